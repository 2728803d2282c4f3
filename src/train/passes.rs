//! A micro-batch's forward and backward pass outside the step, for diagnostics.

use crate::Result;
use crate::data::Batch;
use crate::engine::model::{Decoder, Hook, Mode, Parameters, Workspace};
use crate::train::fp8::Fp8Layer;
use crate::train::step::Engine;

/// Runs both passes over `batch` as [`Engine::step`](super::Engine::step) does, with dL/d(loss of a target) = `seed`.
#[expect(clippy::too_many_arguments, reason = "each caller borrows different fields of the engine")]
pub(super) fn passes(
    model: &Decoder,
    weights: &Parameters,
    fp8: &mut Option<Fp8Layer>,
    batch: &Batch,
    mode: Mode,
    seed: f32,
    workspace: &mut Workspace,
    grads: &Parameters,
    hook: &mut dyn Hook,
) -> Result<()> {
    let hook = &mut (fp8, hook);
    let mut narrow = None;
    let workspace = workspace.fitted(batch.seq_len, &mut narrow)?;
    model.forward(weights, batch.tokens(), mode, workspace, hook)?;
    model.loss_and_head_gradient(weights, &batch.targets, seed, workspace, grads, hook)?;
    Ok(model.backward(weights, batch.tokens(), mode, workspace, grads, hook)?)
}

/// Runs `f` with the working weights as the last step used them: rounded for a block in FP8.
pub(super) fn with_step_weights<R>(engine: &mut Engine, f: impl FnOnce(&mut Engine) -> Result<R>) -> Result<R> {
    let state = &mut engine.state;
    if let Some(fp8) = &mut state.fp8 {
        fp8.round_weights(&state.weights)?;
    }
    let result = f(engine);
    let state = &mut engine.state;
    if let Some(fp8) = &mut state.fp8 {
        fp8.restore(&state.weights)?;
    }
    result
}
