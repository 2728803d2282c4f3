//! Layers of the gated delta rule (Yang et al., "Gated Delta Networks", 2024), which Qwen 3.5 has instead of attention.
//!
//! Queries, keys and values go through a causal convolution of each channel and SiLU; queries and keys then get the
//! norms `1/√key_dim` and 1. Each value head has a state `S [key_dim, value_dim]`, which is zero before a document. A
//! token with the query `q`, the key `k` and the value `v` changes it to `α S + k δᵀ`, where `δ = β (v - α Sᵀ k)`, and
//! reads `Sᵀ q` from it. An RMS norm of each head and the gate `silu(z)` make the output. The write strength
//! `β = sigmoid(b)` and the decay `α = exp(-exp(a_log) · softplus(a + dt_bias))` belong to a token and a value head.

mod backward;

use crate::attention::{upcast, with_matrices};
use crate::columns::{ColumnReader, ColumnSlice, ColumnWriter, write_columns};
use crate::decode_attention::CachedSequence;
use crate::op::same_shapes;
use crate::rope::PositionIds;
use crate::rows::{axpy, dot, scale};
use crate::short_conv::{Taps, add_product, have_positions};
use crate::view::{self, ReadGuard, read, write_f32};
use crate::{isa, math};
pub use backward::backward;
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// The heads of a gated delta layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`: neighbors share a query and a key.
    pub value_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Columns of all keys.
    pub const fn keys(self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Columns of all values.
    pub const fn values(self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub const fn channels(self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Elements of all states.
    pub const fn state_elements(self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Columns of the input.
    pub const fn input_width(self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }

    /// Value heads that share a key head.
    pub const fn group(self) -> usize {
        self.value_heads / self.key_heads
    }
}

/// The parameters of a gated delta layer, or their gradients.
#[derive(Clone, Copy, Debug)]
pub struct DeltaParams<T> {
    /// `[channels, 1, K]`, the weights of the convolution; the last one is for the token itself.
    pub conv: T,
    /// `[value_heads]`, the logarithm of the rate of decay.
    pub a_log: T,
    /// `[value_heads]`, added to `a`.
    pub dt_bias: T,
    /// `[value_dim]`, the weight of the norm.
    pub norm: T,
}

impl<T> DeltaParams<T> {
    /// All of them, in the order of the fields.
    pub(crate) fn all(self) -> [T; 4] {
        [self.conv, self.a_log, self.dt_bias, self.norm]
    }

    /// References to them.
    pub(crate) fn each(&self) -> DeltaParams<&T> {
        let Self { conv, a_log, dt_bias, norm } = self;
        DeltaParams { conv, a_log, dt_bias, norm }
    }

    /// The results of `f` for each of them.
    pub fn try_map<U>(self, f: impl Fn(T) -> Result<U>) -> Result<DeltaParams<U>> {
        let Self { conv, a_log, dt_bias, norm } = self;
        Ok(DeltaParams { conv: f(conv)?, a_log: f(a_log)?, dt_bias: f(dt_bias)?, norm: f(norm)? })
    }
}

/// The forward pass.
#[derive(Debug)]
pub struct GatedDelta<'a> {
    /// The heads.
    pub heads: DeltaHeads,
    /// `[N, input_width]`: queries, keys and values, then `z` (as wide as the values), `b` and `a` (a column for each
    /// value head).
    pub input: &'a Tensor,
    /// The parameters.
    pub params: DeltaParams<&'a Tensor>,
    /// Added to the mean square in the norm.
    pub eps: f32,
    /// The rows' positions in their documents.
    pub positions: PositionIds<'a>,
    /// `[N, values]`.
    pub out: &'a Tensor,
}

/// The gradients of a [`GatedDelta`].
#[derive(Debug)]
pub struct GatedDeltaBackward<'a> {
    /// The heads.
    pub heads: DeltaHeads,
    /// The input of the forward pass.
    pub input: &'a Tensor,
    /// The parameters of the forward pass.
    pub params: DeltaParams<&'a Tensor>,
    /// The norm's constant of the forward pass.
    pub eps: f32,
    /// The positions of the forward pass.
    pub positions: PositionIds<'a>,
    /// `[N, values]`, the gradient of the output.
    pub dy: &'a Tensor,
    /// `[N, input_width]`, overwritten.
    pub dinput: &'a Tensor,
    /// The shapes of the parameters, overwritten; `None` if frozen.
    pub gradients: DeltaParams<Option<&'a Tensor>>,
}

/// A [`GatedDelta`] of new tokens, for generating text.
#[derive(Debug)]
pub struct DecodeGatedDelta<'a> {
    /// The heads.
    pub heads: DeltaHeads,
    /// `[n, input_width]`.
    pub input: &'a Tensor,
    /// The parameters.
    pub params: DeltaParams<&'a Tensor>,
    /// The norm's constant.
    pub eps: f32,
    /// The sequences, in the order of their rows.
    pub sequences: &'a [DeltaSequence<'a>],
    /// `[n, values]`.
    pub out: &'a Tensor,
}

/// New tokens of a sequence, and the tokens before them.
pub type DeltaSequence<'a> = CachedSequence<'a, DeltaCache>;

/// Data of a sequence's last tokens for the next ones, FP32. Unlike keys and values, it cannot go back to fewer tokens.
#[derive(Debug)]
pub struct DeltaCache {
    /// `[K, channels]`, the last inputs of the convolution; the token at position `p` has the row `p % K`.
    pub(crate) inputs: Tensor,
    /// `[value_heads, key_dim, value_dim]`.
    pub(crate) states: Tensor,
}

impl DeltaCache {
    /// A cache for convolutions of `taps` taps.
    pub fn new(heads: DeltaHeads, taps: usize, device: &Device) -> Result<Self> {
        let zeros = |shape: &[usize]| view::zeros(shape, DType::F32, device);
        Ok(Self { inputs: zeros(&[taps, heads.channels()])?, states: zeros(&Self::states_shape(heads))? })
    }

    const fn states_shape(heads: DeltaHeads) -> [usize; 3] {
        [heads.value_heads, heads.key_dim, heads.value_dim]
    }

    pub(crate) fn fits(&self, heads: DeltaHeads, params: DeltaParams<&Tensor>) -> Result<bool> {
        let taps = params.conv.dim(2)?;
        Ok(self.inputs.dims() == [taps, heads.channels()] && self.states.dims() == Self::states_shape(heads))
    }
}

/// Whether these are the parameters, the input and the output of a layer.
fn fits(heads: DeltaHeads, params: DeltaParams<&Tensor>, [input, out]: [&Tensor; 2]) -> Result<bool> {
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = heads;
    let sizes = key_heads > 0 && value_heads.is_multiple_of(key_heads) && heads.values() > 0 && key_dim > 0;
    let rows = out.dim(0)?;
    let matrices = input.dims() == [rows, heads.input_width()] && out.dims() == [rows, heads.values()];
    let taps = params.conv.dims3()?.2;
    let vectors = params.a_log.dims() == [value_heads] && params.dt_bias.dims() == [value_heads];
    let weights = params.conv.dims() == [heads.channels(), 1, taps] && params.norm.dims() == [value_dim];
    Ok(sizes && matrices && taps > 0 && vectors && weights)
}

/// Whether there are whole sequences, and positions for `rows` rows.
fn have_sequences(positions: PositionIds<'_>, rows: usize) -> bool {
    have_positions(positions, rows) && rows.is_multiple_of(positions.seq_len)
}

impl GatedDelta<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let fits = fits(self.heads, self.params, [self.input, self.out])?;
        Ok(fits && have_sequences(self.positions, self.out.dim(0)?))
    }
}

impl GatedDeltaBackward<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let fits = fits(self.heads, self.params, [self.input, self.dy])? && same_shapes([self.input, self.dinput]);
        let gradients = self.gradients.all().into_iter().zip(self.params.all());
        let gradients = gradients.into_iter().all(|(gradient, of)| gradient.is_none_or(|it| same_shapes([it, of])));
        Ok(fits && gradients && have_sequences(self.positions, self.dy.dim(0)?))
    }
}

impl DecodeGatedDelta<'_> {
    pub(crate) fn fits(&self) -> Result<bool> {
        let new: usize = self.sequences.iter().map(|sequence| sequence.new).sum();
        let mut fits = fits(self.heads, self.params, [self.input, self.out])? && new == self.out.dim(0)?;
        for sequence in self.sequences {
            fits &= sequence.cache.fits(self.heads, self.params)?;
        }
        Ok(fits)
    }
}

/// Columns of a state that are updated together. With 128 rows they fit in the L1 cache.
const STRIP: usize = 64;
type Strip = [f32; STRIP];

/// Added to the squared norms of queries and keys.
pub(crate) const NORM_EPS: f32 = 1e-6;

/// The strips of a slice whose length is a multiple of theirs.
#[inline(always)]
fn strips_mut(x: &mut [f32]) -> &mut [Strip] {
    x.as_chunks_mut().0
}

/// The opened input and the parameters.
struct OpenedLayer<'a> {
    heads: DeltaHeads,
    input: ColumnReader<'a>,
    taps: Taps,
    /// `exp(a_log)`.
    rates: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    eps: f32,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy)]
struct SequenceRows<'a> {
    /// The first row.
    first: usize,
    /// The number of rows.
    len: usize,
    /// Tokens before the first row.
    past: usize,
    /// For each row, the row that its document starts in.
    documents: Option<&'a [u32]>,
    /// [`DeltaCache::inputs`]; empty if no tokens are before the first row.
    inputs: &'a [f32],
}

impl<'a> SequenceRows<'a> {
    /// Sequence `b` of a batch.
    fn of_batch(b: usize, PositionIds { seq_len, documents, .. }: PositionIds<'a>) -> Self {
        let documents = documents.map(|starts| &starts[b * seq_len..][..seq_len]);
        Self { first: b * seq_len, len: seq_len, past: 0, documents, inputs: &[] }
    }

    /// The position of a row in its document.
    #[inline(always)]
    fn position(self, i: usize) -> usize {
        self.past + i.saturating_sub(self.documents.map_or(0, |starts| starts[i] as usize))
    }
}

/// The write strength and the decay of a token.
struct TokenGates {
    beta: f32,
    /// The derivative of `beta` with respect to `b`.
    beta_slope: f32,
    log_decay: f32,
    /// The derivative of `log_decay` with respect to `a`.
    log_slope: f32,
}

impl<'a> OpenedLayer<'a> {
    fn open(
        heads: DeltaHeads,
        input: &Tensor,
        opened: &'a ReadGuard<'_>,
        params: DeltaParams<&Tensor>,
        eps: f32,
    ) -> Result<Self> {
        let rates = upcast(params.a_log)?.into_iter().map(math::exp).collect();
        let [dt_bias, norm] = [upcast(params.dt_bias)?, upcast(params.norm)?];
        let input = ColumnSlice::all(input)?.source(opened);
        Ok(Self { heads, input, taps: Taps::read(params.conv)?, rates, dt_bias, norm, eps })
    }

    /// The channels of the query and of the key of a key head.
    fn query_and_key(&self, key_head: usize) -> [Range<usize>; 2] {
        [0, self.heads.keys()].map(|first| {
            let first = first + key_head * self.heads.key_dim;
            first..first + self.heads.key_dim
        })
    }

    /// The channels of a value.
    fn value(&self, value_head: usize) -> Range<usize> {
        let first = 2 * self.heads.keys() + value_head * self.heads.value_dim;
        first..first + self.heads.value_dim
    }

    /// The first column of a head's `z`.
    fn z(&self, value_head: usize) -> usize {
        self.heads.channels() + value_head * self.heads.value_dim
    }

    /// The columns of a head's `b` and `a`.
    fn b_and_a(&self, value_head: usize) -> [usize; 2] {
        let b = self.heads.channels() + self.heads.values() + value_head;
        [b, b + self.heads.value_heads]
    }

    /// The width of a value with padding.
    fn padded(&self) -> usize {
        self.heads.value_dim.next_multiple_of(STRIP)
    }

    /// Writes the inputs of some channels of all rows, in rows of `width` with zeros as padding.
    #[inline(always)]
    fn load(&self, sequence: SequenceRows<'_>, channels: Range<usize>, out: &mut [f32], width: usize) {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let (out, padding) = out.split_at_mut(channels.len());
            self.input.load(sequence.first + i, channels.start, out);
            padding.fill(0.0);
        }
    }

    /// Writes the convolution of some channels of row `i`. `inputs` has these of all rows, in rows of `width`.
    #[inline(always)]
    fn convolve(
        &self,
        sequence: SequenceRows<'_>,
        i: usize,
        channels: Range<usize>,
        (inputs, width): (&[f32], usize),
        out: &mut [f32],
    ) {
        out.fill(0.0);
        for before in 0..self.taps.count().min(sequence.position(i) + 1) {
            let inputs = if before <= i {
                &inputs[(i - before) * width..][..channels.len()]
            } else {
                let row = (sequence.past + i - before) % self.taps.count();
                &sequence.inputs[row * self.heads.channels()..][channels.clone()]
            };
            add_product(out, &self.taps.of(before)[channels.clone()], inputs);
        }
    }

    /// Writes some channels of all rows after convolution and SiLU, in rows of `width` with zeros as padding.
    #[inline(always)]
    fn mix(&self, sequence: SequenceRows<'_>, channels: Range<usize>, [out, scratch]: [&mut [f32]; 2], width: usize) {
        self.load(sequence, channels.clone(), out, width);
        let sum = &mut scratch[..channels.len()];
        // From the last one, because each row replaces its inputs, which later ones read.
        for i in (0..sequence.len).rev() {
            self.convolve(sequence, i, channels.clone(), (out, width), sum);
            for (x, sum) in out[i * width..].iter_mut().zip(&*sum) {
                *x = math::silu(*sum);
            }
        }
    }

    /// Writes the queries and keys of a key head with their norms, in rows of `width` with zeros as padding, and the
    /// factors that gave them these.
    #[inline(always)]
    fn queries_and_keys(
        &self,
        sequence: SequenceRows<'_>,
        key_head: usize,
        outs: [&mut [f32]; 2],
        factors: [&mut [f32]; 2],
        scratch: &mut [f32],
        width: usize,
    ) {
        let parts = self.query_and_key(key_head).into_iter().zip(norms(self.heads.key_dim));
        for ((channels, norm), (out, factors)) in parts.zip(outs.into_iter().zip(factors)) {
            self.mix(sequence, channels, [out, scratch], width);
            for (row, factor) in out.chunks_exact_mut(width).zip(factors) {
                *factor = 1.0 / (dot(row, row) + NORM_EPS).sqrt();
                scale(row, norm * *factor);
            }
        }
    }

    #[inline(always)]
    fn gates(&self, row: usize, value_head: usize) -> TokenGates {
        let [b, a] = self.b_and_a(value_head).map(|column| {
            let mut value = [0.0];
            self.input.load(row, column, &mut value);
            value[0]
        });
        let (beta, complement) = math::logistic(b);
        let step = a + self.dt_bias[value_head];
        let rate = self.rates[value_head];
        let log_decay = -rate * math::softplus(step);
        TokenGates { beta, beta_slope: beta * complement, log_decay, log_slope: -rate * math::logistic(step).0 }
    }

    /// Writes the decays and write strengths of a value head.
    #[inline(always)]
    fn decays_and_strengths(
        &self,
        sequence: SequenceRows<'_>,
        value_head: usize,
        [decays, strengths]: [&mut [f32]; 2],
    ) {
        for (i, (decay, strength)) in decays.iter_mut().zip(strengths).enumerate() {
            let gates = self.gates(sequence.first + i, value_head);
            (*decay, *strength) = (math::exp(gates.log_decay), gates.beta);
        }
    }

    /// Returns the inverse root mean square of a head's output.
    #[inline(always)]
    fn inverse_rms(&self, output: &[f32]) -> f32 {
        1.0 / (dot(output, output) / output.len() as f32 + self.eps).sqrt()
    }
}

/// The norms of a query and of a key.
fn norms(key_dim: usize) -> [f32; 2] {
    [1.0 / (key_dim as f32).sqrt(), 1.0]
}

/// The queries, keys and gates of a value head, a row for each token.
#[derive(Clone, Copy)]
struct HeadTokens<'a> {
    sequence: SequenceRows<'a>,
    size: usize,
    queries: &'a [f32],
    keys: &'a [f32],
    decays: &'a [f32],
    strengths: &'a [f32],
}

impl HeadTokens<'_> {
    /// Adds tokens to a strip of the state, and replaces that strip of their values by their outputs. Keeps, if asked
    /// to, what the state lacked to give each token's value for its key: `v - α Sᵀ k`.
    #[inline(always)]
    fn scan(
        self,
        tokens: Range<usize>,
        state: &mut [Strip],
        rows: &mut [Strip],
        mut errors: Option<&mut [Strip]>,
        [strip, count]: [usize; 2],
    ) {
        for i in tokens {
            if self.sequence.position(i) == 0 {
                state.fill([0.0; STRIP]);
            }
            let row = &mut rows[i * count + strip];
            let [query, key] = [self.queries, self.keys].map(|rows| &rows[i * self.size..][..self.size]);
            let decay = self.decays[i];
            let mut error = combine(state, key);
            for (error, value) in error.iter_mut().zip(&*row) {
                *error = value - decay * *error;
            }
            if let Some(errors) = &mut errors {
                errors[i * count + strip] = error;
            }
            let change = times(self.strengths[i], error);
            let mut output = [0.0; STRIP];
            for (state, (query, key)) in state.iter_mut().zip(query.iter().zip(key)) {
                // In separate loops, because the compiler would not vectorize a common one, and in a copy, because it
                // would store the state after each.
                let mut row = *state;
                scale(&mut row, decay);
                axpy(*key, &change, &mut row);
                axpy(*query, &row, &mut output);
                *state = row;
            }
            *row = output;
        }
    }
}

/// `Σ_i weights_i · rows_i`.
#[inline(always)]
fn combine(rows: &[Strip], weights: &[f32]) -> Strip {
    let mut sum = [0.0; STRIP];
    for (row, weight) in rows.iter().zip(weights) {
        axpy(*weight, row, &mut sum);
    }
    sum
}

#[inline(always)]
fn times(factor: f32, strip: Strip) -> Strip {
    strip.map(
        #[inline(always)]
        |x| factor * x,
    )
}

/// Computes [`GatedDelta`].
pub fn forward(op: &GatedDelta<'_>) -> Result<()> {
    let opened = read(op.input)?;
    let layer = &OpenedLayer::open(op.heads, op.input, &opened, op.params, op.eps)?;
    let tasks = op.out.dim(0)? / op.positions.seq_len * op.heads.key_heads;
    write_columns([ColumnSlice::all(op.out)?], |[out]| {
        (0..tasks).into_par_iter().for_each(|task| {
            let (b, key_head) = (task / op.heads.key_heads, task % op.heads.key_heads);
            isa::vectorize!(forward_group(layer, SequenceRows::of_batch(b, op.positions), key_head, None, out));
        });
    })
}

/// Computes the value heads that share a key head. They read their states from `states [group, key_dim, value_dim]`,
/// and leave the new ones there.
#[inline(always)]
fn forward_group(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    key_head: usize,
    mut states: Option<&mut [f32]>,
    out: ColumnWriter<'_>,
) {
    let DeltaHeads { key_dim, value_dim, .. } = layer.heads;
    let (len, width) = (sequence.len, layer.padded());
    let group = layer.heads.group();
    with_matrices(
        [len * key_dim, len * key_dim, len, len, len * width, key_dim * width, key_dim.max(value_dim)],
        #[inline(always)]
        |[queries, keys, decays, strengths, rows, state, scratch]| {
            layer.queries_and_keys(sequence, key_head, [queries, keys], [decays, strengths], scratch, key_dim);
            for member in 0..group {
                let value_head = key_head * group + member;
                layer.decays_and_strengths(sequence, value_head, [decays, strengths]);
                layer.mix(sequence, layer.value(value_head), [rows, scratch], width);
                let tokens = HeadTokens { sequence, size: key_dim, queries, keys, decays, strengths };
                let mut stored = states.as_deref_mut().map(|states| {
                    let size = key_dim * value_dim;
                    &mut states[member * size..][..size]
                });
                if let Some(stored) = &stored {
                    state.fill(0.0);
                    state_places(layer.heads).for_each(|[from, to]| state[to].copy_from_slice(&stored[from]));
                }
                let count = width / STRIP;
                for (strip, state) in strips_mut(state).chunks_exact_mut(key_dim).enumerate() {
                    tokens.scan(0..len, state, strips_mut(rows), None, [strip, count]);
                }
                if let Some(stored) = &mut stored {
                    state_places(layer.heads).for_each(|[to, from]| stored[to].copy_from_slice(&state[from]));
                }
                write_outputs(layer, sequence, value_head, rows, &mut scratch[..value_dim], out);
            }
        },
    );
}

/// The elements of each row of a state's strips: in [`DeltaCache::states`], and strip after strip.
fn state_places(heads: DeltaHeads) -> impl Iterator<Item = [Range<usize>; 2]> {
    let DeltaHeads { key_dim, value_dim, .. } = heads;
    (0..value_dim).step_by(STRIP).flat_map(move |first| {
        let count = STRIP.min(value_dim - first);
        (0..key_dim).map(move |i| {
            let [stored, strip] = [i * value_dim + first, first * key_dim + i * STRIP];
            [stored..stored + count, strip..strip + count]
        })
    })
}

/// Normalizes the outputs of a value head, multiplies them with their gates and stores them.
#[inline(always)]
fn write_outputs(
    layer: &OpenedLayer<'_>,
    sequence: SequenceRows<'_>,
    value_head: usize,
    rows: &mut [f32],
    z: &mut [f32],
    out: ColumnWriter<'_>,
) {
    for (i, output) in rows.chunks_exact_mut(layer.padded()).enumerate() {
        let output = &mut output[..layer.heads.value_dim];
        let row = sequence.first + i;
        let inverse = layer.inverse_rms(output);
        layer.input.load(row, layer.z(value_head), z);
        for ((output, weight), z) in output.iter_mut().zip(&layer.norm).zip(&*z) {
            *output = weight * (*output * inverse) * math::silu(*z);
        }
        // SAFETY: one task alone writes this head's part of the row.
        unsafe { out.store(row, value_head * layer.heads.value_dim, output) };
    }
}

/// Computes [`DecodeGatedDelta`], each row with the bits of [`forward`].
pub fn decode(op: &DecodeGatedDelta<'_>) -> Result<()> {
    let opened = read(op.input)?;
    let layer = &OpenedLayer::open(op.heads, op.input, &opened, op.params, op.eps)?;
    let DeltaHeads { key_dim, value_dim, .. } = op.heads;
    let mut first = 0;
    for &DeltaSequence { cache, past, new } in op.sequences {
        let inputs = read(&cache.inputs)?;
        let sequence = SequenceRows { first, len: new, past, documents: None, inputs: inputs.typed()? };
        write_columns([ColumnSlice::all(op.out)?], |[out]| {
            write_f32(&cache.states, |states| {
                let groups = states.par_chunks_exact_mut(op.heads.group() * key_dim * value_dim);
                groups.enumerate().for_each(|(key_head, states)| {
                    isa::vectorize!(forward_group(layer, sequence, key_head, Some(states), out));
                });
            })
        })??;
        drop(inputs);
        let (taps, width) = (layer.taps.count(), op.heads.channels());
        write_f32(&cache.inputs, |inputs| {
            for i in new.saturating_sub(taps)..new {
                layer.input.load(first + i, 0, &mut inputs[(past + i) % taps * width..][..width]);
            }
        })?;
        first += new;
    }
    Ok(())
}
