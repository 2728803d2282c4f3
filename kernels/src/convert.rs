//! The element types of the engine's buffers, and rows of them to and from FP32.
//!
//! A row kernel loads a row into FP32 scratch that stays in the L1 cache, computes, and stores it: one rounding, to
//! nearest even, at the end.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::isa::Isa;
use super::isa::vectorize;

/// An element type of the engine's buffers: `f32`, `f16` or `bf16`.
pub trait Element: candle_core::WithDType + bytemuck::Pod + Default {
    /// Upcasts `source` into `target`, which has the same length; exact.
    fn load(source: &[Self], target: &mut [f32]);

    /// Rounds `source` to nearest even into `target`, which has the same length. Overflow becomes infinity, and NaN
    /// stays NaN.
    fn store(source: &[f32], target: &mut [Self]);

    /// Upcasts one element; exact.
    fn to_f32(self) -> f32;

    /// Rounds one element to nearest even.
    fn from_f32(value: f32) -> Self;

    /// The elements as FP32: borrowed if they are FP32, otherwise upcast into `scratch`, which has the same length.
    #[inline(always)]
    fn as_f32<'a>(source: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        Self::load(source, scratch);
        scratch
    }
}

impl Element for f32 {
    #[inline]
    fn load(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    #[inline]
    fn store(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn as_f32<'a>(source: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        source
    }
}

impl Element for bf16 {
    #[inline]
    fn load(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len());
        vectorize!({
            for (&from, to) in source.iter().zip(target) {
                *to = from.to_f32();
            }
        });
    }

    #[inline]
    fn store(source: &[f32], target: &mut [Self]) {
        assert_eq!(source.len(), target.len());
        vectorize!({
            for (&from, to) in source.iter().zip(target) {
                *to = Element::from_f32(from);
            }
        });
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // Half a unit in the last kept place, minus one if that place is even; the carry rounds up, possibly to
        // infinity.
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
}

impl Element for f16 {
    #[inline]
    fn load(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len());
        #[cfg(target_arch = "x86_64")]
        if Isa::current() >= Isa::Avx512 {
            // SAFETY: the CPU has AVX-512, and both slices have the same length.
            return unsafe { avx512::load_f16(source, target) };
        }
        source.convert_to_f32_slice(target);
    }

    #[inline]
    fn store(source: &[f32], target: &mut [Self]) {
        assert_eq!(source.len(), target.len());
        #[cfg(target_arch = "x86_64")]
        if Isa::current() >= Isa::Avx512 {
            // SAFETY: the CPU has AVX-512, and both slices have the same length.
            return unsafe { avx512::store_f16(source, target) };
        }
        target.convert_from_f32_slice(source);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(clippy::cast_ptr_alignment, reason = "these loads and stores take any address")]
mod avx512 {
    use crate::rows::LANES;
    use half::f16;
    use std::arch::x86_64::{
        __m256i, _MM_FROUND_TO_NEAREST_INT, _mm256_loadu_si256, _mm256_mask_storeu_epi16, _mm256_maskz_loadu_epi16,
        _mm256_storeu_si256, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_mask_storeu_ps,
        _mm512_maskz_loadu_ps, _mm512_storeu_ps,
    };

    /// The first `count` lanes, of 1 to 15.
    #[inline(always)]
    fn mask(count: usize) -> u16 {
        (1 << count) - 1
    }

    /// # Safety
    /// Both slices must have the same length.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn load_f16(source: &[f16], target: &mut [f32]) {
        let whole = source.len() / LANES * LANES;
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        // Avoid masks where possible: store forwarding from masked stores is slow.
        for start in (0..whole).step_by(LANES) {
            // SAFETY: `start + LANES` is at most the length of both slices.
            unsafe {
                let bits = _mm256_loadu_si256(from.add(start).cast::<__m256i>());
                _mm512_storeu_ps(to.add(start), _mm512_cvtph_ps(bits));
            }
        }
        if whole < source.len() {
            let mask = mask(source.len() - whole);
            // SAFETY: the mask keeps both accesses inside their slices.
            unsafe {
                let bits = _mm256_maskz_loadu_epi16(mask, from.add(whole).cast());
                _mm512_mask_storeu_ps(to.add(whole), mask, _mm512_cvtph_ps(bits));
            }
        }
    }

    /// # Safety
    /// Both slices must have the same length.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn store_f16(source: &[f32], target: &mut [f16]) {
        let whole = source.len() / LANES * LANES;
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        for start in (0..whole).step_by(LANES) {
            // SAFETY: `start + LANES` is at most the length of both slices.
            unsafe {
                let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(from.add(start)));
                _mm256_storeu_si256(to.add(start).cast::<__m256i>(), bits);
            }
        }
        if whole < source.len() {
            let mask = mask(source.len() - whole);
            // SAFETY: the mask keeps both accesses inside their slices.
            unsafe {
                let values = _mm512_maskz_loadu_ps(mask, from.add(whole));
                let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                _mm256_mask_storeu_epi16(to.add(whole).cast(), mask, bits);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Floats around the rounding boundaries at each `step`th pattern of a 16-bit format: every one for 1, with NaNs,
    /// infinities and subnormals.
    pub(crate) fn hard_cases(step: usize, upcast: impl Fn(u16) -> f32) -> Vec<f32> {
        (0..=u16::MAX)
            .step_by(step)
            .flat_map(|bits| {
                let value = upcast(bits);
                let next = upcast(bits.wrapping_add(1));
                let middle = (f64::from(value) * 0.5 + f64::from(next) * 0.5) as f32;
                [value, middle, middle.next_up(), middle.next_down(), value.next_up(), value.next_down()]
            })
            .collect()
    }

    /// Checks a type with these conversions.
    fn rounds_to_even<T: Element>(
        from_bits: fn(u16) -> T,
        to_f32: fn(T) -> f32,
        from_f32: fn(f32) -> T,
        bits: fn(T) -> u16,
    ) {
        let all: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
        let mut wide = vec![0.0; all.len()];
        T::load(&all, &mut wide);
        for (narrow, wide) in all.iter().zip(&wide) {
            assert!(to_f32(*narrow) == *wide || to_f32(*narrow).is_nan() && wide.is_nan());
        }
        let cases = hard_cases(1, |bits| to_f32(from_bits(bits)));
        let mut stored = vec![from_bits(0); cases.len()];
        T::store(&cases, &mut stored);
        for (case, stored) in cases.iter().zip(&stored) {
            let equal = bits(*stored) == bits(from_f32(*case));
            assert!(equal || to_f32(*stored).is_nan() && case.is_nan(), "{case:e}");
        }
    }

    #[test]
    fn every_number_survives_and_every_boundary_rounds_to_even() {
        rounds_to_even(f16::from_bits, f16::to_f32, f16::from_f32_const, f16::to_bits);
        rounds_to_even(bf16::from_bits, bf16::to_f32_const, bf16::from_f32_const, bf16::to_bits);
    }

    #[test]
    fn overflow_becomes_infinite() {
        let mut halves = [f16::ZERO; 3];
        f16::store(&[65519.9, 65520.0, -1e9], &mut halves);
        assert_eq!(halves, [f16::MAX, f16::INFINITY, f16::NEG_INFINITY]);
        let mut brains = [bf16::ZERO; 2];
        bf16::store(&[f32::MAX, -f32::MAX], &mut brains);
        assert_eq!(brains, [bf16::INFINITY, bf16::NEG_INFINITY]);
    }

    #[test]
    fn every_length_is_served() {
        for length in 0..70 {
            let values: Vec<f32> = (0..length).map(|i| i as f32 - 20.0).collect();
            let mut halves = vec![f16::ZERO; length];
            let mut back = vec![0.0; length];
            f16::store(&values, &mut halves);
            f16::load(&halves, &mut back);
            assert_eq!(values, back);
        }
    }
}
