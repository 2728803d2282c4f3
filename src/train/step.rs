//! One step of mixed-precision training (Micikevicius et al., 2018). FP32, FP16 and BF16 differ only in the policy and in
//! `GradScaler::disabled()`.

use crate::data::Batch;
use crate::engine::collective::{Collective, gather};
use crate::engine::kernels::machine::awake::keep_awake;
use crate::engine::model::{Decoder, Mode, Workspace};
use crate::engine::optim::{Gradients, LrSchedule, Survey, Update};
use crate::precision::ScaleChange;
use crate::train::beside::{Learned, Reader, beside};
use crate::train::state::TrainState;
use crate::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Everything a step needs besides its batches.
#[derive(Debug)]
pub struct Engine {
    /// The processes that take the step together; each computes its share of the micro-batches.
    pub world: Arc<dyn Collective>,
    /// Of the last step in each process: seconds of its passes, seconds of all exchanges so far, micro-batches.
    pub times: Vec<[f64; 3]>,
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
    /// Unscaling, clipping, AdamW, the new working copy; of several processes also its exchange.
    pub optimizer: Duration,
    /// What several processes send each other, waiting for the last included.
    pub exchange: Duration,
    /// Waiting for a reader of the state, which is none of the step's own work.
    pub waited: Duration,
}

impl Engine {
    /// Runs one step over `micro_batches`, whose losses are weighted by their numbers of targets.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<StepReport> {
        self.step_beside(micro_batches, None)
    }

    /// The same, while `reader` reads the state before the update, which waits for it.
    pub fn step_beside(&mut self, micro_batches: &[Batch], reader: Option<Reader<'_>>) -> Result<StepReport> {
        let computes_here = self.state.weights.device().is_cpu();
        let step = || self.take_step(micro_batches, reader);
        if computes_here { keep_awake(step) } else { step() }
    }

    fn take_step(&mut self, micro_batches: &[Batch], reader: Option<Reader<'_>>) -> Result<StepReport> {
        let Self { world, times, model, state, workspace, grads, survey, .. } = self;
        let TrainState { weights, masters, adamw, scaler, fp8, counters, .. } = state;
        let kernels = model.kernels();
        let scale = scaler.scale();
        let targets: usize = micro_batches.iter().map(|batch| batch.target_count).sum();
        let mut time = PartTimes::default();
        let learned = Learned { weights, masters: masters.parameters(), adamw };
        // FP8 rounds weights in place for the passes, and a GPU's values are copied to the host in its own order.
        let alone = fp8.is_some() || !weights.device().is_cpu();
        let (passed, waited) = beside(reader, learned, alone, || {
            if targets == 0 {
                return Err(Error::data(
                    "a step's batches",
                    "have no target to learn from: every token of theirs is masked",
                ));
            }
            let weights = learned.weights;
            let share = grads.begin(micro_batches.len())?;
            let mut losses = Vec::with_capacity(share.len());
            if let Some(fp8) = fp8.as_mut() {
                fp8.begin_step();
                fp8.round_weights(weights)?;
            }
            for (i, batch) in micro_batches.iter().enumerate().take(share.end).skip(share.start) {
                let (tokens, mut narrow) = (batch.tokens(), None);
                let workspace = workspace.fitted(batch.seq_len, &mut narrow)?;
                let mode = Mode::Train { seed: self.seed, draw: counters.draw(i) };
                let clock = Instant::now();
                // 1. Forward in the compute type; the loss in FP32.
                model.forward(weights, tokens, mode, workspace, fp8)?;
                time.forward += clock.elapsed();
                // 2. Backward from scale · dL: gradients are stored in the compute type, every sum in them is FP32.
                let (seed, out) = (scale / targets as f32, grads.micro_batch());
                let loss = model.loss_and_head_gradient(weights, &batch.targets, seed, workspace, out, fp8)?;
                model.backward(weights, tokens, mode, workspace, out, fp8)?;
                losses.push(loss);
                grads.accumulate(kernels, scaler.is_predictive())?;
                time.backward += clock.elapsed();
            }
            time.backward -= time.forward;
            // Of several processes each sums its shard of the gradients, in an order that hangs on no number of processes.
            let clock = Instant::now();
            grads.reduce(&**world)?;
            let loss = sum_losses(&losses, &time, &**world, times)?;
            time.exchange = clock.elapsed();
            // 3. Survey the gradients before anything rescales them.
            let clock = Instant::now();
            grads.survey(self.exponents, survey, kernels, &**world)?;
            time.survey = clock.elapsed();
            Ok(loss)
        });
        let loss = passed?;
        time.waited = waited;
        let stats = &survey.total.stats;
        let unscale = scaler.inverse();
        let finite = stats.is_finite() && (stats.max_abs * unscale).is_finite();
        // 4. Update the FP32 masters, or skip the step after an overflow.
        let clock = Instant::now();
        let outcome = if finite {
            let grad_norm = stats.norm() * f64::from(unscale);
            let clip = self.max_grad_norm.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0));
            let lr = self.schedule.lr(counters.updates);
            let grad_factor = (f64::from(unscale) * clip) as f32;
            let updated = masters.counterpart(weights, world.rank())?;
            let kernels = masters.kernels(kernels);
            let update = Update { lr, grad_factor, updates: counters.updates };
            adamw.step(kernels, grads.total(), update, masters, &updated)?;
            let clock = Instant::now();
            gather::all_gather(weights, &updated, &**world)?;
            time.exchange += clock.elapsed();
            counters.updates += 1;
            Outcome::Applied { grad_norm, clip, lr }
        } else {
            Outcome::Skipped
        };
        time.optimizer = clock.elapsed();
        // 5. Adjust the scale: back off after an overflow; grow after enough clean steps, or into the headroom.
        let change = scaler.update_with_amax(finite, survey.largest);
        if let Some(fp8) = fp8 {
            fp8.end_step(&**world)?;
            // An applied step has already refreshed the working copy.
            if outcome == Outcome::Skipped {
                fp8.restore(weights)?;
            }
        }
        counters.step += 1;
        counters.tokens += targets as u64;
        Ok(StepReport { loss: loss / targets as f64, targets, scale, outcome, change, time })
    }

    /// The mean loss, without dropout, over the targets of batches from `next` until it returns `false`, and the number of targets.
    /// Uses the training buffers, but changes nothing that outlives a step.
    pub fn evaluate(&mut self, batch: &mut Batch, mut next: impl FnMut(&mut Batch) -> bool) -> Result<(f64, u64)> {
        let (mut losses, mut targets) = (Vec::new(), 0u64);
        let (rank, count) = (self.world.rank() as u64, self.world.world() as u64);
        for index in 0u64.. {
            if !next(batch) {
                break;
            }
            targets += batch.target_count as u64;
            if index % count != rank {
                continue;
            }
            let mut narrow = None;
            let workspace = self.workspace.fitted(batch.seq_len, &mut narrow)?;
            self.model.forward(&self.state.weights, batch.tokens(), Mode::Eval, workspace, &mut ())?;
            losses.push(self.model.loss(&self.state.weights, &batch.targets, workspace)?);
        }
        // In the order of the batches, which processes take in turn.
        let bytes: Vec<u8> = losses.iter().flat_map(|loss: &f64| loss.to_ne_bytes()).collect();
        let all = self.world.all_gather(&bytes)?;
        let batches = all.iter().map(|losses| losses.len() / 8).sum::<usize>();
        let of_batch = |index: usize| {
            let losses = all[index % all.len()].as_chunks::<8>().0;
            losses.get(index / all.len()).map_or(f64::NAN, |bytes| f64::from_ne_bytes(*bytes))
        };
        let loss: f64 = (0..batches).map(of_batch).sum();
        Ok((loss / targets.max(1) as f64, targets))
    }
}

/// The sum of all processes' losses in the order of the micro-batches, and what the step took in each process.
fn sum_losses(losses: &[f64], time: &PartTimes, world: &dyn Collective, times: &mut Vec<[f64; 3]>) -> Result<f64> {
    if world.world() == 1 {
        return Ok(losses.iter().sum());
    }
    let compute = (time.forward + time.backward).as_secs_f64();
    let own = [compute, world.waited().as_secs_f64()];
    let bytes: Vec<u8> = own.iter().chain(losses).flat_map(|value| value.to_ne_bytes()).collect();
    times.clear();
    let mut loss = 0.0;
    for theirs in world.all_gather(&bytes)? {
        let mut values = theirs.as_chunks::<8>().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        let [compute, waited] = [values.next(), values.next()].map(Option::unwrap_or_default);
        times.push([compute, waited, values.len() as f64]);
        values.for_each(|value| loss += value);
    }
    Ok(loss)
}
