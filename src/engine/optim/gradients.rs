//! Gradients: as the backward pass writes them, summed over micro-batches, and the statistics that decide whether they
//! are used.

mod reduce;

use crate::engine::collective::async_exchange::AsyncExchange;
use crate::engine::collective::{ProcessGroup, Shards, SingleProcess};
use crate::engine::kernels::summary::TensorSummary;
use crate::engine::kernels::{Kernels, op, view};
use crate::engine::model::{Parameters, candle_dtype};
use crate::engine::optim::adamw::shards;
use crate::engine::optim::tree::{Merge, ReductionTree, local_range, rank_of};
use crate::precision::{Dtype, PrecisionPolicy, PrecisionUnit};
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;
use reduce::{Exchange, PendingChunk};
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The state that is split among several processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharding {
    /// Masters and moments (`ZeRO` stage 1).
    #[default]
    Optimizer,
    /// Sums of gradients as well (`ZeRO` stage 2).
    Gradients,
}

impl Sharding {
    /// The help of its flag.
    pub(crate) const HELP: &str =
        "State that is split among several processes: `optimizer` (masters, moments) or `gradients` (sums as well)";

    /// Reads the name of a variant.
    pub(crate) fn parse(name: &str) -> std::result::Result<Self, serde::de::value::Error> {
        Self::deserialize(name.into_deserializer())
    }
}

/// The gradient of every parameter.
///
/// A backward pass writes each gradient once, rounded to the policy's type. Where several micro-batches make a step,
/// they are summed in FP32 along a fixed binary tree, which keeps a sum for each of its open nodes.
#[derive(Debug)]
pub struct Gradients {
    /// With [`Sharding::Gradients`], all blocks have the same memory.
    grads: Parameters,
    /// FP32, one for each node of this process that can be open at a time; none if it never sums several micro-batches.
    sums: Vec<Parameters>,
    nodes: ReductionTree,
    /// Whether a step may have several micro-batches, so that its sum is FP32.
    accumulates: bool,
    rank: usize,
    world_size: usize,
    sharding: Sharding,
    /// The shard of this process of the sums over all processes, one for each node that can be open at a time; none for
    /// a single process, which has all of the sum.
    shard: Vec<Parameters>,
    shard_nodes: ReductionTree,
    /// The parameters of each unit.
    units: BTreeMap<PrecisionUnit, Vec<usize>>,
    turn: Turn,
    /// The place of the turn's micro-batch in `sums`; `None` if it is not summed here.
    merge: Option<Merge>,
    exchange: Option<Arc<Exchange>>,
    /// The largest magnitude in the micro-batches' gradients, if it was measured.
    largest: Option<f32>,
    /// The time of all exchanges by a thread so far during which this process computed.
    hidden: Duration,
    policy: PrecisionPolicy,
}

/// A part of a step in one process: a pass, an exchange of gradients during it, or both.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// The micro-batch that this process computes.
    pub micro_batch: Option<usize>,
    /// The micro-batches whose gradients the processes then exchange.
    exchanged: Option<Range<usize>>,
}

/// The means to collect a step's gradients.
#[derive(Debug)]
pub struct Collector<'a> {
    group: &'a dyn ProcessGroup,
    kernels: &'a dyn Kernels,
    /// Whether [`GradientStats::amax`] covers the micro-batches' gradients: their FP32 sum does not show the room that
    /// each had in its own type.
    measure: bool,
    /// `None` for a single process, and between GPUs.
    thread: Option<AsyncExchange>,
    /// The chunks that are being exchanged, in order.
    pending: VecDeque<PendingChunk>,
    /// The time that this process has waited for exchanges.
    pub waited: Duration,
    largest: Option<f32>,
}

impl<'a> Collector<'a> {
    /// Runs `body` with a collector. Meanwhile nothing else may use the group.
    pub fn with<R>(
        group: &'a dyn ProcessGroup,
        kernels: &'a dyn Kernels,
        measure: bool,
        body: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let pending = VecDeque::new();
        let waited = Duration::ZERO;
        let new = |thread| Self { group, kernels, measure, thread, pending, waited, largest: None };
        if group.world_size() == 1 || group.gpus().is_some() {
            return body(&mut new(None));
        }
        std::thread::scope(|scope| body(&mut new(Some(AsyncExchange::spawn(scope, group)))))
    }
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

/// Number of FP32 sums that process `rank` needs for its share of a step of `micro_batches` micro-batches.
fn live_sums(sharding: Sharding, micro_batches: usize, rank: usize, world_size: usize) -> usize {
    let share = local_range(rank, world_size, micro_batches);
    let sends_each = world_size > 1 && (sharding == Sharding::Gradients || share.len() <= 1);
    if sends_each || micro_batches <= 1 { 0 } else { ReductionTree::max_live_sums(share, micro_batches) }
}

/// Number of sums of its shard that each of several processes needs.
fn live_shard_sums(sharding: Sharding, micro_batches: usize, world_size: usize) -> usize {
    match sharding {
        Sharding::Optimizer => 1,
        Sharding::Gradients => ReductionTree::max_live_sums_by(world_size, micro_batches),
    }
}

/// Adds `x`, a new node, to the sums that it completes, the outermost first, in one pass: a tree of a power of two of
/// leaves then moves as many bytes as a running sum. Returns false if it completes none. `part` returns the elements of
/// `x` in a sum.
fn add_node<'a>(
    Merge { at, adds, merges }: Merge,
    kernels: &dyn Kernels,
    x: &Tensor,
    part: impl Fn(usize) -> Result<Cow<'a, Tensor>>,
) -> Result<bool> {
    let outermost = at - merges;
    if merges == 0 && !adds {
        return Ok(false);
    }
    let inner: Vec<_> = (outermost + 1..at + usize::from(adds)).rev().map(&part).collect::<Result<_>>()?;
    let inner: Vec<&Tensor> = inner.iter().map(|sum| &**sum).collect();
    op::Accumulate { x, inner: &inner, out: &*part(outermost)? }.run(kernels)?;
    Ok(true)
}

impl Gradients {
    /// Buffers of a single process for parameters laid out as `like`'s and on its device, with FP32 sums for steps of
    /// up to `grad_accum` micro-batches.
    pub fn new(like: &Parameters, policy: PrecisionPolicy, grad_accum: usize) -> Result<Self> {
        Self::sharded(like, policy, grad_accum, &SingleProcess, Sharding::Optimizer)
    }

    /// Like [`Self::new`], for a process of `group`, which computes a share of each step.
    pub fn sharded(
        like: &Parameters,
        policy: PrecisionPolicy,
        grad_accum: usize,
        group: &dyn ProcessGroup,
        sharding: Sharding,
    ) -> Result<Self> {
        let dtype = candle_dtype(policy.grads);
        match sharding {
            Sharding::Gradients if group.world_size() > 1 => {
                Self::of(like.zeros_of_one_block(dtype)?, policy, grad_accum, group, sharding)
            }
            _ => Self::of(like.zeros_like(dtype)?, policy, grad_accum, group, Sharding::Optimizer),
        }
    }

    /// [`Self::sharded`] with these buffers for a backward pass.
    fn of(
        grads: Parameters,
        policy: PrecisionPolicy,
        grad_accum: usize,
        group: &dyn ProcessGroup,
        sharding: Sharding,
    ) -> Result<Self> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let mut units = BTreeMap::from([(PrecisionUnit::NonBlock, Vec::new())]);
        for (index, entry) in grads.layout().iter().enumerate() {
            units.entry(entry.layer.unit()).or_insert_with(Vec::new).push(index);
        }
        let mut new = Self {
            grads,
            sums: Vec::new(),
            nodes: ReductionTree::default(),
            accumulates: grad_accum > 1,
            rank,
            world_size,
            sharding,
            shard: Vec::new(),
            shard_nodes: ReductionTree::default(),
            units,
            turn: Turn::default(),
            merge: None,
            exchange: None,
            largest: None,
            hidden: Duration::ZERO,
            policy,
        };
        if world_size > 1 {
            new.shard.push(new.zero_shard(&shards(&new.grads, group))?);
        }
        new.reserve(grad_accum)?;
        Ok(new)
    }

    /// Allocates the sums of a step of `micro_batches` micro-batches.
    fn reserve(&mut self, micro_batches: usize) -> Result<()> {
        while self.sums.len() < live_sums(self.sharding, micro_batches, self.rank, self.world_size) {
            self.sums.push(self.grads.zeros_like(DType::F32)?);
        }
        if let Some(shards) = self.shard.first().and_then(Parameters::shards).cloned() {
            while self.shard.len() < live_shard_sums(self.sharding, micro_batches, self.world_size) {
                self.shard.push(self.zero_shard(&shards)?);
            }
        }
        Ok(())
    }

    /// Zeros for a sum of this process's shard: in FP32, or in the type of each gradient if a step has one micro-batch.
    fn zero_shard(&self, shards: &Arc<Shards>) -> Result<Parameters> {
        let shard = self.grads.shard(shards, self.rank)?;
        shard.zeros_of_shard(|grad| if self.accumulates { DType::F32 } else { grad.dtype() })
    }

    /// The bytes that [`Gradients::sharded`] allocates for `parameters` parameters, of them `one_block` outside the
    /// blocks and in one block, in each of `world_size` processes, at most. The second number is the shard's sums,
    /// which may be on the CPU even if the gradients are on a GPU.
    pub fn bytes(
        parameters: u64,
        one_block: u64,
        policy: PrecisionPolicy,
        grad_accum: usize,
        world_size: usize,
        sharding: Sharding,
    ) -> (u64, u64) {
        let size = Dtype::F32.size_in_bytes() as u64;
        let width = policy.grads.size_in_bytes() as u64;
        if world_size == 1 {
            let sums = live_sums(sharding, grad_accum, 0, 1) as u64;
            return (parameters * (width + sums * size), 0);
        }
        let total =
            if grad_accum > 1 { size } else { width } * live_shard_sums(sharding, grad_accum, world_size) as u64;
        let sums = (0..world_size).map(|rank| live_sums(sharding, grad_accum, rank, world_size)).max().unwrap_or(0);
        let written = if sharding == Sharding::Gradients { one_block } else { parameters };
        (written * width + parameters * sums as u64 * size, (parameters * total).div_ceil(world_size as u64))
    }

    /// Gives the gradient of fused tensor `index` the type it has where its layer computes in `compute`.
    pub fn change_dtype(&mut self, index: usize, compute: Dtype) -> Result<()> {
        let dtype = candle_dtype(self.policy.with_compute(compute).grads);
        let grad = self.grads.fused_at(index);
        let retyped = view::zeros(grad.dims(), dtype, grad.device())?;
        self.grads.replace_fused(index, retyped)?;
        if let Some(shards) = self.shard.first().and_then(Parameters::shards).cloned()
            && !self.accumulates
        {
            self.shard[0] = self.zero_shard(&shards)?;
        }
        Ok(())
    }

    /// The turns of this process in a step of `micro_batches` micro-batches.
    fn turns(&self, micro_batches: usize) -> Vec<Turn> {
        let (width, rank) = (self.world_size, self.rank);
        if self.sharding == Sharding::Gradients {
            // Neighbors in the tree, so that few of its nodes are open.
            let turn = |first: usize| {
                let exchanged = first..micro_batches.min(first + width);
                Turn { micro_batch: Some(first + rank).filter(|own| *own < exchanged.end), exchanged: Some(exchanged) }
            };
            return (0..micro_batches).step_by(width).map(turn).collect();
        }
        let share = local_range(rank, width, micro_batches);
        let mut turns: Vec<_> = share.map(|own| Turn { micro_batch: Some(own), exchanged: None }).collect();
        if width > 1 {
            if turns.is_empty() {
                turns.push(Turn::default());
            }
            if let Some(turn) = turns.last_mut() {
                turn.exchanged = Some(0..micro_batches);
            }
        }
        turns
    }

    /// Starts a step of `micro_batches` micro-batches, and returns the turns of this process.
    pub fn begin_accumulation(&mut self, micro_batches: usize) -> Result<Vec<Turn>> {
        self.nodes.begin(local_range(self.rank, self.world_size, micro_batches), micro_batches);
        self.shard_nodes.begin(0..micro_batches, micro_batches);
        self.largest = None;
        self.reserve(micro_batches)?;
        Ok(self.turns(micro_batches))
    }

    /// The micro-batches that this process computes in a step of `micro_batches`.
    pub fn local_micro_batches(&self, micro_batches: usize) -> impl Iterator<Item = usize> + use<> {
        self.turns(micro_batches).into_iter().filter_map(|turn| turn.micro_batch)
    }

    /// The process that computes micro-batch `index` of a step of `micro_batches`.
    pub fn rank_of(&self, index: usize, micro_batches: usize) -> usize {
        match self.sharding {
            Sharding::Optimizer => rank_of(index, self.world_size, micro_batches),
            Sharding::Gradients => index % self.world_size,
        }
    }

    /// Whether the gradients of single micro-batches are this process's part of the sum.
    fn sends_each(&self) -> bool {
        let one = self.nodes.share().len() <= 1;
        if self.shard.is_empty() { !self.accumulates } else { one || self.sharding == Sharding::Gradients }
    }

    /// The gradients of one micro-batch, as a backward pass writes them.
    pub fn micro_batch_grads(&self) -> &Parameters {
        &self.grads
    }

    /// Buffers for a pass whose gradients are needed as a whole; `None` if these are.
    pub fn unshared(&self) -> Result<Option<Self>> {
        if self.sharding == Sharding::Optimizer {
            return Ok(None);
        }
        Self::of(self.grads.unshared()?, self.policy, 1, &SingleProcess, Sharding::Optimizer).map(Some)
    }

    /// Begins a turn of a step.
    pub fn begin_turn(&mut self, turn: Turn) {
        let sums_here = turn.micro_batch.is_some() && !self.sends_each();
        self.merge = sums_here.then(|| self.nodes.push(1));
        self.exchange = turn.exchanged.clone().map(|leaves| Arc::new(self.begin_exchange(leaves)));
        self.turn = turn;
    }

    /// Adds the gradients of a unit to the step's sum, and exchanges them, as soon as the backward pass has written
    /// them. A turn calls it for each block, the last one first, and then for the parameters outside the blocks.
    pub fn collect(&self, unit: PrecisionUnit, collector: &mut Collector<'_>) -> crate::Result<()> {
        let Some(members) = self.units.get(&unit) else { return Ok(()) };
        if self.turn.micro_batch.is_some() {
            self.accumulate(members, collector)?;
        }
        let Some(exchange) = &self.exchange else { return Ok(()) };
        match collector.group.gpus() {
            None => self.send(members, exchange, collector),
            Some(gpus) => self.send_between_gpus(members, gpus, exchange, collector),
        }
    }

    /// Ends the turn, whose pass has collected the blocks if there was one.
    pub fn end_turn(&self, collector: &mut Collector<'_>) -> crate::Result<()> {
        let blocks = self.units.keys().rev().filter(|unit| **unit != PrecisionUnit::NonBlock);
        if self.turn.micro_batch.is_none() {
            blocks.copied().try_for_each(|block| self.collect(block, collector))?;
        }
        self.collect(PrecisionUnit::NonBlock, collector)
    }

    /// Waits for the last exchanges of the step.
    pub fn finish(&mut self, collector: &mut Collector<'_>) -> crate::Result<()> {
        while !collector.pending.is_empty() {
            self.add_next_chunk(collector)?;
        }
        self.hidden += collector.thread.as_ref().map_or(Duration::ZERO, |it| it.total.saturating_sub(collector.waited));
        self.largest = collector.largest;
        Ok(())
    }

    /// The time of all exchanges by a thread so far during which this process computed.
    pub fn hidden(&self) -> Duration {
        self.hidden
    }

    fn accumulate(&self, members: &[usize], collector: &mut Collector<'_>) -> Result<()> {
        let kernels = collector.kernels;
        if collector.measure && self.accumulates {
            let policy = candle_dtype(self.policy.grads);
            for grad in members.iter().map(|index| &self.grads[*index]).filter(|grad| grad.dtype() == policy) {
                let stats = kernels.summarize(grad, view::float_format(policy), false)?.stats;
                collector.largest = Some(collector.largest.unwrap_or(0.0).max(stats.max_abs));
            }
        }
        let Some(merge) = self.merge else { return Ok(()) };
        members.iter().try_for_each(|&index| {
            let grad = &self.grads[index];
            if !add_node(merge, kernels, grad, |sum| Ok(Cow::Borrowed(&self.sums[sum][index])))? {
                kernels.copy(grad, &self.sums[merge.at][index])?;
            }
            Ok(())
        })
    }

    /// The step's gradients, times the loss scale; the shard of this process if there are several.
    pub fn total(&self) -> &Parameters {
        self.shard.first().or(self.sums.first()).unwrap_or(&self.grads)
    }

    /// The variance of the elements of each unit's scaled gradient, computed from `stats`.
    pub fn variances(
        &self,
        stats: &GradientStats,
        kernels: &dyn Kernels,
        group: &dyn ProcessGroup,
    ) -> crate::Result<BTreeMap<PrecisionUnit, f64>> {
        let sums = if self.shard.is_empty() {
            self.total().tensors().par_iter().map(|grad| kernels.sum(grad)).collect::<Result<Vec<f64>>>()?
        } else {
            self.reduce_sums(group)?
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
        if self.shard.is_empty() {
            self.local_stats(exponents, stats, kernels)?;
        } else {
            largest = self.reduce_stats(exponents, stats, kernels, group)?;
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
