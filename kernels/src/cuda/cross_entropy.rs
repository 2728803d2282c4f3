//! The launch of `cross_entropy.cu`.

use super::dispatch::{Attempt, CudaKernels, require};
use super::launch::{KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::op;
use candle_core::{DType, Tensor};

const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;

arguments! {
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
}

impl<Q: Queue> CudaKernels<Q> {
    /// Also overwrites the columns after the logits.
    pub(super) fn cross_entropy(&self, op: &op::CrossEntropy<'_>) -> Attempt {
        let (logits, dtype, rows) = (op.logits, op.logits.tensor().dtype(), op.logits.rows());
        require(logits.first() == 0 && op.softcap.is_none())?;
        let targets = Tensor::new(op.targets, op.losses.device())?;
        let weights = op.weights.map(|weights| Tensor::new(weights, op.losses.device())).transpose()?;
        let arguments = CrossEntropy {
            logits: self.columns(logits, dtype)?,
            targets: self.address(&targets, DType::U32, rows)?,
            losses: self.address(op.losses, DType::F32, rows)?,
            weights: self.optional(weights.as_ref(), DType::F32, rows)?,
            rows: to_u32(rows)?,
            vocab: to_u32(logits.count())?,
            stride: to_u32(logits.stride())?,
            has_gradient: u32::from(op.seed.is_some()),
            seed: op.seed.unwrap_or(0.0),
            unused: 0,
        };
        let launch = KernelLaunch {
            module: "cross_entropy",
            kernel: kernel_symbol("cross_entropy", &[dtype])?,
            grid: [to_u32(rows)?, 1, 1],
            threads: THREADS,
            shared_bytes: WARPS * size_of::<f32>() as u32,
        };
        // SAFETY: every buffer was found large enough, and `Op::check` has checked the targets.
        Ok(unsafe { self.queue.launch(&launch, &arguments) }?)
    }
}
