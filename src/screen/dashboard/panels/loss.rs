//! The loss: of the batches the smallest and the largest of each column of dots, the smoothed curve, and validation.

use crate::screen::dashboard::format;
use crate::screen::dashboard::pad::Pad;
use crate::screen::dashboard::plot::{Axes, Plot};
use crate::screen::dashboard::run_data::RunData;
use crate::screen::dashboard::state::ViewModel;
use crate::screen::dashboard::theme::Role;
use crate::telemetry::{Bucket, Series};

/// Draws the panel.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let wide = pad.width() >= 50;
    let (batch, smoothed) = if wide { (" batch   ", " smoothed   ") } else { (" batch ", " smooth ") };
    let gap = if wide { "   " } else { "  " };
    let log = if view.log_loss { " log" } else { "" };
    let mut inner = pad.frame(&[
        ("Loss", Role::Title),
        (log, Role::Dim),
        (gap, Role::Text),
        ("∙", Role::Train),
        (batch, Role::Text),
        ("─", Role::Smooth),
        (smoothed, Role::Text),
        ("◆", Role::Validation),
        (" val", Role::Text),
    ]);
    let run = view.run();
    let to_y = |loss: f64| if view.log_loss { loss.log10() } else { loss };
    let Some(range) = y_range(run, to_y) else {
        inner.text(1, 0, "no loss yet", Role::Dim);
        return;
    };
    let decimals = if range.1 - range.0 < 0.5 && !view.log_loss { 2 } else { 1 };
    let y_label = |y: f64| format!("{:.decimals$}", if view.log_loss { 10f64.powf(y) } else { y });
    let axes = Axes { x: x_range(run, view.time_axis), y: range, x_label: &x_label(view.time_axis), y_label: &y_label };
    axes.draw(&mut inner, |plot| curves(view, run, plot, to_y));
}

fn curves(view: &ViewModel, run: &RunData, plot: &mut Plot, to_y: impl Fn(f64) -> f64) {
    let x = |bucket: &Bucket| x_of(bucket, view.time_axis);
    let batches = run.loss.buckets().iter().filter(|bucket| bucket.count > 0);
    plot.envelope(batches.map(|bucket| (x(bucket), to_y(bucket.min), to_y(bucket.max))), Role::Train);
    for pair in run.smoothed.buckets().windows(2) {
        if let (Some(from), Some(to)) = (pair[0].mean(), pair[1].mean()) {
            plot.line((x(&pair[0]), to_y(from)), (x(&pair[1]), to_y(to)), Role::Smooth);
        }
    }
    for bucket in run.validation.buckets() {
        if let Some(mean) = bucket.mean() {
            plot.mark(x(bucket), to_y(mean), '◆', Role::Validation);
        }
    }
    for bucket in run.loss.buckets().iter().filter(|bucket| bucket.broken > 0) {
        plot.mark(x(bucket), f64::MAX, '✕', Role::Overflow);
    }
}

/// From the smallest to the largest loss ever, batches and validation, with a little air.
fn y_range(run: &RunData, to_y: impl Fn(f64) -> f64) -> Option<(f64, f64)> {
    let finite = |series: &'_ Series| {
        let buckets = series.buckets().iter().filter(|bucket| bucket.count > 0);
        buckets
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), bucket| (low.min(bucket.min), high.max(bucket.max)))
    };
    let (batches, validation) = (finite(&run.loss), finite(&run.validation));
    let (low, high) = (to_y(batches.0.min(validation.0)), to_y(batches.1.max(validation.1)));
    if !low.is_finite() || !high.is_finite() {
        // Only broken losses so far: they still get an axis to stand on.
        return (!run.loss.is_empty()).then_some((0.0, 1.0));
    }
    let air = ((high - low) * 0.03).max(0.01);
    Some((low - air, high + air))
}

/// The x of a bucket: its step, or its time in seconds.
fn x_of(bucket: &Bucket, time: bool) -> f64 {
    if time { bucket.seconds } else { bucket.step as f64 }
}

/// What the x axis of a chart spans: from the first known step (0 for a run known from its beginning) to the last.
pub(super) fn x_range(run: &RunData, time: bool) -> (f64, f64) {
    let first = run.loss.buckets().first();
    let range = if time {
        (first.map_or(0.0, |bucket| if bucket.step <= 1 { 0.0 } else { bucket.seconds }), run.last_s)
    } else {
        let first = first.map_or(0, |bucket| bucket.step);
        (if first <= 1 { 0.0 } else { first as f64 }, run.step.step as f64)
    };
    (range.0, range.1.max(range.0 + 1.0))
}

/// How a figure on the x axis is written.
pub(super) fn x_label(time: bool) -> impl Fn(f64) -> String {
    move |x| if time { format::clock(x) } else { format!("{x:.0}") }
}
