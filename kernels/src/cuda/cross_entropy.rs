//! The launch of `cross_entropy.cu`.

use super::dispatch::{Attempt, CudaKernels, require};
use super::inputs::{InputPart, factors};
use super::launch::{KernelLaunch, MAX_SHARED_BYTES, PACK, Queue, arguments, kernel_symbol, to_u32};
use crate::op;
use candle_core::DType;

const THREADS: usize = 512;
/// The places in which a block's warps exchange numbers.
const SCRATCH_BYTES: usize = THREADS / 32 * size_of::<f32>();

arguments! {
    struct CrossEntropy {
        logits: u64,
        targets: u64,
        losses: u64,
        factors: u64,
        rows: u32,
        vocab: u32,
        stride: u32,
        is_kept: u32,
    }
}

impl<Q: Queue> CudaKernels<Q> {
    /// Also overwrites the columns after the logits.
    pub(super) fn cross_entropy(&self, op: &op::CrossEntropy<'_>) -> Attempt {
        let logits = op.logits;
        let dtype = op.logits.tensor().dtype();
        let rows = op.logits.rows();
        require(logits.first() == 0 && op.softcap.is_none())?;
        let offset = self.offset_of(op.targets);
        let device = op.losses.device();
        let (targets, _owner) = self.words(InputPart::Targets, offset, op.targets, device)?;
        let factors = op.seed.map(|seed| factors(rows, seed, op.weights));
        let factors = factors.map(|factors| self.words(InputPart::Factors, offset, &factors, device)).transpose()?;
        let row_bytes = logits.count().next_multiple_of(PACK) * dtype.size_in_bytes();
        let is_kept = logits.stride().is_multiple_of(PACK) && SCRATCH_BYTES + row_bytes <= MAX_SHARED_BYTES;
        let arguments = CrossEntropy {
            logits: self.columns(logits, dtype)?,
            targets,
            losses: self.address(op.losses, DType::F32, rows)?,
            factors: factors.as_ref().map_or(0, |(address, _owner)| *address),
            rows: to_u32(rows)?,
            vocab: to_u32(logits.count())?,
            stride: to_u32(logits.stride())?,
            is_kept: is_kept.into(),
        };
        let kernel = kernel_symbol("cross_entropy", &[dtype])?;
        let shared_bytes = SCRATCH_BYTES + if is_kept { row_bytes } else { 0 };
        let launch = KernelLaunch::new("cross_entropy", kernel, [rows, 1, 1], [THREADS, shared_bytes])?;
        // SAFETY: every buffer was found large enough, and `Op::check` has checked the targets.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }
}
