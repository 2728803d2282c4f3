//! One run's figures and curves, folded from its log.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::telemetry::{
    self, Event, FinishReason, Outcome, Probe, Record, ScaleCause, Series, StairCase, Started, StepRecord, Validation,
};
use crate::{Error, Result};

/// Buckets of a curve; a picture has some twice as many columns.
const CURVE: usize = 360;
/// Steps whose losses make one figure: a single batch's loss is mostly luck.
const WINDOW: usize = 10;

/// What a run came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// Steps attempted.
    pub steps: u64,
    /// Steps applied.
    pub updates: u64,
    /// Events of overflow.
    pub overflows: u64,
    /// Steps that changed nothing.
    pub skipped: u64,
    /// The most steps in a row that changed nothing.
    pub longest_streak: u64,
    /// Layers that computed in a wider type in the end, where layers fall back.
    pub in_fallback: Option<u64>,
    /// Attempts at a batch that had overflowed.
    pub repeated: u64,
    /// Tokens of batches that were given up.
    pub tokens_lost: u64,
    /// Mean loss of the applied ones among the last `WINDOW` steps.
    pub loss: Option<f64>,
    /// The lowest mean loss of as many applied steps in a row.
    pub best_loss: Option<f64>,
    /// The last validation loss, and the lowest.
    pub validation: Option<(f64, f64)>,
    /// The last perplexity, and the lowest.
    pub perplexity: Option<(f64, f64)>,
    /// The first loss scale, and that after the last step.
    pub scale: Option<(f32, f32)>,
    /// The lowest and the highest loss scale.
    pub scale_range: Option<(f32, f32)>,
    /// Times the scale grew.
    pub growths: u64,
    /// Share of the gradients that FP32 probes found flushed to zero.
    pub flushed: Option<f64>,
    /// Share of the applied steps' scaled gradients that were subnormal.
    pub subnormal: Option<f64>,
    /// Tokens a second within steps.
    pub tokens_per_s: Option<f64>,
    /// Seconds the run was running, validation and saving included.
    pub seconds: f64,
    /// Largest resident memory.
    pub peak_rss: Option<u64>,
}

/// A run, as far as its log tells.
#[derive(Debug, Clone)]
pub struct RunSummary {
    /// Its name: its folder's.
    pub name: String,
    /// Its log.
    pub log: PathBuf,
    /// What it said of itself.
    pub started: Started,
    /// What it came to.
    pub figures: Figures,
    /// Why it stopped; `None` if the log ends without a word.
    pub finished: Option<FinishReason>,
    /// Lines of the log that could not be read.
    pub unreadable: usize,
    /// The batches' losses.
    pub(super) loss: Series,
    /// Validation losses.
    pub(super) validation: Series,
    /// log2 of the loss scale.
    pub(super) scale: StairCase,
    /// log2 of the loss scale at each overflow.
    pub(super) overflows: Series,
}

impl RunSummary {
    /// Reads a run's log. An error names the file, and says so if no run has written it or no step is in it yet.
    pub fn read(log: &Path) -> Result<Self> {
        let poll = telemetry::read_whole(log)?;
        let begun =
            |record: &Record| matches!(&record.event, Event::Started(started) if started.resumed_from.is_none());
        let any = |record: &Record| matches!(record.event, Event::Started(_));
        // A log may be used again by a run of the same name; the last one counts.
        let first = poll.records.iter().rposition(begun).or_else(|| poll.records.iter().position(any));
        let Some(first) = first else {
            return Err(Error::data(log.display(), "no run has written this: it does not say how a run began"));
        };
        let mut fold = Fold::new(log);
        poll.records.into_iter().skip(first).for_each(|record| fold.take(record));
        let mut run = fold.finish();
        run.unreadable = poll.unreadable;
        if run.figures.steps == 0 {
            return Err(Error::data(log.display(), "no step is recorded here yet; wait for the first"));
        }
        Ok(run)
    }

    /// How the run ended, in words.
    pub fn end(&self) -> String {
        let Figures { steps, .. } = self.figures;
        let end = match self.finished {
            Some(FinishReason::Done) => "done".to_owned(),
            Some(FinishReason::Interrupted) => format!("interrupted at step {steps}"),
            Some(FinishReason::Stopped) => format!("stopped at step {steps}"),
            Some(FinishReason::Diverged) => format!("diverged at step {steps}"),
            None => format!("log ends at step {steps} of {}", self.started.total_steps),
        };
        match self.unreadable {
            0 => end,
            1 => end + ", 1 line unreadable",
            lines => format!("{end}, {lines} lines unreadable"),
        }
    }

    /// Every setting by its dotted key, and below `run.` what else may change numbers or speed.
    pub(super) fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = BTreeMap::new();
        flatten(&self.started.config, String::new(), &mut settings);
        let Started { program, cpu, device, data, parameters, .. } = &self.started;
        for (key, value) in [
            ("run.program", program.clone()),
            ("run.cpu", cpu.name.clone()),
            ("run.isa", cpu.isa.clone()),
            ("run.threads", cpu.threads.to_string()),
            ("run.device", device.clone()),
            ("run.data", data.clone()),
            ("run.parameters", parameters.to_string()),
        ] {
            settings.insert(key.to_owned(), value);
        }
        settings
    }
}

/// The leaves of a JSON tree by their dotted paths.
fn flatten(value: &Value, path: String, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(value, path, leaves);
            }
        }
        Value::Null => {}
        Value::String(text) => drop(leaves.insert(path, text.clone())),
        other => drop(leaves.insert(path, other.to_string())),
    }
}

/// A run in the making.
struct Fold {
    run: RunSummary,
    retries: bool,
    /// Whether the next step repeats this one's batch.
    repeats: bool,
    /// Steps skipped since the last applied one.
    streak: u64,
    /// The layers in fallback.
    fallback: BTreeSet<String>,
    /// Outcome and loss of the last steps.
    last: VecDeque<Option<f64>>,
    /// Losses of the last applied steps.
    applied: VecDeque<f64>,
    /// FP32 gradients that are not zero, and those of them that were flushed.
    probed: (u64, u64),
    /// Gradients of applied steps, and the subnormal ones.
    gradients: (u64, u64),
    /// Tokens at the first step and at the last, and milliseconds of the steps between.
    pace: Option<(u64, u64, f64)>,
}

impl Fold {
    fn new(log: &Path) -> Self {
        let run = RunSummary {
            name: String::new(),
            log: log.to_path_buf(),
            started: Started::default(),
            figures: Figures::default(),
            finished: None,
            unreadable: 0,
            loss: Series::new(CURVE),
            validation: Series::new(CURVE),
            scale: StairCase::new(CURVE),
            overflows: Series::new(CURVE),
        };
        Self {
            run,
            retries: false,
            repeats: false,
            streak: 0,
            fallback: BTreeSet::new(),
            last: VecDeque::new(),
            applied: VecDeque::new(),
            probed: (0, 0),
            gradients: (0, 0),
            pace: None,
        }
    }

    fn take(&mut self, record: Record) {
        let Record { s, event, .. } = record;
        self.run.figures.seconds = s;
        match event {
            Event::Started(started) => {
                self.retries = started.config.pointer("/scaler/on_overflow").and_then(Value::as_str) == Some("retry");
                self.fallback = started.fallback.keys().cloned().collect();
                self.run.started = *started;
                self.run.finished = None;
            }
            Event::Step(step) => self.step(&step, s),
            Event::Overflow(_) => self.run.figures.overflows += 1,
            Event::Retyped(retyped) if retyped.back => drop(self.fallback.remove(&retyped.layer)),
            Event::Retyped(retyped) => drop(self.fallback.insert(retyped.layer)),
            Event::Eval(eval) => self.eval(&eval, s),
            Event::Probe(probe) => self.probe(&probe),
            Event::Finished(finished) => {
                self.run.finished = Some(finished.reason);
                self.run.figures.peak_rss = self.run.figures.peak_rss.max(finished.peak_rss_bytes);
            }
            _ => {}
        }
    }

    fn step(&mut self, step: &StepRecord, s: f64) {
        let (run, loss) = (&mut self.run, f64::from(step.loss));
        let figures = &mut run.figures;
        let applied = step.outcome == Outcome::Applied;
        figures.steps = step.step;
        figures.updates = step.updates;
        figures.repeated += u64::from(self.repeats);
        self.streak = if applied { 0 } else { self.streak + 1 };
        figures.longest_streak = figures.longest_streak.max(self.streak);
        self.repeats = !applied && self.retries && step.scale.cause != ScaleCause::AtFloor;
        if applied {
            self.gradients.0 += step.grads.count;
            self.gradients.1 += step.grads.subnormal;
            keep(&mut self.applied, loss);
            if self.applied.len() == WINDOW {
                let mean = mean(self.applied.iter().copied());
                figures.best_loss = Some(figures.best_loss.map_or(mean, |best| best.min(mean)));
            }
        } else {
            figures.skipped += 1;
            figures.tokens_lost += if self.repeats { 0 } else { run.started.tokens_per_step };
            run.overflows.push(step.step, s, f64::from(step.loss_scale).log2());
        }
        keep(&mut self.last, applied.then_some(loss));
        if step.loss_scale > 0.0 {
            run.scale.push(step.step, s, f64::from(step.loss_scale).log2());
            let (low, high) = figures.scale_range.unwrap_or((step.loss_scale, step.loss_scale));
            figures.scale_range = Some((low.min(step.loss_scale), high.max(step.loss_scale)));
            let after = if step.scale.to > 0.0 { step.scale.to } else { step.loss_scale };
            figures.scale = Some((figures.scale.map_or(step.loss_scale, |(first, _)| first), after));
        }
        figures.growths += u64::from(step.scale.cause == ScaleCause::Grew);
        figures.peak_rss = figures.peak_rss.max(step.rss_bytes);
        run.loss.push(step.step, s, loss);
        let (first, _, ms) = self.pace.unwrap_or((step.tokens, step.tokens, -step.time.step_ms));
        self.pace = Some((first, step.tokens, ms + step.time.step_ms));
    }

    fn eval(&mut self, eval: &Validation, s: f64) {
        let figures = &mut self.run.figures;
        let latest =
            |known: Option<(f64, f64)>, value: f64| Some((value, known.map_or(value, |(_, best)| best.min(value))));
        figures.validation = latest(figures.validation, eval.loss);
        figures.perplexity = latest(figures.perplexity, eval.perplexity);
        self.run.validation.push(eval.step, s, eval.loss);
    }

    fn probe(&mut self, probe: &Probe) {
        for tensor in &probe.tensors {
            self.probed.0 += tensor.nonzero;
            self.probed.1 += tensor.flushed;
        }
    }

    fn finish(mut self) -> RunSummary {
        let figures = &mut self.run.figures;
        let share = |(whole, part): (u64, u64)| (whole > 0).then(|| part as f64 / whole as f64);
        (figures.flushed, figures.subnormal) = (share(self.probed), share(self.gradients));
        let falls_back =
            self.run.started.config.pointer("/precision/fallback").and_then(Value::as_str) == Some("layer");
        figures.in_fallback = falls_back.then_some(self.fallback.len() as u64);
        figures.loss = (!self.last.is_empty()).then(|| mean(self.last.iter().flatten().copied()));
        figures.tokens_per_s = self
            .pace
            .and_then(|(first, last, ms)| (ms > 0.0 && last > first).then(|| (last - first) as f64 / ms * 1e3));
        self.run.name = match &self.run.started.run {
            name if !name.is_empty() => name.clone(),
            _ => self.run.log.display().to_string(),
        };
        self.run
    }
}

fn keep<T>(window: &mut VecDeque<T>, value: T) {
    if window.len() == WINDOW {
        window.pop_front();
    }
    window.push_back(value);
}

/// NaN for no value, as when every one of the last steps was skipped.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count)
}
