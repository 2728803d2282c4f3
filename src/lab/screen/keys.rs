//! The lab's keys.

use crate::screen::terminal::Binding;
use ratatui::crossterm::event::KeyCode::{self, Char};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LabAction {
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
    /// Begins a new value with this character.
    Type(char),
    Edit,
    /// Shows all parameters, or the important ones.
    All,
    PageDown,
    PageUp,
    Help,
    Close,
    Quit,
}

pub(super) const KEYS: &[Binding<LabAction>] = &[
    Binding::new(
        "Tab F1-11",
        &[
            (KeyCode::Tab, LabAction::NextTab),
            (KeyCode::BackTab, LabAction::PreviousTab),
            (KeyCode::F(1), LabAction::Tab(0)),
            (KeyCode::F(2), LabAction::Tab(1)),
            (KeyCode::F(3), LabAction::Tab(2)),
            (KeyCode::F(4), LabAction::Tab(3)),
            (KeyCode::F(5), LabAction::Tab(4)),
            (KeyCode::F(6), LabAction::Tab(5)),
            (KeyCode::F(7), LabAction::Tab(6)),
            (KeyCode::F(8), LabAction::Tab(7)),
            (KeyCode::F(9), LabAction::Tab(8)),
            (KeyCode::F(10), LabAction::Tab(9)),
            (KeyCode::F(11), LabAction::Tab(10)),
        ],
        "the next view, Shift-Tab the previous one; F1 to F11 show one",
    )
    .footer("view", "view"),
    Binding::new(
        "j k",
        &[
            (Char('j'), LabAction::NextField),
            (Char('k'), LabAction::PreviousField),
            (KeyCode::Down, LabAction::NextField),
            (KeyCode::Up, LabAction::PreviousField),
        ],
        "select a parameter; down and up too",
    )
    .footer("parameter", "parameter"),
    Binding::new(
        "h l",
        &[
            (Char('h'), LabAction::Decrease { other: false }),
            (Char('l'), LabAction::Increase { other: false }),
            (KeyCode::Left, LabAction::Decrease { other: false }),
            (KeyCode::Right, LabAction::Increase { other: false }),
        ],
        "change it; left and right too, if the view has no cursor",
    )
    .footer("less, more", "less, more"),
    Binding::new(
        "< >",
        &[(Char('<'), LabAction::Decrease { other: true }), (Char('>'), LabAction::Increase { other: true })],
        "change it by another step: finer values, tenfold counts",
    )
    .footer("other step", "other step"),
    Binding::new(
        "0-9 Enter",
        &[
            (Char('0'), LabAction::Type('0')),
            (Char('1'), LabAction::Type('1')),
            (Char('2'), LabAction::Type('2')),
            (Char('3'), LabAction::Type('3')),
            (Char('4'), LabAction::Type('4')),
            (Char('5'), LabAction::Type('5')),
            (Char('6'), LabAction::Type('6')),
            (Char('7'), LabAction::Type('7')),
            (Char('8'), LabAction::Type('8')),
            (Char('9'), LabAction::Type('9')),
            (Char('-'), LabAction::Type('-')),
            (KeyCode::Enter, LabAction::Edit),
            (Char('e'), LabAction::Edit),
        ],
        "type a value, or edit it with Enter; Esc cancels, Ctrl-U clears",
    )
    .footer("type", "type"),
    Binding::new("+", &[(Char('+'), LabAction::All)], "show all parameters of a view, or the important ones"),
    Binding::new(
        "PgUp PgDn",
        &[
            (KeyCode::PageUp, LabAction::PageUp),
            (KeyCode::PageDown, LabAction::PageDown),
            (Char(' '), LabAction::PageDown),
        ],
        "scroll a long page; space too, if the view does not play",
    ),
    Binding::new("?", &[(Char('?'), LabAction::Help)], "these keys").footer("help", "help"),
    Binding::new("Esc", &[(KeyCode::Esc, LabAction::Close)], "close the dialog or detail view"),
    Binding::new("q", &[(Char('q'), LabAction::Quit)], "quit; Ctrl-C too").footer("quit", "quit"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_consistent() {
        crate::screen::terminal::keys::check(KEYS, 6);
    }
}
