//! The launches of `norm.cu`.

use super::launch::{Arguments, DeviceSlice, KernelLaunch, Queue, Rows, kernel_symbol, to_u32};
use candle_core::{DType, Result, bail};

/// Rows up to this wide are kept in registers.
const KEPT_WIDTH: usize = 768;
/// Threads of a backward block: with rows kept in registers, and without.
const KEPT_THREADS: u32 = 384;
const WIDE_THREADS: u32 = 128;
/// Shared memory that a block can have on every GPU since compute capability 8.0.
const SHARED_BYTES: usize = 96 << 10;
/// Blocks of the backward pass, at most: as many as the largest GPUs have multiprocessors.
const MAX_BLOCKS: usize = 132;
/// Threads of a block that adds up the parts, and the columns it takes.
const SUM_THREADS: u32 = 256;
const SUMMED_COLUMNS: usize = 32;
/// The number of a block's rows is a multiple of this.
const ROWS: usize = 8;

/// Statistics that the forward pass stores, FP32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statistics {
    /// Each row's mean, of a layer norm.
    pub(crate) mean: Option<DeviceSlice>,
    /// One over each row's standard deviation.
    pub(crate) rstd: DeviceSlice,
}

/// Whether the kernels can read and write heads of `width` elements: rows that are one head need no alignment.
pub(crate) fn supports_rows(rows: Rows, width: usize) -> bool {
    let is_whole = (rows.first, rows.stride) == (0, width);
    width > 0 && rows.count.is_multiple_of(width) && (is_whole || rows.aligns(width))
}

/// The addresses of operands that have the same heads.
fn addresses<const N: usize>(width: usize, operands: [(&str, Rows); N]) -> Result<[u64; N]> {
    let sizes = |rows: Rows| [rows.len, rows.count];
    let mut addresses = [0; N];
    for ((what, rows), address) in operands.into_iter().zip(&mut addresses) {
        if !supports_rows(rows, width) || sizes(rows) != sizes(operands[0].1) {
            bail!("there is no CUDA kernel for norms of {width} elements in {rows:?}");
        }
        *address = rows.address(what)?;
    }
    Ok(addresses)
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
    gain_offset: f32,
    heads: u32,
    strides: [u32; 2],
    unused: u32,
}
// SAFETY: mirrors `NormForward`.
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
    fresh: u32,
    gain_offset: f32,
    heads: u32,
    strides: [u32; 3],
    unused: u32,
}
// SAFETY: mirrors `NormBackward`.
unsafe impl Arguments for Backward {}

fn variant(width: usize) -> &'static str {
    if width <= KEPT_WIDTH { "kept" } else { "wide" }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SumParts {
    partial: u64,
    out: [u64; 2],
    parts: u32,
    columns: u32,
}
// SAFETY: mirrors `SumParts`.
unsafe impl Arguments for SumParts {}

/// Whether there are kernels for rows of this width: the backward pass sums its columns in shared memory.
pub(crate) fn serves(width: usize) -> bool {
    backward_block(width).1 <= SHARED_BYTES
}

/// Threads and shared memory of a block of the backward pass.
fn backward_block(width: usize) -> (u32, usize) {
    let threads = if width <= KEPT_WIDTH { KEPT_THREADS } else { WIDE_THREADS };
    (threads, threads as usize / 32 * 2 * width * size_of::<f32>())
}

/// See [`Kernels::norm`](crate::Kernels::norm) and
/// [`head_norm`](crate::Kernels::head_norm): of `width` elements each.
pub(crate) fn forward(
    queue: &impl Queue,
    width: usize,
    x: Rows,
    (weight, bias): (DeviceSlice, Option<DeviceSlice>),
    (eps, gain_offset): (f32, f32),
    y: Rows,
    statistics: Statistics,
) -> Result<()> {
    let types = [x, y].map(|rows| rows.buffer.dtype);
    let ([of_x, of_y], heads) = (addresses(width, [("x", x), ("y", y)])?, x.count / width);
    let rows = x.len * heads;
    let arguments = Forward {
        x: of_x,
        weight: weight.expect("weight", types[1], width)?,
        bias: bias.map_or(Ok(0), |bias| bias.expect("bias", types[1], width))?,
        y: of_y,
        mean: statistics.mean.map_or(Ok(0), |mean| mean.expect("mean", DType::F32, rows))?,
        rstd: statistics.rstd.expect("rstd", DType::F32, rows)?,
        rows: to_u32(rows)?,
        width: to_u32(width)?,
        eps,
        gain_offset,
        heads: to_u32(heads)?,
        strides: [to_u32(x.stride)?, to_u32(y.stride)?],
        unused: 0,
    };
    let kernel = kernel_symbol(&format!("norm_forward_{}", variant(width)), &types)?;
    let launch = KernelLaunch::warp_per_row("norm", kernel, rows)?;
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments) }
}

/// Computes [`Kernels::norm_backward`](crate::Kernels::norm_backward): overwrites `dx` if it is `fresh`, otherwise adds
/// to it.
pub(crate) fn backward(
    queue: &impl Queue,
    width: usize,
    (dy, x, weight): (Rows, Rows, DeviceSlice),
    (statistics, gain_offset): (Statistics, f32),
    (dx, fresh): (Rows, bool),
    gradients: Option<(DeviceSlice, Option<DeviceSlice>)>,
) -> Result<()> {
    let types = [x, dy].map(|rows| rows.buffer.dtype);
    let ([of_dy, of_x, of_dx], heads) = (addresses(width, [("dy", dy), ("x", x), ("dx", dx)])?, x.count / width);
    let rows = x.len * heads;
    let (threads, shared_bytes) = backward_block(width);
    if !serves(width) || dx.buffer.dtype != types[0] {
        bail!("there is no CUDA kernel for norms of {width} elements in {types:?}");
    }
    // Small blocks share a multiprocessor.
    let max_blocks = MAX_BLOCKS * (KEPT_THREADS / threads) as usize;
    let rows_per_block = rows.div_ceil(max_blocks).next_multiple_of(ROWS);
    let blocks = rows.div_ceil(rows_per_block.max(1));
    let (partial, _owner) = queue.scratch(blocks * 2 * width)?;
    let arguments = Backward {
        dy: of_dy,
        x: of_x,
        weight: weight.expect("weight", types[1], width)?,
        mean: statistics.mean.map_or(Ok(0), |mean| mean.expect("mean", DType::F32, rows))?,
        rstd: statistics.rstd.expect("rstd", DType::F32, rows)?,
        dx: of_dx,
        partial: partial.address,
        rows: to_u32(rows)?,
        width: to_u32(width)?,
        rows_per_block: to_u32(rows_per_block)?,
        fresh: u32::from(fresh),
        gain_offset,
        heads: to_u32(heads)?,
        strides: [to_u32(dy.stride)?, to_u32(x.stride)?, to_u32(dx.stride)?],
        unused: 0,
    };
    let launch = KernelLaunch {
        module: "norm",
        kernel: kernel_symbol(&format!("norm_backward_{}", variant(width)), &types)?,
        grid: [to_u32(blocks)?, 1, 1],
        threads,
        shared_bytes: to_u32(shared_bytes)?,
    };
    // SAFETY: every buffer was found large enough above.
    unsafe { queue.launch(&launch, &arguments)? };
    let Some((dweight, dbias)) = gradients else { return Ok(()) };
    let dbias = dbias.map_or(Ok(0), |dbias| dbias.expect("dbias", dweight.dtype, width))?;
    let parts = SumParts {
        partial: partial.address,
        out: [dweight.of("dweight", width)?, dbias],
        parts: to_u32(blocks)?,
        columns: to_u32(width)?,
    };
    let launch = KernelLaunch {
        module: "norm",
        kernel: kernel_symbol("sum_parts", &[dweight.dtype])?,
        grid: [to_u32((2 * width).div_ceil(SUMMED_COLUMNS))?, 1, 1],
        threads: SUM_THREADS,
        shared_bytes: SUM_THREADS * size_of::<f32>() as u32,
    };
    // SAFETY: as above.
    unsafe { queue.launch(&launch, &parts) }
}
