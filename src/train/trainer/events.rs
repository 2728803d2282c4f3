//! The events that the trainer emits, and the checks for divergence.

use super::Trainer;
use crate::Error;
use crate::data::{DataPosition, counted};
use crate::engine::kernels::isa::Isa;
use crate::engine::model::{ModuleId, ModuleOp, ParamSpec};
use crate::engine::optim::AdamWConfig;
use crate::precision::{FallbackRule, OnOverflow, ScaleChange, scale_text};
use crate::telemetry::{
    Cpu, Event, FinishReason, Finished, FirstNonFinite, GpuSampler, ModelShape, Overflow, ProcessId, ProcessStats,
    ScaleUpdate, ScalerSettings, Started, StepRecord, StepStatus, StepTime, cpu_name,
};
use crate::train::engine::{StepOutcome, StepReport};
use crate::train::objective::ObjectiveKind;
use crate::train::records;
use std::cmp::Reverse;
use std::time::{Duration, Instant};

/// A loss is far above chance when it exceeds this many times the loss of uniform guessing, ln(vocabulary size).
const DIVERGENCE_FACTOR: f64 = 10.0;
/// Training has diverged after this many consecutive steps far above chance.
const DIVERGENCE_STEPS: u32 = 32;
/// A run whose forward pass overflows in each of this many first steps ends: later ones use the same weights.
const MAX_FORWARD_OVERFLOWS: u32 = 4;
/// A last learning rate this many times the planned one is worth a warning.
const NOTABLE_RATE: f64 = 1.1;
/// Number of steps that the printed tokens per second are averaged over.
const RATE_STEPS: f64 = 10.0;

impl Trainer {
    /// Logs a step of duration `elapsed` on the batches starting at `position`, and schedules their repetition if the
    /// scaler retries. Returns the error if training diverged.
    pub(super) fn log_step(
        &mut self,
        position: DataPosition,
        report: &StepReport,
        origin: Option<FirstNonFinite>,
        elapsed: Duration,
    ) -> Option<Error> {
        let skipped = report.outcome == StepOutcome::Skipped;
        let at_min_scale = matches!(report.change, ScaleChange::AtMinScale { .. });
        if skipped && self.config.scaler.on_overflow == OnOverflow::Retry && !at_min_scale {
            self.progress.retry = Some(position);
            self.progress.repeated_steps += 1;
            // A number of epochs ends with its data.
            self.total_steps += u64::from(self.config.train.steps.is_none());
        }
        self.progress.last_loss = Some(report.loss);
        let (state, grad_stats) = (&self.engine.state, &self.engine.grad_stats);
        let layout = state.weights.layout();
        // The tensors that were not finite.
        let broken = layout.iter().zip(&grad_stats.tensors).filter(|(_, summary)| !summary.stats.is_finite());
        let overflow = skipped.then(|| Overflow {
            step: state.counters.step,
            scale: ScaleUpdate::new(report.scale, report.change),
            loss: report.loss as f32,
            max_abs: grad_stats.total.stats.max_abs,
            tensors: broken.map(records::tensor_record).collect(),
            first_nonfinite: origin,
        });
        let diverged = overflow.as_ref().filter(|_| state.scaler.is_stuck()).map(|last| self.diverged(last));
        let diverged =
            diverged.or_else(|| self.check_divergence(report.loss)).or_else(|| self.check_forward(report.loss));
        self.record(report, overflow, elapsed);
        diverged
    }

    fn record(&mut self, report: &StepReport, overflow: Option<Overflow>, elapsed: Duration) {
        let engine = &self.engine;
        let state = &engine.state;
        let counters = state.counters;
        let mean = self.progress.step_seconds.unwrap_or(elapsed.as_secs_f64());
        let seconds = mean + (elapsed.as_secs_f64() - mean) / RATE_STEPS;
        self.progress.step_seconds = Some(seconds);
        let (outcome, grad_norm, clip_coef, lr) = match report.outcome {
            StepOutcome::Applied { grad_norm, clip, lr } => (StepStatus::Applied, grad_norm, clip, lr),
            StepOutcome::Skipped => (StepStatus::Skipped, f64::NAN, 1.0, engine.schedule.lr(counters.updates)),
        };
        let counts = engine.update_counts.as_deref().unwrap_or_default();
        let lost_updates = records::sum(counts);
        let due = counters.step.is_multiple_of(self.config.telemetry.grad_stats_every);
        let mut tensors = Vec::new();
        if overflow.is_some() || due || lost_updates.is_some() {
            let summaries = state.weights.layout().iter().zip(&engine.grad_stats.tensors);
            tensors = summaries.map(records::tensor_record).collect();
            for (tensor, counts) in tensors.iter_mut().zip(counts) {
                tensor.lost_updates = Some(*counts).filter(|counts| counts.elements > 0);
            }
        }
        let extended = self.progress.retry.is_some() && self.config.train.steps.is_none();
        let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
        let process = ProcessStats::now();
        let record = StepRecord {
            step: counters.step,
            loss: report.loss as f32,
            objective: report.metrics,
            loss_scale: report.scale,
            outcome,
            grad_norm,
            tokens: counters.tokens,
            updates: counters.updates,
            skipped: counters.skipped(),
            lr,
            clip_coef,
            growth_tracker: state.scaler.state().growth_tracker,
            scale: ScaleUpdate::new(report.scale, report.change),
            time: StepTime {
                step_ms: milliseconds(elapsed),
                forward_ms: milliseconds(report.time.forward),
                backward_ms: milliseconds(report.time.backward),
                grad_stats_ms: milliseconds(report.time.grad_stats),
                optimizer_ms: milliseconds(report.time.optimizer),
            },
            grads: records::grad_stats(&engine.grad_stats.total),
            tokens_per_s: report.targets as f64 / seconds,
            epoch: self.loader.epochs(),
            rss_bytes: process.rss_bytes,
            peak_rss_bytes: process.peak_rss_bytes,
            cpu_seconds: process.cpu_seconds,
            gpu: self.gpu.as_ref().and_then(GpuSampler::newest),
            lost_updates,
            total_steps: extended.then_some(self.total_steps),
            tensors,
        };
        self.emitter.emit(Event::Step(Box::new(record)));
        if let Some(overflow) = overflow {
            self.emitter.emit(Event::Overflow(overflow));
        }
    }

    fn diverged(&self, last: &Overflow) -> Error {
        let step = last.step;
        let streak = self.engine.state.scaler.state().min_scale_streak;
        let scale = scale_text(self.engine.state.scaler.scale());
        let origin = last.first_nonfinite.as_ref().map_or_else(String::new, |origin| {
            format!(" (first in the {} of `{}`)", origin.tensor.replace('_', " "), origin.layer)
        });
        let cause = if last.loss.is_finite() {
            let first = self.first_overflowed_gradient(last);
            let tensors = counted(last.tensors.len(), "tensor");
            format!("the loss is finite, but `{first}` overflows, {tensors} in total{origin}")
        } else {
            self.advice_for_trained_weights(&origin)
        };
        let good = self.last_checkpoint();
        Error::Diverged {
            step,
            message: format!("{streak} consecutive steps overflowed at scale {scale}: {cause}; {good}"),
        }
    }

    /// The next step after the forward pass of trained weights overflowed, first at `origin`.
    pub(super) fn advice_for_trained_weights(&self, origin: &str) -> String {
        let wider = if self.config.dtype.needs_loss_scale() { ", or use bf16" } else { "" };
        format!("the forward pass is not finite{origin}, which no loss scale can fix; lower the learning rate{wider}")
    }

    /// The next step after overflows in the forward pass of weights that were not trained yet.
    pub(super) fn advice_for_forward_overflows(&self) -> String {
        format!(
            "the forward pass overflows, which no loss scale changes; use `--dtype bf16`, or `--set \
             precision.fallback=layer`; `finetune fp16-check {}` measures where",
            self.config.model
        )
    }

    /// The name of the overflowed gradient that the backward pass computes first: the head's, then those of the last
    /// block.
    fn first_overflowed_gradient(&self, overflow: &Overflow) -> String {
        let layout = self.engine.state.weights.layout();
        let broken = layout.iter().filter(|entry| overflow.tensors.iter().any(|tensor| tensor.name == entry.name));
        let order = |entry: &&ParamSpec| match entry.layer {
            ModuleId { block: Some(block), op } => (1, usize::MAX - block, Reverse(op)),
            ModuleId { block: None, op: op @ (ModuleOp::Embedding | ModuleOp::Positions) } => (2, 0, Reverse(op)),
            ModuleId { block: None, op } => (0, 0, Reverse(op)),
        };
        broken.min_by_key(order).map_or_else(|| "a gradient".into(), |entry| entry.name.clone())
    }

    /// The error once the loss has been far above chance for [`DIVERGENCE_STEPS`] steps.
    fn check_divergence(&mut self, loss: f64) -> Option<Error> {
        let chance = (self.engine.model.spec().vocab_size as f64).ln();
        // The losses of preferences have no such scale.
        let far = self.config.objective.kind == ObjectiveKind::Sft && loss > DIVERGENCE_FACTOR * chance;
        self.progress.diverging_steps = if far { self.progress.diverging_steps + 1 } else { 0 };
        if self.progress.diverging_steps < DIVERGENCE_STEPS {
            return None;
        }
        let clip = if self.engine.max_grad_norm.is_none() { ", or clip gradients (`--max-grad-norm 1`)" } else { "" };
        let message = format!(
            "the loss of the last {DIVERGENCE_STEPS} steps, now {loss:.1}, is more than {DIVERGENCE_FACTOR} times the \
             {chance:.2} of random guessing; lower the learning rate{clip}; {}",
            self.last_checkpoint()
        );
        Some(Error::Diverged { step: self.engine.state.counters.step, message })
    }

    /// The error once the forward passes of the first [`MAX_FORWARD_OVERFLOWS`] steps have overflowed. With a fallback,
    /// layers may move to FP32 first.
    fn check_forward(&mut self, loss: f64) -> Option<Error> {
        let counters = self.engine.state.counters;
        let overflows = counters.updates == 0 && !loss.is_finite() && self.config.dtype.needs_loss_scale();
        self.progress.forward_overflows = if overflows { self.progress.forward_overflows + 1 } else { 0 };
        if self.progress.forward_overflows < MAX_FORWARD_OVERFLOWS
            || self.config.precision.fallback != FallbackRule::Off
        {
            return None;
        }
        let message = format!("no step could be applied: {}", self.advice_for_forward_overflows());
        Some(Error::Diverged { step: counters.step, message })
    }

    fn last_checkpoint(&self) -> String {
        self.progress.checkpoint.as_ref().map_or_else(
            || "no checkpoint was written yet".to_owned(),
            |path| format!("the last checkpoint is `{}`", path.display()),
        )
    }

    pub(super) fn started(&self) -> Started {
        let config = &self.config;
        let shape = self.engine.model.spec();
        let train = &config.train;
        let tokens_per_step = (config.objective.rows(train.batch_size) * train.seq_len * train.grad_accum) as u64;
        let tokens_per_epoch = self.loader.tokens_per_epoch();
        let steps = self.total_steps.saturating_add_signed(self.progress.extra_steps.saturating_neg());
        let steps = steps.saturating_sub(self.progress.repeated_steps);
        let AdamWConfig { betas: [beta1, beta2], eps, weight_decay } = config.adamw();
        let schedule = &self.engine.schedule;
        let run = self.run.as_ref().and_then(|run| run.path().file_name());
        Started {
            program: format!("finetune {}", env!("CARGO_PKG_VERSION")),
            run: run.map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            process: ProcessId::own(),
            cpu: Cpu {
                name: cpu_name().unwrap_or_else(|| std::env::consts::ARCH.into()),
                threads: rayon::current_num_threads(),
                isa: Isa::current().to_string(),
            },
            device: self.device.clone(),
            os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            model: config.model.clone(),
            shape: ModelShape {
                n_layer: shape.num_layers,
                n_head: shape.heads,
                n_embd: shape.hidden_size,
                n_positions: shape.max_position_embeddings,
                vocab_size: shape.vocab_size,
            },
            model_config: serde_json::from_str(&shape.to_json("float32")).unwrap_or_default(),
            parameters: shape.parameter_count(),
            policy: config.dtype.to_string(),
            scaler: ScalerSettings::from(&config.grad_scaler()),
            optimizer: format!("AdamW betas {beta1}, {beta2} eps {eps:e} weight decay {weight_decay}"),
            max_grad_norm: self.engine.max_grad_norm.map(|norm| norm as f32),
            schedule: format!(
                "{:?} to {} after {} warm-up updates, down to {}",
                schedule.kind,
                schedule.peak_lr,
                schedule.warmup_updates,
                // As f32, so that 0.003 · 0.1 reads 0.0003.
                (schedule.peak_lr * schedule.min_lr_ratio) as f32
            )
            .to_lowercase(),
            data: self.data.clone(),
            tokens_per_step,
            tokens_per_epoch,
            epochs: self.loader.epochs_in(steps / config.objective.iterations(), train.grad_accum),
            total_steps: self.total_steps,
            seed: config.seed,
            resumed_from: self.progress.resumed_from,
            fallback: self.engine.in_fallback(),
            config: serde_json::to_value(config).unwrap_or_default(),
        }
    }

    /// Warns if skipped steps have left the learning rate above the schedule's.
    pub(super) fn warn_about_schedule(&mut self) {
        let counters = self.engine.state.counters;
        let schedule = &self.engine.schedule;
        let (Some(updates), skipped) = (counters.updates.checked_sub(1), counters.skipped()) else { return };
        let last = schedule.lr(updates);
        let planned = schedule.lr(schedule.total_updates.saturating_sub(1));
        if counters.step == self.total_steps && last > NOTABLE_RATE * planned {
            self.warn(format!(
                "the learning rate ended at {last:.1e} instead of {planned:.1e}: its schedule does not count skipped \
                 steps ({skipped})"
            ));
        }
    }

    pub(super) fn finish(&mut self, reason: FinishReason, began: Instant) {
        self.run.iter().for_each(|run| run.note_end(reason));
        let counters = self.engine.state.counters;
        self.emitter.emit(Event::Finished(Finished {
            reason,
            step: counters.step,
            updates: counters.updates,
            skipped: counters.skipped(),
            tokens: counters.tokens,
            loss: self.progress.last_loss.map_or(f32::NAN, |loss| loss as f32),
            val_loss: self.progress.validation.map(|evaluation| evaluation.loss),
            loss_scale: self.engine.state.scaler.scale(),
            seconds: began.elapsed().as_secs_f64(),
            peak_rss_bytes: ProcessStats::now().peak_rss_bytes,
            checkpoint: self.progress.checkpoint.as_ref().map(|path| path.display().to_string()),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::collective::SingleProcess;
    use crate::train::config::Config;
    use std::sync::Arc;

    #[test]
    fn only_consecutive_overflows_and_high_losses_end_a_run() {
        type Check = fn(&mut Trainer, f64) -> Option<Error>;
        let mut config = Config::default();
        (config.train.batch_size, config.train.seq_len) = (1, 16);
        let mut trainer = Trainer::new(Arc::new(SingleProcess), config, None, &mut |_| ()).unwrap();
        for (check, [bad, worse], steps) in [
            (Trainer::check_forward as Check, [f64::NAN, f64::INFINITY], MAX_FORWARD_OVERFLOWS),
            (Trainer::check_divergence, [100.0; 2], DIVERGENCE_STEPS),
        ] {
            for _ in 0..2 {
                assert!((1..steps).all(|_| check(&mut trainer, bad).is_none()));
                assert!(check(&mut trainer, 1.0).is_none());
            }
            assert_eq!((1..=steps).find(|_| check(&mut trainer, worse).is_some()), Some(steps));
        }
        trainer.engine.state.counters.updates = 1;
        assert!(trainer.check_forward(f64::NAN).is_none(), "the weights are trained");
    }
}
