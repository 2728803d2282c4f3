//! The gated delta rule in chunks of tokens (Yang et al., "Parallelizing linear transformers with the delta rule",
//! 2024). candle's autograd gives the gradients.

use super::short_conv::{convolved, convolved_after, taps};
use super::tensors::{matmul, select, store, upcast};
use super::{bounded, logistic};
use crate::gated_delta::{
    DecodeGatedDelta, DeltaHeads, DeltaParams, DeltaSequence, GatedDelta, GatedDeltaBackward, NORM_EPS,
};
use crate::rope::PositionIds;
use candle_core::{Result, Tensor, Var, bail};

/// Tokens whose changes of the state are computed together.
const CHUNK: usize = 64;
/// Below this, the logistic function has the value and the derivative 0 in FP32, and its exponential is finite.
const LOWEST: f32 = -80.0;

/// A layer with its parameters in the type to compute with.
struct Layer<'a> {
    heads: DeltaHeads,
    params: DeltaParams<&'a Tensor>,
    eps: f32,
    positions: PositionIds<'a>,
}

/// Queries, keys and values, `[B·value_heads, T, width]`, and their gates, `[B·value_heads, T, 1]`.
struct Tokens {
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    log_decays: Tensor,
}

fn columns(x: &Tensor, first: usize, count: usize) -> Result<Tensor> {
    x.narrow(1, first, count)?.contiguous()
}

/// The inverse square root of each row's squares, summed, times `factor`, plus `eps`.
fn inverse_root(x: &Tensor, factor: f64, eps: f32) -> Result<Tensor> {
    x.sqr()?.sum_keepdim(x.rank() - 1)?.affine(factor, f64::from(eps))?.sqrt()?.recip()
}

/// `[rows, columns]`: 1 where `holds`, else 0.
fn indicator(rows: usize, columns: usize, like: &Tensor, holds: impl Fn(usize, usize) -> bool) -> Result<Tensor> {
    let value = |i: usize| f32::from(u8::from(holds(i / columns, i % columns)));
    let values = (0..rows * columns).map(value).collect();
    Tensor::from_vec(values, (rows, columns), like.device())?.to_dtype(like.dtype())
}

/// The inverse of `1 + lower`, where `lower [M, n, n]` is strictly triangular. Blocks on the diagonal are inverted,
/// then blocks of twice their size: `[[A, 0], [B, D]]` has the inverse `[[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]`.
fn inverse(lower: &Tensor) -> Result<Tensor> {
    let size = lower.dim(1)?;
    let mut inverse = indicator(size, size, lower, |i, j| i == j)?.broadcast_as(lower.shape())?.contiguous()?;
    let mut block = 1;
    while block < size {
        let below = |i: usize, j: usize| i / block == j / block + 1 && (j / block).is_multiple_of(2);
        let between = lower.broadcast_mul(&indicator(size, size, lower, below)?)?;
        inverse = (&inverse - matmul(&matmul(&inverse, &between)?, &inverse)?)?;
        block *= 2;
    }
    Ok(inverse)
}

impl Layer<'_> {
    /// The number of sequences among `rows` rows.
    fn batch(&self, rows: usize) -> usize {
        rows / self.positions.seq_len
    }

    /// `x [N, key_heads · group · width]` as `[B·value_heads, T, width]`, each of its heads repeated until there are
    /// `value_heads`.
    fn by_head(&self, x: &Tensor, width: usize) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        let DeltaHeads { value_heads, .. } = self.heads;
        let heads = columns / width;
        let (batch, seq_len) = (self.batch(rows), self.positions.seq_len);
        x.reshape((batch, seq_len, heads, 1, width))?
            .broadcast_as((batch, seq_len, heads, value_heads / heads, width))?
            .contiguous()?
            .reshape((batch, seq_len, value_heads, width))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((batch * value_heads, seq_len, width))
    }

    /// Applies SiLU and the norms to `convolved [N, channels]`, and computes the gates from `input`.
    fn tokens(&self, input: &Tensor, convolved: &Tensor) -> Result<Tokens> {
        let DeltaHeads { value_heads, key_dim, value_dim, .. } = self.heads;
        let [keys, values] = [self.heads.keys(), self.heads.values()];
        let x = convolved.silu()?;
        let normalized = |first: usize, norm: f64| {
            let x = self.by_head(&columns(&x, first, keys)?, key_dim)?;
            x.broadcast_mul(&(inverse_root(&x, 1.0, NORM_EPS)? * norm)?)
        };
        let gate = |first: usize| columns(input, self.heads.channels() + values + first, value_heads);
        let step = gate(value_heads)?.broadcast_add(self.params.dt_bias)?;
        let softplus = (step.relu()? + (step.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
        Ok(Tokens {
            queries: normalized(0, 1.0 / (key_dim as f64).sqrt())?,
            keys: normalized(keys, 1.0)?,
            values: self.by_head(&columns(&x, 2 * keys, values)?, value_dim)?,
            strengths: self.by_head(&logistic(&bounded(&gate(0)?, LOWEST)?)?, 1)?,
            log_decays: self.by_head(&softplus.broadcast_mul(&self.params.a_log.exp()?)?.neg()?, 1)?,
        })
    }

    /// Multiplies the normalized `outputs [B·value_heads, T, value_dim]` with their gates: `[N, values]`.
    fn gated(&self, input: &Tensor, outputs: &Tensor) -> Result<Tensor> {
        let DeltaHeads { value_heads, value_dim, .. } = self.heads;
        let (rows, values) = (input.dim(0)?, self.heads.values());
        let outputs = outputs
            .reshape((self.batch(rows), value_heads, self.positions.seq_len, value_dim))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((rows * value_heads, value_dim))?;
        let normalized = outputs.broadcast_mul(&inverse_root(&outputs, 1.0 / value_dim as f64, self.eps)?)?;
        let weighted = normalized.broadcast_mul(self.params.norm)?.reshape((rows, values))?;
        weighted * columns(input, self.heads.channels(), values)?.silu()?
    }

    /// The products of the decays from the state before a chunk, and from each of its tokens, to each token:
    /// `[M, n, 1 + n]`. They are 0 from later tokens and from other documents.
    fn decays(&self, log_decays: &Tensor, first: usize) -> Result<Tensor> {
        let (heads, size, _) = log_decays.dims3()?;
        let batch = heads / self.heads.value_heads;
        // From column `from` on, each of the token's own and earlier logarithms. Sums of few numbers have small errors.
        let after = indicator(1 + size, size, log_decays, |from, i| i >= from)?;
        let until = indicator(size, size, log_decays, |i, to| i <= to)?;
        let terms = log_decays.reshape((heads, 1, size))?.broadcast_mul(&after)?;
        let sums = matmul(&terms.reshape((heads * (1 + size), size))?, &until)?;
        let sums = sums.reshape((batch, self.heads.value_heads, 1 + size, size))?.transpose(2, 3)?.contiguous()?;
        let sees = |i: usize| {
            let (row, from) = (i / (1 + size), i % (1 + size));
            let (b, to) = (row / size, row % size);
            let position = self.positions.of(b * self.positions.seq_len + first + to);
            u8::from(from <= to + 1 && position + from > to)
        };
        let mask: Vec<u8> = (0..batch * size * (1 + size)).map(sees).collect();
        let mask = Tensor::from_vec(mask, (batch, 1, size, 1 + size), log_decays.device())?;
        select(&mask, &sums, f32::NEG_INFINITY)?.exp()?.reshape((heads, size, 1 + size))
    }

    /// The outputs of all tokens after `state [B·value_heads, key_dim, value_dim]`, and the state after them.
    fn attend(&self, tokens: &Tokens, mut state: Tensor) -> Result<(Tensor, Tensor)> {
        let seq_len = self.positions.seq_len;
        let mut outputs = Vec::new();
        for first in (0..seq_len).step_by(CHUNK) {
            let size = CHUNK.min(seq_len - first);
            let part = |x: &Tensor| x.narrow(1, first, size)?.contiguous();
            let (queries, keys, strengths) = (part(&tokens.queries)?, part(&tokens.keys)?, part(&tokens.strengths)?);
            let decays = self.decays(&part(&tokens.log_decays)?, first)?;
            let (from_state, between) =
                (decays.narrow(2, 0, 1)?.contiguous()?, decays.narrow(2, 1, size)?.contiguous()?);
            let to_end = between.narrow(1, size - 1, 1)?.contiguous()?.reshape(from_state.shape())?;
            let transposed = keys.transpose(1, 2)?;
            let earlier = indicator(size, size, &keys, |i, j| j < i)?;
            let overlaps =
                (matmul(&keys.broadcast_mul(&strengths)?, &transposed)? * &between)?.broadcast_mul(&earlier)?;
            let known = matmul(&keys, &state)?.broadcast_mul(&from_state)?;
            let changes = matmul(&inverse(&overlaps)?, &(part(&tokens.values)? - known)?.broadcast_mul(&strengths)?)?;
            let scores = (matmul(&queries, &transposed)? * &between)?;
            let read = matmul(&queries, &state)?.broadcast_mul(&from_state)?;
            outputs.push((read + matmul(&scores, &changes)?)?);
            let kept = state.broadcast_mul(&from_state.narrow(1, size - 1, 1)?)?;
            state = (kept + matmul(&keys.broadcast_mul(&to_end)?.transpose(1, 2)?, &changes)?)?;
        }
        Ok((Tensor::cat(&outputs, 1)?, state))
    }

    /// The output of whole sequences, `[N, values]`.
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let DeltaHeads { value_heads, key_dim, value_dim, .. } = self.heads;
        let x = columns(input, 0, self.heads.channels())?;
        let tokens = self.tokens(input, &convolved(&x, &taps(self.params.conv)?, self.positions)?)?;
        let shape = (self.batch(input.dim(0)?) * value_heads, key_dim, value_dim);
        let (outputs, _) = self.attend(&tokens, Tensor::zeros(shape, input.dtype(), input.device())?)?;
        self.gated(input, &outputs)
    }
}

pub(super) fn forward(op: &GatedDelta<'_>) -> Result<()> {
    let params = op.params.try_map(upcast)?;
    let layer = Layer { heads: op.heads, params: params.each(), eps: op.eps, positions: op.positions };
    store(&layer.forward(&upcast(op.input)?)?, op.out)
}

pub(super) fn backward(op: &GatedDeltaBackward<'_>) -> Result<()> {
    let variable = |x: &Tensor| Var::from_tensor(&upcast(x)?);
    let (input, params) = (variable(op.input)?, op.params.try_map(variable)?);
    let tensors = params.each().try_map(|variable| Ok(variable.as_tensor()))?;
    let layer = Layer { heads: op.heads, params: tensors, eps: op.eps, positions: op.positions };
    let gradients = (layer.forward(&input)? * upcast(op.dy)?)?.sum_all()?.backward()?;
    let outputs = params.each().all().into_iter().zip(op.gradients.all());
    for (variable, out) in [(&input, Some(op.dinput))].into_iter().chain(outputs) {
        let Some(out) = out else { continue };
        let Some(gradient) = gradients.get(variable) else { bail!("autograd has no gradient of {:?}", out.dims()) };
        store(&gradient.contiguous()?, out)?;
    }
    Ok(())
}

pub(super) fn decode(op: &DecodeGatedDelta<'_>) -> Result<()> {
    let params = op.params.try_map(upcast)?;
    let taps = taps(op.params.conv)?;
    let mut first = 0;
    for &DeltaSequence { cache, past, new } in op.sequences {
        let positions = PositionIds { seq_len: new, past, documents: None };
        let layer = Layer { heads: op.heads, params: params.each(), eps: op.eps, positions };
        let input = upcast(&op.input.narrow(0, first, new)?)?;
        let x = columns(&input, 0, op.heads.channels())?;
        let tokens = layer.tokens(&input, &convolved_after(&x, &cache.inputs, past, &taps)?)?;
        let state = if past == 0 { cache.states.zeros_like()? } else { cache.states.copy()? };
        let (outputs, state) = layer.attend(&tokens, state)?;
        store(&state, &cache.states)?;
        store(&layer.gated(&input, &outputs)?, &op.out.narrow(0, first, new)?)?;
        first += new;
    }
    Ok(())
}
