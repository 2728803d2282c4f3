//! The headroom between the largest gradient and FP16's maximum, for the predictive loss scale.
//!
//! The dynamic rule finds the largest scale by growing until it overflows. The predictive rule measures: it keeps a running
//! mean of log2 of the largest unscaled gradient and the largest recent excess over it, and uses the largest power of two with
//! room for both.

use serde::{Deserialize, Serialize};

use super::FloatFormat;

/// Weight of a step in the running mean.
const WEIGHT: f32 = 1.0 / 16.0;
/// The initial excess, in binades.
const FIRST_EXCESS: f32 = 1.0;
/// Growth intervals in which the excess decays by a binade. The dynamic rule grows by a binade in one.
const MEMORY: f32 = 10.0;

/// Running figures of log2 of the largest unscaled gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Headroom {
    /// The running mean.
    pub mean: f32,
    /// The largest excess over it, slowly decaying.
    pub excess: f32,
}

impl Headroom {
    /// The figures after a first step whose largest gradient was `2^log2`.
    pub(super) fn new(log2: f32) -> Self {
        Self { mean: log2, excess: FIRST_EXCESS }
    }

    /// Adds a clean step.
    pub(super) fn add_clean(&mut self, log2: f32, growth_interval: u32) {
        let forgotten = 1.0 / (MEMORY * growth_interval as f32);
        self.excess = (self.excess - forgotten).max(log2 - self.mean).max(0.0);
        self.mean += WEIGHT * (log2 - self.mean);
    }

    /// Adds an overflow, without changing the mean.
    pub(super) fn add_overflow(&mut self, log2: f32) {
        self.excess = self.excess.max(log2 - self.mean);
    }

    /// Replaces an estimated excess by a measured one; a first measurement becomes the mean and keeps the excess.
    pub(super) fn replace_excess(&mut self, log2: f32) {
        if log2 > self.mean {
            self.excess = log2 - self.mean;
        }
    }

    /// log2 of the largest power of two that keeps a step below FP16's maximum even at the recent excess over the mean.
    pub(super) fn log2_scale(self) -> i32 {
        (FloatFormat::FP16.max().log2() as f32 - self.mean - self.excess).floor() as i32
    }
}
