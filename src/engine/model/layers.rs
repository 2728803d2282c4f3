//! The layers with parameters. A layer knows which tensors are its own; its `forward` writes what its `backward` needs into
//! buffers that the caller keeps, and its `backward` writes its parameters' gradients.

use super::hook::{Hook, Part};
use super::parameters::Parameters;
use super::spec::{Layer, ModelSpec};
use crate::engine::kernels::columns::{Columns, Store};
use crate::engine::kernels::{Kernels, NormSettings, Normed, WeightLayout};
use candle_core::{DType, Result, Tensor, bail};

/// The index of a layer's weight or bias among the packs of tensors.
pub(super) fn pack_of(parameters: &Parameters, layer: Layer, bias: bool) -> Result<usize> {
    match parameters.find_pack(layer, bias) {
        Some(index) => Ok(index),
        None => bail!("the model has no parameters for {layer:?}"),
    }
}

/// A normalisation.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormLayer {
    layer: Layer,
    settings: NormSettings,
    weight: usize,
    bias: Option<usize>,
}

impl NormLayer {
    /// The norm at `layer`.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: Layer) -> Result<Self> {
        let settings = NormSettings { norm: spec.norm, eps: spec.norm_eps as f32 };
        let weight = pack_of(parameters, layer, false)?;
        Ok(Self { layer, settings, weight, bias: parameters.find_pack(layer, true) })
    }

    /// Normalises the rows of `x [N, D]` into `normed`.
    pub(super) fn forward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        normed: &Normed,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let bias = self.bias.map(|bias| weights.pack(bias));
        kernels.norm(self.settings, x, weights.pack(self.weight), bias, normed)?;
        hook.part(self.layer, Part::Output, &normed.out)
    }

    /// Adds to `dx` the gradient with respect to `x`, or writes it there, given that of the output, `dy`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, what computes it, and the hook")]
    pub(super) fn backward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        normed: &Normed,
        dy: &Tensor,
        (dx, store): (&Tensor, Store),
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let (dweight, dbias) = (grads.pack(self.weight), self.bias.map(|bias| grads.pack(bias)));
        kernels.norm_backward(self.settings, dy, x, weights.pack(self.weight), normed, (dx, store), dweight, dbias)?;
        hook.part(self.layer, Part::WeightGradient, dweight)?;
        if let Some(dbias) = dbias {
            hook.part(self.layer, Part::BiasGradient, dbias)?;
        }
        hook.part(self.layer, Part::InputGradient, dx)
    }
}

impl NormLayer {
    /// Normalises each head in the columns `x` into the columns `y`.
    pub(super) fn forward_heads(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: Columns<'_>,
        (y, rstd): (Columns<'_>, &Tensor),
        hook: &mut dyn Hook,
    ) -> Result<()> {
        kernels.head_norm(self.settings, x, weights.pack(self.weight), y, rstd)?;
        hook.part(self.layer, Part::Output, y.tensor())
    }

    /// Writes the gradients of the weight and of `x`, given that of the output, `dy`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, what computes it, and the hook")]
    pub(super) fn backward_heads(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: Columns<'_>,
        rstd: &Tensor,
        dy: Columns<'_>,
        dx: Columns<'_>,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let dweight = grads.pack(self.weight);
        kernels.head_norm_backward(self.settings, dy, x, weights.pack(self.weight), rstd, dx, dweight)?;
        hook.part(self.layer, Part::WeightGradient, dweight)
    }
}

/// A fully connected layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    layer: Layer,
    layout: WeightLayout,
    weight: usize,
    bias: Option<usize>,
}

impl Linear {
    /// The product at `layer`.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: Layer) -> Result<Self> {
        let weight = pack_of(parameters, layer, false)?;
        Ok(Self { layer, layout: spec.weight_layout, weight, bias: parameters.find_pack(layer, true) })
    }

    /// The type of its weight.
    pub(super) fn dtype(&self, weights: &Parameters) -> DType {
        weights.pack(self.weight).dtype()
    }

    /// Where it stands.
    pub(super) const fn layer(&self) -> Layer {
        self.layer
    }

    /// `y = x · weight + bias`.
    pub(super) fn forward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        y: &Tensor,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let bias = self.bias.map(|bias| weights.pack(bias));
        kernels.linear(self.layout, x, weights.pack(self.weight), bias, y)?;
        hook.part(self.layer, Part::Output, y)
    }

    /// Writes the gradients of weight, bias and `x`, given that of the output, `dy`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, what computes it, and the hook")]
    pub(super) fn backward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let (dweight, dbias) = (grads.pack(self.weight), self.bias.map(|bias| grads.pack(bias)));
        kernels.linear_weight_gradient(self.layout, x, dy, dweight, dbias)?;
        hook.part(self.layer, Part::WeightGradient, dweight)?;
        if let Some(dbias) = dbias {
            hook.part(self.layer, Part::BiasGradient, dbias)?;
        }
        kernels.linear_input_gradient(self.layout, dy, weights.pack(self.weight), dx)?;
        hook.part(self.layer, Part::InputGradient, dx)
    }
}
