//! The mouse: clicks select a tab, a point of a chart, a tensor or an event; the wheel scrolls lists.

use super::layout::{Areas, Overview, Size};
use super::panels::chart::step_at;
use super::panels::{events, header, tensors};
use super::state::{Dialog, EVENTS, Panel, TENSORS, ViewModel, open_event, scroll, show_tab};
use crate::telemetry::Command;
use ratatui::crossterm::event::{MouseButton, MouseEvent, MouseEventKind};
use ratatui::layout::{Position, Rect};

/// Rows scrolled by one notch of the wheel.
const NOTCH: isize = 3;

/// Handles a mouse event. It never sends commands to training, because a stray click must not cost anything.
pub(super) fn used(view: &mut ViewModel, mouse: MouseEvent) -> Option<Command> {
    match mouse.kind {
        MouseEventKind::ScrollDown => wheel(view, NOTCH),
        MouseEventKind::ScrollUp => wheel(view, -NOTCH),
        MouseEventKind::Down(MouseButton::Left) => clicked(view, Position::new(mouse.column, mouse.row)),
        // Dragging moves the cursor.
        MouseEventKind::Drag(MouseButton::Left) if view.cursor.is_some() => {
            clicked(view, Position::new(mouse.column, mouse.row));
        }
        _ => {}
    }
    None
}

fn wheel(view: &mut ViewModel, by: isize) {
    match view.dialog {
        Some(Dialog::Help) => view.help_top = view.help_top.saturating_add_signed(by.signum() as i16).min(40),
        Some(_) => {}
        // The list of events is newest last.
        None if view.tab == EVENTS && view.event.is_none() => scroll(view, -by),
        None if view.event.is_some() => view.event_top = view.event_top.saturating_add_signed(by as i16),
        None => scroll(view, by),
    }
}

fn clicked(view: &mut ViewModel, at: Position) {
    if view.dialog == Some(Dialog::Help) {
        view.dialog = None;
        return;
    }
    let area = Rect::new(0, 0, view.size.0, view.size.1);
    let (areas, size) = (Areas::of(area), Size::of(area));
    if view.dialog == Some(Dialog::Quit) || matches!(size, Size::Minimal | Size::Tiny) {
        return;
    }
    if areas.header.contains(at) {
        if let Some(tab) = header::tab_at(view, areas.header.width, at.x) {
            show_tab(view, tab);
        }
    } else if areas.body.contains(at) {
        match view.tab {
            0 => overview(view, areas.body, size, at),
            TENSORS if view.detail.is_none() && !view.layers => {
                if let Some(row) = tensors::row_at(view, areas.body, at.y) {
                    let again = view.cursors[TENSORS] == row;
                    view.cursors[TENSORS] = row;
                    if again {
                        view.detail = view.chosen_tensor().map(|row| row.name.clone());
                    }
                }
            }
            EVENTS if view.event.is_none() => {
                if let Some(row) = events::row_at(view, areas.body, at.y) {
                    let again = view.cursors[EVENTS] == row;
                    view.cursors[EVENTS] = row;
                    if again {
                        open_event(view);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Handles a click on the first tab: moves the charts' cursor, or opens the tensor that was clicked.
fn overview(view: &mut ViewModel, body: Rect, size: Size, at: Position) {
    let panels = Overview::of(body, size);
    let panels = match view.zoom {
        None => [(panels.loss, Panel::Loss), (panels.scale, Panel::Scale), (panels.tensors, Panel::Tensors)],
        Some(zoomed) => [(body, zoomed); 3],
    };
    let Some((area, panel)) = panels.into_iter().find(|(area, _)| area.contains(at)) else { return };
    if panel == Panel::Tensors {
        let row = at.y.checked_sub(area.y + 2).map(usize::from);
        let name = row.and_then(|row| view.tensors().get(row).map(|row| row.name.clone()));
        if name.is_some() {
            show_tab(view, TENSORS);
            view.cursors[TENSORS] = row.unwrap_or(0);
            (view.layers, view.detail) = (false, name);
        }
    } else if let Some(step) = step_at(view, panel, area, at.x) {
        view.cursor = Some(step);
    }
}
