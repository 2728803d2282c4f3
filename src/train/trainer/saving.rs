//! The trainer's checkpoints.

use super::Trainer;
use crate::store::checkpoint::{self, Contents, FORMAT_VERSION, Keep, Kind, State};
use crate::telemetry::{Event, Saved, Trouble};
use crate::{Error, Result};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

impl Trainer {
    /// Saves; a failure is told and training goes on, for the older checkpoints are as they were.
    pub(super) fn tell_failure(&mut self, save: fn(&mut Self) -> Result<()>) -> Result<()> {
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

    pub(super) fn save_weights(&mut self) -> Result<()> {
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
}
