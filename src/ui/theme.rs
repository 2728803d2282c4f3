//! Colors by role. Panels use only roles, and nothing is conveyed by color alone.

use super::ascii::locale_lacks_unicode;
use super::palette::Palette;
use ratatui::style::{Color, Modifier, Style};
use strum::EnumString;

/// The role of a piece of a frame, which determines its color.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(test, derive(strum::EnumIter))]
pub(crate) enum Role {
    /// Numbers and text.
    Text,
    /// Frames, axes, captions, explanations.
    Dim,
    /// Titles and the chosen tab.
    Title,
    /// Training: batch losses, normal numbers.
    Train,
    Smooth,
    Validation,
    /// Overflow, infinities, NaN, errors.
    Overflow,
    /// Subnormal numbers, underflow.
    Subnormal,
    /// Success; in full precision; fits.
    Good,
    /// Degraded, a warning.
    Warn,
    /// Failure; lost, overflowed, too large.
    Bad,
    Sign,
    Exponent,
    Mantissa,
    /// One of up to four compared series.
    Series(usize),
    /// The row under the cursor.
    Selected,
    /// The selected tab or parameter, a selected title.
    SelectedTitle,
    /// An overlaid run, by its index.
    Other(usize),
}

impl Role {
    /// Good below the first limit, a warning below the second, else bad, as for NaN.
    pub(crate) fn graded(value: f64, limits: [f64; 2]) -> Self {
        match limits.map(|limit| value < limit) {
            [true, _] => Self::Good,
            [_, true] => Self::Warn,
            _ => Self::Bad,
        }
    }

    /// Bad, or ordinary text.
    pub(crate) fn bad_if(bad: bool) -> Self {
        if bad { Self::Bad } else { Self::Text }
    }

    /// The ANSI escape sequence of text that is printed, for sixteen colors.
    pub(super) const fn ansi(self) -> &'static str {
        match self {
            Self::Text | Self::Smooth | Self::Selected => "",
            Self::Title | Self::SelectedTitle => "\x1b[1m",
            Self::Dim => "\x1b[2m",
            Self::Sign | Self::Bad | Self::Overflow => "\x1b[31m",
            Self::Exponent | Self::Warn | Self::Subnormal | Self::Series(1) => "\x1b[33m",
            Self::Mantissa | Self::Train => "\x1b[36m",
            Self::Good | Self::Series(2) => "\x1b[32m",
            Self::Series(0) => "\x1b[94m",
            Self::Series(_) | Self::Validation | Self::Other(_) => "\x1b[35m",
        }
    }
}

/// The background and contrast of the colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumString)]
#[strum(serialize_all = "kebab-case", parse_err_ty = String, parse_err_fn = unknown_scheme)]
pub enum ColorScheme {
    /// A dark background, the terminal's own.
    #[default]
    Dark,
    /// A light background, the terminal's own.
    Light,
    /// Bright colors on black.
    HighContrast,
}

impl ColorScheme {
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

fn unknown_scheme(_: &str) -> String {
    "must be dark, light or high-contrast".into()
}

/// The colors and characters of the dashboard on this terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    palette: Palette,
    pub(crate) scheme: ColorScheme,
    /// Whether to replace non-ASCII characters.
    pub(crate) ascii: bool,
}

impl Theme {
    /// From the environment: no colors with `NO_COLOR`, all with `COLORTERM=truecolor`, else the sixteen of ANSI.
    /// `ascii`, or a locale without UTF-8, replaces non-ASCII characters. Without a `scheme`, `COLORFGBG` decides.
    pub fn from_env(ascii: bool, scheme: Option<ColorScheme>) -> Self {
        let scheme = scheme.unwrap_or_else(|| ColorScheme::from_env(|name| std::env::var(name).ok()));
        Self { palette: Palette::from_env(), scheme, ascii: ascii || locale_lacks_unicode() }
    }

    /// All colors, as in pictures.
    pub(crate) fn truecolor(scheme: ColorScheme) -> Self {
        Self { palette: Palette::Truecolor, scheme, ascii: false }
    }

    /// The dark look with a number of colors.
    #[cfg(test)]
    pub(crate) const fn of(palette: Palette, ascii: bool) -> Self {
        Self { palette, scheme: ColorScheme::Dark, ascii }
    }

    /// The style of the whole screen: the terminal's own, unless the theme sets the background.
    pub(crate) fn base(self) -> Style {
        match (self.scheme, self.palette) {
            (ColorScheme::HighContrast, Palette::Truecolor) => {
                Style::new().fg(Color::Rgb(255, 255, 255)).bg(Color::Rgb(0, 0, 0))
            }
            (ColorScheme::HighContrast, Palette::Ansi) => Style::new().fg(Color::White).bg(Color::Black),
            _ => Style::new(),
        }
    }

    /// A role's style. Truecolor uses the color-blind-safe palette of Okabe and Ito; on a light background, darker
    /// variants with a contrast of at least 4.5:1 to white.
    pub(crate) fn style(self, role: Role) -> Style {
        let inks = match self.scheme {
            ColorScheme::Dark => &DARK,
            ColorScheme::Light => &LIGHT,
            ColorScheme::HighContrast => &HIGH_CONTRAST,
        };
        let (rgb, ansi) = match role {
            Role::Text => return Style::new(),
            Role::Title => return Style::new().add_modifier(Modifier::BOLD),
            Role::Selected => return Style::new().add_modifier(Modifier::REVERSED),
            Role::SelectedTitle => return Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED),
            Role::Dim => inks.dim,
            Role::Train | Role::Mantissa | Role::Series(0) => inks.train,
            Role::Smooth => inks.smooth,
            Role::Validation | Role::Exponent | Role::Series(1) => inks.validation,
            Role::Overflow | Role::Bad | Role::Sign => inks.bad,
            Role::Subnormal | Role::Warn => inks.warn,
            Role::Good | Role::Series(2) => inks.good,
            Role::Series(_) => inks.fourth,
            Role::Other(run) => [inks.validation, inks.good, inks.third][run % 3],
        };
        self.palette.style(rgb, ansi)
    }
}

/// A color, and its substitute among the sixteen of ANSI.
type ColorPair = ((u8, u8, u8), Color);

/// The colors of a look, named by the roles that use them.
struct Inks {
    dim: ColorPair,
    train: ColorPair,
    smooth: ColorPair,
    validation: ColorPair,
    bad: ColorPair,
    warn: ColorPair,
    good: ColorPair,
    /// The third overlaid run.
    third: ColorPair,
    /// The fourth compared series.
    fourth: ColorPair,
}

const DARK: Inks = Inks {
    dim: ((136, 136, 136), Color::DarkGray),
    train: ((86, 180, 233), Color::Cyan),
    smooth: ((204, 121, 167), Color::Reset),
    validation: ((230, 159, 0), Color::Magenta),
    bad: ((213, 94, 0), Color::Red),
    warn: ((240, 228, 66), Color::Yellow),
    good: ((0, 158, 115), Color::Green),
    third: ((240, 228, 66), Color::Yellow),
    fourth: ((204, 121, 167), Color::LightMagenta),
};

const LIGHT: Inks = Inks {
    dim: ((92, 99, 112), Color::DarkGray),
    train: ((0, 114, 178), Color::Blue),
    smooth: ((163, 68, 122), Color::Reset),
    validation: ((150, 90, 0), Color::Magenta),
    bad: ((196, 46, 0), Color::Red),
    warn: ((116, 102, 0), Color::DarkGray),
    good: ((0, 119, 90), Color::Green),
    third: ((163, 68, 122), Color::Red),
    fourth: ((163, 68, 122), Color::Magenta),
};

const HIGH_CONTRAST: Inks = Inks {
    dim: ((200, 200, 200), Color::Gray),
    train: ((0, 215, 255), Color::LightCyan),
    smooth: ((255, 255, 255), Color::White),
    validation: ((255, 175, 0), Color::LightMagenta),
    bad: ((255, 110, 90), Color::LightRed),
    warn: ((255, 255, 0), Color::LightYellow),
    good: ((0, 255, 135), Color::LightGreen),
    third: ((255, 255, 0), Color::LightYellow),
    fourth: ((255, 255, 255), Color::White),
};

#[cfg(test)]
mod tests {
    use super::*;
    use strum::IntoEnumIterator;

    /// Every role, with the indices that have different colors.
    fn roles() -> impl Iterator<Item = Role> {
        Role::iter().chain([1, 2, 3].map(Role::Series)).chain([1, 2].map(Role::Other))
    }

    #[test]
    fn monochrome_has_no_color_at_all() {
        for scheme in [ColorScheme::Dark, ColorScheme::Light, ColorScheme::HighContrast] {
            let theme = Theme { scheme, ..Theme::of(Palette::Monochrome, false) };
            for role in roles() {
                let style = theme.style(role);
                assert_eq!((style.fg, style.bg), (None, None), "{role:?}");
            }
            assert_eq!(theme.base(), Style::new());
        }
    }

    /// The contrast ratio of WCAG 2: 4.5 for text on its background, 7 for high contrast.
    #[test]
    fn every_color_has_enough_contrast() {
        let luminance = |(r, g, b): (u8, u8, u8)| {
            let linear = |c: u8| {
                let c = f64::from(c) / 255.0;
                if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
        };
        for (scheme, least) in [(ColorScheme::Dark, 4.5), (ColorScheme::Light, 4.5), (ColorScheme::HighContrast, 7.0)] {
            for role in roles() {
                let Some(Color::Rgb(r, g, b)) = Theme::truecolor(scheme).style(role).fg else { continue };
                let ink = luminance((r, g, b));
                let paper = luminance(scheme.page().1);
                let ratio = (ink.max(paper) + 0.05) / (ink.min(paper) + 0.05);
                assert!(ratio >= least, "{scheme:?} {role:?}: {ratio:.2}");
            }
        }
    }

    #[test]
    fn a_light_terminal_is_detected() {
        let told = |value: Option<&'static str>| ColorScheme::from_env(move |_| value.map(str::to_owned));
        assert_eq!(told(Some("0;15")), ColorScheme::Light);
        assert_eq!(told(Some("0;default;7")), ColorScheme::Light);
        assert_eq!([told(Some("15;0")), told(Some("nonsense")), told(None)], [ColorScheme::Dark; 3]);
        assert_eq!("high-contrast".parse(), Ok(ColorScheme::HighContrast));
        assert!("bright".parse::<ColorScheme>().is_err());
    }
}
