//! One step of mixed-precision training (Micikevicius et al., 2018). FP32, FP16 and BF16 differ only in the policy and in
//! `GradScaler::disabled()`.

use crate::data::Batch;
use crate::engine::collective::{ProcessGroup, gather};
use crate::engine::model::{ForwardMode, Hook};
use crate::engine::optim::Update;
use crate::precision::UpdateCounts;
use crate::telemetry::ObjectiveMetric;
use crate::train::engine::{EvalReport, Passes, RankTiming, StepOutcome, StepReport, StepTimings, TrainEngine};
use crate::train::objective::{BatchPass, LossFactors, LossSums, Split};
use crate::train::state::{Counters, TrainState};
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// The result of a step's passes, next to its gradients and their statistics.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepGradients {
    /// Sums over all micro-batches.
    sums: LossSums,
    /// The mean loss.
    pub(super) loss: f64,
    targets: usize,
    time: StepTimings,
}

impl Passes<'_> {
    /// Computes the gradients of micro-batch `index` of the step after `counters`. `also` receives every tensor. Returns the sums of
    /// the losses and the time of the forward pass.
    pub(super) fn micro_batch(
        &mut self,
        (index, batch): (usize, &Batch),
        counters: Counters,
        LossFactors { scale, count, micro_batches }: LossFactors,
        also: &mut dyn Hook,
    ) -> Result<(LossSums, Duration)> {
        let Self { model, weights, objective, grads, .. } = self;
        let (tokens, mut narrow, pass) = (batch.tokens(), None, BatchPass { model, weights, batch });
        let workspace = self.workspace.for_seq_len(batch.seq_len, &mut narrow)?;
        let mode = ForwardMode::Train { seed: self.seed, micro_batch: counters.micro_batch_index(index) };
        let (hook, out, clock) = (&mut (&mut *self.hook, also), grads.micro_batch_grads(), Instant::now());
        // 1. Forward in the compute type; the loss in FP32.
        objective.refer(pass, workspace, Split::Train)?;
        let balance = model.spec().experts.map_or(0.0, |experts| experts.balance) / micro_batches as f64;
        workspace.balance_experts(f64::from(scale) * balance, &batch.row_lens);
        model.forward(weights, tokens, mode, workspace, hook)?;
        let forward = clock.elapsed();
        // 2. Backward from scale · dL · weight: gradients are stored in the compute type, every sum in them is FP32.
        objective.weigh(pass, workspace)?;
        let seed = (scale / count as f32, objective.weights(batch));
        let nll = model.loss_and_head_gradient(weights, &batch.labels, seed, workspace, out, hook)?;
        let mut sums = objective.sums(pass, workspace, nll)?;
        sums.loss += count as f64 * balance * workspace.balance_loss();
        model.backward(weights, tokens, mode, workspace, out, hook)?;
        Ok((sums, forward))
    }

    /// Computes the gradients of `micro_batches` and their statistics.
    pub(super) fn gradients(&mut self, micro_batches: &[Batch]) -> Result<StepGradients> {
        let targets: usize = micro_batches.iter().map(|batch| batch.num_label_tokens).sum();
        if targets == 0 {
            let message = "there are no loss tokens: every token is masked";
            return Err(Error::data("a step's batches", message));
        }
        let factors = LossFactors::new(self.scaler.scale(), self.objective, micro_batches);
        let mut time = StepTimings::default();
        let share = self.grads.begin_accumulation(micro_batches.len())?;
        let mut losses = Vec::with_capacity(share.len());
        for (i, batch) in micro_batches.iter().enumerate().take(share.end).skip(share.start) {
            let clock = Instant::now();
            let (sums, forward) = self.micro_batch((i, batch), self.counters, factors, &mut ())?;
            losses.push(sums);
            self.grads.accumulate(self.model.kernels(), self.scaler.is_predictive())?;
            time.forward += forward;
            time.backward += clock.elapsed().saturating_sub(forward);
        }
        let Self { group, model, grads, objective, .. } = self;
        // 3. Reduce: each process sums its shard of the gradients, in an order that does not depend on the number of processes.
        let clock = Instant::now();
        grads.reduce(model.kernels(), *group)?;
        let compute = (time.forward + time.backward).as_secs_f64();
        let (figures, len) = ([compute, group.comm_time().as_secs_f64()], LossSums::len(objective.kind()));
        let losses = losses.iter().flat_map(|sums| sums.to_array().into_iter().take(len));
        let (figures, mut sums) = (figures.into_iter().chain(losses).collect::<Vec<f64>>(), LossSums::default());
        self.timings.clear();
        for figures in group.all_gather(&figures)? {
            let [compute, comm, losses @ ..] = figures.as_slice() else { continue };
            self.timings.push(RankTiming { compute: *compute, comm: *comm, micro_batches: losses.len() / len });
            losses.chunks_exact(len).for_each(|of_batch| sums.add(of_batch));
        }
        time.comm = clock.elapsed();
        // 4. Compute the statistics of the gradients before anything rescales them.
        let clock = Instant::now();
        grads.compute_stats(self.count_exponents, self.grad_stats, model.kernels(), *group)?;
        time.grad_stats = clock.elapsed();
        Ok(StepGradients { sums, loss: sums.loss / factors.count as f64, targets, time })
    }
}

/// Replaces each parameter's counts by their sums over all processes.
fn add_counts(counts: &mut Vec<UpdateCounts>, group: &dyn ProcessGroup) -> Result<()> {
    let own = std::mem::take(counts);
    counts.resize(own.len(), UpdateCounts::default());
    for process in group.all_gather_messages(&own)? {
        counts.iter_mut().zip(process).for_each(|(sum, count)| *sum += count);
    }
    Ok(())
}

impl TrainEngine {
    /// Applies the gradients if all are finite, and updates the loss scale.
    pub(super) fn update(&mut self, gradients: &StepGradients) -> Result<StepReport> {
        let Self { group, model, state, grads, grad_stats, update_counts, .. } = self;
        let TrainState { weights, masters, adamw, scaler, counters, .. } = state;
        let StepGradients { sums, loss, targets, mut time } = *gradients;
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
            adamw.step(kernels, grads.total(), update, masters, &updated, update_counts.as_mut())?;
            update_counts.as_mut().map_or(Ok(()), |counts| add_counts(counts, &**group))?;
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
        let metrics = sums.metrics(self.objective.settings());
        Ok(StepReport { loss, metrics, targets, scale, outcome, change, time })
    }

    /// The mean loss, without dropout, over batches from `next` until it returns `false`. Uses the training buffers, but changes
    /// nothing that outlives a step.
    pub fn evaluate(&mut self, batch: &mut Batch, mut next: impl FnMut(&mut Batch) -> bool) -> Result<EvalReport> {
        let (mut own, mut targets, mut count) = (Vec::new(), 0u64, 0);
        let Self { group, model, state, workspace, objective, .. } = self;
        let (rank, world_size) = (group.rank(), group.world_size());
        for index in 0.. {
            if !next(batch) {
                break;
            }
            targets += batch.num_label_tokens as u64;
            count += objective.count(std::slice::from_ref(batch));
            if index % world_size != rank {
                continue;
            }
            let mut narrow = None;
            let workspace = workspace.for_seq_len(batch.seq_len, &mut narrow)?;
            own.push(objective.evaluate(BatchPass { model, weights: &state.weights, batch }, workspace)?.to_array());
        }
        // In the order of the batches, which the processes take in turn.
        let all = group.all_gather(&own)?;
        let of_batch =
            |index: usize| all[index % world_size].get(index / world_size).unwrap_or(&[f64::NAN; LossSums::LEN]);
        let mut sums = LossSums::default();
        (0..all.iter().map(Vec::len).sum()).for_each(|index| sums.add(of_batch(index)));
        let settings = objective.settings();
        let metrics = sums.metrics(settings);
        let margin =
            metrics.and_then(|it| it.get(ObjectiveMetric::RewardsMargins)).filter(|_| settings.validate_margin);
        let loss = margin.map_or(sums.loss / count.max(1) as f64, |margin| -margin);
        Ok(EvalReport { loss, metrics, targets })
    }
}
