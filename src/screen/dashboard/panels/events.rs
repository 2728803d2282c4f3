//! Everything that happened but plain steps, in time order, the newest at the bottom.

use crate::screen::dashboard::format;
use crate::screen::dashboard::pad::Pad;
use crate::screen::dashboard::state::{EVENTS, ViewModel};
use crate::screen::dashboard::theme::Role;

/// Draws the fourth tab.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let rows = view.events();
    // Below are newer ones: how many, so that nobody waits for news that are off the screen.
    let hidden = view.cursors[EVENTS].min(rows.len().saturating_sub(1));
    let below = if hidden > 0 { format!("   {hidden} newer below") } else { String::new() };
    let title = format!("Events {}{}{below}", rows.len(), view.filter_label(EVENTS));
    let mut inner = pad.frame(&[(&title, Role::Title)]);
    if rows.is_empty() {
        inner.text(1, 0, "none", Role::Dim);
    }
    let shown: Vec<_> = rows.iter().skip(hidden).take(inner.height().into()).collect();
    for (y, row) in (0..).zip(shown.iter().rev()) {
        let x = inner.text(0, y, &format::clock(row.s), Role::Dim);
        let x = inner.text(x + 1, y, &format!("{:>7} ", row.step), Role::Dim);
        inner.glyph(x, y, row.glyph, row.role);
        inner.text(x + 2, y, &format::printable(&row.text), Role::Text);
    }
}
