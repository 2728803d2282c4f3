//! The decoder with an explicit forward and backward pass: one walk over the layers for every family and every set of
//! kernels.
//!
//! The forward pass stores in the [`Workspace`] all tensors that the backward pass reads. After the first step neither
//! allocates.

mod decode;

pub use decode::KvCache;

use super::adapter::AdapterPass;
use super::hook::{Hook, Part, Place};
use super::layers::{Context, Linear, NormLayer, pack_of};
use super::parameters::{Parameters, Slot};
use super::spec::{Layer, LinearRole, ModelSpec, NormRole, Op, ParamRole};
use super::workspace::{BranchNorm, HeadNorms, Keep, Rotations, StreamGradient, Workspace};
use crate::engine::kernels::attention::{Operands, Shape};
use crate::engine::kernels::columns::{Columns, WriteMode};
use crate::engine::kernels::cross_entropy::{self, HeadGradient, HeadTensor};
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::embedding::scale_of_width;
use crate::engine::kernels::op::{self, Embedding};
use crate::engine::kernels::rope::{Direction, Positions};
use crate::engine::kernels::{HeadHook, Kernels, WeightLayout, view};
use candle_core::{DType, Result, Tensor, bail};
use std::sync::Arc;

/// Whether dropout is on, and which masks it draws.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    /// No dropout.
    Eval,
    /// Dropout at the spec's rates; `draw` numbers the micro-batch over the whole run.
    Train {
        /// The run's seed.
        seed: u64,
        /// Each micro-batch draws its own masks.
        draw: u64,
    },
}

impl Mode {
    pub(super) fn dropout(self, rate: f64, site: usize) -> Option<Dropout> {
        match self {
            Self::Eval => None,
            Self::Train { seed, draw } => Dropout::new(rate as f32, seed, site as u32, draw),
        }
    }
}

/// Token ids with their shape.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// `batch * seq_len` ids, sequence after sequence.
    pub ids: &'a [u32],
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// For each token, the place in its sequence that its document starts at: attention stays within a document, and
    /// positions restart in each. `None` if each sequence is one document.
    pub documents: Option<&'a [u32]>,
}

impl<'a> Tokens<'a> {
    /// Sequences of `seq_len` tokens, each of them one document.
    pub fn new(ids: &'a [u32], seq_len: usize) -> Self {
        Self { ids, seq_len, documents: None }
    }
}

/// The layers of a block.
#[derive(Debug)]
struct Block {
    attention_norm: NormLayer,
    qkv: Linear,
    /// The norms of queries and of keys.
    head_norms: Option<[NormLayer; 2]>,
    out: Linear,
    mlp_norm: NormLayer,
    up: Linear,
    down: Linear,
    /// The norms after attention and after the MLP.
    branch_norms: Option<[NormLayer; 2]>,
}

impl Block {
    fn new(spec: &ModelSpec, layout: &Parameters, block: usize) -> Result<Self> {
        let norm = |role| NormLayer::new(spec, layout, Layer::inner(block, Op::Norm(role)));
        let linear = |role| Linear::new(spec, layout, Layer::inner(block, Op::Linear(role)));
        let pair = |there: bool, roles: [NormRole; 2]| -> Result<Option<[NormLayer; 2]>> {
            if there { Ok(Some([norm(roles[0])?, norm(roles[1])?])) } else { Ok(None) }
        };
        Ok(Self {
            attention_norm: norm(NormRole::Attention)?,
            qkv: linear(LinearRole::Qkv)?,
            head_norms: pair(spec.qk_norm, [NormRole::Query, NormRole::Key])?,
            branch_norms: pair(spec.branch_norms, [NormRole::AttentionBranch, NormRole::MlpBranch])?,
            out: linear(LinearRole::Out)?,
            mlp_norm: norm(NormRole::Mlp)?,
            up: linear(if spec.activation.is_gated() { LinearRole::GateUp } else { LinearRole::Up })?,
            down: linear(LinearRole::Down)?,
        })
    }

    /// Runs the last linear layer of a branch, and the norm after it, if there is one.
    fn close_branch(
        &self,
        cx: &mut Context<'_>,
        (linear, x): (&Linear, &Tensor),
        (norm, kept): (usize, Option<&BranchNorm>),
        branch: &Tensor,
        adapters: AdapterPass<'_>,
    ) -> Result<()> {
        let (Some(norms), Some(kept)) = (&self.branch_norms, kept) else {
            return linear.forward(cx, x, branch, adapters);
        };
        linear.forward(cx, x, &kept.input, adapters)?;
        norms[norm].forward(cx, &kept.input, &kept.into(branch))
    }

    /// Backpropagates `branch`, the gradient of the branch output, through the norm after it, if there is one.
    fn open_branch<'a>(
        &self,
        cx: &mut Context<'_>,
        (norm, kept): (usize, Option<&BranchNorm>),
        (branch, other): (&'a Tensor, Option<&'a Tensor>),
    ) -> Result<&'a Tensor> {
        let (Some(norms), Some(kept), Some(other)) = (&self.branch_norms, kept, other) else {
            return Ok(branch);
        };
        norms[norm].backward(cx, &kept.input, &kept.into(branch), branch, (other, WriteMode::Overwrite))?;
        Ok(other)
    }
}

/// A decoder: its layers, the slots of their parameters, and the kernels.
#[derive(Clone, Debug)]
pub struct Decoder {
    spec: ModelSpec,
    kernels: Arc<dyn Kernels>,
    embedding: Slot,
    positions: Option<Slot>,
    blocks: Arc<[Block]>,
    final_norm: NormLayer,
    head: Slot,
}

impl Decoder {
    /// The model of `spec` over parameters laid out as `layout`'s, computed with `kernels`.
    pub fn new(spec: &ModelSpec, layout: &Parameters, kernels: Arc<dyn Kernels>) -> Result<Self> {
        let embedding = pack_of(layout, Layer::outer(Op::Embedding), ParamRole::Weight)?;
        Ok(Self {
            spec: spec.clone(),
            kernels,
            embedding,
            positions: layout.find_pack(Layer::outer(Op::Positions), ParamRole::Weight),
            blocks: (0..spec.layers).map(|block| Block::new(spec, layout, block)).collect::<Result<_>>()?,
            final_norm: NormLayer::new(spec, layout, Layer::outer(Op::Norm(NormRole::Final)))?,
            head: if spec.tied { embedding } else { pack_of(layout, Layer::outer(Op::Head), ParamRole::Weight)? },
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

    /// The attention of block `block` over `batch` sequences.
    fn shape(&self, block: usize, batch: usize, seq_len: usize) -> Shape {
        let ModelSpec { heads, kv_heads, head_dim, attention_scale, sliding, .. } = &self.spec;
        let shape = Shape::new(batch, seq_len, *heads, *head_dim);
        let window = sliding.as_ref().filter(|_| self.spec.is_sliding(block)).map(|sliding| sliding.window);
        let scale = attention_scale.map_or(shape.scale, |scale| scale as f32);
        Shape { kv_heads: *kv_heads, scale, window, ..shape }
    }

    /// Prepares queries and keys of the product `qkv` for attention: normalises and rotates them. Returns their
    /// columns, and the values.
    fn prepare_heads<'a>(
        &self,
        cx: &mut Context<'_>,
        i: usize,
        (qkv, heads): (&'a Tensor, Option<&'a HeadNorms>),
        (rotations, positions): (&Rotations, Positions<'_>),
    ) -> Result<[Columns<'a>; 3]> {
        let [query, key, value] = self.columns(qkv, heads)?;
        if let (Some(norms), Some(heads)) = (&self.blocks[i].head_norms, heads) {
            let inputs = Columns::split(qkv, self.spec.qkv_widths())?;
            for (((norm, x), y), rstd) in norms.iter().zip(inputs).zip([query, key]).zip(&heads.rstd) {
                norm.forward_heads(cx, x, (y, rstd))?;
            }
        }
        if let Some(table) = rotations.of(&self.spec, i) {
            for x in [query, key] {
                op::Rotate { x, table, positions, direction: Direction::Forward }.run(cx.kernels)?;
            }
        }
        Ok([query, key, value])
    }

    /// The operands of attention: queries and keys, normalised if they have norms, and values.
    fn columns<'a>(&self, qkv: &'a Tensor, heads: Option<&'a HeadNorms>) -> Result<[Columns<'a>; 3]> {
        let widths = self.spec.qkv_widths();
        let [query, key, value] = Columns::split(qkv, widths)?;
        let Some(heads) = heads else { return Ok([query, key, value]) };
        let [query, key] = Columns::split(&heads.out, [widths[0], widths[1]])?;
        Ok([query, key, value])
    }

    fn check(&self, tokens: Tokens<'_>, workspace: &Workspace) -> Result<()> {
        let (ids, seq_len) = (tokens.ids.len(), tokens.seq_len);
        if ids != workspace.batch * workspace.seq_len || seq_len != workspace.seq_len {
            bail!("{ids} tokens in rows of {seq_len} for buffers of {} × {}", workspace.batch, workspace.seq_len);
        }
        if tokens.documents.is_some_and(|documents| documents.len() != ids) {
            bail!("{ids} tokens got another number of documents' starts");
        }
        if seq_len > self.spec.context {
            bail!("sequences of {seq_len} tokens exceed the model's context of {}", self.spec.context);
        }
        Ok(())
    }

    fn embed<'a>(&self, weights: &'a Parameters, tokens: Tokens<'a>, mode: Mode) -> Embedding<'a> {
        Embedding {
            table: weights.pack(self.embedding),
            positions: self.positions.map(|positions| weights.pack(positions)),
            ids: tokens.ids,
            seq_len: tokens.seq_len,
            documents: tokens.documents,
            scale: self.embedding_scale(weights),
            dropout: mode.dropout(self.spec.dropout.embedding, EMBEDDING_SITE),
        }
    }

    /// Embeds tokens. A table in blocks dequantises only their rows.
    fn embed_into(&self, weights: &Parameters, embedding: Embedding<'_>, out: &Tensor) -> Result<()> {
        let Some(rows) = weights.gathered(self.embedding, embedding.ids)? else {
            return op::Embed { input: embedding, out }.run(self.kernels());
        };
        op::Embed { input: Embedding { table: &rows, ids: rows.places(), ..embedding }, out }.run(self.kernels())
    }

    /// From tokens to the head's input, [`Workspace::hidden`].
    pub fn forward(
        &self,
        weights: &Parameters,
        tokens: Tokens<'_>,
        mode: Mode,
        ws: &mut Workspace,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        self.check(tokens, ws)?;
        ws.documents.clear();
        ws.documents.extend_from_slice(tokens.documents.unwrap_or_default());
        self.embed_into(weights, self.embed(weights, tokens, mode), &ws.stream[0])?;
        hook.part(EMBEDDING, Part::Output, &ws.stream[0])?;
        let cx = &mut Context { kernels: self.kernels(), weights, grads: None, mode, hook };
        for (i, block) in self.blocks.iter().enumerate() {
            self.forward_block(cx, i, ws)?;
            let (acts, scratch) = ws.block(i)?;
            if acts.mlp_branch.is_none() {
                block.down.forward(cx, &scratch.activated, &scratch.branch, acts.adapters(scratch))?;
            }
            let dropout = mode.dropout(self.spec.dropout.residual, Sites::of(i).mlp_out);
            op::AddBranch { stream: &acts.middle, branch: &scratch.branch, dropout, out: &ws.stream[i + 1] }
                .run(cx.kernels)?;
            cx.hook.part(Layer::inner(i, Op::MlpSum), Part::Output, &ws.stream[i + 1])?;
        }
        let last = &ws.stream[self.spec.layers];
        self.final_norm.forward(cx, last, &ws.final_norm)
    }

    /// Computes a block from its input to the input of its last product, or of the norm after that: all that its
    /// backward pass reads.
    fn forward_block(&self, cx: &mut Context<'_>, i: usize, ws: &Workspace) -> Result<()> {
        let (kernels, mode, block) = (cx.kernels, cx.mode, &self.blocks[i]);
        let (site, rates) = (Sites::of(i), self.spec.dropout);
        let (input, (acts, scratch)) = (&ws.stream[i], ws.block(i)?);
        let adapters = acts.adapters(scratch);
        block.attention_norm.forward(cx, input, &acts.attention_norm)?;
        block.qkv.forward(cx, &acts.attention_norm.out, &acts.qkv, adapters)?;
        let places = (&ws.rotations, ws.positions());
        let qkv = self.prepare_heads(cx, i, (&acts.qkv, acts.heads.as_ref()), places)?;
        let operands =
            Operands { qkv, documents: ws.documents(), dropout: mode.dropout(rates.attention, site.attention) };
        op::Attention { shape: self.shape(i, ws.batch, ws.seq_len), operands, out: &acts.attended, lse: &acts.lse }
            .run(kernels)?;
        cx.hook.part(Layer::inner(i, Op::Attention), Part::Output, &acts.attended)?;
        let kept = acts.attention_branch.as_ref();
        block.close_branch(cx, (&block.out, &acts.attended), (0, kept), &scratch.branch, adapters)?;
        let dropout = mode.dropout(rates.residual, site.attention_out);
        op::AddBranch { stream: input, branch: &scratch.branch, dropout, out: &acts.middle }.run(kernels)?;
        cx.hook.part(Layer::inner(i, Op::AttentionSum), Part::Output, &acts.middle)?;

        block.mlp_norm.forward(cx, &acts.middle, &acts.mlp_norm)?;
        block.up.forward(cx, &acts.mlp_norm.out, &acts.up, adapters)?;
        op::Activate { activation: self.spec.activation, x: &acts.up, y: &scratch.activated }.run(kernels)?;
        cx.hook.part(Layer::inner(i, Op::Activation), Part::Output, &scratch.activated)?;
        if let Some(kept) = &acts.mlp_branch {
            let (down, branch) = ((&block.down, &scratch.activated), &scratch.branch);
            block.close_branch(cx, down, (1, Some(kept)), branch, adapters)?;
        }
        Ok(())
    }

    /// The factor of the tokens' embeddings.
    fn embedding_scale(&self, weights: &Parameters) -> f32 {
        let dtype = weights.pack(self.embedding).dtype();
        if self.spec.scaled_embedding { scale_of_width(self.spec.width, dtype) } else { 1.0 }
    }

    /// The summed loss of the targets (FP32 softmax, f64 sum), after [`Self::forward`].
    pub fn loss(&self, weights: &Parameters, targets: &[u32], ws: &Workspace) -> Result<f64> {
        let weight = weights.operand(self.head)?;
        cross_entropy::head(self.kernels(), ws.hidden(), &weight, targets, &ws.head, None, None)
    }

    /// The summed loss, and the head's own backward pass with it: dL/dloss = `seed` for each target.
    pub fn loss_and_head_gradient(
        &self,
        weights: &Parameters,
        targets: &[u32],
        seed: f32,
        ws: &Workspace,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<f64> {
        let dx = &ws.scratch(ws.hidden().dtype())?.gradients()?.normed;
        let gradient = HeadGradient { seed, dx, dweight: grads.own(self.head) };
        let watches = hook.watches();
        let mut record = |tensor, first_token, values: &Tensor| {
            let part = match tensor {
                HeadTensor::Logits => Part::Output,
                HeadTensor::LogitsGradient => Part::OutputGradient,
                HeadTensor::InputGradient => Part::InputGradient,
                HeadTensor::WeightGradient => Part::WeightGradient,
            };
            hook.record(Place { layer: Layer::outer(Op::Head), part, first_token }, values)
        };
        let weight = weights.operand(self.head)?;
        let hook: HeadHook<'_> = if watches { Some(&mut record) } else { None };
        cross_entropy::head(self.kernels(), ws.hidden(), &weight, targets, &ws.head, Some(gradient), hook)
    }

    /// From the head's input back to the embeddings, after [`Self::loss_and_head_gradient`]; writes every gradient.
    pub fn backward(
        &self,
        weights: &Parameters,
        tokens: Tokens<'_>,
        mode: Mode,
        ws: &mut Workspace,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        self.check(tokens, ws)?;
        let kernels = self.kernels();
        let Some(StreamGradient { stream, mut order }) = ws.backward.take() else {
            bail!("this workspace has no buffers for a backward pass")
        };
        order.resize(tokens.ids.len(), 0);
        op::Zero { x: &stream }.run(kernels)?;
        let scratch = ws.scratch(ws.hidden().dtype())?;
        let dy = &scratch.gradients()?.normed;
        let last = &ws.stream[self.spec.layers];
        let cx = &mut Context { kernels, weights, grads: Some(grads), mode, hook };
        self.final_norm.backward(cx, last, &ws.final_norm, dy, (&stream, WriteMode::Accumulate))?;
        for i in (0..self.spec.layers).rev() {
            if ws.keep() == Keep::BlockInput {
                self.forward_block(cx, i, ws)?;
                let (acts, scratch) = ws.block(i)?;
                if acts.mlp_branch.is_none() {
                    self.blocks[i].down.forward_again(cx, &scratch.activated, acts.adapters(scratch))?;
                }
            }
            self.backward_block(cx, i, ws, &stream)?;
        }
        let dpositions = self.positions.and_then(|positions| grads.own(positions));
        if let Some(dtable) = grads.own(self.embedding) {
            if !self.spec.tied {
                op::Zero { x: dtable }.run(kernels)?;
            }
            op::EmbedBackward {
                input: self.embed(weights, tokens, mode),
                dx: &stream,
                order: &mut order,
                dtable,
                dpositions,
            }
            .run(kernels)?;
            cx.hook.part(EMBEDDING, Part::WeightGradient, dtable)?;
        }
        ws.backward = Some(StreamGradient { stream, order });
        dpositions.map_or(Ok(()), |grad| cx.hook.part(Layer::outer(Op::Positions), Part::WeightGradient, grad))
    }

    fn backward_block(&self, cx: &mut Context<'_>, i: usize, ws: &Workspace, stream: &Tensor) -> Result<()> {
        let (kernels, mode, block) = (cx.kernels, cx.mode, &self.blocks[i]);
        let (site, rates) = (Sites::of(i), self.spec.dropout);
        let (acts, scratch) = ws.block(i)?;
        let (branch, gradients) = (&scratch.branch, scratch.gradients()?);
        let adapters = acts.adapters(scratch);
        let (normed, qkv, activated) = (&gradients.normed, &gradients.qkv, &gradients.activated);
        op::Copy { x: stream, dropout: mode.dropout(rates.residual, site.mlp_out), out: branch }.run(kernels)?;
        let other = gradients.branch.as_ref();
        let dy = block.open_branch(cx, (1, acts.mlp_branch.as_ref()), (branch, other))?;
        cx.hook.part(block.down.layer(), Part::OutputGradient, dy)?;
        let lengths = block.down.backward_input(cx, dy, activated, adapters)?;
        let (up, input) = (gradients.up(), &scratch.activated);
        op::ActivateBackward { activation: self.spec.activation, x: &acts.up, dy: activated, dx: up, y: input }
            .run(kernels)?;
        let activation = Layer::inner(i, Op::Activation);
        cx.hook.part(activation, Part::Output, input)?;
        cx.hook.part(activation, Part::InputGradient, up)?;
        block.down.backward_weight(cx, input, dy, lengths.as_ref(), adapters)?;
        block.up.backward(cx, &acts.mlp_norm.out, up, normed, adapters)?;
        let dx = (stream, WriteMode::Accumulate);
        block.mlp_norm.backward(cx, &acts.middle, &acts.mlp_norm, normed, dx)?;

        op::Copy { x: stream, dropout: mode.dropout(rates.residual, site.attention_out), out: branch }.run(kernels)?;
        let attended = gradients.attended();
        let dy = block.open_branch(cx, (0, acts.attention_branch.as_ref()), (branch, other))?;
        cx.hook.part(block.out.layer(), Part::OutputGradient, dy)?;
        block.out.backward(cx, &acts.attended, dy, attended, adapters)?;
        self.attention_backward(cx, i, ws, attended, qkv)?;
        cx.hook.part(Layer::inner(i, Op::Attention), Part::InputGradient, qkv)?;
        block.qkv.backward(cx, &acts.attention_norm.out, qkv, normed, adapters)?;
        block.attention_norm.backward(cx, &ws.stream[i], &acts.attention_norm, normed, dx)
    }

    /// Computes the gradient of the product `qkv` from the gradient of attention's output.
    fn attention_backward(
        &self,
        cx: &mut Context<'_>,
        i: usize,
        ws: &Workspace,
        attended: &Tensor,
        dqkv: &Tensor,
    ) -> Result<()> {
        let (kernels, (acts, scratch)) = (cx.kernels, ws.block(i)?);
        let widths = self.spec.qkv_widths();
        let dropout = cx.mode.dropout(self.spec.dropout.attention, Sites::of(i).attention);
        let qkv = self.columns(&acts.qkv, acts.heads.as_ref())?;
        let operands = Operands { qkv, documents: ws.documents(), dropout };
        let linear = Columns::split(dqkv, widths)?;
        // Gradients of normalised queries and keys have a separate buffer: the norm's backward pass reads it and writes
        // next to the values' gradient.
        let [dq, dk] = match &scratch.gradients()?.query_key {
            Some(query_key) => Columns::split(query_key, [widths[0], widths[1]])?,
            None => [linear[0], linear[1]],
        };
        let shape = self.shape(i, ws.batch, ws.seq_len);
        op::AttentionBackward {
            shape,
            operands,
            dout: attended,
            out: &acts.attended,
            lse: &acts.lse,
            gradients: [dq, dk, linear[2]],
        }
        .run(kernels)?;
        if let Some(table) = ws.rotations.of(&self.spec, i) {
            for x in [dq, dk] {
                op::Rotate { x, table, positions: ws.positions(), direction: Direction::Backward }.run(kernels)?;
            }
        }
        if let (Some(norms), Some(heads)) = (&self.blocks[i].head_norms, &acts.heads) {
            let inputs = Columns::split(&acts.qkv, widths)?;
            for part in 0..2 {
                let (x, rstd, dy) = (inputs[part], &heads.rstd[part], [dq, dk][part]);
                norms[part].backward_heads(cx, x, rstd, dy, linear[part])?;
            }
        }
        Ok(())
    }

    /// The logits `[rows, V]` (compute type) of `hidden [rows, D]`, a part of [`Workspace::hidden`].
    pub fn logits(&self, weights: &Parameters, hidden: &Tensor) -> Result<Tensor> {
        let weight = weights.operand(self.head)?;
        let logits = view::zeros(&[hidden.dim(0)?, weight.dim(0)?], hidden.dtype(), hidden.device())?;
        op::Linear { layout: WeightLayout::OutIn, x: hidden, weight: &weight, bias: None, y: &logits, low_rank: None }
            .run(self.kernels())?;
        Ok(logits)
    }

    /// The type that each block computes in: its weights' type.
    fn compute_of_blocks(&self, weights: &Parameters) -> impl Iterator<Item = DType> {
        self.blocks.iter().map(|block| block.qkv.dtype(weights))
    }
}

const EMBEDDING: Layer = Layer::outer(Op::Embedding);

const EMBEDDING_SITE: usize = 0;

/// The places of a block where dropout draws.
struct Sites {
    attention: usize,
    attention_out: usize,
    mlp_out: usize,
}

impl Sites {
    fn of(block: usize) -> Self {
        Self { attention: 3 * block + 1, attention_out: 3 * block + 2, mlp_out: 3 * block + 3 }
    }
}
