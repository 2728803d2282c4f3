//! The decoder's operations in candle's own, on any candle device.
//!
//! Inputs are widened to FP32, computed with in FP32 and rounded once, when they are stored. Two things differ by the device:
//! products in half precision run in that type on a GPU, where a bias is added to the rounded product; and the order of sums.

mod attention;
mod embedding;
mod head;
mod norm;
mod rope;
mod survey;
mod tensors;

use super::adamw::{AdamWStep, Moments};
use super::attention::{Operands, Shape};
use super::columns::{Columns, Factor, Store};
use super::cross_entropy::{HeadGradient, HeadWorkspace};
use super::decode_attention::KeyValues;
use super::dropout::Dropout;
use super::rope::{Direction, Positions, Table};
use super::survey::{TensorSurvey, side_by_side};
use super::{Activation, Embedding, HeadHook, Kernels, NormGradients, NormSettings, Normed, WeightLayout};
use crate::precision::FloatFormat;
use candle_core::{DType, Result, Tensor};
#[cfg(feature = "cuda")]
pub(super) use head::cross_entropy;
use std::fmt;
use std::sync::Arc;
use tensors::{
    accumulate, column_sums, columns_of_rows, drop, product, require_contiguous, store, store_columns, widen,
    widen_columns,
};

/// candle's own operations.
#[derive(Clone, Debug, Default)]
pub struct Plain {
    own: Option<Arc<dyn Replacements>>,
}

/// Kernels that take the place of single operations. Each either computes what the method of the same name in [`Kernels`] does,
/// or answers that it cannot, for a type, a layout or a shape that it was not made for; then candle computes.
pub(crate) trait Replacements: fmt::Debug + Send + Sync {
    /// See [`Kernels::name`].
    fn name(&self) -> &str;

    fn attention(&self, shape: &Shape, operands: &Operands<'_>, out: &Tensor, lse: &Tensor) -> Result<bool>;

    fn attention_backward(
        &self,
        shape: &Shape,
        operands: &Operands<'_>,
        dout: &Tensor,
        out: &Tensor,
        lse: &Tensor,
        gradients: [Columns<'_>; 3],
    ) -> Result<bool>;

    fn norm(
        &self,
        settings: NormSettings,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        to: &Normed,
    ) -> Result<bool>;

    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, each a tensor of its own")]
    fn norm_backward(
        &self,
        settings: NormSettings,
        dy: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        normed: &Normed,
        dx: (&Tensor, Store),
        gradients: Option<NormGradients<'_>>,
    ) -> Result<bool>;

    fn head_norm(
        &self,
        settings: NormSettings,
        x: Columns<'_>,
        weight: &Tensor,
        y: Columns<'_>,
        rstd: &Tensor,
    ) -> Result<bool>;

    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, each a tensor of its own")]
    fn head_norm_backward(
        &self,
        settings: NormSettings,
        dy: Columns<'_>,
        x: Columns<'_>,
        weight: &Tensor,
        rstd: &Tensor,
        dx: Columns<'_>,
        dweight: Option<&Tensor>,
    ) -> Result<bool>;

    /// The loss of each row of logits, and with a `seed` their gradient in their place. The targets have been checked.
    fn cross_entropy(&self, targets: &[u32], logits: Columns<'_>, losses: &Tensor, seed: Option<f32>) -> Result<bool>;

    /// Whether the head's operations take logits whose rows are longer than the vocabulary.
    fn pads_logits(&self) -> bool;

    fn surveys(&self, tensors: &[(&Tensor, FloatFormat)], exponents: bool, out: &mut [TensorSurvey]) -> Result<bool>;

    fn activate(&self, activation: Activation, x: &Tensor, y: &Tensor) -> Result<bool>;

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        y: &Tensor,
    ) -> Result<bool>;

    fn add_branch(&self, stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<bool>;

    fn branch_gradient(&self, stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<bool>;

    /// The ids have been checked.
    fn embed_backward(
        &self,
        embedding: Embedding<'_>,
        dx: &Tensor,
        dtable: &Tensor,
        dpositions: Option<&Tensor>,
    ) -> Result<bool>;

    fn linear(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<bool>;

    fn product(&self, a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>, how: Store) -> Result<bool>;

    fn rotate(&self, x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<bool>;

    /// `out [D] = Σ_rows x [N, D]`.
    fn sum_rows(&self, x: &Tensor, out: &Tensor) -> Result<bool>;

    fn adamw(
        &self,
        numbers: AdamWStep,
        grad: &Tensor,
        master: &Tensor,
        moments: Moments<'_>,
        weight: Option<&Tensor>,
    ) -> Result<bool>;
}

impl Plain {
    /// candle's operations alone.
    pub const fn new() -> Self {
        Self { own: None }
    }

    /// candle's operations, but for those that `own` computes.
    #[cfg(feature = "cuda")]
    pub(crate) fn with(own: Arc<dyn Replacements>) -> Self {
        Self { own: Some(own) }
    }

    /// What `replacement` answers, if there is somebody to ask.
    fn replaced(&self, replacement: impl FnOnce(&dyn Replacements) -> Result<bool>) -> Result<bool> {
        self.own.as_deref().map_or(Ok(false), replacement)
    }
}

impl Kernels for Plain {
    fn name(&self) -> &str {
        self.own.as_deref().map_or("candle", Replacements::name)
    }

    fn zero(&self, x: &Tensor) -> Result<()> {
        require_contiguous(x)?;
        x.zero_set()
    }

    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        store(x, out)
    }

    fn accumulate(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        if self.replaced(|own| own.add_branch(out, x, None, out))? {
            return Ok(());
        }
        accumulate(x, out)
    }

    fn embed(&self, embedding: Embedding<'_>, out: &Tensor) -> Result<()> {
        embedding::forward(embedding, out)
    }

    fn embed_backward(
        &self,
        embedding: Embedding<'_>,
        dx: &Tensor,
        order: &mut [u32],
        dtable: &Tensor,
        dpositions: Option<&Tensor>,
    ) -> Result<()> {
        embedding.check(dtable.dim(0)?)?;
        if self.replaced(|own| own.embed_backward(embedding, dx, dtable, dpositions))? {
            return Ok(());
        }
        embedding::backward(embedding, dx, order, dtable, dpositions)
    }

    fn norm(
        &self,
        settings: NormSettings,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        to: &Normed,
    ) -> Result<()> {
        if self.replaced(|own| own.norm(settings, x, weight, bias, to))? {
            return Ok(());
        }
        norm::forward(settings, x, weight, bias, to)
    }

    fn norm_backward(
        &self,
        settings: NormSettings,
        dy: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        normed: &Normed,
        dx: (&Tensor, Store),
        gradients: Option<NormGradients<'_>>,
    ) -> Result<()> {
        if self.replaced(|own| own.norm_backward(settings, dy, x, weight, normed, dx, gradients))? {
            return Ok(());
        }
        norm::backward(settings, dy, x, weight, normed, dx, gradients)
    }

    fn head_norm(
        &self,
        settings: NormSettings,
        x: Columns<'_>,
        weight: &Tensor,
        y: Columns<'_>,
        rstd: &Tensor,
    ) -> Result<()> {
        if self.replaced(|own| own.head_norm(settings, x, weight, y, rstd))? {
            return Ok(());
        }
        norm::heads_forward(settings, x, weight, y, rstd)
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
        if self.replaced(|own| own.head_norm_backward(settings, dy, x, weight, rstd, dx, dweight))? {
            return Ok(());
        }
        norm::heads_backward(settings, dy, x, weight, rstd, dx, dweight)
    }

    fn rotate(&self, x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<()> {
        if self.replaced(|own| own.rotate(x, table, positions, direction))? {
            return Ok(());
        }
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
        if self.replaced(|own| own.linear(layout, x, weight, bias, y))? {
            return Ok(());
        }
        let mut sum = product(x, &oriented(layout, weight)?, y.dtype())?;
        if let Some(bias) = bias {
            // The sum of two half-precision numbers is rounded once, as it would be from FP32.
            sum = sum.broadcast_add(&bias.to_dtype(sum.dtype())?)?;
        }
        store(&sum, y)
    }

    fn linear_weight_gradient(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        dy: &Tensor,
        dweight: &Tensor,
        dbias: Option<&Tensor>,
    ) -> Result<()> {
        let (left, right) = match layout {
            WeightLayout::InOut => (x, dy),
            WeightLayout::OutIn => (dy, x),
        };
        let (left, right) = (Factor::transposed(Columns::all(left)?), Factor::plain(Columns::all(right)?));
        self.product(left, right, 1.0, Columns::all(dweight)?, Store::Overwrite)?;
        let Some(dbias) = dbias else { return Ok(()) };
        if self.replaced(|own| own.sum_rows(dy, dbias))? {
            return Ok(());
        }
        store(&column_sums(&widen(dy)?)?, dbias)
    }

    fn product(&self, a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>, how: Store) -> Result<()> {
        if self.replaced(|own| own.product(a, b, alpha, c, how))? {
            return Ok(());
        }
        let matrix = |factor: Factor<'_>| {
            let columns = columns_of_rows(factor.columns, 0..factor.columns.rows())?;
            if factor.transposed { columns.t() } else { Ok(columns) }
        };
        let mut product = product(&matrix(a)?, &matrix(b)?, c.tensor().dtype())?;
        if alpha != 1.0 {
            product = (product.to_dtype(DType::F32)? * f64::from(alpha))?;
        }
        match how {
            Store::Add => store_columns(&(widen_columns(c)? + product.to_dtype(DType::F32)?)?, c),
            Store::Overwrite => store_columns(&product, c),
        }
    }

    fn attention(&self, shape: &Shape, operands: &Operands<'_>, out: &Tensor, lse: &Tensor) -> Result<()> {
        if self.replaced(|own| own.attention(shape, operands, out, lse))? {
            return Ok(());
        }
        attention::forward(shape, operands, out, lse)
    }

    fn score_bytes(&self, shape: &Shape) -> Result<u64> {
        attention::score_bytes(shape)
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
        if self.replaced(|own| own.attention_backward(shape, operands, dout, out, lse, gradients))? {
            return Ok(());
        }
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
        attention::decode(shape, cache, past, qkv, out)
    }

    fn activate(&self, activation: Activation, x: &Tensor, y: &Tensor) -> Result<()> {
        if self.replaced(|own| own.activate(activation, x, y))? {
            return Ok(());
        }
        let (gate, up) = halves(activation, x)?;
        let value = (&gate * gate_of(activation, &gate)?)?;
        store(&up.map_or(Ok(value.clone()), |up| value * up)?, y)
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        y: &Tensor,
    ) -> Result<()> {
        if self.replaced(|own| own.activate_backward(activation, x, dy, dx, y))? {
            return Ok(());
        }
        let ((gate, up), dy) = (halves(activation, x)?, widen(dy)?);
        let (slope, value) = (slope_of(activation, &gate)?, (&gate * gate_of(activation, &gate)?)?);
        let Some(up) = up else {
            store(&value, y)?;
            return store(&(dy * slope)?, dx);
        };
        store(&(&value * &up)?, y)?;
        store(&Tensor::cat(&[((&dy * up)? * slope)?, (dy * value)?], 1)?.contiguous()?, dx)
    }

    fn add_branch(&self, stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<()> {
        if self.replaced(|own| own.add_branch(stream, branch, dropout, out))? {
            return Ok(());
        }
        store(&(widen(stream)? + drop(dropout, 0, widen(branch)?)?)?, out)
    }

    fn branch_gradient(&self, stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<()> {
        if self.replaced(|own| own.branch_gradient(stream, dropout, branch))? {
            return Ok(());
        }
        store(&drop(dropout, 0, widen(stream)?)?, branch)
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
        head::head(self, x, weight, targets, workspace, gradient, hook)
    }

    fn surveys(&self, tensors: &[(&Tensor, FloatFormat)], exponents: bool, out: &mut [TensorSurvey]) -> Result<()> {
        if self.replaced(|own| own.surveys(tensors, exponents, out))? {
            return Ok(());
        }
        side_by_side(tensors, out, |tensor, format| survey::survey(tensor, format, exponents))
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
        if self.replaced(|own| own.adamw(numbers, grad, master, moments, weight))? {
            return Ok(());
        }
        let AdamWStep { lr, betas, eps, weight_decay, bias_corrections, grad_factor } = numbers;
        let grad = (widen(grad)? * f64::from(grad_factor))?;
        let (m, v) = (moments.exp_avg, moments.exp_avg_sq);
        let exp_avg = (m + ((&grad - m)? * (1.0 - betas[0]))?)?;
        let exp_avg_sq = ((v * betas[1])? + (grad.sqr()? * (1.0 - betas[1]))?)?;
        let root = (exp_avg_sq.sqrt()? / f64::from(bias_corrections[1].sqrt()))?;
        let update = ((&exp_avg * f64::from(lr / bias_corrections[0]))? / (root + f64::from(eps))?)?;
        let updated = ((master * f64::from(1.0 - lr * weight_decay))? - update)?;
        store(&exp_avg, m)?;
        store(&exp_avg_sq, v)?;
        store(&updated, master)?;
        weight.map_or(Ok(()), |weight| store(&updated, weight))
    }
}

/// `weight` as `[in, out]`, a view.
fn oriented(layout: WeightLayout, weight: &Tensor) -> Result<Tensor> {
    match layout {
        WeightLayout::InOut => Ok(weight.clone()),
        WeightLayout::OutIn => weight.t(),
    }
}

/// What the function is applied to, in FP32, and what a gated activation multiplies it with.
fn halves(activation: Activation, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
    if !activation.is_gated() {
        return Ok((widen(x)?, None));
    }
    require_contiguous(x)?;
    let width = x.dim(1)? / 2;
    let half = |first: usize| widen(&x.narrow(1, first, width)?.contiguous()?);
    Ok((half(0)?, Some(half(width)?)))
}

/// sqrt(2 / π) and the cubic coefficient of the tanh form of GELU.
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;
/// Beyond this magnitude the activations are the identity or zero in FP32, and their derivatives 1 or 0.
const LIMIT: f32 = 100.0;

/// 1 / (1 + exp(-x)): 0 and 1 at the ends, without a NaN between.
fn logistic(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// What each element is multiplied with: GELU's (1 + tanh(u)) / 2 is the logistic function of 2u.
fn gate_of(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::GatedSilu => logistic(x),
        Activation::Gelu | Activation::GatedGelu => {
            let inner = (((x.sqr()? * (2.0 * SQRT_2_OVER_PI * GELU_CUBIC))? + 2.0 * SQRT_2_OVER_PI)? * x)?;
            logistic(&inner)
        }
    }
}

/// The derivative of `x · gate(x)`, finite for every number: candle's own GELU gradient is NaN where x³ overflows.
fn slope_of(activation: Activation, x: &Tensor) -> Result<Tensor> {
    // Comparisons and not `clamp`, which drops NaN on CUDA.
    let limit = |x: &Tensor, bound: f32, beyond: Tensor| -> Result<Tensor> {
        beyond.where_cond(&Tensor::full(bound, (), x.device())?.broadcast_as(x.shape())?, x)
    };
    let x = limit(x, LIMIT, x.gt(LIMIT)?)?;
    let x = limit(&x, -LIMIT, x.lt(-LIMIT)?)?;
    let gate = gate_of(activation, &x)?;
    let inner = match activation {
        Activation::GatedSilu => x.ones_like()?,
        Activation::Gelu | Activation::GatedGelu => {
            ((x.sqr()? * (6.0 * SQRT_2_OVER_PI * GELU_CUBIC))? + 2.0 * SQRT_2_OVER_PI)?
        }
    };
    let rest = (gate.neg()? + 1.0)?;
    &gate + (((&gate * rest)? * x)? * inner)?
}
