//! The operations a decoder is computed with, as the trait [`Kernels`], and its implementations.
//!
//! An operation reads and writes whole candle tensors of one device, stored in FP32, FP16 or BF16. Nonlinear functions
//! and sums are computed in FP32. Softmax, normalization statistics and losses are never in half precision.

#![allow(clippy::inline_always, reason = "code inlines into `isa::vectorize`, or else misses its vector instructions")]

pub mod adamw;
pub mod amx;
pub mod attention;
pub mod blockwise;
mod candle;
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
pub mod gated_delta;
pub mod gelu;
pub mod glu;
pub mod head_gate;
pub mod isa;
pub mod linear;
pub mod machine;
pub mod math;
pub mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod norm;
pub mod op;
pub mod pass;
pub mod precision;
pub mod profile;
pub mod quantized;
pub mod random;
pub mod residual;
pub mod rope;
pub mod route;
pub mod rows;
pub mod short_conv;
pub mod stochastic;
pub mod summary;
pub mod view;

pub use candle::CandleKernels;
pub use fused::Fused;
pub use op::Op;

use crate::precision::FloatFormat;
use attention::AttentionShape;
use candle_core::{DType, Result, Tensor};
use columns::{ColumnSlice, MatmulOperand, WriteMode};
use cross_entropy::HeadTensor;
use matmul::GemmShape;
use pass::{PassFn, PassInputs};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use strum::EnumString;
use summary::TensorSummary;
use view::AllocFn;

/// The kernels a configuration asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, EnumString)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_backend)]
pub enum KernelBackend {
    /// [`KernelBackend::Fused`], except for commands that take only a few passes. On a GPU these use
    /// [`KernelBackend::Candle`], because a preflight takes longer.
    #[default]
    #[serde(skip_serializing)]
    Auto,
    /// [`CandleKernels`].
    Candle,
    /// The project's own: [`Fused`] on a CPU; on a GPU a [`Chain`] of the CUDA kernels that pass a preflight and
    /// [`CandleKernels`].
    Fused,
    /// [`KernelBackend::Fused`], with the same bits, but passes are not recorded as CUDA graphs.
    Eager,
}

fn unknown_backend(text: &str) -> String {
    format!("`{text}` is unknown; use `auto`, `candle`, `fused` or `eager`")
}

/// The normalization in front of attention, MLP and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Layer normalization with weight and bias (Ba, Kiros and Hinton, 2016).
    Layer,
    /// Root mean square normalization with a weight (Zhang and Sennrich, 2019).
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
    SwiGlu,
    /// `gelu(gate) * up`, tanh form.
    GeGlu,
    /// `gate * logistic(1.702 * gate) * (up + 1)`: gate up to 7, and up from -7 to 7. Gates and ups alternate.
    ClampedSwiGlu,
}

impl Activation {
    /// Whether the activation is gated.
    pub const fn is_gated(self) -> bool {
        !matches!(self, Self::Gelu)
    }

    /// Whether the input has pairs of a gate and an up; otherwise all gates come first.
    pub const fn is_interleaved(self) -> bool {
        matches!(self, Self::ClampedSwiGlu)
    }
}

/// The layout of a weight matrix in memory and in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[in, out]`, GPT-2's `Conv1D`.
    InOut,
    /// `[out, in]`, `torch.nn.Linear`.
    OutIn,
}

impl WeightLayout {
    /// The layout of the transposed matrix in the same memory.
    #[must_use]
    pub const fn transposed(self) -> Self {
        match self {
            Self::InOut => Self::OutIn,
            Self::OutIn => Self::InOut,
        }
    }
}

/// How rows are normalized.
#[derive(Clone, Copy, Debug)]
pub struct NormSettings {
    /// The formula.
    pub norm: NormKind,
    /// Added to the variance under the square root.
    pub eps: f32,
}

impl NormSettings {
    /// Whether rows are centered, as in layer norms.
    pub(crate) fn centers(self) -> bool {
        self.norm == NormKind::Layer
    }

    /// The constant that is added to the weight of an RMS norm.
    pub(crate) fn gain_offset(self) -> f32 {
        if self.norm == (NormKind::Rms { unit_offset: true }) { 1.0 } else { 0.0 }
    }
}

/// A product of few columns, added to a layer's own product: `alpha · low · factor`.
#[derive(Clone, Copy, Debug)]
pub struct LoraTerm<'a> {
    /// `[N, R]`.
    pub low: &'a Tensor,
    /// R × the outputs.
    pub factor: MatmulOperand<'a>,
    /// A factor of the sums.
    pub alpha: f32,
    /// The outputs that each of equal shares of `low`'s columns adds to, in order: the factor has zeros elsewhere.
    /// Empty if there is one share.
    pub shares: &'a [Range<usize>],
}

impl LoraTerm<'_> {
    /// Adds it to `y`, in FP32 with one rounding.
    fn add_to(self, kernels: &dyn Kernels, y: &Tensor) -> Result<Ran> {
        let (a, c) = (MatmulOperand::all(self.low)?, ColumnSlice::all(y)?);
        let product = op::Matmul { a, b: self.factor, alpha: self.alpha, c, mode: WriteMode::Accumulate };
        kernels.run(&mut Op::Matmul(product))
    }
}

/// A norm's output and the statistics its backward pass needs.
#[derive(Debug)]
pub struct NormOutput<T = Tensor> {
    /// `[N, D]`, compute type.
    pub out: T,
    /// `[N]`, FP32; layer norms only.
    pub mean: Option<T>,
    /// `[N]`, FP32.
    pub rstd: T,
}

impl<T> NormOutput<T> {
    /// Buffers for `rows` rows of `width`.
    pub fn alloc(norm: NormKind, rows: usize, width: usize, compute: DType, allocate: AllocFn<'_, T>) -> Result<Self> {
        let statistics = || allocate(&[rows], DType::F32);
        Ok(Self {
            out: allocate(&[rows, width], compute)?,
            mean: (norm == NormKind::Layer).then(statistics).transpose()?,
            rstd: statistics()?,
        })
    }
}

/// Called with each tensor the head computes and the index of its first row.
pub type HeadHook<'a> = Option<&'a mut dyn FnMut(HeadTensor, usize, &Tensor) -> Result<()>>;

/// Whether an operation was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ran {
    /// The results are written.
    Done,
    /// There is no kernel for the operation, or for operands of these types, shapes or layouts. Outputs that would be
    /// overwritten may have been.
    Unsupported,
}

/// A set of kernels: an implementation of [the operations](op). Implementations round only when they store a result.
pub trait Kernels: fmt::Debug + Send + Sync {
    /// The name of this set of kernels in configurations and checkpoints.
    fn name(&self) -> &str;

    /// Computes an operation whose operands [have been checked](Op::check). Callers use [`Op::run`].
    fn run(&self, op: &mut Op<'_>) -> Result<Ran>;

    /// Bytes that products of these shapes, on `threads` threads, leave in the kernels' own buffers.
    fn packing_bytes(&self, _products: &[GemmShape], _threads: usize) -> Result<u64> {
        Ok(0)
    }

    /// The maximum bytes that attention and its backward pass allocate for scores.
    fn score_bytes(&self, _shape: &AttentionShape) -> Result<u64> {
        Ok(0)
    }

    /// Whether the head's products and losses are faster on a GPU if the rows of logits are padded.
    fn pads_logits(&self) -> bool {
        false
    }

    /// Whether two operations may run at the same time.
    fn allows_overlap(&self) -> bool {
        true
    }

    /// Computes `pass`, which reads these inputs, or replays an earlier pass with them.
    fn pass(&self, _inputs: &PassInputs<'_>, pass: PassFn<'_>) -> Result<()> {
        pass()
    }

    /// The reason why passes are no longer recorded; once.
    fn take_notice(&self) -> Option<String> {
        None
    }
}

impl dyn Kernels + '_ {
    /// Runs [`op::Copy`] without dropout.
    pub fn copy(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        op::Copy { x, dropout: None, out }.run(self)
    }

    /// Runs [`op::Summarize`] on one tensor.
    pub fn summarize(&self, tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<TensorSummary> {
        let mut out = [TensorSummary::default()];
        op::Summarize { tensors: &[(tensor, format)], exponents, out: &mut out }.run(self)?;
        let [summary] = out;
        Ok(summary)
    }

    /// Runs [`op::Sum`].
    pub fn sum(&self, x: &Tensor) -> Result<f64> {
        let mut sum = 0.0;
        op::Sum { x, sum: &mut sum }.run(self)?;
        Ok(sum)
    }
}

/// Several sets of kernels. The first that supports an operation computes it.
#[derive(Debug)]
pub struct Chain(pub Vec<Box<dyn Kernels>>);

impl Kernels for Chain {
    fn name(&self) -> &str {
        self.0.first().map_or("", |kernels| kernels.name())
    }

    fn run(&self, op: &mut Op<'_>) -> Result<Ran> {
        if let Op::Linear(op) = op
            && let Some(low_rank) = op.low_rank
        {
            op::Linear { low_rank: None, ..*op }.run(self)?;
            return low_rank.add_to(self, op.y);
        }
        for kernels in &self.0 {
            if kernels.run(op)? == Ran::Done {
                return Ok(Ran::Done);
            }
        }
        Ok(Ran::Unsupported)
    }

    fn score_bytes(&self, shape: &AttentionShape) -> Result<u64> {
        self.0.iter().try_fold(0, |most, kernels| Ok(kernels.score_bytes(shape)?.max(most)))
    }

    fn pads_logits(&self) -> bool {
        self.0.iter().any(|kernels| kernels.pads_logits())
    }

    fn pass(&self, inputs: &PassInputs<'_>, pass: PassFn<'_>) -> Result<()> {
        self.0.first().map_or(Ok(()), |kernels| kernels.pass(inputs, pass))
    }

    fn take_notice(&self) -> Option<String> {
        self.0.iter().find_map(|kernels| kernels.take_notice())
    }
}
