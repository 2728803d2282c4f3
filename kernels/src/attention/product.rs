//! Products of the small FP32 matrices of one head, in scratch memory.
//!
//! A tile of the result stays in registers while its sums run over the whole inner dimension. Its shape depends on the
//! instruction set, and so do the bits: only the vector instructions multiply and add with one rounding.

use crate::isa::Isa;

/// Columns of a panel: all numbers of columns are multiples of it.
const PANEL: usize = 16;

/// A matrix of FP32 in scratch memory, read at any strides.
#[derive(Clone, Copy)]
pub(crate) struct ScratchMatrix<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

pub(crate) fn by_rows(data: &[f32], width: usize) -> ScratchMatrix<'_> {
    ScratchMatrix { data, row_stride: width, column_stride: 1 }
}

/// The transpose of a matrix with rows of `width`.
pub(crate) fn by_columns(data: &[f32], width: usize) -> ScratchMatrix<'_> {
    ScratchMatrix { data, row_stride: 1, column_stride: width }
}

/// A right factor: panels of 16 columns.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    data: &'a [f32],
    row_stride: usize,
    panel_stride: usize,
}

pub(crate) fn in_rows(data: &[f32], width: usize) -> Right<'_> {
    Right { data, row_stride: width, panel_stride: PANEL }
}

/// A right factor as [`transpose`] writes it, of `inner` rows.
pub(crate) fn in_panels(data: &[f32], inner: usize) -> Right<'_> {
    Right { data, row_stride: PANEL, panel_stride: inner * PANEL }
}

/// A result whose rows are `row_stride` elements apart.
pub(crate) struct ScratchOutput<'a> {
    data: &'a mut [f32],
    row_stride: usize,
    accumulate: bool,
}

pub(crate) fn overwrite(data: &mut [f32], width: usize) -> ScratchOutput<'_> {
    ScratchOutput { data, row_stride: width, accumulate: false }
}

pub(crate) fn add_to(data: &mut [f32], width: usize) -> ScratchOutput<'_> {
    ScratchOutput { data, row_stride: width, accumulate: true }
}

/// Writes the transpose of a matrix with rows of `width` in panels, one after another: in long rows, whose distance is
/// often a power of two, the elements of a column would evict each other from the cache.
#[inline(always)]
pub(crate) fn transpose(rows: &[f32], width: usize, out: &mut [f32]) {
    for (rows, panel) in rows.chunks_exact(PANEL * width).zip(out.chunks_exact_mut(PANEL * width)) {
        for (row, values) in rows.chunks_exact(width).enumerate() {
            for (out, value) in panel.as_chunks_mut::<PANEL>().0.iter_mut().zip(values) {
                out[row] = *value;
            }
        }
    }
}

/// `c (+)= a · b` for `a` of `rows` × `inner` and `c` of `rows` × `columns`; `inner` and `columns` are multiples of 16.
/// A row's bits do not depend on the number of rows.
pub(crate) fn multiply(sizes: [usize; 3], a: ScratchMatrix<'_>, b: Right<'_>, c: ScratchOutput<'_>) {
    let [rows, inner, columns] = sizes;
    assert!(
        rows > 0 && [inner, columns].iter().all(|size| *size > 0 && size.is_multiple_of(PANEL)),
        "sizes are padded"
    );
    assert!(a.data.len() > (rows - 1) * a.row_stride + (inner - 1) * a.column_stride, "the left matrix is too short");
    let last_panel = (columns / PANEL - 1) * b.panel_stride;
    assert!(b.data.len() >= last_panel + (inner - 1) * b.row_stride + PANEL, "the right matrix is too short");
    assert!(c.data.len() >= (rows - 1) * c.row_stride + columns, "the result is too short");
    match Isa::current() {
        // SAFETY: the CPU has the instructions, and the sizes were checked.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => unsafe { avx512::multiply(sizes, a, b, c) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::multiply(sizes, a, b, c) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonBf16 => unsafe { neon::multiply(sizes, a, b, c) },
        Isa::Portable => portable(sizes, a, b, c),
    }
}

/// Four rows of `b` are multiplied into a row of `c` at a time, for the compiler to vectorize as its target allows.
fn portable([rows, inner, columns]: [usize; 3], a: ScratchMatrix<'_>, b: Right<'_>, c: ScratchOutput<'_>) {
    let ScratchOutput { data, row_stride, accumulate } = c;
    for (row, c) in data.chunks_mut(row_stride).take(rows).enumerate() {
        for (panel, c) in c[..columns].as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            let mut sums = if accumulate { *c } else { [0.0; PANEL] };
            for k in (0..inner).step_by(4) {
                let factors: [f32; 4] = std::array::from_fn(|i| a.data[row * a.row_stride + (k + i) * a.column_stride]);
                let rows: [&[f32]; 4] =
                    std::array::from_fn(|i| &b.data[panel * b.panel_stride + (k + i) * b.row_stride..][..PANEL]);
                for (j, sum) in sums.iter_mut().enumerate() {
                    let term = |i: usize| factors[i] * rows[i][j];
                    *sum += (term(0) + term(1)) + (term(2) + term(3));
                }
            }
            *c = sums;
        }
    }
}

/// [`multiply`] in vectors of `$lanes`, `$vectors` of them side by side in a tile of `$rows` or of one row.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! tiles {
    ($name:ident, $features:literal, $lanes:literal, $rows:literal, $vectors:literal, $arch:ident,
     [$set:ident, $load:ident, $store:ident, $multiply_add:path]) => {
        mod $name {
            use super::{PANEL, Right, ScratchMatrix, ScratchOutput};
            use std::arch::$arch::{$load, $set, $store};

            /// Vectors in a panel.
            const PANEL_VECTORS: usize = PANEL / $lanes;

            /// # Safety
            /// The CPU must have the instructions; the matrices must have these rows and columns.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn multiply(
                [rows, inner, columns]: [usize; 3],
                a: ScratchMatrix<'_>,
                b: Right<'_>,
                mut c: ScratchOutput<'_>,
            ) {
                let whole = rows / $rows * $rows;
                let strips = (0..whole).step_by($rows).map(|row| (row, true));
                for (row, is_whole) in strips.chain((whole..rows).map(|row| (row, false))) {
                    let mut column = 0;
                    while column < columns {
                        let first = [row, column];
                        let wide = column + $vectors * $lanes <= columns;
                        // SAFETY: the caller's promise; `columns` is a multiple of a panel, so a narrow tile fits in
                        // the rest.
                        unsafe {
                            match (is_whole, wide) {
                                (true, true) => tile::<$rows, $vectors>(first, inner, a, b, &mut c),
                                (true, false) => tile::<$rows, PANEL_VECTORS>(first, inner, a, b, &mut c),
                                (false, true) => tile::<1, $vectors>(first, inner, a, b, &mut c),
                                (false, false) => tile::<1, PANEL_VECTORS>(first, inner, a, b, &mut c),
                            }
                        }
                        column += if wide { $vectors * $lanes } else { PANEL };
                    }
                }
            }

            /// Computes the tile of `c` whose first element is at this row and column.
            ///
            /// # Safety
            /// As [`multiply`], for `ROWS` rows and `VECTORS` vectors of columns.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const ROWS: usize, const VECTORS: usize>(
                [row, column]: [usize; 2],
                inner: usize,
                a: ScratchMatrix<'_>,
                b: Right<'_>,
                c: &mut ScratchOutput<'_>,
            ) {
                let (row_stride, accumulate) = (c.row_stride, c.accumulate);
                let mut sums = [[$set(0.0); VECTORS]; ROWS];
                // SAFETY: the caller promised that all of these are elements of the matrices.
                unsafe {
                    let left = a.data.as_ptr().add(row * a.row_stride);
                    let right = b.data.as_ptr().add(column / PANEL * b.panel_stride);
                    let to = c.data.as_mut_ptr().add(row * row_stride + column);
                    if accumulate {
                        for row in 0..ROWS {
                            for vector in 0..VECTORS {
                                sums[row][vector] = $load(to.add(row * row_stride + vector * $lanes));
                            }
                        }
                    }
                    for k in 0..inner {
                        let mut columns = [$set(0.0); VECTORS];
                        for vector in 0..VECTORS {
                            let column = vector * $lanes;
                            let place = column / PANEL * b.panel_stride + column % PANEL;
                            columns[vector] = $load(right.add(k * b.row_stride + place));
                        }
                        for row in 0..ROWS {
                            let factor = $set(*left.add(row * a.row_stride + k * a.column_stride));
                            for vector in 0..VECTORS {
                                sums[row][vector] = $multiply_add(factor, columns[vector], sums[row][vector]);
                            }
                        }
                    }
                    for row in 0..ROWS {
                        for vector in 0..VECTORS {
                            $store(to.add(row * row_stride + vector * $lanes), sums[row][vector]);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
tiles!(
    avx512,
    "avx512f",
    16,
    8,
    2,
    x86_64,
    [_mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, std::arch::x86_64::_mm512_fmadd_ps]
);
#[cfg(target_arch = "x86_64")]
tiles!(
    avx2,
    "avx2,fma",
    8,
    4,
    2,
    x86_64,
    [_mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, std::arch::x86_64::_mm256_fmadd_ps]
);
#[cfg(target_arch = "aarch64")]
tiles!(neon, "neon", 4, 4, 4, aarch64, [vdupq_n_f32, vld1q_f32, vst1q_f32, crate::neon::multiply_add]);

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with sums in f64, by rows and transposed, fresh and accumulated, with rows longer than the used part.
    #[test]
    fn products_are_those_of_the_definition() {
        let values = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 7919 + seed) % 2003) as f32 / 1001.5 - 1.0).collect()
        };
        for [rows, inner, columns] in
            [[16, 16, 16], [32, 48, 80], [16, 64, 96], [80, 16, 64], [1, 32, 48], [11, 16, 32]]
        {
            let (ldb, ldc) = (columns + 16, columns + 32);
            let (a, b) = (values(rows * inner, 1), values(inner * ldb, 2));
            for (a, accumulate) in [(by_rows(&a, inner), false), (by_columns(&a, rows), true)] {
                let before = values(rows * ldc, 3);
                let mut c = before.clone();
                let mut panels = vec![f32::NAN; inner * columns];
                let right = if accumulate {
                    let transposed: Vec<f32> = (0..columns)
                        .flat_map(|j| (0..inner).map(move |k| (k, j)))
                        .map(|(k, j)| b[k * ldb + j])
                        .collect();
                    transpose(&transposed, inner, &mut panels);
                    in_panels(&panels, inner)
                } else {
                    in_rows(&b, ldb)
                };
                let to = if accumulate { add_to(&mut c, ldc) } else { overwrite(&mut c, ldc) };
                multiply([rows, inner, columns], a, right, to);
                for (at, found) in c.iter().enumerate() {
                    let (row, column) = (at / ldc, at % ldc);
                    let old = f64::from(before[at]);
                    let at = |k: usize| f64::from(a.data[row * a.row_stride + k * a.column_stride]);
                    let sum: f64 = (0..inner).map(|k| at(k) * f64::from(b[k * ldb + column.min(ldb - 1)])).sum();
                    let expected = match (column < columns, accumulate) {
                        (false, _) => old,
                        (true, false) => sum,
                        (true, true) => old + sum,
                    };
                    assert!((f64::from(*found) - expected).abs() < 1e-5, "{row}, {column}: {found}, not {expected}");
                }
            }
        }
    }
}
