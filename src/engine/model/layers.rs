//! The layers with parameters. A layer knows its tensors; `forward` writes what `backward` needs into the caller's buffers, and
//! `backward` writes the gradients of its parameters.

use super::adapter::{Adapter, AdapterPass};
use super::dora::Lengths;
use super::hook::{Hook, Part};
use super::parameters::{Parameters, Slot};
use super::spec::{Layer, ModelSpec, ParamRole};
use crate::engine::kernels::columns::{Columns, Store};
use crate::engine::kernels::{Kernels, NormGradients, NormSettings, Normed, WeightLayout};
use candle_core::{DType, Result, Tensor, bail};

/// Where what is `role` to a layer is among the packs of tensors.
pub(super) fn pack_of(parameters: &Parameters, layer: Layer, role: ParamRole) -> Result<Slot> {
    match parameters.find_pack(layer, role) {
        Some(slot) => Ok(slot),
        None => bail!("the model has no {role:?} for {layer:?}"),
    }
}

/// A normalisation.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormLayer {
    layer: Layer,
    settings: NormSettings,
    weight: Slot,
    bias: Option<Slot>,
}

impl NormLayer {
    /// The norm at `layer`.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: Layer) -> Result<Self> {
        let settings = NormSettings { norm: spec.norm, eps: spec.norm_eps as f32 };
        let weight = pack_of(parameters, layer, ParamRole::Weight)?;
        Ok(Self { layer, settings, weight, bias: parameters.find_pack(layer, ParamRole::Bias) })
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

    /// Adds the gradient with respect to `x` to `dx`, or overwrites it, given the output's gradient `dy`.
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
        let bias = self.bias.and_then(|bias| grads.own(bias));
        let gradients = grads.own(self.weight).map(|weight| NormGradients { weight, bias });
        kernels.norm_backward(self.settings, dy, x, weights.pack(self.weight), normed, (dx, store), gradients)?;
        self.record_gradients(grads, hook)?;
        hook.part(self.layer, Part::InputGradient, dx)
    }

    /// Shows the gradients of its parameters, unless they are frozen.
    fn record_gradients(&self, grads: &Parameters, hook: &mut dyn Hook) -> Result<()> {
        record_gradients(self.layer, self.weight, self.bias, grads, hook)
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
        let weight = weights.pack(self.weight);
        kernels.head_norm_backward(self.settings, dy, x, weight, rstd, dx, grads.own(self.weight))?;
        self.record_gradients(grads, hook)
    }
}

/// Shows the gradients of a layer's weight and bias, unless they are frozen.
fn record_gradients(
    layer: Layer,
    weight: Slot,
    bias: Option<Slot>,
    grads: &Parameters,
    hook: &mut dyn Hook,
) -> Result<()> {
    if let Some(dweight) = grads.own(weight) {
        hook.part(layer, Part::WeightGradient, dweight)?;
    }
    match bias.and_then(|bias| grads.own(bias)) {
        Some(dbias) => hook.part(layer, Part::BiasGradient, dbias),
        None => Ok(()),
    }
}

/// A fully connected layer, with an adapter or without.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    layer: Layer,
    layout: WeightLayout,
    weight: Slot,
    bias: Option<Slot>,
    adapter: Option<Adapter>,
}

impl Linear {
    /// The product at `layer`.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: Layer) -> Result<Self> {
        let weight = pack_of(parameters, layer, ParamRole::Weight)?;
        let bias = parameters.find_pack(layer, ParamRole::Bias);
        Ok(Self { layer, layout: spec.weight_layout, weight, bias, adapter: Adapter::new(spec, parameters, layer)? })
    }

    /// The type of its weight.
    pub(super) fn dtype(&self, weights: &Parameters) -> DType {
        weights.pack(self.weight).dtype()
    }

    /// Where it stands.
    pub(super) const fn layer(&self) -> Layer {
        self.layer
    }

    /// `y = x · weight + bias`, and what the adapter adds.
    pub(super) fn forward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        y: &Tensor,
        adapters: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        if let Some(adapter) = &self.adapter {
            adapter.forward(kernels, weights, x, y, adapters, hook)?;
        } else {
            let bias = self.bias.map(|bias| weights.pack(bias));
            let weight = weights.operand(self.weight)?;
            kernels.linear(weight.layout(self.layout), x, &weight, bias, y)?;
        }
        hook.part(self.layer, Part::Output, y)
    }

    /// Computes what the backward pass needs of [`Self::forward`] beside its operands.
    pub(super) fn forward_again(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        adapters: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let Some(adapter) = &self.adapter else { return Ok(()) };
        adapter.forward_low(kernels, weights, x, adapters, hook).map(drop)
    }

    /// Writes the gradient of `x`, given that of the output, `dy`. What this returns belongs into
    /// [`Self::backward_weight`], which must be next to use the adapters' buffers.
    pub(super) fn backward_input(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        dy: &Tensor,
        dx: &Tensor,
        adapters: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<Option<Lengths>> {
        let lengths = if let Some(adapter) = &self.adapter {
            adapter.backward_input(kernels, weights, dy, dx, adapters, hook)?
        } else {
            let weight = weights.operand(self.weight)?;
            kernels.linear_input_gradient(weight.layout(self.layout), dy, &weight, dx)?;
            None
        };
        hook.part(self.layer, Part::InputGradient, dx)?;
        Ok(lengths)
    }

    /// Writes the gradients of weight and bias, and of the adapter's, given the input and the gradient of the output, `dy`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, what computes it, and the hook")]
    pub(super) fn backward_weight(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        lengths: Option<&Lengths>,
        grads: &Parameters,
        adapters: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        if let Some(dweight) = grads.own(self.weight) {
            let dbias = self.bias.and_then(|bias| grads.own(bias));
            kernels.linear_weight_gradient(self.layout, x, dy, dweight, dbias)?;
        }
        record_gradients(self.layer, self.weight, self.bias, grads, hook)?;
        match &self.adapter {
            Some(adapter) => adapter.backward_weight(kernels, weights, x, dy, lengths, grads, adapters, hook),
            None => Ok(()),
        }
    }

    /// [`Self::backward_input`], then [`Self::backward_weight`].
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, what computes it, and the hook")]
    pub(super) fn backward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
        adapters: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let lengths = self.backward_input(kernels, weights, dy, dx, adapters, hook)?;
        self.backward_weight(kernels, weights, x, dy, lengths.as_ref(), grads, adapters, hook)
    }
}
