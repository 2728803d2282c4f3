//! The keys: one table that dispatch, footer and help are made from, so that they cannot disagree.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What a key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Shows a tab, by its index.
    Tab(usize),
    NextTab,
    PreviousTab,
    NextField,
    PreviousField,
    Increase,
    Decrease,
    Edit,
    PageDown,
    PageUp,
    Help,
    Close,
    Quit,
}

/// A row of the table: keys that do the same kind of thing.
pub(super) struct Binding {
    keys: &'static [(KeyCode, Action)],
    /// How footer and help write them.
    pub(super) written: &'static str,
    /// What the footer says.
    pub(super) footer: Option<&'static str>,
    /// What the help says.
    pub(super) help: &'static str,
}

const fn letter(c: char, action: Action) -> (KeyCode, Action) {
    (KeyCode::Char(c), action)
}

/// Every key.
pub(super) const KEYS: &[Binding] = &[
    Binding {
        keys: &[
            letter('1', Action::Tab(0)),
            letter('2', Action::Tab(1)),
            letter('3', Action::Tab(2)),
            letter('4', Action::Tab(3)),
            letter('5', Action::Tab(4)),
            letter('6', Action::Tab(5)),
            (KeyCode::Tab, Action::NextTab),
            (KeyCode::BackTab, Action::PreviousTab),
        ],
        written: "1-6",
        footer: Some("view"),
        help: "show a view; Tab goes round",
    },
    Binding {
        keys: &[
            letter('j', Action::NextField),
            letter('k', Action::PreviousField),
            (KeyCode::Down, Action::NextField),
            (KeyCode::Up, Action::PreviousField),
        ],
        written: "j k",
        footer: Some("parameter"),
        help: "choose a parameter; down and up too",
    },
    Binding {
        keys: &[
            letter('h', Action::Decrease),
            letter('l', Action::Increase),
            (KeyCode::Left, Action::Decrease),
            (KeyCode::Right, Action::Increase),
        ],
        written: "h l",
        footer: Some("less, more"),
        help: "move the parameter; left and right too",
    },
    Binding {
        keys: &[(KeyCode::Enter, Action::Edit), letter('e', Action::Edit)],
        written: "Enter",
        footer: Some("type"),
        help: "type the parameter; Enter takes it, Esc does not",
    },
    Binding {
        keys: &[
            (KeyCode::PageDown, Action::PageDown),
            letter(' ', Action::PageDown),
            (KeyCode::PageUp, Action::PageUp),
        ],
        written: "PgUp PgDn",
        footer: None,
        help: "scroll a long page; space too",
    },
    Binding { keys: &[letter('?', Action::Help)], written: "?", footer: Some("help"), help: "these keys" },
    Binding { keys: &[(KeyCode::Esc, Action::Close)], written: "Esc", footer: None, help: "close what is open" },
    Binding { keys: &[letter('q', Action::Quit)], written: "q", footer: Some("quit"), help: "leave; Ctrl-C too" },
];

/// What a key does, if anything.
pub(super) fn action(key: KeyEvent) -> Option<Action> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return (key.code == KeyCode::Char('c')).then_some(Action::Quit);
    }
    KEYS.iter().flat_map(|binding| binding.keys).find(|(code, _)| *code == key.code).map(|(_, action)| *action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_bound_twice() {
        let codes: Vec<_> = KEYS.iter().flat_map(|binding| binding.keys).map(|(code, _)| code).collect();
        for (i, code) in codes.iter().enumerate() {
            assert!(!codes[..i].contains(code), "{code:?}");
        }
    }
}
