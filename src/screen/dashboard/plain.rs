//! Prints a run as lines of text, for pipes, log files and simple terminals.
//!
//! A step is one line of `key=value` pairs every `log_every` steps, and at least every ten seconds; other events are printed at
//! once.

use crate::precision::{PrecisionUnit, ScalerMode};
use crate::telemetry::eta::EtaEstimator;
use crate::telemetry::{
    Activity, DtypeChange, Event, FinishReason, Finished, FirstNonFinite, GradMax, Overflow, PhaseLines, Record,
    ScaleCause, ScaleUpdate, Started, StepRecord, Throughput,
};
use crate::ui::format::{bytes, clock, loss, magnitude, percent, printable, rate, scale, short};
use crate::untrusted::line;
use std::io::{self, Write};

/// The longest time without a line for a step, in seconds: slow models shall not be silent for minutes.
const LONGEST_SILENCE: f64 = 10.0;

/// Writes a run's records as lines.
#[derive(Debug)]
pub struct Plain<W> {
    out: W,
    log_every: u64,
    total_steps: u64,
    pace: EtaEstimator,
    /// Sum and number of the finite losses since the last step line.
    losses: (f64, u32),
    /// When the last step line was due, in seconds of the run.
    due_at: f64,
    phases: PhaseLines,
}

impl<W: Write> Plain<W> {
    /// Writes to `out` a line for every `log_every`-th step, and for others where steps are slow.
    pub fn new(out: W, log_every: u64) -> Self {
        Self {
            out,
            log_every: log_every.max(1),
            total_steps: 0,
            pace: EtaEstimator::default(),
            losses: (0.0, 0),
            due_at: 0.0,
            phases: PhaseLines::default(),
        }
    }

    /// The same for a run whose beginning it does not see, of `total_steps`.
    pub(super) fn midway(out: W, log_every: u64, total_steps: u64) -> Self {
        Self { total_steps, ..Self::new(out, log_every) }
    }

    /// Writes any other line.
    ///
    /// # Errors
    /// If the output is closed.
    pub fn line(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.out, "{}{text}", self.phases.end())?;
        self.out.flush()
    }

    /// Writes that a phase lasts, where that is due.
    ///
    /// # Errors
    /// If the output is closed.
    pub(super) fn phase(&mut self, activity: &Activity) -> io::Result<()> {
        let Some(text) = self.phases.due(activity, PhaseLines::FIRST) else { return Ok(()) };
        write!(self.out, "{text}")?;
        self.out.flush()
    }

    /// Ends the last line.
    pub(super) fn end(&mut self) {
        let _ = self.out.write_all(self.phases.end().as_bytes());
        let _ = self.out.flush();
    }

    /// Writes the lines for a record, if any.
    ///
    /// # Errors
    /// If the output is closed.
    pub fn show(&mut self, record: &Record) -> io::Result<()> {
        let text = match &record.event {
            Event::Started(started) => {
                self.total_steps = started.total_steps;
                self.pace.interrupt();
                self.due_at = record.s;
                environment(started)
            }
            Event::Step(step) => {
                self.pace.step(step.step, record.s);
                if step.loss.is_finite() {
                    self.losses = (self.losses.0 + f64::from(step.loss), self.losses.1 + 1);
                }
                // The first says what the run begins with, the last what it came to.
                let edge = step.step == 1 || step.step == self.total_steps;
                let due = step.step.is_multiple_of(self.log_every) || record.s - self.due_at >= LONGEST_SILENCE;
                if !due && !edge {
                    return Ok(());
                }
                let text = self.step_line(step);
                // The line for step 1 comes out of turn, and the next one's mean has it too.
                if due {
                    (self.losses, self.due_at) = ((0.0, 0), record.s);
                }
                text
            }
            other => match announcement(other) {
                Some(line) => line,
                None => return Ok(()),
            },
        };
        self.line(&text)
    }

    fn step_line(&self, step: &StepRecord) -> String {
        let (sum, count) = self.losses;
        let mut pairs = vec![
            // A log read from its middle has no `Started` event.
            if self.total_steps == 0 {
                format!("step={}", step.step)
            } else {
                format!("step={}/{}", step.step, self.total_steps)
            },
            format!("epoch={:.2}", step.epoch),
            format!("loss={}", loss(f64::from(step.loss))),
            format!("loss_avg={}", loss(if count == 0 { f64::NAN } else { sum / f64::from(count) })),
            format!("scale={}", step.loss_scale),
            format!("grad_min={}", magnitude(step.grads.min_abs)),
            format!("grad_max={}", magnitude(Some(step.grads.max_abs))),
            format!("norm_scaled={}", short(step.grads.norm)),
            format!("norm={}", short(step.grad_norm)),
            format!("lr={}", rate(step.lr)),
            format!("updates={}", step.updates),
            format!("skipped={}", step.skipped),
            format!("success={}", percent(step.updates, step.step)),
            format!("tokens_per_s={:.0}", step.tokens_per_s),
            format!("step_ms={}", short(step.time.step_ms)),
        ];
        pairs.extend(step.rss_bytes.map(|rss| format!("rss_mib={}", rss >> 20)));
        let left = self.pace.remaining(step.step, self.total_steps).filter(|_| self.total_steps > 0);
        pairs.extend(left.map(|left| format!("eta={}", clock(left))));
        pairs.join(" ")
    }
}

/// A run's environment, one fact per line.
fn environment(started: &Started) -> String {
    let scaler = &started.scaler;
    let scaling = if scaler.enabled {
        let growth = match scaler.mode {
            ScalerMode::Dynamic => format!(
                "dynamic, from {}, ×{} after {} clean steps",
                scale(scaler.init_scale),
                scaler.growth_factor,
                scaler.growth_interval
            ),
            ScalerMode::Predictive => "predictive, from the headroom of earlier steps".to_owned(),
        };
        format!("{growth}, ×{} after an overflow", scaler.backoff_factor)
    } else {
        "off".into()
    };
    let shape = &started.shape;
    let mut facts = vec![
        ("program", started.program.clone()),
        ("run", started.run.clone()),
        ("host", format!("{}, {} threads, {}", started.cpu.name, started.cpu.threads, started.cpu.isa)),
        ("device", started.device.clone()),
        (
            "model",
            format!(
                "{}: {} layers, {} heads, width {}, context {}, vocabulary {}, {} parameters",
                started.model,
                shape.n_layer,
                shape.n_head,
                shape.n_embd,
                shape.n_positions,
                shape.vocab_size,
                started.parameters
            ),
        ),
        ("precision", started.policy.clone()),
        ("loss scale", scaling),
        ("optimizer", started.optimizer.clone()),
        ("schedule", started.schedule.clone()),
        ("data", started.data.clone()),
        (
            "length",
            format!(
                "{} steps of up to {} tokens, {} tokens an epoch, {:.2} epochs",
                started.total_steps, started.tokens_per_step, started.tokens_per_epoch, started.epochs
            ),
        ),
        ("seed", started.seed.to_string()),
    ];
    if let Some(step) = started.resumed_from {
        facts.push(("resumed from", format!("step {step}")));
    }
    let lines: Vec<_> = facts.iter().map(|(key, value)| format!("{key:<13}{}", line(value))).collect();
    lines.join("\n")
}

/// The line of an event that is printed at once; `None` for steps and probes.
pub(super) fn announcement(event: &Event) -> Option<String> {
    words(event).map(|words| line(&words).into_owned())
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
        Event::Eval(eval) => format!(
            "eval step={} val_loss={} perplexity={} tokens={}",
            eval.step,
            loss(eval.loss),
            short(eval.perplexity),
            eval.tokens
        ),
        Event::Sample(sample) => {
            format!("sample step={} text=\"{}\"", sample.step, printable(&format!("{}{}", sample.prompt, sample.text)))
        }
        Event::Fp32Probe(probe) => {
            let (nonzero, flushed) =
                probe.tensors.iter().fold((0, 0), |(n, f), tensor| (n + tensor.nonzero, f + tensor.flushed));
            format!(
                "probe step={} fp32_min={} fp32_max={} underflow={} of {nonzero} values",
                probe.step,
                magnitude(probe.grads.min_abs),
                magnitude(Some(probe.grads.max_abs)),
                percent(flushed, nonzero),
            )
        }
        Event::CheckpointSaved(saved) => {
            format!(
                "saved step={} path={} size={} seconds={:.2}",
                saved.step,
                saved.path,
                bytes(saved.bytes),
                saved.seconds
            )
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
    const NAMED: usize = 4;
    let mut tensors: Vec<_> = overflow
        .tensors
        .iter()
        .take(NAMED)
        .map(|tensor| format!("{}:inf={},nan={}", tensor.name, tensor.stats.inf, tensor.stats.nan))
        .collect();
    if overflow.tensors.len() > NAMED {
        tensors.push(format!("+{}", overflow.tensors.len() - NAMED));
    }
    format!(
        "overflow step={} loss={} scale={} largest_finite={} {}tensors={}",
        overflow.step,
        loss(f64::from(overflow.loss)),
        scale_change(overflow.scale),
        magnitude(Some(overflow.max_abs)),
        overflow.first_nonfinite.as_ref().map_or_else(String::new, origin_pair),
        tensors.join(" ")
    )
}

/// An overflow, short enough for one line of a terminal.
pub(super) fn overflow_brief(overflow: &Overflow) -> String {
    let place = overflow.first_nonfinite.as_ref().map_or_else(
        || format!("in {} tensors", overflow.tensors.len()),
        |origin| format!("in {}'s {} pass", origin.layer, origin.pass),
    );
    format!("overflow step={} scale={} {place}", overflow.step, scale_change(overflow.scale))
}

fn retyped_line(retyped: &DtypeChange) -> String {
    let DtypeChange { step, layer, from, to, overflows, variance, restored: back } = retyped;
    let mut line = format!("retyped step={step} layer={layer} computes={from}->{to}");
    line.extend(overflows.map(|overflows| format!(" overflows={overflows}")));
    line.extend(variance.map(|variance| format!(" variance={variance:.2e}")));
    line + if *back { " back" } else { "" }
}

fn maxima_line(maxima: &GradMax) -> String {
    // Blocks by number, what is outside of them last: as the units are ordered.
    let mut layers: Vec<_> = maxima.layers.iter().collect();
    layers.sort_by_key(|(layer, _)| PrecisionUnit::of(layer));
    let layers = layers.into_iter().map(|(layer, largest)| format!("{layer}={}", magnitude(Some(*largest))));
    format!("maxima step={} scale={} {}", maxima.step, maxima.loss_scale, layers.collect::<Vec<_>>().join(" "))
}

fn origin_pair(origin: &FirstNonFinite) -> String {
    const NAMED: usize = 8;
    let named = &origin.samples[..origin.samples.len().min(NAMED)];
    let mut samples: Vec<_> = named.iter().map(usize::to_string).collect();
    if origin.samples.len() > NAMED {
        samples.push(format!("+{}", origin.samples.len() - NAMED));
    }
    let samples = if samples.is_empty() { String::new() } else { format!(",samples={}", samples.join(";")) };
    format!(
        "origin={}:{}:{},inf={},nan={},largest_finite={},micro_batch={}{samples} ",
        origin.pass,
        origin.layer,
        origin.tensor,
        origin.inf,
        origin.nan,
        magnitude(Some(origin.max_abs)),
        origin.micro_batch
    )
}

fn scale_change(change: ScaleUpdate) -> String {
    let (from, to) = (scale(change.from), scale(change.to));
    match change.cause {
        ScaleCause::Held => from,
        ScaleCause::AtMinScale => format!("{from} (at its floor)"),
        ScaleCause::Grew | ScaleCause::Lowered | ScaleCause::BackedOff => format!("{from}->{to}"),
    }
}

fn finished_line(finished: &Finished) -> String {
    let reason = match finished.reason {
        FinishReason::Done => "done",
        FinishReason::EarlyStopped => "early_stopped",
        FinishReason::Interrupted => "interrupted",
        FinishReason::Stopped => "stopped",
        FinishReason::Diverged => "diverged",
    };
    let mut pairs = vec![
        format!("finished reason={reason}"),
        format!("step={}", finished.step),
        format!("updates={}", finished.updates),
        format!("skipped={}", finished.skipped),
        format!("success={}", percent(finished.updates, finished.step)),
        format!("loss={}", loss(f64::from(finished.loss))),
        format!("scale={}", finished.loss_scale),
        format!("tokens={}", finished.tokens),
        format!("seconds={:.1}", finished.seconds),
    ];
    pairs.extend(finished.val_loss.map(|val_loss| format!("val_loss={}", loss(val_loss))));
    pairs.extend(finished.peak_rss_bytes.map(|peak| format!("peak_rss_mib={}", peak >> 20)));
    pairs.extend(finished.checkpoint.as_ref().map(|checkpoint| format!("checkpoint={checkpoint}")));
    pairs.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{GradStats, Pass, StepStatus, TensorRecord, VERSION};

    fn lines(log_every: u64, events: Vec<Event>) -> Vec<String> {
        let mut plain = Plain::new(Vec::new(), log_every);
        for (at, event) in events.into_iter().enumerate() {
            plain.show(&Record { v: VERSION, t: 0, s: at as f64, event }).unwrap();
        }
        String::from_utf8(plain.out).unwrap().lines().map(str::to_owned).collect()
    }

    fn step(step: u64) -> Event {
        let grads = GradStats { min_abs: Some(6e-8), max_abs: 31.0, norm: 54_395.0, ..Default::default() };
        Event::Step(Box::new(StepRecord {
            step,
            loss: step as f32,
            loss_scale: 65536.0,
            grads,
            grad_norm: 0.83,
            updates: step - 1,
            skipped: 1,
            lr: 4.1e-5,
            tokens_per_s: 41_200.0,
            ..Default::default()
        }))
    }

    #[test]
    fn lines_that_begin_midway_know_the_end() {
        let mut plain = Plain::midway(Vec::new(), 1, 10);
        plain.show(&Record { v: VERSION, t: 0, s: 0.0, event: step(5) }).unwrap();
        assert!(plain.out.starts_with(b"step=5/10 "));
    }

    #[test]
    fn a_step_line_comes_every_log_every_steps_with_every_figure() {
        let found = lines(4, (1..=9).map(step).collect());
        assert_eq!(found.len(), 3);
        assert!(found[0].starts_with("step=1 ") && found[0].contains(" loss_avg=1.000 "), "{}", found[0]);
        assert_eq!(
            found[1],
            "step=4 epoch=0.00 loss=4.000 loss_avg=2.500 scale=65536 grad_min=6.0e-8 grad_max=3.1e1 norm_scaled=5.4e4 \
             norm=0.830 lr=4.1e-5 updates=3 skipped=1 success=75.0% tokens_per_s=41200 step_ms=0"
        );
        assert!(found[2].contains("step=8 ") && found[2].contains("loss_avg=6.500"), "{}", found[2]);
    }

    /// The records are a second apart.
    #[test]
    fn slow_steps_have_a_line_every_ten_seconds() {
        let found = lines(128, (1..=25).map(step).collect());
        let shown: Vec<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(shown, ["step=1", "step=11", "step=21"]);
        assert!(found[1].contains("loss_avg=6.000") && found[2].contains("loss_avg=16.500"), "{found:?}");
    }

    #[test]
    fn maxima_are_a_line_in_the_order_of_layers() {
        let layers = [("head", 5e-4), ("h.10", 2.0), ("h.2", 31.0)].map(|(layer, max)| (layer.to_owned(), max)).into();
        let found = lines(128, vec![Event::GradMax(GradMax { step: 20, loss_scale: 65536.0, layers })]);
        assert_eq!(found, ["maxima step=20 scale=65536 h.2=3.1e1 h.10=2.0e0 head=5.0e-4"]);
    }

    #[test]
    fn an_overflow_is_printed_at_once_with_its_tensors() {
        let tensor =
            |name: &str| TensorRecord { name: name.into(), stats: GradStats { inf: 3, nan: 1, ..Default::default() } };
        let overflow = Overflow {
            step: 3,
            loss: 4.5,
            scale: ScaleUpdate { cause: ScaleCause::BackedOff, from: 65536.0, to: 32768.0 },
            max_abs: 65504.0,
            tensors: ["a", "b", "c", "d", "e", "f"].map(tensor).to_vec(),
            first_nonfinite: None,
        };
        let skipped = StepRecord { step: 3, outcome: StepStatus::Skipped, ..Default::default() };
        let found = lines(128, vec![Event::Step(Box::new(skipped)), Event::Overflow(overflow)]);
        let [line] = &found[..] else { panic!("{found:?}") };
        assert_eq!(
            line,
            "overflow step=3 loss=4.500 scale=2^16->2^15 largest_finite=6.6e4 tensors=a:inf=3,nan=1 b:inf=3,nan=1 \
             c:inf=3,nan=1 d:inf=3,nan=1 +2"
        );
    }

    #[test]
    fn an_overflow_that_was_traced_names_its_origin() {
        let origin = FirstNonFinite {
            pass: Pass::Backward,
            layer: "h.3.mlp.c_fc".into(),
            tensor: "input_gradient".into(),
            count: 64,
            inf: 2,
            nan: 1,
            max_abs: 65504.0,
            micro_batch: 1,
            samples: (0..11).collect(),
        };
        let overflow = Overflow { step: 3, first_nonfinite: Some(origin), ..Default::default() };
        let found = lines(128, vec![Event::Overflow(overflow)]);
        assert!(
            found[0].contains(
                "largest_finite=0.0e0 origin=backward:h.3.mlp.c_fc:input_gradient,inf=2,nan=1,largest_finite=6.6e4,\
                 micro_batch=1,samples=0;1;2;3;4;5;6;7;+3 tensors="
            ),
            "{}",
            found[0]
        );
    }

    #[test]
    fn a_layer_that_changes_its_type_is_printed_at_once() {
        let retyped = |to: &str, overflows, variance| {
            let from = if to == "f16" { "f32" } else { "f16" }.into();
            let (layer, back) = ("h.1".into(), to == "f16");
            Event::DtypeChange(DtypeChange { step: 9, layer, from, to: to.into(), overflows, variance, restored: back })
        };
        assert_eq!(
            lines(
                128,
                vec![retyped("f32", Some(3), None), retyped("f16", None, None), retyped("fp8", None, Some(2e-9))]
            ),
            [
                "retyped step=9 layer=h.1 computes=f16->f32 overflows=3",
                "retyped step=9 layer=h.1 computes=f32->f16 back",
                "retyped step=9 layer=h.1 computes=f16->fp8 variance=2.00e-9"
            ]
        );
    }

    #[test]
    fn the_environment_is_a_table_of_one_fact_per_line() {
        let started = Started { model: "tiny".into(), resumed_from: Some(64), ..Default::default() };
        let found = lines(1, vec![Event::Started(Box::new(started))]);
        assert!(found.iter().any(|line| line.starts_with("model        tiny: ")), "{found:#?}");
        assert_eq!(found.last().unwrap(), "resumed from step 64");
    }
}
