//! The training loop: reads batches, emits events, writes checkpoints, and serves commands and signals between steps.

mod evaluation;
mod events;
mod find_lr;
mod processes;
mod reference;
mod rollouts;
mod saving;

pub use find_lr::LrRangeTest;
pub(super) use processes::on_leader;
use processes::{LeaderMessage, ThroughputMeter};
pub use processes::{RunStart, with_heartbeat};
use rollouts::RolloutLog;

use crate::data::{Batch, BatchLoader, DataPosition, EvalLoader, SequenceIndex, Tokenizer, counted};
use crate::engine::collective::{ProcessGroup, SingleProcess};
use crate::engine::device::DeviceContext;
use crate::engine::gpu;
use crate::engine::model::ModelSpec;
use crate::precision::{Fallback, GradScaler};
use crate::settings::Interval;
use crate::store::aux_files::{AuxFiles, CHAT_TEMPLATE};
use crate::store::checkpoint::{Base, Best, Checkpoint, CheckpointKind, Fingerprint, Run, State, stored_bytes};
use crate::telemetry::{
    Activity, CheckpointProof, Command, Diagnostic, Emitter, Event, FinishReason, GpuSampler, RunState,
};
use crate::train::callbacks::{Callbacks, StepContext};
use crate::train::config::Config;
use crate::train::engine::TrainEngine;
use crate::train::fp8::Fp8Blocks;
use crate::train::rollout::Rollouts;
use crate::train::sample::Sampler;
use crate::train::setup::{self, ModelSource, SetupCallback, SetupEvent};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A run in progress.
pub struct Trainer {
    /// The effective configuration, with the model's revision pinned.
    pub config: Config,
    /// The model and the state that steps change.
    pub engine: TrainEngine,
    /// The device's display name.
    device: String,
    tokenizer: Tokenizer,
    aux_files: AuxFiles,
    loader: BatchLoader,
    micro_batches: Vec<Batch>,
    eval: EvalLoader,
    eval_batch: Batch,
    sampler: Option<Sampler>,
    /// The source of completions, if the objective samples them.
    rollouts: Option<Rollouts>,
    rollout_log: RolloutLog,
    fingerprint: Fingerprint,
    base: Option<Base>,
    /// The digest of the reference's weights, if there is a reference besides this base.
    reference_sha256: Option<String>,
    /// A description of the training text.
    data: String,
    total_steps: u64,
    /// The run's folder; a run without one keeps nothing.
    run: Option<Run>,
    emitter: Emitter,
    /// Commands of a screen, which are served between steps.
    pub commands: Option<Receiver<Command>>,
    /// Makes training save and stop at the next step boundary.
    pub interrupt: Arc<AtomicBool>,
    /// The slow work in progress between two steps, if any.
    pub activity: Activity,
    /// Samples GPU figures in a build with GPU support.
    gpu: Option<GpuSampler>,
    progress: LoopState,
    callbacks: Callbacks,
    throughput: ThroughputMeter,
    /// The time of the last heartbeat.
    last_beat: Instant,
}

/// The loop's own state, next to the [`TrainState`](super::TrainState).
#[derive(Debug, Default)]
struct LoopState {
    /// The start of the current batches, if the next step repeats them.
    retry: Option<DataPosition>,
    last_loss: Option<f64>,
    step_seconds: Option<f64>,
    validation: Option<Best>,
    best: Option<Best>,
    early_stopping_counter: u64,
    /// Whether early stopping ended the run at the checkpoint that it is resumed from.
    stopped_early: bool,
    /// Steps attempted minus those that the data seen so far takes with the current batch size, since it last changed;
    /// without `repeated_steps`.
    extra_steps: i64,
    /// Steps whose batches the next step repeats.
    repeated_steps: u64,
    sampled_at: Option<u64>,
    saved_at: Option<u64>,
    /// The step that the run continues from.
    resumed_from: Option<u64>,
    /// The state of the checkpoint that the run is resumed from, until it begins.
    resumed: Option<State>,
    /// The state of a checkpoint that will be written during the next step.
    pending_save: Option<State>,
    checkpoint: Option<PathBuf>,
    /// The proof of the last checkpoint that this process has written.
    proof: Option<CheckpointProof>,
    /// Settings that differ from the checkpoint's.
    changes: Vec<String>,
    /// Number of consecutive steps whose loss was far above chance.
    diverging_steps: u32,
    /// Number of consecutive steps, from the first, whose forward pass overflowed.
    forward_overflows: u32,
    /// The largest loss scale with which the last step would have been applied, if no step was.
    working_scale: Option<f32>,
    /// The phase that was logged last, and its step.
    phase: Option<(u64, &'static str)>,
}

/// The micro-batches of the step: up to and including the one that ends the epoch.
fn batches_in_step(micro_batches: &[Batch]) -> &[Batch] {
    let last = micro_batches.iter().position(|batch| batch.ends_epoch);
    last.map_or(micro_batches, |last| &micro_batches[..=last])
}

/// The state of a run when a process stops training it.
#[derive(Clone, Debug)]
pub struct RunEnd {
    /// Steps attempted.
    pub step: u64,
    /// Steps that the run will attempt.
    pub total_steps: u64,
    /// The lowest validation loss.
    pub best: Option<Best>,
    /// Whether a checkpoint has its weights.
    pub best_is_saved: bool,
    /// The newest checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// Whether it trained on conversations.
    pub chats: bool,
    /// The flag that sets the run's length, and its value.
    pub length: (&'static str, f64),
}

/// Whether something done every `every` steps (never if 0) is due at step `step`.
fn is_multiple(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

impl Trainer {
    /// A run of `config` in the processes of `group`, which call it together, from its first step or continued from
    /// `checkpoint`. It writes nothing until [`Trainer::attach`]. An error names the field in which model, policy or
    /// data differ from the checkpoint's.
    pub fn new(
        group: Arc<dyn ProcessGroup>,
        config: Config,
        checkpoint: Option<&Checkpoint>,
        report: &mut SetupCallback<'_>,
    ) -> Result<Self> {
        let opened = setup::open_device(group, &config, report)?;
        Self::on_device(opened, config, checkpoint, report)
    }

    /// [`Trainer::new`] for the leader. The workers open their devices now, and start when it is done.
    pub fn lead(
        group: &Arc<dyn ProcessGroup>,
        config: Config,
        checkpoint: Option<&Checkpoint>,
        report: &mut SetupCallback<'_>,
    ) -> Result<Self> {
        group.broadcast(&LeaderMessage::Open(Box::new(config.clone())))?;
        let opened = setup::open_device(group.clone(), &config, report)?;
        with_heartbeat(&**group, &Mutex::default(), || Self::on_device(opened, config, checkpoint, report))
    }

    /// [`Trainer::new`] on a device that is open.
    pub fn on_device(
        (group, open): (Arc<dyn ProcessGroup>, DeviceContext),
        config: Config,
        checkpoint: Option<&Checkpoint>,
        report: &mut SetupCallback<'_>,
    ) -> Result<Self> {
        let source = match checkpoint {
            Some(checkpoint) => ModelSource::from_checkpoint(&config, checkpoint, report)?,
            None => ModelSource::open(&config, report)?,
        };
        let mut config = setup::fit_memory(config, &source.spec, &open, &*group, report)?;
        let (weights, base) = source.initial(&config, &open.device, &*open.kernels, &*group, report)?;
        let DeviceContext { device, name, kernels, .. } = open;
        let chat = source.chat;
        let mut datasets = setup::datasets(&config, &chat, &source.tokenizer, report)?;
        // Pin the commit that `main` was today, so that the run can be repeated.
        config.revision = source.commit.or(config.revision);
        let format = setup::dataset_options(&config, &chat, &source.tokenizer).chat;
        let (loader, eval) = setup::loaders(&config, &datasets, &format, &source.tokenizer, report)?;
        let mut aux_files = source.aux_files;
        if loader.mixture.sets().any(SequenceIndex::is_chat) || chat.template.is_some() {
            aux_files.insert(CHAT_TEMPLATE, format.source.as_str());
        }
        let train = &config.train;
        let per_epoch = loader.steps_per_epoch(train.grad_accum) * config.objective.iterations();
        let total_steps = train.steps.unwrap_or((train.epochs.unwrap_or(1.0) * per_epoch as f64).ceil() as u64);
        report(SetupEvent::Phase("preparing the first step".into()));
        let engine = setup::engine(group, &config, &source.spec, weights, kernels, total_steps)?;
        let stop_token_ids = aux_files.stop_token_ids(&source.spec, &source.tokenizer)?;
        let rows = setup::take_rows(&mut datasets);
        let rollouts = Rollouts::new(&config, &engine, &source.tokenizer, stop_token_ids.clone(), rows)?;
        if let Some(rollouts) = &rollouts {
            let prompts = EvalLoader::from_index(loader.mixture.clone(), 1, None)?;
            rollouts.check_answers(prompts, "the training data")?;
            rollouts.check_answers(eval.clone(), "the validation data")?;
        }
        let sampler = Sampler::new(&engine.model, &config, &source.tokenizer, stop_token_ids, &device)?;
        let (data, summary) = setup::describe_data(&config, &datasets);
        let fingerprint = Fingerprint { model: source.name, policy: config.dtype.to_string(), data };
        let mut trainer = Self {
            data: summary,
            device: name,
            micro_batches: (0..train.grad_accum).map(|_| loader.batch()).collect(),
            eval_batch: loader.batch(),
            tokenizer: source.tokenizer,
            aux_files,
            sampler,
            rollouts,
            rollout_log: RolloutLog::default(),
            reference_sha256: None,
            engine,
            loader,
            eval,
            fingerprint,
            base,
            total_steps,
            run: None,
            emitter: Emitter::new(None),
            commands: None,
            interrupt: Arc::default(),
            activity: Activity::default(),
            gpu: None,
            progress: LoopState::default(),
            callbacks: Callbacks::new(&config),
            throughput: ThroughputMeter::default(),
            last_beat: Instant::now(),
            config,
        };
        if let Some(checkpoint) = checkpoint {
            trainer.load(checkpoint)?;
        }
        Ok(trainer)
    }

    /// Writes checkpoints into `run` and events to `emitter` from now on.
    pub fn attach(&mut self, run: Run, emitter: Emitter) {
        self.run = Some(run);
        self.emitter = emitter;
    }

    /// Bytes of one full checkpoint without its small files.
    pub fn checkpoint_bytes(&self) -> u64 {
        let state = &self.engine.state;
        let exact = [&state.weights, state.masters.parameters(), &state.adamw.exp_avg, &state.adamw.exp_avg_sq];
        let frozen = state.weights.base().filter(|_| self.engine.model.spec().lora.is_none());
        let exact = exact.into_iter().chain(frozen.map(|frozen| &**frozen));
        stored_bytes(exact, &state.adamw.quantized_moments) + self.tokenizer.json().len() as u64
    }

    /// The newest checkpoint written or read.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.progress.checkpoint.as_deref()
    }

    fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let state = checkpoint.state();
        self.check_base(checkpoint)?;
        state.check_fingerprint(&self.fingerprint, checkpoint.path())?;
        self.progress.changes = self.check_settings(checkpoint)?;
        self.loader.seek(state.data_position)?;
        self.count_extra_steps(state);
        if state.step > self.total_steps {
            let key = if self.config.train.steps.is_some() { "train.steps" } else { "train.epochs" };
            let (done, total) = (state.step, self.total_steps);
            let message =
                format!("the run has already completed {done} of {total} steps; increase the number of steps");
            return Err(Error::config(key, message));
        }
        let whole = ModelSpec { frozen: BTreeSet::new(), ..self.engine.model.spec().clone() };
        if checkpoint.spec().parameters() != whole.parameters() {
            return Err(Error::checkpoint(
                checkpoint.path(),
                "contains a model with a different shape; start a new run",
            ));
        }
        self.engine.state.fallback = Fallback::new(self.config.precision.clone(), state.fallback.clone());
        self.engine.state.fp8 =
            Fp8Blocks::new(self.config.precision.fp8.clone(), self.engine.model.spec().num_layers, &state.fp8);
        self.engine.state.underflowed_params.clone_from(&state.underflowed_params);
        let units: Vec<_> = self.engine.state.fallback.active().collect();
        for unit in units {
            self.engine.change_dtype(unit, self.config.precision.fallback_dtype)?;
        }
        let train = &mut self.engine.state;
        train.scaler = GradScaler::resume(self.config.grad_scaler(), state.scaler)?;
        train.counters.step = state.step;
        train.counters.updates = state.updates;
        train.counters.tokens = state.tokens;
        checkpoint.read_masters(train.masters.parameters())?;
        let wide = [train.adamw.exp_avg.clone(), train.adamw.exp_avg_sq.clone()];
        checkpoint.read_moments(wide.each_ref(), &mut train.adamw.quantized_moments)?;
        if train.masters.parameters().shards().is_some() {
            // Without an exchange, because the workers load the checkpoint later than the leader.
            checkpoint.read_masters(&train.weights)?;
        } else {
            train.masters.copy_to_weights(&train.weights, self.engine.model.kernels(), &SingleProcess)?;
        }
        self.reference_sha256.clone_from(&state.reference);
        self.restore_rollouts(state.rollouts.as_ref(), checkpoint.path())?;
        self.progress.best = state.best;
        self.progress.validation = state.validation_loss.map(|loss| Best { step: state.step, loss });
        self.progress.early_stopping_counter = state.early_stopping_counter;
        let planned = state.schedule.get("total_steps").and_then(Value::as_u64).unwrap_or(0);
        let evaluated = state.validation_loss.is_some() && state.step < planned;
        self.progress.stopped_early = evaluated && self.is_early_stopping_due();
        self.progress.saved_at = Some(state.step);
        self.progress.resumed_from = Some(state.step);
        self.progress.resumed = Some(state.clone());
        self.progress.checkpoint = Some(checkpoint.path().to_path_buf());
        Ok(())
    }

    /// Lets a run of a number of epochs end with them although an earlier part had another batch size.
    fn count_extra_steps(&mut self, state: &State) {
        let train = &self.config.train;
        let repeated = state.schedule.get("repeated_steps").and_then(Value::as_u64).unwrap_or(0);
        self.progress.repeated_steps = repeated;
        self.progress.extra_steps = if self.progress.changes.is_empty() {
            state.schedule.get("extra_steps").and_then(Value::as_i64).unwrap_or(0)
        } else {
            let steps = self.loader.steps_to_position(train.grad_accum) * self.config.objective.iterations();
            state.step.saturating_sub(repeated) as i64 - steps as i64
        };
        if train.steps.is_none() {
            self.total_steps = self.total_steps.saturating_add_signed(self.progress.extra_steps);
            self.engine.schedule = self.config.lr_schedule(self.total_steps);
            self.total_steps += repeated;
        }
    }

    /// Marks the run as restarted at step 0, so that readers of the log discard an attempt killed before its first
    /// checkpoint.
    pub fn start_over(&mut self) {
        self.progress.resumed_from = Some(0);
    }

    /// Settings that differ from the checkpoint, with both values.
    pub fn changes(&self) -> &[String] {
        &self.progress.changes
    }

    /// Restores from the run's log the last step's loss, and whether its text was sampled, for a run that resumes with
    /// no step left.
    pub fn restore_last_step(&mut self, history: &RunState) {
        let step = self.engine.state.counters.step;
        self.progress.sampled_at = history.samples.iter().any(|sample| sample.step == step).then_some(step);
        let known = history.curves.loss.at(step).filter(|bucket| bucket.step == step && bucket.last_step == step);
        self.progress.last_loss = known.and_then(|bucket| bucket.mean());
    }

    /// A notice that a resumed run has stopped early, or has neither a step nor an evaluation left, and how to continue
    /// it.
    pub fn nothing_left(&self) -> Option<String> {
        let RunEnd { step, total_steps, length: (flag, now), .. } = self.end();
        if self.progress.stopped_early {
            let text = "nothing is left to do: the run stopped early at step";
            return Some(format!("{text} {step}; continue it with `--early-stopping 0`"));
        }
        let evaluated = self.eval.is_empty() || self.progress.validation.is_some_and(|last| last.step == step);
        (evaluated && step == total_steps).then(|| {
            format!(
                "nothing is left to do: the run has completed its {}; continue it with `{flag}` and a number above {now}",
                counted(step, "step")
            )
        })
    }

    /// The state of the run.
    pub fn end(&self) -> RunEnd {
        let train = &self.config.train;
        let run = self.progress.checkpoint.as_deref().and_then(Path::parent);
        let is_saved = |(run, best): (&Path, Best)| {
            [CheckpointKind::Full, CheckpointKind::Weights]
                .iter()
                .any(|kind| run.join(kind.directory(best.step)).is_dir())
        };
        RunEnd {
            step: self.engine.state.counters.step,
            total_steps: self.total_steps,
            best: self.progress.best,
            best_is_saved: run.zip(self.progress.best).is_some_and(is_saved),
            checkpoint: self.progress.checkpoint.clone(),
            chats: self.loader.mixture.sets().any(SequenceIndex::is_chat),
            length: match train.steps {
                Some(steps) => ("--steps", steps as f64),
                None => ("--epochs", train.epochs.unwrap_or(1.0)),
            },
        }
    }

    /// Runs `count` steps without evaluation, samples, checkpoints or commands.
    pub fn advance(&mut self, count: u64) -> Result<()> {
        self.prepare_reference()?;
        (0..count).try_for_each(|_| self.step(false))
    }

    /// Trains until the run's steps are done or something stops it, and saves the last state, also on an interrupt.
    pub fn run(&mut self) -> Result<FinishReason> {
        let result = self.run_to_end();
        if result.as_ref().err().is_none_or(Error::is_common) {
            self.stop_workers()?;
        }
        result
    }

    fn run_to_end(&mut self) -> Result<FinishReason> {
        let began = Instant::now();
        self.gpu = gpu::uuid(&self.engine.state.weights.device()).and_then(GpuSampler::start);
        let started = self.started();
        self.emitter.emit(Event::Started(Box::new(started)));
        if !self.config.precision.masters {
            let message =
                "`precision.masters = false`: updates below half a unit in the last place of a weight are lost";
            self.warn(message.into());
        }
        let result = self.prepare_reference().and_then(|()| self.abandon_later_checkpoints());
        let result = result.and_then(|()| self.steps());
        let flushed = self.flush_save();
        let step = self.engine.state.counters.step;
        let result = result.and_then(|reason| flushed.map(|()| reason)).map_err(|error| {
            let saves = matches!(error, Error::Data { .. } | Error::Reward { .. }) && step > 0;
            if saves { self.save_last().err().unwrap_or(error) } else { error }
        });
        let reason = match &result {
            Ok(reason) => {
                self.warn_about_schedule();
                *reason
            }
            Err(error @ Error::Diverged { .. }) => {
                self.emitter.emit(Event::Diverged(Diagnostic { step, message: error.to_string() }));
                FinishReason::Diverged
            }
            Err(_) => FinishReason::Failed,
        };
        self.finish(reason, began);
        result
    }

    fn steps(&mut self) -> Result<FinishReason> {
        let mut probe = false;
        let mut reason = if self.progress.stopped_early { FinishReason::EarlyStopped } else { FinishReason::Done };
        while reason == FinishReason::Done && self.engine.state.counters.step < self.total_steps {
            if let Some(reason) = self.serve_commands(&mut probe)? {
                return Ok(reason);
            }
            self.step(std::mem::take(&mut probe))?;
            let (step, total) = (self.engine.state.counters.step, self.total_steps);
            let repeats = self.progress.retry.is_some() || self.has_kept_completions();
            let ends_epoch = self.loader.position().row == 0 && !repeats;
            let due = |every: Interval| {
                step < total
                    && match every {
                        Interval::Steps(every) => is_multiple(step, every),
                        Interval::Epoch => ends_epoch,
                    }
            };
            let (train, checkpoint) = (&self.config.train, &self.config.checkpoint);
            let [eval, sample] = [due(train.eval_every), due(train.sample_every)];
            let [save_weights, save] = [due(checkpoint.save_weights_every), due(checkpoint.save_every)];
            if eval && self.evaluate()? {
                reason = FinishReason::EarlyStopped;
                break;
            }
            if sample {
                self.sample();
            }
            if save_weights {
                self.warn_on_failure(Self::save_weights)?;
            }
            if save {
                self.schedule_save()?;
            }
        }
        let unevaluated = self.progress.validation.is_none_or(|last| last.step != self.engine.state.counters.step);
        // Save even if this evaluation fails.
        let evaluated = if unevaluated { self.evaluate().map(drop) } else { Ok(()) };
        if self.progress.sampled_at != Some(self.engine.state.counters.step) {
            self.sample();
        }
        self.save_last()?;
        evaluated?;
        self.check_result()?;
        Ok(reason)
    }

    /// Serves signals and commands before the next step; returns why training should stop, if it should.
    fn serve_commands(&mut self, probe: &mut bool) -> Result<Option<FinishReason>> {
        let mut paused = false;
        loop {
            self.beat()?;
            let command = match &self.commands {
                _ if self.interrupt.load(Ordering::Relaxed) => Some(Command::Interrupt),
                None => None,
                Some(commands) if paused => commands.recv_timeout(std::time::Duration::from_millis(50)).ok(),
                Some(commands) => commands.try_recv().ok(),
            };
            let step = self.engine.state.counters.step;
            match command {
                None if paused => self.flush_save()?,
                None => return Ok(None),
                Some(Command::Pause) if !paused => {
                    paused = true;
                    self.emitter.emit(Event::Paused { step });
                }
                Some(Command::Resume | Command::Detach) if paused => {
                    paused = false;
                    self.emitter.emit(Event::Resumed { step });
                }
                Some(Command::Pause | Command::Resume | Command::Detach) => {}
                Some(Command::SaveNow) => self.schedule_save()?,
                Some(Command::EvalNow) => {
                    if self.validate()?.is_none() {
                        self.warn("there is no validation data: `val` is `none`".into());
                    }
                }
                Some(Command::SampleNow) if self.sampler.is_none() => {
                    self.warn("there are no text samples: `train.sample_tokens` is 0".into());
                }
                Some(Command::SampleNow) => self.sample(),
                Some(Command::ProbeNow) => *probe = true,
                Some(Command::Stop { save }) => {
                    if save {
                        self.save_last()?;
                    }
                    return Ok(Some(FinishReason::Stopped));
                }
                Some(Command::Interrupt) => {
                    self.save_last()?;
                    return Ok(Some(FinishReason::Interrupted));
                }
                Some(Command::Abort) => return Ok(Some(FinishReason::Stopped)),
            }
        }
    }

    /// Runs one step and emits its events.
    fn step(&mut self, probe: bool) -> Result<()> {
        let began = Instant::now();
        let next = self.engine.state.counters.step + 1;
        let retry = self.progress.retry.take();
        let position = retry.unwrap_or_else(|| self.next_batches());
        if let Err(error) = self.loader.check() {
            // The step has not begun, so a resumed run repeats it.
            self.loader.seek(position)?;
            return Err(error);
        }
        let probe = probe || is_multiple(next, self.config.telemetry.probe_every);
        self.broadcast(&LeaderMessage::Step { probe })?;
        if retry.is_none() {
            self.sample_completions(position)?;
        }
        if probe {
            self.probe()?;
        }
        self.engine.count_exponents = is_multiple(next, self.config.telemetry.grad_histogram_every);
        self.engine.update_counts = is_multiple(next, self.config.telemetry.lost_updates_every).then(Vec::new);
        let batches = batches_in_step(&self.micro_batches);
        if let Some(begin) = self.callbacks.begin {
            begin(&mut self.engine, batches)?;
        }
        let (report, waited) = self.step_overlapping_save()?;
        if let Some(why) = self.engine.model.kernels().take_notice() {
            self.warn(format!("passes run without a CUDA graph: {why}"));
        }
        let batches = batches_in_step(&self.micro_batches);
        let config = &self.config;
        let mut context = StepContext { config, batches, report, first_nonfinite: None, events: Vec::new() };
        self.callbacks.end.iter().try_for_each(|end| end(&mut self.engine, &mut context))?;
        let StepContext { report, first_nonfinite, events, .. } = context;
        self.log_throughput(report.targets);
        let elapsed = began.elapsed().saturating_sub(waited);
        let diverged = self.log_step(position, &report, first_nonfinite.map(|(found, _)| found), elapsed);
        self.measure_after_last(&report)?;
        for event in events {
            self.emitter.emit(event);
        }
        diverged.map_or(Ok(()), Err)
    }

    /// Fills the micro-batches of the next step, and returns where they begin; an epoch's last step may have fewer.
    /// Each batch has a target: samples without one are in no row.
    fn next_batches(&mut self) -> DataPosition {
        let position = self.loader.position();
        if self.has_kept_completions() {
            return position;
        }
        for batch in &mut self.micro_batches {
            if self.rollouts.is_some() {
                *batch = self.loader.batch();
            }
            self.loader.next_batch(batch);
            if batch.ends_epoch {
                break;
            }
        }
        position
    }

    /// Whether the next step uses the completions of the last one.
    fn has_kept_completions(&self) -> bool {
        self.rollouts.as_ref().is_some_and(Rollouts::has_kept)
    }

    /// Shows a phase here, and in the log to those who watch from elsewhere; once if it is tried again.
    pub(super) fn begin_phase(&mut self, what: &'static str) {
        let step = self.engine.state.counters.step;
        self.activity.begin(what);
        if self.progress.phase.replace((step, what)) != Some((step, what)) {
            self.emitter.emit(Event::Phase { step, what: what.to_owned() });
        }
    }
}
