//! Where tensors live and what computes with them: from the names in a configuration to candle's device and [`Kernels`].

use crate::engine::kernels::{Choice, Fused, Kernels};
use crate::precision::{Dtype, PrecisionPolicy};
use crate::{Error, Result};
use candle_core::Device;
use std::str::FromStr;
use std::sync::Arc;

/// The device a configuration asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the first GPU if this program can use it, otherwise on the CPU.
    Auto,
    /// On the CPU.
    Cpu,
    /// On the GPU with this CUDA ordinal.
    Cuda(usize),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let ordinal = match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        ordinal.map(Self::Cuda).ok_or_else(|| format!("`{text}` is unknown; use `auto`, `cpu`, `cuda` or `cuda:0`"))
    }
}

/// A device, ready for tensors.
#[derive(Clone, Debug)]
pub struct OpenDevice {
    /// Where tensors are made.
    pub device: Device,
    /// For example `cpu`, or `cuda:0 NVIDIA H200`.
    pub name: String,
    /// What computes on it.
    pub kernels: Arc<dyn Kernels>,
}

impl OpenDevice {
    /// The CPU, with the kernels that are fastest there.
    pub fn cpu() -> Self {
        Self { device: Device::Cpu, name: "cpu".into(), kernels: Arc::new(Fused) }
    }

    /// Free memory of a GPU, in bytes.
    pub fn free_bytes(&self) -> Option<u64> {
        free_bytes(&self.device)
    }

    /// The most memory of a GPU that tensors have held at once, in bytes.
    pub fn peak_bytes(&self) -> Option<u64> {
        peak_bytes(&self.device)
    }
}

impl Place {
    /// For the process with number `local_rank` of those on this machine: the first takes the GPU that was asked for, the others
    /// take those after it in turn.
    #[must_use]
    pub fn of_process(self, local_rank: usize) -> Self {
        let (first, count) = match self {
            Self::Auto => (0, gpu_count()),
            Self::Cpu => return self,
            Self::Cuda(first) => (first, gpu_count()),
        };
        if local_rank == 0 || first >= count { self } else { Self::Cuda((first + local_rank) % count) }
    }

    /// Opens the device for a model under `policy`, with the kernels of this `choice`. Where any device will do and the GPU
    /// cannot be used, `notice` is told why.
    ///
    /// # Errors
    /// [`Error::Config`] for `device` where a GPU was asked for that cannot be used, and for `kernels` where the device has
    /// none of this kind.
    pub fn open(self, policy: PrecisionPolicy, choice: Choice, notice: &mut dyn FnMut(String)) -> Result<OpenDevice> {
        let (device, name) = match self {
            Self::Cuda(ordinal) => gpu(ordinal, policy)
                .map_err(|message| Error::config("device", format!("`cuda:{ordinal}`: {message}; or use `cpu`")))?,
            Self::Auto if cfg!(feature = "cuda") => gpu(0, policy).unwrap_or_else(|message| {
                notice(format!("computing on the CPU: {message}"));
                (Device::Cpu, "cpu".into())
            }),
            Self::Auto | Self::Cpu => (Device::Cpu, "cpu".into()),
        };
        let kernels = choice.on(&device, notice)?;
        Ok(OpenDevice { device, name, kernels })
    }
}

/// Whether products of this policy have BF16 operands.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "asked of GPUs alone"))]
fn needs_bf16(policy: PrecisionPolicy) -> bool {
    [policy.compute, policy.grads, policy.residual].contains(&Dtype::BF16)
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize, _: PrecisionPolicy) -> std::result::Result<(Device, String), String> {
    Err("this program was built without GPU support; build it with `--features cuda`, see README.md".into())
}

/// GPUs that the driver shows.
#[cfg(not(feature = "cuda"))]
pub(crate) fn gpu_count() -> usize {
    0
}

/// GPUs that the driver shows.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_count() -> usize {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

#[cfg(not(feature = "cuda"))]
fn free_bytes(_: &Device) -> Option<u64> {
    None
}

#[cfg(feature = "cuda")]
fn free_bytes(device: &Device) -> Option<u64> {
    let (free, _) = device.as_cuda_device().ok()?.cuda_stream().context().mem_get_info().ok()?;
    Some(free as u64)
}

#[cfg(not(feature = "cuda"))]
fn peak_bytes(_: &Device) -> Option<u64> {
    None
}

#[cfg(feature = "cuda")]
fn peak_bytes(device: &Device) -> Option<u64> {
    use candle_core::cuda_backend::cudarc::driver::{result::mem_pool, sys};
    let (pool, mut most) = (memory_pool(device.as_cuda_device().ok()?).ok()?, 0u64);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    // SAFETY: the attribute is a 64-bit number.
    unsafe { mem_pool::get_attribute(pool, attribute, (&raw mut most).cast()) }.ok()?;
    Some(most)
}

/// Where the driver takes a GPU's memory from.
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

/// The driver's GPUs in words, or why there is none that can be used.
#[cfg(feature = "cuda")]
pub(crate) fn gpus() -> std::result::Result<Vec<String>, String> {
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

/// GPU `ordinal` and its name, or why it cannot be used.
#[cfg(feature = "cuda")]
fn gpu(ordinal: usize, policy: PrecisionPolicy) -> std::result::Result<(Device, String), String> {
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
    let count = CudaContext::device_count().map_err(|error| first_line(&error))?;
    if usize::try_from(count).unwrap_or(0) <= ordinal {
        return Err(format!("there is no such GPU, the driver shows {count}"));
    }
    check_driver(driver_version()?, sys::CUDA_VERSION)?;
    let device = Device::new_cuda_with_stream(ordinal).map_err(|error| first_line(&error))?;
    let cuda = device.as_cuda_device().map_err(|error| first_line(&error))?;
    // SAFETY: every tensor of this device is created, used and freed on its one stream.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    let context = stream.context();
    let capability = context.compute_capability().map_err(|error| first_line(&error))?;
    if capability < (8, 0) && needs_bf16(policy) {
        let (major, minor) = capability;
        return Err(format!("its compute capability is {major}.{minor} and BF16 needs 8.0; use `--dtype fp16`"));
    }
    keep_freed_memory(cuda).map_err(|error| first_line(&error))?;
    keep_sums_wide(&cuda.cublas_handle()).map_err(|error| first_line(&error))?;
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

/// A driver runs PTX of its own CUDA version and of earlier versions.
#[cfg(any(test, feature = "cuda"))]
fn check_driver(driver: u32, toolkit: u32) -> std::result::Result<(), String> {
    if driver >= toolkit {
        return Ok(());
    }
    let number = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let (runs, built) = (number(driver), number(toolkit));
    Err(format!(
        "the driver runs CUDA {runs} and this program was built with CUDA {built}; update the driver, or build with an older toolkit"
    ))
}

/// Lets the driver keep freed memory for later allocations instead of releasing it at each synchronisation.
#[cfg(feature = "cuda")]
fn keep_freed_memory(
    device: &candle_core::CudaDevice,
) -> std::result::Result<(), candle_core::cuda_backend::cudarc::driver::DriverError> {
    use candle_core::cuda_backend::cudarc::driver::{result::mem_pool, sys};
    let (pool, mut threshold) = (memory_pool(device)?, u64::MAX);
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a 64-bit number.
    unsafe { mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast()) }
}

/// Stops cuBLAS from rounding partial sums of FP16 and BF16 products to 16 bits.
#[cfg(feature = "cuda")]
fn keep_sums_wide(
    blas: &candle_core::cuda_backend::cudarc::cublas::CudaBlas,
) -> std::result::Result<(), candle_core::cuda_backend::cudarc::cublas::result::CublasError> {
    use candle_core::cuda_backend::cudarc::cublas::sys;
    let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    // SAFETY: the handle is open.
    unsafe { sys::cublasSetMathMode(*blas.handle(), mode) }.result()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_named_with_both_versions() {
        check_driver(13_000, 13_000).unwrap();
        check_driver(13_010, 12_080).unwrap();
        let message = check_driver(12_080, 13_000).unwrap_err();
        assert!(message.contains("CUDA 12.8") && message.contains("CUDA 13.0"), "{message}");
    }

    #[test]
    fn places_are_told_by_name() {
        let names = [("auto", Place::Auto), ("cpu", Place::Cpu), ("cuda", Place::Cuda(0)), ("cuda:3", Place::Cuda(3))];
        for (name, place) in names {
            assert_eq!(name.parse(), Ok(place));
        }
        for name in ["gpu", "cuda:", "cuda:-1", "cuda3", ""] {
            let message = name.parse::<Place>().unwrap_err();
            assert!(message.starts_with(&format!("`{name}` is unknown")), "{message}");
        }
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_cpu_build_says_how_to_rebuild() {
        let policy = "fp16".parse().unwrap();
        let open = |place: Place| place.open(policy, Choice::Auto, &mut |notice| panic!("{notice}"));
        assert_eq!(open(Place::Auto).unwrap().name, "cpu");
        assert_eq!(open(Place::Cpu).unwrap().name, "cpu");
        let message = open(Place::Cuda(1)).unwrap_err().to_string();
        assert!(message.starts_with("device: `cuda:1`: ") && message.contains("--features cuda"), "{message}");
    }
}
