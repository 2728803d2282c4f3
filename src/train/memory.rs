//! What training's buffers take, as the types that allocate them tell.

use crate::Result;
use crate::engine::model::{Keep, ModelSpec, Workspace, WorkspaceBytes};
use crate::engine::optim::{AdamW, Gradients, MasterWeights};
use crate::precision::PrecisionPolicy;

/// Bytes by what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineBytes {
    /// The working copy of the weights.
    pub weights: u64,
    /// FP32 masters.
    pub masters: u64,
    /// Gradients, and their FP32 sum over micro-batches.
    pub gradients: u64,
    /// Adam's moments.
    pub adam: u64,
    /// What the forward pass keeps for the backward pass.
    pub activations: u64,
    /// What is overwritten in turn: a tile of logits, gradients of activations.
    pub scratch: u64,
}

impl EngineBytes {
    /// For batches of `batch` sequences of `seq_len` tokens, `grad_accum` of them in a step.
    pub fn new(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        [batch, seq_len, grad_accum]: [usize; 3],
        keep: Keep,
    ) -> Result<Self> {
        let parameters = spec.parameter_count();
        let WorkspaceBytes { activations, scratch } = Workspace::bytes(spec, policy, [batch, seq_len], keep)?;
        let (masters, weights) = MasterWeights::bytes(parameters, policy.compute);
        let gradients = Gradients::bytes(parameters, policy, grad_accum);
        Ok(Self { weights, masters, gradients, adam: AdamW::bytes(parameters), activations, scratch })
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        let Self { weights, masters, gradients, adam, activations, scratch } = self;
        weights + masters + gradients + adam + activations + scratch
    }
}

/// The largest batch whose `bytes` are within the budget; `None` if not even one sequence is.
pub fn largest_batch(budget: u64, bytes: impl Fn(usize) -> u64) -> Option<usize> {
    const MOST: usize = 1 << 20;
    let (mut low, mut high) = (0, MOST);
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if bytes(middle) <= budget { low = middle } else { high = middle }
    }
    (low > 0).then_some(low)
}
