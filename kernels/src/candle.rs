//! The decoder's operations in candle's own, on any candle device.
//!
//! Operations upcast their inputs to FP32, compute in FP32 and round once, when they store the result. A GPU differs in
//! the order of sums and in half-precision matmuls: they run in that type, and a bias is added to the rounded result.

mod attention;
mod cross_entropy;
mod embedding;
mod gated_delta;
mod glu;
mod head_gate;
mod norm;
mod rope;
mod route;
mod short_conv;
mod summary;
mod tensors;

use super::adamw::{AdamWStep, AdamWTensor};
use super::attention::AttentionShape;
use super::blockwise::by_fp32_moments;
use super::columns::{MatmulOperand, WriteMode};
use super::op::{self, Op};
use super::summary::side_by_side;
use super::{Activation, Kernels, Ran, WeightLayout, view};
use candle_core::{DType, Error, Result, Tensor};
use tensors::{
    accumulate, column_sums, columns_of_rows, drop, product, require_contiguous, soft_cap, store, store_columns,
    upcast, upcast_columns,
};

/// candle's own operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct CandleKernels;

impl Kernels for CandleKernels {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn score_bytes(&self, shape: &AttentionShape) -> Result<u64> {
        attention::score_bytes(shape)
    }

    fn run(&self, op: &mut Op<'_>) -> Result<Ran> {
        match op {
            Op::Zero(op) => op.x.zero_set(),
            Op::Copy(op::Copy { x, dropout: None, out }) => store(x, out),
            Op::Copy(op) => store(&drop(op.dropout, 0, upcast(op.x)?)?, op.out),
            Op::Accumulate(op) => {
                let mut from = op.x;
                for to in op.inner.iter().copied().chain([op.out]) {
                    accumulate(from, to)?;
                    from = to;
                }
                Ok(())
            }
            Op::Embed(op) => embedding::forward(op),
            Op::EmbedBackward(op) => embedding::backward(op),
            Op::Norm(op) => norm::forward(op),
            Op::NormBackward(op) => norm::backward(op),
            Op::Rotate(op) => rope::apply_rope(op),
            Op::Linear(op) => {
                linear(op)?;
                return op.low_rank.map_or(Ok(Ran::Done), |low_rank| low_rank.add_to(self, op.y));
            }
            Op::Matmul(op) => product_of_columns(op),
            Op::SumRows(op) => store(&column_sums(&upcast(op.x)?)?, op.out),
            Op::Attention(op) => attention::forward(op),
            Op::AttentionBackward(op) => attention::backward(op),
            Op::DecodeAttention(op) => attention::decode(op),
            Op::Activate(op) => activate(op),
            Op::ActivateBackward(op) => activate_backward(op),
            Op::AddBranch(op) => store(&(upcast(op.stream)? + drop(op.dropout, 0, upcast(op.branch)?)?)?, op.out),
            Op::SoftCap(op) => store(&soft_cap(&upcast(op.x)?, op.cap)?, op.out),
            Op::CrossEntropy(op) => cross_entropy::rows(op),
            Op::Summarize(op) => side_by_side(op, summary::summarize),
            Op::Sum(op) => summary::sum(op.x).map(|sum| *op.sum = sum),
            Op::AdamW(op) => std::mem::take(&mut op.tensors)
                .into_iter()
                .try_for_each(|tensor| by_fp32_moments(tensor, |tensor| adamw(op.step, tensor))),
            Op::Route(op) => route::forward(op),
            Op::RouteBackward(op) => route::backward(op),
            Op::ScaleRows(op) => route::scale_rows(op),
            Op::ShortConv(op) => short_conv::forward(op),
            Op::ShortConvBackward(op) => short_conv::backward(op),
            Op::DecodeShortConv(op) => short_conv::decode(op),
            Op::GatedDelta(op) => gated_delta::forward(op),
            Op::GatedDeltaBackward(op) => gated_delta::backward(op),
            Op::DecodeGatedDelta(op) => gated_delta::decode(op),
            Op::CopyQueries(op) => head_gate::copy_queries(op),
            Op::GateHeads(op) => head_gate::forward(op),
            Op::GateHeadsBackward(op) => head_gate::backward(op),
        }?;
        Ok(Ran::Done)
    }
}

fn linear(op: &op::Linear<'_>) -> Result<()> {
    let weight = if op.layout == WeightLayout::OutIn { &op.weight.t()? } else { op.weight };
    let mut sum = product(op.x, weight, op.y.dtype())?;
    if let Some(bias) = op.bias {
        // The sum of two half-precision numbers is rounded once, as it would be from FP32.
        sum = sum.broadcast_add(&bias.to_dtype(sum.dtype())?)?;
    }
    store(&sum, op.y)
}

fn product_of_columns(op: &op::Matmul<'_>) -> Result<()> {
    let matrix = |factor: MatmulOperand<'_>| {
        let columns = columns_of_rows(factor.columns, 0..factor.columns.rows())?;
        if factor.transposed { columns.t() } else { Ok(columns) }
    };
    let mut product = product(&matrix(op.a)?, &matrix(op.b)?, op.c.tensor().dtype())?;
    if op.alpha != 1.0 {
        product = (upcast(&product)? * f64::from(op.alpha))?;
    }
    match op.mode {
        WriteMode::Accumulate => store_columns(&(upcast_columns(op.c)? + upcast(&product)?)?, op.c),
        WriteMode::Overwrite => store_columns(&product, op.c),
    }
}

fn activate(op: &op::Activate<'_>) -> Result<()> {
    if op.activation.is_interleaved() {
        return glu::clamped(op);
    }
    let (gate, up) = halves(op.activation, op.x)?;
    let value = (&gate * gate_of(op.activation, &gate)?)?;
    store(&up.map_or(Ok(value.clone()), |up| value * up)?, op.y)
}

fn activate_backward(op: &op::ActivateBackward<'_>) -> Result<()> {
    if op.activation.is_interleaved() {
        return glu::clamped_backward(op);
    }
    let (gate, up) = halves(op.activation, op.x)?;
    let dy = upcast(op.dy)?;
    let slope = slope_of(op.activation, &gate)?;
    let value = (&gate * gate_of(op.activation, &gate)?)?;
    let Some(up) = up else {
        store(&value, op.y)?;
        return store(&(dy * slope)?, op.dx);
    };
    store(&(&value * &up)?, op.y)?;
    store(&Tensor::cat(&[((&dy * up)? * slope)?, (dy * value)?], 1)?.contiguous()?, op.dx)
}

fn adamw(step: AdamWStep, op: AdamWTensor<'_>) -> Result<()> {
    let values = |x: &Tensor| view::to_host(x)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>();
    let counted = op.weight.filter(|_| op.counts.is_some());
    let before = counted.map(|weight| Ok::<_, Error>([values(op.master)?, values(weight)?])).transpose()?;
    let AdamWStep { lr, betas, eps, bias_corrections, grad_factor } = step;
    let grad = (upcast(op.grad)? * f64::from(grad_factor))?;
    let (m, v) = (op.exp_avg, op.exp_avg_sq);
    let exp_avg = (m + ((&grad - m)? * (1.0 - betas[0]))?)?;
    let exp_avg_sq = ((v * betas[1])? + (grad.sqr()? * (1.0 - betas[1]))?)?;
    let root = (exp_avg_sq.sqrt()? / f64::from(bias_corrections[1].sqrt()))?;
    let update = ((&exp_avg * f64::from(lr / bias_corrections[0]))? / (root + f64::from(eps))?)?;
    let updated = ((op.master * f64::from(1.0 - lr * op.weight_decay))? - update)?;
    store(&exp_avg, m)?;
    store(&exp_avg_sq, v)?;
    store(&updated, op.master)?;
    if let Some(weight) = op.weight {
        store(&updated, weight)?;
    }
    if let (Some(counts), Some(weight), Some([old, copies])) = (op.counts, counted, before) {
        let format = view::float_format(weight.dtype());
        counts.count(format, [&old, &values(op.master)?], [&copies, &values(weight)?]);
    }
    Ok(())
}

/// Returns the input of the activation function in FP32, and the factor of the result if the activation is gated.
fn halves(activation: Activation, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
    if !activation.is_gated() {
        return Ok((upcast(x)?, None));
    }
    require_contiguous(x)?;
    let width = x.dim(1)? / 2;
    let half = |first: usize| upcast(&x.narrow(1, first, width)?.contiguous()?);
    Ok((half(0)?, Some(half(width)?)))
}

/// sqrt(2 / π) and the cubic coefficient of the tanh form of GELU.
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;
/// Beyond this magnitude the activations are the identity or zero in FP32, and their derivatives 1 or 0.
const ACTIVATION_LIMIT: f32 = 100.0;

/// 1 / (1 + exp(-x)): 0 and 1 at the ends, without a NaN between.
fn logistic(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// The factor of each element: GELU's (1 + tanh(u)) / 2 is the logistic function of 2u.
fn gate_of(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::SwiGlu | Activation::ClampedSwiGlu => logistic(x),
        Activation::Gelu | Activation::GeGlu => {
            let inner = (((x.sqr()? * (2.0 * SQRT_2_OVER_PI * GELU_CUBIC))? + 2.0 * SQRT_2_OVER_PI)? * x)?;
            logistic(&inner)
        }
    }
}

/// `x` up to `bound`, or from `bound` if that is negative: comparisons, because `clamp` drops NaN on CUDA.
fn bounded(x: &Tensor, bound: f32) -> Result<Tensor> {
    let beyond = if bound > 0.0 { x.gt(bound)? } else { x.lt(bound)? };
    let bound = Tensor::full(bound, (), x.device())?.to_dtype(x.dtype())?;
    beyond.where_cond(&bound.broadcast_as(x.shape())?, x)
}

/// The derivative of `x · gate(x)`, finite for every number: candle's own GELU gradient is NaN where x³ overflows.
fn slope_of(activation: Activation, x: &Tensor) -> Result<Tensor> {
    let x = bounded(&bounded(x, ACTIVATION_LIMIT)?, -ACTIVATION_LIMIT)?;
    let gate = gate_of(activation, &x)?;
    let inner = match activation {
        Activation::SwiGlu | Activation::ClampedSwiGlu => x.ones_like()?,
        Activation::Gelu | Activation::GeGlu => {
            ((x.sqr()? * (6.0 * SQRT_2_OVER_PI * GELU_CUBIC))? + 2.0 * SQRT_2_OVER_PI)?
        }
    };
    let rest = (gate.neg()? + 1.0)?;
    &gate + (((&gate * rest)? * x)? * inner)?
}
