//! The launch of `cross_entropy.cu`.

use super::launch::{Arguments, DeviceSlice, KernelLaunch, Queue, kernel_symbol, to_u32};
use candle_core::{DType, Result};

const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct CrossEntropy {
    logits: u64,
    targets: u64,
    losses: u64,
    weights: u64,
    rows: u32,
    vocab: u32,
    stride: u32,
    has_gradient: u32,
    seed: f32,
    unused: u32,
}
// SAFETY: mirrors `CrossEntropy`.
unsafe impl Arguments for CrossEntropy {}

/// Computes the loss of each row of `logits [rows, vocab]`, rows `stride` apart, and overwrites the rest of the row. If
/// `seed` gives the gradient of a row's loss, it overwrites the logits with their gradient, times the row's weight if there
/// are `weights`. The targets are [`IGNORE`](crate::cross_entropy::IGNORE) or below `vocab`.
pub(crate) fn rows(
    queue: &impl Queue,
    [rows, vocab, stride]: [usize; 3],
    logits: DeviceSlice,
    targets: DeviceSlice,
    losses: DeviceSlice,
    seed: Option<f32>,
    weights: Option<DeviceSlice>,
) -> Result<()> {
    let arguments = CrossEntropy {
        logits: logits.of("logits", rows * stride)?,
        targets: targets.expect("targets", DType::U32, rows)?,
        losses: losses.expect("losses", DType::F32, rows)?,
        weights: weights.map_or(Ok(0), |weights| weights.expect("weights", DType::F32, rows))?,
        rows: to_u32(rows)?,
        vocab: to_u32(vocab)?,
        stride: to_u32(stride.max(vocab))?,
        has_gradient: u32::from(seed.is_some()),
        seed: seed.unwrap_or(0.0),
        unused: 0,
    };
    let launch = KernelLaunch {
        module: "cross_entropy",
        kernel: kernel_symbol("cross_entropy", &[logits.dtype])?,
        grid: [to_u32(rows)?, 1, 1],
        threads: THREADS,
        shared_bytes: WARPS * size_of::<f32>() as u32,
    };
    // SAFETY: every buffer was found large enough; the caller has checked the targets.
    unsafe { queue.launch(&launch, &arguments) }
}
