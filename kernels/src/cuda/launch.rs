//! Launches: their buffers, arguments and grid, and the queue that takes them.

#[cfg(doc)]
use crate::columns::ColumnSlice;
use crate::dropout::Dropout;
use crate::op::{self, Op};
use candle_core::{DType, Result, Tensor, bail};
use std::fmt;

/// Elements in the memory of a device, contiguous and aligned to [`ALIGNMENT`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceSlice {
    /// The address of the first one.
    pub(crate) address: u64,
    /// Their type.
    pub(crate) dtype: DType,
    /// How many there are.
    pub(crate) len: usize,
}

/// Bytes that a buffer's address is a multiple of: the widest access of a kernel.
pub(crate) const ALIGNMENT: u64 = 16;

impl DeviceSlice {
    /// The address of `len` elements of type `dtype`; an error if the buffer does not hold them.
    pub(crate) fn expect(self, what: &str, dtype: DType, len: usize) -> Result<u64> {
        if self.dtype != dtype || self.len < len {
            bail!("a kernel's `{what}` must hold {len} of {dtype:?}, not {} of {:?}", self.len, self.dtype);
        }
        if !self.address.is_multiple_of(ALIGNMENT) {
            bail!("a kernel's `{what}` is not aligned to {ALIGNMENT} bytes");
        }
        Ok(self.address)
    }

    /// The address of `len` elements of the buffer's type, for an operand of any type.
    pub(crate) fn of(self, what: &str, len: usize) -> Result<u64> {
        self.expect(what, self.dtype, len)
    }

    /// How many bytes its elements take.
    #[cfg(test)]
    pub(crate) fn bytes(self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }
}

/// Some columns of rows in a buffer, as [`ColumnSlice`] are of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) buffer: DeviceSlice,
    /// How many there are.
    pub(crate) len: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// The first column.
    pub(crate) first: usize,
    /// How many columns.
    pub(crate) count: usize,
}

impl Rows {
    /// All columns of a matrix.
    pub(crate) fn whole(buffer: DeviceSlice, [len, count]: [usize; 2]) -> Self {
        Self { buffer, len, stride: count, first: 0, count }
    }

    /// Whether heads of `width` elements begin where the widest accesses can.
    pub(crate) fn aligns(self, width: usize) -> bool {
        let bytes = |elements: usize| (elements * self.buffer.dtype.size_in_bytes()) as u64;
        [self.first, self.stride, width].into_iter().all(|elements| bytes(elements).is_multiple_of(ALIGNMENT))
    }

    /// The address of the first element; an error if the buffer does not hold the rows.
    pub(crate) fn address(self, what: &str) -> Result<u64> {
        if self.first + self.count > self.stride {
            bail!("a kernel's `{what}` has no columns {}..{}", self.first, self.first + self.count);
        }
        let start = self.buffer.of(what, self.len * self.stride)?;
        Ok(start + (self.first * self.buffer.dtype.size_in_bytes()) as u64)
    }
}

/// A struct of arguments as the `.cu` files declare it.
///
/// # Safety
/// The type is `#[repr(C)]`, has no padding, and mirrors the C++ struct of the kernels it is launched with.
pub(crate) unsafe trait Arguments: Copy {}

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
        Ok(Self {
            module,
            kernel,
            grid: [to_u32(rows.div_ceil(WARPS))?, 1, 1],
            threads: 32 * WARPS as u32,
            shared_bytes: 0,
        })
    }
}

/// Takes launches and runs them in order.
pub(crate) trait Queue: fmt::Debug + Send + Sync {
    /// Launches a kernel; a grid without blocks is nothing to do.
    ///
    /// # Safety
    /// Each address in `arguments` is a buffer of this device, as large as the kernel expects.
    unsafe fn launch<A: Arguments>(&self, launch: &KernelLaunch, arguments: &A) -> Result<()>;

    /// Owns scratch memory.
    type Scratch;

    /// Memory for `len` FP32 numbers, and its owner, which may go once the kernels that use it are launched.
    fn scratch(&self, len: usize) -> Result<(DeviceSlice, Self::Scratch)>;

    /// The memory of `tensor`, on this device; `None` if it has gaps or an address that kernels do not take.
    fn buffer(&self, tensor: &Tensor) -> Result<Option<DeviceSlice>>;

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

/// The name the kernels' entries have for a type.
pub(crate) fn suffix(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => bail!("no CUDA kernel for {other:?}"),
    }
}

/// The entry of `kernel` for these types.
pub(crate) fn kernel_symbol(kernel: &str, dtypes: &[DType]) -> Result<String> {
    dtypes.iter().try_fold(kernel.to_owned(), |name, &dtype| Ok(name + "_" + suffix(dtype)?))
}

/// A number that kernels keep in 32 bits.
pub(crate) fn to_u32(n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{n} does not fit the kernels' 32-bit sizes: use a smaller batch"),
    }
}
