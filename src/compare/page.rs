//! The comparison as text.

use super::metrics::Metric;
use super::report::{Comparison, EquivalenceVerdict, RunGroup, SettingDifference};
use super::run::RunSummary;
use crate::telemetry::{Bucket, Series};
use crate::ui::{Axes, Canvas, Line, Page, Plot, Role, extent, format, power_range};

/// Draws a run's curve; returns the point at a share of its steps.
type DrawCurve<'a> = &'a dyn Fn(&mut Plot, &RunSummary, Role, f64) -> Option<(f64, f64)>;

/// Rows of a plot, including its axis.
const PLOT: u16 = 15;

impl Comparison {
    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        self.list(&mut page, width);
        self.differing(&mut page, width);
        self.table(&mut page, width);
        self.plots(&mut page, width);
        self.conclusion(&mut page, width);
        page
    }

    /// The runs, by group.
    fn list(&self, page: &mut Page, width: usize) {
        for (i, group) in self.groups.iter().enumerate() {
            let heading = Line::new().with(Role::Series(i), group.label.clone());
            page.push(
                heading.with(Role::Title, format!("  {}", format::truncated(&group.name, width.saturating_sub(3)))),
            );
            let names = group.runs.iter().map(|run| format::columns(&run.name)).max().unwrap_or(0).min(width / 3);
            for (j, run) in group.runs.iter().enumerate() {
                let role = if run.finished.is_some() && run.unreadable == 0 { Role::Dim } else { Role::Warn };
                let figures = ["perplexity", "skipped"].into_iter().filter_map(Metric::named);
                let figures = figures.fold(format!("seed {}", run.started.seed), |text, metric| {
                    text + &format!("   {} {}", metric.name, metric.show((metric.of)(&run.figures)))
                });
                let which = if group.runs.len() == 1 {
                    String::new()
                } else {
                    let name = format::padded(&run.name, names);
                    format!("{:<4}{name}   ", group.run_label(j))
                };
                page.push(Line::new().plain(format!("   {which}{figures}")).with(role, format!("   {}", run.end())));
            }
        }
        page.gap();
    }

    fn differing(&self, page: &mut Page, width: usize) {
        if self.differences.is_empty() {
            page.push(Line::new().dim("the configurations differ only in the seed"));
            page.gap();
            return;
        }
        blocks(page, width, "differing", &self.labels(None), &self.settings());
    }

    /// The heads of a table's columns: a group for each, and the difference of two with this sign.
    pub(super) fn labels(&self, minus: Option<&str>) -> Vec<String> {
        let difference = match (&self.groups[..], minus) {
            ([first, second], Some(minus)) => Some(format!("{} {minus} {}", second.label, first.label)),
            _ => None,
        };
        self.groups.iter().map(|group| group.label.clone()).chain(difference).collect()
    }

    /// A row for each setting that differs: its key and its values.
    pub(super) fn settings(&self) -> Vec<(String, Vec<String>)> {
        self.differences.iter().map(|difference| (difference.key.clone(), difference.values.clone())).collect()
    }

    /// A row for each figure: its name, the groups' estimates, and the difference of two groups.
    pub(super) fn figures(&self) -> Vec<(String, Vec<String>)> {
        let row = |metric: &'static Metric| {
            let difference = (self.groups.len() == 2).then(|| metric.show_estimate(self.difference(metric), true));
            let of_group = |group: &RunGroup| metric.show_estimate(group.estimate(metric), false);
            (metric.name.to_owned(), self.groups.iter().map(of_group).chain(difference).collect())
        };
        self.metrics().map(row).collect()
    }

    /// The figures: of single runs, or means with intervals; and the difference of two groups.
    fn table(&self, page: &mut Page, width: usize) {
        let heading = if self.has_samples() { "mean ±95 %" } else { "figures" };
        blocks(page, width, heading, &self.labels(Some("-")), &self.figures());
    }

    /// Loss and loss scale of all groups in one plot each; every curve has its group's color and letter.
    fn plots(&self, page: &mut Page, width: usize) {
        let (axis, losses) = self.losses();
        let steps = (0.0, self.runs().map(|(_, run)| run.figures.steps).max().unwrap_or(1) as f64);
        let scales = range(self.runs().flat_map(|(_, run)| run.curves.scale.points()).map(|point| point.value));
        let x_label = |x: f64| format!("{x:.0}");
        let half = (width.saturating_sub(2) / 2).min(usize::from(u16::MAX / 2 - 1)) as u16;
        page.push(
            Line::new()
                .with(Role::Title, format!("{:<1$}", "loss", usize::from(half) + 2))
                .with(Role::Title, "loss scale, log2")
                .with(Role::Bad, "   ✕")
                .dim(" overflow"),
        );
        let draw = |axes: &Axes, canvas: &mut Canvas, curve: DrawCurve| {
            axes.draw(canvas, |plot| {
                for (i, group) in self.groups.iter().enumerate() {
                    // Place letters at different steps, to distinguish overlapping curves.
                    let share = (i + 1) as f64 / (self.groups.len() + 1) as f64;
                    let letters: Vec<_> =
                        group.runs.iter().filter_map(|run| curve(plot, run, role(i), share)).collect();
                    if let Some((x, y)) = letters.first() {
                        plot.mark(*x, *y, group.label.chars().next().unwrap_or('?'), role(i));
                    }
                }
            });
        };
        let roles: Vec<_> = (0..4).map(role).chain([Role::Bad, Role::Dim]).collect();
        page.drawn((2 * half + 2, PLOT), &roles, |canvas| {
            if let Some(y) = losses {
                let decimals = format::decimals_for(0.4 * (axis.loss(f64::midpoint(y.0, y.1)) - axis.loss(y.0)), 2);
                let y_label = |y: f64| format::decimals(axis.loss(y), decimals);
                let axes = Axes { x: steps, y, x_label: &x_label, y_label: &y_label };
                let curve: DrawCurve = &|plot, run, role, share| loss(plot, run, axis, role, share);
                draw(&axes, &mut canvas.part(0, 0, half, PLOT), curve);
            }
            if let Some(scales) = scales {
                let y_label = |y: f64| format!("2^{y:.0}");
                let axes = Axes { x: steps, y: power_range(scales), x_label: &x_label, y_label: &y_label };
                draw(&axes, &mut canvas.part(half + 2, 0, half, PLOT), &scale);
            }
        });
        page.gap();
    }

    /// The runs, each with the index of its group.
    pub(super) fn runs(&self) -> impl Iterator<Item = (usize, &RunSummary)> {
        self.groups.iter().enumerate().flat_map(|(i, group)| group.runs.iter().map(move |run| (i, run)))
    }

    /// The axis of the losses and its range; `None` if no loss is finite.
    pub(super) fn losses(&self) -> (LossAxis, Option<(f64, f64)>) {
        let all = || self.runs().flat_map(|(_, run)| means(run.curves.loss.whole())).map(|(_, loss)| loss);
        let axis = if all().all(|loss| loss > 0.0) { LossAxis::Logarithmic } else { LossAxis::Linear };
        (axis, range(all().map(|loss| axis.y(loss))))
    }

    /// The difference of two groups' perplexities, and the verdict on the margin.
    fn conclusion(&self, page: &mut Page, width: usize) {
        if let Some(text) = self.describe_perplexity() {
            page.wrapped(Role::Text, &text, width);
        }
        for (text, verdict) in self.describe_verdict().into_iter().chain(self.describe_skips()) {
            let role = match verdict {
                EquivalenceVerdict::Exceeded => Role::Bad,
                EquivalenceVerdict::NotExceeded => Role::Good,
                EquivalenceVerdict::Undecided => Role::Warn,
            };
            page.wrapped(role, &text, width);
        }
    }

    /// The difference of two groups' perplexities as text.
    pub(super) fn describe_perplexity(&self) -> Option<String> {
        if let Some(SettingDifference { key, values }) = self.different_data() {
            return Some(format!(
                "losses and perplexities are over different data and not comparable: {key} is {}",
                values.join(" and ")
            ));
        }
        let [first, second] = &self.groups[..] else { return None };
        let estimate = self.perplexity()?;
        let sizes = format!("{} and {} runs", first.runs.len(), second.runs.len());
        let interval = match estimate.interval() {
            Some((low, high)) => format!("95 % confidence {low:+.4} to {high:+.4} (Welch, {sizes})"),
            None if estimate.mean.is_finite() => {
                format!("no interval from {sizes}; each group needs at least two seeds")
            }
            None => "no interval".to_owned(),
        };
        Some(format!("perplexity {} - {}: {:+.4}, {interval}", second.label, first.label, estimate.mean))
    }

    /// The verdict on consecutive skipped steps as text.
    pub(super) fn describe_skips(&self) -> Option<(String, EquivalenceVerdict)> {
        let (margin, estimate, verdict) = self.skip_verdict()?;
        let verdict_text = match verdict {
            EquivalenceVerdict::Exceeded => "falsified",
            EquivalenceVerdict::NotExceeded => "not falsified",
            EquivalenceVerdict::Undecided => "undecided; run more seeds",
        };
        let text = format!(
            "skipped in a row: {:+.1} on average; `{} adds at most {margin} consecutive skips`: {verdict_text}",
            estimate.mean, self.groups[1].label
        );
        Some((text, verdict))
    }

    /// The verdict on the margin as text.
    pub(super) fn describe_verdict(&self) -> Option<(String, EquivalenceVerdict)> {
        let (margin, verdict) = self.verdict()?;
        let text = match verdict {
            EquivalenceVerdict::Exceeded => format!("a difference of {margin} in perplexity is exceeded"),
            EquivalenceVerdict::NotExceeded => format!("a difference of {margin} in perplexity is not exceeded"),
            EquivalenceVerdict::Undecided => {
                format!("whether a difference of {margin} in perplexity is exceeded is undecided; run more seeds")
            }
        };
        Some((text, verdict))
    }
}

/// A curve's finite means by step.
pub(super) fn means(series: &Series) -> impl Iterator<Item = (f64, f64)> + '_ {
    series.buckets().iter().filter_map(Bucket::point)
}

/// The axis of losses. A logarithmic one shows the end of a run as clearly as its start, but has no place for 0 and
/// less.
#[derive(Clone, Copy)]
pub(super) enum LossAxis {
    Logarithmic,
    Linear,
}

impl LossAxis {
    /// The place of a loss.
    fn y(self, loss: f64) -> f64 {
        match self {
            Self::Logarithmic => loss.ln(),
            Self::Linear => loss,
        }
    }

    /// The loss at a place.
    pub(super) fn loss(self, y: f64) -> f64 {
        match self {
            Self::Logarithmic => y.exp(),
            Self::Linear => y,
        }
    }

    /// A run's losses by step; `None` for those that are not finite.
    pub(super) fn points(self, run: &RunSummary) -> impl Iterator<Item = Option<(f64, f64)>> + '_ {
        let points = run.curves.loss.whole().buckets().iter().map(Bucket::point);
        points.map(move |point| point.map(|(step, loss)| (step, self.y(loss))))
    }
}

/// The smallest and the largest finite value; the end of a single value is 1 above it.
pub(super) fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    extent(values).map(|(low, high)| (low, if high > low { high } else { low + 1.0 }))
}

/// The role of a group, which determines its color.
fn role(group: usize) -> Role {
    Role::Series(group % 4)
}

/// Draws a run's loss; returns the point at a share of its steps.
fn loss(plot: &mut Plot, run: &RunSummary, axis: LossAxis, role: Role, share: f64) -> Option<(f64, f64)> {
    plot.curve(axis.points(run), role);
    for bucket in run.curves.loss.whole().buckets().iter().filter(|bucket| bucket.non_finite > 0) {
        plot.mark(bucket.step as f64, f64::MAX, '✕', Role::Bad);
    }
    let points: Vec<_> = axis.points(run).flatten().collect();
    points.get((points.len() as f64 * share) as usize).copied()
}

/// Draws a run's loss scale; returns the point at a share of its steps.
fn scale(plot: &mut Plot, run: &RunSummary, role: Role, share: f64) -> Option<(f64, f64)> {
    let points = run.curves.scale.points().iter().map(|point| (point.step as f64, point.value));
    plot.stairs(points, run.figures.steps as f64, role);
    for bucket in run.curves.skips.buckets().iter().filter(|bucket| bucket.count > 0) {
        plot.mark(bucket.step as f64, bucket.max, '✕', Role::Bad);
    }
    let step = (run.figures.steps as f64 * share) as u64;
    run.curves.scale.at(step).map(|level| (step as f64, level))
}

/// A table whose columns are wrapped into blocks if they do not fit.
fn blocks(page: &mut Page, width: usize, heading: &str, columns: &[String], rows: &[(String, Vec<String>)]) {
    let length = |text: &String| format::columns(text);
    let names = rows.iter().map(|(name, _)| length(name)).max().unwrap_or(0).max(heading.len()) + 1;
    let most = width.saturating_sub(names + 2).max(8);
    let cells = rows.iter().flat_map(|(_, cells)| cells).chain(columns).map(length).max().unwrap_or(0).min(most);
    let fitting = (width.saturating_sub(names) / (cells + 2)).max(1);
    for first in (0..columns.len()).step_by(fitting) {
        let part = first..columns.len().min(first + fitting);
        let row = |name: &str, values: &[String]| {
            let mut row = format::padded(name, names);
            for value in &values[part.clone()] {
                let value = format::truncated(value, cells);
                row += &" ".repeat(cells + 2 - format::columns(&value));
                row += &value;
            }
            row
        };
        page.title(row(heading, columns));
        for (name, values) in rows {
            page.push(Line::new().plain(row(name, values)));
        }
        page.gap();
    }
}
