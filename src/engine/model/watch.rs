//! Seeing what a pass computes, tensor by tensor, in order of computation. The passes are written once, generic over who
//! watches; where nobody does, nothing is left of it.

use candle_core::{Result, Tensor};
use std::fmt;

/// A layer of the model, named as its parameters are: `h.3.mlp.c_fc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The block it stands in, if it stands in one.
    pub block: Option<usize>,
    /// Its name within.
    pub name: &'static str,
}

impl Layer {
    /// A layer outside the blocks.
    pub const fn outer(name: &'static str) -> Self {
        Self { block: None, name }
    }

    /// A layer of block `block`.
    pub const fn inner(block: usize, name: &'static str) -> Self {
        Self { block: Some(block), name }
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            Some(block) => write!(f, "h.{block}.{}", self.name),
            None => f.write_str(self.name),
        }
    }
}

/// What of a layer was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What it makes of its input; a row for each token.
    Output,
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
        matches!(self, Self::Output)
    }

    /// Whether its rows are tokens.
    pub const fn has_tokens(self) -> bool {
        matches!(self, Self::Output | Self::OutputGradient | Self::InputGradient)
    }

    /// Its name in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Output => "output",
            Self::OutputGradient => "output_gradient",
            Self::InputGradient => "input_gradient",
            Self::WeightGradient => "weight_gradient",
            Self::BiasGradient => "bias_gradient",
        }
    }
}

/// Which tensor a watch is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The layer.
    pub layer: Layer,
    /// What of it.
    pub part: Part,
    /// The token its first row belongs to, where rows are tokens: the head computes a tile at a time.
    pub first_token: usize,
}

/// Sees tensors right after they were computed. `()` sees nothing, at no cost.
pub trait Watch {
    /// `tensor`, at `place`, will not change before the next call, but may be overwritten later. What a watch writes into it
    /// is what the pass goes on with.
    fn saw(&mut self, place: Place, tensor: &Tensor) -> Result<()>;

    /// The `part` of `layer` for all tokens, or of its parameters.
    #[inline]
    fn saw_part(&mut self, layer: Layer, part: Part, tensor: &Tensor) -> Result<()> {
        self.saw(Place { layer, part, first_token: 0 }, tensor)
    }
}

impl<W: Watch> Watch for &mut W {
    #[inline]
    fn saw(&mut self, place: Place, tensor: &Tensor) -> Result<()> {
        (**self).saw(place, tensor)
    }
}

/// Sees if there is someone to.
impl<W: Watch> Watch for Option<W> {
    #[inline]
    fn saw(&mut self, place: Place, tensor: &Tensor) -> Result<()> {
        self.as_mut().map_or(Ok(()), |watch| watch.saw(place, tensor))
    }
}

/// Two see one after the other, and the second what the first leaves.
impl<A: Watch, B: Watch> Watch for (A, B) {
    #[inline]
    fn saw(&mut self, place: Place, tensor: &Tensor) -> Result<()> {
        self.0.saw(place, tensor)?;
        self.1.saw(place, tensor)
    }
}

impl Watch for () {
    #[inline]
    fn saw(&mut self, _: Place, _: &Tensor) -> Result<()> {
        Ok(())
    }
}
