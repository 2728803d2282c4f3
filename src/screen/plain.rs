//! Prints a run as lines of text, for pipes, log files and simple terminals.
//!
//! A step is one line of `key=value` pairs every `log_every` steps, and at least every ten seconds; other events are
//! printed at once.

use super::renderer::{Exit, MessageSource, Renderer, ScreenMessage};
use super::words::{announcement, objective};
use crate::data::counted;
use crate::precision::ScalerMode;
use crate::telemetry::{Event, PhaseLines, RunState, Started, StepRecord};
use crate::ui::format::{clock, loss, magnitude, percent, rate, scale, share, short, steps};
use crate::untrusted::sanitize_line;
use serde_json::Value;
use std::io::{self, Write};

/// The longest time without a line for a step, in seconds: slow models shall not be silent for minutes.
const LONGEST_SILENCE: f64 = 10.0;

#[derive(Debug)]
pub(crate) struct PlainPrinter<W> {
    out: W,
    log_every: u64,
    run: RunState,
    /// Sum and number of the finite losses since the last step line.
    losses: (f64, u32),
    /// When the last step line was due, in seconds of the run.
    due_at: f64,
    phases: PhaseLines,
}

impl<W: Write> PlainPrinter<W> {
    /// Writes to `out` a line for every `log_every`-th step, and for others where steps are slow.
    pub(crate) fn new(out: W, log_every: u64) -> Self {
        Self::after(RunState::default(), out, log_every)
    }

    /// Like [`PlainPrinter::new`], but prints only the events after `run`.
    pub(super) fn after(run: RunState, out: W, log_every: u64) -> Self {
        let losses = (0.0, 0);
        let phases = PhaseLines::default();
        Self { out, log_every: log_every.max(1), run, losses, due_at: 0.0, phases }
    }

    fn line(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.out, "{}{text}", self.phases.end())?;
        self.out.flush()
    }

    /// The line for the newest step, if one is due.
    fn due_line(&mut self) -> Option<String> {
        let step = &self.run.step;
        let s = self.run.last_s;
        if step.loss.is_finite() {
            self.losses = (self.losses.0 + f64::from(step.loss), self.losses.1 + 1);
        }
        // The first and the last step always have a line: the run's beginning and its result.
        let edge = step.step == 1 || step.step == self.run.total_steps();
        let due = step.step.is_multiple_of(self.log_every) || s - self.due_at >= LONGEST_SILENCE;
        let text = (due || edge).then(|| self.step_line());
        // The line for step 1 is extra; the mean of the next line includes step 1 too.
        if due {
            self.losses = (0.0, 0);
            self.due_at = s;
        }
        text
    }

    fn step_line(&self) -> String {
        let step = &self.run.step;
        let total = self.run.total_steps();
        let (sum, count) = self.losses;
        let StepRecord { step: at, epoch, loss_scale, grads, updates, skipped, tokens_per_s, .. } = step;
        // The state moves a step's exponents there.
        let counted = self.run.grads.as_ref().filter(|(counted, ..)| counted == at);
        let p1 = counted.and_then(|(_, scale, stats)| stats.log2_p1(*scale));
        let mut line = format!(
            "step={} epoch={epoch:.2} loss={} loss_avg={} scale={} grad_min={} grad_max={} \
             grad_p1={} zero={} subnormal={} norm_scaled={} norm={} lr={} updates={updates} skipped={skipped} success={} tokens_per_s={tokens_per_s:.0} step_ms={}",
            steps(*at, total),
            loss(f64::from(step.loss)),
            loss(if count == 0 { f64::NAN } else { sum / f64::from(count) }),
            f64::from(*loss_scale),
            magnitude(grads.min_abs),
            magnitude(Some(grads.max_abs)),
            magnitude(p1.map(|p1| p1.exp2() as f32)),
            percent(grads.zero, grads.count),
            percent(grads.subnormal, grads.count),
            short(grads.norm),
            short(step.grad_norm),
            rate(step.lr),
            percent(*updates, *at),
            short(step.time.step_ms),
        );
        if let Some(counts) = &step.lost_updates {
            let [reach, ulps] = [counts.reach(), counts.mean_ulps()].map(|figure| figure.unwrap_or(f64::NAN));
            line.extend([format!(" reach={} ulps={ulps:.4}", share(reach))]);
        }
        line.extend(step.objective.as_ref().map(objective));
        line.extend(step.rss_bytes.map(|rss| format!(" rss_mb={}", rss / 1_000_000)));
        line.extend(self.run.remaining().map(|left| format!(" eta={}", clock(left))));
        line
    }
}

impl<W: Write> Renderer for PlainPrinter<W> {
    fn show(&mut self, message: ScreenMessage) -> io::Result<()> {
        let ScreenMessage::Record(record) = message else { return Ok(()) };
        let words = announcement(&record.event);
        let (started, stepped) = (matches!(record.event, Event::Started(_)), matches!(record.event, Event::Step(_)));
        self.run.apply(*record);
        let text = match &self.run.started {
            Some(run) if started => {
                self.due_at = self.run.last_s;
                Some(environment(run))
            }
            _ if stepped => self.due_line(),
            _ => words,
        };
        text.map_or(Ok(()), |text| self.line(&text))
    }

    fn idle(&mut self, source: &mut dyn MessageSource, quiet: bool, more: bool) -> io::Result<Option<Exit>> {
        if let Some(text) = quiet.then(|| source.phase(&mut self.phases)).flatten() {
            write!(self.out, "{text}")?;
            self.out.flush()?;
        }
        if more || !source.is_over() {
            return Ok(None);
        }
        self.out.write_all(self.phases.end().as_bytes())?;
        self.out.flush()?;
        Ok(Some(Exit::Ended))
    }
}

/// A run's environment, one fact per line.
fn environment(started: &Started) -> String {
    let scaler = &started.scaler;
    // The first gradients may lower it before the first step.
    let is_measured = started.config.pointer("/scaler/measure_first").and_then(Value::as_bool) == Some(true);
    let at_most = if is_measured { "at most " } else { "" };
    let scaling = if scaler.enabled {
        let growth = match scaler.mode {
            ScalerMode::Dynamic => format!(
                "dynamic, from {at_most}{}, ×{} after {} clean steps",
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
    let [threads, layers, heads] = [(started.cpu.threads, "thread"), (shape.n_layer, "layer"), (shape.n_head, "head")]
        .map(|(count, what)| counted(count, what));
    let steps = counted(started.total_steps, "step");
    let mut facts = vec![
        ("program", started.program.clone()),
        ("run", started.run.clone()),
        ("host", format!("{}, {threads}, {}", started.cpu.name, started.cpu.isa)),
        ("device", started.device.clone()),
        (
            "model",
            format!(
                "{}: {layers}, {heads}, width {}, context {}, vocabulary {}, {} parameters",
                started.model, shape.n_embd, shape.n_positions, shape.vocab_size, started.parameters
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
                "{steps} of up to {} tokens, {} tokens per epoch, {:.2} epochs",
                started.tokens_per_step, started.tokens_per_epoch, started.epochs
            ),
        ),
        ("seed", started.seed.to_string()),
    ];
    if let Some(step) = started.resumed_from {
        facts.push(("resumed from", format!("step {step}")));
    }
    let lines: Vec<_> = facts.iter().map(|(key, value)| format!("{key:<13}{}", sanitize_line(value))).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{
        DtypeChange, FirstNonFinite, GradMax, GradStats, Overflow, Pass, Record, ScaleCause, ScaleUpdate,
        ScalerSettings, StepStatus, TensorRecord, VERSION,
    };

    fn message(s: f64, event: Event) -> ScreenMessage {
        ScreenMessage::Record(Box::new(Record { v: VERSION, t: 0, s, event }))
    }

    fn lines(log_every: u64, events: Vec<Event>) -> Vec<String> {
        let mut plain = PlainPrinter::new(Vec::new(), log_every);
        for (at, event) in events.into_iter().enumerate() {
            plain.show(message(at as f64, event)).unwrap();
        }
        String::from_utf8(plain.out).unwrap().lines().map(str::to_owned).collect()
    }

    fn step(step: u64) -> Event {
        let min_abs = Some(6e-8);
        let exponents = vec![(-24, 40), (-3, 960)];
        let (count, zero, subnormal) = (1250, 250, 40);
        let grads = GradStats {
            count,
            min_abs,
            max_abs: 31.0,
            zero,
            subnormal,
            norm: 54_395.0,
            exponents,
            ..Default::default()
        };
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
        let mut run = RunState::default();
        let started = Started { total_steps: 10, ..Started::default() };
        run.apply(Record { v: VERSION, t: 0, s: 0.0, event: Event::Started(Box::new(started)) });
        let mut plain = PlainPrinter::after(run, Vec::new(), 1);
        plain.show(message(0.0, step(5))).unwrap();
        assert!(plain.out.starts_with(b"step=5/10 "));
    }

    #[test]
    fn a_step_line_comes_every_log_every_steps_with_every_figure() {
        let found = lines(4, (1..=9).map(step).collect());
        assert_eq!(found.len(), 3);
        assert!(found[0].starts_with("step=1 ") && found[0].contains(" loss_avg=1.000 "), "{}", found[0]);
        assert_eq!(
            found[1],
            "step=4 epoch=0.00 loss=4.000 loss_avg=2.500 scale=65536 grad_min=6.0e-8 grad_max=3.1e1 grad_p1=1.1e-12 \
             zero=20.0% subnormal=3.2% norm_scaled=5.4e4 norm=0.830 lr=4.1e-5 updates=3 skipped=1 success=75.0% tokens_per_s=41200 step_ms=0"
        );
        assert!(found[2].contains("step=8 ") && found[2].contains("loss_avg=6.500"), "{}", found[2]);
    }

    /// There is one record per second.
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
        let found = lines(128, vec![Event::GradMax(GradMax { step: 20, loss_scale: 1_073_741_824.0, layers })]);
        assert_eq!(found, ["maxima step=20 scale=1073741824 h.2=3.1e1 h.10=2.0e0 head=5.0e-4"]);
    }

    #[test]
    fn an_overflow_is_printed_at_once_with_its_tensors() {
        let tensor = |name: &str| {
            let stats = GradStats { inf: 3, nan: 1, ..Default::default() };
            TensorRecord { name: name.into(), stats, ..Default::default() }
        };
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
            "overflow step=3 loss=4.500 scale=2^16->2^15 largest_finite=65504 tensors=a:inf=3,nan=1 b:inf=3,nan=1 \
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
                "largest_finite=0 origin=backward:h.3.mlp.c_fc:input_gradient,inf=2,nan=1,largest_finite=65504,\
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
            let layer = "h.1".into();
            let restored = to == "f16";
            Event::DtypeChange(DtypeChange { step: 9, layer, from, to: to.into(), overflows, variance, restored })
        };
        let events = [retyped("f32", Some(3), None), retyped("f16", None, None), retyped("fp8", None, Some(2e-9))];
        assert_eq!(
            lines(128, events.into()),
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
        let scale = |measured: bool| {
            let config = serde_json::json!({"scaler": {"measure_first": measured}});
            let scaler = ScalerSettings { enabled: true, init_scale: 65536.0, ..ScalerSettings::default() };
            let started = Started { scaler, config, ..Started::default() };
            let found = lines(1, vec![Event::Started(Box::new(started))]);
            found.into_iter().find(|line| line.starts_with("loss scale")).unwrap()
        };
        assert!(scale(false).contains("dynamic, from 2^16,") && scale(true).contains("dynamic, from at most 2^16,"));
    }
}
