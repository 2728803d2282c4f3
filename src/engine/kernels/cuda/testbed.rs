//! What tests run kernels on: the emulator, or a GPU where `FINETUNE_TEST_GPU` is set in a build with the feature `cuda`.

use super::emulator::Emulator;
use super::launch::{Buffer, Launch, Memory, Queue};
use super::product::{Multiply, Operands, Product};
use candle_core::{DType, Result};
use half::{bf16, f16};
use std::ffi::c_void;

/// A device with the shorthands of tests, which stop at the first thing that is not as it should be.
pub(crate) enum Testbed {
    /// A CPU that watches every access.
    Emulator(Emulator),
    /// GPU 0.
    #[cfg(feature = "cuda")]
    Gpu(super::driver::Gpu),
}

/// Does the same on whichever device it is.
macro_rules! on {
    ($testbed:expr, $device:ident => $body:expr) => {
        match $testbed {
            Testbed::Emulator($device) => $body,
            #[cfg(feature = "cuda")]
            Testbed::Gpu($device) => $body,
        }
    };
}

impl Testbed {
    /// Orders of threads on the emulator; a GPU has its own, which may differ each time.
    pub(crate) const ORDERS: [u32; 3] = Emulator::ORDERS;

    pub(crate) fn new(order: u32) -> Self {
        #[cfg(feature = "cuda")]
        if std::env::var_os("FINETUNE_TEST_GPU").is_some() {
            return Self::Gpu(super::driver::Gpu::open(0, true).expect("a GPU to test"));
        }
        Self::Emulator(Emulator::new(order))
    }

    fn keep_bytes(&self, bytes: &[u8], dtype: DType, len: usize, writable: bool) -> Buffer {
        if let Self::Emulator(emulator) = self
            && !writable
        {
            return emulator.constant(bytes, dtype, len);
        }
        let buffer = self.allocate(dtype, len).expect("memory");
        self.upload(bytes, buffer).expect("a copy");
        buffer
    }

    /// Numbers that kernels may read.
    pub(crate) fn input(&self, values: &[f32], dtype: DType) -> Buffer {
        self.keep_bytes(&encode(values, dtype), dtype, values.len(), false)
    }

    /// Numbers that kernels may change.
    pub(crate) fn state(&self, values: &[f32], dtype: DType) -> Buffer {
        self.keep_bytes(&encode(values, dtype), dtype, values.len(), true)
    }

    /// Room for results, full of NaN.
    pub(crate) fn output(&self, len: usize, dtype: DType) -> Buffer {
        self.keep_bytes(&vec![0xff; len * dtype.size_in_bytes()], dtype, len, true)
    }

    pub(crate) fn words(&self, words: &[u32]) -> Buffer {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.keep_bytes(&bytes, DType::U32, words.len(), false)
    }

    /// Plain structs, as bytes.
    pub(crate) fn structs<T: Copy>(&self, values: &[T], writable: bool) -> Buffer {
        let bytes = size_of_val(values);
        // SAFETY: the structs are made of plain numbers without padding.
        let view = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        self.keep_bytes(view, DType::U8, bytes, writable)
    }

    pub(crate) fn bytes(&self, buffer: Buffer) -> Vec<u8> {
        let mut bytes = vec![0; buffer.bytes()];
        self.download(buffer, &mut bytes).expect("a copy");
        bytes
    }

    /// The buffer's elements, widened.
    pub(crate) fn read(&self, buffer: Buffer) -> Vec<f32> {
        decode(&self.bytes(buffer), buffer.dtype)
    }

    /// Structs that kernels have written.
    pub(crate) fn read_structs<T: Copy>(&self, buffer: Buffer) -> Vec<T> {
        let bytes = self.bytes(buffer);
        // SAFETY: the bytes are those of whole structs of plain numbers.
        bytes.chunks_exact(size_of::<T>()).map(|b| unsafe { b.as_ptr().cast::<T>().read_unaligned() }).collect()
    }
}

/// `values` as `dtype` stores them.
pub(super) fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

/// The values of stored elements.
pub(super) fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match dtype {
        DType::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        DType::BF16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

impl Queue for Testbed {
    unsafe fn launch_raw(&self, launch: &Launch, arguments: *const c_void, size: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        on!(self, device => unsafe { device.launch_raw(launch, arguments, size) })
    }

    fn scratch(&self, len: usize) -> Result<Buffer> {
        on!(self, device => device.scratch(len))
    }

    fn recorded(&self, key: u32, launches: impl FnOnce() -> Result<()>) -> Result<()> {
        on!(self, device => device.recorded(key, launches))
    }
}

/// Pinned memory of whichever device it is.
pub(crate) enum TestPinned {
    Emulator(Vec<u8>),
    #[cfg(feature = "cuda")]
    Gpu(<super::driver::Gpu as Memory>::Pinned),
}

/// Does something with pinned memory and the device that it is of.
macro_rules! with_pinned {
    ($testbed:expr, $pinned:expr, $device:ident, $bytes:ident => $body:expr) => {
        match ($testbed, $pinned) {
            (Testbed::Emulator($device), TestPinned::Emulator($bytes)) => $body,
            #[cfg(feature = "cuda")]
            (Testbed::Gpu($device), TestPinned::Gpu($bytes)) => $body,
            #[cfg(feature = "cuda")]
            _ => candle_core::bail!("pinned memory of another device"),
        }
    };
}

impl Memory for Testbed {
    type Pinned = TestPinned;

    fn name(&self) -> &str {
        on!(self, device => device.name())
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer> {
        on!(self, device => device.allocate(dtype, len))
    }

    fn zero(&self, buffer: Buffer) -> Result<()> {
        on!(self, device => device.zero(buffer))
    }

    fn upload(&self, bytes: &[u8], buffer: Buffer) -> Result<()> {
        on!(self, device => device.upload(bytes, buffer))
    }

    fn pin(&self, bytes: usize) -> Result<TestPinned> {
        match self {
            Self::Emulator(device) => device.pin(bytes).map(TestPinned::Emulator),
            #[cfg(feature = "cuda")]
            Self::Gpu(device) => device.pin(bytes).map(TestPinned::Gpu),
        }
    }

    fn send(&self, from: &mut TestPinned, buffer: Buffer) -> Result<()> {
        with_pinned!(self, from, device, bytes => device.send(bytes, buffer))
    }

    fn post(&self, buffer: Buffer, to: &mut TestPinned) -> Result<()> {
        with_pinned!(self, to, device, bytes => device.post(buffer, bytes))
    }

    fn settled<'a>(&self, pinned: &'a mut TestPinned) -> Result<&'a mut [u8]> {
        with_pinned!(self, pinned, device, bytes => device.settled(bytes))
    }

    fn download(&self, buffer: Buffer, bytes: &mut [u8]) -> Result<()> {
        on!(self, device => device.download(buffer, bytes))
    }
}

impl Multiply for Testbed {
    fn takes(&self, product: Product) -> Result<bool> {
        on!(self, device => device.takes(product))
    }

    unsafe fn multiply(&self, product: Product, operands: Operands) -> Result<()> {
        // SAFETY: the caller's promise.
        on!(self, device => unsafe { device.multiply(product, operands) })
    }
}
