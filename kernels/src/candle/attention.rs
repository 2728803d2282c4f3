//! Causal attention with stored scores, in FP32, for as many whole sequences at a time as fit a budget.

use super::tensors::{columns_of_rows, drop, matmul, select, soft_cap, store, store_columns_of_rows, upcast};
use crate::attention::AttentionShape;
use crate::columns::ColumnSlice;
use crate::decode_attention::CachedSequence;
use crate::op;
use candle_core::{D, Device, Result, Tensor, bail};
use std::ops::Range;

/// Bytes of one matrix of scores at most, unless one sequence takes more.
const SCORE_BYTES: usize = 256 << 20;
/// Matrices of a score's shape that exist at once in the backward pass, with dropout or a soft cap.
const MATRICES: usize = 8;

/// See [`Kernels::score_bytes`](crate::Kernels::score_bytes).
pub(super) fn score_bytes(shape: &AttentionShape) -> Result<u64> {
    let scores = sequences_at_a_time(shape)? * shape.heads * shape.seq_len * shape.seq_len;
    Ok((MATRICES * scores * size_of::<f32>()) as u64)
}

/// Sequences processed together.
fn sequences_at_a_time(shape: &AttentionShape) -> Result<usize> {
    let AttentionShape { heads, seq_len, .. } = *shape;
    let scores = heads * seq_len * seq_len;
    if scores >= 1 << 32 {
        bail!(
            "{heads} heads of {seq_len} × {seq_len} scores exceed what candle's kernels address; use a shorter `seq_len`"
        );
    }
    Ok((SCORE_BYTES / (scores * size_of::<f32>())).clamp(1, shape.batch))
}

/// A part of the batch: whole sequences.
#[derive(Clone, Copy)]
struct BatchSlice<'a> {
    first: usize,
    count: usize,
    shape: &'a AttentionShape,
}

impl<'a> BatchSlice<'a> {
    fn all(shape: &'a AttentionShape) -> Result<impl Iterator<Item = Self>> {
        let step = sequences_at_a_time(shape)?;
        let part = move |first| Self { first, count: step.min(shape.batch - first), shape };
        Ok((0..shape.batch).step_by(step).map(part))
    }

    /// Its rows of a tensor with one row for each token.
    fn rows(self) -> Range<usize> {
        self.first * self.shape.seq_len..(self.first + self.count) * self.shape.seq_len
    }

    /// Its part of the statistics, which have one value for each head of each token.
    fn statistics(self, x: &Tensor) -> Result<Tensor> {
        let each = self.shape.heads * self.shape.seq_len;
        x.narrow(0, self.first * each, self.count * each)
    }

    /// Index of its first score, for the dropout mask.
    fn first_score(self) -> usize {
        self.first * self.shape.heads * self.shape.seq_len * self.shape.seq_len
    }

    /// `[count · kv_heads, group · T, head_size]` in FP32: query heads that share their keys are stacked.
    fn heads(self, x: ColumnSlice<'_>) -> Result<Tensor> {
        split_heads(&columns_of_rows(x, self.rows())?, self.count, self.shape)
    }

    fn operands(self, qkv: [ColumnSlice<'_>; 3]) -> Result<[Tensor; 3]> {
        let [queries, keys, values] = qkv;
        Ok([self.heads(queries)?, self.heads(keys)?, self.heads(values)?])
    }

    /// Which keys its queries attend to.
    fn visible(self, documents: Option<&[u32]>, device: &Device) -> Result<Tensor> {
        visible(self.shape, 0, documents.map(|starts| &starts[self.rows()]), device)
    }
}

/// Rows of heads as `[sequences · kv_heads, group · T, head_size]`, in FP32.
fn split_heads(rows: &Tensor, sequences: usize, shape: &AttentionShape) -> Result<Tensor> {
    let heads = rows.reshape((sequences, shape.seq_len, (), shape.head_size))?.transpose(1, 2)?.contiguous()?;
    upcast(&heads.reshape((sequences * shape.kv_heads, (), shape.head_size))?)
}

/// The inverse of [`split_heads`]: rows of heads.
fn merge_heads(heads: &Tensor, sequences: usize, shape: &AttentionShape) -> Result<Tensor> {
    let heads = heads.reshape((sequences, (), shape.seq_len, shape.head_size))?;
    heads.transpose(1, 2)?.contiguous()?.reshape((sequences * shape.seq_len, ()))
}

/// The mask of the `past + T` keys that each of T queries attends to: `[sequences, 1, T, past + T]`, U8. Without
/// documents one mask serves all sequences.
fn visible(shape: &AttentionShape, past: usize, documents: Option<&[u32]>, device: &Device) -> Result<Tensor> {
    let queries = shape.seq_len;
    let keys = past + shape.seq_len;
    let rows = documents.map_or(queries, <[u32]>::len);
    let mut visible = vec![0u8; rows * keys];
    for (row, visible) in visible.chunks_exact_mut(keys).enumerate() {
        let query = past + row % queries;
        let start = documents.map_or(0, |starts| starts[row] as usize).max(shape.first_in_window(query));
        visible[start..=query].fill(1);
    }
    Tensor::from_vec(visible, (rows / queries, 1, queries, keys), device)
}

/// The scores of all keys, capped if the model caps them: `[sequences, heads, T, keys]`.
fn scores(shape: &AttentionShape, queries: &Tensor, keys: &Tensor) -> Result<Tensor> {
    let scores = matmul(&(queries * f64::from(shape.scale))?, &keys.transpose(1, 2)?)?;
    let scores = scores.reshape(((), shape.heads, shape.seq_len, keys.dim(1)?))?;
    match shape.softcap {
        Some(cap) => soft_cap(&scores, cap),
        None => Ok(scores),
    }
}

/// Sets the scores of masked keys to -∞. Adding -∞ instead would let a NaN of a later token reach an earlier one.
fn masked(scores: &Tensor, visible: &Tensor) -> Result<Tensor> {
    select(visible, scores, f32::NEG_INFINITY)
}

/// The softmax of each row, whose denominator the sinks are a part of, and its log-sum-exp. On CUDA the maximum drops a
/// NaN, but the sum keeps it.
fn softmax(scores: &Tensor, sinks: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
    let mut top = scores.max_keepdim(D::Minus1)?;
    if let Some(sinks) = sinks {
        top = top.broadcast_maximum(sinks)?;
    }
    let exponentials = scores.broadcast_sub(&top)?.exp()?;
    let mut total = exponentials.sum_keepdim(D::Minus1)?;
    if let Some(sinks) = sinks {
        total = (total + sinks.broadcast_sub(&top)?.exp()?)?;
    }
    Ok((exponentials.broadcast_div(&total)?, (total.log()? + top)?))
}

/// The sinks as they are added to rows of scores: `[1, heads, 1, 1]`, in FP32.
fn by_head(sinks: Option<&Tensor>) -> Result<Option<Tensor>> {
    sinks.map(|sinks| upcast(sinks)?.reshape((1, (), 1, 1))).transpose()
}

/// A matrix of a score's shape as the products take it: `[sequences · kv_heads, group · T, keys]`.
fn grouped(scores: &Tensor, like: &Tensor) -> Result<Tensor> {
    scores.reshape((like.dim(0)?, like.dim(1)?, ()))
}

pub(super) fn forward(op: &op::Attention<'_>) -> Result<()> {
    let op::Attention { shape, operands, out, lse } = op;
    let sinks = by_head(operands.sinks)?;
    for part in BatchSlice::all(shape)? {
        let [queries, keys, values] = part.operands(operands.qkv)?;
        let visible = part.visible(operands.documents, out.device())?;
        let (probabilities, log_sum) = softmax(&masked(&scores(shape, &queries, &keys)?, &visible)?, sinks.as_ref())?;
        let probabilities = drop(operands.dropout, part.first_score(), probabilities)?;
        let attended = matmul(&grouped(&probabilities, &queries)?, &values)?;
        let rows = merge_heads(&attended, part.count, shape)?;
        store_columns_of_rows(&rows, ColumnSlice::all(out)?, part.rows())?;
        store(&log_sum.flatten_all()?, &part.statistics(&lse.flatten_all()?)?)?;
    }
    Ok(())
}

pub(super) fn backward(op: &op::AttentionBackward<'_>) -> Result<()> {
    let &op::AttentionBackward { ref shape, operands, dout, out, lse, gradients, dsinks } = op;
    let sinks = by_head(operands.sinks)?;
    let mut dsink = None;
    for part in BatchSlice::all(shape)? {
        let [queries, keys, values] = part.operands(operands.qkv)?;
        let (dout, out) = (part.heads(ColumnSlice::all(dout)?)?, part.heads(ColumnSlice::all(out)?)?);
        let visible = part.visible(operands.documents, dout.device())?;
        let per_row = |x: &Tensor| x.reshape((part.count, shape.heads, shape.seq_len, 1));
        let scores = scores(shape, &queries, &keys)?;
        let log_sum = per_row(&part.statistics(&lse.flatten_all()?)?)?;
        let p = masked(&scores, &visible)?.broadcast_sub(&log_sum)?.exp()?;
        // The softmax's derivative takes Σ_j p_j · dp_j, which is dout · out, masks included.
        let delta = per_row(&(&dout * out)?.sum_keepdim(D::Minus1)?)?;
        if let Some(sinks) = sinks.as_ref()
            && dsinks.is_some()
        {
            let of_part = (sinks.broadcast_sub(&log_sum)?.exp()? * &delta)?.neg()?.sum((0, 2, 3))?;
            dsink = Some(dsink.map_or(Ok(of_part.clone()), |sum: Tensor| sum + of_part)?);
        }
        let dp = matmul(&dout, &values.transpose(1, 2)?)?.reshape(p.shape())?;
        let dp = drop(operands.dropout, part.first_score(), dp)?;
        let mut ds = (&p * dp.broadcast_sub(&delta)?)?;
        if let Some(cap) = shape.softcap {
            ds = (ds * ((scores / f64::from(cap))?.sqr()?.neg()? + 1.0)?)?;
        }
        let ds = grouped(&(ds * f64::from(shape.scale))?, &queries)?;
        let dropped = grouped(&drop(operands.dropout, part.first_score(), p)?, &queries)?;
        let dv = matmul(&dropped.transpose(1, 2)?, &dout)?;
        let dk = matmul(&ds.transpose(1, 2)?, &queries)?;
        let dq = matmul(&ds, &keys)?;
        for (gradient, columns) in [dq, dk, dv].iter().zip(gradients) {
            store_columns_of_rows(&merge_heads(gradient, part.count, shape)?, columns, part.rows())?;
        }
    }
    dsink.zip(dsinks).map_or(Ok(()), |(sum, out)| store(&sum, out))
}

pub(super) fn decode(op: &op::DecodeAttention<'_>) -> Result<()> {
    let &op::DecodeAttention { ref shape, sequences, qkv, sinks, out } = op;
    let sinks = by_head(sinks)?;
    let mut first = 0;
    for &CachedSequence { cache, past, new } in sequences {
        let shape = &AttentionShape { seq_len: new, ..*shape };
        let heads = |x: ColumnSlice<'_>| split_heads(&columns_of_rows(x, first..first + new)?, 1, shape);
        let [queries, keys, values] = qkv;
        for (x, store) in [(keys, &cache.keys), (values, &cache.values)] {
            store.slice_set(&heads(x)?.to_dtype(store.dtype())?, 1, past)?;
        }
        let cached = |x: &Tensor| upcast(&x.narrow(1, 0, past + new)?.contiguous()?);
        let queries = heads(queries)?;
        let scores = scores(shape, &queries, &cached(&cache.keys)?)?;
        let visible = visible(shape, past, None, out.device())?;
        let (probabilities, _) = softmax(&masked(&scores, &visible)?, sinks.as_ref())?;
        let attended = matmul(&grouped(&probabilities, &queries)?, &cached(&cache.values)?)?;
        store(&merge_heads(&attended, 1, shape)?, &out.narrow(0, first, new)?)?;
        first += new;
    }
    Ok(())
}
