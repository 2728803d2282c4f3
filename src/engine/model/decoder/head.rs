//! The head: logits, losses, and their gradients.

use super::Decoder;
use crate::engine::kernels::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::engine::kernels::cross_entropy::{HeadGradient, HeadInput, HeadTensor, write_losses};
use crate::engine::kernels::{HeadHook, WeightLayout, op, view};
use crate::engine::model::hook::{Hook, HookPoint, TensorKind};
use crate::engine::model::parameters::Parameters;
use crate::engine::model::spec::{ModuleId, ModuleOp};
use crate::engine::model::workspace::Workspace;
use candle_core::{DType, Result, Tensor};

impl Decoder {
    /// The operands of logits.
    fn head_input<'a>(&self, ws: &'a Workspace, weight: &'a Tensor) -> HeadInput<'a> {
        let softcap = self.spec.logits_softcap.map(|cap| cap as f32);
        HeadInput { x: ws.hidden(), weight, scale: self.logits_scale(), softcap }
    }

    fn logits_scale(&self) -> f32 {
        (1.0 / self.spec.logits_scaling) as f32
    }

    /// The summed loss of the targets (FP32 softmax, f64 sum), after [`Self::forward`].
    pub fn loss(&self, weights: &Parameters, targets: &[u32], ws: &Workspace) -> Result<f64> {
        let weight = weights.weight(self.head)?;
        write_losses(self.kernels(), self.head_input(ws, &weight), targets, &ws.head, None, None)?;
        ws.head.total_loss()
    }

    /// Computes the loss of each target, and the head's own backward pass with it: dL/dloss = `seed` for each target,
    /// times its weight if there are `target_weights`.
    pub fn loss_and_head_gradient(
        &self,
        weights: &Parameters,
        targets: &[u32],
        (seed, target_weights): (f32, Option<&[f32]>),
        ws: &Workspace,
        grads: &Parameters,
        hook: &mut dyn Hook,
    ) -> Result<()> {
        let dx = &ws.scratch(ws.hidden().dtype())?.gradients()?.normed;
        let gradient = HeadGradient { seed, weights: target_weights, dx, dweight: grads.trainable(self.head) };
        let watches = hook.is_active();
        let mut record = |tensor, first_token, values: &Tensor| {
            let kind = match tensor {
                HeadTensor::Logits => TensorKind::Output,
                HeadTensor::LogitsGradient => TensorKind::OutputGradient,
                HeadTensor::InputGradient => TensorKind::InputGradient,
                HeadTensor::WeightGradient => TensorKind::WeightGradient,
            };
            let first_token = Some(first_token);
            hook.record(HookPoint { layer: ModuleId::global(ModuleOp::Head), kind, first_token }, values)
        };
        let weight = weights.weight(self.head)?;
        let hook: HeadHook<'_> = if watches { Some(&mut record) } else { None };
        write_losses(self.kernels(), self.head_input(ws, &weight), targets, &ws.head, Some(gradient), hook)
    }

    /// The logits `[rows, V]` (compute type, or FP32 if they are capped) of `hidden [rows, D]`, a part of
    /// [`Workspace::hidden`].
    pub fn logits(&self, weights: &Parameters, hidden: &Tensor) -> Result<Tensor> {
        let weight = weights.weight(self.head)?;
        let logits = view::zeros(&[hidden.dim(0)?, weight.dim(0)?], hidden.dtype(), hidden.device())?;
        let layout = WeightLayout::OutIn;
        let alpha = self.logits_scale();
        if alpha == 1.0 {
            op::Linear { layout, x: hidden, weight: &weight, bias: None, y: &logits, low_rank: None }
                .run(self.kernels())?;
        } else {
            let (a, b) = (MatmulOperand::all(hidden)?, MatmulOperand::transpose_of(&weight)?);
            let c = ColumnSlice::all(&logits)?;
            op::Matmul { a, b, alpha, c, mode: WriteMode::Overwrite }.run(self.kernels())?;
        }
        let Some(cap) = self.spec.logits_softcap else { return Ok(logits) };
        let capped = view::zeros(logits.dims(), DType::F32, logits.device())?;
        op::SoftCap { x: &logits, cap: cap as f32, out: &capped }.run(self.kernels())?;
        Ok(capped)
    }

    /// The log-probability of one id per row of `logits`, which are [`Self::logits`]: minus the loss of training.
    pub fn log_probs(&self, logits: &Tensor, ids: &[u32]) -> Result<Vec<f32>> {
        let losses = view::zeros(&[ids.len()], DType::F32, logits.device())?;
        let logits = ColumnSlice::all(logits)?;
        // They are capped already.
        op::CrossEntropy { logits, softcap: None, targets: ids, losses: &losses, seed: None, weights: None }
            .run(self.kernels())?;
        Ok(view::to_host(&losses)?.to_vec1::<f32>()?.into_iter().map(|loss| -loss).collect())
    }
}
