//! Hooks: code that is called with tensors right after a pass has computed them, in order of computation.

use super::spec::Layer;
use candle_core::{Result, Tensor};

/// A tensor of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Its output; a row for each token.
    Output,
    /// The output `x·Aᵀ` of its adapter's first factor, one row per token.
    LowRank,
    /// The gradient of that; a row for each token.
    LowRankGradient,
    /// The gradient of that; a row for each token.
    OutputGradient,
    /// The gradient of its input; a row for each token.
    InputGradient,
    /// The gradient of its weight.
    WeightGradient,
    /// The gradient of its bias.
    BiasGradient,
}

impl Part {
    /// Whether the forward pass computes it.
    pub const fn is_forward(self) -> bool {
        matches!(self, Self::Output | Self::LowRank)
    }

    /// Whether its rows are tokens.
    pub const fn has_tokens(self) -> bool {
        !matches!(self, Self::WeightGradient | Self::BiasGradient)
    }

    /// Its name in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Output => "output",
            Self::LowRank => "adapter",
            Self::LowRankGradient => "adapter_gradient",
            Self::OutputGradient => "output_gradient",
            Self::InputGradient => "input_gradient",
            Self::WeightGradient => "weight_gradient",
            Self::BiasGradient => "bias_gradient",
        }
    }
}

/// Which tensor a hook is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The layer.
    pub layer: Layer,
    /// The tensor of that layer.
    pub part: Part,
    /// The token of its first row, where rows are tokens: the head computes a tile at a time.
    pub first_token: usize,
}

/// Called with tensors as they are computed. `()` does nothing.
pub trait Hook {
    /// `tensor`, at `place`, does not change before the next call, but may be overwritten later. The pass continues
    /// with even if the hook changes it.
    fn record(&mut self, place: Place, tensor: &Tensor) -> Result<()>;

    /// Whether it reads any tensor. If not, a pass may skip work that only hooks need.
    fn watches(&self) -> bool {
        true
    }
}

impl dyn Hook + '_ {
    /// Records the `part` of `layer` for all tokens, or of its parameters.
    pub(super) fn part(&mut self, layer: Layer, part: Part, tensor: &Tensor) -> Result<()> {
        self.record(Place { layer, part, first_token: 0 }, tensor)
    }
}

impl Hook for () {
    fn record(&mut self, _: Place, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn watches(&self) -> bool {
        false
    }
}

impl<H: Hook> Hook for Option<H> {
    fn record(&mut self, place: Place, tensor: &Tensor) -> Result<()> {
        self.as_mut().map_or(Ok(()), |hook| hook.record(place, tensor))
    }

    fn watches(&self) -> bool {
        self.as_ref().is_some_and(Hook::watches)
    }
}

/// Two hooks, called in order; the second receives the first one's result.
impl<A: Hook + ?Sized, B: Hook + ?Sized> Hook for (&mut A, &mut B) {
    fn record(&mut self, place: Place, tensor: &Tensor) -> Result<()> {
        self.0.record(place, tensor)?;
        self.1.record(place, tensor)
    }

    fn watches(&self) -> bool {
        self.0.watches() || self.1.watches()
    }
}
