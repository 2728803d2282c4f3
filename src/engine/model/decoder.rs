//! The decoder with an explicit forward and backward pass: one walk over the layers for every family and every set of
//! kernels.
//!
//! The forward pass leaves in the [`Workspace`] what the backward pass reads. After the first step neither allocates.

mod decode;

pub use decode::KvCache;

use super::hook::{Hook, Part, Place};
use super::layers::{Linear, NormLayer, pack_of};
use super::parameters::Parameters;
use super::spec::{Layer, LinearRole, ModelSpec, NormRole, Op};
use super::workspace::{Keep, StreamGradient, Workspace};
use crate::engine::kernels::attention::Shape;
use crate::engine::kernels::cross_entropy::{HeadGradient, HeadTensor};
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::{Embedding, Kernels, WeightLayout, view};
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
    fn dropout(self, rate: f64, site: usize) -> Option<Dropout> {
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
}

/// The layers of a block.
#[derive(Debug)]
struct Block {
    attention_norm: NormLayer,
    qkv: Linear,
    out: Linear,
    mlp_norm: NormLayer,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(spec: &ModelSpec, layout: &Parameters, block: usize) -> Result<Self> {
        let norm = |role| NormLayer::new(spec, layout, Layer::inner(block, Op::Norm(role)));
        let linear = |role| Linear::new(spec, layout, Layer::inner(block, Op::Linear(role)));
        Ok(Self {
            attention_norm: norm(NormRole::Attention)?,
            qkv: linear(LinearRole::Qkv)?,
            out: linear(LinearRole::Out)?,
            mlp_norm: norm(NormRole::Mlp)?,
            up: linear(if spec.activation.is_gated() { LinearRole::GateUp } else { LinearRole::Up })?,
            down: linear(LinearRole::Down)?,
        })
    }
}

/// A decoder: which layers there are, which parameters are theirs, and what computes them.
#[derive(Clone, Debug)]
pub struct Decoder {
    spec: ModelSpec,
    kernels: Arc<dyn Kernels>,
    embedding: usize,
    positions: Option<usize>,
    blocks: Arc<[Block]>,
    final_norm: NormLayer,
    head: usize,
}

impl Decoder {
    /// The model of `spec` over parameters laid out as `layout`'s, computed with `kernels`.
    pub fn new(spec: &ModelSpec, layout: &Parameters, kernels: Arc<dyn Kernels>) -> Result<Self> {
        let embedding = pack_of(layout, Layer::outer(Op::Embedding), false)?;
        Ok(Self {
            spec: spec.clone(),
            kernels,
            embedding,
            positions: layout.find_pack(Layer::outer(Op::Positions), false),
            blocks: (0..spec.layers).map(|block| Block::new(spec, layout, block)).collect::<Result<_>>()?,
            final_norm: NormLayer::new(spec, layout, Layer::outer(Op::Norm(NormRole::Final)))?,
            head: if spec.tied { embedding } else { pack_of(layout, Layer::outer(Op::Head), false)? },
        })
    }

    /// Its dimensions.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// What computes it.
    pub fn kernels(&self) -> &dyn Kernels {
        &*self.kernels
    }

    fn shape(&self, workspace: &Workspace) -> Shape {
        Shape {
            batch: workspace.batch,
            seq_len: workspace.seq_len,
            heads: self.spec.heads,
            head_size: self.spec.head_dim,
        }
    }

    fn check(&self, tokens: Tokens<'_>, workspace: &Workspace) -> Result<()> {
        let (ids, seq_len) = (tokens.ids.len(), tokens.seq_len);
        if ids != workspace.batch * workspace.seq_len || seq_len != workspace.seq_len {
            bail!("{ids} tokens in rows of {seq_len} for buffers of {} × {}", workspace.batch, workspace.seq_len);
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
            dropout: mode.dropout(self.spec.dropout.embedding, EMBEDDING_SITE),
        }
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
        self.kernels.embed(self.embed(weights, tokens, mode), &ws.stream[0])?;
        hook.part(EMBEDDING, Part::Output, &ws.stream[0])?;
        for (i, block) in self.blocks.iter().enumerate() {
            self.forward_block(i, weights, mode, ws, hook)?;
            let (acts, scratch) = ws.block(i)?;
            block.down.forward(self.kernels(), weights, &acts.activated, &scratch.branch, hook)?;
            let dropout = mode.dropout(self.spec.dropout.residual, Sites::of(i).mlp_out);
            self.kernels.add_branch(&acts.middle, &scratch.branch, dropout, &ws.stream[i + 1])?;
            hook.part(Layer::inner(i, Op::MlpSum), Part::Output, &ws.stream[i + 1])?;
        }
        let last = &ws.stream[self.spec.layers];
        self.final_norm.forward(self.kernels(), weights, last, &ws.final_norm, hook)
    }

    /// A block from its input to what its last product takes: all that its backward pass reads.
    fn forward_block(
        &self,
        i: usize,
        weights: &Parameters,
        mode: Mode,
        ws: &Workspace,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let (kernels, block, site, rates) = (self.kernels(), &self.blocks[i], Sites::of(i), self.spec.dropout);
        let (input, (acts, scratch)) = (&ws.stream[i], ws.block(i)?);
        block.attention_norm.forward(kernels, weights, input, &acts.attention_norm, hook)?;
        block.qkv.forward(kernels, weights, &acts.attention_norm.out, &acts.qkv, hook)?;
        let dropout = mode.dropout(rates.attention, site.attention);
        kernels.attention(self.shape(ws), &acts.qkv, dropout, &acts.attended, &acts.lse)?;
        hook.part(Layer::inner(i, Op::Attention), Part::Output, &acts.attended)?;
        block.out.forward(kernels, weights, &acts.attended, &scratch.branch, hook)?;
        let dropout = mode.dropout(rates.residual, site.attention_out);
        kernels.add_branch(input, &scratch.branch, dropout, &acts.middle)?;
        hook.part(Layer::inner(i, Op::AttentionSum), Part::Output, &acts.middle)?;

        block.mlp_norm.forward(kernels, weights, &acts.middle, &acts.mlp_norm, hook)?;
        block.up.forward(kernels, weights, &acts.mlp_norm.out, &acts.up, hook)?;
        kernels.activate(self.spec.activation, &acts.up, &acts.activated)?;
        hook.part(Layer::inner(i, Op::Activation), Part::Output, &acts.activated)
    }

    /// The summed loss of the targets (FP32 softmax, f64 sum), after [`Self::forward`].
    pub fn loss(&self, weights: &Parameters, targets: &[u32], ws: &Workspace) -> Result<f64> {
        self.kernels.head(ws.hidden(), weights.pack(self.head), targets, &ws.head, None, &mut |_, _, _| Ok(()))
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
        let gradient = HeadGradient { seed, dx, dweight: grads.pack(self.head) };
        let mut record = |tensor, first_token, values: &Tensor| {
            let part = match tensor {
                HeadTensor::Logits => Part::Output,
                HeadTensor::LogitsGradient => Part::OutputGradient,
                HeadTensor::InputGradient => Part::InputGradient,
                HeadTensor::WeightGradient => Part::WeightGradient,
            };
            hook.record(Place { layer: Layer::outer(Op::Head), part, first_token }, values)
        };
        self.kernels.head(ws.hidden(), weights.pack(self.head), targets, &ws.head, Some(gradient), &mut record)
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
        kernels.zero(&stream)?;
        let dy = &ws.scratch(ws.hidden().dtype())?.gradients()?.normed;
        let last = &ws.stream[self.spec.layers];
        self.final_norm.backward(kernels, weights, last, &ws.final_norm, dy, &stream, grads, hook)?;
        for i in (0..self.spec.layers).rev() {
            if ws.keep() == Keep::BlockInput {
                self.forward_block(i, weights, mode, ws, hook)?;
            }
            self.backward_block(i, weights, mode, ws, &stream, grads, hook)?;
        }
        let dtable = grads.pack(self.embedding);
        if !self.spec.tied {
            kernels.zero(dtable)?;
        }
        let dpositions = self.positions.map(|positions| grads.pack(positions));
        kernels.embed_backward(self.embed(weights, tokens, mode), &stream, &mut order, dtable, dpositions)?;
        ws.backward = Some(StreamGradient { stream, order });
        hook.part(EMBEDDING, Part::WeightGradient, dtable)?;
        dpositions.map_or(Ok(()), |grad| hook.part(Layer::outer(Op::Positions), Part::WeightGradient, grad))
    }

    #[expect(clippy::too_many_arguments, reason = "the pass's operands, taken apart")]
    fn backward_block(
        &self,
        i: usize,
        weights: &Parameters,
        mode: Mode,
        ws: &Workspace,
        stream: &Tensor,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let (kernels, block, site, rates) = (self.kernels(), &self.blocks[i], Sites::of(i), self.spec.dropout);
        let (acts, scratch) = ws.block(i)?;
        let (branch, gradients) = (&scratch.branch, scratch.gradients()?);
        let (normed, qkv, activated) = (&gradients.normed, &gradients.qkv, &gradients.activated);
        kernels.branch_gradient(stream, mode.dropout(rates.residual, site.mlp_out), branch)?;
        hook.part(block.down.layer(), Part::OutputGradient, branch)?;
        block.down.backward(kernels, weights, &acts.activated, branch, activated, grads, hook)?;
        let up = gradients.up();
        kernels.activate_backward(self.spec.activation, &acts.up, activated, up)?;
        hook.part(Layer::inner(i, Op::Activation), Part::InputGradient, up)?;
        block.up.backward(kernels, weights, &acts.mlp_norm.out, up, normed, grads, hook)?;
        block.mlp_norm.backward(kernels, weights, &acts.middle, &acts.mlp_norm, normed, stream, grads, hook)?;

        kernels.branch_gradient(stream, mode.dropout(rates.residual, site.attention_out), branch)?;
        hook.part(block.out.layer(), Part::OutputGradient, branch)?;
        let attended = gradients.attended();
        block.out.backward(kernels, weights, &acts.attended, branch, attended, grads, hook)?;
        let dropout = mode.dropout(rates.attention, site.attention);
        kernels.attention_backward(self.shape(ws), attended, &acts.qkv, &acts.attended, &acts.lse, dropout, qkv)?;
        hook.part(Layer::inner(i, Op::Attention), Part::InputGradient, qkv)?;
        block.qkv.backward(kernels, weights, &acts.attention_norm.out, qkv, normed, grads, hook)?;
        let input = &ws.stream[i];
        block.attention_norm.backward(kernels, weights, input, &acts.attention_norm, normed, stream, grads, hook)
    }

    /// The logits `[rows, V]` (compute type) of `hidden [rows, D]`, a part of [`Workspace::hidden`].
    pub fn logits(&self, weights: &Parameters, hidden: &Tensor) -> Result<Tensor> {
        let weight = weights.pack(self.head);
        let logits = view::zeros(&[hidden.dim(0)?, weight.dim(0)?], hidden.dtype(), hidden.device())?;
        self.kernels.linear(WeightLayout::OutIn, hidden, weight, None, &logits)?;
        Ok(logits)
    }

    /// What each block computes in: its weights' type.
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
