//! Series of bounded size that keep every spike of a run of any length.

use std::borrow::Cow;
use std::collections::VecDeque;

/// A series of numbers over steps in at most `capacity` buckets of equal width. When they run out, the width doubles
/// and adjacent buckets are merged, which preserves minimum, maximum and mean.
#[derive(Debug, Clone)]
pub struct Series {
    capacity: usize,
    /// Steps a bucket covers.
    width: u64,
    buckets: Vec<Bucket>,
}

/// The values of some adjacent steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// The first of its steps that had a value.
    pub step: u64,
    /// Run-relative seconds of that step.
    pub seconds: f64,
    /// The last of its steps that had a value.
    pub last_step: u64,
    /// Smallest finite value; infinity if there was none.
    pub min: f64,
    /// Largest finite value; minus infinity if there was none.
    pub max: f64,
    /// Sum of the finite values.
    pub sum: f64,
    /// Number of finite values.
    pub count: u64,
    /// Number of values that were NaN or infinite.
    pub non_finite: u64,
}

impl Bucket {
    fn new(step: u64, seconds: f64, value: f64) -> Self {
        let empty = Self {
            step,
            seconds,
            last_step: step,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            sum: 0.0,
            count: 0,
            non_finite: 0,
        };
        if value.is_finite() {
            Self { min: value, max: value, sum: value, count: 1, ..empty }
        } else {
            Self { non_finite: 1, ..empty }
        }
    }

    /// Mean of the finite values; `None` if there was none.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// Its first step and its mean; `None` without a finite value.
    pub fn point(&self) -> Option<(f64, f64)> {
        Some((self.step as f64, self.mean()?))
    }

    /// The smallest and the largest finite value, both infinite if there was none.
    pub fn ends(&self) -> [f64; 2] {
        [self.min, self.max]
    }

    /// Merges the next bucket into this one.
    fn join(&mut self, next: &Self) {
        self.last_step = next.last_step;
        self.min = self.min.min(next.min);
        self.max = self.max.max(next.max);
        self.sum += next.sum;
        self.count += next.count;
        self.non_finite += next.non_finite;
    }
}

impl Series {
    /// An empty series of at most `capacity` buckets, at least 2.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(2), width: 1, buckets: Vec::new() }
    }

    /// The buckets in the order of their steps.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The buckets since a step.
    pub fn since(&self, step: u64) -> &[Bucket] {
        &self.buckets[self.buckets.partition_point(|bucket| bucket.last_step < step)..]
    }

    /// Whether nothing was pushed.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Adds the value of a step. A step that is not after the last one comes from a resumed run, so the steps it
    /// repeats are removed first.
    pub fn push(&mut self, step: u64, seconds: f64, value: f64) {
        if self.buckets.last().is_some_and(|last| step <= last.last_step) {
            self.truncate_after(step.saturating_sub(1));
        }
        let next = Bucket::new(step, seconds, value);
        match self.buckets.last_mut() {
            Some(last) if last.step / self.width == step / self.width => last.join(&next),
            _ => self.buckets.push(next),
        }
        while self.buckets.len() > self.capacity {
            self.halve();
        }
    }

    /// Removes the steps after `step`. A bucket that also holds earlier ones is kept.
    pub fn truncate_after(&mut self, step: u64) {
        self.buckets.truncate(self.buckets.partition_point(|bucket| bucket.step <= step));
        if let Some(last) = self.buckets.last_mut() {
            last.last_step = last.last_step.min(step);
        }
    }

    fn halve(&mut self) {
        self.width *= 2;
        let width = self.width;
        self.buckets.dedup_by(|next, kept| {
            let same = next.step / width == kept.step / width;
            if same {
                kept.join(next);
            }
            same
        });
    }
}

/// Number of last steps whose individual values a [`Curve`] keeps.
pub const RECENT: usize = 1000;

/// A series over the whole run that also keeps each of the last [`RECENT`] values.
#[derive(Debug, Clone)]
pub struct Curve {
    whole: Series,
    recent: VecDeque<Bucket>,
}

impl Curve {
    /// An empty curve with at most `capacity` buckets for the whole run.
    pub fn new(capacity: usize) -> Self {
        Self { whole: Series::new(capacity), recent: VecDeque::new() }
    }

    /// The whole run.
    pub fn whole(&self) -> &Series {
        &self.whole
    }

    /// The buckets starting at `step`, in the finest resolution available.
    pub fn since(&self, step: u64) -> Cow<'_, [Bucket]> {
        match self.recent.front() {
            Some(first) if step >= first.step => {
                self.recent.iter().filter(|bucket| bucket.step >= step).copied().collect()
            }
            _ => Cow::Borrowed(self.whole.since(step)),
        }
    }

    /// The finest bucket that contains a step, or the last one before it.
    pub fn at(&self, step: u64) -> Option<Bucket> {
        let recent = self.recent.iter().rev().find(|bucket| bucket.step <= step);
        recent.or_else(|| self.whole.buckets.iter().rev().find(|bucket| bucket.step <= step)).copied()
    }

    /// Adds the value of a step, as [`Series::push`] does.
    pub fn push(&mut self, step: u64, seconds: f64, value: f64) {
        self.whole.push(step, seconds, value);
        while self.recent.back().is_some_and(|last| step <= last.step) {
            self.recent.pop_back();
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(Bucket::new(step, seconds, value));
    }

    /// Removes the steps after `step`.
    pub fn truncate_after(&mut self, step: u64) {
        self.whole.truncate_after(step);
        self.recent.retain(|bucket| bucket.step <= step);
    }
}

/// A piecewise constant value, stored as its change points.
#[derive(Debug, Clone)]
pub struct StepSeries {
    capacity: usize,
    points: Vec<ChangePoint>,
}

/// A change point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChangePoint {
    /// The first step with the value.
    pub step: u64,
    /// Run-relative seconds of that step.
    pub seconds: f64,
    /// The value.
    pub value: f64,
}

impl StepSeries {
    /// An empty staircase of at most `capacity` change points, at least 8.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(8), points: Vec::new() }
    }

    /// The change points in the order of their steps.
    pub fn points(&self) -> &[ChangePoint] {
        &self.points
    }

    /// The change points after a step, and the one that holds there.
    pub fn since(&self, step: u64) -> &[ChangePoint] {
        &self.points[self.points.partition_point(|point| point.step <= step).saturating_sub(1)..]
    }

    /// The value at a step; `None` before the first.
    pub fn at(&self, step: u64) -> Option<f64> {
        self.points[..self.points.partition_point(|point| point.step <= step)].last().map(|point| point.value)
    }

    /// The value at the end.
    pub fn last(&self) -> Option<f64> {
        self.points.last().map(|point| point.value)
    }

    /// Sets the value, starting at `step`.
    pub fn push(&mut self, step: u64, seconds: f64, value: f64) {
        if self.points.last().is_some_and(|last| step <= last.step) {
            self.truncate_after(step.saturating_sub(1));
        }
        if self.last() != Some(value) {
            self.points.push(ChangePoint { step, seconds, value });
        }
        if self.points.len() > self.capacity {
            self.thin();
        }
    }

    /// Removes the steps after `step`.
    pub fn truncate_after(&mut self, step: u64) {
        self.points.truncate(self.points.partition_point(|point| point.step <= step));
    }

    /// Keeps the highest, the lowest and the last of every four points, which preserves the envelope.
    fn thin(&mut self) {
        let points = std::mem::take(&mut self.points);
        for four in points.chunks(4) {
            let by_value = |a: &&ChangePoint, b: &&ChangePoint| a.value.total_cmp(&b.value);
            let low = four.iter().min_by(by_value).map(|point| point.step);
            let high = four.iter().max_by(by_value).map(|point| point.step);
            let last = four.last().map(|point| point.step);
            self.points.extend(four.iter().filter(|point| [low, high, last].contains(&Some(point.step))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spike_survives_a_million_steps() {
        let mut series = Series::new(1000);
        for step in 1..=1_000_000 {
            series.push(step, step as f64, if step == 123_457 { 99.0 } else { 1.0 });
        }
        assert!(series.buckets().len() <= 1000 && series.buckets().len() > 400);
        let spike: Vec<_> = series.buckets().iter().filter(|bucket| bucket.max == 99.0).collect();
        assert_eq!(spike.len(), 1);
        assert!(spike[0].step <= 123_457 && 123_457 <= spike[0].last_step && spike[0].min == 1.0);
        assert_eq!(series.buckets().iter().map(|bucket| bucket.count).sum::<u64>(), 1_000_000);
    }

    #[test]
    fn values_that_are_not_finite_are_only_counted() {
        let mut series = Series::new(2);
        for (step, value) in [(0, 1.0), (1, f64::NAN), (2, f64::INFINITY), (3, 3.0)] {
            series.push(step, 0.0, value);
        }
        let broken: u64 = series.buckets().iter().map(|bucket| bucket.non_finite).sum();
        assert_eq!(broken, 2);
        assert_eq!(series.buckets().iter().filter_map(Bucket::mean).sum::<f64>(), 4.0);
    }

    #[test]
    fn a_repeated_step_drops_what_came_after_it() {
        let mut series = Series::new(100);
        let mut stairs = StepSeries::new(100);
        for step in 1..=10 {
            series.push(step, 0.0, step as f64);
            stairs.push(step, 0.0, step as f64);
        }
        series.push(4, 0.0, 40.0);
        stairs.push(4, 0.0, 40.0);
        assert_eq!(series.buckets().iter().map(|bucket| bucket.max).collect::<Vec<_>>(), [1.0, 2.0, 3.0, 40.0]);
        assert_eq!(stairs.points().iter().map(|point| point.value).collect::<Vec<_>>(), [1.0, 2.0, 3.0, 40.0]);
    }

    #[test]
    fn the_last_values_are_kept_one_by_one() {
        let mut curve = Curve::new(64);
        for step in 1..=10_000 {
            curve.push(step, 0.0, step as f64);
        }
        assert!(curve.whole().buckets().len() <= 64 && curve.since(0).len() <= 64);
        let last: Vec<_> = curve.since(9_998).iter().map(|bucket| bucket.max).collect();
        assert_eq!(last, [9_998.0, 9_999.0, 10_000.0]);
        assert_eq!(curve.at(9_500).map(|bucket| (bucket.step, bucket.count)), Some((9_500, 1)));
        assert!(curve.at(500).is_some_and(|bucket| bucket.step <= 500 && 500 <= bucket.last_step));
        curve.truncate_after(9_600);
        assert_eq!(curve.since(9_600).len(), 1);
        curve.push(9_601, 0.0, 1.0);
        assert_eq!(curve.since(9_600).len(), 2);
    }

    #[test]
    fn a_staircase_holds_changes_only_and_keeps_its_envelope() {
        let mut stairs = StepSeries::new(64);
        for step in 0..100_000 {
            let value = if step == 54_321 { 30.0 } else { f64::from(step as u32 / 50 % 7) };
            stairs.push(step, 0.0, value);
        }
        assert!(stairs.points().len() <= 64);
        assert!(stairs.points().windows(2).all(|pair| pair[0].step < pair[1].step));
        assert!(stairs.points().iter().any(|point| point.value == 30.0));
        let mut held = StepSeries::new(64);
        (0..1000).for_each(|step| held.push(step, 0.0, 16.0));
        assert_eq!(held.points().len(), 1);
        assert_eq!(held.last(), Some(16.0));
    }
}
