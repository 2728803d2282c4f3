//! Causal attention of new tokens over the cached keys and values of all tokens before them, for generating text.
//!
//! The arithmetic and its order are those of [`attention`](super::attention): scores, softmax and sums are FP32.

use crate::engine::kernels::isa;
use crate::engine::kernels::math;
use crate::engine::kernels::rows::{axpy, dot, max, sum, with_scratch};
use crate::engine::kernels::view::{View, read, write, zeros};
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

/// One layer's keys and values, `[H, capacity, head_size]` each: a head's rows lie side by side.
#[derive(Debug)]
pub struct KeyValues {
    keys: Tensor,
    values: Tensor,
}

impl KeyValues {
    /// Room for `capacity` tokens.
    pub fn new(heads: usize, capacity: usize, head_size: usize, dtype: DType, device: &Device) -> Result<Self> {
        let zeros = || zeros(&[heads, capacity, head_size], dtype, device);
        Ok(Self { keys: zeros()?, values: zeros()? })
    }

    /// Lets it store `dtype`, empty, if it does not yet.
    pub fn retype(&mut self, dtype: DType) -> Result<()> {
        if self.keys.dtype() != dtype {
            let (heads, capacity, head_size) = self.keys.dims3()?;
            *self = Self::new(heads, capacity, head_size, dtype, &self.keys.device().clone())?;
        }
        Ok(())
    }

    /// Stores the keys and values of `qkv [n, 3·D]` behind those of the first `past` tokens, and attends with its queries:
    /// `out [n, D] = softmax(Q Kᵀ / √head_size, causal) V`.
    pub fn attend(&self, past: usize, qkv: &Tensor, out: &Tensor) -> Result<()> {
        let (heads, capacity, head_size) = self.keys.dims3()?;
        let (new, width) = out.dims2()?;
        if width != heads * head_size || qkv.dims() != [new, 3 * width] || past + new > capacity {
            bail!("{heads} heads with room for {capacity} tokens got {:?} after {past}", qkv.dims());
        }
        let qkv = read(qkv)?;
        let qkv = qkv.view();
        self.append(past, new, qkv)?;
        let (keys, values) = (read(&self.keys)?, read(&self.values)?);
        let (keys, values) = (keys.view(), values.view());
        write(out, |out| {
            let out = out.interleaved();
            (0..heads).into_par_iter().for_each(|head| {
                let size = (past + new) * head_size;
                let start = head * capacity * head_size;
                isa::vectorize(
                    #[inline(always)]
                    || {
                        with_scratch(
                            2 * size + past + new + 2 * head_size,
                            #[inline(always)]
                            |scratch| {
                                let (k, rest) = scratch.split_at_mut(size);
                                let (v, rest) = rest.split_at_mut(size);
                                let (p, rest) = rest.split_at_mut(past + new);
                                let (query, row) = rest.split_at_mut(head_size);
                                let (k, v) = (keys.widened(start, k), values.widened(start, v));
                                for i in 0..new {
                                    qkv.load(i * 3 * width + head * head_size, query);
                                    attend_row(query, k, v, &mut p[..=past + i], row);
                                    // SAFETY: this task alone writes this head's part of the row.
                                    unsafe { out.store(i * width + head * head_size, row) };
                                }
                            },
                        );
                    },
                );
            });
        })
    }

    /// Moves the key and value parts of `qkv`'s rows to their places.
    fn append(&self, past: usize, new: usize, qkv: View<'_>) -> Result<()> {
        let (heads, capacity, head_size) = self.keys.dims3()?;
        let width = heads * head_size;
        for (part, store) in [(1, &self.keys), (2, &self.values)] {
            write(store, |mut store| {
                with_scratch(
                    head_size,
                    #[inline(always)]
                    |row| {
                        for (t, head) in (0..new).flat_map(|t| (0..heads).map(move |head| (t, head))) {
                            qkv.load((3 * t + part) * width + head * head_size, row);
                            store.store((head * capacity + past + t) * head_size, row);
                        }
                    },
                );
            })?;
        }
        Ok(())
    }
}

/// `out = Σ softmax(q · k)[j] v[j]` over the first `p.len()` rows of keys and values; `p` is scratch.
#[inline(always)]
fn attend_row(query: &[f32], keys: &[f32], values: &[f32], p: &mut [f32], out: &mut [f32]) {
    let scale = 1.0 / (query.len() as f32).sqrt();
    for (p, key) in p.iter_mut().zip(keys.chunks_exact(query.len())) {
        *p = scale * dot(query, key);
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
