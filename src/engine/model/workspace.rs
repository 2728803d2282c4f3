//! The buffers of a forward and backward pass.
//!
//! For N tokens, a GPT-2 block in half precision keeps 8·N·D bytes of residual stream in FP32, before attention and
//! before the MLP, and 2·N·(6·D + F) bytes for the backward pass: two norms, queries, keys and values, attention's
//! output and the activation's input.

mod rope_caches;
mod views;

pub(super) use rope_caches::RopeCaches;

use super::adapter::{AdapterBuffers, AdapterPass, total_rank};
use super::decoder::InputIds;
use super::mixture::{Decisions, Experts, LoadBalance};
use super::parameters::Parameters;
use super::rope::Rope;
use super::spec::{ModelSpec, QkNorm};
use crate::engine::kernels::NormOutput;
use crate::engine::kernels::cross_entropy::CrossEntropyWorkspace;
use crate::engine::kernels::rope::PositionIds;
use crate::engine::kernels::view::{self, AllocFn};
use crate::precision::{Dtype, PrecisionPolicy, PrecisionUnit};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use std::cell::{Cell, RefCell};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Activation checkpointing: the activations that the forward pass keeps for the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checkpointing {
    /// Keeps every activation except the output of the MLP's activation function, which the backward pass recomputes.
    #[default]
    None,
    /// Keeps the input of each block. The backward pass recomputes the rest (Chen et al., 2016).
    PerBlock,
}

impl From<bool> for Checkpointing {
    fn from(per_block: bool) -> Self {
        if per_block { Self::PerBlock } else { Self::None }
    }
}

/// The passes that buffers are for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Forward and backward passes, which keep these activations.
    Training(Checkpointing),
    /// Forward passes alone.
    Evaluation,
}

impl Purpose {
    fn trains(self) -> bool {
        matches!(self, Self::Training(_))
    }

    /// Blocks share their buffers in an evaluation.
    fn keep(self) -> Checkpointing {
        if let Self::Training(keep) = self { keep } else { Checkpointing::PerBlock }
    }
}

/// Normalized heads of queries and keys.
#[derive(Debug)]
pub(super) struct QkNorms<T = Tensor> {
    /// Queries without the gates between them, before they are normalized, if there are gates.
    pub(super) queries: Option<T>,
    /// Queries and keys, normalized.
    pub(super) out: T,
    /// `[N · heads]` and `[N · kv_heads]`, FP32.
    pub(super) rstd: [T; 2],
}

impl<T> QkNorms<T> {
    /// The buffers, if there are such norms.
    fn alloc(spec: &ModelSpec, rows: usize, compute: DType, allocate: AllocFn<'_, T>) -> Result<Option<Self>> {
        let [queries, keys, _] = spec.qkv_widths();
        let groups = match spec.qk_norm {
            None => return Ok(None),
            Some(QkNorm::PerHead) => [spec.heads, spec.kv_heads],
            Some(QkNorm::Whole) => [1, 1],
        };
        let statistics = |groups: usize| allocate(&[rows * groups], DType::F32);
        let rstd = [statistics(groups[0])?, statistics(groups[1])?];
        let without_gates = spec.attention_gate.then(|| allocate(&[rows, queries], compute)).transpose()?;
        Ok(Some(Self { queries: without_gates, out: allocate(&[rows, queries + keys], compute)?, rstd }))
    }
}

/// The input of a post-norm, and its statistics.
#[derive(Debug)]
pub(super) struct PostNorm<T = Tensor> {
    /// `[N, D]`, compute type.
    pub(super) input: T,
    /// `[N]`, FP32.
    pub(super) rstd: T,
}

impl<T> PostNorm<T> {
    pub(super) fn alloc(spec: &ModelSpec, rows: usize, compute: DType, allocate: AllocFn<'_, T>) -> Result<Self> {
        Ok(Self { input: allocate(&[rows, spec.hidden_size], compute)?, rstd: allocate(&[rows], DType::F32)? })
    }
}

impl PostNorm {
    /// The norm's result, with its output in a buffer that is overwritten in turn.
    pub(super) fn into(&self, out: &Tensor) -> NormOutput {
        NormOutput { out: out.clone(), mean: None, rstd: self.rstd.clone() }
    }
}

/// The decisions of a block's router.
#[derive(Debug)]
pub(super) struct Routing<T = Tensor> {
    /// `[N, E]`, FP32.
    pub(super) logits: T,
    /// The weight of each row of the experts' products, FP32.
    pub(super) weights: T,
    pub(super) decisions: RefCell<Decisions>,
}

/// The activations of one block's forward pass that its backward pass reads.
#[derive(Debug)]
pub(super) struct BlockActivations<T = Tensor> {
    pub(super) attention_norm: NormOutput<T>,
    /// Queries, keys and values, or the input of a recurrence; see [`mixer_input`].
    pub(super) qkv: T,
    pub(super) heads: Option<QkNorms<T>>,
    /// The output of attention or of a recurrence; see [`mixer_output`].
    pub(super) attended: T,
    /// Attention's output times its gates, if it has some.
    pub(super) gated: Option<T>,
    pub(super) lse: T,
    pub(super) post_attention: Option<PostNorm<T>>,
    /// The residual stream between attention and MLP.
    pub(super) middle: T,
    pub(super) mlp_norm: NormOutput<T>,
    /// The router's decisions, if the MLP is a mixture of experts.
    pub(super) routing: Option<Routing<T>>,
    /// The activation's input.
    pub(super) up: T,
    pub(super) post_mlp: Option<PostNorm<T>>,
    /// Between the factors of adapters, `[N · total_rank]`.
    a_out: Option<T>,
}

impl BlockActivations {
    /// The buffers of the block's adapters.
    pub(super) fn adapters<'a>(&'a self, scratch: &'a LayerScratch) -> AdapterPass<'a> {
        AdapterPass { buffers: scratch.adapter.as_ref(), a_out: self.a_out.as_ref(), routed: None }
    }

    pub(super) fn routing(&self) -> Result<&Routing> {
        required(self.routing.as_ref())
    }
}

fn required<T>(buffer: Option<&T>) -> Result<&T> {
    match buffer {
        Some(buffer) => Ok(buffer),
        None => bail!("this workspace has no buffers for experts"),
    }
}

pub(super) type BlockBuffers<'a> = (&'a BlockActivations, &'a LayerScratch);

/// All buffers of a forward and backward pass for one (batch, sequence) shape.
///
/// Each block, and everything outside the blocks, has a separate compute dtype, usually the policy's. `T` is a
/// tensor, or nothing if only sizes are counted.
#[derive(Debug)]
pub struct Workspace<T = Tensor> {
    policy: PrecisionPolicy,
    purpose: Purpose,
    pub(super) batch: usize,
    pub(super) seq_len: usize,
    /// The documents of the current tokens, as in [`InputIds`]; empty if each sequence is one.
    documents: Vec<u32>,
    /// Whether the current tokens have the rotary tables of short sequences.
    short_ropes: bool,
    /// The load-balancing loss of the current passes.
    pub(super) balance: RefCell<LoadBalance>,
    /// The compute type of each block.
    compute: Vec<DType>,
    /// The residual stream as each block receives it, and last as it leaves the last one.
    pub(super) stream: Vec<T>,
    /// One for each block in the backward pass, which are the last ones, if activations are kept; otherwise none.
    blocks: Vec<BlockActivations<T>>,
    pub(super) final_norm: NormOutput<T>,
    pub(super) head: CrossEntropyWorkspace<T>,
    pub(super) backward: Option<ResidualGrad<T>>,
    /// One entry for the policy's compute dtype, and one for every other dtype in use.
    scratch: Vec<LayerScratch<T>>,
    rope_caches: RopeCaches,
    /// The tables of batches whose documents are up to a length, if longer ones have other frequencies.
    short_rope_caches: Option<(usize, RopeCaches)>,
}

#[derive(Debug)]
pub(super) struct ResidualGrad<T = Tensor> {
    /// Gradient of the residual stream.
    pub(super) stream: T,
    /// Scratch of the embedding's gradient; the first backward pass gives it its length.
    pub(super) order: Vec<u32>,
}

/// Scratch buffers of the layers of one compute type.
#[derive(Debug)]
pub(super) struct LayerScratch<T = Tensor> {
    compute: DType,
    /// The output of attention or MLP before it is added to the residual stream; in the backward pass, its gradient.
    pub(super) branch: T,
    /// The activation's output. The backward pass recomputes it cheaply, which saves a sixth of the kept activations.
    pub(super) activated: T,
    /// Inputs or outputs of the experts, a row for each token and each of its experts.
    routed: Option<T>,
    adapter: Option<AdapterBuffers<T>>,
    gradients: Option<SublayerGrads<T>>,
    /// A block's activations, if they are recomputed or have no backward pass.
    block: Option<BlockActivations<T>>,
}

#[derive(Debug)]
pub(super) struct SublayerGrads<T = Tensor> {
    /// Gradient of a norm's output, `[N, D]`.
    pub(super) normed: T,
    /// Gradient of the input of a post-norm.
    pub(super) branch: Option<T>,
    /// Gradient of normalized queries and keys.
    pub(super) query_key: Option<T>,
    /// The gradient of attention's output, if its width differs from the residual stream's.
    attended: Option<T>,
    pub(super) qkv: T,
    /// Gradient of the activation's output.
    pub(super) activated: T,
    /// Gradient of its input, if it is gated.
    up: Option<T>,
    /// Gradients of the experts' inputs.
    routed: Option<T>,
    /// Gradient of the router's logits.
    router_logits: Option<T>,
}

impl<T> SublayerGrads<T> {
    pub(super) fn attended(&self) -> &T {
        self.attended.as_ref().unwrap_or(&self.normed)
    }

    /// The buffer of the activation's input gradient: the output gradient's if they have one shape.
    pub(super) fn up(&self) -> &T {
        self.up.as_ref().unwrap_or(&self.activated)
    }

    pub(super) fn routed(&self) -> Result<&T> {
        required(self.routed.as_ref())
    }

    pub(super) fn router_logits(&self) -> Result<&T> {
        required(self.router_logits.as_ref())
    }
}

/// Bytes of the buffers of a [`Workspace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceBytes {
    /// Activations that the forward pass keeps for the backward pass.
    pub activations: u64,
    /// Scratch buffers: a tile of logits, gradients of activations.
    pub scratch: u64,
}

/// candle's name of a type.
pub fn candle_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    }
}

/// The part of the buffer of a block's queries, keys and values, or of its recurrence's input: blocks that share a
/// buffer may need fewer columns.
pub(super) fn mixer_input(spec: &ModelSpec, block: usize, buffer: &Tensor) -> Result<Tensor> {
    narrowed(buffer, spec.mixer_widths(Some(block))[0])
}

/// The part of the buffer of the output of a block's attention or recurrence.
pub(super) fn mixer_output(spec: &ModelSpec, block: usize, buffer: &Tensor) -> Result<Tensor> {
    narrowed(buffer, spec.mixer_widths(Some(block))[1])
}

/// The first elements of a buffer as a matrix of `width` columns.
fn narrowed(buffer: &Tensor, width: usize) -> Result<Tensor> {
    let (rows, columns) = buffer.dims2()?;
    if columns == width {
        return Ok(buffer.clone());
    }
    buffer.flatten_all()?.narrow(0, 0, rows * width)?.reshape((rows, width))
}

impl<T> BlockActivations<T> {
    /// The buffers of a block, or buffers for any block.
    fn alloc(
        spec: &ModelSpec,
        block: Option<usize>,
        tokens: usize,
        [compute, stream]: [DType; 2],
        allocate: AllocFn<'_, T>,
    ) -> Result<Self> {
        let attends = block.is_none_or(|block| spec.recurrence(block).is_none());
        let [mixer_input, mixer_output] = spec.mixer_widths(block);
        let rows = |columns: usize, dtype| allocate(&[tokens, columns], dtype);
        let columns = total_rank(spec);
        let norm = || NormOutput::alloc(spec.norm, tokens, spec.hidden_size, compute, allocate);
        let mlp_rows = tokens * spec.mlp_rows();
        let routing = |experts: Experts| -> Result<Routing<T>> {
            let logits = rows(experts.count, DType::F32)?;
            let weights = allocate(&[mlp_rows], DType::F32)?;
            Ok(Routing { logits, weights, decisions: RefCell::default() })
        };
        let branch = || spec.post_norms.then(|| PostNorm::alloc(spec, tokens, compute, allocate)).transpose();
        Ok(Self {
            attention_norm: norm()?,
            qkv: rows(mixer_input, compute)?,
            heads: if attends { QkNorms::alloc(spec, tokens, compute, allocate)? } else { None },
            attended: rows(mixer_output, compute)?,
            gated: (attends && spec.attention_gate).then(|| rows(spec.attn_out_size(), compute)).transpose()?,
            lse: allocate(&[tokens * spec.heads], DType::F32)?,
            post_attention: branch()?,
            middle: rows(spec.hidden_size, stream)?,
            mlp_norm: norm()?,
            routing: spec.experts.map(routing).transpose()?,
            up: allocate(&[mlp_rows, spec.up_width()], compute)?,
            post_mlp: branch()?,
            a_out: (columns > 0).then(|| allocate(&[tokens * columns], compute)).transpose()?,
        })
    }
}

impl<T> LayerScratch<T> {
    /// The buffers of layers of type `compute`.
    pub(super) fn of(all: &[Self], compute: DType) -> Result<&Self> {
        let found = all.iter().find(|scratch| scratch.compute == compute);
        found.ok_or_else(|| Error::msg(format!("there are no buffers for layers that compute in {compute:?}")))
    }

    pub(super) fn routed(&self) -> Result<&T> {
        required(self.routed.as_ref())
    }

    /// The activations of the current block.
    pub(super) fn block(&self) -> Result<&BlockActivations<T>> {
        self.block.as_ref().ok_or_else(|| Error::msg("there are no buffers for the activations of a block"))
    }

    pub(super) fn gradients(&self) -> Result<&SublayerGrads<T>> {
        self.gradients.as_ref().ok_or_else(|| Error::msg("this workspace has no buffers for a backward pass"))
    }

    pub(super) fn alloc(
        spec: &ModelSpec,
        tokens: usize,
        (compute, stream): (DType, DType),
        purpose: Purpose,
        allocate: AllocFn<'_, T>,
    ) -> Result<Self> {
        let rows = |columns: usize| allocate(&[tokens, columns], compute);
        let mlp_rows = |columns: usize| allocate(&[tokens * spec.mlp_rows(), columns], compute);
        let routed = || spec.experts.map(|_| mlp_rows(spec.hidden_size)).transpose();
        let gradients = || -> Result<SublayerGrads<T>> {
            let [mixer_input, mixer_output] = spec.mixer_widths(None);
            let wide = mixer_output != spec.hidden_size;
            Ok(SublayerGrads {
                normed: rows(spec.hidden_size)?,
                branch: spec.post_norms.then(|| rows(spec.hidden_size)).transpose()?,
                query_key: spec.qk_norm.map(|_| rows(spec.qkv_widths()[..2].iter().sum())).transpose()?,
                attended: wide.then(|| rows(mixer_output)).transpose()?,
                qkv: rows(mixer_input)?,
                activated: mlp_rows(spec.intermediate_size)?,
                up: spec.activation.is_gated().then(|| mlp_rows(spec.up_width())).transpose()?,
                routed: routed()?,
                router_logits: spec.experts.map(|experts| rows(experts.count)).transpose()?,
            })
        };
        let block = || BlockActivations::alloc(spec, None, tokens, [compute, stream], allocate);
        Ok(Self {
            compute,
            branch: rows(spec.hidden_size)?,
            activated: mlp_rows(spec.intermediate_size)?,
            routed: routed()?,
            adapter: AdapterBuffers::alloc(spec, tokens, compute, purpose.trains(), allocate)?,
            gradients: purpose.trains().then(gradients).transpose()?,
            block: (purpose.keep() == Checkpointing::PerBlock || spec.first_trained_block() > 0)
                .then(block)
                .transpose()?,
        })
    }
}

impl<T> Workspace<T> {
    /// The one list of buffers: `kept` makes those of the forward pass that the backward pass reads, `scratch` the
    /// others.
    fn alloc(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        (batch, seq_len): (usize, usize),
        purpose: Purpose,
        on_gpu: bool,
        kept: AllocFn<'_, T>,
        scratch: AllocFn<'_, T>,
    ) -> Result<Self> {
        let tokens = batch * seq_len;
        let width = spec.hidden_size;
        let (compute, stream) = (candle_dtype(policy.compute), candle_dtype(policy.residual));
        let first = if purpose.keep() == Checkpointing::None { spec.first_trained_block() } else { spec.num_layers };
        let backward = || -> Result<ResidualGrad<T>> {
            Ok(ResidualGrad { stream: scratch(&[tokens, width], stream)?, order: Vec::new() })
        };
        let grads = (purpose.trains() && spec.trains_head()).then(|| candle_dtype(policy.grads));
        Ok(Self {
            policy,
            purpose,
            batch,
            seq_len,
            documents: Vec::new(),
            short_ropes: false,
            balance: RefCell::default(),
            compute: vec![compute; spec.num_layers],
            stream: (0..=spec.num_layers).map(|_| kept(&[tokens, width], stream)).collect::<Result<_>>()?,
            blocks: (first..spec.num_layers)
                .map(|block| BlockActivations::alloc(spec, Some(block), tokens, [compute, stream], kept))
                .collect::<Result<_>>()?,
            final_norm: NormOutput::alloc(spec.norm, tokens, width, compute, kept)?,
            head: CrossEntropyWorkspace::alloc([tokens, spec.vocab_size, width], compute, grads, on_gpu, scratch)?,
            backward: purpose.trains().then(backward).transpose()?,
            scratch: vec![LayerScratch::alloc(spec, tokens, (compute, stream), purpose, scratch)?],
            rope_caches: RopeCaches::default(),
            short_rope_caches: None,
        })
    }

    /// The scratch buffers of layers of type `compute`.
    pub(super) fn scratch(&self, compute: DType) -> Result<&LayerScratch<T>> {
        LayerScratch::of(&self.scratch, compute)
    }

    pub(super) fn block(&self, block: usize) -> Result<(&BlockActivations<T>, &LayerScratch<T>)> {
        let scratch = self.scratch(self.compute[block])?;
        let kept = self.kept(block).and_then(|kept| self.blocks.get(kept));
        Ok((kept.map_or_else(|| scratch.block(), Ok)?, scratch))
    }

    /// The index of a block in `blocks`.
    fn kept(&self, block: usize) -> Option<usize> {
        block.checked_sub(self.compute.len() - self.blocks.len())
    }

    /// Adds the routers' load-balancing loss to the next passes, with dL/d(loss) = `seed`. `row_lens` has the tokens of
    /// each row without padding, or is empty.
    pub(crate) fn balance_experts(&mut self, seed: f64, row_lens: &[usize]) {
        self.balance.get_mut().begin(seed, row_lens, self.seq_len);
    }

    /// The load-balancing loss of the last forward pass; 0 without it.
    pub(crate) fn balance_loss(&self) -> f64 {
        self.balance.borrow().loss()
    }

    pub(super) fn positions(&self) -> PositionIds<'_> {
        PositionIds { seq_len: self.seq_len, past: 0, documents: self.documents() }
    }

    /// The start columns of its rows' documents.
    pub(super) fn documents(&self) -> Option<&[u32]> {
        (!self.documents.is_empty()).then_some(&self.documents[..])
    }

    /// Begins a batch with these documents.
    pub(super) fn set_documents(&mut self, documents: Option<&[u32]>) {
        self.short_ropes = self.has_short_ropes(documents);
        self.documents.clear();
        self.documents.extend_from_slice(documents.unwrap_or_default());
    }

    /// The rotary tables of the current tokens.
    pub(super) fn rope_caches(&self) -> &RopeCaches {
        match &self.short_rope_caches {
            Some((_, short)) if self.short_ropes => short,
            _ => &self.rope_caches,
        }
    }

    /// Whether sequences with these documents have the frequencies of short ones. As in transformers, the largest
    /// position of the batch decides, and each document restarts positions.
    pub(super) fn has_short_ropes(&self, documents: Option<&[u32]>) -> bool {
        self.short_rope_caches.as_ref().is_some_and(|(context, _)| {
            let positions = PositionIds { documents, ..self.positions() };
            let all_short = || (0..self.batch * self.seq_len).all(|row| positions.of(row) < *context);
            self.seq_len <= *context || (documents.is_some() && all_short())
        })
    }

    /// The part that is kept for the backward pass.
    pub fn keep(&self) -> Checkpointing {
        self.purpose.keep()
    }

    /// Sequences in a batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens in a sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }
}

impl Workspace<()> {
    /// Far above any machine's memory, and low enough that further sums do not overflow.
    const MAX_BYTES: u64 = 1 << 60;

    /// The size of a workspace for training.
    pub fn bytes(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        [batch, seq_len]: [usize; 2],
        keep: Checkpointing,
        on_gpu: bool,
    ) -> Result<WorkspaceBytes> {
        Self::count(spec, policy, (batch, seq_len), Purpose::Training(keep), on_gpu)
    }

    /// The size of a workspace for evaluation.
    pub fn evaluation_bytes(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        [batch, seq_len]: [usize; 2],
        on_gpu: bool,
    ) -> Result<u64> {
        let bytes = Self::count(spec, policy, (batch, seq_len), Purpose::Evaluation, on_gpu)?;
        Ok(bytes.activations + bytes.scratch)
    }

    /// Fails above [`Self::MAX_BYTES`].
    fn count(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        shape: (usize, usize),
        purpose: Purpose,
        on_gpu: bool,
    ) -> Result<WorkspaceBytes> {
        let (activations, scratch) = (Cell::new(0), Cell::new(0));
        let count = |sum: &Cell<u64>, shape: &[usize], dtype| {
            sum.set(sum.get().saturating_add(view::bytes(shape, dtype)));
            if sum.get() > Self::MAX_BYTES {
                candle_core::bail!("the activations of this batch take more than an exbibyte; use a smaller one");
            }
            Ok(())
        };
        let kept = |shape: &[usize], dtype| count(&activations, shape, dtype);
        let overwritten = |shape: &[usize], dtype| count(&scratch, shape, dtype);
        Self::alloc(spec, policy, shape, purpose, on_gpu, &kept, &overwritten)?;
        Ok(WorkspaceBytes { activations: activations.get(), scratch: scratch.get() })
    }
}

impl Workspace {
    /// Buffers for training of `batch` sequences of `seq_len` tokens.
    pub fn for_training(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        shape: (usize, usize),
        keep: Checkpointing,
        device: &Device,
    ) -> Result<Self> {
        Self::new(spec, policy, shape, Purpose::Training(keep), device)
    }

    /// Buffers for evaluation of `batch` sequences of `seq_len` tokens: the blocks share theirs.
    pub fn for_evaluation(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        shape: (usize, usize),
        device: &Device,
    ) -> Result<Self> {
        Self::new(spec, policy, shape, Purpose::Evaluation, device)
    }

    fn new(
        spec: &ModelSpec,
        policy: PrecisionPolicy,
        shape: (usize, usize),
        purpose: Purpose,
        device: &Device,
    ) -> Result<Self> {
        let zeros = |shape: &[usize], dtype| view::zeros(shape, dtype, device);
        let buffers = Self::alloc(spec, policy, shape, purpose, !device.is_cpu(), &zeros, &zeros)?;
        let (_, seq_len) = shape;
        let of_len = |len| RopeCaches::new(spec, 0..seq_len, len, device);
        let context = spec.rope.as_ref().and_then(Rope::short_context).filter(|context| *context < seq_len);
        let short_rope_caches = context.map(|context| Ok::<_, Error>((context, of_len(context)?))).transpose()?;
        Ok(Self { rope_caches: of_len(seq_len)?, short_rope_caches, ..buffers })
    }

    /// The identity of a pass over `tokens` to record, with these weights and gradients: a pass of another identity has
    /// other buffers or kernels.
    pub fn pass_identity(&self, parameters: [&Parameters; 2], tokens: InputIds<'_>) -> u64 {
        let mut hasher = DefaultHasher::new();
        for parameters in parameters {
            parameters.hash_identity(&mut hasher);
        }
        self.head.logits.id().hash(&mut hasher);
        self.has_short_ropes(tokens.documents).hash(&mut hasher);
        hasher.finish()
    }

    /// Gives `unit` buffers of a different compute type; other units keep their buffers.
    pub fn change_dtype(&mut self, spec: &ModelSpec, unit: PrecisionUnit, compute: Dtype) -> Result<()> {
        let device = self.stream[0].device().clone();
        let zeros = |shape: &[usize], dtype| view::zeros(shape, dtype, &device);
        let tokens = self.batch * self.seq_len;
        let dtype = candle_dtype(compute);
        let stream = self.stream[0].dtype();
        match unit {
            PrecisionUnit::Block(block) if block < self.compute.len() => {
                self.compute[block] = dtype;
                if let Some(activations) = self.kept(block).and_then(|kept| self.blocks.get_mut(kept)) {
                    *activations = BlockActivations::alloc(spec, Some(block), tokens, [dtype, stream], &zeros)?;
                }
            }
            PrecisionUnit::Block(block) => bail!("there is no block {block} among {}", self.compute.len()),
            PrecisionUnit::NonBlock => {
                let grads = (self.purpose.trains() && spec.trains_head())
                    .then(|| candle_dtype(self.policy.with_compute(compute).grads));
                self.final_norm = NormOutput::alloc(spec.norm, tokens, spec.hidden_size, dtype, &zeros)?;
                let sizes = [tokens, spec.vocab_size, spec.hidden_size];
                self.head = CrossEntropyWorkspace::alloc(sizes, dtype, grads, !device.is_cpu(), &zeros)?;
            }
        }
        let policy = candle_dtype(self.policy.compute);
        let last = self.final_norm.out.dtype();
        let used: Vec<DType> = self.compute.iter().copied().chain([policy, last]).collect();
        self.scratch.retain(|scratch| used.contains(&scratch.compute));
        if self.scratch(dtype).is_err() {
            self.scratch.push(LayerScratch::alloc(spec, tokens, (dtype, stream), self.purpose, &zeros)?);
        }
        Ok(())
    }

    /// The loss of each target of the head's last pass, FP32; 0 for ignored targets.
    pub fn losses(&self) -> &Tensor {
        &self.head.losses
    }

    /// The final norm's output `[B·T, D]`, the head's input.
    pub fn hidden(&self) -> &Tensor {
        &self.final_norm.out
    }
}
