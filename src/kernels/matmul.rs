//! The matrix product C = α A·B (+ bias) (+ C): inputs FP32, FP16 or BF16, every sum in FP32, one rounding at the end.

use rayon::prelude::*;

use super::convert::Element;

/// A matrix in a slice, read at any row and column stride, so that a transpose costs nothing.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Operand<'a, T> {
    /// The row-major `rows` × `cols` matrix in `data`.
    ///
    /// # Panics
    /// If `data` is too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::with_strides(data, rows, cols, cols, 1)
    }

    /// The `rows` × `cols` matrix with element (i, j) at `data[i * row_stride + j * col_stride]`.
    ///
    /// # Panics
    /// If `data` is too short.
    pub fn with_strides(data: &'a [T], rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Self {
        let needed = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + (cols - 1) * col_stride + 1 };
        assert!(data.len() >= needed, "a {rows} × {cols} operand needs {needed} elements, not {}", data.len());
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// The transpose, of the same data.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// What happens to a sum on its way into C: C = α sum (+ bias) (+ C), all in FP32, then one rounding.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// The factor α of the product.
    pub alpha: f32,
    /// One value a column, added to every row.
    pub bias: Option<&'a [f32]>,
    /// Whether C's old value is added, or else overwritten unread.
    pub accumulate: bool,
}

impl Default for Epilogue<'_> {
    fn default() -> Self {
        Self { alpha: 1.0, bias: None, accumulate: false }
    }
}

/// C = α A·B (+ bias) (+ C), for A of m × k, B of k × n and C of m × n, with row i of C at `c[i * ldc..][..n]`.
///
/// Rows and columns of C are shared out over the rayon pool and k never is, so the bits do not depend on the number of
/// threads.
///
/// # Panics
/// If the shapes do not fit together.
pub fn matmul<A: Element, C: Element>(
    a: Operand<'_, A>,
    b: Operand<'_, A>,
    c: &mut [C],
    ldc: usize,
    epilogue: Epilogue<'_>,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "A has {k} columns, B {} rows", b.rows);
    assert!(ldc >= n && (m == 0 || n == 0 || c.len() >= (m - 1) * ldc + n), "C is too small for {m} × {n}");
    assert!(epilogue.bias.is_none_or(|bias| bias.len() == n), "the bias must have {n} elements");
    if m == 0 || n == 0 {
        return;
    }
    c.par_chunks_mut(ldc).take(m).enumerate().for_each(|(i, row)| {
        let mut sums = vec![0f32; n];
        for p in 0..k {
            let factor = a.data[i * a.row_stride + p * a.col_stride].to_f32();
            for (j, sum) in sums.iter_mut().enumerate() {
                *sum += factor * b.data[p * b.row_stride + j * b.col_stride].to_f32();
            }
        }
        for (j, (sum, c)) in sums.into_iter().zip(row).enumerate() {
            let mut value = epilogue.alpha * sum + epilogue.bias.map_or(0.0, |bias| bias[j]);
            if epilogue.accumulate {
                value += c.to_f32();
            }
            *c = C::from_f32(value);
        }
    });
}
