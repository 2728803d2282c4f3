//! Gradients: as the backward pass writes them, summed over micro-batches, and the statistics that decide whether they are used.

mod reduce;

use crate::engine::collective::{ProcessGroup, Shards};
use crate::engine::kernels::summary::TensorSummary;
use crate::engine::kernels::{Kernels, op, view};
use crate::engine::model::{Parameters, candle_dtype};
use crate::engine::optim::adamw::shards;
use crate::engine::optim::tree::{Merge, ReductionTree, local_range};
use crate::precision::{Dtype, PrecisionPolicy, PrecisionUnit};
use candle_core::{DType, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The gradient of every parameter.
///
/// A backward pass writes each gradient once, rounded to the policy's type. Where several micro-batches make a step,
/// they are summed in FP32 along a fixed binary tree, which keeps a sum for each of its open nodes.
#[derive(Debug)]
pub struct Gradients {
    grads: Parameters,
    /// FP32, one for each node that can be open at a time; none if a step has one micro-batch.
    sums: Vec<Parameters>,
    nodes: ReductionTree,
    /// Whether a step may have several micro-batches, so that its sum is FP32.
    accumulates: bool,
    rank: usize,
    world_size: usize,
    /// The shard of this process of the sum over all processes; `None` for a single process, which has all of the sum.
    shard: Option<Parameters>,
    /// The largest magnitude in the micro-batches' gradients, if it was measured.
    largest: Option<f32>,
    policy: PrecisionPolicy,
}

/// Statistics of the gradients of a step, without unscaling.
#[derive(Clone, Debug, Default)]
pub struct GradientStats {
    /// One entry per parameter, in order.
    pub tensors: Vec<TensorSummary>,
    /// All of them together.
    pub total: TensorSummary,
    /// The largest finite magnitude of gradients in the policy's type, which the loss scale must keep finite.
    pub amax: f32,
}

/// Number of FP32 sums that a process needs for its share of a step of `micro_batches` micro-batches.
fn live_sums(micro_batches: usize, rank: usize, world_size: usize) -> usize {
    let share = local_range(rank, world_size, micro_batches);
    if share.len() > 1 { ReductionTree::max_live_sums(share, micro_batches) } else { 0 }
}

impl Gradients {
    /// Buffers for parameters laid out as `like`'s and on its device, with FP32 sums for steps of up to `grad_accum`
    /// micro-batches. Each process of `group` computes a share of them.
    pub fn new(
        like: &Parameters,
        policy: PrecisionPolicy,
        grad_accum: usize,
        group: &dyn ProcessGroup,
    ) -> Result<Self> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let grads = like.zeros_like(candle_dtype(policy.grads))?;
        let count = live_sums(grad_accum, rank, world_size);
        let sums = (0..count).map(|_| grads.zeros_like(DType::F32)).collect::<Result<_>>()?;
        let (accumulates, nodes) = (grad_accum > 1, ReductionTree::default());
        let mut new = Self { grads, sums, nodes, accumulates, rank, world_size, shard: None, largest: None, policy };
        if world_size > 1 {
            new.shard = Some(new.zero_shard(&shards(&new.grads, group))?);
        }
        Ok(new)
    }

    /// Zeros for the sum of this process's shard: in FP32, or in the type of each gradient if a step has one micro-batch.
    fn zero_shard(&self, shards: &Arc<Shards>) -> Result<Parameters> {
        let shard = self.grads.shard(shards, self.rank)?;
        shard.zeros_of_shard(|grad| if self.accumulates { DType::F32 } else { grad.dtype() })
    }

    /// The bytes that [`Gradients::new`] allocates for `parameters` parameters in each of `world_size` processes, at most. The
    /// second number is the shard's sum, which may be on the CPU even if the gradients are on a GPU.
    pub fn bytes(parameters: u64, policy: PrecisionPolicy, grad_accum: usize, world_size: usize) -> (u64, u64) {
        let size = Dtype::F32.size_in_bytes();
        let total = if grad_accum > 1 { size } else { policy.grads.size_in_bytes() } as u64;
        let total = if world_size > 1 { (parameters * total).div_ceil(world_size as u64) } else { 0 };
        let sums = (0..world_size).map(|rank| live_sums(grad_accum, rank, world_size)).max().unwrap_or(0);
        (parameters * (policy.grads.size_in_bytes() + sums * size) as u64, total)
    }

    /// Gives the gradient of pack `index` the type it has where its layer computes in `compute`.
    pub fn change_dtype(&mut self, index: usize, compute: Dtype) -> Result<()> {
        let dtype = candle_dtype(self.policy.with_compute(compute).grads);
        let grad = self.grads.fused_at(index);
        let retyped = view::zeros(grad.dims(), dtype, grad.device())?;
        self.grads.replace_fused(index, retyped)?;
        if let Some(shards) = self.shard.as_ref().and_then(Parameters::shards).cloned() {
            self.shard = Some(self.zero_shard(&shards)?);
        }
        Ok(())
    }

    /// Starts a step of `micro_batches` micro-batches, and returns the range that this process computes.
    pub fn begin_accumulation(&mut self, micro_batches: usize) -> Result<Range<usize>> {
        let share = self.local_micro_batches(micro_batches);
        self.nodes.begin(share.clone(), micro_batches);
        self.largest = None;
        while self.sums.len() < live_sums(micro_batches, self.rank, self.world_size) {
            self.sums.push(self.grads.zeros_like(DType::F32)?);
        }
        Ok(share)
    }

    /// The micro-batches that this process computes in a step of `micro_batches`.
    pub fn local_micro_batches(&self, micro_batches: usize) -> Range<usize> {
        local_range(self.rank, self.world_size, micro_batches)
    }

    /// Whether this process's part of the sum is the gradient of a single micro-batch.
    fn is_leaf(&self) -> bool {
        if self.shard.is_some() { self.nodes.share().len() <= 1 } else { !self.accumulates }
    }

    /// The gradients of one micro-batch, as a backward pass writes them.
    pub fn micro_batch_grads(&self) -> &Parameters {
        &self.grads
    }

    /// Adds the gradients of a backward pass to the step's sum. With `measure`, [`GradientStats::amax`] covers the
    /// micro-batches' gradients: their FP32 sum does not show the room that each had in its own type.
    pub fn accumulate(&mut self, kernels: &dyn Kernels, measure: bool) -> Result<()> {
        let Merge { at, adds, merges } = self.nodes.push();
        if measure && self.accumulates {
            let policy = candle_dtype(self.policy.grads);
            for grad in self.grads.tensors().iter().filter(|grad| grad.dtype() == policy) {
                let stats = kernels.summarize(grad, view::float_format(policy), false)?.stats;
                self.largest = Some(self.largest.unwrap_or(0.0).max(stats.max_abs));
            }
        }
        if self.is_leaf() {
            return Ok(());
        }
        // The nodes that this micro-batch completes, the outermost first, in one pass: a tree of a power of two of
        // leaves then moves as many bytes as a running sum.
        match self.sums[at - merges..at + usize::from(adds)].split_first() {
            None => {
                let mut pairs = self.grads.tensors().iter().zip(self.sums[at].tensors());
                pairs.try_for_each(|(grad, sum)| kernels.copy(grad, sum))
            }
            Some((outer, inner)) => (0..self.grads.len()).try_for_each(|index| {
                let inner: Vec<_> = inner.iter().rev().map(|sum| &sum[index]).collect();
                op::Accumulate { x: &self.grads[index], inner: &inner, out: &outer[index] }.run(kernels)
            }),
        }
    }

    /// The step's gradients, times the loss scale; the shard of this process if there are several.
    pub fn total(&self) -> &Parameters {
        self.shard.as_ref().or(self.sums.first()).unwrap_or(&self.grads)
    }

    /// The variance of the elements of each unit's scaled gradient, computed from `stats`.
    pub fn variances(
        &self,
        stats: &GradientStats,
        kernels: &dyn Kernels,
        group: &dyn ProcessGroup,
    ) -> crate::Result<BTreeMap<PrecisionUnit, f64>> {
        let sums = if self.shard.is_some() {
            self.reduce_sums(group)?
        } else {
            self.total().tensors().par_iter().map(|grad| kernels.sum(grad)).collect::<Result<Vec<f64>>>()?
        };
        let mut units: BTreeMap<PrecisionUnit, [f64; 3]> = BTreeMap::new();
        for ((entry, summary), sum) in self.grads.layout().iter().zip(&stats.tensors).zip(sums) {
            let of_unit = units.entry(entry.layer.unit()).or_default();
            for (total, term) in of_unit.iter_mut().zip([summary.stats.count as f64, sum, summary.stats.sum_squares]) {
                *total += term;
            }
        }
        let variance = |[count, sum, squares]: [f64; 3]| (squares / count - (sum / count).powi(2)).max(0.0);
        Ok(units.into_iter().map(|(unit, sums)| (unit, variance(sums))).collect())
    }

    /// Computes the statistics of every gradient in one pass; with `exponents`, also a histogram of exponents.
    pub fn compute_stats(
        &self,
        exponents: bool,
        stats: &mut GradientStats,
        kernels: &dyn Kernels,
        group: &dyn ProcessGroup,
    ) -> crate::Result<()> {
        let mut largest = self.largest;
        if self.shard.is_some() {
            largest = self.reduce_stats(exponents, stats, kernels, group)?;
        } else {
            self.local_stats(exponents, stats, kernels)?;
        }
        stats.total = TensorSummary::default();
        stats.amax = 0.0;
        let policy = candle_dtype(self.policy.grads);
        for (tensor, grad) in stats.tensors.iter().zip(self.grads.tensors()) {
            stats.total.merge(tensor);
            if grad.dtype() == policy {
                stats.amax = stats.amax.max(tensor.stats.max_abs);
            }
        }
        stats.amax = largest.unwrap_or(stats.amax);
        Ok(())
    }

    fn local_stats(&self, exponents: bool, stats: &mut GradientStats, kernels: &dyn Kernels) -> Result<()> {
        let grads = self.total().tensors().iter().zip(self.grads.tensors());
        let tensors: Vec<_> = grads.map(|(total, grad)| (total, view::float_format(grad.dtype()))).collect();
        stats.tensors.resize(tensors.len(), TensorSummary::default());
        op::Summarize { tensors: &tensors, exponents, out: &mut stats.tensors }.run(kernels)
    }
}
