//! The series that charts are drawn from.

use super::metrics::SMOOTHING;
use crate::telemetry::{Curve, ObjectiveMetric, Series, StepRecord, StepSeries, StepStatus};

/// A figure of a step that is drawn as a curve.
#[derive(Debug)]
pub struct Plotted {
    /// Its name before a value.
    pub short: &'static str,
    /// Its name in a list.
    pub name: &'static str,
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
}

impl Source {
    fn read(&self, step: &StepRecord) -> Option<f64> {
        match self {
            Self::Step(of) => of(step),
            Self::Objective(metric) => step.objective.as_ref()?.get(*metric),
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
}

/// The figures that are drawn as curves besides losses and the loss scale. Every chart of one is made from its row here.
pub const PLOTTED: [Plotted; 12] = [
    Plotted {
        short: "lr",
        name: "lr",
        title: "Learning rate",
        quantity: Quantity::Rate,
        // A skimmed line lacks the later fields.
        of: Source::Step(|step| (step.time.step_ms > 0.0).then_some(step.lr)),
    },
    Plotted {
        short: "|g|",
        name: "|g|",
        title: "Gradient norm, unscaled",
        quantity: Quantity::Number,
        of: Source::Step(|step| Some(step.grad_norm)),
    },
    Plotted {
        short: "tok/s",
        name: "tokens/s",
        title: "Tokens per second",
        quantity: Quantity::Count,
        of: Source::Step(|step| Some(step.tokens_per_s)),
    },
    Plotted {
        short: "mem",
        name: "memory",
        title: "Resident memory",
        quantity: Quantity::Bytes,
        of: Source::Step(|step| step.rss_bytes.map(|rss| rss as f64)),
    },
    objective("margin", "Rewards: margin", ObjectiveMetric::RewardsMargins),
    objective("accuracy", "Rewards: accuracy", ObjectiveMetric::RewardsAccuracies),
    objective("chosen", "Reward of chosen answers", ObjectiveMetric::RewardsChosen),
    objective("rejected", "Reward of rejected answers", ObjectiveMetric::RewardsRejected),
    objective("reward", "Reward", ObjectiveMetric::Reward),
    objective("length", "Tokens of a completion", ObjectiveMetric::MeanLength),
    objective("entropy", "Entropy, estimated", ObjectiveMetric::Entropy),
    objective("kl", "Divergence from the reference", ObjectiveMetric::Kl),
];

/// A metric of an objective.
const fn objective(name: &'static str, title: &'static str, metric: ObjectiveMetric) -> Plotted {
    Plotted { short: name, name, title, quantity: Quantity::Number, of: Source::Objective(metric) }
}

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
    /// The figures of [`PLOTTED`].
    pub plotted: [Curve; PLOTTED.len()],
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
        for (curve, plotted) in self.plotted.iter_mut().zip(&PLOTTED) {
            if let Some(value) = plotted.of.read(step) {
                curve.push(at, s, value);
            }
        }
    }

    /// Removes the steps after `step`.
    pub(super) fn truncate_after(&mut self, step: u64) {
        let curves = std::iter::once(&mut self.loss).chain(&mut self.smoothed).chain(&mut self.plotted);
        curves.for_each(|curve| curve.truncate_after(step));
        self.validation.truncate_after(step);
        self.skips.truncate_after(step);
        self.scale.truncate_after(step);
    }
}
