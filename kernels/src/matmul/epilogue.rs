//! From a tile of sums to C: scaling, bias, the old value, and the one rounding.

use super::super::convert::Element;
use super::super::isa::vectorize;
use super::Epilogue;
use super::micro::{MAX_TILE, PrefetchQueue, Tile};
use crate::machine::allocator::CACHE_LINE;
use std::any::TypeId;
use std::ops::Range;

/// A row-major matrix that tasks write tile by tile, each tile by one task.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputMatrix<C> {
    start: *mut C,
    stride: usize,
}

// SAFETY: the tasks of a product write disjoint tiles, see `OutputMatrix::row`.
unsafe impl<C: Send> Send for OutputMatrix<C> {}
// SAFETY: as above.
unsafe impl<C: Send> Sync for OutputMatrix<C> {}

/// A tile in C's type, and its old values widened; kept from tile to tile, because zeroing it takes longer than using
/// it.
pub(super) struct Scratch<C> {
    narrow: [C; MAX_TILE],
    wide: [f32; MAX_TILE],
}

impl<C: Element> Scratch<C> {
    pub(super) fn new() -> Self {
        Self { narrow: [C::zero(); MAX_TILE], wide: [0.0; MAX_TILE] }
    }
}

/// The part of a matrix that a tile covers.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileRect {
    pub(super) row: usize,
    pub(super) col: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl TileRect {
    /// The area of the transposed matrix.
    pub(super) fn transposed(self) -> Self {
        Self { row: self.col, col: self.row, rows: self.cols, cols: self.rows }
    }

    /// This area as a part of these rows and columns.
    pub(super) fn relative_to(self, rows: &Range<usize>, cols: &Range<usize>) -> Self {
        Self { row: self.row - rows.start, col: self.col - cols.start, ..self }
    }
}

impl<C: Element> OutputMatrix<C> {
    pub(super) fn new(matrix: &mut [C], stride: usize) -> Self {
        Self { start: matrix.as_mut_ptr(), stride }
    }

    /// The cache lines of an area.
    #[inline]
    pub(super) fn fetch(self, area: TileRect, ahead: &mut PrefetchQueue) {
        // One more than the length fills, because a row may start anywhere in a line.
        let lines = (area.cols * size_of::<C>()).div_ceil(CACHE_LINE) + 1;
        ahead.push_rows(self.start.wrapping_add(area.row * self.stride + area.col), self.stride, area.rows, lines);
    }

    /// This matrix, if it is one of FP32.
    #[inline(always)]
    fn as_floats(self) -> Option<OutputMatrix<f32>> {
        (TypeId::of::<C>() == TypeId::of::<f32>())
            .then(|| OutputMatrix { start: self.start.cast(), stride: self.stride })
    }

    /// The `i`th row of an area.
    ///
    /// # Safety
    /// The area must lie inside the matrix, and no other task may touch it meanwhile.
    #[inline(always)]
    unsafe fn row<'c>(self, area: TileRect, i: usize) -> &'c mut [C] {
        // SAFETY: the caller's promise.
        unsafe {
            let start = self.start.add((area.row + i) * self.stride + area.col);
            std::slice::from_raw_parts_mut(start, area.cols)
        }
    }

    /// Adds this matrix to a tile whose rows are `width` floats apart.
    ///
    /// # Safety
    /// The area must lie inside the matrix, and no other task may touch it meanwhile.
    pub(super) unsafe fn add_to(self, tile: &mut Tile, width: usize, area: TileRect, scratch: &mut Scratch<C>) {
        if let Some(floats) = self.as_floats() {
            return vectorize!({
                for (i, sums) in tile.0.chunks_exact_mut(width).enumerate().take(area.rows) {
                    // SAFETY: the caller's promise.
                    let row = unsafe { floats.row(area, i) };
                    for (sum, old) in sums.iter_mut().zip(row) {
                        *sum += *old;
                    }
                }
            });
        }
        let Scratch { narrow, wide } = scratch;
        let count = area.rows * width;
        for (i, target) in narrow.chunks_exact_mut(width).enumerate().take(area.rows) {
            // SAFETY: the caller's promise.
            copy(unsafe { self.row(area, i) }, &mut target[..area.cols]);
        }
        C::load(&narrow[..count], &mut wide[..count]);
        vectorize!({
            for (sum, old) in tile.0[..count].iter_mut().zip(&wide[..count]) {
                *sum += old;
            }
        });
    }

    /// Rounds a tile into this matrix.
    ///
    /// # Safety
    /// The area must lie inside the matrix, and no other task may touch it meanwhile.
    pub(super) unsafe fn store(self, tile: &Tile, width: usize, area: TileRect, scratch: &mut Scratch<C>) {
        if let Some(floats) = self.as_floats() {
            return vectorize!({
                for (i, source) in tile.0.chunks_exact(width).enumerate().take(area.rows) {
                    // SAFETY: the caller's promise.
                    copy(&source[..area.cols], unsafe { floats.row(area, i) });
                }
            });
        }
        let narrow = &mut scratch.narrow;
        let count = area.rows * width;
        C::store(&tile.0[..count], &mut narrow[..count]);
        for (i, source) in narrow.chunks_exact(width).enumerate().take(area.rows) {
            // SAFETY: the caller's promise.
            copy(&source[..area.cols], unsafe { self.row(area, i) });
        }
    }

    /// Rounds a tile into this matrix and applies `epilogue`.
    ///
    /// # Safety
    /// The area must lie inside the matrix, and no other task may touch it meanwhile.
    pub(super) unsafe fn finish(
        self,
        tile: &mut Tile,
        width: usize,
        area: TileRect,
        epilogue: Epilogue<'_>,
        scratch: &mut Scratch<C>,
    ) {
        if let (Some(floats), 1.0, None) = (self.as_floats(), epilogue.alpha, epilogue.bias)
            && area.cols.is_multiple_of(BLOCK)
        {
            return vectorize!({
                for i in 0..area.rows {
                    let (sums, _) = tile.0[i * width..][..area.cols].as_chunks::<BLOCK>();
                    // SAFETY: the caller's promise.
                    let (row, _) = unsafe { floats.row(area, i) }.as_chunks_mut::<BLOCK>();
                    for (sums, row) in sums.iter().zip(row) {
                        *row = std::array::from_fn(|k| if epilogue.accumulate { sums[k] + row[k] } else { sums[k] });
                    }
                }
            });
        }
        if epilogue.alpha != 1.0 {
            vectorize!({
                for sum in &mut tile.0[..area.rows * width] {
                    *sum *= epilogue.alpha;
                }
            });
        }
        if let Some(bias) = epilogue.bias {
            let bias = &bias[area.col..][..area.cols];
            vectorize!({
                for row in tile.0.chunks_exact_mut(width).take(area.rows) {
                    for (sum, bias) in row.iter_mut().zip(bias) {
                        *sum += bias;
                    }
                }
            });
        }
        // SAFETY: the caller's promise.
        unsafe {
            if epilogue.accumulate {
                self.add_to(tile, width, area, scratch);
            }
            self.store(tile, width, area, scratch);
        }
    }
}

/// Elements of a row that are copied or added together: with a constant length, the compiler needs no call and no loop.
const BLOCK: usize = 16;

/// Copies between slices of the same length, which are short.
#[inline(always)]
fn copy<C: Copy>(source: &[C], target: &mut [C]) {
    let (blocks, rest) = source.as_chunks::<BLOCK>();
    let (target_blocks, target_rest) = target.as_chunks_mut::<BLOCK>();
    for (from, to) in blocks.iter().zip(target_blocks) {
        *to = *from;
    }
    for (from, to) in rest.iter().zip(target_rest) {
        *to = *from;
    }
}
