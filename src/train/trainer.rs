//! The loop around the step: batches in, events and checkpoints out, commands and signals served between two steps.

mod events;
mod saving;

use crate::data::{Batch, BatchLoader, Cursor, EvalBatches, Tokenizer};
use crate::engine::device::OpenDevice;
use crate::engine::model::Parameters;
use crate::inference::trained::check_range;
use crate::precision::{Fallback, GradScaler};
use crate::store::checkpoint::{Best, Checkpoint, Identity, Run};
use crate::telemetry::{
    Activity, Amount, Command, Emitter, Event, FinishReason, GpuSampler, RunState, SampleText, Trouble, Validation,
};
use crate::train::config::{Config, Place};
use crate::train::fp8::Fp8Layer;
use crate::train::observer::{StepObserver, Taken, observers};
use crate::train::probe;
use crate::train::sample::Sampler;
use crate::train::setup::{self, ModelSource, Preparing, Report};
use crate::train::state::Counters;
use crate::train::step::Engine;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Instant;

/// A run in progress.
pub struct Trainer {
    config: Config,
    engine: Engine,
    /// Where it computes, in words.
    device: String,
    tokenizer: Tokenizer,
    loader: BatchLoader,
    micro_batches: Vec<Batch>,
    eval: EvalBatches,
    eval_batch: Batch,
    sampler: Option<Sampler>,
    identity: Identity,
    /// The training text in words.
    data: String,
    total_steps: u64,
    /// The run's folder; a run without one keeps nothing.
    run: Option<Run>,
    emitter: Emitter,
    commands: Option<Receiver<Command>>,
    interrupt: Arc<AtomicBool>,
    /// What takes long between two steps.
    activity: Activity,
    /// The GPU of a build that can use one.
    gpu: Option<GpuSampler>,
    progress: Progress,
    observers: Vec<Box<dyn StepObserver>>,
}

/// What the loop remembers besides the state that a checkpoint holds.
#[derive(Debug, Default)]
struct Progress {
    /// Where the batches at hand began, if the next step repeats them.
    retry: Option<Cursor>,
    last_loss: Option<f64>,
    step_seconds: Option<f64>,
    validation: Option<Best>,
    best: Option<Best>,
    looks_without_best: u64,
    sampled_at: Option<u64>,
    saved_at: Option<u64>,
    checkpoint: Option<PathBuf>,
    /// Settings that were others when the checkpoint was written.
    changes: Vec<String>,
    /// Steps in a row whose loss was far above that of guessing.
    far_above_chance: u32,
    /// Whether the log has been told that batches without targets are passed over.
    said_empty: bool,
}

/// How many of these micro-batches make the step: up to the one that ends the epoch.
fn used(micro_batches: &[Batch]) -> usize {
    micro_batches.iter().position(|batch| batch.ends_epoch).map_or(micro_batches.len(), |last| last + 1)
}

/// Whether something that is done every `every` steps, or never if that is 0, falls on step number `step`.
fn is_multiple(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

impl Trainer {
    /// A run of `config`, at its first step. Until [`Trainer::attach`] nothing is written into a run's folder.
    pub fn new(config: Config, report: &mut Report<'_>) -> Result<Self> {
        let OpenDevice { device, name } = setup::device(&config, report)?;
        let source = ModelSource::open(&config, report)?;
        setup::check_memory(&config, &source.config, &device)?;
        let masters = source.masters(config.seed, &device, report)?;
        check_range(&masters, &config.model, config.dtype.compute)?;
        Self::with_parts(config, source, masters, name, report)
    }

    /// The run of `config`, going on from `checkpoint`. An error names the field in which model, policy or data differ
    /// from the saved run's.
    pub fn resume(config: Config, checkpoint: &Checkpoint, report: &mut Report<'_>) -> Result<Self> {
        let OpenDevice { device, name } = setup::device(&config, report)?;
        let source = ModelSource::of_checkpoint(&config, checkpoint)?;
        setup::check_memory(&config, &source.config, &device)?;
        let masters = source.masters(config.seed, &device, report)?;
        let mut trainer = Self::with_parts(config, source, masters, name, report)?;
        trainer.load(checkpoint)?;
        Ok(trainer)
    }

    pub(super) fn with_parts(
        mut config: Config,
        source: ModelSource,
        masters: Parameters,
        device: String,
        report: &mut Report<'_>,
    ) -> Result<Self> {
        let dataset = setup::dataset(&config, &source.tokenizer, report)?;
        // What `main` was today is what this run is repeated with.
        config.revision = source.commit.or(config.revision);
        let train = &config.train;
        let (batch_size, seq_len) = (train.batch_size, train.seq_len);
        let loader = BatchLoader::new(dataset.train.clone(), batch_size, seq_len, config.seed)?;
        let held_out = if config.val.is_some() { "`--val`" } else { "the last tenth of the text, which validates" };
        dataset.validation.require(seq_len, held_out)?;
        let limit = (train.eval_batches > 0).then_some(train.eval_batches);
        let eval = EvalBatches::new(dataset.validation.clone(), batch_size, seq_len, limit)?;
        let per_epoch = loader.steps_per_epoch(train.grad_accum);
        let total_steps = train.steps.unwrap_or((train.epochs.unwrap_or(1.0) * per_epoch as f64).ceil() as u64);
        report(Preparing::Phase("preparing the first step".into()));
        let engine = setup::engine(&config, &source.config, masters, total_steps)?;
        let sampler = (train.sample_tokens > 0)
            .then(|| {
                let (prompt, tokens) = (&train.prompt, train.sample_tokens);
                let device = engine.state.weights.device();
                Sampler::new(&engine.model, config.dtype, &source.tokenizer, prompt, tokens, train.temperature, &device)
            })
            .transpose()?;
        let identity =
            Identity { model: source.name, policy: config.dtype.to_string(), data: dataset.fingerprint.clone() };
        let optimum = dataset.entropy_per_token.map_or_else(String::new, |h| format!(", entropy {h:.4} nats a token"));
        let data = format!(
            "{}: {} tokens to train on, {} to validate{optimum}",
            config.data,
            dataset.train.len(),
            dataset.validation.len()
        );
        Ok(Self {
            data,
            device,
            micro_batches: (0..train.grad_accum).map(|_| loader.batch()).collect(),
            eval_batch: loader.batch(),
            tokenizer: source.tokenizer,
            sampler,
            engine,
            loader,
            eval,
            identity,
            total_steps,
            run: None,
            emitter: Emitter::new(None),
            commands: None,
            interrupt: Arc::default(),
            activity: Activity::default(),
            gpu: None,
            progress: Progress::default(),
            observers: observers(&config),
            config,
        })
    }

    /// From here on checkpoints go into `run` and events to `emitter`.
    pub fn attach(&mut self, run: Run, emitter: Emitter) {
        self.run = Some(run);
        self.emitter = emitter;
    }

    /// Wishes from a screen.
    pub fn listen(&mut self, commands: Receiver<Command>) {
        self.commands = Some(commands);
    }

    /// A flag that makes training save and stop at the next step boundary.
    pub fn interrupt(&self) -> Arc<AtomicBool> {
        self.interrupt.clone()
    }

    /// What the trainer does between two steps, for a screen.
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }

    /// Bytes of one full checkpoint, but for its small files.
    pub fn checkpoint_bytes(&self) -> u64 {
        let (parameters, compute) = (self.engine.model.spec().parameter_count(), self.config.dtype.compute);
        // Weights, masters and two moments.
        parameters * (compute.size_in_bytes() as u64 + 12) + self.tokenizer.json().len() as u64
    }

    /// The newest checkpoint written or read.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.progress.checkpoint.as_deref()
    }

    /// The configuration in force, with the model's revision pinned.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The engine, for comparisons.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Steps the run will attempt.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Takes over a checkpoint's state.
    fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let state = checkpoint.state();
        state.check_identity(&self.identity, checkpoint.path())?;
        self.progress.changes = self.check_settings(checkpoint)?;
        if checkpoint.config().parameters() != self.engine.model.spec().parameters() {
            return Err(Error::checkpoint(checkpoint.path(), "holds a model of another shape; start a new run"));
        }
        self.engine.state.fallback = Fallback::new(self.config.precision, state.fallback.clone());
        self.engine.state.fp8 = Fp8Layer::new(self.config.precision.fp8, state.fp8.clone());
        let units: Vec<_> = self.engine.state.fallback.active().collect();
        for unit in units {
            self.engine.retype(unit, self.config.precision.fallback_dtype)?;
        }
        let train = &mut self.engine.state;
        train.scaler = GradScaler::resume(self.config.grad_scaler(), state.scaler)?;
        train.counters.step = state.step;
        train.counters.updates = state.updates;
        train.counters.tokens = state.tokens;
        checkpoint.read_masters(train.masters.parameters())?;
        checkpoint.read_exp_avg(&train.adamw.exp_avg)?;
        checkpoint.read_exp_avg_sq(&train.adamw.exp_avg_sq)?;
        train.masters.write_compute_copy(&train.weights, self.engine.model.kernels())?;
        self.loader.seek(state.cursor)?;
        self.progress.best = state.best;
        self.progress.looks_without_best = state.looks_without_best;
        self.progress.saved_at = Some(state.step);
        self.progress.checkpoint = Some(checkpoint.path().to_path_buf());
        Ok(())
    }

    /// Says in the log that whatever an earlier attempt at this run has written there is void: it was killed before its
    /// first checkpoint.
    pub fn start_over(&mut self) {
        self.progress.saved_at = Some(0);
    }

    /// Takes the loss of the step that the run goes on from out of its log: a run that has no step left still has one.
    pub fn recall(&mut self, history: &RunState) {
        let step = self.engine.state.counters.step;
        let known = history.curves.loss.at(step).filter(|bucket| bucket.step == step && bucket.last_step == step);
        self.progress.last_loss = known.and_then(|bucket| bucket.mean());
    }

    /// `count` steps and nothing around them.
    pub fn advance(&mut self, count: u64) -> Result<()> {
        (0..count).try_for_each(|_| self.step(false))
    }

    /// Trains until the run's steps are done or something ends it; the last state is saved, also on an interrupt.
    pub fn run(&mut self) -> Result<FinishReason> {
        let began = Instant::now();
        let resumed_from = self.progress.saved_at;
        let ordinal = if let Ok(Place::Cuda(ordinal)) = self.config.place() { ordinal } else { 0 };
        self.gpu = GpuSampler::start(ordinal);
        let started = self.started(resumed_from);
        self.emitter.emit(Event::Started(Box::new(started)))?;
        for change in std::mem::take(&mut self.progress.changes) {
            self.warn(format!("resumed with another setting than the checkpoint's: {change}"))?;
        }
        let reason = self.steps();
        let reason = match reason {
            Ok(reason) => reason,
            Err(error) => {
                let step = self.engine.state.counters.step;
                if matches!(error, Error::Data { .. }) && step > 0 {
                    self.save_last()?;
                }
                if let Error::Diverged { .. } = &error {
                    self.emitter.emit(Event::Diverged(Trouble { step, message: error.to_string() }))?;
                    self.finish(FinishReason::Diverged, began)?;
                }
                return Err(error);
            }
        };
        self.finish(reason, began)?;
        Ok(reason)
    }

    fn steps(&mut self) -> Result<FinishReason> {
        let mut probe = false;
        let mut reason = FinishReason::Done;
        while self.engine.state.counters.step < self.total_steps {
            if let Some(reason) = self.hear(&mut probe)? {
                return Ok(reason);
            }
            self.step(std::mem::take(&mut probe))?;
            let (step, total) = (self.engine.state.counters.step, self.total_steps);
            let due = |every: u64| is_multiple(step, every) && step < total;
            let (train, checkpoint) = (&self.config.train, &self.config.checkpoint);
            let [eval, sample] = [due(train.eval_every), due(train.sample_every)];
            let [save_weights, save] = [due(checkpoint.weights_every), due(checkpoint.save_every)];
            if eval && self.evaluate()? {
                reason = FinishReason::EarlyStopped;
                break;
            }
            if sample {
                self.sample()?;
            }
            if save_weights {
                self.tell_failure(Self::save_weights)?;
            }
            if save {
                self.tell_failure(Self::save)?;
            }
        }
        let unseen = self.progress.validation.is_none_or(|last| last.step != self.engine.state.counters.step);
        // What has been trained is saved whatever becomes of this.
        let looked = if unseen { self.evaluate().map(drop) } else { Ok(()) };
        if self.progress.sampled_at != Some(self.engine.state.counters.step) {
            self.sample()?;
        }
        self.save_last()?;
        looked?;
        self.check_applied()?;
        Ok(reason)
    }

    /// An error if not one step was applied: then nothing has been learned, and the exit code should say so.
    fn check_applied(&self) -> Result<()> {
        let Counters { step, updates, .. } = self.engine.state.counters;
        if updates > 0 || step == 0 {
            return Ok(());
        }
        let scale = self.engine.state.scaler.scale();
        let message = format!(
            "all {step} steps overflowed and were skipped, so nothing was learned; begin with a lower loss scale, such as \
             `--init-scale {scale}`, or take more steps"
        );
        Err(Error::Diverged { step, message })
    }

    /// What a signal or the screen wants before the next step.
    fn hear(&mut self, probe: &mut bool) -> Result<Option<FinishReason>> {
        let mut paused = false;
        loop {
            if self.interrupt.load(Ordering::Relaxed) {
                self.save_last()?;
                return Ok(Some(FinishReason::Interrupted));
            }
            let wish = match &self.commands {
                None => None,
                Some(commands) if paused => commands.recv_timeout(std::time::Duration::from_millis(50)).ok(),
                Some(commands) => commands.try_recv().ok(),
            };
            let step = self.engine.state.counters.step;
            match wish {
                None if paused => {}
                None => return Ok(None),
                Some(Command::Pause) if !paused => {
                    paused = true;
                    self.emitter.emit(Event::Paused { step })?;
                }
                Some(Command::Resume | Command::Detach) if paused => {
                    paused = false;
                    self.emitter.emit(Event::Resumed { step })?;
                }
                Some(Command::Pause | Command::Resume | Command::Detach) => {}
                Some(Command::SaveNow) => self.tell_failure(Self::save)?,
                Some(Command::EvalNow) => drop(self.validate()?),
                Some(Command::SampleNow) => self.sample()?,
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

    /// One step and the events about it.
    fn step(&mut self, probe: bool) -> Result<()> {
        let began = Instant::now();
        let next = self.engine.state.counters.step + 1;
        let cursor = match self.progress.retry.take() {
            Some(cursor) => cursor,
            None => self.draw()?,
        };
        if let Err(error) = self.loader.check() {
            // The step has not begun: the next process repeats it.
            self.loader.seek(cursor)?;
            return Err(error);
        }
        if probe || is_multiple(next, self.config.telemetry.probe_every) {
            self.probe()?;
        }
        self.engine.exponents = is_multiple(next, self.config.telemetry.exponents_every);
        let batches = &self.micro_batches[..used(&self.micro_batches)];
        self.observers.iter_mut().try_for_each(|observer| observer.before(&mut self.engine, batches))?;
        let report = self.engine.step(batches)?;
        let mut taken = Taken { batches, report, origin: None, events: Vec::new() };
        self.observers.iter_mut().try_for_each(|observer| observer.after(&mut self.engine, &mut taken))?;
        let Taken { report, origin, events, .. } = taken;
        let diverged = self.tell(cursor, &report, origin.map(|(origin, _)| origin), began)?;
        events.into_iter().try_for_each(|event| self.emitter.emit(event))?;
        diverged.map_or(Ok(()), Err)
    }

    /// Fills the micro-batches of the next step, and says where they begin; an epoch's last step may have fewer. Batches in
    /// which every target is masked would teach nothing and are passed over.
    fn draw(&mut self) -> Result<Cursor> {
        for _ in 0..=self.loader.batches_per_epoch() {
            let cursor = self.loader.cursor();
            for batch in &mut self.micro_batches {
                self.loader.next_batch(batch);
                if batch.ends_epoch {
                    break;
                }
            }
            if self.micro_batches[..used(&self.micro_batches)].iter().any(|batch| batch.target_count > 0) {
                return Ok(cursor);
            }
            if !std::mem::replace(&mut self.progress.said_empty, true) {
                self.warn(
                    "a batch without a single target was passed over, as all others will be: prompts fill it".into(),
                )?;
            }
        }
        Err(Error::data(
            "training data",
            "holds no target: prompts, which are not trained on, fill every window; raise `--seq-len`",
        ))
    }

    /// Computes the validation loss and tells it.
    fn validate(&mut self) -> Result<Best> {
        let step = self.engine.state.counters.step;
        self.eval.rewind();
        let total = self.eval.remaining();
        let (eval, activity) = (&mut self.eval, &self.activity);
        let (loss, tokens) = self.engine.evaluate(&mut self.eval_batch, |batch| {
            activity.advance("evaluating", Amount::Items(total - eval.remaining(), total));
            eval.next_batch(batch)
        })?;
        self.activity.end();
        self.eval.check()?;
        let look = Best { step, loss };
        self.progress.validation = Some(look);
        self.emitter.emit(Event::Eval(Validation { step, loss, perplexity: loss.exp(), tokens }))?;
        Ok(look)
    }

    /// Validates when it is due; `true` if training should stop because the loss has not improved for long.
    fn evaluate(&mut self) -> Result<bool> {
        let look = self.validate()?;
        let improved = look.loss.is_finite() && self.progress.best.is_none_or(|best| look.loss < best.loss);
        if improved {
            self.progress.best = Some(look);
            self.progress.looks_without_best = 0;
        } else {
            self.progress.looks_without_best += 1;
        }
        if improved && self.config.checkpoint.keep_best {
            // One of this step that is there already does not know the loss.
            self.progress.saved_at = None;
            self.tell_failure(Self::save)?;
        }
        let patience = self.config.train.early_stopping;
        Ok(patience > 0 && self.progress.looks_without_best >= patience)
    }

    fn sample(&mut self) -> Result<()> {
        let step = self.engine.state.counters.step;
        self.progress.sampled_at = Some(step);
        let Some(sampler) = &mut self.sampler else { return Ok(()) };
        let (model, weights) = (&self.engine.model, &self.engine.state.weights);
        self.activity.begin("sampling");
        let text = sampler.generate(model, weights, &self.tokenizer, self.config.seed ^ step);
        self.activity.end();
        let text = match text {
            Ok(text) => text,
            Err(error) => return self.warn(format!("no text sample: {error}")),
        };
        let prompt = self.config.train.prompt.clone();
        self.emitter.emit(Event::Sample(SampleText { step, prompt, text }))
    }

    /// Repeats the first micro-batch's backward pass in FP32. It writes into buffers that the step overwrites anyway, so
    /// the run's numbers are the same with and without it.
    fn probe(&mut self) -> Result<()> {
        let probe = probe::probe(&mut self.engine, &self.micro_batches[0])?;
        self.emitter.emit(Event::Probe(Box::new(probe)))
    }
}
