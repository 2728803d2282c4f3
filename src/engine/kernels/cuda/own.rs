//! Our own kernels in the place of single operations of candle's.

use super::launch::Buffer;
use super::queue::CudaQueue;
use super::{adamw, attention, cross_entropy, elementwise, embedding, layer_norm, product, survey};
use crate::engine::kernels::adamw::{AdamWStep, Moments};
use crate::engine::kernels::attention::{Operands, Shape};
use crate::engine::kernels::columns::{Columns, Factor, Store};
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::plain::Replacements;
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
    LayerNorm,
    Product,
    Survey,
}

impl Operation {
    pub(crate) const ALL: [Self; 8] = [
        Self::AdamW,
        Self::Attention,
        Self::CrossEntropy,
        Self::Elementwise,
        Self::Embedding,
        Self::LayerNorm,
        Self::Product,
        Self::Survey,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Attention => "attention",
            Self::CrossEntropy => "cross_entropy",
            Self::Elementwise => "elementwise",
            Self::Embedding => "embedding",
            Self::LayerNorm => "layer_norm",
            Self::Product => "product",
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
}

/// Whether there are kernels for this pair of types, of which the first is the second or FP32.
fn is_pair([wide, narrow]: [DType; 2]) -> bool {
    let is_stored = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    (wide == DType::F32 || wide == narrow) && is_stored(narrow)
}

/// The tensor in which queries, keys and values lie side by side, and nothing else.
fn packed<'a>(shape: &Shape, [queries, keys, values]: [Columns<'a>; 3]) -> Option<&'a Tensor> {
    let width = shape.heads * shape.head_size;
    let tensor = queries.tensor();
    let side_by_side = [queries, keys, values].iter().zip([0, width, 2 * width]).all(|(columns, first)| {
        columns.tensor().id() == tensor.id() && (columns.first(), columns.stride()) == (first, 3 * width)
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
        let Some([qkv, out, lse]) = self.buffers(Operation::Attention, [qkv, out, lse])? else { return Ok(false) };
        if !attention::serves(shape) || operands.documents.is_some() || out.dtype != qkv.dtype {
            return Ok(false);
        }
        attention::forward(&self.queue, *shape, qkv, operands.dropout, out, lse).map(|()| true)
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
        let tensors = [dout, qkv, out, lse, dqkv];
        let Some([dout, qkv, out, lse, dqkv]) = self.buffers(Operation::Attention, tensors)? else {
            return Ok(false);
        };
        let one_type = [dout, out, dqkv].iter().all(|buffer| buffer.dtype == qkv.dtype);
        if !attention::serves(shape) || operands.documents.is_some() || !one_type {
            return Ok(false);
        }
        let saved = [dout, qkv, out, lse];
        attention::backward(&self.queue, *shape, saved, operands.dropout, dqkv).map(|()| true)
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
        let (Norm::Layer, Some(bias), Some(mean)) = (settings.norm, bias, &to.mean) else { return Ok(false) };
        let tensors = [x, weight, bias, &to.out, mean, &to.rstd];
        let Some([x, weight, bias, y, mean, rstd]) = self.buffers(Operation::LayerNorm, tensors)? else {
            return Ok(false);
        };
        let one_type = [weight, bias].iter().all(|buffer| buffer.dtype == y.dtype);
        if !layer_norm::serves(width) || !is_pair([x.dtype, y.dtype]) || !one_type {
            return Ok(false);
        }
        let statistics = layer_norm::Statistics { mean, rstd };
        layer_norm::forward(&self.queue, shape, x, [weight, bias], settings.eps, y, statistics).map(|()| true)
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
        let Some(NormGradients { weight: dweight, bias: Some(dbias) }) = gradients else { return Ok(false) };
        let (Norm::Layer, Some(mean)) = (settings.norm, &normed.mean) else { return Ok(false) };
        let tensors = [dy, x, weight, mean, &normed.rstd, dx, dweight, dbias];
        let Some([dy, x, weight, mean, rstd, dx, dweight, dbias]) = self.buffers(Operation::LayerNorm, tensors)? else {
            return Ok(false);
        };
        let types = weight.dtype == dy.dtype && dx.dtype == x.dtype && dweight.dtype == dbias.dtype;
        if !layer_norm::serves(width) || !is_pair([x.dtype, dy.dtype]) || !types {
            return Ok(false);
        }
        let (statistics, fresh) = (layer_norm::Statistics { mean, rstd }, how == Store::Overwrite);
        let operands = [dy, x, weight];
        layer_norm::backward(&self.queue, shape, operands, statistics, dx, fresh, [dweight, dbias]).map(|()| true)
    }

    fn cross_entropy(&self, targets: &[u32], logits: &Tensor, losses: &Tensor, seed: Option<f32>) -> Result<bool> {
        let shape = <[usize; 2]>::from(logits.dims2()?);
        let targets = Tensor::new(targets, logits.device())?;
        let Some([targets, logits, losses]) = self.buffers(Operation::CrossEntropy, [&targets, logits, losses])? else {
            return Ok(false);
        };
        cross_entropy::rows(&self.queue, shape, logits, targets, losses, seed).map(|()| true)
    }

    fn surveys(&self, tensors: &[(&Tensor, FloatFormat)], exponents: bool) -> Result<Option<Vec<TensorSurvey>>> {
        let mut buffers = Vec::with_capacity(tensors.len());
        for (tensor, format) in tensors {
            let Some([buffer]) = self.buffers(Operation::Survey, [tensor])? else { return Ok(None) };
            buffers.push((buffer, *format));
        }
        let device = self.queue.device();
        let words = device.alloc_zeros::<u32>(buffers.len() * survey::WORDS)?;
        let first = self.queue.address(&words);
        for (i, (buffer, format)) in buffers.into_iter().enumerate() {
            let address = first + (i * survey::WORDS * size_of::<u32>()) as u64;
            let figures = Buffer { address, dtype: DType::U32, len: survey::WORDS };
            survey::survey(&self.queue, buffer, format, exponents, figures)?;
        }
        // One copy, because the host waits for each.
        let mut counted = vec![0; tensors.len() * survey::WORDS];
        device.memcpy_dtoh(&words, &mut counted)?;
        Ok(Some(counted.as_chunks().0.iter().map(|words| survey::decode(words, exponents)).collect()))
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
        if !embedding::serves(width) || !served(dtable) || !served(table_of_places) {
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
