//! A run's recent speed and its remaining time.

/// Smoothed seconds per step, including evaluations, checkpoints and waiting for data.
#[derive(Debug, Clone, Default)]
pub(crate) struct EtaEstimator {
    last: Option<(u64, f64)>,
    pace: Average,
}

/// A bias-corrected exponential moving average.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Average {
    sum: f64,
    weight: f64,
}

impl Average {
    pub(super) fn push(&mut self, value: f64, share: f64) {
        self.sum += share * (value - self.sum);
        self.weight += share * (1.0 - self.weight);
    }

    pub(super) fn value(self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

/// A step's weight in the average: about the last 50 steps count.
const ALPHA: f64 = 0.02;

impl EtaEstimator {
    /// A step ended at these run-relative seconds.
    pub(crate) fn step(&mut self, step: u64, seconds: f64) {
        if let Some((before, then)) = self.last
            && step > before
            && seconds >= then
        {
            self.pace.push((seconds - then) / (step - before) as f64, ALPHA);
        }
        self.last = Some((step, seconds));
    }

    /// Forgets the last step's time, so that a pause or a restart does not count as a slow step.
    pub(crate) fn interrupt(&mut self) {
        self.last = None;
    }

    /// Seconds until `total` steps are done; `None` before an estimate is possible.
    pub(crate) fn remaining(&self, step: u64, total: u64) -> Option<f64> {
        Some(total.saturating_sub(step) as f64 * self.pace.value()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_is_right_from_the_second_step_and_ignores_a_pause() {
        let mut pace = EtaEstimator::default();
        pace.step(1, 10.0);
        assert_eq!(pace.remaining(1, 11), None);
        pace.step(2, 12.0);
        assert!(pace.remaining(2, 12).is_some_and(|left| (left - 20.0).abs() < 1e-9));
        pace.interrupt();
        pace.step(3, 5000.0);
        pace.step(4, 5002.0);
        assert!(pace.remaining(4, 14).is_some_and(|left| (left - 20.0).abs() < 1e-9));
    }
}
