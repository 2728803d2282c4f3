//! A GPU through NVIDIA's driver: its memory, launches in one stream, and products by cuBLASLt in [`blas`].
//!
//! Both libraries are looked for at run time, so that a program with GPU support starts where there is none.

mod blas;
mod pinned;

use super::launch::{Buffer, Launch, Memory, Queue};
use super::product::{Multiply, Operands, Product};
use blas::Blas;
use candle_core::{DType, Result, bail};
use cudarc::driver::result::{DriverError, function, module};
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute, CUgraphInstantiate_flags, CUmodule, CUstreamCaptureMode, cudaError_enum,
};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, result, sys};
use pinned::Pinned;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_void};
use std::fmt::Display;
use std::sync::Arc;

/// Each `.cu` file's name with its fat binary.
const MODULES: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/cuda_modules.rs"));
/// What the fat binaries' PTX asks for, and BF16 with it.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);
/// Shared memory that a kernel gets without asking.
const SHARED_BYTES: u32 = 48 << 10;

/// One GPU, in use by one thread at a time.
pub(crate) struct Gpu {
    name: String,
    // Dropped in this order.
    /// Records of launches by key, where they are to be made.
    graphs: Option<RefCell<HashMap<u32, Record>>>,
    blas: Blas,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
    modules: RefCell<HashMap<&'static str, CUmodule>>,
    kernels: RefCell<HashMap<String, Kernel>>,
    /// Bytes of each allocation, by address.
    memory: RefCell<BTreeMap<u64, usize>>,
    scratch: Cell<Option<Buffer>>,
}

/// What is known of the launches of one key.
enum Record {
    /// They have run once, so that kernels are loaded, products planned and memory allocated, of which nothing can be recorded.
    Ran,
    /// As the driver replays them.
    Graph(CudaGraph),
}

#[derive(Clone, Copy)]
struct Kernel {
    function: CUfunction,
    shared_bytes: u32,
}

// SAFETY: the driver's handles belong to no thread, and every call makes the context current first.
unsafe impl Send for Gpu {}

impl Gpu {
    /// The GPU that CUDA counts as `ordinal`; with `graphs` it replays what it is told is the same each time.
    pub(crate) fn open(ordinal: usize, graphs: bool) -> Result<Self> {
        // SAFETY: this loads the library and looks no further.
        if !unsafe { sys::is_culib_present() } {
            bail!("there is no NVIDIA driver (libcuda)");
        }
        let count = CudaContext::device_count().map_err(driver("look for GPUs"))?;
        if usize::try_from(count).unwrap_or(0) <= ordinal {
            bail!("there is no GPU {ordinal}: the driver shows {count}");
        }
        let context = CudaContext::new(ordinal).map_err(driver("open the GPU"))?;
        let capability = context.compute_capability().map_err(driver("ask the GPU for its capability"))?;
        if capability < LEAST_CAPABILITY {
            let (major, minor) = capability;
            bail!("the GPU's compute capability is {major}.{minor}; the kernels need 8.0 or later, as BF16 does");
        }
        // SAFETY: everything runs in the one stream below.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(driver("make a stream"))?;
        let name = format!("cuda:{ordinal} {}", context.name().map_err(driver("ask the GPU for its name"))?);
        let blas = Blas::new()?;
        let gpu = Self {
            name,
            graphs: graphs.then(RefCell::default),
            blas,
            stream,
            context,
            modules: RefCell::default(),
            kernels: RefCell::default(),
            memory: RefCell::default(),
            scratch: Cell::default(),
        };
        gpu.blas.give_workspace(gpu.allocate(DType::U8, blas::WORKSPACE_BYTES)?);
        Ok(gpu)
    }

    /// Bytes that can still be allocated.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        Ok(self.context.mem_get_info().map_err(driver("ask for the GPU's memory"))?.0 as u64)
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(driver("use the GPU"))
    }

    fn kernel(&self, launch: &Launch) -> Result<CUfunction> {
        let mut kernels = self.kernels.borrow_mut();
        let kernel = match kernels.get_mut(&launch.kernel) {
            Some(kernel) => kernel,
            None => kernels.entry(launch.kernel.clone()).or_insert(self.load(launch)?),
        };
        if launch.shared_bytes > kernel.shared_bytes {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a module that stays loaded.
            unsafe { function::set_function_attribute(kernel.function, attribute, launch.shared_bytes as i32) }
                .map_err(driver(&format!("give `{}` {} bytes of shared memory", launch.kernel, launch.shared_bytes)))?;
            kernel.shared_bytes = launch.shared_bytes;
        }
        Ok(kernel.function)
    }

    fn load(&self, launch: &Launch) -> Result<Kernel> {
        let mut modules = self.modules.borrow_mut();
        let module = match modules.get(launch.module) {
            Some(module) => *module,
            None => *modules.entry(launch.module).or_insert(load_module(launch.module)?),
        };
        let Ok(name) = CString::new(launch.kernel.as_str()) else { bail!("a kernel's name holds a zero") };
        // SAFETY: the module is loaded and stays so.
        let function = unsafe { module::get_function(module, name) }
            .map_err(driver(&format!("find the kernel `{}` in `{}`", launch.kernel, launch.module)))?;
        Ok(Kernel { function, shared_bytes: SHARED_BYTES })
    }

    /// The address of `bytes` bytes of `buffer`, which must lie in this GPU's memory.
    fn address(&self, buffer: Buffer, bytes: usize) -> Result<u64> {
        let memory = self.memory.borrow();
        let inside = memory.range(..=buffer.address).next_back().is_some_and(|(&first, &all)| {
            bytes <= buffer.bytes() && buffer.address + buffer.bytes() as u64 <= first + all as u64
        });
        if !inside {
            bail!("{bytes} bytes of {buffer:?} are no part of the GPU's memory");
        }
        self.bind()?;
        Ok(buffer.address)
    }
}

fn load_module(name: &'static str) -> Result<CUmodule> {
    let Some((_, image)) = MODULES.iter().find(|(module, _)| *module == name) else {
        bail!("there is no module `{name}`");
    };
    // The driver reads the image's header as words.
    let mut aligned = vec![0u64; image.len().div_ceil(size_of::<u64>())];
    // SAFETY: there is room for the image, and any bytes make words.
    unsafe { std::ptr::copy_nonoverlapping(image.as_ptr(), aligned.as_mut_ptr().cast(), image.len()) };
    // SAFETY: the image is a fat binary as nvcc has made it.
    unsafe { module::load_data(aligned.as_ptr().cast()) }.map_err(driver(&format!("load the kernels of `{name}`")))
}

/// An error of the driver as one of the engine's.
fn driver(what: &str) -> impl FnOnce(DriverError) -> candle_core::Error {
    move |error| failed(what, &error)
}

fn failed(what: &str, error: &impl Display) -> candle_core::Error {
    candle_core::Error::Msg(format!("CUDA could not {what}: {error}"))
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Nobody is left to hear of a failure.
        let _ = self.bind().map(|()| self.stream.synchronize());
        // Before the kernels that they launch.
        self.graphs = None;
        for &address in self.memory.borrow().keys() {
            // SAFETY: the address is of an allocation, and nothing runs that reads it.
            let _ = unsafe { result::free_sync(address) };
        }
        for &module in self.modules.borrow().values() {
            // SAFETY: as above.
            let _ = unsafe { module::unload(module) };
        }
    }
}

impl Memory for Gpu {
    type Pinned = Pinned;

    fn name(&self) -> &str {
        &self.name
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.bind()?;
        let bytes = (len * dtype.size_in_bytes()).max(1);
        // SAFETY: what lies there is never read before it is written.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => {
                self.memory.borrow_mut().insert(address, bytes);
                Ok(Buffer { address, dtype, len })
            }
            Err(DriverError(cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                let (asked, free) = (mib(bytes as u64), mib(self.free_bytes()?));
                bail!("the GPU has {free:.0} MiB free where {asked:.0} MiB more are needed: use a smaller batch")
            }
            Err(error) => Err(failed("allocate memory", &error)),
        }
    }

    fn zero(&self, buffer: Buffer) -> Result<()> {
        let (address, bytes) = (self.address(buffer, buffer.bytes())?, buffer.bytes());
        // SAFETY: the bytes were found to be ours.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) }.map_err(driver("clear memory"))
    }

    fn upload(&self, bytes: &[u8], buffer: Buffer) -> Result<()> {
        let address = self.address(buffer, bytes.len())?;
        // SAFETY: the bytes were found to be ours. The call returns when it has read `bytes`, which are pageable memory.
        unsafe { result::memcpy_htod_async(address, bytes, self.stream.cu_stream()) }.map_err(driver("send data"))
    }

    fn pin(&self, bytes: usize) -> Result<Pinned> {
        self.bind()?;
        Pinned::new(&self.context, bytes)
    }

    fn send(&self, from: &mut Pinned, buffer: Buffer) -> Result<()> {
        let (address, stream) = (self.address(buffer, buffer.bytes())?, self.stream.cu_stream());
        let bytes = from.for_copy(buffer.bytes())?;
        // SAFETY: the bytes on both sides were found to be ours, and are let alone until the event behind the copy.
        unsafe { result::memcpy_htod_async(address, bytes, stream) }.map_err(driver("send data"))?;
        from.mark(stream)
    }

    fn post(&self, buffer: Buffer, to: &mut Pinned) -> Result<()> {
        let (address, stream) = (self.address(buffer, buffer.bytes())?, self.stream.cu_stream());
        let bytes = to.for_copy(buffer.bytes())?;
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_async(bytes, address, stream) }.map_err(driver("fetch data"))?;
        to.mark(stream)
    }

    fn settled<'a>(&self, pinned: &'a mut Pinned) -> Result<&'a mut [u8]> {
        self.bind()?;
        pinned.settled()
    }

    fn download(&self, buffer: Buffer, bytes: &mut [u8]) -> Result<()> {
        let address = self.address(buffer, bytes.len())?;
        // SAFETY: the bytes were found to be ours, and are waited for.
        unsafe { result::memcpy_dtoh_async(bytes, address, self.stream.cu_stream()) }.map_err(driver("fetch data"))?;
        // An error of an earlier kernel shows here at the latest.
        self.stream.synchronize().map_err(driver("finish what was launched"))
    }
}

impl Queue for Gpu {
    unsafe fn launch_raw(&self, launch: &Launch, arguments: *const c_void, _: usize) -> Result<()> {
        self.bind()?;
        let function = self.kernel(launch)?;
        let ([x, y, z], stream) = (launch.grid, self.stream.cu_stream());
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        let launched = unsafe {
            let threads = (launch.threads, 1, 1);
            let mut parameters = [arguments.cast_mut()];
            result::launch_kernel(function, (x, y, z), threads, launch.shared_bytes, stream, &mut parameters)
        };
        launched.map_err(driver(&format!("launch `{}`", launch.kernel)))
    }

    fn recorded(&self, key: u32, launches: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(graphs) = &self.graphs else { return launches() };
        let mut graphs = graphs.borrow_mut();
        let graph = match graphs.remove(&key) {
            None => {
                graphs.insert(key, Record::Ran);
                return launches();
            }
            Some(Record::Ran) => self.record(launches)?,
            Some(Record::Graph(graph)) => graph,
        };
        let replayed = graph.launch().map_err(driver("replay a step"));
        graphs.insert(key, Record::Graph(graph));
        replayed
    }

    fn scratch(&self, len: usize) -> Result<Buffer> {
        if let Some(buffer) = self.scratch.get().filter(|buffer| buffer.len >= len) {
            return Ok(buffer);
        }
        // Kernels on their way still use the smaller one, which stays until the end: a few calls of the first step.
        let buffer = self.allocate(DType::F32, len)?;
        self.scratch.set(Some(buffer));
        Ok(buffer)
    }
}

impl Gpu {
    /// What `launches` would do, to be replayed.
    fn record(&self, launches: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
        self.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(driver("begin to record a step"))?;
        let launched = launches();
        // Recording ends whatever has become of the launches.
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
        launched?;
        match graph.map_err(driver("record a step"))? {
            Some(graph) => Ok(graph),
            None => bail!("CUDA has recorded nothing of a step"),
        }
    }
}

impl Multiply for Gpu {
    fn takes(&self, product: Product) -> Result<bool> {
        self.bind()?;
        self.blas.takes(product)
    }

    unsafe fn multiply(&self, product: Product, operands: Operands) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { self.blas.multiply(product, operands, self.stream.cu_stream().cast()) }
    }
}
