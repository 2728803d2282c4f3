//! Typed slices of candle tensors: the only access to their CPU storage.
//!
//! A [`View`] has its element type at run time and loads rows as FP32, so a kernel that computes on FP32 rows is
//! compiled once for all combinations of storage types. The match for each row costs nothing compared with the row's
//! work.

use crate::convert::Element;
use crate::precision::FloatFormat;
use crate::rows::{Rows, for_each_part};
use candle_core::{CpuStorage, DType, Device, Error, InplaceOp1, Layout, Result, Storage, StorageRef, Tensor, bail};
use half::{bf16, f16};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

/// The elements of a contiguous CPU tensor, for reading.
#[derive(Clone, Copy, Debug)]
pub enum View<'a> {
    /// FP32 storage.
    F32(&'a [f32]),
    /// FP16 storage.
    F16(&'a [f16]),
    /// BF16 storage.
    BF16(&'a [bf16]),
}

/// The elements of a contiguous CPU tensor, for writing.
#[derive(Debug)]
pub enum ViewMut<'a> {
    /// FP32 storage.
    F32(&'a mut [f32]),
    /// FP16 storage.
    F16(&'a mut [f16]),
    /// BF16 storage.
    BF16(&'a mut [bf16]),
}

/// Runs `$body` with the elements of a view of any type as `$s`, and wraps its result in the variants of `$to` if that
/// is given.
macro_rules! with_elements {
    ($view:expr, $from:ident, $s:ident => $body:expr) => {
        match $view {
            $from::F32($s) => $body,
            $from::F16($s) => $body,
            $from::BF16($s) => $body,
        }
    };
    ($view:expr, $from:ident, $s:ident => $to:ident: $body:expr) => {
        match $view {
            $from::F32($s) => $to::F32($body),
            $from::F16($s) => $to::F16($body),
            $from::BF16($s) => $to::BF16($body),
        }
    };
}
pub(crate) use with_elements;

impl<'a> View<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        with_elements!(self, Self, s => s.len())
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> View<'a> {
        with_elements!(self, Self, s => View: &s[range])
    }

    /// The bytes of the elements.
    pub fn bytes(self) -> &'a [u8] {
        with_elements!(self, Self, s => bytemuck::cast_slice(s))
    }

    /// Widens the elements starting at `start` into `out`.
    #[inline(always)]
    pub fn load(&self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        with_elements!(self, Self, s => Element::load(&s[range], out));
    }

    /// The elements as FP32: the storage itself if it is FP32, else widened into `scratch`.
    #[inline(always)]
    pub fn as_f32<'b>(&self, start: usize, scratch: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        let range = start..start + scratch.len();
        with_elements!(self, Self, s => Element::as_f32(&s[range], scratch))
    }
}

impl ViewMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.as_view().len()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same elements, to read.
    pub fn as_view(&self) -> View<'_> {
        with_elements!(self, Self, s => View: s)
    }

    /// The bytes of the elements.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        with_elements!(self, Self, s => bytemuck::cast_slice_mut(s))
    }

    /// Rounds `values` (to nearest even) into the elements starting at `start`.
    #[inline(always)]
    pub fn store(&mut self, start: usize, values: &[f32]) {
        let range = start..start + values.len();
        with_elements!(self, Self, s => Element::store(values, &mut s[range]));
    }

    /// Sets every element to zero.
    pub fn zero(&mut self) {
        with_elements!(self, Self, s => s.fill(Element::from_f32(0.0)));
    }
}

impl<'a> ViewMut<'a> {
    /// Two disjoint parts, the first of `mid` elements.
    pub fn split_at(self, mid: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        macro_rules! halves {
            ($s:ident, $variant:ident) => {{
                let (a, b) = $s.split_at_mut(mid);
                (ViewMut::$variant(a), ViewMut::$variant(b))
            }};
        }
        match self {
            Self::F32(s) => halves!(s, F32),
            Self::F16(s) => halves!(s, F16),
            Self::BF16(s) => halves!(s, BF16),
        }
    }
}

/// A view that several threads write at once, for interleaved parts that cannot be split into slices.
#[derive(Clone, Copy)]
pub struct SharedViewMut<'a> {
    pointer: Pointer,
    len: usize,
    elements: PhantomData<&'a mut [f32]>,
}

#[derive(Clone, Copy)]
enum Pointer {
    F32(*mut f32),
    F16(*mut f16),
    BF16(*mut bf16),
}

// SAFETY: the pointer represents a unique borrow of plain numbers, and writing through it is `unsafe`.
unsafe impl Send for SharedViewMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// The same elements, to be written by several threads.
    pub fn interleaved(self) -> SharedViewMut<'a> {
        let len = self.len();
        let pointer = with_elements!(self, Self, s => Pointer: s.as_mut_ptr());
        SharedViewMut { pointer, len, elements: PhantomData }
    }
}

impl SharedViewMut<'_> {
    /// Rounds `values` into the elements starting at `start`.
    ///
    /// # Panics
    /// If there are fewer elements than that.
    ///
    /// # Safety
    /// No other thread writes these elements at the same time.
    #[inline(always)]
    pub unsafe fn store(&self, start: usize, values: &[f32]) {
        let count = values.len();
        assert!(start + count <= self.len, "elements {start}.. of {}", self.len);
        // SAFETY: the range lies inside the loan, and the caller keeps others away from it.
        with_elements!(self.pointer, Pointer, p => unsafe {
            Element::store(values, std::slice::from_raw_parts_mut(p.add(start), count));
        });
    }
}

/// Holds a tensor's storage for reading.
pub struct ReadGuard<'a> {
    storage: StorageRef<'a>,
    range: Range<usize>,
}

/// `tensor` in host memory: itself if it is on the CPU, otherwise a copy.
pub fn to_host(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)
}

/// A view of elements of a contiguous tensor, counted in row-major order.
pub fn range(tensor: &Tensor, range: Range<usize>) -> Result<Tensor> {
    tensor.flatten_all()?.narrow(0, range.start, range.len())
}

/// Elements of a contiguous tensor, counted in row-major order, in host memory: a view if it is on the CPU.
pub fn host_range(tensor: &Tensor, elements: Range<usize>) -> Result<Tensor> {
    let part = range(tensor, elements)?;
    // For a view, candle copies the whole tensor that it is a view of.
    if tensor.device().is_cpu() { Ok(part) } else { to_host(&part.force_contiguous()?) }
}

/// Whether both are views of one storage.
pub fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    let (a, b) = (a.storage_and_layout().0, b.storage_and_layout().0);
    std::ptr::eq::<Storage>(&raw const *a, &raw const *b)
}

/// Opens `tensor` for reading; an error unless it is contiguous, on the CPU, and FP32, FP16 or BF16.
pub fn read(tensor: &Tensor) -> Result<ReadGuard<'_>> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous(layout)?;
    match &*storage {
        Storage::Cpu(CpuStorage::F32(_) | CpuStorage::F16(_) | CpuStorage::BF16(_)) => Ok(ReadGuard { storage, range }),
        other => bail!("no CPU kernel for a tensor of {:?} on {:?}", other.dtype(), other.device().location()),
    }
}

impl ReadGuard<'_> {
    /// The elements.
    pub fn view(&self) -> View<'_> {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(s)) => View::F32(&s[self.range.clone()]),
            Storage::Cpu(CpuStorage::F16(s)) => View::F16(&s[self.range.clone()]),
            Storage::Cpu(CpuStorage::BF16(s)) => View::BF16(&s[self.range.clone()]),
            _ => unreachable!("`read` let only these through"),
        }
    }

    /// The elements of a tensor that is stored as `T`.
    pub fn typed<T: Element>(&self) -> Result<&[T]> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok(&storage.as_slice::<T>()?[self.range.clone()]),
            _ => unreachable!("`read` let only CPU storage through"),
        }
    }
}

fn contiguous(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => {
            bail!("kernels take contiguous tensors, not one of {:?} with strides {:?}", layout.dims(), layout.stride())
        }
    }
}

/// Gives `f` write access to `tensor`'s elements; the tensor must not be open for reading. A tensor on another device
/// is copied to the host and back.
pub fn write<R>(tensor: &Tensor, f: impl FnOnce(ViewMut<'_>) -> R) -> Result<R> {
    let on_host = |tensor: &Tensor| {
        write_on_host(tensor, |storage, range| {
            Ok(f(match storage {
                CpuStorage::F32(s) => ViewMut::F32(&mut s[range]),
                CpuStorage::F16(s) => ViewMut::F16(&mut s[range]),
                CpuStorage::BF16(s) => ViewMut::BF16(&mut s[range]),
                _ => bail!("no CPU kernel writes this element type"),
            }))
        })
    };
    if tensor.device().is_cpu() {
        return on_host(tensor);
    }
    let copy = to_host(tensor)?;
    let result = on_host(&copy)?;
    tensor.slice_set(&copy.to_device(tensor.device())?, 0, 0)?;
    Ok(result)
}

/// Gives `f` write access to the elements of a tensor of bytes on the CPU.
pub(crate) fn write_u8<R>(tensor: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    write_on_host(tensor, |storage, range| match storage {
        CpuStorage::U8(s) => Ok(f(&mut s[range])),
        _ => bail!("expected a tensor of bytes, got {:?}", tensor.dtype()),
    })
}

fn write_on_host<R>(tensor: &Tensor, f: impl FnOnce(&mut CpuStorage, Range<usize>) -> Result<R>) -> Result<R> {
    struct WriteOp<F, R> {
        f: Cell<Option<F>>,
        result: Cell<Option<R>>,
    }
    impl<R, F: FnOnce(&mut CpuStorage, Range<usize>) -> Result<R>> InplaceOp1 for WriteOp<F, R> {
        fn name(&self) -> &'static str {
            "write"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let range = contiguous(layout)?;
            self.result.set(self.f.take().map(|f| f(storage, range)).transpose()?);
            Ok(())
        }
    }
    let lend = WriteOp { f: Cell::new(Some(f)), result: Cell::new(None) };
    tensor.inplace_op1(&lend)?;
    lend.result.take().ok_or_else(|| Error::Msg("a CPU kernel was called on another device".into()))
}

/// [`write`] for a tensor that may be missing.
pub(crate) fn write_optional<R>(tensor: Option<&Tensor>, f: impl FnOnce(Option<ViewMut<'_>>) -> R) -> Result<R> {
    match tensor {
        Some(tensor) => write(tensor, |view| f(Some(view))),
        None => Ok(f(None)),
    }
}

/// Gives `f` write access to an FP32 tensor's elements.
pub fn write_f32<R>(tensor: &Tensor, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    write(tensor, |view| match view {
        ViewMut::F32(slice) => Ok(f(slice)),
        _ => bail!("expected an FP32 tensor, got {:?}", tensor.dtype()),
    })?
}

/// `out = x`, rounded to `out`'s type.
pub fn copy(x: &Tensor, out: &Tensor) -> Result<()> {
    map_blocks(x, out, 16 * BLOCK, |_, _, _| ())
}

/// `out += (x + inner[0]) + …`, each sum formed in FP32, in one pass over memory. `inner` is FP32 and stays as it is.
pub fn accumulate(x: &Tensor, inner: &[&Tensor], out: &Tensor) -> Result<()> {
    let inner = inner.iter().map(|tensor| read(tensor)).collect::<Result<Vec<_>>>()?;
    let inner = inner.iter().map(ReadGuard::typed::<f32>).collect::<Result<Vec<_>>>()?;
    map_blocks(
        x,
        out,
        16 * BLOCK,
        #[inline(always)]
        |first, values, out| {
            for inner in &inner {
                for (value, inner) in values.iter_mut().zip(&inner[first..]) {
                    *value += inner;
                }
            }
            let mut old = [0.0; BLOCK];
            for (value, out) in values.iter_mut().zip(out.as_f32(0, &mut old[..out.len()])) {
                *value += out;
            }
        },
    )
}

/// Elements that are converted at a time: they stay in the L1 cache.
pub(crate) const BLOCK: usize = 1024;

/// Writes `x` to `out` by blocks, at most `grain` elements per task. `f` gets the index of a block's first element,
/// `x`'s values, which it turns into the new ones, and `out`'s old ones.
pub(crate) fn map_blocks(
    x: &Tensor,
    out: &Tensor,
    grain: usize,
    f: impl Fn(usize, &mut [f32], View<'_>) + Sync,
) -> Result<()> {
    let x = read(x)?;
    let x = x.view();
    write(out, |out| {
        let len = out.len();
        for_each_part(
            Rows { view: out, width: 1 },
            len,
            grain,
            #[inline(always)]
            |first, len, mut out| {
                let mut values = [0.0; BLOCK];
                for start in (0..len).step_by(BLOCK) {
                    let values = &mut values[..BLOCK.min(len - start)];
                    x.load(first + start, values);
                    f(first + start, values, out.view.as_view().slice(start..start + values.len()));
                    out.view.store(start, values);
                }
            },
        );
    })
}

/// A zeroed CPU or device buffer.
pub fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    if shape.iter().product::<usize>() >= 1 << 32 {
        bail!("a tensor of {shape:?} has 2^32 elements or more, which the kernels do not address: use a smaller batch");
    }
    Tensor::zeros(shape, dtype, device)
}

/// Creates a buffer of a shape and type: a tensor of zeros, or its size where only sizes are counted.
pub type AllocFn<'a, T> = &'a dyn Fn(&[usize], DType) -> Result<T>;

/// The number format of a type.
pub fn float_format(dtype: DType) -> FloatFormat {
    match dtype {
        DType::F16 => FloatFormat::FP16,
        DType::BF16 => FloatFormat::BF16,
        _ => FloatFormat::FP32,
    }
}

/// Bytes of a tensor of this shape and type; at most `u64::MAX`.
pub fn bytes(shape: &[usize], dtype: DType) -> u64 {
    shape.iter().fold(dtype.size_in_bytes() as u64, |bytes, dim| bytes.saturating_mul(*dim as u64))
}

/// Runs `$body` with `$t` standing for the element type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            other => candle_core::bail!("no kernel for {other:?}"),
        }
    };
}
pub(crate) use with_element;
