//! The comparison as one HTML page that needs nothing else: no scripts, no fonts, no other files.
//!
//! Arms differ by colour and by dashes, every picture has a title and a description, and the figures are a table, so that
//! nothing depends on seeing colours, or on seeing at all. The page is well-formed XML too.

use std::fmt::Write;

use super::metrics::METRICS;
use super::page::{logarithms, means, range};
use super::report::{Arm, Report, Verdict};
use super::run::RunSummary;

/// The palette of Okabe and Ito for light and for dark backgrounds; the sky blue is too pale on white.
const STYLE: &str = "
:root { color-scheme: light dark; --back: #fff; --fore: #1c1f26; --dim: #5c6370; --line: #d0d4da;
  --c0: #0072b2; --c1: #b35900; --c2: #00775a; --c3: #a3447a; --bad: #c43d00; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181d; --fore: #d8dee9; --dim: #9aa3b2; --line: #3a3f4b;
    --c0: #56b4e9; --c1: #e69f00; --c2: #2ac9a0; --c3: #e08bbd; --bad: #ff7a45; } }
body { background: var(--back); color: var(--fore); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
svg { width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 12px; }
.axis { stroke: var(--line); fill: none; }
.curve { fill: none; stroke-width: 1.6; }
.mark { stroke: var(--bad); stroke-width: 1.8; fill: none; }
.s0 { stroke: var(--c0); color: var(--c0); } .s1 { stroke: var(--c1); color: var(--c1); stroke-dasharray: 7 3; }
.s2 { stroke: var(--c2); color: var(--c2); stroke-dasharray: 2 3; }
.s3 { stroke: var(--c3); color: var(--c3); stroke-dasharray: 9 3 2 3; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 400; }
.key { display: inline-block; width: 3rem; height: .8rem; vertical-align: middle; }
.note { color: var(--dim); }
";

/// Size of a picture, and of the margins that hold the labels of its axes.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 28.0;
const AIR: f64 = 10.0;

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
            out.push_str("<p class=\"note\">The configurations differ in the seed alone.</p>\n");
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

    fn losses(&self) -> Option<String> {
        let axes = Axes::new(self, range(self.runs().flat_map(|(_, run)| logarithms(&run.loss)).map(|(_, y)| y))?);
        let mut body = String::new();
        for (i, run) in self.runs() {
            axes.curve(&mut body, i, logarithms(&run.loss));
            for bucket in run.loss.buckets().iter().filter(|bucket| bucket.broken > 0) {
                axes.cross(&mut body, bucket.step as f64, axes.y.1);
            }
        }
        let figures = self.in_words("loss", "the last ten steps' loss");
        Some(axes.picture("loss", "Loss of the batches, by step", &figures, &body, |y| format!("{:.2}", y.exp())))
    }

    fn validation(&self) -> Option<String> {
        let axes = Axes::new(self, range(self.runs().flat_map(|(_, run)| means(&run.validation)).map(|(_, y)| y))?);
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
        let axes = Axes::new(self, (low.floor() - 0.5, high.ceil() + 0.5));
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

    /// A description of a picture: its figure for each arm.
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

/// Where data lie in a picture.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn new(report: &Report, y: (f64, f64)) -> Self {
        let last = report.runs().map(|(_, run)| run.figures.steps).max().unwrap_or(1);
        Self { x: (0.0, last.max(1) as f64), y }
    }

    fn left(&self, x: f64) -> f64 {
        LEFT + (x - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - AIR)
    }

    fn top(&self, y: f64) -> f64 {
        AIR + (self.y.1 - y) / (self.y.1 - self.y.0) * (HEIGHT - BOTTOM - AIR)
    }

    fn curve(&self, out: &mut String, arm: usize, points: impl Iterator<Item = (f64, f64)>) {
        let points: Vec<_> = points.map(|(x, y)| format!("{:.1},{:.1}", self.left(x), self.top(y))).collect();
        let _ = writeln!(out, "<polyline class=\"curve s{}\" points=\"{}\"/>", arm % 4, points.join(" "));
    }

    fn cross(&self, out: &mut String, x: f64, y: f64) {
        let (x, y) = (self.left(x), self.top(y));
        let _ = writeln!(out, "<path class=\"mark\" d=\"M{:.1} {:.1}l8 8m0 -8l-8 8\"/>", x - 4.0, y - 4.0);
    }

    /// The picture with axes and labels, under a heading.
    fn picture(&self, id: &str, title: &str, words: &str, body: &str, label: impl Fn(f64) -> String) -> String {
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - AIR);
        let mut out = format!(
            "<svg role=\"img\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" aria-labelledby=\"{id}-title {id}-words\">\n\
             <title id=\"{id}-title\">{title}</title>\n<desc id=\"{id}-words\">{}</desc>\n",
            escape(words)
        );
        for y in ticks(self.y, 5) {
            let top = self.top(y);
            let _ = writeln!(
                out,
                "<path class=\"axis\" d=\"M{LEFT} {top:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                top + 4.0,
                label(y)
            );
        }
        for x in ticks(self.x, 8) {
            let left = self.left(x);
            let _ = writeln!(
                out,
                "<path class=\"axis\" d=\"M{left:.1} {bottom}v5\"/><text x=\"{left:.1}\" y=\"{}\" text-anchor=\"middle\">{x}</text>",
                bottom + 18.0
            );
        }
        format!("<h2>{title}</h2>\n{out}{body}</svg>\n")
    }
}

/// At most `most` round numbers of a range, a step of 1, 2 or 5 times a power of ten apart.
fn ticks((low, high): (f64, f64), most: usize) -> Vec<f64> {
    let span = high - low;
    let power = 10f64.powf((span / most as f64).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = step.into_iter().find(|step| span / step < most as f64).unwrap_or(10.0 * power);
    let count = ((high / step).floor() - (low / step).ceil()).max(0.0) as usize;
    // Multiplied, and rounded where a binary fraction would show.
    (0..=count).map(|i| (((low / step).ceil() + i as f64) * step * 1e9).round() / 1e9).collect()
}

/// Text that no browser takes for markup; control characters, which XML forbids, become blanks.
fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks((0.0, 600.0), 8), [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0]);
        assert_eq!(ticks((0.55, 0.73), 5), [0.55, 0.6, 0.65, 0.7]);
        assert_eq!(ticks((15.5, 24.5), 5), [16.0, 18.0, 20.0, 22.0, 24.0]);
        assert_eq!(ticks((0.0, 1.0), 8).len(), 6);
    }

    #[test]
    fn markup_and_control_characters_are_defused() {
        assert_eq!(escape("<b a='1'>&\"\u{1b}[2J"), "&lt;b a=&#39;1&#39;&gt;&amp;&quot; [2J");
    }
}
