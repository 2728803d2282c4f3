//! The skipped steps, newest first: what the scale became, and in which tensors it happened. Where the overflow was
//! traced, an arrow tells the pass it began in, forward or backward, and the name is that of the layer.

use crate::dashboard::format;
use crate::dashboard::pad::Pad;
use crate::dashboard::run_data::OverflowRow;
use crate::dashboard::state::ViewModel;
use crate::dashboard::theme::Role;
use crate::telemetry::{Origin, Pass, ScaleCause};

/// Draws the panel.
pub(in crate::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let run = view.run();
    let (skipped, steps) = (run.step.skipped, run.step.step);
    let wide = pad.width() >= 40;
    let title = if wide {
        format!("Overflows {skipped} of {steps} steps ({})", format::percent(skipped, steps))
    } else {
        format!("Overflows {skipped}")
    };
    let mut inner = pad.frame(&[(&title, Role::Title)]);
    if run.overflows.is_empty() {
        inner.text(1, 0, if skipped == 0 { "none" } else { "before this log" }, Role::Dim);
    }
    let digits = run.overflows.back().map_or(0, |row| row.step.to_string().len().max(4));
    for (y, row) in (0..inner.height()).zip(run.overflows.iter().rev()) {
        let x = inner.text(0, y, "✕", Role::Overflow);
        let x = inner.text(x + 1, y, &format!("{:>digits$} ", row.step), Role::Text);
        let x = inner.text(x, y, &change(row, wide), Role::Overflow);
        let x = inner.text(x + 1 + u16::from(wide), y, &place(row), Role::Text);
        let more = row.more + row.tensors.len().saturating_sub(1);
        if more > 0 {
            // Over the end of a long name rather than not at all: that there are more matters more.
            let more = format!(" +{more}");
            let at = (x + 2).min(inner.width().saturating_sub(more.len() as u16));
            inner.text(at, y, &more, Role::Dim);
        }
    }
}

/// `← h.3.mlp.c_fc`, or the first tensor that was not finite.
fn place(row: &OverflowRow) -> String {
    match &row.origin {
        Some(Origin { pass: Pass::Forward, layer, .. }) => format!("→ {layer}"),
        Some(Origin { pass: Pass::Backward, layer, .. }) => format!("← {layer}"),
        None => row.tensors.first().map_or_else(|| "-".to_owned(), Clone::clone),
    }
}

/// `2^16→2^15`, or where it is short of room `→2^15`.
fn change(row: &OverflowRow, wide: bool) -> String {
    let (from, to) = (format::scale(row.scale.from), format::scale(row.scale.to));
    match row.scale.cause {
        ScaleCause::AtFloor => format!("{to} floor"),
        ScaleCause::Held => format!("{to} held"),
        _ if wide => format!("{from}→{to}"),
        _ => format!("→{to}"),
    }
}
