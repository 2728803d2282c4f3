//! The layers: the type each computes in, and the variance of its gradient, which may move a block into FP8 and out of it.

use super::chart::{first_step, x_label, x_of, x_range};
use super::tensors::{dotted, edge, extreme};
use crate::precision::PrecisionUnit;
use crate::screen::dashboard::state::ViewModel;
use crate::telemetry::{Bucket, RunState};
use crate::ui::{Axes, Pad, Role};

/// Columns of name, type and newest variance, left of the ranges.
const LABELS: u16 = 26;

/// Draws the third tab's layers: one row each, with the range of its variance over the run on a common axis.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let run = view.run();
    let thresholds = run.fp8_thresholds();
    let legend = thresholds.map_or_else(String::new, |(unit, at)| format!("   ┊ {unit}: {}", in_words(at)));
    let mut inner = pad.frame(&[("Layers, gradient variance", Role::Title), (&legend, Role::Dim)]);
    inner.text(1, 0, &format!("{:<7}{:<6}{:<10}├ least  ● now  ┤ most", "layer", "type", "variance"), Role::Dim);
    let measured = &run.tensors.variances;
    let units = units(run);
    let axis = axis(run, inner.width());
    let rows = inner.height().saturating_sub(if axis.is_some() { 3 } else { 1 });
    for (y, unit) in (1..=rows).zip(&units) {
        let name = unit.to_string();
        inner.text(1, y, &name, Role::Text);
        let dtype = run.computes_in(&name);
        let role = if run.fallback.contains_key(&name) { Role::Subnormal } else { Role::Text };
        inner.text(8, y, &dtype, role);
        let (Some((newest, history)), Some(axis)) = (measured.get(unit), &axis) else { continue };
        inner.text(14, y, &format!("{newest:.2e}"), Role::Text);
        for threshold in thresholds.iter().flat_map(|(_, at)| at) {
            inner.glyph(axis.column(threshold.log2()), y, '┊', Role::Subnormal);
        }
        if history.is_empty() {
            continue;
        }
        let (low, high) = extreme(history);
        let (from, to) = (axis.column(low), axis.column(high));
        (from..=to).for_each(|column| inner.glyph(column, y, '─', Role::Train));
        inner.glyph(from, y, '├', Role::Train);
        inner.glyph(to, y, '┤', Role::Train);
        inner.glyph(axis.column(newest.log2()).clamp(from, to), y, '●', Role::Train);
    }
    let y = 1 + rows.min(units.len() as u16);
    match axis {
        Some(axis) => axis.draw(&mut inner, y),
        None => drop(inner.text(1, y + 1, nothing(), Role::Dim)),
    }
}

/// Why there is no variance.
fn nothing() -> &'static str {
    "no variance is measured: `--set telemetry.variance_every=20` records it"
}

/// The model's units, blocks first.
fn units(run: &RunState) -> Vec<PrecisionUnit> {
    let of_tensors = run.tensors.rows.iter().map(|row| PrecisionUnit::of(&row.name));
    let mut units: Vec<_> = of_tensors.chain(run.tensors.variances.keys().copied()).collect();
    units.sort_unstable();
    units.dedup();
    units
}

/// Which column stands for which log2 of a variance.
struct Axis {
    range: (f64, f64),
    width: u16,
}

/// The axis of all variances and the threshold; `None` where nothing was measured.
fn axis(run: &RunState, width: u16) -> Option<Axis> {
    let histories = run.tensors.variances.values().filter(|(_, history)| !history.is_empty());
    let (mut low, mut high) =
        histories.map(|(_, history)| extreme(history)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
    for threshold in run.fp8_thresholds().iter().flat_map(|(_, at)| at) {
        (low, high) = (low.min(threshold.log2()), high.max(threshold.log2()));
    }
    Some(Axis { range: (low.floor() - 1.0, high.ceil() + 1.0), width: width.saturating_sub(LABELS + 2).max(2) })
}

impl Axis {
    fn column(&self, log2: f64) -> u16 {
        let share = ((log2 - self.range.0) / (self.range.1 - self.range.0)).clamp(0.0, 1.0);
        LABELS + (share * f64::from(self.width - 1)).round() as u16
    }

    fn draw(&self, pad: &mut Pad, y: u16) {
        pad.text(LABELS, y, &"─".repeat(self.width.into()), Role::Dim);
        let middle = f64::midpoint(self.range.0, self.range.1).round();
        for at in [self.range.0, middle, self.range.1] {
            pad.glyph(self.column(at), y, '┴', Role::Dim);
            pad.text_before(self.column(at) + 2, y + 1, &format!("2^{at:.0}"), Role::Dim);
        }
    }
}

/// Whether the variance of a tensor's layer was ever measured.
pub(super) fn is_measured(run: &RunState, tensor: &str) -> bool {
    run.tensors.variances.get(&PrecisionUnit::of(tensor)).is_some_and(|(_, history)| !history.is_empty())
}

/// Draws the variance of a tensor's layer over the run, with the line at which a block enters FP8.
pub(super) fn history(view: &ViewModel, tensor: &str, pad: &mut Pad) {
    let (run, unit) = (view.run(), PrecisionUnit::of(tensor));
    let Some((newest, series)) = run.tensors.variances.get(&unit) else { return };
    let thresholds = run.fp8_thresholds().filter(|(block, _)| *block == unit).map(|(_, at)| at);
    let line = thresholds.map_or_else(String::new, |at| format!("   ┄ {}", in_words(at)));
    pad.text(1, 0, &format!("gradient variance of {unit}, now {newest:.1e}{line}"), Role::Dim);
    let (width, height) = (pad.width(), pad.height().saturating_sub(1));
    let limits: Vec<f64> = thresholds.into_iter().flatten().map(f64::log2).collect();
    let (low, high) = limits.iter().fold(extreme(series), |(low, high), limit| (low.min(*limit), high.max(*limit)));
    let (x, y) = (x_range(view), (low.floor(), high.ceil() + 1.0));
    let y_label = |y: f64| format!("2^{y:.0}");
    let axes = Axes { x, y, x_label: &x_label(view.time_axis), y_label: &y_label };
    axes.draw(&mut pad.part(0, 1, width, height), |plot| {
        for limit in &limits {
            dotted(plot, x, *limit);
        }
        let mean = |bucket: &Bucket| (x_of(bucket, view.time_axis), bucket.mean().unwrap_or(bucket.min));
        edge(plot, series, first_step(view), mean);
    });
}

/// Where a block enters FP8 and where it leaves it.
fn in_words([enters, leaves]: [f64; 2]) -> String {
    format!("FP8 up to {enters:.1e}, out above {leaves:.1e}")
}
