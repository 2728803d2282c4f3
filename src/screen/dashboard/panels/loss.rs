//! The loss chart: the range of batch losses in each column of dots, the smoothed curve, and validation losses. Other runs
//! are overlaid as their smoothed curves, each with its letter at the end.

use super::chart::{Chart, Unit, extent, first_step, x_of, x_range};
use crate::screen::dashboard::state::ViewModel;
use crate::telemetry::{Bucket, RunState, SMOOTHING};
use crate::ui::{Pad, Plot, Role, format};
use std::borrow::Cow;

/// Draws the panel.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let wide = pad.width() >= 50;
    let gap = if wide { "   " } else { " " };
    let mut title = vec![("Loss".to_owned(), Role::Title)];
    if view.log_loss {
        title.push((" log".to_owned(), Role::Dim));
    }
    if let Some(steps) = view.range {
        title.push((format!(" last {steps}"), Role::Dim));
    }
    let mut entry = |glyph: String, role: Role, word: String| {
        title.extend([(gap.to_owned(), Role::Text), (glyph, role), (word, Role::Text)]);
    };
    if view.others.is_empty() {
        entry("∙".into(), Role::Train, " batch".into());
        if let Some(window) = SMOOTHING.get(view.window()) {
            entry("─".into(), Role::Smooth, format!(" {}{window}", if wide { "smoothed " } else { "mean " }));
        }
        entry("◆".into(), Role::Validation, " val".into());
    } else {
        entry("A".into(), Role::Smooth, format!(" {}", name(view.run())));
        for (at, other) in view.others.iter().enumerate() {
            entry(letter(at).into(), Role::Other(at), format!(" {}", name(&other.run)));
        }
    }
    let title: Vec<_> = title.iter().map(|(text, role)| (text.as_str(), *role)).collect();
    let mut inner = pad.frame(&title);
    let Some(chart) = chart(view) else {
        inner.text(1, 0, "no loss yet", Role::Dim);
        return;
    };
    chart.draw(view, &mut inner, |plot| curves(view, plot));
}

/// A run's name in a legend.
fn name(run: &RunState) -> String {
    let name = run.started.as_ref().map_or("", |started| started.run.as_str());
    if name.is_empty() { "run".into() } else { format::printable(name) }
}

/// The letter of another run; the main run is `A`.
pub(super) fn letter(other: usize) -> char {
    char::from(b'B' + (other % 25) as u8)
}

/// The chart's axes; `None` before the first loss.
pub(super) fn chart(view: &ViewModel) -> Option<Chart> {
    let to_y = scaling(view);
    let (first, run) = (first_step(view), view.run());
    let shown = |run: &RunState| {
        let losses = if view.others.is_empty() { run.curves.loss.since(first) } else { line(view, run) };
        let validation = run.curves.validation.buckets().iter().filter(|bucket| bucket.last_step >= first);
        extent(losses.iter().chain(validation))
    };
    let ranges = std::iter::once(run).chain(view.others.iter().map(|other| &other.run)).filter_map(shown);
    let range = ranges.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
    let y = match range.map(|(low, high)| (to_y(low), to_y(high))) {
        Some((low, high)) if low.is_finite() && high.is_finite() => {
            let air = ((high - low) * 0.03).max(if view.range.is_some() { 0.0005 } else { 0.01 });
            (low - air, high + air)
        }
        // No finite loss yet: draw an axis anyway.
        _ if run.curves.loss.whole().is_empty() => return None,
        _ => (0.0, 1.0),
    };
    let span = y.1 - y.0;
    let unit = match view.log_loss {
        true => Unit::LogLoss(if span < 0.1 { 2 } else { 1 }),
        false if span < 0.05 => Unit::Loss(3),
        false => Unit::Loss(if span < 0.5 { 2 } else { 1 }),
    };
    Some(Chart { x: x_range(view), y, unit, time: view.time_axis })
}

fn scaling(view: &ViewModel) -> fn(f64) -> f64 {
    if view.log_loss { f64::log10 } else { |loss| loss }
}

/// The line of a run: its smoothed loss, or the loss itself without smoothing.
fn line<'a>(view: &ViewModel, run: &'a RunState) -> Cow<'a, [Bucket]> {
    run.curves.smoothed.get(view.window()).unwrap_or(&run.curves.loss).since(first_step(view))
}

fn curves(view: &ViewModel, plot: &mut Plot) {
    let (run, to_y) = (view.run(), scaling(view));
    let x = |bucket: &Bucket| x_of(bucket, view.time_axis);
    let losses = run.curves.loss.since(first_step(view));
    if view.others.is_empty() {
        let batches = losses.iter().filter(|bucket| bucket.count > 0);
        plot.envelope(batches.map(|bucket| (x(bucket), to_y(bucket.min), to_y(bucket.max))), Role::Train);
    }
    if view.window() < SMOOTHING.len() || !view.others.is_empty() {
        polyline(plot, view, &line(view, run), Role::Smooth);
    }
    for (at, other) in view.others.iter().enumerate() {
        let line = line(view, &other.run);
        polyline(plot, view, &line, Role::Other(at));
        if let Some((last, mean)) = line.last().and_then(|last| Some((last, last.mean()?))) {
            plot.mark(x(last), to_y(mean), letter(at), Role::Other(at));
        }
    }
    let first = first_step(view);
    for bucket in run.curves.validation.buckets().iter().filter(|bucket| bucket.last_step >= first) {
        if let Some(mean) = bucket.mean() {
            plot.mark(x(bucket), to_y(mean), '◆', Role::Validation);
        }
    }
    for bucket in losses.iter().filter(|bucket| bucket.non_finite > 0) {
        plot.mark(x(bucket), f64::MAX, '✕', Role::Overflow);
    }
}

fn polyline(plot: &mut Plot, view: &ViewModel, buckets: &[Bucket], role: Role) {
    let to_y = scaling(view);
    for pair in buckets.windows(2) {
        if let (Some(from), Some(to)) = (pair[0].mean(), pair[1].mean()) {
            let x = |bucket: &Bucket| x_of(bucket, view.time_axis);
            plot.line((x(&pair[0]), to_y(from)), (x(&pair[1]), to_y(to)), role);
        }
    }
}
