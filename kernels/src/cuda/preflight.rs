//! Whether our own kernels compute on a GPU what candle's operations compute in FP64.

use super::dispatch::{CudaKernels, KernelFamily};
use super::queue::CudaQueue;
use crate::op::cases::check_family;
use candle_core::{Device, Result};
use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

/// Fails unless the kernels of a family compute its cases, on numbers that no earlier check has seen.
pub fn check(family: KernelFamily, device: &Device) -> Result<()> {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let base = if family == KernelFamily::AttentionWgmma { KernelFamily::Attention } else { family };
    let kernels = CudaKernels::new(CudaQueue::new(device.as_cuda_device()?), BTreeSet::from([family, base]));
    check_family(base.name(), &kernels, device, seed)
}
