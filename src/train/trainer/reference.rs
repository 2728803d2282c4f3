//! Prepares the reference of an objective: another model, or the model before training.

use super::Trainer;
use crate::data::Batch;
use crate::digest::{Digest, DigestWriter};
use crate::engine::kernels::view::{read, to_host};
use crate::engine::model::{Decoder, ModelSpec, Parameters, Workspace, candle_dtype};
use crate::precision::{PrecisionConfig, UnitSet};
use crate::store::checkpoint::{Base, Fingerprint};
use crate::telemetry::PhaseProgress;
use crate::train::config::{Config, WeightInit};
use crate::train::engine::TrainEngine;
use crate::train::objective::{ObjectiveKind, Reference, ReferenceLogps, ReferenceModel, Split};
use crate::train::setup::ModelSource;
use crate::{Error, Result, untrusted};
use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _, sink};
use std::sync::atomic::Ordering;

/// The file in the run's folder.
const FILE: &str = "reference.json";
/// The version of its format.
const VERSION: u32 = 3;
const HASH_CHUNK: usize = 1 << 16;

/// The log-probabilities, and the facts that determine them.
#[derive(Debug, Serialize, Deserialize)]
struct StoredReference {
    version: u32,
    /// SHA-256 of the reference's weights.
    weights: String,
    policy: String,
    data: String,
    /// SHA-256 of `logps`.
    sha256: String,
    logps: ReferenceLogps,
}

impl StoredReference {
    fn hash(logps: &ReferenceLogps) -> Result<String> {
        Ok(Digest::of(&serde_json::to_vec(logps).map_err(candle_core::Error::wrap)?).sha256)
    }
}

impl Trainer {
    /// Makes the reference known: as a model for completions that will be sampled. Otherwise the log-probabilities of
    /// all sequences of the run: from the file that this run has written, and for others by a pass over the batches.
    pub(super) fn prepare_reference(&mut self) -> Result<()> {
        if !matches!(&self.engine.objective.reference, Reference::Stored(known) if known.is_empty()) {
            return Ok(());
        }
        let started = self.engine.state.counters.step > 0;
        let mut loaded = None;
        if self.config.objective.loads_reference(self.engine.model.spec()) {
            let model = self.load_reference()?;
            if self.config.objective.kind.samples_completions() {
                self.engine.objective.reference = Reference::Model(Box::new(model));
                return Ok(());
            }
            loaded = Some(model);
        } else if !started {
            self.reference_sha256 = Some(digest(&self.engine.state.weights, self.base.as_ref())?);
        }
        // The leader has the run's folder.
        let read = if self.engine.group.is_leader() { self.read_reference()? } else { None };
        let known = self.engine.group.all_gather_messages(&read)?.into_iter().next().flatten();
        let mut logps = known.unwrap_or_default();
        if self.reference_batches().any(|(split, batch)| logps.lacks(split, &batch)) {
            self.begin_phase("computing reference log-probabilities");
            if loaded.is_none() && started {
                loaded = Some(self.load_reference()?);
            }
            self.compute_reference(&mut logps, loaded)?;
            self.activity.end();
            let run = self.run.as_ref().filter(|_| self.engine.group.is_leader());
            if let (Some(run), Some(weights)) = (run, self.reference_sha256.clone()) {
                let Fingerprint { policy, data, .. } = self.fingerprint.clone();
                let sha256 = StoredReference::hash(&logps)?;
                let stored = StoredReference { version: VERSION, weights, policy, data, sha256, logps: logps.clone() };
                let text = serde_json::to_string(&stored).map_err(candle_core::Error::wrap)?;
                // Only a resumed run reads the file.
                if let Err(error) = run.replace(FILE, &text) {
                    self.warn(format!("a resumed run computes the reference again: {error}"));
                }
            }
        }
        self.engine.objective.reference = Reference::Stored(logps);
        Ok(())
    }

    /// Remembers the digest of the reference's weights. Fails with [`Error::Config`] if the run has begun with other
    /// weights, and with [`Error::Collective`] if another process has other ones.
    fn check_reference(&mut self, sha256: &str) -> Result<()> {
        self.require_equal(&[("reference model", sha256.to_owned())])?;
        let known = self.reference_sha256.get_or_insert_with(|| sha256.to_owned());
        if known == sha256 {
            return Ok(());
        }
        let objective = &self.config.objective;
        let (key, name) = match &objective.reference {
            Some(name) => ("objective.reference", name),
            None => ("model", &self.config.model),
        };
        let message = format!(
            "`{name}` has changed since the run began, or `precision.keep` has; restore it, or start a new run"
        );
        Err(Error::config(key, message))
    }

    /// The model that the objective compares with, as it is stored, after [`Self::check_reference`].
    fn load_reference(&mut self) -> Result<ReferenceModel> {
        // A template does not change a model.
        let mut config = Config { chat_template: None, ..self.config.clone() };
        if let Some(model) = &self.config.objective.reference {
            config.model.clone_from(model);
            config.revision = None;
            config.init = WeightInit::Pretrained;
            config.tokenizer = None;
            config.lora = Config::default().lora;
            config.train.freeze = None;
            config.precision.keep = UnitSet::default();
        }
        let engine = &self.engine;
        let wrong = |message| Err(Error::config("objective.reference", message));
        let source = ModelSource::open(&config, &mut |_| ())?;
        if source.tokenizer.json() != self.tokenizer.json() {
            return wrong(format!("the tokenizers of `{}` and `{}` differ", config.model, self.config.model));
        }
        if source.spec.vocab_size != engine.model.spec().vocab_size {
            let theirs = source.spec.vocab_size;
            let own = engine.model.spec().vocab_size;
            return wrong(format!("the vocabulary of `{}` has {theirs} tokens, not {own}", config.model));
        }
        let device = engine.state.weights.device();
        let kernels = engine.model.kernels();
        let ((masters, mut weights), base) = source.initial(&config, &device, kernels, &*engine.group, &mut |_| ())?;
        let spec = source.spec;
        let PrecisionConfig { keep, fallback_dtype, .. } = &config.precision;
        let workspace = self.reference_workspace(&spec, keep)?;
        for unit in &keep.0 {
            masters.change_dtype(*unit, candle_dtype(*fallback_dtype), &mut weights, kernels)?;
        }
        if !keep.0.is_empty() {
            masters.copy_to_weights(&weights, kernels, &*engine.group)?;
        }
        let sha256 = digest(&weights, base.as_ref())?;
        let model = Decoder::new(&spec, &weights, engine.model.shared_kernels())?;
        self.check_reference(&sha256)?;
        Ok(ReferenceModel { model, weights, workspace })
    }

    /// Computes missing log-probabilities with `loaded`, or with the run's weights if they are not trained yet.
    fn compute_reference(&self, logps: &mut ReferenceLogps, loaded: Option<ReferenceModel>) -> Result<()> {
        let engine = &self.engine;
        let total = self.reference_batches().count() as u64;
        let mut done = 0;
        // A run in one process stops before its first step, and a resumed one computes the rest.
        let may_stop = engine.group.world_size() == 1 && engine.state.counters.step < self.total_steps;
        let goes_on = |_: &_| !(may_stop && self.interrupt.load(Ordering::Relaxed));
        let batches = self.reference_batches().take_while(goes_on).inspect(|_| {
            done += 1;
            self.activity.advance("computing reference log-probabilities", PhaseProgress::Items(done, total));
        });
        if let Some(ReferenceModel { model, weights, mut workspace }) = loaded {
            return logps.compute(&model, &weights, &mut workspace, &*engine.group, batches);
        }
        let mut workspace = self.reference_workspace(engine.model.spec(), &self.config.precision.keep)?;
        logps.compute(&engine.model, &engine.state.weights, &mut workspace, &*engine.group, batches)
    }

    /// Buffers for the passes of a reference that keeps these units in a wider type.
    fn reference_workspace(&self, spec: &ModelSpec, keep: &UnitSet) -> Result<Workspace> {
        let own = &self.engine.workspace;
        let device = self.engine.state.weights.device();
        let mut workspace = Workspace::for_evaluation(spec, self.config.dtype, (own.batch(), own.seq_len()), &device)?;
        for unit in &keep.0 {
            workspace.change_dtype(spec, *unit, self.config.precision.fallback_dtype)?;
        }
        Ok(workspace)
    }

    /// The batches of validation, and of the training that is left, whose sequences need a reference.
    fn reference_batches(&self) -> impl Iterator<Item = (Split, Batch)> {
        let (mut eval, mut loader) = (self.eval.clone(), self.loader.clone());
        eval.rewind();
        let mut batch = self.loader.batch();
        let validation =
            std::iter::from_fn(move || eval.next_batch(&mut batch).then(|| (Split::Validation, batch.clone())));
        let steps = self.total_steps - self.engine.state.counters.step;
        let mut left = steps.saturating_mul(self.config.train.grad_accum as u64);
        let mut batch = self.loader.batch();
        // KTO's estimates depend on the batches, which differ in each epoch, as do the samples of a mixture.
        let TrainEngine { objective, workspace, .. } = &self.engine;
        let seq_len = workspace.seq_len();
        let every = objective.settings.kind == ObjectiveKind::Kto || self.loader.mixture.sets().len() > 1;
        // A resumed run may be within an epoch.
        let mut epochs = if loader.position().row == 0 { 1_usize } else { 2 };
        let training = std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            loader.next_batch(&mut batch);
            epochs = epochs.saturating_sub(batch.ends_epoch.into());
            left = if epochs == 0 && !every { 0 } else { left - 1 };
            Some((Split::Train, batch.clone()))
        });
        validation
            .chain(training)
            .flat_map(move |(split, batch)| objective.referred(batch, seq_len).map(move |it| (split, it)))
    }

    /// The log-probabilities in the run's folder; `None` if there is no file, or one of other data.
    fn read_reference(&self) -> Result<Option<ReferenceLogps>> {
        let Some(path) = self.run.as_ref().map(|run| run.path().join(FILE)).filter(|path| path.exists()) else {
            return Ok(None);
        };
        let mut text = Vec::new();
        let read = untrusted::open(&path).and_then(|mut file| file.read_to_end(&mut text));
        read.map_err(Error::io("read", &path))?;
        let stored: StoredReference = serde_json::from_slice(&text).map_err(|error| {
            Error::checkpoint(&path, format!("{error}; delete the file, and the run computes it again"))
        })?;
        if stored.version != VERSION {
            let message =
                format!("has format version {}, not {VERSION}; delete it to compute it again", stored.version);
            return Err(Error::checkpoint(&path, message));
        }
        if StoredReference::hash(&stored.logps).ok() != Some(stored.sha256) {
            return Err(Error::checkpoint(&path, "it changed since it was written; delete it to compute it again"));
        }
        let same = self.reference_sha256.as_ref().is_none_or(|known| *known == stored.weights)
            && (&stored.policy, &stored.data) == (&self.fingerprint.policy, &self.fingerprint.data);
        Ok(same.then_some(stored.logps))
    }
}

/// SHA-256 of a model's weights: of the base of adapters, which has a digest, or of names and values.
pub(super) fn digest(weights: &Parameters, base: Option<&Base>) -> Result<String> {
    if let Some(base) = base {
        return Ok(base.sha256.clone());
    }
    let mut digest = DigestWriter::new(sink());
    let failed = || Error::io("hash", "the reference");
    let mut values = vec![0.0; HASH_CHUNK];
    for (name, tensor) in weights.with_frozen() {
        digest.write_all(name.as_bytes()).map_err(failed())?;
        let host = to_host(tensor)?;
        let guard = read(&host)?;
        let view = guard.view();
        for first in (0..view.len()).step_by(HASH_CHUNK) {
            let values = &mut values[..HASH_CHUNK.min(view.len() - first)];
            view.load(first, values);
            digest.write_all(bytemuck::cast_slice(values)).map_err(failed())?;
        }
    }
    Ok(digest.finish().1.sha256)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::collective::SingleProcess;
    use crate::train::config::DataSets;
    use std::sync::Arc;
    use std::time::Duration;

    /// Regression: KTO showed the last batch of an epoch during those of all later ones, and a short run ended far
    /// below the total.
    #[test]
    fn progress_counts_the_batches_of_all_steps() {
        let pair = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;
        let answer = r#"{"prompt": "a", "completion": "b", "label": true}"#;
        // KTO computes each batch again with mismatched prompts.
        for (kind, row, steps, batches) in [(ObjectiveKind::Dpo, pair, 2, 2), (ObjectiveKind::Kto, answer, 9, 18)] {
            let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
            std::fs::write(file.path(), format!("{row}\n").repeat(8)).unwrap();
            let data = DataSets::One(file.path().display().to_string());
            let mut config = Config { data, val: Some("none".into()), ..Config::default() };
            config.objective.kind = kind;
            (config.train.batch_size, config.train.seq_len, config.train.steps) = (2, 8, Some(steps));
            let trainer = Trainer::new(Arc::new(SingleProcess), config, None, &mut |_| ()).unwrap();
            trainer.compute_reference(&mut ReferenceLogps::default(), None).unwrap();
            let found = trainer.activity.running_for(Duration::ZERO).unwrap().amount;
            assert_eq!(found, PhaseProgress::Items(batches, batches), "{kind:?}");
        }
    }
}
