//! Launches of `layer_norm.cu`.

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use super::sums::sum_parts;
use candle_core::{DType, Result};

const THREADS: u32 = 256;
const WARPS: usize = THREADS as usize / 32;
/// Blocks of the backward pass, at most: two for each multiprocessor of the largest GPUs.
const MAX_BLOCKS: usize = 264;

/// What the forward pass leaves behind, FP32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statistics {
    /// Each row's mean.
    pub(crate) mean: Buffer,
    /// One over each row's standard deviation.
    pub(crate) rstd: Buffer,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Forward {
    x: u64,
    weight: u64,
    bias: u64,
    y: u64,
    mean: u64,
    rstd: u64,
    rows: u32,
    width: u32,
    eps: f32,
    unused: u32,
}
// SAFETY: mirrors `LayerNormForward`.
unsafe impl Arguments for Forward {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Backward {
    dy: u64,
    x: u64,
    weight: u64,
    mean: u64,
    rstd: u64,
    dx: u64,
    partial: u64,
    rows: u32,
    width: u32,
    rows_per_block: u32,
    unused: u32,
}
// SAFETY: mirrors `LayerNormBackward`.
unsafe impl Arguments for Backward {}

/// See [`layer_norm::forward`](crate::kernels::layer_norm::forward).
pub(crate) fn forward(
    queue: &impl Queue,
    [rows, width]: [usize; 2],
    x: Buffer,
    [weight, bias]: [Buffer; 2],
    eps: f32,
    y: Buffer,
    statistics: Statistics,
) -> Result<()> {
    let arguments = Forward {
        x: x.of("x", rows * width)?,
        weight: weight.expect("weight", y.dtype, width)?,
        bias: bias.expect("bias", y.dtype, width)?,
        y: y.of("y", rows * width)?,
        mean: statistics.mean.expect("mean", DType::F32, rows)?,
        rstd: statistics.rstd.expect("rstd", DType::F32, rows)?,
        rows: word(rows)?,
        width: word(width)?,
        eps,
        unused: 0,
    };
    let launch = Launch::warp_a_row("layer_norm", entry("layer_norm_forward", &[x.dtype, y.dtype])?, rows)?;
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments) }
}

/// See [`layer_norm::backward`](crate::kernels::layer_norm::backward).
pub(crate) fn backward(
    queue: &impl Queue,
    [rows, width]: [usize; 2],
    [dy, x, weight]: [Buffer; 3],
    statistics: Statistics,
    dx: Buffer,
    [dweight, dbias]: [Buffer; 2],
) -> Result<()> {
    let rows_per_block = rows.div_ceil(MAX_BLOCKS).next_multiple_of(WARPS);
    let blocks = rows.div_ceil(rows_per_block.max(1));
    let partial = queue.scratch(blocks * 2 * width)?;
    let arguments = Backward {
        dy: dy.of("dy", rows * width)?,
        x: x.of("x", rows * width)?,
        weight: weight.expect("weight", dy.dtype, width)?,
        mean: statistics.mean.expect("mean", DType::F32, rows)?,
        rstd: statistics.rstd.expect("rstd", DType::F32, rows)?,
        dx: dx.expect("dx", x.dtype, rows * width)?,
        partial: partial.address,
        rows: word(rows)?,
        width: word(width)?,
        rows_per_block: word(rows_per_block)?,
        unused: 0,
    };
    let launch = Launch {
        module: "layer_norm",
        kernel: entry("layer_norm_backward", &[x.dtype, dy.dtype])?,
        grid: [word(blocks)?, 1, 1],
        threads: THREADS,
        shared_bytes: word(2 * width * size_of::<f32>())?,
    };
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments)? };
    sum_parts(queue, partial, blocks, width, [dweight, dbias])
}
