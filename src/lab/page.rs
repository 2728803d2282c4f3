//! A report as lines of text whose parts have roles: plain in a pipe, coloured on a terminal.
//!
//! Roles never carry meaning alone: the text says the same without colour.

use crate::untrusted::line;

/// The role of a part of a line, which determines its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Ordinary text.
    Plain,
    /// A heading.
    Title,
    /// An explanation.
    Dim,
    /// A sign bit.
    Sign,
    /// Exponent bits.
    Exponent,
    /// Mantissa bits.
    Mantissa,
    /// In full precision; survives; fits.
    Good,
    /// Subnormal; degraded.
    Warn,
    /// Lost, overflowed, too large.
    Bad,
    /// One of up to four compared series.
    Series(usize),
}

impl Role {
    /// The ANSI escape sequence, for sixteen colours.
    const fn ansi(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Title => "\x1b[1m",
            Self::Dim => "\x1b[2m",
            Self::Sign | Self::Bad => "\x1b[31m",
            Self::Exponent | Self::Warn | Self::Series(1) => "\x1b[33m",
            Self::Mantissa => "\x1b[36m",
            Self::Good | Self::Series(2) => "\x1b[32m",
            Self::Series(0) => "\x1b[94m",
            Self::Series(_) => "\x1b[35m",
        }
    }
}

/// A part of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The text.
    pub text: String,
    /// The role.
    pub role: Role,
}

/// A line of a page, built from left to right.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Line {
    /// Its parts.
    pub spans: Vec<Span>,
}

impl Line {
    /// An empty line.
    pub const fn new() -> Self {
        Self { spans: Vec::new() }
    }

    /// Adds a part.
    #[must_use]
    pub fn with(mut self, role: Role, text: impl Into<String>) -> Self {
        self.spans.push(Span { text: line(&text.into()).into_owned(), role });
        self
    }

    /// Adds ordinary text.
    #[must_use]
    pub fn plain(self, text: impl Into<String>) -> Self {
        self.with(Role::Plain, text)
    }

    /// Adds an explanation.
    #[must_use]
    pub fn dim(self, text: impl Into<String>) -> Self {
        self.with(Role::Dim, text)
    }
}

/// A rendered report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// Its lines, top first.
    pub lines: Vec<Line>,
    /// The first and the last step shown, between which a cursor moves.
    pub steps: (u64, u64),
}

impl Page {
    /// An empty page.
    pub const fn new() -> Self {
        Self { lines: Vec::new(), steps: (0, 0) }
    }

    /// Adds a line.
    pub fn push(&mut self, line: Line) {
        self.lines.push(line);
    }

    /// Adds a heading.
    pub fn title(&mut self, text: impl Into<String>) {
        self.push(Line::new().with(Role::Title, text));
    }

    /// Adds an empty line.
    pub fn gap(&mut self) {
        self.push(Line::new());
    }

    /// This page, then `other`.
    #[must_use]
    pub fn followed_by(mut self, other: Self) -> Self {
        self.lines.extend(other.lines);
        self.steps = other.steps;
        self
    }

    /// Adds a heading followed by an explanation, on lines of their own if they do not fit on one.
    pub fn headed(&mut self, title: &str, text: &str, width: usize) {
        if title.chars().count() + 3 + text.chars().count() <= width {
            self.push(Line::new().with(Role::Title, title).dim(format!("   {text}")));
        } else {
            self.title(title);
            self.wrapped(Role::Dim, text, width);
        }
    }

    /// Adds a heading or explanation, wrapped at spaces to fit `width`; a longer word is cut into lines.
    pub fn wrapped(&mut self, role: Role, text: &str, width: usize) {
        let mut line = String::new();
        let words = text.split_whitespace().map(|word| word.chars().collect::<Vec<_>>());
        let parts = words.flat_map(|word| word.chunks(width.max(1)).map(String::from_iter).collect::<Vec<_>>());
        for word in parts {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                self.push(Line::new().with(role, std::mem::take(&mut line)));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&word);
        }
        self.push(Line::new().with(role, line));
    }

    /// The page in ASCII: replaces every glyph by one of the same width.
    #[must_use]
    pub fn ascii(mut self) -> Self {
        for span in self.lines.iter_mut().flat_map(|line| &mut line.spans) {
            if !span.text.is_ascii() {
                span.text = span.text.chars().map(ascii).collect();
            }
        }
        self
    }

    /// The page as text, without trailing blanks.
    pub fn text(&self) -> String {
        let line = |line: &Line| {
            let text: String = line.spans.iter().map(|span| span.text.as_str()).collect();
            text.trim_end().to_owned() + "\n"
        };
        self.lines.iter().map(line).collect()
    }

    /// The page for printing: with colours on a terminal, unless `NO_COLOR` is set.
    pub fn printed(&self, terminal: bool) -> String {
        let colour = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        if colour { self.ansi() } else { self.text() }
    }

    /// The page with ANSI colours.
    pub fn ansi(&self) -> String {
        let span = |span: &Span| match span.role.ansi() {
            "" => span.text.clone(),
            start => format!("{start}{}\x1b[0m", span.text),
        };
        self.lines.iter().map(|line| line.spans.iter().map(span).collect::<String>() + "\n").collect()
    }
}

/// The ASCII replacement of a glyph.
fn ascii(glyph: char) -> char {
    const GLYPHS: &str = "─┄–━│┃┴█▇▆▅▄▃▂▁·●◐○✕✓▲▾→←…×π∞≥≤−±ΣΦ";
    const ASCII: &str = "---=||+#%%%::...o*.xy^v><~xpi><-~SF";
    if glyph.is_ascii() {
        return glyph;
    }
    GLYPHS.chars().position(|known| known == glyph).and_then(|at| ASCII.chars().nth(at)).unwrap_or('?')
}

/// The glyph in row `row` (0 is the lowest) of a column of height `level`, in eighths of a row.
pub(super) fn column_cell(level: usize, row: usize) -> char {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    EIGHTHS[level.saturating_sub(row * 8).min(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::new();
        page.title("a ✕");
        page.push(Line::new().plain("b ").with(Role::Bad, "█ → c").dim("   "));
        page
    }

    #[test]
    fn colour_adds_nothing_to_the_text() {
        let page = page();
        assert_eq!(page.text(), "a ✕\nb █ → c\n");
        let mut bare = page.ansi();
        while let Some(start) = bare.find('\x1b') {
            let end = start + bare[start..].find('m').map_or(0, |end| end + 1);
            bare.replace_range(start..end, "");
        }
        assert_eq!(bare.lines().map(str::trim_end).collect::<Vec<_>>(), page.text().lines().collect::<Vec<_>>());
    }

    #[test]
    fn ascii_keeps_every_column() {
        assert_eq!(page().ascii().text(), "a x\nb # > c\n");
    }

    #[test]
    fn every_glyph_of_the_views_has_a_replacement() {
        for source in [
            include_str!("bits.rs"),
            include_str!("blocks.rs"),
            include_str!("casts.rs"),
            include_str!("casts/operations.rs"),
            include_str!("crises.rs"),
            include_str!("guide.rs"),
            include_str!("scaler/page.rs"),
            include_str!("softmax.rs"),
            include_str!("sums.rs"),
            include_str!("memory.rs"),
            include_str!("ranges.rs"),
            include_str!("scaler.rs"),
            include_str!("scaling.rs"),
            include_str!("ulp.rs"),
        ] {
            let code = source.split("mod tests").next().unwrap_or_default();
            for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
                assert!(line.chars().all(|c| c == '?' || ascii(c) != '?'), "{line}");
            }
        }
    }

    #[test]
    fn text_wraps_at_spaces() {
        let mut page = Page::new();
        page.wrapped(Role::Dim, "one two three /a/long/path", 7);
        assert_eq!(page.text(), "one two\nthree\n/a/long\n/path\n");
    }
}
