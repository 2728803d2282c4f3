//! The second chart: the loss scale as a staircase with a mark at every overflow, or another selected curve.

use super::chart::{Chart, Unit, extent, first_step, x_of, x_range};
use super::loss::letter;
use crate::screen::dashboard::state::{SecondChart, ViewModel};
use crate::telemetry::{Bucket, Curve, RunState};
use crate::ui::{Pad, Plot, Role};

/// Draws the panel.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let mut inner = match view.second_chart {
        SecondChart::Scale => pad.frame(&[
            ("Loss scale (log2)", Role::Title),
            ("  ", Role::Text),
            ("✕", Role::Overflow),
            (" overflow", Role::Text),
        ]),
        other => pad.frame(&[(other.title(), Role::Title)]),
    };
    if view.second_chart == SecondChart::Scale && !view.run().scales_losses() {
        inner.text(1, 0, "off: gradients have FP32's range", Role::Dim);
        return;
    }
    let Some(chart) = chart(view) else {
        inner.text(1, 0, "no step yet", Role::Dim);
        return;
    };
    chart.draw(view, &mut inner, |plot| {
        let others = view.others.iter().enumerate().map(|(at, other)| (&other.run, Role::Other(at), Some(letter(at))));
        for (run, role, mark) in others.chain([(view.run(), Role::Train, None)]) {
            match curve(view.second_chart, run) {
                Some(curve) => line(plot, view, curve, role, mark),
                None => stairs(plot, view, run, chart, role, mark),
            }
        }
    });
}

/// The selected curve; `None` for the loss scale, which is a staircase.
fn curve(chosen: SecondChart, run: &RunState) -> Option<&Curve> {
    let curves = &run.curves;
    match chosen {
        SecondChart::Scale => None,
        SecondChart::Rate => Some(&curves.lr),
        SecondChart::Norm => Some(&curves.grad_norm),
        SecondChart::Speed => Some(&curves.tokens_per_s),
        SecondChart::Memory => Some(&curves.memory),
    }
}

/// The chart's axes; `None` before the first step.
pub(super) fn chart(view: &ViewModel) -> Option<Chart> {
    let first = first_step(view);
    let shown = |run: &RunState| {
        if let Some(curve) = curve(view.second_chart, run) {
            return extent(curve.since(first).iter());
        }
        let points = run.curves.scale.points();
        let from = points.partition_point(|point| point.step <= first).saturating_sub(1);
        let levels = points[from..].iter().map(|point| (point.value, point.value));
        levels.reduce(|(low, high), (level, _)| (low.min(level), high.max(level)))
    };
    let runs = std::iter::once(view.run()).chain(view.others.iter().map(|other| &other.run));
    let (low, high) = runs.filter_map(shown).reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))?;
    let (y, unit) = match view.second_chart {
        SecondChart::Scale => {
            // Integer labels at the bottom, in the middle and at the top.
            let (low, high) = (low.floor() - 1.0, high.ceil() + 1.0);
            ((low, high + (high - low) % 2.0), Unit::Power)
        }
        SecondChart::Rate => ((0.0, high.max(f64::MIN_POSITIVE)), Unit::Rate),
        SecondChart::Norm => (padded(low, high), Unit::Plain),
        SecondChart::Speed => (padded(low, high), Unit::Count),
        SecondChart::Memory => (padded(low, high), Unit::Bytes),
    };
    Some(Chart { x: x_range(view), y, unit, time: view.time_axis })
}

fn padded(low: f64, high: f64) -> (f64, f64) {
    let air = ((high - low) * 0.05).max(high.abs() * 1e-3).max(f64::MIN_POSITIVE);
    ((low - air).max(0.0), high + air)
}

/// Draws the range of each bucket if buckets hold several steps, else the line through them.
fn line(plot: &mut Plot, view: &ViewModel, curve: &Curve, role: Role, mark: Option<char>) {
    let x = |bucket: &Bucket| x_of(bucket, view.time_axis);
    let buckets = curve.since(first_step(view));
    if buckets.len() > plot.resolution() {
        let shown = buckets.iter().filter(|bucket| bucket.count > 0);
        plot.envelope(shown.map(|bucket| (x(bucket), bucket.min, bucket.max)), role);
    } else {
        for pair in buckets.windows(2) {
            if let (Some(from), Some(to)) = (pair[0].mean(), pair[1].mean()) {
                plot.line((x(&pair[0]), from), (x(&pair[1]), to), role);
            }
        }
    }
    for bucket in buckets.iter().filter(|bucket| bucket.non_finite > 0) {
        plot.mark(x(bucket), f64::MAX, '✕', Role::Overflow);
    }
    if let (Some(mark), Some((last, mean))) = (mark, buckets.last().and_then(|last| Some((last, last.mean()?)))) {
        plot.mark(x(last), mean, mark, role);
    }
}

fn stairs(plot: &mut Plot, view: &ViewModel, run: &RunState, chart: Chart, role: Role, mark: Option<char>) {
    let at = |step: u64, seconds: f64| if view.time_axis { seconds } else { step as f64 };
    let end = at(run.step.step, run.last_s).max(chart.x.0);
    let points = run.curves.scale.points();
    let from = points.partition_point(|point| point.step <= first_step(view)).saturating_sub(1);
    let shown = points[from.min(points.len())..].iter();
    plot.stairs(shown.map(|point| (at(point.step, point.seconds).max(chart.x.0), point.value)), end, role);
    let skips = run.curves.skips.buckets().iter().filter(|skip| skip.last_step >= first_step(view));
    for skip in skips.filter(|_| mark.is_none()) {
        let y = if skip.count > 0 { skip.max } else { chart.y.1 };
        plot.mark(at(skip.step, skip.seconds), y, '✕', Role::Overflow);
    }
    if let (Some(mark), Some(level)) = (mark, run.curves.scale.last()) {
        plot.mark(end, level, mark, role);
    }
}
