//! A frame: what the state looks like at a size. Draws nothing that is not in the state.

use super::ascii::to_ascii;
use super::format;
use super::keys::{Action, KEYS};
use super::layout::{Areas, Overview, Size, precision};
use super::pad::Pad;
use super::panels::{dialogs, events, gradients, loss, loss_scale, overflows, samples, status, tensors, what_if};
use super::run_data::Phase;
use super::state::{Dialog, Mode, Panel, TABS, ViewModel};
use super::theme::{Role, Theme};
use crate::screen::terminal::Binding;
use crate::screen::terminal::keys::{self, GAPS};
use crate::telemetry::FinishReason;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

/// Draws the dashboard over the whole buffer.
pub(super) fn draw(view: &ViewModel, theme: Theme, buffer: &mut Buffer) {
    let area = buffer.area;
    let size = Size::of(area);
    let areas = Areas::of(area);
    match size {
        Size::TooSmall => too_small(area, &mut Pad::new(buffer, area, theme)),
        Size::Minimal => minimal(view, theme, areas, buffer),
        Size::Full | Size::Compact => {
            header(view, &mut Pad::new(buffer, areas.header, theme));
            body(view, theme, areas.body, size, buffer);
            status::draw(view, &mut Pad::new(buffer, areas.status, theme));
            footer(view, &mut Pad::new(buffer, areas.footer, theme));
            dialogs::draw(view, &mut Pad::new(buffer, area, theme));
        }
    }
    if theme.ascii() {
        to_ascii(buffer);
    }
}

fn body(view: &ViewModel, theme: Theme, area: Rect, size: Size, buffer: &mut Buffer) {
    let mut pad = |area: Rect, draw: &dyn Fn(&ViewModel, &mut Pad)| {
        if !area.is_empty() {
            draw(view, &mut Pad::new(buffer, area, theme));
        }
    };
    match (view.tab, view.zoom) {
        (0, None) => {
            let overview = Overview::of(area, size);
            pad(overview.loss, &loss::draw);
            pad(overview.scale, &loss_scale::draw);
            pad(overview.ruler, &gradients::draw);
            pad(overview.overflows, &overflows::draw);
            pad(overview.tensors, &tensors::draw_short);
        }
        (0, Some(Panel::Loss)) => pad(area, &loss::draw),
        (0, Some(Panel::Scale)) => pad(area, &loss_scale::draw),
        (0, Some(Panel::Ruler)) => pad(area, &gradients::draw),
        (0, Some(Panel::Overflows)) => pad(area, &overflows::draw),
        (0, Some(Panel::Tensors)) => pad(area, &tensors::draw_short),
        (1, _) => {
            let (ruler, table) = precision(area);
            pad(ruler, &gradients::draw_large);
            pad(table, &what_if::draw);
        }
        (2, _) => pad(area, &tensors::draw),
        (3, _) => pad(area, &events::draw),
        _ => pad(area, &samples::draw),
    }
}

fn header(view: &ViewModel, pad: &mut Pad) {
    let (state, role) = phase(view);
    let x = pad.spans(0, 0, &[("finetune ", Role::Title), (&state, role)]);
    let x = frozen(view, pad, x);
    // The chosen tab stands in brackets. Where there is no room for all names, the others keep their numbers.
    let label = |tab: usize, named: bool| match (named || tab == view.tab, tab == view.tab) {
        (_, true) => format!("[{} {}]", tab + 1, TABS[tab]),
        (true, false) => format!(" {} {} ", tab + 1, TABS[tab]),
        (false, false) => format!(" {} ", tab + 1),
    };
    let width = |named: bool| (0..TABS.len()).map(|tab| label(tab, named).len() as u16).sum::<u16>();
    let named = x + width(true) <= pad.width();
    let tabs = pad.width().saturating_sub(width(named));
    if let Some(started) = &view.run().started {
        let policy: Vec<_> = started.policy.split(',').take(2).collect();
        let about = format!("{} · {} · run {}", started.model, policy.join(" "), started.run);
        let room = usize::from(tabs.saturating_sub(x + 4));
        if about.chars().count() <= room {
            pad.text(x + 2, 0, &about, Role::Dim);
        } else if started.model.chars().count() <= room {
            pad.text(x + 2, 0, &started.model, Role::Dim);
        }
    }
    let mut at = tabs.max(x + 1);
    for tab in 0..TABS.len() {
        let role = if tab == view.tab { Role::Title } else { Role::Dim };
        at = pad.text(at, 0, &label(tab, named), role);
    }
}

fn frozen(view: &ViewModel, pad: &mut Pad, x: u16) -> u16 {
    match view.frozen_at() {
        Some(step) => pad.text(x + 1, 0, &format!("view frozen at {step}"), Role::Subnormal),
        None => x,
    }
}

/// What the run is doing, in a glyph and a word.
fn phase(view: &ViewModel) -> (String, Role) {
    let run = view.live();
    let (word, role) = match &run.phase {
        Phase::Waiting => ("∙ waiting", Role::Dim),
        Phase::Running => ("▶ running", Role::Good),
        Phase::Paused => ("‖ paused", Role::Subnormal),
        Phase::Finished(finished) => match finished.reason {
            FinishReason::Done => ("■ done", Role::Good),
            FinishReason::Interrupted => ("■ interrupted", Role::Subnormal),
            FinishReason::Stopped => ("■ stopped", Role::Subnormal),
            FinishReason::Diverged => ("✕ diverged", Role::Overflow),
        },
        Phase::Lost => ("✕ process gone", Role::Overflow),
    };
    if let (Mode::Replaying(speed), Phase::Running) = (view.mode, &run.phase) {
        return (format!("▶ replay ×{speed}"), role);
    }
    // A watched run that says nothing for long may hang; nobody can know, so the time is shown.
    let silent = view.now.saturating_sub(run.last_t) as f64 / 1000.0;
    if view.mode == Mode::Watching && run.phase == Phase::Running && run.last_t > 0 && silent > 30.0 {
        return (format!("{word}, silent for {}", format::ago(silent)), Role::Subnormal);
    }
    (word.to_owned(), role)
}

fn footer(view: &ViewModel, pad: &mut Pad) {
    let mut x = 1;
    if let Some(notice) = view.notice {
        x = pad.text(x, 0, &format!("{notice}…"), Role::Subnormal) + 3;
    }
    let room = usize::from(pad.width().saturating_sub(x));
    for (key, word) in keys::footer(KEYS, room, |binding| shown(view, binding)) {
        x = pad.text(x, 0, key, Role::Title) + GAPS.0;
        x = pad.text(x, 0, word, Role::Dim) + GAPS.1;
    }
}

/// Whether the footer mentions keys: not those for other tabs, nor those for training where nobody listens.
fn shown(view: &ViewModel, binding: &Binding<Action>) -> bool {
    binding.is_for(view.tab) && (view.is_heard() || !binding.does(Action::commands))
}

fn minimal(view: &ViewModel, theme: Theme, areas: Areas, buffer: &mut Buffer) {
    let mut pad = Pad::new(buffer, areas.header, theme);
    let (state, role) = phase(view);
    let x = pad.spans(0, 0, &[("finetune ", Role::Title), (&state, role)]);
    frozen(view, &mut pad, x);
    let lines = Rect { y: areas.header.bottom(), height: 3, ..areas.header };
    status::draw(view, &mut Pad::new(buffer, lines, theme));
    footer(view, &mut Pad::new(buffer, areas.footer, theme));
    if view.dialog == Some(Dialog::Quit) {
        let mut pad = Pad::new(buffer, areas.footer, theme);
        let x = pad.text(0, 0, "Leave?  s save+stop  d detach  k stop  Esc", Role::Title);
        pad.text(x, 0, &" ".repeat(areas.footer.width.into()), Role::Text);
    } else {
        dialogs::draw(view, &mut Pad::new(buffer, areas.body.union(areas.status), theme));
    }
}

/// One sentence, broken anywhere it must be.
fn too_small(area: Rect, pad: &mut Pad) {
    let sentence = format!("{}x{} is too small: 40x6 is the least.", area.width, area.height);
    let letters: Vec<char> = sentence.chars().collect();
    for (y, line) in (0..area.height).zip(letters.chunks(usize::from(area.width).max(1))) {
        pad.text(0, y, &line.iter().collect::<String>(), Role::Text);
    }
}
