//! Measures the precision inside an operation: the share of its results that equal the exact results rounded once.
//!
//! The kernels get random operands, and FP64 gives the exact results. An operation that is FP32 inside rounds once,
//! when it stores a result, so nearly all results match. An operation that sums in half precision rounds at each term,
//! and most results differ.

use crate::amp::{AutocastOp, CastRule};
use crate::engine::kernels::attention::{AttentionInputs, AttentionShape};
use crate::engine::kernels::columns::ColumnSlice;
use crate::engine::kernels::op::{self, cases::Trial};
use crate::engine::kernels::{Activation, Fused, NormKind, NormSettings, WeightLayout};
use crate::engine::model::candle_dtype;
use crate::precision::{FloatFormat, PrecisionPolicy};
use crate::random::{Domain, Stream};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;

/// The types that an operation reads, computes in and stores.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MeasuredOp {
    pub(crate) name: &'static str,
    pub(crate) operands: &'static str,
    /// The type inside: `f32`, or the operands' if the results are not the exact ones rounded once.
    pub(crate) inside: &'static str,
    pub(crate) result: &'static str,
    /// The share of its results that are the exact ones, rounded once to the policy's compute type.
    pub(crate) rounded_once: f64,
    /// The type to which PyTorch's autocast casts the operands; `None` if it leaves them.
    pub(crate) autocast: Option<&'static str>,
}

/// The share of results below which an operation does not count as FP32 inside.
const MIN_ROUNDED_ONCE: f64 = 0.9;

/// Measures the operations of a decoder with this project's kernels for a CPU.
pub(super) fn measured(policy: PrecisionPolicy) -> candle_core::Result<Vec<MeasuredOp>> {
    let probe = PrecisionProbe { compute: candle_dtype(policy.compute), format: policy.compute.format() };
    let [residual, grads] = [policy.residual, policy.grads].map(candle_dtype);
    Ok([probe.products(grads)?, probe.norm(residual)?, probe.attention()?, probe.gelu()?, probe.loss()?].concat())
}

/// Rows and columns of the operands.
const SIZE: [usize; 2] = [96, 192];

struct PrecisionProbe {
    compute: DType,
    format: FloatFormat,
}

fn numbers(salt: u32, shape: [usize; 2]) -> candle_core::Result<Tensor> {
    let mut numbers = vec![0f32; shape[0] * shape[1]];
    Stream::new(0, Domain::Bench).fill_normal(salt, 0, 0, &mut numbers);
    Tensor::from_vec(numbers, &shape, &Device::Cpu)
}

impl PrecisionProbe {
    /// Measures operations with operands of one type; `compute` returns a result for each of `operations`.
    fn measure<const N: usize>(
        &self,
        operations: [(&'static str, AutocastOp); N],
        operands: DType,
        compute: impl Fn(&Trial<'_>) -> candle_core::Result<[Tensor; N]>,
    ) -> candle_core::Result<Vec<MeasuredOp>> {
        let results = compute(&Trial::on_cpu(&Fused))?;
        let exact = compute(&Trial::exact())?;
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let measured = operations.into_iter().zip(results.iter().zip(&exact)).map(|((name, op), (result, exact))| {
            let rounded_once = rounded_once(&values(result)?, &values(exact)?, self.format);
            let inside = if rounded_once >= MIN_ROUNDED_ONCE { DType::F32 } else { operands };
            let autocast = match op.cast_rule() {
                CastRule::LowPrecision => Some(self.compute.as_str()),
                CastRule::Fp32 => Some(DType::F32.as_str()),
                CastRule::Promote | CastRule::Keep => None,
            };
            let [operands, inside, result] = [operands, inside, result.dtype()].map(|dtype| dtype.as_str());
            Ok(MeasuredOp { name, operands, inside, result, rounded_once, autocast })
        });
        measured.collect()
    }

    fn products(&self, grads: DType) -> candle_core::Result<Vec<MeasuredOp>> {
        let [rows, width] = SIZE;
        let operations = [("matrix products", AutocastOp::Linear), ("gradients of biases", AutocastOp::Linear)];
        self.measure(operations, self.compute, |t| {
            let x = numbers(1, SIZE)?;
            let weight = numbers(2, [width, rows])?;
            let (x, weight) = (&t.stored(&x, self.compute)?, &t.stored(&weight, self.compute)?);
            let y = t.poisoned(&[rows, rows], self.compute)?;
            let sums = t.poisoned(&[width], grads)?;
            t.run(op::Linear { layout: WeightLayout::InOut, x, weight, bias: None, low_rank: None, y: &y })?;
            t.run(op::SumRows { x, out: &sums })?;
            Ok([y, sums])
        })
    }

    fn norm(&self, residual: DType) -> candle_core::Result<Vec<MeasuredOp>> {
        let [rows, width] = SIZE;
        let operations = [("normalization", AutocastOp::LayerNorm), ("its statistics", AutocastOp::LayerNorm)];
        self.measure(operations, residual, |t| {
            let x = t.stored(&numbers(3, SIZE)?, residual)?;
            let [weight, bias] = [4, 5].map(|salt| t.stored(&numbers(salt, [1, width])?.flatten_all()?, self.compute));
            let weight = &weight?;
            let bias = &bias?;
            let y = t.poisoned(&SIZE, self.compute)?;
            let [mean, rstd] = [(); 2].map(|()| t.poisoned(&[rows], DType::F32));
            let x = ColumnSlice::all(&x)?;
            let out = ColumnSlice::all(&y)?;
            let bias = Some(bias);
            let mean = Some(&mean?);
            let rstd = rstd?;
            let settings = NormSettings { norm: NormKind::Layer, eps: 1e-5 };
            t.run(op::Norm { settings, x, weight, bias, y: out, mean, rstd: &rstd })?;
            Ok([y, rstd])
        })
    }

    fn attention(&self) -> candle_core::Result<Vec<MeasuredOp>> {
        const HEAD: usize = SIZE[1] / 3;
        let shape = AttentionShape::new(1, SIZE[0], 1, HEAD);
        let operations = [("softmax's sums", AutocastOp::Softmax), ("attention", AutocastOp::Attention)];
        self.measure(operations, self.compute, |t| {
            let qkv = t.stored(&numbers(6, SIZE)?, self.compute)?;
            let out = t.poisoned(&[SIZE[0], HEAD], self.compute)?;
            let lse = t.poisoned(&[SIZE[0]], DType::F32)?;
            let operands = AttentionInputs::packed(&shape, &qkv, None)?;
            t.run(op::Attention { shape, operands, out: &out, lse: &lse })?;
            Ok([lse, out])
        })
    }

    fn gelu(&self) -> candle_core::Result<Vec<MeasuredOp>> {
        self.measure([("GELU", AutocastOp::Gelu)], self.compute, |t| {
            let x = &t.stored(&numbers(7, SIZE)?, self.compute)?;
            let y = t.poisoned(&SIZE, self.compute)?;
            t.run(op::Activate { activation: Activation::Gelu, x, y: &y })?;
            Ok([y])
        })
    }

    fn loss(&self) -> candle_core::Result<Vec<MeasuredOp>> {
        let [rows, width] = SIZE;
        let trial = Trial::on_cpu(&Fused);
        let x = numbers(8, SIZE)?.to_dtype(self.compute)?;
        let weight = numbers(9, [rows, width])?;
        let weight = &weight.to_dtype(self.compute)?;
        let y = &trial.poisoned(&[rows, rows], self.compute)?;
        trial.run(op::Linear { layout: WeightLayout::OutIn, x: &x, weight, bias: None, low_rank: None, y })?;
        let targets = &(0..rows as u32).collect::<Vec<_>>();
        self.measure([("loss", AutocastOp::CrossEntropy)], self.compute, |t| {
            let logits = t.stored(y, self.compute)?;
            let out = t.poisoned(&[rows], DType::F32)?;
            let (logits, losses) = (ColumnSlice::all(&logits)?, &out);
            t.run(op::CrossEntropy { logits, softcap: None, targets, losses, seed: None, weights: None })?;
            Ok([out])
        })
    }
}

/// The share of `results` that equal the `exact` ones after both are rounded to `format`.
fn rounded_once(results: &[f64], exact: &[f64], format: FloatFormat) -> f64 {
    let equal = |(result, exact): &(&f64, &f64)| format.round(**result) == format.round(**exact);
    results.iter().zip(exact).filter(equal).count() as f64 / results.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measurement distinguishes sums in half precision from sums in FP32.
    #[test]
    fn a_narrow_sum_is_found() {
        let terms: Vec<Vec<f64>> = (0..100u32)
            .map(|row| {
                let mut numbers = [0f32; 192];
                Stream::new(1, Domain::Bench).fill_normal(row, 0, 0, &mut numbers);
                numbers.map(|x| FloatFormat::FP16.round(f64::from(x))).to_vec()
            })
            .collect();
        let exact: Vec<f64> = terms.iter().map(|terms| terms.iter().sum()).collect();
        let in_format = |format: FloatFormat| {
            let sum = |terms: &Vec<f64>| terms.iter().fold(0.0, |sum, term| format.round(sum + term));
            terms.iter().map(sum).collect::<Vec<_>>()
        };
        let share = |format| rounded_once(&in_format(format), &exact, FloatFormat::FP16);
        assert!(share(FloatFormat::FP16) < 0.5, "{}", share(FloatFormat::FP16));
        assert!(share(FloatFormat::FP32) >= MIN_ROUNDED_ONCE, "{}", share(FloatFormat::FP32));
    }

    #[test]
    fn every_operation_of_the_engine_is_fp32_inside() {
        for policy in [PrecisionPolicy::FP16, PrecisionPolicy::BF16, "p=f32,c=f16,g=f16,r=f16".parse().unwrap()] {
            for operation in measured(policy).unwrap() {
                assert_eq!(operation.inside, "f32", "{operation:?} under {policy}");
            }
        }
    }
}
