//! The lab's keys.

use crate::screen::terminal::Binding;
use ratatui::crossterm::event::KeyCode::{self, Char};

/// The action of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Shows a tab, by its index.
    Tab(usize),
    NextTab,
    PreviousTab,
    NextField,
    PreviousField,
    /// One step up, normal or of the other size.
    Increase {
        other: bool,
    },
    /// One step down, normal or of the other size.
    Decrease {
        other: bool,
    },
    Edit,
    PageDown,
    PageUp,
    Help,
    Close,
    Quit,
}

/// Every key.
pub(super) const KEYS: &[Binding<Action>] = &[
    Binding::new(
        "1-9 0 -",
        &[
            (Char('1'), Action::Tab(0)),
            (Char('2'), Action::Tab(1)),
            (Char('3'), Action::Tab(2)),
            (Char('4'), Action::Tab(3)),
            (Char('5'), Action::Tab(4)),
            (Char('6'), Action::Tab(5)),
            (Char('7'), Action::Tab(6)),
            (Char('8'), Action::Tab(7)),
            (Char('9'), Action::Tab(8)),
            (Char('0'), Action::Tab(9)),
            (Char('-'), Action::Tab(10)),
            (KeyCode::Tab, Action::NextTab),
            (KeyCode::BackTab, Action::PreviousTab),
        ],
        "show a view; Tab cycles",
    )
    .footer("view", "view"),
    Binding::new(
        "j k",
        &[
            (Char('j'), Action::NextField),
            (Char('k'), Action::PreviousField),
            (KeyCode::Down, Action::NextField),
            (KeyCode::Up, Action::PreviousField),
        ],
        "select a parameter; down and up too",
    )
    .footer("parameter", "parameter"),
    Binding::new(
        "h l",
        &[
            (Char('h'), Action::Decrease { other: false }),
            (Char('l'), Action::Increase { other: false }),
            (KeyCode::Left, Action::Decrease { other: false }),
            (KeyCode::Right, Action::Increase { other: false }),
        ],
        "change it; left and right too, if the view has no cursor",
    )
    .footer("less, more", "less, more"),
    Binding::new(
        "H L",
        &[(Char('H'), Action::Decrease { other: true }), (Char('L'), Action::Increase { other: true })],
        "change it by another step: finer values, tenfold counts",
    )
    .footer("other step", "other step"),
    Binding::new(
        "Enter",
        &[(KeyCode::Enter, Action::Edit), (Char('e'), Action::Edit)],
        "type a value: Enter accepts, Esc cancels, Ctrl-U clears",
    )
    .footer("type", "type"),
    Binding::new(
        "PgUp PgDn",
        &[(KeyCode::PageUp, Action::PageUp), (KeyCode::PageDown, Action::PageDown), (Char(' '), Action::PageDown)],
        "scroll a long page; space too, if the view does not play",
    ),
    Binding::new("?", &[(Char('?'), Action::Help)], "these keys").footer("help", "help"),
    Binding::new("Esc", &[(KeyCode::Esc, Action::Close)], "close the dialog or detail view"),
    Binding::new("q", &[(Char('q'), Action::Quit)], "quit; Ctrl-C too").footer("quit", "quit"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_consistent() {
        crate::screen::terminal::keys::check(KEYS, 6);
    }
}
