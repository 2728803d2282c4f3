//! Saves the trainer's checkpoints.

use super::processes::{GatheredState, with_heartbeat};
use super::{Trainer, batches_in_step};
use crate::data::Batch;
use crate::digest::short_hash;
use crate::engine::model::ModelSpec;
use crate::store::aux_files::AuxFiles;
use crate::store::checkpoint::{
    self, Base, Checkpoint, CheckpointKind, Contents, FORMAT_VERSION, Manifest, RetentionPolicy, Run, ShardedTensors,
    State,
};
use crate::telemetry::{Activity, CheckpointProof, CheckpointSaved, Diagnostic, Event};
use crate::train::config::Config;
use crate::train::engine::{StateView, StepReport, TrainEngine};
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

/// Writes a checkpoint on any thread; holds everything except the tensors.
struct CheckpointWriter<'a> {
    run: &'a mut Run,
    state: State,
    tokenizer: &'a [u8],
    aux_files: &'a AuxFiles,
    activity: &'a Activity,
    kind: CheckpointKind,
    keep: RetentionPolicy,
    config: &'a Config,
    /// The proof of the run's last checkpoint; `None` if this process has not written one.
    previous: Option<CheckpointProof>,
}

/// The result of writing a checkpoint.
struct CompletedSave {
    saved: checkpoint::SaveResult,
    proof: Option<CheckpointProof>,
    /// The removal of older checkpoints.
    rotated: Result<Vec<PathBuf>>,
    seconds: f64,
}

impl CheckpointWriter<'_> {
    /// Writes the checkpoint and removes older ones of its kind.
    fn write(
        self,
        spec: &ModelSpec,
        state: StateView<'_>,
        sharded: Option<&dyn ShardedTensors>,
    ) -> Result<CompletedSave> {
        let began = Instant::now();
        let StateView { weights, masters, adamw } = state;
        let contents = Contents {
            state: &self.state,
            spec,
            tokenizer: self.tokenizer,
            aux_files: self.aux_files,
            weights,
            masters,
            exp_avg: &adamw.exp_avg,
            exp_avg_sq: &adamw.exp_avg_sq,
            quantized: &adamw.quantized_moments,
            activity: self.activity,
            sharded,
        };
        let mut saved = self.run.save(&contents, self.kind)?;
        let proof = self.prove(&saved.manifest).unwrap_or_else(|error| {
            saved.warning = saved.warning.take().or(Some(error));
            None
        });
        let rotated = self.run.apply_retention(self.kind, self.keep);
        Ok(CompletedSave { saved, proof, rotated, seconds: began.elapsed().as_secs_f64() })
    }

    /// The proof of a full checkpoint that was just written.
    fn prove(&self, manifest: &Manifest) -> Result<Option<CheckpointProof>> {
        if self.kind == CheckpointKind::Weights {
            return Ok(None);
        }
        let log = self.run.path().join("events.jsonl");
        let previous = match &self.previous {
            Some(previous) => Some(previous.clone()),
            None => checkpoint::logged_checkpoints(&log)?.into_iter().filter_map(|saved| saved.proof).next_back(),
        };
        checkpoint::prove(manifest, &self.state, &self.config.to_toml()?, &log, previous.as_ref()).map(Some)
    }
}

/// Runs `save` and `passes` at the same time, and returns when both are done: the result of the passes, and the time
/// during which only `save` ran. `save` runs first if it may not, or cannot, run `on_thread`.
fn run_overlapped<R>(on_thread: bool, save: impl FnOnce() + Send, passes: impl FnOnce() -> R) -> (R, Duration) {
    // A thread that cannot start drops its closure, so the closure only borrows `save`.
    let save = LazyLock::new(save);
    let began = Instant::now();
    let (result, passed) = thread::scope(|threads| {
        let thread = thread::Builder::new().name("saving".into());
        if !on_thread || thread.spawn_scoped(threads, || *LazyLock::force(&save)).is_err() {
            LazyLock::force(&save);
        }
        let clock = Instant::now();
        (passes(), clock.elapsed())
    });
    (result, began.elapsed().saturating_sub(passed))
}

impl Trainer {
    /// Turns the error of a failed save into a warning, because older checkpoints are untouched.
    fn downgrade_to_warning(&mut self, step: u64, saved: Result<()>) -> Result<()> {
        match saved {
            Err(error @ (Error::Io { .. } | Error::Checkpoint { .. })) => {
                self.warn_at(step, format!("no checkpoint at step {step}: {error}; training continues"));
                Ok(())
            }
            other => other,
        }
    }

    /// Saves; a failure is only a warning.
    pub(super) fn warn_on_failure(&mut self, save: fn(&mut Self) -> Result<()>) -> Result<()> {
        let saved = save(self);
        self.downgrade_to_warning(self.engine.state.counters.step, saved)
    }

    /// Saves during the passes of the next step; at once if there is none, or if other processes have parts of the
    /// state.
    pub(super) fn schedule_save(&mut self) -> Result<()> {
        let step = self.engine.state.counters.step;
        if self.run.is_some() && self.progress.saved_at != Some(step) && self.progress.pending_save.is_none() {
            self.begin_phase("saving");
            self.progress.pending_save = Some(self.checkpoint_state()?);
        }
        if self.is_distributed() || step >= self.total_steps { self.flush_save() } else { Ok(()) }
    }

    /// Writes the checkpoint of a resumed run again if some of later steps exist. By its newer sequence they are
    /// abandoned, so that a resume or the search for the best no longer finds them.
    pub(super) fn abandon_later_checkpoints(&mut self) -> Result<()> {
        let (Some(run), Some(state)) = (&self.run, self.progress.resumed.take()) else { return Ok(()) };
        if checkpoint::list(run.path())?.iter().any(|one| one.step > state.step) {
            self.begin_phase("saving");
            self.progress.saved_at = None;
            self.progress.pending_save = Some(state);
            self.schedule_save()?;
        }
        Ok(())
    }

    /// Writes the pending checkpoint, if there is one.
    pub(super) fn flush_save(&mut self) -> Result<()> {
        if self.progress.pending_save.is_some() { self.warn_on_failure(Self::save) } else { Ok(()) }
    }

    /// Takes a step over the micro-batches. A pending checkpoint is written on a separate thread during its passes,
    /// which read the same tensors. Returns also the time for which the step only waited for the checkpoint.
    pub(super) fn step_overlapping_save(&mut self) -> Result<(StepReport, Duration)> {
        let step = self.engine.state.counters.step;
        let Some(state) = self.progress.pending_save.take() else { return self.step_without_save() };
        let Some((writer, engine, batches)) = self.checkpoint_writer(state, CheckpointKind::Full) else {
            return self.step_without_save();
        };
        let spec = engine.model.spec().clone();
        let on_thread = engine.state.weights.device().is_cpu();
        let (mut written, mut waited) = (None, Duration::ZERO);
        let report = engine.step_with(batches, |state, passes| {
            let save = || written = Some(writer.write(&spec, state, None));
            let (result, wait) = run_overlapped(on_thread, save, passes);
            waited = wait;
            result
        });
        if let Some(written) = written {
            let saved = self.finish_save(written).map(drop);
            self.downgrade_to_warning(step, saved)?;
        }
        Ok((report?, waited))
    }

    fn step_without_save(&mut self) -> Result<(StepReport, Duration)> {
        let report = self.engine.step(batches_in_step(&self.micro_batches))?;
        Ok((report, Duration::ZERO))
    }

    /// Writes the run's last checkpoint. If that fails, retries for `checkpoint.final_save_retry_s` seconds, then tries
    /// the weights alone. Returns the error of the last full attempt.
    pub(super) fn save_last(&mut self) -> Result<()> {
        let began = Instant::now();
        let mut warned = false;
        let limit = Duration::from_secs(self.config.checkpoint.final_save_retry_s);
        let step = self.engine.state.counters.step;
        loop {
            let error = match self.save() {
                Err(error @ (Error::Io { .. } | Error::Checkpoint { .. })) => error,
                done => return done,
            };
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                let weights = match self.write_weights() {
                    Ok(Some(path)) => format!("only its weights were saved, in `{}`", path.display()),
                    Ok(None) => "the run has no folder".into(),
                    Err(error) => format!("saving only the weights failed too: {error}"),
                };
                let seconds = limit.as_secs();
                self.warn(format!(
                    "the checkpoint of step {step} could not be written within {seconds} s; {weights}; once the folder can be \
                     written, continue with `--resume`"
                ));
                return Err(error);
            }
            if !std::mem::replace(&mut warned, true) {
                let seconds = limit.as_secs();
                self.warn(format!("no checkpoint at step {step} yet: {error}; trying again for {seconds} s"));
            }
            self.beat()?;
            std::thread::sleep(left.min(Duration::from_secs(1)));
        }
    }

    pub(super) fn warn(&mut self, message: String) {
        self.warn_at(self.engine.state.counters.step, message);
    }

    fn warn_at(&mut self, step: u64, message: String) {
        self.emitter.emit(Event::Warning(Diagnostic { step, message }));
    }

    /// Writes a checkpoint of this step, unless it exists already or there is no run to write it into.
    pub fn save(&mut self) -> Result<()> {
        if self.progress.saved_at == Some(self.engine.state.counters.step) {
            return Ok(());
        }
        let state = self.progress.pending_save.take().map_or_else(|| self.checkpoint_state(), Ok)?;
        self.write(state, CheckpointKind::Full).map(drop)
    }

    pub(super) fn save_weights(&mut self) -> Result<()> {
        self.flush_save()?;
        self.write_weights().map(drop)
    }

    fn write_weights(&mut self) -> Result<Option<PathBuf>> {
        self.write(self.checkpoint_state()?, CheckpointKind::Weights)
    }

    /// The writer of a checkpoint of `state`, the engine whose tensors it takes, and the micro-batches; `None` without
    /// a run.
    fn checkpoint_writer(
        &mut self,
        state: State,
        kind: CheckpointKind,
    ) -> Option<(CheckpointWriter<'_>, &mut TrainEngine, &[Batch])> {
        let Self { run, engine, micro_batches, tokenizer, aux_files, activity, config, progress, .. } = self;
        let last = match kind {
            CheckpointKind::Full => config.checkpoint.keep_last,
            CheckpointKind::Weights => config.checkpoint.keep_last_weights,
        };
        let keep = RetentionPolicy { last, best: config.checkpoint.keep_best };
        let run = run.as_mut()?;
        let tokenizer = tokenizer.json();
        let previous = progress.proof.clone();
        let config = &*config;
        let writer = CheckpointWriter { run, state, tokenizer, aux_files, activity, kind, keep, config, previous };
        Some((writer, engine, batches_in_step(micro_batches)))
    }

    /// Writes a checkpoint of `state` now. Returns its path; `None` without a run.
    fn write(&mut self, state: State, kind: CheckpointKind) -> Result<Option<PathBuf>> {
        if self.run.is_some() {
            self.begin_phase("saving");
        }
        let Some((writer, engine, _)) = self.checkpoint_writer(state, kind) else { return Ok(None) };
        let gathered = GatheredState::new(&*engine.group, &engine.state);
        let sharded = engine.state.masters.parameters().shards().map(|_| &gathered as &dyn ShardedTensors);
        let write = || writer.write(engine.model.spec(), engine.state.view(), sharded);
        // Large files take minutes.
        let written = with_heartbeat(&*engine.group, &gathered.exchange, write);
        self.finish_save(written).map(Some)
    }

    /// Logs a complete checkpoint, and returns its path.
    fn finish_save(&mut self, written: Result<CompletedSave>) -> Result<PathBuf> {
        self.activity.end();
        let CompletedSave { saved, proof, rotated, seconds } = written?;
        let checkpoint::SaveResult { path, manifest, warning } = saved;
        let step = manifest.step;
        let bytes = manifest.bytes();
        let weights_only = manifest.kind == CheckpointKind::Weights;
        let name = path.display().to_string();
        self.progress.proof = proof.clone().or(self.progress.proof.take());
        let saved = CheckpointSaved { step, path: name, bytes, seconds, weights_only, proof };
        self.emitter.emit(Event::CheckpointSaved(saved));
        if let Some(error) = warning {
            self.warn_at(step, format!("the checkpoint of step {step} is complete, but {error}"));
        }
        if let Err(error) = rotated {
            self.warn_at(step, format!("an older checkpoint could not be removed: {error}; training continues"));
        }
        if !weights_only {
            self.progress.saved_at = Some(step);
            self.progress.checkpoint = Some(path.clone());
        }
        Ok(path)
    }

    /// Rejects a checkpoint with another seed, `seq_len` or set of kernels, from which the run could not continue bit
    /// for bit; returns the other settings of the step that differ.
    pub(super) fn check_settings(&self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        let state = checkpoint.state();
        let config = &self.config;
        let differs = |key: &str, now: u64| {
            let was = state.schedule.get(key)?.as_u64()?;
            (was != now).then(|| format!("`train.{key}` was {was} and is now {now}"))
        };
        let seed = (state.seed != config.seed).then(|| format!("`seed` was {} and is now {}", state.seed, config.seed));
        if let Some(difference) = seed.or_else(|| differs("seq_len", config.train.seq_len as u64)) {
            let message =
                format!("{difference}: the checkpoint belongs to a different run; resume that run, or start a new one");
            return Err(Error::checkpoint(checkpoint.path(), message));
        }
        let was = state.schedule.get("kernels").and_then(|name| name.as_str()).unwrap_or_default();
        let now = self.engine.model.kernels().name();
        if was != now {
            let kind = was.split(':').next().unwrap_or(was);
            let message = format!(
                "`kernels` changed from `{was}` to `{now}`, which rounds differently; resume with `--kernels {kind}` \
                 on a device that has them, or start a new run"
            );
            return Err(Error::checkpoint(checkpoint.path(), message));
        }
        let batch = [("batch_size", config.train.batch_size), ("grad_accum", config.train.grad_accum)];
        Ok(batch.into_iter().filter_map(|(key, now)| differs(key, now as u64)).collect())
    }

    /// Rejects adapters whose base differs from the checkpoint's.
    pub(super) fn check_base(&self, checkpoint: &Checkpoint) -> Result<()> {
        let was = &checkpoint.state().base;
        let now = &self.base;
        if was.as_ref().map(|base| &base.sha256) == now.as_ref().map(|base| &base.sha256) {
            return Ok(());
        }
        let hash = |base: &Option<Base>| {
            base.as_ref().map_or("none".into(), |base| format!("SHA-256 {}…", short_hash(&base.sha256)))
        };
        let message = format!(
            "its adapters were trained on a different base model: `{}` had {} and now has {}; restore that model, or \
             start a new run",
            was.as_ref().map_or(self.config.model.as_str(), |base| &base.name),
            hash(was),
            hash(now)
        );
        Err(Error::checkpoint(checkpoint.path(), message))
    }

    fn checkpoint_state(&self) -> Result<State> {
        let counters = self.engine.state.counters;
        let retry = self.progress.retry;
        let rollouts = self.rollouts.as_ref().and_then(|rollouts| rollouts.kept(retry.is_some()));
        let data_position = retry.filter(|_| rollouts.is_none()).unwrap_or_else(|| self.loader.position());
        let train = &self.config.train;
        let mut schedule = json!({
            "total_steps": self.total_steps,
            "lr": self.config.optimizer.lr,
            "batch_size": train.batch_size,
            "grad_accum": train.grad_accum,
            "seq_len": train.seq_len,
            "kernels": self.engine.model.kernels().name(),
        });
        if self.progress.extra_steps != 0 {
            schedule["extra_steps"] = self.progress.extra_steps.into();
        }
        if self.progress.repeated_steps != 0 {
            schedule["repeated_steps"] = self.progress.repeated_steps.into();
        }
        let validation = self.progress.validation.filter(|last| last.step == counters.step);
        Ok(State {
            format_version: FORMAT_VERSION,
            step: counters.step,
            updates: counters.updates,
            tokens: counters.tokens,
            seed: self.config.seed,
            fingerprint: self.fingerprint.clone(),
            scaler: self.engine.state.scaler.state(),
            fallback: self.engine.state.fallback.units.clone(),
            fp8: self.engine.state.fp8.states(),
            underflowed_params: self.engine.state.underflowed_params.clone(),
            base: self.base.clone(),
            reference: self.reference_sha256.clone(),
            rollouts: rollouts.map(serde_json::to_value).transpose().map_err(Error::engine)?,
            data_position,
            schedule,
            validation_loss: validation.map(|last| last.loss),
            best: self.progress.best,
            early_stopping_counter: self.progress.early_stopping_counter,
        })
    }
}
