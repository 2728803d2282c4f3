//! The launches of `survey.cu`, and how its figures become [`TensorStats`].

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use crate::engine::kernels::survey::TensorSurvey;
use crate::precision::{ExponentHistogram, FloatFormat, TensorStats};
use candle_core::{DType, Result};

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Elements of a chunk.
const CHUNK: usize = 1 << 14;
/// Bytes of a chunk's figures.
const CHUNK_STATS_BYTES: usize = 32;
/// Counters of a histogram: one for each value of FP32's exponent field.
const BINS: usize = 256;
/// Words of a tensor's figures, and of nothing behind them, so that what follows is aligned.
const STATS_WORDS: usize = 16;

/// Words that a survey's figures take: the tensor's, then the histogram's.
pub(crate) const WORDS: usize = STATS_WORDS + BINS;

/// What the device has counted, from the words it left.
pub(crate) fn decode(words: &[u32; WORDS], exponents: bool) -> TensorSurvey {
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
    TensorSurvey { stats, exponents: histogram }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SurveyChunks {
    data: u64,
    partial: u64,
    exponents: u64,
    len: u64,
    min_normal: u32,
    unused: u32,
}
// SAFETY: mirrors `SurveyChunks`.
unsafe impl Arguments for SurveyChunks {}

#[repr(C)]
#[derive(Clone, Copy)]
struct SurveyTensor {
    partial: u64,
    stats: u64,
    len: u64,
}
// SAFETY: mirrors `SurveyTensor`.
unsafe impl Arguments for SurveyTensor {}

/// Surveys `tensor` into `figures`, [`WORDS`] words that are zero. A value counts as subnormal below the smallest normal one
/// of `format`.
pub(crate) fn survey(
    queue: &impl Queue,
    tensor: Buffer,
    format: FloatFormat,
    exponents: bool,
    figures: Buffer,
) -> Result<()> {
    let len = tensor.len;
    let (partial, _owner) = queue.scratch(len.div_ceil(CHUNK) * CHUNK_STATS_BYTES / size_of::<f32>())?;
    let stats = figures.expect("figures", DType::U32, WORDS)?;
    let parts = SurveyChunks {
        data: tensor.of("tensor", len)?,
        partial: partial.address,
        exponents: if exponents { stats + (STATS_WORDS * size_of::<u32>()) as u64 } else { 0 },
        len: len as u64,
        min_normal: (format.min_normal() as f32).to_bits(),
        unused: 0,
    };
    let whole = SurveyTensor { partial: partial.address, stats, len: len as u64 };
    let scratch = WARPS * size_of::<f64>() as u32;
    let by_chunk = Launch {
        module: "survey",
        kernel: entry("survey_chunks", &[tensor.dtype])?,
        grid: [word(len.div_ceil(CHUNK))?, 1, 1],
        threads: THREADS,
        shared_bytes: WARPS * (BINS * size_of::<u32>()) as u32 + scratch,
    };
    let merge = Launch {
        module: "survey",
        kernel: "survey_tensor".to_owned(),
        grid: [1; 3],
        threads: THREADS,
        shared_bytes: scratch,
    };
    // SAFETY: every buffer was found or made large enough.
    unsafe {
        queue.launch(&by_chunk, &parts)?;
        queue.launch(&merge, &whole)
    }
}
