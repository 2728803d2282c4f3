//! Whether an update to a weight survives rounding: the values of each format around the weight.
//!
//! This is the reason for FP32 master weights: near 1, FP16's spacing is 2^-10, and a typical update is far smaller
//! than half of that.

use super::number::{serialize, short};
use crate::precision::FloatFormat;
use crate::ui::{Column, Line, Page, Role, plain};
use serde::Serialize;

/// A weight, an update, and their sum in each format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct UlpGrid {
    /// The weight.
    #[serde(serialize_with = "serialize")]
    pub(crate) center: f64,
    #[serde(serialize_with = "serialize")]
    pub(crate) update: f64,
    /// Widest format first.
    pub(crate) formats: Vec<UlpRow>,
}

/// A weight and its update in a format.
#[expect(clippy::struct_excessive_bools, reason = "independent results, which JSON shows by name")]
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct UlpRow {
    pub(crate) format: &'static str,
    #[serde(skip)]
    layout: FloatFormat,
    /// The weight as stored.
    #[serde(serialize_with = "serialize")]
    pub(crate) stored: f64,
    /// The next number in the update's direction; NaN if there is none.
    #[serde(serialize_with = "serialize")]
    pub(crate) next: f64,
    /// The stored weight plus the update, rounded.
    #[serde(serialize_with = "serialize")]
    pub(crate) sum: f64,
    pub(crate) verdict: UpdateFate,
    /// Whether the sum is a finite number other than the stored weight.
    pub(crate) survives: bool,
    /// Distance to `next`; at the format's maximum, the spacing below it.
    #[serde(serialize_with = "serialize")]
    pub(crate) spacing: f64,
    /// Half a step above the largest number. It overflows, as do larger numbers; in E4M3, the tie rounds to the largest
    /// number.
    #[serde(serialize_with = "serialize")]
    pub(crate) overflows_from: f64,
    /// Half the spacing: an update survives if it is larger, or equal and the tie rounds away from the weight.
    #[serde(serialize_with = "serialize")]
    pub(crate) smallest: f64,
    /// Whether an update of exactly `smallest` survives, as a finite number.
    pub(crate) tie_survives: bool,
    /// Whether an update that does not round back to the weight overflows: the weight is the format's largest number.
    pub(crate) overflows: bool,
    /// Whether an update of exactly `smallest` overflows.
    pub(crate) tie_overflows: bool,
    /// Steps until the working copy of an FP32 master changes; `None` if it has not after [`UlpGrid::MAX_UPDATES`]
    /// steps, the master itself does not change, or the copy is not finite.
    pub(crate) steps_with_master: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum UpdateFate {
    Survives,
    /// The sum rounds to the weight itself.
    Lost,
    Overflows,
    /// The weight itself is not a finite number of the format.
    OutOfRange,
}

impl UpdateFate {
    const fn show(self) -> (Role, &'static str) {
        match self {
            Self::Survives => (Role::Good, "✓ moves"),
            Self::Lost => (Role::Bad, "✕ lost"),
            Self::Overflows => (Role::Bad, "✕ overflow"),
            Self::OutOfRange => (Role::Bad, "✕ no such weight"),
        }
    }
}

impl UlpGrid {
    /// Maximum number of steps for a working copy to change.
    pub(crate) const MAX_UPDATES: u64 = 1_000_000;

    pub(crate) fn new(center: f64, update: f64) -> Self {
        let row = |format| UlpRow::new(format, center, update);
        Self { center, update, formats: FloatFormat::ALL.map(row).to_vec() }
    }

    pub(crate) fn page(&self, width: usize) -> Page {
        let mut page = Page::new();
        page.push(
            Line::new()
                .with(Role::Title, "weight ")
                .plain(short(self.center))
                .with(Role::Title, "   update ")
                .plain(short(self.update))
                .dim(format!("   relative {}", short((self.update / self.center).abs()))),
        );
        page.gap();
        self.grid(&mut page, width);
        page.gap();
        let known = |row: &UlpRow, text: String| {
            plain(if row.verdict == UpdateFate::OutOfRange { "–".to_owned() } else { text })
        };
        let steps = |row: &UlpRow| row.steps_with_master.map_or_else(|| "never".to_owned(), |steps| steps.to_string());
        let columns: &[Column<UlpRow>] = &[
            ("format", -9, &|row| (Role::Title, row.format.to_owned())),
            ("spacing", 10, &|row| plain(short(row.spacing))),
            (" update", -17, &|row| {
                let (role, verdict) = row.verdict.show();
                (role, format!(" {verdict}"))
            }),
            ("sum stored", 12, &|row| plain(short(row.sum))),
            ("smallest one", 15, &|row| known(row, row.bound().to_owned() + &short(row.smallest))),
            ("with master", 15, &|row| known(row, steps(row))),
        ];
        page.table(&self.formats, columns);
        page.wrapped(
            Role::Dim,
            "smallest one: an update moves the weight if it is above (>) or at least (>=) this; of the largest \
             number it makes infinity (∞). with master: steps until the working copy of an FP32 master weight changes.",
            width,
        );
        for row in self.formats.iter().filter(|row| row.verdict == UpdateFate::Overflows) {
            let from = short(row.overflows_from);
            let range = if row.layout.round(row.overflows_from).is_finite() {
                format!("above {from}")
            } else {
                format!("at {from} and above")
            };
            let text = format!("{} overflows {range}, in either direction", row.format);
            page.push(Line::new().with(Role::Bad, text));
        }
        page
    }

    /// One row per format that marks its numbers, within four FP16 steps on either side of the weight.
    fn grid(&self, page: &mut Page, width: usize) {
        const LABEL: usize = 10;
        // Odd, so that the weight is in the middle.
        let columns = width.saturating_sub(LABEL + 1).max(16) | 1;
        let fp16 = FloatFormat::FP16.ulp(self.center);
        let reach = if fp16.is_nan() { self.center.abs() / 256.0 } else { 4.0 * fp16 }.max(1.25 * self.update.abs());
        let step = 2.0 * reach / (columns - 1) as f64;
        let column = |x: f64| ((x - self.center + reach) / step).round();
        for row in &self.formats {
            // Between these the update rounds back to the weight.
            let half_ways = row.half_ways().map(column);
            let mut cells = vec!['·'; columns];
            if row.spacing < step {
                // A format finer than the columns fills all of them.
                cells.fill('━');
            } else {
                mark(&mut cells, half_ways, '┴');
                // The columns around an infinite weight are NaN.
                let numbers = row.numbers_from(self.center - reach).map(column);
                mark(&mut cells, numbers.take_while(|at| *at < columns as f64), '┃');
            }
            let mut line = Line::new().with(Role::Title, format!("{:<LABEL$}", row.format));
            for (at, cell) in cells.iter().enumerate() {
                let lost = at as f64 > half_ways[0] && (at as f64) < half_ways[1];
                let role = match cell {
                    '┃' => Role::Mantissa,
                    _ if lost || row.verdict == UpdateFate::OutOfRange => Role::Bad,
                    _ => Role::Good,
                };
                line = line.with(role, cell.to_string());
            }
            page.push(line);
        }
        let mut marks = vec![' '; columns];
        for (x, glyph) in [(self.center + self.update, '▲'), (self.center, '│')] {
            if let Some(cell) = marks.get_mut(column(x) as usize) {
                *cell = glyph;
            }
        }
        let marks: String = marks.into_iter().collect();
        page.push(Line::new().plain(" ".repeat(LABEL)).with(Role::Series(1), marks.trim_end()));
        let legend = format!("{:LABEL$}│ weight ▲ with update ┃ number ┴ half way, nearer is lost ━ dense", "");
        page.push(Line::new().dim(legend));
    }
}

/// Writes `glyph` into the columns `at` that exist.
fn mark(cells: &mut [char], at: impl IntoIterator<Item = f64>, glyph: char) {
    for at in at.into_iter().filter(|at| *at >= 0.0) {
        if let Some(cell) = cells.get_mut(at as usize) {
            *cell = glyph;
        }
    }
}

/// Half the distance from `x` to the next number below it; NaN if there is none.
fn half_below(format: FloatFormat, x: f64) -> f64 {
    let below = format.next_down(format.encode(x)).map_or(f64::NAN, |bits| format.decode(bits));
    let half = (x - below) / 2.0;
    if half.is_finite() { half } else { format.ulp(x) / 2.0 }
}

impl UlpRow {
    fn new(format: FloatFormat, center: f64, update: f64) -> Self {
        let bits = format.encode(center);
        let stored = format.decode(bits);
        let step = if update < 0.0 { format.next_down(bits) } else { format.next_up(bits) };
        let next = step.map_or(f64::NAN, |bits| format.decode(bits));
        let sum = format.round(stored + update);
        let spacing = if next.is_finite() { (next - stored).abs() } else { format.ulp(stored) };
        let half = spacing / 2.0;
        let tie = format.round(stored + half.copysign(update));
        let verdict = match (stored.is_finite(), sum.is_finite()) {
            (false, _) => UpdateFate::OutOfRange,
            (true, false) => UpdateFate::Overflows,
            _ if sum == stored => UpdateFate::Lost,
            _ => UpdateFate::Survives,
        };
        Self {
            format: format.name,
            layout: format,
            stored,
            next,
            sum,
            verdict,
            survives: verdict == UpdateFate::Survives,
            spacing,
            overflows_from: format.max() + format.ulp(format.max()) / 2.0,
            smallest: half,
            tie_survives: tie.is_finite() && tie != stored,
            overflows: stored.is_finite() && !next.is_finite(),
            tie_overflows: stored.is_finite() && !tie.is_finite(),
            steps_with_master: steps_with_master(format, center, update),
        }
    }

    /// The middles between the stored weight and the numbers below and above it.
    fn half_ways(&self) -> [f64; 2] {
        [self.stored - half_below(self.layout, self.stored), self.stored + half_below(self.layout, -self.stored)]
    }

    /// The format's numbers in rising order, without the largest one, from `start` rounded.
    fn numbers_from(&self, start: f64) -> impl Iterator<Item = f64> {
        let format = self.layout;
        let bits = std::iter::successors(Some(format.encode(start)), move |bits| format.next_up(*bits));
        bits.map_while(move |bits| format.next_up(bits).map(|_| format.decode(bits)))
    }

    /// The bound that a surviving update exceeds or reaches, with `∞` if the next number is not finite.
    fn bound(&self) -> &'static str {
        match (self.overflows, self.tie_survives || self.tie_overflows) {
            (false, false) => "> ",
            (false, true) => ">= ",
            (true, false) => "∞ above ",
            (true, true) => "∞ from ",
        }
    }
}

/// Steps until the FP32 master rounds to another number in `format`.
fn steps_with_master(format: FloatFormat, center: f64, update: f64) -> Option<u64> {
    let start = format.round(f64::from(center as f32));
    let (mut master, update) = (center as f32, update as f32);
    for step in 1..=UlpGrid::MAX_UPDATES {
        let before = master;
        master += update;
        if master == before || master.is_nan() {
            return None;
        }
        let copy = format.round(f64::from(master));
        if copy != start {
            return copy.is_finite().then_some(step);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(center: f64, update: f64, format: &str) -> UlpRow {
        UlpGrid::new(center, update).formats.into_iter().find(|row| row.format == format).expect("a format's name")
    }

    /// The chapter's example: an update of the size of a learning rate to a weight of 1.
    #[test]
    fn an_update_of_5e_5_to_1_is_lost_in_half_precision() {
        let fp16 = row(1.0, 5e-5, "FP16");
        assert_eq!((fp16.spacing, fp16.smallest, fp16.survives), (2f64.powi(-10), 2f64.powi(-11), false));
        // 2^-11 / 5e-5 = 9.77, and a tie stays.
        assert_eq!(fp16.steps_with_master, Some(10));
        let bf16 = row(1.0, 5e-5, "BF16");
        // 2^-8 / 5e-5 = 78.1.
        assert_eq!((bf16.survives, bf16.steps_with_master), (false, Some(79)));
        let fp32 = row(1.0, 5e-5, "FP32");
        assert_eq!((fp32.survives, fp32.steps_with_master), (true, Some(1)));
    }

    /// The spacing is halved below a power of two.
    #[test]
    fn ties_go_to_even() {
        assert_eq!(row(1.0, -5e-5, "FP16").smallest, 2f64.powi(-12));
        assert!(!row(1.0, 2f64.powi(-11), "FP16").survives);
        let odd = row(1.0 + 2f64.powi(-10), 2f64.powi(-11), "FP16");
        assert!(odd.survives && odd.tie_survives);
        // In ASCII too, this differs from `>`.
        let page = UlpGrid::new(1.0 + 2f64.powi(-10), 1e-4).page(80).ascii().text();
        assert!(page.contains(" >= 2^-11 ") && page.contains(" > 2^-4 "), "{page}");
    }

    #[test]
    fn an_update_lost_in_fp32_never_takes_effect() {
        assert_eq!(row(1.0, 1e-9, "FP16").steps_with_master, None);
        assert_eq!(row(1.0, 0.0, "FP32").steps_with_master, None);
    }

    /// Regression: 65504 + 20 "survived" as infinity, and E4M3's NaN had a tick.
    #[test]
    fn overflow_is_not_survival() {
        let edge = row(65504.0, 20.0, "FP16");
        assert_eq!((edge.verdict, edge.survives, edge.spacing), (UpdateFate::Overflows, false, 32.0));
        assert_eq!((edge.overflows_from, edge.smallest), (65520.0, 16.0));
        assert_eq!(row(65504.0, 15.0, "FP16").verdict, UpdateFate::Lost);
        assert_eq!(row(65504.0, -20.0, "FP16").verdict, UpdateFate::Survives);
        assert_eq!((edge.steps_with_master, edge.tie_survives), (None, false));
        // The tie at 16 rounds to 65536.
        assert_eq!((row(65504.0, 16.0, "FP16").verdict, edge.tie_overflows), (UpdateFate::Overflows, true));
        assert!(UlpGrid::new(65504.0, 15.0).page(80).text().contains("∞ from 16"));
        let e4m3 = row(448.0, 8.0, "FP8 E4M3");
        assert_eq!((e4m3.overflows, e4m3.tie_overflows, e4m3.verdict), (true, false, UpdateFate::Lost));
        let outside = row(65504.0, 20.0, "FP8 E4M3");
        assert_eq!((outside.verdict, outside.steps_with_master), (UpdateFate::OutOfRange, None));
        assert!(!outside.tie_survives);
        let beyond = UlpGrid::new(448.0, 20.0);
        assert_eq!(beyond.formats[3].verdict, UpdateFate::Overflows);
        assert!(beyond.page(80).text().contains("FP8 E4M3 overflows above 464, in either direction"));
        assert!(UlpGrid::new(65504.0, 20.0).page(80).text().contains("FP16 overflows at 65520 and above, in either"));
    }

    #[test]
    fn pages() {
        insta::assert_snapshot!("ulp", UlpGrid::new(1.0, 5e-5).page(80).text());
        insta::assert_snapshot!("ulp_large", UlpGrid::new(3.0, -0.01).page(80).text());
        // Regression: the grid of a weight of minus infinity visited every pattern of FP32.
        let infinite = [(-1.0, f64::INFINITY), (f64::NEG_INFINITY, 1.0)];
        for (center, update) in [(0.0, 1e-3), (1e30, 1.0), (f64::NAN, 1.0), (65504.0, 1e6)].into_iter().chain(infinite)
        {
            assert!(UlpGrid::new(center, update).page(40).lines.len() > 10);
        }
    }
}
