//! The list of events as text: a glyph, a role and a line for each event.

use super::plain::announcement;
use crate::telemetry::{Event, EventRow, Overflow, ScaleCause};
use crate::ui::{
    Role,
    format::{loss, magnitude, scale},
};

/// The glyph of an event, and its role.
pub(super) fn glyph(event: &Event) -> (char, Role) {
    match event {
        Event::Step(step) if step.scale.cause == ScaleCause::Lowered => ('▾', Role::Good),
        Event::Step(_) => ('▴', Role::Good),
        Event::Started(_) | Event::Resumed { .. } => ('▶', Role::Good),
        Event::Overflow(_) | Event::Diverged(_) => ('✕', Role::Overflow),
        Event::Eval(_) => ('◆', Role::Validation),
        Event::Sample(_) | Event::GradVariance(_) | Event::GradMax(_) | Event::Throughput(_) | Event::Phase { .. } => {
            ('∙', Role::Text)
        }
        Event::Fp32Probe(_) | Event::UnderflowOnset(_) => ('▾', Role::Subnormal),
        Event::CheckpointSaved(_) => ('●', Role::Good),
        Event::Paused { .. } => ('‖', Role::Subnormal),
        Event::Warning(_) | Event::DtypeChange(_) => ('▴', Role::Subnormal),
        Event::Finished(_) => ('■', Role::Good),
    }
}

/// The event on one line.
pub(super) fn text(row: &EventRow) -> String {
    let text = match &row.event {
        Event::Step(step) => format!("scale {}→{}", scale(step.scale.from), scale(step.scale.to)),
        Event::Started(started) => match started.resumed_from {
            Some(step) => format!("resumed from step {step}: {}", started.program),
            None => format!("started {}: {} on {}", started.model, started.program, started.device),
        },
        Event::Overflow(overflow) => overflow_text(overflow, row.more),
        Event::UnderflowOnset(touched) => format!("first at 2^-24, FP16's least: {}", touched.tensors.join(", ")),
        other => announcement(other).unwrap_or_default(),
    };
    // The row has a column for the step.
    text.replacen(&format!(" step={}", row.step), "", 1)
}

/// A skipped step. Its tensors come last, because there may be many; a filter finds them by name.
fn overflow_text(overflow: &Overflow, more: usize) -> String {
    let mut names: Vec<_> = overflow
        .tensors
        .iter()
        .map(|tensor| {
            let counts = [(tensor.stats.inf, "inf"), (tensor.stats.nan, "NaN")].into_iter().filter(|(n, _)| *n > 0);
            let counts: Vec<_> = counts.map(|(n, what)| format!("{n} {what}")).collect();
            format!("{} ({})", tensor.name, counts.join(", "))
        })
        .collect();
    if more > 0 {
        names.push(format!("+{more}"));
    }
    let change = match overflow.scale.cause {
        ScaleCause::AtMinScale => format!("{} is the minimum", scale(overflow.scale.to)),
        _ => format!("{}→{}", scale(overflow.scale.from), scale(overflow.scale.to)),
    };
    let began = overflow
        .first_nonfinite
        .as_ref()
        .map_or_else(String::new, |origin| format!(", {} at {} ({})", origin.pass, origin.layer, origin.tensor));
    let (names, loss) = (names.join(", "), loss(f64::from(overflow.loss)));
    format!("overflow {change}, loss {loss}{began}: {names}; largest finite {}", magnitude(Some(overflow.max_abs)))
}
