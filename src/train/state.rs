//! The training state: everything a checkpoint saves, and nothing else.

use crate::Result;
use crate::engine::model::Parameters;
use crate::engine::optim::{AdamW, MasterWeights, OptimizerConfig};
use crate::precision::{Fallback, Fp8Config, GradScaler, PrecisionConfig};
use crate::train::engine::StateView;
use crate::train::fp8::Fp8Blocks;
use std::collections::{BTreeMap, BTreeSet};

/// The state that training changes. Runs with equal state, data and settings continue bit for bit the same.
#[derive(Debug)]
pub struct TrainState {
    /// The working copy, in the compute type except for layers in fallback.
    pub weights: Parameters,
    /// The weights that updates accumulate in.
    pub masters: MasterWeights,
    /// Adam's moments.
    pub adamw: AdamW,
    /// The loss scale.
    pub scaler: GradScaler,
    /// The layers that compute in a wider type.
    pub fallback: Fallback,
    /// The block in simulated FP8.
    pub fp8: Fp8Blocks,
    /// The names of parameters whose gradients have contained FP16's smallest magnitude.
    pub underflowed_params: BTreeSet<String>,
    /// Steps, updates and tokens so far.
    pub counters: Counters,
}

/// Training progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Attempted steps.
    pub step: u64,
    /// Applied steps; Adam's bias correction and the schedule count these.
    pub updates: u64,
    /// Tokens seen, those of skipped steps included.
    pub tokens: u64,
}

impl Counters {
    /// The number of the next step's micro-batch within the run; each number has its own dropout masks.
    pub fn micro_batch_index(self, micro_batch: usize) -> u64 {
        self.step << 16 | micro_batch as u64
    }

    /// The counters before the last step, which was skipped.
    pub(super) fn before_skipped(self) -> Self {
        Self { step: self.step - 1, ..self }
    }

    /// Steps whose gradients were not finite.
    pub fn skipped(self) -> u64 {
        self.step - self.updates
    }
}

impl TrainState {
    /// The state before the first step, from masters and their working copy.
    pub fn new(
        (masters, weights): (MasterWeights, Parameters),
        optimizer: OptimizerConfig,
        scaler: GradScaler,
    ) -> Result<Self> {
        let adamw = AdamW::new(optimizer, masters.parameters())?;
        let fallback = Fallback::new(PrecisionConfig::default(), BTreeMap::new());
        let (underflowed_params, counters) = (BTreeSet::new(), Counters::default());
        let fp8 = Fp8Blocks::new(Fp8Config::default(), 0, &[]);
        Ok(Self { weights, masters, adamw, scaler, fallback, fp8, underflowed_params, counters })
    }

    /// The part that an update changes.
    pub(super) fn view(&self) -> StateView<'_> {
        StateView { weights: &self.weights, masters: self.masters.parameters(), adamw: &self.adamw }
    }
}
