//! The launch of `adamw.cu`.

use super::launch::{Arguments, DeviceSlice, KernelLaunch, Queue, kernel_symbol};
use crate::adamw::AdamWStep;
use crate::precision::UpdateCounts;
use crate::view::float_format;
use candle_core::{DType, Result};

/// Elements a thread takes at a time.
const PACK: usize = 4;

#[repr(C)]
#[derive(Clone, Copy)]
struct AdamW {
    grad: u64,
    master: u64,
    exp_avg: u64,
    exp_avg_sq: u64,
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
// SAFETY: mirrors `AdamW`.
unsafe impl Arguments for AdamW {}

/// Words of the counts: elements that moved, lost updates, and distances, in 64 bits each.
pub(crate) const COUNT_WORDS: usize = 6;

/// Decodes the words that the device has counted for `elements`.
pub(crate) fn decode(words: &[u32], elements: u64) -> UpdateCounts {
    let mut counts = words.as_chunks::<2>().0.iter().map(|&[low, high]| u64::from(low) | u64::from(high) << 32);
    let [moved, lost, distance] = std::array::from_fn(|_| counts.next().unwrap_or_default());
    UpdateCounts { elements, moved, lost, distance }
}

/// See [`adamw::step`](crate::adamw::step): updates a master and its moments, and with them the working copy
/// unless the master is that itself. Adds to `counts`, [`COUNT_WORDS`] zero words, if they are given.
pub(crate) fn step(
    queue: &impl Queue,
    numbers: AdamWStep,
    grad: DeviceSlice,
    [master, exp_avg, exp_avg_sq]: [DeviceSlice; 3],
    weight: Option<DeviceSlice>,
    counts: Option<DeviceSlice>,
) -> Result<()> {
    let AdamWStep { lr, betas, eps, weight_decay, bias_corrections, grad_factor } = numbers;
    let (len, copies) = (grad.len, weight.map_or(DType::F32, |weight| weight.dtype));
    let arguments = AdamW {
        grad: grad.of("grad", len)?,
        master: master.expect("master", DType::F32, len)?,
        exp_avg: exp_avg.expect("exp_avg", DType::F32, len)?,
        exp_avg_sq: exp_avg_sq.expect("exp_avg_sq", DType::F32, len)?,
        weight: weight.map_or(Ok(0), |weight| weight.of("weight", len))?,
        counts: counts.map_or(Ok(0), |counts| counts.expect("counts", DType::U32, COUNT_WORDS))?,
        len: len as u64,
        ulp_fields: UpdateCounts::ulp_fields(float_format(copies)),
        lr,
        betas: betas.map(|beta| beta as f32),
        shares: betas.map(|beta| (1.0 - beta) as f32),
        eps,
        weight_decay,
        bias_corrections,
        grad_factor,
    };
    let kernel = kernel_symbol("adamw", &[grad.dtype, copies])?;
    let launch = KernelLaunch::for_packs("adamw", kernel, len.div_ceil(PACK))?;
    // SAFETY: every buffer was found large enough.
    unsafe { queue.launch(&launch, &arguments) }
}
