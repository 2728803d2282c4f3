//! The skipped steps, newest first: the new scale and the tensors that overflowed. If the overflow was traced, an arrow
//! marks the pass it began in, forward or backward, followed by the layer. The title names the layers in fallback.

use crate::screen::dashboard::state::ViewModel;
use crate::telemetry::OverflowRow;
use crate::telemetry::{Pass, ScaleCause};
use crate::ui::{Pad, Role, format};

/// Draws the panel.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let run = view.run();
    let (skipped, steps) = (run.step.skipped, run.step.step);
    let wide = pad.width() >= 40;
    let title = if wide {
        format!("Overflows {skipped} of {steps} steps ({})", format::percent(skipped, steps))
    } else {
        format!("Overflows {skipped}")
    };
    let fallback = run.in_fallback();
    let gap = if fallback.is_empty() { "" } else { "  " };
    let mut inner = pad.frame(&[(&title, Role::Title), (gap, Role::Text), (&fallback, Role::Subnormal)]);
    if run.overflows.is_empty() {
        inner.text(1, 0, if skipped == 0 { "none" } else { "before this log" }, Role::Dim);
    }
    let digits = run.overflows.back().map_or(0, |row| row.step.to_string().len().max(4));
    for (y, row) in (0..inner.height()).zip(run.overflows.iter().rev()) {
        let x = inner.text(0, y, "✕", Role::Overflow);
        let x = inner.text(x + 1, y, &format!("{:>digits$} ", row.step), Role::Text);
        let x = inner.text(x, y, &change(row, wide), Role::Overflow);
        names(row, &mut inner, x + 1 + u16::from(wide), y);
    }
}

/// Where it began, if that is known, then the tensors that were not finite, worst first, as far as they fit, and the
/// number of the others.
fn names(row: &OverflowRow, pad: &mut Pad, x: u16, y: u16) {
    let room = usize::from(pad.width().saturating_sub(x));
    let mut text = row.origin.as_ref().map_or_else(String::new, |origin| match origin.pass {
        Pass::Forward => format!("→ {}", origin.layer),
        Pass::Backward => format!("← {}", origin.layer),
    });
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
    let room = pad.width().saturating_sub(more.len() as u16);
    let x = pad.part(0, y, room, 1).shortened(x, 0, text, Role::Text);
    pad.text(x, y, &more, Role::Dim);
}

/// `2^16→2^15`, or `→2^15` in a narrow panel.
fn change(row: &OverflowRow, wide: bool) -> String {
    let (from, to) = (format::scale(row.scale.from), format::scale(row.scale.to));
    match row.scale.cause {
        ScaleCause::AtMinScale => format!("{to} floor"),
        ScaleCause::Held => format!("{to} held"),
        _ if wide => format!("{from}→{to}"),
        _ => format!("→{to}"),
    }
}
