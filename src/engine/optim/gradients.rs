//! Gradients: as the backward pass writes them, summed over micro-batches, and the survey that decides whether they are used.

mod reduce;

use crate::engine::collective::{Collective, Shards};
use crate::engine::kernels::survey::TensorSurvey;
use crate::engine::kernels::{Kernels, op, view};
use crate::engine::model::{Parameters, candle_dtype};
use crate::engine::optim::tree::{Nodes, Placed, share};
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
    /// FP32, one for each node that can be open at a time; none where a step has one micro-batch.
    sums: Vec<Parameters>,
    nodes: Nodes,
    /// Whether a step may have several micro-batches, so that its sum is FP32.
    accumulates: bool,
    /// Which of several processes this is, and the sum of the step's gradients over all of them in its own shard.
    shard: Option<(usize, Parameters)>,
    /// The largest magnitude in the micro-batches' gradients, if it was measured.
    largest: Option<f32>,
    policy: PrecisionPolicy,
}

/// What the gradients of a step look like, scaled as they are.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// One entry a parameter, in order.
    pub tensors: Vec<TensorSurvey>,
    /// All of them together.
    pub total: TensorSurvey,
    /// The largest finite magnitude among those of the policy's type: what the loss scale has to leave room for.
    pub largest: f32,
}

/// The FP32 sums that a process takes for its share in a step of so many micro-batches.
fn sums(micro_batches: usize, rank: usize, world: usize) -> usize {
    let share = share(rank, world, micro_batches);
    if share.len() > 1 { Nodes::most_open(share, micro_batches) } else { 0 }
}

impl Gradients {
    /// Buffers for parameters laid out as `like`'s and on its device, with FP32 sums for steps of up to `grad_accum`
    /// micro-batches.
    pub fn new(like: &Parameters, policy: PrecisionPolicy, grad_accum: usize) -> Result<Self> {
        let grads = like.zeros_like(candle_dtype(policy.grads))?;
        let sums = (0..sums(grad_accum, 0, 1)).map(|_| grads.zeros_like(DType::F32)).collect::<Result<_>>()?;
        let accumulates = grad_accum > 1;
        Ok(Self { grads, sums, nodes: Nodes::default(), accumulates, shard: None, largest: None, policy })
    }

    /// [`Gradients::new`] for process `rank` of several, of which each owns one of `shards`.
    pub fn sharded(
        like: &Parameters,
        policy: PrecisionPolicy,
        grad_accum: usize,
        shards: &Arc<Shards>,
        rank: usize,
    ) -> Result<Self> {
        let mut grads = Self::new(like, policy, 1)?;
        grads.accumulates = grad_accum > 1;
        let total = grads.grads.shard(shards, rank)?;
        let total = if grads.accumulates { total.zeros_like(DType::F32)? } else { total.zeros_on_host()? };
        grads.shard = Some((rank, total));
        Ok(grads)
    }

    /// What they take for so many parameters in each of `world` processes at most, in bytes: [`Gradients::new`], or
    /// [`Gradients::sharded`] and the sums of the first step. The second number is what the sum of its shard takes, which is on
    /// the CPU wherever the rest is.
    pub fn bytes(parameters: u64, policy: PrecisionPolicy, grad_accum: usize, world: usize) -> (u64, u64) {
        let size = Dtype::F32.size_in_bytes();
        let total = if grad_accum > 1 { size } else { policy.grads.size_in_bytes() } as u64;
        let total = if world > 1 { (parameters * total).div_ceil(world as u64) } else { 0 };
        let sums = (0..world).map(|rank| sums(grad_accum, rank, world)).max().unwrap_or(0);
        (parameters * (policy.grads.size_in_bytes() + sums * size) as u64, total)
    }

    /// Gives the gradient of pack `index` the type it has where its layer computes in `compute`.
    pub fn retype(&mut self, index: usize, compute: Dtype) -> Result<()> {
        let dtype = candle_dtype(self.policy.with_compute(compute).grads);
        let grad = self.grads.pack_at(index);
        let retyped = view::zeros(grad.dims(), dtype, grad.device())?;
        self.grads.replace_pack(index, retyped)?;
        // One micro-batch's gradients keep their type, also in the shard.
        if let Some((rank, total)) = self.shard.as_mut().filter(|_| !self.accumulates)
            && let Some(shards) = total.shards().cloned()
        {
            *total = self.grads.shard(&shards, *rank)?.zeros_on_host()?;
        }
        Ok(())
    }

    /// Forgets the last step's gradients; the next step has so many micro-batches. Returns those that are for this process.
    pub fn begin(&mut self, micro_batches: usize) -> Result<Range<usize>> {
        let (rank, world) = self.place();
        let share = self.share(micro_batches);
        self.nodes.begin(share.clone(), micro_batches);
        self.largest = None;
        while self.sums.len() < sums(micro_batches, rank, world) {
            self.sums.push(self.grads.zeros_like(DType::F32)?);
        }
        Ok(share)
    }

    /// Of so many micro-batches those that this process computes.
    pub fn share(&self, micro_batches: usize) -> Range<usize> {
        let (rank, world) = self.place();
        share(rank, world, micro_batches)
    }

    /// Which of how many processes this is.
    fn place(&self) -> (usize, usize) {
        let world = self.shard.as_ref().and_then(|(_, total)| total.shards()).map_or(1, |shards| shards.world());
        (self.shard.as_ref().map_or(0, |(rank, _)| *rank), world)
    }

    /// Whether this step's gradients here are those of one micro-batch, as the backward pass wrote them.
    fn is_leaf(&self) -> bool {
        if self.shard.is_some() { self.nodes.share().len() <= 1 } else { self.sums.is_empty() }
    }

    /// Where a backward pass writes: the gradients of one micro-batch.
    pub fn micro_batch(&self) -> &Parameters {
        &self.grads
    }

    /// Adds what a backward pass has written to the step's sum. With `measure`, [`Survey::largest`] will be that of the
    /// micro-batches' gradients: their FP32 sum says nothing of the room that each had in its own type.
    pub fn accumulate(&mut self, kernels: &dyn Kernels, measure: bool) -> Result<()> {
        let Placed { at, adds, merges } = self.nodes.push();
        if measure && self.accumulates {
            let policy = candle_dtype(self.policy.grads);
            for grad in self.grads.tensors().iter().filter(|grad| grad.dtype() == policy) {
                let stats = kernels.survey(grad, view::float_format(policy), false)?.stats;
                self.largest = Some(self.largest.unwrap_or(0.0).max(stats.max_abs));
            }
        }
        if self.is_leaf() {
            return Ok(());
        }
        // The nodes that this micro-batch completes, the outermost first, in one pass: a tree of a power of two of leaves then
        // moves as many bytes as a running sum.
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

    /// The step's gradients, times the loss scale; of several processes the shard of this one.
    pub fn total(&self) -> &Parameters {
        let whole = self.sums.first().unwrap_or(&self.grads);
        self.shard.as_ref().map_or(whole, |(_, total)| total)
    }

    /// The variance of the elements of each unit's gradient, scaled as they are, given the look at them.
    pub fn variances(
        &self,
        survey: &Survey,
        kernels: &dyn Kernels,
        world: &dyn Collective,
    ) -> crate::Result<BTreeMap<PrecisionUnit, f64>> {
        let sums = if self.shard.is_some() {
            self.shared_sums(world)?
        } else {
            self.total().tensors().par_iter().map(|grad| kernels.sum(grad)).collect::<Result<Vec<f64>>>()?
        };
        let mut units: BTreeMap<PrecisionUnit, [f64; 3]> = BTreeMap::new();
        for ((entry, looked), sum) in self.grads.layout().iter().zip(&survey.tensors).zip(sums) {
            let of_unit = units.entry(entry.layer.unit()).or_default();
            for (total, term) in of_unit.iter_mut().zip([looked.stats.count as f64, sum, looked.stats.sum_squares]) {
                *total += term;
            }
        }
        let variance = |[count, sum, squares]: [f64; 3]| (squares / count - (sum / count).powi(2)).max(0.0);
        Ok(units.into_iter().map(|(unit, sums)| (unit, variance(sums))).collect())
    }

    /// Looks at every gradient in one pass; with `exponents` it also counts them by binade.
    pub fn survey(
        &self,
        exponents: bool,
        survey: &mut Survey,
        kernels: &dyn Kernels,
        world: &dyn Collective,
    ) -> crate::Result<()> {
        let mut largest = self.largest;
        if self.shard.is_some() {
            largest = self.survey_together(exponents, survey, world)?;
        } else {
            self.survey_here(exponents, survey, kernels)?;
        }
        survey.total = TensorSurvey::default();
        survey.largest = 0.0;
        let policy = candle_dtype(self.policy.grads);
        for (tensor, grad) in survey.tensors.iter().zip(self.grads.tensors()) {
            survey.total.merge(tensor);
            if grad.dtype() == policy {
                survey.largest = survey.largest.max(tensor.stats.max_abs);
            }
        }
        survey.largest = largest.unwrap_or(survey.largest);
        Ok(())
    }

    fn survey_here(&self, exponents: bool, survey: &mut Survey, kernels: &dyn Kernels) -> Result<()> {
        let grads = self.total().tensors().iter().zip(self.grads.tensors());
        let tensors: Vec<_> = grads.map(|(total, grad)| (total, view::float_format(grad.dtype()))).collect();
        survey.tensors.resize(tensors.len(), TensorSurvey::default());
        op::Survey { tensors: &tensors, exponents, out: &mut survey.tensors }.run(kernels)
    }
}
