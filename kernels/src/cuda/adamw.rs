//! The launch of `adamw.cu`.

use super::dispatch::{Attempt, CudaKernels, is_pair, require};
use super::launch::{KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::blockwise::BLOCK_SIZE;
use crate::op;
use crate::precision::UpdateCounts;
use crate::view::float_format;
use candle_core::{DType, Tensor};

/// Elements a thread takes at a time.
const PACK: usize = 4;
/// Values of a moment in 8 bits.
const CODES: usize = 256;
/// Words of the counts: elements that moved, lost updates, and distances, in 64 bits each.
const COUNT_WORDS: usize = 6;

arguments! {
    struct AdamW {
        grad: u64,
        master: u64,
        exp_avg: u64,
        exp_avg_sq: u64,
        absmax: [u64; 2],
        maps: [u64; 2],
        weight: u64,
        counts: u64,
        len: u64,
        ulp_fields: [u32; 2],
        lr: f32,
        betas: [f32; 2],
        shares: [f32; 2],
        eps: f32,
        weight_decay: f32,
        bias_corrections: [f32; 2],
        grad_factor: f32,
    }
}

/// Decodes the words that the device has counted for `elements`.
fn decode(words: &[u32], elements: u64) -> UpdateCounts {
    let mut counts = words.as_chunks::<2>().0.iter().map(|&[low, high]| u64::from(low) | u64::from(high) << 32);
    let [moved, lost, distance] = std::array::from_fn(|_| counts.next().unwrap_or_default());
    UpdateCounts { elements, moved, lost, distance }
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn adamw(&self, op: &mut op::AdamW<'_>) -> Attempt {
        let op::AdamW { step, grad, master, exp_avg, exp_avg_sq, scales, weight, .. } = *op;
        let (len, copies) = (grad.elem_count(), weight.map_or(DType::F32, Tensor::dtype));
        require(is_pair([grad.dtype(), copies]))?;
        let counts = op.counts.as_deref_mut().filter(|_| weight.is_some());
        let words = counts.as_ref().map(|_| Tensor::zeros(COUNT_WORDS, DType::U32, master.device())).transpose()?;
        let (mut absmax, mut maps) = ([0; 2], [0; 2]);
        for (i, scales) in scales.iter().flatten().enumerate() {
            absmax[i] = self.address(scales.absmax, DType::F32, len.div_ceil(BLOCK_SIZE))?;
            maps[i] = self.address(scales.map, DType::F32, CODES)?;
        }
        let (kernel, moments, packs, shared_bytes) = match scales {
            None => ("adamw", DType::F32, len.div_ceil(PACK), 0),
            // A warp for each block.
            Some(_) => ("adamw_8bit", DType::U8, 32 * len.div_ceil(BLOCK_SIZE), 2 * CODES * size_of::<f32>()),
        };
        let arguments = AdamW {
            grad: self.address(grad, grad.dtype(), len)?,
            master: self.address(master, DType::F32, len)?,
            exp_avg: self.address(exp_avg, moments, len)?,
            exp_avg_sq: self.address(exp_avg_sq, moments, len)?,
            absmax,
            maps,
            weight: self.optional(weight, copies, len)?,
            counts: self.optional(words.as_ref(), DType::U32, COUNT_WORDS)?,
            len: len as u64,
            ulp_fields: UpdateCounts::ulp_fields(float_format(copies)),
            lr: step.lr,
            betas: step.betas.map(|beta| beta as f32),
            shares: step.betas.map(|beta| (1.0 - beta) as f32),
            eps: step.eps,
            weight_decay: step.weight_decay,
            bias_corrections: step.bias_corrections,
            grad_factor: step.grad_factor,
        };
        let kernel = kernel_symbol(kernel, &[grad.dtype(), copies])?;
        let launch = KernelLaunch::for_packs("adamw", kernel, packs)?;
        let launch = KernelLaunch { shared_bytes: to_u32(shared_bytes)?, ..launch };
        // Blocks load the maps of codes, and add their counts to the total.
        let launch = if scales.is_some() || counts.is_some() { launch.looping() } else { launch };
        // SAFETY: every buffer was found large enough.
        unsafe { self.queue.launch(&launch, &arguments) }?;
        if let (Some(counts), Some(words)) = (counts, words) {
            *counts += decode(&words.to_vec1()?, len as u64);
        }
        Ok(())
    }
}
