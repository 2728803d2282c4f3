//! The CPU's own kernels: one pass over memory for each operation, on all threads, with the same bits for any number.

use super::adamw::{self, AdamWStep, Moments};
use super::attention::{self, Shape};
use super::cross_entropy::{self, HeadGradient, HeadWorkspace};
use super::decode_attention::KeyValues;
use super::dropout::Dropout;
use super::survey::{self, TensorSurvey};
use super::{
    Activation, Embedding, HeadHook, Kernels, Norm, NormSettings, Normed, WeightLayout, embedding, gelu, layer_norm,
    linear, residual, view,
};
use crate::precision::FloatFormat;
use candle_core::{Result, Tensor, bail};

/// The CPU's own kernels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fused;

impl Kernels for Fused {
    fn zero(&self, x: &Tensor) -> Result<()> {
        view::write(x, |mut x| x.zero())
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        view::copy(x, out)
    }

    fn accumulate(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        view::accumulate(x, out)
    }

    fn embed(&self, embedding: Embedding<'_>, out: &Tensor) -> Result<()> {
        let Embedding { table, positions, ids, seq_len, dropout } = embedding;
        match positions {
            Some(positions) => embedding::forward(table, positions, ids, seq_len, dropout, out),
            None => bail!("embeddings without positions are not built yet"),
        }
    }

    fn embed_backward(
        &self,
        embedding: Embedding<'_>,
        dx: &Tensor,
        order: &mut [u32],
        dtable: &Tensor,
        dpositions: Option<&Tensor>,
    ) -> Result<()> {
        let Embedding { ids, seq_len, dropout, .. } = embedding;
        match dpositions {
            Some(dpositions) => embedding::backward(dx, ids, seq_len, dropout, order, dtable, dpositions),
            None => bail!("embeddings without positions are not built yet"),
        }
    }

    fn norm(
        &self,
        settings: NormSettings,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        to: &Normed,
    ) -> Result<()> {
        match (settings.norm, bias, &to.mean) {
            (Norm::Layer, Some(bias), Some(mean)) => {
                layer_norm::forward(x, weight, bias, settings.eps, &to.out, mean, &to.rstd)
            }
            (norm, ..) => bail!("{norm:?} without its operands"),
        }
    }

    fn norm_backward(
        &self,
        settings: NormSettings,
        dy: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        normed: &Normed,
        dx: &Tensor,
        dweight: &Tensor,
        dbias: Option<&Tensor>,
    ) -> Result<()> {
        match (settings.norm, dbias, &normed.mean) {
            (Norm::Layer, Some(dbias), Some(mean)) => {
                layer_norm::backward(dy, x, weight, mean, &normed.rstd, dx, dweight, dbias)
            }
            (norm, ..) => bail!("{norm:?} without its operands"),
        }
    }

    fn linear(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<()> {
        match (layout, bias) {
            (WeightLayout::InOut, Some(bias)) => linear::forward(x, weight, bias, y),
            // The product of a gradient is one with the transposed weight as well.
            (WeightLayout::OutIn, None) => linear::backward_input(x, weight, y),
            (layout, _) => bail!("{layout:?} is not built yet"),
        }
    }

    fn linear_input_gradient(&self, layout: WeightLayout, dy: &Tensor, weight: &Tensor, dx: &Tensor) -> Result<()> {
        match layout {
            WeightLayout::InOut => linear::backward_input(dy, weight, dx),
            WeightLayout::OutIn => bail!("{layout:?} is not built yet"),
        }
    }

    fn linear_weight_gradient(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        dy: &Tensor,
        dweight: &Tensor,
        dbias: Option<&Tensor>,
    ) -> Result<()> {
        match (layout, dbias) {
            (WeightLayout::InOut, Some(dbias)) => linear::backward_weight(x, dy, dweight, dbias),
            (layout, _) => bail!("{layout:?} is not built yet"),
        }
    }

    fn attention(
        &self,
        shape: Shape,
        qkv: &Tensor,
        dropout: Option<Dropout>,
        out: &Tensor,
        lse: &Tensor,
    ) -> Result<()> {
        attention::forward(shape, qkv, dropout, out, lse)
    }

    fn attention_backward(
        &self,
        shape: Shape,
        dout: &Tensor,
        qkv: &Tensor,
        out: &Tensor,
        lse: &Tensor,
        dropout: Option<Dropout>,
        dqkv: &Tensor,
    ) -> Result<()> {
        attention::backward(shape, dout, qkv, out, lse, dropout, dqkv)
    }

    fn decode_attention(&self, cache: &KeyValues, past: usize, qkv: &Tensor, out: &Tensor) -> Result<()> {
        cache.attend(past, qkv, out)
    }

    fn activate(&self, activation: Activation, x: &Tensor, y: &Tensor) -> Result<()> {
        match activation {
            Activation::Gelu => gelu::forward(x, y),
            gated => bail!("{gated:?} is not built yet"),
        }
    }

    fn activate_backward(&self, activation: Activation, x: &Tensor, dy: &Tensor, _dx: &Tensor) -> Result<()> {
        match activation {
            Activation::Gelu => gelu::backward(x, dy),
            gated => bail!("{gated:?} is not built yet"),
        }
    }

    fn add_branch(&self, stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<()> {
        residual::add(stream, branch, dropout, out)
    }

    fn branch_gradient(&self, stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<()> {
        residual::branch_gradient(stream, dropout, branch)
    }

    fn head(
        &self,
        x: &Tensor,
        weight: &Tensor,
        targets: &[u32],
        workspace: &HeadWorkspace,
        gradient: Option<HeadGradient<'_>>,
        hook: HeadHook<'_>,
    ) -> Result<f64> {
        cross_entropy::head(x, weight, targets, workspace, gradient, hook)
    }

    fn survey(&self, tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<TensorSurvey> {
        survey::survey(tensor, format, exponents)
    }

    fn sum(&self, tensor: &Tensor) -> Result<f64> {
        survey::sum(tensor)
    }

    fn adamw(
        &self,
        numbers: AdamWStep,
        grad: &Tensor,
        master: &Tensor,
        moments: Moments<'_>,
        weight: Option<&Tensor>,
    ) -> Result<()> {
        adamw::step(numbers, grad, master, moments.exp_avg, moments.exp_avg_sq, weight)
    }
}
