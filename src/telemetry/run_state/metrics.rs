//! A run's summary metrics and the sums that they are computed from.

use super::retries;
use super::rows::keep;
use crate::precision::ExponentHistogram;
use crate::telemetry::eta::Average;
use crate::telemetry::{Fp32Probe, ObjectiveMetrics, ScaleCause, Started, StepRecord, StepStatus, Validation};
use std::collections::{BTreeMap, VecDeque};

/// Steps whose losses are averaged into one figure, because a single batch's loss is noisy.
const WINDOW: usize = 10;
/// The windows, in steps, over which the loss is smoothed.
pub const SMOOTHING: [u32; 4] = [5, 20, 50, 200];

/// The index of the window that suits a run of `total_steps`; a wide one lags in a short run.
pub fn smoothing_for(total_steps: u64) -> usize {
    match total_steps {
        1..400 => 0,
        0 | 400..4000 => 1,
        4000..40_000 => 2,
        _ => 3,
    }
}

/// A run's summary metrics.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunMetrics {
    /// Steps attempted.
    pub steps: u64,
    /// Steps applied.
    pub updates: u64,
    /// Overflow events.
    pub overflows: u64,
    /// Steps skipped.
    pub skipped: u64,
    /// The longest streak of skipped steps.
    pub longest_streak: u64,
    /// Layers in fallback at the end; `None` if fallback is off.
    pub in_fallback: Option<u64>,
    /// Repeated attempts at a batch that had overflowed.
    pub repeated: u64,
    /// Loss tokens of skipped batches that were not repeated.
    pub tokens_lost: u64,
    /// Mean loss of the applied steps among the last `WINDOW` steps.
    pub loss: Option<f64>,
    /// The lowest mean loss of `WINDOW` consecutive applied steps.
    pub best_loss: Option<f64>,
    /// The last validation loss, and the lowest.
    pub validation: Option<(f64, f64)>,
    /// The last perplexity, and the lowest.
    pub perplexity: Option<(f64, f64)>,
    /// The metrics of the objective in the last validation.
    pub objective: Option<ObjectiveMetrics>,
    /// The first loss scale, and the one after the last step.
    pub scale: Option<(f32, f32)>,
    /// The lowest and the highest loss scale.
    pub scale_range: Option<(f32, f32)>,
    /// Number of times the scale grew.
    pub growths: u64,
    /// Share of the gradients that FP32 probes found flushed to zero.
    pub flushed: Option<f64>,
    /// Share of the applied steps' scaled gradients that were subnormal.
    pub subnormal: Option<f64>,
    /// Tokens per second, counting only time within steps.
    pub tokens_per_s: Option<f64>,
    /// Seconds the run took, including validation and saving.
    pub seconds: f64,
    /// Largest resident memory, in bytes.
    pub peak_rss: Option<u64>,
}

/// Totals over all FP32 probes.
#[derive(Debug, Clone, Default)]
pub struct ProbeTotals {
    /// Elements that are not zero in FP32.
    pub nonzero: u64,
    /// Elements that the run's dtype flushed to zero although they are not zero in FP32.
    pub flushed: u64,
    /// The FP32 gradients by exponent, unscaled.
    pub exponents: ExponentHistogram,
    /// The largest activations, by layer.
    pub activations: BTreeMap<String, f32>,
}

/// Accumulates the metrics. Copied at every checkpoint, so that a resume can rewind to it.
#[derive(Debug, Clone, Default)]
pub(super) struct MetricsAccumulator {
    pub(super) figures: RunMetrics,
    pub(super) probed: ProbeTotals,
    /// The lowest validation loss and its step.
    pub(super) best_validation: Option<(f64, u64)>,
    smoothed: [Average; SMOOTHING.len()],
    /// Whether the next step repeats this one's batch.
    repeats: bool,
    /// Steps skipped since the last applied one.
    streak: u64,
    /// Losses of the last steps; `None` for a skipped one.
    last: VecDeque<Option<f64>>,
    /// Losses of the last applied steps.
    applied: VecDeque<f64>,
    /// Gradients of applied steps, and the subnormal ones.
    gradients: (u64, u64),
    /// Tokens at the first step and at the last, and milliseconds of the steps between.
    pace: Option<(u64, u64, f64)>,
}

impl MetricsAccumulator {
    pub(super) fn step(&mut self, step: &StepRecord, started: Option<&Started>) {
        let figures = &mut self.figures;
        let loss = f64::from(step.loss);
        let applied = step.outcome == StepStatus::Applied;
        figures.steps = step.step;
        figures.updates = step.updates;
        figures.repeated += u64::from(self.repeats);
        self.streak = if applied { 0 } else { self.streak + 1 };
        figures.longest_streak = figures.longest_streak.max(self.streak);
        self.repeats = !applied && started.is_some_and(retries) && step.scale.cause != ScaleCause::AtMinScale;
        if applied {
            // A damaged log may have any number.
            let (count, subnormal) = self.gradients;
            self.gradients = (count.saturating_add(step.grads.count), subnormal.saturating_add(step.grads.subnormal));
            keep(&mut self.applied, loss, WINDOW);
            if self.applied.len() == WINDOW {
                let mean = mean(self.applied.iter().copied());
                figures.best_loss = Some(figures.best_loss.map_or(mean, |best| best.min(mean)));
            }
        } else {
            figures.skipped += 1;
            // Unknown for the first record of a log that is read from its middle.
            let before = if step.step == 1 { 0 } else { self.pace.map_or(step.tokens, |(_, last, _)| last) };
            let lost = if self.repeats { 0 } else { step.tokens.saturating_sub(before) };
            figures.tokens_lost = figures.tokens_lost.saturating_add(lost);
        }
        keep(&mut self.last, applied.then_some(loss), WINDOW);
        if step.loss_scale > 0.0 {
            let (low, high) = figures.scale_range.unwrap_or((step.loss_scale, step.loss_scale));
            figures.scale_range = Some((low.min(step.loss_scale), high.max(step.loss_scale)));
            let after = if step.scale.to > 0.0 { step.scale.to } else { step.loss_scale };
            figures.scale = Some((figures.scale.map_or(step.loss_scale, |(first, _)| first), after));
        }
        figures.growths += u64::from(step.scale.cause == ScaleCause::Grew);
        figures.peak_rss = figures.peak_rss.max(step.peak_rss_bytes).max(step.rss_bytes);
        let (first, _, ms) = self.pace.unwrap_or((step.tokens, step.tokens, -step.time.step_ms));
        self.pace = Some((first, step.tokens, ms + step.time.step_ms));
        if loss.is_finite() {
            for (average, window) in self.smoothed.iter_mut().zip(SMOOTHING) {
                average.push(loss, 1.0 / f64::from(window));
            }
        }
    }

    pub(super) fn eval(&mut self, eval: &Validation) {
        let latest =
            |known: Option<(f64, f64)>, value: f64| Some((value, known.map_or(value, |(_, best)| best.min(value))));
        self.figures.validation = latest(self.figures.validation, eval.loss);
        if let Some(perplexity) = eval.perplexity() {
            self.figures.perplexity = latest(self.figures.perplexity, perplexity);
        }
        self.figures.objective = eval.objective.or(self.figures.objective);
        if self.best_validation.is_none_or(|(best, _)| eval.loss < best || best.is_nan()) {
            self.best_validation = Some((eval.loss, eval.step));
        }
    }

    pub(super) fn probe(&mut self, probe: &Fp32Probe) {
        let totals = &mut self.probed;
        let (flushed, nonzero) = probe.underflow();
        totals.flushed = totals.flushed.saturating_add(flushed);
        totals.nonzero = totals.nonzero.saturating_add(nonzero);
        totals.exponents.merge(&probe.grads.histogram());
        for activation in &probe.activations {
            let largest = totals.activations.entry(activation.name.clone()).or_default();
            *largest = largest.max(activation.max_abs);
        }
    }

    /// The loss smoothed over one of the windows of [`SMOOTHING`]; `None` before the first step.
    pub(super) fn smoothed(&self, window: usize) -> Option<f64> {
        self.smoothed.get(window).copied().and_then(Average::value)
    }

    pub(super) fn figures(&self) -> RunMetrics {
        let share = |(whole, part): (u64, u64)| (whole > 0).then(|| part as f64 / whole as f64);
        let rate = |(first, last, ms)| (ms > 0.0 && last > first).then(|| (last - first) as f64 / ms * 1e3);
        RunMetrics {
            flushed: share((self.probed.nonzero, self.probed.flushed)),
            subnormal: share(self.gradients),
            loss: (!self.last.is_empty()).then(|| mean(self.last.iter().flatten().copied())),
            tokens_per_s: self.pace.and_then(rate),
            ..self.figures.clone()
        }
    }
}

/// NaN for no values, as when all the last steps were skipped.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count)
}
