//! The gradients of gated delta layers.
//!
//! The forward pass is computed again and keeps the states at the start of chunks of tokens. Then, from the last chunk to the first,
//! the states within a chunk are computed once more and all kept, and the gradient of the state goes back token by token.

use super::{GatedDeltaBackward, Layer, STRIP, Sequence, Strip, Tokens, norms, strips_mut, times};
use crate::attention::with_matrices;
use crate::columns::{ColumnReader, ColumnSlice, ColumnWriter, write_columns};
use crate::rows::{LANES, STRIPE, axpy, column_sums, dot, lane_total, scale, sum, with_scratch};
use crate::short_conv::add_product;
use crate::view::{read, write};
use crate::{isa, math};
use candle_core::{Result, Tensor};
use rayon::prelude::*;
use std::hint;
use std::ops::Range;

/// The gradients of the outputs and of the input.
#[derive(Clone, Copy)]
struct Gradients<'a> {
    dy: ColumnReader<'a>,
    dinput: ColumnWriter<'a>,
    /// Whether the weights of the convolution get a gradient.
    trains_conv: bool,
}

/// Computes [`GatedDeltaBackward`].
pub fn backward(op: &GatedDeltaBackward<'_>) -> Result<()> {
    let (opened, dy) = (read(op.input)?, read(op.dy)?);
    let layer = &Layer::open(op.heads, op.input, &opened, op.params, op.eps)?;
    let dy = ColumnSlice::all(op.dy)?.source(&dy);
    let key_heads = op.heads.key_heads;
    let size = layer.partial_size();
    let tasks = op.dy.dim(0)? / op.positions.seq_len * key_heads;
    with_scratch(tasks * size, |partials| {
        write_columns([ColumnSlice::all(op.dinput)?], |[dinput]| {
            let gradients = Gradients { dy, dinput, trains_conv: op.gradients.conv.is_some() };
            partials.par_chunks_exact_mut(size).enumerate().for_each(|(task, partial)| {
                partial.fill(0.0);
                let sequence = Sequence::of_batch(task / key_heads, op.positions);
                isa::vectorize!(backward_group(layer, sequence, task % key_heads, gradients, partial));
            });
        })?;
        parameter_gradients(op, layer, partials)
    })
}

/// Adds the parts of all tasks in their order, and stores the gradients of the parameters.
fn parameter_gradients(op: &GatedDeltaBackward<'_>, layer: &Layer<'_>, partials: &[f32]) -> Result<()> {
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

impl Layer<'_> {
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

    /// The places of these elements among those of all parameters: for each part of the channels `[K, width]`, then each value
    /// head's `a_log` and `dt_bias`, then the norm.
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
    layer: &Layer<'_>,
    sequence: Sequence<'_>,
    key_head: usize,
    gradients: Gradients<'_>,
    partial: &mut [f32],
) {
    let (len, width, group) = (sequence.len, layer.padded(), layer.heads.group());
    let (size, taps) = (layer.heads.key_dim, layer.taps.count());
    let (conv, others) = partial.split_at_mut(partial.len() - 2 * group - layer.heads.value_dim);
    let (dqk, dvalues) = conv.split_at_mut(2 * size * taps);
    let (heads, dnorm) = others.split_at_mut(2 * group);
    with_matrices(
        [len * size, len * size, len * size, len * size, len, len, size.max(width)],
        #[inline(always)]
        |[queries, keys, dqueries, dkeys, query_factors, key_factors, scratch]| {
            layer.queries_and_keys(sequence, key_head, [queries, keys], [query_factors, key_factors], scratch);
            dqueries.fill(0.0);
            dkeys.fill(0.0);
            for member in 0..group {
                let dconv = &mut dvalues[member * layer.heads.value_dim * taps..][..layer.heads.value_dim * taps];
                let value_head = key_head * group + member;
                let parameters = [dconv, &mut heads[2 * member..][..2], &mut *dnorm];
                backward_head(layer, sequence, value_head, [queries, keys], [dqueries, dkeys], gradients, parameters);
            }
            let dqk = dqk.chunks_exact_mut(size * taps).zip(layer.query_and_key(key_head)).zip(norms(size));
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
    layer: &Layer<'_>,
    sequence: Sequence<'_>,
    value_head: usize,
    [queries, keys]: [&[f32]; 2],
    [dqueries, dkeys]: [&mut [f32]; 2],
    gradients: Gradients<'_>,
    [dconv, dhead, dnorm]: [&mut [f32]; 3],
) {
    let (len, width, size) = (sequence.len, layer.padded(), layer.heads.key_dim);
    let chunk = len.isqrt();
    let starts = len.div_ceil(chunk) * size * width;
    with_matrices(
        [
            len,
            len,
            len,
            len,
            len * width,
            len * width,
            starts,
            (chunk + 1) * size * STRIP,
            chunk * STRIP,
            2 * size * LANES,
            3 * width,
        ],
        #[inline(always)]
        |[decays, strengths, ddecays, dstrengths, values, outputs, starts, states, errors, lanes, scratch]| {
            layer.decays_and_strengths(sequence, value_head, [decays, strengths]);
            layer.mix(sequence, layer.value(value_head), [values, scratch], width);
            outputs.copy_from_slice(values);
            let tokens = Tokens { sequence, size, queries, keys, decays, strengths };
            let chunks = || (0..len).step_by(chunk).map(|first| first..len.min(first + chunk));
            let count = width / STRIP;
            let (dstate, states) = strips_mut(states).split_at_mut(size);
            let starts = strips_mut(starts);
            let rows = strips_mut(outputs);
            for strip in 0..count {
                dstate.fill([0.0; STRIP]);
                for (i, tokens_of_chunk) in chunks().enumerate() {
                    starts[(i * count + strip) * size..][..size].copy_from_slice(dstate);
                    tokens.scan(tokens_of_chunk, dstate, rows, [strip, count]);
                }
            }
            output_gradients(layer, sequence, value_head, outputs, scratch, gradients, dnorm);
            ddecays.fill(0.0);
            dstrengths.fill(0.0);
            let mut chunk = Chunk {
                tokens,
                states,
                errors: strips_mut(errors),
                lanes: lanes.as_chunks_mut().0,
                dstate,
                values: strips_mut(values),
                doutputs: strips_mut(outputs),
                dqueries,
                dkeys,
                ddecays,
                dstrengths,
            };
            for strip in 0..count {
                chunk.dstate.fill([0.0; STRIP]);
                for (i, tokens_of_chunk) in chunks().enumerate().rev() {
                    chunk.states[..size].copy_from_slice(&starts[(i * count + strip) * size..][..size]);
                    chunk.recompute(tokens_of_chunk.clone(), [strip, count]);
                    chunk.backward(tokens_of_chunk, [strip, count]);
                }
            }
            gate_gradients(layer, sequence, value_head, [decays, ddecays, dstrengths], gradients, dhead);
            mix_backward(layer, sequence, layer.value(value_head), [values, scratch], width, gradients, dconv);
        },
    );
}

/// Replaces the outputs of a value head by their gradients, stores those of `z`, and adds those of the norm's weight.
#[inline(always)]
fn output_gradients(
    layer: &Layer<'_>,
    sequence: Sequence<'_>,
    value_head: usize,
    outputs: &mut [f32],
    scratch: &mut [f32],
    gradients: Gradients<'_>,
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
        for j in 0..size {
            let (gate, slope) = math::silu_with_derivative(z[j]);
            output[j] *= inverse;
            z[j] = dy[j] * layer.norm[j] * output[j] * slope;
            dnorm[j] += dy[j] * output[j] * gate;
            dy[j] *= layer.norm[j] * gate;
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
    layer: &Layer<'_>,
    sequence: Sequence<'_>,
    value_head: usize,
    [decays, ddecays, dstrengths]: [&[f32]; 3],
    gradients: Gradients<'_>,
    dhead: &mut [f32],
) {
    let mut sums = [0.0; 2];
    for (i, dstrength) in dstrengths.iter().enumerate() {
        let row = sequence.first + i;
        let gates = layer.gates(row, value_head);
        let dlog_decay = ddecays[i] * decays[i];
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

/// A strip of the states of a chunk of tokens, and what its gradients need.
struct Chunk<'a> {
    tokens: Tokens<'a>,
    /// The state before each token.
    states: &'a mut [Strip],
    /// [`Tokens::error`] of each token.
    errors: &'a mut [Strip],
    /// Partial sums of the gradients of a query, then of a key.
    lanes: &'a mut [[f32; LANES]],
    /// The gradient of the state after the token.
    dstate: &'a mut [Strip],
    /// The values, then their gradients.
    values: &'a mut [Strip],
    doutputs: &'a mut [Strip],
    dqueries: &'a mut [f32],
    dkeys: &'a mut [f32],
    ddecays: &'a mut [f32],
    dstrengths: &'a mut [f32],
}

impl Chunk<'_> {
    /// Computes the states before all tokens from the one before the first.
    #[inline(always)]
    fn recompute(&mut self, chunk: Range<usize>, [strip, count]: [usize; 2]) {
        let tokens = self.tokens;
        let mut rest = &mut self.states[..chunk.len() * tokens.size];
        for (i, error) in chunk.zip(&mut *self.errors) {
            let state = rest.split_off_mut(..tokens.size).unwrap_or_default();
            if tokens.sequence.position(i) == 0 {
                state.fill([0.0; STRIP]);
            }
            *error = tokens.error(i, state, &self.values[i * count + strip]);
            let change = times(tokens.strengths[i], *error);
            let [_, key] = tokens.query_and_key(i);
            let decay = tokens.decays[i];
            for ((next, state), key) in rest.iter_mut().zip(state).zip(key) {
                *next = times(decay, *state);
                axpy(*key, &change, next);
            }
        }
    }

    /// Goes back through the tokens.
    #[inline(always)]
    fn backward(&mut self, chunk: Range<usize>, [strip, count]: [usize; 2]) {
        let tokens = self.tokens;
        let size = tokens.size;
        let first = chunk.start;
        for i in chunk.rev() {
            let state = &self.states[(i - first) * size..][..size];
            let error = &self.errors[i - first];
            let doutput = self.doutputs[i * count + strip];
            let [query, key] = tokens.query_and_key(i);
            let (decay, strength) = (tokens.decays[i], tokens.strengths[i]);
            let (dquery, dkey) = (&mut self.dqueries[i * size..][..size], &mut self.dkeys[i * size..][..size]);
            let change = times(strength, *error);
            let mut dchange = [0.0; STRIP];
            let (query_lanes, key_lanes) = self.lanes.split_at_mut(size);
            for row in 0..size {
                let dstate = &mut self.dstate[row];
                axpy(query[row], &doutput, dstate);
                axpy(key[row], dstate, &mut dchange);
                key_lanes[row] = products(dstate, &change);
            }
            let dvalue = times(strength, dchange);
            let along = dot(&change, &doutput);
            let mut ddecay = [0.0; STRIP];
            for row in 0..size {
                let (dstate, state) = (&mut self.dstate[row], &state[row]);
                query_lanes[row] = products(state, &doutput);
                axpy(-decay, &products(state, &dvalue), &mut key_lanes[row]);
                axpy(-key[row], &dvalue, dstate);
                add_product(&mut ddecay, dstate, state);
                scale(dstate, decay);
            }
            for row in 0..size {
                dquery[row] += decay * lane_total(query_lanes[row]) + key[row] * along;
                dkey[row] += lane_total(key_lanes[row]);
            }
            self.ddecays[i] += sum(&ddecay);
            self.dstrengths[i] += dot(&dchange, error);
            self.values[i * count + strip] = dvalue;
            if tokens.sequence.position(i) == 0 {
                self.dstate.fill([0.0; STRIP]);
            }
        }
    }
}

/// The products of two strips, summed in lanes. They go through memory: if the compiler saw the sum of the lanes, it would compute
/// in vectors of two.
#[inline(always)]
fn products(x: &Strip, y: &Strip) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    for (x, y) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
        add_product(&mut lanes, x, y);
    }
    hint::black_box(lanes)
}

/// Goes back through SiLU and the convolution of some channels, with the gradients `rows [T, width]`. Stores the gradients of the
/// input and writes those of the weights, `[K, channels]`.
#[inline(always)]
fn mix_backward(
    layer: &Layer<'_>,
    sequence: Sequence<'_>,
    channels: Range<usize>,
    [rows, scratch]: [&mut [f32]; 2],
    width: usize,
    gradients: Gradients<'_>,
    dconv: &mut [f32],
) {
    let (len, count, taps) = (sequence.len, channels.len(), layer.taps.count());
    with_matrices(
        [count],
        #[inline(always)]
        |[sum]| {
            let scratch = &mut scratch[..count];
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                layer.convolve(sequence, i, channels.clone(), sum, scratch);
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
        },
    );
    if !gradients.trains_conv {
        return;
    }
    for (before, dtap) in dconv.chunks_exact_mut(count).enumerate() {
        for (first, dtap) in (0..count).step_by(STRIPE).zip(dtap.chunks_mut(STRIPE)) {
            let [sums] = column_sums(
                len,
                first,
                dtap.len(),
                #[inline(always)]
                |i, first, [sums]| {
                    if sequence.position(i) < before {
                        return;
                    }
                    let mut scratch = [0.0; STRIPE];
                    let start = channels.start + first;
                    let channels = start..start + dtap.len();
                    let inputs = layer.earlier(sequence, [i, before], channels, &mut scratch[..dtap.len()]);
                    add_product(sums, &rows[i * width + first..][..dtap.len()], inputs);
                },
            );
            dtap.copy_from_slice(&sums[..dtap.len()]);
        }
    }
}
