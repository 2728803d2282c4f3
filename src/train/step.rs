//! One step of mixed-precision training (Micikevicius et al., 2018). FP32, FP16 and BF16 differ only in the policy and in
//! `GradScaler::disabled()`.

use crate::data::Batch;
use crate::engine::model::{Decoder, Mode, Workspace};
use crate::engine::optim::{Gradients, LrSchedule, Survey};
use crate::precision::ScaleChange;
use crate::train::state::TrainState;
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Everything a step needs besides its batches.
#[derive(Debug)]
pub struct Engine {
    /// The architecture.
    pub model: Decoder,
    /// The state that steps change.
    pub state: TrainState,
    /// The learning rate.
    pub schedule: LrSchedule,
    /// Gradients are clipped to this global norm; `None` for no clipping.
    pub max_grad_norm: Option<f64>,
    /// The seed of dropout.
    pub seed: u64,
    /// Whether the survey counts exponents.
    pub exponents: bool,
    /// Buffers of the passes.
    pub workspace: Workspace,
    /// Gradients of the last step, scaled.
    pub grads: Gradients,
    /// Statistics of the last step's gradients.
    pub survey: Survey,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The masters were updated.
    Applied {
        /// Global norm after unscaling, before clipping.
        grad_norm: f64,
        /// The factor from clipping.
        clip: f64,
        /// The learning rate of the update.
        lr: f64,
    },
    /// A gradient was not finite: only the scaler has changed.
    Skipped,
}

/// A step's figures, besides [`Engine::survey`].
#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// Mean loss over the targets of all micro-batches, in nats.
    pub loss: f64,
    /// Targets of all micro-batches.
    pub targets: usize,
    /// The loss scale during the step.
    pub scale: f32,
    /// Whether it was applied.
    pub outcome: Outcome,
    /// The change of the scale.
    pub change: ScaleChange,
    /// Wall time of the parts.
    pub time: PartTimes,
}

/// Wall time of a step's parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartTimes {
    /// Forward passes without the head.
    pub forward: Duration,
    /// The head with its own backward pass, and the model's backward passes.
    pub backward: Duration,
    /// The survey of the gradients.
    pub survey: Duration,
    /// Unscaling, clipping, AdamW, the new working copy.
    pub optimizer: Duration,
}

impl Engine {
    /// Runs one step over `micro_batches`, whose losses are weighted by their numbers of targets.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<StepReport> {
        let Self { model, state, workspace, grads, survey, .. } = self;
        let kernels = model.kernels();
        let scale = state.scaler.scale();
        let targets: usize = micro_batches.iter().map(|batch| batch.target_count).sum();
        if targets == 0 {
            return Err(Error::data(
                "a step's batches",
                "have no target to learn from: every token of theirs is masked",
            ));
        }
        let mut time = PartTimes::default();
        let mut loss = 0.0;
        grads.begin(micro_batches.len());
        if let Some(fp8) = &mut state.fp8 {
            fp8.begin_step();
            fp8.round_weights(state.masters.parameters(), &state.weights)?;
        }
        for (i, batch) in micro_batches.iter().enumerate() {
            let (tokens, mut narrow) = (batch.tokens(), None);
            let workspace = workspace.fitted(batch.seq_len, &mut narrow)?;
            let mode = Mode::Train { seed: self.seed, draw: state.counters.draw(i) };
            let clock = Instant::now();
            // 1. Forward in the compute type; the loss in FP32.
            model.forward(&state.weights, tokens, mode, workspace, &mut state.fp8)?;
            time.forward += clock.elapsed();
            // 2. Backward from scale · dL: gradients are stored in the compute type, every sum in them is FP32.
            let (seed, out) = (scale / targets as f32, grads.micro_batch());
            loss +=
                model.loss_and_head_gradient(&state.weights, &batch.targets, seed, workspace, out, &mut state.fp8)?;
            model.backward(&state.weights, tokens, mode, workspace, out, &mut state.fp8)?;
            grads.accumulate(kernels, state.scaler.is_predictive())?;
            time.backward += clock.elapsed();
        }
        time.backward -= time.forward;
        // 3. Survey the gradients before anything rescales them.
        let clock = Instant::now();
        grads.survey(self.exponents, survey, kernels)?;
        time.survey = clock.elapsed();
        let stats = &survey.total.stats;
        let unscale = state.scaler.inverse();
        let finite = stats.is_finite() && (stats.max_abs * unscale).is_finite();
        // 4. Update the FP32 masters, or skip the step after an overflow.
        let clock = Instant::now();
        let outcome = if finite {
            let grad_norm = stats.norm() * f64::from(unscale);
            let clip = self.max_grad_norm.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0));
            let lr = self.schedule.lr(state.counters.updates);
            let factor = (f64::from(unscale) * clip) as f32;
            let TrainState { adamw, masters, weights, counters, .. } = state;
            adamw.step(kernels, grads.total(), factor, lr, counters.updates, masters, weights)?;
            counters.updates += 1;
            Outcome::Applied { grad_norm, clip, lr }
        } else {
            Outcome::Skipped
        };
        time.optimizer = clock.elapsed();
        // 5. Adjust the scale: back off after an overflow; grow after enough clean steps, or into the headroom.
        let change = state.scaler.update_measured(finite, survey.largest);
        if let Some(fp8) = &mut state.fp8 {
            fp8.end_step();
            // An applied step has already refreshed the working copy.
            if outcome == Outcome::Skipped {
                fp8.restore(state.masters.parameters(), &state.weights)?;
            }
        }
        state.counters.step += 1;
        state.counters.tokens += targets as u64;
        Ok(StepReport { loss: loss / targets as f64, targets, scale, outcome, change, time })
    }

    /// The mean loss, without dropout, over the targets of batches from `next` until it returns `false`, and the number of targets.
    /// Uses the training buffers, but changes nothing that outlives a step.
    pub fn evaluate(&mut self, batch: &mut Batch, mut next: impl FnMut(&mut Batch) -> bool) -> Result<(f64, u64)> {
        let (mut loss, mut targets) = (0.0, 0u64);
        while next(batch) {
            let mut narrow = None;
            let workspace = self.workspace.fitted(batch.seq_len, &mut narrow)?;
            self.model.forward(&self.state.weights, batch.tokens(), Mode::Eval, workspace, &mut ())?;
            loss += self.model.loss(&self.state.weights, &batch.targets, workspace)?;
            targets += batch.target_count as u64;
        }
        Ok((loss / targets.max(1) as f64, targets))
    }
}
