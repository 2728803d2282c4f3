//! One step of mixed-precision training (Micikevicius et al., 2018). FP32, FP16 and BF16 differ only in the policy and
//! in `GradScaler::disabled()`.

use crate::data::Batch;
use crate::engine::collective::gather;
use crate::engine::kernels::pass::PassInputs;
use crate::engine::model::{ForwardMode, Hook, Parameters};
use crate::engine::optim::{Collector, Gradients, Update};
use crate::precision::PrecisionUnit;
use crate::train::engine::{CompleteBlocks, Passes, StepOutcome, StepReport, StepTimings, TrainEngine, add_counts};
use crate::train::objective::{BatchPass, LossFactors, LossSums, Split};
use crate::train::state::TrainState;
use crate::{Error, Result};
use candle_core::Tensor;
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

pub(super) enum BatchLosses {
    Sums(Box<LossSums>),
    /// The loss of each target, which a GPU may not have computed yet.
    OnDevice(Tensor),
}

impl Passes<'_> {
    /// Computes the gradients of micro-batch `index` of the step after `self.counters`. `also` receives every tensor,
    /// and `collect` the gradients of each block when they are complete. Returns the losses and the time of the forward
    /// pass.
    pub(super) fn micro_batch(
        &mut self,
        index: usize,
        batch: &Batch,
        LossFactors { scale, count, micro_batches }: LossFactors,
        also: &mut dyn Hook,
        collect: &mut dyn FnMut(&Gradients, PrecisionUnit) -> Result<()>,
    ) -> Result<(BatchLosses, Duration)> {
        let records = self.may_record(also);
        let model = self.model;
        let spec = model.spec();
        let weights: &Parameters = &self.weights;
        let objective = &mut *self.objective;
        let grads: &Gradients = self.grads;
        let out = grads.micro_batch_grads();
        let pass = BatchPass { model, weights, batch };
        let mode = ForwardMode::Train { seed: self.seed, micro_batch: self.counters.micro_batch_index(index) };
        let clock = Instant::now();
        objective.refer(pass, self.workspace, Split::Train)?;
        let mut narrow = None;
        let workspace = self.workspace.for_shape(batch.shape(), &mut narrow)?;
        let mut blocks = CompleteBlocks { collect: &mut |block| collect(grads, block), error: None };
        let mut hook = (&mut (&mut *self.hook, also), &mut blocks);
        let weighs_after_forward = objective.settings.kind.needs_log_probs();
        if !weighs_after_forward {
            objective.weigh(pass, workspace)?;
        }
        let balance = spec.experts.map_or(0.0, |experts| experts.balance) / micro_batches as f64;
        workspace.balance_experts(f64::from(scale) * balance, &batch.row_lens);
        let seed = scale / count as f32;
        let target_weights = if records { objective.weights(batch).map(<[f32]>::to_vec) } else { None };
        let inputs = PassInputs {
            seed: (!weighs_after_forward).then_some(seed),
            weights: target_weights.as_deref(),
            buffers: records.then(|| workspace.pass_identity([weights, out], batch.tokens())),
            ..model.pass_inputs(batch.tokens(), &batch.labels, mode)
        };
        let mut forward = Duration::ZERO;
        let done = model.kernels().pass(&inputs, &mut || {
            let hook: &mut dyn Hook = if records { &mut () } else { &mut hook };
            // 1. Forward in the compute type; the loss in FP32.
            model.forward(weights, batch.tokens(), mode, workspace, hook)?;
            forward = clock.elapsed();
            // 2. Backward from scale · dL · weight: gradients are stored in the compute type, every sum in them is
            //    FP32.
            if weighs_after_forward {
                objective.weigh(pass, workspace)?;
            }
            let seed = (seed, objective.weights(batch));
            model.loss_and_head_gradient(weights, &batch.labels, seed, workspace, out, hook)?;
            model.backward(weights, batch.tokens(), mode, workspace, out, hook)
        });
        if let Some(error) = blocks.error {
            return Err(error);
        }
        done?;
        if records {
            // Recorded passes have no hook that collects them.
            for block in (spec.first_trained_block()..spec.num_layers).rev() {
                collect(grads, PrecisionUnit::Block(block))?;
            }
            return Ok((BatchLosses::OnDevice(workspace.losses().copy()?), forward));
        }
        let mut sums = objective.sums(batch, workspace.losses())?;
        sums.loss += count as f64 * balance * workspace.balance_loss();
        Ok((BatchLosses::Sums(Box::new(sums)), forward))
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
        // 3. Reduce: each process sums its shard of the gradients, in an order that does not depend on the number of
        // processes. It receives a block's while it computes those of the blocks below.
        let turns = self.grads.begin_accumulation(micro_batches.len())?;
        let group = self.group;
        let kernels = self.model.kernels();
        let measure = self.scaler.is_predictive();
        let mut losses = Vec::with_capacity(turns.len());
        Collector::with(group, kernels, measure, |collector| {
            for turn in turns {
                let clock = Instant::now();
                let waited = collector.waited;
                let index = turn.micro_batch;
                self.grads.begin_turn(turn);
                if let Some(index) = index {
                    let mut collect = |grads: &Gradients, block| grads.collect(block, collector);
                    let batch = &micro_batches[index];
                    let (found, forward) = self.micro_batch(index, batch, factors, &mut (), &mut collect)?;
                    losses.push((batch, found));
                    let waited = collector.waited.saturating_sub(waited);
                    time.forward += forward;
                    time.backward += clock.elapsed().saturating_sub(forward + waited);
                    time.comm += waited;
                }
                let clock = Instant::now();
                self.grads.end_turn(collector)?;
                time.comm += clock.elapsed();
            }
            let clock = Instant::now();
            self.grads.finish(collector)?;
            time.comm += clock.elapsed();
            Ok::<_, Error>(())
        })?;
        // 4. Compute the statistics of the gradients before anything rescales them.
        let Self { grads, objective, .. } = self;
        let compute = (time.forward + time.backward).as_secs_f64();
        let comm = group.comm_time().saturating_sub(grads.hidden());
        let clock = Instant::now();
        grads.compute_stats(self.count_exponents, self.grad_stats, kernels, group)?;
        let waits_here = losses.iter().any(|(_, losses)| matches!(losses, BatchLosses::OnDevice(_)));
        let mut own = Vec::with_capacity(losses.len());
        for (batch, losses) in losses {
            own.push(match losses {
                BatchLosses::Sums(sums) => *sums,
                BatchLosses::OnDevice(losses) => objective.sums(batch, &losses)?,
            });
        }
        // Here the host waits for recorded passes.
        *(if waits_here { &mut time.backward } else { &mut time.grad_stats }) += clock.elapsed();
        let clock = Instant::now();
        let sums = self.exchange(&own, [compute, comm.as_secs_f64()], micro_batches.len())?;
        time.comm += clock.elapsed();
        Ok(StepGradients { sums, loss: sums.loss / factors.count as f64, targets, time })
    }
}

impl TrainEngine {
    /// Applies the gradients if all are finite, and updates the loss scale.
    pub(super) fn update(&mut self, gradients: &StepGradients) -> Result<StepReport> {
        let Self { group, model, state, grads, grad_stats, update_counts, .. } = self;
        let TrainState { weights, masters, adamw, scaler, counters, .. } = state;
        let StepGradients { sums, loss, targets, mut time } = *gradients;
        let scale = scaler.scale();
        let stats = &grad_stats.total.stats;
        let unscale = scaler.inverse();
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
            if let Some(counts) = update_counts {
                add_counts(counts, &**group)?;
            }
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
        let metrics = sums.metrics(&self.objective.settings);
        Ok(StepReport { loss, metrics, targets, scale, outcome, change, time })
    }
}
