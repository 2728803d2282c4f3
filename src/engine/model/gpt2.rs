//! GPT-2 (Radford et al., 2019) with an explicit forward and backward pass.
//!
//! The forward pass leaves in the [`Workspace`] what the backward pass reads. Both walk the same short list of layers;
//! after the first step neither allocates.

mod decode;

pub use decode::KvCache;

use crate::engine::kernels::attention::{self, Shape};
use crate::engine::kernels::cross_entropy::{HeadGradient, HeadTensor, HeadWorkspace, TileLimit, head};
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::view::Allocate;
use crate::engine::kernels::{embedding, gelu, residual, view};
use crate::engine::model::config::Gpt2Config;
use crate::engine::model::layers::{LayerNorm, Linear, Normed, position};
use crate::engine::model::parameters::Parameters;
use crate::engine::model::watch::{Layer, Part, Place, Watch};
use crate::precision::{Dtype, PrecisionPolicy, Unit};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::cell::Cell;

/// Whether dropout is on, and which masks it draws.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    /// No dropout.
    Eval,
    /// Dropout at the configuration's rates; `draw` numbers the micro-batch over the whole run.
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

#[derive(Debug)]
struct Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    attn_c_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    mlp_c_proj: Linear,
}

/// The architecture: which layers there are and which parameters are theirs.
#[derive(Debug)]
pub struct Gpt2 {
    config: Gpt2Config,
    wte: usize,
    wpe: usize,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    lm_head: usize,
}

/// What one block's forward pass keeps.
#[derive(Debug)]
struct Activations<T = Tensor> {
    /// The residual stream as the block receives it.
    input: T,
    ln_1: Normed<T>,
    qkv: T,
    attended: T,
    lse: T,
    /// The residual stream between attention and MLP.
    middle: T,
    ln_2: Normed<T>,
    fc: T,
    gelu: T,
}

/// All buffers of a forward and backward pass for one (batch, sequence) shape.
///
/// Each block, and the head with what is around the blocks, has a compute type of its own, usually the policy's.
#[derive(Debug)]
pub struct Workspace<T = Tensor> {
    policy: PrecisionPolicy,
    batch: usize,
    seq_len: usize,
    blocks: Vec<Activations<T>>,
    /// The residual stream after the last block.
    output: T,
    ln_f: Normed<T>,
    head: HeadWorkspace<T>,
    backward: Option<StreamGradient<T>>,
    /// What passes through layers of the policy's compute type.
    passing: Passing<T>,
    /// The same for each other type in use.
    others: Vec<Passing<T>>,
}

#[derive(Debug)]
struct StreamGradient<T = Tensor> {
    /// Gradient of the residual stream.
    stream: T,
    /// The first backward pass gives it its length.
    order: Vec<u32>,
}

/// What the layers of one compute type write in turn.
#[derive(Debug)]
struct Passing<T = Tensor> {
    compute: DType,
    /// A branch's output before it joins the stream; in the backward pass, its gradient.
    branch: T,
    backward: Option<BranchGradients<T>>,
}

#[derive(Debug)]
struct BranchGradients<T = Tensor> {
    /// Gradient of a layer norm's or the attention's output.
    narrow: T,
    qkv: T,
    wide: T,
}

/// What the buffers of a [`Workspace`] take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceBytes {
    /// What the forward pass keeps for the backward pass.
    pub activations: u64,
    /// What passes through: a tile of logits, gradients of activations.
    pub passing: u64,
}

/// candle's name of a type.
pub fn candle_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
    }
}

impl<T> Activations<T> {
    fn lay_out(
        config: &Gpt2Config,
        tokens: usize,
        compute: DType,
        stream: DType,
        allocate: Allocate<'_, T>,
    ) -> Result<Self> {
        let width = config.n_embd;
        let rows = |columns: usize, dtype| allocate(&[tokens, columns], dtype);
        let norm = || Normed::lay_out(tokens, width, compute, allocate);
        Ok(Self {
            input: rows(width, stream)?,
            ln_1: norm()?,
            qkv: rows(3 * width, compute)?,
            attended: rows(width, compute)?,
            lse: allocate(&[tokens * config.n_head], DType::F32)?,
            middle: rows(width, stream)?,
            ln_2: norm()?,
            fc: rows(config.n_inner, compute)?,
            gelu: rows(config.n_inner, compute)?,
        })
    }
}

impl Activations {
    fn compute(&self) -> DType {
        self.qkv.dtype()
    }
}

impl Passing {
    /// Whichever of these layers that compute in `compute` use.
    fn of<'a>(policy: &'a Self, others: &'a [Self], compute: DType) -> Result<&'a Self> {
        match [policy].into_iter().chain(others).find(|passing| passing.compute == compute) {
            Some(passing) => Ok(passing),
            None => bail!("this workspace has no buffers for layers that compute in {compute:?}"),
        }
    }
}

impl<T> Passing<T> {
    fn gradients(&self) -> Result<&BranchGradients<T>> {
        match &self.backward {
            Some(gradients) => Ok(gradients),
            None => bail!("this workspace has no buffers for a backward pass"),
        }
    }
}

impl<T> Passing<T> {
    fn lay_out(
        config: &Gpt2Config,
        tokens: usize,
        compute: DType,
        train: bool,
        allocate: Allocate<'_, T>,
    ) -> Result<Self> {
        let rows = |columns: usize| allocate(&[tokens, columns], compute);
        let backward = || -> Result<BranchGradients<T>> {
            Ok(BranchGradients {
                narrow: rows(config.n_embd)?,
                qkv: rows(3 * config.n_embd)?,
                wide: rows(config.n_inner)?,
            })
        };
        Ok(Self { compute, branch: rows(config.n_embd)?, backward: train.then(backward).transpose()? })
    }
}

impl<T> Workspace<T> {
    /// The one list of buffers, for training (with `train`) or evaluation: those that are `kept` for the backward pass,
    /// and those that something `passing` lies in.
    fn lay_out(
        config: &Gpt2Config,
        policy: PrecisionPolicy,
        (batch, seq_len): (usize, usize),
        train: bool,
        limit: TileLimit,
        kept: Allocate<'_, T>,
        passing: Allocate<'_, T>,
    ) -> Result<Self> {
        let (tokens, width) = (batch * seq_len, config.n_embd);
        let (compute, stream) = (candle_dtype(policy.compute), candle_dtype(policy.residual));
        let block = |_| Activations::lay_out(config, tokens, compute, stream, kept);
        let backward = || -> Result<StreamGradient<T>> {
            Ok(StreamGradient { stream: passing(&[tokens, width], stream)?, order: Vec::new() })
        };
        let grads = train.then(|| candle_dtype(policy.grads));
        Ok(Self {
            policy,
            batch,
            seq_len,
            blocks: (0..config.n_layer).map(block).collect::<Result<_>>()?,
            output: kept(&[tokens, width], stream)?,
            ln_f: Normed::lay_out(tokens, width, compute, kept)?,
            head: HeadWorkspace::lay_out(tokens, config.vocab_size, width, compute, grads, limit, passing)?,
            backward: train.then(backward).transpose()?,
            passing: Passing::lay_out(config, tokens, compute, train, passing)?,
            others: Vec::new(),
        })
    }
}

impl Workspace<()> {
    /// What a workspace for training would take, without making one.
    pub fn bytes(
        config: &Gpt2Config,
        policy: PrecisionPolicy,
        [batch, seq_len]: [usize; 2],
        limit: TileLimit,
    ) -> Result<WorkspaceBytes> {
        let (activations, passing) = (Cell::new(0), Cell::new(0));
        let count = |sum: &Cell<u64>, shape: &[usize], dtype| {
            sum.set(sum.get() + view::bytes(shape, dtype));
            Ok(())
        };
        let kept = |shape: &[usize], dtype| count(&activations, shape, dtype);
        let passing_by = |shape: &[usize], dtype| count(&passing, shape, dtype);
        Self::lay_out(config, policy, (batch, seq_len), true, limit, &kept, &passing_by)?;
        Ok(WorkspaceBytes { activations: activations.get(), passing: passing.get() })
    }
}

impl Workspace {
    /// Buffers for training (with `train`) or evaluation of `batch` sequences of `seq_len` tokens.
    pub fn new(
        config: &Gpt2Config,
        policy: PrecisionPolicy,
        batch: usize,
        seq_len: usize,
        train: bool,
        device: &Device,
    ) -> Result<Self> {
        let zeros = |shape: &[usize], dtype| view::zeros(shape, dtype, device);
        Self::lay_out(config, policy, (batch, seq_len), train, TileLimit::Cpu, &zeros, &zeros)
    }

    /// Gives `unit` buffers of another compute type; those of others stay as they are.
    pub fn retype(&mut self, config: &Gpt2Config, unit: Unit, compute: Dtype) -> Result<()> {
        let device = self.output.device().clone();
        let zeros = |shape: &[usize], dtype| view::zeros(shape, dtype, &device);
        let (tokens, train, policy) = (self.batch * self.seq_len, self.backward.is_some(), self.policy);
        let (dtype, stream) = (candle_dtype(compute), self.output.dtype());
        match unit {
            Unit::Block(block) if block < self.blocks.len() => {
                self.blocks[block] = Activations::lay_out(config, tokens, dtype, stream, &zeros)?;
            }
            Unit::Block(block) => bail!("there is no block {block} among {}", self.blocks.len()),
            Unit::Head => {
                let grads = train.then(|| candle_dtype(policy.with_compute(compute).grads));
                let (vocab, width) = (config.vocab_size, config.n_embd);
                self.ln_f = Normed::lay_out(tokens, width, dtype, &zeros)?;
                self.head = HeadWorkspace::lay_out(tokens, vocab, width, dtype, grads, TileLimit::Cpu, &zeros)?;
            }
        }
        let used: Vec<DType> = self.blocks.iter().map(Activations::compute).chain([self.ln_f.out.dtype()]).collect();
        self.others.retain(|passing| used.contains(&passing.compute));
        if Passing::of(&self.passing, &self.others, dtype).is_err() {
            self.others.push(Passing::lay_out(config, tokens, dtype, train, &zeros)?);
        }
        Ok(())
    }

    /// Sequences in a batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens in a sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The final layer norm's output `[B·T, D]`, the head's input.
    pub fn hidden(&self) -> &Tensor {
        &self.ln_f.out
    }
}

impl Gpt2 {
    /// The model of `config` over parameters laid out as `layout`'s.
    pub fn new(config: &Gpt2Config, layout: &Parameters) -> Result<Self> {
        let block = |i: usize| -> Result<Block> {
            let norm = |name| LayerNorm::new(layout, Layer::inner(i, name), config.layer_norm_epsilon);
            let linear = |name| Linear::new(layout, Layer::inner(i, name));
            Ok(Block {
                ln_1: norm("ln_1")?,
                c_attn: linear("attn.c_attn")?,
                attn_c_proj: linear("attn.c_proj")?,
                ln_2: norm("ln_2")?,
                c_fc: linear("mlp.c_fc")?,
                mlp_c_proj: linear("mlp.c_proj")?,
            })
        };
        let wte = position(layout, "wte.weight")?;
        Ok(Self {
            config: config.clone(),
            wte,
            wpe: position(layout, "wpe.weight")?,
            blocks: (0..config.n_layer).map(block).collect::<Result<_>>()?,
            ln_f: LayerNorm::new(layout, Layer::outer("ln_f"), config.layer_norm_epsilon)?,
            lm_head: if config.tie_word_embeddings { wte } else { position(layout, "lm_head.weight")? },
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    fn shape(&self, workspace: &Workspace) -> Shape {
        Shape {
            batch: workspace.batch,
            seq_len: workspace.seq_len,
            heads: self.config.n_head,
            head_size: self.config.n_embd / self.config.n_head,
        }
    }

    fn check(&self, tokens: Tokens<'_>, workspace: &Workspace) -> Result<()> {
        let (ids, seq_len) = (tokens.ids.len(), tokens.seq_len);
        if ids != workspace.batch * workspace.seq_len || seq_len != workspace.seq_len {
            bail!("{ids} tokens in rows of {seq_len} for buffers of {} × {}", workspace.batch, workspace.seq_len);
        }
        if seq_len > self.config.n_positions {
            bail!("sequences of {seq_len} tokens exceed the model's context of {}", self.config.n_positions);
        }
        Ok(())
    }

    /// From tokens to the head's input, [`Workspace::hidden`].
    pub fn forward(&self, weights: &Parameters, tokens: Tokens<'_>, mode: Mode, ws: &mut Workspace) -> Result<()> {
        self.forward_watched(weights, tokens, mode, ws, &mut ())
    }

    /// [`Self::forward`] before the eyes of `watch`.
    pub fn forward_watched(
        &self,
        weights: &Parameters,
        tokens: Tokens<'_>,
        mode: Mode,
        ws: &mut Workspace,
        watch: &mut impl Watch,
    ) -> Result<()> {
        self.check(tokens, ws)?;
        let shape = self.shape(ws);
        let config = &self.config;
        let first = ws.blocks.first().map_or(&ws.output, |block| &block.input);
        let dropout = mode.dropout(config.embd_pdrop, EMBEDDING_SITE);
        embedding::forward(&weights[self.wte], &weights[self.wpe], tokens.ids, tokens.seq_len, dropout, first)?;
        watch.saw_part(EMBEDDING, Part::Output, first)?;
        for (i, (block, acts)) in self.blocks.iter().zip(&ws.blocks).enumerate() {
            let site = Sites::of(i);
            let branch = &Passing::of(&ws.passing, &ws.others, acts.compute())?.branch;
            block.ln_1.forward(weights, &acts.input, &acts.ln_1, watch)?;
            block.c_attn.forward(weights, &acts.ln_1.out, &acts.qkv, watch)?;
            let dropout = mode.dropout(config.attn_pdrop, site.attention);
            attention::forward(shape, &acts.qkv, dropout, &acts.attended, &acts.lse)?;
            watch.saw_part(Layer::inner(i, ATTENTION), Part::Output, &acts.attended)?;
            block.attn_c_proj.forward(weights, &acts.attended, branch, watch)?;
            let dropout = mode.dropout(config.resid_pdrop, site.attention_out);
            residual::add(&acts.input, branch, dropout, &acts.middle)?;
            watch.saw_part(Layer::inner(i, ATTENTION_SUM), Part::Output, &acts.middle)?;

            block.ln_2.forward(weights, &acts.middle, &acts.ln_2, watch)?;
            block.c_fc.forward(weights, &acts.ln_2.out, &acts.fc, watch)?;
            gelu::forward(&acts.fc, &acts.gelu)?;
            watch.saw_part(Layer::inner(i, GELU), Part::Output, &acts.gelu)?;
            block.mlp_c_proj.forward(weights, &acts.gelu, branch, watch)?;
            let dropout = mode.dropout(config.resid_pdrop, site.mlp_out);
            let next = ws.blocks.get(i + 1).map_or(&ws.output, |block| &block.input);
            residual::add(&acts.middle, branch, dropout, next)?;
            watch.saw_part(Layer::inner(i, MLP_SUM), Part::Output, next)?;
        }
        self.ln_f.forward(weights, &ws.output, &ws.ln_f, watch)
    }

    /// The summed loss of the targets (FP32 softmax, f64 sum), after [`Self::forward`].
    pub fn loss(&self, weights: &Parameters, targets: &[u32], ws: &Workspace) -> Result<f64> {
        head(&ws.ln_f.out, &weights[self.lm_head], targets, &ws.head, None, |_, _, _| Ok(()))
    }

    /// The summed loss, and the head's own backward pass with it: dL/dloss = `seed` for each target.
    pub fn loss_and_head_gradient(
        &self,
        weights: &Parameters,
        targets: &[u32],
        seed: f32,
        ws: &mut Workspace,
        grads: &Parameters,
    ) -> Result<f64> {
        self.loss_and_head_gradient_watched(weights, targets, seed, ws, grads, &mut ())
    }

    /// [`Self::loss_and_head_gradient`] before the eyes of `watch`.
    pub fn loss_and_head_gradient_watched(
        &self,
        weights: &Parameters,
        targets: &[u32],
        seed: f32,
        ws: &mut Workspace,
        grads: &Parameters,
        watch: &mut impl Watch,
    ) -> Result<f64> {
        let narrow = &Passing::of(&ws.passing, &ws.others, ws.ln_f.out.dtype())?.gradients()?.narrow;
        let gradient = HeadGradient { seed, dx: narrow, dweight: &grads[self.lm_head] };
        head(&ws.ln_f.out, &weights[self.lm_head], targets, &ws.head, Some(gradient), |tensor, first_token, values| {
            let part = match tensor {
                HeadTensor::Logits => Part::Output,
                HeadTensor::LogitsGradient => Part::OutputGradient,
                HeadTensor::InputGradient => Part::InputGradient,
                HeadTensor::WeightGradient => Part::WeightGradient,
            };
            watch.saw(Place { layer: HEAD, part, first_token }, values)
        })
    }

    /// From the head's input back to the embeddings, after [`Self::loss_and_head_gradient`]; writes every gradient.
    pub fn backward(
        &self,
        weights: &Parameters,
        tokens: Tokens<'_>,
        mode: Mode,
        ws: &mut Workspace,
        grads: &Parameters,
    ) -> Result<()> {
        self.backward_watched(weights, tokens, mode, ws, grads, &mut ())
    }

    /// [`Self::backward`] before the eyes of `watch`.
    pub fn backward_watched(
        &self,
        weights: &Parameters,
        tokens: Tokens<'_>,
        mode: Mode,
        ws: &mut Workspace,
        grads: &Parameters,
        watch: &mut impl Watch,
    ) -> Result<()> {
        self.check(tokens, ws)?;
        let shape = self.shape(ws);
        let config = &self.config;
        let Workspace { blocks, output, ln_f, backward, passing, others, .. } = ws;
        let Some(StreamGradient { stream, order }) = backward else {
            bail!("this workspace has no buffers for a backward pass")
        };
        order.resize(tokens.ids.len(), 0);
        view::write(stream, |mut stream| stream.zero())?;
        let narrow = &Passing::of(passing, others, ln_f.out.dtype())?.gradients()?.narrow;
        self.ln_f.backward(weights, output, ln_f, narrow, stream, grads, watch)?;
        for (i, (block, acts)) in self.blocks.iter().zip(&*blocks).enumerate().rev() {
            let site = Sites::of(i);
            let passing = Passing::of(passing, others, acts.compute())?;
            let (branch, BranchGradients { narrow, qkv, wide }) = (&passing.branch, passing.gradients()?);
            residual::branch_gradient(stream, mode.dropout(config.resid_pdrop, site.mlp_out), branch)?;
            watch.saw_part(block.mlp_c_proj.layer(), Part::OutputGradient, branch)?;
            block.mlp_c_proj.backward(weights, &acts.gelu, branch, wide, grads, watch)?;
            gelu::backward(&acts.fc, wide)?;
            watch.saw_part(Layer::inner(i, GELU), Part::InputGradient, wide)?;
            block.c_fc.backward(weights, &acts.ln_2.out, wide, narrow, grads, watch)?;
            block.ln_2.backward(weights, &acts.middle, &acts.ln_2, narrow, stream, grads, watch)?;

            residual::branch_gradient(stream, mode.dropout(config.resid_pdrop, site.attention_out), branch)?;
            watch.saw_part(block.attn_c_proj.layer(), Part::OutputGradient, branch)?;
            block.attn_c_proj.backward(weights, &acts.attended, branch, narrow, grads, watch)?;
            let dropout = mode.dropout(config.attn_pdrop, site.attention);
            attention::backward(shape, narrow, &acts.qkv, &acts.attended, &acts.lse, dropout, qkv)?;
            watch.saw_part(Layer::inner(i, ATTENTION), Part::InputGradient, qkv)?;
            block.c_attn.backward(weights, &acts.ln_1.out, qkv, narrow, grads, watch)?;
            block.ln_1.backward(weights, &acts.input, &acts.ln_1, narrow, stream, grads, watch)?;
        }
        if !config.tie_word_embeddings {
            view::write(&grads[self.wte], |mut dwte| dwte.zero())?;
        }
        let dropout = mode.dropout(config.embd_pdrop, EMBEDDING_SITE);
        let (dwte, dwpe) = (&grads[self.wte], &grads[self.wpe]);
        embedding::backward(stream, tokens.ids, tokens.seq_len, dropout, order, dwte, dwpe)?;
        watch.saw_part(EMBEDDING, Part::WeightGradient, dwte)?;
        watch.saw_part(Layer::outer("wpe"), Part::WeightGradient, dwpe)
    }

    /// The logits `[rows, V]` (compute type) of `hidden [rows, D]`, a part of [`Workspace::hidden`].
    pub fn logits(&self, weights: &Parameters, hidden: &Tensor) -> Result<Tensor> {
        let weight = &weights[self.lm_head];
        let logits = view::zeros(&[hidden.dim(0)?, weight.dim(0)?], hidden.dtype(), hidden.device())?;
        crate::engine::kernels::linear::backward_input(hidden, weight, &logits)?;
        Ok(logits)
    }
}

const EMBEDDING: Layer = Layer::outer("wte");
const HEAD: Layer = Layer::outer("lm_head");
/// What a block does beside its layers with parameters.
const ATTENTION: &str = "attn";
const ATTENTION_SUM: &str = "attn.residual";
const GELU: &str = "mlp.gelu";
const MLP_SUM: &str = "mlp.residual";

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
