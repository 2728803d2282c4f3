//! The loss scale as a staircase of its logarithm, with a mark at every overflow.

use super::loss::{x_label, x_range};
use crate::screen::dashboard::pad::Pad;
use crate::screen::dashboard::plot::Axes;
use crate::screen::dashboard::state::ViewModel;
use crate::screen::dashboard::theme::Role;

/// Draws the panel.
pub(in crate::screen::dashboard) fn draw(view: &ViewModel, pad: &mut Pad) {
    let mut inner = pad.frame(&[
        ("Loss scale (log2)", Role::Title),
        ("  ", Role::Text),
        ("✕", Role::Overflow),
        (" overflow", Role::Text),
    ]);
    let run = view.run();
    if !run.scales_losses() {
        inner.text(1, 0, "off: gradients have FP32's range", Role::Dim);
        return;
    }
    let points = run.scale.points();
    let logs = points.iter().map(|point| point.value.log2()).filter(|log| log.is_finite());
    let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), log| (low.min(log), high.max(log)));
    if low > high {
        inner.text(1, 0, "no step yet", Role::Dim);
        return;
    }
    // Whole numbers at the bottom, in the middle and at the top.
    let (low, high) = (low.floor() - 1.0, high.ceil() + 1.0);
    let high = high + (high - low) % 2.0;
    let x = x_range(run, view.time_axis);
    let y_label = |y: f64| format!("2^{y:.0}");
    let axes = Axes { x, y: (low, high), x_label: &x_label(view.time_axis), y_label: &y_label };
    axes.draw(&mut inner, |plot| {
        let at = |step: u64, seconds: f64| if view.time_axis { seconds } else { step as f64 };
        let stairs = points.iter().map(|point| (at(point.step, point.seconds), point.value.log2()));
        plot.stairs(stairs, x.1, Role::Train);
        for skip in run.skips.buckets() {
            let (x, y) = (at(skip.step, skip.seconds), if skip.count > 0 { skip.max } else { high });
            plot.mark(x, y, '✕', Role::Overflow);
        }
    });
}
