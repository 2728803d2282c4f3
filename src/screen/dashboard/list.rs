//! The cursor and the filter of a list that may be longer than its panel.

use crate::screen::terminal::keys::is_plain;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

#[derive(Debug, Default)]
pub(super) struct List {
    /// The selected row; counted from the newest in events and samples.
    pub(super) cursor: usize,
    /// The text that rows must contain.
    pub(super) filter: String,
    /// Whether keys go into the filter.
    pub(super) typing: bool,
}

impl List {
    /// The selected one of `rows` rows.
    pub(super) fn selected(&self, rows: usize) -> usize {
        self.cursor.min(rows.saturating_sub(1))
    }

    /// The number of rows before a window of `height` rows: as few as needed to show the selected one.
    pub(super) fn hidden(&self, rows: usize, height: u16) -> usize {
        (self.selected(rows) + 1).saturating_sub(usize::from(height).max(1))
    }

    /// Moves the cursor within `rows` rows.
    pub(super) fn scroll(&mut self, by: isize, rows: usize) {
        self.cursor = self.cursor.saturating_add_signed(by).min(rows.saturating_sub(1));
    }

    /// Selects a row; `true` if it was selected before.
    pub(super) fn click(&mut self, row: usize) -> bool {
        std::mem::replace(&mut self.cursor, row) == row
    }

    /// The filter for a title, with a cursor while it is typed.
    pub(super) fn label(&self) -> String {
        match (self.filter.as_str(), self.typing) {
            ("", false) => String::new(),
            (filter, typing) => format!("   /{filter}{}", if typing { "█" } else { "" }),
        }
    }

    /// A key while the filter is typed.
    pub(super) fn typed(&mut self, key: KeyEvent) {
        match key.code {
            KeyCode::Char('u') if key.modifiers == KeyModifiers::CONTROL => self.filter.clear(),
            KeyCode::Char(c) if is_plain(key) => self.filter.push(c),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter = String::new();
            }
            _ => return,
        }
        self.cursor = 0;
    }
}
