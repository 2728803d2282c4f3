//! AVX2 with FMA: 6 × 16 sums in 12 registers. Loops by index, as in `avx512`.
//!
//! The inner loop has a constant length: the processor mispredicts the end of one that is as long as a span between prefetches.

#![expect(clippy::needless_range_loop, reason = "as in `avx512`")]

use super::{PrefetchQueue, Tile};
use crate::matmul::pack::fetch;
use std::arch::x86_64::{__m256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_store_ps};

const ROWS: usize = 6;
const VECTORS: usize = 2;
const LANES: usize = 8;
/// Units multiplied between two prefetches.
const UNROLLED: usize = 4;

/// The first `LIVE` of the rows. Units are floats.
///
/// # Safety
/// The CPU must have AVX2 and FMA; `a` must have 6 floats for each of `units`, `b` 16.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn float<const LIVE: usize>(
    units: usize,
    a: *const u32,
    b: *const u32,
    ahead: &PrefetchQueue,
    tile: &mut Tile,
) {
    let (a, b) = (a.cast::<f32>(), b.cast::<f32>());
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; LIVE];
    let whole = units / UNROLLED * UNROLLED;
    for unit in (0..whole).step_by(UNROLLED) {
        fetch(ahead.address(unit / UNROLLED));
        for unit in unit..unit + UNROLLED {
            // SAFETY: the caller promised this many units.
            unsafe { add_products(a.add(unit * ROWS), b.add(unit * VECTORS * LANES), &mut sums) };
        }
    }
    for unit in whole..units {
        // SAFETY: as above.
        unsafe { add_products(a.add(unit * ROWS), b.add(unit * VECTORS * LANES), &mut sums) };
    }
    for row in 0..LIVE {
        for vector in 0..VECTORS {
            let place = (row * VECTORS + vector) * LANES;
            // SAFETY: a tile is aligned and has room for 6 × 16 floats.
            unsafe { _mm256_store_ps(tile.0.as_mut_ptr().add(place), sums[row][vector]) };
        }
    }
}

/// Adds the products of one unit.
///
/// # Safety
/// As [`float`], for one unit.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_products<const LIVE: usize>(a: *const f32, b: *const f32, sums: &mut [[__m256; VECTORS]; LIVE]) {
    let mut columns = [_mm256_setzero_ps(); VECTORS];
    for vector in 0..VECTORS {
        // SAFETY: the caller's promise.
        columns[vector] = unsafe { _mm256_loadu_ps(b.add(vector * LANES)) };
    }
    for row in 0..LIVE {
        // SAFETY: as above.
        let left = _mm256_set1_ps(unsafe { *a.add(row) });
        for vector in 0..VECTORS {
            sums[row][vector] = _mm256_fmadd_ps(left, columns[vector], sums[row][vector]);
        }
    }
}
