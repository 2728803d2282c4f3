//! The launch of `adamw.cu`.

use super::dispatch::{Attempt, CudaKernels, Stop, is_pair, require};
use super::launch::{KernelLaunch, Queue, arguments, kernel_symbol, to_u32};
use crate::adamw::AdamWTensor;
use crate::blockwise::BLOCK_SIZE;
use crate::op;
use crate::precision::UpdateCounts;
use crate::view::float_format;
use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// Elements that a block of threads updates.
const CHUNK: usize = 1 << 13;
const THREADS: usize = 256;
/// Words of a tensor in the table that the kernels read.
const ENTRY_WORDS: usize = 24;
/// Values of a moment in 8 bits.
const CODES: usize = 256;
/// Words of the counts: elements that moved, lost updates, and distances, in 64 bits each.
const COUNT_WORDS: usize = 6;

arguments! {
    struct AdamW {
        tensors: u64,
        counts: u64,
        count: u32,
        ulp_fields: [u32; 2],
        lr: f32,
        betas: [f32; 2],
        shares: [f32; 2],
        eps: f32,
        bias_corrections: [f32; 2],
        grad_factor: f32,
    }
}

/// Tensors of one launch.
#[derive(Default)]
struct LaunchGroup {
    entries: Vec<[u32; ENTRY_WORDS]>,
    chunks: usize,
    shared_bytes: usize,
    ulp_fields: [u32; 2],
}

/// Decodes the words that the device has counted for `elements`.
fn decode(words: &[u32], elements: u64) -> UpdateCounts {
    let mut counts = words.as_chunks::<2>().0.iter().map(|&[low, high]| u64::from(low) | u64::from(high) << 32);
    let [moved, lost, distance] = std::array::from_fn(|_| counts.next().unwrap_or_default());
    UpdateCounts { elements, moved, lost, distance }
}

impl<Q: Queue> CudaKernels<Q> {
    pub(super) fn adamw(&self, op: &mut op::AdamW<'_>) -> Attempt {
        let (mut updated, mut left, mut groups) = (Vec::new(), Vec::new(), BTreeMap::new());
        for tensor in std::mem::take(&mut op.tensors) {
            match self.add_entry(&tensor, to_u32(updated.len())?, &mut groups) {
                Ok(()) => updated.push(tensor),
                Err(Stop::Unsupported) => left.push(tensor),
                Err(failed) => return Err(failed),
            }
        }
        op.tensors = left;
        let Some(device) = updated.first().map(|tensor| tensor.master.device()) else {
            return require(op.tensors.is_empty());
        };
        let counted = updated.iter().any(|tensor| tensor.counts.is_some() && tensor.weight.is_some());
        let words = counted.then(|| Tensor::zeros(updated.len() * COUNT_WORDS, DType::U32, device)).transpose()?;
        let counts = self.optional(words.as_ref(), DType::U32, updated.len() * COUNT_WORDS)?;
        let table: Vec<u32> = groups.values().flat_map(|group| group.entries.as_flattened()).copied().collect();
        let table = self.table(table, device)?;
        let mut tensors = self.address(&table, DType::U32, updated.len() * ENTRY_WORDS)?;
        for (kernel, group) in groups {
            let arguments = AdamW {
                tensors,
                counts,
                count: to_u32(group.entries.len())?,
                ulp_fields: group.ulp_fields,
                lr: op.step.lr,
                betas: op.step.betas.map(|beta| beta as f32),
                shares: op.step.betas.map(|beta| (1.0 - beta) as f32),
                eps: op.step.eps,
                bias_corrections: op.step.bias_corrections,
                grad_factor: op.step.grad_factor,
            };
            tensors += size_of_val(group.entries.as_slice()) as u64;
            let launch = KernelLaunch::new("adamw", kernel, [group.chunks, 1, 1], [THREADS, group.shared_bytes])?;
            // SAFETY: every tensor is as large as the table says, and the other buffers were found large enough.
            unsafe { self.queue.launch(&launch, &arguments) }?;
        }
        if let Some(words) = words {
            // One copy, because the host waits for each.
            let words: Vec<u32> = words.to_vec1()?;
            for (tensor, words) in updated.into_iter().zip(words.chunks(COUNT_WORDS)) {
                if let (Some(counts), Some(weight)) = (tensor.counts, tensor.weight) {
                    *counts += decode(words, weight.elem_count() as u64);
                }
            }
        }
        require(op.tensors.is_empty())
    }

    /// Adds a tensor, whose counts are at `place`, to its kernel's group.
    fn add_entry(&self, tensor: &AdamWTensor<'_>, place: u32, groups: &mut BTreeMap<String, LaunchGroup>) -> Attempt {
        let AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, .. } = *tensor;
        let len = grad.elem_count();
        let copies = weight.map_or(DType::F32, Tensor::dtype);
        require(is_pair([grad.dtype(), copies]))?;
        let (kernel, moments, shared_bytes) = match scales {
            None => ("adamw", DType::F32, size_of::<u32>()),
            Some(_) => ("adamw_8bit", DType::U8, 2 * CODES * size_of::<f32>()),
        };
        let (mut absmax, mut maps) = ([0; 2], [0; 2]);
        for (i, scales) in scales.iter().flatten().enumerate() {
            absmax[i] = self.address(scales.absmax, DType::F32, len.div_ceil(BLOCK_SIZE))?;
            maps[i] = self.address(scales.map, DType::F32, CODES)?;
        }
        let operands = [
            self.address(grad, grad.dtype(), len)?,
            self.address(master, DType::F32, len)?,
            self.address(exp_avg, moments, len)?,
            self.address(exp_avg_sq, moments, len)?,
            self.optional(weight, copies, len)?,
        ];
        let group = groups.entry(kernel_symbol(kernel, &[grad.dtype(), copies])?).or_default();
        let numbers = [len as u64, group.chunks as u64].into_iter().chain(operands).chain(absmax).chain(maps);
        let last = u64::from(weight_decay.to_bits()) | u64::from(place) << 32;
        let mut entry = [0; ENTRY_WORDS];
        for (words, number) in entry.chunks_mut(2).zip(numbers.chain([last])) {
            words.copy_from_slice(&[number as u32, (number >> 32) as u32]);
        }
        group.entries.push(entry);
        group.chunks += len.div_ceil(CHUNK);
        group.shared_bytes = shared_bytes;
        group.ulp_fields = UpdateCounts::ulp_fields(float_format(copies));
        Ok(())
    }
}
