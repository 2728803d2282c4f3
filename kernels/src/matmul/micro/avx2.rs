//! AVX2 with FMA: 6 × 16 sums in 12 registers. Loops by index, as in `avx512`.
//!
//! The inner loop has a constant length: the processor mispredicts the end of one that is as long as a span between
//! prefetches.

#![expect(clippy::needless_range_loop, reason = "as in `avx512`")]

use super::{PrefetchQueue, Tile};
use crate::convert::Element;
use crate::matmul::pack::fetch;
use candle_core::DType;
use std::arch::x86_64::{
    __m256, _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_store_ps,
};

const ROWS: usize = 6;
const VECTORS: usize = 2;
const LANES: usize = 8;
/// Units multiplied between two prefetches.
const UNROLLED: usize = 4;

/// The first `LIVE` of the rows. Units are floats, those of B in type `T`.
///
/// # Safety
/// The CPU must have AVX2, FMA and F16C; `a` must have 6 floats for each of `units`, `b` 16 values of type `T`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn float<T: Element, const LIVE: usize>(
    units: usize,
    a: *const u32,
    b: *const u32,
    ahead: &PrefetchQueue,
    tile: &mut Tile,
) {
    let (a, b) = (a.cast::<f32>(), b.cast::<T>());
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_products<T: Element, const LIVE: usize>(
    a: *const f32,
    b: *const T,
    sums: &mut [[__m256; VECTORS]; LIVE],
) {
    let mut columns = [_mm256_setzero_ps(); VECTORS];
    for vector in 0..VECTORS {
        // SAFETY: the caller's promise.
        columns[vector] = unsafe { load(b.add(vector * LANES)) };
    }
    for row in 0..LIVE {
        // SAFETY: as above.
        let left = _mm256_set1_ps(unsafe { *a.add(row) });
        for vector in 0..VECTORS {
            sums[row][vector] = _mm256_fmadd_ps(left, columns[vector], sums[row][vector]);
        }
    }
}

/// Eight values as floats.
///
/// # Safety
/// As [`float`], and there must be eight values at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<T: Element>(at: *const T) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        match T::DTYPE {
            DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
            DType::BF16 => {
                // The upper halves of floats.
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
            _ => _mm256_loadu_ps(at.cast()),
        }
    }
}
