//! What is known of a run: everything the panels show, gathered record by record, in bounded memory.

use super::format::{loss, magnitude, scale};
use super::pace::Pace;
use super::plain::announcement;
use super::theme::Role;
use crate::precision::{ExponentHistogram, FloatFormat, PrecisionPolicy, Unit};
use crate::telemetry::{
    Event, Finished, GradStats, Origin, Outcome, Overflow, Probe, Record, Saved, ScaleCause, ScaleMove, Series,
    StairCase, Started, StepRecord, TensorRecord,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Buckets of a curve over the whole run; a screen has fewer columns of dots.
const CURVE: usize = 2048;
/// Buckets of all tensors' histories together.
const HISTORIES: usize = 1 << 16;
/// Overflows, events and samples that are kept.
const OVERFLOWS: usize = 1000;
const EVENTS: usize = 4000;
const SAMPLES: usize = 200;
/// Tensors that are kept of an overflow.
const NAMED: usize = 16;
/// A batch's share in the smoothed loss.
const SMOOTHING: f64 = 0.02;

/// A run as it is known so far.
#[derive(Debug, Clone)]
pub(super) struct RunData {
    pub(super) started: Option<Started>,
    pub(super) phase: Phase,
    /// The newest step, without its tables.
    pub(super) step: StepRecord,
    /// The newest look at the gradients that counted exponents, with its step and loss scale.
    pub(super) grads: Option<(u64, f32, GradStats)>,
    pub(super) loss: Series,
    pub(super) smoothed: Series,
    pub(super) validation: Series,
    pub(super) last_validation: Option<f64>,
    /// The lowest validation loss and its step.
    pub(super) best_validation: Option<(f64, u64)>,
    pub(super) scale: StairCase,
    /// log2 of the scale at each skipped step.
    pub(super) skips: Series,
    /// Newest last.
    pub(super) overflows: VecDeque<OverflowRow>,
    /// The layers that compute in another type than the policy's, each with its type.
    pub(super) fallback: BTreeMap<String, String>,
    pub(super) tensors: Tensors,
    pub(super) probe: Option<Probe>,
    /// Newest last.
    pub(super) events: VecDeque<EventRow>,
    /// Newest last.
    pub(super) samples: VecDeque<SampleRow>,
    /// The newest checkpoint and when it was written, in wall-clock milliseconds.
    pub(super) saved: Option<(Saved, u64)>,
    pub(super) pace: Pace,
    pub(super) peak_rss: u64,
    /// Processor time over wall time, percent of one thread.
    pub(super) cpu_percent: Option<f64>,
    cpu_before: Option<(f64, f64)>,
    average: f64,
    average_weight: f64,
    /// Wall clock and run-relative seconds of the newest record.
    pub(super) last_t: u64,
    pub(super) last_s: f64,
}

/// What the run is doing.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) enum Phase {
    /// Nothing has been heard yet.
    #[default]
    Waiting,
    Running,
    Paused,
    Finished(Box<Finished>),
    /// It ended without a word: killed, or crashed.
    Lost,
}

/// A skipped step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OverflowRow {
    pub(super) step: u64,
    pub(super) scale: ScaleMove,
    /// The tensors that overflowed, by name: those first of which the largest share did.
    pub(super) tensors: Vec<String>,
    /// How many more there are.
    pub(super) more: usize,
    /// Where it began, if it was traced.
    pub(super) origin: Option<Origin>,
}

/// Something that happened, in words.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EventRow {
    /// Run-relative seconds.
    pub(super) s: f64,
    pub(super) step: u64,
    pub(super) glyph: char,
    pub(super) role: Role,
    pub(super) text: String,
}

/// A generated text with the smoothed loss at that moment.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampleRow {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) prompt: String,
    pub(super) text: String,
}

impl Default for RunData {
    fn default() -> Self {
        Self {
            started: None,
            phase: Phase::Waiting,
            step: StepRecord::default(),
            grads: None,
            loss: Series::new(CURVE),
            smoothed: Series::new(CURVE),
            validation: Series::new(CURVE),
            last_validation: None,
            best_validation: None,
            scale: StairCase::new(CURVE),
            skips: Series::new(CURVE),
            overflows: VecDeque::new(),
            fallback: BTreeMap::new(),
            tensors: Tensors::default(),
            probe: None,
            events: VecDeque::new(),
            samples: VecDeque::new(),
            saved: None,
            pace: Pace::default(),
            peak_rss: 0,
            cpu_percent: None,
            cpu_before: None,
            average: 0.0,
            average_weight: 0.0,
            last_t: 0,
            last_s: 0.0,
        }
    }
}

impl RunData {
    /// Takes in a record.
    pub(super) fn apply(&mut self, record: Record) {
        let Record { t, s, event, .. } = record;
        if let Event::Started(started) = &event {
            self.begin(started.resumed_from);
        }
        (self.last_t, self.last_s) = (t, s);
        self.note(&event, s);
        match event {
            Event::Started(started) => {
                self.phase = Phase::Running;
                self.fallback.clone_from(&started.fallback);
                self.started = Some(*started);
            }
            Event::Step(step) => self.step(*step, s),
            Event::Overflow(overflow) => self.overflow(overflow),
            Event::Retyped(retyped) if retyped.back => drop(self.fallback.remove(&retyped.layer)),
            Event::Retyped(retyped) => drop(self.fallback.insert(retyped.layer, retyped.to)),
            Event::Eval(eval) => {
                self.validation.push(eval.step, s, eval.loss);
                self.last_validation = Some(eval.loss);
                if self.best_validation.is_none_or(|(best, _)| eval.loss < best) {
                    self.best_validation = Some((eval.loss, eval.step));
                }
            }
            Event::Sample(sample) => {
                let loss = self.smoothed_loss();
                let row = SampleRow { step: sample.step, loss, prompt: sample.prompt, text: sample.text };
                keep(&mut self.samples, row, SAMPLES);
            }
            Event::Probe(probe) => {
                self.tensors.flushed(&probe);
                self.probe = Some(*probe);
            }
            Event::Saved(saved) if saved.weights_only => {}
            Event::Saved(saved) => self.saved = Some((saved, t)),
            Event::Paused { .. } => {
                self.phase = Phase::Paused;
                self.pace.interrupt();
            }
            Event::Resumed { .. } => self.phase = Phase::Running,
            Event::Warning(_) | Event::Diverged(_) | Event::Variances(_) => {}
            Event::Finished(finished) => self.phase = Phase::Finished(Box::new(finished)),
        }
    }

    /// A new run forgets the one before it in the log; a resumed one forgets what it will repeat.
    fn begin(&mut self, resumed_from: Option<u64>) {
        let Some(step) = resumed_from else {
            *self = Self::default();
            return;
        };
        for series in [&mut self.loss, &mut self.smoothed, &mut self.validation, &mut self.skips] {
            series.cut(step);
        }
        self.scale.cut(step);
        self.tensors.cut(step);
        self.overflows.retain(|row| row.step <= step);
        self.samples.retain(|row| row.step <= step);
        self.best_validation = self.best_validation.filter(|(_, at)| *at <= step);
        self.pace.interrupt();
        self.cpu_before = None;
    }

    fn note(&mut self, event: &Event, s: f64) {
        let (glyph, role) = match event {
            Event::Step(step) => return self.note_move(step, s),
            Event::Variances(_) => return,
            Event::Started(_) | Event::Resumed { .. } => ('▶', Role::Good),
            Event::Overflow(_) | Event::Diverged(_) => ('✕', Role::Overflow),
            Event::Eval(_) => ('◆', Role::Validation),
            Event::Sample(_) => ('∙', Role::Text),
            Event::Probe(_) => ('▾', Role::Subnormal),
            Event::Saved(_) => ('●', Role::Good),
            Event::Paused { .. } => ('‖', Role::Subnormal),
            Event::Warning(_) | Event::Retyped(_) => ('▴', Role::Subnormal),
            Event::Finished(_) => ('■', Role::Good),
        };
        let text = match event {
            Event::Started(started) => match started.resumed_from {
                Some(step) => format!("resumed from step {step}: {}", started.program),
                None => format!("started {}: {} on {}", started.model, started.program, started.device),
            },
            Event::Overflow(overflow) => overflow_text(overflow),
            other => announcement(other).unwrap_or_default(),
        };
        let step = event.step().unwrap_or(self.step.step);
        // The row says it already.
        let text = text.replacen(&format!(" step={step}"), "", 1);
        keep(&mut self.events, EventRow { s, step, glyph, role, text }, EVENTS);
    }

    fn note_move(&mut self, step: &StepRecord, s: f64) {
        let glyph = match step.scale.cause {
            ScaleCause::Grew => '▴',
            ScaleCause::Lowered => '▾',
            _ => return,
        };
        let text = format!("scale {}→{}", scale(step.scale.from), scale(step.scale.to));
        keep(&mut self.events, EventRow { s, step: step.step, glyph, role: Role::Good, text }, EVENTS);
    }

    fn step(&mut self, mut step: StepRecord, s: f64) {
        let at = step.step;
        if matches!(self.phase, Phase::Waiting | Phase::Lost) {
            self.phase = Phase::Running;
        }
        self.loss.push(at, s, f64::from(step.loss));
        if step.loss.is_finite() {
            self.average += SMOOTHING * (f64::from(step.loss) - self.average);
            self.average_weight += SMOOTHING * (1.0 - self.average_weight);
        }
        if let Some(smoothed) = self.smoothed_loss() {
            self.smoothed.push(at, s, smoothed);
        }
        self.scale.push(at, s, f64::from(step.loss_scale));
        if step.outcome == Outcome::Skipped {
            self.skips.push(at, s, f64::from(step.loss_scale).log2());
        }
        self.pace.step(at, s);
        self.peak_rss = self.peak_rss.max(step.rss_bytes.unwrap_or(0));
        self.measure_cpu(step.cpu_seconds, s);
        self.tensors.look(at, s, step.loss_scale, std::mem::take(&mut step.tensors));
        let exponents = std::mem::take(&mut step.grads.exponents);
        if !exponents.is_empty() {
            self.grads = Some((at, step.loss_scale, GradStats { exponents, ..step.grads.clone() }));
        }
        self.step = step;
    }

    /// Over stretches of at least a second, because the kernel counts in hundredths.
    fn measure_cpu(&mut self, cpu_seconds: Option<f64>, s: f64) {
        let Some(cpu) = cpu_seconds else { return };
        match self.cpu_before {
            Some((then, before)) if s - then < 1.0 && s >= then && cpu >= before => {}
            Some((then, before)) if s > then && cpu >= before => {
                self.cpu_percent = Some((cpu - before) / (s - then) * 100.0);
                self.cpu_before = Some((s, cpu));
            }
            _ => self.cpu_before = Some((s, cpu)),
        }
    }

    fn overflow(&mut self, mut overflow: Overflow) {
        worst_first(&mut overflow.tensors);
        self.tensors.overflowed(&overflow);
        let more = overflow.tensors.len().saturating_sub(NAMED);
        let tensors = overflow.tensors.into_iter().take(NAMED).map(|tensor| tensor.name).collect();
        let Overflow { step, scale, origin, .. } = overflow;
        keep(&mut self.overflows, OverflowRow { step, scale, tensors, more, origin }, OVERFLOWS);
    }

    /// The average of the last batches' losses; `None` before the first.
    pub(super) fn smoothed_loss(&self) -> Option<f64> {
        (self.average_weight > 0.0).then(|| self.average / self.average_weight)
    }

    /// Steps the run will attempt; 0 if unknown.
    pub(super) fn total_steps(&self) -> u64 {
        self.started.as_ref().map_or(0, |started| started.total_steps)
    }

    /// The format gradients are stored in: FP16 unless the run says otherwise.
    pub(super) fn grad_format(&self) -> FloatFormat {
        let policy = self.started.as_ref().and_then(|started| started.policy.parse::<PrecisionPolicy>().ok());
        policy.map_or(FloatFormat::FP16, |policy| policy.grads.format())
    }

    /// Whether losses are scaled.
    pub(super) fn scales_losses(&self) -> bool {
        self.started.as_ref().is_none_or(|started| started.scaler.enabled)
    }

    /// The probe's FP32 gradients by exponent, unscaled.
    pub(super) fn probe_histogram(&self) -> Option<ExponentHistogram> {
        self.probe.as_ref().map(|probe| histogram(&probe.grads))
    }

    /// The layers that compute in another type than the policy's, in words: `f32 h.1, h.3`. Empty if there are none.
    pub(super) fn in_fallback(&self) -> String {
        let mut layers: Vec<_> = self.fallback.keys().map(String::as_str).collect();
        layers.sort_by_key(|layer| layer_order(layer));
        let mut by_type: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for layer in layers {
            by_type.entry(&self.fallback[layer]).or_default().push(layer);
        }
        let of_type: Vec<_> = by_type.iter().map(|(dtype, layers)| format!("{dtype} {}", layers.join(", "))).collect();
        of_type.join(", ")
    }

    /// The model's layers, in order.
    pub(super) fn layers(&self) -> Vec<Layer> {
        let mut layers = self.tensors.layers();
        for layer in &mut layers {
            layer.in_fallback = self.fallback.contains_key(&Unit::of(&layer.name).to_string());
        }
        layers
    }

    /// Whether training has come to an end.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Finished(_) | Phase::Lost)
    }
}

/// A skipped step in words. The tensors come late, for there may be many; a filter finds them by their names.
fn overflow_text(overflow: &Overflow) -> String {
    let mut tensors = overflow.tensors.clone();
    worst_first(&mut tensors);
    let mut names: Vec<_> = tensors
        .iter()
        .take(NAMED)
        .map(|tensor| {
            let counts = [(tensor.stats.inf, "inf"), (tensor.stats.nan, "NaN")].into_iter().filter(|(n, _)| *n > 0);
            let counts: Vec<_> = counts.map(|(n, what)| format!("{n} {what}")).collect();
            format!("{} ({})", tensor.name, counts.join(", "))
        })
        .collect();
    if tensors.len() > NAMED {
        names.push(format!("+{}", tensors.len() - NAMED));
    }
    let change = match overflow.scale.cause {
        ScaleCause::AtFloor => format!("{} is the least", scale(overflow.scale.to)),
        _ => format!("{}→{}", scale(overflow.scale.from), scale(overflow.scale.to)),
    };
    let began = overflow
        .origin
        .as_ref()
        .map_or_else(String::new, |origin| format!(", {} at {} ({})", origin.pass, origin.layer, origin.tensor));
    let (names, loss) = (names.join(", "), loss(f64::from(overflow.loss)));
    format!("overflow {change}, loss {loss}{began}: {names}; largest finite {}", magnitude(Some(overflow.max_abs)))
}

/// Tensors by the share of their gradient that is not finite.
fn worst_first(tensors: &mut [TensorRecord]) {
    let share = |tensor: &TensorRecord| tensor.stats.not_finite() as f64 / tensor.stats.count.max(1) as f64;
    tensors.sort_by(|a, b| share(b).total_cmp(&share(a)));
}

/// Counts by exponent as [`ExponentHistogram`].
pub(super) fn histogram(stats: &GradStats) -> ExponentHistogram {
    let mut histogram = ExponentHistogram::from_counts(stats.exponents.iter().map(|&(e, count)| (i32::from(e), count)));
    (histogram.zero, histogram.inf, histogram.nan) = (stats.zero, stats.inf, stats.nan);
    histogram
}

fn keep<T>(rows: &mut VecDeque<T>, row: T, capacity: usize) {
    if rows.len() == capacity {
        rows.pop_front();
    }
    rows.push_back(row);
}

/// The model's tensors in parameter order, as far as records have named them.
#[derive(Debug, Clone, Default)]
pub(super) struct Tensors {
    pub(super) rows: Vec<TensorRow>,
    /// The step of the newest table, and its loss scale.
    pub(super) step: u64,
    pub(super) loss_scale: f32,
    by_name: HashMap<String, usize>,
    /// The tensors of the newest overflow.
    pub(super) last_overflow: BTreeSet<String>,
}

/// A tensor's gradient, now and before.
#[derive(Debug, Clone)]
pub(super) struct TensorRow {
    pub(super) name: String,
    pub(super) stats: GradStats,
    /// Steps in which it overflowed.
    pub(super) overflows: u64,
    /// The probe's verdict: elements flushed to zero, of those that are not zero in FP32.
    pub(super) flushed: Option<(u64, u64)>,
    /// log2 of the smallest and of the largest magnitude.
    pub(super) history: (Series, Series),
}

impl Tensors {
    fn look(&mut self, step: u64, s: f64, loss_scale: f32, records: Vec<TensorRecord>) {
        if records.is_empty() {
            return;
        }
        (self.step, self.loss_scale) = (step, loss_scale);
        let capacity = (HISTORIES / records.len()).clamp(32, 512);
        for record in records {
            let row = self.row(record.name, capacity);
            if let Some(min) = record.stats.min_abs {
                row.history.0.push(step, s, f64::from(min).log2());
                row.history.1.push(step, s, f64::from(record.stats.max_abs).log2());
            }
            row.stats = record.stats;
        }
    }

    fn overflowed(&mut self, overflow: &Overflow) {
        self.last_overflow = overflow.tensors.iter().map(|tensor| tensor.name.clone()).collect();
        for tensor in &overflow.tensors {
            self.row(tensor.name.clone(), 128).overflows += 1;
        }
    }

    fn flushed(&mut self, probe: &Probe) {
        for tensor in &probe.tensors {
            self.row(tensor.name.clone(), 128).flushed = Some((tensor.flushed, tensor.nonzero));
        }
    }

    fn row(&mut self, name: String, capacity: usize) -> &mut TensorRow {
        let next = self.rows.len();
        let at = *self.by_name.entry(name.clone()).or_insert(next);
        if at == next {
            let history = (Series::new(capacity), Series::new(capacity));
            self.rows.push(TensorRow { name, stats: GradStats::default(), overflows: 0, flushed: None, history });
        }
        &mut self.rows[at]
    }

    fn cut(&mut self, step: u64) {
        for row in &mut self.rows {
            row.history.0.cut(step);
            row.history.1.cut(step);
        }
    }

    /// The rows by layer, in order: `wte`, `wpe`, `h.0`, …, `ln_f`.
    fn layers(&self) -> Vec<Layer> {
        let mut layers: Vec<Layer> = Vec::new();
        for row in &self.rows {
            let name = layer_name(&row.name);
            let overflowed = self.last_overflow.contains(&row.name);
            if let Some(layer) = layers.iter_mut().find(|layer| layer.name == name) {
                layer.add(row, overflowed);
            } else {
                let mut layer = Layer { name: name.to_owned(), ..Layer::default() };
                layer.add(row, overflowed);
                layers.push(layer);
            }
        }
        layers.sort_by_key(|layer| layer_order(&layer.name));
        layers
    }
}

/// `h.3` of `h.3.mlp.c_fc.weight`, `wte` of `wte.weight`.
pub(super) fn layer_name(tensor: &str) -> &str {
    let parts = if tensor.starts_with("h.") { 2 } else { 1 };
    tensor.match_indices('.').nth(parts - 1).map_or(tensor, |(at, _)| &tensor[..at])
}

/// Embeddings, blocks by number, and what follows them.
fn layer_order(layer: &str) -> (u8, u32) {
    match layer.strip_prefix("h.").and_then(|number| number.parse().ok()) {
        Some(number) => (1, number),
        None if layer == "wte" => (0, 0),
        None if layer == "wpe" => (0, 1),
        None => (2, 0),
    }
}

/// The gradients of one layer, or of several neighbouring ones.
#[derive(Debug, Clone, Default)]
pub(super) struct Layer {
    pub(super) name: String,
    pub(super) min_abs: Option<f32>,
    pub(super) max_abs: f32,
    pub(super) sum_squares: f64,
    pub(super) count: u64,
    /// Whether the newest overflow was here.
    pub(super) overflowed: bool,
    /// Whether it computes in another type than the policy's.
    pub(super) in_fallback: bool,
}

impl Layer {
    fn add(&mut self, row: &TensorRow, overflowed: bool) {
        self.min_abs = smaller(self.min_abs, row.stats.min_abs);
        self.max_abs = self.max_abs.max(row.stats.max_abs);
        self.sum_squares += row.stats.norm.powi(2);
        self.count += row.stats.count;
        self.overflowed |= overflowed;
    }

    /// Takes in the layer after it.
    pub(super) fn join(&mut self, next: &Self) {
        let first = self.name.split('-').next().unwrap_or_default().to_owned();
        self.name = format!("{first}-{}", next.name.trim_start_matches("h."));
        self.min_abs = smaller(self.min_abs, next.min_abs);
        self.max_abs = self.max_abs.max(next.max_abs);
        self.sum_squares += next.sum_squares;
        self.count += next.count;
        self.overflowed |= next.overflowed;
        self.in_fallback |= next.in_fallback;
    }

    /// Root mean square of its elements.
    pub(super) fn rms(&self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.sum_squares / self.count as f64).sqrt() }
    }
}

fn smaller(one: Option<f32>, other: Option<f32>) -> Option<f32> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
