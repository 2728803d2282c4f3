//! The learning rate as a function of the updates applied so far.

use serde::{Deserialize, Serialize};

/// The shape after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// The peak rate throughout.
    Constant,
    /// A straight line down.
    Linear,
    /// Half a cosine down (Loshchilov and Hutter, SGDR, 2017).
    #[default]
    Cosine,
}

/// Linear warm-up to a peak, then a decay to `min_lr_ratio` of it at `total_updates`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// Shape of the decay.
    pub kind: ScheduleKind,
    /// The highest rate.
    pub peak_lr: f64,
    /// Updates until it is reached.
    pub warmup_updates: u64,
    /// Updates until the decay ends; the rate stays there afterwards.
    pub total_updates: u64,
    /// The final rate over the peak.
    pub min_lr_ratio: f64,
}

impl LrSchedule {
    /// The rate of the update that follows `updates` applied ones. A skipped step does not advance it.
    pub fn lr(&self, updates: u64) -> f64 {
        if updates < self.warmup_updates {
            return self.peak_lr * (updates + 1) as f64 / self.warmup_updates as f64;
        }
        let length = self.total_updates.saturating_sub(self.warmup_updates).max(1);
        let progress = ((updates - self.warmup_updates) as f64 / length as f64).min(1.0);
        let height = match self.kind {
            ScheduleKind::Constant => return self.peak_lr,
            ScheduleKind::Linear => 1.0 - progress,
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> LrSchedule {
        LrSchedule { kind, peak_lr: 1.0, warmup_updates: 10, total_updates: 110, min_lr_ratio: 0.1 }
    }

    #[test]
    fn warms_up_to_the_peak() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            assert_eq!(schedule(kind).lr(0), 0.1);
            assert_eq!(schedule(kind).lr(9), 1.0);
            assert_eq!(schedule(kind).lr(10), 1.0);
        }
    }

    #[test]
    fn decays_to_the_floor_and_stays() {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(schedule(ScheduleKind::Linear).lr(60), 0.55);
        near(schedule(ScheduleKind::Cosine).lr(60), 0.55);
        near(schedule(ScheduleKind::Cosine).lr(35), 0.1 + 0.9 * 0.5 * (1.0 + 0.5f64.sqrt()));
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine] {
            near(schedule(kind).lr(110), 0.1);
            near(schedule(kind).lr(10_000), 0.1);
        }
        near(schedule(ScheduleKind::Constant).lr(10_000), 1.0);
    }

    #[test]
    fn no_warm_up_and_no_length_are_fine() {
        let schedule = LrSchedule { warmup_updates: 0, total_updates: 0, ..schedule(ScheduleKind::Cosine) };
        assert_eq!(schedule.lr(0), 1.0);
        assert!((schedule.lr(1) - 0.1).abs() < 1e-12);
    }
}
