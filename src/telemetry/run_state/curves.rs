//! The series that charts are drawn from.

use super::metrics::SMOOTHING;
use crate::telemetry::{Curve, Series, StepRecord, StepSeries, StepStatus};

/// Every curve of a run.
#[derive(Debug, Clone)]
pub struct Curves {
    /// Losses of the batches.
    pub loss: Curve,
    /// The losses smoothed over each window of [`SMOOTHING`].
    pub smoothed: [Curve; SMOOTHING.len()],
    /// Validation losses.
    pub validation: Series,
    /// log2 of the loss scale.
    pub scale: StepSeries,
    /// log2 of the loss scale at each skipped step.
    pub skips: Series,
    /// The learning rate.
    pub lr: Curve,
    /// The global gradient norm, unscaled, before clipping.
    pub grad_norm: Curve,
    /// Tokens per second.
    pub tokens_per_s: Curve,
    /// Resident memory, bytes.
    pub memory: Curve,
}

impl Curves {
    /// Empty curves of at most `capacity` buckets.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            loss: Curve::new(capacity),
            smoothed: std::array::from_fn(|_| Curve::new(capacity)),
            validation: Series::new(capacity),
            scale: StepSeries::new(capacity),
            skips: Series::new(capacity),
            lr: Curve::new(capacity),
            grad_norm: Curve::new(capacity),
            tokens_per_s: Curve::new(capacity),
            memory: Curve::new(capacity),
        }
    }

    pub(super) fn step(&mut self, step: &StepRecord, s: f64, smoothed: [Option<f64>; SMOOTHING.len()]) {
        let at = step.step;
        self.loss.push(at, s, f64::from(step.loss));
        for (curve, value) in self.smoothed.iter_mut().zip(smoothed) {
            if let Some(value) = value {
                curve.push(at, s, value);
            }
        }
        let scale = f64::from(step.loss_scale).log2();
        if step.loss_scale > 0.0 {
            self.scale.push(at, s, scale);
        }
        if step.outcome == StepStatus::Skipped {
            self.skips.push(at, s, scale);
        }
        self.grad_norm.push(at, s, step.grad_norm);
        self.tokens_per_s.push(at, s, step.tokens_per_s);
        // Skimmed lines lack the later fields.
        if step.time.step_ms > 0.0 {
            self.lr.push(at, s, step.lr);
        }
        if let Some(rss) = step.rss_bytes {
            self.memory.push(at, s, rss as f64);
        }
    }

    /// Removes the steps after `step`.
    pub(super) fn truncate_after(&mut self, step: u64) {
        for curve in [&mut self.loss, &mut self.lr, &mut self.grad_norm, &mut self.tokens_per_s, &mut self.memory] {
            curve.truncate_after(step);
        }
        self.smoothed.iter_mut().for_each(|curve| curve.truncate_after(step));
        self.validation.truncate_after(step);
        self.skips.truncate_after(step);
        self.scale.truncate_after(step);
    }
}
