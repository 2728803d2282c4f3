//! Launches: their arguments and grid, and the queue that takes them.

use crate::dropout::Dropout;
use crate::op::{self, Op};
use candle_core::{DType, Result, Tensor, bail};
use std::fmt;

/// Bytes that an operand's address is a multiple of: the widest access of a kernel.
pub(crate) const ALIGNMENT: u64 = 16;

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

/// A kernel with its grid.
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
    /// Shared memory of a block.
    pub(crate) shared_bytes: u32,
}

impl KernelLaunch {
    /// Threads that take `packs` packs of neighbours. They loop if there are more packs than keep the largest GPUs
    /// busy.
    pub(crate) fn for_packs(module: &'static str, kernel: String, packs: usize) -> Result<Self> {
        const THREADS: usize = 256;
        const MAX_BLOCKS: usize = 132 * 8;
        let grid = [to_u32(packs.div_ceil(THREADS).min(MAX_BLOCKS))?, 1, 1];
        Ok(Self { module, kernel, grid, threads: THREADS as u32, shared_bytes: 0 })
    }

    /// One warp for each of `rows` rows, eight warps a block.
    pub(crate) fn warp_per_row(module: &'static str, kernel: String, rows: usize) -> Result<Self> {
        const WARPS: usize = 8;
        let grid = [to_u32(rows.div_ceil(WARPS))?, 1, 1];
        Ok(Self { module, kernel, grid, threads: 32 * WARPS as u32, shared_bytes: 0 })
    }
}

/// Takes launches and runs them in order.
pub(crate) trait Queue: fmt::Debug + Send + Sync {
    /// Launches a kernel; a grid without blocks is nothing to do.
    ///
    /// # Safety
    /// Each address in `arguments` is memory of this device, as large as the kernel expects.
    unsafe fn launch<A: Arguments>(&self, launch: &KernelLaunch, arguments: &A) -> Result<()>;

    /// Owns scratch memory.
    type Scratch;

    /// The address of memory for `len` FP32 numbers, and its owner, which may go once the kernels that use it are launched.
    fn scratch(&self, len: usize) -> Result<(u64, Self::Scratch)>;

    /// The address of `tensor`, on this device; `None` if it has gaps or an address that kernels do not take.
    fn address(&self, tensor: &Tensor) -> Result<Option<u64>>;

    /// Computes a product with a library of the device. `false` if the library has no such product.
    fn product(&self, op: &op::Matmul<'_>) -> Result<bool> {
        let _ = op;
        Ok(false)
    }

    /// Called before the launches of an operation.
    fn begin(&self, op: &Op<'_>) {
        let _ = op;
    }
}

/// A dropout mask as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct DropoutArgs {
    draw: [u32; 2],
    key: [u32; 2],
    site: u32,
    threshold: u32,
    keep_scale: f32,
    unused: u32,
}

impl DropoutArgs {
    /// The mask of `dropout`; `None` drops nothing.
    pub(super) fn new(dropout: Option<Dropout>) -> Self {
        let Some(dropout) = dropout else {
            return Self { draw: [0; 2], key: [0; 2], site: 0, threshold: 0, keep_scale: 1.0, unused: 0 };
        };
        let (draw, key, site, threshold, keep_scale) = dropout.numbers();
        Self { draw: [draw as u32, (draw >> 32) as u32], key, site, threshold, keep_scale, unused: 0 }
    }
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
