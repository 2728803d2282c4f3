//! A rectangle of the screen to draw on by role. It clips, so no size can make a panel panic.

use super::format;
use super::theme::{Role, Theme};
use crate::untrusted::sanitize_line;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Widget};

/// A rectangle of the buffer; positions count from its top left corner.
pub(crate) struct Canvas<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
    pub(crate) theme: Theme,
}

impl<'a> Canvas<'a> {
    /// The part of `area` that is on the screen.
    pub(crate) fn new(buffer: &'a mut Buffer, area: Rect, theme: Theme) -> Self {
        let area = area.intersection(buffer.area);
        Self { buffer, area, theme }
    }

    pub(crate) fn width(&self) -> u16 {
        self.area.width
    }

    pub(crate) fn height(&self) -> u16 {
        self.area.height
    }

    pub(crate) fn part(&mut self, x: u16, y: u16, width: u16, height: u16) -> Canvas<'_> {
        let part = Rect::new(self.area.x.saturating_add(x), self.area.y.saturating_add(y), width, height);
        let area = part.intersection(self.area);
        Canvas { buffer: self.buffer, area, theme: self.theme }
    }

    /// Writes text on one line; returns the column after it.
    pub(crate) fn text(&mut self, x: u16, y: u16, text: &str, role: Role) -> u16 {
        if x >= self.area.width || y >= self.area.height {
            return x;
        }
        let room = usize::from(self.area.width - x);
        let style = self.theme.style(role);
        let (end, _) = self.buffer.set_stringn(self.area.x + x, self.area.y + y, sanitize_line(text), room, style);
        end - self.area.x
    }

    /// Like [`Canvas::text`], but text that does not fit ends with `…`.
    pub(crate) fn shortened(&mut self, x: u16, y: u16, text: &str, role: Role) -> u16 {
        let end = self.text(x, y, text, role);
        let room = usize::from(self.area.width.saturating_sub(x));
        if room > 0 && format::columns(&sanitize_line(text)) > room {
            self.glyph(self.area.width - 1, y, '…', role);
        }
        end
    }

    /// Writes several spans in sequence; returns the column after them.
    pub(crate) fn spans(&mut self, x: u16, y: u16, spans: &[(&str, Role)]) -> u16 {
        spans.iter().fold(x, |x, (text, role)| self.text(x, y, text, *role))
    }

    /// Writes right-aligned text that ends before column `end`.
    pub(crate) fn text_before(&mut self, end: u16, y: u16, text: &str, role: Role) {
        self.text(end.saturating_sub(format::columns(text) as u16), y, text, role);
    }

    pub(crate) fn glyph(&mut self, x: u16, y: u16, glyph: char, role: Role) {
        self.text(x, y, glyph.encode_utf8(&mut [0; 4]), role);
    }

    /// Applies a role's style to a whole line.
    pub(crate) fn highlight(&mut self, y: u16, role: Role) {
        let line = Rect { y: self.area.y.saturating_add(y), height: 1, ..self.area };
        let line = line.intersection(self.area);
        self.buffer.set_style(line, self.theme.style(role));
    }

    /// Draws a frame with a title; returns the area inside.
    pub(crate) fn frame(&mut self, title: &[(&str, Role)]) -> Canvas<'_> {
        let mut spans = vec![Span::raw(" ")];
        spans.extend(title.iter().map(|(text, role)| Span::styled((*text).to_owned(), self.theme.style(*role))));
        spans.push(Span::raw(" "));
        let block = Block::bordered().border_style(self.theme.style(Role::Dim)).title(Line::from(spans));
        let area = block.inner(self.area);
        block.render(self.area, self.buffer);
        Canvas { buffer: self.buffer, area, theme: self.theme }
    }

    /// Clears a centered box of at most this size; returns it.
    pub(crate) fn popup(&mut self, width: u16, height: u16) -> Canvas<'_> {
        let (width, height) = (width.min(self.area.width), height.min(self.area.height));
        let area = Rect::new(
            self.area.x + (self.area.width - width) / 2,
            self.area.y + (self.area.height - height) / 2,
            width,
            height,
        );
        Clear.render(area, self.buffer);
        Canvas { buffer: self.buffer, area, theme: self.theme }
    }
}

/// A frame's rows without trailing blanks.
#[cfg(test)]
pub(crate) fn text_of(frame: &Buffer) -> String {
    let rows = frame.content.chunks(usize::from(frame.area.width).max(1));
    let text = |row: &[ratatui::buffer::Cell]| row.iter().map(ratatui::buffer::Cell::symbol).collect::<String>();
    rows.map(|row| text(row).trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// A frame to store in a snapshot: equal rows that follow each other are one row with their number.
#[cfg(test)]
pub(crate) fn folded(picture: &str) -> String {
    let rows: Vec<&str> = picture.lines().collect();
    let fold =
        |equal: &[&str]| if let [row] = equal { (*row).to_owned() } else { format!("{} × {}", equal[0], equal.len()) };
    rows.chunk_by(|a, b| a == b).map(fold).collect::<Vec<_>>().join("\n")
}
