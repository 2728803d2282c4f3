//! The state of a run, reduced from its log record by record in bounded memory.
//!
//! This is the only reducer of events: the dashboard feeds it as records arrive, `compare`, `report` and the lab from a
//! whole log. A `Started` with `resumed_from: k` rewinds the state to step k.

mod curves;
mod metrics;
mod rows;
mod tensors;

pub use curves::{Curves, PLOTTED, Plotted, Quantity};
pub use metrics::{ProbeTotals, RunMetrics, SMOOTHING, smoothing_for};
pub use rows::{EventRow, OverflowRow, SampleRow};
pub use tensors::{LayerStats, TensorRow, Tensors};

use super::eta::EtaEstimator;
use super::log::{Detail, Tail, for_each};
use super::{CheckpointSaved, Event, FinishReason, Finished, Fp32Probe, GradStats, Record, Started, StepRecord};
use crate::precision::{BlockRanges, ExponentHistogram, FloatFormat, PrecisionPolicy, PrecisionUnit, UpdateCounts};
use crate::{Error, Result};
use metrics::MetricsAccumulator;
use rows::{EVENTS, OVERFLOWS, SAMPLES, keep};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::iter::repeat;
use std::path::Path;
use tensors::layer_order;

/// Checkpoints whose figures are kept, so that a resume can rewind to them.
const MAX_SNAPSHOTS: usize = 64;

/// The state of a run so far.
#[derive(Debug, Clone, Default)]
pub struct RunState {
    /// The newest `Started` event.
    pub started: Option<Started>,
    /// The configuration of each process that trained it, with the step the process started from.
    pub configs: Vec<(u64, serde_json::Value)>,
    /// Whether it runs, waits or has ended.
    pub phase: Phase,
    /// The newest step, without its tables.
    pub step: StepRecord,
    /// The newest gradient statistics with exponents, with their step and loss scale.
    pub grads: Option<(u64, f32, GradStats)>,
    /// The series for charts.
    pub curves: Curves,
    /// Skipped steps, newest last.
    pub overflows: VecDeque<OverflowRow>,
    /// The layers whose compute dtype differs from the policy's, with their dtype.
    pub fallback: BTreeMap<String, String>,
    /// The model's tensors.
    pub tensors: Tensors,
    /// The newest probe.
    pub probe: Option<Fp32Probe>,
    /// The newest counts of lost updates, with their step.
    pub lost_updates: Option<(u64, UpdateCounts)>,
    /// Events worth listing, newest last.
    pub events: VecDeque<EventRow>,
    /// Generated texts, newest last.
    pub samples: VecDeque<SampleRow>,
    /// The newest checkpoint and when it was written, in wall-clock milliseconds.
    pub saved: Option<(CheckpointSaved, u64)>,
    pace: EtaEstimator,
    /// Processor time over wall time, percent of one thread.
    pub cpu_percent: Option<f64>,
    cpu_before: Option<(f64, f64)>,
    /// Wall clock of the newest record, milliseconds.
    pub last_t: u64,
    /// Run-relative seconds of the newest record.
    pub last_s: f64,
    tally: MetricsAccumulator,
    /// The state at the newest checkpoints, oldest first.
    snapshots: VecDeque<Snapshot>,
}

/// The state at a checkpoint that cannot be recovered from the curves.
#[derive(Debug, Clone)]
struct Snapshot {
    step: StepRecord,
    tally: MetricsAccumulator,
    overflows: Vec<u64>,
}

/// The phase of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Phase {
    /// No event yet.
    #[default]
    Waiting,
    /// Training.
    Running,
    /// Paused on request.
    Paused,
    /// Ended.
    Finished(Box<Finished>),
    /// Ended without a `Finished` event: killed or crashed.
    Lost,
}

impl RunState {
    /// An empty state with curves of at most `capacity` buckets.
    pub fn new(capacity: usize) -> Self {
        Self { curves: Curves::new(capacity), ..Self::default() }
    }

    /// Reads a whole log; also returns the number of unreadable lines. Fails if the file cannot be read, is not a run's
    /// log, or has no step yet.
    pub fn read(self, log: &Path) -> Result<(Self, usize)> {
        self.read_with(log, |_| ())
    }

    /// Like [`RunState::read`]; `note` gets each record first.
    pub(crate) fn read_with(mut self, log: &Path, mut note: impl FnMut(&Record)) -> Result<(Self, usize)> {
        let unreadable = for_each(log, Detail::FewTables, |record| {
            note(&record);
            self.apply(record);
            Ok(())
        })?;
        if self.step.step == 0 || self.started.is_none() && unreadable > 0 {
            return Err(Self::no_step(log, self.started.is_some()));
        }
        Ok((self, unreadable))
    }

    /// The error about a log without a step.
    pub(crate) fn no_step(log: &Path, has_started: bool) -> Error {
        let is_empty = log.metadata().is_ok_and(|log| log.len() == 0);
        let message = if has_started || is_empty {
            "the log has no step yet; wait for the first one, or select a different run"
        } else {
            "this is not a run's log: it has no `started` event"
        };
        Error::data(log.display(), message)
    }

    /// The state from a run's log so far, for a screen that continues it; skims a long log.
    pub fn history(log: &Path) -> Result<Self> {
        let mut state = Self::default();
        Tail::new(log).with(Detail::Leading).drain(&mut |record| {
            state.apply(record);
            Ok(true)
        })?;
        state.phase = Phase::Waiting;
        state.pace.interrupt();
        Ok(state)
    }

    /// Applies a record.
    pub fn apply(&mut self, record: Record) {
        let Record { t, s, event, .. } = record;
        if let Event::Started(started) = &event {
            self.begin(started.resumed_from);
        }
        self.last_t = t;
        self.last_s = s;
        self.tally.figures.seconds = s;
        let step = event.step().unwrap_or(self.step.step);
        if let Some(row) = EventRow::of(s, step, &event) {
            keep(&mut self.events, row, EVENTS);
        }
        match event {
            Event::Started(started) => {
                self.phase = Phase::Running;
                self.configs.push((started.resumed_from.unwrap_or(0), started.config.clone()));
                self.fallback.clone_from(&started.fallback);
                self.started = Some(*started);
            }
            Event::Step(step) => self.step(*step, s),
            Event::Overflow(overflow) => {
                self.tally.figures.overflows += 1;
                self.tensors.overflowed(&overflow);
                keep(&mut self.overflows, OverflowRow::of(&overflow), OVERFLOWS);
            }
            Event::DtypeChange(retyped) if retyped.restored => drop(self.fallback.remove(&retyped.layer)),
            Event::DtypeChange(retyped) => drop(self.fallback.insert(retyped.layer, retyped.to)),
            Event::Eval(eval) => {
                self.curves.validation.push(eval.step, s, eval.loss);
                self.tally.eval(&eval);
            }
            Event::Sample(sample) => {
                let loss = self.smoothed_loss(smoothing_for(self.total_steps()));
                let row = SampleRow { step: sample.step, loss, prompt: sample.prompt, text: sample.text };
                keep(&mut self.samples, row, SAMPLES);
            }
            Event::Fp32Probe(probe) => {
                self.tensors.flushed(&probe);
                self.tally.probe(&probe);
                self.curves.probe(&probe, s);
                self.probe = Some(*probe);
            }
            Event::CheckpointSaved(saved) if saved.weights_only => {}
            Event::CheckpointSaved(saved) => {
                let overflows = self.tensors.rows.iter().map(|row| row.overflows).collect();
                let snapshot = Snapshot { step: self.step.clone(), tally: self.tally.clone(), overflows };
                keep(&mut self.snapshots, snapshot, MAX_SNAPSHOTS);
                self.saved = Some((saved, t));
            }
            Event::Paused { .. } => {
                self.phase = Phase::Paused;
                self.pace.interrupt();
            }
            Event::Resumed { .. } => self.phase = Phase::Running,
            Event::GradVariance(variances) => self.tensors.record_variances(variances, s),
            Event::UnderflowOnset(touched) => self.tensors.record_underflow_onset(touched),
            Event::Warning(_) | Event::Diverged(_) | Event::GradMax(_) | Event::Throughput(_) | Event::Phase { .. } => {
            }
            Event::Finished(finished) => {
                let peak = &mut self.tally.figures.peak_rss;
                *peak = (*peak).max(finished.peak_rss_bytes);
                self.phase = Phase::Finished(Box::new(finished));
            }
        }
    }

    /// Keeps the time of a suspended process out of the estimate of the remaining time.
    pub(crate) fn suspended(&mut self) {
        self.pace.interrupt();
    }

    /// A new run discards the previous one in the log; a resumed one discards the steps it will repeat.
    fn begin(&mut self, resumed_from: Option<u64>) {
        let Some(step) = resumed_from else {
            *self = Self::new(self.curves.capacity);
            return;
        };
        self.configs.retain(|(from, _)| *from == 0 || *from < step);
        self.curves.truncate_after(step);
        self.tensors.truncate_after(step);
        self.overflows.retain(|row| row.step <= step);
        self.samples.retain(|row| row.step <= step);
        self.grads = self.grads.take().filter(|(at, ..)| *at <= step);
        self.lost_updates = self.lost_updates.filter(|(at, _)| *at <= step);
        if self.probe.take_if(|probe| probe.step > step).is_some() {
            self.tensors.rows.iter_mut().for_each(|row| row.flushed = None);
        }
        self.snapshots.retain(|snapshot| snapshot.step.step <= step);
        if let Some((saved, _)) = &mut self.saved {
            saved.step = saved.step.min(step);
        }
        if self.step.step > step {
            let snapshot = self.snapshots.back().filter(|snapshot| snapshot.step.step == step);
            let overflows = snapshot.iter().flat_map(|snapshot| snapshot.overflows.iter().copied());
            self.tensors.rows.iter_mut().zip(overflows.chain(repeat(0))).for_each(|(row, count)| row.overflows = count);
            match snapshot {
                Some(snapshot) => {
                    self.step = snapshot.step.clone();
                    self.tally = snapshot.tally.clone();
                }
                // There is no snapshot, because nothing was saved or the log is damaged: only the curves are left.
                None => self.restore_from_curves(step),
            }
        }
        self.pace.interrupt();
        self.cpu_before = None;
    }

    /// Recovers the metrics of the steps up to `step` from the curves.
    fn restore_from_curves(&mut self, step: u64) {
        self.tally = MetricsAccumulator::default();
        for bucket in self.curves.validation.buckets() {
            let loss = bucket.min;
            let eval = super::Validation { step: bucket.step, loss, perplexity: loss.exp(), ..Default::default() };
            self.tally.eval(&eval);
        }
        self.step = StepRecord { step, ..StepRecord::default() };
    }

    fn step(&mut self, mut step: StepRecord, s: f64) {
        if matches!(self.phase, Phase::Waiting | Phase::Lost) {
            self.phase = Phase::Running;
        }
        if let (Some(started), Some(total)) = (&mut self.started, step.total_steps) {
            started.total_steps = total;
        }
        self.tally.step(&step, self.started.as_ref());
        self.curves.step(&step, s, std::array::from_fn(|window| self.tally.smoothed(window)));
        self.pace.step(step.step, s);
        self.measure_cpu(step.cpu_seconds, s);
        self.tensors.update(step.step, s, step.loss_scale, std::mem::take(&mut step.tensors));
        let exponents = std::mem::take(&mut step.grads.exponents);
        if !exponents.is_empty() {
            self.grads = Some((step.step, step.loss_scale, GradStats { exponents, ..step.grads.clone() }));
        }
        if let Some(counts) = step.lost_updates {
            self.lost_updates = Some((step.step, counts));
        }
        self.step = step;
    }

    /// Measures over at least a second, because the kernel counts in hundredths.
    fn measure_cpu(&mut self, cpu_seconds: Option<f64>, s: f64) {
        let Some(cpu) = cpu_seconds else { return };
        match self.cpu_before {
            Some((then, before)) if s - then < 1.0 && s >= then && cpu >= before => {}
            Some((then, before)) if s > then && cpu >= before => {
                self.cpu_percent = Some((cpu - before) / (s - then) * 100.0);
                self.cpu_before = Some((s, cpu));
            }
            _ => self.cpu_before = Some((s, cpu)),
        }
    }

    /// The run's figures so far.
    pub fn figures(&self) -> RunMetrics {
        let falls_back = self.setting("/precision/fallback").and_then(Value::as_str) == Some("layer");
        RunMetrics { in_fallback: falls_back.then_some(self.fallback.len() as u64), ..self.tally.figures() }
    }

    /// The totals of its FP32 probes.
    pub fn probed(&self) -> &ProbeTotals {
        &self.tally.probed
    }

    /// The lowest validation loss and its step.
    pub fn best_validation(&self) -> Option<(f64, u64)> {
        self.tally.best_validation
    }

    /// The loss smoothed over one of the windows of [`SMOOTHING`]; `None` before the first step.
    pub fn smoothed_loss(&self, window: usize) -> Option<f64> {
        self.tally.smoothed(window)
    }

    /// The reason for the end; `None` if it runs, or its log ends without a `Finished` event.
    pub fn finished(&self) -> Option<FinishReason> {
        if let Phase::Finished(finished) = &self.phase { Some(finished.reason) } else { None }
    }

    /// Whether training has ended.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Finished(_) | Phase::Lost)
    }

    /// Steps the run will attempt; 0 if unknown.
    pub fn total_steps(&self) -> u64 {
        self.started.as_ref().map_or(0, |started| started.total_steps)
    }

    /// Seconds until the run is done; `None` before an estimate is possible, and if the number of its steps is unknown.
    pub fn remaining(&self) -> Option<f64> {
        let total = self.total_steps();
        self.pace.remaining(self.step.step, total).filter(|_| total > 0)
    }

    /// A value of the run's configuration, by its JSON pointer.
    pub fn setting(&self, pointer: &str) -> Option<&Value> {
        self.started.as_ref()?.config.pointer(pointer)
    }

    /// The run's precision policy; FP16 if it is not known.
    pub fn policy(&self) -> PrecisionPolicy {
        self.started.as_ref().map_or(PrecisionPolicy::FP16, Started::precision)
    }

    /// The format gradients are stored in.
    pub fn grad_format(&self) -> FloatFormat {
        self.policy().grads.format()
    }

    /// Whether losses are scaled.
    pub fn scales_losses(&self) -> bool {
        self.started.as_ref().is_none_or(|started| started.scaler.enabled)
    }

    /// The newest probe's FP32 gradients by exponent, unscaled.
    pub fn probe_histogram(&self) -> Option<ExponentHistogram> {
        self.probe.as_ref().map(|probe| probe.grads.histogram())
    }

    /// The layers whose compute dtype differs from the policy's, such as `f32 h.1, h.3`. Empty if there are none.
    pub fn in_fallback(&self) -> String {
        let mut layers: Vec<_> = self.fallback.keys().map(String::as_str).collect();
        layers.sort_by_key(|layer| layer_order(layer));
        let mut by_type: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for layer in layers {
            by_type.entry(&self.fallback[layer]).or_default().push(layer);
        }
        let of_type: Vec<_> = by_type.iter().map(|(dtype, layers)| format!("{dtype} {}", layers.join(", "))).collect();
        of_type.join(", ")
    }

    /// The model's layers, in order.
    pub fn layers(&self) -> Vec<LayerStats> {
        let mut layers = self.tensors.layers();
        for layer in &mut layers {
            layer.fallback_dtype = self.fallback.get(&PrecisionUnit::of(&layer.name).to_string()).cloned();
        }
        layers
    }

    /// The type that a tensor or layer computes in now.
    pub fn computes_in(&self, name: &str) -> String {
        let retyped = self.fallback.get(&PrecisionUnit::of(name).to_string()).cloned();
        retyped.unwrap_or_else(|| self.policy().compute.to_string())
    }

    /// The blocks that use FP8 while their gradient variance is low, with the thresholds for entering and leaving FP8.
    pub fn fp8_thresholds(&self) -> Option<(BlockRanges, [f64; 2])> {
        let blocks = BlockRanges::deserialize(self.setting("/precision/fp8/block")?).ok()?;
        let enters = self.setting("/precision/fp8/enter_variance")?.as_f64()?;
        let hysteresis = self.setting("/precision/fp8/exit_ratio").and_then(Value::as_f64).unwrap_or(1.0);
        Some((blocks, [enters, enters * hysteresis]))
    }
}

/// Whether a run repeats the batch of a step that overflowed.
fn retries(started: &Started) -> bool {
    started.config.pointer("/scaler/on_overflow").and_then(Value::as_str) == Some("retry")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{
        FlushedTensor, GradVariance, Overflow, SampleText, ScaleCause, ScaleUpdate, StepStatus, TensorRecord,
        UnderflowOnset, VERSION, Validation,
    };

    fn record(s: f64, event: Event) -> Record {
        Record { v: VERSION, t: 0, s, event }
    }

    fn started(resumed_from: Option<u64>) -> Event {
        Event::Started(Box::new(Started { run: "one".into(), resumed_from, ..Started::default() }))
    }

    fn step(step: u64, loss: f32, outcome: StepStatus) -> Event {
        let skipped = outcome == StepStatus::Skipped;
        let cause = if skipped { ScaleCause::BackedOff } else { ScaleCause::Held };
        let scale = ScaleUpdate { cause, from: 1024.0, to: if skipped { 512.0 } else { 1024.0 } };
        let time = crate::telemetry::StepTime { step_ms: 10.0, ..Default::default() };
        let record =
            StepRecord { step, loss, outcome, loss_scale: 1024.0, scale, tokens: step * 8, time, ..Default::default() };
        Event::Step(Box::new(record))
    }

    /// An applied step with changed figures.
    fn step_with(at: u64, change: impl FnOnce(&mut StepRecord)) -> Event {
        let mut event = step(at, 1.0, StepStatus::Applied);
        if let Event::Step(record) = &mut event {
            change(record);
        }
        event
    }

    fn eval(step: u64, loss: f64) -> Event {
        Event::Eval(Validation { step, loss, perplexity: loss.exp(), tokens: 9, objective: None })
    }

    /// A run that is resumed from its checkpoint at step 20 after it got to step 40.
    fn resumed() -> Vec<Event> {
        let mut events = vec![started(None)];
        for at in 1..=40 {
            let outcome = if at % 7 == 0 { StepStatus::Skipped } else { StepStatus::Applied };
            events.push(step(at, 4.0 - at as f32 / 20.0, outcome));
            match at {
                10 => events.push(eval(10, 3.0)),
                20 => events.extend([
                    eval(20, 3.1),
                    Event::CheckpointSaved(CheckpointSaved { step: 20, ..CheckpointSaved::default() }),
                ]),
                30 => events.push(eval(30, 2.0)),
                _ => {}
            }
        }
        events.push(started(Some(20)));
        events.extend((21..=25).map(|at| step(at, 5.0, StepStatus::Applied)));
        events
    }

    fn fold(events: impl IntoIterator<Item = Event>) -> RunState {
        let mut state = RunState::default();
        for (at, event) in events.into_iter().enumerate() {
            state.apply(record(at as f64, event));
        }
        state
    }

    #[test]
    fn any_counts_of_a_damaged_log_are_added() {
        let huge = |at| {
            step_with(at, |record| {
                record.grads.count = u64::MAX;
                record.grads.subnormal = u64::MAX;
                record.tensors = ["wte.weight", "wte.bias"]
                    .map(|name| TensorRecord { name: name.into(), stats: record.grads.clone(), ..Default::default() })
                    .to_vec();
            })
        };
        let probe = || {
            let most = u64::MAX;
            let flushed = FlushedTensor { nonzero: most, flushed: most, ..FlushedTensor::default() };
            let grads =
                GradStats { zero: most, inf: most, nan: most, exponents: vec![(0, most)], ..Default::default() };
            let tensors = vec![flushed.clone(), flushed];
            Event::Fp32Probe(Box::new(Fp32Probe { grads, tensors, ..Default::default() }))
        };
        let state = fold([started(None), huge(1), probe(), huge(2), probe()]);
        assert_eq!((state.step.step, state.layers()[0].count, state.probed().exponents.nan), (2, u64::MAX, u64::MAX));
    }

    #[test]
    fn a_resumed_run_keeps_the_best_validation_of_what_still_counts() {
        let state = fold(resumed());
        assert_eq!(state.best_validation(), Some((3.0, 10)));
        let figures = state.figures();
        assert_eq!(figures.validation, Some((3.1, 3.0)));
        // Steps 10 to 20 without the skipped one.
        assert!(figures.best_loss.is_some_and(|best| (best - 3.245).abs() < 1e-6), "{:?}", figures.best_loss);
        // Also if the log lacks the checkpoint's event.
        let without = resumed().into_iter().filter(|event| !matches!(event, Event::CheckpointSaved(_)));
        assert_eq!(fold(without).best_validation(), Some((3.0, 10)));
    }

    #[test]
    fn following_a_run_live_gives_the_same_figures_as_reading_its_log() {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("events.jsonl");
        let write = || -> Result<(RunState, usize)> {
            let mut log = crate::telemetry::EventLog::open(&path)?;
            for (at, event) in resumed().into_iter().enumerate() {
                log.append(&record(at as f64, event))?;
            }
            RunState::default().read(&path)
        };
        let (read, unreadable) = write().unwrap_or_else(|error| panic!("{error}"));
        let live = fold(resumed());
        assert_eq!((live.figures(), unreadable), (read.figures(), 0));
        assert_eq!((live.figures().steps, live.figures().skipped), (25, 2));
        assert_eq!((live.step.step, live.smoothed_loss(1)), (25, read.smoothed_loss(1)));
        let steps = |state: &RunState| state.curves.loss.since(0).iter().map(|one| one.step).collect::<Vec<_>>();
        assert_eq!(steps(&live), (1..=25).collect::<Vec<_>>());
        assert_eq!(steps(&live), steps(&read));
    }

    /// Regression: the loss of a short run's samples was smoothed over 20 steps, and too high.
    #[test]
    fn a_sample_has_the_smoothed_loss_of_its_run() {
        let begin = Event::Started(Box::new(Started { total_steps: 60, ..Started::default() }));
        let steps = (1..=20).map(|at| step(at, 20.0 - at as f32, StepStatus::Applied));
        let state = fold([begin].into_iter().chain(steps).chain([Event::Sample(SampleText::default())]));
        let sampled = state.samples.back().and_then(|row| row.loss);
        assert!(sampled.is_some() && sampled == state.smoothed_loss(0), "{sampled:?}");
    }

    #[test]
    fn before_the_first_repeated_step_the_state_is_that_of_the_checkpoint() {
        let events = resumed();
        let until_resumed = events.iter().rposition(|event| matches!(event, Event::Started(_))).map_or(0, |at| at + 1);
        let state = fold(events.into_iter().take(until_resumed));
        assert_eq!((state.step.step, state.figures().skipped), (20, 2));
        assert_eq!(state.phase, Phase::Running);
    }

    /// The history of a run that was resumed showed the probe of a step that the run then repeated.
    #[test]
    fn measurements_of_repeated_steps_are_void() {
        let tensors = vec![FlushedTensor { name: "wte.weight".into(), count: 9, nonzero: 8, flushed: 1 }];
        let probe =
            |step| Event::Fp32Probe(Box::new(Fp32Probe { step, tensors: tensors.clone(), ..Fp32Probe::default() }));
        let probed = |at| {
            let state = fold([started(None), step(at, 1.0, StepStatus::Applied), probe(at), started(Some(20))]);
            state.probe.map(|probe| probe.step).zip(state.tensors.rows[0].flushed)
        };
        assert_eq!([20, 21].map(probed), [Some((20, (1, 8))), None]);
        assert_eq!(fold([started(None), probe(21), started(Some(20))]).tensors.rows[0].flushed, None);
        let measured = |at| {
            let counted = step_with(at, |record| {
                record.grads.exponents = vec![(0, 1)];
                record.lost_updates = Some(UpdateCounts::default());
            });
            let state = fold([
                started(None),
                counted,
                Event::Sample(SampleText { step: at, ..SampleText::default() }),
                Event::Overflow(Overflow { step: at, ..Overflow::default() }),
                Event::UnderflowOnset(UnderflowOnset { step: at, tensors: vec!["wte.weight".into()] }),
                Event::GradVariance(GradVariance { step: at, layers: [("h.0".into(), 1.0)].into() }),
                started(Some(20)),
                started(Some(20)),
            ]);
            assert_eq!(state.configs.iter().map(|(from, _)| *from).collect::<Vec<_>>(), [0, 20]);
            let Tensors { underflow_onsets, variances, .. } = &state.tensors;
            [
                usize::from(state.grads.is_some()),
                usize::from(state.lost_updates.is_some()),
                state.samples.len(),
                state.overflows.len(),
                underflow_onsets.len(),
                variances.values().map(|(_, history)| history.buckets().len()).sum(),
            ]
        };
        assert_eq!([20, 21].map(measured), [[1; 6], [0; 6]]);
    }

    #[test]
    fn the_last_scale_and_the_peak_of_memory_are_those_at_the_end() {
        let mut skipped = step(1, 1.0, StepStatus::Skipped);
        if let Event::Step(record) = &mut skipped {
            (record.rss_bytes, record.peak_rss_bytes) = (Some(5), Some(7));
        }
        let figures = |events: &[Event]| fold(events.iter().cloned()).figures();
        assert_eq!(figures(&[skipped.clone()]).scale, Some((1024.0, 512.0)));
        assert_eq!(figures(&[skipped.clone()]).peak_rss, Some(7));
        let finished = Event::Finished(Finished { peak_rss_bytes: Some(9), ..Finished::default() });
        assert_eq!(figures(&[skipped, finished]).peak_rss, Some(9));
    }

    #[test]
    fn a_pause_and_a_restart_are_no_slow_steps() {
        let started =
            |resumed_from| Event::Started(Box::new(Started { total_steps: 13, resumed_from, ..Started::default() }));
        let timed = |at| step_with(at, |record| record.cpu_seconds = Some(2.0 * at as f64));
        let begun = || [started(None), timed(1), timed(2)];
        assert_eq!(fold(begun()).cpu_percent, Some(200.0));
        for stop in [[Event::Paused { step: 2 }, Event::Resumed { step: 2 }], [started(Some(2)), started(Some(2))]] {
            assert_eq!(fold(begun().into_iter().chain(stop).chain([timed(3)])).remaining(), Some(10.0));
        }
    }

    /// The question before discarding a run counts the steps after it.
    #[test]
    fn the_checkpoint_of_a_resumed_run_is_the_one_it_was_resumed_from() {
        let saved = Event::CheckpointSaved(CheckpointSaved { step: 40, ..CheckpointSaved::default() });
        let saved =
            |resumed| fold([started(None), saved.clone(), started(Some(resumed))]).saved.map(|(one, _)| one.step);
        assert_eq!([20, 40].map(saved), [Some(20), Some(40)]);
    }

    #[test]
    fn a_repeated_overflow_of_a_tensor_counts_once() {
        let overflow = |step| {
            let tensors = vec![TensorRecord { name: "wte.weight".into(), ..TensorRecord::default() }];
            Event::Overflow(Overflow { step, tensors, ..Overflow::default() })
        };
        let counted = |saved: Option<CheckpointSaved>| {
            let before = [started(None), step(1, 1.0, StepStatus::Skipped), overflow(1)];
            let repeated = || [step(2, 1.0, StepStatus::Skipped), overflow(2)];
            let events = before.into_iter().chain(saved.map(Event::CheckpointSaved)).chain(repeated());
            fold(events.chain([started(Some(1))]).chain(repeated())).tensors.rows[0].overflows
        };
        assert_eq!(counted(Some(CheckpointSaved { step: 1, ..CheckpointSaved::default() })), 2);
        // Without the checkpoint's event, as for the figures, the overflows before it are lost.
        assert_eq!(counted(None), 1);
    }

    #[test]
    fn a_new_run_in_the_same_log_discards_the_previous_one() {
        let state = fold(resumed().into_iter().chain([started(None), step(1, 1.0, StepStatus::Applied)]));
        assert_eq!((state.figures().steps, state.best_validation(), state.curves.loss.since(0).len()), (1, None, 1));
    }
}
