//! A synthetic run: realistic records generated from a seed, for the dashboard's demonstration and tests.

use super::telemetry::{
    CheckpointSaved, Cpu, Event, FinishReason, Finished, FlushedTensor, Fp32Probe, GradStats, ModelShape, Overflow,
    Record, SampleText, ScaleCause, ScaleUpdate, ScalerSettings, Started, StepRecord, StepStatus, StepTime,
    TensorRecord, VERSION, Validation,
};

/// Settings of the synthetic run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Invented {
    /// Total number of steps.
    pub total_steps: u64,
    /// log2 of the first loss scale.
    pub init_scale: i32,
    /// Clean steps until the scale grows.
    pub growth_interval: u32,
    /// From this step on the loss is NaN.
    pub nan_from: u64,
    /// Steps between two tables of tensors.
    pub tables_every: u64,
}

impl Default for Invented {
    fn default() -> Self {
        Self { total_steps: 2000, init_scale: 16, growth_interval: 300, nan_from: u64::MAX, tables_every: 50 }
    }
}

/// An iterator over the records of a synthetic run.
#[derive(Default)]
pub(super) struct InventedRun {
    settings: Invented,
    step: u64,
    updates: u64,
    scale: i32,
    tracker: u32,
    seed: u64,
    pending: std::collections::VecDeque<Event>,
    done: bool,
}

/// Exponent of the usual magnitude of each tensor's unscaled gradient.
const TENSORS: [(&str, u64, i32); 16] = [
    ("h.0.attn.c_attn.weight", 196_608, -21),
    ("h.0.mlp.c_fc.weight", 262_144, -20),
    ("h.1.attn.c_attn.weight", 196_608, -20),
    ("h.1.mlp.c_fc.weight", 262_144, -20),
    ("h.2.attn.c_attn.weight", 196_608, -19),
    ("h.2.mlp.c_fc.weight", 262_144, -19),
    ("h.3.attn.c_attn.weight", 196_608, -18),
    ("h.3.mlp.c_fc.weight", 262_144, -18),
    ("h.4.attn.c_proj.weight", 65_536, -17),
    ("h.4.mlp.c_fc.weight", 262_144, -17),
    ("h.5.attn.c_proj.weight", 65_536, -15),
    ("h.5.mlp.c_proj.weight", 262_144, -14),
    ("ln_f.bias", 256, -11),
    ("ln_f.weight", 256, -10),
    ("wpe.weight", 32_768, -21),
    ("wte.weight", 1_048_576, -22),
];

impl InventedRun {
    /// A run with these settings.
    pub(super) fn new(settings: Invented) -> Self {
        let pending = [Event::Started(Box::new(started(settings)))].into();
        Self { settings, scale: settings.init_scale, seed: 42, pending, ..Self::default() }
    }

    /// The end of the run as it is now.
    pub(super) fn finished(&self, reason: FinishReason) -> Event {
        Event::Finished(Finished {
            reason,
            step: self.step,
            updates: self.updates,
            skipped: self.step - self.updates,
            tokens: self.step * 1024,
            loss: 3.214,
            val_loss: Some(3.241),
            loss_scale: 2f32.powi(self.scale),
            seconds: self.step as f64 / 10.0,
            peak_rss_bytes: Some(1_500_000_000),
            checkpoint: Some(format!("checkpoints/0007/step-{:06}", self.step)),
        })
    }

    /// The next pseudorandom number from 0 to 1.
    fn random(&mut self) -> f64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) as f64 / f64::from(1u32 << 31)
    }

    fn invent_step(&mut self) {
        self.step += 1;
        let at = self.step;
        // Most steps have their largest gradient seven binades above the typical one; one in a few hundred has it
        // higher.
        let peak = if self.random() < 0.004 { 11 } else { 8 };
        let tensors: Vec<_> =
            TENSORS.iter().map(|(name, count, exponent)| tensor(name, *count, exponent + self.scale, peak)).collect();
        let grads = total(&tensors);
        let overflowed: Vec<_> = tensors.iter().filter(|tensor| tensor.stats.inf > 0).cloned().collect();
        let outcome = if overflowed.is_empty() { StepStatus::Applied } else { StepStatus::Skipped };
        let change = self.move_scale(outcome);
        self.updates += u64::from(outcome == StepStatus::Applied);
        let progress = at as f64 / self.settings.total_steps as f64;
        let loss = 3.1 + 1.3 * (-5.0 * progress).exp() + 0.25 * (self.random() - 0.5);
        let loss = if at >= self.settings.nan_from { f32::NAN } else { loss as f32 };
        let norm = grads.norm;
        let looked = at.is_multiple_of(self.settings.tables_every) || outcome == StepStatus::Skipped;
        self.pending.push_back(Event::Step(Box::new(StepRecord {
            step: at,
            loss,
            loss_scale: change.from,
            outcome,
            grad_norm: norm / f64::from(change.from),
            tokens: at * 1024,
            tokens_per_s: 10_240.0,
            updates: self.updates,
            skipped: at - self.updates,
            epoch: 3.0 * progress,
            lr: 5e-5 * (1.0 - progress),
            clip_coef: 1.0,
            growth_tracker: self.tracker,
            scale: change,
            time: StepTime {
                step_ms: 100.0,
                forward_ms: 30.0,
                backward_ms: 55.0,
                grad_stats_ms: 3.0,
                optimizer_ms: 12.0,
            },
            rss_bytes: Some(1_300_000_000),
            peak_rss_bytes: Some(1_500_000_000),
            cpu_seconds: Some(at as f64 * 0.19),
            grads,
            tensors: if looked { tensors } else { Vec::new() },
            ..StepRecord::default()
        })));
        if outcome == StepStatus::Skipped {
            let scale = change;
            let max_abs = 65_504.0;
            let tensors = overflowed;
            self.pending.push_back(Event::Overflow(Overflow {
                step: at,
                scale,
                loss,
                max_abs,
                tensors,
                ..Overflow::default()
            }));
        }
        self.invent_others(at, progress);
    }

    fn invent_others(&mut self, at: u64, progress: f64) {
        if at.is_multiple_of(200) {
            let loss = 3.15 + 1.25 * (-5.0 * progress).exp();
            let perplexity = loss.exp();
            let tokens = 8192;
            self.pending.push_back(Event::Eval(Validation { step: at, loss, perplexity, tokens, objective: None }));
        }
        if at.is_multiple_of(500) {
            let path = format!("checkpoints/0007/step-{at:06}");
            self.pending.push_back(Event::CheckpointSaved(CheckpointSaved {
                step: at,
                path,
                bytes: 982_000_000,
                seconds: 1.25,
                ..CheckpointSaved::default()
            }));
            let text = " and the rest is\nsilence, or so they say in the town by the sea".into();
            self.pending.push_back(Event::Sample(SampleText { step: at, prompt: "To be,".into(), text }));
        }
        if at.is_multiple_of(1000) {
            self.pending.push_back(Event::Fp32Probe(Box::new(self.probe(at))));
        }
        if at == self.settings.total_steps {
            self.pending.push_back(self.finished(FinishReason::Done));
        }
    }

    fn move_scale(&mut self, outcome: StepStatus) -> ScaleUpdate {
        let from = 2f32.powi(self.scale);
        self.tracker += 1;
        let cause = if outcome == StepStatus::Skipped {
            self.scale -= 1;
            ScaleCause::BackedOff
        } else if self.tracker > self.settings.growth_interval {
            self.scale += 1;
            ScaleCause::Grew
        } else {
            return ScaleUpdate { cause: ScaleCause::Held, from, to: from };
        };
        self.tracker = 0;
        ScaleUpdate { cause, from, to: 2f32.powi(self.scale) }
    }

    /// The same gradients in FP32, unscaled, including what FP16 flushed.
    fn probe(&self, step: u64) -> Fp32Probe {
        let mut grads = GradStats::default();
        let mut tensors = Vec::new();
        for (name, count, exponent) in TENSORS {
            let counts = spread(count, exponent, 8);
            let flushed = counts.iter().filter(|(e, _)| e + self.scale < -25).map(|(_, count)| count).sum();
            tensors.push(FlushedTensor { name: name.into(), count, nonzero: count, flushed });
            add(&mut grads, &TensorRecord { stats: stats(count, &counts, -149, 127), ..TensorRecord::default() });
        }
        Fp32Probe { step, loss_scale: 2f32.powi(self.scale), grads, tensors, ..Fp32Probe::default() }
    }
}

impl Iterator for InventedRun {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        if self.pending.is_empty() && !self.done {
            self.invent_step();
        }
        let event = self.pending.pop_front()?;
        self.done |= matches!(event, Event::Finished(_));
        let s = self.step as f64 / 10.0;
        Some(Record { v: VERSION, t: 1_750_000_000_000 + self.step * 100, s, event })
    }
}

fn started(settings: Invented) -> Started {
    Started {
        program: "finetune 0.1.0".into(),
        run: "0007".into(),
        cpu: Cpu { name: "Invented CPU".into(), threads: 2, isa: "AVX-512".into() },
        device: "cpu".into(),
        os: "linux x86_64".into(),
        model: "distilgpt2".into(),
        shape: ModelShape { n_layer: 6, n_head: 12, n_embd: 768, n_positions: 1024, vocab_size: 50_257 },
        parameters: 81_912_576,
        policy: "p=f32,c=f16,g=f16,r=f32".into(),
        scaler: ScalerSettings {
            enabled: true,
            init_scale: 2f32.powi(settings.init_scale),
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: settings.growth_interval,
            min_scale: 1.0,
            ..ScalerSettings::default()
        },
        optimizer: "AdamW".into(),
        max_grad_norm: Some(1.0),
        schedule: "linear".into(),
        data: "invented".into(),
        tokens_per_step: 1024,
        tokens_per_epoch: settings.total_steps * 1024 / 3,
        epochs: 3.0,
        total_steps: settings.total_steps,
        seed: 42,
        ..Started::default()
    }
}

/// `count` values around 2^exponent: a bell curve over the exponents that ends `peak` binades above.
fn spread(count: u64, exponent: i32, peak: i32) -> Vec<(i32, u64)> {
    let weight = |distance: i32| (-0.5 * (f64::from(distance) / 4.5).powi(2)).exp();
    let all: f64 = (-18..=peak).map(weight).sum();
    let share = |distance: i32| ((weight(distance) / all * count as f64) as u64).max(u64::from(distance == peak));
    (-18..=peak).map(|distance| (exponent + distance, share(distance))).filter(|(_, count)| *count > 0).collect()
}

/// The statistics of `counts` in a format from 2^least to 2^top.
fn stats(count: u64, counts: &[(i32, u64)], least: i32, top: i32) -> GradStats {
    let kept: Vec<_> = counts.iter().filter(|(e, _)| (least..=top).contains(e)).copied().collect();
    let sum = |keep: &dyn Fn(i32) -> bool| counts.iter().filter(|(e, _)| keep(*e)).map(|(_, count)| count).sum();
    let energy: f64 = kept.iter().map(|(e, count)| *count as f64 * 4f64.powi(*e)).sum();
    GradStats {
        count,
        min_abs: kept.first().map(|(e, _)| 2f32.powi(*e)),
        max_abs: kept.last().map_or(0.0, |(e, _)| 1.7 * 2f32.powi(*e)),
        zero: sum(&|e| e < least),
        subnormal: sum(&|e| (least..-14).contains(&e)),
        inf: sum(&|e| e > top),
        nan: 0,
        norm: energy.sqrt(),
        exponents: kept.iter().map(|(e, count)| (*e as i16, *count)).collect(),
    }
}

fn tensor(name: &str, count: u64, exponent: i32, peak: i32) -> TensorRecord {
    let mut stats = stats(count, &spread(count, exponent, peak), -24, 15);
    if name == "wte.weight" {
        // True zeros: the rows of tokens that are not in the batch.
        stats.count *= 4;
        stats.zero += count * 3;
    }
    TensorRecord { name: name.into(), stats, lost_updates: None }
}

fn total(tensors: &[TensorRecord]) -> GradStats {
    let mut all = GradStats::default();
    for tensor in tensors {
        add(&mut all, tensor);
    }
    all
}

fn add(all: &mut GradStats, tensor: &TensorRecord) {
    let stats = &tensor.stats;
    all.count += stats.count;
    all.min_abs = [all.min_abs, stats.min_abs].into_iter().flatten().reduce(f32::min);
    all.max_abs = all.max_abs.max(stats.max_abs);
    all.zero += stats.zero;
    all.subnormal += stats.subnormal;
    all.inf += stats.inf;
    all.norm = all.norm.hypot(stats.norm);
    for (exponent, count) in &stats.exponents {
        match all.exponents.binary_search_by_key(exponent, |(e, _)| *e) {
            Ok(at) => all.exponents[at].1 += count,
            Err(at) => all.exponents.insert(at, (*exponent, *count)),
        }
    }
}
