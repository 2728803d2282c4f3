//! The table "if the loss scale were 2^k": the shares that would flush to zero, be subnormal, or overflow.

use crate::precision::{ExponentHistogram, RangeShares};
use crate::screen::dashboard::state::ViewModel;
use crate::telemetry::{RunState, histogram};
use crate::ui::{Pad, Role, format};

/// Draws the panel.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let run = view.run();
    let mut inner = pad.frame(&[("If the loss scale were", Role::Title)]);
    let Some((true_gradients, source)) = gradients(run, view.can_command()) else {
        inner.text(1, 0, "no gradients yet", Role::Dim);
        return;
    };
    let format = run.grad_format();
    inner.text(1, 0, "scale     flushed to 0   subnormal      normal    overflow", Role::Dim);
    let rows = i32::from(inner.height().saturating_sub(2));
    let now = (run.step.loss_scale.max(f32::MIN_POSITIVE).log2().round()) as i32;
    let shares = |scale: i32| true_gradients.shares_at(scale, format);
    // The largest scale without an overflow.
    let best = (-30..=60).rev().find(|scale| shares(*scale).overflow == 0.0);
    let first = now - rows / 2;
    for (y, scale) in (1..).zip(first..first + rows) {
        let RangeShares { flushed, subnormal, normal, overflow } = shares(scale);
        let x = inner.text(1, y, &format!("2^{scale:<7}"), if scale == now { Role::Title } else { Role::Text });
        let x = inner.text(x, y, &cell(flushed), if flushed > 0.0 { Role::Subnormal } else { Role::Text });
        let x = inner.text(x, y, &cell(subnormal), Role::Text);
        let x = inner.text(x, y, &cell(normal), Role::Text);
        let x = inner.text(x, y, &cell(overflow), if overflow > 0.0 { Role::Overflow } else { Role::Text });
        if scale == now {
            inner.text(x + 2, y, "▸ now", Role::Title);
        } else if Some(scale) == best {
            inner.text(x + 2, y, "● largest without overflow", Role::Good);
        }
    }
    let x = inner.text(1, rows as u16 + 1, &source, Role::Dim);
    if let Some(best) = best.filter(|best| !(first..first + rows).contains(best)) {
        inner.text(x, rows as u16 + 1, &format!("; largest without overflow 2^{best}"), Role::Good);
    }
}

/// A share in percent, right-aligned in twelve columns.
fn cell(share: f64) -> String {
    let parts = 1_000_000_000_000;
    format!("{:>12}", format::percent((share * parts as f64).ceil() as u64, parts))
}

/// The unscaled gradients, from the newest probe if there is one, and a description of their source.
fn gradients(run: &RunState, attached: bool) -> Option<(ExponentHistogram, String)> {
    if let Some(probe) = &run.probe {
        let source = format!("of the FP32 gradients of the probe at step {}", probe.step);
        return Some((histogram(&probe.grads), source));
    }
    let (step, scale, stats) = run.grads.as_ref()?;
    let shift = scale.log2().round() as i32;
    let counts = histogram(stats);
    let unscaled = ExponentHistogram::from_counts(counts.iter().map(|(exponent, count)| (exponent - shift, count)));
    let hint = if attached { "; press p for an FP32 probe, which includes the rest" } else { "" };
    let source = format!("of what {} kept at step {step}{hint}", run.grad_format().name);
    Some((unscaled, source))
}
