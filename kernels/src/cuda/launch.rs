//! Launches: their arguments and grid, and the queue that takes them.

use crate::op::{self, Op};
use crate::pass::PassFn;
use candle_core::{DType, Result, Tensor, bail};
use std::fmt;

/// Bytes that an operand's address is a multiple of: the widest access of a kernel.
pub(crate) const ALIGNMENT: u64 = 16;
/// Elements that a thread of most kernels takes at a time.
pub(super) const PACK: usize = 8;
/// Shared memory that a block can have on every GPU since compute capability 8.0.
pub(super) const MAX_SHARED_BYTES: usize = 99 << 10;

/// A struct of arguments as the `.cu` files declare it.
///
/// # Safety
/// The type is `#[repr(C)]`, has no padding, and mirrors the C++ struct of the kernels it is launched with.
pub(crate) unsafe trait Arguments: Copy {}

/// Defines structs of arguments. They mirror the C++ structs of the same names.
macro_rules! arguments {
    ($(struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct $name {
            $($field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "there is padding");
        // SAFETY: C's layout without padding, of the C++ struct's fields.
        unsafe impl crate::cuda::launch::Arguments for $name {}
    )*};
}
pub(crate) use arguments;

#[derive(Clone, Debug)]
pub(crate) struct KernelLaunch {
    /// The `.cu` file.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the emulator has all kernels in one library"))]
    pub(crate) module: &'static str,
    /// The entry in it.
    pub(crate) kernel: String,
    /// Blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

impl KernelLaunch {
    /// A grid of blocks with these threads and bytes of shared memory.
    pub(crate) fn new(
        module: &'static str,
        kernel: String,
        [x, y, z]: [usize; 3],
        [threads, shared_bytes]: [usize; 2],
    ) -> Result<Self> {
        let grid = [to_u32(x)?, to_u32(y)?, to_u32(z)?];
        let threads = to_u32(threads)?;
        Ok(Self { module, kernel, grid, threads, shared_bytes: to_u32(shared_bytes)? })
    }

    /// A thread for each of `packs` packs of neighbors.
    pub(crate) fn for_packs(module: &'static str, kernel: String, packs: usize) -> Result<Self> {
        const THREADS: usize = 256;
        Self::new(module, kernel, [packs.div_ceil(THREADS), 1, 1], [THREADS, 0])
    }

    /// One warp for each of `rows` rows, eight warps a block.
    pub(crate) fn warp_per_row(module: &'static str, kernel: String, rows: usize) -> Result<Self> {
        const WARPS: usize = 8;
        Self::new(module, kernel, [rows.div_ceil(WARPS), 1, 1], [32 * WARPS, 0])
    }
}

/// Takes launches and runs them in order.
pub(crate) trait Queue: fmt::Debug + Send + Sync {
    /// Launches a kernel; a grid without blocks is nothing to do.
    ///
    /// # Safety
    /// Each address in `arguments` is memory of this device, as large as the kernel expects.
    unsafe fn launch<A: Arguments>(&self, launch: &KernelLaunch, arguments: &A) -> Result<()>;

    /// The address of memory for `len` FP32 numbers, which the next operation with scratch memory overwrites.
    fn scratch(&self, len: usize) -> Result<u64>;

    /// The address of `tensor`, on this device; `None` if it has gaps or an address that kernels do not take.
    fn address(&self, tensor: &Tensor) -> Result<Option<u64>>;

    /// Computes a product with a library of the device, and adds `bias` to each row. `false` if the library has no such
    /// product.
    fn product(&self, _op: &op::Matmul<'_>, _bias: Option<&Tensor>) -> Result<bool> {
        Ok(false)
    }

    /// Fills a tensor with zeros. `false` if it has gaps.
    fn zero(&self, tensor: &Tensor) -> Result<bool> {
        tensor.zero_set().map(|()| true)
    }

    type Graph: fmt::Debug + Send;

    /// Records the launches of `pass` instead of running them.
    fn capture(&self, _pass: PassFn<'_>) -> Result<Self::Graph> {
        bail!("this device records nothing")
    }

    fn is_capturing(&self) -> bool {
        false
    }

    /// Runs a recorded pass.
    fn replay(&self, _graph: &Self::Graph) -> Result<()> {
        bail!("this device records nothing")
    }

    /// Memory for numbers of the host.
    type Block: fmt::Debug + Send;

    /// New memory with these numbers, and its address.
    fn block(&self, words: &[u32]) -> Result<(u64, Self::Block)>;

    /// Replaces the numbers, after all earlier launches.
    fn overwrite(&self, _block: &mut Self::Block, _words: &[u32]) -> Result<()> {
        bail!("this device records nothing")
    }

    /// Called before the launches of an operation.
    fn begin(&self, _op: &Op<'_>) {}
}

/// A dropout mask as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DropoutArgs {
    /// The address of two words, so that a recorded launch has a new mask each time.
    pub(super) draw: u64,
    pub(super) key: [u32; 2],
    pub(super) site: u32,
    /// 0 drops nothing.
    pub(super) threshold: u32,
    pub(super) keep_scale: f32,
    pub(super) unused: u32,
}

/// The entry of `kernel` for these types.
pub(crate) fn kernel_symbol(kernel: &str, dtypes: &[DType]) -> Result<String> {
    let mut name = kernel.to_owned();
    for dtype in dtypes {
        name += match dtype {
            DType::F32 => "_f32",
            DType::F16 => "_f16",
            DType::BF16 => "_bf16",
            other => bail!("no CUDA kernel for {other:?}"),
        };
    }
    Ok(name)
}

/// A number that kernels keep in 32 bits.
pub(crate) fn to_u32(n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{n} does not fit the kernels' 32-bit sizes: use a smaller batch"),
    }
}
