//! Vectorizable FP32 `exp`, `tanh`, GELU and SiLU.
//!
//! They have no branches, so that loops over them compile to vector code (the standard library's versions are calls),
//! and no fused multiply-adds, so that all instruction sets give the same bits. NaN inputs give NaN.

use std::f32::consts::LOG2_E;

/// ln(2) in two parts: the first has so few bits that its product with any exponent of an FP32 number is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// 1.5 · 2^23: adding it leaves a float's nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// sqrt(2 / π), of the tanh form of GELU.
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
/// The cubic coefficient of the tanh form of GELU.
const GELU_CUBIC: f32 = 0.044_715;
/// Beyond this magnitude GELU is the identity or below the smallest float, and its derivative 1 or 0.
const GELU_LIMIT: f32 = 16.0;

/// Splits `x = n ln(2) + r` and returns `(n, expm1(r))`, with |r| ≤ ln(2) / 2.
#[inline(always)]
fn reduce(x: f32) -> (i32, f32) {
    let shifted = x * LOG2_E + ROUND;
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let rounded = shifted - ROUND;
    let r = (x - rounded * LN_2_HIGH) - rounded * LN_2_LOW;
    // Taylor's series: on this interval its next term is a tenth of the last bit.
    let mut sum = 1.0 / 5040.0;
    sum = sum * r + 1.0 / 720.0;
    sum = sum * r + 1.0 / 120.0;
    sum = sum * r + 1.0 / 24.0;
    sum = sum * r + 1.0 / 6.0;
    sum = sum * r + 0.5;
    (n, sum * (r * r) + r)
}

/// 2^n for an n from -126 to 127.
#[inline(always)]
fn exp2i(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// The exponential function, within 2 ULP; subnormal results are right, overflow is infinite.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let (n, expm1) = reduce(x);
    // In two steps, because 2^n may not be a normal number.
    let half = n >> 1;
    (expm1 + 1.0) * exp2i(half) * exp2i(n - half)
}

/// The hyperbolic tangent, within 2 ULP.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // Small arguments: an odd polynomial, with the coefficients of `tanhf` in Moshier's Cephes library.
    let square = x * x;
    let mut sum = -5.704_988_7e-3;
    sum = sum * square + 2.063_909e-2;
    sum = sum * square - 5.373_971_6e-2;
    sum = sum * square + 1.333_144_2e-1;
    sum = sum * square - 0.333_332_8;
    let small = sum * square * x + x;
    // Others: expm1(2x) / (expm1(2x) + 2).
    let magnitude = x.abs();
    let limited = if magnitude > 9.1 { 9.1 } else { magnitude };
    let (n, expm1) = reduce(2.0 * limited);
    let power = exp2i(n);
    let expm1 = power * expm1 + (power - 1.0);
    let large = expm1 / (expm1 + 2.0);
    let result = if magnitude < 0.625 { small } else { large };
    result.copysign(x)
}

/// Replaces each number `x` by `cap * tanh(x / cap)`.
#[inline(always)]
pub fn soft_cap(x: &mut [f32], cap: f32) {
    for x in x {
        *x = cap * tanh(*x / cap);
    }
}

/// The logistic function of `x` and its complement, each with its full relative accuracy.
#[inline(always)]
pub(crate) fn logistic(x: f32) -> (f32, f32) {
    // Of a negative number, so that it cannot overflow.
    let small = exp(-x.abs());
    let (part, rest) = if x < 0.0 { (small, 1.0) } else { (1.0, small) };
    (part / (1.0 + small), rest / (1.0 + small))
}

/// Softplus, ln(1 + exp(x)); its logarithm is the standard library's.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    x.max(0.0) + exp(-x.abs()).ln_1p()
}

/// GELU's gate (1 + tanh(u)) / 2 at `x`, which is already clamped. It is computed as the logistic function of 2u, which
/// keeps the relative accuracy of small gates.
#[inline(always)]
fn gelu_gate(x: f32) -> f32 {
    let u = SQRT_2_OVER_PI * (x + GELU_CUBIC * (x * x * x));
    logistic(2.0 * u).0
}

#[inline(always)]
fn limit(x: f32) -> f32 {
    let x = if x > GELU_LIMIT { GELU_LIMIT } else { x };
    if x < -GELU_LIMIT { -GELU_LIMIT } else { x }
}

/// GELU in its tanh form, x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2. NaN for -∞, as in `PyTorch`.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * gelu_gate(limit(x))
}

/// [`gelu`] and its derivative, which is finite for every number.
#[inline(always)]
pub fn gelu_with_derivative(x: f32) -> (f32, f32) {
    let limited = limit(x);
    let gate = gelu_gate(limited);
    let slope = 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * (limited * limited));
    (x * gate, gate + gate * (1.0 - gate) * (limited * slope))
}

/// SiLU, x / (1 + exp(-x)). NaN for -∞, as in PyTorch.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * logistic(x).0
}

/// [`silu`] and its derivative, which is finite for every number.
#[inline(always)]
pub fn silu_with_derivative(x: f32) -> (f32, f32) {
    // Beyond this magnitude the complement is 0.
    let limited = if x > 128.0 { 128.0 } else { x };
    let limited = if limited < -128.0 { -128.0 } else { limited };
    let (gate, complement) = logistic(limited);
    (x * gate, gate + gate * complement * limited)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::vectorize;
    use crate::precision::FloatFormat;

    /// A function of this module, and its exact counterpart.
    type Named = (&'static str, fn(f32) -> f32, fn(f64) -> f64);

    #[inline(always)]
    fn gelu_derivative(x: f32) -> f32 {
        gelu_with_derivative(x).1
    }

    fn exact_gelu(x: f64) -> f64 {
        x / (1.0 + (-2.0 * exact_argument(x)).exp())
    }

    fn exact_gelu_derivative(x: f64) -> f64 {
        let x = x.clamp(-1e3, 1e3);
        let gate = 1.0 / (1.0 + (-2.0 * exact_argument(x)).exp());
        let slope = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * x * x);
        gate + 2.0 * x * gate * (1.0 - gate) * slope
    }

    fn exact_silu(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    fn exact_silu_derivative(x: f64) -> f64 {
        let x = x.clamp(-700.0, 700.0);
        let gate = 1.0 / (1.0 + (-x).exp());
        let complement = 1.0 / (1.0 + x.exp());
        gate + x * gate * complement
    }

    fn exact_argument(x: f64) -> f64 {
        (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)
    }

    /// The largest error of `function` over `inputs`, in ULP of FP32, and its input.
    fn worst(inputs: impl Iterator<Item = f32>, function: fn(f32) -> f32, exact: fn(f64) -> f64) -> (f64, f32) {
        inputs.fold((0.0, 0.0), |worst, x| {
            let found = f64::from(function(x));
            let expected = exact(f64::from(x));
            let error = (found - expected).abs() / FloatFormat::FP32.ulp(expected);
            if error > worst.0 || error.is_nan() { (error, x) } else { worst }
        })
    }

    /// Every 1009th FP32 number of a magnitude below `limit`, and the whole numbers.
    fn sweep(limit: f32) -> impl Iterator<Item = f32> {
        let magnitudes = (0..limit.to_bits()).step_by(1009).map(f32::from_bits);
        let whole = (0..limit.min(1e4) as i32).map(|i| i as f32);
        magnitudes.chain(whole).flat_map(|x| [x, -x])
    }

    #[test]
    fn exp_and_tanh_are_within_2_ulp_of_fp32() {
        let (error, at) = worst(sweep(87.0), exp, f64::exp);
        assert!(error < 2.0, "exp({at:e}) is off by {error} ULP");
        let (error, at) = worst(sweep(103.0).filter(|x| *x < 0.0), exp, f64::exp);
        assert!(error < 2.0, "exp({at:e}) is off by {error} ULP");
        let (error, at) = worst(sweep(f32::MAX), tanh, f64::tanh);
        assert!(error < 2.0, "tanh({at:e}) is off by {error} ULP");
    }

    /// Checks all finite inputs of a 16-bit format whose true result it can hold.
    fn check_format(format: FloatFormat, (name, function, exact): Named) {
        for x in (0..1 << 16).map(|bits| format.decode(bits)).filter(|x| x.is_finite()) {
            let expected = exact(x);
            if expected.abs() < format.max() {
                let found = format.round(function(x as f32).into());
                let error = (found - expected).abs() / format.ulp(expected);
                assert!(error < 2.0, "{name}({x:e}) is {found:e}, not {expected:e}: {error} ULP");
            }
        }
    }

    #[test]
    fn all_functions_are_within_2_ulp_of_every_16_bit_format() {
        let functions: [Named; 6] = [
            ("exp", exp, f64::exp),
            ("tanh", tanh, f64::tanh),
            ("gelu", gelu, exact_gelu),
            ("gelu_derivative", gelu_derivative, exact_gelu_derivative),
            ("silu", silu, exact_silu),
            ("silu_derivative", |x| silu_with_derivative(x).1, exact_silu_derivative),
        ];
        for function in functions {
            check_format(FloatFormat::FP16, function);
            check_format(FloatFormat::BF16, function);
        }
    }

    #[test]
    fn large_inputs_saturate_and_nan_stays() {
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.8), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!([tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)], [1.0, -1.0]);
        assert_eq!(tanh(-0.0).to_bits(), (-0f32).to_bits());
        assert_eq!([gelu(f32::MAX), gelu(f32::INFINITY)], [f32::MAX, f32::INFINITY]);
        assert_eq!([gelu(-f32::MAX), gelu(-100.0)], [0.0, 0.0]);
        assert!([f32::MAX, f32::INFINITY, 1e20, 50.0].iter().all(|&x| gelu_derivative(x) == 1.0));
        assert!([f32::MAX, f32::INFINITY, 1e20, 50.0].iter().all(|&x| gelu_derivative(-x) == 0.0));
        assert_eq!([silu(f32::MAX), silu(f32::INFINITY)], [f32::MAX, f32::INFINITY]);
        assert!([f32::MAX, f32::INFINITY, 1e20].iter().all(|&x| silu_with_derivative(x).1 == 1.0));
        assert!([f32::MAX, f32::INFINITY, 1e20].iter().all(|&x| silu_with_derivative(-x).1 == 0.0));
        for function in [exp, tanh, gelu, gelu_derivative, silu, |x| silu_with_derivative(x).1] {
            assert!(function(f32::NAN).is_nan());
        }
    }

    #[test]
    fn slices_get_the_same_bits_as_single_values() {
        fn check(inputs: &[f32], function: impl Fn(f32) -> f32) {
            let mut values = inputs.to_vec();
            vectorize!({
                for value in &mut values {
                    *value = function(*value);
                }
            });
            assert!(values.iter().zip(inputs).all(|(value, input)| value.to_bits() == function(*input).to_bits()));
        }
        let inputs: Vec<f32> = sweep(f32::MAX).step_by(97).collect();
        check(&inputs, exp);
        check(&inputs, tanh);
        check(&inputs, gelu);
        check(&inputs, gelu_derivative);
    }
}
