//! Causal attention of new tokens over the cached keys and values of all tokens before them, for generating text.
//!
//! The arithmetic and its order are the same as in [`attention`](super::attention): scores, softmax and sums are FP32.

use crate::attention::AttentionShape;
use crate::columns::{ColumnSlice, write_columns};
use crate::isa;
use crate::math;
use crate::op;
use crate::rows::{axpy, dot, max, sum, with_scratch};
use crate::view::{read, write, zeros};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// One layer's keys and values, `[kv_heads, capacity, head_size]` each: a head's rows are contiguous.
#[derive(Debug)]
pub struct LayerKvCache {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

/// New tokens of a sequence, and the tokens before them.
#[derive(Clone, Copy, Debug)]
pub struct CachedSequence<'a> {
    /// Keys and values of all its tokens.
    pub cache: &'a LayerKvCache,
    /// Tokens in the cache before the new ones.
    pub past: usize,
    /// New tokens.
    pub new: usize,
}

impl LayerKvCache {
    /// Room for `capacity` tokens.
    pub fn new(kv_heads: usize, capacity: usize, head_size: usize, dtype: DType, device: &Device) -> Result<Self> {
        let zeros = || zeros(&[kv_heads, capacity, head_size], dtype, device);
        Ok(Self { keys: zeros()?, values: zeros()? })
    }

    /// The number of tokens that it has room for.
    fn capacity(&self) -> usize {
        self.keys.dims()[1]
    }

    /// Changes the storage type to `dtype`, which discards the content unless the type is unchanged.
    pub fn retype(&mut self, dtype: DType) -> Result<()> {
        if self.keys.dtype() != dtype {
            let (kv_heads, capacity, head_size) = self.keys.dims3()?;
            *self = Self::new(kv_heads, capacity, head_size, dtype, &self.keys.device().clone())?;
        }
        Ok(())
    }

    /// Copies the keys and values of `rows` into the cache, starting at token `past`.
    fn append(&self, past: usize, rows: Range<usize>, parts: [ColumnSlice<'_>; 2]) -> Result<()> {
        let (heads, capacity, head_size) = self.keys.dims3()?;
        for (part, store) in parts.into_iter().zip([&self.keys, &self.values]) {
            let opened = read(part.tensor())?;
            let part = part.source(&opened);
            write(store, |mut store| {
                with_scratch(
                    head_size,
                    #[inline(always)]
                    |row| {
                        for (t, head) in rows.clone().flat_map(|t| (0..heads).map(move |head| (t, head))) {
                            part.load(t, head * head_size, row);
                            store.store((head * capacity + past + t - rows.start) * head_size, row);
                        }
                    },
                );
            })?;
        }
        Ok(())
    }
}

/// Computes [`op::DecodeAttention`].
pub(super) fn attend(op: &op::DecodeAttention<'_>) -> Result<()> {
    let &op::DecodeAttention { ref shape, sequences, qkv, out } = op;
    let [queries, k, v] = qkv;
    let (mut first, mut caches) = (0, Vec::with_capacity(sequences.len()));
    for sequence in sequences {
        let rows = first..first + sequence.new;
        first = rows.end;
        sequence.cache.append(sequence.past, rows.clone(), [k, v])?;
        caches.push((read(&sequence.cache.keys)?, read(&sequence.cache.values)?, sequence, rows));
    }
    let opened = read(queries.tensor())?;
    let queries = queries.source(&opened);
    let AttentionShape { kv_heads, head_size, heads, .. } = *shape;
    let group = heads / kv_heads;
    write_columns([ColumnSlice::all(out)?], |[out]| {
        let tasks = caches.len() * kv_heads;
        (0..tasks).into_par_iter().for_each(|task| {
            let (kv_head, (keys, values, sequence, rows)) = (task % kv_heads, &caches[task / kv_heads]);
            let CachedSequence { cache, past, new } = **sequence;
            // Keys before the first new token's window are not read.
            let lowest = shape.first_in_window(past);
            let kept = past + new - lowest;
            let size = kept * head_size;
            let start = (kv_head * cache.capacity() + lowest) * head_size;
            isa::vectorize(
                #[inline(always)]
                || {
                    with_scratch(
                        2 * size + kept + 2 * head_size,
                        #[inline(always)]
                        |scratch| {
                            let (k, rest) = scratch.split_at_mut(size);
                            let (v, rest) = rest.split_at_mut(size);
                            let (p, rest) = rest.split_at_mut(kept);
                            let (query, row) = rest.split_at_mut(head_size);
                            let (k, v) = (keys.view().as_f32(start, k), values.view().as_f32(start, v));
                            let heads = kv_head * group..(kv_head + 1) * group;
                            for (head, i) in heads.flat_map(|head| (0..new).map(move |i| (head, i))) {
                                queries.load(rows.start + i, head * head_size, query);
                                let seen = shape.first_in_window(past + i) - lowest..past + i + 1 - lowest;
                                let of_seen = seen.start * head_size..seen.end * head_size;
                                attend_row(shape, query, &k[of_seen.clone()], &v[of_seen], &mut p[seen], row);
                                // SAFETY: this task alone writes this head's part of the row.
                                unsafe { out.store(rows.start + i, head * head_size, row) };
                            }
                        },
                    );
                },
            );
        });
    })
}

/// `out = Σ softmax(scale · query · k)[j] v[j]` over the rows of keys and values; `p` is scratch for as many scores.
#[inline(always)]
fn attend_row(shape: &AttentionShape, query: &[f32], keys: &[f32], values: &[f32], p: &mut [f32], out: &mut [f32]) {
    for (p, key) in p.iter_mut().zip(keys.chunks_exact(query.len())) {
        *p = shape.scale * dot(query, key);
    }
    if let Some(cap) = shape.softcap {
        for p in p.iter_mut() {
            *p = cap * math::tanh(*p / cap);
        }
    }
    let top = max(p);
    for p in p.iter_mut() {
        *p = math::exp(*p - top);
    }
    let total = sum(p);
    out.fill(0.0);
    for (p, value) in p.iter().zip(values.chunks_exact(query.len())) {
        axpy(*p / total, value, out);
    }
}
