//! A micro-batch's forward and backward pass outside the step, for whoever looks closer at one.

use crate::Result;
use crate::data::Batch;
use crate::engine::model::{Gpt2, Mode, Parameters, Tokens, Watch, Workspace};
use crate::train::fp8::Fp8Layer;

/// Both passes over `batch`, as [`Engine::step`](super::Engine::step) does them: dL/d(loss of a target) = `seed`.
#[expect(clippy::too_many_arguments, reason = "the state is the engine's, of which each caller lends other parts")]
pub(super) fn passes(
    model: &Gpt2,
    weights: &Parameters,
    fp8: Option<&mut Fp8Layer>,
    batch: &Batch,
    mode: Mode,
    seed: f32,
    workspace: &mut Workspace,
    grads: &Parameters,
    watch: &mut impl Watch,
) -> Result<()> {
    let watch = &mut (fp8, watch);
    let tokens = Tokens { ids: &batch.inputs, seq_len: batch.seq_len };
    model.forward_watched(weights, tokens, mode, workspace, watch)?;
    model.loss_and_head_gradient_watched(weights, &batch.targets, seed, workspace, grads, watch)?;
    Ok(model.backward_watched(weights, tokens, mode, workspace, grads, watch)?)
}
