//! Launches of `cross_entropy.cu`.

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use candle_core::{DType, Result};

const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct CrossEntropy {
    logits: u64,
    targets: u64,
    losses: u64,
    rows: u32,
    vocab: u32,
    stride: u32,
    has_gradient: u32,
    seed: f32,
    unused: u32,
}
// SAFETY: mirrors `CrossEntropy`.
unsafe impl Arguments for CrossEntropy {}

#[repr(C)]
#[derive(Clone, Copy)]
struct SumLosses {
    losses: u64,
    total: u64,
    rows: u64,
}
// SAFETY: mirrors `SumLosses`.
unsafe impl Arguments for SumLosses {}

/// The loss of each of `rows` rows of logits that are `stride` elements apart; and where `seed` says what the gradient of a
/// row's loss is, that of the logits in their place. Padding behind the first `vocab` gets a gradient of zero.
pub(crate) fn rows(
    queue: &impl Queue,
    [rows, vocab, stride]: [usize; 3],
    logits: Buffer,
    targets: Buffer,
    losses: Buffer,
    seed: Option<f32>,
) -> Result<()> {
    let arguments = CrossEntropy {
        logits: logits.of("logits", rows * stride)?,
        targets: targets.expect("targets", DType::U32, rows)?,
        losses: losses.expect("losses", DType::F32, rows)?,
        rows: word(rows)?,
        vocab: word(vocab)?,
        stride: word(stride)?,
        has_gradient: u32::from(seed.is_some()),
        seed: seed.unwrap_or(0.0),
        unused: 0,
    };
    let launch = Launch {
        module: "cross_entropy",
        kernel: entry("cross_entropy", &[logits.dtype])?,
        grid: [word(rows)?, 1, 1],
        threads: THREADS,
        shared_bytes: WARPS * size_of::<f32>() as u32,
    };
    // SAFETY: every buffer was found large enough; who sends targets to the device checks them against the vocabulary.
    unsafe { queue.launch(&launch, &arguments) }
}

/// `total += Σ losses`, in f64.
pub(crate) fn sum_losses(queue: &impl Queue, rows: usize, losses: Buffer, total: Buffer) -> Result<()> {
    let arguments = SumLosses {
        losses: losses.expect("losses", DType::F32, rows)?,
        total: total.expect("total", DType::F64, 1)?,
        rows: rows as u64,
    };
    let launch = Launch {
        module: "cross_entropy",
        kernel: "sum_losses".to_owned(),
        grid: [1; 3],
        threads: THREADS,
        shared_bytes: WARPS * size_of::<f64>() as u32,
    };
    // SAFETY: both buffers were found large enough.
    unsafe { queue.launch(&launch, &arguments) }
}
