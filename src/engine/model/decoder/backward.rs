//! The backward pass: the blocks from the last to the first that is trained, then the embeddings.

use super::{Block, Decoder, DropoutSites, EMBEDDING, ForwardMode, InputIds, Mlp, RecurrenceParams};
use crate::engine::kernels::attention::AttentionInputs;
use crate::engine::kernels::columns::{ColumnSlice, WriteMode};
use crate::engine::kernels::op;
use crate::engine::kernels::rope::Direction;
use crate::engine::model::adapter::AdapterPass;
use crate::engine::model::hook::{Hook, TensorKind};
use crate::engine::model::layers::Context;
use crate::engine::model::parameters::Parameters;
use crate::engine::model::spec::{LinearRole, ModuleId, ModuleOp, NormRole};
use crate::engine::model::workspace::{Checkpointing, PostNorm, ResidualGrad, Workspace, mixer_input, mixer_output};
use crate::precision::PrecisionUnit;
use candle_core::{Result, Tensor, bail};

impl Block {
    /// Backpropagates `branch`, the gradient of the branch output, through its post-norm, if there is one.
    fn post_norm_backward<'a>(
        &self,
        cx: &mut Context<'_>,
        norm: usize,
        kept: Option<&PostNorm>,
        branch: &'a Tensor,
        other: Option<&'a Tensor>,
    ) -> Result<&'a Tensor> {
        let (Some(norms), Some(kept), Some(other)) = (&self.post_norms, kept, other) else {
            return Ok(branch);
        };
        norms[norm].backward(cx, &kept.input, &kept.into(branch), branch, (other, WriteMode::Overwrite))?;
        Ok(other)
    }
}

impl Decoder {
    /// Backpropagates from the head's input to the embeddings, after [`Self::loss_and_head_gradient`]; writes every
    /// gradient.
    pub fn backward(
        &self,
        weights: &Parameters,
        tokens: InputIds<'_>,
        mode: ForwardMode,
        ws: &mut Workspace,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        self.check(tokens, ws)?;
        let Some(mut residual) = ws.backward.take() else { bail!("this workspace has no buffers for a backward pass") };
        let done = self.backward_into(weights, tokens, mode, ws, (grads, &mut residual), hook);
        ws.backward = Some(residual);
        done
    }

    fn backward_into(
        &self,
        weights: &Parameters,
        tokens: InputIds<'_>,
        mode: ForwardMode,
        ws: &Workspace,
        (grads, ResidualGrad { stream, order }): (&Parameters, &mut ResidualGrad),
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let kernels = self.kernels();
        order.resize(tokens.ids.len(), 0);
        op::Zero { x: stream }.run(kernels)?;
        let scratch = ws.scratch(ws.hidden().dtype())?;
        let dy = &scratch.gradients()?.normed;
        let last = &ws.stream[self.spec.num_layers];
        let adapters = AdapterPass::default();
        let cx = &mut Context { kernels, weights, grads: Some(grads), mode, adapters, hook };
        self.final_norm.backward(cx, last, &ws.final_norm, dy, (stream, WriteMode::Accumulate))?;
        for i in (self.first_trained_block..self.spec.num_layers).rev() {
            if ws.keep() == Checkpointing::PerBlock {
                self.forward_block(cx, i, ws)?;
                let (acts, scratch) = ws.block(i)?;
                match &self.blocks[i].mlp {
                    Mlp::Dense { down, .. } if acts.post_mlp.is_none() => down.recompute(cx, &scratch.activated)?,
                    Mlp::Mixture(mixture) if acts.post_mlp.is_none() => mixture.recompute_down(cx, (acts, scratch))?,
                    _ => {}
                }
            }
            self.backward_block(cx, i, ws, stream)?;
            cx.hook.complete(PrecisionUnit::Block(i))?;
        }
        let dpositions = self.positions.and_then(|positions| grads.trainable(positions));
        let dtable = grads.trainable(self.embedding);
        if let Some(x) = dtable
            && !self.spec.tie_word_embeddings
        {
            op::Zero { x }.run(kernels)?;
        }
        if dtable.or(dpositions).is_some() {
            op::EmbedBackward { input: self.embed(weights, tokens, mode), dx: stream, order, dtable, dpositions }
                .run(kernels)?;
        }
        if let Some(dtable) = dtable {
            cx.hook.record_whole(EMBEDDING, TensorKind::WeightGradient, dtable)?;
        }
        if let Some(grad) = dpositions {
            cx.hook.record_whole(ModuleId::global(ModuleOp::Positions), TensorKind::WeightGradient, grad)?;
        }
        Ok(())
    }

    fn backward_block<'a>(&self, cx: &mut Context<'a>, i: usize, ws: &'a Workspace, stream: &Tensor) -> Result<()> {
        let kernels = cx.kernels;
        let mode = cx.mode;
        let block = &self.blocks[i];
        let site = DropoutSites::of(i);
        let rates = self.spec.dropout;
        let (acts, scratch) = ws.block(i)?;
        let branch = &scratch.branch;
        let gradients = scratch.gradients()?;
        cx.adapters = acts.adapters(scratch);
        let qkv = &mixer_input(&self.spec, i, &gradients.qkv)?;
        let (normed, activated) = (&gradients.normed, &gradients.activated);
        op::Copy { x: stream, dropout: mode.dropout(rates.residual, site.mlp_out), out: branch }.run(kernels)?;
        let other = gradients.branch.as_ref();
        let dy = block.post_norm_backward(cx, 1, acts.post_mlp.as_ref(), branch, other)?;
        let down = ModuleId::in_block(i, ModuleOp::Linear(LinearRole::Down));
        cx.hook.record_whole(down, TensorKind::OutputGradient, dy)?;
        let up = gradients.up();
        let input = &scratch.activated;
        let magnitude_scale = match &block.mlp {
            Mlp::Dense { down, .. } => down.backward_input(cx, dy, activated)?,
            Mlp::Mixture(mixture) => {
                op::Activate { activation: self.spec.activation, x: &acts.up, y: input }.run(kernels)?;
                mixture.scale_activated(cx, acts, input)?;
                mixture.backward_down(cx, (acts, scratch), (dy, &ws.balance.borrow()))?;
                None
            }
        };
        op::ActivateBackward { activation: self.spec.activation, x: &acts.up, dy: activated, dx: up, y: input }
            .run(kernels)?;
        self.record_activation(cx, i, TensorKind::Output, input)?;
        self.record_activation(cx, i, TensorKind::InputGradient, up)?;
        match &block.mlp {
            Mlp::Dense { up: product, down } => {
                down.backward_weight(cx, input, dy, magnitude_scale.as_ref())?;
                product.backward(cx, &acts.mlp_norm.out, up, normed)?;
            }
            Mlp::Mixture(mixture) => mixture.backward_up(cx, (acts, scratch), &acts.mlp_norm.out, up, normed)?,
        }
        let dx = (stream, WriteMode::Accumulate);
        block.mlp_norm.backward(cx, &acts.middle, &acts.mlp_norm, normed, dx)?;

        op::Copy { x: stream, dropout: mode.dropout(rates.residual, site.attention_out), out: branch }.run(kernels)?;
        let attended = &mixer_output(&self.spec, i, gradients.attended())?;
        let dy = block.post_norm_backward(cx, 0, acts.post_attention.as_ref(), branch, other)?;
        cx.hook.record_whole(block.out.layer, TensorKind::OutputGradient, dy)?;
        let out = &mixer_output(&self.spec, i, &acts.attended)?;
        block.out.backward(cx, block.gated(acts).unwrap_or(out), dy, attended)?;
        if let Some(recurrence) = &block.recurrence {
            self.recurrence_backward(cx, i, ws, recurrence, attended, qkv)?;
        } else {
            self.attention_backward(cx, i, ws, attended, qkv)?;
        }
        cx.hook.record_whole(ModuleId::in_block(i, block.mixer()), TensorKind::InputGradient, qkv)?;
        block.qkv.backward(cx, &acts.attention_norm.out, qkv, normed)?;
        block.attention_norm.backward(cx, &ws.stream[i], &acts.attention_norm, normed, dx)
    }

    /// Computes the gradients of a recurrence's input and parameters from the gradient of its output.
    fn recurrence_backward(
        &self,
        cx: &mut Context<'_>,
        i: usize,
        ws: &Workspace,
        recurrence: &RecurrenceParams,
        dy: &Tensor,
        dinput: &Tensor,
    ) -> Result<()> {
        let input = &mixer_input(&self.spec, i, &ws.block(i)?.0.qkv)?;
        let (kernels, weights, positions) = (cx.kernels, cx.weights, ws.positions());
        let grads = cx.grads;
        let trainable = |param| grads.and_then(|grads| grads.trainable(param));
        let mut record = |op, kind, gradient: Option<&Tensor>| {
            gradient.map_or(Ok(()), |gradient| cx.hook.record_whole(ModuleId::in_block(i, op), kind, gradient))
        };
        match recurrence {
            RecurrenceParams::ShortConv(param) => {
                let (weight, dweight) = (weights.fused(*param), trainable(*param));
                op::ShortConvBackward { input, weight, positions, dy, dinput, dweight }.run(kernels)?;
                record(ModuleOp::ShortConv, TensorKind::WeightGradient, dweight)
            }
            RecurrenceParams::GatedDelta { heads, eps, params } => {
                let gradients = params.try_map(|param| Ok(trainable(param)))?;
                let params = params.try_map(|param| Ok(weights.fused(param)))?;
                let (heads, eps) = (*heads, *eps);
                op::GatedDeltaBackward { heads, input, params, eps, positions, dy, dinput, gradients }.run(kernels)?;
                record(ModuleOp::ShortConv, TensorKind::WeightGradient, gradients.conv)?;
                record(ModuleOp::GatedDelta, TensorKind::WeightGradient, gradients.a_log)?;
                record(ModuleOp::GatedDelta, TensorKind::BiasGradient, gradients.dt_bias)?;
                record(ModuleOp::Norm(NormRole::Delta), TensorKind::WeightGradient, gradients.norm)
            }
        }
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
        let kernels = cx.kernels;
        let (acts, scratch) = ws.block(i)?;
        let widths = self.spec.qkv_widths();
        let dropout = cx.mode.dropout(self.spec.dropout.attention, DropoutSites::of(i).attention);
        let product = &mixer_input(&self.spec, i, &acts.qkv)?;
        let out = &mixer_output(&self.spec, i, &acts.attended)?;
        if self.blocks[i].gated(acts).is_some() {
            let [pairs, dpairs] = [self.gated_heads(product)?, self.gated_heads(dqkv)?];
            op::GateHeadsBackward { pairs, x: out, dx: attended, dpairs }.run(kernels)?;
        }
        let qkv = self.columns(product, acts.heads.as_ref())?;
        let sinks = self.sinks(cx.weights, i);
        let operands = AttentionInputs { qkv, documents: ws.documents(), dropout, sinks };
        let linear = ColumnSlice::split(dqkv, self.spec.qkv_product_widths())?;
        // Gradients of normalized queries and keys have a separate buffer: the norm's backward pass reads it and writes
        // next to the values' gradient.
        let [dq, dk] = match &scratch.gradients()?.query_key {
            Some(query_key) => ColumnSlice::split(query_key, [widths[0], widths[1]])?,
            None => [linear[0], linear[1]],
        };
        let dsinks = self.blocks[i].sinks.and_then(|sinks| cx.grad(sinks));
        op::AttentionBackward {
            shape: self.shape(i, ws.batch, ws.seq_len),
            operands,
            dout: attended,
            out,
            lse: &acts.lse,
            gradients: [dq, dk, linear[2]],
            dsinks,
        }
        .run(kernels)?;
        if let Some(dsinks) = dsinks {
            cx.hook.record_whole(ModuleId::in_block(i, ModuleOp::Attention), TensorKind::WeightGradient, dsinks)?;
        }
        if let Some(tables) = ws.rope_caches().of(&self.spec, i) {
            self.apply_rope(kernels, [dq, dk], tables, ws.positions(), Direction::Backward)?;
        }
        if let (Some(norms), Some(heads)) = (&self.blocks[i].qk_norms, &acts.heads) {
            // The gradient of attention's output is not needed any more.
            let queries = heads.queries.as_ref().map(|_| attended);
            let dx = [queries.map_or(Ok(linear[0]), ColumnSlice::all)?, linear[1]];
            let inputs = self.qk_norm_inputs(product, heads)?;
            for part in 0..2 {
                let x = inputs[part];
                let rstd = &heads.rstd[part];
                let dy = [dq, dk][part];
                norms[part].backward_columns(cx, x, (None, rstd), dy, (dx[part], WriteMode::Overwrite))?;
            }
            if let Some(queries) = queries {
                let pairs = self.gated_heads(dqkv)?;
                op::CopyQueries { pairs, queries, direction: Direction::Backward }.run(kernels)?;
            }
        }
        Ok(())
    }
}
