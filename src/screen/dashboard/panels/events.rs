//! All events except plain steps, in time order, newest last.

use super::event_detail;
use crate::screen::dashboard::event_text;
use crate::screen::dashboard::state::{EVENTS, ViewModel};
use crate::ui::{Pad, Role, format};
use ratatui::layout::Rect;

/// Draws the fourth tab.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    if let Some(row) = &view.event {
        event_detail::draw(row, view.event_top, pad);
        return;
    }
    let rows = view.events();
    let cursor = view.cursors[EVENTS].min(rows.len().saturating_sub(1));
    let hidden = hidden(view, pad.height().saturating_sub(2));
    // Show how many newer events are below the visible rows.
    let below = if hidden > 0 { format!("   {hidden} newer below") } else { String::new() };
    let title = format!("Events {}{}{below}", rows.len(), view.filter_label(EVENTS));
    let mut inner = pad.frame(&[(&title, Role::Title)]);
    if rows.is_empty() {
        inner.text(1, 0, "none", Role::Dim);
    }
    let shown: Vec<_> = rows.iter().enumerate().skip(hidden).take(inner.height().into()).collect();
    for (y, (at, row)) in (0..).zip(shown.into_iter().rev()) {
        let x = inner.text(0, y, &format::clock(row.s), Role::Dim);
        let x = inner.text(x + 1, y, &format!("{:>7} ", row.step), Role::Dim);
        let (glyph, role) = event_text::glyph(&row.event);
        inner.glyph(x, y, glyph, role);
        inner.shortened(x + 2, y, &format::printable(&event_text::text(row)), Role::Text);
        if at == cursor && cursor > 0 {
            inner.highlight(y, Role::Selected);
        }
    }
}

/// The number of newest events hidden below a list of `height` lines: as few as needed to show the one under the cursor.
fn hidden(view: &ViewModel, height: u16) -> usize {
    let rows = view.events().len();
    let cursor = view.cursors[EVENTS].min(rows.saturating_sub(1));
    (cursor + 1).saturating_sub(usize::from(height).max(1))
}

/// The event at a line of the panel `area`, counted from the newest.
pub(in crate::screen::dashboard) fn row_at(view: &ViewModel, area: Rect, line: u16) -> Option<usize> {
    let height = area.height.saturating_sub(2);
    let line = line.checked_sub(area.y + 1).filter(|line| *line < height)?;
    let hidden = hidden(view, height);
    let shown = (view.events().len() - hidden).min(height.into());
    let from_bottom = shown.checked_sub(usize::from(line) + 1)?;
    Some(hidden + from_bottom)
}
