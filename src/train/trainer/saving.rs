//! Saves the trainer's checkpoints.

use super::Trainer;
use super::processes::Shared;
use crate::store::checkpoint::{self, Base, Checkpoint, Contents, FORMAT_VERSION, Keep, Kind, State};
use crate::telemetry::{Diagnostic, Event, Saved};
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

impl Trainer {
    /// Saves; a failure is only a warning, because older checkpoints are untouched.
    pub(super) fn warn_on_failure(&mut self, save: fn(&mut Self) -> Result<()>) -> Result<()> {
        match save(self) {
            Err(error @ (Error::Io { .. } | Error::Checkpoint { .. })) => {
                let step = self.engine.state.counters.step;
                self.warn(format!("no checkpoint at step {step}: {error}; training continues"));
                Ok(())
            }
            other => other,
        }
    }

    /// Writes the run's last checkpoint. If that fails, retries for `checkpoint.retry_s` seconds, then tries the weights
    /// alone. Returns the error of the last full attempt.
    pub(super) fn save_last(&mut self) -> Result<()> {
        let (began, mut warned) = (Instant::now(), false);
        let limit = Duration::from_secs(self.config.checkpoint.retry_s);
        let step = self.engine.state.counters.step;
        loop {
            let error = match self.save() {
                Err(error @ (Error::Io { .. } | Error::Checkpoint { .. })) => error,
                done => return done,
            };
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                let weights = match self.write(Kind::Weights, self.config.checkpoint.keep_weights) {
                    Ok(Some(path)) => format!("its weights alone are in `{}`", path.display()),
                    Ok(None) => "there is no folder for it".into(),
                    Err(error) => format!("nor could its weights: {error}"),
                };
                let seconds = limit.as_secs();
                self.warn(format!("the checkpoint of step {step} could not be written within {seconds} s; {weights}"));
                return Err(error);
            }
            if !std::mem::replace(&mut warned, true) {
                let seconds = limit.as_secs();
                self.warn(format!("no checkpoint at step {step} yet: {error}; trying again for {seconds} s"));
            }
            self.still_here()?;
            std::thread::sleep(left.min(Duration::from_secs(1)));
        }
    }

    pub(super) fn warn(&mut self, message: String) {
        let step = self.engine.state.counters.step;
        self.emitter.emit(Event::Warning(Diagnostic { step, message }));
    }

    /// Writes a checkpoint of this step, unless it exists already or there is no run to write it into.
    pub fn save(&mut self) -> Result<()> {
        let step = self.engine.state.counters.step;
        if self.progress.saved_at == Some(step) {
            return Ok(());
        }
        let written = self.write(Kind::Full, self.config.checkpoint.keep_last);
        self.activity.end();
        if let Some(path) = written? {
            self.progress.saved_at = Some(step);
            self.progress.checkpoint = Some(path);
        }
        Ok(())
    }

    pub(super) fn save_weights(&mut self) -> Result<()> {
        self.write(Kind::Weights, self.config.checkpoint.keep_weights).map(drop)
    }

    /// Writes a checkpoint and removes older ones of its kind except the `last` newest. Returns its path; `None` without a
    /// run.
    fn write(&mut self, kind: Kind, last: usize) -> Result<Option<PathBuf>> {
        let began = Instant::now();
        if self.run.is_some() {
            self.begin_phase("saving");
        }
        let (step, state) = (self.engine.state.counters.step, self.checkpoint_state());
        let Some(run) = &mut self.run else { return Ok(None) };
        let train = &self.engine.state;
        let shared = Shared { world: &*self.engine.world, state: train };
        let contents = Contents {
            state: &state,
            config: self.engine.model.spec(),
            tokenizer: self.tokenizer.json(),
            companions: &self.companions,
            weights: &train.weights,
            masters: train.masters.parameters(),
            exp_avg: &train.adamw.exp_avg,
            exp_avg_sq: &train.adamw.exp_avg_sq,
            quantised: train.adamw.quantised(),
            activity: &self.activity,
            spread: train.masters.parameters().shards().is_some().then_some(&shared as &dyn checkpoint::Spread),
        };
        let checkpoint::Saved { path, manifest, trouble } = run.save(&contents, kind)?;
        let rotated = run.rotate(kind, Keep { last, best: self.config.checkpoint.keep_best });
        let (bytes, seconds) = (manifest.bytes(), began.elapsed().as_secs_f64());
        let (weights_only, name) = (kind == Kind::Weights, path.display().to_string());
        self.emitter.emit(Event::Saved(Saved { step, path: name, bytes, seconds, weights_only }));
        if let Some(error) = trouble {
            self.warn(format!("the checkpoint of step {step} is complete, but {error}"));
        }
        if let Err(error) = rotated {
            self.warn(format!("an older checkpoint could not be removed: {error}; training continues"));
        }
        Ok(Some(path))
    }

    /// Rejects a checkpoint with another seed, `seq_len` or set of kernels, from which the run could not continue bit for bit;
    /// returns the other settings of the step that differ.
    pub(super) fn check_settings(&self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        let (state, config) = (checkpoint.state(), &self.config);
        let differs = |key: &str, now: u64| {
            // Older checkpoints lack some settings.
            let was = state.schedule.get(key)?.as_u64()?;
            (was != now).then(|| format!("`{key}` was {was} and is now {now}"))
        };
        let seed = (state.seed != config.seed).then(|| format!("`seed` was {} and is now {}", state.seed, config.seed));
        if let Some(difference) = seed.or_else(|| differs("seq_len", config.train.seq_len as u64)) {
            let message =
                format!("{difference}: the checkpoint is of another run; resume that run, or start a new one");
            return Err(Error::checkpoint(checkpoint.path(), message));
        }
        // Older checkpoints do not name their kernels; they used the fused ones.
        let (was, now) =
            (state.schedule.get("kernels").and_then(|name| name.as_str()), self.engine.model.kernels().name());
        if let was = was.unwrap_or("fused")
            && was != now
        {
            let kind = was.split(':').next().unwrap_or(was);
            let message = format!(
                "`kernels` was `{was}` and is now `{now}`, which rounds otherwise; resume with `--kernels {kind}` on a device \
                 that has them, or start a new run"
            );
            return Err(Error::checkpoint(checkpoint.path(), message));
        }
        let batch = [("batch_size", config.train.batch_size), ("grad_accum", config.train.grad_accum)];
        Ok(batch.into_iter().filter_map(|(key, now)| differs(key, now as u64)).collect())
    }

    /// Rejects adapters over another base than that of the checkpoint.
    pub(super) fn check_base(&self, checkpoint: &Checkpoint) -> Result<()> {
        let (was, now) = (&checkpoint.state().base, &self.base);
        if was.as_ref().map(|base| &base.sha256) == now.as_ref().map(|base| &base.sha256) {
            return Ok(());
        }
        let hash = |base: &Option<Base>| {
            base.as_ref()
                .map_or("none".into(), |base| format!("SHA-256 {}…", &base.sha256[..12.min(base.sha256.len())]))
        };
        let message = format!(
            "its adapters were trained over another base: `{}` had {} and now has {}; restore that model, or start a new run",
            was.as_ref().map_or(self.config.model.as_str(), |base| &base.name),
            hash(was),
            hash(now)
        );
        Err(Error::checkpoint(checkpoint.path(), message))
    }

    fn checkpoint_state(&self) -> State {
        let counters = self.engine.state.counters;
        let cursor = self.progress.retry.unwrap_or_else(|| self.loader.cursor());
        let validation = self.progress.validation.filter(|last| last.step == counters.step);
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
            touched: self.engine.state.touched.clone(),
            base: self.base.clone(),
            cursor,
            schedule: json!({
                "total_steps": self.total_steps,
                "lr": self.config.optimizer.lr,
                "batch_size": self.config.train.batch_size,
                "grad_accum": self.config.train.grad_accum,
                "seq_len": self.config.train.seq_len,
                "kernels": self.engine.model.kernels().name(),
            }),
            validation_loss: validation.map(|last| last.loss),
            best: self.progress.best,
            evaluations_without_best: self.progress.evaluations_without_best,
        }
    }
}
