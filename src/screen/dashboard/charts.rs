//! The charts of the first tab: the loss, a second curve, and the figures at their cursor.
//!
//! The loss has the range of batch losses in each column of dots, the smoothed curve, and validation losses. The second
//! chart has the loss scale as a staircase with a mark at every overflow, or another curve. Other runs are overlaid,
//! each with its letter at the end.

use super::keys::Action;
use super::overview::Panel;
use super::scene::Scene;
use crate::telemetry::{Bucket, Curve, PLOTTED, Quantity, RunState, SMOOTHING, Series, smoothing_for};
use crate::ui::{Axes, Canvas, Plot, Role, extent, format, power_range};
use std::borrow::Cow;

/// The ranges of the charts, in last steps, besides the whole run.
const RANGES: [u64; 3] = [1000, 300, 100];

#[derive(Debug, Default)]
pub(super) struct Charts {
    /// Whether the x axis is time instead of steps.
    pub(super) time: bool,
    /// The number of last steps shown; `None` for all.
    pub(super) range: Option<u64>,
    /// The step that the charts are read at.
    pub(super) cursor: Option<u64>,
    log_loss: bool,
    /// The selected index in `SMOOTHING`; its length means no smoothing.
    smoothing: Option<usize>,
    /// The second chart's curve, by its index in `PLOTTED`; `None` for the loss scale.
    pub(super) second: Option<usize>,
}

impl Charts {
    pub(super) fn act(&mut self, run: &RunState, action: Action) {
        match action {
            Action::TimeAxis => self.time = !self.time,
            Action::LogAxis => self.log_loss = !self.log_loss,
            Action::Range => {
                let next = |steps: &u64| self.range.is_none_or(|range| *steps < range);
                self.range = RANGES.into_iter().find(next);
            }
            Action::Smoothing => self.smoothing = Some((self.window(run) + 1) % (SMOOTHING.len() + 1)),
            Action::Curve => {
                // Curves of other objectives are empty.
                let next = self.second.map_or(0, |second| second + 1);
                self.second = (next..PLOTTED.len()).find(|&at| !run.curves.plotted[at].whole().is_empty());
            }
            Action::Cursor(by) => self.move_cursor(run, by),
            _ => {}
        }
    }

    /// Moves the cursor, which starts at the last step, by this many 200ths of the x axis.
    fn move_cursor(&mut self, run: &RunState, by: i32) {
        let last = run.step.step;
        let first = self.first_step(run).max(1);
        let stride = ((last.saturating_sub(first)) as f64 / 200.0).max(1.0) * f64::from(by);
        let moved = self.cursor.map_or(last as f64, |step| step as f64 + stride);
        self.cursor = (last > 0).then(|| (moved.round() as u64).clamp(first.min(last), last));
    }

    /// The index in `SMOOTHING` that the loss is smoothed over: the selected one, or the one that suits the run. Its
    /// length means no smoothing.
    pub(super) fn window(&self, run: &RunState) -> usize {
        self.smoothing.unwrap_or_else(|| smoothing_for(run.total_steps()))
    }

    pub(super) fn first_step(&self, run: &RunState) -> u64 {
        self.range.map_or(0, |steps| run.step.step.saturating_sub(steps))
    }

    /// The line of a run: its smoothed loss, or the loss itself without smoothing. The window suits the run `shown`.
    fn smoothed<'a>(&self, shown: &RunState, run: &'a RunState) -> &'a Curve {
        run.curves.smoothed.get(self.window(shown)).unwrap_or(&run.curves.loss)
    }
}

/// The unit of a chart's y axis, which determines the format of its labels.
#[derive(Debug, Clone, Copy)]
pub(super) enum AxisUnit {
    /// A loss, with this many decimals.
    Loss(usize),
    /// log10 of a loss.
    LogLoss(usize),
    /// log2 of the value.
    Power,
    Of(Quantity),
}

impl AxisUnit {
    fn write(self, y: f64) -> String {
        match self {
            Self::Loss(decimals) => format::decimals(y, decimals),
            Self::LogLoss(decimals) => format::decimals(10f64.powf(y), decimals),
            Self::Power => format!("2^{y:.0}"),
            Self::Of(quantity) => format::quantity(quantity, y),
        }
    }
}

/// The axes of a chart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chart {
    x: (f64, f64),
    y: (f64, f64),
    unit: AxisUnit,
    time: bool,
}

impl Chart {
    /// The x axis has the last steps if a range is set; else from the first known step (0 for a run known from its
    /// start) to the last step of the longest run shown.
    pub(super) fn new(scene: &Scene, y: (f64, f64), unit: AxisUnit) -> Self {
        let run = scene.run();
        let charts = &scene.charts;
        let time = scene.charts.time;
        let last = scene.runs().map(|run| if time { run.last_s } else { run.step.step as f64 }).fold(0.0, f64::max);
        let first = match (charts.range, run.curves.loss.whole().buckets().first()) {
            (Some(_), _) => x_of_step(run, charts.first_step(run), time),
            (None, Some(bucket)) if bucket.step > 1 => x_of_step(run, bucket.step, time),
            (None, _) => 0.0,
        };
        Self { x: (first, last.max(first + 1.0)), y, unit, time }
    }

    /// The chart of the loss; `None` before the first loss.
    fn loss(scene: &Scene) -> Option<Self> {
        let run = scene.run();
        let charts = &scene.charts;
        let first = charts.first_step(run);
        let shown = |one: &RunState| {
            let losses = if scene.others.is_empty() { &one.curves.loss } else { charts.smoothed(run, one) };
            let losses = losses.since(first);
            // A logarithmic axis has no place for losses that are not positive.
            let buckets = losses.iter().chain(one.curves.validation.since(first));
            extent(buckets.flat_map(Bucket::ends).map(y_of_loss(charts)))
        };
        let y = match range(scene, shown) {
            Some((low, high)) => {
                let air = ((high - low) * 0.03).max(if charts.range.is_some() { 0.0005 } else { 0.01 });
                (low - air, high + air)
            }
            None if run.curves.loss.whole().is_empty() => return None,
            // No finite loss yet: draw an axis anyway.
            None => (0.0, 1.0),
        };
        let [low, middle] = [y.0, f64::midpoint(y.0, y.1)].map(|y| if charts.log_loss { 10f64.powf(y) } else { y });
        // Rounding may change a label by a fifth of the difference.
        let decimals = format::decimals_for(0.4 * (middle - low), 1);
        let unit = if charts.log_loss { AxisUnit::LogLoss(decimals) } else { AxisUnit::Loss(decimals) };
        Some(Self::new(scene, y, unit))
    }

    /// The second chart; `None` before the first step.
    fn second(scene: &Scene) -> Option<Self> {
        let first = scene.charts.first_step(scene.run());
        let second = scene.charts.second;
        let shown = |run: &RunState| {
            if let Some(at) = second {
                return extent(run.curves.plotted[at].since(first).iter().flat_map(Bucket::ends));
            }
            extent(run.curves.scale.since(first).iter().map(|point| point.value))
        };
        let (low, high) = range(scene, shown)?;
        let air = ((high - low) * 0.05).max(high.abs() * 1e-3).max(f64::MIN_POSITIVE);
        let (y, unit) = match second.map(|at| PLOTTED[at].quantity) {
            None => (power_range((low, high)), AxisUnit::Power),
            Some(rate @ Quantity::Rate) => ((0.0, high.max(f64::MIN_POSITIVE)), AxisUnit::Of(rate)),
            Some(quantity) => {
                let least = if low < 0.0 { low - air } else { (low - air).max(0.0) };
                ((least, high + air), AxisUnit::Of(quantity))
            }
        };
        Some(Self::new(scene, y, unit))
    }

    fn axes<T>(self, then: impl FnOnce(&Axes) -> T) -> T {
        let x_label = |x: f64| if self.time { format::clock(x) } else { format!("{x:.0}") };
        then(&Axes { x: self.x, y: self.y, x_label: &x_label, y_label: &|y| self.unit.write(y) })
    }

    /// Draws the axes and the curves.
    pub(super) fn draw(self, canvas: &mut Canvas, curves: impl FnOnce(&mut Plot)) {
        self.axes(|axes| axes.draw(canvas, curves));
    }

    /// Draws the axes, a line at the cursor, and the curves.
    fn draw_read(self, scene: &Scene, canvas: &mut Canvas, curves: impl FnOnce(&mut Plot)) {
        self.draw(canvas, |plot| {
            if let Some(step) = scene.charts.cursor {
                plot.rule(x_of_step(scene.run(), step, self.time), Role::Text);
            }
            curves(plot);
        });
    }

    /// The x of a bucket: its step, or its time in seconds.
    fn x_of(self, bucket: &Bucket) -> f64 {
        if self.time { bucket.seconds } else { bucket.step as f64 }
    }

    /// Draws a line through a value of each bucket; one without a value interrupts it.
    fn line(self, plot: &mut Plot, buckets: &[Bucket], y: impl Fn(&Bucket) -> Option<f64>, role: Role) {
        plot.curve(buckets.iter().map(|bucket| y(bucket).map(|y| (self.x_of(bucket), y))), role);
    }

    /// Draws a line through a value of each bucket since a step.
    pub(super) fn history(self, plot: &mut Plot, series: &Series, first: u64, y: impl Fn(&Bucket) -> f64) {
        self.line(plot, series.since(first), |bucket| Some(y(bucket)), Role::Train);
    }

    /// Draws a dotted line across the chart.
    pub(super) fn limit(self, plot: &mut Plot, y: f64) {
        let dots = plot.resolution();
        for dot in (0..dots).step_by(3) {
            let at = (self.x.0 + (self.x.1 - self.x.0) * dot as f64 / dots as f64, y);
            plot.line(at, at, Role::Subnormal);
        }
    }

    /// Marks at the top the steps whose value was not finite.
    fn mark_broken(self, plot: &mut Plot, buckets: &[Bucket]) {
        for bucket in buckets.iter().filter(|bucket| bucket.non_finite > 0) {
            plot.mark(self.x_of(bucket), f64::MAX, '✕', Role::Overflow);
        }
    }

    /// Writes the letter of another run at the end of its line.
    fn mark_end(self, plot: &mut Plot, buckets: &[Bucket], y: impl Fn(f64) -> f64, other: usize) {
        if let Some((last, mean)) = buckets.last().and_then(|last| Some((last, last.mean()?))) {
            plot.mark(self.x_of(last), y(mean), letter(other), Role::Other(other));
        }
    }
}

fn x_of_step(run: &RunState, step: u64, time: bool) -> f64 {
    if time { run.curves.loss.at(step).map_or(0.0, |bucket| bucket.seconds) } else { step as f64 }
}

fn y_of_loss(charts: &Charts) -> fn(f64) -> f64 {
    if charts.log_loss { f64::log10 } else { |loss| loss }
}

/// The smallest and the largest value that any run shows.
fn range(scene: &Scene, of: impl Fn(&RunState) -> Option<(f64, f64)>) -> Option<(f64, f64)> {
    extent(scene.runs().filter_map(of).flat_map(|(low, high)| [low, high]))
}

/// The letter of another run; the main run is `A`.
fn letter(other: usize) -> char {
    format::letter(other + 1)
}

pub(super) fn step_at(scene: &Scene, panel: Panel, width: u16, column: u16) -> Option<u64> {
    let chart = match panel {
        Panel::Loss => Chart::loss(scene),
        Panel::Scale => Chart::second(scene),
        _ => None,
    }?;
    let (columns, column) = chart.axes(|axes| {
        let margin = axes.margin();
        width.checked_sub(margin + 3).zip(column.checked_sub(margin + 2))
    })?;
    let share = (f64::from(column) + 0.5) / f64::from(columns.max(1));
    let x = chart.x.0 + share.clamp(0.0, 1.0) * (chart.x.1 - chart.x.0);
    let buckets = scene.run().curves.loss.since(scene.charts.first_step(scene.run()));
    let distance = |bucket: &&Bucket| (chart.x_of(bucket) - x).abs();
    buckets.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).map(|bucket| bucket.step)
}

pub(super) fn draw_loss(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let charts = &scene.charts;
    let wide = canvas.width() >= 50;
    let gap = if wide { "   " } else { " " };
    let mut title = vec![("Loss".to_owned(), Role::Title)];
    if charts.log_loss {
        let all = run.curves.loss.whole().buckets().iter().all(|bucket| bucket.min > 0.0);
        title.push((if all { " log" } else { " log, positive only" }.to_owned(), Role::Dim));
    }
    if let Some(steps) = charts.range {
        title.push((format!(" last {steps}"), Role::Dim));
    }
    let mut entry = |glyph: char, role: Role, word: String| {
        title.extend([(gap.to_owned(), Role::Text), (glyph.into(), role), (format!(" {word}"), Role::Text)]);
    };
    if scene.others.is_empty() {
        entry('∙', Role::Train, "batch".into());
        if let Some(window) = SMOOTHING.get(charts.window(run)) {
            entry('─', Role::Smooth, format!("smoothed {window}"));
        }
        entry('◆', Role::Validation, "val".into());
    } else {
        entry('A', Role::Smooth, name(run));
        for (at, other) in scene.others.iter().enumerate() {
            entry(letter(at), Role::Other(at), name(other));
        }
    }
    let title: Vec<_> = title.iter().map(|(text, role)| (text.as_str(), *role)).collect();
    let mut inner = canvas.frame(&title);
    match Chart::loss(scene) {
        Some(chart) => chart.draw_read(scene, &mut inner, |plot| losses(scene, chart, plot)),
        None => drop(inner.text(1, 0, "no loss yet", Role::Dim)),
    }
}

/// A run's name in a legend.
fn name(run: &RunState) -> String {
    let name = run.started.as_ref().map_or("", |started| started.run.as_str());
    if name.is_empty() { "run".into() } else { format::printable(name) }
}

fn losses(scene: &Scene, chart: Chart, plot: &mut Plot) {
    let run = scene.run();
    let charts = &scene.charts;
    let to_y = y_of_loss(&scene.charts);
    let first = charts.first_step(run);
    let mean = |bucket: &Bucket| bucket.mean().map(to_y);
    let batches = run.curves.loss.since(first);
    if scene.others.is_empty() {
        let finite = batches.iter().filter(|bucket| bucket.count > 0);
        plot.envelope(finite.map(|bucket| (chart.x_of(bucket), to_y(bucket.min), to_y(bucket.max))), Role::Train);
    }
    if charts.window(run) < SMOOTHING.len() || !scene.others.is_empty() {
        chart.line(plot, &charts.smoothed(run, run).since(first), mean, Role::Smooth);
    }
    for (at, other) in scene.others.iter().enumerate() {
        let line: Cow<[Bucket]> = charts.smoothed(run, other).since(first);
        chart.line(plot, &line, mean, Role::Other(at));
        chart.mark_end(plot, &line, to_y, at);
    }
    for bucket in run.curves.validation.since(first) {
        if let Some(mean) = mean(bucket) {
            plot.mark(chart.x_of(bucket), mean, '◆', Role::Validation);
        }
    }
    chart.mark_broken(plot, &batches);
}

pub(super) fn draw_second(scene: &Scene, canvas: &mut Canvas) {
    let second = scene.charts.second;
    let legend = [("  ", Role::Text), ("✕", Role::Overflow), (" overflow", Role::Text)];
    let mut title = vec![(second.map_or("Loss scale (log2)", |at| PLOTTED[at].title), Role::Title)];
    title.extend(legend.into_iter().filter(|_| second.is_none()));
    let mut inner = canvas.frame(&title);
    if second.is_none() && !scene.run().scales_losses() {
        inner.text(1, 0, "off: gradients have FP32's range", Role::Dim);
        return;
    }
    let Some(chart) = Chart::second(scene) else {
        inner.text(1, 0, "no step yet", Role::Dim);
        return;
    };
    let first = scene.charts.first_step(scene.run());
    chart.draw_read(scene, &mut inner, |plot| {
        let others = scene.others.iter().enumerate().map(|(at, other)| (other, Some(at)));
        for (run, other) in others.chain([(scene.run(), None)]) {
            match second {
                Some(at) => curve(chart, plot, &run.curves.plotted[at].since(first), other),
                None => stairs(chart, plot, run, first, other),
            }
        }
    });
}

/// Draws the range of each bucket if buckets hold several steps, else the line through them.
fn curve(chart: Chart, plot: &mut Plot, buckets: &[Bucket], other: Option<usize>) {
    let role = other.map_or(Role::Train, Role::Other);
    if buckets.len() > plot.resolution() {
        let shown = buckets.iter().filter(|bucket| bucket.count > 0);
        plot.envelope(shown.map(|bucket| (chart.x_of(bucket), bucket.min, bucket.max)), role);
    } else {
        chart.line(plot, buckets, Bucket::mean, role);
    }
    chart.mark_broken(plot, buckets);
    if let Some(other) = other {
        chart.mark_end(plot, buckets, |mean| mean, other);
    }
}

fn stairs(chart: Chart, plot: &mut Plot, run: &RunState, first: u64, other: Option<usize>) {
    let at = |step: u64, seconds: f64| if chart.time { seconds } else { step as f64 };
    let end = at(run.step.step, run.last_s).max(chart.x.0);
    let shown = run.curves.scale.since(first).iter();
    let points = shown.map(|point| (at(point.step, point.seconds).max(chart.x.0), point.value));
    plot.stairs(points, end, other.map_or(Role::Train, Role::Other));
    let Some(other) = other else {
        for skip in run.curves.skips.since(first) {
            let y = if skip.count > 0 { skip.max } else { chart.y.1 };
            plot.mark(chart.x_of(skip), y, '✕', Role::Overflow);
        }
        return;
    };
    if let Some(level) = run.curves.scale.last() {
        plot.mark(end, level, letter(other), Role::Other(other));
    }
}

/// Draws the figures of the step at the cursor, on one line.
pub(super) fn draw_cursor_values(scene: &Scene, step: u64, canvas: &mut Canvas) {
    let mut x = canvas.text(1, 0, &format!("┊ step {step}"), Role::Title);
    for (text, role) in figures(scene, step) {
        let columns = text.chars().count() as u16;
        if x + 2 + columns > canvas.width() {
            break;
        }
        x = canvas.text(x + 2, 0, &text, role);
    }
}

/// Each figure at the step, or the last one before it. If a bucket holds several steps: the mean, minimum and maximum.
fn figures(scene: &Scene, step: u64) -> Vec<(String, Role)> {
    let run = scene.run();
    let charts = &scene.charts;
    let curves = &run.curves;
    let mut figures = Vec::new();
    if let Some(loss) = curves.loss.at(step) {
        let text = match loss.mean() {
            None => "loss not finite".into(),
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
    if let Some(smoothed) = curves.smoothed.get(charts.window(run)).and_then(mean) {
        figures.push((format!("smoothed {}", format::loss(smoothed)), Role::Smooth));
    }
    for (at, other) in scene.others.iter().enumerate() {
        let loss = mean(charts.smoothed(run, other)).map_or_else(|| "-".into(), format::loss);
        figures.push((format!("{} {loss}", letter(at)), Role::Other(at)));
    }
    let validation = curves.validation.buckets().iter().rev().find(|bucket| bucket.step <= step);
    if let Some((bucket, mean)) = validation.and_then(|bucket| Some((bucket, bucket.mean()?))) {
        figures.push((format!("val {} @ {}", format::loss(mean), bucket.step), Role::Validation));
    }
    if let Some(scale) = curves.scale.at(step)
        && run.scales_losses()
    {
        figures.push((format!("scale {}", format::scale(scale.exp2() as f32)), Role::Text));
    }
    for (plotted, curve) in PLOTTED.iter().zip(&curves.plotted) {
        let figure = |value| (format!("{} {}", plotted.short, format::quantity(plotted.quantity, value)), Role::Text);
        figures.extend(mean(curve).map(figure));
    }
    figures
}
