//! Causal self-attention on packed queries, keys and values.
//!
//! A head's scores never exist as a whole: the forward pass keeps each row's log-sum-exp, and the backward pass
//! recomputes the probabilities from it (Dao et al., "FlashAttention", 2022). Scores, softmax and sums are FP32.

use crate::kernels::dropout::Dropout;
use crate::kernels::isa;
use crate::kernels::math;
use crate::kernels::rows::{axpy, dot, max, sum, with_scratch};
use crate::kernels::view::{View, read, write, write_f32};
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

/// The shape of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences in the batch, B.
    pub batch: usize,
    /// Tokens in a sequence, T.
    pub seq_len: usize,
    /// Heads, H.
    pub heads: usize,
    /// Width of a head.
    pub head_size: usize,
}

impl Shape {
    fn width(self) -> usize {
        self.heads * self.head_size
    }

    /// Where token `t` of sequence `b` has the values of `head` in rows of `stride` elements.
    fn at(self, b: usize, t: usize, head: usize, stride: usize) -> usize {
        (b * self.seq_len + t) * stride + head * self.head_size
    }

    fn softmax_scale(self) -> f32 {
        1.0 / (self.head_size as f32).sqrt()
    }
}

/// A head's rows of several sources, widened to FP32.
struct Head<'a> {
    shape: Shape,
    b: usize,
    head: usize,
    qkv: View<'a>,
}

impl Head<'_> {
    /// Part 0 is Q, 1 is K, 2 is V; `out [T, head_size]`.
    #[inline(always)]
    fn load(&self, part: usize, out: &mut [f32]) {
        let Shape { heads: _, head_size, .. } = self.shape;
        let width = self.shape.width();
        for (t, row) in out.chunks_exact_mut(head_size).enumerate() {
            self.qkv.load(self.shape.at(self.b, t, self.head, 3 * width) + part * width, row);
        }
    }

    /// The softmax weights of query `i` into `p[..= i]`, not normalised; returns the row's maximum.
    #[inline(always)]
    fn scores(&self, query: &[f32], keys: &[f32], p: &mut [f32]) {
        let scale = self.shape.softmax_scale();
        for (p, key) in p.iter_mut().zip(keys.chunks_exact(self.shape.head_size)) {
            *p = scale * dot(query, key);
        }
    }

    /// Index of the first element of row `i` of the attention matrix, for the dropout mask.
    fn mask_row(&self, i: usize) -> usize {
        ((self.b * self.shape.heads + self.head) * self.shape.seq_len + i) * self.shape.seq_len
    }
}

fn check(shape: Shape, qkv: &Tensor, out: &Tensor) -> Result<()> {
    let tokens = shape.batch * shape.seq_len;
    if qkv.dims() != [tokens, 3 * shape.width()] || out.dims() != [tokens, shape.width()] {
        bail!("attention of {shape:?} got qkv {:?} and out {:?}", qkv.dims(), out.dims());
    }
    Ok(())
}

/// `out [B·T, D] = softmax(Q Kᵀ / √head_size, causal) V` for `qkv [B·T, 3·D]`; `lse [B·H·T]` (FP32) receives each row's
/// log-sum-exp. Dropout acts on the softmax's output.
pub fn forward(shape: Shape, qkv: &Tensor, dropout: Option<Dropout>, out: &Tensor, lse: &Tensor) -> Result<()> {
    check(shape, qkv, out)?;
    let Shape { batch, seq_len, heads, head_size } = shape;
    let qkv = read(qkv)?;
    let qkv = qkv.view();
    write(out, |out| {
        write_f32(lse, |lse| {
            let out = out.interleaved();
            lse.par_chunks_exact_mut(seq_len).take(batch * heads).enumerate().for_each(|(task, lse)| {
                let head = Head { shape, b: task / heads, head: task % heads, qkv };
                let size = seq_len * head_size;
                isa_with_scratch(3 * size + seq_len + head_size, |scratch| {
                    let (q, rest) = scratch.split_at_mut(size);
                    let (k, rest) = rest.split_at_mut(size);
                    let (v, rest) = rest.split_at_mut(size);
                    let (p, row) = rest.split_at_mut(seq_len);
                    for (part, out) in [&mut *q, &mut *k, &mut *v].into_iter().enumerate() {
                        head.load(part, out);
                    }
                    for (i, query) in q.chunks_exact(head_size).enumerate() {
                        let p = &mut p[..=i];
                        head.scores(query, k, p);
                        let top = max(p);
                        for p in p.iter_mut() {
                            *p = math::exp(*p - top);
                        }
                        let total = sum(p);
                        lse[i] = top + total.ln();
                        if let Some(dropout) = dropout {
                            dropout.apply(head.mask_row(i), p);
                        }
                        row.fill(0.0);
                        for (p, value) in p.iter().zip(v.chunks_exact(head_size)) {
                            axpy(*p / total, value, row);
                        }
                        // SAFETY: this task alone writes this head's part of the row.
                        unsafe { out.store(shape.at(head.b, i, head.head, shape.width()), row) };
                    }
                });
            });
        })
    })?
}

/// `dqkv [B·T, 3·D]` from `dout [B·T, D]` and the forward pass's operands and results.
pub fn backward(
    shape: Shape,
    dout: &Tensor,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    dropout: Option<Dropout>,
    dqkv: &Tensor,
) -> Result<()> {
    check(shape, qkv, out)?;
    let Shape { batch, seq_len, heads, head_size } = shape;
    let (dout, qkv, out, lse) = (read(dout)?, read(qkv)?, read(out)?, read(lse)?);
    let (dout, qkv, out, lse) = (dout.view(), qkv.view(), out.view(), lse.typed::<f32>()?);
    write(dqkv, |dqkv| {
        let dqkv = dqkv.interleaved();
        (0..batch * heads).into_par_iter().for_each(|task| {
            let head = Head { shape, b: task / heads, head: task % heads, qkv };
            let lse = &lse[task * seq_len..][..seq_len];
            let size = seq_len * head_size;
            isa_with_scratch(6 * size + 2 * seq_len + 2 * head_size, |scratch| {
                let (inputs, rest) = scratch.split_at_mut(3 * size);
                let (grads, rest) = rest.split_at_mut(3 * size);
                let (p, rest) = rest.split_at_mut(seq_len);
                let (dp, rest) = rest.split_at_mut(seq_len);
                let (dout_row, out_row) = rest.split_at_mut(head_size);
                for (part, out) in inputs.chunks_exact_mut(size).enumerate() {
                    head.load(part, out);
                }
                let (q, rest) = inputs.split_at(size);
                let (k, v) = rest.split_at(size);
                grads.fill(0.0);
                let (dq, rest) = grads.split_at_mut(size);
                let (dk, dv) = rest.split_at_mut(size);
                for (i, query) in q.chunks_exact(head_size).enumerate() {
                    let (p, dp) = (&mut p[..=i], &mut dp[..=i]);
                    head.scores(query, k, p);
                    for p in p.iter_mut() {
                        *p = math::exp(*p - lse[i]);
                    }
                    let at = shape.at(head.b, i, head.head, shape.width());
                    dout.load(at, dout_row);
                    out.load(at, out_row);
                    let delta = dot(dout_row, out_row);
                    for (dp, value) in dp.iter_mut().zip(v.chunks_exact(head_size)) {
                        *dp = dot(dout_row, value);
                    }
                    if let Some(dropout) = dropout {
                        dropout.apply(head.mask_row(i), dp);
                    }
                    for (dp, p) in dp.iter_mut().zip(p.iter()) {
                        *dp = p * (*dp - delta) * shape.softmax_scale();
                    }
                    if let Some(dropout) = dropout {
                        dropout.apply(head.mask_row(i), p);
                    }
                    let dq = &mut dq[i * head_size..][..head_size];
                    for j in 0..=i {
                        let row = j * head_size..(j + 1) * head_size;
                        axpy(p[j], dout_row, &mut dv[row.clone()]);
                        axpy(dp[j], query, &mut dk[row.clone()]);
                        axpy(dp[j], &k[row], dq);
                    }
                }
                let width = shape.width();
                for (part, grad) in grads.chunks_exact(size).enumerate() {
                    for (t, row) in grad.chunks_exact(head_size).enumerate() {
                        // SAFETY: this task alone writes this head's parts of the rows.
                        unsafe { dqkv.store(shape.at(head.b, t, head.head, 3 * width) + part * width, row) };
                    }
                }
            });
        });
    })
}

fn isa_with_scratch(len: usize, f: impl FnOnce(&mut [f32])) {
    isa::vectorize(
        #[inline(always)]
        || with_scratch(len, f),
    );
}
