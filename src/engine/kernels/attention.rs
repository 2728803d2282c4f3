//! Causal self-attention on packed queries, keys and values.
//!
//! A head's scores never exist as a whole: the forward pass keeps each row's log-sum-exp, and the backward pass
//! recomputes the probabilities from it (Dao et al., "`FlashAttention`", 2022). Scores, softmax and sums are FP32.

use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::isa;
use crate::engine::kernels::math;
use crate::engine::kernels::rows::{dot, max, sum, with_scratch};
use crate::engine::kernels::view::{Interleaved, View, read, write, write_f32};
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

    pub(crate) fn softmax_scale(self) -> f32 {
        1.0 / (self.head_size as f32).sqrt()
    }
}

/// Queries worked on together: their scores against all keys stay in the second-level cache.
const QUERIES: usize = 16;
/// Scratch matrices have a multiple of this many rows and columns, filled up with zeros, so that loops have no tails.
const PAD: usize = 16;

/// One head of one sequence, with its padded sizes.
#[derive(Clone, Copy)]
struct Head {
    shape: Shape,
    b: usize,
    index: usize,
    /// Padded sequence length.
    tokens: usize,
    /// Padded head size.
    size: usize,
}

impl Head {
    fn of(shape: Shape, task: usize) -> Self {
        let (tokens, size) = (shape.seq_len.next_multiple_of(PAD), shape.head_size.next_multiple_of(PAD));
        Self { shape, b: task / shape.heads, index: task % shape.heads, tokens, size }
    }

    /// Elements of a matrix `[T, head_size]` with padding.
    fn elements(self) -> usize {
        self.tokens * self.size
    }

    /// Widens this head's part of rows of `stride` elements into `out [T, head_size]`, times `factor`.
    #[inline(always)]
    fn load(self, rows: View<'_>, stride: usize, part: usize, factor: f32, out: &mut [f32]) {
        let Shape { seq_len, head_size, .. } = self.shape;
        out.fill(0.0);
        for (t, row) in out.chunks_exact_mut(self.size).take(seq_len).enumerate() {
            let row = &mut row[..head_size];
            rows.load(self.shape.at(self.b, t, self.index, stride) + part * self.shape.width(), row);
            for x in row.iter_mut() {
                *x *= factor;
            }
        }
    }

    /// `out [head_size, T] = rowsᵀ`.
    #[inline(always)]
    fn transpose(self, rows: &[f32], out: &mut [f32]) {
        for (t, row) in rows.chunks_exact(self.size).enumerate() {
            for (d, &x) in row.iter().enumerate() {
                out[d * self.tokens + t] = x;
            }
        }
    }

    /// Index of the first element of row `i` of the attention matrix, for the dropout mask.
    fn mask_row(self, i: usize) -> usize {
        ((self.b * self.shape.heads + self.index) * self.shape.seq_len + i) * self.shape.seq_len
    }
}

/// A matrix of FP32 in scratch memory, read at any strides.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

/// `c (+)= a · b` for `a` of `rows` × `inner`, and `b`, `c` with rows of `ldb` and `ldc` elements of which `columns` take
/// part; `rows` and `inner` are multiples of 4.
///
/// Four rows of `b` are folded into four rows of `c` at a time: plain loops that compilers turn into vectors, at half of
/// the arithmetic's peak for the sizes of a head.
#[inline(always)]
fn multiply(
    [rows, inner, columns]: [usize; 3],
    a: Matrix<'_>,
    (b, ldb): (&[f32], usize),
    (c, ldc): (&mut [f32], usize),
    accumulate: bool,
) {
    for (block, c) in c.chunks_mut(4 * ldc).take(rows / 4).enumerate() {
        for k in (0..inner).step_by(4) {
            let at = |r: usize, i: usize| a.data[(4 * block + r) * a.row_stride + (k + i) * a.column_stride];
            let factors: [[f32; 4]; 4] = std::array::from_fn(|r| std::array::from_fn(|i| at(r, i)));
            let b = &b[k * ldb..];
            let b = [&b[..columns], &b[ldb..][..columns], &b[2 * ldb..][..columns], &b[3 * ldb..][..columns]];
            if k == 0 && !accumulate {
                fold::<true>(factors, b, c, ldc);
            } else {
                fold::<false>(factors, b, c, ldc);
            }
        }
    }
}

/// Adds the products of four rows of `b` to four rows of `c`; overwrites those if they are `FRESH`.
#[inline(always)]
fn fold<const FRESH: bool>(factors: [[f32; 4]; 4], [b0, b1, b2, b3]: [&[f32]; 4], c: &mut [f32], ldc: usize) {
    let columns = b0.len();
    let (c0, rest) = c.split_at_mut(ldc);
    let (c1, rest) = rest.split_at_mut(ldc);
    let (c2, c3) = rest.split_at_mut(ldc);
    let (c0, c1, c2, c3) = (&mut c0[..columns], &mut c1[..columns], &mut c2[..columns], &mut c3[..columns]);
    let (b1, b2, b3) = (&b1[..columns], &b2[..columns], &b3[..columns]);
    let [f0, f1, f2, f3] = factors;
    for j in 0..columns {
        let b = [b0[j], b1[j], b2[j], b3[j]];
        let sum = |f: [f32; 4]| (f[0] * b[0] + f[1] * b[1]) + (f[2] * b[2] + f[3] * b[3]);
        c0[j] = if FRESH { sum(f0) } else { c0[j] + sum(f0) };
        c1[j] = if FRESH { sum(f1) } else { c1[j] + sum(f1) };
        c2[j] = if FRESH { sum(f2) } else { c2[j] + sum(f2) };
        c3[j] = if FRESH { sum(f3) } else { c3[j] + sum(f3) };
    }
}

/// A matrix by rows of `width`.
#[inline(always)]
fn by_rows(data: &[f32], width: usize) -> Matrix<'_> {
    Matrix { data, row_stride: width, column_stride: 1 }
}

/// The transpose of a matrix with rows of `width`.
#[inline(always)]
fn by_columns(data: &[f32], width: usize) -> Matrix<'_> {
    Matrix { data, row_stride: 1, column_stride: width }
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
    let qkv = read(qkv)?;
    let qkv = qkv.view();
    write(out, |out| {
        write_f32(lse, |lse| {
            let out = out.interleaved();
            lse.par_chunks_exact_mut(shape.seq_len).take(shape.batch * shape.heads).enumerate().for_each(
                |(task, lse)| {
                    isa::vectorize(
                        #[inline(always)]
                        || forward_head(Head::of(shape, task), qkv, dropout, &out, lse),
                    );
                },
            );
        })
    })?
}

#[inline(always)]
fn forward_head(head: Head, qkv: View<'_>, dropout: Option<Dropout>, out: &Interleaved<'_>, lse: &mut [f32]) {
    let Head { shape, tokens, size, .. } = head;
    let Shape { seq_len, head_size, .. } = shape;
    let stride = 3 * shape.width();
    let lengths = [head.elements(), head.elements(), head.elements(), QUERIES * tokens, QUERIES * size];
    with_matrices(
        lengths,
        #[inline(always)]
        |[q, kt, v, p, rows]| {
            head.load(qkv, stride, 1, 1.0, q);
            head.transpose(q, kt);
            head.load(qkv, stride, 0, shape.softmax_scale(), q);
            head.load(qkv, stride, 2, 1.0, v);
            let mut totals = [0.0; QUERIES];
            for first in (0..seq_len).step_by(QUERIES) {
                let keys = first + QUERIES;
                let queries = by_rows(&q[first * size..], size);
                multiply([QUERIES, size, keys], queries, (kt, tokens), (p, tokens), false);
                for (i, p) in (first..seq_len).zip(p.chunks_exact_mut(tokens)) {
                    let (seen, masked) = p[..keys].split_at_mut(i + 1);
                    masked.fill(0.0);
                    let top = max(seen);
                    for p in seen.iter_mut() {
                        *p = math::exp(*p - top);
                    }
                    let total = sum(seen);
                    totals[i - first] = total;
                    lse[i] = top + total.ln();
                    if let Some(dropout) = dropout {
                        dropout.apply(head.mask_row(i), seen);
                    }
                }
                multiply([QUERIES, keys, size], by_rows(p, tokens), (v, size), (rows, size), false);
                for (i, row) in (first..seq_len).zip(rows.chunks_exact_mut(size)) {
                    let row = &mut row[..head_size];
                    for x in row.iter_mut() {
                        *x /= totals[i - first];
                    }
                    // SAFETY: this task alone writes this head's part of the row.
                    unsafe { out.store(shape.at(head.b, i, head.index, shape.width()), row) };
                }
            }
        },
    );
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
    let (dout, qkv, out, lse) = (read(dout)?, read(qkv)?, read(out)?, read(lse)?);
    let saved = Saved { dout: dout.view(), qkv: qkv.view(), out: out.view(), dropout };
    let lse = lse.typed::<f32>()?;
    write(dqkv, |dqkv| {
        let dqkv = dqkv.interleaved();
        (0..shape.batch * shape.heads).into_par_iter().for_each(|task| {
            let lse = &lse[task * shape.seq_len..][..shape.seq_len];
            isa::vectorize(
                #[inline(always)]
                || backward_head(Head::of(shape, task), saved, lse, &dqkv),
            );
        });
    })
}

/// What the backward pass reads.
#[derive(Clone, Copy)]
struct Saved<'a> {
    dout: View<'a>,
    qkv: View<'a>,
    out: View<'a>,
    dropout: Option<Dropout>,
}

#[inline(always)]
fn backward_head(head: Head, saved: Saved<'_>, lse: &[f32], dqkv: &Interleaved<'_>) {
    let Head { shape, tokens, size, .. } = head;
    let Shape { seq_len, head_size, .. } = shape;
    let (width, n, scale) = (shape.width(), head.elements(), shape.softmax_scale());
    let lengths = [n, n, n, n, n, n, n, n, QUERIES * tokens, QUERIES * tokens];
    with_matrices(
        lengths,
        #[inline(always)]
        |[q, k, kt, vt, dout, dq, dk, dv, p, dp]| {
            head.load(saved.qkv, 3 * width, 2, 1.0, k);
            head.transpose(k, vt);
            head.load(saved.qkv, 3 * width, 1, 1.0, k);
            head.transpose(k, kt);
            head.load(saved.qkv, 3 * width, 0, scale, q);
            head.load(saved.dout, width, 0, 1.0, dout);
            // Until its block is reached, dq holds the forward pass's output.
            head.load(saved.out, width, 0, 1.0, dq);
            dk.fill(0.0);
            dv.fill(0.0);
            for first in (0..seq_len).step_by(QUERIES) {
                let keys = first + QUERIES;
                let block = first * size..(first + QUERIES) * size;
                let mut deltas = [0.0; QUERIES];
                let rows = dout[block.clone()].chunks_exact(size).zip(dq[block.clone()].chunks_exact(size));
                for (delta, (dout, out)) in deltas.iter_mut().zip(rows) {
                    *delta = dot(dout, out);
                }
                multiply([QUERIES, size, keys], by_rows(&q[block.clone()], size), (kt, tokens), (p, tokens), false);
                multiply([QUERIES, size, keys], by_rows(&dout[block.clone()], size), (vt, tokens), (dp, tokens), false);
                for (r, (p, dp)) in p.chunks_exact_mut(tokens).zip(dp.chunks_exact_mut(tokens)).enumerate() {
                    let i = first + r;
                    let seen = if i < seq_len { i + 1 } else { 0 };
                    p[seen..keys].fill(0.0);
                    dp[seen..keys].fill(0.0);
                    let (p, dp) = (&mut p[..seen], &mut dp[..seen]);
                    let log = lse.get(i).copied().unwrap_or(0.0);
                    for p in p.iter_mut() {
                        *p = math::exp(*p - log);
                    }
                    if let Some(dropout) = saved.dropout {
                        dropout.apply(head.mask_row(i), dp);
                    }
                    for (dp, p) in dp.iter_mut().zip(p.iter()) {
                        *dp = p * (*dp - deltas[r]);
                    }
                    if let Some(dropout) = saved.dropout {
                        dropout.apply(head.mask_row(i), p);
                    }
                }
                let (dout, query) = (&dout[block.clone()], &q[block.clone()]);
                multiply([keys, QUERIES, size], by_columns(p, tokens), (dout, size), (dv, size), true);
                multiply([keys, QUERIES, size], by_columns(dp, tokens), (query, size), (dk, size), true);
                multiply([QUERIES, keys, size], by_rows(dp, tokens), (k, size), (&mut dq[block.clone()], size), false);
                for x in &mut dq[block] {
                    *x *= scale;
                }
            }
            for (part, grad) in [&*dq, &*dk, &*dv].into_iter().enumerate() {
                for (t, row) in grad.chunks_exact(size).take(seq_len).enumerate() {
                    let start = shape.at(head.b, t, head.index, 3 * width) + part * width;
                    // SAFETY: this task alone writes this head's parts of the rows.
                    unsafe { dqkv.store(start, &row[..head_size]) };
                }
            }
        },
    );
}

/// Lends `f` scratch matrices of the given lengths, with old contents.
#[inline(always)]
fn with_matrices<const N: usize>(lengths: [usize; N], f: impl FnOnce([&mut [f32]; N])) {
    with_scratch(
        lengths.iter().sum(),
        #[inline(always)]
        |mut rest| {
            f(lengths.map(|length| {
                let (matrix, tail) = std::mem::take(&mut rest).split_at_mut(length);
                rest = tail;
                matrix
            }));
        },
    );
}
