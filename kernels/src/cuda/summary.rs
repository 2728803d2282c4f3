//! The launches of `summary.cu`, and how its figures become [`TensorStats`].

use super::dispatch::{Attempt, CudaKernels, require};
use super::launch::{KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::op;
use crate::precision::{ExponentHistogram, TensorStats};
use crate::summary::{CHUNK, THREADS, TensorSummary};
use candle_core::{DType, Tensor};

const WARPS: usize = THREADS / 32;
const CHUNK_STATS_BYTES: usize = 32;
/// Counters of a histogram: one for each value of FP32's exponent field.
const BINS: usize = 256;
/// Histograms of a block.
const COPIES: usize = 16;
const STATS_WORDS: usize = 14;

/// Words of a tensor's figures: the statistics, then the histogram.
const WORDS: usize = STATS_WORDS + BINS;
/// Words of a tensor in the table that the kernels read.
const ENTRY_WORDS: usize = 8;

/// Decodes the words that the device has counted, in place, because the update waits for it.
fn decode(words: &[u32; WORDS], exponents: bool, TensorSummary { stats, exponents: histogram }: &mut TensorSummary) {
    let double = |index: usize| u64::from(words[index]) | u64::from(words[index + 1]) << 32;
    let (least, most) = (words[10], words[11]);
    *stats = TensorStats {
        count: double(0),
        zero: double(2),
        subnormal: double(4),
        inf: double(6),
        nan: double(8),
        min_nonzero: (least != u32::MAX).then(|| f32::from_bits(least + 1)),
        max_abs: f32::from_bits(most),
        sum_squares: f64::from_bits(double(12)),
    };
    if exponents {
        histogram.set_binades(&words[STATS_WORDS..]);
        histogram.zero = stats.zero;
        histogram.inf = stats.inf;
        histogram.nan = stats.nan;
    } else {
        *histogram = ExponentHistogram::new();
    }
}

arguments! {
    struct StatsLaunch {
        tensors: u64,
        partial: u64,
        figures: u64,
        first: u64,
        count: u32,
        has_exponents: u32,
    }
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn summarize(&self, op: &mut op::Summarize<'_>) -> Attempt {
        let Some((first, _)) = op.tensors.first() else { return Ok(()) };
        // The tensors of each type, and their chunks, follow each other.
        let mut table = Vec::with_capacity(op.tensors.len() * ENTRY_WORDS);
        let mut groups = Vec::new();
        let mut chunks = 0;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let first_entry = table.len() / ENTRY_WORDS;
            let first_chunk = chunks;
            let of_type = op.tensors.iter().enumerate().filter(|(_, (tensor, _))| tensor.dtype() == dtype);
            for (place, (tensor, format)) in of_type {
                let double = |value: u64| [value as u32, (value >> 32) as u32];
                let len = tensor.elem_count();
                let address = self.address(tensor, dtype, len)?;
                table.extend([address, len as u64, chunks as u64].map(double).as_flattened());
                table.extend([(format.min_normal() as f32).to_bits(), to_u32(place)?]);
                chunks += len.div_ceil(CHUNK);
            }
            groups.push((dtype, first_entry..table.len() / ENTRY_WORDS, first_chunk..chunks));
        }
        let count = op.tensors.len();
        require(table.len() == count * ENTRY_WORDS)?;
        let words = Tensor::zeros(count * WORDS, DType::U32, first.device())?;
        let table = self.table(table, first.device())?;
        let partial = self.queue.scratch(chunks * CHUNK_STATS_BYTES / size_of::<f32>())?;
        let all = StatsLaunch {
            tensors: self.address(&table, DType::U32, count * ENTRY_WORDS)?,
            partial,
            figures: self.address(&words, DType::U32, count * WORDS)?,
            first: 0,
            count: to_u32(count)?,
            has_exponents: u32::from(op.exponents),
        };
        let scratch = WARPS * size_of::<f64>();
        let launch = |kernel: String, blocks: usize, shared_bytes: usize, arguments: StatsLaunch| -> Attempt {
            let launch = KernelLaunch::new("summary", kernel, [blocks, 1, 1], [THREADS, shared_bytes])?;
            // SAFETY: every tensor is as large as the table says, and the other buffers were found large enough.
            Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
        };
        for (dtype, tensors, chunks) in groups {
            let arguments = StatsLaunch {
                tensors: all.tensors + (tensors.start * ENTRY_WORDS * size_of::<u32>()) as u64,
                first: chunks.start as u64,
                count: to_u32(tensors.len())?,
                ..all
            };
            let shared_bytes = COPIES * BINS * size_of::<u32>() + scratch;
            launch(kernel_symbol("summarize_chunks", &[dtype])?, chunks.len(), shared_bytes, arguments)?;
        }
        launch("summarize_tensors".to_owned(), count, scratch, all)?;
        // One copy, because the host waits for each.
        let counted: Vec<u32> = words.to_vec1()?;
        for (out, words) in op.out.iter_mut().zip(counted.as_chunks().0) {
            decode(words, op.exponents, out);
        }
        Ok(())
    }
}
