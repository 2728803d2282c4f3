//! What a launch consists of, and who takes it.

use candle_core::{DType, Result, bail};
use std::ffi::c_void;

/// Elements in the memory of a device, contiguous and aligned to 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    /// Where they begin.
    pub(crate) address: u64,
    /// What they are.
    pub(crate) dtype: DType,
    /// How many there are.
    pub(crate) len: usize,
}

impl Buffer {
    /// Where `len` elements of type `dtype` begin; an error if this is not what the buffer holds.
    pub(crate) fn expect(self, what: &str, dtype: DType, len: usize) -> Result<u64> {
        if self.dtype != dtype || self.len < len {
            bail!("a kernel's `{what}` must hold {len} of {dtype:?}, not {} of {:?}", self.len, self.dtype);
        }
        if !self.address.is_multiple_of(16) {
            bail!("a kernel's `{what}` is not aligned to 16 bytes");
        }
        Ok(self.address)
    }

    /// The same for a row kernel's operand of whatever type.
    pub(crate) fn of(self, what: &str, len: usize) -> Result<u64> {
        self.expect(what, self.dtype, len)
    }

    /// The `len` elements from `first` on.
    pub(crate) fn part(self, first: usize, len: usize) -> Result<Self> {
        if first + len > self.len {
            bail!("elements {first} to {} of a buffer of {}", first + len, self.len);
        }
        Ok(Self { address: self.address + (first * self.dtype.size_in_bytes()) as u64, len, ..self })
    }

    /// The first `len` elements as the bytes they are made of, or bytes as `len` elements.
    pub(crate) fn cast(self, dtype: DType, len: usize) -> Result<Self> {
        if len * dtype.size_in_bytes() > self.bytes() {
            bail!("{len} elements of {dtype:?} in a buffer of {} bytes", self.bytes());
        }
        Ok(Self { dtype, len, ..self })
    }

    /// How many bytes its elements take.
    pub(crate) fn bytes(self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }
}

/// What is the same on host and device, byte for byte.
///
/// # Safety
/// The type is `#[repr(C)]`, made of numbers, without padding, and valid whatever its bits are.
pub(crate) unsafe trait Plain: Copy + Default {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for f64 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}

/// The bytes of plain values.
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: the type has no padding, so that all bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of plain values, to be overwritten.
pub(crate) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes make valid values.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// A struct of arguments as the `.cu` files declare it.
///
/// # Safety
/// The type is `#[repr(C)]`, has no padding, and mirrors the C++ struct of the kernels it is launched with.
pub(crate) unsafe trait Arguments: Copy {}

/// A kernel with its grid.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
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

impl Launch {
    /// One warp for each of `rows` rows, eight warps a block.
    pub(crate) fn warp_a_row(module: &'static str, kernel: String, rows: usize) -> Result<Self> {
        const WARPS: usize = 8;
        Ok(Self {
            module,
            kernel,
            grid: [word(rows.div_ceil(WARPS))?, 1, 1],
            threads: 32 * WARPS as u32,
            shared_bytes: 0,
        })
    }
}

/// Takes launches and runs them in order.
pub(crate) trait Queue {
    /// # Safety
    /// `arguments` points to the `size` bytes of the struct that the kernel takes, and the addresses in it are those of
    /// buffers of this device, as large as the kernel expects.
    unsafe fn launch_raw(&self, launch: &Launch, arguments: *const c_void, size: usize) -> Result<()>;

    /// Memory for `len` FP32 numbers that is free until the next call: what is launched later runs later.
    fn scratch(&self, len: usize) -> Result<Buffer>;

    /// Runs `launches`, which are the same in every call with this `key`: what is launched may be recorded, and replayed in
    /// the place of later calls.
    fn recorded(&self, key: u32, launches: impl FnOnce() -> Result<()>) -> Result<()> {
        let _ = key;
        launches()
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The addresses in `arguments` are those of buffers of this device, as large as the kernel expects.
    unsafe fn launch<A: Arguments>(&self, launch: &Launch, arguments: &A) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch_raw(launch, std::ptr::from_ref(arguments).cast(), size_of::<A>()) }
    }
}

/// Plain values at the beginning of `bytes`, wherever they lie.
pub(crate) fn values_of<T: Plain>(bytes: &[u8], len: usize) -> Result<Vec<T>> {
    let mut values = vec![T::default(); len];
    let Some(bytes) = bytes.get(..size_of_val(&values[..])) else {
        bail!("{len} values of {} bytes each in {} bytes", size_of::<T>(), bytes.len());
    };
    bytes_of_mut(&mut values).copy_from_slice(bytes);
    Ok(values)
}

/// A device's memory. Copies take their turn among the launches. A buffer that was not allocated here, or is part of none
/// that was, is an error.
pub(crate) trait Memory {
    /// Bytes of the host that the device reads and writes on its own; see [`Memory::pin`].
    type Pinned: Send;

    /// For example `cuda:0 NVIDIA H200`.
    fn name(&self) -> &str;

    /// Room for `len` elements, whatever lies there, until the device is dropped.
    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer>;

    /// Sets every byte to zero.
    fn zero(&self, buffer: Buffer) -> Result<()>;

    /// Overwrites the buffer from its beginning.
    fn upload(&self, bytes: &[u8], buffer: Buffer) -> Result<()>;

    /// Host memory for copies that nobody waits for, until the bytes are wanted again.
    fn pin(&self, bytes: usize) -> Result<Self::Pinned>;

    /// Overwrites the buffer with the bytes, when it is its turn.
    fn send(&self, from: &mut Self::Pinned, buffer: Buffer) -> Result<()>;

    /// Overwrites the first bytes with the buffer, when it is its turn.
    fn post(&self, buffer: Buffer, to: &mut Self::Pinned) -> Result<()>;

    /// The bytes, after the last copy from or to them.
    fn settled<'a>(&self, pinned: &'a mut Self::Pinned) -> Result<&'a mut [u8]>;

    /// Waits for everything before, and reads the buffer from its beginning.
    fn download(&self, buffer: Buffer, bytes: &mut [u8]) -> Result<()>;

    /// A buffer of these values, as bytes where the type is none of a tensor's.
    fn keep<T: Plain>(&self, values: &[T]) -> Result<Buffer> {
        let buffer = self.allocate(DType::U8, size_of_val(values))?;
        self.upload(bytes_of(values), buffer)?;
        Ok(buffer)
    }

    /// The first `len` values of a buffer.
    fn fetch<T: Plain>(&self, buffer: Buffer, len: usize) -> Result<Vec<T>> {
        let mut values = vec![T::default(); len];
        self.download(buffer, bytes_of_mut(&mut values))?;
        Ok(values)
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
pub(crate) fn entry(kernel: &str, dtypes: &[DType]) -> Result<String> {
    dtypes.iter().try_fold(kernel.to_owned(), |name, &dtype| Ok(name + "_" + suffix(dtype)?))
}

/// A number that kernels keep in 32 bits.
pub(crate) fn word(n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{n} does not fit the kernels' 32-bit sizes: use a smaller batch"),
    }
}
