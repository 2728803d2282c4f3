//! The tables of a run's page.

use crate::compare::METRICS;
use crate::telemetry::{OverflowRow, RunMetrics, RunState};
use crate::ui::{format, html::escape, html::table};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Maximum number of rows of a long table.
const ROWS: usize = 100;
const SAMPLES: usize = 20;

pub(super) fn figures(figures: &RunMetrics) -> String {
    let rows = METRICS
        .iter()
        .filter_map(|metric| Some(vec![metric.name.to_owned(), metric.show(Some((metric.of)(figures)?))]));
    "<h2>Figures</h2>\n".to_owned() + &table("Results", &[" figure", "value"], rows)
}

pub(super) fn overflows(run: &RunState) -> String {
    let mut out = String::from("<h2>Overflows</h2>\n");
    if run.overflows.is_empty() {
        return out + "<p>None.</p>\n";
    }
    let row = |row: &OverflowRow| {
        let origin = row.origin.as_ref().map_or_else(
            || "not traced".to_owned(),
            |origin| format!("{} pass, {} of {}", origin.pass, origin.tensor.replace('_', " "), origin.layer),
        );
        let more = if row.more > 0 { format!(" and {} more", row.more) } else { String::new() };
        let scale = format!("{} → {}", format::scale(row.scale.from), format::scale(row.scale.to));
        vec![row.step.to_string(), scale, origin, row.tensors.join(", ") + &more]
    };
    let all = run.figures().overflows;
    let caption = match run.overflows.len().min(ROWS) as u64 {
        shown if shown < all => format!("The last {shown} of {all}, newest first"),
        _ => "Newest first".to_owned(),
    };
    let headings = ["step", "loss scale", " where it began", " tensors that were not finite"];
    out.push_str(&table(&caption, &headings, run.overflows.iter().rev().take(ROWS).map(row)));
    out
}

pub(super) fn precision(run: &RunState) -> String {
    let started = run.started.as_ref();
    let figures = run.figures();
    let share = |share: Option<f64>| share.map_or_else(|| "not measured".to_owned(), format::share);
    let fallback = run.in_fallback();
    let facts = [
        ("policy", started.map_or_else(String::new, |started| started.policy.clone())),
        ("gradients are stored as", run.grad_format().name.to_owned()),
        ("loss scaling", if run.scales_losses() { "on".to_owned() } else { "off".to_owned() }),
        ("subnormal gradients", share(figures.subnormal)),
        ("flushed to zero (FP32 probes)", share(figures.flushed)),
        ("lost updates", format::lost_updates(run).unwrap_or_else(|| "not measured".to_owned())),
        ("layers in a wider dtype at the end", if fallback.is_empty() { "none".to_owned() } else { fallback }),
    ];
    let mut out = String::from("<h2>Precision</h2>\n<dl>\n");
    for (what, value) in facts {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(what), escape(&value));
    }
    out.push_str("</dl>\n");
    if !run.tensors.rows.is_empty() {
        let rows = run.tensors.rows.iter().take(10 * ROWS).map(|row| {
            let stats = &row.stats;
            // Before its first table, only a probe or an overflow has named the tensor.
            let share = |part| if stats.count == 0 { "–".into() } else { format::percent(part, stats.count) };
            let flushed = row.flushed.map_or_else(|| "–".into(), |(flushed, of)| format::percent(flushed, of));
            vec![
                row.name.clone(),
                format::magnitude(stats.min_abs),
                // None without a finite value.
                format::magnitude(stats.min_abs.and(Some(stats.max_abs))),
                share(stats.zero),
                share(stats.subnormal),
                flushed,
                row.overflows.to_string(),
            ]
        });
        let at = if run.tensors.step == 0 { String::new() } else { format!(", at step {}", run.tensors.step) };
        let caption = format!("Gradients of each tensor as stored{at}");
        let headings = [" tensor", "min |g|", "max |g|", "zero", "subnormal", "underflow", "overflows"];
        let _ = write!(out, "<details><summary>Tensors</summary>\n{}</details>\n", table(&caption, &headings, rows));
    }
    out
}

pub(super) fn samples(run: &RunState) -> String {
    if run.samples.is_empty() {
        return String::new();
    }
    let lines = |text: &str| text.lines().map(escape).collect::<Vec<_>>().join("<br/>");
    let mut out = String::from("<h2>Samples</h2>\n");
    for sample in run.samples.iter().rev().take(SAMPLES) {
        let loss = sample.loss.map(|loss| format!(", smoothed loss {}", format::loss(loss))).unwrap_or_default();
        let _ = write!(
            out,
            "<p class=\"note\">step {}{loss}</p>\n<blockquote><strong>{}</strong>{}</blockquote>\n",
            sample.step,
            lines(&sample.prompt),
            lines(&sample.text)
        );
    }
    out
}

pub(super) fn settings(settings: &BTreeMap<String, String>) -> String {
    let rows = settings.iter().map(|(key, value)| vec![key.clone(), value.clone()]);
    "<h2>Configuration</h2>\n".to_owned()
        + &table("Every setting, and under run. the machine", &[" key", " value"], rows)
}
