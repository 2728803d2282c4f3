//! Curves in braille, two by four dots per character, with axes.

use super::{Canvas, Role};

/// A chart's axes: the ranges of the data and the formats of the labels.
pub(crate) struct Axes<'a> {
    /// Values at the left and right edge.
    pub(crate) x: (f64, f64),
    /// Values at the bottom and top edge.
    pub(crate) y: (f64, f64),
    pub(crate) x_label: &'a dyn Fn(f64) -> String,
    pub(crate) y_label: &'a dyn Fn(f64) -> String,
}

/// Dots and marks over a rectangle of cells.
pub(crate) struct Plot {
    columns: u16,
    rows: u16,
    x: (f64, f64),
    y: (f64, f64),
    cells: Vec<PlotCell>,
}

#[derive(Clone, Copy, Default)]
struct PlotCell {
    dots: u8,
    /// Whether a vertical line crosses it.
    rule: bool,
    mark: Option<char>,
    role: Option<Role>,
}

/// The bits of a braille character's dots, by row and column.
pub(crate) const DOTS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

impl Axes<'_> {
    /// The labels at the top, in the middle and at the bottom.
    fn y_labels(&self) -> [String; 3] {
        [1.0, 0.5, 0.0].map(|share| (self.y_label)(self.y.0 + (self.y.1 - self.y.0) * share))
    }

    /// Columns left of the y axis.
    pub(crate) fn margin(&self) -> u16 {
        self.y_labels().iter().map(|label| label.chars().count()).max().unwrap_or(0) as u16
    }

    /// Draws the axes, and calls `curves` to draw between them.
    pub(crate) fn draw(&self, canvas: &mut Canvas, curves: impl FnOnce(&mut Plot)) {
        let (labels, margin) = (self.y_labels(), self.margin());
        let columns = canvas.width().saturating_sub(margin + 1);
        let rows = canvas.height().saturating_sub(2);
        if columns < 2 || rows < 1 {
            return;
        }
        for y in 0..rows {
            canvas.text(margin, y, "│", Role::Dim);
        }
        canvas.text(margin, rows, &format!("└{}", "─".repeat(columns.into())), Role::Dim);
        canvas.text_before(margin, 0, &labels[0], Role::Dim);
        if rows >= 5 {
            canvas.text_before(margin, (rows - 1) / 2, &labels[1], Role::Dim);
        }
        if rows >= 2 {
            canvas.text_before(margin, rows - 1, &labels[2], Role::Dim);
        }
        self.label_x(canvas, margin, columns, rows + 1);

        let mut plot = Plot {
            columns,
            rows,
            x: self.x,
            y: self.y,
            cells: vec![PlotCell::default(); usize::from(columns) * usize::from(rows)],
        };
        curves(&mut plot);
        plot.draw(&mut canvas.part(margin + 1, 0, columns, rows));
    }

    fn label_x(&self, canvas: &mut Canvas, margin: u16, columns: u16, y: u16) {
        let (first, last) = ((self.x_label)(self.x.0), (self.x_label)(self.x.1));
        let middle = (self.x_label)(f64::midpoint(self.x.0, self.x.1));
        let end = margin + 1 + columns;
        let after_first = canvas.text(margin, y, &first, Role::Dim);
        let before_last = end.saturating_sub(last.chars().count() as u16);
        if before_last > after_first {
            canvas.text_before(end, y, &last, Role::Dim);
        }
        let at = (margin + columns / 2).saturating_sub(middle.chars().count() as u16 / 2);
        if at > after_first + 1 && at + (middle.chars().count() as u16) + 1 < before_last {
            canvas.text(at, y, &middle, Role::Dim);
        }
    }
}

impl Plot {
    /// Draws the upper and lower edge of ranges (x, low, high), leaving space for a curve between them.
    pub(crate) fn envelope(&mut self, ranges: impl Iterator<Item = (f64, f64, f64)>, role: Role) {
        let mut edges: Vec<Option<(usize, usize)>> = vec![None; self.resolution()];
        for (x, low, high) in ranges {
            let (Some(column), Some(top), Some(bottom)) = (self.dot_column(x), self.dot_row(high), self.dot_row(low))
            else {
                continue;
            };
            let edge = edges[column].get_or_insert((top, bottom));
            *edge = (edge.0.min(top), edge.1.max(bottom));
        }
        for (column, edge) in edges.into_iter().enumerate() {
            if let Some((top, bottom)) = edge {
                self.dot(column, top, role);
                self.dot(column, bottom, role);
            }
        }
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), role: Role) {
        let ends = (self.dot_column(from.0), self.dot_row(from.1), self.dot_column(to.0), self.dot_row(to.1));
        let (Some(x0), Some(y0), Some(x1), Some(y1)) = ends else { return };
        let steps = x0.abs_diff(x1).max(y0.abs_diff(y1)).max(1);
        for at in 0..=steps {
            let share = at as f64 / steps as f64;
            let between = |a: usize, b: usize| (a as f64 + (b as f64 - a as f64) * share).round() as usize;
            self.dot(between(x0, x1), between(y0, y1), role);
        }
    }

    /// Draws a line through points. Each missing one interrupts it, and a point without neighbors is a dot.
    pub(crate) fn curve(&mut self, points: impl Iterator<Item = Option<(f64, f64)>>, role: Role) {
        let mut before = None;
        for point in points {
            if let Some(at) = point {
                self.line(before.unwrap_or(at), at, role);
            }
            before = point;
        }
    }

    /// Draws a staircase through points that each hold until the next, the last until `end`.
    pub(crate) fn stairs(&mut self, points: impl Iterator<Item = (f64, f64)>, end: f64, role: Role) {
        let mut points = points.peekable();
        while let Some((from, level)) = points.next() {
            let to = points.peek().map_or(end, |(next, _)| *next);
            self.line((from, level), (to, level), role);
            if let Some((_, next)) = points.peek() {
                self.line((to, level), (to, *next), role);
            }
        }
    }

    /// Draws a character that hides the dots under it.
    pub(crate) fn mark(&mut self, x: f64, y: f64, mark: char, role: Role) {
        let (Some(column), Some(row)) = (self.dot_column(x), self.dot_row(y)) else { return };
        let cell = &mut self.cells[row / 4 * usize::from(self.columns) + column / 2];
        *cell = PlotCell { mark: Some(mark), role: Some(role), ..*cell };
    }

    /// Draws a line from top to bottom, below everything else.
    pub(crate) fn rule(&mut self, x: f64, role: Role) {
        let Some(column) = self.dot_column(x) else { return };
        for row in 0..usize::from(self.rows) {
            let cell = &mut self.cells[row * usize::from(self.columns) + column / 2];
            *cell = PlotCell { rule: true, role: cell.role.or(Some(role)), ..*cell };
        }
    }

    /// The number of columns of dots.
    pub(crate) fn resolution(&self) -> usize {
        usize::from(self.columns) * 2
    }

    fn dot_column(&self, x: f64) -> Option<usize> {
        place(x, self.x, self.resolution())
    }

    fn dot_row(&self, y: f64) -> Option<usize> {
        place(y, (self.y.1, self.y.0), usize::from(self.rows) * 4)
    }

    fn dot(&mut self, column: usize, row: usize, role: Role) {
        if let Some(cell) = self.cells.get_mut(row / 4 * usize::from(self.columns) + column / 2) {
            cell.dots |= DOTS[row % 4][column % 2];
            if cell.mark.is_none() {
                cell.role = Some(role);
            }
        }
    }

    fn draw(&self, canvas: &mut Canvas) {
        for (index, cell) in self.cells.iter().enumerate() {
            let Some(role) = cell.role else { continue };
            let braille = match cell.dots {
                0 if cell.rule => '┊',
                dots => char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' '),
            };
            let (x, y) = (index % usize::from(self.columns), index / usize::from(self.columns));
            canvas.glyph(x as u16, y as u16, cell.mark.unwrap_or(braille), role);
        }
    }
}

/// The smallest and the largest finite value; `None` without one.
pub(crate) fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|value| value.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    (low <= high).then_some((low, high))
}

/// The range of an axis that shows these powers of two: whole exponents, with a whole one in the middle.
pub(crate) fn power_range((low, high): (f64, f64)) -> (f64, f64) {
    let (low, high) = (low.floor() - 1.0, high.ceil() + 1.0);
    (low, high + (high - low) % 2.0)
}

/// The index of the nearest of `count` evenly spaced places in the range, clamped to its ends.
fn place(value: f64, (first, last): (f64, f64), count: usize) -> Option<usize> {
    let share = (value - first) / (last - first);
    (count > 0 && share.is_finite()).then(|| (share.clamp(0.0, 1.0) * (count - 1) as f64).round() as usize)
}

#[cfg(test)]
mod tests {
    use super::super::Page;
    use super::*;

    fn drawn(width: u16, height: u16, curves: impl FnOnce(&mut Plot)) -> Vec<String> {
        let label = |value: f64| format!("{value:.0}");
        let axes = Axes { x: (0.0, 9.0), y: (0.0, 4.0), x_label: &label, y_label: &label };
        let mut page = Page::new();
        page.drawn((width, height), &[], |canvas| axes.draw(canvas, curves));
        page.text().lines().map(str::to_owned).collect()
    }

    #[test]
    fn stairs_hold_until_the_next() {
        let rows = drawn(12, 3, |plot| plot.stairs([(0.0, 0.0), (4.5, 4.0)].into_iter(), 9.0, Role::Train));
        assert_eq!(rows, ["4│⣀⣀⣀⣀⣀⡏⠉⠉⠉⠉", " └──────────", " 0    4    9"]);
    }

    #[test]
    fn the_corners_are_at_the_range_of_the_axes() {
        let rows = drawn(12, 5, |plot| {
            plot.line((0.0, 0.0), (0.0, 4.0), Role::Train);
            plot.mark(9.0, 4.0, 'M', Role::Overflow);
            plot.line((9.0, 0.0), (9.0, 0.0), Role::Train);
        });
        assert_eq!(rows, ["4│⡇        M", " │⡇", "0│⡇        ⢀", " └──────────", " 0    4    9"]);
    }

    #[test]
    fn an_axis_of_powers_has_whole_exponents_at_its_labels() {
        let ranges = [(-23.4, -20.1), (-23.0, -20.0), (15.0, 15.0), (0.0, 0.5)].map(power_range);
        assert_eq!(ranges, [(-25.0, -19.0), (-24.0, -18.0), (14.0, 16.0), (-1.0, 3.0)]);
    }

    #[test]
    fn values_that_are_not_finite_draw_no_dot_and_no_size_panics() {
        let rows = drawn(12, 5, |plot| plot.line((f64::NAN, 0.0), (1.0, f64::INFINITY), Role::Train));
        assert_eq!(rows[1], " │");
        for width in 1..8 {
            for height in 1..5 {
                drawn(width, height, |plot| plot.line((3.0, 0.0), (3.0, 4.0), Role::Train));
            }
        }
    }
}
