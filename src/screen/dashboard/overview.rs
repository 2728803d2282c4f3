//! The first tab: charts, gradients, overflows and tensors, as many as fit, or one of them zoomed.

use super::app::Tab;
use super::keys::Action;
use super::layout::{self, Size};
use super::scene::Scene;
use super::{charts, precision, tensors};
use crate::screen::words;
use crate::telemetry::OverflowRow;
use crate::ui::{Canvas, Role, format};
use ratatui::layout::{Position, Rect};

/// The panels, in the order that zooming visits them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Panel {
    Loss,
    Scale,
    Ruler,
    Overflows,
    Tensors,
}

const PANELS: [Panel; 5] = [Panel::Loss, Panel::Scale, Panel::Ruler, Panel::Overflows, Panel::Tensors];

#[derive(Debug, Default)]
pub(super) struct Overview {
    /// The panel that fills the tab.
    pub(super) zoom: Option<Panel>,
}

impl Overview {
    /// The panels shown in an area, each with its part of it.
    fn panels(&self, (width, height): (u16, u16)) -> Vec<(Panel, Rect)> {
        let body = Rect::new(0, 0, width, height);
        match self.zoom {
            Some(panel) => vec![(panel, body)],
            None => PANELS.into_iter().zip(layout::overview(body, Size::around(body))).collect(),
        }
    }
}

impl Tab for Overview {
    fn draw(&self, scene: &Scene, canvas: &mut Canvas) {
        for (panel, area) in self.panels((canvas.width(), canvas.height())) {
            if area.is_empty() {
                continue;
            }
            let mut canvas = canvas.part(area.x, area.y, area.width, area.height);
            match panel {
                Panel::Loss => charts::draw_loss(scene, &mut canvas),
                Panel::Scale => charts::draw_second(scene, &mut canvas),
                Panel::Ruler => precision::draw_ruler(scene, &mut canvas),
                Panel::Overflows => draw_overflows(scene, &mut canvas),
                Panel::Tensors => tensors::draw_short(scene, &mut canvas),
            }
        }
    }

    fn act(&mut self, _scene: &mut Scene, action: Action, shown: bool) {
        if action == Action::Zoom && shown {
            let next = self.zoom.map_or(0, |panel| panel as usize + 1);
            self.zoom = PANELS.get(next).copied();
        }
    }

    fn clicked(&mut self, scene: &mut Scene, size: (u16, u16), at: Position) -> Option<usize> {
        let (panel, area) = self.panels(size).into_iter().find(|(_, area)| area.contains(at))?;
        if panel == Panel::Tensors {
            return at.y.checked_sub(area.y + 2).map(usize::from);
        }
        let step = charts::step_at(scene, panel, area.width, at.x - area.x);
        scene.charts.cursor = step.or(scene.charts.cursor);
        None
    }

    fn close(&mut self) -> bool {
        self.zoom.take().is_some()
    }

    fn leave(&mut self) {
        self.zoom = None;
    }
}

/// Draws the skipped steps, newest first: the new scale and the tensors that overflowed. If the overflow was traced, an
/// arrow marks the pass it began in, forward or backward, followed by the layer. The title names the layers in
/// fallback.
fn draw_overflows(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let (skipped, steps) = (run.step.skipped, run.step.step);
    let wide = canvas.width() >= 40;
    let title = if wide {
        format!("Overflows {skipped} of {steps} steps ({})", format::percent(skipped, steps))
    } else {
        format!("Overflows {skipped}")
    };
    let fallback = run.in_fallback();
    let gap = if fallback.is_empty() { "" } else { "  " };
    let mut inner = canvas.frame(&[(&title, Role::Title), (gap, Role::Text), (&fallback, Role::Subnormal)]);
    if run.overflows.is_empty() {
        inner.text(1, 0, if skipped == 0 { "none" } else { "before this log" }, Role::Dim);
    }
    let digits = run.overflows.back().map_or(0, |row| row.step.to_string().len().max(4));
    for (y, row) in (0..inner.height()).zip(run.overflows.iter().rev()) {
        let x = inner.text(0, y, "✕", Role::Overflow);
        let x = inner.text(x + 1, y, &format!("{:>digits$} ", row.step), Role::Text);
        let x = inner.text(x, y, &words::new_scale(row.scale, wide), Role::Overflow);
        draw_names(row, &mut inner, x + 1 + u16::from(wide), y);
    }
}

/// Draws where an overflow began, if that is known, then the tensors that were not finite, worst first, as far as they
/// fit, and the number of the others.
fn draw_names(row: &OverflowRow, canvas: &mut Canvas, x: u16, y: u16) {
    let room = usize::from(canvas.width().saturating_sub(x));
    let mut text = row.origin.as_ref().map_or_else(String::new, words::beginning);
    let mut named = 0;
    for name in &row.tensors {
        // In a narrow panel, omit the suffix of weights.
        let name = if room < 24 { name.trim_end_matches(".weight") } else { name };
        if !text.is_empty() && text.chars().count() + 2 + name.len() + " +000".len() > room {
            break;
        }
        let separator = if named > 0 { ", " } else { ": " };
        text = if text.is_empty() { name.to_owned() } else { text + separator + name };
        named += 1;
    }
    let more = row.more + row.tensors.len() - named;
    let text = if text.is_empty() { "-" } else { &text };
    // The number of the others takes precedence over the end of a long name.
    let more = if more > 0 { format!(" +{more}") } else { String::new() };
    let room = canvas.width().saturating_sub(more.len() as u16);
    let x = canvas.part(0, y, room, 1).shortened(x, 0, text, Role::Text);
    canvas.text(x, y, &more, Role::Dim);
}
