//! Self-contained HTML pages, without scripts, fonts or other files: their frame and style, tables, and charts as
//! inline SVG. They support light and dark mode, and are well-formed XML.

use super::format::{decimals, decimals_for};
use crate::telemetry::{Bucket, Series, StepSeries};
use std::fmt::Write;

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
polyline { stroke-linecap: round; }
.curve { fill: none; stroke-width: 1.6; }
.mark { stroke: var(--bad); stroke-width: 1.8; fill: none; }
.s0 { stroke: var(--c0); color: var(--c0); } .s1 { stroke: var(--c1); color: var(--c1); stroke-dasharray: 7 3; }
.s2 { stroke: var(--c2); color: var(--c2); stroke-dasharray: 2 3; }
.s3 { stroke: var(--c3); color: var(--c3); stroke-dasharray: 9 3 2 3; }
.dot { fill: currentColor; stroke: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 400; }
.key { display: inline-block; width: 3rem; height: .8rem; vertical-align: middle; }
.note { color: var(--dim); }
";

/// A page with a title, a first heading, and a body. `style` is added to the style of tables and charts.
pub(crate) fn page(title: &str, heading: &str, style: &str, body: &str) -> String {
    let (title, heading) = (escape(title), escape(heading));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>{title}</title>\n\
         <style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n<h1>{heading}</h1>\n{body}</main>\n</body>\n</html>\n"
    )
}

/// A table. A column without a heading heads its rows; one whose heading starts with a space is text.
pub(crate) fn table(caption: &str, headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let class = |column: usize| if headings[column].starts_with(' ') { " class=\"text\"" } else { "" };
    let mut out = format!("<div class=\"scroll\"><table>\n<caption>{}</caption>\n<thead><tr>", escape(caption));
    for (column, heading) in headings.iter().enumerate() {
        let _ = match *heading {
            "" => write!(out, "<td></td>"),
            heading => write!(out, "<th scope=\"col\"{}>{}</th>", class(column), escape(heading.trim())),
        };
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let _ = match headings[column] {
                "" => write!(out, "<th scope=\"row\">{}</th>", escape(cell)),
                _ => write!(out, "<td{}>{}</td>", class(column), escape(cell)),
            };
        }
        out.push_str("</tr>\n");
    }
    out + "</tbody>\n</table></div>\n"
}

/// Size of a chart, and of the margins for the labels of its axes.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 28.0;
const AIR: f64 = 10.0;
/// Room for half of the last step's number.
const RIGHT: f64 = 28.0;
/// Maximum number of ticks of the y axis.
const TICKS: usize = 5;

/// The mapping of data to positions in a chart.
pub(crate) struct SvgAxes {
    pub(crate) x: (f64, f64),
    pub(crate) y: (f64, f64),
}

impl SvgAxes {
    fn left(&self, x: f64) -> f64 {
        LEFT + (x - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn top(&self, y: f64) -> f64 {
        AIR + (self.y.1 - y) / (self.y.1 - self.y.0) * (HEIGHT - BOTTOM - AIR)
    }

    /// The label of a loss at a tick of the y axis; `loss` is the inverse of the scale.
    pub(crate) fn loss_label<L: Fn(f64) -> f64>(&self, loss: L) -> impl Fn(f64) -> String + use<L> {
        let losses: Vec<_> = ticks(self.y, TICKS).into_iter().map(&loss).collect();
        let least = losses.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
        let count = decimals_for(least, 2);
        move |y| decimals(loss(y), count)
    }

    /// Positions in an SVG attribute: `left,top left,top`.
    pub(crate) fn points(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        points.map(|(x, y)| format!("{:.1},{:.1}", self.left(x), self.top(y))).collect::<Vec<_>>().join(" ")
    }

    /// A line that each missing point interrupts.
    pub(crate) fn curve(&self, out: &mut String, class: &str, points: impl Iterator<Item = Option<(f64, f64)>>) {
        let points: Vec<_> = points.collect();
        for part in points.split(Option::is_none).filter(|part| !part.is_empty()) {
            // A line of one point would not be visible.
            let part = if let [only] = part { &[*only, *only] } else { part };
            let _ = writeln!(
                out,
                "<polyline class=\"{class}\" points=\"{}\"/>",
                self.points(part.iter().copied().flatten())
            );
        }
    }

    /// A staircase of levels that each hold until the next, the last until `end`, with a cross at each skipped step.
    pub(crate) fn stairs(&self, out: &mut String, class: &str, levels: &StepSeries, skips: &Series, end: f64) {
        let points = levels.points();
        let ends = points.iter().skip(1).map(|next| next.step as f64).chain([end]);
        let corners = points.iter().zip(ends).flat_map(|(p, end)| [(p.step as f64, p.value), (end, p.value)]);
        self.curve(out, class, corners.map(Some));
        for skip in skips.buckets().iter().filter(|skip| skip.count > 0) {
            self.cross(out, skip.step as f64, skip.max);
        }
    }

    pub(crate) fn dots(&self, out: &mut String, class: &str, points: impl Iterator<Item = (f64, f64)>) {
        for (x, y) in points {
            let (x, y) = (self.left(x), self.top(y));
            let _ = writeln!(out, "<circle class=\"dot {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        }
    }

    /// A cross at the top for each bucket with a value that is not finite.
    pub(crate) fn broken(&self, out: &mut String, buckets: &[Bucket]) {
        for bucket in buckets.iter().filter(|bucket| bucket.non_finite > 0) {
            self.cross(out, bucket.step as f64, self.y.1);
        }
    }

    fn cross(&self, out: &mut String, x: f64, y: f64) {
        let (x, y) = (self.left(x), self.top(y));
        let _ = writeln!(out, "<path class=\"mark\" d=\"M{:.1} {:.1}l8 8m0 -8l-8 8\"/>", x - 4.0, y - 4.0);
    }

    /// A bar from the bottom of the chart, between two values of x.
    pub(crate) fn bar(&self, out: &mut String, class: &str, x: (f64, f64), y: f64) {
        let left = self.left(x.0);
        let right = self.left(x.1);
        let top = self.top(y);
        let _ = writeln!(
            out,
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            (right - left - 1.0).max(0.5),
            (HEIGHT - BOTTOM - top).max(0.0)
        );
    }

    /// The chart with axes, labels and a heading.
    pub(crate) fn picture(
        &self,
        id: &str,
        title: &str,
        words: &str,
        body: &str,
        label: impl Fn(f64) -> String,
    ) -> String {
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        let mut out = format!(
            "<svg role=\"img\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" aria-labelledby=\"{id}-title {id}-words\">\n\
             <title id=\"{id}-title\">{title}</title>\n<desc id=\"{id}-words\">{}</desc>\n",
            escape(words)
        );
        for y in ticks(self.y, TICKS) {
            let top = self.top(y);
            let _ = writeln!(
                out,
                "<path class=\"axis\" d=\"M{LEFT} {top:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                top + 4.0,
                escape(&label(y))
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

/// At most `most` round numbers in a range, spaced by 1, 2 or 5 times a power of ten.
fn ticks((low, high): (f64, f64), most: usize) -> Vec<f64> {
    let span = high - low;
    let exponent = (span / most as f64).log10().floor().clamp(-300.0, 300.0) as i32;
    // Dividing by a power of ten rounds once; multiplying by its inverse would leave binary fractions.
    let scaled = |x: f64| if exponent < 0 { x / 10f64.powi(-exponent) } else { x * 10f64.powi(exponent) };
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| span / scaled(*factor) < most as f64).unwrap_or(10.0);
    let (first, last) = ((low / scaled(factor)).ceil(), (high / scaled(factor)).floor());
    (0..=(last - first).max(0.0) as usize).take(most).map(|i| scaled((first + i as f64) * factor)).collect()
}

/// The label of `base`^`y` on a logarithmic axis; empty between integers.
pub(crate) fn power_label(base: u32, y: f64) -> String {
    if y.fract() == 0.0 { format!("{base}^{y}") } else { String::new() }
}

/// Escapes text for markup; control characters, which XML forbids, become spaces.
pub(crate) fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if crate::untrusted::is_unsafe_char(c) => out.push(' '),
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
        assert_eq!(ticks((0.0, 3e-10), 5), [0.0, 1e-10, 2e-10, 3e-10]);
        assert_eq!(ticks((-f64::MIN_POSITIVE, f64::MIN_POSITIVE), 5), [0.0]);
        assert!(ticks((-1e308, 1e308), 5).len() <= 5, "a damaged log");
    }

    #[test]
    fn ticks_of_losses_have_labels_that_differ() {
        let labels = |y, loss: fn(f64) -> f64| {
            let axes = SvgAxes { x: (0.0, 1.0), y };
            ticks(y, TICKS).into_iter().map(axes.loss_label(loss)).collect::<Vec<_>>()
        };
        assert_eq!(labels((0.55, 0.73), |y| y), ["0.55", "0.60", "0.65", "0.70"]);
        assert_eq!(labels((0.7931, 0.7949), |y| y), ["0.7935", "0.7940", "0.7945"]);
        assert_eq!(labels((-7.3, -4.9), f64::exp), ["0.0009", "0.0015", "0.0025", "0.0041", "0.0067"]);
    }

    #[test]
    fn only_whole_powers_have_labels() {
        let labels: Vec<_> = ticks((15.5, 16.5), 5).into_iter().map(|y| power_label(2, y)).collect();
        assert_eq!(labels, ["", "2^16", ""]);
    }

    #[test]
    fn markup_and_control_characters_are_escaped() {
        assert_eq!(escape("<b a='1'>&\"\u{1b}[2J"), "&lt;b a=&#39;1&#39;&gt;&amp;&quot; [2J");
    }
}
