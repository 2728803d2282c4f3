//! The loop around the step: batches in, events and checkpoints out, wishes and signals heard between two steps.

use crate::checkpoint::{self, Best, Checkpoint, Contents, FORMAT_VERSION, Identity, Keep, Kind, Run, State};
use crate::data::{Batch, BatchLoader, Cursor, EvalBatches, Tokenizer};
use crate::kernels::isa::Isa;
use crate::model::Parameters;
use crate::optim::AdamWConfig;
use crate::precision::{Fallback, GradScaler, OnOverflow, ScaleChange, ScalerPolicy};
use crate::telemetry::{
    Command, Cpu, Emitter, Event, FinishReason, Finished, GpuSampler, ModelShape, Overflow, ProcessId, ProcessStats,
    SampleText, Saved, ScalerSettings, Started, Trouble, Validation,
};
use crate::train::accelerator::{Accelerator, accelerator};
use crate::train::config::{CheckpointSection, Config, Place};
use crate::train::fp8::Fp8Layer;
use crate::train::sample::Sampler;
use crate::train::setup::{self, ModelSource, Report};
use crate::train::step::{Engine, Outcome, StepReport};
use crate::train::{attribution, fallback, fp8, headroom, probe, records};
use crate::trained::check_range;
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Instant;

/// Steps the printed tokens per second are averaged over.
const RATE_STEPS: f64 = 10.0;

/// A run in progress.
pub struct Trainer {
    config: Config,
    engine: Engine,
    /// What takes the engine's steps, if that is not the engine itself.
    device: Option<Box<dyn Accelerator>>,
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
    /// The GPU of a build that can use one.
    gpu: Option<GpuSampler>,
    progress: Progress,
}

/// What the loop remembers besides the state that a checkpoint holds.
#[derive(Debug, Default)]
struct Progress {
    /// Where the batches at hand began, if the next step repeats them.
    retry: Option<Cursor>,
    last_loss: f64,
    step_seconds: Option<f64>,
    validation: Option<Best>,
    best: Option<Best>,
    looks_without_best: u64,
    sampled_at: Option<u64>,
    saved_at: Option<u64>,
    checkpoint: Option<PathBuf>,
}

impl Trainer {
    /// A run of `config`, at its first step. Until [`Trainer::attach`] nothing is written into a run's folder.
    pub fn new(config: Config, report: &mut Report<'_>) -> Result<Self> {
        config.check_device()?;
        let source = ModelSource::open(&config, report)?;
        let masters = source.masters(config.seed, &candle_core::Device::Cpu)?;
        check_range(&masters, &config.model, config.dtype.compute)?;
        Self::with_parts(config, source, masters, report)
    }

    /// The run of `config`, going on from `checkpoint`. An error names the field in which model, policy or data differ
    /// from the saved run's.
    pub fn resume(config: Config, checkpoint: &Checkpoint, report: &mut Report<'_>) -> Result<Self> {
        config.check_device()?;
        let source = ModelSource::of_checkpoint(&config, checkpoint)?;
        let masters = source.masters(config.seed, &candle_core::Device::Cpu)?;
        let mut trainer = Self::with_parts(config, source, masters, report)?;
        trainer.load(checkpoint)?;
        Ok(trainer)
    }

    pub(super) fn with_parts(
        mut config: Config,
        source: ModelSource,
        masters: Parameters,
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
        let total_steps = train.steps.unwrap_or((train.epochs * per_epoch as f64).ceil() as u64);
        let mut engine = setup::engine(&config, &source.config, masters, total_steps)?;
        let device = accelerator(&config, &mut engine, report)?;
        let sampler = (train.sample_tokens > 0)
            .then(|| {
                let (prompt, tokens) = (&train.prompt, train.sample_tokens);
                Sampler::new(&engine.model, config.dtype, &source.tokenizer, prompt, tokens, train.temperature)
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
            micro_batches: (0..train.grad_accum).map(|_| loader.batch()).collect(),
            eval_batch: loader.batch(),
            tokenizer: source.tokenizer,
            sampler,
            engine,
            device,
            loader,
            eval,
            identity,
            total_steps,
            run: None,
            emitter: Emitter::new(None),
            commands: None,
            interrupt: Arc::default(),
            gpu: None,
            progress: Progress::default(),
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

    /// From here on `device` takes the steps.
    #[cfg(test)]
    pub(super) fn run_on(&mut self, device: impl FnOnce(&Engine) -> Result<Box<dyn Accelerator>>) -> Result<()> {
        self.device = Some(device(&self.engine)?);
        self.engine.shrink(self.config.dtype)
    }

    /// Brings the engine's tensors to where the run is.
    fn fetch(&mut self) -> Result<()> {
        self.device.as_mut().map_or(Ok(()), |device| device.fetch(&mut self.engine.state))
    }

    /// Readies the engine for passes of its own over the batches at hand.
    fn look_closer(&mut self) -> Result<()> {
        self.fetch()?;
        let train = &self.config.train;
        self.engine.grow(self.config.dtype, train.batch_size, train.seq_len)
    }

    /// Steps the run will attempt.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Takes over a checkpoint's state.
    fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let state = checkpoint.state();
        state.check_identity(&self.identity, checkpoint.path())?;
        if checkpoint.config().parameter_shapes() != self.engine.model.config().parameter_shapes() {
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
        train.masters.write_compute_copy(&train.weights)?;
        if let Some(device) = &mut self.device {
            device.send(train)?;
        }
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

    /// `count` steps and nothing around them.
    pub fn advance(&mut self, count: u64) -> Result<()> {
        (0..count).try_for_each(|_| self.step(false))?;
        self.fetch()
    }

    /// Trains until the run's steps are done or something ends it; the last state is saved, also on an interrupt.
    pub fn run(&mut self) -> Result<FinishReason> {
        let began = Instant::now();
        let resumed_from = self.progress.saved_at;
        let ordinal = if let Ok(Place::Cuda(ordinal)) = self.config.place() { ordinal } else { 0 };
        self.gpu = GpuSampler::start(ordinal);
        let started = self.started(resumed_from);
        self.emitter.emit(Event::Started(Box::new(started)))?;
        let reason = self.steps();
        let reason = match reason {
            Ok(reason) => reason,
            Err(error) => {
                let step = self.engine.state.counters.step;
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
        while self.engine.state.counters.step < self.total_steps {
            if let Some(reason) = self.hear(&mut probe)? {
                return Ok(reason);
            }
            self.step(std::mem::take(&mut probe))?;
            let step = self.engine.state.counters.step;
            let due = |every: u64| every > 0 && step.is_multiple_of(every) && step < self.total_steps;
            let CheckpointSection { save_every, weights_every, .. } = self.config.checkpoint;
            let (eval, sample) = (due(self.config.train.eval_every), due(self.config.train.sample_every));
            let (save, save_weights) = (due(save_every), due(weights_every));
            if eval && self.evaluate()? {
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
        if self.progress.validation.is_none_or(|last| last.step != self.engine.state.counters.step) {
            self.evaluate()?;
        }
        if self.progress.sampled_at != Some(self.engine.state.counters.step) {
            self.sample()?;
        }
        self.save()?;
        Ok(FinishReason::Done)
    }

    /// What a signal or the screen wants before the next step.
    fn hear(&mut self, probe: &mut bool) -> Result<Option<FinishReason>> {
        let mut paused = false;
        loop {
            if self.interrupt.load(Ordering::Relaxed) {
                self.save()?;
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
                Some(Command::EvalNow) => drop(self.evaluate()?),
                Some(Command::SampleNow) => self.sample()?,
                Some(Command::ProbeNow) => *probe = true,
                Some(Command::Stop { save }) => {
                    if save {
                        self.save()?;
                    }
                    return Ok(Some(FinishReason::Stopped));
                }
                Some(Command::Abort) => return Ok(Some(FinishReason::Stopped)),
            }
        }
    }

    fn step(&mut self, probe: bool) -> Result<()> {
        let began = Instant::now();
        let cursor = self.progress.retry.take().unwrap_or_else(|| self.draw());
        let next = self.engine.state.counters.step + 1;
        let every = |every: u64| every > 0 && next.is_multiple_of(every);
        if probe || every(self.config.telemetry.probe_every) {
            self.probe()?;
        }
        self.engine.exponents = every(self.config.telemetry.exponents_every);
        let used = self.used_batches();
        self.measure_first(used)?;
        let batches = &self.micro_batches[..used];
        let mut report = match &mut self.device {
            None => self.engine.step(batches)?,
            Some(device) => device.step(&mut self.engine, batches)?,
        };
        let skipped = report.outcome == Outcome::Skipped;
        let at_floor = matches!(report.change, ScaleChange::AtFloor { .. });
        if skipped && self.config.scaler.on_overflow == OnOverflow::Retry && !at_floor {
            self.progress.retry = Some(cursor);
        }
        let variance_every = self.config.telemetry.variance_every;
        let seen = fp8::after_step(&mut self.engine, self.config.dtype.compute, &report, variance_every)?;
        let attribute = self.config.telemetry.attribute_overflows || self.engine.state.fallback.is_on();
        let origin = if skipped && attribute {
            self.look_closer()?;
            attribution::origin(&mut self.engine, &self.micro_batches[..used], &report)?
        } else {
            None
        };
        let retyped = fallback::after_step(&mut self.engine, self.config.dtype, &report, origin.as_ref())?;
        self.measure_overflow(used, &mut report)?;
        let state = &self.engine.state;
        if let (true, Some(fp8)) = (skipped, &state.fp8) {
            fp8.restore(state.masters.parameters(), &state.weights)?;
        }
        let layout = self.engine.state.weights.layout();
        let step = self.engine.state.counters.step;
        let overflow = skipped.then(|| records::overflow(&report, step, layout, &self.engine.survey, origin));
        self.progress.last_loss = report.loss;
        let diverged =
            overflow.as_ref().filter(|_| self.engine.state.scaler.is_stuck()).map(|last| self.diverged(last));
        self.record(&report, overflow, began)?;
        let retyped = retyped.into_iter().map(Event::Retyped);
        seen.into_iter().chain(retyped).try_for_each(|event| self.emitter.emit(event))?;
        diverged.map_or(Ok(()), Err)
    }

    /// Lets the predictive loss scale begin where the first batch's gradients allow.
    fn measure_first(&mut self, used: usize) -> Result<()> {
        let scaler = &self.engine.state.scaler;
        if scaler.wants_measure() {
            let (scale, counters) = (scaler.scale(), self.engine.state.counters);
            let batches = &self.micro_batches[..used];
            if let Some(largest) = headroom::largest_gradient(&mut self.engine, batches, counters, scale)? {
                self.engine.state.scaler.measure(largest);
            }
        }
        Ok(())
    }

    /// Tells the predictive loss scale how far an overflow lay above the top, which the step itself cannot know.
    fn measure_overflow(&mut self, used: usize, report: &mut StepReport) -> Result<()> {
        let predictive = self.config.scaler.policy == ScalerPolicy::Predictive;
        if let ScaleChange::BackedOff { to, .. } = &mut report.change
            && predictive
        {
            let counters = self.engine.state.counters.before_skipped();
            let batches = &self.micro_batches[..used];
            if let Some(largest) = headroom::largest_gradient(&mut self.engine, batches, counters, report.scale)? {
                *to = self.engine.state.scaler.measure(largest);
            }
        }
        Ok(())
    }

    /// Fills the micro-batches of the next step, and says where they begin; an epoch's last step may have fewer.
    fn draw(&mut self) -> Cursor {
        let cursor = self.loader.cursor();
        for batch in &mut self.micro_batches {
            self.loader.next_batch(batch);
            if batch.ends_epoch {
                break;
            }
        }
        cursor
    }

    fn used_batches(&self) -> usize {
        self.micro_batches.iter().position(|batch| batch.ends_epoch).map_or(self.micro_batches.len(), |last| last + 1)
    }

    fn record(&mut self, report: &StepReport, overflow: Option<Overflow>, began: Instant) -> Result<()> {
        let engine = &self.engine;
        let state = &engine.state;
        let elapsed = began.elapsed();
        let seconds = self
            .progress
            .step_seconds
            .map_or(elapsed.as_secs_f64(), |mean| mean + (elapsed.as_secs_f64() - mean) / RATE_STEPS);
        self.progress.step_seconds = Some(seconds);
        let tracker = state.scaler.state().growth_tracker;
        let next_lr = engine.schedule.lr(state.counters.updates);
        let mut record = records::step_record(report, &engine.survey, state.counters, tracker, next_lr, elapsed);
        record.tokens_per_s = report.targets as f64 / seconds;
        record.epoch = state.counters.tokens as f64 / self.loader.tokens_per_epoch().max(1) as f64;
        let process = ProcessStats::now();
        record.rss_bytes = process.rss_bytes;
        record.cpu_seconds = process.cpu_seconds;
        record.gpu = self.gpu.as_ref().and_then(GpuSampler::newest);
        if overflow.is_some() || state.counters.step.is_multiple_of(self.config.telemetry.tensors_every) {
            record.tensors = records::tensor_records(state.weights.layout(), &engine.survey);
        }
        self.emitter.emit(Event::Step(Box::new(record)))?;
        match overflow {
            Some(overflow) => self.emitter.emit(Event::Overflow(overflow)),
            None => Ok(()),
        }
    }

    fn diverged(&self, last: &Overflow) -> Error {
        let step = last.step;
        let streak = self.engine.state.scaler.state().floor_streak;
        let scale = self.engine.state.scaler.scale();
        let origin = last.origin.as_ref().map_or_else(String::new, |origin| {
            format!(" (first the {} of `{}`)", origin.tensor.replace('_', " "), origin.layer)
        });
        let cause = if last.loss.is_finite() {
            let first = last.tensors.last().map_or("a gradient", |tensor| tensor.name.as_str());
            format!("the loss is finite, but `{first}` and {} tensors in all overflow{origin}", last.tensors.len())
        } else {
            format!(
                "the forward pass is not finite{origin}, which no loss scale can cure; lower the learning rate, or use bf16"
            )
        };
        let good = self.progress.checkpoint.as_ref().map_or_else(
            || "no checkpoint was written yet".to_owned(),
            |path| format!("the last good checkpoint is `{}`", path.display()),
        );
        Error::Diverged {
            step,
            message: format!("{streak} steps in a row overflowed at scale {scale}: {cause}; {good}"),
        }
    }

    /// Computes the validation loss; `true` if training should stop because it has not improved for long.
    fn evaluate(&mut self) -> Result<bool> {
        let step = self.engine.state.counters.step;
        self.eval.rewind();
        let eval = &mut self.eval;
        let (batch, mut next) = (&mut self.eval_batch, |batch: &mut Batch| eval.next_batch(batch));
        let (loss, tokens) = match &mut self.device {
            None => self.engine.evaluate(batch, next)?,
            Some(device) => device.evaluate(&self.engine, batch, &mut next)?,
        };
        let look = Best { step, loss };
        self.progress.validation = Some(look);
        if self.progress.best.is_none_or(|best| loss < best.loss) {
            self.progress.best = Some(look);
            self.progress.looks_without_best = 0;
        } else {
            self.progress.looks_without_best += 1;
        }
        self.emitter.emit(Event::Eval(Validation { step, loss, perplexity: loss.exp(), tokens }))?;
        let patience = self.config.train.early_stopping;
        Ok(patience > 0 && self.progress.looks_without_best >= patience)
    }

    fn sample(&mut self) -> Result<()> {
        let step = self.engine.state.counters.step;
        self.progress.sampled_at = Some(step);
        self.fetch()?;
        let Some(sampler) = &mut self.sampler else { return Ok(()) };
        let (model, weights) = (&self.engine.model, &self.engine.state.weights);
        let text = sampler.generate(model, weights, &self.tokenizer, self.config.seed ^ step)?;
        let prompt = self.config.train.prompt.clone();
        self.emitter.emit(Event::Sample(SampleText { step, prompt, text }))
    }

    /// Saves; a failure is told and training goes on, for the older checkpoints are as they were.
    fn tell_failure(&mut self, save: fn(&mut Self) -> Result<()>) -> Result<()> {
        match save(self) {
            Err(error @ Error::Io { .. }) => {
                let step = self.engine.state.counters.step;
                let message = format!("no checkpoint at step {step}: {error}; training goes on");
                self.emitter.emit(Event::Warning(Trouble { step, message }))
            }
            other => other,
        }
    }

    /// Writes a checkpoint of this step, unless there is one or no run to write it into.
    pub fn save(&mut self) -> Result<()> {
        let step = self.engine.state.counters.step;
        if self.progress.saved_at == Some(step) {
            return Ok(());
        }
        if let Some(path) = self.write(Kind::Full, self.config.checkpoint.keep_last)? {
            self.progress.saved_at = Some(step);
            self.progress.checkpoint = Some(path);
        }
        Ok(())
    }

    fn save_weights(&mut self) -> Result<()> {
        self.write(Kind::Weights, self.config.checkpoint.keep_weights).map(drop)
    }

    /// Writes a checkpoint and thins out the older ones of its kind. Says where, or nothing if there is no run to write into.
    fn write(&mut self, kind: Kind, last: usize) -> Result<Option<PathBuf>> {
        let began = Instant::now();
        let (step, state) = (self.engine.state.counters.step, self.checkpoint_state());
        if self.run.is_some() {
            self.fetch()?;
        }
        let Some(run) = &mut self.run else { return Ok(None) };
        let train = &self.engine.state;
        let contents = Contents {
            state: &state,
            config: self.engine.model.config(),
            tokenizer: self.tokenizer.json(),
            weights: &train.weights,
            masters: train.masters.parameters(),
            exp_avg: &train.adamw.exp_avg,
            exp_avg_sq: &train.adamw.exp_avg_sq,
        };
        let checkpoint::Saved { path, manifest } = run.save(&contents, kind)?;
        let rotated = run.rotate(kind, Keep { last, best: self.config.checkpoint.keep_best });
        let (bytes, seconds) = (manifest.bytes(), began.elapsed().as_secs_f64());
        let (weights_only, name) = (kind == Kind::Weights, path.display().to_string());
        self.emitter.emit(Event::Saved(Saved { step, path: name, bytes, seconds, weights_only }))?;
        if let Err(error) = rotated {
            let message = format!("an older checkpoint could not be removed: {error}; training goes on");
            self.emitter.emit(Event::Warning(Trouble { step, message }))?;
        }
        Ok(Some(path))
    }

    fn checkpoint_state(&self) -> State {
        let counters = self.engine.state.counters;
        let cursor = self.progress.retry.unwrap_or_else(|| self.loader.cursor());
        let validation = self.progress.validation.filter(|look| look.step == counters.step);
        State {
            format_version: FORMAT_VERSION,
            step: counters.step,
            updates: counters.updates,
            tokens: counters.tokens,
            seed: self.config.seed,
            identity: self.identity.clone(),
            scaler: self.engine.state.scaler.state(),
            fallback: self.engine.state.fallback.units().clone(),
            fp8: self.engine.state.fp8.as_ref().map(|fp8| fp8.state().clone()),
            cursor,
            schedule: json!({ "total_steps": self.total_steps, "lr": self.config.optimizer.lr }),
            validation_loss: validation.map(|look| look.loss),
            best: self.progress.best,
            looks_without_best: self.progress.looks_without_best,
        }
    }

    /// Repeats the first micro-batch's backward pass in FP32. It writes into buffers that the step overwrites anyway, so
    /// the run's numbers are the same with and without it.
    fn probe(&mut self) -> Result<()> {
        self.look_closer()?;
        let probe = probe::probe(&mut self.engine, &self.micro_batches[0])?;
        self.emitter.emit(Event::Probe(Box::new(probe)))
    }

    fn started(&self, resumed_from: Option<u64>) -> Started {
        let (config, shape) = (&self.config, self.engine.model.config());
        let train = &config.train;
        let tokens_per_step = (train.batch_size * train.seq_len * train.grad_accum) as u64;
        let tokens_per_epoch = self.loader.tokens_per_epoch();
        let AdamWConfig { betas: [beta1, beta2], eps, weight_decay } = config.adamw();
        let schedule = &self.engine.schedule;
        let run = self.run.as_ref().and_then(|run| run.path().file_name());
        Started {
            program: format!("finetune {}", env!("CARGO_PKG_VERSION")),
            run: run.map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            process: ProcessId::own(),
            cpu: Cpu { name: cpu_name(), threads: rayon::current_num_threads(), isa: Isa::current().to_string() },
            device: self.device.as_ref().map_or_else(|| "cpu".into(), |device| device.name().to_owned()),
            os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            model: config.model.clone(),
            shape: ModelShape {
                n_layer: shape.n_layer,
                n_head: shape.n_head,
                n_embd: shape.n_embd,
                n_positions: shape.n_positions,
                vocab_size: shape.vocab_size,
            },
            parameters: shape.parameter_count(),
            policy: config.dtype.to_string(),
            scaler: ScalerSettings::from(&config.grad_scaler()),
            optimizer: format!("AdamW betas {beta1}, {beta2} eps {eps:e} weight decay {weight_decay}"),
            max_grad_norm: self.engine.max_grad_norm.map(|norm| norm as f32),
            schedule: format!(
                "{:?} to {} after {} warm-up updates, down to {}",
                schedule.kind,
                schedule.peak_lr,
                schedule.warmup_updates,
                // As f32, so that 0.003 · 0.1 reads 0.0003.
                (schedule.peak_lr * schedule.min_lr_ratio) as f32
            )
            .to_lowercase(),
            data: self.data.clone(),
            tokens_per_step,
            tokens_per_epoch,
            epochs: (self.total_steps * tokens_per_step) as f64 / tokens_per_epoch.max(1) as f64,
            total_steps: self.total_steps,
            seed: config.seed,
            resumed_from,
            fallback: self.engine.in_fallback(),
            config: serde_json::to_value(config).unwrap_or_default(),
        }
    }

    fn finish(&mut self, reason: FinishReason, began: Instant) -> Result<()> {
        let counters = self.engine.state.counters;
        self.emitter.emit(Event::Finished(Finished {
            reason,
            step: counters.step,
            updates: counters.updates,
            skipped: counters.skipped(),
            tokens: counters.tokens,
            loss: self.progress.last_loss as f32,
            val_loss: self.progress.validation.map(|look| look.loss),
            loss_scale: self.engine.state.scaler.scale(),
            seconds: began.elapsed().as_secs_f64(),
            peak_rss_bytes: ProcessStats::now().peak_rss_bytes,
            checkpoint: self.progress.checkpoint.as_ref().map(|path| path.display().to_string()),
        }))
    }
}

/// The processor's name as the system tells it.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(": ")).map_or_else(|| std::env::consts::ARCH.into(), |(_, name)| name.into())
}
