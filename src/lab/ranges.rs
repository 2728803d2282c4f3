//! Each format's range on one logarithmic axis, with the magnitudes of a value or a run.

use super::number::{serialize, short};
use crate::precision::{FloatClass, FloatFormat};
use crate::ui::format::padded;
use crate::ui::{Column, Line, Page, Role, plain};
use serde::Serialize;

/// The formats' ranges, and the magnitudes to compare with them.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[expect(clippy::struct_field_names, reason = "they are keys of the JSON output")]
pub(crate) struct Ranges {
    /// Widest format first.
    pub(crate) formats: Vec<RangeRow>,
    pub(crate) value_ranges: Vec<ValueRange>,
    /// Exponents of the chart's ends.
    pub(crate) window: (i32, i32),
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RangeRow {
    pub(crate) format: &'static str,
    /// The smallest positive number.
    pub(crate) min_subnormal: f64,
    /// The smallest with full precision.
    pub(crate) min_normal: f64,
    /// The largest finite number.
    pub(crate) max: f64,
    /// Significant bits of a normal number, including the implied one.
    pub(crate) significant_bits: u32,
    /// Widths of the sign, exponent and mantissa fields.
    pub(crate) fields: [u32; 3],
    /// Bytes per number.
    pub(crate) bytes: u32,
    /// Distance from 1 to the next larger number.
    pub(crate) ulp_at_1: f64,
}

/// Magnitudes from `low` to `high`; a single value if they are equal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ValueRange {
    /// Their name: `value`, `gradients, scaled`, ….
    pub(crate) label: String,
    /// The smallest magnitude above zero.
    #[serde(serialize_with = "serialize")]
    pub(crate) low: f64,
    /// The largest finite magnitude.
    #[serde(serialize_with = "serialize")]
    pub(crate) high: f64,
}

const LABEL: usize = 19;

fn label(range: &ValueRange) -> String {
    padded(&range.label, LABEL - 1) + " "
}

impl Ranges {
    /// A chart from just below FP32's smallest to just above its largest number.
    pub(crate) const WHOLE: (i32, i32) = (-150, 130);

    /// Compares `value_ranges` with every format. `window` is the exponents of the chart's ends; by default they fit
    /// the extents and FP16, or all formats without extents.
    pub(crate) fn new(value_ranges: Vec<ValueRange>, window: (Option<i32>, Option<i32>)) -> Self {
        const MARGIN: i32 = 4;
        let exponents = |ends: fn(&ValueRange) -> f64| {
            value_ranges.iter().map(move |extent| ends(extent).log2()).filter(|log2| log2.is_finite())
        };
        let fitting = if value_ranges.is_empty() {
            Self::WHOLE
        } else {
            let low = exponents(|extent| extent.low).fold(-24.0, f64::min);
            let high = exponents(|extent| extent.high).fold(16.0, f64::max);
            ((low.floor() as i32 - MARGIN).max(Self::WHOLE.0), (high.ceil() as i32 + MARGIN).min(Self::WHOLE.1))
        };
        let window = (window.0.unwrap_or(fitting.0), window.1.unwrap_or(fitting.1));
        let row = |format: FloatFormat| RangeRow {
            format: format.name,
            min_subnormal: format.min_subnormal(),
            min_normal: format.min_normal(),
            max: format.max(),
            significant_bits: format.mantissa_bits + 1,
            fields: [1, format.exponent_bits, format.mantissa_bits],
            bytes: format.bits() / 8,
            ulp_at_1: format.epsilon(),
        };
        let window = (window.0, window.1.max(window.0 + 1));
        Self { formats: FloatFormat::ALL.map(row).to_vec(), value_ranges, window }
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        page.push(Line::new().with(Role::Title, "range").dim("   ┄ subnormal   ━ normal   ● extent"));
        let axis = ExponentAxis { window: self.window, columns: width.saturating_sub(LABEL).max(16) };
        for extent in &self.value_ranges {
            let bar = axis.bar(&[(extent.low, extent.high, '●')]);
            page.push(Line::new().plain(label(extent)).with(Role::Series(0), bar));
        }
        for row in &self.formats {
            let bar = axis.bar(&[(row.min_subnormal, row.min_normal, '┄'), (row.min_normal, row.max, '━')]);
            page.push(Line::new().with(Role::Title, format!("{:<LABEL$}", row.format)).with(Role::Mantissa, bar));
        }
        let (ticks, labels) = axis.ticks();
        page.push(Line::new().dim(" ".repeat(LABEL) + &ticks));
        page.push(Line::new().dim(" ".repeat(LABEL) + &labels));
        page.gap();
        self.limits(&mut page);
        if !self.value_ranges.is_empty() {
            page.gap();
            self.verdicts(&mut page);
        }
        page
    }

    fn limits(&self, page: &mut Page) {
        let columns: &[Column<RangeRow>] = &[
            ("format", -9, &|row| (Role::Title, row.format.to_owned())),
            ("bytes", 6, &|row| plain(row.bytes)),
            ("s+e+m", 8, &|row| plain(row.fields.map(|width| width.to_string()).join("+"))),
            ("± range", 13, &|row| plain(short(row.max))),
            ("min normal", 14, &|row| plain(short(row.min_normal))),
            ("min subnormal", 14, &|row| plain(short(row.min_subnormal))),
            ("ULP at 1", 12, &|row| plain(short(row.ulp_at_1))),
        ];
        page.table(&self.formats, columns);
    }

    fn verdicts(&self, page: &mut Page) {
        let [a, b, c, d, e] = FloatFormat::ALL.map(|format| format.name);
        page.title(format!("{:<LABEL$}{a:>10}{b:>10}{c:>10}{d:>10}{e:>10}", "held by"));
        for extent in &self.value_ranges {
            let mut line = Line::new().plain(label(extent));
            for format in FloatFormat::ALL {
                let (role, verdict) = extent.verdict(format);
                line = line.with(role, format!("{verdict:>10}"));
            }
            page.push(line);
            // A single value is the label itself.
            if extent.low < extent.high {
                page.push(Line::new().dim(format!("  {} to {}", short(extent.low), short(extent.high))));
            }
        }
    }
}

impl ValueRange {
    /// A single value's magnitude.
    pub(crate) fn value(label: impl Into<String>, x: f64) -> Self {
        Self { label: label.into(), low: x.abs(), high: x.abs() }
    }

    /// How a format represents the extent's ends; the worse one counts.
    fn verdict(&self, format: FloatFormat) -> (Role, &'static str) {
        let class = |x: f64| format.classify(format.encode(x));
        match (class(self.low), class(self.high)) {
            (_, FloatClass::Infinite | FloatClass::Nan) => (Role::Bad, "✕ over"),
            (FloatClass::Zero, _) if self.low != 0.0 => (Role::Bad, "○ flushed"),
            (FloatClass::Subnormal, _) => (Role::Warn, "◐ subn"),
            _ => (Role::Good, "● normal"),
        }
    }
}

/// A logarithmic axis in terminal columns.
struct ExponentAxis {
    window: (i32, i32),
    columns: usize,
}

impl ExponentAxis {
    /// The column of `x`, clamped to the window.
    fn column(&self, x: f64) -> usize {
        let (low, high) = (f64::from(self.window.0), f64::from(self.window.1));
        let share = (x.log2() - low) / (high - low);
        ((share * self.columns as f64).floor().max(0.0) as usize).min(self.columns - 1)
    }

    /// Segments of glyphs, later ones over earlier ones, clipped to the window.
    fn bar(&self, stretches: &[(f64, f64, char)]) -> String {
        let mut cells = vec![' '; self.columns];
        let window = (f64::from(self.window.0), f64::from(self.window.1));
        for &(from, to, glyph) in stretches {
            if from.log2() < window.1 && to.log2() >= window.0 {
                cells[self.column(from)..=self.column(to)].fill(glyph);
                // Mark what continues beyond the window.
                if from.log2() < window.0 - 1.0 {
                    cells[0] = '←';
                }
                if to.log2() > window.1 + 1.0 {
                    cells[self.columns - 1] = '→';
                }
            }
        }
        cells.into_iter().collect::<String>().trim_end().to_owned()
    }

    /// A scale with about six marks, and their exponents.
    fn ticks(&self) -> (String, String) {
        let span = self.window.1 - self.window.0;
        let step = [1, 2, 5, 10, 20, 50, 100].into_iter().find(|step| span / step <= 8).unwrap_or(200);
        let mut ticks = vec!['─'; self.columns];
        let mut labels = vec![' '; self.columns];
        let first = self.window.0.div_euclid(step) * step;
        for exponent in (first..=self.window.1).step_by(step as usize).filter(|e| *e >= self.window.0) {
            let column = self.column(2f64.powi(exponent));
            ticks[column] = '┴';
            let label: Vec<char> = format!("2^{exponent}").chars().collect();
            if column + label.len() <= self.columns && labels[column.saturating_sub(1)] == ' ' {
                labels[column..column + label.len()].copy_from_slice(&label);
            }
        }
        (ticks.into_iter().collect(), labels.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Ranges {
        let value_ranges = vec![
            ValueRange::value("1e-8", 1e-8),
            ValueRange { label: "gradients, scaled".into(), low: 2f64.powi(-24), high: 71.0 },
            ValueRange { label: "logits".into(), low: 1e-3, high: 1e5 },
        ];
        Ranges::new(value_ranges, (Some(Ranges::WHOLE.0), Some(Ranges::WHOLE.1)))
    }

    #[test]
    fn pages() {
        insta::assert_snapshot!("ranges", example().page(80).text());
        insta::assert_snapshot!("ranges_near_fp16", Ranges { window: (-30, 20), ..example() }.page(80).text());
    }

    #[test]
    fn a_long_label_moves_no_bar() {
        let column = |label: &str| {
            let text = Ranges::new(vec![ValueRange::value(label, 1.0)], (None, None)).page(80).text();
            text.lines().skip(1).find_map(|line| line.chars().position(|c| c == '●'))
        };
        assert!(column("1").is_some());
        assert_eq!(column("1.000000000000000000000000"), column("1"));
    }

    #[test]
    fn the_axis_fits_what_is_shown() {
        let window = |x| Ranges::new(vec![ValueRange::value("x", x)], (None, None)).window;
        assert_eq!([window(1.0), window(2f64.powi(-40)), window(1e30)], [(-28, 20), (-44, 20), (-28, 104)]);
        assert_eq!(Ranges::new(Vec::new(), (None, Some(20))).window, (-150, 20));
    }

    #[test]
    fn verdicts_follow_the_formats() {
        let verdict = |x, format| ValueRange::value("x", x).verdict(format).1;
        assert_eq!(verdict(1e-8, FloatFormat::FP16), "○ flushed");
        assert_eq!(verdict(1e-8, FloatFormat::BF16), "● normal");
        assert_eq!(verdict(1e-5, FloatFormat::FP16), "◐ subn");
        assert_eq!(verdict(65520.0, FloatFormat::FP16), "✕ over");
        assert_eq!(verdict(449.0, FloatFormat::E4M3), "● normal");
        assert_eq!(verdict(465.0, FloatFormat::E4M3), "✕ over");
    }
}
