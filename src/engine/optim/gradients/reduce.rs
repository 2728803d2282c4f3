//! The gradients of several processes: each gets its shard of all partial sums, adds them along the tree, and looks at the
//! result; what each has seen is put together in the order that one process has.

use super::{Gradients, Survey};
use crate::Result;
use crate::engine::collective::{Collective, Reader, Shards, Writer, range_bytes};
use crate::engine::kernels::convert::Element;
use crate::engine::kernels::rows::{Rows, for_each_part, with_scratch};
use crate::engine::kernels::survey::{TensorSurvey, merge_parts, part_sums, parts};
use crate::engine::kernels::view;
use crate::engine::model::Parameters;
use crate::engine::optim::tree::{Nodes, cut, share};
use crate::precision::{ExponentHistogram, TensorStats};
use candle_core::{DType, Tensor};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

/// Elements of a shard that are exchanged at a time: what bounds the memory of it.
pub(crate) const CHUNK: usize = 1 << 20;
/// Elements that are summed at a time.
const WIDTH: usize = 1024;

/// One step of summing along the tree, on a stack.
#[derive(Clone, Copy, Debug)]
enum Op {
    Load(usize),
    Add,
}

/// How the sums of `nodes`, left to right, become that of the tree over `of` micro-batches; and the depth of the stack.
fn program(nodes: &[Range<usize>], of: usize) -> (Vec<Op>, usize) {
    fn descend(node: Range<usize>, nodes: &[Range<usize>], ops: &mut Vec<Op>, depth: usize) -> usize {
        if let Ok(index) = nodes.binary_search_by_key(&(node.start, node.end), |node| (node.start, node.end)) {
            ops.push(Op::Load(index));
            return depth + 1;
        }
        let cut = cut(&node);
        let left = descend(node.start..cut, nodes, ops, depth);
        let right = descend(cut..node.end, nodes, ops, depth + 1);
        ops.push(Op::Add);
        left.max(right)
    }
    let mut ops = Vec::new();
    let depth = descend(0..of, nodes, &mut ops, 0);
    (ops, depth)
}

/// Elements of one node as they came.
#[derive(Clone, Copy)]
struct Source<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

impl Source<'_> {
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
        let mut copy = [0u16; WIDTH];
        let copy = &mut copy[..out.len()];
        bytemuck::cast_slice_mut(copy).copy_from_slice(bytes);
        if self.dtype == DType::F16 {
            f16::load(copy.reinterpret_cast(), out);
        } else {
            <bf16 as Element>::load(copy.reinterpret_cast(), out);
        }
    }
}

/// Writes the sum of `sources` along `ops` over the elements of `out` from `first` on.
fn sum(out: &Tensor, first: usize, len: usize, sources: &[Source<'_>], (ops, depth): &(Vec<Op>, usize)) -> Result<()> {
    Ok(view::write(out, |out| {
        let (_, out) = out.split_at(first);
        let (out, _) = out.split_at(len);
        for_each_part(
            Rows { view: out, width: 1 },
            len,
            16 * WIDTH,
            #[inline(always)]
            |first, len, mut out| {
                for start in (0..len).step_by(WIDTH) {
                    let width = WIDTH.min(len - start);
                    with_scratch(depth * WIDTH, |stack| {
                        let mut top = 0;
                        for op in ops {
                            match op {
                                Op::Load(index) => {
                                    sources[*index].load(first + start, &mut stack[top..top + width]);
                                    top += WIDTH;
                                }
                                Op::Add => {
                                    top -= WIDTH;
                                    let (left, right) = stack.split_at_mut(top);
                                    for (left, right) in left[top - WIDTH..].iter_mut().zip(&right[..width]) {
                                        *left += right;
                                    }
                                }
                            }
                        }
                        out.view.store(start, &stack[..width]);
                    });
                }
            },
        );
    })?)
}

impl Gradients {
    /// Sums the gradients of all processes into the shard of this one. A process alone has nothing to do.
    pub fn reduce(&mut self, world: &dyn Collective) -> Result<()> {
        let Some((rank, total)) = &self.shard else { return Ok(()) };
        let (rank, count, of) = (*rank, world.world(), self.nodes.of());
        let Some(shards) = total.shards().cloned() else { return Ok(()) };
        let nodes: Vec<Vec<Range<usize>>> =
            (0..count).map(|other| Nodes::of_share(share(other, count, of), of)).collect();
        let program = program(&nodes.concat(), of);
        let own: Vec<&Parameters> =
            (0..nodes[rank].len()).map(|node| if self.is_leaf() { &self.grads } else { &self.sums[node] }).collect();
        // A share of one micro-batch is sent as the backward pass wrote it.
        let dtype = |from: usize, parameter: usize| match share(from, count, of).len() {
            1 => self.grads[parameter].dtype(),
            _ => DType::F32,
        };
        let longest = (0..count).map(|owner| shards.len(owner)).max().unwrap_or(0);
        for start in (0..longest).step_by(CHUNK) {
            let span = start..start + CHUNK;
            let out = (0..count).into_par_iter().map(|owner| {
                let mut bytes = Vec::new();
                for node in &own {
                    for (parameter, range) in shards.pieces(owner, span.clone()) {
                        range_bytes(&node[parameter], range, &mut bytes)?;
                    }
                }
                Ok(bytes)
            });
            let mut out = out.collect::<Result<Vec<_>>>()?;
            let here = std::mem::take(&mut out[rank]);
            let mine = shards.pieces(rank, span);
            let length = |from: usize| {
                let bytes = mine.iter().map(|(parameter, range)| range.len() * dtype(from, *parameter).size_in_bytes());
                nodes[from].len() * bytes.sum::<usize>()
            };
            let mut received: Vec<Vec<u8>> =
                (0..count).map(|from| vec![0; if from == rank { 0 } else { length(from) }]).collect();
            let slices: Vec<&[u8]> = out.iter().map(Vec::as_slice).collect();
            world.exchange(&slices, &mut received.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
            received[rank] = here;
            let mut at: Vec<usize> = vec![0; count];
            for (parameter, range) in &mine {
                let mut sources = Vec::new();
                for from in 0..count {
                    let dtype = dtype(from, *parameter);
                    let node_bytes = received[from].len() / nodes[from].len().max(1);
                    let size = range.len() * dtype.size_in_bytes();
                    for node in 0..nodes[from].len() {
                        let start = node * node_bytes + at[from];
                        sources.push(Source { bytes: &received[from][start..start + size], dtype });
                    }
                    at[from] += size;
                }
                let first = range.start - shards.of(rank, *parameter).start;
                sum(&total[*parameter], first, range.len(), &sources, &program)?;
            }
        }
        Ok(())
    }

    /// The statistics of whole parameters, of which every process has looked at its shard; and the largest magnitude that any
    /// has measured.
    pub(super) fn survey_together(
        &self,
        exponents: bool,
        survey: &mut Survey,
        world: &dyn Collective,
    ) -> Result<Option<f32>> {
        let (total, layout) = (self.total(), self.grads.layout());
        let mut own = Writer::default();
        own.f64(self.largest.map_or(-1.0, f64::from));
        for (tensor, grad) in total.tensors().iter().zip(self.grads.tensors()) {
            let parts = parts(tensor, view::float_format(grad.dtype()), exponents)?;
            let mut histogram = ExponentHistogram::default();
            for part in &parts {
                write_stats(&mut own, &part.stats);
                histogram.merge(&part.exponents);
            }
            if exponents && !parts.is_empty() {
                own.bytes(&serde_json::to_vec(&histogram).map_err(candle_core::Error::wrap)?);
            }
        }
        let all = world.all_gather(&own.0)?;
        let mut readers: Vec<Reader<'_>> = all.iter().map(|bytes| Reader(bytes)).collect();
        let largest = readers.iter_mut().map(Reader::f64).collect::<Result<Vec<_>>>()?;
        let largest = largest.into_iter().fold(-1.0, f64::max) as f32;
        let Some(shards) = total.shards() else { return Ok(None) };
        survey.tensors.clear();
        for index in 0..layout.len() {
            let (mut parts, mut histogram) = (Vec::new(), ExponentHistogram::default());
            for (rank, reader) in readers.iter_mut().enumerate() {
                let blocks = blocks(shards, rank, index);
                for _ in 0..blocks {
                    parts.push(read_stats(reader)?);
                }
                if exponents && blocks > 0 {
                    let theirs: ExponentHistogram =
                        serde_json::from_slice(reader.bytes()?).map_err(candle_core::Error::wrap)?;
                    histogram.merge(&theirs);
                }
            }
            let stats = merge_parts(self.grads[index].elem_count(), &mut parts.into_iter());
            survey.tensors.push(TensorSurvey { stats, exponents: histogram });
        }
        Ok((largest >= 0.0).then_some(largest))
    }

    /// The sum of each parameter's gradient, in the order that one process has.
    pub(super) fn shared_sums(&self, world: &dyn Collective) -> Result<Vec<f64>> {
        let total = self.total();
        let own = total.tensors().iter().map(part_sums).collect::<candle_core::Result<Vec<_>>>()?.concat();
        let bytes: Vec<u8> = own.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let all = world.all_gather(&bytes)?;
        let mut all: Vec<_> = all.iter().map(|bytes| bytes.as_chunks::<8>().0.iter()).collect();
        let Some(shards) = total.shards() else { return Ok(own) };
        let mut sum_of = |index: usize| {
            let parts = all.iter_mut().enumerate();
            let parts = parts.flat_map(|(rank, sums)| sums.by_ref().take(blocks(shards, rank, index)));
            parts.map(|bytes| f64::from_ne_bytes(*bytes)).sum()
        };
        Ok((0..total.len()).map(&mut sum_of).collect())
    }
}

/// Blocks of a parameter that a process looks at.
fn blocks(shards: &Shards, rank: usize, parameter: usize) -> usize {
    shards.of(rank, parameter).len().div_ceil(crate::engine::kernels::survey::PART)
}

fn write_stats(out: &mut Writer, stats: &TensorStats) {
    for count in [stats.count, stats.zero, stats.subnormal, stats.inf, stats.nan] {
        out.u64(count);
    }
    let pair = [stats.min_nonzero.unwrap_or(0.0), stats.max_abs].map(|x| u64::from(x.to_bits()));
    out.u64(pair[0] << 32 | pair[1]);
    out.f64(stats.sum_squares);
}

fn read_stats(from: &mut Reader<'_>) -> Result<TensorStats> {
    let [count, zero, subnormal, inf, nan] = [from.u64()?, from.u64()?, from.u64()?, from.u64()?, from.u64()?];
    let pair = from.u64()?;
    let (min, max_abs) = (f32::from_bits((pair >> 32) as u32), f32::from_bits(pair as u32));
    let min_nonzero = (min > 0.0).then_some(min);
    Ok(TensorStats { count, zero, subnormal, inf, nan, min_nonzero, max_abs, sum_squares: from.f64()? })
}
