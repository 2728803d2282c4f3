//! The headroom between the largest gradient and FP16's maximum, for the predictive loss scale.
//!
//! The dynamic mode finds the largest scale by growing until it overflows. The predictive mode measures: it keeps the
//! running mean of log2 of the largest unscaled gradient and the largest recent deviation above it, and uses the
//! largest power of two that leaves room for both.

use super::FloatFormat;
use serde::{Deserialize, Serialize};

/// Weight of a step in the running mean.
const WEIGHT: f32 = 1.0 / 16.0;
const FIRST_DEVIATION: f32 = 1.0;
/// Growth intervals in which the deviation decays by a binade. The dynamic mode grows by a binade in one.
const MEMORY: f32 = 10.0;

/// Running statistics of log2 of the largest unscaled gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Headroom {
    /// The running mean.
    pub mean: f32,
    /// The largest deviation above the mean, slowly decaying.
    pub peak_deviation: f32,
}

impl Headroom {
    /// The statistics after a first step whose largest gradient was `2^log2`.
    pub(super) fn new(log2: f32) -> Self {
        Self { mean: log2, peak_deviation: FIRST_DEVIATION }
    }

    pub(super) fn add_clean(&mut self, log2: f32, growth_interval: u32) {
        let forgotten = 1.0 / (MEMORY * growth_interval as f32);
        self.peak_deviation = (self.peak_deviation - forgotten).max(log2 - self.mean).max(0.0);
        self.mean += WEIGHT * (log2 - self.mean);
    }

    /// Adds an overflow, without changing the mean.
    pub(super) fn add_overflow(&mut self, log2: f32) {
        self.peak_deviation = self.peak_deviation.max(log2 - self.mean);
    }

    /// Replaces an estimated deviation by a measured one, unless it is below the mean.
    pub(super) fn replace_peak_deviation(&mut self, log2: f32) {
        if log2 > self.mean {
            self.peak_deviation = log2 - self.mean;
        }
    }

    /// log2 of the largest power of two that keeps a step with the recent deviation below FP16's maximum.
    pub(super) fn log2_scale(self) -> i32 {
        (FloatFormat::FP16.max().log2() as f32 - self.mean - self.peak_deviation).floor() as i32
    }
}
