//! NEON's multiply-add with the operands in the order of other processors, and the instruction that Rust has no
//! intrinsic for.

use std::arch::aarch64::{float32x4_t, uint32x4_t, vfmaq_f32};
use std::arch::asm;

/// `a·b + sum`, with one rounding.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn multiply_add(a: float32x4_t, b: float32x4_t, sum: float32x4_t) -> float32x4_t {
    vfmaq_f32(sum, a, b)
}

/// `sum + a·bᵀ` for 2 × 4 BF16 matrices.
#[inline]
#[target_feature(enable = "neon,bf16")]
pub(super) fn multiply_bf16(mut sum: float32x4_t, a: uint32x4_t, b: uint32x4_t) -> float32x4_t {
    // SAFETY: the caller has the feature, and the instruction touches nothing but these registers.
    unsafe {
        asm!(
            "bfmmla {sum:v}.4s, {a:v}.8h, {b:v}.8h",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}
