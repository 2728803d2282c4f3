//! Our CPU kernels: each operation is one multithreaded pass over memory, with the same bits for any number of threads.

use super::adamw::{self, AdamWStep, Moments};
use super::attention::{self, Operands, Shape};
use super::columns::{Columns, Factor, Store};
use super::cross_entropy::{self, HeadGradient, HeadWorkspace};
use super::decode_attention::KeyValues;
use super::dropout::Dropout;
use super::embedding::{self, Tables};
use super::linear::{self, Weight};
use super::matmul::{ProductShape, buffer_bytes};
use super::rope::{self, Direction, Positions, Table};
use super::survey::{self, TensorSurvey};
use super::{
    Activation, Embedding, HeadHook, Kernels, LowRank, Norm, NormGradients, NormSettings, Normed, WeightLayout, gated,
    gelu, layer_norm, residual, rms_norm, view,
};
use crate::precision::FloatFormat;
use candle_core::{Result, Tensor, bail};

/// Our CPU kernels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fused;

impl Kernels for Fused {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn product_bytes(&self, products: &[ProductShape], threads: usize) -> Result<u64> {
        buffer_bytes(products, threads)
    }

    fn zero(&self, x: &Tensor) -> Result<()> {
        view::write(x, |mut x| x.zero())
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        view::copy(x, out)
    }

    fn accumulate(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        view::accumulate(x, out)
    }

    fn accumulate_along(&self, x: &Tensor, inner: &[&Tensor], out: &Tensor) -> Result<()> {
        view::accumulate_along(x, inner, out)
    }

    fn embed(&self, embedding: Embedding<'_>, out: &Tensor) -> Result<()> {
        let Embedding { table, positions, ids, scale, dropout, .. } = embedding;
        embedding::forward(Tables { tokens: table, positions, scale }, ids, embedding.places(), dropout, out)
    }

    fn embed_backward(
        &self,
        embedding: Embedding<'_>,
        dx: &Tensor,
        order: &mut [u32],
        dtable: &Tensor,
        dpositions: Option<&Tensor>,
    ) -> Result<()> {
        let Embedding { ids, scale, dropout, .. } = embedding;
        let gradients = Tables { tokens: dtable, positions: dpositions, scale };
        embedding::backward(dx, ids, embedding.places(), dropout, order, gradients)
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
            (Norm::Rms { .. }, None, None) => {
                self.head_norm(settings, Columns::all(x)?, weight, Columns::all(&to.out)?, &to.rstd)
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
        (dx, store): (&Tensor, Store),
        gradients: Option<NormGradients<'_>>,
    ) -> Result<()> {
        match (settings.norm, &normed.mean) {
            (Norm::Layer, Some(mean)) if store == Store::Add => {
                layer_norm::backward(dy, x, weight, mean, &normed.rstd, dx, gradients)
            }
            (Norm::Rms { .. }, None) => {
                let (dy, x, dx) = (Columns::all(dy)?, Columns::all(x)?, Columns::all(dx)?);
                let dweight = gradients.map(|gradients| gradients.weight);
                rms_norm::backward(dy, x, settings.gain(weight), &normed.rstd, (dx, store), dweight)
            }
            (norm, _) => bail!("{norm:?} without its operands"),
        }
    }

    fn head_norm(
        &self,
        settings: NormSettings,
        x: Columns<'_>,
        weight: &Tensor,
        y: Columns<'_>,
        rstd: &Tensor,
    ) -> Result<()> {
        rms_norm::forward(x, settings.gain(weight), settings.eps, y, rstd)
    }

    fn head_norm_backward(
        &self,
        settings: NormSettings,
        dy: Columns<'_>,
        x: Columns<'_>,
        weight: &Tensor,
        rstd: &Tensor,
        dx: Columns<'_>,
        dweight: Option<&Tensor>,
    ) -> Result<()> {
        rms_norm::backward(dy, x, settings.gain(weight), rstd, (dx, Store::Overwrite), dweight)
    }

    fn rotate(&self, x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<()> {
        rope::rotate(x, table, positions, direction)
    }

    fn linear(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<()> {
        linear::forward(x, Weight { tensor: weight, layout }, bias, None, y)
    }

    fn linear_low_rank(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        low_rank: LowRank<'_>,
        y: &Tensor,
    ) -> Result<()> {
        if x.dim(0)? == 1 {
            // A single row is multiplied without packing anything.
            self.linear(layout, x, weight, bias, y)?;
            return low_rank.add_to(self, y);
        }
        linear::forward(x, Weight { tensor: weight, layout }, bias, Some(low_rank), y)
    }

    fn linear_weight_gradient(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        dy: &Tensor,
        dweight: &Tensor,
        dbias: Option<&Tensor>,
    ) -> Result<()> {
        linear::backward_weight(x, dy, Weight { tensor: dweight, layout }, dbias)
    }

    fn product(&self, a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>, store: Store) -> Result<()> {
        linear::product_of_columns(a, b, alpha, c, store)
    }

    fn attention(&self, shape: &Shape, operands: &Operands<'_>, out: &Tensor, lse: &Tensor) -> Result<()> {
        attention::forward(shape, operands, out, lse)
    }

    fn attention_backward(
        &self,
        shape: &Shape,
        operands: &Operands<'_>,
        dout: &Tensor,
        out: &Tensor,
        lse: &Tensor,
        gradients: [Columns<'_>; 3],
    ) -> Result<()> {
        attention::backward(shape, operands, dout, out, lse, gradients)
    }

    fn decode_attention(
        &self,
        shape: &Shape,
        cache: &KeyValues,
        past: usize,
        qkv: [Columns<'_>; 3],
        out: &Tensor,
    ) -> Result<()> {
        cache.attend(shape, past, qkv, out)
    }

    fn activate(&self, activation: Activation, x: &Tensor, y: &Tensor) -> Result<()> {
        let Some(kind) = activation.gate() else { return gelu::forward(x, y) };
        let [gate, up] = halves(x)?;
        gated::forward(kind, gate, up, y)
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        y: &Tensor,
    ) -> Result<()> {
        let Some(kind) = activation.gate() else { return gelu::backward(x, dy, y) };
        let ([gate, up], gradients) = (halves(x)?, halves(dx)?);
        gated::backward(kind, gate, up, dy, gradients, y)
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

    fn surveys(&self, tensors: &[(&Tensor, FloatFormat)], exponents: bool, out: &mut [TensorSurvey]) -> Result<()> {
        survey::side_by_side(tensors, out, |tensor, format| survey::survey(tensor, format, exponents))
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

/// The halves of the columns of `x [N, 2·F]`.
fn halves(x: &Tensor) -> Result<[Columns<'_>; 2]> {
    Columns::split(x, [x.dims2()?.1 / 2; 2])
}
