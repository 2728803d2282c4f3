//! A histogram of gradients under an adjustable loss scale: the shares that are flushed, subnormal, normal or overflow.

use super::number::percent;
use crate::precision::{ExponentHistogram, FloatFormat, RangeShares};
use crate::ui::{Column, Line, Page, Role, column_cell, plain};
use serde::Serialize;

/// A histogram of gradients in a format at a range of scales.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct UnderflowReport {
    pub(crate) source: String,
    pub(crate) format: &'static str,
    #[serde(skip)]
    layout: FloatFormat,
    /// Magnitudes before scaling.
    pub(crate) gradients: ExponentHistogram,
    /// log2 of the scale shown.
    pub(crate) shift: i32,
    /// The shares at that scale.
    pub(crate) shares: RangeShares,
    /// log2 of the best scale: the smallest that keeps the most in full precision without overflow.
    pub(crate) best: i32,
    pub(crate) best_shares: RangeShares,
    /// Doublings from the best scale to the first overflow.
    pub(crate) margin: i32,
    /// The scales around the best one and the one shown.
    pub(crate) table: Vec<UnderflowRow>,
    /// The variance of each layer's unscaled gradient, in ascending order, if a run has measured it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) variances: Vec<(String, f64)>,
    /// Whether the counts' axis is linear instead of logarithmic.
    #[serde(skip)]
    pub(crate) linear: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct UnderflowRow {
    pub(crate) shift: i32,
    /// Shares of the non-zero gradients.
    pub(crate) shares: RangeShares,
}

/// log2 of the scales considered.
const SHIFTS: std::ops::RangeInclusive<i32> = -10..=40;

impl UnderflowReport {
    /// Computes the shares of `gradients` in `format` at the scale `2^shift`, or at the best one.
    pub(crate) fn new(
        source: impl Into<String>,
        gradients: ExponentHistogram,
        format: FloatFormat,
        shift: Option<i32>,
    ) -> Self {
        let at = |shift| UnderflowRow { shift, shares: gradients.shares_at(shift, format) };
        let all: Vec<_> = SHIFTS.map(at).collect();
        let highest = gradients.highest().unwrap_or(0);
        let best = (all.iter().filter(|row| row.shares.overflow == 0.0))
            .copied()
            .reduce(|best, row| {
                let merit = |row: &UnderflowRow| (row.shares.normal, -row.shares.flushed);
                if merit(&row) > merit(&best) { row } else { best }
            })
            .unwrap_or(all[0]);
        let shift = shift.unwrap_or(best.shift);
        let near = |row: &UnderflowRow| (row.shift - best.shift).abs() <= 3 || (row.shift - shift).abs() <= 1;
        Self {
            source: source.into(),
            format: format.name,
            layout: format,
            shift,
            shares: at(shift).shares,
            best: best.shift,
            best_shares: best.shares,
            margin: format.max_exponent() - highest - best.shift,
            table: all.iter().filter(|row| near(row)).copied().collect(),
            gradients,
            variances: Vec::new(),
            linear: false,
        }
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        page.headed(&format!("{} at loss scale 2^{}", self.format, self.shift), &self.source, width);
        self.ruler(&mut page, width);
        page.push(
            Line::new()
                .with(Role::Bad, format!("flushed {} %", percent(self.shares.flushed)))
                .with(Role::Warn, format!("   subnormal {} %", percent(self.shares.subnormal)))
                .with(Role::Good, format!("   normal {} %", percent(self.shares.normal)))
                .with(Role::Bad, format!("   overflow {} %", percent(self.shares.overflow))),
        );
        page.push(Line::new().with(Role::Title, format!("best scale 2^{}", self.best)).plain(match self.margin {
            margin if margin < 0 => "   every scale overflows".to_owned(),
            0 => "   twice that scale overflows".to_owned(),
            margin => format!("   overflows at 2^{} and above", self.best + margin + 1),
        }));
        if let [(calm, least), .., (wild, most)] = &self.variances[..] {
            page.push(
                Line::new()
                    .plain(format!("variance of a layer's gradient: {least:.1e} ({calm}) to {most:.1e} ({wild})")),
            );
        }
        page.gap();
        self.scales(&mut page);
        page
    }

    /// Draws the format's range at a fixed position, with space on both sides; the gradients shift with the scale. Left
    /// of the range they are flushed, right of it they overflow.
    fn ruler(&self, page: &mut Page, width: usize) {
        const HEIGHT: usize = 7;
        let (first, per_column, columns) = self.columns(width);
        let most = columns.iter().map(|(_, count)| *count).max().unwrap_or(0).max(2);
        let level = |count: u64| {
            let share = if self.linear {
                count as f64 / most as f64
            } else {
                (1.0 + count as f64).ln() / (1.0 + most as f64).ln()
            };
            (share * (HEIGHT * 8) as f64).ceil() as usize
        };
        for row in (0..HEIGHT).rev() {
            let label = match row + 1 {
                HEIGHT if self.linear => format!("{:.1e}", most as f64),
                HEIGHT => format!("10^{:<4.1}", (most as f64).log10()),
                _ => " ".repeat(7),
            };
            let mut line = Line::new().dim(format!("{label:>7} "));
            for &(role, count) in &columns {
                line = line.with(role, column_cell(level(count), row).to_string());
            }
            page.push(line);
        }
        self.axis(page, columns.len(), |exponent| ((exponent - first) / per_column) as usize);
    }

    /// The exponent at which the first column begins, the binades of a column, and each column's role and number of
    /// gradients.
    fn columns(&self, width: usize) -> (i32, i32, Vec<(Role, u64)>) {
        // Binades shown below and above the format's own.
        const PADDING: (i32, i32) = (18, 10);
        let [least, normal, top] = self.limits();
        // If the format is wider than the screen, a column holds several binades.
        let binades = (top - least + 1 + PADDING.0 + PADDING.1).unsigned_abs() as usize;
        let per_column = binades.div_ceil(width.saturating_sub(12).max(8)) as i32;
        let count = |from: i32, to: i32| (from..to).map(|e| self.gradients.count(e - self.shift)).sum::<u64>();
        let mut columns: Vec<(Role, u64)> = Vec::new();
        let first = least - PADDING.0 / per_column * per_column;
        for from in (first..=top + PADDING.1).step_by(per_column as usize) {
            let role = match from {
                // Values that round up to the smallest subnormal are not flushed.
                _ if from < least - 1 => Role::Bad,
                _ if from < normal => Role::Warn,
                _ if from <= top => Role::Good,
                _ => Role::Bad,
            };
            columns.push((role, count(from, from + per_column)));
        }
        // The tails beyond the chart.
        let last = columns.len() - 1;
        columns[0].1 += count(-400, first);
        columns[last].1 += count(first + (last as i32 + 1) * per_column, 400);
        (first, per_column, columns)
    }

    /// The exponents of the format's smallest subnormal, smallest normal and largest number.
    fn limits(&self) -> [i32; 3] {
        [self.layout.min_subnormal_exponent(), self.layout.min_exponent(), self.layout.max_exponent()]
    }

    /// Draws the axis and the names of the ranges below the columns; `column` maps an exponent to its column.
    fn axis(&self, page: &mut Page, columns: usize, column: impl Fn(i32) -> usize) {
        let [least, normal, top] = self.limits();
        let mut marks = vec!['─'; columns];
        let mut labels = String::new();
        for exponent in [least, normal, 0, top] {
            let label = exponent.to_string();
            let end = column(exponent) + 1;
            marks[end - 1] = '┴';
            if labels.is_empty() || labels.len() + label.len() < end {
                labels.extend([format!("{label:>0$}", end - labels.len())]);
            }
        }
        // The longest of the names that fits.
        let zone = |names: &[&str], from: usize, to: usize| {
            let width = to.saturating_sub(from);
            let fits = names.iter().find(|name| name.len() < width).copied().unwrap_or_default();
            format!("{fits:^width$}")
        };
        let [least, normal, above] = [column(least), column(normal), column(top) + 1];
        let zones = [
            (Role::Bad, zone(&["flushed", "zero", "0"], 0, least)),
            (Role::Warn, zone(&["subnormal", "subn.", "sub"], least, normal)),
            (Role::Good, zone(&[&format!("{} normal", self.format), "normal"], normal, above)),
            (Role::Bad, zone(&["overflow", "over", "inf"], above, columns)),
        ];
        page.push(Line::new().plain(" ".repeat(8)).dim(marks.into_iter().collect::<String>()));
        page.push(Line::new().plain(" ".repeat(8)).dim(labels));
        let names = zones.into_iter().fold(Line::new().dim("after S "), |line, (role, name)| line.with(role, name));
        page.push(names);
    }

    fn scales(&self, page: &mut Page) {
        let mark = |shift: i32| match shift {
            shift if shift == self.best => "  ← best",
            shift if shift == self.shift => "  ← shown",
            _ => "",
        };
        let columns: &[Column<UnderflowRow>] = &[
            ("scale", 8, &|row| plain(format!("2^{}", row.shift))),
            ("flushed %", 13, &|row| plain(percent(row.shares.flushed))),
            ("subnormal %", 13, &|row| plain(percent(row.shares.subnormal))),
            ("normal %", 13, &|row| plain(percent(row.shares.normal))),
            ("overflow %", 13, &|row| (Role::bad_if(row.shares.overflow > 0.0), percent(row.shares.overflow))),
            ("", 0, &|row| (Role::Title, mark(row.shift).to_owned())),
        ];
        page.table(&self.table, columns);
    }
}

/// `count` gradients with normally distributed log2 magnitudes of mean `mu` and deviation `sigma`: the rounded expected
/// number in each binade, so that the tails end where less than half a gradient is expected.
pub(crate) fn log_normal(mu: f64, sigma: f64, count: u64) -> ExponentHistogram {
    let below = |exponent: i32| standard_normal_cdf((f64::from(exponent) - mu) / sigma);
    let binade = |e: i32| (e, ((below(e + 1) - below(e)) * count as f64).round() as u64);
    ExponentHistogram::from_counts((ExponentHistogram::LOWEST..=ExponentHistogram::HIGHEST).map(binade))
}

/// Φ(x) to about 1e-9, relative in the lower tail: half of the complementary error function, by the continued fraction
/// in the tails and the Taylor series between.
fn standard_normal_cdf(x: f64) -> f64 {
    if x > 0.0 {
        return 1.0 - standard_normal_cdf(-x);
    }
    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if x < -3.0 {
        let fraction = (1..=60).rev().fold(-x, |fraction, n| -x + f64::from(n) / fraction);
        return density / fraction;
    }
    let mut term = x;
    let mut sum = x;
    let mut n = 1.0;
    while term.abs() > 1e-17 {
        n += 2.0;
        term *= x * x / n;
        sum += term;
    }
    0.5 + density * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_distribution() {
        for (x, expected) in [
            (0.0, 0.5),
            (-1.0, 0.158_655_253_931_457_05),
            (1.96, 0.975_002_104_851_779_5),
            (-3.1, 9.676_032_132_183_563e-4),
            (-6.0, 9.865_876_450_376_98e-10),
        ] {
            assert!((standard_normal_cdf(x) / expected - 1.0f64).abs() < 1e-9, "{x}: {}", standard_normal_cdf(x));
        }
    }

    /// In log2 units, one binade around the mean of a unit normal: Φ(1) - Φ(0) = 34.13 %.
    #[test]
    fn a_log_normal_histogram_has_the_right_total() {
        let histogram = log_normal(-20.0, 1.0, 1_000_000);
        assert_eq!((histogram.count(-20), histogram.count(-21)), (341_345, 341_345));
        assert!(histogram.total().abs_diff(1_000_000) < 10);
    }

    #[test]
    fn the_best_scale_loses_the_least_without_overflow() {
        // Five binades from 2^-30: all are normal in FP16 at scales of at least 2^16, and overflow above 2^41.
        let five = ExponentHistogram::from_counts((-30..-25).map(|e| (e, 10)));
        let report = UnderflowReport::new("", five, FloatFormat::FP16, None);
        assert_eq!((report.best, report.best_shares.normal, report.margin), (16, 1.0, 25));
        // Wider than FP16: the largest scale without overflow.
        let wide = ExponentHistogram::from_counts((-40..=-1).map(|e| (e, 1)));
        let report = UnderflowReport::new("", wide, FloatFormat::FP16, None);
        assert_eq!((report.best, report.margin), (16, 0));
        assert_eq!(report.best_shares.overflow, 0.0);
        // Too small for normal numbers at every scale.
        let tiny = ExponentHistogram::from_counts((-66..=-62).map(|e| (e, 1)));
        let report = UnderflowReport::new("", tiny, FloatFormat::FP16, None);
        assert_eq!((report.best, report.best_shares.flushed), (40, 0.2));
    }

    #[test]
    fn pages() {
        let gradients = log_normal(-22.0, 4.0, 82_000_000);
        let page = |format, shift| UnderflowReport::new("log-normal", gradients.clone(), format, shift).page(80).text();
        insta::assert_snapshot!("underflow_unscaled", page(FloatFormat::FP16, Some(0)));
        insta::assert_snapshot!("underflow_e5m2", page(FloatFormat::E5M2, Some(16)));
        assert!(page(FloatFormat::FP32, None).lines().all(|line| line.chars().count() <= 80));
        assert!(
            !UnderflowReport::new("", ExponentHistogram::new(), FloatFormat::E4M3, None).page(20).text().is_empty()
        );
    }
}
