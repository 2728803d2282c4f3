//! Launches of `survey.cu`, and how its figures become [`TensorStats`].

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use crate::engine::kernels::survey::TensorSurvey;
use crate::precision::{ExponentHistogram, FloatFormat, TensorStats};
use candle_core::{DType, Result, bail};

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Elements of a chunk.
const CHUNK: usize = 1 << 16;
/// Counters of a histogram: one for each value of FP32's exponent field.
pub(crate) const BINS: usize = 256;

/// A chunk of a tensor, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chunk {
    tensor: u32,
    index: u32,
}

/// How tensors of these lengths are cut: one block a chunk.
pub(crate) fn chunks(lens: impl IntoIterator<Item = usize>) -> Vec<Chunk> {
    let cut = |(tensor, len): (usize, usize)| {
        (0..len.div_ceil(CHUNK)).map(move |index| Chunk { tensor: tensor as u32, index: index as u32 })
    };
    lens.into_iter().enumerate().flat_map(cut).collect()
}

/// A tensor as the survey reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SurveyedTensor {
    data: u64,
    len: u64,
    first_chunk: u32,
    chunks: u32,
}

/// The table of the tensors to be surveyed, which are all of one type.
pub(crate) fn tensors(buffers: &[Buffer]) -> Result<Vec<SurveyedTensor>> {
    let mut first = 0;
    buffers
        .iter()
        .map(|buffer| {
            let count = buffer.len.div_ceil(CHUNK);
            let data = buffer.expect("gradient", buffers[0].dtype, buffer.len)?;
            first += count;
            Ok(SurveyedTensor { data, len: buffer.len as u64, first_chunk: word(first - count)?, chunks: word(count)? })
        })
        .collect()
}

/// A part's figures: what `ChunkStats` holds.
pub(crate) const CHUNK_STATS_BYTES: usize = 32;

/// A tensor's figures as the device counts them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RawStats {
    count: u64,
    zero: u64,
    subnormal: u64,
    inf: u64,
    nan: u64,
    least: u32,
    most: u32,
    squares: f64,
}

impl RawStats {
    /// In the words of the log.
    pub(crate) fn stats(&self) -> TensorStats {
        TensorStats {
            count: self.count,
            zero: self.zero,
            subnormal: self.subnormal,
            inf: self.inf,
            nan: self.nan,
            min_nonzero: (self.least != u32::MAX).then(|| f32::from_bits(self.least + 1)),
            max_abs: f32::from_bits(self.most),
            sum_squares: self.squares,
        }
    }

    /// With the tensor's counters of exponents, which are empty where none were asked for.
    pub(crate) fn survey(&self, counters: &[u32]) -> TensorSurvey {
        let mut exponents = ExponentHistogram::new();
        if !counters.is_empty() {
            for (field, &count) in counters.iter().enumerate().filter(|(_, count)| **count > 0) {
                exponents.add(field as i32 + ExponentHistogram::LOWEST, u64::from(count));
            }
            (exponents.zero, exponents.inf, exponents.nan) = (self.zero, self.inf, self.nan);
        }
        TensorSurvey { stats: self.stats(), exponents }
    }
}

/// What the survey of one set of gradients needs on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SurveyBuffers {
    /// [`SurveyedTensor`]s, as bytes.
    pub(crate) tensors: Buffer,
    /// [`Chunk`]s, as bytes.
    pub(crate) chunks: Buffer,
    /// [`CHUNK_STATS_BYTES`] for each chunk.
    pub(crate) partial: Buffer,
    /// [`RawStats`] for each tensor, as bytes.
    pub(crate) stats: Buffer,
    /// [`BINS`] counters for each tensor, zero before each survey; `None` for no histograms.
    pub(crate) exponents: Option<Buffer>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SurveyChunks {
    tensors: u64,
    chunks: u64,
    partial: u64,
    exponents: u64,
    min_normal: u32,
    unused: u32,
}
// SAFETY: mirrors `SurveyChunks`.
unsafe impl Arguments for SurveyChunks {}

#[repr(C)]
#[derive(Clone, Copy)]
struct SurveyTensors {
    tensors: u64,
    partial: u64,
    stats: u64,
}
// SAFETY: mirrors `SurveyTensors`.
unsafe impl Arguments for SurveyTensors {}

/// Surveys tensors of type `dtype`, each into its [`RawStats`]. A value counts as subnormal below the smallest normal one
/// of `format`.
pub(crate) fn survey(queue: &impl Queue, dtype: DType, format: FloatFormat, buffers: SurveyBuffers) -> Result<()> {
    let (tensors, chunks) =
        (buffers.tensors.len / size_of::<SurveyedTensor>(), buffers.chunks.len / size_of::<Chunk>());
    if tensors == 0 {
        bail!("there is no gradient to survey");
    }
    let exponents = buffers.exponents.map(|counters| counters.expect("exponents", DType::U32, tensors * BINS));
    let parts = SurveyChunks {
        tensors: buffers.tensors.address,
        chunks: buffers.chunks.address,
        partial: buffers.partial.expect("partial", DType::U8, chunks * CHUNK_STATS_BYTES)?,
        exponents: exponents.transpose()?.unwrap_or(0),
        min_normal: (format.min_normal() as f32).to_bits(),
        unused: 0,
    };
    let whole = SurveyTensors {
        tensors: parts.tensors,
        partial: parts.partial,
        stats: buffers.stats.expect("stats", DType::U8, tensors * size_of::<RawStats>())?,
    };
    let scratch = WARPS * size_of::<f64>() as u32;
    let by_chunk = Launch {
        module: "survey",
        kernel: entry("survey_chunks", &[dtype])?,
        grid: [word(chunks)?, 1, 1],
        threads: THREADS,
        shared_bytes: WARPS * (BINS * size_of::<u32>()) as u32 + scratch,
    };
    let by_tensor = Launch {
        module: "survey",
        kernel: "survey_tensors".to_owned(),
        grid: [word(tensors)?, 1, 1],
        threads: THREADS,
        shared_bytes: scratch,
    };
    // SAFETY: the tables describe buffers of this device, and their lengths give the grids.
    unsafe {
        queue.launch(&by_chunk, &parts)?;
        queue.launch(&by_tensor, &whole)
    }
}
