//! Both passes and the head between them: from tokens to gradients.

use super::{Decoder, Mode, Tokens};
use crate::engine::model::hook::Hook;
use crate::engine::model::parameters::Parameters;
use crate::engine::model::workspace::Workspace;
use candle_core::Result;

impl Decoder {
    /// Writes the gradients of all parameters into `grads` and returns the sum of the targets' losses; `seed` is the
    /// derivative of the objective with respect to each of them.
    #[expect(clippy::too_many_arguments, reason = "operands and results of the model's derivative")]
    pub fn gradients(
        &self,
        weights: &Parameters,
        tokens: Tokens<'_>,
        targets: &[u32],
        mode: Mode,
        seed: f32,
        workspace: &mut Workspace,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<f64> {
        self.forward(weights, tokens, mode, workspace, hook)?;
        let loss = self.loss_and_head_gradient(weights, targets, seed, workspace, grads, hook)?;
        self.backward(weights, tokens, mode, workspace, grads, hook)?;
        Ok(loss)
    }
}
