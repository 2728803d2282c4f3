//! Prepares the reference's log-probabilities of a run that trains a full model on preferences.

use super::Trainer;
use crate::data::{Batch, DataPosition};
use crate::engine::device::DeviceContext;
use crate::engine::model::Workspace;
use crate::store::checkpoint::Fingerprint;
use crate::telemetry::PhaseProgress;
use crate::train::objective::{ObjectiveKind, Reference, ReferenceLogps, Split};
use crate::train::setup::ModelSource;
use crate::{Error, Result, untrusted};
use serde::{Deserialize, Serialize};
use std::io::Read as _;

/// The file in the run's folder.
const FILE: &str = "reference.json";
/// The version of its format.
const VERSION: u32 = 1;

/// The log-probabilities, and the facts that determine them.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    version: u32,
    fingerprint: Fingerprint,
    logps: ReferenceLogps,
}

impl Trainer {
    /// Makes the reference's log-probabilities of all sequences of the run known: from the file that this run has written, and
    /// for others by a pass over the batches with the model before training.
    pub(super) fn prepare_reference(&mut self) -> Result<()> {
        if !matches!(&self.engine.objective.reference, Reference::Stored(known) if known.is_empty()) {
            return Ok(());
        }
        // The leader has the run's folder.
        let read = if self.engine.group.is_leader() { self.read_reference()? } else { None };
        let known = self.engine.group.all_gather_messages(&read)?.into_iter().next().flatten();
        let mut logps = known.unwrap_or_default();
        let lacking = self.reference_batches().any(|(split, batch)| logps.lacks(split, &batch));
        if lacking {
            self.begin_phase("computing reference log-probabilities");
            self.compute_reference(&mut logps)?;
            self.activity.end();
            if let Some(run) = self.run.as_ref().filter(|_| self.engine.group.is_leader()) {
                let stored = Stored { version: VERSION, fingerprint: self.fingerprint.clone(), logps: logps.clone() };
                run.replace(FILE, &serde_json::to_string(&stored).map_err(candle_core::Error::wrap)?)?;
            }
        }
        self.engine.objective.reference = Reference::Stored(logps);
        Ok(())
    }

    fn compute_reference(&self, logps: &mut ReferenceLogps) -> Result<()> {
        let (engine, config) = (&self.engine, &self.config);
        let (model, group, device) = (&engine.model, &*engine.group, engine.state.weights.device());
        let original = if engine.state.counters.step == 0 {
            None
        } else {
            let source = ModelSource::open(config, &mut |_| ())?;
            let open =
                DeviceContext { device: device.clone(), name: self.device.clone(), kernels: model.shared_kernels() };
            Some(source.initial(config, &open, group, &mut |_| ())?.weights.1)
        };
        let weights = original.as_ref().unwrap_or(&engine.state.weights);
        let shape = (engine.workspace.batch(), engine.workspace.seq_len());
        let mut workspace = Workspace::for_evaluation(model.spec(), config.dtype, shape, &device)?;
        let total = self.loader.batches_per_epoch() + self.eval.remaining();
        let mut done = 0;
        let batches = self.reference_batches().inspect(|_| {
            done += 1;
            self.activity
                .advance("computing reference log-probabilities", PhaseProgress::Items(done.min(total), total));
        });
        logps.compute((model, weights), (&mut workspace, group), batches)
    }

    /// The batches of validation and training whose sequences need a reference.
    fn reference_batches(&self) -> impl Iterator<Item = (Split, Batch)> {
        let (mut eval, mut loader) = (self.eval.clone(), self.loader.clone());
        eval.rewind();
        let mut batch = self.loader.batch();
        let validation =
            std::iter::from_fn(move || eval.next_batch(&mut batch).then(|| (Split::Validation, batch.clone())));
        let mut left = self.total_steps.saturating_mul(self.config.train.grad_accum as u64);
        let mut batch = self.loader.batch();
        let begun = loader.seek(DataPosition::default()).is_ok();
        // KTO's estimates depend on the batches, which differ in each epoch.
        let objective = &self.engine.objective;
        let every = objective.kind() == ObjectiveKind::Kto;
        let training = std::iter::from_fn(move || {
            if left == 0 || !begun {
                return None;
            }
            loader.next_batch(&mut batch);
            left = if batch.ends_epoch && !every { 0 } else { left - 1 };
            Some((Split::Train, batch.clone()))
        });
        validation.chain(training).flat_map(move |(split, batch)| objective.referred(batch).map(move |it| (split, it)))
    }

    /// The log-probabilities in the run's folder; `None` if there is no file, or one of other data.
    fn read_reference(&self) -> Result<Option<ReferenceLogps>> {
        let Some(path) = self.run.as_ref().map(|run| run.path().join(FILE)).filter(|path| path.exists()) else {
            return Ok(None);
        };
        let mut text = Vec::new();
        let read = untrusted::open(&path).and_then(|mut file| file.read_to_end(&mut text));
        read.map_err(Error::io("read", &path))?;
        let stored: Stored = serde_json::from_slice(&text).map_err(|error| {
            Error::checkpoint(&path, format!("{error}; delete the file, and the run computes it again"))
        })?;
        if stored.version != VERSION {
            let message =
                format!("has format version {}, not {VERSION}; delete it to compute it again", stored.version);
            return Err(Error::checkpoint(&path, message));
        }
        Ok((stored.fingerprint == self.fingerprint).then_some(stored.logps))
    }
}
