//! The decoder with an explicit forward and backward pass: one traversal of the layers for every family and every set
//! of kernels.
//!
//! The forward pass stores in the [`Workspace`] all tensors that the backward pass reads. After the first step neither
//! allocates.

mod backward;
mod decode;
mod head;

pub use decode::KvCache;

use super::adapter::AdapterPass;
use super::hook::{Hook, HookPoint, TensorKind};
use super::layers::{Context, Linear, NormLayer, fused_param};
use super::mixture::ExpertMlps;
use super::parameters::{ParamRef, Parameters};
use super::spec::{EmbeddingScale, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole, ParamRole, Recurrence};
use super::workspace::{
    BlockActivations, BlockBuffers, LayerScratch, PostNorm, QkNorms, RopeCaches, Workspace, mixer_input, mixer_output,
};
use crate::engine::kernels::Kernels;
use crate::engine::kernels::attention::{AttentionInputs, AttentionShape};
use crate::engine::kernels::columns::ColumnSlice;
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::embedding::scale_of_width;
use crate::engine::kernels::gated_delta::{DeltaHeads, DeltaParams};
use crate::engine::kernels::head_gate::GatedHeads;
use crate::engine::kernels::op::{self, Embedding};
use crate::engine::kernels::pass::PassInputs;
use crate::engine::kernels::rope::{CosSinCache, Direction, PositionIds};
use candle_core::{DType, Result, Tensor, bail};
use std::sync::Arc;

/// Whether dropout is on, and its random masks.
#[derive(Clone, Copy, Debug)]
pub enum ForwardMode {
    /// No dropout.
    Eval,
    /// The frozen base alone, without adapters and dropout.
    Base,
    /// Dropout at the spec's rates.
    Train {
        /// The run's seed.
        seed: u64,
        /// The index of the micro-batch in the run; each has different masks.
        micro_batch: u64,
    },
}

impl ForwardMode {
    pub(super) fn dropout(self, rate: f64, site: usize) -> Option<Dropout> {
        match self {
            Self::Eval | Self::Base => None,
            Self::Train { seed, micro_batch: draw } => Dropout::new(rate as f32, seed, site as u32, draw),
        }
    }
}

/// Token ids with their shape.
#[derive(Clone, Copy, Debug)]
pub struct InputIds<'a> {
    /// `batch * seq_len` ids, sequence after sequence.
    pub ids: &'a [u32],
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// For each token, the offset in its sequence at which its document starts: attention stays within a document, and
    /// positions restart in each. `None` if each sequence is one document.
    pub documents: Option<&'a [u32]>,
}

impl<'a> InputIds<'a> {
    /// Sequences of `seq_len` tokens, each of them one document.
    pub fn new(ids: &'a [u32], seq_len: usize) -> Self {
        Self { ids, seq_len, documents: None }
    }
}

#[derive(Debug)]
struct Block {
    attention_norm: NormLayer,
    /// Queries, keys and values, or the input of a recurrence.
    qkv: Linear,
    /// The norms of queries and of keys.
    qk_norms: Option<[NormLayer; 2]>,
    sinks: Option<ParamRef>,
    /// The recurrence, if the block has one instead of attention.
    recurrence: Option<RecurrenceParams>,
    out: Linear,
    mlp_norm: NormLayer,
    mlp: Mlp,
    /// The norms after attention and after the MLP.
    post_norms: Option<[NormLayer; 2]>,
}

/// A recurrence and its parameters.
#[derive(Debug)]
enum RecurrenceParams {
    ShortConv(ParamRef),
    GatedDelta { heads: DeltaHeads, eps: f32, params: DeltaParams<ParamRef> },
}

/// The operands of the operation that mixes tokens.
enum MixerInputs<'a> {
    /// Queries, keys and values, normalized and rotated.
    Attention([ColumnSlice<'a>; 3]),
    ShortConv {
        input: &'a Tensor,
        weight: &'a Tensor,
    },
    GatedDelta {
        heads: DeltaHeads,
        eps: f32,
        input: &'a Tensor,
        params: DeltaParams<&'a Tensor>,
    },
}

/// The products of an MLP, or of a mixture of them.
#[derive(Debug)]
enum Mlp {
    Dense { up: Linear, down: Linear },
    Mixture(ExpertMlps),
}

impl Mlp {
    /// Computes the activation's input.
    fn forward_up(&self, cx: &mut Context<'_>, (acts, scratch): BlockBuffers<'_>) -> Result<()> {
        match self {
            Self::Dense { up, .. } => up.forward(cx, &acts.mlp_norm.out, &acts.up),
            Self::Mixture(mixture) => mixture.forward_up(cx, &acts.mlp_norm.out, (acts, scratch)),
        }
    }

    /// Computes the output from the activation's output.
    fn forward_down(&self, cx: &mut Context<'_>, (acts, scratch): BlockBuffers<'_>, out: &Tensor) -> Result<()> {
        match self {
            Self::Dense { down, .. } => down.forward(cx, &scratch.activated, out),
            Self::Mixture(mixture) => mixture.forward_down(cx, (acts, scratch), out),
        }
    }
}

impl RecurrenceParams {
    fn new(spec: &ModelSpec, layout: &Parameters, block: usize, recurrence: Recurrence) -> Result<Self> {
        let param = |op, role| fused_param(layout, ModuleId::in_block(block, op), role);
        let conv = param(ModuleOp::ShortConv, ParamRole::Weight)?;
        Ok(match recurrence {
            Recurrence::ShortConv { .. } => Self::ShortConv(conv),
            Recurrence::GatedDelta { heads, .. } => Self::GatedDelta {
                heads,
                eps: spec.norm_eps as f32,
                params: DeltaParams {
                    conv,
                    a_log: param(ModuleOp::GatedDelta, ParamRole::Weight)?,
                    dt_bias: param(ModuleOp::GatedDelta, ParamRole::Bias)?,
                    norm: param(ModuleOp::Norm(NormRole::Delta), ParamRole::Weight)?,
                },
            },
        })
    }
}

impl Block {
    fn new(spec: &ModelSpec, layout: &Parameters, block: usize) -> Result<Self> {
        let norm = |role| NormLayer::new(spec, layout, ModuleId::in_block(block, ModuleOp::Norm(role)));
        let linear = |role| Linear::new(spec, layout, ModuleId::in_block(block, ModuleOp::Linear(role)));
        let pair = |first, second| -> Result<[NormLayer; 2]> { Ok([norm(first)?, norm(second)?]) };
        let mlp = match ExpertMlps::new(spec, layout, block)? {
            Some(mixture) => Mlp::Mixture(mixture),
            None => Mlp::Dense { up: linear(spec.up_role())?, down: linear(LinearRole::Down)? },
        };
        let weight = |op| layout.find_fused(ModuleId::in_block(block, op), ParamRole::Weight);
        let recurrence = spec.recurrence(block);
        let [input, output] = match recurrence {
            Some(Recurrence::ShortConv { .. }) => [LinearRole::ConvIn, LinearRole::ConvOut],
            Some(Recurrence::GatedDelta { .. }) => [LinearRole::DeltaIn, LinearRole::DeltaOut],
            None => [LinearRole::Qkv, LinearRole::Out],
        };
        let qk_norm = spec.qk_norm.filter(|_| recurrence.is_none());
        let recurrence = recurrence.map(|it| RecurrenceParams::new(spec, layout, block, it)).transpose()?;
        Ok(Self {
            attention_norm: norm(NormRole::Attention)?,
            qkv: linear(input)?,
            qk_norms: qk_norm.map(|_| pair(NormRole::Query, NormRole::Key)).transpose()?,
            sinks: weight(ModuleOp::Attention),
            recurrence,
            post_norms: spec.post_norms.then(|| pair(NormRole::PostAttention, NormRole::PostMlp)).transpose()?,
            out: linear(output)?,
            mlp_norm: norm(NormRole::Mlp)?,
            mlp,
        })
    }

    /// The operation that mixes tokens.
    const fn mixer(&self) -> ModuleOp {
        match self.recurrence {
            Some(RecurrenceParams::ShortConv(_)) => ModuleOp::ShortConv,
            Some(RecurrenceParams::GatedDelta { .. }) => ModuleOp::GatedDelta,
            None => ModuleOp::Attention,
        }
    }

    /// The buffer of attention's output times its gates, if it has some.
    fn gated<'a>(&self, acts: &'a BlockActivations) -> Option<&'a Tensor> {
        acts.gated.as_ref().filter(|_| self.recurrence.is_none())
    }

    /// Runs `last`, the last product of attention or the MLP, and its post-norm, if there is one.
    fn branch_forward(
        &self,
        cx: &mut Context<'_>,
        last: impl FnOnce(&mut Context<'_>, &Tensor) -> Result<()>,
        norm: usize,
        kept: Option<&PostNorm>,
        branch: &Tensor,
    ) -> Result<()> {
        let (Some(norms), Some(kept)) = (&self.post_norms, kept) else {
            return last(cx, branch);
        };
        last(cx, &kept.input)?;
        norms[norm].forward(cx, &kept.input, &kept.into(branch))
    }
}

/// A decoder: its layers, references to their parameters, and the kernels.
#[derive(Clone, Debug)]
pub struct Decoder {
    spec: ModelSpec,
    kernels: Arc<dyn Kernels>,
    embedding: ParamRef,
    positions: Option<ParamRef>,
    blocks: Arc<[Block]>,
    /// The lowest block in the backward pass.
    first_trained_block: usize,
    final_norm: NormLayer,
    head: ParamRef,
    /// The distinct windows of attention.
    windows: Vec<Option<usize>>,
}

impl Decoder {
    /// The model of `spec` over parameters with the layout of `layout`, computed with `kernels`.
    pub fn new(spec: &ModelSpec, layout: &Parameters, kernels: Arc<dyn Kernels>) -> Result<Self> {
        let embedding = fused_param(layout, ModuleId::global(ModuleOp::Embedding), ParamRole::Weight)?;
        let mut windows: Vec<_> = (0..spec.num_layers).map(|block| window(spec, block)).collect();
        windows.sort_unstable();
        windows.dedup();
        Ok(Self {
            windows,
            spec: spec.clone(),
            kernels,
            embedding,
            positions: layout.find_fused(ModuleId::global(ModuleOp::Positions), ParamRole::Weight),
            blocks: (0..spec.num_layers).map(|block| Block::new(spec, layout, block)).collect::<Result<_>>()?,
            first_trained_block: spec.first_trained_block(),
            final_norm: NormLayer::new(spec, layout, ModuleId::global(ModuleOp::Norm(NormRole::Final)))?,
            head: if spec.tie_word_embeddings {
                embedding
            } else {
                fused_param(layout, ModuleId::global(ModuleOp::Head), ParamRole::Weight)?
            },
        })
    }

    /// Its dimensions.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The kernels that compute it.
    pub fn kernels(&self) -> &dyn Kernels {
        &*self.kernels
    }

    /// The kernels, for another model of the same device.
    pub fn shared_kernels(&self) -> Arc<dyn Kernels> {
        self.kernels.clone()
    }

    /// The host's inputs of a pass in training over `tokens` with these targets. The pass is not recorded, and its loss
    /// has no known factors.
    pub fn pass_inputs<'a>(&'a self, tokens: InputIds<'a>, targets: &'a [u32], mode: ForwardMode) -> PassInputs<'a> {
        let draw = if let ForwardMode::Train { micro_batch, .. } = mode { micro_batch } else { 0 };
        let InputIds { ids, seq_len, documents } = tokens;
        let windows = &self.windows[..];
        PassInputs { ids, seq_len, documents, targets, seed: None, weights: None, draw, windows, buffers: None }
    }

    /// The attention of block `block` over `batch` sequences.
    fn shape(&self, block: usize, batch: usize, seq_len: usize) -> AttentionShape {
        let ModelSpec { heads, kv_heads, head_dim, attention_scale, attention_softcap, .. } = &self.spec;
        let shape = AttentionShape::new(batch, seq_len, *heads, *head_dim);
        let window = window(&self.spec, block);
        let scale = attention_scale.map_or(shape.scale, |scale| scale as f32);
        let softcap = attention_softcap.map(|cap| cap as f32);
        AttentionShape { kv_heads: *kv_heads, scale, window, softcap, ..shape }
    }

    /// Prepares queries and keys of the product `qkv` for attention: normalizes and rotates them. Returns their
    /// columns, and the values.
    fn qk_norm_and_rope<'a>(
        &self,
        cx: &mut Context<'_>,
        i: usize,
        qkv: &'a Tensor,
        heads: Option<&'a QkNorms>,
        rope_caches: &RopeCaches,
        positions: PositionIds<'_>,
    ) -> Result<[ColumnSlice<'a>; 3]> {
        let [query, key, value] = self.columns(qkv, heads)?;
        if let (Some(norms), Some(heads)) = (&self.blocks[i].qk_norms, heads) {
            let inputs = self.qk_norm_inputs(qkv, heads)?;
            if let Some(queries) = &heads.queries {
                let pairs = self.gated_heads(qkv)?;
                op::CopyQueries { pairs, queries, direction: Direction::Forward }.run(cx.kernels)?;
            }
            for (((norm, x), y), rstd) in norms.iter().zip(inputs).zip([query, key]).zip(&heads.rstd) {
                norm.forward_columns(cx, x, y, None, rstd)?;
            }
        }
        if let Some(tables) = rope_caches.of(&self.spec, i) {
            self.apply_rope(cx.kernels, [query, key], tables, positions, Direction::Forward)?;
        }
        Ok([query, key, value])
    }

    /// Rotates queries and keys, or the first elements of each head.
    fn apply_rope(
        &self,
        kernels: &dyn Kernels,
        query_key: [ColumnSlice<'_>; 2],
        tables: [&CosSinCache; 2],
        positions: PositionIds<'_>,
        direction: Direction,
    ) -> Result<()> {
        let head = self.spec.head_dim;
        let rotated = self.spec.rotary_dim();
        for (x, table) in query_key.into_iter().zip(tables) {
            // Heads that are rotated as a whole are rotated together.
            let (step, count) = if rotated == head { (x.count(), x.count()) } else { (head, rotated) };
            for first in (x.first()..x.first() + x.count()).step_by(step) {
                let x = ColumnSlice::new(x.tensor(), first..first + count)?;
                op::Rotate { x, table, positions, direction }.run(kernels)?;
            }
        }
        Ok(())
    }

    /// The queries of the product `qkv` and the gates of their heads' outputs.
    fn gated_heads<'a>(&self, qkv: &'a Tensor) -> Result<GatedHeads<'a>> {
        let [columns, ..] = ColumnSlice::split(qkv, self.spec.qkv_product_widths())?;
        Ok(GatedHeads { columns, head_dim: self.spec.head_dim })
    }

    /// Queries and keys before they are normalized.
    fn qk_norm_inputs<'a>(&self, qkv: &'a Tensor, heads: &'a QkNorms) -> Result<[ColumnSlice<'a>; 2]> {
        let [query, key, _] = ColumnSlice::split(qkv, self.spec.qkv_product_widths())?;
        Ok([heads.queries.as_ref().map_or(Ok(query), ColumnSlice::all)?, key])
    }

    /// The operands of attention: queries and keys, normalized if they have norms, and values.
    fn columns<'a>(&self, qkv: &'a Tensor, heads: Option<&'a QkNorms>) -> Result<[ColumnSlice<'a>; 3]> {
        let [query, key, value] = ColumnSlice::split(qkv, self.spec.qkv_product_widths())?;
        let Some(heads) = heads else { return Ok([query, key, value]) };
        let [queries, keys, _] = self.spec.qkv_widths();
        let [query, key] = ColumnSlice::split(&heads.out, [queries, keys])?;
        Ok([query, key, value])
    }

    fn check(&self, tokens: InputIds<'_>, workspace: &Workspace) -> Result<()> {
        let ids = tokens.ids.len();
        let seq_len = tokens.seq_len;
        if ids != workspace.batch * workspace.seq_len || seq_len != workspace.seq_len {
            bail!("{ids} tokens in rows of {seq_len} for buffers of {} × {}", workspace.batch, workspace.seq_len);
        }
        if tokens.documents.is_some_and(|documents| documents.len() != ids) {
            bail!("{ids} tokens, but a different number of document starts");
        }
        if seq_len > self.spec.max_position_embeddings {
            bail!("sequences of {seq_len} tokens exceed the model's context of {}", self.spec.max_position_embeddings);
        }
        Ok(())
    }

    fn embed<'a>(&self, weights: &'a Parameters, tokens: InputIds<'a>, mode: ForwardMode) -> Embedding<'a> {
        Embedding {
            table: weights.fused(self.embedding),
            positions: self.positions.map(|positions| weights.fused(positions)),
            ids: tokens.ids,
            seq_len: tokens.seq_len,
            documents: tokens.documents,
            scale: self.embedding_scale(weights),
            dropout: mode.dropout(self.spec.dropout.embedding, EMBEDDING_SITE),
        }
    }

    /// Embeds tokens. A quantized table dequantizes only their rows.
    fn embed_into(&self, weights: &Parameters, embedding: Embedding<'_>, out: &Tensor) -> Result<()> {
        let Some(rows) = weights.gathered(self.embedding, embedding.ids)? else {
            return op::Embed { input: embedding, out }.run(self.kernels());
        };
        op::Embed { input: Embedding { table: &rows, ids: rows.places(), ..embedding }, out }.run(self.kernels())
    }

    /// Computes the head's input, [`Workspace::hidden`], from tokens.
    pub fn forward(
        &self,
        weights: &Parameters,
        tokens: InputIds<'_>,
        mode: ForwardMode,
        ws: &mut Workspace,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        self.check(tokens, ws)?;
        ws.set_documents(tokens.documents);
        self.embed_into(weights, self.embed(weights, tokens, mode), &ws.stream[0])?;
        hook.record_whole(EMBEDDING, TensorKind::Output, &ws.stream[0])?;
        let ws = &*ws;
        let adapters = AdapterPass::default();
        let cx = &mut Context { kernels: self.kernels(), weights, grads: None, mode, adapters, hook };
        for i in 0..self.spec.num_layers {
            self.forward_block(cx, i, ws)?;
            ws.balance.borrow_mut().add(ws.block(i)?.0)?;
            self.add_mlp(cx, i, ws.block(i)?, &ws.stream[i + 1])?;
        }
        let last = &ws.stream[self.spec.num_layers];
        self.final_norm.forward(cx, last, &ws.final_norm)
    }

    /// Computes a block from its input to the input of its last product, or of the norm after that: all that its
    /// backward pass reads.
    fn forward_block<'a>(&self, cx: &mut Context<'a>, i: usize, ws: &'a Workspace) -> Result<()> {
        let dropout = cx.mode.dropout(self.spec.dropout.attention, DropoutSites::of(i).attention);
        let (acts, scratch) = ws.block(i)?;
        let sinks = self.sinks(cx.weights, i);
        let (out, positions) = (&mixer_output(&self.spec, i, &acts.attended)?, ws.positions());
        self.block_pass(cx, i, (&ws.stream[i], acts, scratch), ws.rope_caches(), positions, |inputs| match inputs {
            MixerInputs::Attention(qkv) => {
                let operands = AttentionInputs { qkv, documents: ws.documents(), dropout, sinks };
                let shape = self.shape(i, ws.batch, ws.seq_len);
                op::Attention { shape, operands, out, lse: &acts.lse }.run(self.kernels())
            }
            MixerInputs::ShortConv { input, weight } => {
                op::ShortConv { input, weight, positions, out }.run(self.kernels())
            }
            MixerInputs::GatedDelta { heads, eps, input, params } => {
                op::GatedDelta { heads, input, params, eps, positions, out }.run(self.kernels())
            }
        })
    }

    fn sinks<'a>(&self, weights: &'a Parameters, i: usize) -> Option<&'a Tensor> {
        self.blocks[i].sinks.map(|sinks| weights.fused(sinks))
    }

    /// [`Self::forward_block`] with these buffers and positions. `mix` writes the output of attention or of the
    /// recurrence.
    fn block_pass<'a>(
        &self,
        cx: &mut Context<'a>,
        i: usize,
        (input, acts, scratch): (&Tensor, &'a BlockActivations, &'a LayerScratch),
        rope_caches: &RopeCaches,
        positions: PositionIds<'_>,
        mix: impl FnOnce(MixerInputs<'_>) -> Result<()>,
    ) -> Result<()> {
        let kernels = cx.kernels;
        let mode = cx.mode;
        let block = &self.blocks[i];
        cx.adapters = acts.adapters(scratch);
        block.attention_norm.forward(cx, input, &acts.attention_norm)?;
        let qkv = &mixer_input(&self.spec, i, &acts.qkv)?;
        block.qkv.forward(cx, &acts.attention_norm.out, qkv)?;
        let weights = cx.weights;
        mix(match &block.recurrence {
            Some(RecurrenceParams::ShortConv(weight)) => {
                MixerInputs::ShortConv { input: qkv, weight: weights.fused(*weight) }
            }
            Some(RecurrenceParams::GatedDelta { heads, eps, params }) => {
                let params = params.try_map(|param| Ok(weights.fused(param)))?;
                MixerInputs::GatedDelta { heads: *heads, eps: *eps, input: qkv, params }
            }
            None => {
                let heads = acts.heads.as_ref();
                MixerInputs::Attention(self.qk_norm_and_rope(cx, i, qkv, heads, rope_caches, positions)?)
            }
        })?;
        let attended = &mixer_output(&self.spec, i, &acts.attended)?;
        cx.hook.record_whole(ModuleId::in_block(i, block.mixer()), TensorKind::Output, attended)?;
        let gated = block.gated(acts);
        if let Some(out) = gated {
            op::GateHeads { pairs: self.gated_heads(qkv)?, x: attended, out }.run(kernels)?;
        }
        let mixed = gated.unwrap_or(attended);
        let kept = acts.post_attention.as_ref();
        let out = |cx: &mut Context<'_>, y: &Tensor| block.out.forward(cx, mixed, y);
        block.branch_forward(cx, out, 0, kept, &scratch.branch)?;
        let dropout = mode.dropout(self.spec.dropout.residual, DropoutSites::of(i).attention_out);
        op::AddBranch { stream: input, branch: &scratch.branch, dropout, out: &acts.middle }.run(kernels)?;
        cx.hook.record_whole(ModuleId::in_block(i, ModuleOp::AttnResidual), TensorKind::Output, &acts.middle)?;

        block.mlp_norm.forward(cx, &acts.middle, &acts.mlp_norm)?;
        block.mlp.forward_up(cx, (acts, scratch))?;
        op::Activate { activation: self.spec.activation, x: &acts.up, y: &scratch.activated }.run(kernels)?;
        self.record_activation(cx, i, TensorKind::Output, &scratch.activated)?;
        if let Mlp::Mixture(mixture) = &block.mlp {
            mixture.scale_activated(cx, acts, &scratch.activated)?;
        }
        if let Some(kept) = &acts.post_mlp {
            let down = |cx: &mut Context<'_>, y: &Tensor| block.mlp.forward_down(cx, (acts, scratch), y);
            block.branch_forward(cx, down, 1, Some(kept), &scratch.branch)?;
        }
        Ok(())
    }

    /// Shows a tensor of the MLP's activation to the hook.
    fn record_activation(&self, cx: &mut Context<'_>, i: usize, kind: TensorKind, tensor: &Tensor) -> Result<()> {
        let layer = ModuleId::in_block(i, ModuleOp::Activation);
        let first_token = self.spec.experts.is_none().then_some(0);
        cx.hook.record(HookPoint { layer, kind, first_token }, tensor)
    }

    /// Completes a block after [`Self::block_pass`]: writes the residual stream with the MLP's output to `out`.
    fn add_mlp(&self, cx: &mut Context<'_>, i: usize, (acts, scratch): BlockBuffers<'_>, out: &Tensor) -> Result<()> {
        if acts.post_mlp.is_none() {
            self.blocks[i].mlp.forward_down(cx, (acts, scratch), &scratch.branch)?;
        }
        let dropout = cx.mode.dropout(self.spec.dropout.residual, DropoutSites::of(i).mlp_out);
        op::AddBranch { stream: &acts.middle, branch: &scratch.branch, dropout, out }.run(cx.kernels)?;
        cx.hook.record_whole(ModuleId::in_block(i, ModuleOp::MlpResidual), TensorKind::Output, out)
    }

    /// The factor of the tokens' embeddings.
    fn embedding_scale(&self, weights: &Parameters) -> f32 {
        let dtype = weights.fused(self.embedding).dtype();
        let scale = match self.spec.embedding_scale {
            EmbeddingScale::Factor(factor) => factor,
            EmbeddingScale::RootOfWidth => f64::from(scale_of_width(self.spec.hidden_size, dtype)),
        };
        (scale / self.spec.residual_multiplier) as f32
    }

    /// The type that each block computes in: its weights' type.
    fn compute_of_blocks(&self, weights: &Parameters) -> impl Iterator<Item = DType> {
        self.blocks.iter().map(|block| block.qkv.dtype(weights))
    }
}

fn window(spec: &ModelSpec, block: usize) -> Option<usize> {
    spec.sliding.as_ref().filter(|_| spec.is_sliding(block)).map(|sliding| sliding.window)
}

const EMBEDDING: ModuleId = ModuleId::global(ModuleOp::Embedding);

const EMBEDDING_SITE: usize = 0;

struct DropoutSites {
    attention: usize,
    attention_out: usize,
    mlp_out: usize,
}

impl DropoutSites {
    fn of(block: usize) -> Self {
        Self { attention: 3 * block + 1, attention_out: 3 * block + 2, mlp_out: 3 * block + 3 }
    }
}
