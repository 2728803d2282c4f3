//! NVIDIA GPUs: whether the driver suits this program, and how candle's device is set up.

use super::{check_driver, needs_bf16};
use crate::precision::PrecisionPolicy;
use candle_core::cuda_backend::cudarc::cublas::{self, CudaBlas};
use candle_core::cuda_backend::cudarc::driver::result::mem_pool;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, sys};
use candle_core::{CudaDevice, Device};

/// The number of GPUs that the driver reports.
pub(crate) fn count() -> usize {
    CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

/// The identity of a GPU or of a partition, which no setting of CUDA's environment changes.
pub(crate) fn uuid(device: &Device) -> Option<[u8; 16]> {
    let uuid = device.as_cuda_device().ok()?.cuda_stream().context().uuid().ok()?;
    Some(uuid.bytes.map(|byte| byte as u8))
}

pub(crate) fn free_bytes(device: &Device) -> Option<u64> {
    let (free, _) = device.as_cuda_device().ok()?.cuda_stream().context().mem_get_info().ok()?;
    Some(free as u64)
}

/// Whether this GPU has products of four warps.
pub(crate) fn has_wgmma(device: &Device) -> bool {
    let capability = device.as_cuda_device().map(|cuda| cuda.cuda_stream().context().compute_capability());
    matches!(capability, Ok(Ok((9, 0))))
}

pub(crate) fn peak_bytes(device: &Device) -> Option<u64> {
    let pool = memory_pool(device.as_cuda_device().ok()?).ok()?;
    let mut most = 0u64;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    // SAFETY: the attribute is a 64-bit number.
    unsafe { mem_pool::get_attribute(pool, attribute, (&raw mut most).cast()) }.ok()?;
    Some(most)
}

/// The driver's memory pool of a GPU.
fn memory_pool(device: &CudaDevice) -> Result<sys::CUmemoryPool, DriverError> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: the device is open.
    unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, device.cuda_stream().context().cu_device()) }.result()?;
    Ok(pool)
}

/// A description of each GPU, or the reason why none can be used.
pub(crate) fn all() -> Result<Vec<String>, String> {
    let described = |ordinal: i32| {
        let gpu = CudaContext::new(usize::try_from(ordinal).unwrap_or(0))?;
        let gib = gpu.total_mem()? as f64 / f64::from(1 << 30);
        let (major, minor) = gpu.compute_capability()?;
        Ok(format!("cuda:{ordinal} {}, {gib:.1} GiB, compute capability {major}.{minor}", gpu.name()?))
    };
    let all =
        CudaContext::device_count().and_then(|count| (0..count).map(described).collect::<Result<_, DriverError>>());
    check_driver(driver_version()?, sys::CUDA_VERSION)?;
    all.map_err(first_line)
}

fn first_line(error: impl std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Opens GPU `ordinal`; returns candle's device and its name, or the reason why it cannot be used.
pub(crate) fn open(ordinal: usize, policy: PrecisionPolicy) -> Result<(Device, String), String> {
    let count = CudaContext::device_count().map_err(first_line)?;
    if usize::try_from(count).unwrap_or(0) <= ordinal {
        return Err(format!("this GPU does not exist; the driver reports {count}"));
    }
    check_driver(driver_version()?, sys::CUDA_VERSION)?;
    let device = Device::new_cuda_with_stream(ordinal).map_err(first_line)?;
    let cuda = device.as_cuda_device().map_err(first_line)?;
    // SAFETY: every tensor of this device is created, used and freed on its one stream. `collective/nccl.rs` also uses
    // tensors on another, and waits for it before they are used again or freed.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    let context = stream.context();
    let capability = context.compute_capability().map_err(first_line)?;
    if capability < (8, 0) && needs_bf16(policy) {
        let (major, minor) = capability;
        return Err(format!("its compute capability is {major}.{minor} and BF16 needs 8.0; use `--dtype fp16`"));
    }
    set_pool_release_threshold(cuda).map_err(first_line)?;
    disable_reduced_precision_reduction(&cuda.cublas_handle()).map_err(first_line)?;
    set_blas_workspace(cuda, capability)?;
    let name = context.name().map_err(first_line)?;
    Ok((device, format!("cuda:{ordinal} {name}")))
}

fn driver_version() -> Result<u32, String> {
    let mut version = 0;
    // SAFETY: the driver writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|error| error.to_string())?;
    u32::try_from(version).map_err(|error| error.to_string())
}

/// Lets the driver keep freed memory for later allocations instead of releasing it at each synchronization.
fn set_pool_release_threshold(device: &CudaDevice) -> Result<(), DriverError> {
    let pool = memory_pool(device)?;
    let mut threshold = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a 64-bit number.
    unsafe { mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast()) }
}

/// Gives cuBLAS a workspace as large as its own, which it would allocate while a pass is recorded.
fn set_blas_workspace(device: &CudaDevice, capability: (i32, i32)) -> Result<(), String> {
    let bytes = if capability >= (9, 0) { 32 << 20 } else { 4 << 20 };
    // SAFETY: products write the workspace before they read it.
    let slice = unsafe { device.alloc::<u8>(bytes) }.map_err(first_line)?;
    // It stays as long as the handle, which belongs to the device.
    let (address, handle) = (slice.leak(), device.cublas_handle());
    // SAFETY: the handle is open, and the memory has this size.
    let set = unsafe { cublas::sys::cublasSetWorkspace_v2(*handle.handle(), address as *mut _, bytes) };
    set.result().map_err(first_line)
}

/// Stops cuBLAS from rounding partial sums of FP16 and BF16 products to 16 bits.
fn disable_reduced_precision_reduction(blas: &CudaBlas) -> Result<(), cublas::result::CublasError> {
    let mode = cublas::sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle is open.
    unsafe { cublas::sys::cublasSetMathMode(*blas.handle(), mode) }.result()
}
