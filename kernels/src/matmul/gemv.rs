//! One row times a matrix, as in generating text: each weight is used once, so packing it would cost more than the product.
//!
//! The matrix is read as it is stored, so speed is bound by memory. Columns are divided among threads; a column's sum never is.

use super::super::convert::Element;
use super::super::rows::{Rows, axpy, for_each_part, with_scratch};
use super::{Epilogue, Operand, SERIAL_WORK};

/// Columns summed at a time: the sums and the rows added to them stay in the L1 cache.
const SPAN: usize = 1024;
/// Columns below which a task reads too little of a row at a time.
const MIN_SPAN: usize = 128;
/// Rows added at a time, so that the sums are loaded and stored less often.
const ROWS: usize = 4;

/// The placement of a column's elements.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// One row between them: columns are summed side by side.
    RowMajor,
    /// Side by side: each column is a dot product.
    ColMajor,
}

/// C = α a·B (+ bias) (+ C) for a single row `a`, if B's rows or columns are contiguous; else C stays as it is.
pub(super) fn multiply<A: Element, C: Element>(
    a: Operand<'_, A>,
    b: Operand<'_, A>,
    c: &mut [C],
    epilogue: Epilogue<'_>,
) -> bool {
    let stored = match (b.row_stride, b.col_stride) {
        (_, 1) => Order::RowMajor,
        (1, _) => Order::ColMajor,
        _ => return false,
    };
    let (depth, columns) = (b.rows, b.cols);
    let tasks = if depth * columns < SERIAL_WORK { 1 } else { 2 * rayon::current_num_threads() };
    let least = if stored == Order::RowMajor { MIN_SPAN } else { 1 };
    let span = columns.div_ceil(tasks).next_multiple_of(least).min(SPAN);
    with_scratch(depth, |row| {
        for (wide, index) in row.iter_mut().zip(0..) {
            *wide = a.data[index * a.col_stride].to_f32();
        }
        let row = &*row;
        let c = Rows { view: &mut c[..columns], width: 1 };
        for_each_part(
            c,
            columns,
            span,
            #[inline(always)]
            |first, width, c| {
                with_scratch(
                    width,
                    #[inline(always)]
                    |sums| {
                        match stored {
                            Order::RowMajor => sum_rows(row, b, first, sums),
                            Order::ColMajor => sum_columns(row, b, first, sums),
                        }
                        finish(sums, first, c.view, epilogue);
                    },
                );
            },
        );
    });
    true
}

/// `sums = Σ row[i] b[i, first..]`, in the order of the rows.
#[inline(always)]
fn sum_rows<T: Element>(row: &[f32], b: Operand<'_, T>, first: usize, sums: &mut [f32]) {
    let width = sums.len();
    let stored = |index: usize| &b.data[index * b.row_stride + first..][..width];
    sums.fill(0.0);
    with_scratch(
        ROWS * width,
        #[inline(always)]
        |scratch| {
            let (fours, rest) = row.as_chunks::<ROWS>();
            let mut index = 0;
            for &[x0, x1, x2, x3] in fours {
                let (s0, scratch) = scratch.split_at_mut(width);
                let (s1, scratch) = scratch.split_at_mut(width);
                let (s2, s3) = scratch.split_at_mut(width);
                let (w0, w1) = (T::as_f32(stored(index), s0), T::as_f32(stored(index + 1), s1));
                let (w2, w3) = (T::as_f32(stored(index + 2), s2), T::as_f32(stored(index + 3), s3));
                for ((((sum, w0), w1), w2), w3) in sums.iter_mut().zip(w0).zip(w1).zip(w2).zip(w3) {
                    *sum = *sum + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3;
                }
                index += ROWS;
            }
            for &x in rest {
                axpy(x, T::as_f32(stored(index), &mut scratch[..width]), sums);
                index += 1;
            }
        },
    );
}

/// `sums[j] = row · b[.., first + j]`.
#[inline(always)]
fn sum_columns<T: Element>(row: &[f32], b: Operand<'_, T>, first: usize, sums: &mut [f32]) {
    with_scratch(
        row.len(),
        #[inline(always)]
        |scratch| {
            for (sum, column) in sums.iter_mut().zip(first..) {
                let stored = &b.data[column * b.col_stride..][..row.len()];
                *sum = T::dot(row, stored, scratch);
            }
        },
    );
}

/// Rounds the sums of the columns starting at `first` into `c`, which is those columns of C.
#[inline(always)]
fn finish<C: Element>(sums: &mut [f32], first: usize, c: &mut [C], epilogue: Epilogue<'_>) {
    if epilogue.alpha != 1.0 {
        for sum in sums.iter_mut() {
            *sum *= epilogue.alpha;
        }
    }
    if let Some(bias) = epilogue.bias {
        axpy(1.0, &bias[first..][..sums.len()], sums);
    }
    if epilogue.accumulate {
        for (sum, old) in sums.iter_mut().zip(&*c) {
            *sum += old.to_f32();
        }
    }
    C::store(sums, c);
}
