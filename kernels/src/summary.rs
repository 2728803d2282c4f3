//! Statistics of a gradient before anything rescales it: whether it is finite, its magnitude, and what its type lost.

use crate::isa;
use crate::machine::spin::join;
use crate::op;
use crate::precision::{ExponentHistogram, FloatFormat, TensorStats};
use crate::view::{View, read, to_host, with_elements};
use candle_core::{Result, Tensor};
use rayon::prelude::*;

/// A tensor's statistics and its histogram of exponents.
#[derive(Clone, Debug, Default)]
pub struct TensorSummary {
    /// Counts, extremes and sum of squares.
    pub stats: TensorStats,
    /// Counts by binade; empty if none were requested.
    pub exponents: ExponentHistogram,
}

impl TensorSummary {
    /// Adds another part's figures.
    pub fn merge(&mut self, other: &Self) {
        self.stats.merge(&other.stats);
        self.exponents.merge(&other.exponents);
    }
}

/// Computes [`op::Summarize`] on all threads, each tensor by `summarize`.
pub(super) fn side_by_side(
    op: &mut op::Summarize<'_>,
    summarize: impl Fn(&Tensor, FloatFormat, bool) -> Result<TensorSummary> + Sync,
) -> Result<()> {
    op.out.par_iter_mut().zip(op.tensors).try_for_each(|(out, (tensor, format))| {
        *out = summarize(tensor, *format, op.exponents)?;
        Ok(())
    })
}

/// Elements of a task. The tree in which parts are merged, and so the sums' bits, depend only on this.
pub const TASK_ELEMENTS: usize = 1 << 16;

/// Summarizes `tensor` on the host; a value counts as subnormal below the smallest normal value of `format`.
pub fn summarize(tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<TensorSummary> {
    let tensor = to_host(tensor)?;
    Ok(by_parts(read(&tensor)?.view(), format, exponents))
}

/// The sum of a tensor's values, in f64. Adds its `block_sums` in their order.
pub fn sum(tensor: &Tensor) -> Result<f64> {
    Ok(block_sums(tensor)?.into_iter().sum())
}

/// The sum of each part's values, in f64 in the order of its elements.
pub fn block_sums(tensor: &Tensor) -> Result<Vec<f64>> {
    const WIDTH: usize = 1024;
    let tensor = read(tensor)?;
    let view = tensor.view();
    let part = |start: usize| {
        let mut values = [0.0; WIDTH];
        let mut sum = 0.0;
        let end = view.len().min(start + TASK_ELEMENTS);
        for start in (start..end).step_by(WIDTH) {
            let values = &mut values[..WIDTH.min(end - start)];
            view.load(start, values);
            sum += values.iter().map(|x| f64::from(*x)).sum::<f64>();
        }
        sum
    };
    Ok((0..view.len()).step_by(TASK_ELEMENTS).map(part).collect())
}

/// Summarizes part after part of `tensor`, the whole of a parameter or parts of it from [`TASK_ELEMENTS`] to
/// [`TASK_ELEMENTS`].
pub fn parts(tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<Vec<TensorSummary>> {
    let tensor = read(tensor)?;
    let view = tensor.view();
    let count = view.len().div_ceil(TASK_ELEMENTS);
    let part =
        |i: usize| by_parts(view.slice(i * TASK_ELEMENTS..view.len().min((i + 1) * TASK_ELEMENTS)), format, exponents);
    Ok((0..count).into_par_iter().map(part).collect())
}

/// Merges the statistics of the `parts` of a tensor of `len` elements, as [`summarize`] does.
pub fn merge_parts(len: usize, parts: &mut impl Iterator<Item = TensorStats>) -> TensorStats {
    if len <= TASK_ELEMENTS {
        return parts.next().unwrap_or_default();
    }
    let cut = (len / 2).next_multiple_of(TASK_ELEMENTS);
    let mut low = merge_parts(cut, parts);
    low.merge(&merge_parts(len - cut, parts));
    low
}

/// Elements that a block of threads of `summary.cu` summarizes.
pub const CHUNK: usize = 1 << 14;
/// Threads of such a block.
pub(crate) const THREADS: usize = 256;

/// Merges the statistics of a tensor's chunks, one or more, to the bits of `summary.cu`.
pub fn merge_chunks(chunks: impl Iterator<Item = TensorStats>) -> TensorStats {
    const WARP: usize = 32;
    let mut threads = vec![TensorStats::default(); THREADS];
    for (index, chunk) in chunks.enumerate() {
        threads[index % THREADS].merge(&chunk);
    }
    let mut total = TensorStats::default();
    for warp in threads.chunks_mut(WARP) {
        for lanes in [16, 8, 4, 2, 1] {
            let (low, high) = warp.split_at_mut(lanes);
            low.iter_mut().zip(high).for_each(|(low, high)| low.merge(high));
        }
        total.merge(&warp[0]);
    }
    total
}

fn by_parts(view: View<'_>, format: FloatFormat, exponents: bool) -> TensorSummary {
    if view.len() <= TASK_ELEMENTS {
        return isa::vectorize!(leaf(view, format, exponents));
    }
    let cut = (view.len() / 2).next_multiple_of(TASK_ELEMENTS);
    let low = view.slice(0..cut);
    let high = view.slice(cut..view.len());
    let (mut sum, mut rest) = (TensorSummary::default(), TensorSummary::default());
    join(|| sum = by_parts(low, format, exponents), || rest = by_parts(high, format, exponents));
    sum.merge(&rest);
    sum
}

#[inline(always)]
fn leaf(view: View<'_>, format: FloatFormat, exponents: bool) -> TensorSummary {
    let mut summary = TensorSummary::default();
    summary.stats = with_elements!(view, View, x => if exponents {
        TensorStats::with_histogram(x, format, &mut summary.exponents)
    } else {
        TensorStats::of(x, format)
    });
    summary
}
