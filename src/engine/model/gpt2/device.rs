//! The passes on a device: the same layers in the same order as [`Gpt2::forward`] and [`Gpt2::backward`], with launches in
//! the place of CPU kernels.

use super::{Activations, BranchGradients, EMBEDDING_SITE, Gpt2, Mode, Sites, StreamGradient, Workspace};
use crate::engine::kernels::attention::Shape;
use crate::engine::kernels::cross_entropy::{HeadWorkspace, TileLimit};
use crate::engine::kernels::cuda::cross_entropy::{Seed, sum_losses};
use crate::engine::kernels::cuda::launch::{Buffer, Memory};
use crate::engine::kernels::cuda::layer_norm::{Addition, Onward, Statistics};
use crate::engine::kernels::cuda::product::{HeadGradient, HeadShape, Multiply};
use crate::engine::kernels::cuda::{attention, elementwise, embedding, layer_norm, product};
use crate::engine::model::config::Gpt2Config;
use crate::engine::model::layers::{LayerNorm, Linear, Normed};
use crate::precision::PrecisionPolicy;
use candle_core::{Result, bail};

/// The head's product wants whole tiles of the tensor cores.
const VOCAB_MULTIPLE: usize = 64;
/// Tiles of the head have a multiple of this many rows, so that each begins at an address that vectors want.
const ROW_GROUP: usize = 16;

impl Gpt2 {
    /// Which parameter is the head's weight. On a device it has [`Gpt2Config::padded_vocab`] rows, and so has its gradient.
    pub(crate) fn head_weight(&self) -> usize {
        self.lm_head
    }
}

impl Gpt2Config {
    /// The vocabulary, filled up to whole tiles.
    pub(crate) fn padded_vocab(&self) -> usize {
        self.vocab_size.next_multiple_of(VOCAB_MULTIPLE)
    }
}

impl Workspace<Buffer> {
    /// The buffers of [`Workspace::new`] on a device, for training.
    pub(crate) fn on(
        device: &impl Memory,
        config: &Gpt2Config,
        policy: PrecisionPolicy,
        batch: usize,
        seq_len: usize,
    ) -> Result<Self> {
        let padded = Gpt2Config { vocab_size: config.padded_vocab(), ..config.clone() };
        let allocate = |shape: &[usize], dtype| device.allocate(dtype, shape.iter().product());
        Self::lay_out(&padded, policy, (batch, seq_len), true, TileLimit::Gpu, &allocate, &allocate)
    }

    /// Cuts the head's logits to tiles of `rows`, as they are where a batch is large.
    #[cfg(test)]
    pub(crate) fn cut_head(&mut self, device: &impl Memory, rows: usize, padded: usize, width: usize) {
        self.head.logits.len = rows * padded;
        self.head.weight_sum = device.allocate(candle_core::DType::F32, padded * width).ok();
    }
}

/// One micro-batch on its way through the model.
pub(crate) struct DevicePass<'a, D> {
    /// Where it is computed.
    pub(crate) device: &'a D,
    /// The architecture.
    pub(crate) model: &'a Gpt2,
    /// The working copies, in the parameters' order.
    pub(crate) weights: &'a [Buffer],
    /// What the passes write.
    pub(crate) workspace: &'a Workspace<Buffer>,
    /// The inputs.
    pub(crate) tokens: embedding::Tokens,
    /// What is to be predicted.
    pub(crate) targets: Buffer,
    /// Dropout; the draw is the tokens'.
    pub(crate) mode: Mode,
}

/// Where gradients begin and where they go.
#[derive(Clone, Copy)]
pub(crate) struct DeviceGradients<'a> {
    /// The gradient of a target's loss.
    pub(crate) seed: Seed,
    /// In the parameters' order.
    pub(crate) grads: &'a [Buffer],
}

impl<D: Multiply> DevicePass<'_, D> {
    fn rows(&self) -> usize {
        self.workspace.batch * self.workspace.seq_len
    }

    /// Rows, width, sequence length.
    fn stream_shape(&self) -> [usize; 3] {
        [self.rows(), self.model.config.n_embd, self.workspace.seq_len]
    }

    fn attention_shape(&self) -> Shape {
        let Gpt2Config { n_head, n_embd, .. } = self.model.config;
        let Workspace { batch, seq_len, .. } = *self.workspace;
        Shape { batch, seq_len, heads: n_head, head_size: n_embd / n_head }
    }

    /// From tokens to the head's input.
    pub(crate) fn forward(&self) -> Result<()> {
        let Self { device, model, weights, workspace: ws, tokens, mode, .. } = *self;
        let config = &model.config;
        let first = ws.blocks.first().map_or(ws.output, |block| block.input);
        let dropout = mode.dropout(config.embd_pdrop, EMBEDDING_SITE);
        let tables = [weights[model.wte], weights[model.wpe]];
        embedding::forward(device, self.stream_shape(), tables, tokens, dropout, first)?;
        // What the last block adds to the stream, on its way into the next norm.
        let mut last = None;
        let add = |site, sum| {
            let dropout = mode.dropout(config.resid_pdrop, site);
            Addition { branch: ws.passing.branch, dropout, draw: tokens.draw, sum }
        };
        let mut stream = first;
        for (i, (block, acts)) in model.blocks.iter().zip(&ws.blocks).enumerate() {
            let site = Sites::of(i);
            let Activations { input, qkv, attended, lse, middle, fc, gelu, .. } = *acts;
            self.norm(&block.ln_1, stream, last, &acts.ln_1)?;
            self.linear(&block.c_attn, acts.ln_1.out, qkv)?;
            let dropout = mode.dropout(config.attn_pdrop, site.attention);
            attention::forward(device, self.attention_shape(), qkv, dropout, tokens.draw, attended, lse)?;
            self.linear(&block.attn_c_proj, attended, ws.passing.branch)?;

            self.norm(&block.ln_2, input, Some(add(site.attention_out, middle)), &acts.ln_2)?;
            let operands = [acts.ln_2.out, weights[block.c_fc.weight], weights[block.c_fc.bias]];
            product::linear_gelu_forward(device, self.linear_shape(operands[0], fc), operands, fc, gelu)?;
            self.linear(&block.mlp_c_proj, gelu, ws.passing.branch)?;
            let next = ws.blocks.get(i + 1).map_or(ws.output, |block| block.input);
            (stream, last) = (middle, Some(add(site.mlp_out, next)));
        }
        self.norm(&model.ln_f, stream, last, &ws.ln_f)
    }

    /// Adds the losses of all targets to `total` (f64), after [`Self::forward`]; with `gradients` also computes those of the
    /// head.
    pub(crate) fn loss(&self, total: Buffer, gradients: Option<DeviceGradients<'_>>) -> Result<()> {
        let Self { device, model, weights, workspace: ws, .. } = *self;
        let HeadWorkspace { logits, weight_sum, losses } = ws.head;
        let ([rows, width, _], head) = (self.stream_shape(), model.lm_head);
        let (vocab, padded) = (model.config.vocab_size, model.config.padded_vocab());
        let room = logits.len / padded;
        let tile = if room < rows { (room / ROW_GROUP * ROW_GROUP).max(1) } else { rows };
        for first in (0..rows).step_by(tile) {
            let count = tile.min(rows - first);
            let of_tile = |rows: Buffer| rows.part(first * width, count * width);
            let gradient = |DeviceGradients { seed, grads }| -> Result<HeadGradient> {
                let dx = of_tile(ws.passing.gradients()?.narrow)?;
                let dweight = weight_sum.unwrap_or(grads[head]);
                Ok(HeadGradient { seed, dx, dweight, accumulate: first > 0 })
            };
            let operands = [of_tile(ws.ln_f.out)?, weights[head], logits];
            let (targets, losses) = (self.targets.part(first, count)?, losses.part(first, count)?);
            let shape = HeadShape { rows: count, width, vocab, padded };
            product::head(device, shape, operands, targets, losses, gradients.map(gradient).transpose()?)?;
        }
        if let (Some(sum), Some(gradients)) = (weight_sum, gradients) {
            elementwise::copy(device, sum, gradients.grads[head])?;
        }
        sum_losses(device, rows, losses, total)
    }

    /// From the head's input back to the embeddings, after [`Self::loss`] with gradients; writes every gradient.
    pub(crate) fn backward(&self, grads: &[Buffer]) -> Result<()>
    where
        D: Memory,
    {
        let Self { device, model, weights, workspace: ws, tokens, mode, .. } = *self;
        let config = &model.config;
        let Some(StreamGradient { stream, .. }) = ws.backward else {
            bail!("this workspace has no buffers for a backward pass")
        };
        let BranchGradients { narrow, qkv, wide } = *ws.passing.gradients()?;
        let branch = ws.passing.branch;
        let onward = |site| {
            let dropout = mode.dropout(config.resid_pdrop, site);
            Some(Onward { branch, dropout, draw: tokens.draw })
        };
        // To the branch that the stream took up last before `block`.
        let before = |block: usize| block.checked_sub(1).and_then(|last| onward(Sites::of(last).mlp_out));
        let last = before(ws.blocks.len());
        self.norm_backward(&model.ln_f, ws.output, &ws.ln_f, [narrow, stream], true, last, grads)?;
        for (i, (block, acts)) in model.blocks.iter().zip(&ws.blocks).enumerate().rev() {
            let site = Sites::of(i);
            let sizes = self.linear_backward_weight(&block.mlp_c_proj, acts.gelu, branch, grads)?;
            let operands = [branch, weights[block.mlp_c_proj.weight]];
            product::linear_gelu_backward_input(device, sizes, operands, acts.fc, wide)?;
            self.linear_backward(&block.c_fc, acts.ln_2.out, wide, narrow, grads)?;
            let attention_out = onward(site.attention_out);
            self.norm_backward(&block.ln_2, acts.middle, &acts.ln_2, [narrow, stream], false, attention_out, grads)?;

            self.linear_backward(&block.attn_c_proj, acts.attended, branch, narrow, grads)?;
            let dropout = mode.dropout(config.attn_pdrop, site.attention);
            let operands = [narrow, acts.qkv, acts.attended, acts.lse];
            attention::backward(device, self.attention_shape(), operands, dropout, tokens.draw, qkv)?;
            self.linear_backward(&block.c_attn, acts.ln_1.out, qkv, narrow, grads)?;
            self.norm_backward(&block.ln_1, acts.input, &acts.ln_1, [narrow, stream], false, before(i), grads)?;
        }
        if !config.tie_word_embeddings {
            device.zero(grads[model.wte])?;
        }
        let dropout = mode.dropout(config.embd_pdrop, EMBEDDING_SITE);
        let tables = [grads[model.wte], grads[model.wpe]];
        embedding::backward(device, self.stream_shape(), stream, tokens, dropout, tables)
    }

    fn norm(&self, layer: &LayerNorm, x: Buffer, addition: Option<Addition>, normed: &Normed<Buffer>) -> Result<()> {
        let [rows, width, _] = self.stream_shape();
        let weights = [self.weights[layer.weight], self.weights[layer.bias]];
        layer_norm::forward(self.device, [rows, width], x, addition, weights, layer.eps, normed.out, statistics(normed))
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of the derivative, and where its result goes")]
    fn norm_backward(
        &self,
        layer: &LayerNorm,
        x: Buffer,
        normed: &Normed<Buffer>,
        [dy, dx]: [Buffer; 2],
        fresh: bool,
        onward: Option<Onward>,
        grads: &[Buffer],
    ) -> Result<()> {
        let [rows, width, _] = self.stream_shape();
        let operands = [dy, x, self.weights[layer.weight]];
        let gradients = [grads[layer.weight], grads[layer.bias]];
        layer_norm::backward(self.device, [rows, width], operands, statistics(normed), dx, fresh, onward, gradients)
    }

    /// Rows, columns of `x`, columns of `y`.
    fn linear_shape(&self, x: Buffer, y: Buffer) -> [usize; 3] {
        let rows = self.rows();
        [rows, x.len / rows, y.len / rows]
    }

    fn linear(&self, layer: &Linear, x: Buffer, y: Buffer) -> Result<()> {
        let operands = [x, self.weights[layer.weight], self.weights[layer.bias]];
        product::linear_forward(self.device, self.linear_shape(x, y), operands, y)
    }

    fn linear_backward(&self, layer: &Linear, x: Buffer, dy: Buffer, dx: Buffer, grads: &[Buffer]) -> Result<()> {
        let sizes = self.linear_backward_weight(layer, x, dy, grads)?;
        product::linear_backward_input(self.device, sizes, [dy, self.weights[layer.weight]], dx)
    }

    fn linear_backward_weight(&self, layer: &Linear, x: Buffer, dy: Buffer, grads: &[Buffer]) -> Result<[usize; 3]> {
        let sizes = self.linear_shape(x, dy);
        product::linear_backward_weight(self.device, sizes, [x, dy], grads[layer.weight], grads[layer.bias])?;
        Ok(sizes)
    }
}

fn statistics(normed: &Normed<Buffer>) -> Statistics {
    Statistics { mean: normed.mean, rstd: normed.rstd }
}
