//! The error of a sum or dot product by its length, the accumulator's format and the algorithm.
//!
//! Inputs are rounded to the format first, and the reference sums these in FP64, so that only accumulation errors
//! count.

use super::number::{relative_error, serialize, short};
use crate::Result;
use crate::error::Error;
use crate::precision::FloatFormat;
use crate::random::{Domain, Stream};
use crate::ui::{Line, Page, Role};
use serde::Serialize;
use strum::{EnumString, VariantNames};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, EnumString, VariantNames)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Terms {
    /// Numbers between 0 and 1: `frac((i + 1) × 0.618…)`.
    Uniform,
    /// Uniform minus 0.5, so that most of the sum cancels.
    Signed,
    /// 0.1 repeated.
    Tenths,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Algorithm {
    /// One by one, each sum rounded.
    OneByOne,
    /// With Kahan's compensation in the same format.
    Kahan,
    /// Recursive halves.
    Pairwise,
    /// One by one, with stochastic rounding.
    Stochastic,
    /// Summed in FP32 and rounded once at the end, like a tensor core's FP32 accumulator.
    TensorCore,
}

/// The errors of one accumulator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SumRow {
    /// The inputs' format, also the accumulator's except for tensor cores.
    pub(crate) format: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) results: Vec<f64>,
    /// Its relative error.
    pub(crate) errors: Vec<f64>,
    /// The length from which terms no longer changed the sum; `None` if the last ones did.
    pub(crate) stuck_from: Option<usize>,
}

/// Accumulators compared over lengths.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SummationReport {
    pub(crate) terms: Terms,
    /// Whether products of two such sequences are summed.
    pub(crate) dot: bool,
    pub(crate) lengths: Vec<usize>,
    pub(crate) rows: Vec<SumRow>,
    /// The FP64 sum of the unrounded inputs at the largest length.
    #[serde(serialize_with = "serialize")]
    pub(crate) exact: f64,
}

/// The accumulators, most common mistakes first.
const ROWS: [(FloatFormat, Algorithm); 11] = [
    (FloatFormat::FP16, Algorithm::OneByOne),
    (FloatFormat::FP16, Algorithm::Stochastic),
    (FloatFormat::FP16, Algorithm::Kahan),
    (FloatFormat::FP16, Algorithm::Pairwise),
    (FloatFormat::FP16, Algorithm::TensorCore),
    (FloatFormat::BF16, Algorithm::OneByOne),
    (FloatFormat::BF16, Algorithm::Stochastic),
    (FloatFormat::BF16, Algorithm::Kahan),
    (FloatFormat::BF16, Algorithm::Pairwise),
    (FloatFormat::BF16, Algorithm::TensorCore),
    (FloatFormat::FP32, Algorithm::OneByOne),
];

impl SummationReport {
    pub(crate) const MAX_TERMS: usize = 1 << 20;

    /// Sums at powers of four up to `length`, and at `length`. `seed` is for stochastic rounding.
    pub(crate) fn new(terms: Terms, dot: bool, length: usize, seed: u64) -> Result<Self> {
        if !(1..=Self::MAX_TERMS).contains(&length) {
            return Err(Error::config("--length", format!("must be between 1 and {}", Self::MAX_TERMS)));
        }
        let mut lengths: Vec<usize> = (2..32).map(|power| 1 << (2 * power)).filter(|n| *n < length).collect();
        lengths.push(length);
        // Keep the longest ones that fit on a line.
        lengths.drain(..lengths.len().saturating_sub(6));
        let value = |i: usize, factor: f64| match terms {
            Terms::Uniform => ((i + 1) as f64 * factor).fract(),
            Terms::Signed => ((i + 1) as f64 * factor).fract() - 0.5,
            Terms::Tenths => 0.1,
        };
        let left: Vec<f64> = (0..length).map(|i| value(i, 0.618_033_988_749_894_9)).collect();
        let right: Vec<f64> =
            if dot { (0..length).map(|i| value(i, std::f64::consts::SQRT_2)).collect() } else { vec![1.0; length] };
        let exact = left.iter().zip(&right).map(|(a, b)| a * b).sum();
        let row = |(format, algorithm): (FloatFormat, Algorithm)| {
            let rounded = |values: &[f64]| values.iter().map(|x| format.round(*x)).collect::<Vec<_>>();
            let products: Vec<f64> = rounded(&left).iter().zip(rounded(&right)).map(|(a, b)| a * b).collect();
            let sums = lengths.iter().map(|n| {
                let reference: f64 = products[..*n].iter().sum();
                let (sum, stuck) = accumulate(&products[..*n], format, algorithm, seed);
                (sum, relative_error(sum, reference), stuck)
            });
            let sums: Vec<_> = sums.collect();
            SumRow {
                format: format.name,
                algorithm,
                results: sums.iter().map(|(sum, ..)| *sum).collect(),
                errors: sums.iter().map(|(_, error, _)| *error).collect(),
                stuck_from: sums.last().and_then(|(.., stuck)| *stuck),
            }
        };
        let rows = ROWS.map(row).to_vec();
        Ok(Self { terms, dot, lengths, rows, exact })
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let what = if self.dot { "dot products" } else { "sums" };
        page.push(
            Line::new()
                .with(Role::Title, format!("relative error of {what} by length"))
                .dim(format!("   exact at the end: {}", short(self.exact))),
        );
        let lengths: Vec<_> = self.lengths.iter().map(|n| format!("{n:>9}")).collect();
        page.title(format!("{:<20}{}", "accumulator", lengths.concat()));
        for row in &self.rows {
            let name = match row.algorithm {
                Algorithm::OneByOne => "sequential",
                Algorithm::Kahan => "Kahan",
                Algorithm::Pairwise => "pairwise",
                Algorithm::Stochastic => "stochastic",
                Algorithm::TensorCore => "FP32 inside",
            };
            let mut line = Line::new().with(Role::Title, format!("{:<6}", row.format)).plain(format!("{name:<14}"));
            for error in &row.errors {
                line = line.with(Role::graded(*error, [1e-3, 1e-2]), format!("{:>9}", percentage(*error)));
            }
            page.push(line);
        }
        page.gap();
        for row in self.rows.iter().filter(|row| row.algorithm == Algorithm::OneByOne) {
            let result = row.results.last().copied().unwrap_or(0.0);
            let (role, end) = match row.stuck_from {
                _ if !result.is_finite() => (Role::Bad, format!("overflows: {}", short(result))),
                Some(from) => {
                    let end = format!("stagnates at {} from term {from}", short(result));
                    (Role::Bad, format!("{end}: each term is below half an ULP"))
                }
                None => (Role::Text, format!("ends at {}", short(result))),
            };
            page.wrapped(role, &format!("sequential {} summation {end}", row.format), width);
        }
        page
    }
}

/// An error in percent, in at most nine columns.
fn percentage(error: f64) -> String {
    match error * 100.0 {
        percent if !percent.is_finite() => "✕".to_owned(),
        0.0 => "0 %".to_owned(),
        percent if percent < 0.01 => format!("{percent:.0e} %"),
        percent => format!("{percent:.2} %"),
    }
}

/// The sum, and the number of terms after which it no longer changed, if at least a tenth of them had no effect.
fn accumulate(terms: &[f64], format: FloatFormat, algorithm: Algorithm, seed: u64) -> (f64, Option<usize>) {
    let round = |x: f64| format.round(x);
    match algorithm {
        Algorithm::OneByOne => {
            let (mut sum, mut moved) = (0.0, 0);
            for (i, term) in terms.iter().enumerate() {
                let next = round(sum + round(*term));
                if next != sum {
                    moved = i + 1;
                }
                sum = next;
            }
            (sum, (moved * 10 <= terms.len() * 9).then_some(moved))
        }
        Algorithm::Kahan => {
            let (mut sum, mut lost) = (0.0, 0.0);
            for term in terms {
                let corrected = round(round(*term) - lost);
                let next = round(sum + corrected);
                lost = round(round(next - sum) - corrected);
                sum = next;
            }
            (sum, None)
        }
        Algorithm::Pairwise => (pairwise(terms, format), None),
        Algorithm::Stochastic => {
            let stream = Stream::new(seed, Domain::Bench);
            let draw = |i: usize| f64::from(stream.block(3, 0, i as u32)[0]) / 2f64.powi(32);
            let sum = terms.iter().enumerate().fold(0.0, |sum, (i, x)| stochastic(format, sum + round(*x), draw(i)));
            (sum, None)
        }
        // FP32 sums of exact products, one by one, equivalent to a tensor core's partial sums.
        Algorithm::TensorCore => (round(f64::from(terms.iter().fold(0f32, |sum, x| sum + *x as f32))), None),
    }
}

fn pairwise(terms: &[f64], format: FloatFormat) -> f64 {
    match terms {
        [] => 0.0,
        [term] => format.round(*term),
        _ => {
            let (left, right) = terms.split_at(terms.len() / 2);
            format.round(pairwise(left, format) + pairwise(right, format))
        }
    }
}

/// `x` rounded stochastically: away from zero with a probability equal to its fractional position between its
/// neighbors.
fn stochastic(format: FloatFormat, x: f64, uniform: f64) -> f64 {
    let ulp = format.ulp(x);
    if !ulp.is_finite() {
        return format.round(x);
    }
    let units = x.abs() / ulp;
    let rounded = units.floor() + if uniform < units.fract() { 1.0 } else { 0.0 };
    format.round((rounded * ulp).copysign(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(sums: &SummationReport, format: &str, algorithm: Algorithm) -> SumRow {
        sums.rows.iter().find(|row| row.format == format && row.algorithm == algorithm).unwrap().clone()
    }

    /// BF16 has eight significant bits: at 32 its spacing is 0.25, and adding 0.1 has no effect.
    #[test]
    fn repeated_tenths_stop_adding_up() {
        let sums = SummationReport::new(Terms::Tenths, false, 65536, 0).unwrap();
        let bf16 = row(&sums, "BF16", Algorithm::OneByOne);
        assert_eq!(*bf16.results.last().unwrap(), 32.0);
        let fp16 = row(&sums, "FP16", Algorithm::OneByOne);
        assert_eq!(*fp16.results.last().unwrap(), 256.0);
        assert!(bf16.stuck_from.unwrap() < fp16.stuck_from.unwrap());
        for (format, bound) in [("FP16", 1e-3), ("BF16", 4e-3)] {
            for algorithm in [Algorithm::Pairwise, Algorithm::TensorCore] {
                let errors = row(&sums, format, algorithm).errors;
                assert!(errors.iter().all(|error| *error <= bound), "{format} {algorithm:?} {errors:?}");
            }
            // Kahan's compensation also has the format's precision: in BF16 it stops too.
            let errors = row(&sums, format, Algorithm::Kahan).errors;
            let long = if format == "FP16" { 6 } else { 4 };
            assert!(errors[..long].iter().all(|error| *error <= bound), "{format} Kahan {errors:?}");
        }
        assert!(row(&sums, "FP32", Algorithm::OneByOne).errors.iter().all(|error| *error < 1e-3));
    }

    /// The mean over seeds approaches the sum, although rounding to nearest stops.
    #[test]
    fn stochastic_rounding_is_unbiased() {
        let terms = vec![0.1; 4096];
        let exact: f64 = terms.iter().map(|x| FloatFormat::BF16.round(*x)).sum();
        let sums = (0..200).map(|seed| accumulate(&terms, FloatFormat::BF16, Algorithm::Stochastic, seed).0);
        let sums: Vec<f64> = sums.collect();
        let mean = crate::lab::scaler::Mean::of(&sums);
        assert!((mean.mean - exact).abs() < 2.0 * mean.half_width, "{mean}, exact {exact}");
        assert!(mean.half_width < 0.01 * exact);
    }

    #[test]
    fn lengths_end_at_the_requested_one() {
        let sums = SummationReport::new(Terms::Uniform, true, 5000, 0).unwrap();
        assert_eq!(sums.lengths, [16, 64, 256, 1024, 4096, 5000]);
        assert!(SummationReport::new(Terms::Uniform, true, 0, 0).is_err());
    }
}
