//! The ruler: a number format's binades along the columns of a terminal, with one cell for zero and one for ∞ and NaN.
//!
//! FP16 has exactly 40 binades of finite values, 2^-24 to 2^15, so it gets a cell for each, 44 columns in all. The wide
//! formats show the binades in use, several per cell if there are more than 40.

use super::{Canvas, Role, column_cell};
use crate::precision::{ExponentHistogram, FloatFormat};

/// Number of cells for finite values.
const CELLS: i32 = 40;

/// The mapping of exponents to cells and columns.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ruler {
    format: FloatFormat,
    /// The lowest exponent of the first cell.
    first: i32,
    /// Binades per cell.
    fold: i32,
    cells: i32,
    /// Columns per cell.
    cell_width: u16,
    /// Column of the cell for zero.
    pub(crate) zero: u16,
}

impl Ruler {
    /// A ruler whose cell for zero is in column `zero`, for a format and the lowest and highest exponent in use.
    /// `below` is the number of binades shown below FP16's smallest, where a probe sees lost values.
    pub(crate) fn new(format: FloatFormat, used: Option<(i32, i32)>, zero: u16, cell_width: u16, below: i32) -> Self {
        let (least, top) = (format.min_subnormal_exponent(), format.max_exponent());
        if top - least < CELLS {
            let below = below.max(0);
            return Self { format, first: least - below, fold: 1, cells: CELLS + below, cell_width, zero };
        }
        let (low, high) = used.unwrap_or((-CELLS, -1));
        let span = high - low + 1;
        let fold = (span + CELLS - 1) / CELLS;
        Self { format, first: low - (CELLS * fold - span) / 2, fold, cells: CELLS, cell_width, zero }
    }

    /// The column of the cell for ∞ and NaN.
    pub(crate) fn infinity(&self) -> u16 {
        self.start() + self.cells as u16 * self.cell_width + 1
    }

    fn start(&self) -> u16 {
        self.zero + 2
    }

    /// The first column of the cell of 2^exponent, or of the nearest cell.
    pub(crate) fn column(&self, exponent: i32) -> u16 {
        self.start() + self.cell(exponent) * self.cell_width
    }

    fn cell(&self, exponent: i32) -> u16 {
        (exponent - self.first).div_euclid(self.fold).clamp(0, self.cells - 1) as u16
    }

    /// Whether there is a cell for 2^exponent.
    fn shows(&self, exponent: i32) -> bool {
        (self.first..self.first + self.cells * self.fold).contains(&exponent)
    }

    fn counts(&self, histogram: &ExponentHistogram) -> Vec<u64> {
        let mut counts = vec![0u64; self.cells as usize];
        for (exponent, count) in histogram.iter() {
            let cell = &mut counts[usize::from(self.cell(exponent))];
            *cell = cell.saturating_add(count);
        }
        counts
    }

    /// The kind of numbers in a cell.
    fn role(&self, cell: usize) -> Role {
        let highest = self.first + (cell as i32 + 1) * self.fold - 1;
        if highest < self.format.min_subnormal_exponent() {
            Role::Overflow
        } else if highest < self.format.min_exponent() {
            Role::Subnormal
        } else {
            Role::Train
        }
    }

    /// The exponents that get a tick: the ends, and the format's limits if they are in range.
    fn ticks(&self) -> Vec<i32> {
        let last = self.first + self.cells * self.fold - 1;
        let limits = [self.format.min_subnormal_exponent(), self.format.min_exponent(), 0, self.format.max_exponent()];
        let mut ticks: Vec<_> = [self.first, last].into_iter().chain(limits).filter(|e| self.shows(*e)).collect();
        ticks.sort_unstable();
        ticks.dedup();
        // A limit takes precedence over the ends.
        let crowded = |pair: &[i32]| self.column(pair[1]) - self.column(pair[0]) < 5;
        if ticks.len() > 2 && crowded(&ticks[..2]) && !limits.contains(&ticks[0]) {
            ticks.remove(0);
        }
        ticks
    }

    /// The columns of the format's limits, for rows to mark.
    pub(crate) fn limits(&self) -> impl Iterator<Item = u16> {
        let format = self.format;
        [format.min_subnormal_exponent(), format.min_exponent(), format.max_exponent()]
            .into_iter()
            .filter(|exponent| self.shows(*exponent))
            .map(|exponent| self.column(exponent))
    }

    /// Draws the histogram as bars of log10 of the counts, on `height` rows from `y`, with the outline of another one
    /// over it. Returns the count of the highest bar.
    pub(crate) fn bars(
        &self,
        canvas: &mut Canvas,
        y: u16,
        height: u16,
        histogram: &ExponentHistogram,
        outline: Option<&ExponentHistogram>,
    ) -> u64 {
        let counts = self.counts(histogram);
        let outlined = outline.map(|outline| self.counts(outline)).unwrap_or_default();
        let broken = histogram.inf + histogram.nan;
        let all = counts.iter().chain(&outlined).chain([&histogram.zero, &broken]);
        let top = all.copied().max().unwrap_or(0);
        let Some(last_row) = height.checked_sub(1) else { return top };
        let eighths = |count: u64| {
            let share = (count as f64 + 1.0).log10() / (top as f64 + 1.0).log10();
            (share * f64::from(height) * 8.0).round() as u16
        };
        let mut bar = |x: u16, width: u16, count: u64, role: Role| {
            for at in 0..height {
                let block = column_cell(eighths(count).max(1).into(), (last_row - at).into());
                if count > 0 && block != ' ' {
                    (x..x + width).for_each(|x| canvas.glyph(x, y + at, block, role));
                }
            }
        };
        bar(self.zero, 1, histogram.zero, Role::Dim);
        bar(self.infinity(), 1, broken, Role::Overflow);
        for (cell, count) in counts.iter().enumerate() {
            let x = self.start() + cell as u16 * self.cell_width;
            bar(x, self.cell_width, *count, self.role(cell));
        }
        for (cell, count) in outlined.iter().enumerate().filter(|(_, count)| **count > 0) {
            let above = (eighths(*count) / 8).min(last_row);
            let x = self.start() + cell as u16 * self.cell_width;
            (x..x + self.cell_width).for_each(|x| canvas.glyph(x, y + last_row - above, '∙', Role::Validation));
        }
        top
    }

    /// Draws the axis on two rows from `y`. Its labels are exponents minus `shift`.
    pub(crate) fn axis(&self, canvas: &mut Canvas, y: u16, shift: i32) {
        let start = self.start();
        canvas.glyph(self.zero, y, '┴', Role::Dim);
        canvas.text(self.zero, y + 1, "0", Role::Dim);
        canvas.text(start, y, &"─".repeat(usize::from(self.infinity() - 1 - start)), Role::Dim);
        canvas.glyph(self.infinity(), y, '┴', Role::Dim);
        canvas.text(self.infinity(), y + 1, "∞", Role::Overflow);
        let end = self.infinity() - 1;
        let mut free = start;
        let ticks = self.ticks();
        for (at, exponent) in ticks.iter().enumerate() {
            let x = self.column(*exponent);
            canvas.glyph(x, y, '┴', Role::Dim);
            let label = (exponent - shift).to_string();
            let x = x.min(end.saturating_sub(label.len() as u16));
            let last = at + 1 == ticks.len();
            if x < free || (!last && x + label.len() as u16 + 3 > end) {
                continue;
            }
            free = canvas.text(x, y + 1, &label, Role::Dim) + 1;
            let next = ticks.get(at + 1).map_or(end, |next| self.column(*next));
            let kind = self.kind(*exponent);
            if !last && !kind.is_empty() && free + (kind.len() as u16) < next {
                free = canvas.text(free, y + 1, kind, Role::Dim) + 1;
            }
        }
    }

    /// The label of the numbers starting at 2^exponent; empty if an earlier tick has it already.
    fn kind(&self, exponent: i32) -> &'static str {
        match exponent {
            e if e < self.format.min_subnormal_exponent() => "lost",
            e if e == self.format.min_subnormal_exponent() => "sub",
            e if e == self.format.min_exponent() => "normal",
            _ => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp16_has_a_column_for_every_binade() {
        let ruler = Ruler::new(FloatFormat::FP16, None, 16, 1, 0);
        assert_eq!((ruler.zero, ruler.column(-24), ruler.column(15), ruler.infinity()), (16, 18, 57, 59));
        let all: Vec<_> = (-24..=15).map(|exponent| ruler.column(exponent)).collect();
        assert!(all.windows(2).all(|pair| pair[1] == pair[0] + 1));
        assert_eq!(ruler.ticks(), [-24, -14, 0, 15]);
        assert_eq!(ruler.limits().collect::<Vec<_>>(), [18, 28, 57]);
    }

    #[test]
    fn a_wide_format_folds_the_binades_in_use() {
        let narrow = Ruler::new(FloatFormat::BF16, Some((-30, -1)), 0, 1, 0);
        assert_eq!((narrow.fold, narrow.first, narrow.infinity()), (1, -35, 43));
        let wide = Ruler::new(FloatFormat::FP32, Some((-126, 3)), 0, 1, 0);
        assert_eq!((wide.fold, wide.infinity()), (4, 43));
        assert!(wide.shows(-126) && wide.shows(3));
        assert!(wide.ticks().contains(&-126), "the smallest normal number is in sight: {:?}", wide.ticks());
    }

    #[test]
    fn every_count_lands_in_a_cell() {
        let histogram = ExponentHistogram::from_counts((-127..=127).map(|exponent| (exponent, 1)));
        for format in [FloatFormat::FP16, FloatFormat::BF16, FloatFormat::FP32] {
            let ruler = Ruler::new(format, Some((-127, 127)), 0, 2, 5);
            assert_eq!(ruler.counts(&histogram).iter().sum::<u64>(), 255, "{format:?}");
        }
    }

    #[test]
    fn counts_of_a_damaged_log_do_not_overflow() {
        let histogram = ExponentHistogram::from_counts((-127..=127).chain([0]).map(|exponent| (exponent, u64::MAX)));
        let ruler = Ruler::new(FloatFormat::FP32, Some((-127, 127)), 0, 2, 5);
        assert_eq!((histogram.total(), ruler.counts(&histogram).iter().max()), (u64::MAX, Some(&u64::MAX)));
    }
}
