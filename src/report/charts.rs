//! The charts of a run's page.

use crate::compare::chart::{Axes, HEIGHT, escape};
use crate::telemetry::{Bucket, Curve, RunState, SMOOTHING, histogram, smoothing_for};
use crate::ui::format;
use std::fmt::Write;

/// All charts that have data.
pub(super) fn all(run: &RunState) -> String {
    let curves = &run.curves;
    let bytes = |y: f64| format::bytes(y.max(0.0) as u64);
    let charts = [
        loss(run),
        scale(run),
        gradients(run),
        line(run, "lr", "Learning rate, by step", &curves.lr, |y| format!("{y:.1e}")),
        line(run, "norm", "Global gradient norm before clipping, by step", &curves.grad_norm, format::short),
        line(run, "speed", "Tokens a second, by step", &curves.tokens_per_s, |y| format!("{y:.0}")),
        line(run, "memory", "Resident memory, by step", &curves.memory, bytes),
    ];
    charts.into_iter().flatten().collect()
}

fn x_of(run: &RunState) -> (f64, f64) {
    (0.0, run.step.step.max(1) as f64)
}

/// The smallest and the largest value with a margin; `None` without finite values.
fn y_of(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|value| value.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)));
    let air = ((high - low) * 0.04).max(high.abs() * 1e-3).max(f64::MIN_POSITIVE);
    (low <= high).then_some((low - air, high + air))
}

fn ends(buckets: &[Bucket]) -> impl Iterator<Item = f64> + '_ {
    buckets.iter().filter(|bucket| bucket.count > 0).flat_map(|bucket| [bucket.min, bucket.max])
}

/// The area between the smallest and the largest value of each bucket.
fn band(axes: &Axes, buckets: &[Bucket], out: &mut String) {
    let shown = || buckets.iter().filter(|bucket| bucket.count > 0);
    let at = |x: u64, y: f64| format!("{:.1},{:.1}", axes.left(x as f64), axes.top(y));
    let above = shown().map(|bucket| at(bucket.step, bucket.max));
    let below = shown().rev().map(|bucket| at(bucket.step, bucket.min));
    let points: Vec<_> = above.chain(below).collect();
    let _ = writeln!(out, "<polygon class=\"band\" points=\"{}\"/>", points.join(" "));
}

fn means(axes: &Axes, buckets: &[Bucket], class: &str, out: &mut String) {
    let points = buckets.iter().filter_map(|bucket| Some((bucket.step as f64, bucket.mean()?)));
    let points: Vec<_> = points.map(|(x, y)| format!("{:.1},{:.1}", axes.left(x), axes.top(y))).collect();
    let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
}

fn legend(entries: &[(&str, &str)]) -> String {
    let entries = entries.iter().map(|(shape, word)| {
        format!("<span><svg viewBox=\"0 0 32 14\" aria-hidden=\"true\">{shape}</svg>{}</span>", escape(word))
    });
    format!("<p class=\"legend\">{}</p>\n", entries.collect::<String>())
}

fn loss(run: &RunState) -> Option<String> {
    let window = smoothing_for(run.total_steps());
    let (batches, smoothed) = (run.curves.loss.since(0), run.curves.smoothed[window].since(0));
    let validation = run.curves.validation.buckets();
    let axes = Axes { x: x_of(run), y: y_of(ends(&batches).chain(ends(validation)))? };
    let mut body = String::new();
    band(&axes, &batches, &mut body);
    means(&axes, &batches, "plain", &mut body);
    means(&axes, &smoothed, "smooth", &mut body);
    for (x, y) in validation.iter().filter_map(|bucket| Some((bucket.step as f64, bucket.mean()?))) {
        let _ =
            writeln!(body, "<circle class=\"point\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\"/>", axes.left(x), axes.top(y));
    }
    for bucket in batches.iter().filter(|bucket| bucket.non_finite > 0) {
        axes.cross(&mut body, bucket.step as f64, axes.y.1);
    }
    let figures = run.figures();
    let words = format!(
        "last ten steps {}, last and best validation loss {}",
        figures.loss.map_or_else(|| "unknown".into(), format::short),
        figures.validation.map_or_else(|| "unknown".into(), |(last, best)| format!("{last:.4} and {best:.4}")),
    );
    let window = format!("smoothed over {} steps", SMOOTHING[window]);
    let legend = legend(&[
        ("<path class=\"plain\" d=\"M0 7H32\"/>", "batches"),
        ("<path class=\"smooth\" d=\"M0 7H32\"/>", &window),
        ("<circle class=\"point\" cx=\"16\" cy=\"7\" r=\"5\"/>", "validation"),
        ("<path class=\"mark\" d=\"M11 2l10 10m0 -10l-10 10\"/>", "not finite"),
    ]);
    Some(axes.picture("loss", "Loss, by step", &words, &body, |y| format!("{y:.2}")) + &legend)
}

fn scale(run: &RunState) -> Option<String> {
    let points = run.curves.scale.points();
    if !run.scales_losses() {
        return None;
    }
    let (low, high) =
        points.iter().map(|point| (point.value, point.value)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
    let axes = Axes { x: x_of(run), y: (low.floor() - 0.5, high.ceil() + 0.5) };
    let ends = points.iter().skip(1).map(|next| next.step as f64).chain([axes.x.1]);
    let corners = points.iter().zip(ends).flat_map(|(p, end)| [(p.step as f64, p.value), (end, p.value)]);
    let corners: Vec<_> = corners.map(|(x, y)| format!("{:.1},{:.1}", axes.left(x), axes.top(y))).collect();
    let mut body = format!("<polyline class=\"plain\" points=\"{}\"/>\n", corners.join(" "));
    for skip in run.curves.skips.buckets().iter().filter(|skip| skip.count > 0) {
        axes.cross(&mut body, skip.step as f64, skip.max);
    }
    let words = format!("{} overflows, each marked with a cross", run.figures().overflows);
    let legend = legend(&[("<path class=\"mark\" d=\"M11 2l10 10m0 -10l-10 10\"/>", "overflow")]);
    Some(axes.picture("scale", "Loss scale, log2, by step", &words, &body, |y| format!("2^{y:.0}")) + &legend)
}

/// The newest histogram of gradients by exponent.
fn gradients(run: &RunState) -> Option<String> {
    let (step, scale, stats) = run.grads.as_ref()?;
    let counts = histogram(stats);
    let (low, high) = counts.lowest().zip(counts.highest())?;
    let most = counts.iter().map(|(_, count)| count).max().unwrap_or(1).max(1);
    let format = run.grad_format();
    let axes = Axes { x: (f64::from(low), f64::from(high) + 1.0), y: (0.0, (most as f64 + 1.0).log10()) };
    let mut body = String::new();
    for (exponent, count) in counts.iter().filter(|(_, count)| *count > 0) {
        let class = if exponent < format.min_exponent() { "sub" } else { "bar" };
        let (left, right) = (axes.left(f64::from(exponent)), axes.left(f64::from(exponent) + 1.0));
        let top = axes.top((count as f64 + 1.0).log10());
        let bottom = HEIGHT - crate::compare::chart::BOTTOM;
        let _ = writeln!(
            body,
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            (right - left - 1.0).max(0.5),
            (bottom - top).max(0.0)
        );
    }
    let share = |part| format::percent(part, stats.count);
    let words = format!(
        "{} stores them at step {step}, times the loss scale {}: zero {}, subnormal {}, not finite {}",
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
    Some(axes.picture("gradients", title, &words, &body, |y| format!("10^{y:.0}")) + &legend + &note)
}

fn line(run: &RunState, id: &str, title: &str, curve: &Curve, label: fn(f64) -> String) -> Option<String> {
    let buckets = curve.since(0);
    let axes = Axes { x: x_of(run), y: y_of(ends(&buckets))? };
    let mut body = String::new();
    band(&axes, &buckets, &mut body);
    means(&axes, &buckets, "plain", &mut body);
    let last = buckets.last().and_then(Bucket::mean).map_or_else(|| "unknown".into(), label);
    Some(axes.picture(id, title, &format!("at the end {last}"), &body, label))
}
