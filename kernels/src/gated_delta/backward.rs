//! The gradients of gated delta layers.
//!
//! The forward pass is computed again and keeps the state before each chunk of tokens. Then products of matrices give
//! the gradients of chunks, from the last to the first (Yang et al., "Parallelizing linear transformers with the delta
//! rule", 2024).

use super::{GatedDeltaBackward, HeadTokens, OpenedLayer, STRIP, SequenceRows, norms, strips_mut};
use crate::attention::product::{
    Right, add_to, by_columns, by_rows, in_panels, in_rows, multiply, overwrite, transpose,
};
use crate::attention::{PAD, with_matrices};
use crate::columns::{ColumnReader, ColumnSlice, ColumnWriter, write_columns};
use crate::rows::{STRIPE, axpy, column_sums, dot, scale, sum, with_scratch};
use crate::short_conv::{add_product, multiply_elements};
use crate::view::{read, write};
use crate::{isa, math};
use candle_core::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// The gradients of the outputs and of the input.
#[derive(Clone, Copy)]
struct DeltaGradients<'a> {
    dy: ColumnReader<'a>,
    dinput: ColumnWriter<'a>,
    /// Whether the weights of the convolution get a gradient.
    trains_conv: bool,
}

/// Computes [`GatedDeltaBackward`].
pub fn backward(op: &GatedDeltaBackward<'_>) -> Result<()> {
    let (opened, dy) = (read(op.input)?, read(op.dy)?);
    let layer = &OpenedLayer::open(op.heads, op.input, &opened, op.params, op.eps)?;
    let dy = ColumnSlice::all(op.dy)?.source(&dy);
    let key_heads = op.heads.key_heads;
    let size = layer.partial_size();
    let tasks = op.dy.dim(0)? / op.positions.seq_len * key_heads;
    with_scratch(tasks * size, |partials| {
        write_columns([ColumnSlice::all(op.dinput)?], |[dinput]| {
            let gradients = DeltaGradients { dy, dinput, trains_conv: op.gradients.conv.is_some() };
            partials.par_chunks_exact_mut(size).enumerate().for_each(|(task, partial)| {
                partial.fill(0.0);
                let sequence = SequenceRows::of_batch(task / key_heads, op.positions);
                isa::vectorize!(backward_group(layer, sequence, task % key_heads, gradients, partial));
            });
        })?;
        parameter_gradients(op, layer, partials)
    })
}

/// Adds the parts of all tasks in their order, and stores the gradients of the parameters.
fn parameter_gradients(op: &GatedDeltaBackward<'_>, layer: &OpenedLayer<'_>, partials: &[f32]) -> Result<()> {
    let parameters = op.params.all().into_iter().zip(op.gradients.all());
    let mut sums = vec![0.0; op.params.all().map(Tensor::elem_count).iter().sum()];
    let places: Vec<Vec<usize>> = (0..op.heads.key_heads).map(|key_head| layer.partial_places(key_head)).collect();
    for (partial, places) in partials.chunks_exact(layer.partial_size()).zip(places.iter().cycle()) {
        for (value, place) in partial.iter().zip(places) {
            sums[*place] += value;
        }
    }
    let mut sums = &sums[..];
    for (parameter, gradient) in parameters {
        let (values, rest) = sums.split_at(parameter.elem_count());
        sums = rest;
        gradient.map_or(Ok(()), |gradient| write(gradient, |mut view| view.store(0, values)))?;
    }
    Ok(())
}

impl OpenedLayer<'_> {
    /// The channels of a key head's task: of the query, the key and each value.
    fn channels_of_task(&self, key_head: usize) -> impl Iterator<Item = Range<usize>> {
        let group = self.heads.group();
        let values = (key_head * group..(key_head + 1) * group).map(|value_head| self.value(value_head));
        self.query_and_key(key_head).into_iter().chain(values)
    }

    /// The number of elements of a task's part of the gradients of the parameters.
    fn partial_size(&self) -> usize {
        let channels = self.heads.channels() / self.heads.key_heads;
        self.taps.count() * channels + 2 * self.heads.group() + self.heads.value_dim
    }

    /// The places of these elements among those of all parameters: for each part of the channels `[K, width]`, then
    /// each value head's `a_log` and `dt_bias`, then the norm.
    fn partial_places(&self, key_head: usize) -> Vec<usize> {
        let taps = self.taps.count();
        let conv = self.channels_of_task(key_head).flat_map(|channels| {
            (0..taps).rev().flat_map(move |tap| channels.clone().map(move |channel| channel * taps + tap))
        });
        let mut first = self.heads.channels() * taps;
        let group = self.heads.group();
        let heads = (key_head * group..(key_head + 1) * group)
            .flat_map(|value_head| [0, self.heads.value_heads].map(|parameter| first + parameter + value_head));
        let mut places: Vec<usize> = conv.chain(heads).collect();
        first += 2 * self.heads.value_heads;
        places.extend(first..first + self.heads.value_dim);
        places
    }
}

/// The gradients of the value heads that share a key head.
#[inline(always)]
fn backward_group(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    key_head: usize,
    gradients: DeltaGradients<'_>,
    partial: &mut [f32],
) {
    let (len, width, group) = (sequence.len, layer.padded(), layer.heads.group());
    let (size, taps) = (layer.heads.key_dim.next_multiple_of(PAD), layer.taps.count());
    let (conv, others) = partial.split_at_mut(partial.len() - 2 * group - layer.heads.value_dim);
    let (dqk, dvalues) = conv.split_at_mut(2 * layer.heads.key_dim * taps);
    let (heads, dnorm) = others.split_at_mut(2 * group);
    with_matrices(
        [len * size, len * size, len * size, len * size, len, len, size.max(width)],
        #[inline(always)]
        |[queries, keys, dqueries, dkeys, query_factors, key_factors, scratch]| {
            layer.queries_and_keys(sequence, key_head, [queries, keys], [query_factors, key_factors], scratch, size);
            dqueries.fill(0.0);
            dkeys.fill(0.0);
            for member in 0..group {
                let dconv = &mut dvalues[member * layer.heads.value_dim * taps..][..layer.heads.value_dim * taps];
                let value_head = key_head * group + member;
                let parameters = [dconv, &mut heads[2 * member..][..2], &mut *dnorm];
                backward_head(layer, sequence, value_head, [queries, keys], [dqueries, dkeys], gradients, parameters);
            }
            let dqk = dqk.chunks_exact_mut(layer.heads.key_dim * taps);
            let dqk = dqk.zip(layer.query_and_key(key_head)).zip(norms(layer.heads.key_dim));
            let rows = [(queries, dqueries, query_factors), (keys, dkeys, key_factors)];
            for (((dconv, channels), norm), (rows, drows, factors)) in dqk.zip(rows) {
                for ((row, drow), factor) in rows.chunks_exact(size).zip(drows.chunks_exact_mut(size)).zip(factors) {
                    normalize_backward(row, drow, norm, *factor);
                }
                mix_backward(layer, sequence, channels, [drows, scratch], size, gradients, dconv);
            }
        },
    );
}

/// Replaces the gradient of a row of a given norm by that of the row before its multiplication by `norm · factor`.
#[inline(always)]
fn normalize_backward(row: &[f32], drow: &mut [f32], norm: f32, factor: f32) {
    let along = dot(row, drow) / norm;
    for (d, x) in drow.iter_mut().zip(row) {
        *d = factor * (norm * *d - x * along);
    }
}

/// Computes the gradients of a value head. Those of queries and keys are added to the sums of the group.
#[inline(always)]
fn backward_head(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    value_head: usize,
    [queries, keys]: [&[f32]; 2],
    [dqueries, dkeys]: [&mut [f32]; 2],
    gradients: DeltaGradients<'_>,
    [dconv, dhead, dnorm]: [&mut [f32]; 3],
) {
    let (len, width) = (sequence.len, layer.padded());
    let size = queries.len() / len;
    let state = size * width;
    with_matrices(
        [len, len, len, len, len * width, len * width, len * width, len.div_ceil(CHUNK) * state, state, 2 * width],
        #[inline(always)]
        |[decays, strengths, dlog_decays, dstrengths, values, outputs, errors, starts, dstate, scratch]| {
            layer.decays_and_strengths(sequence, value_head, [decays, strengths]);
            layer.mix(sequence, layer.value(value_head), [values, scratch], width);
            outputs.copy_from_slice(values);
            let tokens = HeadTokens { sequence, size, queries, keys, decays, strengths };
            let chunks = || (0..len).step_by(CHUNK).map(|first| first..len.min(first + CHUNK));
            let count = width / STRIP;
            for strip in 0..count {
                let state = &mut strips_mut(dstate)[..size];
                state.fill([0.0; STRIP]);
                for (tokens_of_chunk, start) in chunks().zip(strips_mut(starts).chunks_exact_mut(size * count)) {
                    for (start, state) in start[strip..].iter_mut().step_by(count).zip(&*state) {
                        *start = *state;
                    }
                    let errors = Some(strips_mut(errors));
                    tokens.scan(tokens_of_chunk, state, strips_mut(outputs), errors, [strip, count]);
                }
            }
            output_gradients(layer, sequence, value_head, outputs, scratch, gradients, dnorm);
            dstate.fill(0.0);
            let doutputs = &*outputs;
            let mut rows =
                HeadRows { errors, doutputs, dqueries, dkeys, dvalues: values, dlog_decays, dstrengths, dstate };
            for (tokens_of_chunk, start) in chunks().zip(starts.chunks_exact(state)).rev() {
                rows.backward(tokens, tokens_of_chunk, start);
            }
            gate_gradients(layer, sequence, value_head, [dlog_decays, dstrengths], gradients, dhead);
            mix_backward(layer, sequence, layer.value(value_head), [values, scratch], width, gradients, dconv);
        },
    );
}

/// Replaces the outputs of a value head by their gradients, stores those of `z`, and adds those of the norm's weight.
#[inline(always)]
fn output_gradients(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    value_head: usize,
    outputs: &mut [f32],
    scratch: &mut [f32],
    gradients: DeltaGradients<'_>,
    dnorm: &mut [f32],
) {
    let size = layer.heads.value_dim;
    let (z, rest) = scratch.split_at_mut(size);
    let dy = &mut rest[..size];
    for (i, output) in outputs.chunks_exact_mut(layer.padded()).enumerate() {
        let output = &mut output[..size];
        let row = sequence.first + i;
        let inverse = layer.inverse_rms(output);
        layer.input.load(row, layer.z(value_head), z);
        gradients.dy.load(row, value_head * size, dy);
        let elements = output.iter_mut().zip(&mut *dy).zip(&mut *z).zip(&layer.norm).zip(&mut *dnorm);
        for ((((output, dy), z), weight), dweight) in elements {
            let (gate, slope) = math::silu_with_derivative(*z);
            *output *= inverse;
            *z = *dy * weight * *output * slope;
            *dweight += *dy * *output * gate;
            *dy *= weight * gate;
        }
        // SAFETY: one task alone writes this head's part of the row.
        unsafe { gradients.dinput.store(row, layer.z(value_head), z) };
        let along = dot(dy, output) / size as f32;
        for (output, dy) in output.iter_mut().zip(&*dy) {
            *output = inverse * (dy - *output * along);
        }
    }
}

/// Stores the gradients of `b` and `a`, and adds those of `a_log` and `dt_bias`.
#[inline(always)]
fn gate_gradients(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    value_head: usize,
    [dlog_decays, dstrengths]: [&[f32]; 2],
    gradients: DeltaGradients<'_>,
    dhead: &mut [f32],
) {
    let mut sums = [0.0; 2];
    for (i, (dlog_decay, dstrength)) in dlog_decays.iter().zip(dstrengths).enumerate() {
        let row = sequence.first + i;
        let gates = layer.gates(row, value_head);
        let da = dlog_decay * gates.log_slope;
        sums[0] += f64::from(dlog_decay * gates.log_decay);
        sums[1] += f64::from(da);
        let [b, a] = layer.b_and_a(value_head);
        for (column, gradient) in [(b, dstrength * gates.beta_slope), (a, da)] {
            // SAFETY: one task alone writes this head's elements of the row.
            unsafe { gradients.dinput.store(row, column, &[gradient]) };
        }
    }
    dhead.copy_from_slice(&sums.map(|sum| sum as f32));
}

/// The largest number of tokens of a chunk.
const CHUNK: usize = 32;

/// The rows of a value head, and the gradients that belong to them.
struct HeadRows<'a> {
    /// `v - α Sᵀ k`.
    errors: &'a [f32],
    doutputs: &'a [f32],
    /// Sums over the heads of a group.
    dqueries: &'a mut [f32],
    dkeys: &'a mut [f32],
    dvalues: &'a mut [f32],
    /// The gradients of `log α`.
    dlog_decays: &'a mut [f32],
    dstrengths: &'a mut [f32],
    /// The gradient of the state after the chunk, then that of the state before it.
    dstate: &'a mut [f32],
}

impl HeadRows<'_> {
    /// Computes the gradients of a chunk of tokens, given the state before it. With the product `D_ij` of the decays
    /// after token `j` up to token `i`, the state after token `i` is `D_i0 S_0 + Σ_j D_ij k_j δ_jᵀ`.
    #[inline(always)]
    fn backward(&mut self, tokens: HeadTokens<'_>, chunk: Range<usize>, state: &[f32]) {
        let (len, size) = (chunk.len(), tokens.size);
        let (width, count) = (state.len() / size, len.next_multiple_of(PAD));
        let of_keys = chunk.start * size..chunk.end * size;
        let of_values = chunk.start * width..chunk.end * width;
        let strengths = &tokens.strengths[chunk.clone()];
        let [keys, values, square] = [count * size, count * width, count * count];
        let panels = size.max(count) * width;
        with_matrices(
            [keys, keys, keys, values, values, values, square, square, square, square, square, 3 * count, panels],
            #[inline(always)]
            |[q, k, through_state, doutput, change, dvalue, decays, qk, kk, dqk, dkk, sums, panels]| {
                let errors = &self.errors[of_values.clone()];
                pad(&tokens.queries[of_keys.clone()], q);
                pad(&tokens.keys[of_keys.clone()], k);
                pad(&self.doutputs[of_values.clone()], doutput);
                pad(errors, change);
                scale_rows(change, width, strengths);
                let (since_start, sums) = sums.split_at_mut(count);
                chunk_decays(tokens, chunk.clone(), decays, since_start);
                let until_end = &decays[(len - 1) * count..][..count];

                // The gradients of the changes and of the values.
                transpose(k, size, panels);
                multiply_both([q, k], in_panels(panels, size), size, [qk, kk]);
                multiply_elements(qk, decays);
                multiply_elements(kk, decays);
                multiply([count, size, width], by_rows(k, size), in_rows(self.dstate, width), overwrite(dvalue, width));
                scale_rows(dvalue, width, until_end);
                let right = in_rows(doutput, width);
                multiply([count, count, width], by_columns(qk, count), right, add_to(dvalue, width));
                let dstrengths = &mut self.dstrengths[chunk.clone()];
                substitute(dvalue, kk, [strengths, errors], dstrengths);
                self.dvalues[of_values].copy_from_slice(&dvalue[..len * width]);

                // The gradients of queries and keys from other tokens of the chunk.
                let (dq, dk) = (&mut self.dqueries[of_keys.clone()], &mut self.dkeys[of_keys]);
                transpose(change, width, panels);
                multiply_both([doutput, dvalue], in_panels(panels, width), width, [dqk, dkk]);
                for (((qk, kk), dqk), dkk) in qk.iter_mut().zip(kk).zip(&*dqk).zip(&*dkk) {
                    *qk = *qk * dqk - *kk * dkk;
                }
                multiply_elements(dqk, decays);
                multiply_elements(dkk, decays);
                negate_and_mirror(dkk, count);
                multiply([len, count, size], by_rows(dqk, count), in_rows(k, size), add_to(dq, size));
                multiply([len, count, size], by_columns(dqk, count), in_rows(q, size), add_to(dk, size));
                multiply([len, count, size], by_rows(dkk, count), in_rows(k, size), add_to(dk, size));

                // Those from the states before and after the chunk.
                scale_rows(change, width, until_end);
                scale_rows(doutput, width, since_start);
                scale(since_start, -1.0);
                scale_rows(dvalue, width, since_start);
                let (from_start, to_end) = sums.split_at_mut(count);
                from_start.fill(0.0);
                to_end.fill(0.0);
                transpose(state, width, panels);
                let right = in_panels(panels, width);
                add_products((doutput, width), right, [q, through_state], dq, from_start);
                add_products((dvalue, width), right, [k, through_state], dk, from_start);
                transpose(self.dstate, width, panels);
                let right = in_panels(panels, width);
                add_products((change, width), right, [k, through_state], dk, to_end);

                scale(self.dstate, -since_start[len - 1]);
                let mut both = 0.0;
                for (x, dx) in state.chunks_exact(width).zip(self.dstate.chunks_exact(width)) {
                    both += f64::from(dot(x, dx));
                }
                decay_gradients(&mut self.dlog_decays[chunk], qk, [from_start, to_end], both as f32);
                let right = in_rows(doutput, width);
                multiply([size, count, width], by_columns(q, size), right, add_to(self.dstate, width));
                let right = in_rows(dvalue, width);
                multiply([size, count, width], by_columns(k, size), right, add_to(self.dstate, width));
            },
        );
    }
}

/// Multiplies two matrices of the chunk's rows, whose width is `inner`, by the same one.
#[inline(always)]
fn multiply_both(left: [&[f32]; 2], right: Right<'_>, inner: usize, products: [&mut [f32]; 2]) {
    for (left, product) in left.into_iter().zip(products) {
        let count = left.len() / inner;
        multiply([count, inner, count], by_rows(left, inner), right, overwrite(product, count));
    }
}

/// Replaces the gradients of changes by those of values, and writes those of write strengths, from the last: each
/// token's change depends on the ones before it.
#[inline(always)]
fn substitute(changes: &mut [f32], kk: &[f32], [strengths, errors]: [&[f32]; 2], dstrengths: &mut [f32]) {
    let width = errors.len() / strengths.len();
    let count = changes.len() / width;
    for i in (0..strengths.len()).rev() {
        let (earlier, dvalue) = changes[..(i + 1) * width].split_at_mut(i * width);
        dstrengths[i] = dot(dvalue, &errors[i * width..][..width]);
        scale(dvalue, strengths[i]);
        for (earlier, product) in earlier.chunks_exact_mut(width).zip(&kk[i * count..]) {
            axpy(-product, dvalue, earlier);
        }
    }
}

/// Adds the rows of `a · b` to `dx`, and their scalar products with those of `x` to `sums`.
#[inline(always)]
fn add_products(
    (a, width): (&[f32], usize),
    b: Right<'_>,
    [x, products]: [&mut [f32]; 2],
    dx: &mut [f32],
    sums: &mut [f32],
) {
    let size = x.len() / sums.len();
    multiply([sums.len(), width, size], by_rows(a, width), b, overwrite(products, size));
    axpy(1.0, &products[..dx.len()], dx);
    for ((sum, x), product) in sums.iter_mut().zip(x.chunks_exact(size)).zip(products.chunks_exact(size)) {
        *sum += dot(x, product);
    }
}

/// Writes the gradients of `log α` of a chunk. Each is the sum of all products that its decay is a factor of: `pairs`
/// of a later token or itself, in the rows, and an earlier one; of the state before the chunk and later tokens or
/// itself, `from_start`; of earlier tokens and the state after the chunk, `to_end`; and of both states. Nothing is
/// subtracted from a larger sum.
#[inline(always)]
fn decay_gradients(dlog_decays: &mut [f32], pairs: &mut [f32], [from_start, to_end]: [&mut [f32]; 2], both: f32) {
    let count = from_start.len();
    for i in 1..count {
        to_end[i] += to_end[i - 1];
    }
    for (i, gradient) in dlog_decays.iter_mut().enumerate().rev() {
        let (rows, later) = pairs.split_at_mut((i + 1) * count);
        let row = &mut rows[i * count..];
        if i + 1 < count {
            axpy(1.0, &later[..count], row);
            from_start[i] += from_start[i + 1];
        }
        let before = if i == 0 { 0.0 } else { to_end[i - 1] };
        *gradient = sum(&row[..i]) + from_start[i] + before + both;
    }
}

/// Copies rows, and fills the rest of `out` with zeros.
#[inline(always)]
fn pad(rows: &[f32], out: &mut [f32]) {
    let (out, padding) = out.split_at_mut(rows.len());
    out.copy_from_slice(rows);
    padding.fill(0.0);
}

/// Multiplies each row of `width` by its factor.
#[inline(always)]
fn scale_rows(rows: &mut [f32], width: usize, factors: &[f32]) {
    for (row, factor) in rows.chunks_exact_mut(width).zip(factors) {
        scale(row, *factor);
    }
}

/// Replaces a matrix by the negative sum of its part below the diagonal and of that part's transpose.
#[inline(always)]
fn negate_and_mirror(x: &mut [f32], size: usize) {
    for i in 0..size {
        x[i * size + i] = 0.0;
        for j in 0..i {
            x[i * size + j] *= -1.0;
            x[j * size + i] = x[i * size + j];
        }
    }
}

/// Writes the products of the decays after each token, in the columns, up to each token of a chunk, in the rows; above
/// the diagonal, and in the padding, zeros. `since_start` gets those of all decays up to each token.
#[inline(always)]
fn chunk_decays(tokens: HeadTokens<'_>, chunk: Range<usize>, decays: &mut [f32], since_start: &mut [f32]) {
    let count = since_start.len();
    decays.fill(0.0);
    since_start.fill(0.0);
    let mut product = 1.0;
    for (i, token) in chunk.enumerate() {
        let decay = if tokens.sequence.position(token) == 0 { 0.0 } else { tokens.decays[token] };
        product *= decay;
        since_start[i] = product;
        let (before, row) = decays.split_at_mut(i * count);
        for (x, before) in row[..i].iter_mut().zip(before[i.saturating_sub(1) * count..].iter()) {
            *x = decay * before;
        }
        row[i] = 1.0;
    }
}

/// Goes back through SiLU and the convolution of some channels, with the gradients `rows [T, width]`. Stores the
/// gradients of the input and writes those of the weights, `[K, channels]`.
#[inline(always)]
fn mix_backward(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    channels: Range<usize>,
    [rows, scratch]: [&mut [f32]; 2],
    width: usize,
    gradients: DeltaGradients<'_>,
    dconv: &mut [f32],
) {
    let (len, count, taps) = (sequence.len, channels.len(), layer.taps.count());
    with_matrices(
        [len * count],
        #[inline(always)]
        |[inputs]| {
            layer.load(sequence, channels.clone(), inputs, count);
            let sum = &mut scratch[..count];
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                layer.convolve(sequence, i, channels.clone(), (inputs, count), sum);
                for (d, x) in row.iter_mut().zip(&*sum) {
                    *d *= math::silu_with_derivative(*x).1;
                }
            }
            for i in 0..len {
                sum.fill(0.0);
                for after in (0..taps.min(len - i)).filter(|after| sequence.position(i + after) >= *after) {
                    add_product(sum, &layer.taps.of(after)[channels.clone()], &rows[(i + after) * width..][..count]);
                }
                // SAFETY: one task alone writes these channels of the row.
                unsafe { gradients.dinput.store(sequence.first + i, channels.start, sum) };
            }
            if gradients.trains_conv {
                convolution_gradients(sequence, inputs, rows, width, dconv);
            }
        },
    );
}

/// Writes the gradients of a convolution's weights, `[K, channels]`, from its `inputs [T, channels]` and the gradients
/// `rows [T, width]` of its outputs.
#[inline(always)]
fn convolution_gradients(sequence: SequenceRows<'_>, inputs: &[f32], rows: &[f32], width: usize, dconv: &mut [f32]) {
    let count = inputs.len() / sequence.len;
    for (before, dtap) in dconv.chunks_exact_mut(count).enumerate() {
        for (first, dtap) in (0..count).step_by(STRIPE).zip(dtap.chunks_mut(STRIPE)) {
            let [sums] = column_sums(
                sequence.len,
                first,
                dtap.len(),
                #[inline(always)]
                |i, first, [sums]| {
                    if sequence.position(i) < before {
                        return;
                    }
                    let inputs = &inputs[(i - before) * count + first..][..dtap.len()];
                    add_product(sums, &rows[i * width + first..][..dtap.len()], inputs);
                },
            );
            dtap.copy_from_slice(&sums[..dtap.len()]);
        }
    }
}
