//! Hooks: code that is called with tensors right after a pass has computed them, in order of computation.

use super::spec::ModuleId;
use crate::precision::PrecisionUnit;
use candle_core::{Result, Tensor};
use strum::IntoStaticStr;

/// The kind of a tensor of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum TensorKind {
    /// Its output; a row for each token.
    Output,
    /// The output `x·Aᵀ` of its adapter's first factor, one row per token.
    #[strum(serialize = "adapter")]
    LoraTerm,
    /// The gradient of `x·Aᵀ`; a row for each token.
    #[strum(serialize = "adapter_gradient")]
    LowRankGradient,
    /// The gradient of the output; a row for each token.
    OutputGradient,
    /// The gradient of its input; a row for each token.
    InputGradient,
    /// The gradient of its weight.
    WeightGradient,
    /// The gradient of its bias.
    BiasGradient,
}

impl TensorKind {
    /// Whether the forward pass computes it.
    pub const fn is_forward(self) -> bool {
        matches!(self, Self::Output | Self::LoraTerm)
    }

    /// Whether its rows are tokens.
    pub const fn has_tokens(self) -> bool {
        !matches!(self, Self::WeightGradient | Self::BiasGradient)
    }

    /// Its name in logs.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The identity of the tensor that a hook is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookPoint {
    /// The layer.
    pub layer: ModuleId,
    /// The tensor of that layer.
    pub kind: TensorKind,
    /// The token of the first row, if rows are tokens; the head computes a tile at a time. `None` for rows of experts.
    pub first_token: Option<usize>,
}

/// Called with tensors as they are computed. `()` does nothing.
pub trait Hook {
    /// Receives a tensor, which the pass may overwrite after the next call. The pass continues with the changes that
    /// the hook makes.
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> Result<()>;

    /// Whether the hook reads any tensor. If not, a pass may skip work that only hooks need.
    fn is_active(&self) -> bool {
        true
    }

    /// Called when the backward pass has written all gradients of a block.
    fn complete(&mut self, _block: PrecisionUnit) -> Result<()> {
        Ok(())
    }
}

impl dyn Hook + '_ {
    /// Records a tensor of `layer` that has all tokens, or belongs to its parameters.
    pub(super) fn record_whole(&mut self, layer: ModuleId, kind: TensorKind, tensor: &Tensor) -> Result<()> {
        let first_token = layer.op.has_tokens().then_some(0);
        self.record(HookPoint { layer, kind, first_token }, tensor)
    }
}

impl Hook for () {
    fn record(&mut self, _: HookPoint, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn is_active(&self) -> bool {
        false
    }
}

impl<H: Hook> Hook for Option<H> {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> Result<()> {
        self.as_mut().map_or(Ok(()), |hook| hook.record(point, tensor))
    }

    fn is_active(&self) -> bool {
        self.as_ref().is_some_and(Hook::is_active)
    }

    fn complete(&mut self, block: PrecisionUnit) -> Result<()> {
        self.as_mut().map_or(Ok(()), |hook| hook.complete(block))
    }
}

/// Two hooks, called in order; the second receives the first one's result.
impl<A: Hook + ?Sized, B: Hook + ?Sized> Hook for (&mut A, &mut B) {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> Result<()> {
        self.0.record(point, tensor)?;
        self.1.record(point, tensor)
    }

    fn is_active(&self) -> bool {
        self.0.is_active() || self.1.is_active()
    }

    fn complete(&mut self, block: PrecisionUnit) -> Result<()> {
        self.0.complete(block)?;
        self.1.complete(block)
    }
}
