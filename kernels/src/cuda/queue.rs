//! Launches on a GPU, in candle's stream.

use super::launch::{ALIGNMENT, Arguments, KernelLaunch, Queue};
use super::product::{self, Products};
use crate::op;
use crate::pass::PassFn;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaGraph, CudaSlice, DevicePtr, DeviceRepr, LaunchConfig, PinnedHostSlice, PushKernelArg, result, sys,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Storage, Tensor, bail};
use half::{bf16, f16};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// `.cu` files as nvcc has compiled them for this build, by name.
macro_rules! modules {
    ($($name:literal),*) => {
        [$(($name, include_str!(concat!(env!("OUT_DIR"), "/", $name, ".ptx")))),*]
    };
}
const MODULES: [(&str, &str); 10] = modules! {
    "adamw", "attention", "attention_mma", "attention_wgmma", "cross_entropy", "elementwise", "embedding", "norm", "rope",
    "summary"
};
/// Shared memory that a kernel gets without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

#[derive(Debug)]
pub(crate) struct CudaQueue {
    device: CudaDevice,
    capturing: AtomicBool,
    /// The last is the largest. Operations share it, since they run one after the other. All stay, because recorded
    /// passes have their addresses.
    scratch: Mutex<Vec<CudaSlice<f32>>>,
    /// Empty before the first product.
    pub(super) products: Mutex<Option<Products>>,
}

pub(crate) struct Graph(CudaGraph);
// SAFETY: the driver's graphs belong to no thread, and `CudaKernels` uses them under a lock.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// Whether the graph allocates or frees memory: its addresses are valid only while it runs.
    fn has_memory(&self) -> Result<bool> {
        let graph = self.0.cu_graph();
        let mut count = 0;
        // SAFETY: the graph exists, and the driver writes the number of its nodes, then at most as many nodes.
        unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) }.result().w()?;
        let mut nodes = vec![std::ptr::null_mut(); count];
        // SAFETY: as above.
        unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) }.result().w()?;
        for node in nodes {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            // SAFETY: it is a node of the graph.
            unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result().w()?;
            let memory =
                [sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC, sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE];
            if memory.contains(&kind) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[derive(Debug)]
pub(crate) struct StagedBlock {
    words: CudaSlice<u32>,
    /// The host's copy, and the event after it is sent; `None` before the first is overwritten.
    staged: Option<(PinnedHostSlice<u32>, CudaEvent)>,
}

impl Drop for StagedBlock {
    /// Frees the host's copy after it is sent.
    fn drop(&mut self) {
        if let Some((_, sent)) = &self.staged {
            let _ = sent.synchronize();
        }
    }
}

/// A struct of arguments as cudarc passes it on: by value.
#[repr(transparent)]
struct Argument<A>(A);
// SAFETY: `Arguments` are plain numbers in the layout of the kernel's parameter.
unsafe impl<A: Arguments> DeviceRepr for Argument<A> {}

impl CudaQueue {
    pub(crate) fn new(device: &CudaDevice) -> Self {
        Self {
            device: device.clone(),
            capturing: AtomicBool::new(false),
            scratch: Mutex::default(),
            products: Mutex::default(),
        }
    }

    /// The address of memory of this device. The caller keeps the memory until its users are launched.
    pub(super) fn start<T>(&self, slice: &CudaSlice<T>) -> u64 {
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
        let block_dim = (launch.threads, 1, 1);
        let shared_mem_bytes = launch.shared_bytes;
        // SAFETY: the caller's promise.
        unsafe { builder.launch(LaunchConfig { grid_dim: (x, y, z), block_dim, shared_mem_bytes }) }.w()?;
        Ok(())
    }

    fn scratch(&self, len: usize) -> Result<u64> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if scratch.last().is_none_or(|last| last.len() < len) {
            if self.is_capturing() {
                bail!("it needs memory during the pass");
            }
            // SAFETY: kernels write scratch memory before they read it.
            scratch.push(unsafe { self.device.alloc::<f32>(len.next_power_of_two()) }?);
        }
        Ok(scratch.last().map_or(0, |last| self.start(last)))
    }

    fn zero(&self, tensor: &Tensor) -> Result<bool> {
        let Some(address) = self.address(tensor)? else { return Ok(false) };
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let stream = self.device.cuda_stream();
        // SAFETY: the tensor has no gaps, and its memory stays until the stream has cleared it.
        unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }.w()?;
        Ok(true)
    }

    type Graph = Graph;

    fn capture(&self, pass: PassFn<'_>) -> Result<Graph> {
        let stream = self.device.cuda_stream();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        self.capturing.store(true, Ordering::Relaxed);
        let ran = pass();
        self.capturing.store(false, Ordering::Relaxed);
        // cudarc keeps errors of memory that is dropped, and would return them instead of ending the capture.
        let dropped = stream.context().check_err();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        ran?;
        let Some(graph) = graph.w()? else { bail!("the driver has recorded nothing") };
        dropped.w()?;
        let graph = Graph(graph);
        if graph.has_memory()? {
            bail!("an operation allocates memory during the pass");
        }
        Ok(graph)
    }

    fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        graph.0.launch().w()
    }

    type Block = StagedBlock;

    fn block(&self, words: &[u32]) -> Result<(u64, StagedBlock)> {
        let words = self.device.clone_htod(words)?;
        Ok((self.start(&words), StagedBlock { words, staged: None }))
    }

    /// Copies from page-locked memory, because the host would wait for the launches before a copy from other memory.
    fn overwrite(&self, StagedBlock { words, staged }: &mut StagedBlock, new: &[u32]) -> Result<()> {
        if staged.is_none() {
            let stream = self.device.cuda_stream();
            let flags = None;
            // SAFETY: the memory is written before it is read.
            let memory = unsafe { stream.context().alloc_pinned::<u32>(new.len()) }.w()?;
            *staged = Some((memory, stream.context().new_event(flags).w()?));
        }
        let Some((staged, sent)) = staged.as_mut().filter(|(staged, _)| [staged.len(), words.len()] == [new.len(); 2])
        else {
            bail!("the block of inputs has another size")
        };
        // cudarc's own event is not recorded while event tracking is disabled.
        sent.synchronize().w()?;
        staged.as_mut_slice().w()?.copy_from_slice(new);
        self.device.memcpy_htod(&*staged, words)?;
        sent.record(&self.device.cuda_stream()).w()
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

    fn product(&self, op: &op::Matmul<'_>, bias: Option<&Tensor>) -> Result<bool> {
        product::product(self, op, bias)
    }
}
