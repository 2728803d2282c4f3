//! What is left between the largest gradient and FP16's top, as the predictive loss scale sees it.
//!
//! The dynamic rule finds the largest scale by trying the next one until it overflows. This one measures: it keeps a
//! running mean of log2 of the largest unscaled gradient, and the largest excess over that mean of late, and takes the
//! largest power of two that leaves room for both.

use serde::{Deserialize, Serialize};

use super::FloatFormat;

/// Weight of a step in the running mean.
const WEIGHT: f32 = 1.0 / 16.0;
/// The excess before any was seen, in binades.
const FIRST_EXCESS: f32 = 1.0;
/// Growth intervals in which the excess is forgotten by a binade. The dynamic rule tries a binade in one.
const MEMORY: f32 = 10.0;

/// Running figures of log2 of the largest unscaled gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Headroom {
    /// The running mean.
    pub mean: f32,
    /// The largest excess over it, slowly forgotten: how far one step may lie above the others.
    pub excess: f32,
}

impl Headroom {
    /// The figures after a first step whose largest gradient was `2^log2`.
    pub(super) fn new(log2: f32) -> Self {
        Self { mean: log2, excess: FIRST_EXCESS }
    }

    /// Takes in a clean step.
    pub(super) fn see(&mut self, log2: f32, growth_interval: u32) {
        let forgotten = 1.0 / (MEMORY * growth_interval as f32);
        self.excess = (self.excess - forgotten).max(log2 - self.mean).max(0.0);
        self.mean += WEIGHT * (log2 - self.mean);
    }

    /// Takes in an overflow; the mean remains that of clean steps.
    pub(super) fn see_overflow(&mut self, log2: f32) {
        self.excess = self.excess.max(log2 - self.mean);
    }

    /// Replaces a guess by what was measured; a first measure is its own mean, and keeps its excess.
    pub(super) fn replace_excess(&mut self, log2: f32) {
        if log2 > self.mean {
            self.excess = log2 - self.mean;
        }
    }

    /// log2 of the largest power of two that keeps a step below FP16's top even if it exceeds the mean as far as one did
    /// of late.
    pub(super) fn log2_scale(self) -> i32 {
        (FloatFormat::FP16.max().log2() as f32 - self.mean - self.excess).floor() as i32
    }
}
