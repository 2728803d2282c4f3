//! A random model of the largest gradient of each step, for simulations without a run.

use super::{GradientTrace, StepCondition};
use crate::random::{Domain, Stream};
use serde::Serialize;

/// log2 max|g| as a normal variable around a level that drifts and jumps, with spikes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct GradientModel {
    /// Mean of log2 max|g| at the first step.
    pub(crate) level: f64,
    /// Standard deviation, in binades.
    pub(crate) sigma: f64,
    /// Change of the level in 1,000 steps, in binades.
    pub(crate) drift: f64,
    /// Share of steps with a spike.
    pub(crate) spikes: f64,
    /// Height of a spike, in binades.
    pub(crate) spike: f64,
    /// The step at which the level rises by `jump` binades.
    pub(crate) jump_at: Option<u64>,
    /// Height of the jump at `jump_at`, in binades.
    pub(crate) jump: f64,
}

impl Default for GradientModel {
    fn default() -> Self {
        Self { level: -1.0, sigma: 1.0, drift: 0.0, spikes: 0.0, spike: 6.0, jump_at: None, jump: 6.0 }
    }
}

impl GradientModel {
    /// log2 max|g| of a step.
    fn log2(&self, seed: u64, step: u64) -> f64 {
        let stream = Stream::new(seed, Domain::Bench);
        let mut normal = [0f32; 2];
        stream.fill_normal(1, step, 0, &mut normal);
        let uniform = f64::from(stream.block(2, step, 0)[0]) / 2f64.powi(32);
        let spike = if uniform < self.spikes { self.spike } else { 0.0 };
        let jump = if self.jump_at.is_some_and(|at| step >= at) { self.jump } else { 0.0 };
        self.level + self.sigma * f64::from(normal[0]) + self.drift * step as f64 / 1000.0 + spike + jump
    }

    pub(crate) fn steps(&self, seed: u64, steps: usize) -> GradientTrace {
        let visit = |step| StepCondition::Largest(self.log2(seed, step).exp2() as f32);
        let mut source = vec![format!("log2 max|g| ~ N({}, {})", self.level, self.sigma)];
        if self.drift != 0.0 {
            source.push(format!("drift {} per 1000", self.drift));
        }
        if self.spikes > 0.0 {
            source.push(format!("spikes {}", self.spikes));
        }
        if let Some(at) = self.jump_at {
            source.push(format!("jump {} at {at}", self.jump));
        }
        source.push(format!("seed {seed}"));
        let visits = (0..steps as u64).map(visit).collect();
        GradientTrace { source: source.join(", "), visits, ..GradientTrace::none(0) }
    }
}

/// A mean over seeds with its 95 % interval, from the normal approximation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Mean {
    pub(crate) mean: f64,
    pub(crate) half_width: f64,
}

impl Mean {
    /// The mean of `values`, at least two.
    pub(crate) fn of(values: &[f64]) -> Self {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
        Self { mean, half_width: 1.96 * (variance / n).sqrt() }
    }
}

impl std::fmt::Display for Mean {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ± {:.2}", self.mean, self.half_width)
    }
}
