//! The operations a decoder is computed with, as the trait [`Kernels`], and its implementations.
//!
//! An operation reads and writes whole candle tensors of one device, stored in FP32, FP16 or BF16. Nonlinear functions and sums
//! are computed in FP32. Softmax, normalisation statistics and losses are never in half precision.

#![allow(clippy::inline_always, reason = "code inlines into `isa::vectorize`, or else misses its vector instructions")]

pub mod adamw;
pub mod attention;
pub mod columns;
pub mod convert;
pub mod cross_entropy;
#[cfg(any(feature = "cuda", test))]
pub mod cuda;
pub mod decode_attention;
pub mod dropout;
pub mod embedding;
pub mod fp8;
mod fused;
pub mod gated;
pub mod gelu;
pub mod isa;
pub mod layer_norm;
pub mod linear;
pub mod machine;
pub mod math;
pub mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
pub mod precision;
pub mod quantised;
pub mod random;
pub mod residual;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub mod stochastic;
pub mod survey;
pub mod tiles;
pub mod view;

pub use fused::Fused;
pub use plain::Plain;

use crate::precision::FloatFormat;
use adamw::{AdamWStep, Moments};
use attention::{Operands, Shape};
use candle_core::{DType, Result, Tensor};
use columns::{Columns, Factor, Store};
use cross_entropy::{HeadGradient, HeadTensor, HeadWorkspace};
use decode_attention::KeyValues;
use dropout::Dropout;
use gated::Gate;
use matmul::ProductShape;
use rms_norm::Gain;
use rope::{Direction, Positions, Table};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use survey::TensorSurvey;
use view::Allocate;

/// The kernels a configuration asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// [`Choice::Fused`]; but for what takes a few passes only, [`Choice::Candle`] on a GPU, where a preflight takes longer.
    #[default]
    #[serde(skip_serializing)]
    Auto,
    /// [`Plain`].
    Candle,
    /// The project's own: [`Fused`] on a CPU; on a GPU [`Plain`], with own CUDA kernels for operations that pass a preflight.
    Fused,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "candle" => Ok(Self::Candle),
            "fused" => Ok(Self::Fused),
            other => Err(format!("`{other}` is unknown; use `auto`, `candle` or `fused`")),
        }
    }
}

/// The normalisation in front of attention, MLP and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Layer normalisation with weight and bias (Ba, Kiros and Hinton, 2016).
    Layer,
    /// Root mean square normalisation with a weight (Zhang and Sennrich, 2019).
    Rms {
        /// The factor is 1 + weight, as Gemma has it.
        unit_offset: bool,
    },
}

/// The MLP's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU in its tanh form (Hendrycks and Gimpel, 2016).
    Gelu,
    /// `silu(gate) * up` (Shazeer, 2020).
    GatedSilu,
    /// `gelu(gate) * up`, tanh form.
    GatedGelu,
}

impl Activation {
    /// Whether the activation is gated.
    pub const fn is_gated(self) -> bool {
        self.gate().is_some()
    }

    /// The function applied to the gate.
    pub(crate) const fn gate(self) -> Option<Gate> {
        match self {
            Self::Gelu => None,
            Self::GatedSilu => Some(Gate::Silu),
            Self::GatedGelu => Some(Gate::Gelu),
        }
    }
}

/// How a weight matrix lies in memory and in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[in, out]`, GPT-2's `Conv1D`.
    InOut,
    /// `[out, in]`, `torch.nn.Linear`.
    OutIn,
}

impl WeightLayout {
    /// How the transposed matrix lies in the same memory.
    #[must_use]
    pub const fn transposed(self) -> Self {
        match self {
            Self::InOut => Self::OutIn,
            Self::OutIn => Self::InOut,
        }
    }
}

/// How rows are normalised.
#[derive(Clone, Copy, Debug)]
pub struct NormSettings {
    /// The formula.
    pub norm: Norm,
    /// Added to the variance under the square root.
    pub eps: f32,
}

impl NormSettings {
    /// An RMS norm's gain.
    pub(crate) fn gain(self, weight: &Tensor) -> Gain<'_> {
        let plus_one = self.norm == Norm::Rms { unit_offset: true };
        Gain { weight, offset: if plus_one { 1.0 } else { 0.0 } }
    }
}

/// Where the gradients of a norm's own parameters are written.
#[derive(Clone, Copy, Debug)]
pub struct NormGradients<'a> {
    /// `[D]`.
    pub weight: &'a Tensor,
    /// `[D]`; layer norms only.
    pub bias: Option<&'a Tensor>,
}

/// A product of few columns beside a layer's own: `alpha · low · factor`.
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// `[N, R]`.
    pub low: &'a Tensor,
    /// R × the outputs.
    pub factor: Factor<'a>,
    /// A factor of the sums.
    pub alpha: f32,
    /// The outputs that each of equal shares of `low`'s columns adds to, in order: the factor has zeros elsewhere. Empty if
    /// there is one share.
    pub shares: &'a [Range<usize>],
}

impl LowRank<'_> {
    /// Adds it to `y`, in FP32 with one rounding.
    fn add_to(self, kernels: &(impl Kernels + ?Sized), y: &Tensor) -> Result<()> {
        let low = Factor::plain(Columns::all(self.low)?);
        kernels.product(low, self.factor, self.alpha, Columns::all(y)?, Store::Add)
    }
}

/// A norm's output and the statistics its backward pass needs.
#[derive(Debug)]
pub struct Normed<T = Tensor> {
    /// `[N, D]`, compute type.
    pub out: T,
    /// `[N]`, FP32; layer norms only.
    pub mean: Option<T>,
    /// `[N]`, FP32.
    pub rstd: T,
}

impl<T> Normed<T> {
    /// Buffers for `rows` rows of `width`.
    pub fn lay_out(norm: Norm, rows: usize, width: usize, compute: DType, allocate: Allocate<'_, T>) -> Result<Self> {
        let statistics = || allocate(&[rows], DType::F32);
        Ok(Self {
            out: allocate(&[rows, width], compute)?,
            mean: (norm == Norm::Layer).then(statistics).transpose()?,
            rstd: statistics()?,
        })
    }
}

/// The operands of an embedding.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// `[V, D]`.
    pub table: &'a Tensor,
    /// `[C, D]`, the learned position embedding; row 0 belongs to the first token of a sequence.
    pub positions: Option<&'a Tensor>,
    /// Token ids, sequence after sequence.
    pub ids: &'a [u32],
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// For each token, the place in its sequence that its document starts at, where positions begin anew.
    pub documents: Option<&'a [u32]>,
    /// Factor of the tokens' rows.
    pub scale: f32,
    /// Applied to the sum.
    pub dropout: Option<Dropout>,
}

impl<'a> Embedding<'a> {
    /// The position of each token.
    pub(crate) fn places(&self) -> Positions<'a> {
        Positions { seq_len: self.seq_len, past: 0, documents: self.documents }
    }
}

/// Called with each tensor the head computes and the index of its first row.
pub type HeadHook<'a> = Option<&'a mut dyn FnMut(HeadTensor, usize, &Tensor) -> Result<()>>;

/// The operations of a decoder. Results are written into existing tensors; N is the number of tokens. Implementations round
/// only when they store a result.
pub trait Kernels: fmt::Debug + Send + Sync {
    /// The name of this set of kernels in configurations and checkpoints.
    fn name(&self) -> &str;

    /// `x = 0`.
    fn zero(&self, x: &Tensor) -> Result<()>;

    /// `out = x`, rounded to `out`'s type.
    fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `out += x`, the sum formed in FP32.
    fn accumulate(&self, x: &Tensor, out: &Tensor) -> Result<()>;

    /// `x`, `inner` and `out` along a tree: `x` is added to the first of `inner`, that to the next, and the last to `out`, each sum
    /// formed in FP32. What `inner`, which is FP32, then holds is undefined.
    fn accumulate_along(&self, x: &Tensor, inner: &[&Tensor], out: &Tensor) -> Result<()> {
        let mut from = x;
        for to in inner.iter().copied().chain([out]) {
            self.accumulate(from, to)?;
            from = to;
        }
        Ok(())
    }

    /// `out[n] = dropout(scale · table[ids[n]] + positions[p])`, with p the token's position in its document, for `out [N, D]` of the residual type. An id outside the
    /// vocabulary is an error.
    fn embed(&self, embedding: Embedding<'_>, out: &Tensor) -> Result<()>;

    /// Adds the gradient of the table to `dtable [V, D]` and writes that of the positions, given that of the output,
    /// `dx [N, D]`. `order` is scratch of N numbers.
    fn embed_backward(
        &self,
        embedding: Embedding<'_>,
        dx: &Tensor,
        order: &mut [u32],
        dtable: &Tensor,
        dpositions: Option<&Tensor>,
    ) -> Result<()>;

    /// Normalises each row of `x [N, D]` (residual type). Only layer norms have a `bias`.
    fn norm(
        &self,
        settings: NormSettings,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        to: &Normed,
    ) -> Result<()>;

    /// Adds the gradient with respect to `x` to `dx [N, D]`, or overwrites it, and writes those of weight and bias to `gradients`,
    /// unless they are frozen.
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
    ) -> Result<()>;

    /// RMS norm of each head in the columns `x` into the columns `y` of another tensor; `rstd` holds one value a head.
    fn head_norm(
        &self,
        settings: NormSettings,
        x: Columns<'_>,
        weight: &Tensor,
        y: Columns<'_>,
        rstd: &Tensor,
    ) -> Result<()>;

    /// Writes the gradients with respect to `x` and, unless it is frozen, the weight, given the output's gradient `dy`.
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
    ) -> Result<()>;

    /// Rotates the heads in the columns `x` in place by the angles of their positions.
    fn rotate(&self, x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<()>;

    /// `y [N, O] = x [N, I] · weight + bias [O]`, summed in FP32 and rounded once.
    fn linear(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<()>;

    /// [`Kernels::linear`] with a product of few columns added before the sum is rounded, or after that.
    fn linear_low_rank(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        low_rank: LowRank<'_>,
        y: &Tensor,
    ) -> Result<()> {
        self.linear(layout, x, weight, bias, y)?;
        low_rank.add_to(self, y)
    }

    /// `dx = dy · weightᵀ`.
    fn linear_input_gradient(&self, layout: WeightLayout, dy: &Tensor, weight: &Tensor, dx: &Tensor) -> Result<()> {
        self.linear(layout.transposed(), dy, weight, None, dx)
    }

    /// `dweight = xᵀ · dy`, laid out as the weight is, and `dbias = Σ_rows dy`, in the gradients' type.
    fn linear_weight_gradient(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        dy: &Tensor,
        dweight: &Tensor,
        dbias: Option<&Tensor>,
    ) -> Result<()>;

    /// `c = alpha · a · b`, or added to `c`, summed in FP32 and rounded once; `a` and `b` are of one type.
    fn product(&self, a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>, store: Store) -> Result<()>;

    /// Causal attention of queries, keys and values into `out [N, H·head_dim]`; `lse [B·H·T]` (FP32) receives each row's
    /// log-sum-exp.
    fn attention(&self, shape: &Shape, operands: &Operands<'_>, out: &Tensor, lse: &Tensor) -> Result<()>;

    /// Bytes that products of these shapes, on so many threads, leave in buffers of the kernels' own.
    fn product_bytes(&self, products: &[ProductShape], threads: usize) -> Result<u64> {
        let _ = (products, threads);
        Ok(0)
    }

    /// Bytes that [`Kernels::attention`] and its backward pass allocate for scores, at most.
    fn score_bytes(&self, shape: &Shape) -> Result<u64> {
        let _ = shape;
        Ok(0)
    }

    /// The gradients of queries, keys and values from `dout` and the forward pass's operands and results.
    fn attention_backward(
        &self,
        shape: &Shape,
        operands: &Operands<'_>,
        dout: &Tensor,
        out: &Tensor,
        lse: &Tensor,
        gradients: [Columns<'_>; 3],
    ) -> Result<()>;

    /// Attention of new tokens over cached keys and values; see [`KeyValues::attend`].
    fn decode_attention(
        &self,
        shape: &Shape,
        cache: &KeyValues,
        past: usize,
        qkv: [Columns<'_>; 3],
        out: &Tensor,
    ) -> Result<()>;

    /// `y [N, F] = activation(x)`; if it is gated, `x` is `[N, 2·F]` with the gate first.
    fn activate(&self, activation: Activation, x: &Tensor, y: &Tensor) -> Result<()>;

    /// Writes the gradient with respect to `x` into `dx`, given the output's gradient `dy`, and the output again into `y`.
    /// Without a gate `dx` is `dy`: the gradient is computed in place.
    fn activate_backward(&self, activation: Activation, x: &Tensor, dy: &Tensor, dx: &Tensor, y: &Tensor)
    -> Result<()>;

    /// `out = stream + dropout(branch)`, all `[N, D]`; the sum is formed in FP32 and rounded to the residual type.
    fn add_branch(&self, stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<()>;

    /// `branch = dropout(stream)`: the residual stream's gradient as the branch receives it (compute type).
    fn branch_gradient(&self, stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<()>;

    /// Sum of the losses `-log softmax(x · weightᵀ)[target]` over rows whose target is not
    /// [`IGNORE`](cross_entropy::IGNORE), for `x [N, D]` and `weight [V, D]`, in nats; with `gradient` its derivatives too.
    fn head(
        &self,
        x: &Tensor,
        weight: &Tensor,
        targets: &[u32],
        workspace: &HeadWorkspace,
        gradient: Option<HeadGradient<'_>>,
        hook: HeadHook<'_>,
    ) -> Result<f64>;

    /// Statistics of each tensor, into the place of the same index; a value counts as subnormal below the smallest normal value
    /// of the tensor's format.
    fn surveys(&self, tensors: &[(&Tensor, FloatFormat)], exponents: bool, out: &mut [TensorSurvey]) -> Result<()>;

    /// Those of one tensor.
    fn survey(&self, tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<TensorSurvey> {
        let mut out = [TensorSurvey::default()];
        self.surveys(&[(tensor, format)], exponents, &mut out)?;
        let [survey] = out;
        Ok(survey)
    }

    /// The sum of a tensor's values.
    fn sum(&self, tensor: &Tensor) -> Result<f64>;

    /// One AdamW update. The new master is rounded into `weight`, the working copy; `None` means that the master is the working
    /// copy.
    fn adamw(
        &self,
        numbers: AdamWStep,
        grad: &Tensor,
        master: &Tensor,
        moments: Moments<'_>,
        weight: Option<&Tensor>,
    ) -> Result<()>;
}
