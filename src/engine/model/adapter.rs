//! A product's adapters: low-rank products added to the frozen product.
//!
//! The first factors of layers that share a product (for example queries and values) are stacked in one tensor, so that
//! their input is multiplied once. Their second factors also form one tensor, with zeros for outputs that a layer does
//! not have, so that the kernels can add the low-rank product to the frozen one before they round.

use super::dora::{self, MagnitudeScale};
use super::hook::TensorKind;
use super::layers::{Context, fused_param};
use super::lora::{Lora, columns, dropout_site, parts};
use super::parameters::{ParamRef, Parameters};
use super::spec::{ModelSpec, ModuleId, ModuleOp, ParamRole};
use crate::engine::kernels::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::engine::kernels::view::AllocFn;
use crate::engine::kernels::{LoraTerm, WeightLayout, op};
use candle_core::{DType, Error, Result, Tensor};
use std::ops::Range;

#[derive(Clone, Debug)]
pub(super) struct Adapter {
    layer: ModuleId,
    layout: WeightLayout,
    weight: ParamRef,
    bias: Option<ParamRef>,
    /// `[members · r, in]`.
    a: ParamRef,
    /// The index of the expert whose factors these are in those of all experts.
    expert: Option<usize>,
    members: Vec<LoraModule>,
    /// The members' outputs; empty if the only member has all outputs.
    out_slices: Vec<Range<usize>>,
    /// Outputs of the product.
    outputs: usize,
    /// The column offset of this adapter's `x·Aᵀ` in the block's buffer.
    a_offset: usize,
    r: usize,
    scale: f32,
    dropout: f64,
    site: usize,
}

/// The adapter of one linear layer of the product.
#[derive(Clone, Debug)]
pub(super) struct LoraModule {
    /// `[out, r]`.
    pub(super) b: ParamRef,
    /// Its outputs among those of the product.
    pub(super) outputs: Range<usize>,
    /// DoRA's magnitudes, `[out]`.
    pub(super) magnitude: Option<ParamRef>,
}

/// The buffers of a block's adapters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AdapterPass<'a> {
    /// The scratch buffers of the layer's compute dtype; `None` if the model has no adapters.
    pub(super) buffers: Option<&'a AdapterBuffers>,
    /// `x·Aᵀ` of the block's adapters, `[N · total_rank]`.
    pub(super) a_out: Option<&'a Tensor>,
    /// The first row of the current expert among those of all experts, and the number of tokens.
    pub(super) routed: Option<(usize, usize)>,
}

/// Scratch buffers that the adapters of one compute dtype share.
#[derive(Clone, Debug)]
pub(super) struct AdapterBuffers<T = Tensor> {
    /// The gradient of `x·Aᵀ`, with the columns of the widest product.
    a_out_grad: Option<T>,
    /// The second factors of a product as one, for the largest product with several parts.
    factor: Option<T>,
    /// The input after dropout, and its gradient.
    dropped: Option<[T; 2]>,
    /// DoRA: the product's output before scaling by the magnitudes, and the gradient of that output.
    output: Option<T>,
}

/// Columns between the factors of the adapters of any block.
pub(super) fn total_rank(spec: &ModelSpec) -> usize {
    let Some(lora) = &spec.lora else { return 0 };
    let mut blocks = vec![0; spec.num_layers];
    for layer in &lora.targets {
        if let Some(block) = layer.block.and_then(|block| blocks.get_mut(block)) {
            *block += columns(spec, lora, *layer);
        }
    }
    blocks.into_iter().max().unwrap_or(0)
}

impl<T> AdapterBuffers<T> {
    /// Buffers for `tokens` rows, or none if `spec` has no adapters.
    pub(super) fn alloc(
        spec: &ModelSpec,
        tokens: usize,
        compute: DType,
        train: bool,
        allocate: AllocFn<'_, T>,
    ) -> Result<Option<Self>> {
        let Some(lora) = &spec.lora else { return Ok(None) };
        let rows = |columns: usize| allocate(&[tokens * columns], compute);
        let mut fused: Vec<_> = spec.fused_products().into_values().collect();
        fused.retain(|product| product.members > 0);
        let members = fused.iter().map(|product| product.members).max().unwrap_or(1);
        let joined = fused.iter().filter(|product| product.parts > 1);
        let joined = joined.map(|product| product.members * product.outputs).max();
        let [mixer_input, mixer_output] = spec.mixer_widths(None);
        let widest = [spec.hidden_size, mixer_output, spec.intermediate_size].into_iter().max().unwrap_or(0);
        let outputs = [mixer_input, spec.up_width(), spec.hidden_size].into_iter().max().unwrap_or(0);
        let dropped = train && lora.dropout > 0.0;
        Ok(Some(Self {
            a_out_grad: train.then(|| rows(members * lora.r)).transpose()?,
            factor: joined.map(|elements| allocate(&[elements * lora.r], compute)).transpose()?,
            dropped: if dropped { Some([rows(widest)?, rows(widest)?]) } else { None },
            output: (train && lora.dora).then(|| rows(outputs)).transpose()?,
        }))
    }
}

impl<'a> AdapterPass<'a> {
    fn buffers(self) -> Result<&'a AdapterBuffers> {
        self.buffers.ok_or_else(|| Error::msg("this workspace has no buffers for adapters"))
    }
}

/// The first `rows` × `columns` elements of a buffer as a matrix.
fn matrix(buffer: Option<&Tensor>, rows: usize, columns: usize) -> Result<Tensor> {
    let buffer = buffer.ok_or_else(|| Error::msg("this workspace has no buffers for adapters in this pass"))?;
    buffer.narrow(0, 0, rows * columns)?.reshape((rows, columns))
}

impl Adapter {
    /// The adapters of the product `layer`, if it has any.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: ModuleId) -> Result<Option<Self>> {
        let Some(lora) = &spec.lora else { return Ok(None) };
        let owner = spec.adapter_layer(layer);
        let Some(a) = parameters.find_fused(owner, ParamRole::LoraA) else { return Ok(None) };
        let parts = parts(spec, owner);
        let outputs = parts.iter().map(|(_, part)| part.end).max().unwrap_or(0);
        let members: Vec<_> = parts.into_iter().filter(|(layer, _)| lora.targets.contains(layer)).collect();
        let out_slices = members.iter().map(|(_, part)| part.clone()).filter(|part| part.len() < outputs);
        let member = |(layer, outputs): (ModuleId, Range<usize>)| {
            Ok(LoraModule {
                b: fused_param(parameters, layer, ParamRole::LoraB)?,
                outputs,
                magnitude: parameters.find_fused(layer, ParamRole::Magnitude),
            })
        };
        let adapted = spec.adaptable_layers().into_iter().filter(|it| lora.targets.contains(&it.layer));
        let before = adapted.filter(|it| it.fused_into.block == owner.block && it.fused_into < owner);
        let Lora { r, dropout, .. } = *lora;
        Ok(Some(Self {
            layer,
            layout: spec.layout_of(layer.op),
            weight: fused_param(parameters, layer, ParamRole::Weight)?,
            bias: parameters.find_fused(layer, ParamRole::Bias),
            a,
            expert: if let ModuleOp::Expert(expert, _) = layer.op { Some(expert.into()) } else { None },
            out_slices: out_slices.collect(),
            members: members.into_iter().map(member).collect::<Result<_>>()?,
            outputs,
            a_offset: before.map(|it| columns(spec, lora, it.layer)).sum(),
            r,
            scale: lora.scale() as f32,
            dropout,
            site: dropout_site(layer),
        }))
    }

    /// Whether DoRA scales the product's output.
    fn is_dora(&self) -> bool {
        self.members.iter().any(|member| member.magnitude.is_some())
    }

    /// Computes the frozen product of `x` plus the output of the adapters.
    pub(super) fn forward(&self, cx: &mut Context<'_>, x: &Tensor, y: &Tensor) -> Result<()> {
        let a_out = self.forward_a(cx, x)?;
        let bias = self.bias.map(|bias| cx.weights.fused(bias));
        self.product(cx, x, &a_out, bias, y)?;
        match self.magnitude_scale(cx)? {
            Some(magnitude_scale) => magnitude_scale.apply(y, bias),
            None => Ok(()),
        }
    }

    /// Adds the output of the adapter to `y`, which is FP32.
    pub(super) fn add_to_fp32(&self, cx: &mut Context<'_>, x: &Tensor, y: &Tensor) -> Result<()> {
        let a_out = self.forward_a(cx, x)?;
        let factor = self.factor(cx)?;
        let (a, b) = (MatmulOperand::all(&a_out)?, MatmulOperand::transpose_of(&factor)?);
        op::Matmul { a, b, alpha: self.scale, c: ColumnSlice::all(y)?, mode: WriteMode::Accumulate }.run(cx.kernels)
    }

    /// Computes `dropout(x) · Aᵀ`.
    pub(super) fn forward_a(&self, cx: &mut Context<'_>, x: &Tensor) -> Result<Tensor> {
        let input = self.dropped(cx, x)?;
        let a_out = self.a_out(cx, x.dim(0)?)?;
        let a = self.a(cx.weights.fused(self.a))?;
        cx.product(MatmulOperand::all(&input)?, MatmulOperand::transpose_of(&a)?, 1.0, ColumnSlice::all(&a_out)?)?;
        cx.hook.record_whole(self.layer, TensorKind::LoraTerm, &a_out)?;
        Ok(a_out)
    }

    /// `y = x · weight + bias + scale · a_out · Bᵀ`.
    fn product(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        a_out: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<()> {
        let factor = self.factor(cx)?;
        let factor = MatmulOperand::transpose_of(&factor)?;
        let shares = &self.out_slices[..];
        let low_rank = LoraTerm { low: a_out, factor, alpha: self.scale, shares };
        let weight = cx.weights.weight(self.weight)?;
        op::Linear { layout: weight.layout(self.layout), x, weight: &weight, bias, low_rank: Some(low_rank), y }
            .run(cx.kernels)
    }

    /// The second factors as one, `[outputs, members · r]`.
    fn factor(&self, cx: &Context<'_>) -> Result<Tensor> {
        if let (true, [member]) = (self.out_slices.is_empty(), &self.members[..]) {
            return self.b(member, cx.weights.fused(member.b));
        }
        let factor = matrix(cx.adapters.buffers()?.factor.as_ref(), self.outputs, self.members.len() * self.r)?;
        op::Zero { x: &factor }.run(cx.kernels)?;
        for (i, member) in self.members.iter().enumerate() {
            let rows = factor.narrow(0, member.outputs.start, member.outputs.len())?;
            rows.slice_set(cx.weights.fused(member.b), 1, i * self.r)?;
        }
        Ok(factor)
    }

    /// Writes the gradient of `x` to `dx`, given the output gradient `dy`. With DoRA it returns the scale.
    pub(super) fn backward_input(
        &self,
        cx: &mut Context<'_>,
        dy: &Tensor,
        dx: &Tensor,
    ) -> Result<Option<MagnitudeScale>> {
        let magnitude_scale = self.magnitude_scale(cx)?;
        let rows = dy.dim(0)?;
        let dy = self.grad_before_scaling(cx, magnitude_scale.as_ref(), dy)?;
        let a_out_grad = self.a_out_grad(cx, rows)?;
        for (i, member) in self.members.iter().enumerate() {
            let dy = MatmulOperand::plain(ColumnSlice::new(&dy, member.outputs.clone())?);
            let b = self.b(member, cx.weights.fused(member.b))?;
            cx.product(dy, MatmulOperand::all(&b)?, self.scale, ColumnSlice::new(&a_out_grad, self.columns(i))?)?;
        }
        cx.hook.record_whole(self.layer, TensorKind::LowRankGradient, &a_out_grad)?;
        let weight = cx.weights.weight(self.weight)?;
        let a = self.a(cx.weights.fused(self.a))?;
        let a = MatmulOperand::all(&a)?;
        let layout = weight.layout(self.layout).transposed();
        let Some(dropout) = cx.mode.dropout(self.dropout, self.site) else {
            let low_rank = LoraTerm { low: &a_out_grad, factor: a, alpha: 1.0, shares: &[] };
            op::Linear { layout, x: &dy, weight: &weight, bias: None, low_rank: Some(low_rank), y: dx }
                .run(cx.kernels)?;
            return Ok(magnitude_scale);
        };
        op::Linear { layout, x: &dy, weight: &weight, bias: None, low_rank: None, y: dx }.run(cx.kernels)?;
        let buffers = cx.adapters.buffers()?.dropped.as_ref();
        let [through_dropout, before] = [buffers.map(|buffers| &buffers[0]), buffers.map(|buffers| &buffers[1])];
        let (through_dropout, before) = (matrix(through_dropout, rows, dx.dim(1)?)?, matrix(before, rows, dx.dim(1)?)?);
        cx.product(MatmulOperand::all(&a_out_grad)?, a, 1.0, ColumnSlice::all(&before)?)?;
        op::Copy { x: &before, dropout: Some(dropout), out: &through_dropout }.run(cx.kernels)?;
        op::Accumulate { x: &through_dropout, out: dx, inner: &[] }.run(cx.kernels)?;
        Ok(magnitude_scale)
    }

    /// Writes the gradients of the factors and the magnitudes, after [`Self::backward_input`] of the same `dy`.
    pub(super) fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        dy: &Tensor,
        magnitude_scale: Option<&MagnitudeScale>,
    ) -> Result<()> {
        let rows = x.dim(0)?;
        let (a_out, a_out_grad) = (self.a_out(cx, rows)?, self.a_out_grad(cx, rows)?);
        if let Some(magnitude_scale) = magnitude_scale {
            let output = matrix(cx.adapters.buffers()?.output.as_ref(), rows, self.outputs)?;
            self.product(cx, x, &a_out, None, &output)?;
            for (i, member) in self.members.iter().enumerate() {
                if let Some(dmagnitude) = member.magnitude.and_then(|param| cx.grad(param)) {
                    magnitude_scale.gradient(i, dy, &output, dmagnitude)?;
                    cx.hook.record_whole(self.layer, TensorKind::WeightGradient, dmagnitude)?;
                }
            }
        }
        let dy = self.grad_before_scaling(cx, magnitude_scale, dy)?;
        for (i, member) in self.members.iter().enumerate() {
            if let Some(db) = cx.grad(member.b) {
                let db = self.b(member, db)?;
                let dy = MatmulOperand::transposed(ColumnSlice::new(&dy, member.outputs.clone())?);
                let a_out = MatmulOperand::plain(ColumnSlice::new(&a_out, self.columns(i))?);
                cx.product(dy, a_out, self.scale, ColumnSlice::all(&db)?)?;
                cx.hook.record_whole(self.layer, TensorKind::WeightGradient, &db)?;
            }
        }
        let Some(da) = cx.grad(self.a) else { return Ok(()) };
        let da = self.a(da)?;
        let input = self.dropped(cx, x)?;
        let (a_out_grad, input) = (MatmulOperand::transpose_of(&a_out_grad)?, MatmulOperand::all(&input)?);
        cx.product(a_out_grad, input, 1.0, ColumnSlice::all(&da)?)?;
        cx.hook.record_whole(self.layer, TensorKind::WeightGradient, &da)
    }

    /// Writes the gradients of the factors for an input without rows.
    pub(super) fn zero_gradients(&self, cx: &mut Context<'_>) -> Result<()> {
        let a = cx.grad(self.a).map(|da| self.a(da));
        let b = self.members.iter().filter_map(|member| cx.grad(member.b).map(|db| self.b(member, db)));
        for x in a.into_iter().chain(b).collect::<Result<Vec<_>>>()? {
            op::Zero { x: &x }.run(cx.kernels)?;
            cx.hook.record_whole(self.layer, TensorKind::WeightGradient, &x)?;
        }
        Ok(())
    }

    /// The first factors in `stored`, a parameter or its gradient.
    fn a(&self, stored: &Tensor) -> Result<Tensor> {
        self.part(stored, self.members.len() * self.r)
    }

    /// The second factor of `member` in `stored`, a parameter or its gradient.
    fn b(&self, member: &LoraModule, stored: &Tensor) -> Result<Tensor> {
        self.part(stored, member.outputs.len())
    }

    /// The `rows` of this expert in the factor of all experts; the whole factor outside of experts.
    fn part(&self, stored: &Tensor, rows: usize) -> Result<Tensor> {
        self.expert.map_or_else(|| Ok(stored.clone()), |expert| stored.narrow(0, expert * rows, rows))
    }

    /// The gradient of the product's output before `magnitude_scale` scales it.
    fn grad_before_scaling(
        &self,
        cx: &Context<'_>,
        magnitude_scale: Option<&MagnitudeScale>,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let Some(magnitude_scale) = magnitude_scale else { return Ok(dy.clone()) };
        let before = matrix(cx.adapters.buffers()?.output.as_ref(), dy.dim(0)?, self.outputs)?;
        cx.kernels.copy(dy, &before)?;
        magnitude_scale.apply(&before, None)?;
        Ok(before)
    }

    /// `x` after dropout.
    fn dropped(&self, cx: &Context<'_>, x: &Tensor) -> Result<Tensor> {
        let Some(dropout) = cx.mode.dropout(self.dropout, self.site) else { return Ok(x.clone()) };
        let (rows, columns) = x.dims2()?;
        let dropped = matrix(cx.adapters.buffers()?.dropped.as_ref().map(|buffers| &buffers[0]), rows, columns)?;
        op::Copy { x, dropout: Some(dropout), out: &dropped }.run(cx.kernels)?;
        Ok(dropped)
    }

    /// The columns of member `i` between the factors.
    fn columns(&self, i: usize) -> Range<usize> {
        i * self.r..(i + 1) * self.r
    }

    /// `x·Aᵀ` of all members, `[rows, members · r]`.
    fn a_out(&self, cx: &Context<'_>, rows: usize) -> Result<Tensor> {
        let (first, tokens) = cx.adapters.routed.unwrap_or((0, rows));
        let start = tokens * self.a_offset + first * self.r;
        let rest = cx.adapters.a_out.map(|a_out| a_out.narrow(0, start, rows * self.members.len() * self.r));
        matrix(rest.transpose()?.as_ref(), rows, self.members.len() * self.r)
    }

    /// The gradient of [`Self::a_out`].
    fn a_out_grad(&self, cx: &Context<'_>, rows: usize) -> Result<Tensor> {
        matrix(cx.adapters.buffers()?.a_out_grad.as_ref(), rows, self.members.len() * self.r)
    }

    /// DoRA's scale of the output, if any.
    fn magnitude_scale(&self, cx: &Context<'_>) -> Result<Option<MagnitudeScale>> {
        if !self.is_dora() {
            return Ok(None);
        }
        let weight = cx.weights.weight(self.weight)?;
        let layout = weight.layout(self.layout);
        dora::magnitude_scale(cx, &self.members, &weight, layout, cx.weights.fused(self.a), self.scale).map(Some)
    }
}
