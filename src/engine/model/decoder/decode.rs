//! The forward pass for generating text: computes only new tokens, over the cached keys and values, or states of
//! recurrences, of earlier ones.

use super::{Decoder, ForwardMode, InputIds, MixerInputs};
use crate::engine::kernels::decode_attention::{CachedSequence, LayerKvCache};
use crate::engine::kernels::gated_delta::DeltaCache;
use crate::engine::kernels::op::{self, Embedding};
use crate::engine::kernels::rope::PositionIds;
use crate::engine::kernels::short_conv::ConvCache;
use crate::engine::kernels::view;
use crate::engine::model::adapter::AdapterPass;
use crate::engine::model::layers::Context;
use crate::engine::model::parameters::Parameters;
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::{ModelSpec, Recurrence};
use crate::engine::model::workspace::{LayerScratch, Purpose, RopeCaches, candle_dtype, mixer_output};
use crate::precision::PrecisionPolicy;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::borrow::Cow;
use strum::EnumTryAs;

/// The cached keys and values of sequences, and the buffers of the pass that adds to them.
///
/// A layer's part has the type that its weights have when a sequence begins, at first the policy's.
#[derive(Debug)]
pub struct KvCache {
    sequences: Vec<SequenceCache>,
    compute: DType,
    residual: DType,
    device: Device,
    /// Made for the number of tokens that were decoded last.
    buffers: Option<DecodeBuffers>,
}

/// A sequence's part of a layer.
#[derive(Debug, EnumTryAs)]
enum LayerCache {
    Attention(LayerKvCache),
    ShortConv(ConvCache),
    GatedDelta(DeltaCache),
}

/// The caches of a sequence in every layer.
#[derive(Debug)]
struct SequenceCache {
    layers: Vec<LayerCache>,
    capacity: usize,
    ids: Vec<u32>,
    /// For `capacity` positions. Not used with a dynamic base.
    rope_caches: RopeCaches,
}

/// The residual stream, and for each compute type in use the activations of one block. All blocks reuse them, because
/// no backward pass follows.
#[derive(Debug)]
struct DecodeBuffers {
    rows: usize,
    stream: Tensor,
    blocks: Vec<LayerScratch>,
}

impl KvCache {
    /// A cache for a sequence of `capacity` tokens, at most the model's context.
    pub fn new(spec: &ModelSpec, policy: PrecisionPolicy, capacity: usize, device: &Device) -> Result<Self> {
        let mut cache = Self::empty(policy, device);
        cache.add(spec, capacity)?;
        Ok(cache)
    }

    /// A cache without sequences.
    pub fn empty(policy: PrecisionPolicy, device: &Device) -> Self {
        let [compute, residual] = [policy.compute, policy.residual].map(candle_dtype);
        Self { sequences: Vec::new(), compute, residual, device: device.clone(), buffers: None }
    }

    /// Adds an empty sequence of up to `capacity` tokens, at most the model's context, after the others.
    pub fn add(&mut self, spec: &ModelSpec, capacity: usize) -> Result<()> {
        if capacity > spec.max_position_embeddings {
            bail!("a cache of {capacity} tokens exceeds the model's context of {}", spec.max_position_embeddings);
        }
        let layer = |block| match spec.recurrence(block) {
            Some(Recurrence::ShortConv { taps }) => {
                ConvCache::new(taps, spec.hidden_size, &self.device).map(LayerCache::ShortConv)
            }
            Some(Recurrence::GatedDelta { heads, taps }) => {
                DeltaCache::new(heads, taps, &self.device).map(LayerCache::GatedDelta)
            }
            None => LayerKvCache::new(spec.kv_heads, capacity, spec.head_dim, self.compute, &self.device)
                .map(LayerCache::Attention),
        };
        let layers = (0..spec.num_layers).map(layer).collect::<Result<_>>()?;
        let rope_caches = RopeCaches::new(spec, 0..capacity, capacity, &self.device)?;
        self.sequences.push(SequenceCache { layers, capacity, ids: Vec::new(), rope_caches });
        Ok(())
    }

    /// Removes a sequence; those after it move up.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn remove(&mut self, sequence: usize) {
        self.sequences.remove(sequence);
    }

    /// Bytes of the cache of a sequence of `capacity` tokens.
    pub fn bytes(spec: &ModelSpec, policy: PrecisionPolicy, capacity: usize) -> u64 {
        let columns = 2 * spec.attention_layers() * spec.kv_heads * spec.head_dim;
        // States are FP32.
        let states =
            (0..spec.num_layers).filter_map(|block| spec.recurrence(block)).map(|recurrence| match recurrence {
                Recurrence::ShortConv { taps } => taps * spec.hidden_size,
                Recurrence::GatedDelta { heads, taps } => taps * heads.channels() + heads.state_elements(),
            });
        let states = states.sum::<usize>() * DType::F32.size_in_bytes();
        (columns * capacity * policy.compute.size_in_bytes() + states) as u64
    }

    /// The maximum number of tokens of the first sequence.
    pub fn capacity(&self) -> usize {
        self.sequences.first().map_or(0, |sequence| sequence.capacity)
    }

    /// Returns how many tokens of a sequence that will have `total` tokens are cached. Discards all of them if the
    /// rotary embeddings of longer sequences begin between, so that they are computed again, as transformers does.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn reusable(&mut self, spec: &ModelSpec, sequence: usize, total: usize) -> usize {
        let ids = &mut self.sequences[sequence].ids;
        let context = spec.rope.as_ref().and_then(Rope::original_context);
        if context.is_some_and(|context| (ids.len()..total).contains(&context)) {
            ids.clear();
        }
        ids.len()
    }

    /// Prepares the first sequence for a text of up to `capacity` tokens, at most the model's context, that begins with
    /// `prompt`; adds it if there is none. Keeps the cached tokens that the prompt begins with, except its last one,
    /// whose logits are needed. The weights must be those that computed them.
    pub fn prepare(&mut self, spec: &ModelSpec, prompt: &[u32], capacity: usize) -> Result<()> {
        if self.sequences.is_empty() {
            return self.add(spec, capacity);
        }
        let cached = self.sequences[0].ids.iter().zip(&prompt[..prompt.len().saturating_sub(1)]);
        // With other angles for another length, earlier tokens are computed again.
        let kept = if has_dynamic_ropes(spec) { 0 } else { cached.take_while(|(old, new)| old == new).count() };
        self.truncate(kept);
        let sequence = &mut self.sequences[0];
        if capacity > sequence.capacity {
            for layer in &mut sequence.layers {
                if let LayerCache::Attention(layer) = layer {
                    *layer = layer.grown(capacity, sequence.ids.len())?;
                }
            }
            sequence.rope_caches = RopeCaches::new(spec, 0..capacity, capacity, &self.device)?;
            sequence.capacity = capacity;
        }
        Ok(())
    }

    /// Keeps only the first `len` tokens of every sequence; none if a recurrence cannot go back so far.
    pub fn truncate(&mut self, len: usize) {
        for sequence in &mut self.sequences {
            let is_lost = |layer: &LayerCache| match layer {
                LayerCache::Attention(_) => false,
                // It has one token more than the next one needs.
                LayerCache::ShortConv(_) => sequence.ids.len() > len + 1,
                LayerCache::GatedDelta(_) => sequence.ids.len() > len,
            };
            let is_lost = sequence.layers.iter().any(is_lost);
            sequence.ids.truncate(if is_lost { 0 } else { len });
        }
    }

    /// The caches of a layer that are of one kind, with the number of new tokens of each sequence.
    fn of_layer<C>(
        &self,
        layer: usize,
        counts: &[usize],
        of_kind: impl Fn(&LayerCache) -> Option<&C>,
    ) -> Vec<CachedSequence<'_, C>> {
        let sequences = self.sequences.iter().zip(counts).filter_map(|(SequenceCache { layers, ids, .. }, new)| {
            Some(CachedSequence { cache: of_kind(&layers[layer])?, past: ids.len(), new: *new })
        });
        sequences.collect()
    }

    /// The positions of `counts` new tokens of each sequence, and their rotary tables with their rows' first position.
    fn positions(&self, spec: &ModelSpec, counts: &[usize]) -> Result<(Vec<u32>, Cow<'_, RopeCaches>, usize)> {
        let ranges =
            self.sequences.iter().zip(counts).map(|(SequenceCache { ids, .. }, new)| ids.len()..ids.len() + new);
        let positions = ranges.clone().flat_map(|range| range.map(|position| position as u32)).collect();
        // Keys of earlier tokens keep their angles, as in transformers.
        let dynamic = has_dynamic_ropes(spec);
        if let ([sequence], false) = (&self.sequences[..], dynamic) {
            return Ok((positions, Cow::Borrowed(&sequence.rope_caches), sequence.ids.len()));
        }
        let tables = self.sequences.iter().zip(ranges).map(|(sequence, range)| {
            let len = range.end;
            if dynamic { RopeCaches::new(spec, range, len, &self.device) } else { sequence.rope_caches.narrow(range) }
        });
        Ok((positions, Cow::Owned(RopeCaches::concat(&tables.collect::<Result<Vec<_>>>()?)?), 0))
    }
}

/// Whether angles depend on the length so far.
fn has_dynamic_ropes(spec: &ModelSpec) -> bool {
    let ropes = [spec.rope.as_ref(), spec.sliding.as_ref().map(|sliding| &sliding.rope)];
    ropes.into_iter().flatten().any(Rope::is_dynamic)
}

impl DecodeBuffers {
    fn new(spec: &ModelSpec, residual: DType, compute: &[DType], rows: usize, device: &Device) -> Result<Self> {
        let zeros = |shape: &[usize], dtype| view::zeros(shape, dtype, device);
        let mut blocks: Vec<LayerScratch> = Vec::new();
        for &dtype in compute {
            if LayerScratch::of(&blocks, dtype).is_err() {
                blocks.push(LayerScratch::alloc(spec, rows, (dtype, residual), Purpose::Evaluation, &zeros)?);
            }
        }
        Ok(Self { rows, stream: zeros(&[rows, spec.hidden_size], residual)?, blocks })
    }

    fn serve(&self, rows: usize, compute: &[DType]) -> bool {
        self.rows == rows && compute.iter().all(|dtype| LayerScratch::of(&self.blocks, *dtype).is_ok())
    }
}

impl Decoder {
    /// Appends `ids` to the cached sequence and returns the head's input for each of them, `[ids.len(), D]`: the rows
    /// that [`Decoder::forward`] computes in the whole sequence, without dropout.
    pub fn decode<'c>(&self, weights: &Parameters, ids: &[u32], cache: &'c mut KvCache) -> Result<&'c Tensor> {
        self.decode_batch(weights, &[ids], cache)
    }

    /// Like [`Self::decode`], for several sequences: `ids` has the new tokens of each, at least one. Their rows follow
    /// each other.
    pub fn decode_batch<'c>(&self, weights: &Parameters, ids: &[&[u32]], cache: &'c mut KvCache) -> Result<&'c Tensor> {
        if ids.len() != cache.sequences.len() {
            bail!("tokens of {} sequences for a cache of {}", ids.len(), cache.sequences.len());
        }
        let counts: Vec<usize> = ids.iter().map(|ids| ids.len()).collect();
        for (SequenceCache { ids, capacity, .. }, new) in cache.sequences.iter().zip(&counts) {
            let len = ids.len();
            if *new == 0 || len + new > *capacity {
                bail!("{new} tokens after {len} for a cache of {capacity}");
            }
        }
        let new_ids = ids.concat();
        let rows = new_ids.len();
        let head = weights.fused(self.head).dtype();
        let compute: Vec<DType> = self.compute_of_blocks(weights).chain([head]).collect();
        for sequence in cache.sequences.iter_mut().filter(|sequence| sequence.ids.is_empty()) {
            for (layer, dtype) in sequence.layers.iter_mut().zip(&compute) {
                if let LayerCache::Attention(layer) = layer {
                    layer.retype(*dtype)?;
                }
            }
        }
        if cache.buffers.as_ref().is_none_or(|buffers| !buffers.serve(rows, &compute)) {
            cache.buffers = Some(DecodeBuffers::new(&self.spec, cache.residual, &compute, rows, &cache.device)?);
        }
        let (positions, rope_caches, past) = cache.positions(&self.spec, &counts)?;
        let places = PositionIds { seq_len: rows, past, documents: None };
        let Some(DecodeBuffers { stream, blocks, .. }) = &cache.buffers else { bail!("the cache has no buffers") };
        let kernels = self.kernels();
        let mode = ForwardMode::Eval;
        let adapters = AdapterPass::default();
        let cx = &mut Context { kernels, weights, grads: None, mode, adapters, hook: &mut () };
        let positions = Tensor::new(positions, &cache.device)?;
        let positions = self.positions.map(|table| weights.fused(table).index_select(&positions, 0)).transpose()?;
        let embedding = self.embed(weights, InputIds::new(&new_ids, rows), ForwardMode::Eval);
        self.embed_into(weights, Embedding { positions: positions.as_ref(), ..embedding }, stream)?;
        for (i, dtype) in compute[..self.spec.num_layers].iter().enumerate() {
            let scratch = LayerScratch::of(blocks, *dtype)?;
            let acts = scratch.block()?;
            let out = &mixer_output(&self.spec, i, &acts.attended)?;
            self.block_pass(cx, i, (stream, acts, scratch), &rope_caches, places, |inputs| match inputs {
                MixerInputs::Attention(qkv) => {
                    let sequences = &cache.of_layer(i, &counts, LayerCache::try_as_attention_ref);
                    let shape = self.shape(i, 1, rows);
                    let sinks = self.sinks(weights, i);
                    op::DecodeAttention { shape, sequences, qkv, sinks, out }.run(kernels)
                }
                MixerInputs::ShortConv { input, weight } => {
                    let sequences = &cache.of_layer(i, &counts, LayerCache::try_as_short_conv_ref);
                    op::DecodeShortConv { input, weight, sequences, out }.run(kernels)
                }
                MixerInputs::GatedDelta { heads, eps, input, params } => {
                    let sequences = &cache.of_layer(i, &counts, LayerCache::try_as_gated_delta_ref);
                    op::DecodeGatedDelta { heads, input, params, eps, sequences, out }.run(kernels)
                }
            })?;
            self.add_mlp(cx, i, (acts, scratch), stream)?;
        }
        let normed = &LayerScratch::of(blocks, head)?.block()?.attention_norm;
        self.final_norm.forward(cx, stream, normed)?;
        drop(rope_caches);
        for (sequence, new) in cache.sequences.iter_mut().zip(ids) {
            sequence.ids.extend_from_slice(new);
        }
        Ok(&normed.out)
    }
}
