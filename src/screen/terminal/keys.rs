//! The keys of a screen: one table that dispatch, footer and help are generated from, so that they always agree.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// A row of the table: keys with related actions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding<A: 'static> {
    keys: &'static [(KeyCode, A)],
    /// The keys as footer and help show them.
    pub(crate) written: &'static str,
    /// The footer's text, short and in full; `None` if the footer does not show it.
    footer: Option<(&'static str, &'static str)>,
    pub(crate) help: &'static str,
    /// The tabs where the keys work; empty for all.
    tabs: &'static [usize],
}

impl<A: Copy> Binding<A> {
    /// A row that the footer does not show.
    pub(crate) const fn new(written: &'static str, keys: &'static [(KeyCode, A)], help: &'static str) -> Self {
        Self { keys, written, footer: None, help, tabs: &[] }
    }

    /// Sets the footer's text: short, and in full if it fits.
    pub(crate) const fn footer(mut self, short: &'static str, full: &'static str) -> Self {
        self.footer = Some((short, full));
        self
    }

    /// Limits the keys to these tabs.
    pub(crate) const fn tabs(mut self, tabs: &'static [usize]) -> Self {
        self.tabs = tabs;
        self
    }

    /// Whether the keys work in a tab.
    pub(crate) fn is_for(&self, tab: usize) -> bool {
        self.tabs.is_empty() || self.tabs.contains(&tab)
    }

    #[cfg(test)]
    pub(crate) fn keys(&self) -> impl Iterator<Item = (KeyCode, A)> {
        self.keys.iter().copied()
    }

    /// Whether the action of any key satisfies `kind`.
    pub(crate) fn does(&self, kind: impl Fn(A) -> bool) -> bool {
        self.keys.iter().any(|(_, action)| kind(*action))
    }
}

/// Whether neither Control nor Alt is pressed with a key: they make it another key.
pub(crate) fn is_plain(key: KeyEvent) -> bool {
    !key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT)
}

/// The action of a key; `None` if it is not in the table.
pub(crate) fn action<A: Copy>(table: &[Binding<A>], key: KeyEvent) -> Option<A> {
    if !is_plain(key) {
        return None;
    }
    table.iter().flat_map(|binding| binding.keys).find(|(code, _)| *code == key.code).map(|(_, action)| *action)
}

/// Whether a key is Ctrl-C, which is in no table, because every screen always handles it.
pub(crate) fn is_ctrl_c(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Whether a key is Ctrl-Z, which in raw mode is a key and not a signal.
pub(crate) fn is_ctrl_z(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('z') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Columns between a key and its text, and after the text.
pub(crate) const GAPS: (u16, u16) = (2, 3);

/// The footer's entries (key, text) for the rows that are `shown`, in at most `width` columns: in full if all of them
/// fit. Entries are dropped from the end, except the last two, help and quit.
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

/// Asserts for a table that no key has two actions, every row has its texts, and the footer fits and ends with help and
/// quit.
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
    fn the_footer_depends_on_tab_and_width() {
        check(TABLE, 2);
        let entries = |tab, width| footer(TABLE, width, |binding| binding.is_for(tab));
        let keys = |tab, width| entries(tab, width).iter().map(|(key, _)| *key).collect::<String>();
        assert_eq!([keys(0, 80), keys(1, 80), keys(1, 0)], ["a?q", "ab?q", "?q"]);
        assert_eq!(entries(0, 80)[0], ("a", "alpha"));
        assert_eq!(entries(0, 28)[0], ("a", "a"));
        assert!(TABLE[0].does(|action| action == 1) && !TABLE[1].does(|action| action == 1));
    }
}
