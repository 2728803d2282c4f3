//! The launches of `summary.cu`, and how its figures become [`TensorStats`].

use super::launch::{self, DeviceSlice, KernelLaunch, Queue, kernel_symbol, to_u32};
use crate::precision::{ExponentHistogram, FloatFormat, TensorStats};
use crate::summary::TensorSummary;
use candle_core::{DType, Result, bail};
use std::ops::Range;

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Elements of a chunk.
const CHUNK: usize = 1 << 14;
/// Bytes of a chunk's figures.
const CHUNK_STATS_BYTES: usize = 32;
/// Counters of a histogram: one for each value of FP32's exponent field.
const BINS: usize = 256;
/// Words of a tensor's statistics.
const STATS_WORDS: usize = 14;

/// Words of a tensor's figures: the statistics, then the histogram.
pub(crate) const WORDS: usize = STATS_WORDS + BINS;

/// Decodes the words that the device has counted.
pub(crate) fn decode(words: &[u32; WORDS], exponents: bool) -> TensorSummary {
    let double = |index: usize| u64::from(words[index]) | u64::from(words[index + 1]) << 32;
    let (least, most) = (words[10], words[11]);
    let stats = TensorStats {
        count: double(0),
        zero: double(2),
        subnormal: double(4),
        inf: double(6),
        nan: double(8),
        min_nonzero: (least != u32::MAX).then(|| f32::from_bits(least + 1)),
        max_abs: f32::from_bits(most),
        sum_squares: f64::from_bits(double(12)),
    };
    let mut histogram = ExponentHistogram::new();
    if exponents {
        for (field, &count) in words[STATS_WORDS..].iter().enumerate().filter(|(_, count)| **count > 0) {
            histogram.add(field as i32 + ExponentHistogram::LOWEST, u64::from(count));
        }
        (histogram.zero, histogram.inf, histogram.nan) = (stats.zero, stats.inf, stats.nan);
    }
    TensorSummary { stats, exponents: histogram }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    tensors: u64,
    partial: u64,
    figures: u64,
    first: u64,
    count: u32,
    has_exponents: u32,
}
// SAFETY: mirrors `StatsLaunch`.
unsafe impl launch::Arguments for Arguments {}

/// Words of a tensor in the table that the kernels read.
const ENTRY_WORDS: usize = 8;

/// Tensors of one type.
struct DtypeGroup {
    dtype: DType,
    tensors: Range<usize>,
    chunks: Range<usize>,
}

/// The launch that summarizes several tensors.
pub(crate) struct StatsLaunch {
    table: Vec<u32>,
    groups: Vec<DtypeGroup>,
}

impl StatsLaunch {
    /// Summarizes these tensors; of each, a value counts as subnormal below the smallest normal one of its format.
    pub(crate) fn new(tensors: &[(DeviceSlice, FloatFormat)]) -> Result<Self> {
        let mut summary = Self { table: Vec::with_capacity(tensors.len() * ENTRY_WORDS), groups: Vec::new() };
        let (mut count, mut chunks) = (0, 0);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (first_tensor, first_chunk) = (count, chunks);
            let of_type = tensors.iter().enumerate().filter(|(_, (tensor, _))| tensor.dtype == dtype);
            for (place, (tensor, format)) in of_type {
                let double = |value: u64| [value as u32, (value >> 32) as u32];
                let address = tensor.of("tensor", tensor.len)?;
                summary.table.extend([address, tensor.len as u64, chunks as u64].map(double).as_flattened());
                summary.table.extend([(format.min_normal() as f32).to_bits(), to_u32(place)?]);
                count += 1;
                chunks += tensor.len.div_ceil(CHUNK);
            }
            summary.groups.push(DtypeGroup { dtype, tensors: first_tensor..count, chunks: first_chunk..chunks });
        }
        if count < tensors.len() {
            bail!("no CUDA kernel for statistics of these types");
        }
        Ok(summary)
    }

    /// The table that [`StatsLaunch::run`] needs in the device's memory.
    pub(crate) fn table(&self) -> &[u32] {
        &self.table
    }

    /// Counts into `figures`, [`WORDS`] zero words per tensor.
    pub(crate) fn run(
        &self,
        queue: &impl Queue,
        table: DeviceSlice,
        exponents: bool,
        figures: DeviceSlice,
    ) -> Result<()> {
        let (count, chunks) = (self.table.len() / ENTRY_WORDS, self.groups.last().map_or(0, |last| last.chunks.end));
        let (partial, _owner) = queue.scratch(chunks * CHUNK_STATS_BYTES / size_of::<f32>())?;
        let table = table.expect("table", DType::U32, self.table.len())?;
        let of = |tensors: &Range<usize>, first: usize| {
            Ok::<_, candle_core::Error>(Arguments {
                tensors: table + (tensors.start * ENTRY_WORDS * size_of::<u32>()) as u64,
                partial: partial.address,
                figures: figures.expect("figures", DType::U32, count * WORDS)?,
                first: first as u64,
                count: to_u32(tensors.len())?,
                has_exponents: u32::from(exponents),
            })
        };
        let scratch = WARPS * size_of::<f64>() as u32;
        let launch = |kernel: String, blocks: usize, shared_bytes: u32| {
            Ok::<_, candle_core::Error>(KernelLaunch {
                module: "summary",
                kernel,
                grid: [to_u32(blocks)?, 1, 1],
                threads: THREADS,
                shared_bytes,
            })
        };
        let mut launches = Vec::with_capacity(self.groups.len() + 1);
        for DtypeGroup { dtype, tensors, chunks } in &self.groups {
            let shared = WARPS * (BINS * size_of::<u32>()) as u32 + scratch;
            let by_chunk = launch(kernel_symbol("summarize_chunks", &[*dtype])?, chunks.len(), shared)?;
            launches.push((by_chunk, of(tensors, chunks.start)?));
        }
        launches.push((launch("summarize_tensors".to_owned(), count, scratch)?, of(&(0..count), 0)?));
        // SAFETY: every tensor was found as large as the table says, and the other buffers as large as needed.
        launches.iter().try_for_each(|(launch, arguments)| unsafe { queue.launch(launch, arguments) })
    }
}
