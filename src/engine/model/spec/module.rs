//! The operations of a model, and their addresses.

use crate::engine::kernels::Activation;
use crate::precision::PrecisionUnit;

/// The norms of a block, and the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NormRole {
    /// Before attention.
    Attention,
    /// The norm of each query head.
    Query,
    /// The norm of each key head.
    Key,
    /// After attention, before its output is added to the residual stream.
    PostAttention,
    /// Before the MLP.
    Mlp,
    /// After the MLP, before its output is added to the residual stream.
    PostMlp,
    /// The norm of each head of a gated delta rule's output.
    Delta,
    /// Before the head.
    Final,
}

/// The products of a block. Parts of one product, such as queries, keys and values, have separate names in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearRole {
    /// Queries, keys and values in one.
    Qkv,
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// After attention.
    Out,
    /// Into a short convolution: its two gates and its values in one.
    ConvIn,
    /// After a short convolution.
    ConvOut,
    /// Into a gated delta rule: all its inputs in one.
    DeltaIn,
    /// Its queries, keys and values.
    DeltaQkv,
    /// The gate of its output.
    DeltaGate,
    /// The share of a value that it writes to the state.
    DeltaBeta,
    /// The decay of its state.
    DeltaDecay,
    /// After a gated delta rule.
    DeltaOut,
    /// Gate and up in one.
    GateUp,
    /// The gate of a gated MLP.
    Gate,
    /// Into the MLP.
    Up,
    /// Out of the MLP.
    Down,
}

impl LinearRole {
    /// The fused layer that contains this one.
    pub(in crate::engine::model) const fn fused(self, activation: Activation) -> Self {
        match self {
            Self::Query | Self::Key | Self::Value => Self::Qkv,
            Self::DeltaQkv | Self::DeltaGate | Self::DeltaBeta | Self::DeltaDecay => Self::DeltaIn,
            Self::Gate => Self::GateUp,
            Self::Up if activation.is_gated() => Self::GateUp,
            other => other,
        }
    }
}

/// An operation of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModuleOp {
    /// The token embedding.
    Embedding,
    /// The position embedding.
    Positions,
    /// A normalization.
    Norm(NormRole),
    /// A product with a weight.
    Linear(LinearRole),
    /// The product whose result are the logits of the experts.
    Router,
    /// A product of an expert.
    Expert(u16, LinearRole),
    /// Attention itself.
    Attention,
    /// A short convolution itself, or the one of a gated delta rule.
    ShortConv,
    /// A gated delta rule itself.
    GatedDelta,
    /// The residual stream after attention.
    AttnResidual,
    /// The MLP's activation.
    Activation,
    /// The residual stream after the MLP.
    MlpResidual,
    /// The language-model head.
    Head,
}

impl ModuleOp {
    /// The operation whose fused tensor contains this one's.
    pub(super) fn fused(self, activation: Activation) -> Self {
        match self {
            Self::Linear(role) => Self::Linear(role.fused(activation)),
            Self::Expert(expert, role) => Self::Expert(expert, role.fused(activation)),
            other => other,
        }
    }

    /// Whether its inputs and outputs have a row for each token.
    pub(in crate::engine::model) const fn has_tokens(self) -> bool {
        !matches!(self, Self::Expert(..))
    }
}

/// The address of an operation in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModuleId {
    /// The index of its block; `None` outside the blocks.
    pub block: Option<usize>,
    /// Its operation.
    pub op: ModuleOp,
}

impl ModuleId {
    /// A module outside the blocks.
    pub const fn global(op: ModuleOp) -> Self {
        Self { block: None, op }
    }

    /// A module of block `block`.
    pub const fn in_block(block: usize, op: ModuleOp) -> Self {
        Self { block: Some(block), op }
    }

    /// The unit that shares its compute type.
    pub fn unit(self) -> PrecisionUnit {
        self.block.map_or(PrecisionUnit::NonBlock, PrecisionUnit::Block)
    }
}
