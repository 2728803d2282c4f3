//! Opens the device and the [`Kernels`] that a configuration names.

use super::gpu;
use crate::engine::kernels::{CandleKernels, Fused, KernelBackend, Kernels};
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use candle_core::Device;
use std::str::FromStr;
use std::sync::Arc;

/// The device a configuration asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSpec {
    /// The first GPU if this program can use it, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this CUDA ordinal.
    Cuda(usize),
    /// The GPU of an Apple computer.
    Metal,
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let ordinal = match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "metal" => return Ok(Self::Metal),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        ordinal
            .map(Self::Cuda)
            .ok_or_else(|| format!("`{text}` is unknown; use `auto`, `cpu`, `cuda`, `cuda:0` or `metal`"))
    }
}

/// A device, ready for tensors.
#[derive(Clone, Debug)]
pub struct DeviceContext {
    /// candle's device.
    pub device: Device,
    /// For example `cpu`, or `cuda:0 NVIDIA H200`.
    pub name: String,
    /// The kernels for tensors of the device.
    pub kernels: Arc<dyn Kernels>,
    /// Number of processes that use its memory.
    pub processes: usize,
}

impl DeviceContext {
    /// The CPU, with the kernels that are fastest there.
    pub fn cpu() -> Self {
        Self { device: Device::Cpu, name: "cpu".into(), kernels: Arc::new(Fused), processes: 1 }
    }

    /// Free memory of a GPU, in bytes.
    pub fn free_bytes(&self) -> Option<u64> {
        gpu::free_bytes(&self.device)
    }

    /// The peak memory of a GPU's tensors, in bytes.
    pub fn peak_bytes(&self) -> Option<u64> {
        gpu::peak_bytes(&self.device)
    }
}

impl DeviceSpec {
    /// The device of the process `local_rank` on this machine: the requested GPU for the first one, the following GPUs
    /// in turn for the others.
    #[must_use]
    pub fn for_local_rank(self, local_rank: usize) -> Self {
        let (first, count) = match self {
            Self::Auto => (0, gpu::count()),
            Self::Cpu | Self::Metal => return self,
            Self::Cuda(first) => (first, gpu::count()),
        };
        if local_rank == 0 || first >= count { self } else { Self::Cuda((first + local_rank) % count) }
    }

    /// Opens the device for a model under `policy`, with the kernels of this `choice`. If [`DeviceSpec::Auto`] cannot
    /// use the GPU, `notice` receives the reason. Fails with [`Error::Config`] for `device` if the requested GPU cannot
    /// be used, and [`Error::Engine`] if the device has no kernels of this kind.
    pub fn open(
        self,
        policy: PrecisionPolicy,
        choice: KernelBackend,
        notice: &mut dyn FnMut(String),
    ) -> Result<DeviceContext> {
        let (device, name) = match self {
            Self::Cuda(ordinal) => gpu::open(ordinal, policy)
                .map_err(|message| Error::config("device", format!("`cuda:{ordinal}`: {message}; or use `cpu`")))?,
            Self::Metal => gpu::open_metal()
                .map_err(|message| Error::config("device", format!("`metal`: {message}; or use `cpu`")))?,
            Self::Auto if cfg!(feature = "cuda") => gpu::open(0, policy).unwrap_or_else(|message| {
                notice(format!("computing on the CPU: {message}"));
                (Device::Cpu, "cpu".into())
            }),
            Self::Auto | Self::Cpu => (Device::Cpu, "cpu".into()),
        };
        let kernels = kernels(choice, &device, notice)?;
        Ok(DeviceContext { device, name, kernels, processes: 1 })
    }
}

/// The kernels for tensors of `device`; `notice` receives a message about CUDA kernels that failed their preflight.
pub(crate) fn kernels(
    choice: KernelBackend,
    device: &Device,
    notice: &mut dyn FnMut(String),
) -> Result<Arc<dyn Kernels>> {
    Ok(match choice {
        KernelBackend::Auto | KernelBackend::Fused | KernelBackend::Eager if device.is_cpu() => Arc::new(Fused),
        KernelBackend::Candle => Arc::new(CandleKernels),
        KernelBackend::Auto if device.is_metal() => Arc::new(CandleKernels),
        KernelBackend::Auto | KernelBackend::Fused => with_cuda(device, true, notice)?,
        KernelBackend::Eager => with_cuda(device, false, notice)?,
    })
}

/// Our CUDA kernels that passed the preflight, and candle's. Passes may be recorded if `records`.
#[cfg(feature = "cuda")]
fn with_cuda(device: &Device, records: bool, notice: &mut dyn FnMut(String)) -> candle_core::Result<Arc<dyn Kernels>> {
    super::kernels::cuda::before_candle(super::preflight::passing_families(device, records, notice), device)
}

#[cfg(not(feature = "cuda"))]
fn with_cuda(device: &Device, _: bool, _: &mut dyn FnMut(String)) -> candle_core::Result<Arc<dyn Kernels>> {
    candle_core::bail!("there are no fused kernels for {:?}", device.location())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed() {
        let names = [
            ("auto", DeviceSpec::Auto),
            ("cpu", DeviceSpec::Cpu),
            ("cuda", DeviceSpec::Cuda(0)),
            ("cuda:3", DeviceSpec::Cuda(3)),
            ("metal", DeviceSpec::Metal),
        ];
        for (name, spec) in names {
            assert_eq!(name.parse(), Ok(spec));
        }
    }
}
