//! Helpers for candle's operations: FP32 inside, one rounding at the end. They assert the layouts that candle's CUDA
//! back end requires on every device, because the CPU back end accepts others.

use crate::columns::ColumnSlice;
use crate::dropout::Dropout;
use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;
use std::ops::Range;

/// Fails unless the elements of `x` are in order, without gaps.
pub(super) fn require_contiguous(x: &Tensor) -> Result<()> {
    if !x.is_contiguous() {
        bail!("kernels take contiguous tensors, not one of {:?} with strides {:?}", x.dims(), x.stride());
    }
    Ok(())
}

/// `x` in the type to compute with: FP32, or FP64 if `x` is.
pub(super) fn upcast(x: &Tensor) -> Result<Tensor> {
    require_contiguous(x)?;
    x.to_dtype(if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 })
}

/// `cap · tanh(x / cap)`.
pub(super) fn soft_cap(x: &Tensor, cap: f32) -> Result<Tensor> {
    let cap = f64::from(cap);
    (x / cap)?.tanh()? * cap
}

/// Rounds `value` into the existing tensor `out`, which may be a view of a larger one.
pub(super) fn store(value: &Tensor, out: &Tensor) -> Result<()> {
    if value.dims() != out.dims() {
        bail!("a result of {:?} for a tensor of {:?}", value.dims(), out.dims());
    }
    require_contiguous(value)?;
    require_contiguous(out)?;
    out.slice_set(&value.to_dtype(out.dtype())?, 0, 0)
}

/// Some columns of some rows, as a separate tensor.
pub(super) fn columns_of_rows(x: ColumnSlice<'_>, rows: Range<usize>) -> Result<Tensor> {
    require_contiguous(x.tensor())?;
    x.tensor().narrow(0, rows.start, rows.len())?.narrow(1, x.first(), x.count())?.contiguous()
}

pub(super) fn upcast_columns(x: ColumnSlice<'_>) -> Result<Tensor> {
    upcast(&columns_of_rows(x, 0..x.rows())?)
}

/// Rounds `value` into some columns of some rows.
pub(super) fn store_columns_of_rows(value: &Tensor, x: ColumnSlice<'_>, rows: Range<usize>) -> Result<()> {
    if value.dims() != [rows.len(), x.count()] {
        bail!("a result of {:?} for {} rows of {} columns", value.dims(), rows.len(), x.count());
    }
    require_contiguous(value)?;
    let out = x.tensor().narrow(0, rows.start, rows.len())?;
    require_contiguous(&out)?;
    out.slice_set(&value.to_dtype(out.dtype())?, 1, x.first())
}

pub(super) fn store_columns(value: &Tensor, x: ColumnSlice<'_>) -> Result<()> {
    store_columns_of_rows(value, x, 0..x.rows())
}

/// Adds `value` to `out`; the sum is formed in FP32.
pub(super) fn accumulate(value: &Tensor, out: &Tensor) -> Result<()> {
    store(&(upcast(out)? + upcast(value)?)?, out)
}

/// Whether cuBLAS can read the last two dimensions: by rows or by columns, without gaps.
fn is_matrix(x: &Tensor) -> bool {
    let ([.., rows, columns], [.., row, column]) = (x.dims(), x.stride()) else { return false };
    let by_rows = (*column == 1 || *columns == 1) && (row == columns || *rows == 1);
    let by_columns = (column == rows || *columns == 1) && (*row == 1 || *rows == 1);
    by_rows || by_columns
}

/// `a · b`, of two matrices or of two batches of matrices.
pub(super) fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    for x in [a, b] {
        if !is_matrix(x) || x.rank() > 3 {
            bail!("cuBLAS cannot read an operand of {:?} with strides {:?}", x.dims(), x.stride());
        }
    }
    a.matmul(b)
}

/// `a · b` for two matrices of one storage type; either may be transposed. `out` is the type that the result is for.
///
/// On a GPU a product whose result is stored in the operands' half type is of that type: cuBLAS sums in FP32 and rounds
/// once. Others are FP32. candle's CPU back end rounds partial sums to FP16, so there the operands are widened first.
pub(super) fn product(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    if a.device().is_cpu() || a.dtype() != out {
        return matmul(&upcast_matrix(a)?, &upcast_matrix(b)?);
    }
    matmul(a, b)
}

/// [`upcast`] for a matrix that may be transposed; the layout is kept.
fn upcast_matrix(x: &Tensor) -> Result<Tensor> {
    if x.is_contiguous() { upcast(x) } else { upcast(&x.t()?)?.t() }
}

/// The sum of the rows of `x [N, D]` (FP32): `[D]`, as a product with ones, which is fast and ordered on every device.
pub(super) fn column_sums(x: &Tensor) -> Result<Tensor> {
    let ones = Tensor::ones((1, x.dim(0)?), x.dtype(), x.device())?;
    matmul(&ones, x)?.squeeze(0)
}

/// `condition ? x : otherwise`, where `condition` is U8 and spreads to the shape of `x`.
pub(super) fn select(condition: &Tensor, x: &Tensor, otherwise: f32) -> Result<Tensor> {
    let otherwise = Tensor::full(otherwise, (), x.device())?.to_dtype(x.dtype())?.broadcast_as(x.shape())?;
    condition.broadcast_as(x.shape())?.where_cond(x, &otherwise)
}

/// The rows of `table [V, D]` with these indices. They are checked: on a GPU a bad index is an illegal access.
pub(super) fn rows_at(table: &Tensor, rows: &[u32]) -> Result<Tensor> {
    require_contiguous(table)?;
    let count = table.dim(0)?;
    if let Some(row) = rows.iter().find(|&&row| row as usize >= count) {
        bail!("row {row} of a table of {count}");
    }
    table.index_select(&Tensor::new(rows, table.device())?, 0)
}

/// The mask of `dropout` for the elements starting at index `first`, in the shape of `x`, multiplied with `x`.
///
/// The mask is computed on the host and uploaded: our random stream is not a candle operation, and all kernels must use
/// the same mask.
pub(super) fn drop(dropout: Option<Dropout>, first: usize, x: Tensor) -> Result<Tensor> {
    const TASK_ELEMENTS: usize = 1 << 16;
    let Some(dropout) = dropout else { return Ok(x) };
    let mut mask = vec![1.0f32; x.elem_count()];
    mask.par_chunks_mut(TASK_ELEMENTS)
        .enumerate()
        .for_each(|(part, values)| dropout.apply(first + part * TASK_ELEMENTS, values));
    &x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
}
