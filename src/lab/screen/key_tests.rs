//! Presses every key in a view's help, and reports keys that do not work as described.

use super::keys::{KEYS, LabAction};
use super::parameters::Adjust;
use super::state::{LabState, LabTab};
use super::{Evaluate, view};
use crate::lab::parse_value;
use crate::screen::terminal::Binding;
use crate::ui::{Palette, Theme};
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use std::cell::RefCell;
use std::ops::ControlFlow;

/// Parameters without an effect at first, each with the parameter that enables it.
const NEEDED: [(&str, &str, &str, &str); 5] = [
    ("scaler", "min_scale", "level", "18"),
    ("scaler", "consecutive_hysteresis", "hysteresis", "2"),
    ("scaler", "spike", "spikes", "0.05"),
    ("scaler", "jump", "jump-at", "1000"),
    ("blocks", "stale-amax", "scheme", "delayed"),
];

struct ViewHarness<'a, 'e> {
    state: LabState,
    size: (u16, u16),
    evaluate: &'a RefCell<&'a mut Evaluate<'e>>,
}

impl<'a, 'e> ViewHarness<'a, 'e> {
    fn new(lab_tabs: &[LabTab], tab: usize, size: (u16, u16), evaluate: &'a RefCell<&'a mut Evaluate<'e>>) -> Self {
        Self { state: LabState::new(lab_tabs.to_vec(), tab), size, evaluate }
    }

    fn picture(&mut self) -> String {
        self.state.evaluate(self.size.0.into(), &mut **self.evaluate.borrow_mut());
        view::picture(&mut self.state, Theme::of(Palette::Monochrome, false), self.size.0, self.size.1)
    }

    fn page(&mut self) -> String {
        self.picture();
        self.state.page.text()
    }

    fn press(&mut self, code: KeyCode) -> ControlFlow<()> {
        self.state.press(KeyEvent::from(code))
    }

    /// Whether the key changes the picture.
    fn changes(&mut self, code: KeyCode) -> bool {
        let before = self.picture();
        self.press(code).is_continue() && self.picture() != before
    }
}

/// The keys of all views that do not work at `size`, with the defect.
pub(crate) fn unresponsive_keys(lab_tabs: &[LabTab], size: (u16, u16), evaluate: &mut Evaluate) -> Vec<String> {
    let evaluate = RefCell::new(evaluate);
    let mut wrong = Vec::new();
    for (tab, lab_tab) in lab_tabs.iter().enumerate() {
        let stage = || ViewHarness::new(lab_tabs, tab, size, &evaluate);
        for (code, action) in KEYS.iter().flat_map(Binding::keys) {
            // The view's own keys take precedence.
            if lab_tab.keys.iter().any(|key| key.code == code) || (code == KeyCode::Char(' ') && lab_tab.play.is_some())
            {
                continue;
            }
            if let LabAction::Increase { .. } | LabAction::Decrease { .. } = action {
                for field in 0..lab_tab.fields.len() {
                    if let Err(what) = step(stage(), field, code, action) {
                        wrong.push(format!("{}: {what}", lab_tab.name));
                    }
                }
            } else if let Err(what) = common(stage(), code, action) {
                wrong.push(format!("{}: {code}: {what}", lab_tab.name));
            }
        }
        for (letter, scenario) in ('a'..='d').zip(&lab_tab.scenarios) {
            let mut stage = stage();
            // Its text may be wrapped.
            let begins: String = scenario.text.chars().take(40).collect();
            if !stage.changes(KeyCode::Char(letter)) || !stage.picture().contains(&begins) {
                wrong.push(format!("{}: {letter} does not load `{}`", lab_tab.name, scenario.name));
            }
            if stage.page().contains("cannot show") {
                wrong.push(format!("{}: {letter} loads what cannot be shown", lab_tab.name));
            }
        }
        for key in lab_tab.keys {
            // Some keys act only after another one, for example End after Home.
            let alone = stage().changes(key.code);
            let behind = |other: KeyCode| {
                let mut stage = stage();
                stage.press(other).is_continue() && stage.changes(key.code)
            };
            if !alone && !lab_tab.keys.iter().map(|other| other.code).any(behind) {
                wrong.push(format!("{}: {} ({})", lab_tab.name, key.written, key.help));
            }
        }
        let mut stage = stage();
        if lab_tab.play.is_some() {
            let begins = stage.press(KeyCode::Char(' ')).is_continue() && stage.state.playing && stage.state.tick();
            let first = stage.picture();
            let goes_on = stage.state.tick() && stage.picture() != first;
            if !begins || !goes_on || stage.press(KeyCode::Char(' ')).is_break() || stage.state.tick() {
                wrong.push(format!("{}: space does not run and pause", lab_tab.name));
            }
        }
    }
    wrong
}

/// A key that changes a parameter.
fn step(mut stage: ViewHarness, field: usize, code: KeyCode, action: LabAction) -> Result<(), String> {
    let lab_tab = stage.state.current_tab().clone();
    let parameter = &lab_tab.fields[field];
    let name = format!("{code} on `{}` = `{}`", parameter.flag, parameter.value);
    for (view, flag, needed, value) in NEEDED {
        if (view, flag) == (lab_tab.name, parameter.flag) {
            let tab = stage.state.tab;
            stage.state.lab_tabs[tab].set(needed, value);
        }
    }
    stage.state.field = field;
    let before = stage.page();
    if stage.press(code).is_break() {
        return Err(format!("{name} ends the screen"));
    }
    let page = stage.page();
    if let Adjust::Typed = parameter.control.adjust {
        return stage.state.typed.is_some().then_some(()).ok_or(format!("{name} does not begin to type"));
    }
    let value = stage.state.current_tab().fields[field].value.clone();
    if let (Ok(old), Ok(new), LabAction::Increase { .. } | LabAction::Decrease { .. }) =
        (parse_value(&parameter.value), parse_value(&value), action)
        && !matches!(parameter.control.adjust, Adjust::Among(_))
        && (new > old) != matches!(action, LabAction::Increase { .. })
        && new != old
    {
        return Err(format!("{name} gives {value}"));
    }
    if page.contains("cannot show") {
        return Err(format!("{name} gives {value}, which cannot be shown"));
    }
    // A value at its bound stays.
    let at_end = value == parameter.value;
    (at_end || page != before).then_some(()).ok_or(format!("{name} changes nothing"))
}

/// Any other key of all views.
fn common(mut stage: ViewHarness, code: KeyCode, action: LabAction) -> Result<(), String> {
    let tab = stage.state.tab;
    let tabs = stage.state.lab_tabs.len();
    let fields = stage.state.current_tab().fields.len();
    let first = stage.picture();
    let last_line = stage.state.page.text().trim_end().lines().last().unwrap_or_default().trim().to_owned();
    let wholly_shown = first.contains(&last_line);
    let flow = stage.press(code);
    let then = stage.picture();
    let done = match action {
        LabAction::Quit => return flow.is_break().then_some(()).ok_or("does not leave".to_owned()),
        LabAction::Tab(shown) => stage.state.tab == shown && (shown == tab || then != first),
        LabAction::NextTab => stage.state.tab == (tab + 1) % tabs && then != first,
        LabAction::PreviousTab => stage.state.tab == (tab + tabs - 1) % tabs && then != first,
        LabAction::NextField => stage.state.field != 0 && then != first || fields == 1,
        LabAction::PreviousField => stage.state.field >= fields / 2 && then != first || fields == 1,
        LabAction::Type(digit) => {
            let typing = stage.state.typed == Some(digit.to_string()) && then != first;
            typing && stage.changes(KeyCode::Esc) && stage.picture() == first
        }
        LabAction::All => !stage.state.current_tab().has_rare() || then != first,
        LabAction::Edit => {
            let typing = stage.state.typed.is_some() && then != first;
            let typed = stage.changes(KeyCode::Char('7')) && stage.changes(KeyCode::Backspace);
            let cancelled = stage.changes(KeyCode::Esc) && stage.picture() == first;
            typing && typed && cancelled
        }
        LabAction::PageDown => {
            for _ in 0..20 {
                let _ = stage.press(code);
            }
            let end = stage.picture();
            wholly_shown || (then != first && end.contains(&last_line))
        }
        LabAction::PageUp => {
            let _ = stage.press(KeyCode::PageDown);
            let scrolled = stage.picture();
            wholly_shown || (scrolled != first && stage.changes(code) && stage.picture() == first)
        }
        LabAction::Help => {
            let keys = stage.state.current_tab().keys.iter().map(|key| key.help);
            let missing = KEYS.iter().map(|binding| binding.help).chain(keys).find(|help| !then.contains(help));
            if let Some(missing) = missing {
                return Err(format!("the help does not show `{missing}`"));
            }
            stage.changes(KeyCode::Esc) && stage.picture() == first
        }
        LabAction::Close => {
            let _ = stage.press(KeyCode::Char('?'));
            stage.changes(code) && stage.picture() == first
        }
        LabAction::Increase { .. } | LabAction::Decrease { .. } => true,
    };
    (flow.is_continue() && done).then_some(()).ok_or("differs from the help".to_owned())
}
