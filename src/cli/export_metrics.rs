//! `finetune export-metrics`: exports a run's figures as a table or as TensorBoard event files.

use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, find_log};
use crate::telemetry::{
    Event, PreferenceMetrics, Sink, StepRecord, StepStatus, Tail, TensorBoard, Validation, float, for_each,
};
use crate::{Error, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Flags of `export-metrics`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExportMetricsArgs {
    /// A run's name or folder, or its events file [default: the newest run]
    run: Option<PathBuf>,
    /// The format: a table with a row for each step, or an event file with scalars and histograms
    #[arg(long, value_enum, default_value = "csv")]
    format: MetricsFormat,
    /// The file to write, or the folder for TensorBoard [default: standard output, or `tensorboard` in the run's folder]
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

/// One step, with the validation that followed it.
#[derive(Debug, Default, Serialize)]
struct Row {
    step: u64,
    /// Wall clock, seconds since 1970.
    time: f64,
    /// Seconds since the run began.
    seconds: f64,
    #[serde(with = "float")]
    loss: f32,
    outcome: StepStatus,
    loss_scale: f32,
    #[serde(with = "float")]
    grad_norm: f64,
    #[serde(with = "float")]
    clip: f64,
    lr: f64,
    epoch: f64,
    tokens: u64,
    tokens_per_s: f64,
    step_ms: f64,
    updates: u64,
    skipped: u64,
    grad_zero: u64,
    grad_subnormal: u64,
    grad_not_finite: u64,
    resident_bytes: Option<u64>,
    #[serde(serialize_with = "optional")]
    val_loss: Option<f64>,
    #[serde(serialize_with = "optional")]
    val_perplexity: Option<f64>,
    #[serde(flatten)]
    preference: Option<PreferenceMetrics>,
}

/// Serializes NaN and infinities by name, as in the log.
#[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
fn optional<S: serde::Serializer>(value: &Option<f64>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match value {
        Some(value) => float::serialize(value, serializer),
        None => serializer.serialize_none(),
    }
}

impl Row {
    fn new(t: u64, s: f64, step: &StepRecord) -> Self {
        Self {
            step: step.step,
            time: t as f64 / 1000.0,
            seconds: s,
            loss: step.loss,
            outcome: step.outcome,
            loss_scale: step.loss_scale,
            grad_norm: step.grad_norm,
            clip: step.clip_coef,
            lr: step.lr,
            epoch: step.epoch,
            tokens: step.tokens,
            tokens_per_s: step.tokens_per_s,
            step_ms: step.time.step_ms,
            updates: step.updates,
            skipped: step.skipped,
            grad_zero: step.grads.zero,
            grad_subnormal: step.grads.subnormal,
            grad_not_finite: step.grads.not_finite(),
            resident_bytes: step.rss_bytes,
            val_loss: None,
            val_perplexity: None,
            preference: step.preference,
        }
    }
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
            let _reporter = Reporter::of("reading the log");
            let mut writer = BufWriter::new(File::create(file).map_err(Error::io("create", file))?);
            let failed = || Error::io("write", file);
            table(&log, format, &mut writer, failed)?;
            writer.flush().map_err(failed())
        }
        (format, None) => {
            let mut writer = BufWriter::new(out);
            let failed = || Error::io("write to", "standard output");
            table(&log, format, &mut writer, failed)?;
            writer.flush().map_err(failed())
        }
    }
}

/// Fails if the log has no step yet, before anything is written.
fn check_has_steps(log: &Path) -> Result<()> {
    let mut tail = Tail::new(log);
    loop {
        let poll = tail.poll()?;
        if poll.records.iter().any(|record| matches!(record.event, Event::Step(_))) {
            return Ok(());
        }
        if !poll.more {
            return Err(Error::data(log.display(), "the log has no step yet; wait for the first one"));
        }
    }
}

fn tensorboard(log: &Path, folder: &Path, out: &mut dyn Write) -> Result<()> {
    let mut board = TensorBoard::create(folder)?;
    let reporter = Reporter::of("reading the log");
    for_each(log, |record| board.write(&record))?;
    drop(reporter);
    let written =
        writeln!(out, "wrote {}; view it with `tensorboard --logdir {}`", board.path().display(), folder.display());
    written.map_err(Error::io("write to", "standard output"))
}

fn table<F: FnOnce(std::io::Error) -> Error>(
    log: &Path,
    format: MetricsFormat,
    out: &mut dyn Write,
    failed: impl Fn() -> F,
) -> Result<()> {
    let mut row: Option<Row> = None;
    let mut first = true;
    let mut finish = |row: Option<Row>| match row {
        Some(row) => write_row(&row, format, std::mem::take(&mut first), out).map_err(failed()),
        None => Ok(()),
    };
    for_each(log, |record| {
        match &record.event {
            Event::Step(step) => finish(row.replace(Row::new(record.t, record.s, step)))?,
            Event::Eval(Validation { step, loss, perplexity, preference, .. }) => {
                if let Some(row) = row.as_mut().filter(|row| row.step == *step) {
                    row.val_loss = Some(*loss);
                    row.val_perplexity = preference.is_none().then_some(*perplexity);
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    finish(row)
}

fn write_row(row: &Row, format: MetricsFormat, first: bool, out: &mut dyn Write) -> std::io::Result<()> {
    if format == MetricsFormat::Jsonl {
        serde_json::to_writer(&mut *out, row)?;
        return writeln!(out);
    }
    // Serialize to text to keep the order of the struct's fields, which a map would sort.
    let text = serde_json::to_string(row)?;
    let cells: Vec<(&str, &str)> = text
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
