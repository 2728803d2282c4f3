//! Our own kernels in the place of single operations of candle's.

use super::launch::{Buffer, Rows};
use super::queue::CudaQueue;
use super::survey::Survey;
use super::{adamw, attention, cross_entropy, elementwise, embedding, heads, norm, product, survey};
use crate::adamw::{AdamWStep, Moments};
use crate::attention::{Operands, Shape};
use crate::columns::{Columns, Factor, Store};
use crate::dropout::Dropout;
use crate::plain::Replacements;
use crate::precision::FloatFormat;
use crate::rope::{Direction, Positions, Table};
use crate::survey::TensorSurvey;
use crate::{Activation, Embedding, Norm, NormGradients, NormSettings, Normed, WeightLayout};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// An operation that we have kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
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
    /// Every operation, by name.
    pub const ALL: [Self; 9] = [
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

    /// The name in messages, logs and checkpoints.
    pub const fn name(self) -> &'static str {
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
    bounded: Mutex<Option<Bounded>>,
}

/// Attention's bounds as the device has them, and what they are of. All layers of a pass have the same.
#[derive(Debug)]
struct Bounded {
    sizes: (usize, usize, Option<usize>),
    documents: Option<Vec<u32>>,
    tensor: Tensor,
}

impl Own {
    pub(crate) fn new(device: &Device, operations: BTreeSet<Operation>) -> Result<Self> {
        let names: Vec<&str> = operations.iter().map(|operation| operation.name()).collect();
        let name = format!("fused:{}", names.join(","));
        Ok(Self { queue: CudaQueue::new(device.as_cuda_device()?), operations, name, bounded: Mutex::new(None) })
    }

    /// [`attention::bounds`] on the device.
    fn bounds(&self, shape: &Shape, documents: Option<&[u32]>, device: &Device) -> Result<Option<Tensor>> {
        let sizes = (shape.batch, shape.seq_len, shape.window);
        let mut last = self.bounded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.as_ref().filter(|last| last.sizes == sizes && last.documents.as_deref() == documents) {
            return Ok(Some(last.tensor.clone()));
        }
        let Some(bounds) = attention::bounds(shape, documents)? else { return Ok(None) };
        let bounds = Tensor::new(bounds, device)?;
        *last = Some(Bounded { sizes, documents: documents.map(<[u32]>::to_vec), tensor: bounds.clone() });
        Ok(Some(bounds))
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

    /// Some columns of tensors that an operation's kernels can take; `None` where candle has to compute.
    fn rows<const N: usize>(&self, operation: Operation, columns: [Columns<'_>; N]) -> Result<Option<[Rows; N]>> {
        let Some(buffers) = self.buffers(operation, columns.map(|columns| columns.tensor()))? else { return Ok(None) };
        let mut rows = buffers.map(|buffer| Rows::whole(buffer, [0, 0]));
        for (rows, columns) in rows.iter_mut().zip(columns) {
            (rows.len, rows.stride) = (columns.rows(), columns.stride());
            (rows.first, rows.count) = (columns.first(), columns.count());
        }
        Ok(Some(rows))
    }

    /// Queries, keys and values, or their gradients, as attention's kernels take them: side by side, with keys and values for
    /// each head. Where they lie otherwise, a tensor for that and where they lie; `None` where candle has to compute.
    fn side_by_side(&self, shape: &Shape, parts: [Columns<'_>; 3]) -> Result<Option<(Tensor, Option<[Rows; 3]>)>> {
        if !attention::serves(&Shape { kv_heads: shape.heads, ..*shape }) {
            return Ok(None);
        }
        if let Some(tensor) = packed(shape, parts).filter(|_| shape.kv_heads == shape.heads) {
            return Ok(Some((tensor.clone(), None)));
        }
        let Some(rows) = self.rows(Operation::Attention, parts)? else { return Ok(None) };
        let (tokens, tensor) = (shape.batch * shape.seq_len, parts[0].tensor());
        if !heads::can_spread(shape, rows) || rows.iter().any(|part| part.buffer.dtype != tensor.dtype()) {
            return Ok(None);
        }
        let wide = Tensor::zeros((tokens, 3 * shape.widths()[0]), tensor.dtype(), tensor.device())?;
        Ok(Some((wide, Some(rows))))
    }

    /// Queries, keys and values [`side_by_side`](Self::side_by_side).
    fn spread(&self, shape: &Shape, parts: [Columns<'_>; 3]) -> Result<Option<Tensor>> {
        let Some((tensor, apart)) = self.side_by_side(shape, parts)? else { return Ok(None) };
        if let (Some(rows), Some([wide])) = (apart, self.buffers(Operation::Attention, [&tensor])?) {
            heads::spread(&self.queue, shape, rows, wide)?;
        }
        Ok(Some(tensor))
    }

    /// [`Own::buffers`] of operands that may be missing.
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

/// Whether there are kernels for RMS norms of heads, or their gradients: operands of one type.
fn norms_heads(settings: NormSettings, operands: &[Rows], weight: Buffer) -> bool {
    let fits = |rows: &Rows| rows.buffer.dtype == weight.dtype && norm::are_placed(*rows, weight.len);
    settings.norm != Norm::Layer && operands.iter().all(fits) && norm::serves(weight.len)
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
        let Some(qkv) = self.spread(shape, operands.qkv)? else { return Ok(false) };
        let bounds = self.bounds(shape, operands.documents, qkv.device())?;
        let Some((bounds, _)) = self.optional(Operation::Attention, bounds.as_ref(), None)? else { return Ok(false) };
        let Some([qkv, out, lse]) = self.buffers(Operation::Attention, [&qkv, out, lse])? else { return Ok(false) };
        if out.dtype != qkv.dtype {
            return Ok(false);
        }
        let equal = Shape { kv_heads: shape.heads, ..*shape };
        attention::forward(&self.queue, (equal, bounds), qkv, operands.dropout, out, lse).map(|()| true)
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
        let Some(qkv) = self.spread(shape, operands.qkv)? else { return Ok(false) };
        let Some((dqkv, apart)) = self.side_by_side(shape, gradients)? else { return Ok(false) };
        let bounds = self.bounds(shape, operands.documents, qkv.device())?;
        let Some((bounds, _)) = self.optional(Operation::Attention, bounds.as_ref(), None)? else { return Ok(false) };
        let tensors = [dout, &qkv, out, lse, &dqkv];
        let Some([dout, qkv, out, lse, dqkv]) = self.buffers(Operation::Attention, tensors)? else {
            return Ok(false);
        };
        if [dout, out, dqkv].iter().any(|buffer| buffer.dtype != qkv.dtype) {
            return Ok(false);
        }
        let equal = Shape { kv_heads: shape.heads, ..*shape };
        attention::backward(&self.queue, (equal, bounds), [dout, qkv, out, lse], operands.dropout, dqkv)?;
        apart.map_or(Ok(()), |apart| heads::gather(&self.queue, shape, dqkv, apart))?;
        Ok(true)
    }

    fn rotate(&self, x: Columns<'_>, table: &Table, positions: Positions<'_>, direction: Direction) -> Result<bool> {
        let (available, half) = table.cos.dims2()?;
        let starts = positions.documents.map(|starts| Tensor::new(starts, x.tensor().device())).transpose()?;
        let documents = positions.documents.map_or(x.rows(), <[u32]>::len);
        let known = positions.past + positions.seq_len.min(x.rows()) <= available && documents == x.rows();
        let Some([x]) = self.rows(Operation::Rope, [x])? else { return Ok(false) };
        let Some([cos, sin]) = self.buffers(Operation::Rope, [&table.cos, &table.sin])? else { return Ok(false) };
        let Some((starts, _)) = self.optional(Operation::Rope, starts.as_ref(), None)? else { return Ok(false) };
        if !known || !heads::can_rotate(x, half) || positions.seq_len == 0 {
            return Ok(false);
        }
        heads::rotate(&self.queue, x, [cos, sin], half, positions, starts, direction).map(|()| true)
    }

    fn norm(
        &self,
        settings: NormSettings,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        to: &Normed,
    ) -> Result<bool> {
        let (rows, width) = x.dims2()?;
        let Some([x, weight, y, rstd]) = self.buffers(Operation::Norm, [x, weight, &to.out, &to.rstd])? else {
            return Ok(false);
        };
        let Some((bias, mean)) = self.optional(Operation::Norm, bias, to.mean.as_ref())? else { return Ok(false) };
        let one_type = weight.dtype == y.dtype && bias.is_none_or(|bias| bias.dtype == y.dtype);
        if !norm::serves(width) || !is_pair([x.dtype, y.dtype]) || !one_type || !has_its_operands(settings, mean) {
            return Ok(false);
        }
        let (statistics, numbers) = (norm::Statistics { mean, rstd }, (settings.eps, gain_offset(settings)));
        let [x, y] = [x, y].map(|all| Rows::whole(all, [rows, width]));
        norm::forward(&self.queue, width, x, (weight, bias), numbers, y, statistics).map(|()| true)
    }

    fn head_norm(
        &self,
        settings: NormSettings,
        x: Columns<'_>,
        weight: &Tensor,
        y: Columns<'_>,
        rstd: &Tensor,
    ) -> Result<bool> {
        let Some([x, y]) = self.rows(Operation::Norm, [x, y])? else { return Ok(false) };
        let Some([weight, rstd]) = self.buffers(Operation::Norm, [weight, rstd])? else { return Ok(false) };
        if !norms_heads(settings, &[x, y], weight) {
            return Ok(false);
        }
        let (statistics, numbers) = (norm::Statistics { mean: None, rstd }, (settings.eps, gain_offset(settings)));
        norm::forward(&self.queue, weight.len, x, (weight, None), numbers, y, statistics).map(|()| true)
    }

    fn head_norm_backward(
        &self,
        settings: NormSettings,
        dy: Columns<'_>,
        x: Columns<'_>,
        weight: &Tensor,
        rstd: &Tensor,
        dx: Columns<'_>,
        dweight: Option<&Tensor>,
    ) -> Result<bool> {
        let Some([dy, x, dx]) = self.rows(Operation::Norm, [dy, x, dx])? else { return Ok(false) };
        let Some([weight, rstd]) = self.buffers(Operation::Norm, [weight, rstd])? else { return Ok(false) };
        let Some((dweight, _)) = self.optional(Operation::Norm, dweight, None)? else { return Ok(false) };
        if !norms_heads(settings, &[x, dy, dx], weight) {
            return Ok(false);
        }
        let statistics = (norm::Statistics { mean: None, rstd }, gain_offset(settings));
        let gradients = dweight.map(|dweight| (dweight, None));
        norm::backward(&self.queue, weight.len, (dy, x, weight), statistics, (dx, true), gradients).map(|()| true)
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
        let (rows, width) = x.dims2()?;
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
        let gradients = dweight.map(|dweight| (dweight, dbias));
        let [dy, x, dx] = [dy, x, dx].map(|all| Rows::whole(all, [rows, width]));
        let to = (dx, how == Store::Overwrite);
        norm::backward(&self.queue, width, (dy, x, weight), statistics, to, gradients).map(|()| true)
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
