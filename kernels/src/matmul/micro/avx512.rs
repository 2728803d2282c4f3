//! AVX-512: 8 × 48 sums in 24 registers; the inner loop issues two multiply-adds a cycle and little else.
//!
//! Loops by index over local arrays; only intrinsics take or return vectors. The compiler does not always inline a
//! closure or an iterator of vectors, and without inlining the kernel takes five times as long.

use super::{PrefetchQueue, Tile};
use crate::matmul::pack::fetch;
use std::arch::x86_64::{
    __m512, __m512bh, _mm256_load_si256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_dpbf16_ps,
    _mm512_fmadd_ps, _mm512_load_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_store_ps,
};
use std::mem::transmute;

const ROWS: usize = 8;
const VECTORS: usize = 3;
const LANES: usize = 16;

macro_rules! micro_kernel {
    (
        $(#[$attribute:meta])* $name:ident, $words:expr, |$at:ident| $load:expr,
        |$left:ident, $right:ident, $sum:ident| $multiply_add:expr
    ) => {
        $(#[$attribute])*
        pub(super) unsafe fn $name<const LIVE: usize>(
            units: usize,
            a: *const u32,
            b: *const u32,
            ahead: &PrefetchQueue,
            tile: &mut Tile,
        ) {
            let (mut a, mut b) = (a.cast::<f32>(), b.cast::<f32>());
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; LIVE];
            for span in ahead.spread_over(units) {
                fetch(span.address);
                for _ in 0..span.units {
                    // SAFETY: the caller promised this many aligned units.
                    unsafe {
                        let mut columns = [_mm512_setzero_ps(); VECTORS];
                        for vector in 0..VECTORS {
                            let $at = b.add(vector * $words);
                            columns[vector] = $load;
                        }
                        for row in 0..LIVE {
                            let $left = _mm512_set1_ps(*a.add(row));
                            for vector in 0..VECTORS {
                                let $right = columns[vector];
                                let $sum = sums[row][vector];
                                sums[row][vector] = $multiply_add;
                            }
                        }
                        a = a.add(ROWS);
                        b = b.add(VECTORS * $words);
                    }
                }
            }
            for row in 0..LIVE {
                for vector in 0..VECTORS {
                    let place = (row * VECTORS + vector) * LANES;
                    // SAFETY: a tile is aligned and has room for 8 × 48 floats.
                    unsafe { _mm512_store_ps(tile.0.as_mut_ptr().add(place), sums[row][vector]) };
                }
            }
        }
    };
}

micro_kernel! {
    /// The first `LIVE` of the rows. Units are floats.
    ///
    /// # Safety
    /// The CPU must have AVX-512; `a` must have 8 units of memory for each of `units`, `b` 48, aligned to 64 bytes.
    #[target_feature(enable = "avx512f")]
    float, LANES, |at| _mm512_load_ps(at), |left, right, sum| _mm512_fmadd_ps(left, right, sum)
}

micro_kernel! {
    /// Like [`float`], but B's units are FP16, half a word each.
    ///
    /// # Safety
    /// As [`float`], with B aligned to 32 bytes.
    #[target_feature(enable = "avx512f")]
    half, LANES / 2, |at| _mm512_cvtph_ps(_mm256_load_si256(at.cast())),
    |left, right, sum| _mm512_fmadd_ps(left, right, sum)
}

micro_kernel! {
    /// Like [`float`], but B's units are BF16, half a word each: the upper halves of floats.
    ///
    /// # Safety
    /// As [`half`].
    #[target_feature(enable = "avx512f")]
    bf16, LANES / 2,
    |at| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_load_si256(at.cast())))),
    |left, right, sum| _mm512_fmadd_ps(left, right, sum)
}

micro_kernel! {
    /// Like [`float`], but units are pairs of BF16. The instruction adds both products of a pair to the FP32 sum,
    /// rounding after each; it takes subnormal inputs and results for zero.
    ///
    /// # Safety
    /// As [`float`], and the CPU must have BF16 dot products.
    #[target_feature(enable = "avx512f,avx512bf16")]
    bf16_pair, LANES, |at| _mm512_load_ps(at), |left, right, sum| _mm512_dpbf16_ps(
        sum,
        // The casts keep all bits.
        transmute::<__m512, __m512bh>(left),
        transmute::<__m512, __m512bh>(right),
    )
}
