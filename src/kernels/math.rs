//! Vectorisable FP32 `exp`, `tanh` and GELU.
//!
//! Branch-free on purpose, so that loops over them compile to vector code (the standard library's versions are calls),
//! and free of fused multiply-adds, so that every instruction set gives the same bits. NaN in gives NaN out.

use super::isa::vectorize;

/// log2(e).
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln(2) in two parts: the first has so few bits that its product with any exponent of an FP32 number is exact.
const LN_2_HIGH: f32 = 0.693_359_375;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// 1.5 · 2^23: adding it leaves a float's nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// sqrt(2 / π), of the tanh form of GELU.
const SQRT_2_OVER_PI: f32 = 0.797_884_56;
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
    // In two steps, since 2^n itself may be no normal float.
    let half = n >> 1;
    (expm1 + 1.0) * exp2i(half) * exp2i(n - half)
}

/// The hyperbolic tangent, within 2 ULP.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    let magnitude = if magnitude > 9.1 { 9.1 } else { magnitude };
    let (n, expm1) = reduce(2.0 * magnitude);
    let power = exp2i(n);
    let expm1 = power * expm1 + (power - 1.0);
    (expm1 / (expm1 + 2.0)).copysign(x)
}

/// GELU's gate (1 + tanh(u)) / 2 at the already limited `x`, as a logistic function so that small gates keep their
/// relative accuracy.
#[inline(always)]
fn gelu_gate(x: f32) -> f32 {
    let u = SQRT_2_OVER_PI * (x + GELU_CUBIC * (x * x * x));
    1.0 / (1.0 + exp(-2.0 * u))
}

#[inline(always)]
fn limit(x: f32) -> f32 {
    let x = if x > GELU_LIMIT { GELU_LIMIT } else { x };
    if x < -GELU_LIMIT { -GELU_LIMIT } else { x }
}

/// GELU in its tanh form, x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2. Of -∞ it is NaN, as in `PyTorch`.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * gelu_gate(limit(x))
}

/// The derivative of [`gelu`]; finite for every number.
#[inline(always)]
pub fn gelu_derivative(x: f32) -> f32 {
    let x = limit(x);
    let gate = gelu_gate(x);
    let slope = 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * (x * x));
    gate + gate * (1.0 - gate) * (x * slope)
}

/// Replaces each element by `function` of it, in vector code.
#[inline(always)]
fn map(values: &mut [f32], function: impl Fn(f32) -> f32) {
    vectorize(
        #[inline(always)]
        || values.iter_mut().for_each(|value| *value = function(*value)),
    );
}

/// [`exp`] of each element, in place.
pub fn exp_slice(values: &mut [f32]) {
    map(values, exp);
}

/// [`tanh`] of each element, in place.
pub fn tanh_slice(values: &mut [f32]) {
    map(values, tanh);
}

/// [`gelu`] of each element, in place.
pub fn gelu_slice(values: &mut [f32]) {
    map(values, gelu);
}

/// [`gelu_derivative`] of each element, in place.
pub fn gelu_derivative_slice(values: &mut [f32]) {
    map(values, gelu_derivative);
}
