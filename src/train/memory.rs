//! The memory that training's buffers take, summed from the types that allocate them.

use crate::engine::kernels::Kernels;
use crate::engine::kernels::attention::Shape;
use crate::engine::model::{Keep, ModelSpec, Workspace, WorkspaceBytes};
use crate::engine::optim::{AdamW, Gradients, MasterWeights};
use crate::precision::PrecisionPolicy;
use crate::train::config::Config;
use crate::{Error, Result};

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineBytes {
    /// The working copy of the weights.
    pub weights: u64,
    /// FP32 masters.
    pub masters: u64,
    /// Gradients, and their FP32 sums over micro-batches: the binary logarithm of their number, rounded down.
    pub gradients: u64,
    /// Adam's moments.
    pub adam: u64,
    /// What the forward pass keeps for the backward pass.
    pub activations: u64,
    /// Buffers that are reused: a tile of logits, gradients of activations.
    pub scratch: u64,
    /// Attention's scores, where the kernels store them: candle's do, and so a GPU.
    pub scores: u64,
}

impl EngineBytes {
    /// For batches of `batch` sequences of `seq_len` tokens, `grad_accum` of them in a step.
    pub fn new(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        [batch, seq_len, grad_accum]: [usize; 3],
        keep: Keep,
        kernels: &dyn Kernels,
    ) -> Result<Self> {
        let parameters = spec.parameter_count();
        let WorkspaceBytes { activations, scratch } = Workspace::bytes(spec, policy, [batch, seq_len], keep)?;
        let (masters, weights) = MasterWeights::bytes(parameters, policy.compute);
        let gradients = Gradients::bytes(parameters, policy, grad_accum);
        let scores = kernels.score_bytes(&Shape::new(batch, seq_len, spec.heads, spec.head_dim))?;
        Ok(Self { weights, masters, gradients, adam: AdamW::bytes(parameters), activations, scratch, scores })
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        let Self { weights, masters, gradients, adam, activations, scratch, scores } = self;
        weights + masters + gradients + adam + activations + scratch + scores
    }
}

/// Rejects a batch that does not fit into memory before anything is allocated, and names the largest that fits.
///
/// # Errors
/// [`Error::Config`] with the bytes needed and available.
pub(super) fn check_fits(config: &Config, spec: &ModelSpec, kernels: &dyn Kernels, available: u64) -> Result<()> {
    let train = &config.train;
    let (batch, seq_len, grad_accum, recompute) = (train.batch_size, train.seq_len, train.grad_accum, train.recompute);
    let need = |batch| {
        let bytes = EngineBytes::new(spec, config.dtype, [batch, seq_len, grad_accum], recompute, kernels);
        bytes.map_or(u64::MAX, |bytes| bytes.total())
    };
    if need(batch) <= available {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
    let advice = match largest_batch(available, need) {
        Some(largest) => {
            format!("the largest batch that fits is {largest}, use `--grad-accum` for several micro-batches a step")
        }
        None => "not even a batch of 1 fits; use a shorter `--seq-len` or a smaller model".into(),
    };
    let message = format!(
        "{batch} sequences of {seq_len} tokens need {:.1} GiB, and {:.1} GiB are available; {advice}",
        gib(need(batch)),
        gib(available)
    );
    Err(Error::config("train.batch_size", message))
}

/// The largest batch whose `bytes` are within the budget; `None` if one sequence is too large.
pub fn largest_batch(budget: u64, bytes: impl Fn(usize) -> u64) -> Option<usize> {
    const MOST: usize = 1 << 20;
    let (mut low, mut high) = (0, MOST);
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if bytes(middle) <= budget { low = middle } else { high = middle }
    }
    (low > 0).then_some(low)
}
