//! The layers with parameters. A layer knows its tensors; `forward` writes what `backward` needs into the caller's buffers, and
//! `backward` writes the gradients of its parameters.

use super::adapter::{Adapter, AdapterPass};
use super::decoder::Mode;
use super::dora::Lengths;
use super::hook::{Hook, Part};
use super::parameters::{Parameters, Slot};
use super::spec::{Layer, ModelSpec, ParamRole};
use crate::engine::kernels::columns::{Columns, Factor, WriteMode};
use crate::engine::kernels::{Kernels, NormSettings, Normed, WeightLayout, op};
use candle_core::{DType, Result, Tensor, bail};

/// The arguments that the layers of a pass share.
pub(super) struct Context<'a> {
    pub(super) kernels: &'a dyn Kernels,
    pub(super) weights: &'a Parameters,
    /// The gradients that a backward pass writes.
    pub(super) grads: Option<&'a Parameters>,
    pub(super) mode: Mode,
    pub(super) hook: &'a mut dyn Hook,
}

impl<'a> Context<'a> {
    /// The tensor for a parameter's gradient; `None` if it is frozen.
    pub(super) fn grad(&self, slot: Slot) -> Option<&'a Tensor> {
        self.grads?.own(slot)
    }

    /// `c = alpha · a · b`.
    pub(super) fn product(&self, a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>) -> Result<()> {
        op::Product { a, b, alpha, c, mode: WriteMode::Overwrite }.run(self.kernels)
    }
}

/// Looks up the fused tensor that holds parameter `role` of `layer`.
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
    pub(super) fn forward(&self, cx: &mut Context<'_>, x: &Tensor, normed: &Normed) -> Result<()> {
        let bias = self.bias.map(|bias| cx.weights.pack(bias));
        op::Norm {
            settings: self.settings,
            x: Columns::all(x)?,
            weight: cx.weights.pack(self.weight),
            bias,
            y: Columns::all(&normed.out)?,
            mean: normed.mean.as_ref(),
            rstd: &normed.rstd,
        }
        .run(cx.kernels)?;
        cx.hook.part(self.layer, Part::Output, &normed.out)
    }

    /// Adds the gradient with respect to `x` to `dx`, or overwrites it, given the output's gradient `dy`.
    pub(super) fn backward(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        normed: &Normed,
        dy: &Tensor,
        (dx, mode): (&Tensor, WriteMode),
    ) -> Result<()> {
        let (dy, x, to) = (Columns::all(dy)?, Columns::all(x)?, Columns::all(dx)?);
        let dweight = cx.grad(self.weight);
        op::NormBackward {
            settings: self.settings,
            dy,
            x,
            weight: cx.weights.pack(self.weight),
            mean: normed.mean.as_ref(),
            rstd: &normed.rstd,
            dx: to,
            mode,
            dweight,
            dbias: self.bias.and_then(|bias| cx.grad(bias)),
        }
        .run(cx.kernels)?;
        self.record_gradients(cx)?;
        cx.hook.part(self.layer, Part::InputGradient, dx)
    }

    /// Shows the gradients of its parameters, unless they are frozen.
    fn record_gradients(&self, cx: &mut Context<'_>) -> Result<()> {
        record_gradients(cx, self.layer, self.weight, self.bias)
    }
}

impl NormLayer {
    /// Normalises each head in the columns `x` into the columns `y`.
    pub(super) fn forward_heads(
        &self,
        cx: &mut Context<'_>,
        x: Columns<'_>,
        (y, rstd): (Columns<'_>, &Tensor),
    ) -> Result<()> {
        op::Norm { settings: self.settings, x, weight: cx.weights.pack(self.weight), y, rstd, bias: None, mean: None }
            .run(cx.kernels)?;
        cx.hook.part(self.layer, Part::Output, y.tensor())
    }

    /// Writes the gradients of the weight and of `x`, given the output gradient `dy`.
    pub(super) fn backward_heads(
        &self,
        cx: &mut Context<'_>,
        x: Columns<'_>,
        rstd: &Tensor,
        dy: Columns<'_>,
        dx: Columns<'_>,
    ) -> Result<()> {
        let weight = cx.weights.pack(self.weight);
        op::NormBackward {
            settings: self.settings,
            dy,
            x,
            weight,
            rstd,
            dx,
            dweight: cx.grad(self.weight),
            mode: WriteMode::Overwrite,
            mean: None,
            dbias: None,
        }
        .run(cx.kernels)?;
        self.record_gradients(cx)
    }
}

/// Shows the gradients of a layer's weight and bias, unless they are frozen.
fn record_gradients(cx: &mut Context<'_>, layer: Layer, weight: Slot, bias: Option<Slot>) -> Result<()> {
    if let Some(dweight) = cx.grad(weight) {
        cx.hook.part(layer, Part::WeightGradient, dweight)?;
    }
    match bias.and_then(|bias| cx.grad(bias)) {
        Some(dbias) => cx.hook.part(layer, Part::BiasGradient, dbias),
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

    /// Its address in the model.
    pub(super) const fn layer(&self) -> Layer {
        self.layer
    }

    /// `y = x · weight + bias`, plus the output of the adapter.
    pub(super) fn forward(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        y: &Tensor,
        adapters: AdapterPass<'_>,
    ) -> Result<()> {
        if let Some(adapter) = &self.adapter {
            adapter.forward(cx, x, y, adapters)?;
        } else {
            let bias = self.bias.map(|bias| cx.weights.pack(bias));
            let weight = cx.weights.operand(self.weight)?;
            op::Linear { layout: weight.layout(self.layout), x, weight: &weight, bias, y, low_rank: None }
                .run(cx.kernels)?;
        }
        cx.hook.part(self.layer, Part::Output, y)
    }

    /// Recomputes the intermediate results of [`Self::forward`] that the backward pass reads, except its operands.
    pub(super) fn forward_again(&self, cx: &mut Context<'_>, x: &Tensor, adapters: AdapterPass<'_>) -> Result<()> {
        let Some(adapter) = &self.adapter else { return Ok(()) };
        adapter.forward_low(cx, x, adapters).map(drop)
    }

    /// Writes the gradient of `x`, given the output's gradient `dy`. The result is an argument of
    /// [`Self::backward_weight`], which must be next to use the adapters' buffers.
    pub(super) fn backward_input(
        &self,
        cx: &mut Context<'_>,
        dy: &Tensor,
        dx: &Tensor,
        adapters: AdapterPass<'_>,
    ) -> Result<Option<Lengths>> {
        let lengths = if let Some(adapter) = &self.adapter {
            adapter.backward_input(cx, dy, dx, adapters)?
        } else {
            let weight = cx.weights.operand(self.weight)?;
            op::Linear {
                layout: weight.layout(self.layout).transposed(),
                x: dy,
                weight: &weight,
                bias: None,
                low_rank: None,
                y: dx,
            }
            .run(cx.kernels)?;
            None
        };
        cx.hook.part(self.layer, Part::InputGradient, dx)?;
        Ok(lengths)
    }

    /// Writes the gradients of weight and bias, and of the adapter's, given the input and the gradient of the output, `dy`.
    pub(super) fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        dy: &Tensor,
        lengths: Option<&Lengths>,
        adapters: AdapterPass<'_>,
    ) -> Result<()> {
        if let Some(dweight) = cx.grad(self.weight) {
            let dbias = self.bias.and_then(|bias| cx.grad(bias));
            op::linear_weight_gradient(cx.kernels, self.layout, [x, dy], dweight, dbias)?;
        }
        record_gradients(cx, self.layer, self.weight, self.bias)?;
        match &self.adapter {
            Some(adapter) => adapter.backward_weight(cx, x, dy, lengths, adapters),
            None => Ok(()),
        }
    }

    /// [`Self::backward_input`], then [`Self::backward_weight`].
    pub(super) fn backward(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        adapters: AdapterPass<'_>,
    ) -> Result<()> {
        let lengths = self.backward_input(cx, dy, dx, adapters)?;
        self.backward_weight(cx, x, dy, lengths.as_ref(), adapters)
    }
}
