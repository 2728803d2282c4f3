//! `finetune export-metrics`: exports a run's figures as a table or as TensorBoard event files.

use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, find_log, output_file};
use crate::precision::UpdateCounts;
use crate::telemetry::float;
use crate::telemetry::{
    Detail, Event, Fp32Probe, Record, RunState, Sink, StepRecord, Tail, TensorBoard, Validation, for_each,
};
use crate::{Error, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::to_string;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

#[derive(Args, Clone, Debug)]
pub(crate) struct ExportMetricsArgs {
    /// A run's name or folder, or its events file [default: the newest run]
    run: Option<PathBuf>,
    /// The format: a table with a row for each step, or an event file with scalars and histograms
    #[arg(long, value_enum, default_value = "csv")]
    format: MetricsFormat,
    /// The file to write, or the folder for TensorBoard [default: standard output, or `tensorboard` in the run's
    /// folder]
    #[arg(long, short, value_name = "FILE|FOLDER")]
    output: Option<PathBuf>,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MetricsFormat {
    Csv,
    Jsonl,
    Tensorboard,
}

/// A number, or NaN or an infinity by name as in the log.
#[derive(Serialize)]
#[serde(bound = "T: Copy + Into<f64> + Serialize")]
struct Number<T: Copy + Into<f64> + Serialize>(#[serde(serialize_with = "float::serialize")] T);

/// The figures of a step and of the validation that followed it: a JSON object in the order of the table's columns.
fn row(LoggedStep { t, s, step, probe, validation }: &LoggedStep) -> serde_json::Result<String> {
    let probe = probe.as_ref();
    let validation = validation.as_ref();
    let counts = step.lost_updates.as_ref();
    let perplexity = validation.and_then(Validation::perplexity).map(Number);
    let cells = [
        ("step", to_string(&step.step)),
        // Wall clock, seconds since 1970.
        ("time", to_string(&(*t as f64 / 1000.0))),
        // Since the run began.
        ("seconds", to_string(s)),
        ("loss", to_string(&Number(step.loss))),
        ("outcome", to_string(&step.outcome)),
        ("loss_scale", to_string(&f64::from(step.loss_scale))),
        ("grad_norm", to_string(&Number(step.grad_norm))),
        ("clip", to_string(&Number(step.clip_coef))),
        ("lr", to_string(&step.lr)),
        ("epoch", to_string(&step.epoch)),
        ("tokens", to_string(&step.tokens)),
        ("tokens_per_s", to_string(&step.tokens_per_s)),
        ("step_ms", to_string(&step.time.step_ms)),
        ("updates", to_string(&step.updates)),
        ("skipped", to_string(&step.skipped)),
        ("grad_zero", to_string(&step.grads.zero)),
        ("grad_subnormal", to_string(&step.grads.subnormal)),
        ("grad_not_finite", to_string(&step.grads.not_finite())),
        // log2 of unscaled magnitudes.
        ("grad_log2_p1", to_string(&step.log2_grad_p1())),
        ("probe_log2_min", to_string(&probe.and_then(|probe| probe.log2_min()))),
        ("probe_flushed", to_string(&probe.and_then(|probe| probe.flushed_share()))),
        // The share of changed masters whose 16-bit weight changed too, and the mean distance between both.
        ("updates_reach", to_string(&counts.and_then(UpdateCounts::reach))),
        ("updates_mean_ulps", to_string(&counts.and_then(UpdateCounts::mean_ulps))),
        ("resident_bytes", to_string(&step.rss_bytes)),
        ("val_loss", to_string(&validation.map(|validation| Number(validation.loss)))),
        ("val_perplexity", to_string(&perplexity)),
    ];
    let cells = cells.into_iter().map(|(name, value)| Ok(format!("\"{name}\":{}", value?)));
    let mut text = cells.collect::<serde_json::Result<Vec<_>>>()?.join(",");
    if let Some(objective) = &step.objective {
        text = text + "," + to_string(objective)?.trim_matches(['{', '}']);
        // All rows have the same columns; a validation has some of a step's metrics.
        let validated = validation.and_then(|validation| validation.objective).unwrap_or_default();
        for (name, _) in objective.named() {
            let value = validated.named().find(|(one, _)| *one == name).map(|(_, value)| value);
            text = format!("{text},\"eval_{name}\":{}", to_string(&value)?);
        }
    }
    Ok(format!("{{{text}}}"))
}

/// Writes the figures, without steps that a resume made void.
pub(crate) fn run(args: &ExportMetricsArgs, out: &mut dyn Write) -> Result<()> {
    let log = find_log(args.run.as_deref(), &args.runs_dir.path)?;
    check_has_steps(&log)?;
    match (args.format, &args.output) {
        (MetricsFormat::Tensorboard, folder) => {
            let beside = || log.parent().unwrap_or(Path::new("")).join("tensorboard");
            tensorboard(&log, &folder.clone().unwrap_or_else(beside), out)
        }
        (format, Some(file)) => {
            let output = output_file("--output", file, std::slice::from_ref(&log))?;
            let _reporter = Reporter::of("reading the log");
            output.write_with(|out| table(&log, format, out, &|error| Error::io("write", file)(error)))
        }
        (format, None) => table(&log, format, &mut BufWriter::new(out), &Error::stdout),
    }
}

/// Fails if the log has no step yet, before anything is written.
fn check_has_steps(log: &Path) -> Result<()> {
    let mut tail = Tail::new(log);
    let mut has_started = false;
    loop {
        let poll = tail.poll()?;
        has_started |= poll.records.iter().any(|record| matches!(record.event, Event::Started(_)));
        if poll.records.iter().any(|record| matches!(record.event, Event::Step(_))) {
            return Ok(());
        }
        if !poll.more {
            return Err(RunState::no_step(log, has_started));
        }
    }
}

fn tensorboard(log: &Path, folder: &Path, out: &mut dyn Write) -> Result<()> {
    let mut board = TensorBoard::create(folder)?;
    let reporter = Reporter::of("reading the log");
    for_each(log, Detail::Full, |record| board.write(&record))?;
    drop(reporter);
    let written =
        writeln!(out, "wrote {}; view it with `tensorboard --logdir {}`", board.path().display(), folder.display());
    written.map_err(Error::stdout)
}

/// A step with the probe before it and the validation after it.
struct LoggedStep {
    /// Wall clock.
    t: u64,
    /// Run-relative seconds.
    s: f64,
    step: Box<StepRecord>,
    probe: Option<Box<Fp32Probe>>,
    validation: Option<Validation>,
}

fn table(
    log: &Path,
    format: MetricsFormat,
    out: &mut dyn Write,
    failed: &dyn Fn(std::io::Error) -> Error,
) -> Result<()> {
    let mut last: Option<LoggedStep> = None;
    let mut probe = None;
    let mut first = true;
    let mut finish = |last: Option<LoggedStep>| {
        let Some(last) = last else { return Ok(()) };
        let row = row(&last).map_err(std::io::Error::from);
        row.and_then(|row| write_row(&row, format, std::mem::take(&mut first), out)).map_err(failed)
    };
    for_each(log, Detail::FewTables, |Record { t, s, event, .. }| {
        match event {
            // A probe comes before its step.
            Event::Fp32Probe(found) => probe = Some(found),
            Event::Step(step) => {
                let probe = probe.take().filter(|probe| probe.step == step.step);
                finish(last.replace(LoggedStep { t, s, step, probe, validation: None }))?;
            }
            Event::Eval(eval) => {
                if let Some(last) = &mut last
                    && last.step.step == eval.step
                {
                    last.validation = Some(eval);
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    finish(last)?;
    out.flush().map_err(failed)
}

fn write_row(row: &str, format: MetricsFormat, first: bool, out: &mut dyn Write) -> std::io::Result<()> {
    if format == MetricsFormat::Jsonl {
        return writeln!(out, "{row}");
    }
    let cells: Vec<(&str, &str)> = row
        .trim_matches(['{', '}'])
        .split(',')
        .filter_map(|field| field.split_once(':'))
        .map(|(key, value)| (key.trim_matches('"'), if value == "null" { "" } else { value.trim_matches('"') }))
        .collect();
    let line = |pick: fn(&(&str, &str)) -> String| cells.iter().map(pick).collect::<Vec<_>>().join(",");
    if first {
        writeln!(out, "{}", line(|(key, _)| (*key).to_owned()))?;
    }
    writeln!(out, "{}", line(|(_, value)| (*value).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{ObjectiveMetric, ObjectiveMetrics};
    use serde_json::Value;

    #[test]
    fn a_row_has_the_metrics_of_its_step_and_of_its_validation() {
        let metrics = |values: &[(ObjectiveMetric, f64)]| {
            let mut metrics = ObjectiveMetrics::default();
            for (metric, value) in values {
                metrics.set(*metric, *value);
            }
            Some(metrics)
        };
        let of_step = metrics(&[(ObjectiveMetric::Reward, 0.5), (ObjectiveMetric::Kl, f64::NAN)]);
        let objective = metrics(&[(ObjectiveMetric::Reward, 0.75)]);
        let row = |validation| -> serde_json::Map<String, Value> {
            let step = Box::new(StepRecord { objective: of_step, ..StepRecord::default() });
            serde_json::from_str(&row(&LoggedStep { t: 0, s: 0.0, step, probe: None, validation }).unwrap()).unwrap()
        };
        let validated = row(Some(Validation { objective, ..Validation::default() }));
        let other = row(None);
        assert_eq!([&validated["reward"], &validated["eval_reward"]], [0.5, 0.75]);
        assert!(validated["kl"].is_null() && validated["eval_kl"].is_null() && other["eval_reward"].is_null());
        assert!(validated.keys().eq(other.keys()));
    }
}
