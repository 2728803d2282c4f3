//! A report as lines of text whose parts have roles: plain in a pipe, colored on a terminal.
//!
//! Roles never carry meaning alone: the text says the same without color.

use super::ascii::{locale_lacks_unicode, to_ascii};
use super::{Canvas, ColorScheme, Role, Theme, format, may_color};
use crate::untrusted::sanitize_line;
use ratatui::buffer::{Buffer, Cell};
use ratatui::layout::Rect;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) text: String,
    pub(crate) role: Role,
}

/// A line of a page, built from left to right.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Line {
    pub(crate) spans: Vec<Span>,
}

impl Line {
    pub(crate) const fn new() -> Self {
        Self { spans: Vec::new() }
    }

    #[must_use]
    pub(crate) fn with(mut self, role: Role, text: impl Into<String>) -> Self {
        self.spans.push(Span { text: sanitize_line(&text.into()).into_owned(), role });
        self
    }

    /// Adds ordinary text.
    #[must_use]
    pub(crate) fn plain(self, text: impl Into<String>) -> Self {
        self.with(Role::Text, text)
    }

    /// Adds an explanation.
    #[must_use]
    pub(crate) fn dim(self, text: impl Into<String>) -> Self {
        self.with(Role::Dim, text)
    }
}

/// A rendered report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Page {
    pub(crate) lines: Vec<Line>,
    /// The first and the last step shown, between which a cursor moves.
    pub(crate) steps: (u64, u64),
}

impl Page {
    pub(crate) const fn new() -> Self {
        Self { lines: Vec::new(), steps: (0, 0) }
    }

    pub(crate) fn push(&mut self, line: Line) {
        self.lines.push(line);
    }

    pub(crate) fn title(&mut self, text: impl Into<String>) {
        self.push(Line::new().with(Role::Title, text));
    }

    /// Adds a table with a row for each item.
    pub(crate) fn table<T>(&mut self, items: &[T], columns: &[Column<T>]) {
        let pad = |text: &str, width: isize| {
            let columns = width.unsigned_abs();
            if width < 0 { format!("{text:<columns$}") } else { format!("{text:>columns$}") }
        };
        self.title(columns.iter().map(|(heading, width, _)| pad(heading, *width)).collect::<String>());
        for item in items {
            let cells = columns.iter().map(|(_, width, cell)| (*width, cell(item)));
            self.push(cells.fold(Line::new(), |line, (width, (role, text))| line.with(role, pad(&text, width))));
        }
    }

    pub(crate) fn gap(&mut self) {
        self.push(Line::new());
    }

    /// This page, then `other`.
    #[must_use]
    pub(crate) fn followed_by(mut self, other: Self) -> Self {
        self.lines.extend(other.lines);
        self.steps = other.steps;
        self
    }

    /// Adds a heading followed by an explanation, on separate lines if they do not fit on one.
    pub(crate) fn headed(&mut self, title: &str, text: &str, width: usize) {
        if format::columns(title) + 3 + format::columns(text) <= width {
            self.push(Line::new().with(Role::Title, title).dim(format!("   {text}")));
        } else {
            self.title(title);
            self.wrapped(Role::Dim, text, width);
        }
    }

    /// Adds a heading or explanation, wrapped at spaces to fit `width`; a longer word is cut into lines.
    pub(crate) fn wrapped(&mut self, role: Role, text: &str, width: usize) {
        let mut line = String::new();
        let words = text.split_whitespace().map(|word| word.chars().collect::<Vec<_>>());
        let parts = words.flat_map(|word| word.chunks(width.max(1)).map(String::from_iter).collect::<Vec<_>>());
        for word in parts {
            if !line.is_empty() && format::columns(&line) + 1 + format::columns(&word) > width {
                self.push(Line::new().with(role, std::mem::take(&mut line)));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&word);
        }
        self.push(Line::new().with(role, line));
    }

    /// Draws on a rectangle of `width` × `height` cells, and adds them as lines. `roles` are all roles that `draw`
    /// uses.
    pub(crate) fn drawn(&mut self, (width, height): (u16, u16), roles: &[Role], draw: impl FnOnce(&mut Canvas)) {
        let area = Rect::new(0, 0, width, height);
        let mut buffer = Buffer::empty(area);
        let theme = Theme::truecolor(ColorScheme::Dark);
        draw(&mut Canvas::new(&mut buffer, area, theme));
        // A cell stores only its color, which is unique to each of the roles.
        let role = |cell: &Cell| roles.iter().find(|role| theme.style(**role).fg == Some(cell.fg)).copied();
        for row in buffer.content.chunks(usize::from(width).max(1)) {
            let end = row.iter().rposition(|cell| cell.symbol() != " ").map_or(0, |last| last + 1);
            let line = row[..end].chunk_by(|a, b| role(a) == role(b)).fold(Line::new(), |line, part| {
                line.with(role(&part[0]).unwrap_or(Role::Text), part.iter().map(Cell::symbol).collect::<String>())
            });
            self.push(line);
        }
    }

    /// Shows the lines on a screen, starting at row `y`.
    pub(crate) fn show(self, canvas: &mut Canvas, y: u16) {
        let ascii = canvas.theme.ascii;
        let cut = if ascii { to_ascii('…') } else { '…' };
        let page = if ascii { self.ascii() } else { self };
        for (y, line) in (y..canvas.height()).zip(&page.lines) {
            line.spans.iter().fold(1, |x, span| canvas.text(x, y, &span.text, span.role));
            let text: String = line.spans.iter().map(|span| span.text.as_str()).collect();
            if format::columns(text.trim_end()) >= usize::from(canvas.width()) {
                canvas.glyph(canvas.width().saturating_sub(1), y, cut, Role::Dim);
            }
        }
    }

    /// The page in ASCII: replaces every glyph by one of the same width.
    #[must_use]
    pub(crate) fn ascii(mut self) -> Self {
        for span in self.lines.iter_mut().flat_map(|line| &mut line.spans) {
            span.text = span.text.chars().map(to_ascii).collect();
        }
        self
    }

    /// The page as text, without trailing blanks.
    pub(crate) fn text(&self) -> String {
        let line = |line: &Line| {
            let text: String = line.spans.iter().map(|span| span.text.as_str()).collect();
            text.trim_end().to_owned() + "\n"
        };
        self.lines.iter().map(line).collect()
    }

    /// The page for printing. On a terminal it has colors, unless `NO_COLOR` is set, and is in ASCII if the locale is.
    pub(crate) fn printed(self, ascii: bool, terminal: bool) -> String {
        let page = if ascii || terminal && locale_lacks_unicode() { self.ascii() } else { self };
        if terminal && may_color() { page.ansi() } else { page.text() }
    }

    /// The page with ANSI colors.
    pub(crate) fn ansi(&self) -> String {
        let span = |span: &Span| match span.role.ansi() {
            "" => span.text.clone(),
            start => format!("{start}{}\x1b[0m", span.text),
        };
        self.lines.iter().map(|line| line.spans.iter().map(span).collect::<String>() + "\n").collect()
    }
}

/// A column of a table: its heading, its width, which is negative for text on the left, and the cell of an item.
pub(crate) type Column<'a, T> = (&'a str, isize, &'a dyn Fn(&T) -> (Role, String));

/// A cell of ordinary text.
#[expect(clippy::needless_pass_by_value, reason = "a call with a reference would hide the number")]
pub(crate) fn plain(text: impl ToString) -> (Role, String) {
    (Role::Text, text.to_string())
}

/// The glyph in row `row` (0 is the lowest) of a column of height `level`, in eighths of a row.
pub(crate) fn column_cell(level: usize, row: usize) -> char {
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
    fn color_adds_nothing_to_the_text() {
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
    fn text_wraps_at_spaces() {
        let mut page = Page::new();
        page.wrapped(Role::Dim, "one two three /a/long/path", 7);
        assert_eq!(page.text(), "one two\nthree\n/a/long\n/path\n");
    }
}
