//! Colours by role. No panel names a colour, and none means anything by colour alone.

use crate::screen::terminal::Palette;
use ratatui::style::{Color, Modifier, Style};

/// What a piece of the picture is, as far as its colour goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Figures and words.
    Text,
    /// Frames, axes, captions.
    Dim,
    /// Titles and the chosen tab.
    Title,
    /// Training: batch losses, normal numbers.
    Train,
    /// Training, smoothed.
    Smooth,
    /// Validation.
    Validation,
    /// Overflow, infinities, NaN, trouble.
    Overflow,
    /// Subnormal numbers, underflow.
    Subnormal,
    /// What went well.
    Good,
    /// The row under the cursor.
    Selected,
}

/// How the dashboard looks on this terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    palette: Palette,
    ascii: bool,
}

impl Theme {
    /// What the environment asks for: `NO_COLOR` for none, `COLORTERM=truecolor` for all, else the sixteen of ANSI.
    /// `ascii` keeps every character within ASCII.
    pub fn from_env(ascii: bool) -> Self {
        Self { palette: Palette::from_env(), ascii }
    }

    /// All colours, as in pictures.
    pub fn truecolor() -> Self {
        Self { palette: Palette::Truecolor, ascii: false }
    }

    /// No colours, as under `NO_COLOR`.
    pub fn monochrome() -> Self {
        Self { palette: Palette::Monochrome, ascii: false }
    }

    /// Whether characters beyond ASCII are to be replaced.
    pub(super) fn ascii(self) -> bool {
        self.ascii
    }

    /// A role's style. In truecolor the palette of Okabe and Ito, which colour-blind people can tell apart.
    pub(super) fn style(self, role: Role) -> Style {
        let plain = match role {
            Role::Title => Style::new().add_modifier(Modifier::BOLD),
            Role::Selected => Style::new().add_modifier(Modifier::REVERSED),
            _ => Style::new(),
        };
        let (rgb, ansi) = match role {
            Role::Text | Role::Title | Role::Selected => return plain,
            Role::Dim => ((136, 136, 136), Color::DarkGray),
            Role::Train => ((86, 180, 233), Color::Cyan),
            Role::Smooth => ((0, 114, 178), Color::Blue),
            Role::Validation => ((230, 159, 0), Color::Magenta),
            Role::Overflow => ((213, 94, 0), Color::Red),
            Role::Subnormal => ((240, 228, 66), Color::Yellow),
            Role::Good => ((0, 158, 115), Color::Green),
        };
        self.palette.style(rgb, ansi).patch(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLES: [Role; 10] = [
        Role::Text,
        Role::Dim,
        Role::Title,
        Role::Train,
        Role::Smooth,
        Role::Validation,
        Role::Overflow,
        Role::Subnormal,
        Role::Good,
        Role::Selected,
    ];

    #[test]
    fn monochrome_has_no_colour_at_all() {
        let theme = Theme::monochrome();
        for role in ROLES {
            let style = theme.style(role);
            assert_eq!((style.fg, style.bg), (None, None), "{role:?}");
        }
    }
}
