//! Launches on a GPU, in candle's stream.

use super::launch::{ALIGNMENT, Arguments, KernelLaunch, Queue};
use super::product;
use crate::op;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Storage, Tensor, bail};
use half::{bf16, f16};

/// The `.cu` files as nvcc has compiled them for this build.
const MODULES: [(&str, &str); 9] = [
    ("adamw", include_str!(concat!(env!("OUT_DIR"), "/adamw.ptx"))),
    ("attention", include_str!(concat!(env!("OUT_DIR"), "/attention.ptx"))),
    ("attention_mma", include_str!(concat!(env!("OUT_DIR"), "/attention_mma.ptx"))),
    ("cross_entropy", include_str!(concat!(env!("OUT_DIR"), "/cross_entropy.ptx"))),
    ("elementwise", include_str!(concat!(env!("OUT_DIR"), "/elementwise.ptx"))),
    ("embedding", include_str!(concat!(env!("OUT_DIR"), "/embedding.ptx"))),
    ("norm", include_str!(concat!(env!("OUT_DIR"), "/norm.ptx"))),
    ("rope", include_str!(concat!(env!("OUT_DIR"), "/rope.ptx"))),
    ("summary", include_str!(concat!(env!("OUT_DIR"), "/summary.ptx"))),
];
/// Shared memory that a kernel gets without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

/// A GPU as a queue.
#[derive(Debug)]
pub(crate) struct CudaQueue {
    device: CudaDevice,
}

/// A struct of arguments as cudarc passes it on: by value.
#[repr(transparent)]
struct Argument<A>(A);
// SAFETY: `Arguments` are plain numbers in the layout of the kernel's parameter.
unsafe impl<A: Arguments> DeviceRepr for Argument<A> {}

impl CudaQueue {
    pub(crate) fn new(device: &CudaDevice) -> Self {
        Self { device: device.clone() }
    }

    /// The address of memory of this device. The caller keeps the memory until its users are launched.
    fn start<T>(&self, slice: &CudaSlice<T>) -> u64 {
        slice.device_ptr(&self.device.cuda_stream()).0
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }
}

impl Queue for CudaQueue {
    unsafe fn launch<A: Arguments>(&self, launch: &KernelLaunch, arguments: &A) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let Some((module, ptx)) = MODULES.iter().find(|(name, _)| *name == launch.module) else {
            bail!("there is no module `{}`", launch.module)
        };
        let function = self.device.get_or_load_custom_func(&launch.kernel, module, ptx)?;
        if launch.shared_bytes > SHARED_BYTES {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, launch.shared_bytes as i32).w()?;
        }
        let argument = Argument(*arguments);
        let mut builder = function.builder();
        builder.arg(&argument);
        let [x, y, z] = launch.grid;
        let (block_dim, shared_mem_bytes) = ((launch.threads, 1, 1), launch.shared_bytes);
        // SAFETY: the caller's promise.
        unsafe { builder.launch(LaunchConfig { grid_dim: (x, y, z), block_dim, shared_mem_bytes }) }.w()?;
        Ok(())
    }

    type Scratch = CudaSlice<f32>;

    fn scratch(&self, len: usize) -> Result<(u64, Self::Scratch)> {
        // SAFETY: kernels write scratch memory before they read it.
        let slice = unsafe { self.device.alloc::<f32>(len) }?;
        // It is freed in the stream's order, after the kernels that use it.
        Ok((self.start(&slice), slice))
    }

    fn address(&self, tensor: &Tensor) -> Result<Option<u64>> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            bail!("a tensor of {:?} for a kernel of a GPU", tensor.device())
        };
        let Some((first, _)) = layout.contiguous_offsets() else { return Ok(None) };
        let dtype = tensor.dtype();
        let start = match dtype {
            DType::F32 => self.start(storage.as_cuda_slice::<f32>()?),
            DType::F16 => self.start(storage.as_cuda_slice::<f16>()?),
            DType::BF16 => self.start(storage.as_cuda_slice::<bf16>()?),
            DType::U32 => self.start(storage.as_cuda_slice::<u32>()?),
            DType::U8 => self.start(storage.as_cuda_slice::<u8>()?),
            other => bail!("no CUDA kernel for {other:?}"),
        };
        let address = start + (first * dtype.size_in_bytes()) as u64;
        Ok(address.is_multiple_of(ALIGNMENT).then_some(address))
    }

    fn product(&self, op: &op::Matmul<'_>) -> Result<bool> {
        product::product(self, op)
    }
}
