//! Our own kernels for a GPU.

use super::launch::{DeviceSlice, Queue, Rows};
use super::summary::StatsLaunch;
use super::{adamw, attention, cross_entropy, elementwise, embedding, heads, norm, summary};
use crate::attention::AttentionShape;
use crate::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::op::{self, Embedding, Op};
use crate::{Kernels, Ran, WeightLayout};
use candle_core::{DType, Device, Error, Result, Tensor};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use strum::{IntoStaticStr, VariantArray};

/// Kernels that are compiled and tried together, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs, reason = "each variant is named like its file of kernels")]
pub enum KernelFamily {
    #[strum(serialize = "adamw")]
    AdamW,
    Attention,
    CrossEntropy,
    Elementwise,
    Embedding,
    Norm,
    Product,
    Rope,
    #[strum(serialize = "summary")]
    StatsLaunch,
}

impl KernelFamily {
    /// The name used in logs, checkpoints and error texts.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The kernels of some families, on one device.
#[derive(Debug)]
pub(crate) struct CudaKernels<Q> {
    queue: Q,
    families: BTreeSet<KernelFamily>,
    name: String,
    bounded: Mutex<Option<KeyRangeCache>>,
}

/// Attention's bounds on the device, with the sizes and documents that they belong to. All layers of a pass have the
/// same.
#[derive(Debug)]
struct KeyRangeCache {
    sizes: (usize, usize, Option<usize>),
    documents: Option<Vec<u32>>,
    tensor: Tensor,
}

impl<Q: Queue> CudaKernels<Q> {
    pub(crate) fn new(queue: Q, families: BTreeSet<KernelFamily>) -> Self {
        let names: Vec<&str> = families.iter().map(|family| family.name()).collect();
        let name = format!("fused:{}", names.join(","));
        Self { queue, families, name, bounded: Mutex::new(None) }
    }

    /// [`attention::bounds`] on the device.
    fn bounds(&self, shape: &AttentionShape, documents: Option<&[u32]>, device: &Device) -> Result<Option<Tensor>> {
        let sizes = (shape.batch, shape.seq_len, shape.window);
        let mut last = self.bounded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last.as_ref().filter(|last| last.sizes == sizes && last.documents.as_deref() == documents) {
            return Ok(Some(last.tensor.clone()));
        }
        let Some(bounds) = attention::bounds(shape, documents)? else { return Ok(None) };
        let bounds = Tensor::new(bounds, device)?;
        *last = Some(KeyRangeCache { sizes, documents: documents.map(<[u32]>::to_vec), tensor: bounds.clone() });
        Ok(Some(bounds))
    }

    /// The memory of tensors that the kernels of `family` can take.
    fn buffers<const N: usize>(&self, family: KernelFamily, tensors: [&Tensor; N]) -> Attempt<[DeviceSlice; N]> {
        require(self.families.contains(&family))?;
        let mut buffers = [DeviceSlice { address: 0, dtype: DType::F32, len: 0 }; N];
        for (tensor, slot) in tensors.into_iter().zip(&mut buffers) {
            *slot = self.queue.buffer(tensor)?.ok_or(Stop::Unsupported)?;
        }
        Ok(buffers)
    }

    /// [`Self::buffers`] of an operand that may be missing.
    fn optional(&self, family: KernelFamily, tensor: Option<&Tensor>) -> Attempt<Option<DeviceSlice>> {
        tensor.map(|tensor| self.buffers(family, [tensor]).map(|[buffer]| buffer)).transpose()
    }

    /// [`Self::buffers`] of some columns of tensors.
    fn rows<const N: usize>(&self, family: KernelFamily, columns: [ColumnSlice<'_>; N]) -> Attempt<[Rows; N]> {
        let buffers = self.buffers(family, columns.map(|columns| columns.tensor()))?;
        let mut rows = buffers.map(|buffer| Rows::whole(buffer, [0, 0]));
        for (rows, columns) in rows.iter_mut().zip(columns) {
            (rows.len, rows.stride) = (columns.rows(), columns.stride());
            (rows.first, rows.count) = (columns.first(), columns.count());
        }
        Ok(rows)
    }

    /// Queries, keys and values, or their gradients, in the layout that attention's kernels take: side by side, with
    /// keys and values for each head. If their layout differs, returns a tensor for that layout and their current rows.
    fn side_by_side(
        &self,
        shape: &AttentionShape,
        parts: [ColumnSlice<'_>; 3],
    ) -> Attempt<(Tensor, Option<[Rows; 3]>)> {
        require(attention::serves(&AttentionShape { kv_heads: shape.heads, ..*shape }))?;
        if let Some(tensor) = packed(shape, parts).filter(|_| shape.kv_heads == shape.heads) {
            return Ok((tensor.clone(), None));
        }
        let rows = self.rows(KernelFamily::Attention, parts)?;
        let (tokens, tensor) = (shape.batch * shape.seq_len, parts[0].tensor());
        let one_type = rows.iter().all(|part| part.buffer.dtype == tensor.dtype());
        require(heads::supports_repeat_kv(shape, rows) && one_type)?;
        let wide = Tensor::zeros((tokens, 3 * shape.widths()[0]), tensor.dtype(), tensor.device())?;
        Ok((wide, Some(rows)))
    }

    /// Queries, keys and values [`side_by_side`](Self::side_by_side).
    fn spread(&self, shape: &AttentionShape, parts: [ColumnSlice<'_>; 3]) -> Attempt<Tensor> {
        let (tensor, apart) = self.side_by_side(shape, parts)?;
        if let Some(rows) = apart {
            let [wide] = self.buffers(KernelFamily::Attention, [&tensor])?;
            heads::spread(&self.queue, shape, rows, wide)?;
        }
        Ok(tensor)
    }

    fn attention(&self, op: &op::Attention<'_>) -> Attempt {
        let (shape, operands) = (&op.shape, &op.operands);
        let qkv = self.spread(shape, operands.qkv)?;
        let bounds = self.bounds(shape, operands.documents, qkv.device())?;
        let bounds = self.optional(KernelFamily::Attention, bounds.as_ref())?;
        let [qkv, out, lse] = self.buffers(KernelFamily::Attention, [&qkv, op.out, op.lse])?;
        require(out.dtype == qkv.dtype)?;
        let equal = AttentionShape { kv_heads: shape.heads, ..*shape };
        Ok(attention::forward(&self.queue, (equal, bounds), qkv, operands.dropout, out, lse)?)
    }

    fn attention_backward(&self, op: &op::AttentionBackward<'_>) -> Attempt {
        let (shape, operands) = (&op.shape, &op.operands);
        let qkv = self.spread(shape, operands.qkv)?;
        let (dqkv, apart) = self.side_by_side(shape, op.gradients)?;
        let bounds = self.bounds(shape, operands.documents, qkv.device())?;
        let bounds = self.optional(KernelFamily::Attention, bounds.as_ref())?;
        let tensors = [op.dout, &qkv, op.out, op.lse, &dqkv];
        let [dout, qkv, out, lse, dqkv] = self.buffers(KernelFamily::Attention, tensors)?;
        require([dout, out, dqkv].iter().all(|buffer| buffer.dtype == qkv.dtype))?;
        let equal = AttentionShape { kv_heads: shape.heads, ..*shape };
        attention::backward(&self.queue, (equal, bounds), [dout, qkv, out, lse], operands.dropout, dqkv)?;
        Ok(apart.map_or(Ok(()), |apart| heads::gather(&self.queue, shape, dqkv, apart))?)
    }

    fn apply_rope(&self, op: &op::Rotate<'_>) -> Attempt {
        let (half, positions) = (op.table.cos.dim(1)?, op.positions);
        let starts = positions.documents.map(|starts| Tensor::new(starts, op.x.tensor().device())).transpose()?;
        let [x] = self.rows(KernelFamily::Rope, [op.x])?;
        let angles = self.buffers(KernelFamily::Rope, [&op.table.cos, &op.table.sin])?;
        let starts = self.optional(KernelFamily::Rope, starts.as_ref())?;
        require(heads::supports_rope(x, half))?;
        Ok(heads::apply_rope(&self.queue, x, angles, half, positions, starts, op.direction)?)
    }

    fn norm(&self, op: &op::Norm<'_>) -> Attempt {
        let [x, y] = self.rows(KernelFamily::Norm, [op.x, op.y])?;
        let [weight, rstd] = self.buffers(KernelFamily::Norm, [op.weight, op.rstd])?;
        let [bias, mean] = [op.bias, op.mean].map(|tensor| self.optional(KernelFamily::Norm, tensor));
        let (bias, mean) = (bias?, mean?);
        require(takes_rows(&[x, y], weight) && is_pair([x.buffer.dtype, y.buffer.dtype]))?;
        require(weight.dtype == y.buffer.dtype && bias.is_none_or(|bias| bias.dtype == weight.dtype))?;
        let (statistics, numbers) = (norm::Statistics { mean, rstd }, (op.settings.eps, op.settings.gain_offset()));
        Ok(norm::forward(&self.queue, weight.len, x, (weight, bias), numbers, y, statistics)?)
    }

    fn norm_backward(&self, op: &op::NormBackward<'_>) -> Attempt {
        let [dy, x, dx] = self.rows(KernelFamily::Norm, [op.dy, op.x, op.dx])?;
        let [weight, rstd] = self.buffers(KernelFamily::Norm, [op.weight, op.rstd])?;
        let [mean, dweight, dbias] =
            [op.mean, op.dweight, op.dbias].map(|tensor| self.optional(KernelFamily::Norm, tensor));
        let (mean, dweight, dbias) = (mean?, dweight?, dbias?);
        let gradients = dweight.map(|dweight| (dweight, dbias));
        require(takes_rows(&[x, dy, dx], weight) && is_pair([x.buffer.dtype, dy.buffer.dtype]))?;
        require(weight.dtype == dy.buffer.dtype && dx.buffer.dtype == x.buffer.dtype)?;
        require(gradients.is_none_or(|(dweight, dbias)| dbias.is_none_or(|dbias| dweight.dtype == dbias.dtype)))?;
        let statistics = (norm::Statistics { mean, rstd }, op.settings.gain_offset());
        let to = (dx, op.mode == WriteMode::Overwrite);
        Ok(norm::backward(&self.queue, weight.len, (dy, x, weight), statistics, to, gradients)?)
    }

    fn cross_entropy(&self, op: &op::CrossEntropy<'_>) -> Attempt {
        let (logits, seed) = (op.logits, op.seed);
        let targets = Tensor::new(op.targets, op.losses.device())?;
        let weights = op.weights.map(|weights| Tensor::new(weights, op.losses.device())).transpose()?;
        let tensors = [&targets, logits.tensor(), op.losses];
        let [targets, buffer, losses] = self.buffers(KernelFamily::CrossEntropy, tensors)?;
        let weights = self.optional(KernelFamily::CrossEntropy, weights.as_ref())?;
        require(logits.first() == 0)?;
        let shape = [logits.rows(), logits.count(), logits.stride()];
        Ok(cross_entropy::rows(&self.queue, shape, buffer, targets, losses, seed, weights)?)
    }

    fn summarize(&self, op: &mut op::Summarize<'_>) -> Attempt {
        let mut buffers = Vec::with_capacity(op.tensors.len());
        for (tensor, format) in op.tensors {
            let [buffer] = self.buffers(KernelFamily::StatsLaunch, [tensor])?;
            buffers.push((buffer, *format));
        }
        let summary = StatsLaunch::new(&buffers)?;
        let Some((first, _)) = op.tensors.first() else { return Ok(()) };
        let words = Tensor::zeros(buffers.len() * summary::WORDS, DType::U32, first.device())?;
        let table = Tensor::new(summary.table(), first.device())?;
        let [figures, table] = self.buffers(KernelFamily::StatsLaunch, [&words, &table])?;
        summary.run(&self.queue, table, op.exponents, figures)?;
        // One copy, because the host waits for each.
        let counted: Vec<u32> = words.to_vec1()?;
        for (out, words) in op.out.iter_mut().zip(counted.as_chunks().0) {
            *out = summary::decode(words, op.exponents);
        }
        Ok(())
    }

    fn activate(&self, op: &op::Activate<'_>) -> Attempt {
        let [x, y] = self.buffers(KernelFamily::Elementwise, [op.x, op.y])?;
        let width = op.y.dim(1)?;
        require(elementwise::serves(width) && x.dtype == y.dtype)?;
        Ok(elementwise::activate(&self.queue, op.activation, width, x, y, None)?)
    }

    fn activate_backward(&self, op: &op::ActivateBackward<'_>) -> Attempt {
        let width = op.y.dim(1)?;
        let [x, dy, dx, y] = self.buffers(KernelFamily::Elementwise, [op.x, op.dy, op.dx, op.y])?;
        require(elementwise::serves(width) && [x, dy, dx].iter().all(|buffer| buffer.dtype == y.dtype))?;
        Ok(elementwise::activate(&self.queue, op.activation, width, x, y, Some([dy, dx]))?)
    }

    fn residual_add(&self, op: &op::AddBranch<'_>) -> Attempt {
        let [stream, branch, out] = self.buffers(KernelFamily::Elementwise, [op.stream, op.branch, op.out])?;
        require(stream.dtype == out.dtype && is_pair([out.dtype, branch.dtype]))?;
        Ok(elementwise::residual_add(&self.queue, stream, branch, op.dropout, out)?)
    }

    fn accumulate(&self, op: &op::Accumulate<'_>) -> Attempt {
        let along: Vec<&Tensor> = [op.x].into_iter().chain(op.inner.iter().copied()).chain([op.out]).collect();
        require(along.windows(2).all(|pair| is_pair([pair[1].dtype(), pair[0].dtype()])))?;
        let buffers = along.iter().map(|x| self.buffers(KernelFamily::Elementwise, [x]).map(|[buffer]| buffer));
        let buffers: Vec<DeviceSlice> = buffers.collect::<Attempt<_>>()?;
        for pair in buffers.windows(2) {
            elementwise::residual_add(&self.queue, pair[1], pair[0], None, pair[1])?;
        }
        Ok(())
    }

    fn copy(&self, op: &op::Copy<'_>) -> Attempt {
        let [x, out] = self.buffers(KernelFamily::Elementwise, [op.x, op.out])?;
        require(is_pair([x.dtype, out.dtype]))?;
        Ok(elementwise::residual_backward(&self.queue, x, op.dropout, out)?)
    }

    fn embed_backward(&self, op: &op::EmbedBackward<'_>) -> Attempt {
        let Embedding { ids, scale, dropout, .. } = op.input;
        let width = op.dx.dim(1)?;
        let [dx] = self.buffers(KernelFamily::Embedding, [op.dx])?;
        let dtable = self.optional(KernelFamily::Embedding, op.dtable)?;
        let dpositions = self.optional(KernelFamily::Embedding, op.dpositions)?;
        let served = |table: DeviceSlice| is_pair([dx.dtype, table.dtype]) || table.dtype == DType::F32;
        require(elementwise::serves(width) && dtable.is_none_or(served) && dpositions.is_none_or(served))?;
        let add = |groups: embedding::Groups, table: DeviceSlice, scale| -> Attempt {
            let upload = |numbers: Vec<u32>| Tensor::new(numbers, op.dx.device());
            let [order, ends] = [upload(groups.order)?, upload(groups.ends)?];
            let grouped = self.buffers(KernelFamily::Embedding, [&order, &ends])?;
            Ok(embedding::backward(&self.queue, [dx, table], grouped, width, scale, dropout)?)
        };
        if let (Some(table), Some(tensor)) = (dpositions, op.dpositions) {
            let places = op.input.places();
            tensor.zero_set()?;
            add(embedding::grouped(ids.len(), |row| places.of(row))?, table, 1.0)?;
        }
        let Some(table) = dtable else { return Ok(()) };
        add(embedding::grouped(ids.len(), |row| ids[row] as usize)?, table, scale)
    }

    fn linear(&self, op: &op::Linear<'_>) -> Attempt {
        require(op.low_rank.is_none())?;
        let mode = match op.bias {
            None => WriteMode::Overwrite,
            Some(bias) => {
                let [row, out] = self.buffers(KernelFamily::Product, [bias, op.y])?;
                require(elementwise::serves(row.len) && row.dtype == out.dtype)?;
                elementwise::fill_rows(&self.queue, row, out)?;
                WriteMode::Accumulate
            }
        };
        let b = MatmulOperand { columns: ColumnSlice::all(op.weight)?, transposed: op.layout == WeightLayout::OutIn };
        let a = MatmulOperand::plain(ColumnSlice::all(op.x)?);
        self.product(&op::Matmul { a, b, alpha: 1.0, c: ColumnSlice::all(op.y)?, mode })
    }

    fn product(&self, op: &op::Matmul<'_>) -> Attempt {
        require(self.families.contains(&KernelFamily::Product) && self.queue.product(op)?)
    }

    fn sum_rows(&self, op: &op::SumRows<'_>) -> Attempt {
        let (ones, sums) = (Tensor::ones((1, op.x.dim(0)?), op.x.dtype(), op.x.device())?, op.out.unsqueeze(0)?);
        let (a, b) = (MatmulOperand::plain(ColumnSlice::all(&ones)?), MatmulOperand::plain(ColumnSlice::all(op.x)?));
        self.product(&op::Matmul { a, b, alpha: 1.0, c: ColumnSlice::all(&sums)?, mode: WriteMode::Overwrite })
    }

    fn adamw(&self, op: &mut op::AdamW<'_>) -> Attempt {
        let tensors = [op.grad, op.master, op.exp_avg, op.exp_avg_sq, op.weight.unwrap_or(op.master)];
        let [grad, master, exp_avg, exp_avg_sq, copy] = self.buffers(KernelFamily::AdamW, tensors)?;
        require(is_pair([grad.dtype, copy.dtype]))?;
        let (state, weight) = ([master, exp_avg, exp_avg_sq], op.weight.map(|_| copy));
        let Some(counts) = op.counts.as_deref_mut().filter(|_| weight.is_some()) else {
            return Ok(adamw::step(&self.queue, op.step, grad, state, weight, None)?);
        };
        let words = Tensor::zeros(adamw::COUNT_WORDS, DType::U32, op.master.device())?;
        let [counted] = self.buffers(KernelFamily::AdamW, [&words])?;
        adamw::step(&self.queue, op.step, grad, state, weight, Some(counted))?;
        *counts += adamw::decode(&words.to_vec1::<u32>()?, grad.len as u64);
        Ok(())
    }
}

impl<Q: Queue> Kernels for CudaKernels<Q> {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&self, op: &mut Op<'_>) -> Result<Ran> {
        self.queue.begin(op);
        let attempt = match op {
            Op::Copy(op) => self.copy(op),
            Op::Accumulate(op) => self.accumulate(op),
            Op::EmbedBackward(op) => self.embed_backward(op),
            Op::Norm(op) => self.norm(op),
            Op::NormBackward(op) => self.norm_backward(op),
            Op::Rotate(op) => self.apply_rope(op),
            Op::Linear(op) => self.linear(op),
            Op::Matmul(op) => self.product(op),
            Op::SumRows(op) => self.sum_rows(op),
            Op::Attention(op) => self.attention(op),
            Op::AttentionBackward(op) => self.attention_backward(op),
            Op::Activate(op) => self.activate(op),
            Op::ActivateBackward(op) => self.activate_backward(op),
            Op::AddBranch(op) => self.residual_add(op),
            Op::CrossEntropy(op) => self.cross_entropy(op),
            Op::Summarize(op) => self.summarize(op),
            Op::AdamW(op) => self.adamw(op),
            _ => Err(Stop::Unsupported),
        };
        match attempt {
            Ok(()) => Ok(Ran::Done),
            Err(Stop::Unsupported) => Ok(Ran::Unsupported),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    fn pads_logits(&self) -> bool {
        [KernelFamily::CrossEntropy, KernelFamily::Product].iter().all(|family| self.families.contains(family))
    }
}

/// The reason why an operation is not computed.
enum Stop {
    /// There is no kernel for it.
    Unsupported,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

type Attempt<T = ()> = std::result::Result<T, Stop>;

/// Stops unless there is a kernel for the operands.
fn require(supported: bool) -> Attempt {
    if supported { Ok(()) } else { Err(Stop::Unsupported) }
}

/// Whether there are kernels for norms of these rows, by groups as wide as the weight.
fn takes_rows(operands: &[Rows], weight: DeviceSlice) -> bool {
    norm::serves(weight.len) && operands.iter().all(|rows| norm::supports_rows(*rows, weight.len))
}

/// Whether there are kernels for this pair of types: the first is equal to the second or FP32.
fn is_pair([wide, narrow]: [DType; 2]) -> bool {
    let is_stored = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    (wide == DType::F32 || wide == narrow) && is_stored(narrow)
}

/// The tensor that holds queries, keys and values side by side, and nothing else.
fn packed<'a>(shape: &AttentionShape, parts: [ColumnSlice<'a>; 3]) -> Option<&'a Tensor> {
    let (tensor, [queries, keys, values]) = (parts[0].tensor(), shape.widths());
    let side_by_side = parts.iter().zip([0, queries, queries + keys]).all(|(columns, first)| {
        columns.tensor().id() == tensor.id() && (columns.first(), columns.stride()) == (first, queries + keys + values)
    });
    side_by_side.then_some(tensor)
}
