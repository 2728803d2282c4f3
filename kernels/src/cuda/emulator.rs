//! Runs the kernels on a CPU: compiles the `.cu` files as C++ with `emulator.h` in CUDA's place, and launches them.
#![allow(clippy::unwrap_used, reason = "only tests use it, and a panic is a failed test")]

use super::launch::{Arguments, KernelLaunch, MAX_SHARED_BYTES, Queue};
use crate::op::{Access, Op};
use candle_core::{DType, Result, Tensor, TensorId, bail};
use half::{bf16, f16};
use rayon::prelude::*;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex};
use std::{env, fs};

/// Undefined behaviour, misaligned vectors among it, ends the test. Products are not contracted, so that results do not
/// depend on the compiler.
const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fsanitize=undefined",
    "-fno-sanitize-recover=all",
];

type EntryPoint = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    *const u32,
    usize,
    *const c_void,
    usize,
    *const Range,
    usize,
    u32,
    *mut c_char,
    usize,
) -> c_int;

#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    first: usize,
    end: usize,
    writable: bool,
}

static ENTRY_POINT: LazyLock<std::result::Result<EntryPoint, String>> = LazyLock::new(|| {
    let path = library()?;
    let path = CString::new(path.to_string_lossy().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the library is the one built below; its constructors only register the kernels.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        return Err(format!("cannot load {}", path.to_string_lossy()));
    }
    // SAFETY: the handle is open, and the name ends in a zero.
    let symbol = unsafe { libc::dlsym(handle, c"emulator_launch".as_ptr()) };
    if symbol.is_null() {
        return Err("the emulator has no entry point".into());
    }
    // SAFETY: emulator.cpp declares the function with these arguments.
    Ok(unsafe { std::mem::transmute::<*mut c_void, EntryPoint>(symbol) })
});

/// The compiled emulator, rebuilt if a source has changed.
fn library() -> std::result::Result<PathBuf, String> {
    let text = |error: std::io::Error| error.to_string();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut contents = FLAGS.join(" ");
    let mut sources = Vec::new();
    for folder in [kernels.clone(), kernels.join("cuda")] {
        let mut files: Vec<_> = fs::read_dir(folder)
            .map_err(text)?
            .map(|entry| entry.map(|e| e.path()))
            .collect::<std::io::Result<_>>()
            .map_err(text)?;
        files.sort();
        for file in files {
            let extension = file.extension().and_then(|e| e.to_str()).unwrap_or_default();
            if ["cu", "cuh", "cpp", "h"].contains(&extension) {
                contents += &fs::read_to_string(&file).map_err(text)?;
                if ["cu", "cpp"].contains(&extension) {
                    sources.push(file);
                }
            }
        }
    }
    let folder = env::current_exe().map_err(text)?.with_file_name("cuda-emulator");
    let mut hasher = DefaultHasher::new();
    contents.hash(&mut hasher);
    let library = folder.join(format!("{:016x}.so", hasher.finish()));
    if !library.exists() {
        fs::create_dir_all(&folder).map_err(text)?;
        let build = tempfile::tempdir_in(&folder).map_err(text)?;
        compile(&sources, build.path())?;
        fs::rename(build.path().join("emulator.so"), &library).map_err(text)?;
    }
    Ok(library)
}

fn compile(sources: &[PathBuf], folder: &Path) -> std::result::Result<(), String> {
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let run = |arguments: &[&str]| {
        let output = Command::new(&compiler).args(FLAGS).args(arguments).output();
        match output.map_err(|error| format!("{compiler}: {error}; the kernels' tests need a C++ compiler"))? {
            output if output.status.success() => Ok(()),
            output => Err(format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr))),
        }
    };
    let objects: Vec<_> =
        (0..sources.len()).map(|i| folder.join(format!("{i}.o")).to_string_lossy().into_owned()).collect();
    let jobs = sources.par_iter().zip(&objects);
    jobs.try_for_each(|(source, object)| run(&["-x", "c++", "-c", &source.to_string_lossy(), "-o", object]))?;
    let library = folder.join("emulator.so").to_string_lossy().into_owned();
    let mut arguments = vec!["-shared", "-o", &library];
    arguments.extend(objects.iter().map(String::as_str));
    run(&arguments)
}

/// Aligned as a device's allocator aligns.
#[repr(C, align(256))]
#[derive(Clone, Copy, Debug)]
struct AlignedBytes([u8; 256]);

#[derive(Debug)]
struct Allocation {
    lines: Vec<AlignedBytes>,
    /// The tensor that the memory stands for.
    tensor: Option<Tensor>,
    bytes: usize,
    writable: bool,
}

impl Allocation {
    fn address(&self) -> u64 {
        self.lines.as_ptr() as u64
    }
}

/// A device with separate memory: kernels may access only memory that it has allocated. For a CPU tensor it allocates
/// memory of the tensor's size, which holds its values during a launch.
#[derive(Debug)]
pub(crate) struct Emulator {
    order: u32,
    memory: Mutex<Vec<Allocation>>,
    /// The tensors that the operation in progress only reads.
    read_only: Mutex<Vec<TensorId>>,
}

impl Emulator {
    /// Every order in which fibers and blocks run: a race makes two of them differ.
    pub(crate) const ORDERS: [u32; 3] = [0, 1, 2];

    pub(crate) fn new(order: u32) -> Self {
        Self { order, memory: Mutex::default(), read_only: Mutex::default() }
    }

    /// Memory with these bytes, which stands for `tensor`.
    fn keep(&self, bytes: &[u8], tensor: Option<&Tensor>) -> u64 {
        let mut lines = vec![AlignedBytes([0xff; 256]); bytes.len().div_ceil(256).max(1)];
        for (line, part) in lines.iter_mut().zip(bytes.chunks(256)) {
            line.0[..part.len()].copy_from_slice(part);
        }
        let writable = tensor.is_none_or(|tensor| !self.read_only.lock().unwrap().contains(&tensor.id()));
        let allocation = Allocation { lines, tensor: tensor.cloned(), bytes: bytes.len(), writable };
        let address = allocation.address();
        self.memory.lock().unwrap().push(allocation);
        address
    }

    /// Copies tensors to their memory before a launch, or the written values back after it.
    fn copy(&self, back: bool) -> Result<()> {
        for allocation in self.memory.lock().unwrap().iter_mut().filter(|allocation| allocation.writable || !back) {
            let Some(tensor) = &allocation.tensor else { continue };
            // SAFETY: lines are bytes and nothing else.
            let (_, all, _) = unsafe { allocation.lines.align_to_mut::<u8>() };
            let memory = &mut all[..allocation.bytes];
            if back {
                let values = Tensor::from_raw_buffer(memory, tensor.dtype(), tensor.dims(), tensor.device())?;
                tensor.slice_set(&values, 0, 0)?;
            } else {
                memory.copy_from_slice(&bytes_of(tensor)?);
            }
        }
        Ok(())
    }
}

/// The elements of a contiguous CPU tensor.
pub(super) fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let tensor = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::U32 => tensor.to_vec1::<u32>()?.into_iter().flat_map(u32::to_ne_bytes).collect(),
        DType::U8 => tensor.to_vec1()?,
        DType::F16 => tensor.to_vec1::<f16>()?.into_iter().flat_map(f16::to_ne_bytes).collect(),
        DType::BF16 => tensor.to_vec1::<bf16>()?.into_iter().flat_map(bf16::to_ne_bytes).collect(),
        _ => tensor.to_vec1::<f32>()?.into_iter().flat_map(f32::to_ne_bytes).collect(),
    })
}

impl Queue for Emulator {
    unsafe fn launch<A: Arguments>(&self, launch: &KernelLaunch, arguments: &A) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        assert!(launch.shared_bytes as usize <= MAX_SHARED_BYTES, "{launch:?} fits into no block");
        let entry_point = match &*ENTRY_POINT {
            Ok(entry_point) => entry_point,
            Err(error) => bail!("{error}"),
        };
        let ranges: Vec<Range> = (self.memory.lock().unwrap().iter())
            .map(|allocation| {
                let first = allocation.address() as usize;
                Range { first, end: first + allocation.bytes, writable: allocation.writable }
            })
            .collect();
        let Ok(name) = CString::new(launch.kernel.as_str()) else { bail!("a kernel's name holds a zero") };
        self.copy(false)?;
        let mut message = [0; 600];
        // SAFETY: the library checks the arguments' size and every access to memory against `ranges`.
        let failed = unsafe {
            entry_point(
                name.as_ptr(),
                launch.grid.as_ptr(),
                [launch.threads, 1, 1].as_ptr(),
                launch.shared_bytes as usize,
                std::ptr::from_ref(arguments).cast(),
                size_of::<A>(),
                ranges.as_ptr(),
                ranges.len(),
                self.order,
                message.as_mut_ptr(),
                message.len(),
            )
        };
        if failed != 0 {
            // SAFETY: the library ends the message with a zero.
            bail!("{}", unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy());
        }
        self.copy(true)
    }

    /// Full of NaN, so that a read before the first write shows.
    fn scratch(&self, len: usize) -> Result<u64> {
        Ok(self.keep(&vec![0xff; len * size_of::<f32>()], None))
    }

    type Graph = ();
    type Block = ();

    fn block(&self, _: &[u32]) -> Result<(u64, ())> {
        bail!("the emulator has memory for one operation at a time")
    }

    fn address(&self, tensor: &Tensor) -> Result<Option<u64>> {
        let known = |memory: &Allocation| memory.tensor.as_ref().is_some_and(|known| known.id() == tensor.id());
        let address = self.memory.lock().unwrap().iter().find(|memory| known(memory)).map(Allocation::address);
        Ok(Some(match address {
            Some(address) => address,
            None => self.keep(&bytes_of(tensor)?, Some(tensor)),
        }))
    }

    fn begin(&self, op: &Op<'_>) {
        self.memory.lock().unwrap().clear();
        let mut read_only = self.read_only.lock().unwrap();
        read_only.clear();
        if let Op::Summarize(op) = op {
            read_only.extend(op.tensors.iter().map(|(tensor, _)| tensor.id()));
        }
        op.for_each_tensor(&mut |tensor, access| match access {
            Access::Read => read_only.push(tensor.id()),
            Access::Write => read_only.retain(|id| *id != tensor.id()),
        });
    }
}
