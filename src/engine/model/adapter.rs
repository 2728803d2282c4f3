//! A product's adapters: low-rank products added to the frozen product.
//!
//! The first factors of layers that share a product (queries and values, say) are stacked in one pack, so that their
//! input is multiplied once. Their second factors make one as well, with zeros where a layer takes no share in an
//! output, so that the kernels can add the thin product to the frozen one before they round.

use super::dora::{self, Lengths};
use super::hook::Part;
use super::layers::{Context, pack_of};
use super::lora::{Lora, dropout_site, parts};
use super::parameters::{Parameters, Slot};
use super::spec::{Layer, ModelSpec, Op, ParamRole};
use crate::engine::kernels::columns::{Columns, Factor};
use crate::engine::kernels::view::Allocate;
use crate::engine::kernels::{LowRank, WeightLayout, op};
use candle_core::{DType, Result, Tensor, bail};
use std::ops::Range;

/// The adapters of a product.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    layer: Layer,
    layout: WeightLayout,
    weight: Slot,
    bias: Option<Slot>,
    /// `[members · r, in]`.
    a: Slot,
    members: Vec<Member>,
    /// The members' outputs; empty if the only member has all outputs.
    shares: Vec<Range<usize>>,
    /// Outputs of the product.
    outputs: usize,
    /// The column offset of this adapter's `x·Aᵀ` in the block's buffer.
    first_low: usize,
    r: usize,
    scale: f32,
    dropout: f64,
    site: usize,
}

/// A layer's own part of it.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// `[out, r]`.
    pub(super) b: Slot,
    /// Its outputs among those of the product.
    pub(super) outputs: Range<usize>,
    /// DoRA's lengths, `[out]`.
    pub(super) magnitude: Option<Slot>,
}

/// The buffers of an adapter.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdapterPass<'a> {
    /// The scratch buffers of the layer's compute dtype; `None` if the model has no adapters.
    pub(super) buffers: Option<&'a AdapterBuffers>,
    /// `x·Aᵀ` of the block's adapters, `[N · low_columns]`.
    pub(super) low: Option<&'a Tensor>,
}

/// Scratch buffers that the adapters of one compute dtype share.
#[derive(Clone, Debug)]
pub(super) struct AdapterBuffers<T = Tensor> {
    /// The gradient of `x·Aᵀ`, with the columns of the widest product.
    low_gradient: Option<T>,
    /// The second factors of a product as one, for the largest product with several parts.
    factor: Option<T>,
    /// The input after dropout, and its gradient.
    dropped: Option<[T; 2]>,
    /// DoRA: the product's output before its outputs' lengths act on it, and that output's gradient.
    output: Option<T>,
}

/// Columns between the factors of the adapters of any block.
pub(super) fn low_columns(spec: &ModelSpec) -> usize {
    let Some(lora) = &spec.lora else { return 0 };
    let mut columns = vec![0; spec.layers];
    for layer in &lora.targets {
        if let Some(columns) = layer.block.and_then(|block| columns.get_mut(block)) {
            *columns += lora.r;
        }
    }
    columns.into_iter().max().unwrap_or(0)
}

impl<T> AdapterBuffers<T> {
    /// Buffers for `tokens` rows, or none where `spec` has no adapters.
    pub(super) fn lay_out(
        spec: &ModelSpec,
        tokens: usize,
        compute: DType,
        train: bool,
        allocate: Allocate<'_, T>,
    ) -> Result<Option<Self>> {
        let Some(lora) = &spec.lora else { return Ok(None) };
        let rows = |columns: usize| allocate(&[tokens * columns], compute);
        let packs = spec.adapted_products();
        let members = packs.iter().map(|(members, ..)| *members).max().unwrap_or(1);
        let joined =
            packs.iter().filter(|(_, parts, _)| *parts > 1).map(|(members, _, outputs)| members * outputs).max();
        let widest = [spec.width, spec.attended_width(), spec.inner].into_iter().max().unwrap_or(0);
        let outputs = [spec.qkv_width(), spec.up_width(), spec.width].into_iter().max().unwrap_or(0);
        let dropped = train && lora.dropout > 0.0;
        Ok(Some(Self {
            low_gradient: train.then(|| rows(members * lora.r)).transpose()?,
            factor: joined.map(|elements| allocate(&[elements * lora.r], compute)).transpose()?,
            dropped: if dropped { Some([rows(widest)?, rows(widest)?]) } else { None },
            output: (train && lora.dora).then(|| rows(outputs)).transpose()?,
        }))
    }
}

impl AdapterPass<'_> {
    fn buffers(&self) -> Result<&AdapterBuffers> {
        match self.buffers {
            Some(buffers) => Ok(buffers),
            None => bail!("this workspace has no buffers for adapters"),
        }
    }
}

/// The first `rows` × `columns` elements of a buffer as a matrix.
fn matrix(buffer: Option<&Tensor>, rows: usize, columns: usize) -> Result<Tensor> {
    match buffer {
        Some(buffer) => buffer.narrow(0, 0, rows * columns)?.reshape((rows, columns)),
        None => bail!("this workspace has no buffers for adapters in this pass"),
    }
}

impl Adapter {
    /// The adapters of the product `layer`, if it has any.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: Layer) -> Result<Option<Self>> {
        let Some(lora) = &spec.lora else { return Ok(None) };
        let (Some(block), Op::Linear(role)) = (layer.block, layer.op) else { return Ok(None) };
        let Some(a) = parameters.find_pack(layer, ParamRole::LoraA) else { return Ok(None) };
        let parts = parts(spec, layer);
        let outputs = parts.iter().map(|(_, first, count)| first + count).max().unwrap_or(0);
        let members: Vec<_> = parts.into_iter().filter(|(part, ..)| lora.targets.contains(part)).collect();
        let shares =
            members.iter().filter(|(.., count)| *count < outputs).map(|(_, first, count)| *first..first + count);
        let member = |(part, first, count): (Layer, usize, usize)| {
            Ok(Member {
                b: pack_of(parameters, part, ParamRole::LoraB)?,
                outputs: first..first + count,
                magnitude: parameters.find_pack(part, ParamRole::Magnitude),
            })
        };
        let linears = spec.linear_layers().into_iter().filter(|(part, ..)| lora.targets.contains(part));
        let before = linears.filter(|(_, pack, _)| pack.block == layer.block && *pack < layer).count();
        let Lora { r, dropout, .. } = *lora;
        Ok(Some(Self {
            layer,
            layout: spec.weight_layout,
            weight: pack_of(parameters, layer, ParamRole::Weight)?,
            bias: parameters.find_pack(layer, ParamRole::Bias),
            a,
            shares: shares.collect(),
            members: members.into_iter().map(member).collect::<Result<_>>()?,
            outputs,
            first_low: before * r,
            r,
            scale: lora.scale() as f32,
            dropout,
            site: dropout_site(block, role),
        }))
    }

    /// Whether there are DoRA's lengths, which act on the product's output.
    fn has_lengths(&self) -> bool {
        self.members.iter().any(|member| member.magnitude.is_some())
    }

    /// Computes the frozen product of `x` plus the output of the adapters.
    pub(super) fn forward(&self, cx: &mut Context<'_>, x: &Tensor, y: &Tensor, pass: AdapterPass<'_>) -> Result<()> {
        let low = self.forward_low(cx, x, pass)?;
        let bias = self.bias.map(|bias| cx.weights.pack(bias));
        self.product(cx, x, &low, bias, y, pass)?;
        match self.lengths(cx.weights)? {
            Some(lengths) => lengths.apply(y, bias),
            None => Ok(()),
        }
    }

    /// Computes `dropout(x) · Aᵀ`.
    pub(super) fn forward_low(&self, cx: &mut Context<'_>, x: &Tensor, pass: AdapterPass<'_>) -> Result<Tensor> {
        let (input, low) = (self.dropped(cx, x, pass)?, self.low(x.dim(0)?, pass)?);
        let a = Factor::transposed(Columns::all(cx.weights.pack(self.a))?);
        cx.product(Factor::plain(Columns::all(&input)?), a, 1.0, Columns::all(&low)?)?;
        cx.hook.part(self.layer, Part::LowRank, &low)?;
        Ok(low)
    }

    /// `y = x · weight + bias + scale · low · Bᵀ`.
    fn product(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        low: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
        pass: AdapterPass<'_>,
    ) -> Result<()> {
        let factor = self.factor(cx, pass)?;
        let (factor, shares) = (Factor::transposed(Columns::all(&factor)?), &self.shares[..]);
        let low_rank = LowRank { low, factor, alpha: self.scale, shares };
        let weight = cx.weights.operand(self.weight)?;
        op::Linear { layout: weight.layout(self.layout), x, weight: &weight, bias, low_rank: Some(low_rank), y }
            .run(cx.kernels)
    }

    /// The second factors as one, `[outputs, members · r]`.
    fn factor(&self, cx: &Context<'_>, pass: AdapterPass<'_>) -> Result<Tensor> {
        if let (true, [member]) = (self.shares.is_empty(), &self.members[..]) {
            return Ok(cx.weights.pack(member.b).clone());
        }
        let factor = matrix(pass.buffers()?.factor.as_ref(), self.outputs, self.members.len() * self.r)?;
        op::Zero { x: &factor }.run(cx.kernels)?;
        for (i, member) in self.members.iter().enumerate() {
            let rows = factor.narrow(0, member.outputs.start, member.outputs.len())?;
            rows.slice_set(cx.weights.pack(member.b), 1, i * self.r)?;
        }
        Ok(factor)
    }

    /// Writes the gradient of `x` to `dx`, given the output gradient `dy`. With DoRA it returns the lengths.
    pub(super) fn backward_input(
        &self,
        cx: &mut Context<'_>,
        dy: &Tensor,
        dx: &Tensor,
        pass: AdapterPass<'_>,
    ) -> Result<Option<Lengths>> {
        let (lengths, rows) = (self.lengths(cx.weights)?, dy.dim(0)?);
        let dy = self.through(cx, lengths.as_ref(), dy, pass)?;
        let dlow = self.low_gradient(rows, pass)?;
        for (i, member) in self.members.iter().enumerate() {
            let dy = Factor::plain(Columns::new(&dy, member.outputs.clone())?);
            let b = Factor::plain(Columns::all(cx.weights.pack(member.b))?);
            let into = Columns::new(&dlow, self.columns(i))?;
            cx.product(dy, b, self.scale, into)?;
        }
        cx.hook.part(self.layer, Part::LowRankGradient, &dlow)?;
        let (weight, a) = (cx.weights.operand(self.weight)?, Factor::plain(Columns::all(cx.weights.pack(self.a))?));
        let layout = weight.layout(self.layout);
        let Some(dropout) = cx.mode.dropout(self.dropout, self.site) else {
            let low_rank = LowRank { low: &dlow, factor: a, alpha: 1.0, shares: &[] };
            op::Linear {
                layout: layout.transposed(),
                x: &dy,
                weight: &weight,
                bias: None,
                low_rank: Some(low_rank),
                y: dx,
            }
            .run(cx.kernels)?;
            return Ok(lengths);
        };
        op::Linear { layout: layout.transposed(), x: &dy, weight: &weight, bias: None, low_rank: None, y: dx }
            .run(cx.kernels)?;
        let buffers = pass.buffers()?.dropped.as_ref();
        let [through, before] = [buffers.map(|buffers| &buffers[0]), buffers.map(|buffers| &buffers[1])];
        let (through, before) = (matrix(through, rows, dx.dim(1)?)?, matrix(before, rows, dx.dim(1)?)?);
        let dlow = Factor::plain(Columns::all(&dlow)?);
        cx.product(dlow, a, 1.0, Columns::all(&before)?)?;
        op::Copy { x: &before, dropout: Some(dropout), out: &through }.run(cx.kernels)?;
        op::Accumulate { x: &through, out: dx, inner: &[] }.run(cx.kernels)?;
        Ok(lengths)
    }

    /// Writes the gradients of the factors and the lengths, after [`Self::backward_input`] of the same `dy`.
    pub(super) fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        x: &Tensor,
        dy: &Tensor,
        lengths: Option<&Lengths>,
        pass: AdapterPass<'_>,
    ) -> Result<()> {
        let rows = x.dim(0)?;
        let (low, dlow) = (self.low(rows, pass)?, self.low_gradient(rows, pass)?);
        if let Some(lengths) = lengths {
            let output = matrix(pass.buffers()?.output.as_ref(), rows, self.outputs)?;
            self.product(cx, x, &low, None, &output, pass)?;
            for (i, member) in self.members.iter().enumerate() {
                if let Some(dmagnitude) = member.magnitude.and_then(|slot| cx.grad(slot)) {
                    lengths.gradient(i, dy, &output, dmagnitude)?;
                    cx.hook.part(self.layer, Part::WeightGradient, dmagnitude)?;
                }
            }
        }
        let dy = self.through(cx, lengths, dy, pass)?;
        for (i, member) in self.members.iter().enumerate() {
            if let Some(db) = cx.grad(member.b) {
                let dy = Factor::transposed(Columns::new(&dy, member.outputs.clone())?);
                let low = Factor::plain(Columns::new(&low, self.columns(i))?);
                cx.product(dy, low, self.scale, Columns::all(db)?)?;
                cx.hook.part(self.layer, Part::WeightGradient, db)?;
            }
        }
        let Some(da) = cx.grad(self.a) else { return Ok(()) };
        let input = self.dropped(cx, x, pass)?;
        let (dlow, input) = (Factor::transposed(Columns::all(&dlow)?), Factor::plain(Columns::all(&input)?));
        cx.product(dlow, input, 1.0, Columns::all(da)?)?;
        cx.hook.part(self.layer, Part::WeightGradient, da)
    }

    /// The gradient of the product's output before `lengths` act on it, if there are any.
    fn through(
        &self,
        cx: &Context<'_>,
        lengths: Option<&Lengths>,
        dy: &Tensor,
        pass: AdapterPass<'_>,
    ) -> Result<Tensor> {
        let Some(lengths) = lengths else { return Ok(dy.clone()) };
        let before = matrix(pass.buffers()?.output.as_ref(), dy.dim(0)?, self.outputs)?;
        cx.kernels.copy(dy, &before)?;
        lengths.apply(&before, None)?;
        Ok(before)
    }

    /// `x` after dropout.
    fn dropped(&self, cx: &Context<'_>, x: &Tensor, pass: AdapterPass<'_>) -> Result<Tensor> {
        let Some(dropout) = cx.mode.dropout(self.dropout, self.site) else { return Ok(x.clone()) };
        let (rows, columns) = x.dims2()?;
        let dropped = matrix(pass.buffers()?.dropped.as_ref().map(|buffers| &buffers[0]), rows, columns)?;
        op::Copy { x, dropout: Some(dropout), out: &dropped }.run(cx.kernels)?;
        Ok(dropped)
    }

    /// The columns of member `i` between the factors.
    fn columns(&self, i: usize) -> Range<usize> {
        i * self.r..(i + 1) * self.r
    }

    /// `x·Aᵀ` of all members, `[rows, members · r]`.
    fn low(&self, rows: usize, pass: AdapterPass<'_>) -> Result<Tensor> {
        let rest = pass.low.map(|low| low.narrow(0, rows * self.first_low, rows * self.members.len() * self.r));
        matrix(rest.transpose()?.as_ref(), rows, self.members.len() * self.r)
    }

    /// The gradient of that.
    fn low_gradient(&self, rows: usize, pass: AdapterPass<'_>) -> Result<Tensor> {
        matrix(pass.buffers()?.low_gradient.as_ref(), rows, self.members.len() * self.r)
    }

    /// DoRA's scale of the output, if any.
    fn lengths(&self, weights: &Parameters) -> Result<Option<Lengths>> {
        if !self.has_lengths() {
            return Ok(None);
        }
        let weight = weights.operand(self.weight)?;
        let weight = (&*weight, weight.layout(self.layout));
        dora::lengths(weights, &self.members, weight, weights.pack(self.a), (self.r, self.scale)).map(Some)
    }
}
