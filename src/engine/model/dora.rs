//! DoRA (Liu et al., 2024): the weights of each output keep the direction that base and adapter give them and take a
//! trained length. As the paper proposes and PEFT does, the length they would have is a constant to the gradient.
//!
//! candle's operations on any device: they cost little compared with the products.

use super::adapter::LoraModule;
use super::parameters::Parameters;
use crate::engine::kernels::WeightLayout;
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
    weights: &Parameters,
    members: &[LoraModule],
    weight: &Tensor,
    layout: WeightLayout,
    a: &Tensor,
    r: usize,
    scale: f32,
) -> Result<MagnitudeScale> {
    let outputs = weight.dim(usize::from(layout == WeightLayout::InOut))?;
    let mut factors = Vec::new();
    let mut norms = Vec::new();
    let mut end = 0;
    let ones = |count| Tensor::ones(count, DType::F32, weight.device());
    for (i, member) in members.iter().enumerate() {
        let Some(magnitude) = member.magnitude else { continue };
        let first = member.outputs.start;
        let count = member.outputs.len();
        let delta = wide(weights.fused(member.b))?.matmul(&wide(&a.narrow(0, i * r, r)?)?)?;
        let norm = weight_norm(&(rows(weight, layout, first, count)? + (delta * f64::from(scale))?)?)?;
        if first > end {
            factors.push(ones(first - end)?);
        }
        factors.push((wide(weights.fused(magnitude))? / &norm)?);
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
    weight_norm(&rows(weight, layout, first, count)?)
}

fn wide(x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.to_dtype(DType::F32)
}

/// The weights of some outputs as rows, in FP32.
fn rows(weight: &Tensor, layout: WeightLayout, first: usize, count: usize) -> Result<Tensor> {
    match layout {
        WeightLayout::OutIn => wide(&weight.narrow(0, first, count)?),
        WeightLayout::InOut => wide(&weight.narrow(1, first, count)?)?.t()?.contiguous(),
    }
}

fn weight_norm(rows: &Tensor) -> Result<Tensor> {
    rows.sqr()?.sum(1)?.sqrt()
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
