//! The charts of the first tab: the ranges of their axes, and the step of each column.

use super::{curve, loss};
use crate::screen::dashboard::state::{Panel, ViewModel};
use crate::telemetry::{Bucket, RunState};
use crate::ui::{Axes, Pad, Plot, Role, format};
use ratatui::layout::Rect;

/// The unit of a chart's y axis, which determines the format of its labels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::screen::dashboard) enum Unit {
    /// A loss, with this many decimals.
    Loss(usize),
    /// log10 of a loss.
    LogLoss(usize),
    /// log2 of a loss scale.
    Power,
    Rate,
    Plain,
    Count,
    Bytes,
}

impl Unit {
    pub(in crate::screen::dashboard) fn write(self, y: f64) -> String {
        match self {
            Self::Loss(decimals) => format!("{y:.decimals$}"),
            Self::LogLoss(decimals) => format!("{:.decimals$}", 10f64.powf(y)),
            Self::Power => format!("2^{y:.0}"),
            Self::Rate => format::rate(y),
            Self::Plain => format::short(y),
            Self::Count => format::count(y),
            Self::Bytes => format::bytes(y.max(0.0) as u64),
        }
    }
}

/// The axes of a chart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::screen::dashboard) struct Chart {
    pub(in crate::screen::dashboard) x: (f64, f64),
    pub(in crate::screen::dashboard) y: (f64, f64),
    pub(in crate::screen::dashboard) unit: Unit,
    pub(in crate::screen::dashboard) time: bool,
}

impl Chart {
    /// Draws the axes, the curves, and a line at the cursor.
    pub(super) fn draw(self, view: &ViewModel, pad: &mut Pad, curves: impl FnOnce(&mut Plot)) {
        let (x_label, y_label) = (x_label(self.time), |y: f64| self.unit.write(y));
        let axes = Axes { x: self.x, y: self.y, x_label: &x_label, y_label: &y_label };
        axes.draw(pad, |plot| {
            if let Some(x) = view.cursor.map(|step| x_of_step(view.run(), step, self.time)) {
                plot.rule(x, Role::Text);
            }
            curves(plot);
        });
    }
}

/// The step at a column of the screen, in the chart of a panel.
pub(in crate::screen::dashboard) fn step_at(view: &ViewModel, panel: Panel, area: Rect, column: u16) -> Option<u64> {
    let chart = match panel {
        Panel::Loss => loss::chart(view),
        Panel::Scale => curve::chart(view),
        _ => None,
    }?;
    let (x_label, y_label) = (x_label(chart.time), |y: f64| chart.unit.write(y));
    let margin = Axes { x: chart.x, y: chart.y, x_label: &x_label, y_label: &y_label }.margin();
    let columns = area.width.checked_sub(margin + 3)?;
    let column = column.checked_sub(area.x + margin + 2)?;
    let share = (f64::from(column) + 0.5) / f64::from(columns.max(1));
    let x = chart.x.0 + share.clamp(0.0, 1.0) * (chart.x.1 - chart.x.0);
    let buckets = view.run().curves.loss.since(first_step(view));
    let nearest = |bucket: &&Bucket| (x_of(bucket, chart.time) - x).abs();
    buckets.iter().min_by(|a, b| nearest(a).total_cmp(&nearest(b))).map(|bucket| bucket.step)
}

/// The first step that charts show.
pub(in crate::screen::dashboard) fn first_step(view: &ViewModel) -> u64 {
    view.range.map_or(0, |steps| view.run().step.step.saturating_sub(steps))
}

/// The x of a bucket: its step, or its time in seconds.
pub(super) fn x_of(bucket: &Bucket, time: bool) -> f64 {
    if time { bucket.seconds } else { bucket.step as f64 }
}

/// The x of a step.
fn x_of_step(run: &RunState, step: u64, time: bool) -> f64 {
    if time { run.curves.loss.at(step).map_or(0.0, |bucket| bucket.seconds) } else { step as f64 }
}

/// The range of the x axis: the last steps if a range is set; else from the first known step (0 for a run known from its
/// start) to the last step of the longest run shown.
pub(super) fn x_range(view: &ViewModel) -> (f64, f64) {
    let run = view.run();
    let runs = || std::iter::once(run).chain(view.others.iter().map(|other| &other.run));
    let last = runs().map(|run| if view.time_axis { run.last_s } else { run.step.step as f64 }).fold(0.0, f64::max);
    let first = match view.range {
        Some(_) => x_of_step(run, first_step(view), view.time_axis),
        None => run
            .curves
            .loss
            .whole()
            .buckets()
            .first()
            .map_or(0.0, |bucket| if bucket.step <= 1 { 0.0 } else { x_of(bucket, view.time_axis) }),
    };
    (first, last.max(first + 1.0))
}

/// Formats a label of the x axis.
pub(super) fn x_label(time: bool) -> impl Fn(f64) -> String {
    move |x| if time { format::clock(x) } else { format!("{x:.0}") }
}

/// The smallest and the largest value of buckets; `None` without a finite value.
pub(super) fn extent<'a>(buckets: impl Iterator<Item = &'a Bucket>) -> Option<(f64, f64)> {
    let buckets = buckets.filter(|bucket| bucket.count > 0);
    let range = buckets
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), bucket| (low.min(bucket.min), high.max(bucket.max)));
    (range.0 <= range.1).then_some(range)
}
