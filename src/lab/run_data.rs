//! A run's figures for the lab: its events, and the weights of its newest checkpoint.

use super::ranges::ValueRange;
use super::scaler::{GradientTrace, StepCondition};
use crate::digest::{MAX_SMALL_FILE, read_at_most};
use crate::precision::{Dtype, ExponentHistogram, FloatFormat, GradScalerConfig, TensorStats};
use crate::store::tensor_file::TensorFile;
use crate::telemetry::{Event, ProbeTotals, RunState, Started, StepRecord, StepStatus};
use crate::{Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

/// A run's figures, read from its folder or its `events.jsonl`.
#[derive(Debug)]
pub(crate) struct RunData {
    pub(crate) folder: PathBuf,
    pub(crate) started: Started,
    pub(crate) sums: StepAggregates,
    /// Totals over all FP32 probes.
    pub(crate) probed: ProbeTotals,
    /// The largest reported resident memory, in bytes.
    pub(crate) peak_rss_bytes: Option<u64>,
    /// The newest variance of each layer's unscaled gradient, in ascending order.
    pub(crate) variances: Vec<(String, f64)>,
}

/// The file of a checkpoint with the master weights.
const MASTERS: &str = "master.safetensors";
/// Steps that the scaler's replay keeps: a run may have millions.
const MAX_STEPS: usize = 1 << 18;

/// The fields of a step that the scaler's replay needs.
#[derive(Clone, Copy, Debug)]
struct Step {
    number: u64,
    loss_scale: f32,
    condition: StepCondition,
}

#[derive(Debug, Default)]
pub(crate) struct StepAggregates {
    /// The newest steps, at most [`MAX_STEPS`].
    steps: VecDeque<Step>,
    /// The number of older steps.
    earlier: u64,
    /// The loss scale of the run's first step.
    pub(crate) first_scale: Option<f32>,
    /// The smallest and the largest gradient of all applied steps, scaled and true.
    scaled: Option<(f64, f64)>,
    pub(crate) unscaled: Option<(f64, f64)>,
    /// The largest learning rate.
    pub(crate) largest_rate: Option<f64>,
    /// The gradients of every applied step as stored, unscaled.
    stored: ExponentHistogram,
    /// The largest unscaled gradient that an FP32 probe found, by step.
    largest: BTreeMap<u64, f32>,
    /// Mean loss tokens of a step.
    tokens_per_step: u64,
}

impl StepAggregates {
    fn add(&mut self, step: &StepRecord, most: usize) {
        let loss_scale = step.loss_scale;
        let max_abs = step.grads.max_abs;
        let applied = step.outcome == StepStatus::Applied;
        if self.steps.len() == most {
            self.steps.pop_front();
            self.earlier += 1;
            let first = self.steps.front().map_or(step.step, |first| first.number);
            self.largest = self.largest.split_off(&first);
        }
        let condition = StepCondition::of_step(loss_scale, max_abs, applied, step.loss.is_finite());
        self.steps.push_back(Step { number: step.step, loss_scale, condition });
        self.first_scale.get_or_insert(loss_scale);
        self.tokens_per_step = step.tokens / step.step.max(1);
        if step.lr > 0.0 {
            self.largest_rate = Some(self.largest_rate.map_or(step.lr, |largest| largest.max(step.lr)));
        }
        if !applied {
            return;
        }
        self.stored.merge(&histogram(&step.grads.exponents, (-loss_scale.log2()).round() as i32));
        if let Some(min_abs) = step.grads.min_abs {
            let widen = |extent: &mut Option<(f64, f64)>, scale: f64| {
                let (min, max) = (f64::from(min_abs) / scale, f64::from(max_abs) / scale);
                *extent = Some(extent.map_or((min, max), |(low, high)| (low.min(min), high.max(max))));
            };
            widen(&mut self.scaled, 1.0);
            widen(&mut self.unscaled, f64::from(loss_scale));
        }
    }
}

impl RunData {
    /// Reads a run. A log without steps is an error.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Self::read_newest(path, MAX_STEPS)
    }

    /// Reads a run, and keeps the newest `most` steps for a replay.
    fn read_newest(path: &Path, most: usize) -> Result<Self> {
        let (folder, log) = if path.is_dir() {
            (path.to_path_buf(), path.join("events.jsonl"))
        } else {
            (path.parent().unwrap_or(Path::new("")).to_path_buf(), path.to_path_buf())
        };
        let mut sums = StepAggregates::default();
        let (state, _) = RunState::default().read_with(&log, |record| match &record.event {
            // Another run in the same log.
            Event::Started(started) if started.resumed_from.is_none() => sums = StepAggregates::default(),
            Event::Step(step) => sums.add(step, most),
            Event::Fp32Probe(probe) => drop(sums.largest.insert(probe.step, probe.grads.max_abs)),
            _ => {}
        })?;
        let probed = state.probed().clone();
        let peak_rss_bytes = state.figures().peak_rss;
        let of_layers = state.tensors.variances.iter().map(|(layer, (newest, _))| (layer.to_string(), *newest));
        let mut variances: Vec<_> = of_layers.collect();
        variances.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let started = state.started.unwrap_or_default();
        Ok(Self { folder, started, sums, probed, peak_rss_bytes, variances })
    }

    /// The scaler's settings. It begins with the scale of the first step that is kept, which may have been measured.
    pub(crate) fn scaler(&self) -> Option<GradScalerConfig> {
        let config: GradScalerConfig = self.setting("/scaler")?;
        let enabled = config.enabled && self.started.precision().needs_loss_scale();
        let init_scale = self.sums.steps.front().map_or(config.init_scale, |step| step.loss_scale);
        Some(GradScalerConfig { enabled, init_scale, ..config })
    }

    /// A value of the run's configuration, by its JSON pointer; `None` if it is missing or has a different type.
    pub(crate) fn setting<'a, T: Deserialize<'a>>(&'a self, pointer: &str) -> Option<T> {
        T::deserialize(self.started.config.pointer(pointer)?).ok()
    }

    /// The path of a file of the newest checkpoint, if it exists.
    fn checkpoint_file(&self, name: &str) -> Option<PathBuf> {
        let latest = String::from_utf8(read_at_most(&self.folder.join("latest"), MAX_SMALL_FILE).ok()?).ok()?;
        Some(self.folder.join(latest.trim()).join(name)).filter(|file| file.is_file())
    }

    /// The tokenizer of its newest checkpoint.
    pub(crate) fn tokenizer(&self) -> Option<PathBuf> {
        self.checkpoint_file("tokenizer.json")
    }

    /// The run's steps, for the scaler's replay. If an FP32 probe has measured a step's largest gradient, it determines
    /// the scales at which the step overflows; an overflow without a probe shows only that its scale was too large.
    pub(crate) fn overflows(&self) -> GradientTrace {
        // A probe measures the first micro-batch only.
        let probed =
            if self.setting("/train/grad_accum") == Some(1u64) { &self.sums.largest } else { &BTreeMap::new() };
        // Even with FP32 weight gradients, activation gradients pass through FP16, whose maximum decides.
        let policy = self.started.precision();
        let format = if policy.compute == Dtype::F16 { FloatFormat::FP16 } else { policy.grads.format() };
        let visit = |step: &Step| match probed.get(&step.number) {
            Some(largest) if step.condition != StepCondition::Broken && *largest > 0.0 => {
                StepCondition::Largest(*largest)
            }
            _ => step.condition,
        };
        let StepAggregates { steps, earlier, .. } = &self.sums;
        let all = *earlier + steps.len() as u64;
        let part = if *earlier > 0 { format!("the last {} of {all} steps, ", steps.len()) } else { String::new() };
        GradientTrace {
            source: format!("{part}replayed from {}", self.name()),
            first: steps.front().map_or(0, |step| step.number),
            visits: steps.iter().map(visit).collect(),
            max: format.max(),
            tokens_per_step: self.sums.tokens_per_step,
        }
    }

    /// The run's unscaled gradients and a description of their source: FP32 probes if there were any, else the
    /// gradients of every applied step as stored.
    pub(crate) fn gradients(&self) -> Result<(String, ExponentHistogram)> {
        if self.probed.exponents.total() > 0 {
            return Ok((format!("FP32 probes of {}", self.name()), self.probed.exponents.clone()));
        }
        if self.sums.stored.total() == 0 {
            let message = "no step has a histogram of its gradients; record them with `telemetry.grad_histogram_every`";
            return Err(Error::data(self.folder.display(), message));
        }
        Ok((
            format!("gradients that {} kept in {}", self.name(), self.started.precision().grads.format().name),
            self.sums.stored.clone(),
        ))
    }

    /// Magnitudes of the run's gradients, the standard deviation of its layers' (the smallest and the largest, if
    /// measured), of activations if there was a probe (the smallest and the largest of the blocks' maxima), and of the
    /// weights if there is a checkpoint.
    pub(crate) fn value_ranges(&self) -> Result<Vec<ValueRange>> {
        let mut value_ranges = Vec::new();
        let mut push = |label: &str, low: f64, high: f64| {
            if low <= high && high > 0.0 {
                value_ranges.push(ValueRange { label: label.to_owned(), low, high });
            }
        };
        for (label, extent) in [("gradients, scaled", self.sums.scaled), ("gradients, true", self.sums.unscaled)] {
            if let Some((low, high)) = extent {
                push(label, low, high);
            }
        }
        if let [(_, least), .., (_, most)] = &self.variances[..] {
            push("deviation by layer", least.sqrt(), most.sqrt());
        }
        // The names in GPT-2, and in Llama and similar models.
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
            let (low, high) = maxima.fold((f64::INFINITY, 0.0f64), |(low, high), max| (low.min(max), high.max(max)));
            push(label, low, high);
        }
        if let Some(weights) = self.weights()? {
            push("weights", weights.min_nonzero.map_or(f64::INFINITY, f64::from), f64::from(weights.max_abs));
        }
        Ok(value_ranges)
    }

    /// The root mean square of the newest checkpoint's weights, and the largest learning rate, which approximates
    /// Adam's update.
    pub(crate) fn weight_and_update(&self) -> Result<(f64, f64)> {
        let weights = self.weights()?.filter(|weights| weights.count > 0);
        let center = weights.map_or(1.0, |weights| (weights.sum_squares / weights.count as f64).sqrt());
        Ok((center, self.sums.largest_rate.unwrap_or(5e-5)))
    }

    /// A weight matrix of the newest checkpoint, with its name: the first of at most `most` values whose rows are
    /// multiples of 128.
    pub(crate) fn matrix(&self, most: usize) -> Result<(String, Vec<f32>, [usize; 2])> {
        let missing = |why: &str| Error::data(self.folder.display(), format!("{why}; use a run with a checkpoint"));
        let masters =
            self.checkpoint_file(MASTERS).ok_or_else(|| missing("no checkpoint with master weights found"))?;
        for tensor in TensorFile::open(masters)?.tensors() {
            if let [rows, columns] = *tensor.shape
                && columns % 128 == 0
                && rows * columns <= most
            {
                return Ok((format!("{} of {}", tensor.name, self.name()), tensor.to_f32()?, [rows, columns]));
            }
        }
        Err(missing("no matrix has rows with a multiple of 128 values"))
    }

    /// Statistics of the newest checkpoint's master weights, if there is one.
    fn weights(&self) -> Result<Option<TensorStats>> {
        let Some(masters) = self.checkpoint_file(MASTERS) else { return Ok(None) };
        let mut stats = TensorStats::default();
        for tensor in TensorFile::open(masters)?.tensors() {
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
pub(crate) use tests::write_run;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::ModelSpec;
    use crate::precision::PrecisionPolicy;
    use crate::telemetry::{ActivationMax, EventLog, Fp32Probe, GradStats, GradVariance, Record, VERSION};

    fn run() -> (tempfile::TempDir, RunData) {
        let folder = tempfile::tempdir().unwrap();
        write_run(folder.path());
        let figures = RunData::read(folder.path()).unwrap();
        (folder, figures)
    }

    fn append(folder: &Path, event: Event) {
        let mut log = EventLog::open(folder.join("events.jsonl")).unwrap();
        log.append(&Record { v: VERSION, t: 0, s: 0.0, event }).unwrap();
    }

    /// Logs a run of three steps; the second overflowed at 2^16.
    pub(crate) fn write_run(folder: &Path) {
        let started = Started { policy: PrecisionPolicy::FP16.to_string(), tokens_per_step: 80, ..Default::default() };
        let scaler = GradScalerConfig { init_scale: 1024.0, ..GradScalerConfig::default() };
        let gpt2 = ModelSpec::named("gpt2").unwrap().resized(2, 128, 4);
        let model = ModelSpec { vocab_size: 512, max_position_embeddings: 128, ..gpt2 }.to_json("float32");
        let model_config = serde_json::from_str(&model).unwrap();
        let started = Started { config: serde_json::json!({ "scaler": scaler }), model_config, ..started };
        append(folder, Event::Started(Box::new(started)));
        for (step, loss_scale, outcome) in
            [(1, 65536.0, StepStatus::Applied), (2, 65536.0, StepStatus::Skipped), (3, 32768.0, StepStatus::Applied)]
        {
            let grads = GradStats {
                min_abs: Some(2f32.powi(-20)),
                max_abs: 1024.0,
                exponents: vec![(-20, 3), (10, 1)],
                ..Default::default()
            };
            let rss_bytes = Some(step << 20);
            let tokens = 64 * step;
            let record =
                StepRecord { step, loss_scale, outcome, grads, rss_bytes, tokens, loss: 1.0, ..Default::default() };
            append(folder, Event::Step(Box::new(record)));
        }
    }

    #[test]
    fn steps_become_conditions_of_the_scale() {
        let (_folder, run) = run();
        let overflows = run.overflows();
        assert_eq!((overflows.first, overflows.tokens_per_step), (1, 64));
        let expected = [
            StepCondition::Largest(1024.0 / 65536.0),
            StepCondition::Above(65536.0),
            StepCondition::Largest(1024.0 / 32768.0),
        ];
        assert_eq!(overflows.visits, expected);
        assert_eq!(run.peak_rss_bytes, Some(3 << 20));
    }

    /// The replay of a run without loss scaling grew a scale that the run did not have.
    #[test]
    fn a_replay_scales_only_if_the_run_did() {
        let (folder, fp16) = run();
        let log = folder.path().join("events.jsonl");
        let text = std::fs::read_to_string(&log).unwrap();
        let [narrow, wide] = [PrecisionPolicy::FP16, PrecisionPolicy::BF16].map(|policy| policy.to_string());
        std::fs::write(&log, text.replace(&narrow, &wide)).unwrap();
        let bf16 = RunData::read(folder.path()).unwrap();
        assert_eq!([fp16, bf16].map(|run| run.scaler().unwrap().enabled), [true, false]);
    }

    /// The last two of the three, from the scale of the first of them; what is not replayed counts them all.
    #[test]
    fn a_replay_of_a_long_log_has_its_newest_steps() {
        let (folder, whole) = run();
        let run = RunData::read_newest(folder.path(), 2).unwrap();
        let overflows = run.overflows();
        assert_eq!((overflows.first, &overflows.visits[..]), (2, &whole.overflows().visits[1..]));
        assert!(overflows.source.starts_with("the last 2 of 3 steps, replayed from "), "{}", overflows.source);
        assert_eq!(run.sums.unscaled, whole.sums.unscaled);
        assert_eq!(run.sums.first_scale, Some(65536.0));
        assert_eq!((run.scaler().unwrap().init_scale, whole.scaler().unwrap().init_scale), (65536.0, 65536.0));
        let last = RunData::read_newest(folder.path(), 1).unwrap();
        assert_eq!(last.scaler().unwrap().init_scale, 32768.0);
    }

    #[test]
    fn gradients_are_unscaled() {
        let (_folder, run) = run();
        let (_, gradients) = run.gradients().unwrap();
        let expected = ExponentHistogram::from_counts([(-36, 3), (-6, 1), (-35, 3), (-5, 1)]);
        assert_eq!(gradients, expected);
        let value_ranges = run.value_ranges().unwrap();
        assert_eq!(
            value_ranges[1],
            ValueRange { label: "gradients, true".into(), low: 2f64.powi(-36), high: 2f64.powi(-5) }
        );
        assert_eq!(value_ranges.len(), 2);
    }

    #[test]
    fn variances_are_by_layer() {
        let (folder, _) = run();
        let layers = [("h.0", 2f64.powi(-20)), ("head", 2f64.powi(-30)), ("h.1", 2f64.powi(-26))];
        let layers = layers.map(|(layer, variance)| (layer.to_owned(), variance)).into();
        append(folder.path(), Event::GradVariance(GradVariance { step: 3, layers }));
        let run = RunData::read(folder.path()).unwrap();
        let order: Vec<_> = run.variances.iter().map(|(layer, _)| layer.as_str()).collect();
        assert_eq!(order, ["head", "h.1", "h.0"]);
        let expected = ValueRange { label: "deviation by layer".into(), low: 2f64.powi(-15), high: 2f64.powi(-10) };
        assert_eq!(run.value_ranges().unwrap()[2], expected);
    }

    #[test]
    fn probes_give_the_maxima_of_activations() {
        let (folder, _) = run();
        for (fc, stream) in [(3.0, 8.0), (5.0, 4.0)] {
            let activation = |name: &str, max_abs| ActivationMax { name: name.into(), max_abs };
            let activations = vec![
                activation("h.0.mlp.residual", stream),
                activation("h.0.mlp.c_fc", fc),
                activation("h.1.mlp.residual", 2.0 * stream),
                activation("h.1.mlp.c_fc", 10.0),
            ];
            let probe = Fp32Probe { step: 2, activations, ..Fp32Probe::default() };
            append(folder.path(), Event::Fp32Probe(Box::new(probe)));
        }
        let value_ranges = RunData::read(folder.path()).unwrap().value_ranges().unwrap();
        let extent = |label: &str, low, high| ValueRange { label: label.into(), low, high };
        assert_eq!(value_ranges[2..], [extent("MLP, maxima", 5.0, 10.0), extent("residual, maxima", 8.0, 16.0)]);
    }

    #[test]
    fn a_folder_without_steps_is_one_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(RunData::read(folder.path()).unwrap_err().to_string().contains("events.jsonl"));
        std::fs::write(folder.path().join("events.jsonl"), "").unwrap();
        assert!(RunData::read(folder.path()).unwrap_err().to_string().contains("has no step yet"));
    }
}
