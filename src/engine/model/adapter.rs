//! A product's adapters: thin products beside the frozen one.
//!
//! The first factors of layers that share a product (queries and values, say) are stacked in one pack, so that their input is
//! multiplied once; each second factor adds to its own columns of the output. What is between them has `r` columns a layer and
//! is computed again in the backward pass.

use super::decoder::Mode;
use super::dora::{self, Lengths};
use super::hook::{Hook, Part};
use super::layers::pack_of;
use super::lora::{Lora, dropout_site, parts};
use super::parameters::{Parameters, Slot};
use super::spec::{Layer, ModelSpec, Op, ParamRole};
use crate::engine::kernels::columns::{Columns, Factor, Store};
use crate::engine::kernels::view::Allocate;
use crate::engine::kernels::{Kernels, WeightLayout};
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

/// What an adapter takes beside its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdapterPass<'a> {
    pub(super) mode: Mode,
    /// Those of the layer's compute type; none where the model has no adapters.
    pub(super) buffers: Option<&'a AdapterBuffers>,
}

/// What adapters of one compute type overwrite in turn.
#[derive(Clone, Debug)]
pub(super) struct AdapterBuffers<T = Tensor> {
    /// Between the factors, and its gradient, for as many columns as any product needs.
    low: T,
    low_gradient: Option<T>,
    /// The input behind dropout, and what goes back through it.
    dropped: Option<[T; 2]>,
    /// DoRA: the product's output before its outputs' lengths act on it, then that output's gradient.
    output: Option<T>,
    /// Gradients of a frozen norm's weight and bias, which nobody reads.
    unread: Option<[T; 2]>,
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
        let members = spec.packs_of_linears().iter().map(Vec::len).max().unwrap_or(1);
        let low = || rows(members * lora.r);
        let widest = [spec.width, spec.attended_width(), spec.inner].into_iter().max().unwrap_or(0);
        let outputs = [spec.qkv_width(), spec.up_width(), spec.width].into_iter().max().unwrap_or(0);
        let dropped = train && lora.dropout > 0.0;
        let unread = || allocate(&[spec.width.max(spec.head_dim)], DType::F32);
        Ok(Some(Self {
            low: low()?,
            low_gradient: train.then(low).transpose()?,
            dropped: if dropped { Some([rows(widest)?, rows(widest)?]) } else { None },
            output: (train && lora.dora).then(|| rows(outputs)).transpose()?,
            unread: if train { Some([unread()?, unread()?]) } else { None },
        }))
    }
}

impl AdapterPass<'_> {
    /// Where the gradients of a frozen norm of this width go.
    pub(super) fn unread(&self, width: usize) -> Result<[Option<Tensor>; 2]> {
        let Some([weight, bias]) = self.buffers.and_then(|buffers| buffers.unread.as_ref()) else {
            return Ok([None, None]);
        };
        Ok([Some(weight.narrow(0, 0, width)?), Some(bias.narrow(0, 0, width)?)])
    }

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
        None => bail!("this workspace has no buffers for the backward pass of adapters"),
    }
}

impl Adapter {
    /// The adapters of the product `layer`, if it has any.
    pub(super) fn new(spec: &ModelSpec, parameters: &Parameters, layer: Layer) -> Result<Option<Self>> {
        let Some(lora) = &spec.lora else { return Ok(None) };
        let (Some(block), Op::Linear(role)) = (layer.block, layer.op) else { return Ok(None) };
        let Some(a) = parameters.find_pack(layer, ParamRole::LoraA) else { return Ok(None) };
        let members = parts(spec, layer).into_iter().filter(|(part, ..)| lora.targets.contains(part));
        let member = |(part, first, count): (Layer, usize, usize)| {
            Ok(Member {
                b: pack_of(parameters, part, ParamRole::LoraB)?,
                outputs: first..first + count,
                magnitude: parameters.find_pack(part, ParamRole::Magnitude),
            })
        };
        let Lora { r, dropout, .. } = *lora;
        Ok(Some(Self {
            layer,
            layout: spec.weight_layout,
            weight: pack_of(parameters, layer, ParamRole::Weight)?,
            bias: parameters.find_pack(layer, ParamRole::Bias),
            a,
            members: members.map(member).collect::<Result<_>>()?,
            r,
            scale: lora.scale() as f32,
            dropout,
            site: dropout_site(block, role),
        }))
    }

    /// Whether [`Self::backward`] writes the whole product's input gradient: DoRA's lengths act on the product's output.
    pub(super) fn writes_input_gradient(&self) -> bool {
        self.members.iter().any(|member| member.magnitude.is_some())
    }

    /// Adds to `y` what the adapters make of `x`.
    pub(super) fn forward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        y: &Tensor,
        pass: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let x = self.dropped(kernels, x, pass)?;
        let low = self.low(kernels, weights, &x, pass)?;
        hook.part(self.layer, Part::LowRank, &low)?;
        self.add(kernels, weights, &low, y)?;
        if let Some(lengths) = self.lengths(weights)? {
            let bias = self.bias.map(|bias| weights.pack(bias));
            lengths.apply(y, bias)?;
        }
        Ok(())
    }

    /// Writes the gradients of the factors, and adds to `dx` the gradient of `x`, given that of the output, `dy`. With DoRA
    /// it writes the whole product's to `dx`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, what computes it, and the hook")]
    pub(super) fn backward(
        &self,
        kernels: &dyn Kernels,
        weights: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        grads: &Parameters,
        pass: AdapterPass<'_>,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let input = self.dropped(kernels, x, pass)?;
        let low = self.low(kernels, weights, &input, pass)?;
        let (rows, columns) = low.dims2()?;
        let mut dy = dy.clone();
        if let Some(lengths) = self.lengths(weights)? {
            let output = matrix(pass.buffers()?.output.as_ref(), rows, dy.dim(1)?)?;
            let weight = weights.operand(self.weight)?;
            kernels.linear(weight.layout(self.layout), x, &weight, None, &output)?;
            drop(weight);
            self.add(kernels, weights, &low, &output)?;
            for (i, member) in self.members.iter().enumerate() {
                if let Some(dmagnitude) = member.magnitude.and_then(|slot| grads.own(slot)) {
                    lengths.gradient(i, &dy, &output, dmagnitude)?;
                    hook.part(self.layer, Part::WeightGradient, dmagnitude)?;
                }
            }
            kernels.copy(&dy, &output)?;
            lengths.apply(&output, None)?;
            let weight = weights.operand(self.weight)?;
            kernels.linear_input_gradient(weight.layout(self.layout), &output, &weight, dx)?;
            dy = output;
        }
        let dlow = matrix(pass.buffers()?.low_gradient.as_ref(), rows, columns)?;
        for (i, member) in self.members.iter().enumerate() {
            let (dy, low_rank) = (Columns::new(&dy, member.outputs.clone())?, i * self.r..(i + 1) * self.r);
            let b = Factor::plain(Columns::all(weights.pack(member.b))?);
            let into = Columns::new(&dlow, low_rank.clone())?;
            kernels.product(Factor::plain(dy), b, self.scale, into, Store::Overwrite)?;
            if let Some(db) = grads.own(member.b) {
                let low = Factor::plain(Columns::new(&low, low_rank)?);
                kernels.product(Factor::transposed(dy), low, self.scale, Columns::all(db)?, Store::Overwrite)?;
                hook.part(self.layer, Part::WeightGradient, db)?;
            }
        }
        hook.part(self.layer, Part::LowRankGradient, &dlow)?;
        let dlow = Columns::all(&dlow)?;
        if let Some(da) = grads.own(self.a) {
            let input = Factor::plain(Columns::all(&input)?);
            kernels.product(Factor::transposed(dlow), input, 1.0, Columns::all(da)?, Store::Overwrite)?;
            hook.part(self.layer, Part::WeightGradient, da)?;
        }
        let a = Factor::plain(Columns::all(weights.pack(self.a))?);
        let Some(dropout) = pass.mode.dropout(self.dropout, self.site) else {
            return kernels.product(Factor::plain(dlow), a, 1.0, Columns::all(dx)?, Store::Add);
        };
        let buffers = pass.buffers()?.dropped.as_ref();
        let [through, before] = [buffers.map(|buffers| &buffers[0]), buffers.map(|buffers| &buffers[1])];
        let (through, before) = (matrix(through, rows, dx.dim(1)?)?, matrix(before, rows, dx.dim(1)?)?);
        kernels.product(Factor::plain(dlow), a, 1.0, Columns::all(&before)?, Store::Overwrite)?;
        kernels.branch_gradient(&before, Some(dropout), &through)?;
        kernels.accumulate(&through, dx)
    }

    /// `x` behind dropout.
    fn dropped(&self, kernels: &dyn Kernels, x: &Tensor, pass: AdapterPass<'_>) -> Result<Tensor> {
        let Some(dropout) = pass.mode.dropout(self.dropout, self.site) else { return Ok(x.clone()) };
        let (rows, columns) = x.dims2()?;
        let dropped = matrix(pass.buffers()?.dropped.as_ref().map(|buffers| &buffers[0]), rows, columns)?;
        kernels.branch_gradient(x, Some(dropout), &dropped)?;
        Ok(dropped)
    }

    /// `x · Aᵀ`, for all members side by side.
    fn low(&self, kernels: &dyn Kernels, weights: &Parameters, x: &Tensor, pass: AdapterPass<'_>) -> Result<Tensor> {
        let low = matrix(Some(&pass.buffers()?.low), x.dim(0)?, self.members.len() * self.r)?;
        let (x, a) = (Factor::plain(Columns::all(x)?), Factor::transposed(Columns::all(weights.pack(self.a))?));
        kernels.product(x, a, 1.0, Columns::all(&low)?, Store::Overwrite)?;
        Ok(low)
    }

    /// Adds `scale · low · Bᵀ` to each member's columns of `y`.
    fn add(&self, kernels: &dyn Kernels, weights: &Parameters, low: &Tensor, y: &Tensor) -> Result<()> {
        for (i, member) in self.members.iter().enumerate() {
            let low = Factor::plain(Columns::new(low, i * self.r..(i + 1) * self.r)?);
            let b = Factor::transposed(Columns::all(weights.pack(member.b))?);
            kernels.product(low, b, self.scale, Columns::new(y, member.outputs.clone())?, Store::Add)?;
        }
        Ok(())
    }

    /// What DoRA's lengths do to the output, if there are any.
    fn lengths(&self, weights: &Parameters) -> Result<Option<Lengths>> {
        if !self.writes_input_gradient() {
            return Ok(None);
        }
        let weight = weights.operand(self.weight)?;
        let weight = (&*weight, weight.layout(self.layout));
        dora::lengths(weights, &self.members, weight, weights.pack(self.a), (self.r, self.scale)).map(Some)
    }
}
