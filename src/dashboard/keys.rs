//! The keys: one table that dispatch, footer and help are made from, so that they cannot disagree.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What a key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Shows a tab, by its index.
    Tab(usize),
    NextTab,
    PreviousTab,
    Pause,
    Freeze,
    Save,
    Evaluate,
    Sample,
    Probe,
    Zoom,
    TimeAxis,
    LogAxis,
    TrueMagnitudes,
    Sort,
    Filter,
    Down,
    Up,
    PageDown,
    PageUp,
    Details,
    Help,
    Close,
    Quit,
}

/// A row of the table: keys that do the same kind of thing.
pub(super) struct Binding {
    /// The keys with what each does.
    keys: &'static [(KeyCode, Action)],
    /// How footer and help write them.
    pub(super) written: &'static str,
    /// What the footer says, short and in full; `None` where it does not mention them.
    footer: Option<(&'static str, &'static str)>,
    /// What the help says.
    pub(super) help: &'static str,
    /// The tabs where it does something; empty for all.
    tabs: &'static [usize],
}

const fn letter(c: char, action: Action) -> (KeyCode, Action) {
    (KeyCode::Char(c), action)
}

/// Every key. The footer takes what fits in this order, help and quit always.
pub(super) const KEYS: &[Binding] = &[
    Binding {
        keys: &[
            letter('1', Action::Tab(0)),
            letter('2', Action::Tab(1)),
            letter('3', Action::Tab(2)),
            letter('4', Action::Tab(3)),
            letter('5', Action::Tab(4)),
            (KeyCode::Tab, Action::NextTab),
            (KeyCode::Right, Action::NextTab),
            (KeyCode::BackTab, Action::PreviousTab),
            (KeyCode::Left, Action::PreviousTab),
        ],
        written: "1-5",
        footer: Some(("tab", "tab")),
        help: "show a tab; Tab and the arrows go round",
        tabs: &[],
    },
    Binding {
        keys: &[letter(' ', Action::Pause)],
        written: "space",
        footer: Some(("pause", "pause training")),
        help: "pause training at the next step, and go on",
        tabs: &[],
    },
    Binding {
        keys: &[letter('f', Action::Freeze)],
        written: "f",
        footer: Some(("freeze", "freeze view")),
        help: "freeze the picture; training goes on",
        tabs: &[],
    },
    Binding {
        keys: &[letter('s', Action::Save)],
        written: "s",
        footer: Some(("save", "save")),
        help: "write a checkpoint now",
        tabs: &[],
    },
    Binding {
        keys: &[letter('z', Action::Zoom)],
        written: "z",
        footer: Some(("zoom", "zoom")),
        help: "one panel on the whole screen, the next, …, back",
        tabs: &[0],
    },
    Binding {
        keys: &[letter('x', Action::TimeAxis)],
        written: "x",
        footer: Some(("step/time", "step/time")),
        help: "charts over steps or over time",
        tabs: &[0, 2],
    },
    Binding {
        keys: &[letter('y', Action::LogAxis)],
        written: "y",
        footer: Some(("log y", "log y")),
        help: "loss on a logarithmic or a linear axis",
        tabs: &[0],
    },
    Binding {
        keys: &[letter('u', Action::TrueMagnitudes)],
        written: "u",
        footer: Some(("scaled/true", "scaled/true")),
        help: "magnitudes as stored, or divided by the loss scale",
        tabs: &[0, 1, 2],
    },
    Binding {
        keys: &[letter('p', Action::Probe)],
        written: "p",
        footer: Some(("probe", "FP32 probe")),
        help: "run the next batch's backward pass in FP32 beside the run's own",
        tabs: &[],
    },
    Binding {
        keys: &[letter('o', Action::Sort)],
        written: "o",
        footer: Some(("sort", "sort")),
        help: "sort the tensors by the next column",
        tabs: &[2],
    },
    Binding {
        keys: &[letter('/', Action::Filter)],
        written: "/",
        footer: Some(("filter", "filter")),
        help: "show only rows that contain a text; Enter keeps it, Esc drops it",
        tabs: &[2, 3],
    },
    Binding {
        keys: &[(KeyCode::Enter, Action::Details)],
        written: "Enter",
        footer: Some(("details", "details")),
        help: "the history of the tensor under the cursor",
        tabs: &[2],
    },
    Binding {
        keys: &[
            letter('j', Action::Down),
            letter('k', Action::Up),
            (KeyCode::Down, Action::Down),
            (KeyCode::Up, Action::Up),
            (KeyCode::PageDown, Action::PageDown),
            (KeyCode::PageUp, Action::PageUp),
        ],
        written: "j k",
        footer: Some(("scroll", "scroll")),
        help: "scroll; arrows and PgUp, PgDn too",
        tabs: &[2, 3, 4],
    },
    Binding {
        keys: &[letter('e', Action::Evaluate)],
        written: "e",
        footer: Some(("eval", "evaluate")),
        help: "compute the validation loss now",
        tabs: &[],
    },
    Binding {
        keys: &[letter('g', Action::Sample)],
        written: "g",
        footer: Some(("sample", "sample")),
        help: "generate text now",
        tabs: &[],
    },
    Binding {
        keys: &[(KeyCode::Esc, Action::Close)],
        written: "Esc",
        footer: None,
        help: "close what is open",
        tabs: &[],
    },
    Binding {
        keys: &[letter('?', Action::Help), letter('h', Action::Help)],
        written: "?",
        footer: Some(("help", "help")),
        help: "this list",
        tabs: &[],
    },
    Binding {
        keys: &[letter('q', Action::Quit)],
        written: "q",
        footer: Some(("quit", "quit")),
        help: "leave: save and stop, detach, or stop",
        tabs: &[],
    },
];

/// What a key does; `None` for one that is not in the table.
pub(super) fn action(key: KeyEvent) -> Option<Action> {
    if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) {
        return None;
    }
    KEYS.iter().flat_map(|binding| binding.keys).find(|(code, _)| *code == key.code).map(|(_, action)| *action)
}

/// The footer's entries for a tab, as (key, word), in at most `width` columns: in full words if all of them fit.
pub(super) fn footer(tab: usize, width: usize) -> Vec<(&'static str, &'static str)> {
    let of_tab: Vec<_> = KEYS.iter().filter(|binding| binding.tabs.is_empty() || binding.tabs.contains(&tab)).collect();
    let entries = |full: bool| {
        of_tab.iter().filter_map(move |binding| {
            let (short, long) = binding.footer?;
            Some((binding.written, if full { long } else { short }))
        })
    };
    let columns = |(key, word): (&str, &str)| key.len() + 2 + word.len() + 3;
    let total: usize = entries(true).map(columns).sum();
    let all: Vec<_> = entries(total <= width).collect();
    // Help and quit, the last two, have their place before the others are dealt theirs.
    let (rest, last) = all.split_at(all.len().saturating_sub(2));
    let mut room = width.saturating_sub(last.iter().copied().map(columns).sum());
    let fitting = rest.iter().copied().take_while(|entry| {
        let fits = columns(*entry) <= room;
        room = room.saturating_sub(columns(*entry));
        fits
    });
    fitting.chain(last.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_key_has_one_meaning() {
        let keys: Vec<_> = KEYS.iter().flat_map(|binding| binding.keys).map(|(code, _)| *code).collect();
        let different: HashSet<_> = keys.iter().collect();
        assert_eq!(keys.len(), different.len());
    }

    #[test]
    fn every_row_says_its_keys_and_what_they_do() {
        for binding in KEYS {
            assert!(!binding.keys.is_empty() && !binding.help.is_empty() && !binding.written.is_empty());
            let KeyCode::Char(first) = binding.keys[0].0 else { continue };
            assert!(binding.written.starts_with(first) || first == ' ', "{}", binding.written);
        }
    }

    #[test]
    fn the_footer_fits_and_always_says_how_to_get_help_and_out() {
        for tab in 0..5 {
            for width in 0..250 {
                let entries = footer(tab, width);
                let columns: usize = entries.iter().map(|(key, word)| key.len() + word.len() + 5).sum();
                assert!(columns <= width || entries.len() == 2, "{tab} {width}");
                assert_eq!(entries.iter().rev().take(2).map(|(key, _)| *key).collect::<Vec<_>>(), ["q", "?"]);
            }
        }
        assert!(footer(0, 250).contains(&("space", "pause training")));
        assert!(footer(0, 78).contains(&("space", "pause")));
    }

    #[test]
    fn control_and_alt_are_not_letters() {
        let key = |modifiers| KeyEvent::new(KeyCode::Char('q'), modifiers);
        assert_eq!(action(key(KeyModifiers::NONE)), Some(Action::Quit));
        assert_eq!(action(key(KeyModifiers::CONTROL)), None);
        assert_eq!(action(key(KeyModifiers::ALT)), None);
    }
}
