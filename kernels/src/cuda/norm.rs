//! The launches of `norm.cu`.

use super::dispatch::{Attempt, CudaKernels, Stop, aligns, is_pair, require};
use super::launch::{KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::columns::{ColumnSlice, WriteMode};
use crate::op;
use candle_core::{DType, Result};

/// A warp has each row up to this wide if it is whole packs. A block has each other row.
const NARROW_WIDTH: usize = 768;
/// Elements of the largest pack.
const PACK: usize = 8;
/// Threads of a backward block with narrow rows.
const NARROW_THREADS: usize = 384;
/// Threads that have a wide row, at most, and those of a multiprocessor.
const WIDE_THREADS: usize = 768;
/// Bytes of a wide row in the residual stream that a thread has.
const WIDE_BYTES: usize = 16;
/// Places in which a wide row's threads exchange sums: two for each warp, in turn.
const WIDE_SCRATCH: usize = 2 * 2 * WIDE_THREADS / 32;
/// Blocks of the backward pass with narrow rows, at most: as many as the largest GPUs have multiprocessors.
const MAX_BLOCKS: usize = 132;
/// Threads of a block that adds up rows or parts, and the columns of parts it takes.
const SUM_THREADS: usize = 256;
const SUMMED_COLUMNS: usize = 32;
/// The number of a block's rows is a multiple of this.
const ROWS: usize = 8;

arguments! {
    struct NormForward {
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

    struct NormBackward {
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

    struct SumParts {
        partial: u64,
        out: [u64; 2],
        parts: u32,
        columns: u32,
        stride: u32,
        unused: u32,
    }

    struct SumRows {
        x: u64,
        partial: u64,
        rows: u32,
        width: u32,
        rows_per_part: u32,
        unused: u32,
    }
}

impl SumParts {
    fn new(partial: u64, out: [u64; 2], [parts, columns, stride]: [usize; 3]) -> Result<Self> {
        Ok(Self { partial, out, parts: to_u32(parts)?, columns: to_u32(columns)?, stride: to_u32(stride)?, unused: 0 })
    }
}

/// Blocks that have a wide row at a time.
fn wide(kernel: String, blocks: usize, threads: usize) -> Result<KernelLaunch> {
    KernelLaunch::new("norm", kernel, [blocks, 1, 1], [threads, WIDE_SCRATCH * size_of::<f32>()])
}

/// Threads of a row's block; `None` if a warp has the row. Stops unless the kernels can take these columns, the first
/// of the residual stream, in groups of `width`. Rows that are one group need no alignment.
fn threads_of_row(operands: &[ColumnSlice<'_>], width: usize) -> Attempt<Option<usize>> {
    let is_whole = |columns: &ColumnSlice<'_>| (columns.first(), columns.stride()) == (0, width);
    require(operands.iter().all(|columns| is_whole(columns) || aligns(*columns, width)))?;
    if width <= NARROW_WIDTH && width.is_multiple_of(PACK) {
        return Ok(None);
    }
    let bytes = width * operands[0].tensor().dtype().size_in_bytes();
    let threads = bytes.div_ceil(WIDE_BYTES).next_multiple_of(32);
    require(threads <= WIDE_THREADS)?;
    Ok(Some(threads))
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn norm(&self, op: &op::Norm<'_>) -> Attempt {
        let &op::Norm { x, y, .. } = op;
        let width = op.weight.elem_count();
        let types @ [stream, compute] = [x, y].map(|columns| columns.tensor().dtype());
        require(is_pair(types))?;
        let threads = threads_of_row(&[x, y], width)?;
        let heads = x.count() / width;
        let rows = x.rows() * heads;
        let arguments = NormForward {
            x: self.columns(x, stream)?,
            weight: self.address(op.weight, compute, width)?,
            bias: self.optional(op.bias, compute, width)?,
            y: self.columns(y, compute)?,
            mean: self.optional(op.mean, DType::F32, rows)?,
            rstd: self.address(op.rstd, DType::F32, rows)?,
            rows: to_u32(rows)?,
            width: to_u32(width)?,
            eps: op.settings.eps,
            gain_offset: op.settings.gain_offset(),
            heads: to_u32(heads)?,
            strides: [to_u32(x.stride())?, to_u32(y.stride())?],
            unused: 0,
        };
        let symbol = |name: &str| kernel_symbol(name, &types);
        let launch = match threads {
            None => KernelLaunch::warp_per_row("norm", symbol("norm_forward_narrow")?, rows)?,
            Some(threads) => wide(symbol("norm_forward_wide")?, rows, threads)?,
        };
        // SAFETY: every buffer was found large enough, and `Op::check` has compared the sizes of the columns.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }

    pub(super) fn norm_backward(&self, op: &op::NormBackward<'_>) -> Attempt {
        let &op::NormBackward { dy, x, dx, .. } = op;
        let width = op.weight.elem_count();
        let types @ [stream, compute] = [x, dy].map(|columns| columns.tensor().dtype());
        require(is_pair(types))?;
        let threads = threads_of_row(&[x, dy, dx], width)?;
        let heads = x.count() / width;
        let rows = x.rows() * heads;
        let rows_per_block = match threads {
            None => rows.div_ceil(MAX_BLOCKS).next_multiple_of(ROWS),
            Some(threads) => rows.div_ceil(MAX_BLOCKS * WIDE_THREADS / threads),
        };
        let blocks = rows.div_ceil(rows_per_block.max(1));
        let partial = self.queue.scratch(blocks * 2 * width)?;
        let arguments = NormBackward {
            dy: self.columns(dy, compute)?,
            x: self.columns(x, stream)?,
            weight: self.address(op.weight, compute, width)?,
            mean: self.optional(op.mean, DType::F32, rows)?,
            rstd: self.address(op.rstd, DType::F32, rows)?,
            dx: self.columns(dx, stream)?,
            partial,
            rows: to_u32(rows)?,
            width: to_u32(width)?,
            rows_per_block: to_u32(rows_per_block)?,
            fresh: u32::from(op.mode == WriteMode::Overwrite),
            gain_offset: op.settings.gain_offset(),
            heads: to_u32(heads)?,
            strides: [to_u32(dy.stride())?, to_u32(x.stride())?, to_u32(dx.stride())?],
            unused: 0,
        };
        let launch = match threads {
            None => {
                let shared_bytes = NARROW_THREADS / 32 * 2 * width * size_of::<f32>();
                let kernel = kernel_symbol("norm_backward_narrow", &types)?;
                KernelLaunch::new("norm", kernel, [blocks, 1, 1], [NARROW_THREADS, shared_bytes])?
            }
            Some(threads) => wide(kernel_symbol("norm_backward_wide", &types)?, blocks, threads)?,
        };
        // Before the first launch, because that may add to `dx`.
        let sums = op.dweight.map(|dweight| {
            let dtype = dweight.dtype();
            let out = [self.address(dweight, dtype, width)?, self.optional(op.dbias, dtype, width)?];
            Ok::<_, Stop>((SumParts::new(partial, out, [blocks, width, 2 * width])?, dtype))
        });
        let sums = sums.transpose()?;
        // SAFETY: every buffer was found large enough, and `Op::check` has compared the sizes of the columns.
        unsafe { self.queue.launch(&launch, &arguments)? };
        sums.map_or(Ok(()), |(sums, dtype)| self.sum_parts(&sums, dtype))
    }

    fn sum_parts(&self, sums: &SumParts, dtype: DType) -> Attempt {
        let grid = [(sums.stride as usize).div_ceil(SUMMED_COLUMNS), 1, 1];
        let block = [SUM_THREADS, SUM_THREADS * size_of::<f32>()];
        let launch = KernelLaunch::new("norm", kernel_symbol("sum_parts", &[dtype])?, grid, block)?;
        // SAFETY: the caller has found every buffer large enough.
        Ok(unsafe { self.queue.launch(&launch, sums) }?)
    }

    pub(super) fn sum_rows(&self, op: &op::SumRows<'_>) -> Attempt {
        let (rows, width) = op.x.dims2()?;
        let types @ [of_sums, dtype] = [op.out.dtype(), op.x.dtype()];
        require(is_pair(types) && rows > 0)?;
        let tiles = width.div_ceil(SUM_THREADS);
        // Small blocks share a multiprocessor.
        let rows_per_part = rows.div_ceil((3 * MAX_BLOCKS / tiles.max(1)).max(1)).next_multiple_of(8 * ROWS);
        let parts = rows.div_ceil(rows_per_part);
        let partial = self.queue.scratch(parts * width)?;
        let sums = SumParts::new(partial, [self.address(op.out, of_sums, width)?, 0], [parts, width, width])?;
        let arguments = SumRows {
            x: self.address(op.x, dtype, rows * width)?,
            partial,
            rows: to_u32(rows)?,
            width: to_u32(width)?,
            rows_per_part: to_u32(rows_per_part)?,
            unused: 0,
        };
        let block = [SUM_THREADS, SUM_THREADS / 32 * SUM_THREADS * size_of::<f32>()];
        let launch = KernelLaunch::new("norm", kernel_symbol("sum_rows", &[dtype])?, [tiles, parts, 1], block)?;
        // SAFETY: every buffer was found large enough.
        unsafe { self.queue.launch(&launch, &arguments) }?;
        self.sum_parts(&sums, of_sums)
    }
}
