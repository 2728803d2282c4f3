//! Converts a step's results to the records of [`crate::telemetry`].

use crate::engine::kernels::summary::TensorSummary;
use crate::engine::model::ParamSpec;
use crate::engine::optim::GradientStats;
use crate::precision::UpdateCounts;
use crate::telemetry::{
    FirstNonFinite, GradStats, Overflow, ScaleUpdate, StepRecord, StepStatus as RecordedOutcome, StepTime, TensorRecord,
};
use crate::train::engine::{StepOutcome, StepReport};
use crate::train::state::Counters;
use std::time::Duration;

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

pub(super) fn grad_stats(summary: &TensorSummary) -> GradStats {
    let stats = &summary.stats;
    GradStats {
        count: stats.count,
        min_abs: stats.min_nonzero,
        max_abs: stats.max_abs,
        zero: stats.zero,
        subnormal: stats.subnormal,
        inf: stats.inf,
        nan: stats.nan,
        norm: if stats.is_finite() { stats.norm() } else { f64::NAN },
        exponents: summary.exponents.iter().map(|(exponent, count)| (exponent as i16, count)).collect(),
    }
}

pub(super) fn tensor_record((entry, summary): (&ParamSpec, &TensorSummary)) -> TensorRecord {
    TensorRecord { name: entry.name.clone(), stats: grad_stats(summary), lost_updates: None }
}

/// The counts of all tensors together; `None` if none was counted.
pub(super) fn sum(counts: &[UpdateCounts]) -> Option<UpdateCounts> {
    let mut sum = UpdateCounts::default();
    for counts in counts {
        sum += *counts;
    }
    (sum.elements > 0).then_some(sum)
}

/// The step's record without the fields that the loop adds: rates, memory, the tensor table.
pub(super) fn step_record(
    report: &StepReport,
    summary: &GradientStats,
    counters: Counters,
    growth_tracker: u32,
    next_lr: f64,
    step: Duration,
) -> StepRecord {
    let (outcome, grad_norm, clip, lr) = match report.outcome {
        StepOutcome::Applied { grad_norm, clip, lr } => (RecordedOutcome::Applied, grad_norm, clip, lr),
        StepOutcome::Skipped => (RecordedOutcome::Skipped, f64::NAN, 1.0, next_lr),
    };
    StepRecord {
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
        clip_coef: clip,
        growth_tracker,
        scale: ScaleUpdate::new(report.scale, report.change),
        time: StepTime {
            step_ms: milliseconds(step),
            forward_ms: milliseconds(report.time.forward),
            backward_ms: milliseconds(report.time.backward),
            grad_stats_ms: milliseconds(report.time.grad_stats),
            optimizer_ms: milliseconds(report.time.optimizer),
        },
        grads: grad_stats(&summary.total),
        ..StepRecord::default()
    }
}

/// The tensors that were not finite in a skipped step.
pub(super) fn overflow(
    report: &StepReport,
    step: u64,
    layout: &[ParamSpec],
    summary: &GradientStats,
    origin: Option<FirstNonFinite>,
) -> Overflow {
    let broken = layout.iter().zip(&summary.tensors).filter(|(_, summary)| !summary.stats.is_finite());
    Overflow {
        step,
        scale: ScaleUpdate::new(report.scale, report.change),
        loss: report.loss as f32,
        max_abs: summary.total.stats.max_abs,
        tensors: broken.map(tensor_record).collect(),
        first_nonfinite: origin,
    }
}
