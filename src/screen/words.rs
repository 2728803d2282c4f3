//! The text of every event: the line of plain output, a shorter one above the status line, and the dashboard's row.

use crate::data::counted;
use crate::precision::PrecisionUnit;
use crate::telemetry::{
    CheckpointSaved, DtypeChange, Event, EventRow, FinishReason, Finished, FirstNonFinite, GradMax, ObjectiveMetrics,
    Overflow, Pass, ScaleCause, ScaleUpdate, TensorRecord, Throughput, Validation,
};
use crate::ui::Role;
use crate::ui::format::{base_name, bytes, exact, loss, magnitude, percent, printable, scale, short};
use crate::untrusted::sanitize_line;

/// The line of an event that is printed at once; `None` for steps and probes.
pub(super) fn announcement(event: &Event) -> Option<String> {
    words(event).map(|words| sanitize_line(&words).into_owned())
}

/// The line of an event above a status line, where an overflow is short enough for a terminal.
pub(super) fn brief(event: &Event) -> Option<String> {
    let Event::Overflow(overflow) = event else { return announcement(event) };
    let place = overflow.first_nonfinite.as_ref().map_or_else(
        || format!("in {}", counted(overflow.tensors.len(), "tensor")),
        |origin| format!("in {}'s {} pass", origin.layer, origin.pass),
    );
    Some(format!("overflow step={} scale={} {place}", overflow.step, scale_change(overflow.scale)))
}

pub(super) fn glyph(event: &Event) -> (char, Role) {
    match event {
        Event::Step(step) if step.scale.cause == ScaleCause::Lowered => ('▾', Role::Good),
        Event::Step(_) => ('▴', Role::Good),
        Event::Started(_) | Event::Resumed { .. } => ('▶', Role::Good),
        Event::Overflow(_) | Event::Diverged(_) => ('✕', Role::Overflow),
        Event::Eval(_) => ('◆', Role::Validation),
        Event::Sample(_) | Event::GradVariance(_) | Event::GradMax(_) | Event::Throughput(_) | Event::Phase { .. } => {
            ('∙', Role::Text)
        }
        Event::Fp32Probe(_) | Event::UnderflowOnset(_) => ('▾', Role::Subnormal),
        Event::CheckpointSaved(_) => ('●', Role::Good),
        Event::Paused { .. } => ('‖', Role::Subnormal),
        Event::Warning(_) | Event::DtypeChange(_) => ('▴', Role::Subnormal),
        Event::Finished(_) => ('■', Role::Good),
    }
}

/// The event on one line of the dashboard's list.
pub(super) fn listed(row: &EventRow) -> String {
    let text = match &row.event {
        Event::Step(step) => format!("scale {}", arrow(step.scale)),
        Event::Started(started) => match started.resumed_from {
            Some(step) => format!("resumed from step {step}: {}", started.program),
            None => format!("started {}: {} on {}", base_name(&started.model), started.program, started.device),
        },
        Event::Overflow(overflow) => overflow_text(overflow, row.more),
        Event::UnderflowOnset(touched) => {
            format!("first at 2^-24, FP16's smallest: {}", touched.tensors.join(", "))
        }
        other => announcement(other).unwrap_or_default(),
    };
    // The row has a column for the step.
    text.replacen(&format!(" step={}", row.step), "", 1)
}

/// Metrics of an objective, with a space before each.
pub(super) fn objective(metrics: &ObjectiveMetrics) -> String {
    metrics.named().fold(String::new(), |line, (name, value)| format!("{line} {name}={}", short(value)))
}

fn words(event: &Event) -> Option<String> {
    Some(match event {
        Event::Started(_)
        | Event::Step(_)
        | Event::GradVariance(_)
        | Event::UnderflowOnset(_)
        | Event::Phase { .. } => {
            return None;
        }
        Event::GradMax(maxima) => maxima_line(maxima),
        Event::Overflow(overflow) => overflow_line(overflow),
        Event::DtypeChange(retyped) => retyped_line(retyped),
        Event::Eval(eval @ Validation { step, loss: nats, tokens, objective: metrics, .. }) => {
            let perplexity = eval.perplexity().map(|perplexity| format!(" perplexity={}", short(perplexity)));
            let perplexity = perplexity.unwrap_or_default();
            let metrics = metrics.as_ref().map(objective);
            format!(
                "eval step={step} val_loss={}{perplexity}{} tokens={tokens}",
                loss(*nats),
                metrics.unwrap_or_default()
            )
        }
        Event::Sample(sample) => {
            format!("sample step={} text=\"{}\"", sample.step, printable(&format!("{}{}", sample.prompt, sample.text)))
        }
        Event::Fp32Probe(probe) => {
            let (flushed, nonzero) = probe.underflow();
            format!(
                "probe step={} fp32_min={} fp32_max={} underflow={} of {nonzero} values",
                probe.step,
                magnitude(probe.grads.min_abs),
                magnitude(Some(probe.grads.max_abs)),
                percent(flushed, nonzero),
            )
        }
        Event::CheckpointSaved(CheckpointSaved { step, path, seconds, bytes: size, .. }) => {
            format!("saved step={step} path={path} size={} seconds={seconds:.2}", bytes(*size))
        }
        Event::Throughput(processes) => processes_line(processes),
        Event::Paused { step } => format!("paused step={step}"),
        Event::Resumed { step } => format!("resumed step={step}"),
        Event::Warning(warning) => format!("warning step={} {}", warning.step, warning.message),
        Event::Diverged(why) => format!("diverged step={} {}", why.step, why.message),
        Event::Finished(finished) => finished_line(finished),
    })
}

fn processes_line(processes: &Throughput) -> String {
    let each = processes.processes.iter().map(|one| {
        format!("{}: {:.0} tokens/s, {:.0} % waiting", one.name, one.tokens_per_s, 100.0 * one.comm_fraction)
    });
    let each = each.collect::<Vec<_>>().join("; ");
    let slow = if processes.stragglers.is_empty() {
        String::new()
    } else {
        format!(" slow: {}", processes.stragglers.join(", "))
    };
    format!("processes step={} {each}{slow}", processes.step)
}

fn overflow_line(overflow: &Overflow) -> String {
    let tensors = first(&overflow.tensors, 4, |tensor| {
        format!("{}:inf={},nan={}", tensor.name, tensor.stats.inf, tensor.stats.nan)
    });
    format!(
        "overflow step={} loss={} scale={} largest_finite={} {}tensors={}",
        overflow.step,
        loss(f64::from(overflow.loss)),
        scale_change(overflow.scale),
        exact(overflow.max_abs),
        overflow.first_nonfinite.as_ref().map_or_else(String::new, origin_pair),
        tensors.join(" ")
    )
}

/// The first of the items, and the number of the others.
fn first<T>(items: &[T], most: usize, write: impl Fn(&T) -> String) -> Vec<String> {
    let others = items.len().saturating_sub(most);
    items.iter().take(most).map(write).chain((others > 0).then(|| format!("+{others}"))).collect()
}

fn retyped_line(retyped: &DtypeChange) -> String {
    let DtypeChange { step, layer, from, to, overflows, variance, restored } = retyped;
    let mut line = format!("retyped step={step} layer={layer} computes={from}->{to}");
    line.extend(overflows.map(|overflows| format!(" overflows={overflows}")));
    line.extend(variance.map(|variance| format!(" variance={variance:.2e}")));
    line + if *restored { " back" } else { "" }
}

fn maxima_line(maxima: &GradMax) -> String {
    // In the order of the units: blocks by number, the rest last.
    let mut layers: Vec<_> = maxima.layers.iter().collect();
    layers.sort_by_key(|(layer, _)| PrecisionUnit::of(layer));
    let layers = layers.into_iter().map(|(layer, largest)| format!("{layer}={}", magnitude(Some(*largest))));
    format!(
        "maxima step={} scale={} {}",
        maxima.step,
        f64::from(maxima.loss_scale),
        layers.collect::<Vec<_>>().join(" ")
    )
}

fn origin_pair(origin: &FirstNonFinite) -> String {
    let samples = first(&origin.samples, 8, usize::to_string);
    let samples = if samples.is_empty() { String::new() } else { format!(",samples={}", samples.join(";")) };
    format!(
        "origin={}:{}:{},inf={},nan={},largest_finite={},micro_batch={}{samples} ",
        origin.pass,
        origin.layer,
        origin.tensor,
        origin.inf,
        origin.nan,
        exact(origin.max_abs),
        origin.micro_batch
    )
}

fn finished_line(finished: &Finished) -> String {
    let reason = match finished.reason {
        FinishReason::EarlyStopped => "early_stopped".to_owned(),
        reason => reason.to_string(),
    };
    let Finished { step, updates, skipped, loss_scale, tokens, seconds, .. } = finished;
    let mut line = format!(
        "finished reason={reason} step={step} updates={updates} skipped={skipped} success={} loss={} \
         scale={} tokens={tokens} seconds={seconds:.1}",
        percent(*updates, *step),
        loss(f64::from(finished.loss)),
        f64::from(*loss_scale),
    );
    line.extend(finished.val_loss.map(|val_loss| format!(" val_loss={}", loss(val_loss))));
    line.extend(finished.peak_rss_bytes.map(|peak| format!(" peak_rss_mb={}", peak / 1_000_000)));
    line.extend(finished.checkpoint.as_ref().map(|checkpoint| format!(" checkpoint={checkpoint}")));
    line
}

fn scale_change(change: ScaleUpdate) -> String {
    let (from, to) = (scale(change.from), scale(change.to));
    match change.cause {
        ScaleCause::Held => from,
        ScaleCause::AtMinScale => format!("{from} (at min_scale)"),
        ScaleCause::Grew | ScaleCause::Lowered | ScaleCause::BackedOff => format!("{from}->{to}"),
    }
}

fn arrow(change: ScaleUpdate) -> String {
    format!("{}→{}", scale(change.from), scale(change.to))
}

/// The change of the loss scale in the list of overflows.
pub(super) fn new_scale(change: ScaleUpdate, wide: bool) -> String {
    match change.cause {
        ScaleCause::AtMinScale => format!("{} min", scale(change.to)),
        ScaleCause::Held => format!("{} held", scale(change.to)),
        _ if wide => arrow(change),
        _ => format!("→{}", scale(change.to)),
    }
}

/// The pass and the layer where an overflow began, in the list of overflows.
pub(super) fn beginning(origin: &FirstNonFinite) -> String {
    let arrow = if origin.pass == Pass::Forward { '→' } else { '←' };
    format!("{arrow} {}", origin.layer)
}

/// A skipped step. Its tensors come last, because there may be many; a filter finds them by name.
fn overflow_text(overflow: &Overflow, more: usize) -> String {
    let name = |tensor: &TensorRecord| {
        let counts = [(tensor.stats.inf, "inf"), (tensor.stats.nan, "NaN")].into_iter().filter(|(n, _)| *n > 0);
        let counts: Vec<_> = counts.map(|(n, what)| format!("{n} {what}")).collect();
        format!("{} ({})", tensor.name, counts.join(", "))
    };
    let mut names: Vec<_> = overflow.tensors.iter().map(name).collect();
    if more > 0 {
        names.push(format!("+{more}"));
    }
    let change = match overflow.scale.cause {
        ScaleCause::AtMinScale => format!("{} is the minimum", scale(overflow.scale.to)),
        _ => arrow(overflow.scale),
    };
    let began = overflow
        .first_nonfinite
        .as_ref()
        .map_or_else(String::new, |origin| format!(", {} at {} ({})", origin.pass, origin.layer, origin.tensor));
    let names = names.join(", ");
    let loss = loss(f64::from(overflow.loss));
    format!("overflow {change}, loss {loss}{began}: {names}; largest finite {}", exact(overflow.max_abs))
}
