//! Our CPU kernels: each operation is one multithreaded pass over memory, with the same bits for any number of threads.

use super::matmul::{GemmShape, buffer_bytes};
use super::op::Op;
use super::{
    Activation, Kernels, Ran, adamw, attention, cross_entropy, decode_attention, embedding, gated_delta, gelu, glu,
    head_gate, linear, math, norm, residual, rope, route, short_conv, summary, view,
};
use candle_core::Result;

/// Our CPU kernels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fused;

impl Kernels for Fused {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn packing_bytes(&self, products: &[GemmShape], threads: usize) -> Result<u64> {
        buffer_bytes(products, threads)
    }

    fn run(&self, op: &mut Op<'_>) -> Result<Ran> {
        match op {
            Op::Zero(op) => view::write(op.x, |mut x| x.zero()),
            Op::Copy(op) => residual::copy(op),
            Op::Accumulate(op) => view::accumulate(op.x, op.inner, op.out),
            Op::Embed(op) => embedding::forward(op),
            Op::EmbedBackward(op) => embedding::backward(op),
            Op::Norm(op) => norm::forward(op),
            Op::NormBackward(op) => norm::backward(op),
            Op::Rotate(op) => rope::apply_rope(op),
            Op::Linear(op) => linear::forward(op),
            Op::Matmul(op) => linear::product_of_columns(op),
            Op::SumRows(op) => linear::sum_rows(op),
            Op::Attention(op) => attention::forward(op),
            Op::AttentionBackward(op) => attention::backward(op),
            Op::DecodeAttention(op) => decode_attention::attend(op),
            Op::Activate(op) => match op.activation {
                Activation::Gelu => gelu::forward(op.x, op.y),
                Activation::SwiGlu => glu::forward(op, math::silu),
                Activation::GeGlu => glu::forward(op, math::gelu),
                Activation::ClampedSwiGlu => glu::clamped(op),
            },
            Op::ActivateBackward(op) => match op.activation {
                Activation::Gelu => gelu::backward(op.x, op.dy, op.y),
                Activation::SwiGlu => glu::backward(op, math::silu_with_derivative),
                Activation::GeGlu => glu::backward(op, math::gelu_with_derivative),
                Activation::ClampedSwiGlu => glu::clamped_backward(op),
            },
            Op::AddBranch(op) => residual::add(op),
            Op::SoftCap(op) => cross_entropy::soft_cap(op),
            Op::CrossEntropy(op) => cross_entropy::rows(op),
            Op::Summarize(op) => summary::side_by_side(op, summary::summarize),
            Op::Sum(op) => summary::sum(op.x).map(|sum| *op.sum = sum),
            Op::AdamW(op) => std::mem::take(&mut op.tensors).into_iter().try_for_each(|it| adamw::step(op.step, it)),
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
