//! The layers: the type each computes in, and the variance of its gradient, which may move a block into FP8 and out of
//! it.

use super::charts::{AxisUnit, Chart};
use super::scene::Scene;
use crate::precision::{BlockRanges, PrecisionUnit};
use crate::telemetry::{Bucket, RunState};
use crate::ui::{Canvas, Role, extent, power_range};

/// Columns of name, type and newest variance, left of the ranges.
const LABELS: u16 = 26;

/// Draws the third tab's layers: one row each, with the range of its variance over the run on a common axis.
pub(super) fn draw(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let thresholds = run.fp8_thresholds();
    let legend = thresholds.as_ref().map_or_else(String::new, |(blocks, at)| {
        let unit = units(run).into_iter().find(|unit| is_among(blocks, *unit));
        unit.map_or_else(String::new, |unit| format!("   ┊ {unit}: {}", describe_thresholds(*at)))
    });
    let mut inner = canvas.frame(&[("Layers, gradient variance", Role::Title), (&legend, Role::Dim)]);
    inner.text(1, 0, &format!("{:<7}{:<6}{:<10}├ min  ● current  ┤ max", "layer", "type", "variance"), Role::Dim);
    let measured = &run.tensors.variances;
    let units = units(run);
    let axis = axis(run, inner.width());
    let rows = inner.height().saturating_sub(if axis.is_some() { 3 } else { 1 });
    for (y, unit) in (1..=rows).zip(&units) {
        let name = unit.to_string();
        inner.text(1, y, &name, Role::Text);
        let role = if run.fallback.contains_key(&name) { Role::Subnormal } else { Role::Text };
        inner.text(8, y, &run.computes_in(&name), role);
        let (Some((newest, history)), Some(axis)) = (measured.get(unit), &axis) else { continue };
        inner.text(14, y, &format!("{newest:.2e}"), Role::Text);
        for threshold in thresholds.iter().flat_map(|(_, at)| at) {
            inner.glyph(axis.column(threshold.log2()), y, '┊', Role::Subnormal);
        }
        let Some((low, high)) = extent(history.buckets().iter().flat_map(Bucket::ends)) else { continue };
        let (from, to) = (axis.column(low), axis.column(high));
        (from..=to).for_each(|column| inner.glyph(column, y, '─', Role::Train));
        inner.glyph(from, y, '├', Role::Train);
        inner.glyph(to, y, '┤', Role::Train);
        inner.glyph(axis.column(newest.log2()).clamp(from, to), y, '●', Role::Train);
    }
    let y = 1 + rows.min(units.len() as u16);
    let nothing = "no variance was recorded: enable it with `--set telemetry.grad_variance_every=20`";
    match axis {
        Some(axis) => axis.draw(&mut inner, y),
        None => drop(inner.text(1, y + 1, nothing, Role::Dim)),
    }
}

/// The model's units, blocks first.
fn units(run: &RunState) -> Vec<PrecisionUnit> {
    let of_tensors = run.tensors.rows.iter().map(|row| PrecisionUnit::of(&row.name));
    let mut units: Vec<_> = of_tensors.chain(run.tensors.variances.keys().copied()).collect();
    units.sort_unstable();
    units.dedup();
    units
}

/// The columns of log2 of variances.
struct VarianceAxis {
    range: (f64, f64),
    width: u16,
}

fn is_among(blocks: &BlockRanges, unit: PrecisionUnit) -> bool {
    matches!(unit, PrecisionUnit::Block(block) if blocks.contains(block))
}

/// The axis of all variances and the threshold; `None` if nothing was measured.
fn axis(run: &RunState, width: u16) -> Option<VarianceAxis> {
    let histories = run.tensors.variances.values().flat_map(|(_, history)| history.buckets());
    let (mut low, mut high) = extent(histories.flat_map(Bucket::ends))?;
    for threshold in run.fp8_thresholds().iter().flat_map(|(_, at)| at) {
        low = low.min(threshold.log2());
        high = high.max(threshold.log2());
    }
    Some(VarianceAxis { range: power_range((low, high)), width: width.saturating_sub(LABELS + 2).max(2) })
}

impl VarianceAxis {
    fn column(&self, log2: f64) -> u16 {
        let share = ((log2 - self.range.0) / (self.range.1 - self.range.0)).clamp(0.0, 1.0);
        LABELS + (share * f64::from(self.width - 1)).round() as u16
    }

    fn draw(&self, canvas: &mut Canvas, y: u16) {
        canvas.text(LABELS, y, &"─".repeat(self.width.into()), Role::Dim);
        for at in [self.range.0, f64::midpoint(self.range.0, self.range.1), self.range.1] {
            canvas.glyph(self.column(at), y, '┴', Role::Dim);
            canvas.text_before(self.column(at) + 2, y + 1, &format!("2^{at:.0}"), Role::Dim);
        }
    }
}

/// Whether the variance of a tensor's layer was ever measured.
pub(super) fn is_measured(run: &RunState, tensor: &str) -> bool {
    let variances = run.tensors.variances.get(&PrecisionUnit::of(tensor));
    variances.is_some_and(|(_, history)| !history.is_empty())
}

/// Draws the variance of a tensor's layer over the run, with the lines at which a block enters FP8 and leaves it.
pub(super) fn draw_history(scene: &Scene, tensor: &str, canvas: &mut Canvas) {
    let run = scene.run();
    let unit = PrecisionUnit::of(tensor);
    let Some((newest, series)) = run.tensors.variances.get(&unit) else { return };
    let Some((low, high)) = extent(series.buckets().iter().flat_map(Bucket::ends)) else { return };
    let thresholds = run.fp8_thresholds().filter(|(blocks, _)| is_among(blocks, unit)).map(|(_, at)| at);
    let line = thresholds.map_or_else(String::new, |at| format!("   ┄ {}", describe_thresholds(at)));
    canvas.text(1, 0, &format!("gradient variance of {unit}, current {newest:.1e}{line}"), Role::Dim);
    let width = canvas.width();
    let height = canvas.height().saturating_sub(1);
    let limits: Vec<f64> = thresholds.into_iter().flatten().map(f64::log2).collect();
    let (low, high) = limits.iter().fold((low, high), |(low, high), limit| (low.min(*limit), high.max(*limit)));
    let chart = Chart::new(scene, power_range((low, high)), AxisUnit::Power);
    chart.draw(&mut canvas.part(0, 1, width, height), |plot| {
        for limit in &limits {
            chart.limit(plot, *limit);
        }
        let mean = |bucket: &Bucket| bucket.mean().unwrap_or(bucket.min);
        chart.history(plot, series, scene.charts.first_step(run), mean);
    });
}

/// The thresholds at which a block enters and leaves FP8, as text.
fn describe_thresholds([enters, leaves]: [f64; 2]) -> String {
    format!("FP8 up to {enters:.1e}, out above {leaves:.1e}")
}
