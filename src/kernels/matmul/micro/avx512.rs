//! AVX-512: 8 × 48 sums in 24 registers; the inner loop issues two multiply-adds a cycle and little else.

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_load_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_store_ps,
};
use std::mem::transmute;

use super::Tile;

const ROWS: usize = 8;
const VECTORS: usize = 3;
const LANES: usize = 16;

/// Units are floats.
///
/// # Safety
/// The CPU must have AVX-512; `a` must have 8 units of memory for each of `units`, `b` 48, aligned to 64 bytes.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn float(units: usize, a: *const u32, b: *const u32, tile: &mut Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        accumulate(
            units,
            a,
            b,
            tile,
            #[inline(always)]
            |a, b, sum| _mm512_fmadd_ps(a, b, sum),
        );
    }
}

/// Units are pairs of BF16. The instruction adds both products of a pair to the FP32 sum, rounding after each; it takes
/// subnormal inputs and results for zero, which no other micro-kernel does.
///
/// # Safety
/// As [`float`], and the CPU must have BF16 dot products.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn bf16_pair(units: usize, a: *const u32, b: *const u32, tile: &mut Tile) {
    // SAFETY: the caller's promise; the casts keep all bits.
    unsafe {
        accumulate(
            units,
            a,
            b,
            tile,
            #[inline(always)]
            |a, b, sum| _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)),
        );
    }
}

/// # Safety
/// As [`float`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn accumulate(
    units: usize,
    a: *const u32,
    b: *const u32,
    tile: &mut Tile,
    multiply_add: impl Fn(__m512, __m512, __m512) -> __m512,
) {
    let (mut a, mut b) = (a.cast::<f32>(), b.cast::<f32>());
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    for _ in 0..units {
        // SAFETY: the caller promised this many aligned units.
        unsafe {
            let right: [__m512; VECTORS] = std::array::from_fn(|vector| _mm512_load_ps(b.add(vector * LANES)));
            for (row, sums) in sums.iter_mut().enumerate() {
                let left = _mm512_set1_ps(*a.add(row));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = multiply_add(left, right, *sum);
                }
            }
            a = a.add(ROWS);
            b = b.add(VECTORS * LANES);
        }
    }
    for (vector, sum) in sums.as_flattened().iter().enumerate() {
        // SAFETY: a tile is aligned and has room for 8 × 48 floats.
        unsafe { _mm512_store_ps(tile.0.as_mut_ptr().add(vector * LANES), *sum) };
    }
}
