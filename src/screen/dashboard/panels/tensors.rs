//! The table of tensors, and the history of one of them.

use super::chart::{first_step, x_label, x_range};
use super::layers;
use crate::screen::dashboard::state::{TENSORS, ViewModel};
use crate::telemetry::{Bucket, RunState, Series, TensorRow};
use crate::ui::{Axes, Pad, Plot, Role, format};
use ratatui::layout::Rect;

/// Columns right of the name, in the first tab's narrow table and in the third tab's.
const NARROW: usize = 33;
const WIDE: usize = 81;
/// The width of the columns that the third tab's table drops first, so that names stay readable.
const SPARE: usize = 32;
/// The length of the longest GPT-2 tensor name, which must be readable.
const NAME: usize = 24;

/// Draws the panel of the first tab.
pub(in crate::screen::dashboard) fn draw_short(view: &ViewModel, pad: &mut Pad) {
    let mut inner = pad.frame(&[(&(title(view) + &view.filter_label(TENSORS)), Role::Title)]);
    let rows = view.tensors();
    if rows.is_empty() {
        inner.text(0, 0, nothing(view), Role::Dim);
        return;
    }
    let name = usize::from(inner.width()).saturating_sub(NARROW);
    let probed = view.run().probe.is_some();
    let share = if probed { "under" } else { "sub" };
    let (min, max) = headings(view);
    inner.text(0, 0, &format!("{:<name$}{min:>8} {max:>8} {share:>7} {:>6}", "tensor", "✕"), Role::Dim);
    let divisor = divisor(view);
    for (y, row) in (1..inner.height()).zip(rows) {
        let stats = &row.stats;
        let lost = if probed { underflow(row) } else { format::percent(stats.subnormal, stats.count) };
        let figures = format!(
            "{:<name$}{:>8} {:>8} ",
            shortened(&row.name, name),
            format::magnitude(stats.min_abs.map(|min| min / divisor)),
            format::magnitude(Some(stats.max_abs / divisor)),
        );
        let x = inner.text(0, y, &figures, Role::Text);
        let x = inner.text(x, y, &format!("{lost:>7} "), lost_role(row));
        inner.text(x, y, &format!("{:>6}", row.overflows), overflow_role(row));
    }
}

/// Draws the third tab.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    if view.detail.is_some() {
        history(view, pad);
        return;
    }
    let title = format!("{}, at step {}{}", title(view), view.run().tensors.step, view.filter_label(TENSORS));
    let mut inner = pad.frame(&[(&title, Role::Title)]);
    let rows = view.tensors();
    let table = Table::new(view, inner.width().into());
    let (min, max) = headings(view);
    let spare = if table.spare {
        format!("{:<4} {:>7} {:>9} {:>8} ", "type", "2^-24", "elements", "norm")
    } else {
        String::new()
    };
    let name = table.name;
    let heading =
        format!("  {:<name$}{spare}{min:>8} {max:>8} {:>7} {:>7} {:>7} {:>4}", "tensor", "zero", "sub", "under", "✕");
    inner.text(0, 0, &heading, Role::Dim);
    if rows.is_empty() {
        inner.text(2, 1, nothing(view), Role::Dim);
    }
    let cursor = view.cursors[TENSORS].min(rows.len().saturating_sub(1));
    let first = first_row(view, inner.height());
    for (y, (at, row)) in (1..inner.height()).zip(rows.iter().enumerate().skip(first)) {
        table.row(view.run(), &mut inner, y, row);
        if at == cursor {
            inner.text(0, y, "▸", Role::Title);
            inner.highlight(y, Role::Selected);
        }
    }
}

/// The first row shown by a table of this height, which includes its heading.
fn first_row(view: &ViewModel, height: u16) -> usize {
    (view.cursors[TENSORS] + 1).saturating_sub(usize::from(height.saturating_sub(1)).max(1))
}

/// The row of the third tab's table at a line of the panel `area`.
pub(in crate::screen::dashboard) fn row_at(view: &ViewModel, area: Rect, line: u16) -> Option<usize> {
    let line = line.checked_sub(area.y + 2).filter(|line| *line + 3 < area.height)?;
    let row = first_row(view, area.height.saturating_sub(2)) + usize::from(line);
    (row < view.tensors().len()).then_some(row)
}

/// Why the table is empty.
fn nothing(view: &ViewModel) -> &'static str {
    if view.filters[TENSORS].is_empty() { "no statistics of single tensors yet" } else { "no such tensor" }
}

/// The layout of the third tab's table.
struct Table {
    /// Columns of the name.
    name: usize,
    /// Whether the optional columns fit.
    spare: bool,
    /// The divisor of magnitudes.
    divisor: f32,
}

impl Table {
    fn new(view: &ViewModel, width: usize) -> Self {
        let spare = width >= WIDE + NAME;
        let figures = if spare { WIDE } else { WIDE - SPARE };
        Self { name: width.saturating_sub(figures).clamp(8, 40), spare, divisor: divisor(view) }
    }

    fn row(&self, run: &RunState, pad: &mut Pad, y: u16, row: &TensorRow) {
        let (stats, name, divisor) = (&row.stats, self.name, self.divisor);
        let spare = if self.spare {
            let (dtype, touched) = (run.computes_in(&row.name), touched(run, &row.name));
            let (count, norm) = (format::count(stats.count as f64), format::short(stats.norm / f64::from(divisor)));
            format!("{dtype:<4} {touched:>7} {count:>9} {norm:>8} ")
        } else {
            String::new()
        };
        let figures = format!(
            "  {:<name$}{spare}{:>8} {:>8} {:>7} ",
            shortened(&row.name, name.saturating_sub(1)),
            format::magnitude(stats.min_abs.map(|min| min / divisor)),
            format::magnitude(Some(stats.max_abs / divisor)),
            format::percent(stats.zero, stats.count),
        );
        let x = pad.text(0, y, &figures, Role::Text);
        let subnormal = format::percent(stats.subnormal, stats.count);
        let role = if stats.subnormal > 0 { Role::Subnormal } else { Role::Text };
        let x = pad.text(x, y, &format!("{subnormal:>7} "), role);
        let x = pad.text(x, y, &format!("{:>7} ", underflow(row)), lost_role(row));
        pad.text(x, y, &format!("{:>4}", row.overflows), overflow_role(row));
    }
}

/// The divisor of magnitudes: the loss scale of the newest table if true magnitudes are shown, else 1.
fn divisor(view: &ViewModel) -> f32 {
    if view.true_magnitudes { view.run().tensors.loss_scale } else { 1.0 }
}

/// The headings of the smallest and the largest magnitude.
fn headings(view: &ViewModel) -> (&'static str, &'static str) {
    if view.true_magnitudes { ("true min", "true max") } else { ("min|g|", "max|g|") }
}

/// The first step in which a tensor's gradient held 2^-24, as the table has it.
fn touched(run: &RunState, name: &str) -> String {
    run.tensors.underflow_onsets.get(name).map_or_else(|| "-".into(), u64::to_string)
}

/// The selected tensor's smallest and largest magnitude over the run, with the format's limits, and the variance of its
/// layer's gradient where it was measured.
fn history(view: &ViewModel, pad: &mut Pad) {
    let run = view.run();
    let Some(row) = view.chosen_tensor() else { return };
    let format = run.grad_format();
    let (least, normal) = (format.min_subnormal_exponent(), format.min_exponent());
    let legend = format!("   min and max |g| as stored, log2   ┄ 2^{least} 2^{normal}");
    let mut inner = pad.frame(&[(&row.name, Role::Title), (&legend, Role::Dim)]);
    let first = match touched(run, &row.name).as_str() {
        "-" => String::new(),
        step => format!(", first at 2^-24 in step {step}"),
    };
    inner.text(1, 0, &format!("computes in {}{first}", run.computes_in(&row.name)), Role::Text);
    let (width, rows) = (inner.width(), inner.height().saturating_sub(1));
    let variance = if layers::is_measured(run, &row.name) { rows * 2 / 5 } else { 0 };
    layers::history(view, &row.name, &mut inner.part(0, 1 + rows - variance, width, variance));
    let mut inner = inner.part(0, 1, width, rows - variance);
    let (low, high) = (&row.history.0, &row.history.1);
    if low.is_empty() {
        inner.text(1, 0, "no history", Role::Dim);
        return;
    }
    let (bottom, top) = (extreme(low).0, extreme(high).1);
    // Draw a format's limits only if they are near the data: FP32's would compress everything else.
    let limits: Vec<_> = [least, normal].map(f64::from).into_iter().filter(|limit| bottom - limit < 24.0).collect();
    let bottom = limits.iter().fold(bottom, |bottom, limit| bottom.min(*limit));
    let y = (bottom.floor() - 1.0, top.ceil() + 1.0);
    let (x, first) = (x_range(view), first_step(view));
    let y_label = |y: f64| format!("2^{y:.0}");
    Axes { x, y, x_label: &x_label(view.time_axis), y_label: &y_label }.draw(&mut inner, |plot| {
        for limit in &limits {
            dotted(plot, x, *limit);
        }
        let at = |bucket: &Bucket| if view.time_axis { bucket.seconds } else { bucket.step as f64 };
        edge(plot, low, first, |bucket| (at(bucket), bucket.min));
        edge(plot, high, first, |bucket| (at(bucket), bucket.max));
    });
}

/// A line through one point of each bucket from a step on.
pub(super) fn edge(plot: &mut Plot, series: &Series, first: u64, point: impl Fn(&Bucket) -> (f64, f64)) {
    let points: Vec<_> = series.buckets().iter().filter(|bucket| bucket.last_step >= first).map(point).collect();
    if let [only] = points[..] {
        plot.line(only, only, Role::Train);
    }
    for pair in points.windows(2) {
        plot.line(pair[0], pair[1], Role::Train);
    }
}

pub(super) fn dotted(plot: &mut Plot, x: (f64, f64), y: f64) {
    let dots = plot.resolution();
    for dot in (0..dots).step_by(3) {
        let at = x.0 + (x.1 - x.0) * dot as f64 / dots as f64;
        plot.stroke(at, y, y, Role::Subnormal);
    }
}

pub(super) fn extreme(series: &Series) -> (f64, f64) {
    let buckets = series.buckets().iter();
    buckets.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), bucket| (low.min(bucket.min), high.max(bucket.max)))
}

fn title(view: &ViewModel) -> String {
    let probe = &view.run().probe;
    let when = probe.as_ref().map(|probe| format!(" (probe at {})", probe.step)).unwrap_or_default();
    format!("Tensors, {}{when}", view.sort.title(probe.is_some()))
}

/// True underflow from the newest probe; `-` without one.
fn underflow(row: &TensorRow) -> String {
    row.flushed.map_or_else(|| "-".into(), |(flushed, nonzero)| format::percent(flushed, nonzero))
}

fn lost_role(row: &TensorRow) -> Role {
    let lost = row.flushed.map_or(row.stats.subnormal, |(flushed, _)| flushed);
    if lost > 0 { Role::Subnormal } else { Role::Text }
}

fn overflow_role(row: &TensorRow) -> Role {
    if row.overflows > 0 { Role::Overflow } else { Role::Text }
}

/// Shortens a long name at its start, because its end distinguishes the tensors of a layer.
fn shortened(name: &str, width: usize) -> String {
    let length = name.chars().count();
    if length <= width {
        return name.to_owned();
    }
    let kept: String = name.chars().skip(length - width.saturating_sub(1).min(length)).collect();
    format!("…{kept}")
}
