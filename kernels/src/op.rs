//! The operations of a decoder as values, which every set of [`Kernels`] computes.
//!
//! N is the number of tokens, D a row's width and V the size of the vocabulary. Results are written into existing
//! tensors. Sums are formed in FP32, and results are rounded once, to the type of the tensor that stores them.

pub mod cases;
mod operands;

use super::adamw::{AdamWStep, AdamWTensor};
use super::attention::{AttentionInputs, AttentionShape};
use super::columns::{ColumnSlice, MatmulOperand, WriteMode};
use super::decode_attention::CachedSequence;
use super::dropout::Dropout;
pub use super::gated_delta::{DecodeGatedDelta, GatedDelta, GatedDeltaBackward};
pub use super::head_gate::{CopyQueries, GateHeads, GateHeadsBackward};
use super::machine::spin::join;
use super::profile::flops;
use super::rope::{CosSinCache, Direction, PositionIds};
pub use super::route::{Route, RouteBackward, ScaleRows};
pub use super::short_conv::{DecodeShortConv, ShortConv, ShortConvBackward};
use super::summary::TensorSummary;
use super::{Activation, Kernels, LoraTerm, NormSettings, Ran, WeightLayout};
use crate::precision::FloatFormat;
use candle_core::{Result, Tensor, bail};
pub(crate) use operands::same_shapes;

/// Defines [`Op`] with a variant for each operation's struct.
macro_rules! operations {
    ($($name:ident),*) => {
        /// One operation with its operands.
        #[derive(Debug)]
        pub enum Op<'a> {
            $(#[doc = concat!("See [`", stringify!($name), "`](struct@", stringify!($name), ").")] $name($name<'a>),)*
        }

        impl Op<'_> {
            /// The name of the operation.
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => stringify!($name),)* }
            }
        }

        $(impl<'a> From<$name<'a>> for Op<'a> {
            fn from(op: $name<'a>) -> Self {
                Self::$name(op)
            }
        }

        impl $name<'_> {
            /// Checks the operands, and computes the operation with `kernels`.
            pub fn run(self, kernels: &dyn Kernels) -> Result<()> {
                Op::$name(self).run(kernels)
            }
        })*
    };
}

operations!(
    Zero,
    Copy,
    Accumulate,
    Embed,
    EmbedBackward,
    Norm,
    NormBackward,
    Rotate,
    Linear,
    Matmul,
    SumRows,
    Attention,
    AttentionBackward,
    DecodeAttention,
    Activate,
    ActivateBackward,
    AddBranch,
    SoftCap,
    CrossEntropy,
    Summarize,
    Sum,
    AdamW,
    Route,
    RouteBackward,
    ScaleRows,
    ShortConv,
    ShortConvBackward,
    DecodeShortConv,
    GatedDelta,
    GatedDeltaBackward,
    DecodeGatedDelta,
    CopyQueries,
    GateHeads,
    GateHeadsBackward
);

/// `x = 0`.
#[derive(Debug)]
pub struct Zero<'a> {
    /// Any shape and type.
    pub x: &'a Tensor,
}

/// `out = dropout(x)`, for any two types.
#[derive(Debug)]
pub struct Copy<'a> {
    /// Any shape; with dropout a matrix.
    pub x: &'a Tensor,
    /// Applied to the values.
    pub dropout: Option<Dropout>,
    /// The shape of `x`.
    pub out: &'a Tensor,
}

/// `out += x`, or a sum along a tree: `x` is added to the first of `inner`, that to the next, and the last to `out`.
#[derive(Debug)]
pub struct Accumulate<'a> {
    /// Any shape and type.
    pub x: &'a Tensor,
    /// The shape of `x`, FP32. Their contents are undefined afterwards.
    pub inner: &'a [&'a Tensor],
    /// The shape of `x`.
    pub out: &'a Tensor,
}

/// The inputs of an embedding, `dropout(scale · table[ids[n]] + positions[p])` for token n at position p of its
/// document.
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
    /// For each token, the index in its sequence of its document's first token, where positions restart.
    pub documents: Option<&'a [u32]>,
    /// Factor of the tokens' rows.
    pub scale: f32,
    /// Applied to the sum.
    pub dropout: Option<Dropout>,
}

/// Embeds tokens.
#[derive(Debug)]
pub struct Embed<'a> {
    /// Tokens and tables.
    pub input: Embedding<'a>,
    /// `[N, D]`, residual type.
    pub out: &'a Tensor,
}

/// Adds the gradient of an embedding's table, and writes that of its positions.
#[derive(Debug)]
pub struct EmbedBackward<'a> {
    /// The operands of the forward pass; its tables are not read.
    pub input: Embedding<'a>,
    /// `[N, D]`, the gradient of the output.
    pub dx: &'a Tensor,
    /// Scratch of N numbers.
    pub order: &'a mut [u32],
    /// `[V, D]`, added to; `None` if the table is frozen.
    pub dtable: Option<&'a Tensor>,
    /// `[C, D]`, overwritten.
    pub dpositions: Option<&'a Tensor>,
}

/// Layer or RMS norm of groups as wide as the weight: of whole rows, or of each head.
#[derive(Debug)]
pub struct Norm<'a> {
    /// The formula.
    pub settings: NormSettings,
    /// `[N, D]`, residual type.
    pub x: ColumnSlice<'a>,
    /// As wide as a group, compute type.
    pub weight: &'a Tensor,
    /// Like `weight`; layer norms only.
    pub bias: Option<&'a Tensor>,
    /// `[N, D]`, compute type.
    pub y: ColumnSlice<'a>,
    /// One value per group, FP32; layer norms only.
    pub mean: Option<&'a Tensor>,
    /// One value per group, FP32: the inverse standard deviation.
    pub rstd: &'a Tensor,
}

/// The gradients of a [`Norm`].
#[derive(Debug)]
pub struct NormBackward<'a> {
    /// The formula.
    pub settings: NormSettings,
    /// `[N, D]`, compute type: the gradient of the output.
    pub dy: ColumnSlice<'a>,
    /// The input of the forward pass.
    pub x: ColumnSlice<'a>,
    /// The weight of the forward pass.
    pub weight: &'a Tensor,
    /// The mean of the forward pass.
    pub mean: Option<&'a Tensor>,
    /// The inverse standard deviation of the forward pass.
    pub rstd: &'a Tensor,
    /// `[N, D]`, the type of `x`.
    pub dx: ColumnSlice<'a>,
    /// Whether the gradient is added to `dx`.
    pub mode: WriteMode,
    /// Like `weight`, overwritten; `None` if the norm is frozen.
    pub dweight: Option<&'a Tensor>,
    /// Like `weight`, overwritten; layer norms only.
    pub dbias: Option<&'a Tensor>,
}

/// Rotates heads in place by the angles of their positions.
#[derive(Debug)]
pub struct Rotate<'a> {
    /// `[N, heads · head_size]`.
    pub x: ColumnSlice<'a>,
    /// The angles.
    pub table: &'a CosSinCache,
    /// The rows' positions.
    pub positions: PositionIds<'a>,
    /// Forward, or backward for gradients.
    pub direction: Direction,
}

/// `y = x · weight + bias + low rank`.
#[derive(Debug)]
pub struct Linear<'a> {
    /// The weight's layout in memory.
    pub layout: WeightLayout,
    /// `[N, I]`, compute type.
    pub x: &'a Tensor,
    /// I × O in its layout, compute type.
    pub weight: &'a Tensor,
    /// `[O]`.
    pub bias: Option<&'a Tensor>,
    /// An additional product. It may be added after the sum was rounded.
    pub low_rank: Option<LoraTerm<'a>>,
    /// `[N, O]`.
    pub y: &'a Tensor,
}

/// `c = alpha · a · b`, or added to `c`.
#[derive(Debug)]
pub struct Matmul<'a> {
    /// M × K.
    pub a: MatmulOperand<'a>,
    /// K × N, the type of `a`.
    pub b: MatmulOperand<'a>,
    /// Multiplies the product.
    pub alpha: f32,
    /// `[M, N]`.
    pub c: ColumnSlice<'a>,
    /// Whether the product is added to `c`.
    pub mode: WriteMode,
}

/// `out = Σ_rows x`.
#[derive(Debug)]
pub struct SumRows<'a> {
    /// `[N, D]`.
    pub x: &'a Tensor,
    /// `[D]`.
    pub out: &'a Tensor,
}

/// Causal attention.
#[derive(Debug)]
pub struct Attention<'a> {
    /// Sizes and limits.
    pub shape: AttentionShape,
    /// Queries, keys and values.
    pub operands: AttentionInputs<'a>,
    /// `[N, H·head_size]`.
    pub out: &'a Tensor,
    /// `[B·H·T]`, FP32: the log-sum-exp of each row of scores.
    pub lse: &'a Tensor,
}

/// The gradients of [`Attention`].
#[derive(Debug)]
pub struct AttentionBackward<'a> {
    /// Sizes and limits.
    pub shape: AttentionShape,
    /// The operands of the forward pass.
    pub operands: AttentionInputs<'a>,
    /// `[N, H·head_size]`, the gradient of the output.
    pub dout: &'a Tensor,
    /// The output of the forward pass.
    pub out: &'a Tensor,
    /// The log-sum-exps of the forward pass.
    pub lse: &'a Tensor,
    /// The gradients of queries, keys and values, overwritten.
    pub gradients: [ColumnSlice<'a>; 3],
    /// `[H]`, the gradient of the sinks, overwritten; `None` if there are none or they are frozen.
    pub dsinks: Option<&'a Tensor>,
}

/// Appends the keys and values of new tokens to the caches of their sequences, and computes attention for the new
/// queries.
#[derive(Debug)]
pub struct DecodeAttention<'a> {
    /// The n new tokens of all sequences, as if they were one sequence.
    pub shape: AttentionShape,
    /// The sequences, in the order of their rows.
    pub sequences: &'a [CachedSequence<'a>],
    /// Queries, keys and values of the new tokens.
    pub qkv: [ColumnSlice<'a>; 3],
    /// `[H]`, as in [`AttentionInputs::sinks`].
    pub sinks: Option<&'a Tensor>,
    /// `[n, H·head_size]`.
    pub out: &'a Tensor,
}

/// `y = activation(x)`.
#[derive(Debug)]
pub struct Activate<'a> {
    /// The function.
    pub activation: Activation,
    /// `[N, F]`; of a gated activation `[N, 2·F]`, all gates first or in pairs with up.
    pub x: &'a Tensor,
    /// `[N, F]`.
    pub y: &'a Tensor,
}

/// The gradient of [`Activate`], and its output again.
#[derive(Debug)]
pub struct ActivateBackward<'a> {
    /// The function.
    pub activation: Activation,
    /// The input of the forward pass.
    pub x: &'a Tensor,
    /// `[N, F]`, the gradient of the output.
    pub dy: &'a Tensor,
    /// The shape of `x`, overwritten. Without a gate it is `dy`: the gradient is computed in place.
    pub dx: &'a Tensor,
    /// `[N, F]`, the output.
    pub y: &'a Tensor,
}

/// `out = stream + dropout(branch)`.
#[derive(Debug)]
pub struct AddBranch<'a> {
    /// `[N, D]`, residual type.
    pub stream: &'a Tensor,
    /// `[N, D]`, compute type.
    pub branch: &'a Tensor,
    /// Applied to the branch.
    pub dropout: Option<Dropout>,
    /// `[N, D]`, residual type.
    pub out: &'a Tensor,
}

/// `out = cap · tanh(x / cap)`.
#[derive(Debug)]
pub struct SoftCap<'a> {
    /// `[N, V]`.
    pub x: &'a Tensor,
    /// The bound of magnitudes.
    pub cap: f32,
    /// `[N, V]`.
    pub out: &'a Tensor,
}

/// Each row's loss `-log softmax(logits)[target]` in nats, and the gradient of the logits, which overwrites them.
#[derive(Debug)]
pub struct CrossEntropy<'a> {
    /// `[n, V]`.
    pub logits: ColumnSlice<'a>,
    /// Logits `x` count as `cap · tanh(x / cap)`.
    pub softcap: Option<f32>,
    /// n ids, or [`IGNORE`](super::cross_entropy::IGNORE).
    pub targets: &'a [u32],
    /// `[n]`, FP32; 0 for ignored targets.
    pub losses: &'a Tensor,
    /// dL/d(row's loss) before its weight. If `None`, the logits stay as they are.
    pub seed: Option<f32>,
    /// n factors of the rows' gradients, of either sign; 1 if `None`. The losses have no weights.
    pub weights: Option<&'a [f32]>,
}

/// Statistics of tensors.
#[derive(Debug)]
pub struct Summarize<'a> {
    /// Each tensor with the format whose smallest normal value bounds subnormal ones.
    pub tensors: &'a [(&'a Tensor, FloatFormat)],
    /// Whether to count values by exponent.
    pub exponents: bool,
    /// The statistics of each tensor.
    pub out: &'a mut [TensorSummary],
}

/// The sum of a tensor's values.
#[derive(Debug)]
pub struct Sum<'a> {
    /// Any shape and type.
    pub x: &'a Tensor,
    /// The sum.
    pub sum: &'a mut f64,
}

/// One AdamW update.
#[derive(Debug)]
pub struct AdamW<'a> {
    /// Learning rate, decay rates and corrections.
    pub step: AdamWStep,
    /// Of any types. Kernels may take out those that they have updated, and leave the others to the next.
    pub tensors: Vec<AdamWTensor<'a>>,
}

/// The scales of a moment in 8 bits. See [`BlockwiseQuantized`](super::blockwise::BlockwiseQuantized).
#[derive(Clone, Copy, Debug)]
pub struct MomentScales<'a> {
    /// The largest magnitude of each block.
    pub absmax: &'a Tensor,
    /// The values of the codes.
    pub map: &'a Tensor,
}

/// How an operation uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it.
    Write,
}

impl<'a> Matmul<'a> {
    /// The gradient of a linear layer's weight, in its layout, given the input `x [N, I]` and the output's gradient
    /// `dy [N, O]`.
    pub fn weight_gradient(layout: WeightLayout, [x, dy]: [&'a Tensor; 2], dweight: &'a Tensor) -> Result<Self> {
        let [left, right] = if layout == WeightLayout::InOut { [x, dy] } else { [dy, x] };
        let (a, b) = (MatmulOperand::transpose_of(left)?, MatmulOperand::all(right)?);
        Ok(Self { a, b, alpha: 1.0, c: ColumnSlice::all(dweight)?, mode: WriteMode::Overwrite })
    }
}

/// Floating-point operations of a product that is faster on one thread, side by side with another product, than on two:
/// a core reads another core's results at 6 to 17 GB/s (Emerald Rapids).
const SMALL_PRODUCT: f64 = (1 << 28) as f64;

/// Computes two products that do not depend on each other. Small ones run side by side if `x`, an operand, is in the
/// CPU's memory.
pub fn run_both(products: [Op<'_>; 2], x: &Tensor, kernels: &dyn Kernels) -> Result<()> {
    let small = products.iter().all(|product| flops(product) <= SMALL_PRODUCT);
    let [first, second] = products;
    if small && x.device().is_cpu() && kernels.allows_overlap() {
        let [mut one, mut other] = [const { Ok(()) }; 2];
        join(|| one = first.run(kernels), || other = second.run(kernels));
        one.and(other)
    } else {
        first.run(kernels)?;
        second.run(kernels)
    }
}

impl Op<'_> {
    /// Checks the operands, and computes the operation with `kernels`. Fails if there is no kernel for it.
    pub fn run(mut self, kernels: &dyn Kernels) -> Result<()> {
        self.check()?;
        match kernels.run(&mut self)? {
            Ran::Done => Ok(()),
            Ran::Unsupported => bail!("the kernels `{}` cannot compute {self:?}", kernels.name()),
        }
    }
}
