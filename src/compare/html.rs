//! The comparison as one HTML page.
//!
//! For accessibility, groups differ by color and by dashes, every chart has a title and a description, and the figures
//! are a table.

use super::metrics::Metric;
use super::page::{means, range};
use super::report::{Comparison, EquivalenceVerdict};
use crate::telemetry::Bucket;
use crate::ui::html::{SvgAxes, escape, page, power_label, table};
use std::fmt::Write;

impl Comparison {
    pub(crate) fn html(&self) -> String {
        let names: Vec<_> = self.groups.iter().map(|group| group.name.as_str()).collect();
        let mut out = String::new();
        self.html_list(&mut out);
        self.html_conclusion(&mut out);
        for picture in [self.batch_losses(), self.validation(), self.scales()].into_iter().flatten() {
            out.push_str(&picture);
        }
        self.html_differences(&mut out);
        let caption = if self.has_samples() { "Figures, mean ± 95 % confidence" } else { "Figures" };
        out.push_str(&group_table(caption, &self.labels(Some("−")), self.figures()));
        page(&format!("Runs compared: {}", names.join(" · ")), "Runs compared", "", &out)
    }

    fn html_list(&self, out: &mut String) {
        for (i, group) in self.groups.iter().enumerate() {
            let _ = write!(out, "<h2>{} {} {}</h2>\n<ul>\n", key(i), group.label, escape(&group.name));
            for (j, run) in group.runs.iter().enumerate() {
                let label = group.run_label(j);
                let name = escape(&run.name);
                let seed = run.started.seed;
                let _ = writeln!(out, "<li>{label}: {name}, seed {seed}, {}</li>", escape(&run.end()));
            }
            out.push_str("</ul>\n");
        }
    }

    fn html_conclusion(&self, out: &mut String) {
        if let Some(text) = self.describe_perplexity() {
            let _ = writeln!(out, "<p>{}</p>", escape(&text));
        }
        for (text, verdict) in self.describe_verdict().into_iter().chain(self.describe_skips()) {
            let mark = match verdict {
                EquivalenceVerdict::Exceeded => "✕",
                EquivalenceVerdict::NotExceeded => "✓",
                EquivalenceVerdict::Undecided => "?",
            };
            let _ = writeln!(out, "<p><strong>{mark} {}</strong></p>", escape(&text));
        }
    }

    fn html_differences(&self, out: &mut String) {
        if self.differences.is_empty() {
            out.push_str("<p class=\"note\">The configurations differ only in the seed.</p>\n");
            return;
        }
        out.push_str(&group_table("Settings that differ", &self.labels(None), self.settings()));
    }

    fn axes(&self, y: (f64, f64)) -> SvgAxes {
        let last = self.runs().map(|(_, run)| run.figures.steps).max().unwrap_or(1);
        SvgAxes { x: (0.0, last.max(1) as f64), y }
    }

    fn batch_losses(&self) -> Option<String> {
        let (axis, range) = self.losses();
        let axes = self.axes(range?);
        let mut body = String::new();
        for (i, run) in self.runs() {
            axes.curve(&mut body, &class(i), axis.points(run));
            axes.broken(&mut body, run.curves.loss.whole().buckets());
        }
        let figures = self.describe("loss", "the last ten steps' loss");
        Some(axes.picture("loss", "Loss of the batches, by step", &figures, &body, axes.loss_label(|y| axis.loss(y))))
    }

    fn validation(&self) -> Option<String> {
        let axes = self.axes(range(self.runs().flat_map(|(_, run)| means(&run.curves.validation)).map(|(_, y)| y))?);
        let mut body = String::new();
        for (i, run) in self.runs() {
            axes.curve(&mut body, &class(i), run.curves.validation.buckets().iter().map(Bucket::point));
            axes.dots(&mut body, &format!("s{}", i % 4), means(&run.curves.validation));
        }
        let figures = self.describe("validation_loss", "the last validation loss");
        Some(axes.picture("validation", "Validation loss, by step", &figures, &body, axes.loss_label(|y| y)))
    }

    fn scales(&self) -> Option<String> {
        let (low, high) = range(self.runs().flat_map(|(_, run)| run.curves.scale.points()).map(|point| point.value))?;
        let axes = self.axes((low.floor() - 0.5, high.ceil() + 0.5));
        let mut body = String::new();
        for (i, run) in self.runs() {
            axes.stairs(&mut body, &class(i), &run.curves.scale, &run.curves.skips, run.figures.steps as f64);
        }
        let figures = self.describe("overflows", "overflows, each marked with a cross");
        Some(axes.picture("scale", "Loss scale, log2, by step", &figures, &body, |y| power_label(2, y)))
    }

    /// A description of a chart: its figure for each group.
    fn describe(&self, key: &str, what: &str) -> String {
        let Some(metric) = Metric::named(key) else { return String::new() };
        let groups = self.groups.iter().map(|group| {
            format!("{} ({}): {}", group.label, group.name, metric.show_estimate(group.estimate(metric), false))
        });
        format!("{what}: {}", groups.collect::<Vec<_>>().join("; "))
    }
}

/// A table whose columns are groups, or the difference of two.
fn group_table(caption: &str, labels: &[String], rows: Vec<(String, Vec<String>)>) -> String {
    let headings: Vec<_> = std::iter::once("").chain(labels.iter().map(String::as_str)).collect();
    table(caption, &headings, rows.into_iter().map(|(name, cells)| [vec![name], cells].concat()))
}

/// The class of a group's curves.
fn class(group: usize) -> String {
    format!("curve s{}", group % 4)
}

/// The line of a group in the legend.
fn key(group: usize) -> String {
    format!(
        "<svg class=\"key\" viewBox=\"0 0 48 12\" aria-hidden=\"true\"><path d=\"M0 6H48\" class=\"{}\"/></svg>",
        class(group)
    )
}
