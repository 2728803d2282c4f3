//! The layers with parameters. A layer holds references to its tensors; `forward` writes what `backward` needs into the
//! caller's buffers, and `backward` writes the gradients of its parameters.

use super::adapter::{Adapter, AdapterPass};
use super::decoder::ForwardMode;
use super::dora::MagnitudeScale;
use super::hook::{Hook, TensorKind};
use super::parameters::{ParamRef, Parameters};
use super::quantized_base::WeightRef;
use super::spec::{ModelSpec, ModuleId, ModuleOp, NormRole, ParamRole};
use crate::engine::kernels::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::engine::kernels::{Kernels, NormOutput, NormSettings, WeightLayout, op};
use candle_core::{DType, Result, Tensor, bail};

/// The arguments that the layers of a pass share.
pub(super) struct Context<'a> {
    pub(super) kernels: &'a dyn Kernels,
    pub(super) weights: &'a Parameters,
    /// The gradients that a backward pass writes.
    pub(super) grads: Option<&'a Parameters>,
    pub(super) mode: ForwardMode,
    /// The buffers of the current block's adapters.
    pub(super) adapters: AdapterPass<'a>,
    pub(super) hook: &'a mut dyn Hook,
}

impl<'a> Context<'a> {
    /// The tensor for a parameter's gradient; `None` if it is frozen.
    pub(super) fn grad(&self, param: ParamRef) -> Option<&'a Tensor> {
        self.grads?.trainable(param)
    }

    /// `c = alpha · a · b`.
    pub(super) fn product(
        &self,
        a: MatmulOperand<'_>,
        b: MatmulOperand<'_>,
        alpha: f32,
        c: ColumnSlice<'_>,
    ) -> Result<()> {
        op::Matmul { a, b, alpha, c, mode: WriteMode::Overwrite }.run(self.kernels)
    }
}

/// Looks up the fused tensor that holds parameter `role` of `layer`.
pub(super) fn fused_param(parameters: &Parameters, layer: ModuleId, role: ParamRole) -> Result<ParamRef> {
    match parameters.find_fused(layer, role) {
        Some(param) => Ok(param),
        None => bail!("the model has no {role:?} for {layer:?}"),
    }
}

/// A normalization, or a copy in the compute type if attention and MLP take the residual stream as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormLayer {
    layer: ModuleId,
    settings: NormSettings,
    weight: Option<ParamRef>,
    bias: Option<ParamRef>,
}

impl NormLayer {
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: ModuleId) -> Result<Self> {
        let (eps, there) = match layer.op {
            ModuleOp::Norm(NormRole::Attention | NormRole::Mlp) => (spec.stream_norm_eps(), spec.pre_norms),
            ModuleOp::Norm(NormRole::Final) => (spec.stream_norm_eps(), true),
            _ => (spec.norm_eps, true),
        };
        let settings = NormSettings { norm: spec.norm, eps: eps as f32 };
        let weight = there.then(|| fused_param(parameters, layer, ParamRole::Weight)).transpose()?;
        Ok(Self { layer, settings, weight, bias: parameters.find_fused(layer, ParamRole::Bias) })
    }

    /// Normalizes the rows of `x [N, D]` into `normed`.
    pub(super) fn forward(&self, cx: &mut Context<'_>, x: &Tensor, normed: &NormOutput) -> Result<()> {
        if self.weight.is_none() {
            cx.kernels.copy(x, &normed.out)?;
            return cx.hook.record_whole(self.layer, TensorKind::Output, &normed.out);
        }
        let y = ColumnSlice::all(&normed.out)?;
        self.forward_columns(cx, ColumnSlice::all(x)?, y, normed.mean.as_ref(), &normed.rstd)
    }

    /// Normalizes the groups of the columns `x`, which are as wide as the weight, into the columns `y`.
    pub(super) fn forward_columns(
        &self,
        cx: &mut Context<'_>,
        x: ColumnSlice<'_>,
        y: ColumnSlice<'_>,
        mean: Option<&Tensor>,
        rstd: &Tensor,
    ) -> Result<()> {
        let weight = cx.weights.fused(self.param()?);
        let bias = self.bias.map(|bias| cx.weights.fused(bias));
        op::Norm { settings: self.settings, x, weight, bias, y, mean, rstd }.run(cx.kernels)?;
        cx.hook.record_whole(self.layer, TensorKind::Output, y.tensor())
    }

    /// Adds the gradient with respect to `x` to `dx`, or overwrites it, given the output's gradient `dy`.
    pub(super) fn backward(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        normed: &NormOutput,
        dy: &Tensor,
        (dx, mode): (&Tensor, WriteMode),
    ) -> Result<()> {
        if self.weight.is_some() {
            let x = ColumnSlice::all(x)?;
            let dy = ColumnSlice::all(dy)?;
            let into = (ColumnSlice::all(dx)?, mode);
            self.backward_columns(cx, x, (normed.mean.as_ref(), &normed.rstd), dy, into)?;
        } else {
            op::Accumulate { x: dy, inner: &[], out: dx }.run(cx.kernels)?;
        }
        cx.hook.record_whole(self.layer, TensorKind::InputGradient, dx)
    }

    /// Writes the gradients of the parameters and of the groups of `x`, given the output gradient `dy`.
    pub(super) fn backward_columns(
        &self,
        cx: &mut Context<'_>,
        x: ColumnSlice<'_>,
        (mean, rstd): (Option<&Tensor>, &Tensor),
        dy: ColumnSlice<'_>,
        (dx, mode): (ColumnSlice<'_>, WriteMode),
    ) -> Result<()> {
        let Self { layer, settings, bias, .. } = *self;
        let param = self.param()?;
        let dbias = bias.and_then(|bias| cx.grad(bias));
        let weight = cx.weights.fused(param);
        let dweight = cx.grad(param);
        op::NormBackward { settings, dy, x, weight, mean, rstd, dx, mode, dweight, dbias }.run(cx.kernels)?;
        record_gradients(cx, layer, param, bias)
    }

    fn param(&self) -> Result<ParamRef> {
        match self.weight {
            Some(weight) => Ok(weight),
            None => bail!("{:?} has no weight", self.layer),
        }
    }
}

/// Shows the gradients of a layer's weight and bias, unless they are frozen.
fn record_gradients(cx: &mut Context<'_>, layer: ModuleId, weight: ParamRef, bias: Option<ParamRef>) -> Result<()> {
    if let Some(dweight) = cx.grad(weight) {
        cx.hook.record_whole(layer, TensorKind::WeightGradient, dweight)?;
    }
    match bias.and_then(|bias| cx.grad(bias)) {
        Some(dbias) => cx.hook.record_whole(layer, TensorKind::BiasGradient, dbias),
        None => Ok(()),
    }
}

/// A fully connected layer, with an adapter or without.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    /// Its address in the model.
    pub(super) layer: ModuleId,
    layout: WeightLayout,
    weight: ParamRef,
    bias: Option<ParamRef>,
    adapter: Option<Box<Adapter>>,
}

impl Linear {
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: ModuleId) -> Result<Self> {
        let weight = fused_param(parameters, layer, ParamRole::Weight)?;
        let bias = parameters.find_fused(layer, ParamRole::Bias);
        let adapter = Adapter::new(spec, parameters, layer)?.map(Box::new);
        Ok(Self { layer, layout: spec.layout_of(layer.op), weight, bias, adapter })
    }

    pub(super) fn dtype(&self, weights: &Parameters) -> DType {
        weights.fused(self.weight).dtype()
    }

    /// `y = x · weight + bias`, plus the output of the adapter.
    pub(super) fn forward(&self, cx: &mut Context<'_>, x: &Tensor, y: &Tensor) -> Result<()> {
        if let Some(adapter) = self.active_adapter(cx) {
            adapter.forward(cx, x, y)?;
        } else {
            let bias = self.bias.map(|bias| cx.weights.fused(bias));
            let weight = cx.weights.weight(self.weight)?;
            op::Linear { layout: weight.layout(self.layout), x, weight: &weight, bias, y, low_rank: None }
                .run(cx.kernels)?;
        }
        cx.hook.record_whole(self.layer, TensorKind::Output, y)
    }

    fn active_adapter(&self, cx: &Context<'_>) -> Option<&Adapter> {
        self.adapter.as_deref().filter(|_| !matches!(cx.mode, ForwardMode::Base))
    }

    /// Computes `x · weight + bias` in FP32 plus the output of the adapter.
    pub(super) fn forward_into_fp32(&self, cx: &mut Context<'_>, x: &Tensor, y: &Tensor) -> Result<()> {
        let weight = cx.weights.weight(self.weight)?;
        let layout = weight.layout(self.layout);
        if let Some(bias) = self.bias {
            let bias = Some(cx.weights.fused(bias));
            op::Linear { layout, x, weight: &weight, bias, y, low_rank: None }.run(cx.kernels)?;
        } else {
            let weight = MatmulOperand::of_weight(&weight, layout)?;
            cx.product(MatmulOperand::all(x)?, weight, 1.0, ColumnSlice::all(y)?)?;
        }
        if let Some(adapter) = self.active_adapter(cx) {
            adapter.add_to_fp32(cx, x, y)?;
        }
        cx.hook.record_whole(self.layer, TensorKind::Output, y)
    }

    /// Recomputes the intermediate results of [`Self::forward`] that the backward pass reads, except its operands.
    pub(super) fn recompute(&self, cx: &mut Context<'_>, x: &Tensor) -> Result<()> {
        let Some(adapter) = &self.adapter else { return Ok(()) };
        adapter.forward_a(cx, x).map(drop)
    }

    /// Writes the gradient of `x`, given the output's gradient `dy`. The result is an argument of
    /// [`Self::backward_weight`], which must be next to use the adapters' buffers.
    pub(super) fn backward_input(
        &self,
        cx: &mut Context<'_>,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<Option<MagnitudeScale>> {
        let magnitude_scale = if let Some(adapter) = &self.adapter {
            adapter.backward_input(cx, dy, dx)?
        } else {
            self.input_gradient(&cx.weights.weight(self.weight)?, dy, dx).run(cx.kernels)?;
            None
        };
        cx.hook.record_whole(self.layer, TensorKind::InputGradient, dx)?;
        Ok(magnitude_scale)
    }

    /// Writes the gradients of weight and bias, and of the adapter's, given the input and the gradient of the output,
    /// `dy`.
    pub(super) fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        dy: &Tensor,
        magnitude_scale: Option<&MagnitudeScale>,
    ) -> Result<()> {
        if let Some(dweight) = cx.grad(self.weight) {
            op::Matmul::weight_gradient(self.layout, [x, dy], dweight)?.run(cx.kernels)?;
        }
        self.backward_bias(cx, dy)?;
        match &self.adapter {
            Some(adapter) => adapter.backward_weight(cx, x, dy, magnitude_scale),
            None => Ok(()),
        }
    }

    /// Writes the gradients of weight and bias, and of the adapter's, for an input without rows.
    pub(super) fn zero_gradients(&self, cx: &mut Context<'_>) -> Result<()> {
        for param in [Some(self.weight), self.bias].into_iter().flatten() {
            if let Some(x) = cx.grad(param) {
                op::Zero { x }.run(cx.kernels)?;
            }
        }
        record_gradients(cx, self.layer, self.weight, self.bias)?;
        self.adapter.as_ref().map_or(Ok(()), |adapter| adapter.zero_gradients(cx))
    }

    /// [`Self::backward_input`] and [`Self::backward_weight`].
    pub(super) fn backward(&self, cx: &mut Context<'_>, x: &Tensor, dy: &Tensor, dx: &Tensor) -> Result<()> {
        if let (None, Some(dweight)) = (&self.adapter, cx.grad(self.weight)) {
            let weight = cx.weights.weight(self.weight)?;
            let dweight = op::Matmul::weight_gradient(self.layout, [x, dy], dweight)?;
            op::run_both([self.input_gradient(&weight, dy, dx).into(), dweight.into()], dx, cx.kernels)?;
            cx.hook.record_whole(self.layer, TensorKind::InputGradient, dx)?;
            return self.backward_bias(cx, dy);
        }
        let magnitude_scale = self.backward_input(cx, dy, dx)?;
        self.backward_weight(cx, x, dy, magnitude_scale.as_ref())
    }

    /// The operation that computes the gradient of the input without an adapter.
    fn input_gradient<'a>(&self, weight: &'a WeightRef<'_>, dy: &'a Tensor, dx: &'a Tensor) -> op::Linear<'a> {
        let layout = weight.layout(self.layout).transposed();
        op::Linear { layout, x: dy, weight, bias: None, low_rank: None, y: dx }
    }

    /// Writes the gradient of the bias, and shows it and the weight's.
    fn backward_bias(&self, cx: &mut Context<'_>, dy: &Tensor) -> Result<()> {
        if let Some(out) = self.bias.and_then(|bias| cx.grad(bias)) {
            op::SumRows { x: dy, out }.run(cx.kernels)?;
        }
        record_gradients(cx, self.layer, self.weight, self.bias)
    }
}
