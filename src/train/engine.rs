//! The engine of training: the model, its state, and the buffers of a step. `step.rs` has the recipe.

use crate::data::Batch;
use crate::engine::collective::ProcessGroup;
use crate::engine::kernels::machine::spin::with_spinning_workers;
use crate::engine::model::{Decoder, Hook, HookPoint, Parameters, Workspace};
use crate::engine::optim::{AdamW, GradientStats, Gradients, LrSchedule};
use crate::precision::{GradScaler, PrecisionUnit, ScaleChange, UpdateCounts};
use crate::telemetry::{ObjectiveMetric, ObjectiveMetrics};
use crate::train::objective::{BatchPass, LossSums, Objective};
use crate::train::state::{Counters, TrainState};
use crate::train::step::StepGradients;
use crate::{Error, Result};
use candle_core::Tensor;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// Everything that a step needs besides its batches.
#[derive(Debug)]
pub struct TrainEngine {
    /// The processes that take the step together; each computes its share of the micro-batches.
    pub group: Arc<dyn ProcessGroup>,
    /// The timings of the last step, by rank.
    pub timings: Vec<RankTiming>,
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
    /// Whether the statistics count exponents.
    pub count_exponents: bool,
    /// If the next updates are counted: for each parameter, the part of the last one that 16-bit weights show.
    pub update_counts: Option<Vec<UpdateCounts>>,
    /// The training signal.
    pub objective: Objective,
    /// Buffers of the passes.
    pub workspace: Workspace,
    /// Gradients of the last step, scaled.
    pub grads: Gradients,
    /// Statistics of the last step's gradients.
    pub grad_stats: GradientStats,
}

/// The timing of a step in one process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTiming {
    /// Seconds of the passes.
    pub compute: f64,
    /// Seconds of all exchanges since the start of the run.
    pub comm: f64,
    /// Number of micro-batches.
    pub micro_batches: usize,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepOutcome {
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

/// A step's figures, besides [`TrainEngine::grad_stats`].
#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// Mean of the objective's losses of all micro-batches; for fine-tuning over the targets, in nats.
    pub loss: f64,
    /// Metrics of the objective.
    pub metrics: Option<ObjectiveMetrics>,
    /// Targets of all micro-batches.
    pub targets: usize,
    /// The loss scale during the step.
    pub scale: f32,
    /// Whether it was applied.
    pub outcome: StepOutcome,
    /// The change of the scale.
    pub change: ScaleChange,
    /// Wall time of the parts.
    pub time: StepTimings,
}

/// The figures of a validation.
#[derive(Clone, Copy, Debug)]
pub struct EvalReport {
    /// Mean of the objective's losses, or minus the mean reward or margin.
    pub loss: f64,
    /// Metrics of the objective.
    pub metrics: Option<ObjectiveMetrics>,
    /// Number of targets.
    pub targets: u64,
}

/// Wall time of a step's parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepTimings {
    /// Forward passes without the head, unless a GPU replays them.
    pub forward: Duration,
    /// The head with its own backward pass, and the model's backward passes. If a GPU may replay them, all of the
    /// passes and the statistics, because the host waits for both at once.
    pub backward: Duration,
    /// Statistics of the gradients.
    pub grad_stats: Duration,
    /// Unscaling, clipping, AdamW and the new working copy; with several processes also its exchange.
    pub optimizer: Duration,
    /// Exchanges between processes, including the wait for the slowest.
    pub comm: Duration,
}

/// The state that the passes only read and the update changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateView<'a> {
    /// The working copy.
    pub(super) weights: &'a Parameters,
    /// The master weights, or the shard of this process.
    pub(super) masters: &'a Parameters,
    pub(super) adamw: &'a AdamW,
}

/// The operands of a step's passes, which only read the state.
pub(super) struct Passes<'a> {
    pub(super) group: &'a dyn ProcessGroup,
    pub(super) model: &'a Decoder,
    /// The working weights, with those of a block in FP8 rounded.
    pub(super) weights: Cow<'a, Parameters>,
    /// Rounds the other operands of a block in FP8.
    pub(super) hook: &'a mut (dyn Hook + 'static),
    pub(super) scaler: &'a GradScaler,
    pub(super) counters: Counters,
    pub(super) seed: u64,
    pub(super) count_exponents: bool,
    pub(super) objective: &'a mut Objective,
    pub(super) workspace: &'a mut Workspace,
    pub(super) grads: &'a mut Gradients,
    pub(super) grad_stats: &'a mut GradientStats,
    pub(super) timings: &'a mut Vec<RankTiming>,
}

impl Passes<'_> {
    /// Whether a GPU may record the passes of a micro-batch, and repeat them without the host, because the host does
    /// nothing during them.
    pub(super) fn may_record(&self, also: &dyn Hook) -> bool {
        let host_acts = self.objective.settings.kind.needs_log_probs()
            || self.hook.is_active()
            || also.is_active()
            || self.group.world_size() > 1
            || self.model.spec().experts.is_some();
        !host_acts && !self.weights.device().is_cpu()
    }

    /// Adds the losses of all processes in the order of the micro-batches, and keeps the timings of all. `own` has the
    /// losses of this process, and `seconds` those of its passes and its exchanges.
    pub(super) fn exchange(&mut self, own: &[LossSums], seconds: [f64; 2], micro_batches: usize) -> Result<LossSums> {
        let mut figures = seconds.to_vec();
        let len = LossSums::len(self.objective.settings.kind);
        figures.extend(own.iter().flat_map(|sums| sums.to_array().into_iter().take(len)));
        let all = self.group.all_gather(&figures)?;
        let mut sums = LossSums::default();
        self.timings.clear();
        let mut of_ranks: Vec<_> = all.iter().map(|figures| figures[2..].chunks_exact(len)).collect();
        for (figures, losses) in all.iter().zip(&of_ranks) {
            self.timings.push(RankTiming { compute: figures[0], comm: figures[1], micro_batches: losses.len() });
        }
        for index in 0..micro_batches {
            let rank = self.grads.rank_of(index, micro_batches);
            if let Some(losses) = of_ranks[rank].next() {
                sums.add(losses);
            }
        }
        Ok(sums)
    }
}

/// Replaces each parameter's counts by their sums over all processes.
pub(super) fn add_counts(counts: &mut Vec<UpdateCounts>, group: &dyn ProcessGroup) -> Result<()> {
    let own = std::mem::take(counts);
    counts.resize(own.len(), UpdateCounts::default());
    for process in group.all_gather_messages(&own)? {
        counts.iter_mut().zip(process).for_each(|(sum, count)| *sum += count);
    }
    Ok(())
}

/// Passes each block on as soon as its gradients are complete.
pub(super) struct CompleteBlocks<'a> {
    pub(super) collect: &'a mut dyn FnMut(PrecisionUnit) -> Result<()>,
    pub(super) error: Option<Error>,
}

impl Hook for CompleteBlocks<'_> {
    fn record(&mut self, _: HookPoint, _: &Tensor) -> candle_core::Result<()> {
        Ok(())
    }

    fn is_active(&self) -> bool {
        false
    }

    fn complete(&mut self, block: PrecisionUnit) -> candle_core::Result<()> {
        (self.collect)(block).map_err(|error| {
            self.error = Some(error);
            candle_core::Error::msg("a block's gradients were not collected")
        })
    }
}

impl TrainEngine {
    /// Runs one step over `micro_batches`, whose losses are weighted by their numbers of targets.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<StepReport> {
        self.step_with(micro_batches, |_, passes| passes())
    }

    /// Like [`Self::step`], but `around` runs the passes. Nothing changes the state that it receives until it returns.
    pub(super) fn step_with(
        &mut self,
        micro_batches: &[Batch],
        around: impl FnOnce(StateView<'_>, &mut dyn FnMut() -> Result<StepGradients>) -> Result<StepGradients>,
    ) -> Result<StepReport> {
        let computes_here = self.state.weights.device().is_cpu();
        let step = || {
            self.state.fp8.begin_step();
            let (mut passes, state) = self.passes()?;
            let gradients = around(state, &mut || passes.gradients(micro_batches))?;
            let report = self.update(&gradients)?;
            self.state.fp8.end_step(&*self.group)?;
            Ok(report)
        };
        if computes_here { with_spinning_workers(step) } else { step() }
    }

    /// The operands of the passes, with the scales of the last step in FP8, and the state that they leave unchanged.
    pub(super) fn passes(&mut self) -> Result<(Passes<'_>, StateView<'_>)> {
        let Self { group, timings, model, state, objective, workspace, grads, grad_stats, .. } = self;
        let TrainState { weights, masters, adamw, scaler, fp8, counters, .. } = state;
        let passes = Passes {
            group: &**group,
            model,
            weights: fp8.step_weights(weights)?,
            hook: fp8,
            scaler,
            counters: *counters,
            seed: self.seed,
            count_exponents: self.count_exponents,
            objective,
            workspace,
            grads,
            grad_stats,
            timings,
        };
        Ok((passes, StateView { weights, masters: masters.parameters(), adamw }))
    }

    /// The mean loss, without dropout, over batches from `next` until it returns `false`. Uses the training buffers,
    /// but changes nothing that outlives a step.
    pub fn evaluate(&mut self, batch: &mut Batch, mut next: impl FnMut(&mut Batch) -> bool) -> Result<EvalReport> {
        let mut own = Vec::new();
        let mut targets = 0u64;
        let mut count = 0;
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
            own.push(objective.evaluate(BatchPass { model, weights: &state.weights, batch }, workspace)?.to_array());
        }
        // In the order of the batches, which the processes take in turn.
        let all = group.all_gather(&own)?;
        let of_batch =
            |index: usize| all[index % world_size].get(index / world_size).unwrap_or(&[f64::NAN; LossSums::LEN]);
        let mut sums = LossSums::default();
        (0..all.iter().map(Vec::len).sum()).for_each(|index| sums.add(of_batch(index)));
        let settings = &objective.settings;
        let metrics = sums.metrics(settings);
        let loss = if settings.validate_margin {
            // Answers of one label have no margin.
            -metrics.and_then(|it| it.get(ObjectiveMetric::RewardsMargins)).unwrap_or(f64::NAN)
        } else {
            sums.loss / count.max(1) as f64
        };
        Ok(EvalReport { loss, metrics, targets })
    }
}
