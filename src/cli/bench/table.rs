//! Measures several types and prints one table. Each type runs in a separate process, to measure its memory alone.

use super::BenchArgs;
use crate::precision::PrecisionPolicy;
use crate::ui::{Column, Page, plain};
use crate::untrusted::subprocess::outside_job;
use crate::{Error, Result};
use serde_json::Value;
use std::process::Stdio;

/// Measures every one of `types` and compares them with FP32, if it is among them.
pub(super) fn of(args: &BenchArgs, types: &[(String, PrecisionPolicy)]) -> Result<String> {
    let reports: Vec<(&str, Value)> =
        types.iter().map(|(name, _)| Ok((name.as_str(), measure_in_subprocess(name)?))).collect::<Result<_>>()?;
    let fp32 = types.iter().position(|(_, policy)| *policy == PrecisionPolicy::FP32).map(|at| &reports[at].1);
    Ok(if args.latency.is_some() { latencies(&reports) } else { speeds(&reports, fp32) })
}

/// Runs this command for one type, and returns its report. The last `--dtype` of a command line counts.
fn measure_in_subprocess(dtype: &str) -> Result<Value> {
    let program = std::env::current_exe().map_err(Error::io("find", "this program"))?;
    let output = outside_job(program)
        .args(std::env::args_os().skip(1))
        .args(["--dtype", dtype])
        .stderr(Stdio::inherit())
        .output()
        .map_err(Error::io("start", "this program for each type"))?;
    if !output.status.success() {
        return Err(Error::config("--dtype", format!("`{dtype}` could not be measured; see the error above")));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::config("--dtype", format!("the result for `{dtype}` could not be read: {error}")))
}

/// A number of a report; NaN if it has none.
pub(super) fn figure(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or(f64::NAN)
}

fn speeds(reports: &[(&str, Value)], fp32: Option<&Value>) -> String {
    let against = |key: &str, show: &dyn Fn(f64) -> String| {
        plain(fp32.and_then(|fp32| fp32[key].as_f64()).map_or_else(|| "-".into(), show))
    };
    let share = |it: &Value, key: &str| against(key, &|fp32| format!("{:.2}", figure(it, key) / fp32));
    let distance = |it: &Value, key: &str| against(key, &|fp32| format!("{:+.1e}", figure(it, key) - fp32));
    let columns: &[Column<(&str, Value)>] = &[
        ("type", -6, &|(name, _)| plain(name)),
        ("tokens/s", 11, &|(_, it)| plain(format!("{:.0}", figure(it, "tokens_per_s")))),
        ("/ fp32", 9, &|(_, it)| share(it, "tokens_per_s")),
        ("memory MiB", 12, &|(_, it)| plain(format!("{:.1}", figure(it, "peak_rss_mib")))),
        ("/ fp32", 9, &|(_, it)| share(it, "peak_rss_mib")),
        ("first loss", 12, &|(_, it)| plain(format!("{:.5}", figure(it, "loss_first")))),
        ("- fp32", 10, &|(_, it)| distance(it, "loss_first")),
        ("last loss", 11, &|(_, it)| plain(format!("{:.5}", figure(it, "loss_last")))),
        ("- fp32", 10, &|(_, it)| distance(it, "loss_last")),
        ("skipped", 9, &|(_, it)| plain(figure(it, "skipped"))),
    ];
    let mut page = Page::new();
    page.table(reports, columns);
    page.text()
        + "\nMemory is the peak resident size of a separate process. All types start from the same weights, so the\n\
           first losses differ only by rounding."
}

fn latencies(reports: &[(&str, Value)]) -> String {
    let time = |it: &Value, what: &str, share: &str| plain(format!("{:.3}", figure(&it[what], share)));
    let columns: &[Column<(&str, Value)>] = &[
        ("type", -6, &|(name, _)| plain(name)),
        ("pass p50", 11, &|(_, it)| time(it, "forward_ms", "p50")),
        ("p95", 10, &|(_, it)| time(it, "forward_ms", "p95")),
        ("p99", 10, &|(_, it)| time(it, "forward_ms", "p99")),
        ("token p50", 13, &|(_, it)| time(it, "token_ms", "p50")),
        ("p95", 10, &|(_, it)| time(it, "token_ms", "p95")),
        ("p99", 10, &|(_, it)| time(it, "token_ms", "p99")),
        ("memory MiB", 12, &|(_, it)| plain(format!("{:.1}", figure(it, "peak_rss_mib")))),
    ];
    let mut page = Page::new();
    page.table(reports, columns);
    page.text() + "\nLatency percentiles in milliseconds: a forward pass over one sequence, and the next token."
}
