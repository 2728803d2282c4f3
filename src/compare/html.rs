//! The comparison as one self-contained HTML page, without scripts, fonts or other files.
//!
//! For accessibility, arms differ by colour and by dashes, every chart has a title and a description, and the figures are a
//! table. The page is well-formed XML.

use std::fmt::Write;

use super::chart::{Axes, STYLE, escape};
use super::metrics::METRICS;
use super::page::{logarithms, means, range};
use super::report::{Arm, Report, Verdict};
use super::run::RunSummary;

impl Report {
    /// The report as an HTML page.
    pub fn html(&self) -> String {
        let names: Vec<_> = self.arms.iter().map(|arm| arm.name.as_str()).collect();
        let title = escape(&names.join(" · "));
        let mut out = format!(
            "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta charset=\"utf-8\"/>\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
             <title>Runs compared: {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Runs compared</h1>\n"
        );
        self.html_list(&mut out);
        self.html_conclusion(&mut out);
        for picture in [self.losses(), self.validation(), self.scales()].into_iter().flatten() {
            out.push_str(&picture);
        }
        self.html_differences(&mut out);
        self.html_figures(&mut out);
        out + "</main>\n</body>\n</html>\n"
    }

    fn html_list(&self, out: &mut String) {
        for (i, arm) in self.arms.iter().enumerate() {
            let _ = write!(out, "<h2>{} {} {}</h2>\n<ul>\n", key(i), arm.label, escape(&arm.name));
            for (j, run) in arm.runs.iter().enumerate() {
                let (label, name, seed) = (arm.run_label(j), escape(&run.name), run.started.seed);
                let _ = writeln!(out, "<li>{label}: {name}, seed {seed}, {}</li>", escape(&run.end()));
            }
            out.push_str("</ul>\n");
        }
    }

    fn html_conclusion(&self, out: &mut String) {
        if let Some(text) = self.perplexity_in_words() {
            let _ = writeln!(out, "<p>{}</p>", escape(&text));
        }
        if let Some((text, verdict)) = self.verdict_in_words() {
            let mark = match verdict {
                Verdict::Exceeded => "✕",
                Verdict::NotExceeded => "✓",
                Verdict::Undecided => "?",
            };
            let _ = writeln!(out, "<p><strong>{mark} {}</strong></p>", escape(&text));
        }
    }

    fn html_differences(&self, out: &mut String) {
        if self.differences.is_empty() {
            out.push_str("<p class=\"note\">The configurations differ only in the seed.</p>\n");
            return;
        }
        let rows = self.differences.iter().map(|difference| (difference.key.as_str(), difference.values.clone()));
        self.html_table(out, "Settings that differ", None, rows);
    }

    fn html_figures(&self, out: &mut String) {
        let difference = match &self.arms[..] {
            [first, second] => Some(format!("{} − {}", second.label, first.label)),
            _ => None,
        };
        let caption = if self.has_samples() { "Figures, mean ± 95 % confidence" } else { "Figures" };
        let rows = self.metrics().map(|metric| {
            let of_arm = |arm: &Arm| metric.show_estimate(arm.estimate(metric), false);
            let mut cells: Vec<String> = self.arms.iter().map(of_arm).collect();
            if difference.is_some() {
                cells.push(metric.show_estimate(self.difference(metric), true));
            }
            (metric.name, cells)
        });
        self.html_table(out, caption, difference.as_deref(), rows);
    }

    fn html_table<'a>(
        &self,
        out: &mut String,
        caption: &str,
        last: Option<&str>,
        rows: impl Iterator<Item = (&'a str, Vec<String>)>,
    ) {
        let _ = write!(out, "<div class=\"scroll\"><table>\n<caption>{caption}</caption>\n<thead><tr><td></td>");
        for label in self.arms.iter().map(|arm| arm.label.as_str()).chain(last) {
            let _ = write!(out, "<th scope=\"col\">{label}</th>");
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        for (name, cells) in rows {
            let _ = write!(out, "<tr><th scope=\"row\">{}</th>", escape(name));
            for cell in cells {
                let _ = write!(out, "<td>{}</td>", escape(&cell));
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody>\n</table></div>\n");
    }

    fn runs(&self) -> impl Iterator<Item = (usize, &RunSummary)> {
        self.arms.iter().enumerate().flat_map(|(i, arm)| arm.runs.iter().map(move |run| (i, run)))
    }

    fn axes(&self, y: (f64, f64)) -> Axes {
        let last = self.runs().map(|(_, run)| run.figures.steps).max().unwrap_or(1);
        Axes { x: (0.0, last.max(1) as f64), y }
    }

    fn losses(&self) -> Option<String> {
        let axes = self.axes(range(self.runs().flat_map(|(_, run)| logarithms(&run.loss)).map(|(_, y)| y))?);
        let mut body = String::new();
        for (i, run) in self.runs() {
            axes.curve(&mut body, i, logarithms(&run.loss));
            for bucket in run.loss.buckets().iter().filter(|bucket| bucket.non_finite > 0) {
                axes.cross(&mut body, bucket.step as f64, axes.y.1);
            }
        }
        let figures = self.in_words("loss", "the last ten steps' loss");
        Some(axes.picture("loss", "Loss of the batches, by step", &figures, &body, |y| format!("{:.2}", y.exp())))
    }

    fn validation(&self) -> Option<String> {
        let axes = self.axes(range(self.runs().flat_map(|(_, run)| means(&run.validation)).map(|(_, y)| y))?);
        let mut body = String::new();
        for (i, run) in self.runs() {
            axes.curve(&mut body, i, means(&run.validation));
            for (x, y) in means(&run.validation) {
                let (x, y) = (axes.left(x), axes.top(y));
                let _ = writeln!(
                    body,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" class=\"s{}\" fill=\"currentColor\"/>",
                    i % 4
                );
            }
        }
        let figures = self.in_words("validation_loss", "the last validation loss");
        Some(axes.picture("validation", "Validation loss, by step", &figures, &body, |y| format!("{y:.3}")))
    }

    fn scales(&self) -> Option<String> {
        let (low, high) = range(self.runs().flat_map(|(_, run)| run.scale.points()).map(|point| point.value))?;
        let axes = self.axes((low.floor() - 0.5, high.ceil() + 0.5));
        let mut body = String::new();
        for (i, run) in self.runs() {
            let points = run.scale.points();
            let ends = points.iter().skip(1).map(|next| next.step as f64).chain([run.figures.steps as f64]);
            let corners = points.iter().zip(ends).flat_map(|(p, end)| [(p.step as f64, p.value), (end, p.value)]);
            axes.curve(&mut body, i, corners);
            for bucket in run.overflows.buckets().iter().filter(|bucket| bucket.count > 0) {
                axes.cross(&mut body, bucket.step as f64, bucket.max);
            }
        }
        let figures = self.in_words("overflows", "overflows, each marked with a cross");
        Some(axes.picture("scale", "Loss scale, log2, by step", &figures, &body, |y| format!("2^{y:.0}")))
    }

    /// A description of a chart: its figure for each arm.
    fn in_words(&self, key: &str, what: &str) -> String {
        let Some(metric) = METRICS.iter().find(|metric| metric.key == key) else { return String::new() };
        let arms = self
            .arms
            .iter()
            .map(|arm| format!("{} ({}): {}", arm.label, arm.name, metric.show_estimate(arm.estimate(metric), false)));
        format!("{what}: {}", arms.collect::<Vec<_>>().join("; "))
    }
}

/// The line of an arm in the legend.
fn key(arm: usize) -> String {
    format!(
        "<svg class=\"key\" viewBox=\"0 0 48 12\" aria-hidden=\"true\"><path d=\"M0 6H48\" class=\"curve s{}\"/></svg>",
        arm % 4
    )
}
