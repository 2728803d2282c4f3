//! What each format can hold, on one logarithmic axis, with the numbers of a value or a run above it.

use serde::Serialize;

use super::number::{serialize, short};
use super::page::{Line, Page, Role};
use crate::precision::{FloatClass, FloatFormat};

/// The formats' ranges, and what is to be held.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranges {
    /// Widest format first.
    pub formats: Vec<RangeRow>,
    /// What is compared with them.
    pub extents: Vec<Extent>,
    /// Exponents of the chart's ends.
    pub window: (i32, i32),
}

/// A format's limits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RangeRow {
    /// The format's name.
    pub format: &'static str,
    /// The smallest positive number.
    #[serde(serialize_with = "serialize")]
    pub min_subnormal: f64,
    /// The smallest with full precision.
    #[serde(serialize_with = "serialize")]
    pub min_normal: f64,
    /// The largest finite number.
    #[serde(serialize_with = "serialize")]
    pub max: f64,
    /// Significant bits of a normal number, the implied one included.
    pub significant_bits: u32,
}

/// Magnitudes from `low` to `high`; a single value where they are equal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Extent {
    /// What lies there: `value`, `gradients, scaled`, ….
    pub label: String,
    /// The smallest magnitude above zero.
    #[serde(serialize_with = "serialize")]
    pub low: f64,
    /// The largest finite magnitude.
    #[serde(serialize_with = "serialize")]
    pub high: f64,
}

const LABEL: usize = 19;

impl Ranges {
    /// A chart from just below FP32's smallest to just above its largest number.
    pub const WHOLE: (i32, i32) = (-150, 130);

    /// Compares `extents` with every format; `window` are the exponents of the chart's ends.
    pub fn new(extents: Vec<Extent>, window: (i32, i32)) -> Self {
        let row = |format: FloatFormat| RangeRow {
            format: format.name,
            min_subnormal: format.min_subnormal(),
            min_normal: format.min_normal(),
            max: format.max(),
            significant_bits: format.mantissa_bits + 1,
        };
        let window = (window.0, window.1.max(window.0 + 1));
        Self { formats: FloatFormat::ALL.map(row).to_vec(), extents, window }
    }

    /// The report as text, `width` columns wide.
    pub fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        page.push(Line::new().with(Role::Title, "range").dim("   ┄ subnormal   ━ normal   ● extent"));
        let axis = Axis { window: self.window, columns: width.saturating_sub(LABEL).max(16) };
        for extent in &self.extents {
            let bar = axis.bar(&[(extent.low, extent.high, '●')]);
            page.push(Line::new().plain(format!("{:<LABEL$}", extent.label)).with(Role::Series(0), bar));
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
        if !self.extents.is_empty() {
            page.gap();
            self.verdicts(&mut page);
        }
        page
    }

    fn limits(&self, page: &mut Page) {
        page.title(format!("{:<12}{:>14}{:>14}{:>14}{:>7}", "format", "min subnormal", "min normal", "max", "bits"));
        for row in &self.formats {
            let [low, normal, max] = [row.min_subnormal, row.min_normal, row.max].map(short);
            page.push(
                Line::new()
                    .plain(format!("{:<12}{low:>14}{normal:>14}{max:>14}{:>7}", row.format, row.significant_bits)),
            );
        }
    }

    fn verdicts(&self, page: &mut Page) {
        let [a, b, c, d, e] = FloatFormat::ALL.map(|format| format.name);
        page.title(format!("{:<LABEL$}{a:>10}{b:>10}{c:>10}{d:>10}{e:>10}", "held by"));
        for extent in &self.extents {
            let mut line = Line::new().plain(format!("{:<LABEL$}", extent.label));
            for format in FloatFormat::ALL {
                let (role, verdict) = extent.verdict(format);
                line = line.with(role, format!("{verdict:>10}"));
            }
            page.push(line);
            // A single value is its own label.
            if extent.low < extent.high {
                page.push(Line::new().dim(format!("  {} to {}", short(extent.low), short(extent.high))));
            }
        }
    }
}

impl Extent {
    /// A single value's magnitude.
    pub fn value(label: impl Into<String>, x: f64) -> Self {
        Self { label: label.into(), low: x.abs(), high: x.abs() }
    }

    /// What a format makes of its ends, the worse first.
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
struct Axis {
    window: (i32, i32),
    columns: usize,
}

impl Axis {
    /// The column that holds `x`; out of the window the nearest.
    fn column(&self, x: f64) -> usize {
        let (low, high) = (f64::from(self.window.0), f64::from(self.window.1));
        let share = (x.log2() - low) / (high - low);
        ((share * self.columns as f64).floor().max(0.0) as usize).min(self.columns - 1)
    }

    /// Stretches of glyphs, later ones over earlier ones; what lies outside the window is not drawn.
    fn bar(&self, stretches: &[(f64, f64, char)]) -> String {
        let mut cells = vec![' '; self.columns];
        let window = (f64::from(self.window.0), f64::from(self.window.1));
        for &(from, to, glyph) in stretches {
            if from.log2() < window.1 && to.log2() >= window.0 {
                cells[self.column(from)..=self.column(to)].fill(glyph);
            }
        }
        cells.into_iter().collect::<String>().trim_end().to_owned()
    }

    /// A scale with about six marks, and their exponents.
    fn ticks(&self) -> (String, String) {
        let span = self.window.1 - self.window.0;
        let step = [1, 2, 5, 10, 20, 50, 100].into_iter().find(|step| span / step <= 8).unwrap_or(200);
        let (mut ticks, mut labels) = (vec!['─'; self.columns], vec![' '; self.columns]);
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
        let extents = vec![
            Extent::value("1e-8", 1e-8),
            Extent { label: "gradients, scaled".into(), low: 2f64.powi(-24), high: 71.0 },
            Extent { label: "logits".into(), low: 1e-3, high: 1e5 },
        ];
        Ranges::new(extents, Ranges::WHOLE)
    }

    #[test]
    fn pages() {
        insta::assert_snapshot!("ranges", example().page(80).text());
        insta::assert_snapshot!("ranges_near_fp16", Ranges { window: (-30, 20), ..example() }.page(80).text());
    }

    #[test]
    fn verdicts_follow_the_formats() {
        let verdict = |x, format| Extent::value("x", x).verdict(format).1;
        assert_eq!(verdict(1e-8, FloatFormat::FP16), "○ flushed");
        assert_eq!(verdict(1e-8, FloatFormat::BF16), "● normal");
        assert_eq!(verdict(1e-5, FloatFormat::FP16), "◐ subn");
        assert_eq!(verdict(65520.0, FloatFormat::FP16), "✕ over");
        assert_eq!(verdict(449.0, FloatFormat::E4M3), "● normal");
        assert_eq!(verdict(465.0, FloatFormat::E4M3), "✕ over");
    }
}
