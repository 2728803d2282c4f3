//! NEON: 8 × 12 sums in 24 registers of four. Loops by index, as in `avx512`.
//!
//! FP16 is widened while it is packed: FMLAL, which multiplies it and adds in FP32, does four multiply-adds as FMLA
//! does.

#![expect(clippy::needless_range_loop, reason = "as in `avx512`")]

use super::{PrefetchQueue, Tile};
use crate::matmul::pack::fetch;
use crate::neon::multiply_bf16;
use std::arch::aarch64::{
    vdupq_n_f32, vfmaq_laneq_f32, vget_high_f32, vget_low_f32, vld1q_f32, vld1q_u32, vst1_f32, vst1q_f32,
};

const ROWS: usize = 8;
const COLUMNS: usize = 12;
const LANES: usize = 4;

/// Units are floats.
///
/// # Safety
/// `a` must have 8 floats for each of `units`, `b` 12.
#[target_feature(enable = "neon")]
pub(super) unsafe fn float(units: usize, a: *const u32, b: *const u32, ahead: &PrefetchQueue, tile: &mut Tile) {
    const VECTORS: usize = COLUMNS / LANES;
    let (mut a, mut b) = (a.cast::<f32>(), b.cast::<f32>());
    // SAFETY: the caller promised this many units, and a tile has room for 8 × 12 floats.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); VECTORS]; ROWS];
        for span in ahead.spread_over(units) {
            fetch(span.address);
            for _ in 0..span.units {
                let mut columns = [vdupq_n_f32(0.0); VECTORS];
                for vector in 0..VECTORS {
                    columns[vector] = vld1q_f32(b.add(vector * LANES));
                }
                for row in (0..ROWS).step_by(LANES) {
                    let left = vld1q_f32(a.add(row));
                    for vector in 0..VECTORS {
                        let right = columns[vector];
                        sums[row][vector] = vfmaq_laneq_f32::<0>(sums[row][vector], right, left);
                        sums[row + 1][vector] = vfmaq_laneq_f32::<1>(sums[row + 1][vector], right, left);
                        sums[row + 2][vector] = vfmaq_laneq_f32::<2>(sums[row + 2][vector], right, left);
                        sums[row + 3][vector] = vfmaq_laneq_f32::<3>(sums[row + 3][vector], right, left);
                    }
                }
                a = a.add(ROWS);
                b = b.add(COLUMNS);
            }
        }
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                vst1q_f32(tile.0.as_mut_ptr().add(row * COLUMNS + vector * LANES), sums[row][vector]);
            }
        }
    }
}

/// Units are four BF16 values of a line: two lines are a factor of BFMMLA, which adds 2 × 2 sums of four products. It
/// takes subnormal inputs and results for zero, and rounds to odd, which no other micro-kernel does.
///
/// # Safety
/// The CPU must have BF16 products of matrices; `a` must have 8 units of two words for each pair of `words`, `b` 12.
#[target_feature(enable = "neon,bf16")]
pub(super) unsafe fn bf16_quad(
    words: usize,
    mut a: *const u32,
    mut b: *const u32,
    ahead: &PrefetchQueue,
    tile: &mut Tile,
) {
    // SAFETY: as in `float`; a register is two units of two words.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); COLUMNS / 2]; ROWS / 2];
        for span in ahead.spread_over(words / 2) {
            fetch(span.address);
            for _ in 0..span.units {
                let mut rows = [vld1q_u32(a); ROWS / 2];
                for row in 1..ROWS / 2 {
                    rows[row] = vld1q_u32(a.add(row * LANES));
                }
                for column in 0..COLUMNS / 2 {
                    let right = vld1q_u32(b.add(column * LANES));
                    for row in 0..ROWS / 2 {
                        sums[row][column] = multiply_bf16(sums[row][column], rows[row], right);
                    }
                }
                a = a.add(2 * ROWS);
                b = b.add(2 * COLUMNS);
            }
        }
        for row in 0..ROWS / 2 {
            for column in 0..COLUMNS / 2 {
                let place = tile.0.as_mut_ptr().add(2 * row * COLUMNS + 2 * column);
                vst1_f32(place, vget_low_f32(sums[row][column]));
                vst1_f32(place.add(COLUMNS), vget_high_f32(sums[row][column]));
            }
        }
    }
}
