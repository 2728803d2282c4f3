//! One step of mixed-precision training (Micikevicius et al., 2018). FP32, FP16 and BF16 differ only in the policy and in
//! `GradScaler::disabled()`.

use crate::data::Batch;
use crate::engine::collective::gather;
use crate::engine::model::ForwardMode;
use crate::engine::optim::Update;
use crate::train::engine::{Passes, RankTiming, StepOutcome, StepReport, StepTimings, TrainEngine};
use crate::train::state::TrainState;
use crate::{Error, Result};
use std::time::Instant;

/// The result of a step's passes, next to its gradients and their statistics.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepGradients {
    /// Sum of the losses of all targets.
    loss: f64,
    targets: usize,
    time: StepTimings,
}

impl Passes<'_> {
    /// Computes the gradients of `micro_batches` and their statistics.
    pub(super) fn gradients(&mut self, micro_batches: &[Batch]) -> Result<StepGradients> {
        let Self { group, model, weights, hook, scaler, workspace, grads, .. } = self;
        let targets: usize = micro_batches.iter().map(|batch| batch.num_label_tokens).sum();
        if targets == 0 {
            let message = "there are no loss tokens: every token is masked";
            return Err(Error::data("a step's batches", message));
        }
        let mut time = StepTimings::default();
        let share = grads.begin_accumulation(micro_batches.len())?;
        let mut losses = Vec::with_capacity(share.len());
        for (i, batch) in micro_batches.iter().enumerate().take(share.end).skip(share.start) {
            let (tokens, mut narrow) = (batch.tokens(), None);
            let workspace = workspace.for_seq_len(batch.seq_len, &mut narrow)?;
            let mode = ForwardMode::Train { seed: self.seed, micro_batch: self.counters.micro_batch_index(i) };
            let clock = Instant::now();
            // 1. Forward in the compute type; the loss in FP32.
            model.forward(weights, tokens, mode, workspace, *hook)?;
            time.forward += clock.elapsed();
            // 2. Backward from scale · dL: gradients are stored in the compute type, every sum in them is FP32.
            let (seed, out) = (scaler.scale() / targets as f32, grads.micro_batch_grads());
            losses.push(model.loss_and_head_gradient(weights, &batch.labels, (seed, None), workspace, out, *hook)?);
            model.backward(weights, tokens, mode, workspace, out, *hook)?;
            grads.accumulate(model.kernels(), scaler.is_predictive())?;
            time.backward += clock.elapsed();
        }
        time.backward -= time.forward;
        // 3. Reduce: each process sums its shard of the gradients, in an order that does not depend on the number of processes.
        let clock = Instant::now();
        grads.reduce(*group)?;
        let compute = (time.forward + time.backward).as_secs_f64();
        let figures: Vec<f64> = [compute, group.comm_time().as_secs_f64()].into_iter().chain(losses).collect();
        let mut loss = 0.0;
        self.timings.clear();
        for figures in group.all_gather(&figures)? {
            let [compute, comm, losses @ ..] = figures.as_slice() else { continue };
            self.timings.push(RankTiming { compute: *compute, comm: *comm, micro_batches: losses.len() });
            for of_batch in losses {
                loss += of_batch;
            }
        }
        time.comm = clock.elapsed();
        // 4. Compute the statistics of the gradients before anything rescales them.
        let clock = Instant::now();
        grads.compute_stats(self.count_exponents, self.grad_stats, model.kernels(), *group)?;
        time.grad_stats = clock.elapsed();
        Ok(StepGradients { loss, targets, time })
    }
}

impl TrainEngine {
    /// Applies the gradients if all are finite, and updates the loss scale.
    pub(super) fn update(&mut self, gradients: StepGradients) -> Result<StepReport> {
        let Self { group, model, state, grads, grad_stats, .. } = self;
        let TrainState { weights, masters, adamw, scaler, counters, .. } = state;
        let StepGradients { loss, targets, mut time } = gradients;
        let (scale, stats, unscale) = (scaler.scale(), &grad_stats.total.stats, scaler.inverse());
        let finite = stats.is_finite() && (stats.max_abs * unscale).is_finite();
        // 5. Update the FP32 masters, or skip the step after an overflow.
        let clock = Instant::now();
        let outcome = if finite {
            let grad_norm = stats.norm() * f64::from(unscale);
            let clip = self.max_grad_norm.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0));
            let lr = self.schedule.lr(counters.updates);
            let grad_factor = (f64::from(unscale) * clip) as f32;
            let updated = masters.compute_copy_of_shard(weights, group.rank())?;
            let kernels = masters.kernels(model.kernels());
            let update = Update { lr, grad_factor, updates: counters.updates };
            adamw.step(kernels, grads.total(), update, masters, &updated)?;
            let clock = Instant::now();
            gather::all_gather(weights, &updated, &**group)?;
            time.comm += clock.elapsed();
            counters.updates += 1;
            StepOutcome::Applied { grad_norm, clip, lr }
        } else {
            StepOutcome::Skipped
        };
        time.optimizer = clock.elapsed();
        // 6. Adjust the scale: back off after an overflow; grow after enough clean steps, or into the headroom.
        let change = scaler.update_with_amax(finite, grad_stats.amax);
        counters.step += 1;
        counters.tokens += targets as u64;
        Ok(StepReport { loss: loss / targets as f64, targets, scale, outcome, change, time })
    }

    /// The mean loss, without dropout, over the targets of batches from `next` until it returns `false`, and the number
    /// of targets. Uses the training buffers, but changes nothing that outlives a step.
    pub fn evaluate(&mut self, batch: &mut Batch, mut next: impl FnMut(&mut Batch) -> bool) -> Result<(f64, u64)> {
        let (mut losses, mut targets) = (Vec::new(), 0u64);
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        for index in 0.. {
            if !next(batch) {
                break;
            }
            targets += batch.num_label_tokens as u64;
            if index % world_size != rank {
                continue;
            }
            let mut narrow = None;
            let workspace = self.workspace.for_seq_len(batch.seq_len, &mut narrow)?;
            self.model.forward(&self.state.weights, batch.tokens(), ForwardMode::Eval, workspace, &mut ())?;
            losses.push(self.model.loss(&self.state.weights, &batch.labels, workspace)?);
        }
        // In the order of the batches, which the processes take in turn.
        let all = self.group.all_gather(&losses)?;
        let batches = all.iter().map(Vec::len).sum();
        let of_batch = |index: usize| all[index % world_size].get(index / world_size).copied().unwrap_or(f64::NAN);
        let loss: f64 = (0..batches).map(of_batch).sum();
        Ok((loss / targets.max(1) as f64, targets))
    }
}
