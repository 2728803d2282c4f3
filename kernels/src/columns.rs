//! A range of a matrix's columns, such as the queries in a buffer of packed queries, keys and values.
//!
//! Kernels that take [`ColumnSlice`] work on packed and on separate buffers alike.

use crate::WeightLayout;
use crate::view::{ReadGuard, SharedViewMut, View, write};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// How a result is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Added to the buffer's content, in FP32 with one rounding.
    Accumulate,
    /// The buffer's content is overwritten.
    Overwrite,
}

/// A range of columns of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSlice<'a> {
    tensor: &'a Tensor,
    rows: usize,
    /// Elements from one row to the next.
    stride: usize,
    first: usize,
    count: usize,
}

impl<'a> ColumnSlice<'a> {
    /// The given columns of `tensor [N, C]`.
    pub fn new(tensor: &'a Tensor, columns: Range<usize>) -> Result<Self> {
        let (rows, stride) = tensor.dims2()?;
        if columns.start > columns.end || columns.end > stride {
            bail!("a matrix of {stride} columns has no columns {columns:?}");
        }
        Ok(Self { tensor, rows, stride, first: columns.start, count: columns.len() })
    }

    /// All columns of `tensor [N, C]`.
    pub fn all(tensor: &'a Tensor) -> Result<Self> {
        Self::new(tensor, 0..tensor.dims2()?.1)
    }

    /// Cuts `tensor [N, C]` into parts of the given numbers of columns, which must add up to C.
    pub fn split<const N: usize>(tensor: &'a Tensor, counts: [usize; N]) -> Result<[Self; N]> {
        let (rows, stride) = tensor.dims2()?;
        if counts.iter().sum::<usize>() != stride {
            bail!("a matrix of {stride} columns cannot be cut into parts of {counts:?}");
        }
        let mut first = 0;
        Ok(counts.map(|count| {
            let part = Self { tensor, rows, stride, first, count };
            first += count;
            part
        }))
    }

    /// The whole matrix.
    pub fn tensor(&self) -> &'a Tensor {
        self.tensor
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of these columns.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        [self.rows, self.count]
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The first of these columns.
    pub fn first(&self) -> usize {
        self.first
    }

    /// These columns of the opened tensor.
    pub(crate) fn source<'b>(&self, opened: &'b ReadGuard<'_>) -> ColumnReader<'b> {
        ColumnReader { view: opened.view(), stride: self.stride, first: self.first }
    }
}

/// An operand of a product: some columns of a matrix, or the transpose of them.
#[derive(Clone, Copy, Debug)]
pub struct MatmulOperand<'a> {
    /// The columns.
    pub columns: ColumnSlice<'a>,
    /// Whether the operand is the transpose of the columns.
    pub transposed: bool,
}

impl<'a> MatmulOperand<'a> {
    /// The columns, not transposed.
    pub fn plain(columns: ColumnSlice<'a>) -> Self {
        Self { columns, transposed: false }
    }

    /// Their transpose.
    pub fn transposed(columns: ColumnSlice<'a>) -> Self {
        Self { columns, transposed: true }
    }

    /// The matrix `x`.
    pub fn all(x: &'a Tensor) -> Result<Self> {
        ColumnSlice::all(x).map(Self::plain)
    }

    /// The transpose of `x`.
    pub fn transpose_of(x: &'a Tensor) -> Result<Self> {
        ColumnSlice::all(x).map(Self::transposed)
    }

    /// The inputs × outputs matrix of a weight with this layout.
    pub fn of_weight(weight: &'a Tensor, layout: WeightLayout) -> Result<Self> {
        if layout == WeightLayout::InOut { Self::all(weight) } else { Self::transpose_of(weight) }
    }

    /// Rows and columns of the operand.
    pub fn dims(&self) -> [usize; 2] {
        let [rows, columns] = self.columns.dims();
        if self.transposed { [columns, rows] } else { [rows, columns] }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ColumnReader<'a> {
    view: View<'a>,
    stride: usize,
    first: usize,
}

impl ColumnReader<'_> {
    /// Upcasts elements of `row`, starting at `column`, into `out`.
    #[inline(always)]
    pub(crate) fn load(&self, row: usize, column: usize, out: &mut [f32]) {
        self.view.load(row * self.stride + self.first + column, out);
    }

    /// Elements of `row` as FP32, starting at `column`; in `scratch` unless they are FP32 in storage.
    #[inline(always)]
    pub(crate) fn as_f32<'b>(&'b self, row: usize, column: usize, scratch: &'b mut [f32]) -> &'b [f32] {
        self.view.as_f32(row * self.stride + self.first + column, scratch)
    }
}

/// Columns that several tasks write at once.
#[derive(Clone, Copy)]
pub(crate) struct ColumnWriter<'a> {
    out: SharedViewMut<'a>,
    stride: usize,
    first: usize,
}

impl ColumnWriter<'_> {
    /// Rounds `values` into the elements of `row`, starting at `column`.
    ///
    /// # Safety
    /// No other thread writes these elements at the same time.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, row: usize, column: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.out.store(row * self.stride + self.first + column, values) }
    }
}

/// Gives `f` write access to columns. Parts of one tensor are opened together; tensors that share storage are not
/// allowed.
pub(crate) fn write_columns<const N: usize, R>(
    columns: [ColumnSlice<'_>; N],
    f: impl FnOnce([ColumnWriter<'_>; N]) -> R,
) -> Result<R> {
    fn open<const N: usize, R>(
        columns: &[ColumnSlice<'_>; N],
        index: usize,
        mut targets: [Option<ColumnWriter<'_>>; N],
        f: impl FnOnce([ColumnWriter<'_>; N]) -> R,
    ) -> Result<R> {
        let Some(next) = columns.get(index) else {
            let Some(first) = targets[0] else { bail!("there is nothing to write") };
            return Ok(f(targets.map(|target| target.unwrap_or(first))));
        };
        let before = columns[..index].iter().position(|column| column.tensor.id() == next.tensor.id());
        if let Some(opened) = before.and_then(|before| targets[before]) {
            targets[index] = Some(ColumnWriter { first: next.first, ..opened });
            return open(columns, index + 1, targets, f);
        }
        write(next.tensor, |view| {
            let mut targets = targets;
            targets[index] = Some(ColumnWriter { out: view.interleaved(), stride: next.stride, first: next.first });
            open(columns, index + 1, targets, f)
        })?
    }
    open(&columns, 0, [None; N], f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::read;
    use candle_core::Device;

    #[test]
    fn parts_of_one_tensor_and_other_tensors_are_written_together() {
        let packed = Tensor::zeros((2, 5), candle_core::DType::F32, &Device::Cpu).unwrap();
        let other = Tensor::zeros((2, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
        let [a, b] = ColumnSlice::split(&packed, [2, 3]).unwrap();
        write_columns([b, ColumnSlice::all(&other).unwrap(), a], |[b, other, a]| {
            // SAFETY: this thread alone writes.
            unsafe {
                b.store(1, 1, &[1.0, 2.0]);
                other.store(0, 0, &[3.0]);
                a.store(0, 1, &[4.0]);
            }
        })
        .unwrap();
        assert_eq!(packed.to_vec2::<f32>().unwrap(), [[0.0, 4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 2.0]]);
        assert_eq!(other.to_vec2::<f32>().unwrap(), [[3.0, 0.0], [0.0, 0.0]]);
        let mut out = [0.0; 2];
        b.source(&read(&packed).unwrap()).load(1, 1, &mut out);
        assert_eq!(out, [1.0, 2.0]);
    }

    #[test]
    fn columns_that_are_not_there_are_an_error() {
        let matrix = Tensor::zeros((2, 5), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert!(ColumnSlice::new(&matrix, 3..6).is_err());
        assert!(ColumnSlice::split(&matrix, [2, 2]).is_err());
    }
}
