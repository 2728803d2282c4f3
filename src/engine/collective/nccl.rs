//! The exchange of tensors between GPUs through NCCL.
//!
//! The library is loaded when several processes have a GPU each, so a program for one GPU starts without it. Only its
//! sends and receives are used, because a reduction's bits would depend on the number of processes.

use super::{Job, ProcessGroup, TensorExchange, pause};
use crate::engine::device::DeviceContext;
use crate::engine::kernels::cuda::KernelFamily;
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DevicePtr, sys};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{DType, Device, Storage, Tensor, bail};
use libloading::Library;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const LIBRARY: &str = "libnccl.so.2";
/// The oldest version whose declarations were compared with those below.
const OLDEST: c_int = 21_800;
/// NCCL's variable that lets processes share a GPU.
const SHARED_GPU_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// The interval of checks for processes that have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The time that an exchange has to end after another process has: that may have been the last one.
const GRACE: Duration = Duration::from_secs(1);
/// `ncclInt8`.
const BYTE: c_int = 0;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// Defines the functions of the library and how they are found.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions, as `nccl.h` declares them.
        #[derive(Clone, Copy, Debug)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn find(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: `nccl.h` declares the same types.
                Ok(unsafe { Self { $($name: *library.get($symbol)?,)* } })
            }
        }
    };
}

functions! {
    version: b"ncclGetVersion"(*mut c_int) -> c_int;
    error_text: b"ncclGetErrorString"(c_int) -> *const c_char;
    unique_id: b"ncclGetUniqueId"(*mut UniqueId) -> c_int;
    init: b"ncclCommInitRank"(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int;
    async_error: b"ncclCommGetAsyncError"(*mut c_void, *mut c_int) -> c_int;
    abort: b"ncclCommAbort"(*mut c_void) -> c_int;
    destroy: b"ncclCommDestroy"(*mut c_void) -> c_int;
    group_start: b"ncclGroupStart"() -> c_int;
    group_end: b"ncclGroupEnd"() -> c_int;
    send: b"ncclSend"(*const c_void, usize, c_int, c_int, *mut c_void, sys::CUstream) -> c_int;
    receive: b"ncclRecv"(*mut c_void, usize, c_int, c_int, *mut c_void, sys::CUstream) -> c_int;
}

impl Functions {
    /// Loads the library for the rest of the process's life. An error is the reason why it cannot be used.
    fn load() -> std::result::Result<Self, String> {
        // SAFETY: the library's initialization has no requirements.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| error.to_string())?;
        let functions = Self::find(Box::leak(Box::new(library))).map_err(|error| error.to_string())?;
        let mut version = 0;
        // SAFETY: it writes one number.
        functions.check(unsafe { (functions.version)(&raw mut version) }).map_err(|error| error.to_string())?;
        if version < OLDEST {
            let name = |version: c_int| format!("{}.{}", version / 10_000, version / 100 % 100);
            // Before 2.9, a version was 1000 times its first number.
            let found = if version < 10_000 { format!("2.{}", version / 100 % 10) } else { name(version) };
            return Err(format!("{LIBRARY} is version {found}, and the oldest supported one is {}", name(OLDEST)));
        }
        Ok(functions)
    }

    fn check(&self, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it returns a constant text.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) };
        Err(Error::Collective(format!("NCCL: {} (its log: `NCCL_DEBUG=WARN`)", text.to_string_lossy())))
    }
}

/// A message of each process to the others before they connect.
#[derive(Serialize, Deserialize)]
struct Candidate {
    /// Whether its kernels compute the gradients' statistics on a GPU that no other process uses, or that processes may
    /// share.
    has_gpu: bool,
    /// The reason why it cannot load NCCL.
    problem: Option<String>,
}

impl Candidate {
    /// Our kernel for statistics can be continued by other processes. candle has none.
    fn new(DeviceContext { device, kernels, processes, .. }: &DeviceContext) -> (Self, Option<Functions>) {
        let mut families = kernels.name().split([':', ',']);
        let has_statistics = families.any(|name| name == KernelFamily::Summary.name());
        let may_share = std::env::var(SHARED_GPU_VARIABLE).is_ok_and(|value| value == "1");
        let has_gpu = device.is_cuda() && has_statistics && (*processes == 1 || may_share);
        match has_gpu.then(Functions::load) {
            Some(Ok(functions)) => (Self { has_gpu, problem: None }, Some(functions)),
            loaded => (Self { has_gpu, problem: loaded.and_then(std::result::Result::err) }, None),
        }
    }
}

/// A group of processes that have a GPU each. Messages go through another group.
///
/// Tensors are exchanged on a separate stream, which waits for the work that was queued before. The stream of the
/// computation never waits for an exchange: this thread does, because only a thread can notice that another process has
/// ended. So a copy to the host cannot wait for a process that has ended, and memory is freed after its exchange.
#[derive(Debug)]
struct OnGpus {
    group: Arc<dyn ProcessGroup>,
    functions: Functions,
    device: CudaDevice,
    stream: Arc<CudaStream>,
    state: Mutex<NcclState>,
}

#[derive(Debug)]
struct NcclState {
    /// NCCL's communicator; null after an error.
    communicator: AtomicPtr<c_void>,
    /// The exchanges that have not been waited for.
    pending: VecDeque<Pending>,
}

/// An exchange.
#[derive(Debug)]
struct Pending {
    /// The end of the work before it.
    ready: CudaEvent,
    done: CudaEvent,
    /// Keeps the memory.
    _tensors: [Vec<(usize, Tensor)>; 2],
}

/// Connects the GPUs of a group's processes. Returns the group itself if tensors are to go through host memory: on
/// CPUs, with candle's kernels, and if processes share a GPU. Fails if NCCL is missing or too old in any process.
pub(crate) fn connect(group: Arc<dyn ProcessGroup>, open: &DeviceContext) -> Result<Arc<dyn ProcessGroup>> {
    if group.world_size() == 1 {
        return Ok(group);
    }
    let (own, functions) = Candidate::new(open);
    let all = group.all_gather_messages(&own)?;
    if !all.iter().all(|candidate| candidate.has_gpu) {
        return Ok(group);
    }
    if let Some((rank, problem)) = all.iter().enumerate().find_map(|(rank, it)| Some((rank, it.problem.as_ref()?))) {
        let message = format!(
            "several processes on GPUs need NCCL, which {} cannot load: {problem}; install it (the wheel \
             `nvidia-nccl-cu13` has it) and add its folder to LD_LIBRARY_PATH, or exchange through host memory with \
             `--kernels candle`",
            group.name(rank)
        );
        return Err(Error::config("device", message));
    }
    let (Some(functions), Device::Cuda(device)) = (functions, &open.device) else { return Ok(group) };
    let mut id = UniqueId([0; 128]);
    if group.is_leader() {
        // SAFETY: it writes one id.
        functions.check(unsafe { (functions.unique_id)(&raw mut id) })?;
        group.broadcast(&id.0.to_vec())?;
    } else {
        let bytes: Vec<u8> = group.receive_message(0)?;
        id.0.copy_from_slice(&bytes);
    }
    device.cuda_stream().context().bind_to_thread().w()?;
    let mut communicator = null_mut();
    let world_size = group.world_size() as c_int;
    let rank = group.rank() as c_int;
    // SAFETY: the GPU's context is current, and all processes call it with the leader's id.
    let init = || unsafe { (functions.init)(&raw mut communicator, world_size, id, rank) };
    functions.check(watched(&*group, init))?;
    let state = Mutex::new(NcclState { communicator: AtomicPtr::new(communicator), pending: VecDeque::new() });
    let stream = device.cuda_stream().context().new_stream().w()?;
    let gpus = OnGpus { group, functions, device: device.clone(), stream, state };
    let one_each = || {
        let others = (0..gpus.world_size()).filter(|other| *other != gpus.rank());
        others.map(|other| Ok((other, Tensor::zeros(1, DType::F32, &open.device)?))).collect::<Result<Vec<_>>>()
    };
    let (out, into) = (one_each()?, one_each()?);
    // The first exchange of two processes connects them, and waits without a limit.
    watched(&*gpus.group, || gpus.start(out, into))?;
    gpus.wait()?;
    Ok(Arc::new(gpus))
}

/// Calls `join`, which waits for the other processes, and ends this process if one of them ends meanwhile, or at the
/// time limit.
fn watched<T>(group: &dyn ProcessGroup, join: impl FnOnce() -> T) -> T {
    let Some(job) = group.job() else { return join() };
    let (joins, joined) = channel::<()>();
    let is_joining = move |time| joined.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while is_joining(CHECK_INTERVAL) {
                if let Err(error) = group.check_peers()
                    && is_joining(GRACE)
                {
                    (job.on_timeout)(&error.to_string());
                }
                if began.elapsed() > job.limit {
                    let seconds = job.limit.as_secs();
                    (job.on_timeout)(&format!("NCCL did not connect all processes within {seconds} s"));
                }
            }
        });
        let result = join();
        drop(joins);
        result
    })
}

impl OnGpus {
    /// The address of a tensor on this GPU, and its size in bytes.
    fn memory(&self, tensor: &Tensor) -> candle_core::Result<(u64, usize)> {
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cuda(storage), Some((first, end))) = (&*storage, layout.contiguous_offsets()) else {
            bail!("a tensor on {:?} with gaps, or not on a GPU, cannot be exchanged", tensor.device().location())
        };
        let stream = self.device.cuda_stream();
        let start = match &storage.slice {
            CudaStorageSlice::F32(slice) => slice.device_ptr(&stream).0,
            CudaStorageSlice::F16(slice) => slice.device_ptr(&stream).0,
            CudaStorageSlice::BF16(slice) => slice.device_ptr(&stream).0,
            _ => bail!("a tensor of {:?} cannot be exchanged", tensor.dtype()),
        };
        let size = tensor.dtype().size_in_bytes();
        Ok((start + (first * size) as u64, (end - first) * size))
    }

    /// Queues the sends and receives as one operation.
    fn enqueue(&self, communicator: *mut c_void, out: &[(usize, Tensor)], into: &[(usize, Tensor)]) -> Result<()> {
        let Self { functions, stream, .. } = self;
        // SAFETY: the context is current; the tensors are alive until the exchange has ended.
        functions.check(unsafe { (functions.group_start)() })?;
        let queue = || {
            let stream = stream.cu_stream();
            for ((rank, tensor), is_sent) in out.iter().map(|it| (it, true)).chain(into.iter().map(|it| (it, false))) {
                let (address, bytes) = self.memory(tensor)?;
                let address = address as *mut c_void;
                let rank = *rank as c_int;
                // SAFETY: the tensor has this number of bytes.
                functions.check(unsafe {
                    if is_sent {
                        (functions.send)(address, bytes, BYTE, rank, communicator, stream)
                    } else {
                        (functions.receive)(address, bytes, BYTE, rank, communicator, stream)
                    }
                })?;
            }
            Ok(())
        };
        let queued = queue();
        // SAFETY: closes the group, also after an error: in an open group, NCCL would postpone the abort.
        queued.and(functions.check(unsafe { (functions.group_end)() }))
    }

    /// Waits for the end of an exchange, which never comes if another process has ended.
    fn poll(&self, communicator: *mut c_void, done: &CudaEvent, began: Instant) -> Result<()> {
        let limit = self.job().map(|job| job.limit);
        let (mut checked, mut lost) = (began, None);
        loop {
            if done.try_is_complete().w()? {
                return Ok(());
            }
            if checked.elapsed() > CHECK_INTERVAL {
                checked = Instant::now();
                let mut status = 0;
                // SAFETY: the communicator is open, and it writes one number.
                self.functions.check(unsafe { (self.functions.async_error)(communicator, &raw mut status) })?;
                self.functions.check(status)?;
                if let Err(error) = self.group.check_peers() {
                    lost.get_or_insert((checked, error));
                }
            }
            if let Some((_, error)) = lost.take_if(|(since, _)| since.elapsed() > GRACE) {
                return Err(error);
            }
            if let Some(limit) = limit.filter(|limit| began.elapsed() > *limit) {
                let seconds = limit.as_secs();
                return Err(Error::Collective(format!("an exchange between GPUs did not end within {seconds} s")));
            }
            pause(began);
        }
    }

    fn lock(&self) -> MutexGuard<'_, NcclState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `body` with the communicator, and ends all exchanges if it fails.
    fn with_communicator<T>(&self, state: &NcclState, body: impl FnOnce(*mut c_void) -> Result<T>) -> Result<T> {
        let communicator = state.communicator.load(Ordering::Relaxed);
        if communicator.is_null() {
            return Err(Error::Collective("the exchange between GPUs has failed before".into()));
        }
        let result = body(communicator);
        if result.is_err() {
            state.communicator.store(null_mut(), Ordering::Relaxed);
            // SAFETY: nothing uses the communicator after this. It ends kernels that wait for other processes.
            unsafe { (self.functions.abort)(communicator) };
        }
        result
    }
}

impl Drop for OnGpus {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let communicator = std::mem::replace(state.communicator.get_mut(), null_mut());
        if communicator.is_null() {
            return;
        }
        // After an error of this process, another one may never take part in a pending exchange.
        let close = if state.pending.is_empty() { self.functions.destroy } else { self.functions.abort };
        // SAFETY: nothing uses the communicator after this.
        unsafe { close(communicator) };
    }
}

impl TensorExchange for OnGpus {
    fn start(&self, out: Vec<(usize, Tensor)>, into: Vec<(usize, Tensor)>) -> Result<()> {
        let mut state = self.lock();
        let (ready, done) = self.with_communicator(&state, |communicator| {
            let ready = self.device.cuda_stream().record_event(None).w()?;
            self.stream.wait(&ready).w()?;
            self.enqueue(communicator, &out, &into)?;
            Ok((ready, self.stream.record_event(None).w()?))
        })?;
        state.pending.push_back(Pending { ready, done, _tensors: [out, into] });
        Ok(())
    }

    fn wait(&self) -> Result<Duration> {
        let mut state = self.lock();
        let Some(pending) = state.pending.pop_front() else { return Ok(Duration::ZERO) };
        // Its own work does not count as communication.
        pending.ready.synchronize().w()?;
        let began = Instant::now();
        self.with_communicator(&state, |communicator| self.poll(communicator, &pending.done, began))?;
        if let Some(job) = self.job() {
            job.add_comm_time(began);
        }
        Ok(began.elapsed())
    }
}

impl ProcessGroup for OnGpus {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        self.group.all_to_all(out, into)
    }

    fn job(&self) -> Option<&Job> {
        self.group.job()
    }

    fn gpus(&self) -> Option<&dyn TensorExchange> {
        Some(self)
    }

    fn check_peers(&self) -> Result<()> {
        self.group.check_peers()
    }
}
