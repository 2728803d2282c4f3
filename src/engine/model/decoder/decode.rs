//! The forward pass for generating text: computes only new tokens, over the cached keys and values of earlier ones.

use super::{Decoder, ForwardMode, InputIds};
use crate::engine::kernels::decode_attention::LayerKvCache;
use crate::engine::kernels::op::{self, Embedding};
use crate::engine::kernels::rope::PositionIds;
use crate::engine::kernels::{NormOutput, view};
use crate::engine::model::adapter::{AdapterBuffers, AdapterPass};
use crate::engine::model::layers::Context;
use crate::engine::model::parameters::Parameters;
use crate::engine::model::rope::Rope;
use crate::engine::model::spec::ModelSpec;
use crate::engine::model::workspace::{PostNorm, QkNorms, RopeCaches, alloc_a_out, candle_dtype};
use crate::precision::PrecisionPolicy;
use candle_core::{DType, Device, Result, Tensor, bail};

/// The cached keys and values of one sequence's tokens in every layer, and the buffers of the pass that adds to it.
///
/// A layer's part has the type that its weights have when a sequence begins, at first the policy's.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerKvCache>,
    residual: DType,
    device: Device,
    capacity: usize,
    len: usize,
    /// Made for the number of tokens that were decoded last.
    buffers: Option<Buffers>,
    /// For `capacity` positions; with a dynamic base, for the rows that were decoded last.
    rope_caches: RopeCaches,
}

/// The residual stream, and for each compute type in use the activations of one block.
#[derive(Debug)]
struct Buffers {
    rows: usize,
    stream: Tensor,
    middle: Tensor,
    blocks: Vec<BlockBuffers>,
}

/// The activations of one block. All blocks reuse them, because no backward pass follows.
#[derive(Debug)]
struct BlockBuffers {
    normed: NormOutput,
    qkv: Tensor,
    heads: Option<QkNorms>,
    attended: Tensor,
    branch: Tensor,
    branch_norm: Option<PostNorm>,
    up: Tensor,
    activated: Tensor,
    adapter: Option<AdapterBuffers>,
    a_out: Option<Tensor>,
}

impl KvCache {
    /// A cache for a sequence of `capacity` tokens, at most the model's context.
    pub fn new(spec: &ModelSpec, policy: PrecisionPolicy, capacity: usize, device: &Device) -> Result<Self> {
        if capacity > spec.max_position_embeddings {
            bail!("a cache of {capacity} tokens exceeds the model's context of {}", spec.max_position_embeddings);
        }
        let (heads, head_size) = (spec.kv_heads, spec.head_dim);
        let layer = |_| LayerKvCache::new(heads, capacity, head_size, candle_dtype(policy.compute), device);
        let layers = (0..spec.num_layers).map(layer).collect::<Result<_>>()?;
        let residual = candle_dtype(policy.residual);
        let rope_caches = RopeCaches::new(spec, 0..capacity, device)?;
        Ok(Self { layers, residual, device: device.clone(), capacity, len: 0, buffers: None, rope_caches })
    }

    /// Bytes of the keys and values of a sequence of `capacity` tokens.
    pub fn bytes(spec: &ModelSpec, policy: PrecisionPolicy, capacity: usize) -> u64 {
        (2 * spec.num_layers * spec.kv_heads * spec.head_dim * capacity * policy.compute.size_in_bytes()) as u64
    }

    /// Tokens seen.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token was seen yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The maximum number of tokens.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Keeps only the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl BlockBuffers {
    fn new(spec: &ModelSpec, compute: DType, rows: usize, device: &Device) -> Result<Self> {
        let buffer = |columns: usize| view::zeros(&[rows, columns], compute, device);
        let zeros = |shape: &[usize], dtype| view::zeros(shape, dtype, device);
        Ok(Self {
            normed: NormOutput::alloc(spec.norm, rows, spec.hidden_size, compute, &zeros)?,
            heads: QkNorms::alloc(spec, rows, compute, &zeros)?,
            branch_norm: spec.post_norms.then(|| PostNorm::alloc(spec, rows, compute, &zeros)).transpose()?,
            qkv: buffer(spec.qkv_width())?,
            attended: buffer(spec.attn_out_size())?,
            branch: buffer(spec.hidden_size)?,
            up: buffer(spec.up_width())?,
            activated: buffer(spec.intermediate_size)?,
            adapter: AdapterBuffers::alloc(spec, rows, compute, false, &zeros)?,
            a_out: alloc_a_out(spec, rows, compute, &zeros)?,
        })
    }

    fn compute(&self) -> DType {
        self.qkv.dtype()
    }

    fn of(all: &[Self], compute: DType) -> Result<&Self> {
        match all.iter().find(|buffers| buffers.compute() == compute) {
            Some(buffers) => Ok(buffers),
            None => bail!("a layer's type changed to {compute:?} within a sequence"),
        }
    }
}

impl Buffers {
    fn new(spec: &ModelSpec, residual: DType, compute: &[DType], rows: usize, device: &Device) -> Result<Self> {
        let stream = || view::zeros(&[rows, spec.hidden_size], residual, device);
        let mut blocks: Vec<BlockBuffers> = Vec::new();
        for &dtype in compute {
            if BlockBuffers::of(&blocks, dtype).is_err() {
                blocks.push(BlockBuffers::new(spec, dtype, rows, device)?);
            }
        }
        Ok(Self { rows, stream: stream()?, middle: stream()?, blocks })
    }

    fn serve(&self, rows: usize, compute: &[DType]) -> bool {
        self.rows == rows && compute.iter().all(|dtype| BlockBuffers::of(&self.blocks, *dtype).is_ok())
    }
}

impl Decoder {
    /// Appends `ids` to the cached sequence and returns the head's input for each of them, `[ids.len(), D]`: the rows
    /// that [`Decoder::forward`] computes in the whole sequence, without dropout.
    pub fn decode<'c>(&self, weights: &Parameters, ids: &[u32], cache: &'c mut KvCache) -> Result<&'c Tensor> {
        let (past, rows) = (cache.len, ids.len());
        if rows == 0 || past + rows > cache.capacity {
            bail!("{rows} tokens after {past} for a cache of {}", cache.capacity);
        }
        let head = weights.fused(self.head).dtype();
        let compute: Vec<DType> = self.compute_of_blocks(weights).chain([head]).collect();
        if past == 0 {
            for (layer, dtype) in cache.layers.iter_mut().zip(&compute) {
                layer.retype(*dtype)?;
            }
        }
        if cache.buffers.as_ref().is_none_or(|buffers| !buffers.serve(rows, &compute)) {
            cache.buffers = Some(Buffers::new(&self.spec, cache.residual, &compute, rows, &cache.device)?);
        }
        let mut places = PositionIds { seq_len: rows, past, documents: None };
        let ropes = [self.spec.rope.as_ref(), self.spec.sliding.as_ref().map(|sliding| &sliding.rope)];
        if ropes.into_iter().flatten().any(Rope::is_dynamic) {
            // Angles depend on the length so far. Keys of earlier tokens keep theirs, as in transformers.
            cache.rope_caches = RopeCaches::new(&self.spec, past..past + rows, &cache.device)?;
            places.past = 0;
        }
        let KvCache { layers, buffers: Some(buffers), len, rope_caches, .. } = cache else {
            bail!("the cache has no buffers")
        };
        let Buffers { stream, middle, blocks, .. } = &*buffers;
        let (kernels, mode) = (self.kernels(), ForwardMode::Eval);
        let cx = &mut Context { kernels, weights, grads: None, mode, hook: &mut () };
        // Positions count from the sequence's start.
        let positions = self.positions.map(|table| weights.fused(table).narrow(0, past, rows)).transpose()?;
        let embedding = self.embed(weights, InputIds::new(ids, rows), ForwardMode::Eval);
        self.embed_into(weights, Embedding { positions: positions.as_ref(), ..embedding }, stream)?;
        for (i, ((block, layer), dtype)) in self.blocks.iter().zip(layers).zip(&compute).enumerate() {
            let BlockBuffers { normed, qkv, heads, attended, branch, branch_norm, up, activated, adapter, a_out } =
                BlockBuffers::of(blocks, *dtype)?;
            let adapters = AdapterPass { buffers: adapter.as_ref(), a_out: a_out.as_ref() };
            let (heads, branch_norm) = (heads.as_ref(), branch_norm.as_ref());
            block.attention_norm.forward(cx, stream, normed)?;
            block.qkv.forward(cx, &normed.out, qkv, adapters)?;
            let qkv = self.qk_norm_and_rope(cx, i, (qkv, heads), (rope_caches, places))?;
            op::DecodeAttention { shape: self.shape(i, 1, rows), cache: layer, past, qkv, out: attended }
                .run(kernels)?;
            block.branch_forward(cx, (&block.out, attended), (0, branch_norm), branch, adapters)?;
            op::AddBranch { stream, branch, dropout: None, out: middle }.run(kernels)?;
            block.mlp_norm.forward(cx, middle, normed)?;
            block.up.forward(cx, &normed.out, up, adapters)?;
            op::Activate { activation: self.spec.activation, x: up, y: activated }.run(kernels)?;
            block.branch_forward(cx, (&block.down, activated), (1, branch_norm), branch, adapters)?;
            op::AddBranch { stream: middle, branch, dropout: None, out: stream }.run(kernels)?;
        }
        let normed = &BlockBuffers::of(blocks, head)?.normed;
        self.final_norm.forward(cx, stream, normed)?;
        *len += rows;
        Ok(&normed.out)
    }
}
