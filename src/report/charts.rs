//! The charts of a run's page.

use crate::data::counted;
use crate::telemetry::{Bucket, Curve, PLOTTED, Plotted, RunState, SMOOTHING, smoothing_for};
use crate::ui::html::{SvgAxes, escape, power_label};
use crate::ui::{extent, format};
use std::fmt::Write;

/// All charts that have data.
pub(super) fn all(run: &RunState) -> String {
    let lines = PLOTTED.iter().zip(&run.curves.plotted).enumerate().map(|(n, plotted)| line(run, n, plotted));
    [loss(run), scale(run), gradients(run)].into_iter().chain(lines).flatten().collect()
}

fn x_of(run: &RunState) -> (f64, f64) {
    (0.0, run.step.step.max(1) as f64)
}

/// The smallest and the largest value with a margin; `None` without finite values.
fn y_of(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let (low, high) = extent(values)?;
    let air = ((high - low) * 0.04).max(high.abs() * 1e-3).max(f64::MIN_POSITIVE);
    Some((low - air, high + air))
}

/// The area between the smallest and the largest value of each bucket.
fn band(axes: &SvgAxes, buckets: &[Bucket], out: &mut String) {
    for part in buckets.split(|bucket| bucket.count == 0).filter(|part| !part.is_empty()) {
        let above = part.iter().map(|bucket| (bucket.step as f64, bucket.max));
        let below = part.iter().rev().map(|bucket| (bucket.step as f64, bucket.min));
        let _ = writeln!(out, "<polygon class=\"band\" points=\"{}\"/>", axes.points(above.chain(below)));
    }
}

fn means(axes: &SvgAxes, buckets: &[Bucket], class: &str, out: &mut String) {
    axes.curve(out, class, buckets.iter().map(Bucket::point));
}

fn legend(entries: &[(&str, &str)]) -> String {
    let entries = entries.iter().map(|(shape, word)| {
        format!("<span><svg viewBox=\"0 0 32 14\" aria-hidden=\"true\">{shape}</svg>{}</span>", escape(word))
    });
    format!("<p class=\"legend\">{}</p>\n", entries.collect::<String>())
}

fn loss(run: &RunState) -> Option<String> {
    let window = smoothing_for(run.total_steps());
    let batches = run.curves.loss.since(0);
    let smoothed = run.curves.smoothed[window].since(0);
    let validation = run.curves.validation.buckets();
    let axes = SvgAxes { x: x_of(run), y: y_of(batches.iter().chain(validation).flat_map(Bucket::ends))? };
    let mut body = String::new();
    band(&axes, &batches, &mut body);
    means(&axes, &batches, "plain", &mut body);
    means(&axes, &smoothed, "smooth", &mut body);
    axes.dots(&mut body, "s1", validation.iter().filter_map(Bucket::point));
    axes.broken(&mut body, &batches);
    let figures = run.figures();
    let words = format!(
        "last ten steps {}, last and best validation loss {}",
        figures.loss.map_or_else(|| "unknown".into(), format::short),
        figures.validation.map_or_else(
            || "unknown".into(),
            |(last, best)| format!("{} and {}", format::decimals(last, 4), format::decimals(best, 4))
        ),
    );
    let window = format!("smoothed over {} steps", SMOOTHING[window]);
    let legend = legend(&[
        ("<path class=\"plain\" d=\"M0 7H32\"/>", "batches"),
        ("<path class=\"smooth\" d=\"M0 7H32\"/>", &window),
        ("<circle class=\"dot s1\" cx=\"16\" cy=\"7\" r=\"5\"/>", "validation"),
        ("<path class=\"mark\" d=\"M11 2l10 10m0 -10l-10 10\"/>", "not finite"),
    ]);
    Some(axes.picture("loss", "Loss, by step", &words, &body, axes.loss_label(|y| y)) + &legend)
}

fn scale(run: &RunState) -> Option<String> {
    if !run.scales_losses() {
        return None;
    }
    let (low, high) = extent(run.curves.scale.points().iter().map(|point| point.value))?;
    let axes = SvgAxes { x: x_of(run), y: (low.floor() - 0.5, high.ceil() + 0.5) };
    let mut body = String::new();
    axes.stairs(&mut body, "plain", &run.curves.scale, &run.curves.skips, axes.x.1);
    let words = format!("{}, each marked with a cross", counted(run.figures().overflows, "overflow"));
    let legend = legend(&[("<path class=\"mark\" d=\"M11 2l10 10m0 -10l-10 10\"/>", "overflow")]);
    Some(axes.picture("scale", "Loss scale, log2, by step", &words, &body, |y| power_label(2, y)) + &legend)
}

/// The newest histogram of gradients by exponent.
fn gradients(run: &RunState) -> Option<String> {
    let (step, scale, stats) = run.grads.as_ref()?;
    let counts = stats.histogram();
    let (low, high) = counts.lowest().zip(counts.highest())?;
    let most = counts.iter().map(|(_, count)| count).max().unwrap_or(1).max(1);
    let format = run.grad_format();
    let axes = SvgAxes { x: (f64::from(low), f64::from(high) + 1.0), y: (0.0, (most as f64 + 1.0).log10()) };
    let mut body = String::new();
    for (exponent, count) in counts.iter().filter(|(_, count)| *count > 0) {
        let class = if exponent < format.min_exponent() { "sub" } else { "bar" };
        let x = (f64::from(exponent), f64::from(exponent) + 1.0);
        axes.bar(&mut body, class, x, (count as f64 + 1.0).log10());
    }
    let share = |part| format::percent(part, stats.count);
    let words = format!(
        "{} stores them at step {step}, multiplied by the loss scale {}: zero {}, subnormal {}, not finite {}",
        format.name,
        format::scale(*scale),
        share(stats.zero),
        share(stats.subnormal),
        stats.not_finite()
    );
    let legend = legend(&[
        ("<rect class=\"bar\" x=\"4\" y=\"2\" width=\"24\" height=\"10\"/>", "normal"),
        ("<rect class=\"sub\" x=\"4\" y=\"2\" width=\"24\" height=\"10\"/>", "subnormal"),
    ]);
    let title = "Gradients by exponent (log2 of the magnitude)";
    let note = format!("<p class=\"note\">As {}.</p>\n", escape(&words));
    Some(axes.picture("gradients", title, &words, &body, |y| power_label(10, y)) + &legend + &note)
}

/// The chart of the `n`th of [`PLOTTED`].
fn line(run: &RunState, n: usize, (plotted, curve): (&Plotted, &Curve)) -> Option<String> {
    let buckets = curve.since(0);
    let axes = SvgAxes { x: x_of(run), y: y_of(buckets.iter().flat_map(Bucket::ends))? };
    let mut body = String::new();
    band(&axes, &buckets, &mut body);
    means(&axes, &buckets, "plain", &mut body);
    let label = |value| format::quantity(plotted.quantity, value);
    let last = buckets.last().and_then(Bucket::mean).map_or_else(|| "unknown".into(), label);
    let title = format!("{}, by step", plotted.title);
    Some(axes.picture(&format!("curve-{n}"), &title, &format!("at the end {last}"), &body, label))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Series;

    #[test]
    fn a_value_that_is_not_finite_interrupts_a_line() {
        let mut losses = Series::new(8);
        for (step, loss) in [(1, 2.0), (2, f64::NAN), (3, 1.0), (4, 1.5)] {
            losses.push(step, 0.0, loss);
        }
        let axes = SvgAxes { x: (0.0, 4.0), y: (0.0, 2.0) };
        let (mut lines, mut areas) = (String::new(), String::new());
        means(&axes, losses.buckets(), "plain", &mut lines);
        band(&axes, losses.buckets(), &mut areas);
        let points: Vec<_> = lines.lines().map(|line| line.matches(',').count()).collect();
        assert_eq!((points, areas.lines().count()), (vec![2, 2], 2), "{lines}{areas}");
    }
}
