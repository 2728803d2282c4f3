//! Means of small samples, and the difference of two means, with 95 % confidence intervals.

use crate::telemetry::float;
use distrs::StudentsT;
use serde::Serialize;

/// A mean, or a difference of two, with its interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Estimate {
    #[serde(serialize_with = "float::serialize")]
    pub(crate) mean: f64,
    /// Half the width of the 95 % confidence interval; `None` if a sample is too small.
    pub(crate) half: Option<f64>,
}

struct SampleMoments {
    count: f64,
    mean: f64,
    /// The variance of the mean: the sample's unbiased variance divided by its size. `None` for a single value.
    variance: Option<f64>,
}

impl SampleMoments {
    fn of(values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let variance = (values.len() > 1).then(|| squares / (count - 1.0) / count);
        (!values.is_empty()).then_some(Self { count, mean, variance })
    }
}

impl Estimate {
    /// The mean of a sample, with Student's interval. `None` for no sample.
    pub(crate) fn mean(values: &[f64]) -> Option<Self> {
        let SampleMoments { count, mean, variance } = SampleMoments::of(values)?;
        Some(Self { mean, half: variance.and_then(|variance| half_width(variance, count - 1.0)) })
    }

    /// The mean of `second` minus that of `first`, with Welch's interval for unequal variances.
    pub(crate) fn difference(first: &[f64], second: &[f64]) -> Option<Self> {
        let (a, b) = (SampleMoments::of(first)?, SampleMoments::of(second)?);
        let half = a.variance.zip(b.variance).and_then(|(va, vb)| {
            let freedom = (va + vb).powi(2) / (va * va / (a.count - 1.0) + vb * vb / (b.count - 1.0));
            half_width(va + vb, freedom)
        });
        Some(Self { mean: b.mean - a.mean, half })
    }

    pub(crate) fn interval(&self) -> Option<(f64, f64)> {
        self.half.map(|half| (self.mean - half, self.mean + half))
    }
}

/// Half the 95 % interval around a mean of this variance.
fn half_width(variance: f64, freedom: f64) -> Option<f64> {
    if variance == 0.0 {
        return Some(0.0);
    }
    Some(variance.sqrt() * quantile(freedom.max(1.0))).filter(|half| half.is_finite())
}

/// The 97.5 % quantile of Student's distribution.
fn quantile(freedom: f64) -> f64 {
    if freedom >= 2.0 {
        return StudentsT::ppf(0.975, freedom);
    }
    // The approximation of `ppf` errs by up to 18 % here. The probability beyond ±t is `factor` times x^a times a
    // series in x = freedom / (freedom + t²), with a = freedom / 2.
    let a = freedom / 2.0;
    let factor = 2.0 * StudentsT::pdf(0.0, freedom) / freedom.sqrt();
    let mut x = 0.0;
    for _ in 0..8 {
        let series = 1.0 + a * x * (0.5 / (a + 1.0) + x * (0.375 / (a + 2.0) + x * 0.3125 / (a + 3.0)));
        x = (0.05 / (factor * series)).powf(1.0 / a);
    }
    (freedom / x - freedom).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-3 * expected.abs().max(1e-9), "{value}, expected {expected}");
    }

    /// Quantiles from a table of Student's distribution, and by bisection of the incomplete beta function.
    #[test]
    fn students_quantiles() {
        for (freedom, quantile) in [(1.001, 12.6763), (1.1, 10.2768), (1.5, 6.0167), (1.9, 4.5271), (1.999, 4.3047)] {
            assert_near(half_width(1.0, freedom).unwrap(), quantile);
        }
        for (freedom, quantile) in [(1.0, 12.706), (2.0, 4.303), (4.0, 2.776), (30.0, 2.042), (1e6, 1.960)] {
            assert_near(half_width(1.0, freedom).unwrap(), quantile);
        }
    }

    /// By hand: 1, 2, 3 has variance 1, so the mean 2 has the standard error 1/√3.
    #[test]
    fn a_mean_of_three() {
        let estimate = Estimate::mean(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(estimate.mean, 2.0);
        assert_near(estimate.half.unwrap(), 4.3027 / 3f64.sqrt());
        assert_eq!(Estimate::mean(&[7.0]), Some(Estimate { mean: 7.0, half: None }));
        assert_eq!(Estimate::mean(&[]), None);
        assert_eq!(Estimate::mean(&[5.0, 5.0]).unwrap().interval(), Some((5.0, 5.0)));
    }

    /// By hand: variances 1 and 16 of three values each give 17/3 for the difference's variance and
    /// (17/3)² / ((1/3)²/2 + (16/3)²/2) = 2.249 degrees of freedom, whose quantile is 3.877.
    #[test]
    fn welchs_difference() {
        let estimate = Estimate::difference(&[1.0, 2.0, 3.0], &[2.0, 6.0, 10.0]).unwrap();
        assert_eq!(estimate.mean, 4.0);
        assert_near(estimate.half.unwrap(), 3.877 * (17.0f64 / 3.0).sqrt());
        assert_eq!(Estimate::difference(&[1.0], &[2.0, 3.0]), Some(Estimate { mean: 1.5, half: None }));
    }

    #[test]
    fn values_that_are_not_finite_have_no_interval() {
        let estimate = Estimate::mean(&[1.0, f64::NAN]).unwrap();
        assert!(estimate.mean.is_nan() && estimate.half.is_none());
        let estimate = Estimate::difference(&[1.0, 2.0], &[f64::INFINITY, 1.0]).unwrap();
        assert!(estimate.mean.is_infinite() && estimate.half.is_none());
    }
}
