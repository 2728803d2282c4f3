//! The number of the terminal's colors, and the mapping of colors to them.

use ratatui::style::{Color, Style};

/// The number of colors the terminal has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Palette {
    Truecolor,
    Ansi,
    Monochrome,
}

/// Whether `NO_COLOR` is unset or empty.
pub(crate) fn may_color() -> bool {
    Palette::from_env() != Palette::Monochrome
}

impl Palette {
    /// From the environment: none with `NO_COLOR`, all with `COLORTERM=truecolor`, else the sixteen of ANSI.
    pub(crate) fn from_env() -> Self {
        Self::choose(|name| std::env::var(name).ok())
    }

    fn choose(env: impl Fn(&str) -> Option<String>) -> Self {
        if env("NO_COLOR").is_some_and(|value| !value.is_empty()) {
            Self::Monochrome
        } else if env("COLORTERM").is_some_and(|value| value == "truecolor" || value == "24bit") {
            Self::Truecolor
        } else {
            Self::Ansi
        }
    }

    /// A style with this color, with `ansi`, or without a color.
    pub(crate) fn style(self, (r, g, b): (u8, u8, u8), ansi: Color) -> Style {
        match self {
            Self::Truecolor => Style::new().fg(Color::Rgb(r, g, b)),
            Self::Ansi => Style::new().fg(ansi),
            Self::Monochrome => Style::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_color_wins_over_everything_but_an_empty_one_counts_for_nothing() {
        let under = |variables: &'static [(&str, &str)]| {
            Palette::choose(move |name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(under(&[("NO_COLOR", "1"), ("COLORTERM", "truecolor")]), Palette::Monochrome);
        assert_eq!(under(&[("NO_COLOR", ""), ("COLORTERM", "truecolor")]), Palette::Truecolor);
        assert_eq!(under(&[("COLORTERM", "24bit")]), Palette::Truecolor);
        assert_eq!(under(&[]), Palette::Ansi);
    }
}
