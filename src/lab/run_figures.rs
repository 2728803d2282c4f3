//! A run's figures for the lab: its events, and the weights of its newest checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::ranges::Extent;
use super::scaler::{Overflows, Visit};
use crate::engine::model::Keep;
use crate::precision::{Dtype, ExponentHistogram, FloatFormat, PrecisionPolicy, TensorStats};
use crate::store::tensor_file::TensorFile;
use crate::telemetry::{Event, Outcome, ProbeTotals, RunState, Started, StepRecord};
use crate::{Error, Result};

/// A run's figures, read from its folder or its `events.jsonl`.
#[derive(Debug)]
pub struct RunFigures {
    /// The run's folder.
    pub folder: PathBuf,
    /// The newest `Started` event.
    pub started: Started,
    /// Every valid step.
    pub steps: Vec<Step>,
    /// The gradients of every applied step as stored, unscaled.
    stored: ExponentHistogram,
    /// Totals over all FP32 probes.
    pub probed: ProbeTotals,
    /// The largest unscaled gradient that an FP32 probe found, by step.
    pub largest: BTreeMap<u64, f32>,
    /// The largest reported resident memory, in bytes.
    pub peak_rss_bytes: Option<u64>,
}

/// What the lab needs of a step: little, because a run may have millions.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Its number.
    pub number: u64,
    /// Its loss scale.
    pub loss_scale: f32,
    applied: bool,
    loss_is_finite: bool,
    lr: f64,
    /// The smallest and the largest scaled gradient.
    min_abs: Option<f32>,
    max_abs: f32,
}

impl Step {
    fn of(step: &StepRecord) -> Self {
        Self {
            number: step.step,
            loss_scale: step.loss_scale,
            applied: step.outcome == Outcome::Applied,
            loss_is_finite: step.loss.is_finite(),
            lr: step.lr,
            min_abs: step.grads.min_abs,
            max_abs: step.grads.max_abs,
        }
    }

    /// The smallest and the largest true gradient.
    fn unscaled(&self) -> Option<(f64, f64)> {
        let scale = f64::from(self.loss_scale);
        Some((f64::from(self.min_abs?) / scale, f64::from(self.max_abs) / scale))
    }
}

impl RunFigures {
    /// Reads a run. A log without steps is an error.
    pub fn read(path: &Path) -> Result<Self> {
        let (folder, log) = if path.is_dir() {
            (path.to_path_buf(), path.join("events.jsonl"))
        } else {
            (path.parent().unwrap_or(Path::new("")).to_path_buf(), path.to_path_buf())
        };
        let (mut steps, mut stored, mut largest) = (Vec::new(), ExponentHistogram::new(), BTreeMap::new());
        let (state, _) = RunState::default().read_with(&log, |record| match &record.event {
            Event::Started(started) if started.resumed_from.is_none() => {
                // Another run in the same log.
                (steps, stored, largest) = Default::default();
            }
            Event::Step(step) => {
                steps.push(Step::of(step));
                if step.outcome == Outcome::Applied {
                    stored.merge(&histogram(&step.grads.exponents, (-step.loss_scale.log2()).round() as i32));
                }
            }
            Event::Probe(probe) => drop(largest.insert(probe.step, probe.grads.max_abs)),
            _ => {}
        })?;
        let (probed, peak_rss_bytes) = (state.probed().clone(), state.figures().peak_rss);
        let started = state.started.unwrap_or_default();
        Ok(Self { folder, started, steps, stored, probed, largest, peak_rss_bytes })
    }

    /// The run's precision policy; FP16 if it is not known.
    pub fn policy(&self) -> PrecisionPolicy {
        self.started.precision()
    }

    /// The storage type of gradients.
    fn gradient_format(&self) -> FloatFormat {
        self.policy().grads.format()
    }

    /// An integer in the run's configuration, by its path.
    pub fn setting(&self, path: &str) -> Option<u64> {
        self.started.config.pointer(path)?.as_u64()
    }

    /// What the run's forward passes keep for the backward pass.
    pub fn keep(&self) -> Keep {
        let keep = self.started.config.pointer("/train/recompute").cloned();
        keep.and_then(|keep| serde_json::from_value(keep).ok()).unwrap_or(Keep::All)
    }

    /// The tokenizer of its newest checkpoint.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let latest = std::fs::read_to_string(self.folder.join("latest")).ok()?;
        Some(self.folder.join(latest.trim()).join("tokenizer.json")).filter(|file| file.is_file())
    }

    /// The run's steps, for the scaler's replay. Where an FP32 probe has measured a step's largest gradient, that decides at
    /// which scales it overflows; an overflow without one tells only that its scale was too large.
    pub fn overflows(&self) -> Overflows {
        // A probe measures the first micro-batch only.
        let probed = if self.setting("/train/grad_accum") == Some(1) { &self.largest } else { &BTreeMap::new() };
        // Even with FP32 weight gradients, activation gradients pass through FP16, whose maximum decides.
        let format = if self.policy().compute == Dtype::F16 { FloatFormat::FP16 } else { self.gradient_format() };
        let visit = |step: &Step| {
            if let Some(largest) = probed.get(&step.number).filter(|largest| step.loss_is_finite && **largest > 0.0) {
                return Visit::Limit((format.max() / f64::from(*largest)) as f32);
            }
            Visit::of_step(step.loss_scale, step.max_abs, step.applied, step.loss_is_finite, format)
        };
        let first = self.steps.first().map_or(0, |step| step.number);
        Overflows {
            source: format!("replayed from {}", self.name()),
            first,
            visits: self.steps.iter().map(visit).collect(),
            tokens_per_step: self.started.tokens_per_step,
        }
    }

    /// The run's unscaled gradients and a description of their source: FP32 probes if there were any, else the gradients of every
    /// applied step as stored.
    pub fn gradients(&self) -> Result<(String, ExponentHistogram)> {
        if self.probed.exponents.total() > 0 {
            return Ok((format!("FP32 probes of {}", self.name()), self.probed.exponents.clone()));
        }
        if self.stored.total() == 0 {
            let message = "no step has a histogram of its gradients; record some with `telemetry.exponents_every`";
            return Err(Error::data(self.folder.display(), message));
        }
        Ok((format!("gradients that {} kept in {}", self.name(), self.gradient_format().name), self.stored.clone()))
    }

    /// Magnitudes of the run's gradients, of activations if there was a probe (the smallest and the largest of the blocks'
    /// maxima), and of the weights if there is a checkpoint.
    pub fn extents(&self) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let applied = || self.steps.iter().filter(|step| step.applied);
        let mut push = |label: &str, low: f64, high: f64| {
            if low <= high && high > 0.0 {
                extents.push(Extent { label: label.to_owned(), low, high });
            }
        };
        let fold = |values: &mut dyn Iterator<Item = (f64, f64)>| {
            values.fold((f64::INFINITY, 0.0f64), |(low, high), (min, max)| (low.min(min), high.max(max)))
        };
        let scaled = |step: &Step| Some((f64::from(step.min_abs?), f64::from(step.max_abs)));
        let (low, high) = fold(&mut applied().filter_map(scaled));
        push("gradients, scaled", low, high);
        let (low, high) = fold(&mut applied().filter_map(Step::unscaled));
        push("gradients, true", low, high);
        // As GPT-2 calls them, and as Llama and its relatives do.
        for (label, layers) in [
            ("QKV, maxima", ["attn.c_attn", "self_attn.qkv"]),
            ("MLP, maxima", ["mlp.c_fc", "mlp.gate_up"]),
            ("residual, maxima", ["mlp.residual"; 2]),
            ("logits, maximum", ["lm_head"; 2]),
        ] {
            // `h.3.mlp.c_fc` is `mlp.c_fc` of a block.
            let within = |name: &str| {
                let rest = name.strip_prefix("h.").or_else(|| name.strip_prefix("layers."))?;
                rest.split_once('.').map(|(_, layer)| layer.to_owned())
            };
            let of_kind = |name: &str| layers.contains(&within(name).as_deref().unwrap_or(name));
            let maxima =
                self.probed.activations.iter().filter(|(name, _)| of_kind(name)).map(|(_, max)| f64::from(*max));
            let (low, high) = fold(&mut maxima.map(|max| (max, max)));
            push(label, low, high);
        }
        if let Some(weights) = self.weights()? {
            push("weights", weights.min_nonzero.map_or(f64::INFINITY, f64::from), f64::from(weights.max_abs));
        }
        Ok(extents)
    }

    /// The smallest and the largest true gradient of all applied steps, if recorded.
    pub fn true_gradients(&self) -> Option<(f64, f64)> {
        let applied = self.steps.iter().filter(|step| step.applied);
        applied.filter_map(Step::unscaled).reduce(|(low, high), (l, h)| (low.min(l), high.max(h)))
    }

    /// The largest learning rate of any step.
    pub fn largest_rate(&self) -> Option<f64> {
        self.steps.iter().map(|step| step.lr).filter(|rate| *rate > 0.0).reduce(f64::max)
    }

    /// The root mean square of the newest checkpoint's weights, and the largest learning rate, which approximates Adam's update.
    pub fn weight_and_update(&self) -> Result<(f64, f64)> {
        let weights = self.weights()?.filter(|weights| weights.count > 0);
        let center = weights.map_or(1.0, |weights| (weights.sum_squares / weights.count as f64).sqrt());
        Ok((center, self.largest_rate().unwrap_or(5e-5)))
    }

    /// A weight matrix of the newest checkpoint, with its name: the first of at most `most` values whose rows are multiples of 128.
    pub fn matrix(&self, most: usize) -> Result<(String, Vec<f32>, [usize; 2])> {
        let missing = |why: &str| Error::data(self.folder.display(), format!("{why}; name a run with a checkpoint"));
        let latest = std::fs::read_to_string(self.folder.join("latest")).map_err(|_| missing("no checkpoint found"))?;
        let file = TensorFile::open(self.folder.join(latest.trim()).join("master.safetensors"))?;
        for tensor in file.tensors() {
            if let [rows, columns] = *tensor.shape
                && columns % 128 == 0
                && rows * columns <= most
            {
                return Ok((format!("{} of {}", tensor.name, self.name()), tensor.to_f32()?, [rows, columns]));
            }
        }
        Err(missing("no matrix with rows of a multiple of 128 values"))
    }

    /// Statistics of the newest checkpoint's master weights, if there is one.
    fn weights(&self) -> Result<Option<TensorStats>> {
        let Ok(latest) = std::fs::read_to_string(self.folder.join("latest")) else { return Ok(None) };
        let path = self.folder.join(latest.trim()).join("master.safetensors");
        if !path.is_file() {
            return Ok(None);
        }
        let mut stats = TensorStats::default();
        for tensor in TensorFile::open(path)?.tensors() {
            stats.merge(&TensorStats::of(&tensor.to_f32()?, FloatFormat::FP16));
        }
        Ok(Some(stats))
    }

    fn name(&self) -> String {
        if self.started.run.is_empty() {
            self.folder.display().to_string()
        } else {
            format!("run {}", self.started.run)
        }
    }
}

/// A record's exponents, shifted by `shift` binades.
fn histogram(exponents: &[(i16, u64)], shift: i32) -> ExponentHistogram {
    ExponentHistogram::from_counts(
        exponents.iter().map(|&(exponent, count)| (i32::from(exponent).saturating_add(shift), count)),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::telemetry::{ActivationMax, EventLog, GradStats, Probe, Record, VERSION};

    /// A run of three steps, the second of which overflowed at 2^16.
    fn run() -> (tempfile::TempDir, RunFigures) {
        let folder = tempfile::tempdir().unwrap();
        let mut log = EventLog::open(folder.path().join("events.jsonl")).unwrap();
        let mut append = |event| log.append(&Record { v: VERSION, t: 0, s: 0.0, event }).unwrap();
        let started = Started { policy: PrecisionPolicy::FP16.to_string(), tokens_per_step: 64, ..Default::default() };
        append(Event::Started(Box::new(started)));
        for (step, loss_scale, outcome) in
            [(1, 65536.0, Outcome::Applied), (2, 65536.0, Outcome::Skipped), (3, 32768.0, Outcome::Applied)]
        {
            let grads = GradStats {
                min_abs: Some(2f32.powi(-20)),
                max_abs: 1024.0,
                exponents: vec![(-20, 3), (10, 1)],
                ..Default::default()
            };
            let rss_bytes = Some(step << 20);
            let record = StepRecord { step, loss_scale, outcome, grads, rss_bytes, loss: 1.0, ..Default::default() };
            append(Event::Step(Box::new(record)));
        }
        let figures = RunFigures::read(folder.path()).unwrap();
        (folder, figures)
    }

    #[test]
    fn steps_become_limits_of_the_scale() {
        let (_folder, run) = run();
        let overflows = run.overflows();
        assert_eq!((overflows.first, overflows.tokens_per_step), (1, 64));
        let limit = 65504.0 / 1024.0;
        let expected =
            [Visit::Limit(65536.0 * limit), Visit::Limit(65536f32.next_down()), Visit::Limit(32768.0 * limit)];
        assert_eq!(overflows.visits, expected);
        assert_eq!(run.peak_rss_bytes, Some(3 << 20));
    }

    #[test]
    fn gradients_are_unscaled() {
        let (_folder, run) = run();
        let (_, gradients) = run.gradients().unwrap();
        let expected = ExponentHistogram::from_counts([(-36, 3), (-6, 1), (-35, 3), (-5, 1)]);
        assert_eq!(gradients, expected);
        let extents = run.extents().unwrap();
        assert_eq!(extents[1], Extent { label: "gradients, true".into(), low: 2f64.powi(-36), high: 2f64.powi(-5) });
        assert_eq!(extents.len(), 2);
    }

    #[test]
    fn probes_give_the_maxima_of_activations() {
        let (folder, _) = run();
        let mut log = EventLog::open(folder.path().join("events.jsonl")).unwrap();
        for (fc, stream) in [(3.0, 8.0), (5.0, 4.0)] {
            let activation = |name: &str, max_abs| ActivationMax { name: name.into(), max_abs };
            let activations = vec![
                activation("h.0.mlp.residual", stream),
                activation("h.0.mlp.c_fc", fc),
                activation("h.1.mlp.residual", 2.0 * stream),
                activation("h.1.mlp.c_fc", 10.0),
            ];
            let probe = Probe { step: 2, activations, ..Probe::default() };
            log.append(&Record { v: VERSION, t: 0, s: 0.0, event: Event::Probe(Box::new(probe)) }).unwrap();
        }
        let extents = RunFigures::read(folder.path()).unwrap().extents().unwrap();
        let extent = |label: &str, low, high| Extent { label: label.into(), low, high };
        assert_eq!(extents[2..], [extent("MLP, maxima", 5.0, 10.0), extent("residual, maxima", 8.0, 16.0)]);
    }

    #[test]
    fn a_folder_without_steps_is_one_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(RunFigures::read(folder.path()).unwrap_err().to_string().contains("events.jsonl"));
        std::fs::write(folder.path().join("events.jsonl"), "").unwrap();
        assert!(RunFigures::read(folder.path()).unwrap_err().to_string().contains("has no step yet"));
    }
}
