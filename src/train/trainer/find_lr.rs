//! A range test of the learning rate (Smith, 2017): steps at rising rates show where the loss falls and where it
//! diverges.

use super::Trainer;
use crate::engine::optim::{LrSchedule, ScheduleKind};
use crate::{Error, Result};

/// The first and the last rate of a test.
const RATES: [f64; 2] = [1e-7, 1.0];
/// The weight of earlier steps in the smoothed loss.
const SMOOTHING: f64 = 0.9;
/// The suggested rate divides the rate of the lowest loss by this.
const MARGIN: f64 = 10.0;
/// A fall of the loss by less than this share of the first one is noise.
const NOTABLE: f64 = 0.01;

/// Learning rates with the losses before their updates, smoothed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LrRangeTest {
    /// Rate and loss of each step.
    pub points: Vec<(f64, f64)>,
    /// The sum of the weights' complement, which the mean is corrected by.
    mean: f64,
}

impl LrRangeTest {
    /// The number of steps.
    pub const STEPS: u64 = 100;

    /// Adds a step; `false` if the loss has diverged: it has risen from its minimum by the minimum's magnitude and to
    /// the first loss. Some losses fall below 0.
    fn push(&mut self, lr: f64, loss: f64) -> bool {
        self.mean = SMOOTHING * self.mean + (1.0 - SMOOTHING) * loss;
        let smoothed = self.mean / (1.0 - SMOOTHING.powf((self.points.len() + 1) as f64));
        self.points.push((lr, smoothed));
        let ((_, first), Some((_, lowest))) = (self.points[0], self.lowest()) else { return false };
        smoothed <= first || smoothed - lowest <= lowest.abs()
    }

    /// The step with the lowest loss.
    pub fn lowest(&self) -> Option<(f64, f64)> {
        self.points.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// A rate for training, with one digit: a tenth of the rate with the lowest loss; `None` if the loss did not fall.
    pub fn suggestion(&self) -> Option<f64> {
        let (_, first) = self.points.first()?;
        let (lr, lowest) = self.lowest()?;
        (first - lowest > NOTABLE * first.abs()).then(|| format!("{:.0e}", lr / MARGIN).parse().ok()).flatten()
    }
}

impl Trainer {
    /// Takes [`LrRangeTest::STEPS`] steps at rising rates, or fewer if the loss diverges. Nothing is saved; the model
    /// is useless afterwards. `progress` receives the number of steps taken. Fails with [`Error::Config`] for several
    /// processes, whose rates would differ.
    pub fn find_lr(&mut self, mut progress: impl FnMut(u64)) -> Result<LrRangeTest> {
        if self.is_distributed() {
            return Err(Error::config("--find-lr", "runs in one process; start it without a launcher"));
        }
        self.prepare_reference()?;
        let mut test = LrRangeTest::default();
        for step in 0..LrRangeTest::STEPS {
            progress(step);
            let [first, last] = RATES;
            let peak_lr = first * (last / first).powf(step as f64 / (LrRangeTest::STEPS - 1) as f64);
            self.engine.schedule = LrSchedule {
                kind: ScheduleKind::Constant,
                peak_lr,
                warmup_updates: 0,
                total_updates: LrRangeTest::STEPS,
                min_lr_ratio: 1.0,
            };
            match self.step(false) {
                Err(Error::Diverged { .. }) => break,
                taken => taken?,
            }
            let loss = self.progress.last_loss.filter(|loss| loss.is_finite());
            if !loss.is_some_and(|loss| test.push(peak_lr, loss)) {
                break;
            }
        }
        Ok(test)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_of(loss: impl Fn(f64) -> f64) -> LrRangeTest {
        let mut test = LrRangeTest::default();
        let rates = (0..100).map(|step| 10f64.powf(-7.0 + 7.0 * f64::from(step) / 99.0));
        rates.take_while(|lr| test.push(*lr, loss(*lr))).count();
        test
    }

    #[test]
    fn the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss() {
        // Falls from 4, is lowest at 0.01 and diverges after it.
        let test = test_of(|lr| (lr.log10() + 2.0).powi(2) * if lr > 0.01 { 40.0 } else { 0.1 } + 1.5);
        let (lr, _) = test.lowest().unwrap();
        assert!((0.005..0.04).contains(&lr), "{lr}");
        assert!([1e-3, 2e-3, 3e-3].contains(&test.suggestion().unwrap()), "{:?}", test.suggestion());
        assert!(test.points.len() < 100, "it ends soon after the loss diverges");
    }

    #[test]
    fn a_loss_may_fall_below_zero() {
        let test = test_of(|lr| (lr.log10() + 2.0).powi(2) * if lr > 0.01 { 40.0 } else { 0.1 } - 0.9);
        let (lr, lowest) = test.lowest().unwrap();
        assert!((0.005..0.04).contains(&lr) && lowest < 0.0, "{lr}: {lowest}");
        assert!(test.suggestion().is_some() && test.points.len() < 100);
    }

    #[test]
    fn a_loss_that_does_not_fall_suggests_nothing() {
        for first in [4.0, -4.0] {
            assert_eq!(test_of(|lr| first + lr).suggestion(), None);
            assert_eq!(test_of(|lr| first - 0.009 * 4.0 * (lr / 1e-2).min(1.0)).suggestion(), None);
        }
        assert_eq!(LrRangeTest::default().suggestion(), None);
    }
}
