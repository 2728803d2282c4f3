//! The launch of `adamw.cu`.

use super::launch::{Arguments, Buffer, Launch, Queue, entry, word};
use super::survey::Chunk;
use crate::engine::kernels::adamw::AdamWStep;
use candle_core::{DType, Result};

const THREADS: u32 = 256;

/// A parameter as the update reads and writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AdamWTensor {
    grad: u64,
    master: u64,
    exp_avg: u64,
    exp_avg_sq: u64,
    weight: u64,
    len: u64,
    weight_decay: f32,
    unused: u32,
}

impl AdamWTensor {
    /// Of a parameter's gradient, master, moments and working copy; `None` where the master is the working copy.
    pub(crate) fn new(
        grad: Buffer,
        [master, exp_avg, exp_avg_sq]: [Buffer; 3],
        weight: Option<Buffer>,
        weight_decay: f32,
    ) -> Result<Self> {
        let len = grad.len;
        Ok(Self {
            grad: grad.of("grad", len)?,
            master: master.expect("master", DType::F32, len)?,
            exp_avg: exp_avg.expect("exp_avg", DType::F32, len)?,
            exp_avg_sq: exp_avg_sq.expect("exp_avg_sq", DType::F32, len)?,
            weight: weight.map_or(Ok(0), |weight| weight.of("weight", len))?,
            len: len as u64,
            weight_decay,
            unused: 0,
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AdamW {
    tensors: u64,
    chunks: u64,
    lr: f32,
    betas: [f32; 2],
    shares: [f32; 2],
    eps: f32,
    bias_corrections: [f32; 2],
    grad_factor: f32,
    unused: u32,
}
// SAFETY: mirrors `AdamW`.
unsafe impl Arguments for AdamW {}

/// Updates all parameters of a table of [`AdamWTensor`]s, cut by a table of [`Chunk`]s. The gradients are of one type, and
/// the working copies of another. Weight decay is the tensors', not that of `numbers`.
pub(crate) fn step(
    queue: &impl Queue,
    [grads, weights]: [DType; 2],
    tensors: Buffer,
    chunks: Buffer,
    numbers: AdamWStep,
) -> Result<()> {
    let AdamWStep { lr, betas, eps, bias_corrections, grad_factor, .. } = numbers;
    let arguments = AdamW {
        tensors: tensors.of("tensors", size_of::<AdamWTensor>())?,
        chunks: chunks.of("chunks", size_of::<Chunk>())?,
        lr,
        betas: betas.map(|beta| beta as f32),
        shares: betas.map(|beta| (1.0 - beta) as f32),
        eps,
        bias_corrections,
        grad_factor,
        unused: 0,
    };
    let launch = Launch {
        module: "adamw",
        kernel: entry("adamw", &[grads, weights])?,
        grid: [word(chunks.len / size_of::<Chunk>())?, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
    };
    // SAFETY: the tables describe buffers of this device, and their length gives the grid.
    unsafe { queue.launch(&launch, &arguments) }
}
