//! The launches of `heads.cu`.

use super::dispatch::{Attempt, CudaKernels, aligns, require};
use super::launch::{KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::attention::AttentionShape;
use crate::columns::ColumnSlice;
use crate::op;
use crate::rope::Direction;
use candle_core::{DType, Result, Tensor};

/// Elements a thread takes at a time.
const PACK: usize = 8;

arguments! {
    struct Rotate {
        x: u64,
        cos: u64,
        sin: u64,
        starts: u64,
        rows: u32,
        stride: u32,
        heads: u32,
        half: u32,
        seq_len: u32,
        past: u32,
        sign: f32,
        unused: u32,
    }

    struct GqaArgs {
        parts: [u64; 3],
        wide: u64,
        strides: [u32; 3],
        rows: u32,
        heads: u32,
        kv_heads: u32,
        head_size: u32,
        unused: u32,
    }
}

fn launch(kernel: &str, dtype: DType, packs: usize) -> Result<KernelLaunch> {
    KernelLaunch::for_packs("heads", kernel_symbol(kernel, &[dtype])?, packs)
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn apply_rope(&self, op: &op::Rotate<'_>) -> Attempt {
        let op::Rotate { x, table, positions, direction } = *op;
        let (dtype, rows, half) = (x.tensor().dtype(), x.rows(), table.cos.dim(1)?);
        require(half.is_multiple_of(PACK) && aligns(x, half))?;
        let starts = positions.documents.map(|starts| Tensor::new(starts, x.tensor().device())).transpose()?;
        let angles = (positions.past + positions.seq_len.min(rows)) * half;
        let arguments = Rotate {
            x: self.columns(x, dtype)?,
            cos: self.address(&table.cos, DType::F32, angles)?,
            sin: self.address(&table.sin, DType::F32, angles)?,
            starts: self.optional(starts.as_ref(), DType::U32, rows)?,
            rows: to_u32(rows)?,
            stride: to_u32(x.stride())?,
            heads: to_u32(x.count() / (2 * half))?,
            half: to_u32(half)?,
            seq_len: to_u32(positions.seq_len)?,
            past: to_u32(positions.past)?,
            sign: if direction == Direction::Forward { 1.0 } else { -1.0 },
            unused: 0,
        };
        // The kernel counts packs in 32 bits.
        let packs = to_u32(rows * x.count() / 2 / PACK)?;
        // SAFETY: every buffer was found large enough.
        Ok(unsafe { self.queue.launch(&launch("apply_rope", dtype, packs as usize)?, &arguments) }?)
    }

    /// Puts queries, keys and values side by side, with keys and values for each head: `wide [B·T, 3·H·head_size]`.
    pub(super) fn spread_heads(&self, shape: &AttentionShape, parts: [ColumnSlice<'_>; 3], wide: &Tensor) -> Attempt {
        self.move_heads("spread_heads", shape, parts, wide, 3 * shape.widths()[0])
    }

    /// The gradients of [`Self::spread_heads`]: `wide` is read and `parts` are written. Sums are FP32, rounded once.
    pub(super) fn gather_heads(&self, shape: &AttentionShape, wide: &Tensor, parts: [ColumnSlice<'_>; 3]) -> Attempt {
        self.move_heads("gather_heads", shape, parts, wide, shape.widths().iter().sum())
    }

    /// `width` elements of each row are written.
    fn move_heads(
        &self,
        kernel: &str,
        shape: &AttentionShape,
        parts: [ColumnSlice<'_>; 3],
        wide: &Tensor,
        width: usize,
    ) -> Attempt {
        let (rows, dtype, head_size) = (shape.batch * shape.seq_len, wide.dtype(), shape.head_size);
        require(head_size.is_multiple_of(PACK) && parts.iter().all(|part| aligns(*part, head_size)))?;
        let [queries, keys, values] = parts;
        let arguments = GqaArgs {
            parts: [self.columns(queries, dtype)?, self.columns(keys, dtype)?, self.columns(values, dtype)?],
            wide: self.address(wide, dtype, rows * 3 * shape.widths()[0])?,
            strides: [to_u32(queries.stride())?, to_u32(keys.stride())?, to_u32(values.stride())?],
            rows: to_u32(rows)?,
            heads: to_u32(shape.heads)?,
            kv_heads: to_u32(shape.kv_heads)?,
            head_size: to_u32(head_size)?,
            unused: 0,
        };
        // SAFETY: every buffer was found large enough, and `Op::check` has compared the parts with the shape.
        Ok(unsafe { self.queue.launch(&launch(kernel, dtype, rows * width / PACK)?, &arguments) }?)
    }
}
