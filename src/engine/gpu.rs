//! The GPUs of this machine: whether this program can use them, and how they are opened.

use crate::precision::{Dtype, PrecisionPolicy};
use candle_core::Device;

/// Whether matrix products of this policy have BF16 operands.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "asked of GPUs alone"))]
fn needs_bf16(policy: PrecisionPolicy) -> bool {
    [policy.compute, policy.grads, policy.residual].contains(&Dtype::BF16)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn open(_: usize, _: PrecisionPolicy) -> std::result::Result<(Device, String), String> {
    Err("this program was built without GPU support; build it with `--features cuda` (see README.md)".into())
}

#[cfg(not(feature = "metal"))]
pub(crate) fn open_metal() -> std::result::Result<(Device, String), String> {
    Err("this program was built without Metal; build it on a Mac with `--features metal` (see docs/gpu.md)".into())
}

/// Opens the GPU of an Apple computer.
#[cfg(feature = "metal")]
pub(crate) fn open_metal() -> std::result::Result<(Device, String), String> {
    // With fast math the compiler may assume that no value is infinite or NaN, and the loss scale depends on both.
    let fast_math = "CANDLE_METAL_ENABLE_FAST_MATH";
    if std::env::var(fast_math).as_deref() != Ok("0") {
        return Err(format!("candle's Metal kernels would not keep infinities and NaN; set `{fast_math}=0`"));
    }
    Ok((Device::new_metal(0).map_err(|error| error.to_string())?, "metal".into()))
}

/// The number of GPUs that the driver reports.
#[cfg(not(feature = "cuda"))]
pub(crate) fn count() -> usize {
    0
}

/// The number of GPUs that the driver reports.
#[cfg(feature = "cuda")]
pub(crate) fn count() -> usize {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn uuid(_: &Device) -> Option<[u8; 16]> {
    None
}

/// The identity of a GPU or of a partition, which no setting of CUDA's environment changes.
#[cfg(feature = "cuda")]
pub(crate) fn uuid(device: &Device) -> Option<[u8; 16]> {
    let uuid = device.as_cuda_device().ok()?.cuda_stream().context().uuid().ok()?;
    Some(uuid.bytes.map(|byte| byte as u8))
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn free_bytes(_: &Device) -> Option<u64> {
    None
}

#[cfg(feature = "cuda")]
pub(crate) fn free_bytes(device: &Device) -> Option<u64> {
    let (free, _) = device.as_cuda_device().ok()?.cuda_stream().context().mem_get_info().ok()?;
    Some(free as u64)
}

/// Whether this GPU has products of four warps.
#[cfg(feature = "cuda")]
pub(crate) fn has_wgmma(device: &Device) -> bool {
    let capability = device.as_cuda_device().map(|cuda| cuda.cuda_stream().context().compute_capability());
    matches!(capability, Ok(Ok((9, 0))))
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn peak_bytes(_: &Device) -> Option<u64> {
    None
}

#[cfg(feature = "cuda")]
pub(crate) fn peak_bytes(device: &Device) -> Option<u64> {
    use candle_core::cuda_backend::cudarc::driver::{result::mem_pool, sys};
    let (pool, mut most) = (memory_pool(device.as_cuda_device().ok()?).ok()?, 0u64);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    // SAFETY: the attribute is a 64-bit number.
    unsafe { mem_pool::get_attribute(pool, attribute, (&raw mut most).cast()) }.ok()?;
    Some(most)
}

/// The driver's memory pool of a GPU.
#[cfg(feature = "cuda")]
fn memory_pool(
    device: &candle_core::CudaDevice,
) -> std::result::Result<
    candle_core::cuda_backend::cudarc::driver::sys::CUmemoryPool,
    candle_core::cuda_backend::cudarc::driver::DriverError,
> {
    use candle_core::cuda_backend::cudarc::driver::sys;
    let mut pool = std::ptr::null_mut();
    // SAFETY: the device is open.
    unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, device.cuda_stream().context().cu_device()) }.result()?;
    Ok(pool)
}

/// A description of each GPU, or the reason why none can be used.
#[cfg(feature = "cuda")]
pub(crate) fn all() -> std::result::Result<Vec<String>, String> {
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, sys};
    let described = |ordinal: i32| {
        let gpu = CudaContext::new(usize::try_from(ordinal).unwrap_or(0))?;
        let (gib, (major, minor)) = (gpu.total_mem()? as f64 / f64::from(1 << 30), gpu.compute_capability()?);
        Ok(format!("cuda:{ordinal} {}, {gib:.1} GiB, compute capability {major}.{minor}", gpu.name()?))
    };
    let all =
        CudaContext::device_count().and_then(|count| (0..count).map(described).collect::<Result<_, DriverError>>());
    check_driver(driver_version()?, sys::CUDA_VERSION)?;
    all.map_err(|error| first_line(&error))
}

#[cfg(feature = "cuda")]
fn first_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Opens GPU `ordinal`; returns candle's device and its name, or the reason why it cannot be used.
#[cfg(feature = "cuda")]
pub(crate) fn open(ordinal: usize, policy: PrecisionPolicy) -> std::result::Result<(Device, String), String> {
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
    let count = CudaContext::device_count().map_err(|error| first_line(&error))?;
    if usize::try_from(count).unwrap_or(0) <= ordinal {
        return Err(format!("this GPU does not exist; the driver reports {count}"));
    }
    check_driver(driver_version()?, sys::CUDA_VERSION)?;
    let device = Device::new_cuda_with_stream(ordinal).map_err(|error| first_line(&error))?;
    let cuda = device.as_cuda_device().map_err(|error| first_line(&error))?;
    // SAFETY: every tensor of this device is created, used and freed on its one stream. `collective/nccl.rs` also uses tensors on
    // another, and waits for it before they are used again or freed.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    let context = stream.context();
    let capability = context.compute_capability().map_err(|error| first_line(&error))?;
    if capability < (8, 0) && needs_bf16(policy) {
        let (major, minor) = capability;
        return Err(format!("its compute capability is {major}.{minor} and BF16 needs 8.0; use `--dtype fp16`"));
    }
    set_pool_release_threshold(cuda).map_err(|error| first_line(&error))?;
    disable_reduced_precision_reduction(&cuda.cublas_handle()).map_err(|error| first_line(&error))?;
    set_blas_workspace(cuda, capability)?;
    let name = context.name().map_err(|error| first_line(&error))?;
    Ok((device, format!("cuda:{ordinal} {name}")))
}

#[cfg(feature = "cuda")]
fn driver_version() -> std::result::Result<u32, String> {
    use candle_core::cuda_backend::cudarc::driver::sys;
    let mut version = 0;
    // SAFETY: the driver writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|error| error.to_string())?;
    u32::try_from(version).map_err(|error| error.to_string())
}

/// A driver runs PTX of the same and of earlier CUDA versions.
#[cfg(any(test, feature = "cuda"))]
fn check_driver(driver: u32, toolkit: u32) -> std::result::Result<(), String> {
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

/// Lets the driver keep freed memory for later allocations instead of releasing it at each synchronisation.
#[cfg(feature = "cuda")]
fn set_pool_release_threshold(
    device: &candle_core::CudaDevice,
) -> std::result::Result<(), candle_core::cuda_backend::cudarc::driver::DriverError> {
    use candle_core::cuda_backend::cudarc::driver::{result::mem_pool, sys};
    let (pool, mut threshold) = (memory_pool(device)?, u64::MAX);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a 64-bit number.
    unsafe { mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast()) }
}

/// Gives cuBLAS a workspace as large as its own, which it would allocate while a pass is recorded.
#[cfg(feature = "cuda")]
fn set_blas_workspace(device: &candle_core::CudaDevice, capability: (i32, i32)) -> std::result::Result<(), String> {
    use candle_core::cuda_backend::cudarc::cublas::sys;
    let bytes = if capability >= (9, 0) { 32 << 20 } else { 4 << 20 };
    // SAFETY: products write the workspace before they read it.
    let slice = unsafe { device.alloc::<u8>(bytes) }.map_err(|error| first_line(&error))?;
    // It stays as long as the handle, which belongs to the device.
    let (address, handle) = (slice.leak(), device.cublas_handle());
    // SAFETY: the handle is open, and the memory has this size.
    let set = unsafe { sys::cublasSetWorkspace_v2(*handle.handle(), address as *mut _, bytes) };
    set.result().map_err(|error| first_line(&error))
}

/// Stops cuBLAS from rounding partial sums of FP16 and BF16 products to 16 bits.
#[cfg(feature = "cuda")]
fn disable_reduced_precision_reduction(
    blas: &candle_core::cuda_backend::cudarc::cublas::CudaBlas,
) -> std::result::Result<(), candle_core::cuda_backend::cudarc::cublas::result::CublasError> {
    use candle_core::cuda_backend::cudarc::cublas::sys;
    let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle is open.
    unsafe { sys::cublasSetMathMode(*blas.handle(), mode) }.result()
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
