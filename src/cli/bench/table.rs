//! Measures several types and prints one table. Each type runs in a separate process, to measure its memory alone.

use super::BenchArgs;
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use serde_json::Value;
use std::fmt::Write as _;
use std::process::{Command, Stdio};

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
    let output = Command::new(program)
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

fn speeds(reports: &[(&str, Value)], fp32: Option<&Value>) -> String {
    let mut text = format!(
        "{:<6} {:>10} {:>8} {:>11} {:>8} {:>11} {:>9} {:>10} {:>9} {:>8}",
        "type", "tokens/s", "/ fp32", "memory MiB", "/ fp32", "first loss", "- fp32", "last loss", "- fp32", "skipped"
    );
    for (name, report) in reports {
        let figure = |key: &str| report[key].as_f64().unwrap_or(f64::NAN);
        let against = |key: &str| fp32.and_then(|fp32| fp32[key].as_f64());
        let share = |key: &str| against(key).map_or_else(|| "-".into(), |fp32| format!("{:.2}", figure(key) / fp32));
        let distance =
            |key: &str| against(key).map_or_else(|| "-".into(), |fp32| format!("{:+.1e}", figure(key) - fp32));
        let _ = write!(
            text,
            "\n{name:<6} {:>10.0} {:>8} {:>11.1} {:>8} {:>11.5} {:>9} {:>10.5} {:>9} {:>8}",
            figure("tokens_per_s"),
            share("tokens_per_s"),
            figure("peak_rss_mib"),
            share("peak_rss_mib"),
            figure("loss_first"),
            distance("loss_first"),
            figure("loss_last"),
            distance("loss_last"),
            figure("skipped"),
        );
    }
    text + "\n\nMemory is the peak resident size of a separate process. All types start from the same weights, so the\n\
            first losses differ only by rounding."
}

fn latencies(reports: &[(&str, Value)]) -> String {
    let mut text = format!(
        "{:<6} {:>10} {:>9} {:>9} {:>12} {:>9} {:>9} {:>11}",
        "type", "pass p50", "p95", "p99", "token p50", "p95", "p99", "memory MiB"
    );
    for (name, report) in reports {
        let time = |what: &str, share: &str| report[what][share].as_f64().unwrap_or(f64::NAN);
        let [pass, token] = ["forward_ms", "token_ms"].map(|what| ["p50", "p95", "p99"].map(|share| time(what, share)));
        let _ = write!(
            text,
            "\n{name:<6} {:>10.3} {:>9.3} {:>9.3} {:>12.3} {:>9.3} {:>9.3} {:>11.1}",
            pass[0],
            pass[1],
            pass[2],
            token[0],
            token[1],
            token[2],
            report["peak_rss_mib"].as_f64().unwrap_or(f64::NAN)
        );
    }
    text + "\n\nLatency percentiles in milliseconds: a forward pass over one sequence, and the next token."
}
