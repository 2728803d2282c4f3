//! Reduces the gradients of several processes: each process receives its shard of all partial sums, adds them along the
//! tree, and computes statistics of the result. The statistics are merged in the order of a single process.

use super::{Collector, GradientStats, Gradients, Sharding, add_node};
use crate::engine::collective::shards::CHUNK_ELEMENTS;
use crate::engine::collective::{ProcessGroup, Shards, TensorExchange, range_bytes};
use crate::engine::kernels::convert::Element;
use crate::engine::kernels::rows::{Rows, for_each_part, with_scratch};
use crate::engine::kernels::summary::{
    CHUNK, TASK_ELEMENTS, TensorSummary, block_sums, merge_chunks, merge_parts, parts,
};
use crate::engine::kernels::{Fused, Kernels, op, view};
use crate::engine::model::Parameters;
use crate::engine::optim::tree::{Merge, ReductionTree, local_range, split};
use crate::precision::{ExponentHistogram, TensorStats};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Number of elements of a shard that GPUs exchange at a time.
const GPU_CHUNK_ELEMENTS: usize = 1 << 22;
/// Chunks that may be exchanged at a time, which bounds the memory of their bytes.
const MAX_PENDING: usize = 2;
/// Elements that are summed at a time.
const TILE_ELEMENTS: usize = 1024;

/// One step of summing along the tree, on a stack.
#[derive(Clone, Copy, Debug)]
enum ReduceOp {
    Load(usize),
    Add,
}

/// The steps of a sum.
#[derive(Debug)]
struct ReductionPlan {
    ops: Vec<ReduceOp>,
    /// The depth of their stack.
    depth: usize,
}

/// How the sums of `nodes`, left to right, become that of node `of` of the tree.
fn reduction_plan(nodes: &[Range<usize>], of: Range<usize>) -> ReductionPlan {
    fn descend(node: Range<usize>, nodes: &[Range<usize>], ops: &mut Vec<ReduceOp>, depth: usize) -> usize {
        if let Ok(index) = nodes.binary_search_by_key(&(node.start, node.end), |node| (node.start, node.end)) {
            ops.push(ReduceOp::Load(index));
            return depth + 1;
        }
        let cut = split(&node);
        let left = descend(node.start..cut, nodes, ops, depth);
        let right = descend(cut..node.end, nodes, ops, depth + 1);
        ops.push(ReduceOp::Add);
        left.max(right)
    }
    let mut ops = Vec::new();
    let depth = descend(of, nodes, &mut ops, 0);
    ReductionPlan { ops, depth }
}

#[derive(Debug)]
pub(super) struct Exchange {
    /// The nodes that each process sends.
    nodes: Vec<Vec<Range<usize>>>,
    /// How they become nodes of the shard, and the places of these.
    sums: Vec<(ReductionPlan, Merge)>,
}

/// Elements of a shard, by parameter.
type Pieces = Vec<(usize, Range<usize>)>;

/// A part of an exchange that has not been added to the sums yet.
#[derive(Debug)]
pub(super) struct PendingChunk {
    exchange: Arc<Exchange>,
    /// The elements that this process receives, by parameter.
    pieces: Pieces,
    data: ChunkData,
}

#[derive(Debug)]
enum ChunkData {
    /// The bytes of this process itself.
    Bytes(Vec<u8>),
    /// The nodes of all processes, by piece, on a GPU.
    Tensors(Vec<Vec<Tensor>>),
}

/// Elements of one node as they came.
#[derive(Clone, Copy)]
struct NodeChunk<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

impl NodeChunk<'_> {
    #[inline]
    fn load(&self, start: usize, out: &mut [f32]) {
        let size = self.dtype.size_in_bytes();
        let bytes = &self.bytes[start * size..(start + out.len()) * size];
        // Pieces of several types may leave one at an odd address.
        if self.dtype == DType::F32 {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_ne_bytes(*bytes);
            }
            return;
        }
        let mut copy = [0u16; TILE_ELEMENTS];
        let copy = &mut copy[..out.len()];
        bytemuck::cast_slice_mut(copy).copy_from_slice(bytes);
        if self.dtype == DType::F16 {
            f16::load(copy.reinterpret_cast(), out);
        } else {
            <bf16 as Element>::load(copy.reinterpret_cast(), out);
        }
    }
}

/// Sums `width` elements of `sources`, starting at `first`, along `ops` into the start of `stack`.
#[expect(clippy::inline_always, reason = "the loop only vectorizes for the caller if it is inlined")]
#[inline(always)]
fn sum_tile(stack: &mut [f32], sources: &[NodeChunk<'_>], ops: &[ReduceOp], first: usize, width: usize) {
    let mut top = 0;
    for op in ops {
        match op {
            ReduceOp::Load(index) => {
                sources[*index].load(first, &mut stack[top..top + width]);
                top += TILE_ELEMENTS;
            }
            ReduceOp::Add => {
                top -= TILE_ELEMENTS;
                let (left, right) = stack.split_at_mut(top);
                for (left, right) in left[top - TILE_ELEMENTS..].iter_mut().zip(&right[..width]) {
                    *left += right;
                }
            }
        }
    }
}

/// Writes the sum of `sources` along `ops` into `out`.
fn sum(out: &Tensor, sources: &[NodeChunk<'_>], plan: &ReductionPlan) -> Result<()> {
    let len = out.elem_count();
    Ok(view::write(out, |out| {
        for_each_part(
            Rows { view: out, width: 1 },
            len,
            16 * TILE_ELEMENTS,
            #[inline(always)]
            |first, len, mut out| {
                for start in (0..len).step_by(TILE_ELEMENTS) {
                    let width = TILE_ELEMENTS.min(len - start);
                    with_scratch(plan.depth * TILE_ELEMENTS, |stack| {
                        sum_tile(stack, sources, &plan.ops, first + start, width);
                        out.view.store(start, &stack[..width]);
                    });
                }
            },
        );
    })?)
}

fn sum_with(kernels: &dyn Kernels, sources: &[Tensor], plan: &ReductionPlan, out: &Tensor) -> Result<()> {
    let mut stack: Vec<(Tensor, bool)> = Vec::new();
    for op in &plan.ops {
        if let ReduceOp::Load(index) = op {
            stack.push((sources[*index].clone(), false));
        } else if let (Some((right, _)), Some((left, is_sum))) = (stack.pop(), stack.pop()) {
            let sum = if is_sum {
                left
            } else {
                let sum = if stack.is_empty() { out.clone() } else { out.zeros_like()? };
                kernels.copy(&left, &sum)?;
                sum
            };
            op::Accumulate { x: &right, inner: &[], out: &sum }.run(kernels)?;
            stack.push((sum, true));
        }
    }
    match stack.pop() {
        Some((single, false)) => Ok(kernels.copy(&single, out)?),
        _ => Ok(()),
    }
}

impl Gradients {
    /// Begins an exchange of the sums of micro-batches `leaves`.
    pub(super) fn begin_exchange(&mut self, leaves: Range<usize>) -> Exchange {
        let count = self.world_size;
        let of = self.nodes.leaves;
        let sent = |rank: usize| match self.sharding {
            Sharding::Optimizer => ReductionTree::nodes_of_range(local_range(rank, count, of), of),
            Sharding::Gradients => leaves.clone().skip(rank).take(1).map(|leaf| leaf..leaf + 1).collect(),
        };
        let nodes: Vec<Vec<_>> = (0..count).map(sent).collect();
        let all = nodes.concat();
        let sums = ReductionTree::nodes_of_range(leaves, of).into_iter();
        let sums = sums.map(|node| (reduction_plan(&all, node.clone()), self.shard_nodes.push(node.len()))).collect();
        Exchange { nodes, sums }
    }

    /// The type in which process `from` sends a gradient: one of a single micro-batch as the backward pass wrote it.
    fn sent_dtype(&self, from: usize, parameter: usize) -> DType {
        let share = local_range(from, self.world_size, self.nodes.leaves);
        let is_single = share.len() == 1 || self.sharding == Sharding::Gradients;
        if is_single { self.grads[parameter].dtype() } else { DType::F32 }
    }

    /// This process's part of each of its nodes in an exchange.
    fn own_nodes(&self, exchange: &Exchange) -> Vec<&Parameters> {
        let nodes = 0..exchange.nodes[self.rank].len();
        nodes.map(|node| if self.sends_each() { &self.grads } else { &self.sums[node] }).collect()
    }

    /// The parts of each process's shard of `members` that are exchanged at a time, by round and process.
    fn rounds(&self, members: &[usize], elements: usize) -> Vec<Vec<Pieces>> {
        let Some(shards) = self.total().shards() else { return Vec::new() };
        let of = |owner| shards.rounds(owner, members.iter().copied(), elements).into_iter();
        let mut owners: Vec<_> = (0..self.world_size).map(of).collect();
        let count = owners.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let mut next = || owners.iter_mut().map(|rounds| rounds.next().unwrap_or_default()).collect();
        (0..count).map(|_| next()).collect()
    }

    /// Sends each process its shard of the gradients of `members`, and adds chunks that it has received to the sums.
    pub(super) fn send(
        &self,
        members: &[usize],
        exchange: &Arc<Exchange>,
        collector: &mut Collector<'_>,
    ) -> Result<()> {
        let own = self.own_nodes(exchange);
        for mut pieces in self.rounds(members, CHUNK_ELEMENTS) {
            let out = pieces.par_iter().map(|pieces| {
                let mut bytes = Vec::new();
                for node in &own {
                    for (parameter, range) in pieces {
                        range_bytes(&node[*parameter], range.clone(), &mut bytes)?;
                    }
                }
                Ok(bytes)
            });
            let mut out = out.collect::<Result<Vec<_>>>()?;
            let own = std::mem::take(&mut out[self.rank]);
            let pieces = pieces.swap_remove(self.rank);
            let length = |from: usize| {
                let size = |parameter: &usize| self.sent_dtype(from, *parameter).size_in_bytes();
                let bytes = pieces.iter().map(|(parameter, range)| range.len() * size(parameter));
                if from == self.rank { 0 } else { exchange.nodes[from].len() * bytes.sum::<usize>() }
            };
            let into = (0..self.world_size).map(|from| vec![0; length(from)]).collect();
            self.limit_pending(collector)?;
            if let Some(thread) = &collector.thread {
                thread.start(out, into)?;
                let exchange = exchange.clone();
                let data = ChunkData::Bytes(own);
                collector.pending.push_back(PendingChunk { exchange, pieces, data });
            }
        }
        Ok(())
    }

    /// Waits until another exchange may start.
    fn limit_pending(&self, collector: &mut Collector<'_>) -> Result<()> {
        while collector.pending.len() >= MAX_PENDING {
            self.add_next_chunk(collector)?;
        }
        Ok(())
    }

    /// Waits for the oldest chunk that is being exchanged, and adds it to the sums of this process's shard.
    pub(super) fn add_next_chunk(&self, collector: &mut Collector<'_>) -> Result<()> {
        let Some(PendingChunk { exchange, pieces, data }) = collector.pending.pop_front() else { return Ok(()) };
        match (data, collector.group.gpus(), &mut collector.thread) {
            (ChunkData::Tensors(nodes), Some(gpus), _) => {
                collector.waited += gpus.wait()?;
                let kernels = collector.kernels;
                pieces.iter().zip(&nodes).try_for_each(|((parameter, range), nodes)| {
                    self.add_sums(&exchange, *parameter, range, kernels, |plan, out| {
                        sum_with(kernels, nodes, plan, out)
                    })
                })
            }
            (ChunkData::Bytes(own), _, Some(thread)) => {
                let clock = Instant::now();
                let mut received = thread.wait()?;
                collector.waited += clock.elapsed();
                received[self.rank] = own;
                self.add_bytes(&exchange, &pieces, &received)
            }
            _ => Ok(()),
        }
    }

    /// Adds the bytes from all processes to the sums.
    fn add_bytes(&self, exchange: &Exchange, pieces: &[(usize, Range<usize>)], received: &[Vec<u8>]) -> Result<()> {
        let mut at: Vec<usize> = vec![0; self.world_size];
        for (parameter, range) in pieces {
            let mut sources = Vec::new();
            for (from, nodes) in exchange.nodes.iter().enumerate() {
                let dtype = self.sent_dtype(from, *parameter);
                let node_bytes = received[from].len() / nodes.len().max(1);
                let size = range.len() * dtype.size_in_bytes();
                for node in 0..nodes.len() {
                    let start = node * node_bytes + at[from];
                    sources.push(NodeChunk { bytes: &received[from][start..start + size], dtype });
                }
                at[from] += size;
            }
            self.add_sums(exchange, *parameter, range, &Fused, |plan, out| sum(out, &sources, plan))?;
        }
        Ok(())
    }

    /// Adds elements `range` of a parameter to the sums of the shard. `sum` writes the sum by a plan.
    fn add_sums(
        &self,
        exchange: &Exchange,
        parameter: usize,
        range: &Range<usize>,
        kernels: &dyn Kernels,
        sum: impl Fn(&ReductionPlan, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let first = range.start - self.total().range(parameter).start;
        let part = |sum: usize| view::range(&self.shard[sum][parameter], first..first + range.len());
        for (plan, merge) in &exchange.sums {
            let mut node = part(merge.at)?;
            if merge.adds {
                node = node.zeros_like()?;
            }
            sum(plan, &node)?;
            add_node(*merge, kernels, &node, |sum| part(sum).map(Cow::Owned))?;
        }
        Ok(())
    }

    /// The parts of `nodes` that are `pieces`, node after node.
    fn parts(&self, nodes: &[&Parameters], pieces: &Pieces) -> candle_core::Result<Vec<Tensor>> {
        let gradients =
            nodes.iter().flat_map(|node| pieces.iter().map(|(parameter, range)| (&node[*parameter], range)));
        let part = |(gradient, range): (&Tensor, &Range<usize>)| {
            let part = view::range(gradient, range.clone())?;
            // The pass writes the gradients of other blocks to this memory before the exchange has ended.
            if self.sharding == Sharding::Gradients { part.force_contiguous() } else { Ok(part) }
        };
        gradients.map(part).collect()
    }

    /// Memory for the parts of `nodes` nodes of process `from` that are `pieces`, node after node.
    fn received_parts(&self, from: usize, nodes: usize, pieces: &Pieces) -> candle_core::Result<Vec<Tensor>> {
        let device = self.total().device();
        let zeros = |(parameter, range): &(usize, Range<usize>)| {
            view::zeros(&[range.len()], self.sent_dtype(from, *parameter), &device)
        };
        (0..nodes).flat_map(|_| pieces.iter().map(zeros)).collect()
    }

    /// [`Self::send`] without host memory.
    pub(super) fn send_between_gpus(
        &self,
        members: &[usize],
        gpus: &dyn TensorExchange,
        exchange: &Arc<Exchange>,
        collector: &mut Collector<'_>,
    ) -> Result<()> {
        let own = self.own_nodes(exchange);
        for mut pieces in self.rounds(members, GPU_CHUNK_ELEMENTS) {
            self.limit_pending(collector)?;
            let (mut out, mut into) = (Vec::new(), Vec::new());
            for (owner, pieces) in pieces.iter().enumerate().filter(|(owner, _)| *owner != self.rank) {
                out.extend(self.parts(&own, pieces)?.into_iter().map(|part| (owner, part)));
            }
            let pieces = pieces.swap_remove(self.rank);
            let mut sources: Vec<Vec<Tensor>> = vec![Vec::new(); pieces.len()];
            for (from, nodes) in exchange.nodes.iter().enumerate() {
                let parts = if from == self.rank {
                    self.parts(&own, &pieces)?
                } else {
                    let parts = self.received_parts(from, nodes.len(), &pieces)?;
                    into.extend(parts.iter().map(|part| (from, part.clone())));
                    parts
                };
                parts.into_iter().enumerate().for_each(|(at, part)| sources[at % pieces.len()].push(part));
            }
            gpus.start(out, into)?;
            let exchange = exchange.clone();
            let data = ChunkData::Tensors(sources);
            collector.pending.push_back(PendingChunk { exchange, pieces, data });
        }
        Ok(())
    }

    /// The statistics of each parameter's blocks in the shard of this process.
    fn block_stats(&self, exponents: bool, shards: &Shards, kernels: &dyn Kernels) -> Result<Vec<Vec<TensorSummary>>> {
        let format = |index: usize| view::float_format(self.grads[index].dtype());
        let tensors = self.total().tensors().iter().enumerate();
        if shards.on_host {
            let parts = tensors.map(|(index, tensor)| parts(tensor, format(index), exponents));
            return Ok(parts.collect::<candle_core::Result<_>>()?);
        }
        let (mut blocks, mut counts) = (Vec::new(), Vec::new());
        for (index, tensor) in tensors {
            let before = blocks.len();
            for start in (0..tensor.elem_count()).step_by(CHUNK) {
                let end = tensor.elem_count().min(start + CHUNK);
                blocks.push((view::range(tensor, start..end)?, format(index)));
            }
            counts.push(blocks.len() - before);
        }
        let mut all = vec![TensorSummary::default(); blocks.len()];
        let blocks: Vec<_> = blocks.iter().map(|(block, format)| (block, *format)).collect();
        op::Summarize { tensors: &blocks, exponents, out: &mut all }.run(kernels)?;
        let mut all = all.into_iter();
        Ok(counts.into_iter().map(|count| all.by_ref().take(count).collect()).collect())
    }

    /// Merges the statistics of all shards into statistics of whole parameters. Returns the largest magnitude that any
    /// process has measured in a micro-batch.
    pub(super) fn reduce_stats(
        &self,
        exponents: bool,
        stats: &mut GradientStats,
        kernels: &dyn Kernels,
        group: &dyn ProcessGroup,
    ) -> Result<Option<f32>> {
        let total = self.total();
        let Some(shards) = total.shards() else { return Ok(None) };
        let (mut words, mut histograms) = (Vec::new(), Vec::new());
        for parts in self.block_stats(exponents, shards, kernels)? {
            let mut histogram = ExponentHistogram::default();
            for part in &parts {
                words.push(to_words(&part.stats));
                histogram.merge(&part.exponents);
            }
            histograms.push(histogram);
        }
        // The last row is the measured magnitude.
        let largest = self.largest.map_or(0, |largest| u64::from(largest.to_bits()));
        words.push([self.largest.is_some().into(), largest, 0, 0, 0, 0, 0]);
        let words = group.all_gather(&words)?;
        let rows = |rank: usize| (0..total.tensors().len()).map(|index| blocks(shards, rank, index)).sum::<usize>() + 1;
        if words.iter().enumerate().any(|(rank, words)| words.len() != rows(rank)) {
            let message =
                "received a different number of statistics than expected; all processes must run the same build";
            return Err(Error::Collective(message.into()));
        }
        let histograms = if exponents { group.all_gather_messages(&histograms)? } else { Vec::new() };
        let mut words: Vec<_> = words.iter().map(|words| words.iter()).collect();
        stats.tensors.clear();
        for index in 0..total.tensors().len() {
            let of_rank = words.iter_mut().enumerate();
            let mut parts = of_rank.flat_map(|(rank, words)| words.take(blocks(shards, rank, index))).map(from_words);
            let merged = if shards.on_host {
                merge_parts(self.grads[index].elem_count(), &mut parts)
            } else {
                merge_chunks(parts)
            };
            let mut exponents = ExponentHistogram::default();
            histograms.iter().filter_map(|histograms| histograms.get(index)).for_each(|other| exponents.merge(other));
            stats.tensors.push(TensorSummary { stats: merged, exponents });
        }
        let largest = words.into_iter().flatten().filter(|[is_known, ..]| *is_known > 0);
        Ok(largest.map(|[_, bits, ..]| f32::from_bits(*bits as u32)).reduce(f32::max))
    }

    /// The sum of each parameter's gradient, in the order of a single process.
    pub(super) fn reduce_sums(&self, group: &dyn ProcessGroup) -> Result<Vec<f64>> {
        let total = self.total();
        let own = total.tensors().iter().map(|tensor| block_sums(&view::to_host(tensor)?));
        let own = own.collect::<candle_core::Result<Vec<_>>>()?.concat();
        let Some(shards) = total.shards() else { return Ok(own) };
        let all = group.all_gather(&own)?;
        let mut all: Vec<_> = all.iter().map(|sums| sums.iter()).collect();
        let mut sum_of = |index: usize| {
            let of_rank = all.iter_mut().enumerate();
            of_rank.flat_map(|(rank, sums)| sums.take(shards.range(rank, index).len().div_ceil(TASK_ELEMENTS))).sum()
        };
        Ok((0..total.tensors().len()).map(&mut sum_of).collect())
    }
}

/// Number of blocks of a parameter in the shard of process `rank`.
fn blocks(shards: &Shards, rank: usize, parameter: usize) -> usize {
    shards.range(rank, parameter).len().div_ceil(if shards.on_host { TASK_ELEMENTS } else { CHUNK })
}

fn to_words(stats: &TensorStats) -> [u64; 7] {
    let TensorStats { count, zero, subnormal, inf, nan, min_nonzero, max_abs, sum_squares } = *stats;
    let extremes = u64::from(min_nonzero.unwrap_or(0.0).to_bits()) << 32 | u64::from(max_abs.to_bits());
    [count, zero, subnormal, inf, nan, extremes, sum_squares.to_bits()]
}

fn from_words(&[count, zero, subnormal, inf, nan, extremes, sum_squares]: &[u64; 7]) -> TensorStats {
    let min = f32::from_bits((extremes >> 32) as u32);
    let max_abs = f32::from_bits(extremes as u32);
    let min_nonzero = (min > 0.0).then_some(min);
    let sum_squares = f64::from_bits(sum_squares);
    TensorStats { count, zero, subnormal, inf, nan, min_nonzero, max_abs, sum_squares }
}
