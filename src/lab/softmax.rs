//! Softmax and positions in half precision: overflow of exp, the error of a long softmax, the error of a position's
//! sine.

use super::number::{serialize, short};
use crate::precision::FloatFormat;
use crate::ui::{Column, Line, Page, Role, plain};
use serde::Serialize;

/// Softmax and positions in every format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Softmax {
    pub(crate) logit: f64,
    /// Number of attended tokens: one with logit `logit`, the others with 0.
    pub(crate) length: u64,
    pub(crate) position: f64,
    /// FP32, FP16 and BF16.
    pub(crate) formats: Vec<SoftmaxRow>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SoftmaxRow {
    pub(crate) format: &'static str,
    /// The largest number of the format with a finite exp.
    pub(crate) exp_until: f64,
    /// The smallest number of the format with a non-zero exp.
    pub(crate) exp_from: f64,
    /// The weight of the logit by the formula `exp(x) / Σ exp`, with every operation rounded.
    #[serde(serialize_with = "serialize")]
    pub(crate) plain: f64,
    /// The weight of the logit, with the largest of all subtracted first.
    #[serde(serialize_with = "serialize")]
    pub(crate) shifted: f64,
    /// The weight of each of the other tokens, shifted.
    #[serde(serialize_with = "serialize")]
    pub(crate) other: f64,
    /// The sum of all exps by the plain formula, accumulated one by one in the format.
    #[serde(serialize_with = "serialize")]
    pub(crate) total: f64,
    /// The position as stored.
    #[serde(serialize_with = "serialize")]
    pub(crate) position: f64,
    /// The sine of the stored position, rounded to the format.
    #[serde(serialize_with = "serialize")]
    pub(crate) sine: f64,
    /// Its distance from the true sine.
    #[serde(serialize_with = "serialize")]
    pub(crate) sine_error: f64,
    /// The first position that is not stored exactly.
    pub(crate) first_inexact: u64,
}

const FORMATS: [FloatFormat; 3] = [FloatFormat::FP32, FloatFormat::FP16, FloatFormat::BF16];

impl Softmax {
    pub(crate) const MAX_LENGTH: u64 = 1 << 20;

    /// Computes a softmax over `length` tokens, and the sine of a position.
    pub(crate) fn new(logit: f64, length: u64, position: f64) -> Self {
        let length = length.clamp(2, Self::MAX_LENGTH);
        let formats = FORMATS.map(|format| SoftmaxRow::new(format, logit, length, position)).to_vec();
        Self { logit, length, position, formats }
    }

    /// The true weights of the logit and of each other token.
    fn exact(&self) -> (f64, f64) {
        let others = (self.length - 1) as f64;
        (1.0 / (1.0 + others * (-self.logit).exp()), 1.0 / (self.logit.exp() + others))
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        let (first, other) = self.exact();
        page.title(format!("softmax of one logit {} among {} of 0", short(self.logit), self.length - 1));
        page.push(Line::new().dim(format!("true weights: {} and {}", short(first), short(other))));
        let held = |x: f64| (if x.is_finite() { Role::Good } else { Role::Bad }, short(x));
        let kept = |x: f64| (if x == 0.0 && other != 0.0 { Role::Bad } else { Role::Good }, short(x));
        let columns: &[Column<SoftmaxRow>] = &[
            ("format", -8, &|row| (Role::Title, row.format.to_owned())),
            ("exp ok from", 12, &|row| plain(format!("{:.4}", row.exp_from))),
            ("to", 12, &|row| plain(format!("{:.4}", row.exp_until))),
            ("plain", 12, &|row| held(row.plain)),
            ("shifted", 12, &|row| held(row.shifted)),
            ("others", 12, &|row| kept(row.other)),
            ("Σ exp", 10, &|row| held(row.total)),
        ];
        page.table(&self.formats, columns);
        page.gap();
        page.title(format!("position {}: sin is {:.6}", short(self.position), self.position.sin()));
        let graded = |row: &SoftmaxRow, x: f64| (Role::graded(row.sine_error, [1e-3, 1e-1]), short(x));
        let columns: &[Column<SoftmaxRow>] = &[
            ("format", -8, &|row| (Role::Title, row.format.to_owned())),
            ("stored", 14, &|row| plain(short(row.position))),
            ("sin", 14, &|row| graded(row, row.sine)),
            ("error", 14, &|row| graded(row, row.sine_error)),
            ("exact below", 20, &|row| plain(row.first_inexact)),
        ];
        page.table(&self.formats, columns);
        page.gap();
        let text = "Shifted: exp(x − max x), which no finite logit overflows; each column rounds after every operation. \
                    Positions count in steps of the format's spacing, so beyond the last column neighboring positions have the same angle.";
        page.wrapped(Role::Dim, text, width);
        page
    }
}

impl SoftmaxRow {
    fn new(format: FloatFormat, logit: f64, length: u64, position: f64) -> Self {
        let round = |x: f64| format.round(x);
        let exp = |x: f64| round(round(x).exp());
        // Add the others one by one in the format.
        let sum = |first: f64, other: f64| {
            let mut sum = first;
            for _ in 1..length {
                let next = round(sum + other);
                if next == sum {
                    break;
                }
                sum = next;
            }
            sum
        };
        let logit = round(logit);
        let plain = round(exp(logit) / sum(exp(logit), exp(0.0)));
        let max = logit.max(0.0);
        let first = exp(logit - max);
        let other = exp(-max);
        let total = sum(first, other);
        let stored = round(position);
        let sine = round(stored.sin());
        Self {
            format: format.name,
            exp_until: last(format, |x| exp(x).is_finite()),
            exp_from: -last(format, |x| exp(-x) > 0.0),
            plain,
            shifted: round(first / total),
            other: round(other / total),
            total: sum(exp(logit), exp(0.0)),
            position: stored,
            sine,
            sine_error: (sine - position.sin()).abs(),
            first_inexact: (1 << (format.mantissa_bits + 1)) + 1,
        }
    }
}

/// The largest positive number of the format for which `holds`, which must be monotonic.
fn last(format: FloatFormat, holds: impl Fn(f64) -> bool) -> f64 {
    let mut low = 0;
    let mut high = format.encode(format.max());
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if holds(format.decode(middle)) { low = middle } else { high = middle - 1 }
    }
    format.decode(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(softmax: &Softmax, format: &str) -> SoftmaxRow {
        softmax.formats.iter().find(|row| row.format == format).unwrap().clone()
    }

    /// exp overflows FP16 above ln 65520 = 11.0901, and is zero below ln 2^-25 = -17.33.
    #[test]
    fn exp_in_fp16() {
        let fp16 = row(&Softmax::new(12.0, 16, 4095.0), "FP16");
        assert_eq!((fp16.exp_until, fp16.exp_from), (11.085_937_5, -17.328_125));
        assert!(fp16.plain.is_nan() && fp16.total.is_infinite() && fp16.shifted > 0.9);
        let bf16 = row(&Softmax::new(12.0, 16, 4095.0), "BF16");
        assert!(bf16.plain.is_finite() && (88.0..89.0).contains(&bf16.exp_until));
    }

    /// Above 65520 FP16 stores infinity, and ∞ − ∞ is NaN. Below 0 the other logits are the largest.
    #[test]
    fn the_largest_logit_is_subtracted() {
        let shifted = |logit| row(&Softmax::new(logit, 16, 0.0), "FP16").shifted;
        assert!(shifted(70_000.0).is_nan() && shifted(65_000.0) == 1.0);
        let low = Softmax::new(-20.0, 16, 0.0);
        assert_eq!((row(&low, "FP16").shifted, row(&low, "FP16").other), (0.0, FloatFormat::FP16.round(1.0 / 15.0)));
        assert!((low.exact().0 * 15.0 / (-20f64).exp() - 1.0).abs() < 1e-9);
        assert_eq!(Softmax::new(-1000.0, 16, 0.0).exact(), (0.0, 1.0 / 15.0));
    }

    #[test]
    fn rounded_positions_have_the_wrong_sine() {
        let softmax = Softmax::new(1.0, 4, 2049.0);
        let (fp16, bf16) = (row(&softmax, "FP16"), row(&softmax, "BF16"));
        assert_eq!((fp16.position, fp16.first_inexact), (2048.0, 2049));
        assert_eq!((bf16.position, bf16.first_inexact), (2048.0, 257));
        assert!(fp16.sine_error > 0.5 && row(&softmax, "FP32").sine_error < 1e-6);
    }

    #[test]
    fn empty_input_does_not_panic() {
        for (logit, length, position) in [(f64::NAN, 0, f64::INFINITY), (1e300, 1 << 40, -1.0), (-1e9, 3, 0.0)] {
            assert!(!Softmax::new(logit, length, position).page(40).text().is_empty());
        }
    }
}
