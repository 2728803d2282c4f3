//! The figures of the step at the charts' cursor, on one line.

use crate::screen::dashboard::state::ViewModel;
use crate::telemetry::{Bucket, Curve};
use crate::ui::{Pad, Role, format};

/// Draws the line.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, step: u64, pad: &mut Pad) {
    let mut x = pad.text(1, 0, &format!("┊ step {step}"), Role::Title);
    for (text, role) in figures(view, step) {
        let columns = text.chars().count() as u16;
        if x + 2 + columns > pad.width() {
            break;
        }
        x = pad.text(x + 2, 0, &text, role);
    }
}

/// Each figure at the step, or the last one before it. If a bucket holds several steps: the mean, minimum and maximum.
fn figures(view: &ViewModel, step: u64) -> Vec<(String, Role)> {
    let curves = &view.run().curves;
    let mut figures = Vec::new();
    if let Some(loss) = curves.loss.at(step) {
        let text = match loss.mean() {
            None => "loss NaN".into(),
            Some(mean) if loss.count == 1 => format!("loss {}", format::loss(mean)),
            Some(mean) => format!(
                "loss {} ({} to {}, steps {}-{})",
                format::loss(mean),
                format::loss(loss.min),
                format::loss(loss.max),
                loss.step,
                loss.last_step
            ),
        };
        figures.push((text, if loss.non_finite > 0 { Role::Overflow } else { Role::Train }));
    }
    let mean = |curve: &Curve| curve.at(step).as_ref().and_then(Bucket::mean);
    if let Some(smoothed) = curves.smoothed.get(view.window()).and_then(mean) {
        figures.push((format!("smoothed {}", format::loss(smoothed)), Role::Smooth));
    }
    for (at, other) in view.others.iter().enumerate() {
        let curve = other.run.curves.smoothed.get(view.window()).unwrap_or(&other.run.curves.loss);
        let loss = mean(curve).map_or_else(|| "-".into(), format::loss);
        figures.push((format!("{} {loss}", super::loss::letter(at)), Role::Other(at)));
    }
    let validation = curves.validation.buckets().iter().rev().find(|bucket| bucket.step <= step);
    if let Some((bucket, mean)) = validation.and_then(|bucket| Some((bucket, bucket.mean()?))) {
        figures.push((format!("val {} @ {}", format::loss(mean), bucket.step), Role::Validation));
    }
    if let Some(scale) = curves.scale.at(step).filter(|_| view.run().scales_losses()) {
        figures.push((format!("scale 2^{scale}"), Role::Text));
    }
    let mut other = |name: &str, curve: &Curve, write: fn(f64) -> String| {
        figures.extend(mean(curve).map(|value| (format!("{name} {}", write(value)), Role::Text)));
    };
    other("lr", &curves.lr, format::rate);
    other("|g|", &curves.grad_norm, format::short);
    other("tok/s", &curves.tokens_per_s, format::count);
    other("mem", &curves.memory, |bytes| format::bytes(bytes as u64));
    figures
}
