//! The second tab: the gradients on a ruler, and the table "if the loss scale were 2^k". The first tab has a smaller
//! ruler.

use super::app::Tab;
use super::layout;
use super::scene::Scene;
use crate::precision::{ExponentHistogram, FloatFormat, RangeShares};
use crate::telemetry::{GradStats, LayerStats, RunState};
use crate::ui::{Canvas, Role, Ruler, format};
use ratatui::layout::Rect;

/// Columns for the labels of layers, left of the ruler.
const LABELS: u16 = 16;

#[derive(Debug, Default)]
pub(super) struct Precision;

impl Tab for Precision {
    fn draw(&self, scene: &Scene, canvas: &mut Canvas) {
        let (width, height) = (canvas.width(), canvas.height());
        let (ruler, table) = layout::precision(Rect::new(0, 0, width, height));
        if !ruler.is_empty() {
            draw_large(scene, &mut canvas.part(0, 0, width, ruler.height));
        }
        if !table.is_empty() {
            draw_scales(scene, &mut canvas.part(0, table.y, width, table.height));
        }
    }
}

/// Draws the panel of the first tab.
pub(super) fn draw_ruler(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let mut inner = canvas.frame(&[(&title(scene), Role::Title)]);
    let layered = inner.width() >= LABELS + 45;
    let zero = if layered { LABELS } else { 7 };
    let Some((_, scale, stats)) = &run.grads else {
        let ruler = Ruler::new(run.grad_format(), None, zero, 1, 0);
        let y = inner.height().saturating_sub(2);
        ruler.axis(&mut inner, y, 0);
        inner.text(1, 0, "no gradients yet", Role::Dim);
        return;
    };
    let histogram = stats.histogram();
    let ruler = Ruler::new(run.grad_format(), histogram.lowest().zip(histogram.highest()), zero, 1, 0);
    let shift = if scene.true_magnitudes { exponent_of(*scale) } else { 0 };
    if layered {
        let layers = fold(run.layers(), inner.height().saturating_sub(8));
        let bars = inner.height().saturating_sub(2 + layers.len() as u16);
        draw_bars(&mut inner, bars, &ruler, &histogram, None, shift);
        margin(&mut inner, bars, stats);
        for (y, layer) in (bars + 2..).zip(&layers) {
            layer_row(&mut inner, y, &ruler, run.grad_format(), layer, shift);
        }
    } else {
        let bars = inner.height().saturating_sub(3);
        draw_bars(&mut inner, bars, &ruler, &histogram, None, shift);
        inner.text(1, bars + 2, &summary(stats, shift), Role::Text);
    }
}

/// Draws the panel of the second tab: a full-width ruler with the probe's FP32 gradients as an outline.
fn draw_large(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let mut inner = canvas.frame(&[(&title(scene), Role::Title)]);
    let Some((step, scale, stats)) = &run.grads else {
        inner.text(1, 0, "no gradients yet", Role::Dim);
        return;
    };
    let scale_exponent = exponent_of(*scale);
    let histogram = stats.histogram();
    let probe = run.probe_histogram().map(|probe| shifted(&probe, scale_exponent));
    let zero = 7;
    let cell_width = if inner.width() > zero + 44 + 40 { 2 } else { 1 };
    let room = i32::from(inner.width()) - i32::from(zero) - 4 - 40 * i32::from(cell_width) - 1;
    let lowest = probe.as_ref().and_then(ExponentHistogram::lowest).unwrap_or(0);
    let below = (FloatFormat::FP16.min_subnormal_exponent() - lowest).clamp(0, room / i32::from(cell_width));
    let used = histogram.lowest().zip(histogram.highest());
    let ruler = Ruler::new(run.grad_format(), used, zero, cell_width, below);
    let shift = if scene.true_magnitudes { scale_exponent } else { 0 };
    let lost_updates = format::lost_updates(run);
    let bars = inner.height().saturating_sub(4 + u16::from(lost_updates.is_some()));
    draw_bars(&mut inner, bars, &ruler, &histogram, probe.as_ref(), shift);
    let line = format!("step {step}, scale {}: {}", format::scale(*scale), summary(stats, shift));
    inner.text(1, bars + 2, &line, Role::Text);
    probe_line(run, scene.can_command(), &mut inner, bars + 3);
    if let Some(line) = lost_updates {
        inner.text(1, bars + 4, &line, Role::Text);
    }
}

fn probe_line(run: &RunState, attached: bool, canvas: &mut Canvas, y: u16) {
    let Some(probe) = &run.probe else {
        canvas.text(1, y, if attached { "no FP32 probe yet: press p" } else { "no FP32 probe" }, Role::Dim);
        return;
    };
    let (flushed, nonzero) = probe.underflow();
    let experts = probe.experts.map(|share| format!(", {:.2} % of choices of experts differ", 100.0 * share));
    let text = format!(
        " FP32 probe at step {}: underflow {} of {} values that are not zero{}",
        probe.step,
        format::percent(flushed, nonzero),
        format::count(nonzero as f64),
        experts.unwrap_or_default()
    );
    canvas.spans(1, y, &[("∙", Role::Validation), (&text, Role::Text)]);
}

fn title(scene: &Scene) -> String {
    let run = scene.run();
    let how = match (run.scales_losses(), scene.true_magnitudes) {
        (true, false) => " (after loss scaling)",
        (true, true) => " (true magnitudes)",
        (false, _) => "",
    };
    let format = run.grad_format();
    // FP16's limits are on the ruler; those of the wide formats rarely are.
    let range = match (format.min_exponent(), format.max_exponent()) {
        _ if format == FloatFormat::FP16 => String::new(),
        (min, max) => format!(" (normal from 2^{min} to 2^{max})"),
    };
    format!("Gradients as {} stores them{range}{how}", format.name)
}

/// The histogram on `height` rows and its axis on two more.
fn draw_bars(
    canvas: &mut Canvas,
    height: u16,
    ruler: &Ruler,
    histogram: &ExponentHistogram,
    outline: Option<&ExponentHistogram>,
    shift: i32,
) {
    let top = ruler.bars(canvas, 0, height, histogram, outline);
    let label = format!("10^{:.0}", (top.max(1) as f64).log10());
    if ruler.zero >= LABELS {
        canvas.text(1, 0, &format!("log count {label}"), Role::Dim);
    } else {
        canvas.text(1, 0, &label, Role::Dim);
    }
    ruler.axis(canvas, height, shift);
}

/// The shares left of the histogram, if it is high enough.
fn margin(canvas: &mut Canvas, height: u16, stats: &GradStats) {
    if height < 5 {
        return;
    }
    let rows = [
        ("zero", format::percent(stats.zero, stats.count), Role::Dim),
        ("sub", format::percent(stats.subnormal, stats.count), Role::Subnormal),
        ("inf", format::count(stats.not_finite() as f64), Role::Overflow),
    ];
    for (y, (what, figure, role)) in (height - 3..).zip(rows) {
        let nothing = figure.starts_with("0%") || figure == "0";
        canvas.text(1, y, what, Role::Dim);
        canvas.text(6, y, &figure, if nothing { Role::Dim } else { role });
    }
}

/// `zero 21.9%  subnormal 6.1%  inf 0  2^-24 to 2^9`
fn summary(stats: &GradStats, shift: i32) -> String {
    let power = |value: f32| format!("2^{}", exponent_of(value) - shift);
    format!(
        "zero {}  subnormal {}  inf {}  {} to {}",
        format::percent(stats.zero, stats.count),
        format::percent(stats.subnormal, stats.count),
        format::count(stats.not_finite() as f64),
        stats.min_abs.map_or_else(|| "-".into(), power),
        if stats.max_abs > 0.0 { power(stats.max_abs) } else { "-".into() },
    )
}

/// One layer: name, smallest magnitude, and the range from smallest to largest with the root mean square on it.
fn layer_row(canvas: &mut Canvas, y: u16, ruler: &Ruler, format: FloatFormat, layer: &LayerStats, shift: i32) {
    canvas.text(1, y, label(&layer.name), Role::Text);
    for column in ruler.limits() {
        canvas.glyph(column, y, '┊', Role::Dim);
    }
    if let Some(min) = layer.min_abs {
        let low = exponent_of(min);
        let at_edge = low <= format.min_subnormal_exponent();
        let mark = match (layer.fallback_dtype.as_deref(), at_edge) {
            (Some("fp8"), _) => "8",
            (Some(_), _) => "▴",
            (None, true) => "▾",
            (None, false) => " ",
        };
        canvas.text(7, y, mark, Role::Subnormal);
        canvas.text(9, y, &format!("2^{}", low - shift), Role::Dim);
        let from = ruler.column(low);
        let to = ruler.column(exponent_of(layer.max_abs));
        for column in from..=to {
            canvas.glyph(column, y, '─', Role::Train);
        }
        if from < to {
            canvas.glyph(from, y, '├', if at_edge { Role::Subnormal } else { Role::Train });
            canvas.glyph(to, y, '┤', Role::Train);
        }
        // A layer that overflowed has no mean.
        if layer.rms().is_finite() {
            canvas.glyph(ruler.column(exponent_of(layer.rms() as f32)).clamp(from, to), y, '●', Role::Train);
        }
    }
    if layer.overflowed {
        canvas.glyph(ruler.infinity(), y, '✕', Role::Overflow);
    }
}

/// The name of a layer in the six columns that it has.
fn label(layer: &str) -> &str {
    match layer {
        "embed_tokens" => "embed",
        "lm_head" => "head",
        // Blocks such as `h.32-47`.
        layer if layer.len() > 6 => layer.trim_start_matches("h."),
        layer => layer,
    }
}

/// At most `rows` layers: adjacent blocks are merged until they fit.
fn fold(layers: Vec<LayerStats>, rows: u16) -> Vec<LayerStats> {
    let blocks = layers.iter().filter(|layer| layer.name.starts_with("h.")).count();
    let others = layers.len() - blocks;
    let together = blocks.div_ceil(usize::from(rows).saturating_sub(others).max(1)).max(1);
    let mut folded: Vec<LayerStats> = Vec::new();
    let mut joined = 0;
    for layer in layers {
        let block = layer.name.starts_with("h.");
        match folded.last_mut() {
            Some(last) if block && joined > 0 && joined < together => {
                last.join(&layer);
                joined += 1;
            }
            _ => {
                joined = usize::from(block);
                folded.push(layer);
            }
        }
    }
    folded.truncate(rows.into());
    folded
}

/// The exponent of a number's binade; for zero, that of the smallest `f32`.
fn exponent_of(value: f32) -> i32 {
    if value > 0.0 { value.log2().floor().max(-149.0) as i32 } else { -149 }
}

/// The exponent of the power of two nearest to a loss scale, which a damaged log may state as zero or infinite.
fn nearest_exponent(scale: f32) -> i32 {
    scale.clamp(f32::MIN_POSITIVE, f32::MAX).log2().round() as i32
}

/// The exponents of the same values times 2^shift.
fn shifted(histogram: &ExponentHistogram, shift: i32) -> ExponentHistogram {
    ExponentHistogram::from_counts(histogram.iter().map(|(exponent, count)| (exponent + shift, count)))
}

/// Draws the shares that would flush to zero, be subnormal, or overflow at each loss scale.
fn draw_scales(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let mut inner = canvas.frame(&[("If the loss scale were", Role::Title)]);
    let Some((true_gradients, source)) = unscaled(run) else {
        inner.text(1, 0, "no gradients yet", Role::Dim);
        return;
    };
    let format = run.grad_format();
    inner.text(1, 0, "scale     flushed to 0   subnormal      normal    overflow", Role::Dim);
    // The current scale matters more than the last line.
    let rows = i32::from(inner.height().saturating_sub(2).max(1));
    let now = nearest_exponent(run.step.loss_scale);
    let shares = |scale: i32| true_gradients.shares_at(scale, format);
    // The largest scale without an overflow; `f32` ends at 2^127.
    let best = true_gradients.highest().map(|highest| (format.max_exponent() - highest).min(f32::MAX_EXP - 1));
    let first = now - rows / 2;
    for (y, scale) in (1..).zip(first..first + rows) {
        let RangeShares { flushed, subnormal, normal, overflow } = shares(scale);
        let x = inner.text(1, y, &format!("2^{scale:<7}"), if scale == now { Role::Title } else { Role::Text });
        let x = inner.text(x, y, &cell(flushed), if flushed > 0.0 { Role::Subnormal } else { Role::Text });
        let x = inner.text(x, y, &cell(subnormal), Role::Text);
        let x = inner.text(x, y, &cell(normal), Role::Text);
        let x = inner.text(x, y, &cell(overflow), if overflow > 0.0 { Role::Overflow } else { Role::Text });
        if scale == now {
            inner.text(x + 2, y, "▸ now", Role::Title);
        } else if Some(scale) == best {
            inner.text(x + 2, y, "● largest without overflow", Role::Good);
        }
    }
    let hidden = best.filter(|best| !(first..first + rows).contains(best));
    let note = hidden.map_or_else(String::new, |best| format!("largest without overflow 2^{best}, "));
    inner.spans(1, rows as u16 + 1, &[(&note, Role::Good), (&source, Role::Dim)]);
}

/// A share in percent, right-aligned in twelve columns.
fn cell(share: f64) -> String {
    format!("{:>12}", format::share(share))
}

/// The unscaled gradients, from the newest probe if there is one, and a description of their source.
fn unscaled(run: &RunState) -> Option<(ExponentHistogram, String)> {
    if let Some(probe) = &run.probe {
        let source = format!("of the FP32 probe at step {}", probe.step);
        return Some((probe.grads.histogram(), source));
    }
    let (step, scale, stats) = run.grads.as_ref()?;
    let format = run.grad_format();
    let mut stored = stats.histogram();
    // Values that are not finite are at least the smallest that overflows.
    stored.add(format.max_exponent() + 1, stats.not_finite());
    let unscaled = shifted(&stored, -nearest_exponent(*scale));
    let source = format!("of the gradients that {} kept at step {step}", format.name);
    Some((unscaled, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(blocks: usize) -> Vec<LayerStats> {
        let names = ["wte", "wpe"].map(String::from).into_iter();
        let names = names.chain((0..blocks).map(|block| format!("h.{block}"))).chain(["ln_f".into()]);
        names.map(|name| LayerStats { name, ..LayerStats::default() }).collect()
    }

    fn folded(blocks: usize, rows: u16) -> Vec<String> {
        fold(layers(blocks), rows).into_iter().map(|layer| layer.name).collect()
    }

    #[test]
    fn a_deep_model_fits_with_every_block_in_some_row() {
        assert_eq!(folded(2, 9), ["wte", "wpe", "h.0", "h.1", "ln_f"]);
        assert_eq!(folded(7, 7), ["wte", "wpe", "h.0-1", "h.2-3", "h.4-5", "h.6", "ln_f"]);
        assert_eq!(folded(48, 6), ["wte", "wpe", "h.0-15", "h.16-31", "h.32-47", "ln_f"]);
        assert_eq!(["h.0-15", "h.32-47", "embed_tokens", "lm_head"].map(label), ["h.0-15", "32-47", "embed", "head"]);
        for blocks in 0..50 {
            for rows in 0..20 {
                let folded = folded(blocks, rows);
                assert!(
                    folded.len() <= rows.into() && folded.iter().all(|layer| label(layer).len() <= 6),
                    "{folded:?}"
                );
            }
        }
    }

    #[test]
    fn exponents_are_those_of_the_binade() {
        assert_eq!([1.0, 1.99, 2.0, 6e-8, 65504.0, 0.0].map(exponent_of), [0, 0, 1, -24, 15, -149]);
        assert_eq!([65536.0, 24576.0, 0.0, f32::INFINITY].map(nearest_exponent), [16, 15, -126, 128]);
    }
}
