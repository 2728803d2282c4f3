//! The memory that training's buffers take, summed from the types that allocate them.

use crate::engine::kernels::Kernels;
use crate::engine::kernels::attention::Shape;
use crate::engine::model::{Keep, Layer, ModelSpec, ParamSpec, Workspace, WorkspaceBytes};
use crate::engine::optim::{AdamW, Gradients, MasterWeights, OptimizerKind};
use crate::precision::PrecisionPolicy;
use crate::train::config::Config;
use crate::{Error, Result};
use std::collections::BTreeMap;

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
        sizes: [usize; 3],
        keep: Keep,
        optimizer: OptimizerKind,
        kernels: &dyn Kernels,
    ) -> Result<Self> {
        Self::among(1, spec, policy, sizes, keep, optimizer, kernels)
    }

    /// The same for each of `world` processes.
    pub fn among(
        world: usize,
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        [batch, seq_len, grad_accum]: [usize; 3],
        keep: Keep,
        optimizer: OptimizerKind,
        kernels: &dyn Kernels,
    ) -> Result<Self> {
        let elements = |entries: Vec<ParamSpec>| -> Vec<u64> {
            entries.iter().map(|entry| entry.shape.iter().product::<usize>() as u64).collect()
        };
        let trained = elements(spec.parameters());
        let parameters: u64 = trained.iter().sum();
        let frozen = Frozen::new(spec, policy);
        let WorkspaceBytes { activations, scratch } = Workspace::bytes(spec, policy, [batch, seq_len], keep)?;
        let (masters, weights) = MasterWeights::bytes(parameters, policy, world);
        let gradients = Gradients::bytes(parameters, policy, grad_accum, world);
        let scores = kernels.score_bytes(&Shape::new(batch, seq_len, spec.heads, spec.head_dim))?;
        let adam = AdamW::bytes(optimizer, policy, trained).div_ceil(world as u64);
        let (weights, scratch) = (weights + frozen.held, scratch + frozen.buffer);
        Ok(Self { weights, masters, gradients, adam, activations, scratch, scores })
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        let Self { weights, masters, gradients, adam, activations, scratch, scores } = self;
        weights + masters + gradients + adam + activations + scratch + scores
    }
}

/// Bytes of a frozen base.
#[derive(Default)]
struct Frozen {
    held: u64,
    /// For the largest of the matrices in blocks, dequantised.
    buffer: u64,
}

impl Frozen {
    fn new(spec: &ModelSpec, policy: PrecisionPolicy) -> Self {
        let (in_blocks, size) = (spec.in_blocks(), policy.compute.size_in_bytes() as u64);
        let (mut held, mut products) = (0, BTreeMap::<Layer, u64>::new());
        for ParamSpec { name, shape, pack, .. } in spec.frozen_parameters() {
            let elements = shape.iter().product::<usize>() as u64;
            held += match in_blocks.get(&name) {
                Some(dtype) => {
                    *products.entry(pack).or_default() += elements * size;
                    elements / dtype.block_size() as u64 * dtype.type_size() as u64
                }
                None => elements * size,
            };
        }
        Self { held, buffer: products.into_values().max().unwrap_or(0) }
    }
}

/// What this configuration takes in each of `world` processes with other sizes.
fn need(config: &Config, spec: &ModelSpec, batch: usize, keep: Keep, kernels: &dyn Kernels, world: usize) -> u64 {
    let train = &config.train;
    let sizes = [batch, train.seq_len, train.grad_accum.max(train.batch_size.div_ceil(batch))];
    let bytes = EngineBytes::among(world, spec, config.dtype, sizes, keep, train.optimizer, kernels);
    bytes.map_or(u64::MAX, |bytes| bytes.total())
}

/// Rejects a configuration that does not fit into memory before anything is allocated, and names settings that would fit.
///
/// # Errors
/// [`Error::Config`] with the bytes needed and available.
pub(super) fn check_fits(
    config: &Config,
    spec: &ModelSpec,
    kernels: &dyn Kernels,
    world: usize,
    available: u64,
) -> Result<()> {
    let train = &config.train;
    let (batch, keep) = (train.batch_size, train.recompute);
    let need = |config: &Config, spec: &ModelSpec, batch, keep| need(config, spec, batch, keep, kernels, world);
    if need(config, spec, batch, keep) <= available {
        return Ok(());
    }
    let mut ways = Vec::new();
    let largest = largest_batch(available, |batch| need(config, spec, batch, keep));
    if keep == Keep::All {
        match largest_batch(available, |batch| need(config, spec, batch, Keep::BlockInput)).map(|most| most.min(batch))
        {
            Some(fits) if fits == batch => ways.push("`--set train.recompute=block`".into()),
            Some(fits) if largest.is_none() => {
                ways.push(format!("`--set train.recompute=block` with `--batch-size {fits}`"));
            }
            _ => {}
        }
    }
    let narrow = with_narrow_moments(config);
    if narrow != *config && need(&narrow, spec, batch, keep) <= available {
        ways.push("`--optimizer adamw8bit`".into());
    }
    let lora = with_lora(config);
    if config.lora.r.is_none()
        && lora.adapted(spec.clone()).is_ok_and(|spec| need(&lora, &spec, batch, keep) <= available)
    {
        ways.push("`--lora r=16,alpha=32`".into());
    }
    let advice = match largest {
        Some(largest) => {
            format!("the largest batch that fits is {largest}, use `--grad-accum` for several micro-batches a step")
        }
        None => "not even a batch of 1 fits".into(),
    };
    let more = match (ways.is_empty(), largest) {
        (false, _) => format!("; what fits as well: {}", ways.join("; ")),
        (true, None) => "; use a shorter `--seq-len` or a smaller model".into(),
        (true, Some(_)) => String::new(),
    };
    let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
    let message = format!(
        "{batch} sequences of {} tokens need {:.1} GiB, and {:.1} GiB are available; {advice}{more}",
        train.seq_len,
        gib(need(config, spec, batch, keep)),
        gib(available)
    );
    Err(Error::config("train.batch_size", message))
}

fn with_narrow_moments(config: &Config) -> Config {
    let mut config = config.clone();
    config.train.optimizer = OptimizerKind::AdamW8bit;
    config
}

fn with_lora(config: &Config) -> Config {
    let mut config = config.clone();
    (config.lora.r, config.lora.alpha) = (Some(16), Some(32.0));
    config
}

/// `config` with as many sequences a step in smaller micro-batches or, where not one sequence fits, with recomputation: the
/// first that fits, and what was changed in words. Unchanged where nothing has to be or can be.
pub(super) fn fitted(
    config: &Config,
    spec: &ModelSpec,
    kernels: &dyn Kernels,
    world: usize,
    available: u64,
) -> (Config, Option<String>) {
    let (batch, accum) = (config.train.batch_size, config.train.grad_accum);
    let keeps = [config.train.recompute, Keep::BlockInput];
    for keep in keeps {
        let divisors = (1..=batch).rev().filter(|divisor| batch.is_multiple_of(*divisor));
        for smaller in divisors {
            if need(config, spec, smaller, keep, kernels, world) > available {
                continue;
            }
            let mut fitted = config.clone();
            let train = &mut fitted.train;
            (train.batch_size, train.grad_accum, train.recompute) = (smaller, batch / smaller * accum, keep);
            let recompute = if keep == config.train.recompute { "" } else { ", train.recompute = block" };
            let said =
                format!("to fit into memory: batch_size = {smaller}, grad_accum = {}{recompute}", train.grad_accum);
            let changed = fitted != *config;
            return (fitted, changed.then_some(said));
        }
    }
    (config.clone(), None)
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
