//! Colours by role. No panel names a colour, and none means anything by colour alone.

use ratatui::style::{Color, Modifier, Style};

/// What a piece of the picture is, as far as its colour goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
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

/// How many colours the terminal has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Palette {
    Truecolor,
    Ansi,
    Monochrome,
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
        Self::choose(ascii, |name| std::env::var(name).ok())
    }

    /// All colours, as in pictures.
    pub fn truecolor() -> Self {
        Self { palette: Palette::Truecolor, ascii: false }
    }

    /// No colours, as under `NO_COLOR`.
    pub fn monochrome() -> Self {
        Self { palette: Palette::Monochrome, ascii: false }
    }

    fn choose(ascii: bool, env: impl Fn(&str) -> Option<String>) -> Self {
        let palette = if env("NO_COLOR").is_some_and(|value| !value.is_empty()) {
            Palette::Monochrome
        } else if env("COLORTERM").is_some_and(|value| value == "truecolor" || value == "24bit") {
            Palette::Truecolor
        } else {
            Palette::Ansi
        };
        Self { palette, ascii }
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
        match self.palette {
            Palette::Truecolor => plain.fg(Color::Rgb(rgb.0, rgb.1, rgb.2)),
            Palette::Ansi => plain.fg(ansi),
            Palette::Monochrome => plain,
        }
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

    fn under(variables: &'static [(&str, &str)]) -> Theme {
        Theme::choose(false, move |name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn no_color_wins_over_everything_but_an_empty_one_counts_for_nothing() {
        assert_eq!(under(&[("NO_COLOR", "1"), ("COLORTERM", "truecolor")]).palette, Palette::Monochrome);
        assert_eq!(under(&[("NO_COLOR", ""), ("COLORTERM", "truecolor")]).palette, Palette::Truecolor);
        assert_eq!(under(&[]).palette, Palette::Ansi);
    }

    #[test]
    fn monochrome_has_no_colour_at_all() {
        let theme = under(&[("NO_COLOR", "1")]);
        for role in ROLES {
            let style = theme.style(role);
            assert_eq!((style.fg, style.bg), (None, None), "{role:?}");
        }
    }
}
