//! AVX2 with FMA: 6 × 16 sums in 12 registers. Loops by index, as in `avx512`.

#![expect(clippy::needless_range_loop, reason = "as in `avx512`")]

use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_store_ps};

use super::{PrefetchQueue, Tile};
use crate::matmul::pack::fetch;

const ROWS: usize = 6;
const VECTORS: usize = 2;
const LANES: usize = 8;

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
    let (mut a, mut b) = (a.cast::<f32>(), b.cast::<f32>());
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; LIVE];
    for span in ahead.spread_over(units) {
        fetch(span.address);
        for _ in 0..span.units {
            // SAFETY: the caller promised this many units.
            unsafe {
                let mut columns = [_mm256_setzero_ps(); VECTORS];
                for vector in 0..VECTORS {
                    columns[vector] = _mm256_loadu_ps(b.add(vector * LANES));
                }
                for row in 0..LIVE {
                    let left = _mm256_set1_ps(*a.add(row));
                    for vector in 0..VECTORS {
                        sums[row][vector] = _mm256_fmadd_ps(left, columns[vector], sums[row][vector]);
                    }
                }
                a = a.add(ROWS);
                b = b.add(VECTORS * LANES);
            }
        }
    }
    for row in 0..LIVE {
        for vector in 0..VECTORS {
            let place = (row * VECTORS + vector) * LANES;
            // SAFETY: a tile is aligned and has room for 6 × 16 floats.
            unsafe { _mm256_store_ps(tile.0.as_mut_ptr().add(place), sums[row][vector]) };
        }
    }
}
