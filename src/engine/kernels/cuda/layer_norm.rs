//! Launches of `layer_norm.cu`: layer norms, with the residual stream's sums before them and its gradient's way on.

use super::elementwise::Mask;
use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use super::sums::sum_parts;
use crate::engine::kernels::dropout::Dropout;
use candle_core::{DType, Result, bail};

/// Rows up to this wide are kept in registers.
const KEPT_WIDTH: usize = 768;
/// Threads of a backward block, where rows are kept and where they are not.
const KEPT_THREADS: u32 = 384;
const WIDE_THREADS: u32 = 128;
/// What a block can have of a multiprocessor's shared memory since compute capability 9.0; on 8.0 it is less, and the driver
/// says so.
const SHARED_BYTES: usize = 227 << 10;
/// Blocks of the backward pass, at most: as many as the largest GPUs have multiprocessors.
const MAX_BLOCKS: usize = 132;
/// What a block's rows are a multiple of.
const ROWS: usize = 8;

/// What the forward pass leaves behind, FP32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statistics {
    /// Each row's mean.
    pub(crate) mean: Buffer,
    /// One over each row's standard deviation.
    pub(crate) rstd: Buffer,
}

/// A branch on its way into the stream: `sum = x + dropout(branch)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addition {
    /// What is added.
    pub(crate) branch: Buffer,
    /// Its mask, drawn from `draw`.
    pub(crate) dropout: Option<Dropout>,
    /// See [`Tokens`](super::embedding::Tokens::draw).
    pub(crate) draw: Buffer,
    /// The stream after it.
    pub(crate) sum: Buffer,
}

/// The stream's gradient on its way to a branch: `branch = dropout(dx)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Onward {
    /// The gradient of what the branch added.
    pub(crate) branch: Buffer,
    /// The mask that was the branch's.
    pub(crate) dropout: Option<Dropout>,
    /// See [`Addition::draw`].
    pub(crate) draw: Buffer,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Forward {
    x: u64,
    branch: u64,
    weight: u64,
    bias: u64,
    sum: u64,
    y: u64,
    mean: u64,
    rstd: u64,
    rows: u32,
    width: u32,
    eps: f32,
    unused: u32,
    dropout: Mask,
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
    branch: u64,
    partial: u64,
    rows: u32,
    width: u32,
    rows_per_block: u32,
    fresh: u32,
    dropout: Mask,
}
// SAFETY: mirrors `LayerNormBackward`.
unsafe impl Arguments for Backward {}

fn variant(width: usize) -> &'static str {
    if width <= KEPT_WIDTH { "kept" } else { "wide" }
}

/// See [`layer_norm::forward`](crate::engine::kernels::layer_norm::forward); with an addition, what is normalised is its sum, as
/// [`residual::add`](crate::engine::kernels::residual::add) rounds it.
#[expect(clippy::too_many_arguments, reason = "the operands of the layer, each a tensor of its own")]
pub(crate) fn forward(
    queue: &impl Queue,
    [rows, width]: [usize; 2],
    x: Buffer,
    addition: Option<Addition>,
    [weight, bias]: [Buffer; 2],
    eps: f32,
    y: Buffer,
    statistics: Statistics,
) -> Result<()> {
    let len = rows * width;
    let (branch, sum, dropout) = match addition {
        None => (0, 0, Mask::NONE),
        Some(Addition { branch, dropout, draw, sum }) => {
            let mask = Mask::new(dropout, draw)?;
            (branch.expect("branch", y.dtype, len)?, sum.expect("sum", x.dtype, len)?, mask)
        }
    };
    let arguments = Forward {
        x: x.of("x", len)?,
        branch,
        weight: weight.expect("weight", y.dtype, width)?,
        bias: bias.expect("bias", y.dtype, width)?,
        sum,
        y: y.of("y", len)?,
        mean: statistics.mean.expect("mean", DType::F32, rows)?,
        rstd: statistics.rstd.expect("rstd", DType::F32, rows)?,
        rows: word(rows)?,
        width: word(width)?,
        eps,
        unused: 0,
        dropout,
    };
    let kernel = entry(&format!("layer_norm_forward_{}", variant(width)), &[x.dtype, y.dtype])?;
    let launch = Launch::warp_a_row("layer_norm", kernel, rows)?;
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments) }
}

/// See [`layer_norm::backward`](crate::engine::kernels::layer_norm::backward): `dx` is added to, or where it is `fresh` overwritten.
/// What it is then goes onward as in [`residual::branch_gradient`](crate::engine::kernels::residual::branch_gradient).
#[expect(clippy::too_many_arguments, reason = "the operands of the derivative, and where its result goes")]
pub(crate) fn backward(
    queue: &impl Queue,
    [rows, width]: [usize; 2],
    [dy, x, weight]: [Buffer; 3],
    statistics: Statistics,
    dx: Buffer,
    fresh: bool,
    onward: Option<Onward>,
    [dweight, dbias]: [Buffer; 2],
) -> Result<()> {
    let len = rows * width;
    let kept = width <= KEPT_WIDTH;
    let threads = if kept { KEPT_THREADS } else { WIDE_THREADS };
    // Small blocks share a multiprocessor.
    let max_blocks = MAX_BLOCKS * (KEPT_THREADS / threads) as usize;
    let rows_per_block = rows.div_ceil(max_blocks).next_multiple_of(ROWS);
    let blocks = rows.div_ceil(rows_per_block.max(1));
    let shared_bytes = 2 * width * size_of::<f32>() * if kept { 1 } else { threads as usize / 32 };
    if shared_bytes > SHARED_BYTES {
        bail!("layer norms of {width} elements are too wide for the CUDA kernels: use the CPU");
    }
    let (branch, dropout) = match onward {
        None => (0, Mask::NONE),
        Some(Onward { branch, dropout, draw }) => (branch.expect("branch", dy.dtype, len)?, Mask::new(dropout, draw)?),
    };
    let partial = queue.scratch(blocks * 2 * width)?;
    let arguments = Backward {
        dy: dy.of("dy", len)?,
        x: x.of("x", len)?,
        weight: weight.expect("weight", dy.dtype, width)?,
        mean: statistics.mean.expect("mean", DType::F32, rows)?,
        rstd: statistics.rstd.expect("rstd", DType::F32, rows)?,
        dx: dx.expect("dx", x.dtype, len)?,
        branch,
        partial: partial.address,
        rows: word(rows)?,
        width: word(width)?,
        rows_per_block: word(rows_per_block)?,
        fresh: u32::from(fresh),
        dropout,
    };
    let launch = Launch {
        module: "layer_norm",
        kernel: entry(&format!("layer_norm_backward_{}", variant(width)), &[x.dtype, dy.dtype])?,
        grid: [word(blocks)?, 1, 1],
        threads,
        shared_bytes: word(shared_bytes)?,
    };
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments)? };
    sum_parts(queue, partial, blocks, width, [dweight, dbias])
}
