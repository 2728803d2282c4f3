//! The log-probabilities of the reference, which is the model before training.
//!
//! For adapters it is their frozen base, computed along with each micro-batch. A full model changes, so its
//! log-probabilities are computed once, before the first step, in the run's types and the order of its batches.

use super::{BatchPass, Split};
use crate::data::Batch;
use crate::engine::collective::ProcessGroup;
use crate::engine::model::{Decoder, ForwardMode, Parameters, Workspace};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The source of the reference's log-probabilities.
#[derive(Debug, Default)]
pub enum Reference {
    /// The frozen base of the adapters.
    #[default]
    Base,
    /// Computed before training.
    Stored(ReferenceLogps),
    /// Another model, which reads completions as they are sampled.
    Model(Box<ReferenceModel>),
}

/// A model that is not trained.
#[derive(Debug)]
pub struct ReferenceModel {
    /// The architecture.
    pub model: Decoder,
    /// The weights.
    pub weights: Parameters,
    /// Buffers of its passes.
    pub workspace: Workspace,
}

/// The log-probability of each sequence under the reference, by its number in the data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReferenceLogps {
    /// The bits of f64 values, which JSON would round.
    bits: [BTreeMap<u64, u64>; 2],
}

impl ReferenceLogps {
    /// Adds a sequence of `split`; a known one keeps its value.
    pub fn insert(&mut self, split: Split, index: u64, logp: f64) {
        self.bits[split as usize].entry(index).or_insert(logp.to_bits());
    }

    /// The log-probability of a sequence.
    pub fn get(&self, split: Split, index: u64) -> Option<f64> {
        self.bits[split as usize].get(&index).copied().map(f64::from_bits)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(BTreeMap::is_empty)
    }

    /// Whether a sequence of `batch` is missing.
    pub(in crate::train) fn lacks(&self, split: Split, batch: &Batch) -> bool {
        batch.sequences.iter().any(|sequence| self.get(split, sequence.index).is_none())
    }

    /// Computes the log-probabilities of `batches` with `weights`, which are the same in all processes; each process
    /// computes its share of the batches.
    pub(in crate::train) fn compute(
        &mut self,
        model: &Decoder,
        weights: &Parameters,
        workspace: &mut Workspace,
        group: &dyn ProcessGroup,
        batches: impl Iterator<Item = (Split, Batch)>,
    ) -> Result<()> {
        let mut own = Vec::new();
        let mut index = 0;
        for (split, batch) in batches {
            if !self.lacks(split, &batch) {
                continue;
            }
            // All processes know the sequences, but each only its values.
            let unknown = batch.sequences.iter().filter(|it| self.get(split, it.index).is_none());
            let unknown: Vec<u64> = unknown.map(|it| it.index).collect();
            if index % group.world_size() == group.rank() {
                let logps = BatchPass { model, weights, batch: &batch }.logps(ForwardMode::Eval, workspace)?;
                let computed = batch.sequences.iter().zip(logps).filter(|(it, _)| unknown.contains(&it.index));
                own.extend(computed.map(|(it, (logp, _))| [split as u64, it.index, logp.to_bits()]));
            }
            for it in unknown {
                self.insert(split, it, f64::NAN);
            }
            index += 1;
        }
        for [split, index, bits] in group.all_gather(&own)?.into_iter().flatten() {
            self.bits[split as usize].insert(index, bits);
        }
        Ok(())
    }
}

impl Reference {
    /// The log-probability of each target. Overwrites the buffers.
    pub(super) fn read_targets(&mut self, pass: BatchPass<'_>, workspace: &mut Workspace) -> Result<Vec<f64>> {
        match self {
            Self::Base => pass.target_logps(ForwardMode::Base, workspace),
            Self::Model(it) => {
                let pass = BatchPass { model: &it.model, weights: &it.weights, batch: pass.batch };
                pass.target_logps(ForwardMode::Eval, &mut it.workspace)
            }
            Self::Stored(_) => Err(Error::engine("sampled completions have no stored reference")),
        }
    }

    /// The log-probability of each sequence. Overwrites the buffers.
    pub(super) fn read(&self, pass: BatchPass<'_>, workspace: &mut Workspace, split: Split) -> Result<Vec<f64>> {
        match self {
            Self::Base => Ok(pass.logps(ForwardMode::Base, workspace)?.into_iter().map(|(logp, _)| logp).collect()),
            Self::Model(_) => Err(Error::engine("the data's reference is computed before training")),
            Self::Stored(stored) => {
                let message = "the reference's log-probability of a sequence is unknown: the data changed";
                let unknown = || Error::data("the training data", message);
                let logps = pass.batch.sequences.iter().map(|it| stored.get(split, it.index).ok_or_else(unknown));
                logps.collect()
            }
        }
    }
}
