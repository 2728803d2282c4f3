//! DoRA (Liu et al., 2024): the weights of each output keep the direction that base and adapter give them and take a
//! trained magnitude. As the paper proposes and PEFT does, the norm they would have is a constant to the gradient.
//!
//! Mostly candle's operations on any device: what they read is small compared with the products.

use super::adapter::LoraModule;
use super::layers::Context;
use super::quantized_base::WeightRef;
use crate::engine::kernels::columns::{ColumnSlice, MatmulOperand};
use crate::engine::kernels::linear::squared_norms;
use crate::engine::kernels::{WeightLayout, view};
use candle_core::{DType, Result, Tensor};

/// DoRA's scale of a product's outputs.
#[derive(Debug)]
pub(super) struct MagnitudeScale {
    /// Trained magnitude over weight norm, `[out]`, FP32; 1 for outputs without DoRA.
    factors: Tensor,
    /// For each member its first output and the weight norms, `[out]`, FP32.
    members: Vec<(usize, Tensor)>,
}

/// The scale of a product's outputs. `a` holds the stacked `lora_A` of the members.
pub(super) fn magnitude_scale(
    cx: &Context<'_>,
    members: &[LoraModule],
    weight: &WeightRef<'_>,
    layout: WeightLayout,
    a: &Tensor,
    scale: f32,
) -> Result<MagnitudeScale> {
    let squares = squared_norms(weight, layout)?;
    let outputs = squares.elem_count();
    // ‖W + s B A‖² = ‖W‖² + s B (2 A Wᵀ + s A Aᵀ Bᵀ) of each output: no copy of W is made.
    let cross = view::zeros(&[a.dim(0)?, outputs], DType::F32, weight.device())?;
    let operand = MatmulOperand::of_weight(weight, layout)?;
    cx.product(MatmulOperand::all(a)?, operand, 2.0, ColumnSlice::all(&cross)?)?;
    let r = a.dim(0)? / members.len();
    let scale = f64::from(scale);
    let mut factors = Vec::new();
    let mut norms = Vec::new();
    let mut end = 0;
    let ones = |count| Tensor::ones(count, DType::F32, weight.device());
    for (i, member) in members.iter().enumerate() {
        let Some(magnitude) = member.magnitude else { continue };
        let first = member.outputs.start;
        let count = member.outputs.len();
        let (a, b) = (wide(&a.narrow(0, i * r, r)?)?, wide(cx.weights.fused(member.b))?);
        let own = cross.narrow(0, i * r, r)?.narrow(1, first, count)?.t()?;
        let sum = (own + (b.matmul(&a.matmul(&a.t()?)?)? * scale)?)?;
        let added = ((sum * b)?.sum(1)? * scale)?;
        let norm = (squares.narrow(0, first, count)? + added)?.relu()?.sqrt()?;
        if first > end {
            factors.push(ones(first - end)?);
        }
        factors.push((wide(cx.weights.fused(magnitude))? / &norm)?);
        norms.push((first, norm));
        end = first + count;
    }
    if outputs > end {
        factors.push(ones(outputs - end)?);
    }
    Ok(MagnitudeScale { factors: Tensor::cat(&factors, 0)?, members: norms })
}

/// The weight norms of `count` outputs, starting at output `first`; the initial values of the magnitudes.
pub(super) fn initial(weight: &Tensor, layout: WeightLayout, first: usize, count: usize) -> Result<Tensor> {
    squared_norms(weight, layout)?.narrow(0, first, count)?.sqrt()
}

fn wide(x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.to_dtype(DType::F32)
}

impl MagnitudeScale {
    /// Scales each output of `y [N, out]`, which holds `bias` already: `factor · (y - bias) + bias`, rounded once.
    pub(super) fn apply(&self, y: &Tensor, bias: Option<&Tensor>) -> Result<()> {
        let mut scaled = wide(y)?.broadcast_mul(&self.factors)?;
        if let Some(bias) = bias {
            let shift = (wide(bias)? * (self.factors.neg()? + 1.0)?)?;
            scaled = scaled.broadcast_add(&shift)?;
        }
        y.slice_set(&scaled.to_dtype(y.dtype())?, 0, 0)
    }

    /// Writes the gradient of the magnitudes of member `i`, given the output gradient `dy` and the unscaled output.
    pub(super) fn gradient(&self, i: usize, dy: &Tensor, output: &Tensor, into: &Tensor) -> Result<()> {
        let (first, norms) = &self.members[i];
        let columns = |x: &Tensor| wide(&x.narrow(1, *first, norms.elem_count())?);
        let ones = Tensor::ones((1, dy.dim(0)?), DType::F32, dy.device())?;
        let sums = ones.matmul(&(columns(dy)? * columns(output)?)?)?.squeeze(0)?;
        into.slice_set(&(sums / norms)?.to_dtype(into.dtype())?, 0, 0)
    }
}
