//! Colours by role. Panels use only roles, and nothing is conveyed by colour alone.

use super::palette::Palette;
use ratatui::style::{Color, Modifier, Style};
use std::str::FromStr;

/// The role of a piece of a frame, which determines its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Numbers and text.
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
    /// Overflow, infinities, NaN, errors.
    Overflow,
    /// Subnormal numbers, underflow.
    Subnormal,
    /// Success.
    Good,
    /// The row under the cursor.
    Selected,
    /// An overlaid run, by its index.
    Other(usize),
}

/// The background and contrast of the colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Look {
    /// A dark background, the terminal's own.
    #[default]
    Dark,
    /// A light background, the terminal's own.
    Light,
    /// Bright colours on black.
    HighContrast,
}

impl Look {
    /// Reads the terminal's background from `COLORFGBG`; dark if it is not set.
    fn from_env(env: impl Fn(&str) -> Option<String>) -> Self {
        let background = env("COLORFGBG").and_then(|value| value.rsplit(';').next()?.parse::<u8>().ok());
        if matches!(background, Some(7 | 15)) { Self::Light } else { Self::Dark }
    }

    /// The look after this one.
    pub(crate) fn next(self) -> Self {
        match self {
            Self::Dark => Self::Light,
            Self::Light => Self::HighContrast,
            Self::HighContrast => Self::Dark,
        }
    }

    /// Default foreground and background of a picture.
    pub(crate) fn page(self) -> ((u8, u8, u8), (u8, u8, u8)) {
        match self {
            Self::Dark => ((216, 222, 233), (22, 24, 29)),
            Self::Light => ((28, 31, 38), (255, 255, 255)),
            Self::HighContrast => ((255, 255, 255), (0, 0, 0)),
        }
    }
}

impl FromStr for Look {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "dark" => Ok(Self::Dark),
            "light" => Ok(Self::Light),
            "high-contrast" => Ok(Self::HighContrast),
            _ => Err("must be dark, light or high-contrast".into()),
        }
    }
}

/// The colours and characters of the dashboard on this terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    palette: Palette,
    look: Look,
    ascii: bool,
}

impl Theme {
    /// From the environment: no colours with `NO_COLOR`, all with `COLORTERM=truecolor`, else the sixteen of ANSI. `ascii`
    /// replaces non-ASCII characters. Without a `look`, `COLORFGBG` decides.
    pub fn from_env(ascii: bool, look: Option<Look>) -> Self {
        let look = look.unwrap_or_else(|| Look::from_env(|name| std::env::var(name).ok()));
        Self { palette: Palette::from_env(), look, ascii }
    }

    /// All colours, as in pictures.
    pub fn truecolor(look: Look) -> Self {
        Self { palette: Palette::Truecolor, look, ascii: false }
    }

    /// No colours, as under `NO_COLOR`.
    pub fn monochrome() -> Self {
        Self { palette: Palette::Monochrome, look: Look::Dark, ascii: false }
    }

    /// Whether to replace non-ASCII characters.
    pub(crate) fn ascii(self) -> bool {
        self.ascii
    }

    /// The theme's look.
    pub fn look(self) -> Look {
        self.look
    }

    /// The theme with another look.
    pub(crate) fn on(self, look: Look) -> Self {
        Self { look, ..self }
    }

    /// The style of the whole screen: the terminal's own, unless the theme sets the background.
    pub(crate) fn base(self) -> Style {
        match (self.look, self.palette) {
            (Look::HighContrast, Palette::Truecolor) => {
                Style::new().fg(Color::Rgb(255, 255, 255)).bg(Color::Rgb(0, 0, 0))
            }
            (Look::HighContrast, Palette::Ansi) => Style::new().fg(Color::White).bg(Color::Black),
            _ => Style::new(),
        }
    }

    /// A role's style. Truecolor uses the colour-blind-safe palette of Okabe and Ito; on a light background, darker variants
    /// with a contrast of at least 4.5:1 to white.
    pub(crate) fn style(self, role: Role) -> Style {
        let plain = match role {
            Role::Title => Style::new().add_modifier(Modifier::BOLD),
            Role::Selected => Style::new().add_modifier(Modifier::REVERSED),
            _ => Style::new(),
        };
        if matches!(role, Role::Text | Role::Title | Role::Selected) {
            return plain;
        }
        let (rgb, ansi) = match self.look {
            Look::Dark => dark(role),
            Look::Light => light(role),
            Look::HighContrast => high_contrast(role),
        };
        self.palette.style(rgb, ansi).patch(plain)
    }
}

type Ink = ((u8, u8, u8), Color);

fn dark(role: Role) -> Ink {
    match role {
        Role::Text | Role::Title | Role::Selected | Role::Dim => ((136, 136, 136), Color::DarkGray),
        Role::Train => ((86, 180, 233), Color::Cyan),
        Role::Smooth => ((204, 121, 167), Color::Reset),
        Role::Validation => ((230, 159, 0), Color::Magenta),
        Role::Overflow => ((213, 94, 0), Color::Red),
        Role::Subnormal => ((240, 228, 66), Color::Yellow),
        Role::Good => ((0, 158, 115), Color::Green),
        Role::Other(run) => match run % 3 {
            0 => ((230, 159, 0), Color::Magenta),
            1 => ((0, 158, 115), Color::Green),
            _ => ((240, 228, 66), Color::Yellow),
        },
    }
}

fn light(role: Role) -> Ink {
    match role {
        Role::Text | Role::Title | Role::Selected | Role::Dim => ((92, 99, 112), Color::DarkGray),
        Role::Train => ((0, 114, 178), Color::Blue),
        Role::Smooth => ((163, 68, 122), Color::Reset),
        Role::Validation => ((150, 90, 0), Color::Magenta),
        Role::Overflow => ((196, 46, 0), Color::Red),
        Role::Subnormal => ((116, 102, 0), Color::DarkGray),
        Role::Good => ((0, 119, 90), Color::Green),
        Role::Other(run) => match run % 3 {
            0 => ((150, 90, 0), Color::Magenta),
            1 => ((0, 119, 90), Color::Green),
            _ => ((163, 68, 122), Color::Red),
        },
    }
}

fn high_contrast(role: Role) -> Ink {
    match role {
        Role::Text | Role::Title | Role::Selected | Role::Dim => ((200, 200, 200), Color::Gray),
        Role::Train => ((0, 215, 255), Color::LightCyan),
        Role::Smooth => ((255, 255, 255), Color::White),
        Role::Validation => ((255, 175, 0), Color::LightMagenta),
        Role::Overflow => ((255, 110, 90), Color::LightRed),
        Role::Subnormal => ((255, 255, 0), Color::LightYellow),
        Role::Good => ((0, 255, 135), Color::LightGreen),
        Role::Other(run) => match run % 3 {
            0 => ((255, 175, 0), Color::LightMagenta),
            1 => ((0, 255, 135), Color::LightGreen),
            _ => ((255, 255, 0), Color::LightYellow),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLES: [Role; 13] = [
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
        Role::Other(0),
        Role::Other(1),
        Role::Other(2),
    ];

    #[test]
    fn monochrome_has_no_colour_at_all() {
        for look in [Look::Dark, Look::Light, Look::HighContrast] {
            let theme = Theme::monochrome().on(look);
            for role in ROLES {
                let style = theme.style(role);
                assert_eq!((style.fg, style.bg), (None, None), "{role:?}");
            }
            assert_eq!(theme.base(), Style::new());
        }
    }

    /// The contrast ratio of WCAG 2: 4.5 for text on its background, 7 for high contrast.
    #[test]
    fn every_colour_has_enough_contrast() {
        let luminance = |(r, g, b): (u8, u8, u8)| {
            let linear = |c: u8| {
                let c = f64::from(c) / 255.0;
                if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
        };
        for (look, least) in [(Look::Dark, 4.5), (Look::Light, 4.5), (Look::HighContrast, 7.0)] {
            for role in ROLES {
                let Some(Color::Rgb(r, g, b)) = Theme::truecolor(look).style(role).fg else { continue };
                let (ink, paper) = (luminance((r, g, b)), luminance(look.page().1));
                let ratio = (ink.max(paper) + 0.05) / (ink.min(paper) + 0.05);
                assert!(ratio >= least, "{look:?} {role:?}: {ratio:.2}");
            }
        }
    }

    #[test]
    fn a_light_terminal_is_detected() {
        let told = |value: Option<&'static str>| Look::from_env(move |_| value.map(str::to_owned));
        assert_eq!(told(Some("0;15")), Look::Light);
        assert_eq!(told(Some("0;default;7")), Look::Light);
        assert_eq!([told(Some("15;0")), told(Some("nonsense")), told(None)], [Look::Dark; 3]);
        assert_eq!("high-contrast".parse(), Ok(Look::HighContrast));
        assert!("bright".parse::<Look>().is_err());
    }
}
