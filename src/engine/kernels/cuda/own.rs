//! Our own kernels in the place of single operations of candle's.

use super::launch::Buffer;
use super::queue::CudaQueue;
use super::survey::Survey;
use super::{adamw, attention, cross_entropy, elementwise, embedding, heads, norm, product, survey};
use crate::engine::kernels::adamw::{AdamWStep, Moments};
use crate::engine::kernels::attention::{Operands, Shape};
use crate::engine::kernels::columns::{Columns, Factor, Store};
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::plain::Replacements;
use crate::engine::kernels::rope::{Direction, Positions, Table};
use crate::engine::kernels::survey::TensorSurvey;
use crate::engine::kernels::{Activation, Embedding, Norm, NormGradients, NormSettings, Normed, WeightLayout};
use crate::precision::FloatFormat;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::BTreeSet;

/// An operation that we have kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    AdamW,
    Attention,
    CrossEntropy,
    Elementwise,
    Embedding,
    Norm,
    Product,
    Rope,
    Survey,
}

impl Operation {
    pub(crate) const ALL: [Self; 9] = [
        Self::AdamW,
        Self::Attention,
        Self::CrossEntropy,
        Self::Elementwise,
        Self::Embedding,
        Self::Norm,
        Self::Product,
        Self::Rope,
        Self::Survey,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Attention => "attention",
            Self::CrossEntropy => "cross_entropy",
            Self::Elementwise => "elementwise",
            Self::Embedding => "embedding",
            Self::Norm => "norm",
            Self::Product => "product",
            Self::Rope => "rope",
            Self::Survey => "survey",
        }
    }
}

/// The kernels of some operations, on one GPU.
#[derive(Debug)]
pub(crate) struct Own {
    queue: CudaQueue,
    operations: BTreeSet<Operation>,
    name: String,
}

impl Own {
    pub(crate) fn new(device: &Device, operations: BTreeSet<Operation>) -> Result<Self> {
        let names: Vec<&str> = operations.iter().map(|operation| operation.name()).collect();
        let name = format!("fused:{}", names.join(","));
        Ok(Self { queue: CudaQueue::new(device.as_cuda_device()?), operations, name })
    }

    /// The memory of tensors that an operation's kernels can take; `None` where candle has to compute.
    fn buffers<const N: usize>(&self, operation: Operation, tensors: [&Tensor; N]) -> Result<Option<[Buffer; N]>> {
        if !self.operations.contains(&operation) {
            return Ok(None);
        }
        let mut buffers = [Buffer { address: 0, dtype: DType::F32, len: 0 }; N];
        for (tensor, slot) in tensors.into_iter().zip(&mut buffers) {
            let Some(buffer) = self.queue.buffer(tensor)? else { return Ok(None) };
            *slot = buffer;
        }
        Ok(Some(buffers))
    }

    /// Whether attention's kernels can be used.
    fn attends(&self, shape: &Shape, operands: &Operands<'_>, one_type: bool) -> bool {
        let served = attention::serves(&Shape { kv_heads: shape.heads, ..*shape });
        let grouped = shape.kv_heads != shape.heads;
        let known = served && one_type && operands.documents.is_none() && (!grouped || heads::can_spread(shape));
        known && self.operations.contains(&Operation::Attention)
    }

    /// Queries, keys and values with keys and values for each head, where the model shares them.
    fn spread(&self, shape: &Shape, qkv: &Tensor) -> Result<Option<Tensor>> {
        if shape.kv_heads == shape.heads {
            return Ok(None);
        }
        let wide = Tensor::zeros((qkv.dim(0)?, 3 * shape.widths()[0]), qkv.dtype(), qkv.device())?;
        let Some([from, to]) = self.buffers(Operation::Attention, [qkv, &wide])? else {
            bail!("queries, keys and values are not aligned")
        };
        heads::spread(&self.queue, shape, from, to)?;
        Ok(Some(wide))
    }

    /// The same for operands that may be missing.
    fn optional(
        &self,
        operation: Operation,
        a: Option<&Tensor>,
        b: Option<&Tensor>,
    ) -> Result<Option<(Option<Buffer>, Option<Buffer>)>> {
        let mut found = [None; 2];
        for (tensor, slot) in [a, b].into_iter().zip(&mut found) {
            if let Some(tensor) = tensor {
                let Some([buffer]) = self.buffers(operation, [tensor])? else { return Ok(None) };
                *slot = Some(buffer);
            }
        }
        Ok(Some((found[0], found[1])))
    }
}

/// Whether a layer norm has its mean, and an RMS norm none.
fn has_its_operands(settings: NormSettings, mean: Option<Buffer>) -> bool {
    (settings.norm == Norm::Layer) == mean.is_some()
}

/// What a norm adds to its weight.
fn gain_offset(settings: NormSettings) -> f32 {
    if settings.norm == (Norm::Rms { unit_offset: true }) { 1.0 } else { 0.0 }
}

/// Whether there are kernels for this pair of types, of which the first is the second or FP32.
fn is_pair([wide, narrow]: [DType; 2]) -> bool {
    let is_stored = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    (wide == DType::F32 || wide == narrow) && is_stored(narrow)
}

/// The tensor in which queries, keys and values lie side by side, and nothing else.
fn packed<'a>(shape: &Shape, parts: [Columns<'a>; 3]) -> Option<&'a Tensor> {
    let (tensor, [queries, keys, values]) = (parts[0].tensor(), shape.widths());
    let side_by_side = parts.iter().zip([0, queries, queries + keys]).all(|(columns, first)| {
        columns.tensor().id() == tensor.id() && (columns.first(), columns.stride()) == (first, queries + keys + values)
    });
    side_by_side.then_some(tensor)
}

impl Replacements for Own {
    fn name(&self) -> &str {
        &self.name
    }

    fn attention(&self, shape: &Shape, operands: &Operands<'_>, out: &Tensor, lse: &Tensor) -> Result<bool> {
        operands.check(shape, out, lse)?;
        let Some(qkv) = packed(shape, operands.qkv) else { return Ok(false) };
        if !self.attends(shape, operands, out.dtype() == qkv.dtype()) {
            return Ok(false);
        }
        let (wide, shape) = (self.spread(shape, qkv)?, Shape { kv_heads: shape.heads, ..*shape });
        let Some([qkv, out, lse]) = self.buffers(Operation::Attention, [wide.as_ref().unwrap_or(qkv), out, lse])?
        else {
            return Ok(false);
        };
        attention::forward(&self.queue, shape, qkv, operands.dropout, out, lse).map(|()| true)
    }

    fn attention_backward(
        &self,
        shape: &Shape,
        operands: &Operands<'_>,
        dout: &Tensor,
        out: &Tensor,
        lse: &Tensor,
        gradients: [Columns<'_>; 3],
    ) -> Result<bool> {
        operands.check(shape, out, lse)?;
        operands.check(shape, dout, lse)?;
        shape.check(gradients)?;
        let (Some(qkv), Some(dqkv)) = (packed(shape, operands.qkv), packed(shape, gradients)) else {
            return Ok(false);
        };
        let one_type = [dout, out, dqkv].iter().all(|tensor| tensor.dtype() == qkv.dtype());
        if !self.attends(shape, operands, one_type) {
            return Ok(false);
        }
        let wide = self.spread(shape, qkv)?;
        let wide_gradient = wide.as_ref().map(Tensor::zeros_like).transpose()?;
        let to = wide_gradient.as_ref().unwrap_or(dqkv);
        let tensors = [dout, wide.as_ref().unwrap_or(qkv), out, lse, to, dqkv];
        let Some([dout, qkv, out, lse, to, dqkv]) = self.buffers(Operation::Attention, tensors)? else {
            return Ok(false);
        };
        let equal = Shape { kv_heads: shape.heads, ..*shape };
        attention::backward(&self.queue, equal, [dout, qkv, out, lse], operands.dropout, to)?;
        if wide_gradient.is_some() {
            heads::gather(&self.queue, shape, to, dqkv)?;
        }
        Ok(true)
    }

    fn rotate(&self, x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<bool> {
        let (available, half) = table.cos.dims2()?;
        let starts = positions.documents.map(|starts| Tensor::new(starts, x.tensor().device())).transpose()?;
        let place = heads::Heads { rows: x.rows(), stride: x.stride(), first: x.first(), count: x.count() };
        let documents = positions.documents.map_or(x.rows(), <[u32]>::len);
        let known = positions.past + positions.seq_len.min(x.rows()) <= available && documents == x.rows();
        let Some([buffer, cos, sin]) = self.buffers(Operation::Rope, [x.tensor(), &table.cos, &table.sin])? else {
            return Ok(false);
        };
        let Some((starts, _)) = self.optional(Operation::Rope, starts.as_ref(), None)? else { return Ok(false) };
        if !known || !place.can_rotate(half) || positions.seq_len == 0 {
            return Ok(false);
        }
        heads::rotate(&self.queue, (buffer, place), [cos, sin], half, positions, starts, direction).map(|()| true)
    }

    fn norm(
        &self,
        settings: NormSettings,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        to: &Normed,
    ) -> Result<bool> {
        let shape @ [_, width] = <[usize; 2]>::from(x.dims2()?);
        let Some([x, weight, y, rstd]) = self.buffers(Operation::Norm, [x, weight, &to.out, &to.rstd])? else {
            return Ok(false);
        };
        let Some((bias, mean)) = self.optional(Operation::Norm, bias, to.mean.as_ref())? else { return Ok(false) };
        let one_type = weight.dtype == y.dtype && bias.is_none_or(|bias| bias.dtype == y.dtype);
        if !norm::serves(width) || !is_pair([x.dtype, y.dtype]) || !one_type || !has_its_operands(settings, mean) {
            return Ok(false);
        }
        let (statistics, numbers) = (norm::Statistics { mean, rstd }, (settings.eps, gain_offset(settings)));
        norm::forward(&self.queue, shape, x, (weight, bias), numbers, y, statistics).map(|()| true)
    }

    fn norm_backward(
        &self,
        settings: NormSettings,
        dy: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        normed: &Normed,
        (dx, how): (&Tensor, Store),
        gradients: Option<NormGradients<'_>>,
    ) -> Result<bool> {
        let shape @ [_, width] = <[usize; 2]>::from(x.dims2()?);
        let Some([dy, x, weight, rstd, dx]) = self.buffers(Operation::Norm, [dy, x, weight, &normed.rstd, dx])? else {
            return Ok(false);
        };
        let (dweight, dbias) = gradients.map_or((None, None), |to| (Some(to.weight), to.bias));
        let Some((dweight, dbias)) = self.optional(Operation::Norm, dweight, dbias)? else { return Ok(false) };
        let Some((mean, _)) = self.optional(Operation::Norm, normed.mean.as_ref(), None)? else { return Ok(false) };
        let sums = dweight.is_none_or(|dweight| dbias.is_none_or(|dbias| dweight.dtype == dbias.dtype));
        let types = weight.dtype == dy.dtype && dx.dtype == x.dtype && sums;
        if !norm::serves(width) || !is_pair([x.dtype, dy.dtype]) || !types || !has_its_operands(settings, mean) {
            return Ok(false);
        }
        let statistics = (norm::Statistics { mean, rstd }, gain_offset(settings));
        let (operands, gradients) = ([dy, x, weight], dweight.map(|dweight| (dweight, dbias)));
        let to = (dx, how == Store::Overwrite);
        norm::backward(&self.queue, shape, operands, statistics, to, gradients).map(|()| true)
    }

    fn cross_entropy(&self, targets: &[u32], logits: Columns<'_>, losses: &Tensor, seed: Option<f32>) -> Result<bool> {
        let shape = [logits.rows(), logits.count(), logits.stride()];
        let targets = Tensor::new(targets, losses.device())?;
        let tensors = [&targets, logits.tensor(), losses];
        let Some([targets, buffer, losses]) = self.buffers(Operation::CrossEntropy, tensors)? else {
            return Ok(false);
        };
        if logits.first() != 0 {
            return Ok(false);
        }
        cross_entropy::rows(&self.queue, shape, buffer, targets, losses, seed).map(|()| true)
    }

    fn pads_logits(&self) -> bool {
        [Operation::CrossEntropy, Operation::Product].iter().all(|operation| self.operations.contains(operation))
    }

    fn surveys(&self, tensors: &[(&Tensor, FloatFormat)], exponents: bool, out: &mut [TensorSurvey]) -> Result<bool> {
        let mut buffers = Vec::with_capacity(tensors.len());
        for (tensor, format) in tensors {
            let Some([buffer]) = self.buffers(Operation::Survey, [tensor])? else { return Ok(false) };
            buffers.push((buffer, *format));
        }
        let (device, survey) = (self.queue.device(), Survey::new(&buffers)?);
        let words = device.alloc_zeros::<u32>(buffers.len() * survey::WORDS)?;
        let table = device.clone_htod(survey.table())?;
        let [figures, of_table] =
            [&words, &table].map(|of| Buffer { address: self.queue.address(of), dtype: DType::U32, len: of.len() });
        survey.run(&self.queue, of_table, exponents, figures)?;
        // One copy, because the host waits for each.
        let mut counted = vec![0; tensors.len() * survey::WORDS];
        device.memcpy_dtoh(&words, &mut counted)?;
        for (out, words) in out.iter_mut().zip(counted.as_chunks().0) {
            *out = survey::decode(words, exponents);
        }
        Ok(true)
    }

    fn activate(&self, activation: Activation, x: &Tensor, y: &Tensor) -> Result<bool> {
        let Some([x, out]) = self.buffers(Operation::Elementwise, [x, y])? else { return Ok(false) };
        let width = y.dim(1)?;
        if !elementwise::serves(width) || x.dtype != out.dtype {
            return Ok(false);
        }
        elementwise::activate(&self.queue, activation, width, x, out, None).map(|()| true)
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: &Tensor,
        y: &Tensor,
    ) -> Result<bool> {
        let width = y.dim(1)?;
        let Some([x, dy, dx, y]) = self.buffers(Operation::Elementwise, [x, dy, dx, y])? else { return Ok(false) };
        if !elementwise::serves(width) || [x, dy, dx].iter().any(|buffer| buffer.dtype != y.dtype) {
            return Ok(false);
        }
        elementwise::activate(&self.queue, activation, width, x, y, Some([dy, dx])).map(|()| true)
    }

    fn add_branch(&self, stream: &Tensor, branch: &Tensor, dropout: Option<Dropout>, out: &Tensor) -> Result<bool> {
        let Some([stream, branch, out]) = self.buffers(Operation::Elementwise, [stream, branch, out])? else {
            return Ok(false);
        };
        if stream.dtype != out.dtype || !is_pair([out.dtype, branch.dtype]) {
            return Ok(false);
        }
        elementwise::add_branch(&self.queue, stream, branch, dropout, out).map(|()| true)
    }

    fn branch_gradient(&self, stream: &Tensor, dropout: Option<Dropout>, branch: &Tensor) -> Result<bool> {
        let Some([stream, branch]) = self.buffers(Operation::Elementwise, [stream, branch])? else { return Ok(false) };
        if !is_pair([stream.dtype, branch.dtype]) {
            return Ok(false);
        }
        elementwise::branch_gradient(&self.queue, stream, dropout, branch).map(|()| true)
    }

    fn embed_backward(
        &self,
        embedding: Embedding<'_>,
        dx: &Tensor,
        dtable: &Tensor,
        dpositions: Option<&Tensor>,
    ) -> Result<bool> {
        let Embedding { ids, scale, dropout, .. } = embedding;
        let width = dx.dim(1)?;
        let tables = [dtable, dpositions.unwrap_or(dtable)];
        let Some([dx, dtable, table_of_places]) = self.buffers(Operation::Embedding, [dx, tables[0], tables[1]])?
        else {
            return Ok(false);
        };
        let served = |table: Buffer| is_pair([dx.dtype, table.dtype]) || table.dtype == DType::F32;
        if !elementwise::serves(width) || !served(dtable) || !served(table_of_places) {
            return Ok(false);
        }
        let add = |groups: embedding::Groups, table: Buffer, scale| {
            let upload = |numbers: Vec<u32>| Tensor::new(numbers, tables[0].device());
            let [order, ends] = [upload(groups.order)?, upload(groups.ends)?];
            let Some(grouped) = self.buffers(Operation::Embedding, [&order, &ends])? else {
                bail!("freshly allocated memory is not aligned")
            };
            embedding::backward(&self.queue, [dx, table], grouped, width, scale, dropout)
        };
        if let Some(dpositions) = dpositions {
            let (places, count) = (embedding.places(), dpositions.dim(0)?);
            let groups = embedding::grouped(ids.len(), |row| places.of(row))?;
            if groups.ends.iter().step_by(2).any(|&place| place as usize >= count) {
                bail!("more positions than the {count} of the table");
            }
            dpositions.zero_set()?;
            add(groups, table_of_places, 1.0)?;
        }
        add(embedding::grouped(ids.len(), |row| ids[row] as usize)?, dtable, scale)?;
        Ok(true)
    }

    fn linear(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<bool> {
        let how = match bias {
            None => Store::Overwrite,
            Some(bias) => {
                let Some([row, out]) = self.buffers(Operation::Product, [bias, y])? else { return Ok(false) };
                if !elementwise::serves(row.len) || row.dtype != out.dtype {
                    return Ok(false);
                }
                elementwise::fill_rows(&self.queue, row, out)?;
                Store::Add
            }
        };
        let weight = Factor { columns: Columns::all(weight)?, transposed: layout == WeightLayout::OutIn };
        Replacements::product(self, Factor::plain(Columns::all(x)?), weight, 1.0, Columns::all(y)?, how)
    }

    fn product(&self, a: Factor<'_>, b: Factor<'_>, alpha: f32, c: Columns<'_>, how: Store) -> Result<bool> {
        Ok(self.operations.contains(&Operation::Product) && product::product(&self.queue, a, b, alpha, c, how)?)
    }

    fn sum_rows(&self, x: &Tensor, out: &Tensor) -> Result<bool> {
        let (ones, sums) = (Tensor::ones((1, x.dim(0)?), x.dtype(), x.device())?, out.unsqueeze(0)?);
        let (ones, x) = (Factor::plain(Columns::all(&ones)?), Factor::plain(Columns::all(x)?));
        Replacements::product(self, ones, x, 1.0, Columns::all(&sums)?, Store::Overwrite)
    }

    fn adamw(
        &self,
        numbers: AdamWStep,
        grad: &Tensor,
        master: &Tensor,
        moments: Moments<'_>,
        weight: Option<&Tensor>,
    ) -> Result<bool> {
        let tensors = [grad, master, moments.exp_avg, moments.exp_avg_sq, weight.unwrap_or(master)];
        let Some([grad, master, exp_avg, exp_avg_sq, copy]) = self.buffers(Operation::AdamW, tensors)? else {
            return Ok(false);
        };
        if !is_pair([grad.dtype, copy.dtype]) {
            return Ok(false);
        }
        let state = [master, exp_avg, exp_avg_sq];
        adamw::step(&self.queue, numbers, grad, state, weight.map(|_| copy)).map(|()| true)
    }
}
