//! The launch of `rope.cu`.

use super::dispatch::{Attempt, CudaKernels, aligns, require};
use super::inputs::InputPart;
use super::launch::{KernelLaunch, PACK, Queue, arguments, kernel_symbol, to_u32};
use crate::op;
use crate::rope::Direction;
use candle_core::DType;

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
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn apply_rope(&self, op: &op::Rotate<'_>) -> Attempt {
        let op::Rotate { x, table, positions, direction } = *op;
        let dtype = x.tensor().dtype();
        let rows = x.rows();
        let half = table.cos.dim(1)?;
        require(half.is_multiple_of(PACK) && aligns(x, half))?;
        let starts = positions.documents.map(|starts| self.words(InputPart::Documents, 0, starts, x.tensor().device()));
        let starts = starts.transpose()?;
        let angles = (positions.past + positions.seq_len.min(rows)) * half;
        let arguments = Rotate {
            x: self.columns(x, dtype)?,
            cos: self.address(&table.cos, DType::F32, angles)?,
            sin: self.address(&table.sin, DType::F32, angles)?,
            starts: starts.as_ref().map_or(0, |(address, _owner)| *address),
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
        let launch = KernelLaunch::for_packs("rope", kernel_symbol("apply_rope", &[dtype])?, packs as usize)?;
        // SAFETY: every buffer was found large enough.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }
}
