//! The forward pass for generating text: new tokens only, over the cached keys and values of those before them.

use super::Gpt2;
use crate::engine::kernels::decode_attention::KeyValues;
use crate::engine::kernels::{embedding, gelu, residual, view};
use crate::engine::model::candle_dtype;
use crate::engine::model::config::Gpt2Config;
use crate::engine::model::layers::Normed;
use crate::engine::model::parameters::Parameters;
use crate::precision::PrecisionPolicy;
use candle_core::{DType, Device, Result, Tensor, bail};

/// What one sequence's tokens left behind in every layer, and the buffers of the pass that adds to it.
///
/// A layer's part has the type that its weights have when a sequence begins, at first the policy's.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<KeyValues>,
    residual: DType,
    device: Device,
    capacity: usize,
    len: usize,
    /// Made for the number of tokens that were decoded last.
    buffers: Option<Buffers>,
}

/// The residual stream, and for each compute type in use the activations of one block.
#[derive(Debug)]
struct Buffers {
    rows: usize,
    stream: Tensor,
    middle: Tensor,
    blocks: Vec<BlockBuffers>,
}

/// The activations of one block; every block uses them in turn, for no backward pass follows.
#[derive(Debug)]
struct BlockBuffers {
    normed: Normed,
    qkv: Tensor,
    attended: Tensor,
    branch: Tensor,
    fc: Tensor,
    gelu: Tensor,
}

impl KvCache {
    /// Room for a sequence of `capacity` tokens, which must lie within the model's context.
    pub fn new(config: &Gpt2Config, policy: PrecisionPolicy, capacity: usize, device: &Device) -> Result<Self> {
        if capacity > config.n_positions {
            bail!("a cache of {capacity} tokens exceeds the model's context of {}", config.n_positions);
        }
        let (heads, head_size) = (config.n_head, config.n_embd / config.n_head);
        let layer = |_| KeyValues::new(heads, capacity, head_size, candle_dtype(policy.compute), device);
        let layers = (0..config.n_layer).map(layer).collect::<Result<_>>()?;
        let residual = candle_dtype(policy.residual);
        Ok(Self { layers, residual, device: device.clone(), capacity, len: 0, buffers: None })
    }

    /// Tokens seen.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token was seen yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets every token but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl BlockBuffers {
    fn new(config: &Gpt2Config, compute: DType, rows: usize, device: &Device) -> Result<Self> {
        let width = config.n_embd;
        let buffer = |columns: usize| view::zeros(&[rows, columns], compute, device);
        Ok(Self {
            normed: Normed::lay_out(rows, width, compute, &|shape, dtype| view::zeros(shape, dtype, device))?,
            qkv: buffer(3 * width)?,
            attended: buffer(width)?,
            branch: buffer(width)?,
            fc: buffer(config.n_inner)?,
            gelu: buffer(config.n_inner)?,
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
    fn new(config: &Gpt2Config, residual: DType, compute: &[DType], rows: usize, device: &Device) -> Result<Self> {
        let stream = || view::zeros(&[rows, config.n_embd], residual, device);
        let mut blocks: Vec<BlockBuffers> = Vec::new();
        for &dtype in compute {
            if BlockBuffers::of(&blocks, dtype).is_err() {
                blocks.push(BlockBuffers::new(config, dtype, rows, device)?);
            }
        }
        Ok(Self { rows, stream: stream()?, middle: stream()?, blocks })
    }

    fn serve(&self, rows: usize, compute: &[DType]) -> bool {
        self.rows == rows && compute.iter().all(|dtype| BlockBuffers::of(&self.blocks, *dtype).is_ok())
    }
}

impl Gpt2 {
    /// Appends `ids` to the cached sequence and returns the head's input for each of them, `[ids.len(), D]`: what
    /// [`Gpt2::forward`] computes for those rows of the whole sequence, without dropout.
    pub fn decode<'c>(&self, weights: &Parameters, ids: &[u32], cache: &'c mut KvCache) -> Result<&'c Tensor> {
        let (past, rows) = (cache.len, ids.len());
        if rows == 0 || past + rows > cache.capacity {
            bail!("{rows} tokens after {past} for a cache of {}", cache.capacity);
        }
        let head = weights[self.lm_head].dtype();
        let compute: Vec<DType> = self.compute_of_blocks(weights).chain([head]).collect();
        if past == 0 {
            for (layer, dtype) in cache.layers.iter_mut().zip(&compute) {
                layer.retype(*dtype)?;
            }
        }
        if cache.buffers.as_ref().is_none_or(|buffers| !buffers.serve(rows, &compute)) {
            cache.buffers = Some(Buffers::new(&self.config, cache.residual, &compute, rows, &cache.device)?);
        }
        let KvCache { layers, buffers: Some(buffers), len, .. } = cache else { bail!("the cache has no buffers") };
        let Buffers { stream, middle, blocks, .. } = &*buffers;
        let positions = weights[self.wpe].narrow(0, past, rows)?;
        embedding::forward(&weights[self.wte], &positions, ids, rows, None, stream)?;
        for ((block, layer), dtype) in self.blocks.iter().zip(layers).zip(&compute) {
            let BlockBuffers { normed, qkv, attended, branch, fc, gelu } = BlockBuffers::of(blocks, *dtype)?;
            block.ln_1.forward(weights, stream, normed, &mut ())?;
            block.c_attn.forward(weights, &normed.out, qkv, &mut ())?;
            layer.attend(past, qkv, attended)?;
            block.attn_c_proj.forward(weights, attended, branch, &mut ())?;
            residual::add(stream, branch, None, middle)?;

            block.ln_2.forward(weights, middle, normed, &mut ())?;
            block.c_fc.forward(weights, &normed.out, fc, &mut ())?;
            gelu::forward(fc, gelu)?;
            block.mlp_c_proj.forward(weights, gelu, branch, &mut ())?;
            residual::add(middle, branch, None, stream)?;
        }
        let normed = &BlockBuffers::of(blocks, head)?.normed;
        self.ln_f.forward(weights, stream, normed, &mut ())?;
        *len += rows;
        Ok(&normed.out)
    }

    /// What each block computes in: its weights' type.
    fn compute_of_blocks(&self, weights: &Parameters) -> impl Iterator<Item = DType> {
        self.blocks.iter().map(|block| weights[block.c_attn.weight()].dtype())
    }
}
