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

/// One layer's keys and values, `[kv_heads, capacity, head_size]` each: a head's rows are contiguous.
#[derive(Debug)]
pub struct LayerKvCache {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl LayerKvCache {
    /// Room for `capacity` tokens.
    pub fn new(kv_heads: usize, capacity: usize, head_size: usize, dtype: DType, device: &Device) -> Result<Self> {
        let zeros = || zeros(&[kv_heads, capacity, head_size], dtype, device);
        Ok(Self { keys: zeros()?, values: zeros()? })
    }

    /// Changes the storage type to `dtype`, which discards the content unless the type is unchanged.
    pub fn retype(&mut self, dtype: DType) -> Result<()> {
        if self.keys.dtype() != dtype {
            let (kv_heads, capacity, head_size) = self.keys.dims3()?;
            *self = Self::new(kv_heads, capacity, head_size, dtype, &self.keys.device().clone())?;
        }
        Ok(())
    }

    /// Computes [`op::DecodeAttention`] with this cache.
    pub(super) fn attend(&self, op: &op::DecodeAttention<'_>) -> Result<()> {
        let &op::DecodeAttention { ref shape, past, qkv, out, .. } = op;
        let (kv_heads, capacity, head_size) = self.keys.dims3()?;
        let new = shape.seq_len;
        let [queries, k, v] = qkv;
        self.append(past, new, [k, v])?;
        let (keys, values, opened) = (read(&self.keys)?, read(&self.values)?, read(queries.tensor())?);
        let (keys, values, queries) = (keys.view(), values.view(), queries.source(&opened));
        // Keys before the first new token's window are not read.
        let lowest = shape.first_in_window(past);
        let (kept, group) = (past + new - lowest, shape.heads / kv_heads);
        write_columns([ColumnSlice::all(out)?], |[out]| {
            (0..kv_heads).into_par_iter().for_each(|kv_head| {
                let size = kept * head_size;
                let start = (kv_head * capacity + lowest) * head_size;
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
                                let (k, v) = (keys.widened(start, k), values.widened(start, v));
                                let heads = kv_head * group..(kv_head + 1) * group;
                                for (head, i) in heads.flat_map(|head| (0..new).map(move |i| (head, i))) {
                                    queries.load(i, head * head_size, query);
                                    let seen = shape.first_in_window(past + i) - lowest..past + i + 1 - lowest;
                                    let rows = seen.start * head_size..seen.end * head_size;
                                    attend_row(shape, query, &k[rows.clone()], &v[rows], &mut p[seen], row);
                                    // SAFETY: this task alone writes this head's part of the row.
                                    unsafe { out.store(i, head * head_size, row) };
                                }
                            },
                        );
                    },
                );
            });
        })
    }

    /// Copies new keys and values into the cache.
    fn append(&self, past: usize, new: usize, parts: [ColumnSlice<'_>; 2]) -> Result<()> {
        let (heads, capacity, head_size) = self.keys.dims3()?;
        for (part, store) in parts.into_iter().zip([&self.keys, &self.values]) {
            let opened = read(part.tensor())?;
            let part = part.source(&opened);
            write(store, |mut store| {
                with_scratch(
                    head_size,
                    #[inline(always)]
                    |row| {
                        for (t, head) in (0..new).flat_map(|t| (0..heads).map(move |head| (t, head))) {
                            part.load(t, head * head_size, row);
                            store.store((head * capacity + past + t) * head_size, row);
                        }
                    },
                );
            })?;
        }
        Ok(())
    }
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
