//! Draws the screen: tabs, parameters, the page, the keys.

use super::keys::KEYS;
use super::parameters::Field;
use super::state::{LabState, LabTab};
use crate::screen::terminal::keys::{self, GAPS};
use crate::ui::{Canvas, Line, Page, Role, Theme};
use ratatui::Frame;
use ratatui::layout::Position;

/// Draws the whole screen at any size; clamps scrolling to the page.
pub(super) fn draw(state: &mut LabState, theme: Theme, frame: &mut Frame) {
    let area = frame.area();
    let width = usize::from(area.width);
    let mut shown = Page::new();
    shown.push(tabs(state, width));
    // The keys need the whole screen at 80×24.
    if !state.help {
        shown.lines.extend(field_lines(state, width));
        shown.lines.extend(scenario_line(state));
    }
    let room = usize::from(area.height).saturating_sub(shown.lines.len() + 1);
    let help = help_page(state);
    let page = if state.help { &help } else { &state.page };
    let most = page.lines.len().saturating_sub(room);
    state.scroll = state.scroll.min(most);
    let (scroll, below) = if state.help { (0, 0) } else { (state.scroll, most - state.scroll) };
    shown.lines.extend(page.lines.iter().skip(scroll).take(room).cloned());
    let mut last = Page::new();
    last.push(footer(state, below, width.saturating_sub(1)));

    let mut canvas = Canvas::new(frame.buffer_mut(), area, theme);
    shown.show(&mut canvas, 0);
    last.show(&mut canvas, area.height.saturating_sub(1));
    if let (Some(typed), true) = (&state.typed, area.height > 0) {
        let column = 9 + state.current_tab().fields[state.field].flag.chars().count() + typed.chars().count();
        let last = Position { x: area.width.saturating_sub(1), y: area.height - 1 };
        frame.set_cursor_position(Position { x: last.x.min(column as u16), ..last });
    }
}

/// The tabs; in a narrow terminal only the current one has the number of its function key.
fn tabs(state: &LabState, width: usize) -> Line {
    let name = |(i, lab_tab): (usize, &LabTab)| (i, format!("{} {}", i + 1, lab_tab.name));
    let full: Vec<_> = state.lab_tabs.iter().enumerate().map(name).collect();
    let columns = 5 + full.iter().map(|(_, name)| name.len() + 2).sum::<usize>();
    if columns <= width {
        let line = Line::new().with(Role::Title, "lab ");
        return full.iter().fold(line, |line, (i, name)| {
            line.with(if *i == state.tab { Role::SelectedTitle } else { Role::Dim }, format!(" {name} "))
        });
    }
    // Leave out the first ones if the current one would be beyond the edge.
    let before = |first: usize| state.lab_tabs[first..state.tab].iter().map(|tab| tab.name.len() + 1).sum::<usize>();
    let own = full[state.tab].1.len() + 1;
    let first = (0..state.tab).find(|first| before(*first) + own <= width).unwrap_or(state.tab);
    full[first..].iter().fold(Line::new(), |line, (i, name)| {
        if *i == state.tab {
            line.dim(" ").with(Role::SelectedTitle, name.as_str())
        } else {
            line.dim(format!(" {}", state.lab_tabs[*i].name))
        }
    })
}

/// The scenarios of the view with their keys; the loaded one is marked.
fn scenario_line(state: &LabState) -> Option<Line> {
    let scenarios = &state.current_tab().scenarios;
    let line = scenarios.iter().zip('a'..).enumerate().fold(Line::new().dim("try"), |line, (i, (scenario, key))| {
        let is = state.scenario == Some(i);
        line.plain("  ")
            .with(Role::Title, key.to_string())
            .with(if is { Role::SelectedTitle } else { Role::Dim }, format!(" {} ", scenario.name))
    });
    (!scenarios.is_empty()).then_some(line)
}

/// The parameters, wrapped into lines; the selected one is marked, also by brackets.
fn field_lines(state: &LabState, width: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut line = Line::new();
    let mut used = 1;
    let shown = |(_, field): &(usize, &Field)| state.current_tab().shows(field);
    for (i, field) in state.current_tab().fields.iter().enumerate().filter(shown) {
        let value = match &field.value {
            _ if state.current_tab().is_of_run(field) => "the run's",
            value if value.is_empty() => "–",
            value => value,
        };
        let is_chosen = i == state.field;
        let (open, close) = if is_chosen { ('[', ']') } else { (' ', ' ') };
        let length = field.flag.len() + value.chars().count() + 5;
        if used + length > width && used > 1 {
            lines.push(std::mem::take(&mut line));
            used = 1;
        }
        used += length;
        let role = if is_chosen { Role::SelectedTitle } else { Role::Title };
        line = line.dim(format!("{} ", field.flag)).with(role, format!("{open}{value}{close}")).plain(" ");
    }
    if state.current_tab().has_rare() && !state.current_tab().all {
        line = line.with(Role::Title, "+").dim(" more");
    }
    lines.push(line);
    lines
}

fn footer(state: &LabState, below: usize, mut width: usize) -> Line {
    if let Some(typed) = &state.typed {
        let flag = state.current_tab().fields[state.field].flag;
        return Line::new()
            .with(Role::Title, format!("type {flag} = "))
            .plain(typed.clone())
            .dim("   Enter  Esc  Ctrl-U");
    }
    let mut line = Line::new();
    if below > 0 {
        let more = format!("PgDn ▾{below}   ");
        width = width.saturating_sub(more.chars().count());
        line = line.with(Role::Warn, more);
    }
    let keys = state.current_tab().keys.iter().filter(|key| !key.footer.is_empty());
    let play = state.current_tab().play.map(|_| ("space", if state.playing { "pause" } else { "run" }));
    for (key, what) in play.into_iter().chain(keys.map(|key| (key.written, key.footer))) {
        let columns = key.chars().count() + what.len() + usize::from(GAPS.0 + GAPS.1);
        if columns + 30 > width {
            break;
        }
        width -= columns;
        line = line.with(Role::Title, key).dim(format!("  {what}   "));
    }
    let gap = |columns: u16| " ".repeat(columns.into());
    keys::footer(KEYS, width, |_| true).into_iter().fold(line, |line, (key, what)| {
        line.with(Role::Title, key).dim(format!("{}{what}{}", gap(GAPS.0), gap(GAPS.1)))
    })
}

fn help_page(state: &LabState) -> Page {
    let mut page = Page::new();
    let lab_tab = state.current_tab();
    if lab_tab.play.is_some() || !lab_tab.keys.is_empty() {
        page.title(format!("Keys of {}", lab_tab.name));
        if lab_tab.play.is_some() {
            page.push(key_line("space", "run and pause"));
        }
        lab_tab.keys.iter().for_each(|key| page.push(key_line(key.written, key.help)));
        page.gap();
    }
    page.title("Keys");
    if !lab_tab.scenarios.is_empty() {
        page.push(key_line("a b c d", "load a scenario; its instructions are the first lines"));
    }
    page.push(key_line("A-Z", "select the next parameter with this letter; free small ones too"));
    for binding in KEYS {
        page.push(key_line(binding.written, binding.help));
    }
    page.gap();
    page.push(Line::new().dim("finetune lab VIEW prints the same as text, or with --json for scripts."));
    page
}

fn key_line(written: &str, help: &str) -> Line {
    Line::new().with(Role::Title, format!("  {written:<12}")).plain(help)
}

#[cfg(test)]
pub(super) use tests::picture;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Bits;
    use crate::lab::screen::{Adjust, Field};
    use crate::ui::{Palette, folded, text_of};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::buffer::Buffer;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};
    use ratatui::style::Color;

    const MONOCHROME: Theme = Theme::of(Palette::Monochrome, false);

    fn buffer(state: &mut LabState, theme: Theme, width: u16, height: u16) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(state, theme, frame)).unwrap();
        terminal.backend().buffer().clone()
    }

    pub(in crate::lab::screen) fn picture(state: &mut LabState, theme: Theme, width: u16, height: u16) -> String {
        text_of(&buffer(state, theme, width, height))
    }

    fn state() -> LabState {
        let fields = vec![
            Field::new("value", "1e-8", Adjust::Among(&Bits::PRESETS)),
            Field::new("note", "", Adjust::Typed),
            Field::new("a-rather-long-parameter", "of a certain length", Adjust::Typed),
            Field::new("another-one", "that needs a second line", Adjust::Typed),
        ];
        let lab_tabs = ["bits", "ranges", "ulp", "scaler", "underflow", "memory"];
        let mut state = LabState::new(lab_tabs.map(|name| LabTab::new(name, fields.clone())).to_vec(), 0);
        state.evaluate(80, &mut |_, values, width| Ok(Bits::parse(values[0].1).unwrap().page(width)));
        state
    }

    #[test]
    fn the_help_and_the_line_of_a_typed_value() {
        let mut state = state();
        state.help = true;
        insta::assert_snapshot!("screen_help", folded(&picture(&mut state, MONOCHROME, 80, 24)));
        state.help = false;
        assert!(state.press(KeyEvent::from(KeyCode::Enter)).is_continue());
        let last = picture(&mut state, MONOCHROME, 80, 24).lines().last().unwrap().to_owned();
        assert_eq!(last, " type value = 1e-8   Enter  Esc  Ctrl-U");
    }

    #[test]
    fn every_size_draws() {
        let mut state = state();
        for (width, height) in (1..=40).map(|n| (n * 3, n)).chain([(1, 1), (250, 80), (80, 1), (1, 80)]) {
            picture(&mut state, MONOCHROME, width, height);
        }
    }

    /// Regression: nothing showed that the screen cut a line.
    #[test]
    fn a_cut_line_ends_with_an_ellipsis() {
        let shown = picture(&mut state(), MONOCHROME, 40, 24);
        let full: Vec<_> = shown.lines().filter(|line| line.chars().count() == 40).collect();
        assert!(full.len() > 5 && full.iter().all(|line| line.ends_with('…')), "{shown}");
    }

    #[test]
    fn color_is_decoration_and_ascii_is_ascii() {
        let mut state = state();
        let plain = picture(&mut state, MONOCHROME, 100, 30);
        for palette in [Palette::Ansi, Palette::Truecolor] {
            assert_eq!(picture(&mut state, Theme::of(palette, false), 100, 30), plain);
        }
        assert!(picture(&mut state, Theme::of(Palette::Monochrome, true), 100, 30).is_ascii());
        let colors = buffer(&mut state, MONOCHROME, 100, 30).content;
        assert!(colors.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    }

    #[test]
    fn the_current_tab_is_visible() {
        let mut state = state();
        state.tab = 5;
        assert!(picture(&mut state, MONOCHROME, 20, 15).lines().next().unwrap().contains(" 6 memory"));
    }

    #[test]
    fn scrolling_ends_with_the_page() {
        let mut state = state();
        state.scroll = 1000;
        picture(&mut state, MONOCHROME, 80, 12);
        assert!(state.scroll > 0 && state.scroll < state.page.lines.len());
        picture(&mut state, MONOCHROME, 80, 60);
        assert_eq!(state.scroll, 0);
    }
}
