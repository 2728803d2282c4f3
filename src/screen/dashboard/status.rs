//! The three status lines: progress, learning, resources.

use super::scene::Scene;
use crate::telemetry::{GpuStats, RunState, Started};
use crate::ui::{Canvas, Role, format};

pub(super) fn draw(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    if run.started.is_none() && run.step.step == 0 {
        canvas.text(1, 0, "waiting for the run to start", Role::Dim);
        return;
    }
    let wide = canvas.width() >= 110;
    progress(run, canvas);
    if run.step.step == 0 && !run.is_over() {
        canvas.text(1, 1, "the first step has not ended yet", Role::Dim);
        return;
    }
    let narrow = canvas.width() < 64;
    items(canvas, 1, &learning(scene, run, wide, narrow));
    items(canvas, 2, &cost(scene, run, wide));
}

/// Loss, loss scale and step, for a very small terminal.
pub(super) fn essentials(scene: &Scene) -> Vec<(String, Role)> {
    let run = scene.run();
    if run.step.step == 0 {
        return vec![("waiting".into(), Role::Dim)];
    }
    let mut items = learning(scene, run, false, true);
    items.retain(|(text, _)| text.starts_with("loss") || text.starts_with("scale"));
    items.push((format!("step {}", format::steps(run.step.step, run.total_steps())), Role::Text));
    items
}

fn progress(run: &RunState, canvas: &mut Canvas) {
    let step = run.step.step;
    let total = run.total_steps();
    let share = if total == 0 { 0.0 } else { (step as f64 / total as f64).min(1.0) };
    let done = format!("step {}", format::steps(step, total));
    let mut epoch = format!("  epoch {:.2}", run.step.epoch);
    let mut rest = String::new();
    // A log that begins in the middle of a run, or whose first line is damaged, has no `Started` event.
    if let Some(Started { epochs, .. }) = run.started.as_ref()
        && total > 0
    {
        let eta = match run.remaining() {
            // A run that stopped early has no ETA.
            _ if run.is_over() => (step >= total).then_some(0.0),
            eta => eta,
        };
        let eta = eta.map_or_else(|| "--:--:--".into(), format::clock);
        let all = format!("{epochs:.2}");
        // A large text's few steps are far less than an epoch.
        let few = *epochs > 0.0 && *epochs < 0.995;
        let all = if few { &all } else { format::trimmed(&all) };
        epoch.extend(["/", all]);
        rest = format!("  {:.1}%  ETA {eta}", share * 100.0);
    }
    let whole = format!("{done}{epoch}{rest}");
    let text = if whole.len() < usize::from(canvas.width()) { whole } else { done + &rest };
    let x = canvas.text(1, 0, &text, Role::Text) + 1;
    let cells = usize::from(canvas.width().saturating_sub(x + 1));
    let full = (share * cells as f64).round() as usize;
    let x = canvas.text(x, 0, &"━".repeat(full), Role::Good);
    canvas.text(x, 0, &"─".repeat(cells - full), Role::Dim);
}

/// Writes the items that fit, three columns apart, or two if that is too wide.
fn items(canvas: &mut Canvas, y: u16, items: &[(String, Role)]) {
    let columns = |text: &str| text.chars().count() as u16;
    let all: u16 = items.iter().map(|(text, _)| columns(text) + 3).sum();
    let gap = if all <= canvas.width() { 3 } else { 2 };
    let mut x = 1;
    for (text, role) in items {
        if x == 1 || x + columns(text) <= canvas.width() {
            x = canvas.text(x, y, text, *role) + gap;
        }
    }
}

fn learning(scene: &Scene, run: &RunState, wide: bool, narrow: bool) -> Vec<(String, Role)> {
    let step = &run.step;
    let loss_role = if step.loss.is_finite() { Role::Text } else { Role::Overflow };
    let mut items = vec![(format!("loss {}", format::loss(f64::from(step.loss))), loss_role)];
    if wide && let Some(smoothed) = run.smoothed_loss(scene.charts.window(run)) {
        items.push((format!("smoothed {}", format::loss(smoothed)), Role::Text));
    }
    if let Some((last, _)) = run.figures().validation {
        let best = run.best_validation().filter(|_| wide);
        let best = best.map(|(loss, at)| format!(" (best {} @ {at})", format::loss(loss))).unwrap_or_default();
        items.push((format!("val {}{best}", format::loss(last)), Role::Text));
    }
    items.push((format!("lr {}", format::rate(step.lr)), Role::Text));
    let clip = run.started.as_ref().and_then(|started| started.max_grad_norm).filter(|_| wide);
    let clip = clip.map(|clip| format!(" (clip {clip:?})")).unwrap_or_default();
    items.push((format!("|g| {}{clip}", format::short(step.grad_norm)), Role::Text));
    if run.scales_losses() {
        items.push((format!("scale {}", format::scale(step.loss_scale)), Role::Text));
    }
    let role = if step.skipped > 0 { Role::Overflow } else { Role::Text };
    items.push((format!("skipped {}", step.skipped), role));
    if narrow {
        // Items are dropped from the end: keep those about numerics.
        items.sort_by_key(|(text, _)| text.starts_with("lr") || text.starts_with("|g|"));
    }
    items
}

fn cost(scene: &Scene, run: &RunState, wide: bool) -> Vec<(String, Role)> {
    let step = &run.step;
    let roomy = wide && step.gpu.is_none();
    let mut items = vec![
        (format!("{} tok/s", format::count(step.tokens_per_s)), Role::Text),
        (format!("{}/step", format::milliseconds(step.time.step_ms)), Role::Text),
    ];
    if let Some(cpu) = run.cpu_percent {
        items.push((format!("CPU {cpu:.0}%"), Role::Text));
    }
    if let Some(gpu) = step.gpu {
        items.push((gpu_figures(&gpu, wide), Role::Text));
    }
    if let Some(rss) = step.rss_bytes {
        let peak = run.figures().peak_rss.filter(|_| roomy);
        let peak = peak.map(|peak| format!(" (peak {})", format::bytes(peak))).unwrap_or_default();
        items.push((format!("mem {}{peak}", format::bytes(rss)), Role::Text));
    }
    match &run.saved {
        Some((saved, t)) if wide => {
            let ago = format::ago(scene.now.saturating_sub(*t) as f64 / 1000.0);
            let what = if roomy { "last checkpoint" } else { "ckpt" };
            items.push((format!("{what} {}, {ago} ago", saved.step), Role::Text));
        }
        Some((saved, _)) => items.push((format!("ckpt {}", saved.step), Role::Text)),
        None => {}
    }
    items
}

/// `GPU 94% 611 W 61 °C 23.0/150.1 GB`; without the power in a narrow terminal.
fn gpu_figures(gpu: &GpuStats, wide: bool) -> String {
    let space = if wide { " " } else { "" };
    let figures = [
        gpu.utilization.map(|share| format!("{share:.0}%")),
        gpu.power_w.filter(|_| wide).map(|watts| format!("{watts:.0} W")),
        gpu.temperature_c.map(|degrees| format!("{degrees:.0}{space}°C")),
        Some(format::bytes_of(gpu.memory_bytes, gpu.memory_total_bytes)),
    ];
    figures.into_iter().flatten().fold("GPU".into(), |text, figure| text + " " + &figure)
}
