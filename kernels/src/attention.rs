//! Causal self-attention with grouped queries, sliding windows and document boundaries.
//!
//! A head's full score matrix is never stored: the forward pass keeps each row's log-sum-exp, and the backward pass
//! recomputes the probabilities from it (Dao et al., "`FlashAttention`", 2022). Scores, softmax and sums are FP32.
//! Keys and values are not copied for the heads that share them; the gradients of these heads are summed in FP32, in a
//! fixed tree. Keys that no query of a block attends to are skipped.

use self::product::{add_to, by_columns, by_rows, in_panels, in_rows, multiply, overwrite, transpose};
use crate::columns::{ColumnReader, ColumnSlice, ColumnWriter, write_columns};
use crate::dropout::Dropout;
use crate::isa;
use crate::machine::allocator::CACHE_LINE;
use crate::machine::spin::{for_each_task, join};
use crate::math;
use crate::op;
use crate::rows::{Rows, axpy, dot, for_each_part, max, scale, sum, with_scratch};
use crate::view::{read, write, write_f32};
use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;
use std::ops::Range;

pub(crate) mod product;

/// The shape of one attention call, and which keys a query attends to.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Sequences in the batch, B.
    pub batch: usize,
    /// Tokens in a sequence, T.
    pub seq_len: usize,
    /// Heads of queries, H.
    pub heads: usize,
    /// Heads of keys and values, each shared by `heads / kv_heads` neighboring heads of queries.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_size: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// The maximum number of keys that a query attends to: its own position and the ones just before it.
    pub window: Option<usize>,
    /// Scores `s` become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
}

impl AttentionShape {
    /// As many heads of keys as of queries, scores divided by `√head_size`, and no limits.
    pub fn new(batch: usize, seq_len: usize, heads: usize, head_size: usize) -> Self {
        let scale = 1.0 / (head_size as f32).sqrt();
        Self { batch, seq_len, heads, kv_heads: heads, head_size, scale, window: None, softcap: None }
    }

    /// Columns of queries, of keys and of values.
    pub fn widths(&self) -> [usize; 3] {
        [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads * self.head_size)
    }

    /// The first key within the window of row `i` of a sequence.
    pub(crate) fn first_in_window(&self, i: usize) -> usize {
        self.window.map_or(0, |window| (i + 1).saturating_sub(window))
    }

    /// Fails unless operands of these shapes fit.
    pub(crate) fn check(&self, qkv: [ColumnSlice<'_>; 3]) -> Result<()> {
        let fits = self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads) && self.window != Some(0);
        let tokens = self.batch * self.seq_len;
        let operands = qkv.map(|columns| columns.dims());
        if !fits || operands != self.widths().map(|width| [tokens, width]) {
            bail!("attention of {self:?} got queries, keys and values of {operands:?}");
        }
        Ok(())
    }

    /// Fails unless there is a sink for each head, or none.
    pub(crate) fn check_sinks(&self, sinks: Option<&Tensor>) -> Result<()> {
        match sinks {
            Some(sinks) if sinks.dims() != [self.heads] => {
                bail!("attention of {self:?} got sinks of {:?}", sinks.dims())
            }
            _ => Ok(()),
        }
    }
}

/// The inputs of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// Queries `[B·T, H·head_size]`, keys and values `[B·T, kv_heads·head_size]`.
    pub qkv: [ColumnSlice<'a>; 3],
    /// For each row, the row of its sequence at which its document starts; earlier rows are masked.
    pub documents: Option<&'a [u32]>,
    /// Applied to the softmax's output.
    pub dropout: Option<Dropout>,
    /// `[H]`: a score of each head that counts in the softmax's denominator only (Xiao et al., "Attention sinks",
    /// 2023).
    pub sinks: Option<&'a Tensor>,
}

impl<'a> AttentionInputs<'a> {
    /// Queries, keys and values side by side in `qkv [B·T, C]`.
    pub fn packed(shape: &AttentionShape, qkv: &'a Tensor, dropout: Option<Dropout>) -> Result<Self> {
        Ok(Self { qkv: ColumnSlice::split(qkv, shape.widths())?, documents: None, dropout, sinks: None })
    }

    pub(crate) fn check(&self, shape: &AttentionShape, out: &Tensor, lse: &Tensor) -> Result<()> {
        shape.check(self.qkv)?;
        shape.check_sinks(self.sinks)?;
        let tokens = shape.batch * shape.seq_len;
        if out.dims() != [tokens, shape.widths()[0]] || lse.elem_count() != tokens * shape.heads {
            bail!("attention of {shape:?} got an output of {:?} and {} statistics", out.dims(), lse.elem_count());
        }
        let Some(starts) = self.documents else { return Ok(()) };
        let rising =
            |starts: &[u32]| starts.is_sorted() && starts.iter().enumerate().all(|(row, start)| *start as usize <= row);
        if starts.len() != tokens || !starts.chunks(shape.seq_len.max(1)).all(rising) {
            bail!("each of {tokens} rows must name the row its document starts in, itself or one before it");
        }
        Ok(())
    }
}

/// Queries processed together: their scores against all keys fit in the L2 cache.
pub(crate) const QUERIES: usize = 16;
/// Rows and columns of scratch matrices are zero-padded to a multiple of this, so that loops have no tails.
pub(crate) const PAD: usize = 16;

/// One sequence, with padded sizes.
#[derive(Clone, Copy)]
struct PaddedSequence<'a> {
    shape: AttentionShape,
    b: usize,
    /// For each row, the index of its document's first token.
    documents: Option<&'a [u32]>,
    /// Padded sequence length.
    tokens: usize,
    /// Distance of rows of scores; a power of two would make them evict each other from the cache.
    row: usize,
    /// Padded head size.
    size: usize,
}

impl<'a> PaddedSequence<'a> {
    fn new(shape: AttentionShape, b: usize, documents: Option<&'a [u32]>) -> Self {
        let (tokens, size) = (shape.seq_len.next_multiple_of(PAD), shape.head_size.next_multiple_of(PAD));
        let documents = documents.map(|starts| &starts[b * shape.seq_len..][..shape.seq_len]);
        Self { shape, b, documents, tokens, row: tokens + PAD, size }
    }

    /// Elements of a matrix `[T, head_size]` with padding.
    fn elements(self) -> usize {
        self.tokens * self.size
    }

    /// The first key that row `i` attends to.
    #[inline(always)]
    fn first_key(self, i: usize) -> usize {
        self.documents.map_or(0, |starts| starts[i] as usize).max(self.shape.first_in_window(i))
    }

    /// The blocks of queries, in order.
    fn blocks(self) -> impl Iterator<Item = QueryBlock> {
        (0..self.shape.seq_len).step_by(QUERIES).map(move |first| {
            let lowest = self.first_key(first) / PAD * PAD;
            QueryBlock { first, lowest, keys: first + QUERIES - lowest }
        })
    }

    /// The keys that row `i` attends to, counted from key `lowest`.
    #[inline(always)]
    fn seen(self, i: usize, lowest: usize) -> Range<usize> {
        self.first_key(i) - lowest..i + 1 - lowest
    }

    /// Upcasts `head`'s part of the rows into `out [T, head_size]`, times `factor`.
    #[inline(always)]
    fn load(self, rows: ColumnReader<'_>, head: usize, factor: f32, out: &mut [f32]) {
        let AttentionShape { seq_len, head_size, .. } = self.shape;
        out.fill(0.0);
        for (t, row) in out.chunks_exact_mut(self.size).take(seq_len).enumerate() {
            let row = &mut row[..head_size];
            rows.load(self.b * seq_len + t, head * head_size, row);
            scale(row, factor);
        }
    }

    /// Rounds `rows [T, head_size]` into `head`'s part of `out`.
    ///
    /// # Safety
    /// No other thread writes this part at the same time.
    #[inline(always)]
    unsafe fn store(self, rows: &[f32], head: usize, out: ColumnWriter<'_>) {
        let AttentionShape { seq_len, head_size, .. } = self.shape;
        for (t, row) in rows.chunks_exact(self.size).take(seq_len).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.store(self.b * seq_len + t, head * head_size, &row[..head_size]) };
        }
    }

    /// Index of the first key that row `i` of `head` attends to in all attention matrices, for the dropout mask.
    fn mask_start(self, head: usize, i: usize) -> usize {
        ((self.b * self.shape.heads + head) * self.shape.seq_len + i) * self.shape.seq_len + self.first_key(i)
    }
}

/// [`QUERIES`] neighboring queries, and the keys that they attend to.
#[derive(Clone, Copy)]
struct QueryBlock {
    /// The first query.
    first: usize,
    /// The first key of any of them, rounded down to the padding.
    lowest: usize,
    /// The number of keys from there.
    keys: usize,
}

/// The opened operands of the forward pass.
struct Inputs<'a> {
    qkv: [ColumnReader<'a>; 3],
    dropout: Option<Dropout>,
    /// One for each head.
    sinks: Option<Vec<f32>>,
}

/// Computes [`op::Attention`].
pub fn forward(op: &op::Attention<'_>) -> Result<()> {
    let &op::Attention { shape, operands, out, lse } = op;
    let [q, k, v] = operands.qkv;
    let opened = (read(q.tensor())?, read(k.tensor())?, read(v.tensor())?);
    let inputs = Inputs {
        qkv: [q.source(&opened.0), k.source(&opened.1), v.source(&opened.2)],
        dropout: operands.dropout,
        sinks: operands.sinks.map(upcast).transpose()?,
    };
    write_columns([ColumnSlice::all(out)?], |[out]| {
        write_f32(lse, |lse| {
            let lse = Rows { view: lse, width: shape.seq_len };
            for_each_part(
                lse,
                shape.batch * shape.heads,
                1,
                #[inline(always)]
                |task, _, lse| {
                    let (b, head) = (task / shape.heads, task % shape.heads);
                    let sequence = PaddedSequence::new(shape, b, operands.documents);
                    forward_head(sequence, head, &inputs, out, lse.view);
                },
            );
        })
    })?
}

#[inline(always)]
fn forward_head(
    sequence: PaddedSequence<'_>,
    head: usize,
    inputs: &Inputs<'_>,
    out: ColumnWriter<'_>,
    lse: &mut [f32],
) {
    let PaddedSequence { shape, b, row, size, .. } = sequence;
    let AttentionShape { seq_len, head_size, softcap, .. } = shape;
    let [queries, keys, values] = inputs.qkv;
    let kv_head = head / (shape.heads / shape.kv_heads);
    let sink = inputs.sinks.as_ref().map(|sinks| sinks[head]);
    let n = sequence.elements();
    with_matrices(
        [n, n, n, QUERIES * row, QUERIES * size],
        #[inline(always)]
        |[q, kt, v, p, rows]| {
            sequence.load(keys, kv_head, 1.0, q);
            transpose(q, size, kt);
            sequence.load(queries, head, shape.scale, q);
            sequence.load(values, kv_head, 1.0, v);
            let mut totals = [0.0; QUERIES];
            for QueryBlock { first, lowest, keys } in sequence.blocks() {
                let (q, kt) = (by_rows(&q[first * size..], size), in_panels(&kt[lowest * size..], size));
                multiply([QUERIES, size, keys], q, kt, overwrite(p, row));
                for (i, p) in (first..seq_len).zip(p.chunks_exact_mut(row)) {
                    let seen = sequence.seen(i, lowest);
                    let (top, total) = exponentials(&mut p[..keys], seen.clone(), softcap, sink);
                    totals[i - first] = total;
                    lse[i] = top + total.ln();
                    if let Some(dropout) = inputs.dropout {
                        dropout.apply(sequence.mask_start(head, i), &mut p[seen]);
                    }
                }
                let (p, v) = (by_rows(p, row), in_rows(&v[lowest * size..], size));
                multiply([QUERIES, keys, size], p, v, overwrite(rows, size));
                for (i, row) in (first..seq_len).zip(rows.chunks_exact_mut(size)) {
                    let row = &mut row[..head_size];
                    divide(row, totals[i - first]);
                    // SAFETY: this task alone writes this head's part of the row.
                    unsafe { out.store(b * seq_len + i, head * head_size, row) };
                }
            }
        },
    );
}

/// Replaces the scores `seen` of a row by the softmax's numerators and all others by 0. Returns the largest score, or
/// the sink's, and the softmax's denominator.
#[inline(always)]
pub(crate) fn exponentials(p: &mut [f32], seen: Range<usize>, softcap: Option<f32>, sink: Option<f32>) -> (f32, f32) {
    let seen = zero_outside(p, seen);
    if let Some(cap) = softcap {
        math::soft_cap(seen, cap);
    }
    let top = sink.map_or_else(|| max(seen), |sink| max(seen).max(sink));
    for p in seen.iter_mut() {
        *p = math::exp(*p - top);
    }
    let total = sum(seen);
    (top, sink.map_or(total, |sink| total + math::exp(sink - top)))
}

/// Sets the elements outside `range` to 0, and returns the others.
#[inline(always)]
fn zero_outside(row: &mut [f32], range: Range<usize>) -> &mut [f32] {
    row[..range.start].fill(0.0);
    row[range.end..].fill(0.0);
    &mut row[range]
}

/// Divides a row by the softmax's denominator.
#[inline(always)]
pub(crate) fn divide(row: &mut [f32], total: f32) {
    for x in row {
        *x /= total;
    }
}

/// The values of a small tensor in FP32.
pub(crate) fn upcast(x: &Tensor) -> Result<Vec<f32>> {
    let opened = read(x)?;
    let mut values = vec![0.0; x.elem_count()];
    opened.view().load(0, &mut values);
    Ok(values)
}

/// Computes [`op::AttentionBackward`].
pub fn backward(op: &op::AttentionBackward<'_>) -> Result<()> {
    let &op::AttentionBackward { shape, operands, dout, out, lse, gradients, dsinks } = op;
    let [q, k, v] = operands.qkv;
    let opened = (read(q.tensor())?, read(k.tensor())?, read(v.tensor())?, read(dout)?, read(out)?, read(lse)?);
    let qkv = [q.source(&opened.0), k.source(&opened.1), v.source(&opened.2)];
    let sinks = operands.sinks.map(upcast).transpose()?;
    let saved = SavedTensors {
        inputs: Inputs { qkv, dropout: operands.dropout, sinks },
        dout: ColumnSlice::all(dout)?.source(&opened.3),
        out: ColumnSlice::all(out)?.source(&opened.4),
        lse: opened.5.typed::<f32>()?,
    };
    if let (Some(sinks), Some(dsinks)) = (&saved.inputs.sinks, dsinks) {
        sink_gradients(&shape, &saved, sinks, dsinks)?;
    }
    write_columns(gradients, |gradients| {
        for_each_task(0..shape.batch * shape.kv_heads, &|task| {
            let (b, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
            let sequence = PaddedSequence::new(shape, b, operands.documents);
            isa::vectorize!(backward_group(sequence, kv_head, &saved, gradients));
        });
    })
}

/// Writes the gradients of the sinks. Each row's is minus its sink's probability times the scalar product of the output
/// and its gradient.
fn sink_gradients(shape: &AttentionShape, saved: &SavedTensors<'_>, sinks: &[f32], out: &Tensor) -> Result<()> {
    let AttentionShape { batch, seq_len, heads, head_size, .. } = *shape;
    let gradient = |head: usize| {
        let mut sum = 0.0;
        with_scratch(
            2 * head_size,
            #[inline(always)]
            |scratch| {
                let (dout, out) = scratch.split_at_mut(head_size);
                for (b, t) in (0..batch).flat_map(|b| (0..seq_len).map(move |t| (b, t))) {
                    saved.dout.load(b * seq_len + t, head * head_size, dout);
                    saved.out.load(b * seq_len + t, head * head_size, out);
                    let log_sum = saved.lse[(b * heads + head) * seq_len + t];
                    sum -= f64::from(math::exp(sinks[head] - log_sum) * dot(dout, out));
                }
            },
        );
        sum as f32
    };
    let gradients: Vec<f32> = (0..heads).into_par_iter().map(gradient).collect();
    write(out, |mut out| out.store(0, &gradients))
}

/// The inputs of the backward pass.
struct SavedTensors<'a> {
    inputs: Inputs<'a>,
    dout: ColumnReader<'a>,
    out: ColumnReader<'a>,
    lse: &'a [f32],
}

/// The data shared by the heads of a group: keys by rows, and keys and values in panels.
#[derive(Clone, Copy)]
struct KvGroup<'a> {
    k: &'a [f32],
    kt: &'a [f32],
    vt: &'a [f32],
}

/// The gradients of the heads that share `kv_head`.
#[inline(always)]
fn backward_group(
    sequence: PaddedSequence<'_>,
    kv_head: usize,
    saved: &SavedTensors<'_>,
    [d_q, d_k, d_v]: [ColumnWriter<'_>; 3],
) {
    let n = sequence.elements();
    let group = sequence.shape.heads / sequence.shape.kv_heads;
    let [_, keys, values] = saved.inputs.qkv;
    with_matrices(
        [n; 5],
        #[inline(always)]
        |[k, kt, vt, dk, dv]| {
            sequence.load(values, kv_head, 1.0, k);
            transpose(k, sequence.size, vt);
            sequence.load(keys, kv_head, 1.0, k);
            transpose(k, sequence.size, kt);
            let heads = kv_head * group..(kv_head + 1) * group;
            backward_heads(sequence, heads, saved, KvGroup { k, kt, vt }, [dk, dv], d_q);
            // SAFETY: this task alone writes the parts of this group's heads.
            unsafe {
                sequence.store(dk, kv_head, d_k);
                sequence.store(dv, kv_head, d_v);
            }
        },
    );
}

/// The gradients of queries for some heads of a group, and the sums of these heads' gradients of keys and values, in a
/// tree that depends on their number alone.
fn backward_heads(
    sequence: PaddedSequence<'_>,
    heads: Range<usize>,
    saved: &SavedTensors<'_>,
    shared: KvGroup<'_>,
    [dk, dv]: [&mut [f32]; 2],
    d_q: ColumnWriter<'_>,
) {
    if heads.len() == 1 {
        return isa::vectorize!(backward_head(sequence, heads.start, saved, shared, [dk, dv], d_q));
    }
    let middle = usize::midpoint(heads.start, heads.end);
    let n = sequence.elements();
    with_matrices([n, n], |[dk_high, dv_high]| {
        join(
            || backward_heads(sequence, heads.start..middle, saved, shared, [dk, dv], d_q),
            || backward_heads(sequence, middle..heads.end, saved, shared, [dk_high, dv_high], d_q),
        );
        axpy(1.0, dk_high, dk);
        axpy(1.0, dv_high, dv);
    });
}

#[inline(always)]
fn backward_head(
    sequence: PaddedSequence<'_>,
    head: usize,
    saved: &SavedTensors<'_>,
    KvGroup { k, kt, vt }: KvGroup<'_>,
    [dk, dv]: [&mut [f32]; 2],
    d_q: ColumnWriter<'_>,
) {
    let PaddedSequence { shape, b, row, size, .. } = sequence;
    let seq_len = shape.seq_len;
    let n = sequence.elements();
    let lse = &saved.lse[(b * shape.heads + head) * seq_len..][..seq_len];
    with_matrices(
        [n, n, n, QUERIES * row, QUERIES * row],
        #[inline(always)]
        |[q, dout, dq, p, dp]| {
            dk.fill(0.0);
            dv.fill(0.0);
            sequence.load(saved.inputs.qkv[0], head, shape.scale, q);
            sequence.load(saved.dout, head, 1.0, dout);
            // dq holds the forward pass's output until its block is processed.
            sequence.load(saved.out, head, 1.0, dq);
            for QueryBlock { first, lowest, keys } in sequence.blocks() {
                let block = first * size..(first + QUERIES) * size;
                let (q, dout, dq) = (&q[block.clone()], &dout[block.clone()], &mut dq[block]);
                let below = lowest * size;
                let (kt, vt) = (in_panels(&kt[below..], size), in_panels(&vt[below..], size));
                multiply([QUERIES, size, keys], by_rows(q, size), kt, overwrite(p, row));
                multiply([QUERIES, size, keys], by_rows(dout, size), vt, overwrite(dp, row));
                let scores = p.chunks_exact_mut(row).zip(dp.chunks_exact_mut(row));
                let outputs = dout.chunks_exact(size).zip(dq.chunks_exact(size));
                for (i, ((p, dp), (dout, out))) in (first..).zip(scores.zip(outputs)) {
                    let (p, dp) = (&mut p[..keys], &mut dp[..keys]);
                    if i >= seq_len {
                        p.fill(0.0);
                        dp.fill(0.0);
                        continue;
                    }
                    let seen = sequence.seen(i, lowest);
                    let (p, dp) = (zero_outside(p, seen.clone()), zero_outside(dp, seen));
                    if let Some(dropout) = saved.inputs.dropout {
                        dropout.apply(sequence.mask_start(head, i), dp);
                    }
                    score_gradients(p, dp, lse[i], dot(dout, out), shape.softcap);
                    if let Some(dropout) = saved.inputs.dropout {
                        dropout.apply(sequence.mask_start(head, i), p);
                    }
                }
                let (k, dk, dv) = (in_rows(&k[below..], size), &mut dk[below..], &mut dv[below..]);
                multiply([keys, QUERIES, size], by_columns(p, row), in_rows(dout, size), add_to(dv, size));
                multiply([keys, QUERIES, size], by_columns(dp, row), in_rows(q, size), add_to(dk, size));
                multiply([QUERIES, keys, size], by_rows(dp, row), k, overwrite(dq, size));
                scale(dq, shape.scale);
            }
            // SAFETY: this task alone writes this head's part.
            unsafe { sequence.store(dq, head, d_q) };
        },
    );
}

/// Replaces a row's scores `p` by probabilities, and the gradients `dp` of the probabilities by the scores' gradients.
/// `log` is the row's log-sum-exp, `delta` the scalar product of its output and the output's gradient.
#[inline(always)]
fn score_gradients(p: &mut [f32], dp: &mut [f32], log: f32, delta: f32, softcap: Option<f32>) {
    if let Some(cap) = softcap {
        for (dp, p) in dp.iter_mut().zip(p) {
            let tanh = math::tanh(*p / cap);
            *p = math::exp(cap * tanh - log);
            *dp = *p * (*dp - delta) * (1.0 - tanh * tanh);
        }
        return;
    }
    for p in p.iter_mut() {
        *p = math::exp(*p - log);
    }
    for (dp, p) in dp.iter_mut().zip(p) {
        *dp = *p * (*dp - delta);
    }
}

/// Passes `f` scratch matrices of the given lengths, with arbitrary contents, each from the start of a cache line.
#[inline(always)]
pub(crate) fn with_matrices<const N: usize>(lengths: [usize; N], f: impl FnOnce([&mut [f32]; N])) {
    let aligned = |length: usize| length.next_multiple_of(CACHE_LINE / size_of::<f32>());
    with_scratch(
        lengths.into_iter().map(aligned).sum(),
        #[inline(always)]
        |mut rest| {
            f(lengths.map(|length| {
                let (matrix, tail) = std::mem::take(&mut rest).split_at_mut(aligned(length));
                rest = tail;
                &mut matrix[..length]
            }));
        },
    );
}
