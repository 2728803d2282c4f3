//! The keys of a screen: one table that dispatch, footer and help are made from, so that they cannot disagree.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// A row of the table: keys that do the same kind of thing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding<A: 'static> {
    /// The keys with what each does.
    keys: &'static [(KeyCode, A)],
    /// How footer and help write them.
    pub(crate) written: &'static str,
    /// What the footer says, short and in full; `None` where it does not mention them.
    footer: Option<(&'static str, &'static str)>,
    /// What the help says.
    pub(crate) help: &'static str,
    /// The tabs where it does something; empty for all.
    tabs: &'static [usize],
}

impl<A: Copy> Binding<A> {
    /// Keys that the footer does not mention.
    pub(crate) const fn new(written: &'static str, keys: &'static [(KeyCode, A)], help: &'static str) -> Self {
        Self { keys, written, footer: None, help, tabs: &[] }
    }

    /// What the footer says of them: short, and in full where there is room.
    pub(crate) const fn footer(mut self, short: &'static str, full: &'static str) -> Self {
        self.footer = Some((short, full));
        self
    }

    /// The only tabs where they do something.
    pub(crate) const fn tabs(mut self, tabs: &'static [usize]) -> Self {
        self.tabs = tabs;
        self
    }

    /// Whether they do something in a tab.
    pub(crate) fn is_for(&self, tab: usize) -> bool {
        self.tabs.is_empty() || self.tabs.contains(&tab)
    }

    /// Whether one of them does something of this kind.
    pub(crate) fn does(&self, kind: impl Fn(A) -> bool) -> bool {
        self.keys.iter().any(|(_, action)| kind(*action))
    }
}

/// What a key does; `None` for one that is not in the table.
pub(crate) fn action<A: Copy>(table: &[Binding<A>], key: KeyEvent) -> Option<A> {
    if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) {
        return None;
    }
    table.iter().flat_map(|binding| binding.keys).find(|(code, _)| *code == key.code).map(|(_, action)| *action)
}

/// Whether a key is Ctrl-C, which no table holds: every screen hears it whatever it is doing.
pub(crate) fn is_ctrl_c(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Whether it is the key that suspends a program in a shell. In raw mode it is a key and no signal.
pub(crate) fn is_ctrl_z(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('z') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Columns between a key and its word, and after the word.
pub(crate) const GAPS: (u16, u16) = (2, 3);

/// The footer's entries of the rows that are `shown`, as (key, word), in at most `width` columns: in full words if all of
/// them fit. What does not fit is left out from the end, but for the last two, which say how to get help and how to leave.
pub(crate) fn footer<A: Copy>(
    table: &[Binding<A>],
    width: usize,
    shown: impl Fn(&Binding<A>) -> bool,
) -> Vec<(&'static str, &'static str)> {
    let rows: Vec<_> = table.iter().filter(|binding| shown(binding)).collect();
    let entries = |full: bool| {
        rows.iter().filter_map(move |binding| {
            let (short, long) = binding.footer?;
            Some((binding.written, if full { long } else { short }))
        })
    };
    let columns = |(key, word): (&str, &str)| key.len() + word.len() + usize::from(GAPS.0 + GAPS.1);
    let total: usize = entries(true).map(columns).sum();
    let all: Vec<_> = entries(total <= width).collect();
    let (rest, last) = all.split_at(all.len().saturating_sub(2));
    let mut room = width.saturating_sub(last.iter().copied().map(columns).sum());
    let fitting = rest.iter().copied().take_while(|entry| {
        let fits = columns(*entry) <= room;
        room = room.saturating_sub(columns(*entry));
        fits
    });
    fitting.chain(last.iter().copied()).collect()
}

/// What must hold of every table: no key has two meanings, every row says its keys and what they do, and the footer fits
/// and always ends in help and quit.
#[cfg(test)]
pub(crate) fn check<A: Copy>(table: &[Binding<A>], tabs: usize) {
    let keys: Vec<_> = table.iter().flat_map(|binding| binding.keys).map(|(code, _)| *code).collect();
    assert_eq!(keys.len(), keys.iter().collect::<std::collections::HashSet<_>>().len());
    for binding in table {
        assert!(!binding.keys.is_empty() && !binding.help.is_empty() && !binding.written.is_empty());
        let KeyCode::Char(first) = binding.keys[0].0 else { continue };
        assert!(binding.written.starts_with(first) || first == ' ', "{}", binding.written);
    }
    for tab in 0..tabs {
        for width in 0..250 {
            let entries = footer(table, width, |binding| binding.is_for(tab));
            let columns: usize = entries.iter().map(|(key, word)| key.len() + word.len() + 5).sum();
            assert!(columns <= width || entries.len() == 2, "{tab} {width}");
            assert_eq!(entries.iter().rev().take(2).map(|(key, _)| *key).collect::<Vec<_>>(), ["q", "?"]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[Binding<u8>] = &[
        Binding::new("a", &[(KeyCode::Char('a'), 0), (KeyCode::Up, 1)], "first").footer("a", "alpha"),
        Binding::new("b", &[(KeyCode::Char('b'), 2)], "second").footer("b", "beta").tabs(&[1]),
        Binding::new("?", &[(KeyCode::Char('?'), 3)], "help").footer("help", "help"),
        Binding::new("q", &[(KeyCode::Char('q'), 4)], "leave").footer("quit", "quit"),
    ];

    #[test]
    fn control_and_alt_are_not_letters() {
        let key = |modifiers| KeyEvent::new(KeyCode::Char('q'), modifiers);
        assert_eq!(action(TABLE, key(KeyModifiers::NONE)), Some(4));
        assert_eq!(action(TABLE, key(KeyModifiers::CONTROL)), None);
        assert_eq!(action(TABLE, key(KeyModifiers::ALT)), None);
        assert_eq!(action(TABLE, KeyEvent::from(KeyCode::Up)), Some(1));
        assert!(is_ctrl_c(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!is_ctrl_c(KeyEvent::from(KeyCode::Char('c'))));
    }

    #[test]
    fn the_footer_knows_its_tab_and_its_room() {
        check(TABLE, 2);
        let entries = |tab, width| footer(TABLE, width, |binding| binding.is_for(tab));
        let keys = |tab, width| entries(tab, width).iter().map(|(key, _)| *key).collect::<String>();
        assert_eq!([keys(0, 80), keys(1, 80), keys(1, 0)], ["a?q", "ab?q", "?q"]);
        assert_eq!(entries(0, 80)[0], ("a", "alpha"));
        assert_eq!(entries(0, 28)[0], ("a", "a"));
        assert!(TABLE[0].does(|action| action == 1) && !TABLE[1].does(|action| action == 1));
    }
}
