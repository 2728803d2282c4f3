//! The operands of operations: which tensors each one reads and writes, and whether they fit together.

use super::{Access, Embedding, Op};
use crate::adamw::AdamWTensor;
use crate::attention::AttentionShape;
use crate::columns::{ColumnSlice, WriteMode};
use crate::cross_entropy::IGNORE;
use crate::decode_attention::CachedSequence;
use crate::rope::{Direction, PositionIds};
use crate::{Activation, NormSettings, WeightLayout};
use candle_core::{DType, Result, Tensor, bail};

impl Op<'_> {
    /// Calls `visit` with each tensor that is read or written; with one that is updated first as read, then as written.
    /// Not for [`Op::Summarize`].
    pub fn for_each_tensor(&self, visit: &mut dyn FnMut(&Tensor, Access)) {
        let mut all = |reads: &[Option<&Tensor>], writes: &[Option<&Tensor>]| {
            reads.iter().flatten().for_each(|tensor| visit(tensor, Access::Read));
            writes.iter().flatten().for_each(|tensor| visit(tensor, Access::Write));
        };
        match self {
            Self::Zero(op) => all(&[], &[Some(op.x)]),
            Self::Copy(op) => all(&[Some(op.x)], &[Some(op.out)]),
            Self::Accumulate(op) => {
                all(&[Some(op.x), Some(op.out)], &[Some(op.out)]);
                op.inner.iter().for_each(|inner| all(&[Some(inner)], &[Some(inner)]));
            }
            Self::Embed(op) => all(&[Some(op.input.table), op.input.positions], &[Some(op.out)]),
            Self::EmbedBackward(op) => all(&[Some(op.dx), op.dtable], &[op.dtable, op.dpositions]),
            Self::Norm(op) => {
                all(&[Some(op.x.tensor()), Some(op.weight), op.bias], &[Some(op.y.tensor()), Some(op.rstd), op.mean]);
            }
            Self::NormBackward(op) => {
                let (dy, x, dx) = (Some(op.dy.tensor()), Some(op.x.tensor()), Some(op.dx.tensor()));
                let old = dx.filter(|_| op.mode == WriteMode::Accumulate);
                all(&[dy, x, Some(op.weight), Some(op.rstd), op.mean, old], &[dx, op.dweight, op.dbias]);
            }
            Self::Rotate(op) => {
                let x = Some(op.x.tensor());
                all(&[Some(&op.table.cos), Some(&op.table.sin), x], &[x]);
            }
            Self::Linear(op) => {
                let low = op.low_rank.map(|low_rank| low_rank.low);
                let factor = op.low_rank.map(|low_rank| low_rank.factor.columns.tensor());
                all(&[Some(op.x), Some(op.weight), op.bias, low, factor], &[Some(op.y)]);
            }
            Self::Matmul(op) => {
                let c = Some(op.c.tensor());
                let old = c.filter(|_| op.mode == WriteMode::Accumulate);
                all(&[Some(op.a.columns.tensor()), Some(op.b.columns.tensor()), old], &[c]);
            }
            Self::SumRows(op) => all(&[Some(op.x)], &[Some(op.out)]),
            Self::Attention(op) => {
                all(&tensors(op.operands.qkv), &[Some(op.out), Some(op.lse)]);
                all(&[op.operands.sinks], &[]);
            }
            Self::AttentionBackward(op) => {
                all(&tensors(op.operands.qkv), &[]);
                all(&[Some(op.dout), Some(op.out), Some(op.lse), op.operands.sinks], &tensors(op.gradients));
                all(&[], &[op.dsinks]);
            }
            Self::DecodeAttention(op) => {
                all(&tensors(op.qkv), &[Some(op.out)]);
                all(&[op.sinks], &[]);
                for CachedSequence { cache, .. } in op.sequences {
                    let stored = [Some(&cache.keys), Some(&cache.values)];
                    all(&stored, &stored);
                }
            }
            Self::Activate(op) => all(&[Some(op.x)], &[Some(op.y)]),
            Self::ActivateBackward(op) => all(&[Some(op.x), Some(op.dy)], &[Some(op.dx), Some(op.y)]),
            Self::AddBranch(op) => all(&[Some(op.stream), Some(op.branch)], &[Some(op.out)]),
            Self::SoftCap(op) => all(&[Some(op.x)], &[Some(op.out)]),
            Self::CrossEntropy(op) => {
                let logits = Some(op.logits.tensor());
                all(&[logits], &[logits, Some(op.losses)]);
            }
            Self::Summarize(_) => {}
            Self::Sum(op) => all(&[Some(op.x)], &[]),
            Self::AdamW(op) => {
                for x in &op.tensors {
                    let state = [Some(x.master), Some(x.exp_avg), Some(x.exp_avg_sq)];
                    all(&[Some(x.grad)], &[x.weight]);
                    all(&state, &state);
                    let scales = x.scales.iter().flatten();
                    scales.for_each(|it| all(&[Some(it.map), Some(it.absmax)], &[Some(it.absmax)]));
                }
            }
            Self::Route(op) => all(&[Some(op.logits)], &[Some(op.weights)]),
            Self::RouteBackward(op) => {
                all(&[op.logits, op.weights, op.x, op.dx].map(Some), &[Some(op.dlogits)]);
            }
            Self::ScaleRows(op) => all(&[Some(op.weights), Some(op.x)], &[Some(op.x)]),
            Self::ShortConv(op) => all(&[op.input, op.weight].map(Some), &[Some(op.out)]),
            Self::ShortConvBackward(op) => {
                all(&[op.input, op.weight, op.dy].map(Some), &[Some(op.dinput), op.dweight]);
            }
            Self::DecodeShortConv(op) => {
                all(&[op.input, op.weight].map(Some), &[Some(op.out)]);
                let caches = op.sequences.iter().map(|sequence| [Some(&sequence.cache.products)]);
                caches.for_each(|products| all(&products, &products));
            }
            Self::CopyQueries(op) => {
                let (pairs, queries) = (Some(op.pairs.columns.tensor()), Some(op.queries));
                let [from, to] = if op.direction == Direction::Forward { [pairs, queries] } else { [queries, pairs] };
                all(&[from], &[to]);
            }
            Self::GateHeads(op) => all(&[op.pairs.columns.tensor(), op.x].map(Some), &[Some(op.out)]),
            Self::GateHeadsBackward(op) => {
                let written = [op.dx, op.dpairs.columns.tensor()].map(Some);
                all(&[op.pairs.columns.tensor(), op.x, op.dx].map(Some), &written);
            }
            Self::GatedDelta(op) => {
                all(&op.params.all().map(Some), &[]);
                all(&[Some(op.input)], &[Some(op.out)]);
            }
            Self::GatedDeltaBackward(op) => {
                all(&op.params.all().map(Some), &op.gradients.all());
                all(&[op.input, op.dy].map(Some), &[Some(op.dinput)]);
            }
            Self::DecodeGatedDelta(op) => {
                all(&op.params.all().map(Some), &[]);
                all(&[Some(op.input)], &[Some(op.out)]);
                let caches = op.sequences.iter().map(|it| [&it.cache.inputs, &it.cache.states].map(Some));
                caches.for_each(|cached| all(&cached, &cached));
            }
        }
    }

    /// Fails unless the operands are contiguous, of types that kernels store, and of shapes that fit together.
    pub fn check(&self) -> Result<()> {
        let mut stored = true;
        self.for_each_tensor(&mut |x, _| {
            let is_code = x.dtype() == DType::U8 && matches!(self, Self::AdamW(_));
            stored &= x.is_contiguous() && (is_code || matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16));
        });
        if !(stored && self.fits()?) {
            bail!("operands that do not fit together, or that no kernel takes: {self:?}");
        }
        Ok(())
    }

    /// Whether the shapes and types of the operands fit together.
    fn fits(&self) -> Result<bool> {
        Ok(match self {
            Self::Zero(_) | Self::Sum(_) => true,
            Self::Copy(op) => same_shapes([op.x, op.out]),
            Self::SoftCap(op) => op.x.rank() == 2 && same_shapes([op.x, op.out]),
            Self::Accumulate(op) => {
                op.inner.iter().all(|x| same_shapes([op.x, x]) && x.dtype() == DType::F32)
                    && same_shapes([op.x, op.out])
            }
            Self::Embed(op) => op.input.fits(op.input.table, op.input.positions, op.out)?,
            Self::EmbedBackward(op) => {
                op.order.len() == op.input.ids.len()
                    && op.input.fits(op.dtable.unwrap_or(op.input.table), op.dpositions, op.dx)?
            }
            Self::Norm(op) => {
                let vectors = [op.bias, op.mean].map(|vector| vector.is_some());
                op.settings.fits([op.x, op.y], op.weight, op.mean, op.rstd)
                    && vectors == [op.settings.centers(); 2]
                    && op.bias.is_none_or(|bias| same_shapes([bias, op.weight]))
            }
            Self::NormBackward(op) => {
                let gradients = [op.dweight, op.dbias].into_iter().flatten().all(|grad| same_shapes([grad, op.weight]));
                let biased = op.dbias.is_some() == (op.dweight.is_some() && op.settings.centers());
                op.dx.dims() == op.x.dims()
                    && (gradients && biased)
                    && op.settings.fits([op.x, op.dy], op.weight, op.mean, op.rstd)
            }
            Self::Rotate(op) => {
                let rows = op.x.rows();
                let (available, half) = op.table.cos.dims2()?;
                let heads = half > 0 && op.x.count().is_multiple_of(2 * half);
                let known = op.positions.past + op.positions.seq_len.min(rows) <= available;
                let documents = op.positions.documents.is_none_or(|starts| starts.len() == rows);
                heads && known && documents && op.positions.seq_len > 0
            }
            Self::Linear(op) => {
                let (rows, columns) = op.weight.dims2()?;
                let [inner, outer] = if op.layout == WeightLayout::InOut { [rows, columns] } else { [columns, rows] };
                let rows = op.x.dim(0)?;
                let bias = op.bias.is_none_or(|bias| bias.dims() == [outer]);
                let low_rank = op.low_rank.is_none_or(|low_rank| {
                    let [rank, width] = low_rank.factor.dims();
                    low_rank.low.dims() == [rows, rank] && width == outer
                });
                op.x.dims() == [rows, inner] && op.y.dims() == [rows, outer] && bias && low_rank
            }
            Self::Matmul(op) => {
                let [m, k] = op.a.dims();
                let [depth, n] = op.b.dims();
                let one_type = op.a.columns.tensor().dtype() == op.b.columns.tensor().dtype();
                k == depth && [m, n] == op.c.dims() && one_type
            }
            Self::SumRows(op) => op.out.dims() == [op.x.dims2()?.1],
            Self::Attention(op) => {
                op.operands.check(&op.shape, op.out, op.lse)?;
                true
            }
            Self::AttentionBackward(op) => {
                op.operands.check(&op.shape, op.out, op.lse)?;
                op.shape.check(op.gradients)?;
                op.shape.check_sinks(op.dsinks)?;
                same_shapes([op.dout, op.out]) && (op.dsinks.is_none() || op.operands.sinks.is_some())
            }
            Self::DecodeAttention(op) => {
                op.shape.check(op.qkv)?;
                op.shape.check_sinks(op.sinks)?;
                let AttentionShape { batch, seq_len, kv_heads, head_size, .. } = op.shape;
                let fits = |&CachedSequence { cache, past, new }: &CachedSequence<'_>| {
                    let capacity = cache.capacity();
                    cache.keys.dims() == [kv_heads, capacity, head_size] && past + new <= capacity
                };
                batch == 1
                    && op.sequences.iter().all(fits)
                    && op.sequences.iter().map(|sequence| sequence.new).sum::<usize>() == seq_len
                    && op.out.dims() == [seq_len, op.shape.widths()[0]]
            }
            Self::Activate(op) => op.activation.fits(op.x, op.y)?,
            Self::ActivateBackward(op) => {
                op.activation.fits(op.x, op.y)? && same_shapes([op.dx, op.x]) && same_shapes([op.dy, op.y])
            }
            Self::AddBranch(op) => same_shapes([op.stream, op.branch, op.out]),
            Self::CrossEntropy(op) => {
                let [rows, vocab] = op.logits.dims();
                if let Some(target) = op.targets.iter().find(|&&target| target != IGNORE && target as usize >= vocab) {
                    bail!("target {target} is outside the model's vocabulary of {vocab}");
                }
                let rows_fit = op.targets.len() == rows && op.weights.is_none_or(|weights| weights.len() == rows);
                rows_fit && op.losses.dims() == [rows] && op.losses.dtype() == DType::F32
            }
            Self::Summarize(op) => op.tensors.len() == op.out.len(),
            Self::AdamW(op) => op.tensors.iter().all(AdamWTensor::fits),
            Self::Route(op) => op.fits()?,
            Self::RouteBackward(op) => op.fits()?,
            Self::ScaleRows(op) => op.fits()?,
            Self::ShortConv(op) => op.fits()?,
            Self::ShortConvBackward(op) => op.fits()?,
            Self::DecodeShortConv(op) => op.fits()?,
            Self::CopyQueries(op) => op.pairs.fits(op.queries)?,
            Self::GateHeads(op) => op.pairs.fits(op.x)? && same_shapes([op.x, op.out]),
            Self::GateHeadsBackward(op) => op.pairs.fits(op.x)? && op.dpairs.fits(op.x)? && same_shapes([op.x, op.dx]),
            Self::GatedDelta(op) => op.fits()?,
            Self::GatedDeltaBackward(op) => op.fits()?,
            Self::DecodeGatedDelta(op) => op.fits()?,
        })
    }
}

impl NormSettings {
    /// Whether two matrices are rows of groups as wide as the weight, with statistics for each group.
    fn fits(self, x: [ColumnSlice<'_>; 2], weight: &Tensor, mean: Option<&Tensor>, rstd: &Tensor) -> bool {
        let [rows, columns] = x[0].dims();
        let width = weight.elem_count();
        let whole = weight.rank() == 1 && width > 0 && columns.is_multiple_of(width) && x[1].dims() == [rows, columns];
        let groups = |x: &Tensor| x.dtype() == DType::F32 && x.elem_count() * width == rows * columns;
        whole && mean.is_some() == self.centers() && groups(rstd) && mean.is_none_or(groups)
    }
}

impl Activation {
    /// Whether input and output are of shapes that fit together.
    fn fits(self, x: &Tensor, y: &Tensor) -> Result<bool> {
        let (rows, width) = y.dims2()?;
        Ok(x.dims() == [rows, if self.is_gated() { 2 * width } else { width }])
    }
}

impl<'a> Embedding<'a> {
    pub(crate) fn places(&self) -> PositionIds<'a> {
        PositionIds { seq_len: self.seq_len, past: 0, documents: self.documents }
    }

    /// Whether there are rows for all tokens, given the tables that are read or written.
    fn fits(&self, table: &Tensor, positions: Option<&Tensor>, x: &Tensor) -> Result<bool> {
        let (vocab, width) = table.dims2()?;
        if let Some(id) = self.ids.iter().find(|&&id| id as usize >= vocab) {
            bail!("token id {id} is outside the model's vocabulary of {vocab}");
        }
        let rows = self.ids.len();
        let known = |positions: &Tensor| matches!(*positions.dims(), [count, w] if count >= self.seq_len && w == width);
        let documents = self.documents.is_none_or(|starts| starts.len() == rows);
        let sequences = self.seq_len > 0 && rows.is_multiple_of(self.seq_len);
        Ok(sequences && documents && positions.is_none_or(known) && x.dims() == [rows, width])
    }
}

fn tensors(columns: [ColumnSlice<'_>; 3]) -> [Option<&Tensor>; 3] {
    columns.map(|columns| Some(columns.tensor()))
}

pub(crate) fn same_shapes<const N: usize>(tensors: [&Tensor; N]) -> bool {
    tensors.iter().all(|tensor| tensor.dims() == tensors[0].dims())
}
