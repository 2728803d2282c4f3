//! The reports of the views, from their arguments and the numbers of a run.

use super::args::{
    BitsArgs, BlocksArgs, DtypesArgs, FailuresArgs, MemoryArgs, RangesArgs, ScalerArgs, SoftmaxArgs, SumsArgs, UlpArgs,
    UnderflowArgs,
};
use crate::engine::model::ModelSpec;
use crate::engine::optim::OptimizerKind;
use crate::lab::{
    Bits, BlockScaling, DtypeReport, FailureDemo, GradientModel, GradientTrace, MeasuredRun, MemoryPlan, Ranges,
    RunData, ScalerComparison, Softmax, SummationReport, TrainSetup, UlpGrid, UnderflowReport, ValueRange,
    apply_setting, log_normal, model_named, normal_tensor, parse_value,
};
use crate::precision::PrecisionPolicy;
use crate::store::{StoredModel, has_gguf_extension};
use crate::telemetry::Started;
use crate::train::{Config, DistributedLayout, MemoryExtras, ObjectiveSection};
use crate::{Error, Result};
use serde::Deserialize;
use std::path::Path;

/// The value that was typed for an argument.
fn typed_value(argument: &str, text: &str) -> Result<f64> {
    parse_value(text).map_err(|why| Error::config(argument, why))
}

impl RangesArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<Ranges> {
        let values = self.values.iter().map(|text| Ok(ValueRange::value(text.trim(), typed_value("VALUES", text)?)));
        let mut value_ranges = values.collect::<Result<Vec<_>>>()?;
        if let Some(run) = run {
            value_ranges.extend(run.value_ranges()?);
        }
        if let (Some(from), Some(to)) = (self.from, self.to)
            && from > to
        {
            return Err(Error::config("--to", format!("{to} is below `--from`, which is {from}")));
        }
        Ok(Ranges::new(value_ranges, (self.from, self.to)))
    }
}

impl BitsArgs {
    pub(super) fn report(&self) -> Result<Bits> {
        let mut bits = Bits::parse(&self.value).map_err(|why| Error::config("VALUE", why))?;
        bits.cursor = self.cursor.map(|bit| (self.format, bit.min(self.format.bits() - 1)));
        Ok(bits)
    }
}

impl UlpArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<UlpGrid> {
        let from_run = run.map(RunData::weight_and_update).transpose()?.unwrap_or((1.0, 5e-5));
        Ok(UlpGrid::new(self.center.unwrap_or(from_run.0), self.update.unwrap_or(from_run.1)))
    }
}

impl SumsArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<SummationReport> {
        // The longest sum in a block is over the MLP's inner width.
        let deepest = run.map(|run| spec_from_log(&run.started)).transpose()?.map(|shape| shape.intermediate_size);
        SummationReport::new(self.terms, self.dot, self.length.or(deepest).unwrap_or(16384), self.seed)
    }
}

impl BlocksArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<BlockScaling> {
        /// Maximum number of values of a quantized tensor.
        const MAX_VALUES: usize = 1 << 20;
        if let Some(run) = run {
            let (source, tensor, shape) = run.matrix(MAX_VALUES)?;
            return BlockScaling::new(source, tensor, shape, self.stale_amax as f32, self.scheme);
        }
        if self.rows == 0 {
            return Err(Error::config("--rows", "must be at least 1"));
        }
        if self.rows.saturating_mul(self.columns) > MAX_VALUES {
            let message = format!("{} × {} are more than {MAX_VALUES} values", self.rows, self.columns);
            return Err(Error::config("--rows", message));
        }
        let shape = [self.rows, self.columns];
        let tensor = normal_tensor(shape, self.outlier as f32, self.seed);
        let source = format!("normal, seed {}, outlier × {}", self.seed, self.outlier);
        BlockScaling::new(source, tensor, shape, self.stale_amax as f32, self.scheme)
    }
}

impl DtypesArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<DtypeReport> {
        DtypeReport::of(self.policy.or(run.map(|run| run.started.precision())).unwrap_or(PrecisionPolicy::FP16))
    }
}

impl SoftmaxArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Softmax {
        let logit = run.and_then(|run| run.probed.activations.get("lm_head")).map(|largest| f64::from(*largest));
        let length = run.and_then(|run| run.setting("/train/seq_len"));
        let (logit, length) = (self.logit.or(logit).unwrap_or(12.0), self.length.or(length).unwrap_or(4096));
        Softmax::new(logit, length, self.position)
    }
}

impl FailuresArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<FailureDemo> {
        let gradients = run.and_then(|run| run.sums.unscaled);
        let rate = run.and_then(|run| run.sums.largest_rate);
        let scale = run.and_then(|run| run.sums.first_scale).map(f64::from);
        let small = self.small.or(gradients.map(|(low, _)| low)).unwrap_or(1e-8);
        let large = self.large.or(gradients.map(|(_, high)| high)).unwrap_or(3.0);
        let scale = self.scale.or(scale).unwrap_or(65536.0);
        let weight = [self.weight, self.update.or(rate).unwrap_or(5e-5)];
        FailureDemo::new([small, large], scale, self.activation, weight, self.steps)
    }
}

impl ScalerArgs {
    const MAX_STEPS: usize = 1_000_000;

    pub(super) fn report(&self, run: Option<&RunData>) -> Result<ScalerComparison> {
        if self.setting.len() > 3 {
            return Err(Error::config("--setting", "at most four settings can be compared: the base and three others"));
        }
        for (flag, share) in [("--rate", self.rate), ("--spikes", self.spikes)] {
            if !(0.0..=1.0).contains(&share) {
                return Err(Error::config(flag, format!("{share} is not a share between 0 and 1")));
            }
        }
        check_within("--steps", self.steps, Self::MAX_STEPS)?;
        let started = run.and_then(RunData::scaler);
        let base = self.base.as_deref().unwrap_or(if run.is_some() { "" } else { "growth_interval=50" }).trim();
        let model = if self.level.trim() == "none" { None } else { Some(self.gradients()?) };
        let steps = |seed| match (run, model) {
            (Some(run), _) => run.overflows(),
            (None, Some(model)) => model.steps(seed, self.steps),
            (None, None) => GradientTrace::none(self.steps),
        };
        let injected = |seed| steps(seed).injected(&self.overflow_at, self.rate, seed);
        let label = if (1..20).contains(&base.len()) { base } else { "base" };
        let base = apply_setting(started.unwrap_or_default(), "--base", base)?;
        let others = self.setting.iter().map(|text| Ok((text.clone(), apply_setting(base, "--setting", text)?)));
        let settings = std::iter::once(Ok((label.to_owned(), base))).chain(others).collect::<Result<_>>()?;
        let mut comparison = ScalerComparison::run(settings, &injected(self.seed))?;
        if let Some(seeds) = self.seeds {
            comparison.repeat(seeds, injected)?;
        }
        comparison.cursor = self.cursor;
        Ok(comparison)
    }

    fn gradients(&self) -> Result<GradientModel> {
        let Self { sigma, drift, spikes, spike, jump_at, jump, .. } = *self;
        let level = typed_value("--level", &self.level)?;
        let given = [("--level", level), ("--sigma", sigma), ("--drift", drift), ("--spike", spike), ("--jump", jump)];
        if let Some((flag, value)) = given.into_iter().find(|(_, value)| !value.is_finite()) {
            return Err(Error::config(flag, format!("must be finite, not {value}")));
        }
        if sigma < 0.0 {
            return Err(Error::config("--sigma", "must be 0 or more"));
        }
        Ok(GradientModel { level, sigma, drift, spikes, spike, jump_at, jump })
    }
}

impl UnderflowArgs {
    pub(super) fn report(&self, run: Option<&RunData>) -> Result<UnderflowReport> {
        if !(self.sigma > 0.0 && self.sigma.is_finite() && self.mu.is_finite()) {
            return Err(Error::config("--sigma", "the mean must be finite, the deviation finite and above 0"));
        }
        let (source, gradients) = if let Some(run) = run {
            run.gradients()?
        } else {
            let source = format!("log-normal around 2^{}, deviation {} binades", self.mu, self.sigma);
            (source, log_normal(self.mu, self.sigma, self.count))
        };
        let mut report = UnderflowReport::new(source, gradients, self.format, self.scale);
        report.linear = self.linear;
        report.variances = run.map(|run| run.variances.clone()).unwrap_or_default();
        Ok(report)
    }
}

impl MemoryArgs {
    /// Flags that are not given default to the run's values, or to a small fine-tuning of distilgpt2.
    pub(super) fn report(&self, run: Option<&RunData>, program: u64) -> Result<MemoryPlan> {
        let objective: ObjectiveSection = run.and_then(|run| run.setting("/objective")).unwrap_or_default();
        let shape = self.shape(run, &objective)?;
        let (name, spec) = self.model(run)?;
        let on_gpu = self.gpu || run.is_some_and(|run| run.started.device != "cpu");
        let setup = TrainSetup {
            shape,
            layout: DistributedLayout {
                world_size: self.processes,
                sharding: self.shard,
                on_gpu,
                shards_on_host: false,
            },
            budget: self.memory,
            rank: self.rank,
            keep: run.and_then(|run| run.setting::<bool>("/train/gradient_checkpointing")).unwrap_or_default().into(),
            extras: extras(run, &objective),
            process: program,
        };
        let mut memory = MemoryPlan::new(&name, &spec, setup)?;
        let sizes_of_run = self.batch.is_none() && self.seq.is_none() && self.grad_accum.is_none();
        // A run on a GPU has logged the memory of its host.
        let as_it_ran = self.model.is_none() && sizes_of_run && self.processes == 1 && !on_gpu;
        if let Some(run) = run
            && let Some(peak) = run.peak_rss_bytes
            && as_it_ran
        {
            let (spec, kind, recipe) = recipe_from_run(run, spec)?;
            let policy = run.started.precision();
            let engine = setup.engine(&spec, policy, kind)?;
            memory.measured = Some(MeasuredRun { policy, recipe, peak, engine });
        }
        Ok(memory)
    }

    /// Sequences in a micro-batch, tokens in a sequence, micro-batches in a step.
    fn shape(&self, run: Option<&RunData>, objective: &ObjectiveSection) -> Result<[usize; 3]> {
        let setting = |path| run.and_then(|run| run.setting::<usize>(path));
        let rows = |samples: usize| objective.rows(1).saturating_mul(samples);
        let batch = self.batch.or_else(|| setting("/train/batch_size").map(rows)).unwrap_or(32);
        let seq = self.seq.or_else(|| setting("/train/seq_len")).unwrap_or(32);
        let accum = self.grad_accum.or_else(|| setting("/train/grad_accum")).unwrap_or(1);
        for (flag, size) in [("--batch", batch), ("--seq", seq), ("--grad-accum", accum), ("--rank", self.rank)] {
            check_within(flag, size, 1 << 20)?;
        }
        check_within("--processes", self.processes, 1024)?;
        Ok([batch, seq, accum])
    }

    /// The name and the shape of the model.
    fn model(&self, run: Option<&RunData>) -> Result<(String, ModelSpec)> {
        if let (None, Some(run)) = (&self.model, run) {
            return Ok((run.started.model.clone(), spec_from_log(&run.started)?));
        }
        let name = self.model.as_deref().unwrap_or("distilgpt2");
        let path = Path::new(name);
        Ok((name.to_owned(), if path.exists() { StoredModel::shape(path)? } else { model_named(name)? }))
    }
}

/// The work in addition to the steps: of a run, or none.
fn extras<'a>(run: Option<&'a RunData>, objective: &'a ObjectiveSection) -> MemoryExtras<'a> {
    let Some(run) = run else { return MemoryExtras { objective: Some(objective), ..MemoryExtras::default() } };
    let sample_tokens = run.setting("/train/sample_tokens").unwrap_or(0).min(1 << 20);
    MemoryExtras {
        probes: run.probed.nonzero > 0,
        sample: [sample_tokens, run.setting::<&str>("/train/prompt").map_or(0, str::len)],
        objective: Some(objective),
        threads: Some(run.started.cpu.threads.clamp(1, 1 << 16)),
    }
}

fn check_within(flag: &str, size: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&size) {
        return Ok(());
    }
    Err(Error::config(flag, format!("{size} is not a number from 1 to {most}")))
}

/// A run's model with its adapters, its optimizer, and a description of both; empty for a full model and AdamW.
fn recipe_from_run(run: &RunData, spec: ModelSpec) -> Result<(ModelSpec, OptimizerKind, String)> {
    // An older log may have settings that no longer exist.
    let Ok(config) = Config::deserialize(&run.started.config) else {
        return Ok((spec, OptimizerKind::AdamW, String::new()));
    };
    let mut recipe = String::new();
    let mut spec = config.with_trained_parts(spec)?;
    if let Some(lora) = &spec.lora {
        let base = Path::new(&config.model);
        if has_gguf_extension(base) {
            let missing = "the run's base model is missing; use the folder in which the run was started, or --model";
            let found = base.is_file().then(|| StoredModel::shape(base));
            spec.quantized = found.ok_or_else(|| Error::data(&config.model, missing))??.quantized;
        }
        let kind = if spec.quantized.is_empty() { "LoRA" } else { "QLoRA" };
        recipe = format!(", {kind} of rank {}", lora.r);
    }
    let kind = config.train.optimizer;
    if kind == OptimizerKind::AdamW8bit {
        recipe += ", 8-bit Adam";
    }
    Ok((spec, kind, recipe))
}

/// The shape of a run's model, from its `config.json`.
fn spec_from_log(started: &Started) -> Result<ModelSpec> {
    ModelSpec::from_json(started.model_config.to_string().as_bytes(), "the run's log")
}
