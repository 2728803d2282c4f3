//! The precision inside an operation, measured: the share of its results that are the exact ones rounded once.
//!
//! The kernels get random operands, and FP64 gives the exact results. What is FP32 inside rounds once, when it stores a result, so
//! nearly all results are the exact ones rounded. What sums in half precision rounds at each term and misses most of them.

use candle_core::{DType, Device, Tensor};
use serde::Serialize;

use crate::engine::kernels::attention::{Operands, Shape};
use crate::engine::kernels::cross_entropy::HeadWorkspace;
use crate::engine::kernels::{Activation, Fused, Kernels, Norm, NormSettings, Normed, WeightLayout, view};
use crate::engine::model::candle_dtype;
use crate::precision::{FloatFormat, PrecisionPolicy};
use crate::random::{Domain, Stream};

/// What an operation reads, computes in and stores.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Operation {
    /// The operation.
    pub name: &'static str,
    /// The type of its operands.
    pub operands: &'static str,
    /// The type inside: `f32`, or the operands' if the results are not the exact ones rounded once.
    pub inside: &'static str,
    /// The type of its results.
    pub result: &'static str,
    /// The share of its results that are the exact ones, rounded once to the operands' type.
    pub rounded_once: f64,
}

/// The share of results below which an operation does not count as FP32 inside.
const MOST: f64 = 0.9;

/// Measures the operations of a decoder with this project's kernels for a CPU.
pub(super) fn measured(policy: PrecisionPolicy) -> candle_core::Result<Vec<Operation>> {
    let bench = Bench { compute: candle_dtype(policy.compute), format: policy.compute.format() };
    let (norm, statistics) = bench.norm(candle_dtype(policy.residual))?;
    let (softmax, attention) = bench.attention()?;
    let (product, bias) = bench.products(candle_dtype(policy.grads))?;
    Ok(vec![product, bias, norm, statistics, softmax, attention, bench.gelu()?, bench.loss()?])
}

/// Rows and columns of the operands.
const SIZE: [usize; 2] = [96, 192];

struct Bench {
    compute: DType,
    format: FloatFormat,
}

/// The values of a tensor, which are exact in FP64.
fn values(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?.into_iter().map(f64::from).collect())
}

fn room(shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
    view::zeros(shape, dtype, &Device::Cpu)
}

/// Normally distributed numbers.
fn numbers(salt: u32, shape: [usize; 2], dtype: DType) -> candle_core::Result<Tensor> {
    let mut numbers = vec![0f32; shape[0] * shape[1]];
    Stream::new(0, Domain::Bench).fill_normal(salt, 0, 0, &mut numbers);
    Tensor::from_vec(numbers, &shape, &Device::Cpu)?.to_dtype(dtype)
}

impl Bench {
    fn operation(
        &self,
        name: &'static str,
        operands: DType,
        result: &Tensor,
        exact: &[f64],
    ) -> candle_core::Result<Operation> {
        let rounded_once = rounded_once(&values(result)?, exact, self.format);
        let inside = if rounded_once >= MOST { DType::F32 } else { operands };
        let (operands, inside) = (operands.as_str(), inside.as_str());
        Ok(Operation { name, operands, inside, result: result.dtype().as_str(), rounded_once })
    }

    fn products(&self, grads: DType) -> candle_core::Result<(Operation, Operation)> {
        let [rows, width] = SIZE;
        let (x, weight) = (numbers(1, SIZE, self.compute)?, numbers(2, [width, rows], self.compute)?);
        let y = room(&[rows, rows], self.compute)?;
        Fused.linear(WeightLayout::InOut, &x, &weight, None, &y)?;
        let (a, b) = (values(&x)?, values(&weight)?);
        let dot = |row: usize, column: usize| (0..width).map(|k| a[row * width + k] * b[k * rows + column]).sum();
        let exact: Vec<f64> = (0..rows * rows).map(|at| dot(at / rows, at % rows)).collect();
        let product = self.operation("matrix products", self.compute, &y, &exact)?;
        let (dweight, dbias) = (room(&[width, width], grads)?, room(&[width], grads)?);
        Fused.linear_weight_gradient(WeightLayout::InOut, &x, &x, &dweight, Some(&dbias))?;
        let exact: Vec<f64> = (0..width).map(|column| a.iter().skip(column).step_by(width).sum()).collect();
        Ok((product, self.operation("gradients of biases", self.compute, &dbias, &exact)?))
    }

    fn norm(&self, residual: DType) -> candle_core::Result<(Operation, Operation)> {
        let [rows, width] = SIZE;
        let x = numbers(3, SIZE, residual)?;
        let (weight, bias) = (numbers(4, [1, width], self.compute)?, numbers(5, [1, width], self.compute)?);
        let (weight, bias) = (weight.flatten_all()?, bias.flatten_all()?);
        let settings = NormSettings { norm: Norm::Layer, eps: 1e-5 };
        let normed = Normed::lay_out(Norm::Layer, rows, width, self.compute, &room)?;
        Fused.norm(settings, &x, &weight, Some(&bias), &normed)?;
        let (gain, shift) = (values(&weight)?, values(&bias)?);
        let (mut exact, mut rstds) = (Vec::new(), Vec::new());
        for row in values(&x)?.chunks(width) {
            let mean = row.iter().sum::<f64>() / width as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            let rstd = 1.0 / (variance + f64::from(settings.eps)).sqrt();
            exact.extend(row.iter().zip(&gain).zip(&shift).map(|((x, gain), shift)| (x - mean) * rstd * gain + shift));
            rstds.push(rstd);
        }
        let norm = self.operation("normalisation", residual, &normed.out, &exact)?;
        Ok((norm, self.operation("its statistics", residual, &normed.rstd, &rstds)?))
    }

    fn attention(&self) -> candle_core::Result<(Operation, Operation)> {
        const HEAD: usize = SIZE[1] / 3;
        let rows = SIZE[0];
        let shape = Shape::new(1, rows, 1, HEAD);
        let qkv = numbers(6, SIZE, self.compute)?;
        let (out, lse) = (room(&[rows, HEAD], self.compute)?, room(&[rows], DType::F32)?);
        Fused.attention(&shape, &Operands::packed(&shape, &qkv, None)?, &out, &lse)?;
        let packed = values(&qkv)?;
        let part = |row: usize, part: usize| &packed[(3 * row + part) * HEAD..][..HEAD];
        let (mut exact, mut sums) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let score = |key: usize| {
                let product: f64 = part(row, 0).iter().zip(part(key, 1)).map(|(q, k)| q * k).sum();
                (product * f64::from(shape.scale)).exp()
            };
            let scores: Vec<f64> = (0..=row).map(score).collect();
            let sum: f64 = scores.iter().sum();
            let mixed = |column: usize| {
                scores.iter().enumerate().map(|(key, score)| score * part(key, 2)[column]).sum::<f64>() / sum
            };
            exact.extend((0..HEAD).map(mixed));
            sums.push(sum.ln());
        }
        let softmax = self.operation("softmax's sums", self.compute, &lse, &sums)?;
        Ok((softmax, self.operation("attention", self.compute, &out, &exact)?))
    }

    fn gelu(&self) -> candle_core::Result<Operation> {
        let x = numbers(7, SIZE, self.compute)?;
        let y = room(&SIZE, self.compute)?;
        Fused.activate(Activation::Gelu, &x, &y)?;
        let gelu =
            |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
        let exact: Vec<f64> = values(&x)?.into_iter().map(gelu).collect();
        self.operation("GELU", self.compute, &y, &exact)
    }

    fn loss(&self) -> candle_core::Result<Operation> {
        let [rows, width] = SIZE;
        let (x, weight) = (numbers(8, SIZE, self.compute)?, numbers(9, [rows, width], self.compute)?);
        let targets: Vec<u32> = (0..rows as u32).collect();
        let workspace = HeadWorkspace::lay_out(rows, rows, width, self.compute, None, &room)?;
        Fused.head(&x, &weight, &targets, &workspace, None, None)?;
        let loss =
            |(row, logits): (usize, &[f64])| logits.iter().map(|logit| (logit - logits[row]).exp()).sum::<f64>().ln();
        let exact: Vec<f64> = values(&workspace.logits)?.chunks(rows).enumerate().map(loss).collect();
        self.operation("loss", self.compute, &workspace.losses, &exact)
    }
}

/// The share of `results` that are the `exact` ones where both are rounded to `format`.
fn rounded_once(results: &[f64], exact: &[f64], format: FloatFormat) -> f64 {
    let equal = |(result, exact): &(&f64, &f64)| format.round(**result) == format.round(**exact);
    results.iter().zip(exact).filter(equal).count() as f64 / results.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// The measurement tells sums in half precision from those in FP32.
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
        assert!(share(FloatFormat::FP32) >= MOST, "{}", share(FloatFormat::FP32));
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
