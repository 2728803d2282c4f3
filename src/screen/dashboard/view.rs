//! Draws a frame from the state at a size.

use super::keys::{Action, KEYS};
use super::layout::{Areas, Overview, Size, precision};
use super::panels::{
    curve, dialogs, events, gradients, header, layers, loss, overflows, readout, samples, status, tensors, what_if,
};
use super::state::{Dialog, Panel, ViewModel};
use crate::screen::terminal::Binding;
use crate::screen::terminal::keys::{self, GAPS};
use crate::ui::{Pad, Role, Theme, to_ascii};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Color;

/// Draws the dashboard over the whole buffer.
pub(super) fn draw(view: &ViewModel, theme: Theme, buffer: &mut Buffer) {
    let theme = view.look.map_or(theme, |look| theme.on(look));
    let area = buffer.area;
    let size = Size::of(area);
    let areas = Areas::of(area);
    match size {
        Size::Tiny => tiny(view, &mut Pad::new(buffer, area, theme)),
        Size::Minimal => minimal(view, theme, areas, buffer),
        Size::Full | Size::Compact | Size::Small => {
            header::draw(view, &mut Pad::new(buffer, areas.header, theme));
            body(view, theme, areas.body, size, buffer);
            status::draw(view, &mut Pad::new(buffer, areas.status, theme));
            footer(view, &mut Pad::new(buffer, areas.footer, theme));
            dialogs::draw(view, &mut Pad::new(buffer, area, theme));
        }
    }
    if let (Some(ink), Some(paper)) = (theme.base().fg, theme.base().bg) {
        for cell in &mut buffer.content {
            cell.fg = if cell.fg == Color::Reset { ink } else { cell.fg };
            cell.bg = if cell.bg == Color::Reset { paper } else { cell.bg };
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
            pad(overview.scale, &curve::draw);
            pad(overview.ruler, &gradients::draw);
            pad(overview.overflows, &overflows::draw);
            pad(overview.tensors, &tensors::draw_short);
        }
        (0, Some(Panel::Loss)) => pad(area, &loss::draw),
        (0, Some(Panel::Scale)) => pad(area, &curve::draw),
        (0, Some(Panel::Ruler)) => pad(area, &gradients::draw),
        (0, Some(Panel::Overflows)) => pad(area, &overflows::draw),
        (0, Some(Panel::Tensors)) => pad(area, &tensors::draw_short),
        (1, _) => {
            let (ruler, table) = precision(area);
            pad(ruler, &gradients::draw_large);
            pad(table, &what_if::draw);
        }
        (2, _) if view.layers => pad(area, &layers::draw),
        (2, _) => pad(area, &tensors::draw),
        (3, _) => pad(area, &events::draw),
        _ => pad(area, &samples::draw),
    }
}

fn footer(view: &ViewModel, pad: &mut Pad) {
    if let (Some(step), 0) = (view.cursor, view.tab) {
        readout::draw(view, step, pad);
        return;
    }
    let mut x = 1;
    if let Some(activity) = &view.activity {
        x = pad.text(x, 0, &format!("{activity}…"), Role::Subnormal) + 3;
    }
    if let Some(notice) = view.notice {
        x = pad.text(x, 0, &format!("{notice}…"), Role::Subnormal) + 3;
    }
    let room = usize::from(pad.width().saturating_sub(x));
    for (key, word) in keys::footer(KEYS, room, |binding| shown(view, binding)) {
        x = pad.text(x, 0, key, Role::Title) + GAPS.0;
        x = pad.text(x, 0, word, Role::Dim) + GAPS.1;
    }
}

/// Whether the footer shows a key: it must work in this tab, and commands to training and to a replay only where they apply.
fn shown(view: &ViewModel, binding: &Binding<Action>) -> bool {
    let replaying = view.playback.is_some();
    let pauses = binding.does(|action| action == Action::Pause) && replaying;
    binding.is_for(view.tab)
        && (view.can_command() || pauses || !binding.does(Action::commands))
        && (replaying || !binding.does(Action::plays))
}

fn minimal(view: &ViewModel, theme: Theme, areas: Areas, buffer: &mut Buffer) {
    header::draw_state(view, &mut Pad::new(buffer, areas.header, theme));
    let lines = Rect { y: areas.header.bottom(), height: 3, ..areas.header };
    status::draw(view, &mut Pad::new(buffer, lines, theme));
    footer(view, &mut Pad::new(buffer, areas.footer, theme));
    if view.dialog == Some(Dialog::Quit) {
        let mut pad = Pad::new(buffer, areas.footer, theme);
        let x = pad.text(0, 0, "Leave?  s save+stop  d detach  D discard  Esc", Role::Title);
        pad.text(x, 0, &" ".repeat(areas.footer.width.into()), Role::Text);
    } else {
        dialogs::draw(view, &mut Pad::new(buffer, areas.body.union(areas.status), theme));
    }
}

/// The figures that matter most, as many as fit on each line.
fn tiny(view: &ViewModel, pad: &mut Pad) {
    if view.dialog == Some(Dialog::Quit) {
        for (y, answer) in (0..).zip(["s save+stop", "d detach", "k stop", "Esc back"]) {
            pad.text(0, y, answer, Role::Title);
        }
        return;
    }
    let (mut x, mut y) = (0, 0);
    for (text, role) in status::essentials(view) {
        let columns = text.chars().count() as u16;
        if x > 0 && x + columns > pad.width() {
            (x, y) = (0, y + 1);
        }
        x = pad.text(x, y, &text, role) + 2;
    }
}
