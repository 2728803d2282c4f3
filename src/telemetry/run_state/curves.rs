//! The series that charts are drawn from.

use super::metrics::SMOOTHING;
use crate::precision::UpdateCounts;
use crate::telemetry::{Curve, Fp32Probe, ObjectiveMetric, Series, StepRecord, StepSeries, StepStatus};

/// A figure of a step that is drawn as a curve.
#[derive(Debug)]
pub struct Plotted {
    /// Its name before a value.
    pub short: &'static str,
    /// Its name as a title.
    pub title: &'static str,
    /// Its kind, which determines the format of values.
    pub quantity: Quantity,
    of: Source,
}

/// Extracts a step's value; `None` if the record lacks it.
#[derive(Debug)]
enum Source {
    Step(fn(&StepRecord) -> Option<f64>),
    Objective(ObjectiveMetric),
    Probe(fn(&Fp32Probe) -> Option<f64>),
}

impl Source {
    fn read(&self, step: &StepRecord) -> Option<f64> {
        match self {
            Self::Step(of) => of(step),
            Self::Objective(metric) => step.objective.as_ref()?.get(*metric),
            Self::Probe(_) => None,
        }
    }
}

/// The kind of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// A learning rate, whose axis begins at zero.
    Rate,
    /// A plain number.
    Number,
    /// A large number of things.
    Count,
    /// Bytes.
    Bytes,
    /// log2 of a magnitude.
    Log2,
    /// A share of a whole.
    Share,
}

/// The figures that are drawn as curves besides losses and the loss scale. Every chart of one is made from its row
/// here.
pub const PLOTTED: [Plotted; 19] = [
    // A skimmed line lacks the later fields.
    figure("lr", "Learning rate", Quantity::Rate, Source::Step(|step| (step.time.step_ms > 0.0).then_some(step.lr))),
    figure("|g|", "Gradient norm, unscaled", Quantity::Number, Source::Step(|step| Some(step.grad_norm))),
    figure("tok/s", "Tokens per second", Quantity::Count, Source::Step(|step| Some(step.tokens_per_s))),
    figure("mem", "Resident memory", Quantity::Bytes, Source::Step(|step| step.rss_bytes.map(|rss| rss as f64))),
    figure("|g| p1", "Gradients, unscaled: first percentile", Quantity::Log2, Source::Step(StepRecord::log2_grad_p1)),
    figure("zero", "Gradients that are zero", Quantity::Share, Source::Step(|step| step.grads.share(step.grads.zero))),
    figure(
        "subnormal",
        "Gradients that are subnormal",
        Quantity::Share,
        Source::Step(|step| step.grads.share(step.grads.subnormal)),
    ),
    figure(
        "reach",
        "Updates that reach the 16-bit weights",
        Quantity::Share,
        Source::Step(|step| step.lost_updates.as_ref().and_then(UpdateCounts::reach)),
    ),
    figure("FP32 min", "Smallest gradient in FP32 probes", Quantity::Log2, Source::Probe(Fp32Probe::log2_min)),
    figure("flushed", "Gradients flushed to zero, by probes", Quantity::Share, Source::Probe(Fp32Probe::flushed_share)),
    objective("margin", "Rewards: margin", ObjectiveMetric::RewardsMargins),
    objective("accuracy", "Rewards: accuracy", ObjectiveMetric::RewardsAccuracies),
    objective("chosen", "Reward of chosen answers", ObjectiveMetric::RewardsChosen),
    objective("rejected", "Reward of rejected answers", ObjectiveMetric::RewardsRejected),
    objective("reward", "Reward", ObjectiveMetric::Reward),
    objective("length", "Tokens of a completion", ObjectiveMetric::MeanLength),
    objective("entropy", "Entropy, estimated", ObjectiveMetric::Entropy),
    objective("kl", "Divergence from the reference", ObjectiveMetric::Kl),
    figure(
        "experts",
        "Choices of experts unlike FP32's, by probes",
        Quantity::Share,
        Source::Probe(|probe| probe.experts),
    ),
];

const fn objective(name: &'static str, title: &'static str, metric: ObjectiveMetric) -> Plotted {
    figure(name, title, Quantity::Number, Source::Objective(metric))
}

const fn figure(short: &'static str, title: &'static str, quantity: Quantity, of: Source) -> Plotted {
    Plotted { short, title, quantity, of }
}

/// Every curve of a run.
#[derive(Debug, Clone)]
pub struct Curves {
    pub(super) capacity: usize,
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
    /// The figures of [`PLOTTED`].
    pub plotted: [Curve; PLOTTED.len()],
}

impl Default for Curves {
    /// Empty curves with more buckets than a screen has columns.
    fn default() -> Self {
        Self::new(2048)
    }
}

impl Curves {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            loss: Curve::new(capacity),
            smoothed: std::array::from_fn(|_| Curve::new(capacity)),
            validation: Series::new(capacity),
            scale: StepSeries::new(capacity),
            skips: Series::new(capacity),
            plotted: std::array::from_fn(|_| Curve::new(capacity)),
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
        self.plot(at, s, |source| source.read(step));
    }

    pub(super) fn probe(&mut self, probe: &Fp32Probe, s: f64) {
        self.plot(probe.step, s, |source| if let Source::Probe(of) = source { of(probe) } else { None });
    }

    fn plot(&mut self, step: u64, s: f64, read: impl Fn(&Source) -> Option<f64>) {
        for (curve, plotted) in self.plotted.iter_mut().zip(&PLOTTED) {
            if let Some(value) = read(&plotted.of) {
                curve.push(step, s, value);
            }
        }
    }

    pub(super) fn truncate_after(&mut self, step: u64) {
        let curves = std::iter::once(&mut self.loss).chain(&mut self.smoothed).chain(&mut self.plotted);
        curves.for_each(|curve| curve.truncate_after(step));
        self.validation.truncate_after(step);
        self.skips.truncate_after(step);
        self.scale.truncate_after(step);
    }
}
