//! The screen's state, and how keys change it.

use super::Evaluate;
use super::keys::{KEYS, LabAction};
use super::parameters::{Adjust, Controls, Field, name};
use crate::screen::terminal::keys::{action, is_ctrl_c, is_plain};
use crate::ui::{Line, Page, Role};
use clap::{Arg, ArgAction};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::ops::ControlFlow;

/// A tab: a view with its parameters.
#[derive(Debug, Clone)]
pub(crate) struct LabTab {
    /// The view's name on the command line.
    pub(crate) name: &'static str,
    pub(crate) fields: Vec<Field>,
    /// Experiments that a key loads: `a`, `b`, ….
    pub(crate) scenarios: Vec<Scenario>,
    /// Keys of this view, which take precedence over common ones.
    pub(crate) keys: &'static [ViewKey],
    /// Advances a playing view by one frame; `false` at its end.
    pub(crate) play: Option<fn(&mut Self) -> bool>,
    /// The first and the last step of its page.
    pub(crate) steps: (u64, u64),
    /// Whether all its parameters are shown, not only the important ones.
    pub(crate) all: bool,
}

/// Parameter values to load, with instructions.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Values by flag; the other parameters are reset.
    pub(crate) set: Vec<(&'static str, &'static str)>,
    /// Instructions, and the expected result.
    pub(crate) text: &'static str,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ViewKey {
    pub(crate) code: KeyCode,
    /// The key as footer and help show it.
    pub(crate) written: &'static str,
    /// The footer's text; empty if the footer does not show the key.
    pub(crate) footer: &'static str,
    pub(crate) help: &'static str,
    pub(crate) act: fn(&mut LabTab),
}

impl LabTab {
    /// A tab without scenarios and own keys.
    pub(crate) const fn new(name: &'static str, fields: Vec<Field>) -> Self {
        Self { name, fields, scenarios: Vec::new(), keys: &[], play: None, steps: (0, 0), all: false }
    }

    /// The value of a parameter; empty if it does not exist.
    pub(crate) fn value(&self, flag: &str) -> &str {
        self.fields.iter().find(|field| field.flag == flag).map_or("", |field| &field.value)
    }

    pub(crate) fn set(&mut self, flag: &str, value: impl Into<String>) {
        if let Some(field) = self.fields.iter_mut().find(|field| field.flag == flag) {
            field.value = value.into();
        }
    }

    /// Sets a parameter to a value from the command line.
    pub(crate) fn choose(&mut self, flag: &str, value: &str) {
        self.set(flag, value);
        self.fields.iter_mut().filter(|field| field.flag == flag).for_each(|field| field.chosen = true);
    }

    /// Whether a parameter is shown: it is important, it differs from its initial value, or all are shown.
    pub(super) fn shows(&self, field: &Field) -> bool {
        self.all || !field.control.rare || field.value != field.first
    }

    /// Whether some parameters are shown only on demand.
    pub(super) fn has_rare(&self) -> bool {
        self.fields.iter().any(|field| field.control.rare)
    }

    /// Whether a parameter has the value of the run that is read.
    pub(crate) fn is_of_run(&self, field: &Field) -> bool {
        field.control.from_run && !field.chosen && !self.value("run").is_empty()
    }

    fn load(&mut self, scenario: &Scenario) {
        for field in &mut self.fields {
            if field.flag != "run" {
                field.value.clone_from(&field.first);
                // A scenario's text describes its own values, not a run's.
                field.chosen = true;
            }
        }
        for (flag, value) in &scenario.set {
            self.set(flag, *value);
        }
    }
}

/// Sets the parameters of `arg` to the values that were typed for it.
pub(crate) fn choose(lab_tab: &mut LabTab, arg: &Arg, values: &[String]) {
    match (arg.get::<Controls>(), arg.get_action()) {
        (Some(Controls(parts)), ArgAction::Append) => {
            parts.iter().zip(values).for_each(|((name, _), value)| lab_tab.choose(name, value));
        }
        (Some(_), _) => {
            let pairs = values.iter().flat_map(|value| value.split(',')).filter_map(|pair| pair.split_once('='));
            pairs.for_each(|(name, value)| lab_tab.choose(name.trim(), value.trim()));
        }
        (None, ArgAction::SetTrue) => lab_tab.choose(name(arg), "yes"),
        (None, _) => lab_tab.choose(name(arg), &values.join(",")),
    }
}

#[derive(Debug, Default)]
pub(super) struct LabState {
    pub(super) lab_tabs: Vec<LabTab>,
    pub(super) tab: usize,
    /// The selected parameter of the current tab.
    pub(super) field: usize,
    /// The text being typed for it.
    pub(super) typed: Option<String>,
    pub(super) help: bool,
    pub(super) scroll: usize,
    pub(super) page: Page,
    /// Whether the page is out of date.
    pub(super) stale: bool,
    /// The last loaded scenario of the current tab.
    pub(super) scenario: Option<usize>,
    pub(super) playing: bool,
}

impl LabState {
    pub(super) fn new(lab_tabs: Vec<LabTab>, tab: usize) -> Self {
        Self { lab_tabs, tab, stale: true, ..Self::default() }
    }

    pub(super) fn current_tab(&self) -> &LabTab {
        &self.lab_tabs[self.tab]
    }

    /// Updates the page; shows an error as the page.
    pub(super) fn evaluate(&mut self, width: usize, evaluate: &mut Evaluate) {
        if !self.stale {
            return;
        }
        self.stale = false;
        let lab_tab = self.current_tab();
        // Apply typed text immediately if it is valid.
        let current = |(i, field): (usize, &'_ Field)| match &self.typed {
            Some(typed) if i == self.field => (field.flag, typed.clone()),
            _ if lab_tab.is_of_run(field) => (field.flag, String::new()),
            _ => (field.flag, field.value.clone()),
        };
        let given: Vec<_> = lab_tab.fields.iter().enumerate().map(current).collect();
        let given = given.iter().filter(|(_, value)| !value.trim().is_empty());
        let values: Vec<_> = given.map(|(flag, value)| (*flag, value.as_str())).collect();
        let result = evaluate(lab_tab.name, &values, width.saturating_sub(2));
        if self.typed.is_some() && result.is_err() {
            return;
        }
        let mut text = Page::new();
        if let Some(scenario) = self.scenario.and_then(|scenario| lab_tab.scenarios.get(scenario)) {
            text.wrapped(Role::Series(1), &format!("→ {}", scenario.text), width.saturating_sub(2));
        }
        self.page = match result {
            Ok(page) => {
                self.lab_tabs[self.tab].steps = page.steps;
                text.followed_by(page)
            }
            Err(error) => {
                let mut page = Page::new();
                page.push(Line::new().with(Role::Bad, "✕ cannot show this"));
                for line in error.to_string().lines() {
                    page.wrapped(Role::Text, line, width.saturating_sub(2));
                }
                page
            }
        };
    }

    /// Handles a key; breaks to quit.
    pub(super) fn press(&mut self, key: KeyEvent) -> ControlFlow<()> {
        if is_ctrl_c(key) {
            return ControlFlow::Break(());
        }
        if self.typed.is_some() {
            self.type_key(key);
            return ControlFlow::Continue(());
        }
        if !self.help && is_plain(key) && self.of_view(key.code) {
            return ControlFlow::Continue(());
        }
        let Some(action) = action(KEYS, key) else {
            let plain = (key.modifiers - KeyModifiers::SHIFT).is_empty() && !self.help;
            if let KeyCode::Char(letter) = key.code
                && plain
            {
                self.jump(letter);
            }
            return ControlFlow::Continue(());
        };
        if self.help && !matches!(action, LabAction::Quit) {
            self.help = false;
            return ControlFlow::Continue(());
        }
        self.act(action)
    }

    /// Handles a key of the current view or of its scenarios; `false` if it is neither.
    fn of_view(&mut self, code: KeyCode) -> bool {
        let lab_tab = &mut self.lab_tabs[self.tab];
        if let KeyCode::Char(letter @ 'a'..='d') = code {
            let index = letter as usize - 'a' as usize;
            let Some(scenario) = lab_tab.scenarios.get(index).cloned() else { return false };
            lab_tab.load(&scenario);
            self.scenario = Some(index);
            self.scroll = 0;
            self.playing = false;
        } else if code == KeyCode::Char(' ') && lab_tab.play.is_some() {
            self.playing = !self.playing;
        } else if let Some(key) = lab_tab.keys.iter().find(|key| key.code == code) {
            (key.act)(lab_tab);
        } else {
            return false;
        }
        self.stale = true;
        true
    }

    /// Advances a playing view; `true` if a redraw is needed.
    pub(super) fn tick(&mut self) -> bool {
        if !self.playing {
            return false;
        }
        let lab_tab = &mut self.lab_tabs[self.tab];
        self.playing = lab_tab.play.is_some_and(|play| play(lab_tab));
        self.stale = true;
        true
    }

    fn act(&mut self, action: LabAction) -> ControlFlow<()> {
        let tabs = self.lab_tabs.len();
        let fields = self.current_tab().fields.len();
        match action {
            LabAction::Tab(tab) if tab < tabs => self.show(tab),
            LabAction::NextTab => self.show((self.tab + 1) % tabs),
            LabAction::PreviousTab => self.show((self.tab + tabs - 1) % tabs),
            LabAction::NextField => self.select(1, |_| true),
            LabAction::PreviousField => self.select(fields - 1, |_| true),
            LabAction::Type(digit) => self.typed = Some(digit.to_string()),
            LabAction::All => {
                let lab_tab = &mut self.lab_tabs[self.tab];
                lab_tab.all = !lab_tab.all;
                if !lab_tab.shows(&lab_tab.fields[self.field]) {
                    self.field = 0;
                }
            }
            LabAction::Increase { other } | LabAction::Decrease { other } if !self.is_typed() => {
                let up = matches!(action, LabAction::Increase { .. });
                self.lab_tabs[self.tab].fields[self.field].step(up, other);
                self.stale = true;
            }
            // A parameter without steps must be typed.
            LabAction::Increase { .. } | LabAction::Decrease { .. } | LabAction::Edit => {
                self.typed = Some(self.current_tab().fields[self.field].value.clone());
            }
            LabAction::PageDown => self.scroll += 10,
            LabAction::PageUp => self.scroll = self.scroll.saturating_sub(10),
            LabAction::Help => self.help = true,
            LabAction::Quit => return ControlFlow::Break(()),
            LabAction::Tab(_) | LabAction::Close => {}
        }
        ControlFlow::Continue(())
    }

    /// Selects the next shown parameter that meets the condition, in steps of `by` around the list.
    fn select(&mut self, by: usize, meets: impl Fn(&Field) -> bool) {
        let lab_tab = self.current_tab();
        let count = lab_tab.fields.len();
        let next = (1..=count).map(|step| (self.field + step * by) % count);
        let shown = |at: &usize| lab_tab.shows(&lab_tab.fields[*at]) && meets(&lab_tab.fields[*at]);
        self.field = next.into_iter().find(shown).unwrap_or(self.field);
    }

    /// Selects the next parameter whose name begins with a letter.
    fn jump(&mut self, letter: char) {
        self.select(1, |field| field.flag.starts_with(letter.to_ascii_lowercase()));
    }

    fn is_typed(&self) -> bool {
        matches!(self.current_tab().fields[self.field].control.adjust, Adjust::Typed)
    }

    fn show(&mut self, tab: usize) {
        if tab != self.tab {
            *self = Self::new(std::mem::take(&mut self.lab_tabs), tab);
        }
    }

    fn type_key(&mut self, key: KeyEvent) {
        let Some(typed) = &mut self.typed else { return };
        match key.code {
            KeyCode::Enter => {
                let value = std::mem::take(typed);
                let field = &mut self.lab_tabs[self.tab].fields[self.field];
                // A cleared field takes the run's value again.
                field.chosen = !value.is_empty();
                field.value = value;
                self.typed = None;
                self.scroll = 0;
            }
            KeyCode::Esc => self.typed = None,
            KeyCode::Backspace => drop(typed.pop()),
            KeyCode::Char('u') if key.modifiers.contains(KeyModifiers::CONTROL) => typed.clear(),
            KeyCode::Char(c) if (key.modifiers - KeyModifiers::SHIFT).is_empty() => typed.push(c),
            _ => return,
        }
        self.stale = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::lab::screen::Control;

    fn state() -> LabState {
        let fields = vec![
            Field::new("format", "fp16", Adjust::Among(&["fp16", "bf16", "e4m3"])),
            Field::new("steps", "20", Adjust::Double(8)),
            Field::new("scale", "", Adjust::Count(16)),
            Field::new("update", "-0.5", Adjust::Scale),
        ];
        LabState::new(vec![LabTab::new("one", fields.clone()), LabTab::new("two", fields)], 0)
    }

    fn press(state: &mut LabState, keys: &[KeyCode]) -> ControlFlow<()> {
        keys.iter().try_for_each(|code| state.press(KeyEvent::new(*code, KeyModifiers::NONE)))
    }

    fn value(state: &LabState) -> &str {
        &state.current_tab().fields[state.field].value
    }

    #[test]
    fn arrows_select_and_change_parameters() {
        use KeyCode::{Char, Down, Left, Right, Up};
        let mut state = state();
        assert!(press(&mut state, &[Left]).is_continue());
        assert_eq!(value(&state), "e4m3");
        assert!(press(&mut state, &[Right, Right, Down, Right]).is_continue());
        assert_eq!(value(&state), "40");
        assert!(press(&mut state, &[Char('j'), Char('l'), Char('h'), Char('h')]).is_continue());
        assert_eq!(value(&state), "14");
        assert!(press(&mut state, &[Down, Right]).is_continue());
        assert_eq!(value(&state), "-1");
        assert!(press(&mut state, &[Down, Down, Up]).is_continue());
        assert_eq!((state.field, &*state.lab_tabs[0].fields[0].value), (0, "bf16"));
    }

    #[test]
    fn typing_is_accepted_by_enter_and_cancelled_by_esc() {
        use KeyCode::{Backspace, Char, Enter, Esc};
        let mut state = state();
        assert!(press(&mut state, &[Enter, Backspace, Char('q'), Char('1')]).is_continue());
        assert_eq!(state.typed.as_deref(), Some("fp1q1"));
        assert!(press(&mut state, &[Esc]).is_continue());
        assert_eq!((value(&state), state.tab), ("fp16", 0));
        assert!(press(&mut state, &[Enter, Char('x'), Enter]).is_continue());
        assert_eq!(value(&state), "fp16x");
        assert!(state.stale);
    }

    #[test]
    fn a_digit_replaces_the_value_and_a_letter_jumps() {
        use KeyCode::{Char, Enter, Esc};
        let mut state = state();
        assert!(press(&mut state, &[Char('s'), Char('4'), Char('8'), Enter]).is_continue());
        assert_eq!((state.current_tab().fields[state.field].flag, value(&state)), ("steps", "48"));
        assert!(press(&mut state, &[Char('S'), Char('-'), Esc]).is_continue());
        assert_eq!((state.current_tab().fields[state.field].flag, value(&state)), ("scale", ""));
        assert!(press(&mut state, &[Char('u'), Char('z')]).is_continue());
        assert_eq!(state.current_tab().fields[state.field].flag, "update");
    }

    #[test]
    fn rare_parameters_are_shown_on_demand_or_with_a_value_of_their_own() {
        use KeyCode::{Char, Down};
        let fields = vec![
            Field::new("steps", "20", Adjust::Double(8)),
            Field::new("drift", "0", Control::new(Adjust::By(1.0)).rare()),
            Field::new("seed", "0", Adjust::Count(0)),
        ];
        let mut state = LabState::new(vec![LabTab::new("one", fields)], 0);
        let flag = |state: &LabState| state.current_tab().fields[state.field].flag;
        assert!(press(&mut state, &[Down]).is_continue());
        assert_eq!(flag(&state), "seed");
        assert!(press(&mut state, &[Char('+'), Down, Down, Char('l')]).is_continue());
        assert_eq!((flag(&state), value(&state)), ("drift", "1"));
        assert!(press(&mut state, &[Char('+'), Down, Down, Down]).is_continue());
        assert_eq!(flag(&state), "drift", "its value differs from the default");
    }

    #[test]
    fn tabs_help_and_leaving() {
        use KeyCode::{Char, F, Tab};
        let mut state = state();
        assert!(press(&mut state, &[F(2)]).is_continue());
        assert_eq!(state.tab, 1);
        assert!(press(&mut state, &[Tab, F(6)]).is_continue());
        assert_eq!(state.tab, 0);
        assert!(press(&mut state, &[Char('?'), F(2)]).is_continue());
        assert!(!state.help && state.tab == 0, "any key closes the help");
        assert!(press(&mut state, &[Char('q')]).is_break());
        state.typed = Some(String::new());
        assert!(state.press(KeyEvent::new(Char('c'), KeyModifiers::CONTROL)).is_break());
    }

    #[test]
    fn a_view_plays_until_its_end_a_pause_or_another_tab() {
        use KeyCode::{Char, Tab};
        let ends: fn(&mut LabTab) -> bool = |lab_tab| {
            let steps: u32 = lab_tab.value("steps").parse().unwrap();
            lab_tab.set("steps", (steps + 1).to_string());
            steps < 21
        };
        let mut state = state();
        state.lab_tabs[0].play = Some(ends);
        assert!(!state.tick() && press(&mut state, &[Char(' ')]).is_continue());
        assert_eq!([state.tick(), state.tick(), state.tick()], [true, true, false]);
        assert_eq!(state.current_tab().value("steps"), "22");
        for key in [Char(' '), Tab] {
            assert!(press(&mut state, &[Char(' '), key]).is_continue());
            assert!(!state.playing && !state.tick());
        }
    }

    #[test]
    fn a_page_scrolls_by_ten_lines_until_its_values_change() {
        use KeyCode::{Char, Enter, PageDown, PageUp};
        let mut state = state();
        assert!(press(&mut state, &[PageUp, PageDown, PageDown, PageUp]).is_continue());
        assert_eq!(state.scroll, 10);
        assert!(press(&mut state, &[Char('5'), Enter]).is_continue());
        assert_eq!(state.scroll, 0);
    }

    #[test]
    fn an_invalid_value_keeps_the_page_while_it_is_typed() {
        use KeyCode::{Char, Enter};
        let mut state = state();
        let mut evaluate = |_: &str, values: &[(&str, &str)], _| {
            let format = values[0].1;
            let mut page = Page::new();
            page.title(format);
            if format == "5x" { Err(Error::config("format", "unknown")) } else { Ok(page) }
        };
        for (key, shown) in [(Char('5'), "5"), (Char('x'), "5"), (Enter, "cannot show")] {
            assert!(press(&mut state, &[key]).is_continue());
            state.evaluate(80, &mut evaluate);
            assert!(state.page.text().contains(shown), "{}", state.page.text());
        }
    }

    /// With a run, a parameter that the run determines has the run's value until another value is chosen.
    #[test]
    fn a_runs_values_count_until_others_are_chosen() {
        use KeyCode::{Char, Down, Enter, Right};
        let scenarios = vec![Scenario { name: "one", set: vec![("scale", "8")], text: "" }];
        let fields = |run| {
            vec![
                Field::new("logit", "", Control::new(Adjust::By(1.0)).start_from_run("12")),
                Field::new("scale", "4", Adjust::Scale),
                Field::new("run", run, Adjust::Typed),
            ]
        };
        let given = |state: &mut LabState| {
            let mut seen = Vec::new();
            state.evaluate(80, &mut |_, values, _| {
                seen = values.iter().map(|(flag, value)| format!("{flag}={value}")).collect();
                Ok(Page::new())
            });
            seen
        };
        let lab_tab = |run| LabTab { scenarios: scenarios.clone(), ..LabTab::new("one", fields(run)) };
        let state = |run| LabState::new(vec![lab_tab(run)], 0);
        assert_eq!(given(&mut state("")), ["logit=12", "scale=4"]);
        let mut from_run = state("r");
        assert_eq!(given(&mut from_run), ["scale=4", "run=r"]);
        assert!(press(&mut from_run, &[Right]).is_continue());
        assert_eq!(given(&mut from_run), ["logit=13", "scale=4", "run=r"]);
        let mut typed = state("");
        assert!(press(&mut typed, &[Down, Down, Enter, Char('r'), Enter]).is_continue());
        assert_eq!(given(&mut typed), ["scale=4", "run=r"]);
        assert!(press(&mut typed, &[Char('a')]).is_continue());
        assert_eq!(given(&mut typed), ["logit=12", "scale=8", "run=r"]);
    }

    #[test]
    fn empty_values_are_omitted_and_errors_are_shown() {
        let mut state = state();
        let mut seen = Vec::new();
        state.evaluate(80, &mut |name, values, width| {
            seen.push((name.to_owned(), values.len(), width));
            Err(Error::config("value", "cannot read `x`"))
        });
        assert_eq!(seen, [("one".to_owned(), 3, 78)]);
        assert!(state.page.text().contains("value: cannot read `x`"));
        state.evaluate(80, &mut |_, _, _| unreachable!("nothing has changed"));
    }
}
