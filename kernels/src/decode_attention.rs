//! Causal attention of new tokens over the cached keys and values of all tokens before them, for generating text.
//!
//! Computes with the products and the softmax of [`attention`](super::attention) in their order, so a row has the bits
//! of the training pass for any number of new tokens.

use crate::attention::product::{by_rows, in_panels, in_rows, multiply, overwrite, transpose};
use crate::attention::{AttentionShape, PAD, QUERIES, divide, exponentials, upcast, with_matrices};
use crate::columns::{ColumnReader, ColumnSlice, ColumnWriter, write_columns};
use crate::isa;
use crate::op;
use crate::rows::{scale, with_scratch};
use crate::view::{View, read, write, zeros};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// One layer's keys and values, `[kv_heads, capacity, head_size]` each: a head's rows are contiguous.
#[derive(Debug)]
pub struct LayerKvCache {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

/// New tokens of a sequence, and a layer's cache of the tokens before them.
#[derive(Debug)]
pub struct CachedSequence<'a, C = LayerKvCache> {
    /// Data of the tokens before.
    pub cache: &'a C,
    /// Tokens in the cache before the new ones.
    pub past: usize,
    /// New tokens.
    pub new: usize,
}

impl<C> Clone for CachedSequence<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for CachedSequence<'_, C> {}

impl LayerKvCache {
    /// Room for `capacity` tokens.
    pub fn new(kv_heads: usize, capacity: usize, head_size: usize, dtype: DType, device: &Device) -> Result<Self> {
        let zeros = || zeros(&[kv_heads, capacity, head_size], dtype, device);
        Ok(Self { keys: zeros()?, values: zeros()? })
    }

    /// The number of tokens that it has room for.
    pub(super) fn capacity(&self) -> usize {
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

    /// A copy with room for `capacity` tokens and the first `len` tokens of this one.
    pub fn grown(&self, capacity: usize, len: usize) -> Result<Self> {
        let (kv_heads, _, head_size) = self.keys.dims3()?;
        let grown = Self::new(kv_heads, capacity, head_size, self.keys.dtype(), self.keys.device())?;
        if len > 0 {
            for (old, new) in [(&self.keys, &grown.keys), (&self.values, &grown.values)] {
                new.slice_set(&old.narrow(1, 0, len)?.contiguous()?, 1, 0)?;
            }
        }
        Ok(grown)
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

pub(super) fn attend(op: &op::DecodeAttention<'_>) -> Result<()> {
    let &op::DecodeAttention { ref shape, sequences, qkv, sinks, out } = op;
    let [queries, k, v] = qkv;
    let sinks = sinks.map(upcast).transpose()?;
    let mut first = 0;
    let mut caches = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        let rows = first..first + sequence.new;
        first = rows.end;
        sequence.cache.append(sequence.past, rows.clone(), [k, v])?;
        caches.push((read(&sequence.cache.keys)?, read(&sequence.cache.values)?, sequence, rows));
    }
    let opened = read(queries.tensor())?;
    let queries = queries.source(&opened);
    let kv_heads = shape.kv_heads;
    write_columns([ColumnSlice::all(out)?], |[out]| {
        (0..caches.len() * kv_heads).into_par_iter().for_each(|task| {
            let kv_head = task % kv_heads;
            let (keys, values, sequence, rows) = &caches[task / kv_heads];
            let group = HeadGroup {
                shape,
                kv_head,
                sinks: sinks.as_deref(),
                sequence: **sequence,
                stored: [keys.view(), values.view()],
                queries,
                first_row: rows.start,
            };
            isa::vectorize!(group.attend(out));
        });
    })
}

/// The new tokens of a sequence for the heads that share `kv_head`.
struct HeadGroup<'a> {
    shape: &'a AttentionShape,
    kv_head: usize,
    sinks: Option<&'a [f32]>,
    sequence: CachedSequence<'a>,
    /// The cache's keys and values.
    stored: [View<'a>; 2],
    queries: ColumnReader<'a>,
    /// The row of the first new token.
    first_row: usize,
}

impl HeadGroup<'_> {
    /// Writes attention's output.
    #[inline(always)]
    fn attend(&self, out: ColumnWriter<'_>) {
        let &Self { shape, kv_head, sinks, sequence, stored, queries, first_row } = self;
        let CachedSequence { cache, past, new } = sequence;
        let &AttentionShape { heads, kv_heads, head_size, .. } = shape;
        let group = heads / kv_heads;
        let size = head_size.next_multiple_of(PAD);
        // Keys before the first new token's window are not read.
        let lowest = shape.first_in_window(past) / PAD * PAD;
        let tokens = (past + new - lowest).next_multiple_of(PAD);
        let row = tokens + PAD;
        with_matrices(
            [tokens * size, tokens * size, QUERIES * size, QUERIES * row],
            #[inline(always)]
            |[v, kt, x, p]| {
                let start = (kv_head * cache.capacity() + lowest) * head_size;
                let [keys, values] = stored.map(|view| view.slice(start..start + (past + new - lowest) * head_size));
                load(keys, head_size, size, v);
                transpose(v, size, kt);
                load(values, head_size, size, v);
                let place = |index: usize| (kv_head * group + index / new, index % new);
                for first in (0..group * new).step_by(QUERIES) {
                    let indices = first..(group * new).min(first + QUERIES);
                    let mut from = usize::MAX;
                    let mut to = 0;
                    for (index, x) in indices.clone().zip(x.chunks_exact_mut(size)) {
                        let (head, token) = place(index);
                        from = from.min(past + token);
                        to = to.max(past + token + 1);
                        queries.load(first_row + token, head * head_size, &mut x[..head_size]);
                        x[head_size..].fill(0.0);
                        scale(x, shape.scale);
                    }
                    let from = shape.first_in_window(from) / PAD * PAD;
                    let count = indices.len();
                    let keys = (to - from).next_multiple_of(PAD);
                    let below = (from - lowest) * size;
                    multiply([count, size, keys], by_rows(x, size), in_panels(&kt[below..], size), overwrite(p, row));
                    let mut totals = [0.0; QUERIES];
                    for ((index, total), p) in indices.clone().zip(&mut totals).zip(p.chunks_exact_mut(row)) {
                        let (head, token) = place(index);
                        let position = past + token;
                        let seen = shape.first_in_window(position) - from..position + 1 - from;
                        (_, *total) = exponentials(&mut p[..keys], seen, shape.softcap, sinks.map(|sinks| sinks[head]));
                    }
                    multiply([count, keys, size], by_rows(p, row), in_rows(&v[below..], size), overwrite(x, size));
                    for ((index, total), x) in indices.zip(totals).zip(x.chunks_exact_mut(size)) {
                        let (head, token) = place(index);
                        divide(&mut x[..head_size], total);
                        // SAFETY: this task alone writes this head's part of the row.
                        unsafe { out.store(first_row + token, head * head_size, &x[..head_size]) };
                    }
                }
            },
        );
    }
}

/// Upcasts rows of `head_size` into rows of `size`, padded with zeros.
#[inline(always)]
fn load(stored: View<'_>, head_size: usize, size: usize, out: &mut [f32]) {
    let rows = stored.len() / head_size;
    for (t, row) in out.chunks_exact_mut(size).enumerate() {
        let (row, padding) = row.split_at_mut(if t < rows { head_size } else { 0 });
        if t < rows {
            stored.load(t * head_size, row);
        }
        padding.fill(0.0);
    }
}
