//! Binary floating-point formats as data, with exact conversion.
//!
//! A format is two field widths and whether it has infinities; limits, spacing, rounding and decoding follow from
//! those. One algorithm serves all formats, so the exhaustive tests against `half` and `float8` also cover formats that
//! no crate implements.

/// A format with a sign bit, `exponent_bits` and `mantissa_bits`, and bias `2^(exponent_bits - 1) - 1`, as in IEEE 754.
///
/// Bit patterns are right-aligned in a `u32`. Values are `f64`, which represents every value of every format exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FloatFormat {
    /// The customary name: `FP16`.
    pub name: &'static str,
    /// Width of the exponent field.
    pub exponent_bits: u32,
    /// Width of the stored mantissa, without the implied leading one.
    pub mantissa_bits: u32,
    /// Whether the top exponent means infinity and NaN, as in IEEE 754. If not (E4M3 in the OCP 8-bit specification,
    /// also called "fn"), it has finite numbers too, and only the all-ones pattern is NaN.
    pub has_inf: bool,
}

/// The class of a bit pattern's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FloatClass {
    /// +0 or -0.
    Zero,
    /// Below the smallest normal number, with fewer significant bits.
    Subnormal,
    /// Full precision.
    Normal,
    /// Beyond the largest finite number.
    Infinite,
    /// Not a number.
    Nan,
}

/// `2^k` for `k` in the range of normal f64 exponents, -1022 to 1023.
const fn exp2(k: i32) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

/// The exponent of the binade of `x`: `floor(log2 |x|)`, and -1023 for zero and f64's own subnormals.
const fn binade(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

impl FloatFormat {
    /// IEEE 754 binary32.
    pub const FP32: Self = Self { name: "FP32", exponent_bits: 8, mantissa_bits: 23, has_inf: true };
    /// IEEE 754 binary16.
    pub const FP16: Self = Self { name: "FP16", exponent_bits: 5, mantissa_bits: 10, has_inf: true };
    /// bfloat16: the upper half of binary32.
    pub const BF16: Self = Self { name: "BF16", exponent_bits: 8, mantissa_bits: 7, has_inf: true };
    /// OCP FP8 for weights and activations; no infinity, so the largest value is 448 rather than 240.
    pub const E4M3: Self = Self { name: "FP8 E4M3", exponent_bits: 4, mantissa_bits: 3, has_inf: false };
    /// OCP FP8 for gradients: the range of FP16 with a quarter of its mantissa.
    pub const E5M2: Self = Self { name: "FP8 E5M2", exponent_bits: 5, mantissa_bits: 2, has_inf: true };
    /// Every format, widest first.
    pub const ALL: [Self; 5] = [Self::FP32, Self::FP16, Self::BF16, Self::E4M3, Self::E5M2];

    /// Width of a pattern.
    pub const fn bits(self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    /// The bias of the exponent field.
    pub const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// Exponent of the smallest normal number: -14 in FP16.
    pub const fn min_exponent(self) -> i32 {
        1 - self.bias()
    }

    /// Exponent of the largest finite number: 15 in FP16.
    pub const fn max_exponent(self) -> i32 {
        if self.has_inf { self.bias() } else { self.bias() + 1 }
    }

    /// Exponent of the smallest subnormal number: -24 in FP16.
    pub const fn min_subnormal_exponent(self) -> i32 {
        self.min_exponent() - self.mantissa_bits as i32
    }

    /// The largest finite value.
    pub const fn max(self) -> f64 {
        self.decode(self.max_bits())
    }

    /// The smallest positive normal value.
    pub const fn min_normal(self) -> f64 {
        exp2(self.min_exponent())
    }

    /// The smallest positive value.
    pub const fn min_subnormal(self) -> f64 {
        exp2(self.min_subnormal_exponent())
    }

    /// Distance from 1 to the next larger value.
    pub const fn epsilon(self) -> f64 {
        exp2(-(self.mantissa_bits as i32))
    }

    /// Spacing of the format's values in the binade of `x`; the smallest subnormal at and around zero; NaN out of
    /// range.
    pub fn ulp(self, x: f64) -> f64 {
        let exponent = binade(x).max(self.min_exponent());
        if exponent > self.max_exponent() { f64::NAN } else { exp2(exponent - self.mantissa_bits as i32) }
    }

    /// The pattern nearest to `x`, ties to even; infinity out of range, or NaN if the format has no infinity.
    ///
    /// This is IEEE 754's rule and the OCP specification's non-saturating conversion. A NaN becomes the canonical quiet
    /// NaN with the same sign.
    pub fn encode(self, x: f64) -> u32 {
        let sign = u32::from(x.is_sign_negative()) << (self.bits() - 1);
        if x.is_nan() {
            return sign | self.nan_bits();
        }
        // Count x in units of its binade's spacing. The leading one of a normal number adds one to the exponent field,
        // so the same sum works for subnormals (no leading one) and a carry into the next binade.
        let exponent = binade(x).max(self.min_exponent());
        let units = (x.abs() / exp2(exponent - self.mantissa_bits as i32)).round_ties_even() as u64;
        let magnitude = (((exponent - self.min_exponent()) as u64) << self.mantissa_bits).saturating_add(units);
        let overflow = if self.has_inf { self.max_bits() + 1 } else { self.nan_bits() };
        sign | if magnitude > u64::from(self.max_bits()) { overflow } else { magnitude as u32 }
    }

    /// Like [`encode`](Self::encode), but values out of range, including infinities, become the largest finite value.
    ///
    /// FP8 hardware and the crate `float8` do this with finite values. NaN stays NaN.
    pub fn encode_saturating(self, x: f64) -> u32 {
        let max = self.max();
        self.encode(if x.is_nan() { x } else { x.clamp(-max, max) })
    }

    /// `x` rounded to the format with a power-of-two scale, saturating. Values that are not finite stay so, because
    /// overflows must be detected.
    pub fn round_scaled(self, x: f32, scale: f32) -> f32 {
        if !x.is_finite() {
            return x;
        }
        (self.decode(self.encode_saturating(f64::from(x) * f64::from(scale))) / f64::from(scale)) as f32
    }

    /// The exact value of a pattern; ignores bits above the format's width.
    pub const fn decode(self, bits: u32) -> f64 {
        let magnitude = bits & self.magnitude_mask();
        let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
        let field = magnitude >> self.mantissa_bits;
        let value = if magnitude > self.max_bits() {
            if self.has_inf && mantissa == 0 { f64::INFINITY } else { f64::NAN }
        } else if field == 0 {
            mantissa as f64 * self.min_subnormal()
        } else {
            (1.0 + mantissa as f64 * self.epsilon()) * exp2(field as i32 - self.bias())
        };
        if bits >> (self.bits() - 1) & 1 == 1 { -value } else { value }
    }

    /// `x` rounded to the format.
    pub fn round(self, x: f64) -> f64 {
        self.decode(self.encode(x))
    }

    /// The class of a pattern.
    pub const fn classify(self, bits: u32) -> FloatClass {
        let magnitude = bits & self.magnitude_mask();
        if magnitude == 0 {
            FloatClass::Zero
        } else if magnitude < 1 << self.mantissa_bits {
            FloatClass::Subnormal
        } else if magnitude <= self.max_bits() {
            FloatClass::Normal
        } else if self.has_inf && magnitude == self.max_bits() + 1 {
            FloatClass::Infinite
        } else {
            FloatClass::Nan
        }
    }

    /// The next pattern towards +inf: infinity (or NaN) after the largest value, the smallest positive number after
    /// either zero. `None` for NaN and +inf.
    pub fn next_up(self, bits: u32) -> Option<u32> {
        let sign = 1 << (self.bits() - 1);
        let negative = bits & sign != 0;
        match self.classify(bits) {
            FloatClass::Nan => None,
            FloatClass::Infinite if !negative => None,
            FloatClass::Zero => Some(1),
            _ if negative => Some(bits - 1),
            _ => Some(bits + 1),
        }
    }

    /// The next pattern towards -inf; the mirror image of [`next_up`](Self::next_up).
    pub fn next_down(self, bits: u32) -> Option<u32> {
        let sign = 1 << (self.bits() - 1);
        self.next_up(bits ^ sign).map(|up| up ^ sign)
    }

    const fn magnitude_mask(self) -> u32 {
        (1 << (self.bits() - 1)) - 1
    }

    /// The pattern of the largest finite value.
    const fn max_bits(self) -> u32 {
        if self.has_inf { self.magnitude_mask() - (1 << self.mantissa_bits) } else { self.magnitude_mask() - 1 }
    }

    /// The canonical NaN: quiet, no payload.
    const fn nan_bits(self) -> u32 {
        if self.has_inf { self.max_bits() + 1 + (1 << (self.mantissa_bits - 1)) } else { self.magnitude_mask() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// `decode` of every pattern equals `reference`, and encoding that value gives the pattern back.
    fn check_every_pattern(format: FloatFormat, reference: impl Fn(u32) -> f64) {
        for bits in 0..1u32 << format.bits() {
            let ours = format.decode(bits);
            let theirs = reference(bits);
            if theirs.is_nan() {
                assert!(ours.is_nan(), "{} {bits:#x}: {ours}", format.name);
                assert_eq!(format.classify(format.encode(theirs)), FloatClass::Nan);
            } else {
                assert_eq!(ours.to_bits(), theirs.to_bits(), "{} {bits:#x}: {ours} {theirs}", format.name);
                assert_eq!(format.encode(ours), bits, "{} {bits:#x}", format.name);
            }
        }
    }

    /// Compares the rounding of every value, every midpoint to its successor, and their f32 neighbors. (Not f64
    /// neighbors: `half` converts f64 through f32, so rounds twice.)
    fn check_every_rounding(format: FloatFormat, reference: impl Fn(f32) -> f64) {
        for bits in 0..=format.max_bits() {
            let low = format.decode(bits);
            let middle = (low + format.ulp(low) / 2.0) as f32;
            let low = low as f32;
            for x in [low, low.next_up(), middle.next_down(), middle, middle.next_up()] {
                for x in [x, -x] {
                    let ours = format.round(f64::from(x));
                    let theirs = reference(x);
                    assert_eq!(ours.to_bits(), theirs.to_bits(), "{} {x:e}: {ours:e} {theirs:e}", format.name);
                }
            }
        }
    }

    #[test]
    fn fp16_matches_half_on_all_patterns_and_midpoints() {
        check_every_pattern(FloatFormat::FP16, |bits| f16::from_bits(bits as u16).to_f64());
        check_every_rounding(FloatFormat::FP16, |x| f16::from_f32(x).to_f64());
    }

    #[test]
    fn bf16_matches_half_on_all_patterns_and_midpoints() {
        check_every_pattern(FloatFormat::BF16, |bits| bf16::from_bits(bits as u16).to_f64());
        check_every_rounding(FloatFormat::BF16, |x| bf16::from_f32(x).to_f64());
    }

    /// `float8` saturates: it has the largest value if this module's result leaves the range.
    #[test]
    fn fp8_matches_float8_except_for_overflow() {
        let saturated = |format: FloatFormat, x: f64| format.decode(format.encode_saturating(x));
        check_every_pattern(FloatFormat::E4M3, |bits| float8::F8E4M3::from_bits(bits as u8).to_f64());
        check_every_pattern(FloatFormat::E5M2, |bits| float8::F8E5M2::from_bits(bits as u8).to_f64());
        check_every_rounding(FloatFormat::E4M3, |x| match float8::F8E4M3::from_f32(x).to_f64() {
            // 464 is the midpoint between 448 and E4M3's NaN pattern.
            _ if x.abs() > 464.0 => f64::NAN.copysign(FloatFormat::E4M3.round(f64::from(x))),
            theirs => theirs,
        });
        check_every_rounding(FloatFormat::E5M2, |x| match float8::F8E5M2::from_f32(x).to_f64() {
            _ if x.abs() >= 61440.0 => f64::INFINITY.copysign(f64::from(x)),
            theirs => theirs,
        });
        for x in [448.0, 464.0, 464.1, 1e30, f64::INFINITY, -1e30] {
            assert_eq!(saturated(FloatFormat::E4M3, x), float8::F8E4M3::from_f64(x).to_f64());
        }
        for x in [57344.0, 61439.0, 61440.0, 1e30, -1e30] {
            assert_eq!(saturated(FloatFormat::E5M2, x), float8::F8E5M2::from_f64(x).to_f64());
        }
        assert_eq!(FloatFormat::E4M3.round(464.0), 448.0);
        assert!(FloatFormat::E4M3.round(464.1).is_nan());
        assert!(FloatFormat::E4M3.round(f64::INFINITY).is_nan());
        assert_eq!(FloatFormat::E5M2.round(61440.0), f64::INFINITY);
    }

    #[test]
    fn limits_are_the_published_ones() {
        let [fp32, fp16, bf16, e4m3, e5m2] = FloatFormat::ALL;
        assert_eq!(fp32.max(), f64::from(f32::MAX));
        assert_eq!(fp32.min_normal(), f64::from(f32::MIN_POSITIVE));
        assert_eq!(fp32.min_subnormal(), f64::from(f32::from_bits(1)));
        assert_eq!(fp32.epsilon(), f64::from(f32::EPSILON));
        assert_eq!((fp16.max(), fp16.min_normal(), fp16.min_subnormal()), (65504.0, exp2(-14), exp2(-24)));
        assert_eq!((bf16.max(), bf16.epsilon()), (f64::from(half::bf16::MAX), exp2(-7)));
        assert_eq!((e4m3.max(), e4m3.min_normal(), e4m3.min_subnormal()), (448.0, exp2(-6), exp2(-9)));
        assert_eq!((e5m2.max(), e5m2.min_normal(), e5m2.min_subnormal()), (57344.0, exp2(-14), exp2(-16)));
        assert_eq!(FloatFormat::ALL.map(FloatFormat::bias), [127, 15, 127, 7, 15]);
        assert_eq!(e4m3.encode(f64::NAN), 0x7f);
        assert_eq!(e4m3.encode(-f64::NAN), 0xff);
    }

    #[test]
    fn ulp_is_the_spacing_of_the_binade() {
        let fp16 = FloatFormat::FP16;
        assert_eq!(fp16.ulp(0.0), exp2(-24));
        assert_eq!(fp16.ulp(-1.0), exp2(-10));
        assert_eq!(fp16.ulp(2048.0), 2.0);
        assert_eq!(fp16.ulp(65535.0), 32.0);
        assert!(fp16.ulp(65536.0).is_nan() && fp16.ulp(f64::INFINITY).is_nan());
    }

    #[test]
    fn classes_and_neighbors() {
        let fp16 = FloatFormat::FP16;
        let class = |x: f64| fp16.classify(fp16.encode(x));
        assert_eq!(class(exp2(-25)), FloatClass::Zero);
        assert_eq!(class(exp2(-24)), FloatClass::Subnormal);
        assert_eq!(class(exp2(-14)), FloatClass::Normal);
        assert_eq!(class(65519.0), FloatClass::Normal);
        assert_eq!(class(65520.0), FloatClass::Infinite);
        assert_eq!(class(f64::NAN), FloatClass::Nan);
        assert_eq!(fp16.next_up(0x8000), Some(1));
        assert_eq!(fp16.next_down(0), Some(0x8001));
        assert_eq!(fp16.next_up(0x7bff), Some(0x7c00));
        assert_eq!(fp16.next_up(0x7c00), None);
        assert_eq!(fp16.next_down(0x7c00), Some(0x7bff));
        assert_eq!(fp16.next_down(0x7e00), None);
    }

    proptest! {
        #[test]
        fn f32_patterns_round_as_the_crates_do(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(!x.is_nan());
            prop_assert_eq!(FloatFormat::FP32.encode(f64::from(x)), bits);
            prop_assert_eq!(FloatFormat::FP16.encode(f64::from(x)), u32::from(f16::from_f32(x).to_bits()));
            prop_assert_eq!(FloatFormat::BF16.encode(f64::from(x)), u32::from(bf16::from_f32(x).to_bits()));
            prop_assert_eq!(FloatFormat::FP16.round(x.into()), f16::from_f32(x).to_f64());
        }

        #[test]
        fn f64_rounds_to_fp32_as_the_machine_does(x in any::<f64>()) {
            prop_assert_eq!(FloatFormat::FP32.encode(x), (x as f32).to_bits());
        }
    }
}
