//! The GPUs of this machine: whether this program can use them, and how they are opened.

#[cfg(feature = "cuda")]
mod cuda;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{all, count, free_bytes, has_wgmma, open, peak_bytes, uuid};
#[cfg(not(feature = "cuda"))]
pub(crate) use without_cuda::{count, free_bytes, open, peak_bytes, uuid};

use crate::precision::{Dtype, PrecisionPolicy};
use candle_core::Device;

/// Whether matrix products of this policy have BF16 operands.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "asked of GPUs alone"))]
fn needs_bf16(policy: PrecisionPolicy) -> bool {
    [policy.compute, policy.grads, policy.residual].contains(&Dtype::BF16)
}

#[cfg(not(feature = "cuda"))]
mod without_cuda {
    use crate::precision::PrecisionPolicy;
    use candle_core::Device;

    pub(crate) fn open(_: usize, _: PrecisionPolicy) -> Result<(Device, String), String> {
        Err("this program was built without GPU support; build it with `--features cuda` (see README.md)".into())
    }

    pub(crate) fn count() -> usize {
        0
    }

    pub(crate) fn uuid(_: &Device) -> Option<[u8; 16]> {
        None
    }

    pub(crate) fn free_bytes(_: &Device) -> Option<u64> {
        None
    }

    pub(crate) fn peak_bytes(_: &Device) -> Option<u64> {
        None
    }
}

#[cfg(not(feature = "metal"))]
pub(crate) fn open_metal() -> Result<(Device, String), String> {
    Err("this program was built without Metal; build it on a Mac with `--features metal` (see docs/gpu.md)".into())
}

/// Opens the GPU of an Apple computer.
#[cfg(feature = "metal")]
pub(crate) fn open_metal() -> Result<(Device, String), String> {
    // With fast math the compiler may assume that no value is infinite or NaN, and the loss scale depends on both.
    let fast_math = "CANDLE_METAL_ENABLE_FAST_MATH";
    if std::env::var(fast_math).as_deref() != Ok("0") {
        return Err(format!("candle's Metal kernels would not keep infinities and NaN; set `{fast_math}=0`"));
    }
    Ok((Device::new_metal(0).map_err(|error| error.to_string())?, "metal".into()))
}

/// A driver runs PTX of the same and of earlier CUDA versions.
#[cfg(any(test, feature = "cuda"))]
fn check_driver(driver: u32, toolkit: u32) -> Result<(), String> {
    if driver >= toolkit {
        return Ok(());
    }
    let number = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let (runs, built) = (number(driver), number(toolkit));
    Err(format!(
        "the driver supports CUDA {runs}, but this program was built with CUDA {built}; update the driver, or build \
         with an older toolkit"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_named_with_both_versions() {
        check_driver(13_000, 13_000).unwrap();
        check_driver(13_010, 12_080).unwrap();
        let message = check_driver(12_080, 13_000).unwrap_err();
        assert!(message.contains("CUDA 12.8") && message.contains("CUDA 13.0"), "{message}");
    }
}
