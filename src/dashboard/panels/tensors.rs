//! The table of tensors, and the history of one of them.

use super::loss::{x_label, x_range};
use crate::dashboard::format;
use crate::dashboard::pad::Pad;
use crate::dashboard::plot::{Axes, Plot};
use crate::dashboard::run_data::TensorRow;
use crate::dashboard::state::{TENSORS, ViewModel};
use crate::dashboard::theme::Role;
use crate::telemetry::Series;

/// Columns of the figures right of the name, in the first tab's narrow table and in the third tab's.
const NARROW: usize = 33;
const WIDE: usize = 68;

/// Draws the panel of the first tab.
pub(in crate::dashboard) fn draw_short(view: &ViewModel, pad: &mut Pad) {
    let mut inner = pad.frame(&[(&title(view), Role::Title)]);
    let rows = view.tensors();
    if rows.is_empty() {
        inner.text(0, 0, "no look at single tensors yet", Role::Dim);
        return;
    }
    let name = usize::from(inner.width()).saturating_sub(NARROW);
    let probed = view.run().probe.is_some();
    let share = if probed { "under" } else { "sub" };
    inner.text(0, 0, &format!("{:<name$}{:>8} {:>8} {share:>7} {:>6}", "tensor", "min|g|", "max|g|", "inf"), Role::Dim);
    for (y, row) in (1..inner.height()).zip(rows) {
        let stats = &row.stats;
        let lost = if probed { underflow(row) } else { format::percent(stats.subnormal, stats.count) };
        let figures = format!(
            "{:<name$}{:>8} {:>8} ",
            shortened(&row.name, name),
            format::magnitude(stats.min_abs),
            format::magnitude(Some(stats.max_abs)),
        );
        let x = inner.text(0, y, &figures, Role::Text);
        let x = inner.text(x, y, &format!("{lost:>7} "), lost_role(row));
        inner.text(x, y, &format!("{:>6}", row.overflows), overflow_role(row));
    }
}

/// Draws the third tab.
pub(in crate::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    if view.detail.is_some() {
        history(view, pad);
        return;
    }
    let mut title = format!("{}, look at step {}", title(view), view.run().tensors.step);
    let filter = &view.filters[TENSORS];
    if view.typing || !filter.is_empty() {
        title += &format!("   /{filter}{}", if view.typing { "█" } else { "" });
    }
    let mut inner = pad.frame(&[(&title, Role::Title)]);
    let rows = view.tensors();
    let name = usize::from(inner.width()).saturating_sub(WIDE).clamp(8, 40);
    inner.text(
        0,
        0,
        &format!(
            "  {:<name$}{:>9} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7} {:>4}",
            "tensor", "elements", "min|g|", "max|g|", "norm", "zero", "sub", "under", "inf"
        ),
        Role::Dim,
    );
    if rows.is_empty() {
        inner.text(2, 1, if filter.is_empty() { "no look at single tensors yet" } else { "no such tensor" }, Role::Dim);
    }
    let page = usize::from(inner.height().saturating_sub(1)).max(1);
    let cursor = view.cursors[TENSORS].min(rows.len().saturating_sub(1));
    let first = (cursor + 1).saturating_sub(page);
    for (y, (at, row)) in (1..inner.height()).zip(rows.iter().enumerate().skip(first)) {
        table_row(&mut inner, y, row, name);
        if at == cursor {
            inner.text(0, y, "▸", Role::Title);
            inner.highlight(y, Role::Selected);
        }
    }
}

fn table_row(pad: &mut Pad, y: u16, row: &TensorRow, name: usize) {
    let stats = &row.stats;
    let figures = format!(
        "  {:<name$}{:>9} {:>8} {:>8} {:>8} {:>7} ",
        shortened(&row.name, name.saturating_sub(1)),
        format::count(stats.count as f64),
        format::magnitude(stats.min_abs),
        format::magnitude(Some(stats.max_abs)),
        format::short(stats.norm),
        format::percent(stats.zero, stats.count),
    );
    let x = pad.text(0, y, &figures, Role::Text);
    let subnormal = format::percent(stats.subnormal, stats.count);
    let x = pad.text(x, y, &format!("{subnormal:>7} "), if stats.subnormal > 0 { Role::Subnormal } else { Role::Text });
    let x = pad.text(x, y, &format!("{:>7} ", underflow(row)), lost_role(row));
    pad.text(x, y, &format!("{:>4}", row.overflows), overflow_role(row));
}

/// The chosen tensor's smallest and largest magnitude over the run, with the format's limits.
fn history(view: &ViewModel, pad: &mut Pad) {
    let run = view.run();
    let Some(row) = view.chosen_tensor() else { return };
    let format = run.grad_format();
    let (least, normal) = (format.min_subnormal_exponent(), format.min_exponent());
    let legend = format!("   min to max |g| as stored, log2   ┄ 2^{least} 2^{normal}");
    let mut inner = pad.frame(&[(&row.name, Role::Title), (&legend, Role::Dim)]);
    let (low, high) = (&row.history.0, &row.history.1);
    if low.is_empty() {
        inner.text(1, 0, "no history", Role::Dim);
        return;
    }
    let (bottom, top) = (extreme(low).0, extreme(high).1);
    // A format's limits are drawn where they are in the neighbourhood: FP32's would squeeze everything else.
    let limits: Vec<_> = [least, normal].map(f64::from).into_iter().filter(|limit| bottom - limit < 24.0).collect();
    let bottom = limits.iter().fold(bottom, |bottom, limit| bottom.min(*limit));
    let y = (bottom.floor() - 1.0, top.ceil() + 1.0);
    let x = x_range(run, view.time_axis);
    let y_label = |y: f64| format!("2^{y:.0}");
    Axes { x, y, x_label: &x_label(view.time_axis), y_label: &y_label }.draw(&mut inner, |plot| {
        for limit in &limits {
            dotted(plot, x, *limit);
        }
        for (low, high) in low.buckets().iter().zip(high.buckets()) {
            let at = if view.time_axis { low.seconds } else { low.step as f64 };
            plot.stroke(at, low.min, high.max, Role::Train);
        }
    });
}

fn dotted(plot: &mut Plot, x: (f64, f64), y: f64) {
    let dots = plot.resolution();
    for dot in (0..dots).step_by(3) {
        let at = x.0 + (x.1 - x.0) * dot as f64 / dots as f64;
        plot.stroke(at, y, y, Role::Subnormal);
    }
}

fn extreme(series: &Series) -> (f64, f64) {
    let buckets = series.buckets().iter();
    buckets.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), bucket| (low.min(bucket.min), high.max(bucket.max)))
}

fn title(view: &ViewModel) -> String {
    let probe = &view.run().probe;
    let when = probe.as_ref().map(|probe| format!(" (probe at {})", probe.step)).unwrap_or_default();
    format!("Tensors, {}{when}", view.sort.title(probe.is_some()))
}

/// True underflow as the probe found it; `-` where it has not looked.
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

/// A name that is too long loses its beginning: its end tells tensors of a layer apart.
fn shortened(name: &str, width: usize) -> String {
    let length = name.chars().count();
    if length <= width {
        return name.to_owned();
    }
    let kept: String = name.chars().skip(length - width.saturating_sub(1).min(length)).collect();
    format!("…{kept}")
}
