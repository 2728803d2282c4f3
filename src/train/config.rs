//! A run's configuration: what a TOML file, flags and `--set` may say, with defaults for everything.

use crate::data::Source;
pub use crate::engine::device::Place;
use crate::engine::model::Keep;
use crate::engine::optim::{AdamWConfig, LrSchedule, ScheduleKind};
use crate::precision::{GradScalerConfig, PrecisionConfig, PrecisionPolicy};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The configuration of the built-in model's run, under everything a user says when the model is `tiny`.
const TINY: &str = include_str!("../../configs/tiny-grammar.toml");

/// The most of anything that is counted here: products of three such numbers can still be computed with.
const MOST: usize = 1 << 20;

/// Where initial weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// The model's published or stored weights; random ones for `tiny`, which has none.
    #[default]
    Pretrained,
    /// GPT-2's initialisation from the seed.
    Random,
}

/// Everything that defines a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// `tiny`, a local Hugging Face folder, a model of the Hugging Face Hub, or with `init = "random"` an architecture.
    pub model: String,
    /// The Hub's branch, tag or commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Where initial weights come from.
    pub init: Init,
    /// A `tokenizer.json`, in place of the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Training text.
    pub data: String,
    /// Validation text; without it the last tenth of the training text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val: Option<String>,
    /// `fp32`, `fp16`, `bf16`, or a policy such as `p=f32,c=f16,g=f16,r=f32`.
    pub dtype: PrecisionPolicy,
    /// The seed of every random stream.
    pub seed: u64,
    /// Where to compute: `cpu`, `cuda` or `cuda:N`; or `auto`, a GPU where this program can use one.
    pub device: String,
    /// Threads that compute; all processors by default. Sums do not depend on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Batches, length, and what happens along the way.
    pub train: TrainSection,
    /// AdamW and clipping.
    pub optimizer: OptimizerSection,
    /// The learning rate over time.
    pub schedule: ScheduleSection,
    /// The dynamic loss scale; in force where the policy computes in FP16.
    pub scaler: GradScalerConfig,
    /// Layers that compute in another type than the policy's.
    pub precision: PrecisionConfig,
    /// Dropout rates; off by default.
    pub dropout: DropoutSection,
    /// What is written where.
    pub checkpoint: CheckpointSection,
    /// What is looked at, and how often.
    pub telemetry: TelemetrySection,
}

/// Batches, length, and what happens along the way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Sequences in a micro-batch.
    pub batch_size: usize,
    /// Tokens in a sequence; at most the model's context.
    pub seq_len: usize,
    /// Micro-batches in a step.
    pub grad_accum: usize,
    /// What the backward pass computes again instead of keeping it: `none`, or `block` for all inside a block (gradient
    /// checkpointing). The numbers are the same; memory falls and a step takes about a third longer.
    pub recompute: Keep,
    /// Passes over the training text; ignored where `steps` is given.
    pub epochs: f64,
    /// Steps to attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Steps between two looks at the validation text; 0 for one at the end only.
    pub eval_every: u64,
    /// Validation batches looked at, at most; 0 for all.
    pub eval_batches: u64,
    /// Steps between two text samples; 0 for one at the end only.
    pub sample_every: u64,
    /// Tokens of a sample.
    pub sample_tokens: usize,
    /// Sampling temperature; 0 takes the likeliest token.
    pub temperature: f64,
    /// What a sample begins with.
    pub prompt: String,
    /// Looks at the validation text without a new best after which training stops; 0 for never.
    pub early_stopping: u64,
}

/// AdamW and clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// The highest learning rate.
    pub lr: f64,
    /// Decay rates of Adam's moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of parameters of two or more dimensions.
    pub weight_decay: f64,
    /// Global gradient norm to clip to; 0 for no clipping.
    pub max_grad_norm: f64,
}

/// The learning rate over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleSection {
    /// `constant`, `linear` or `cosine`.
    pub kind: ScheduleKind,
    /// Share of the run's steps that warm up.
    pub warmup_ratio: f64,
    /// Steps that warm up, in place of the share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// The final learning rate over the highest.
    pub min_lr_ratio: f64,
}

/// Dropout rates in training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DropoutSection {
    /// Of the embeddings' sum.
    pub embedding: f64,
    /// Of what joins the residual stream.
    pub residual: f64,
    /// Of the attention weights.
    pub attention: f64,
}

/// What is written where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// The folder of all runs.
    pub dir: PathBuf,
    /// The run's folder within; by default named after model and dtype, with a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// Steps between two checkpoints; 0 for one at the end only.
    pub save_every: u64,
    /// Checkpoints kept; older ones go when a newer one is complete.
    pub keep_last: usize,
    /// Whether the one with the best validation loss is kept too.
    pub keep_best: bool,
    /// Steps between two checkpoints of the weights alone, which are small and of no use to `--resume`; 0 for none.
    pub weights_every: u64,
    /// Of those, how many are kept, and the best one where `keep_best` says so.
    pub keep_weights: usize,
    /// Seconds for which the last checkpoint of a run is tried again where the disk refuses it, before the weights alone are
    /// tried.
    pub retry_s: u64,
}

/// What is looked at, and how often.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetrySection {
    /// Steps between two printed lines where there is no dashboard.
    pub log_every: u64,
    /// Steps between two looks at every tensor (each overflow is looked at anyway).
    pub tensors_every: u64,
    /// Steps between two counts of gradient exponents.
    pub exponents_every: u64,
    /// Steps between two FP32 probes; 0 for none.
    pub probe_every: u64,
    /// Steps between two measurements of each layer's gradient variance; 0 for none.
    pub variance_every: u64,
    /// Whether the passes of an overflowing step run once more, to find the tensor where it began.
    pub attribute_overflows: bool,
    /// Whether scalars and histograms are written for TensorBoard too, into `tensorboard` in the run's folder.
    pub tensorboard: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model: "tiny".into(),
            revision: None,
            init: Init::Pretrained,
            tokenizer: None,
            data: "grammar".into(),
            val: None,
            dtype: PrecisionPolicy::FP16,
            seed: 1,
            device: "auto".into(),
            threads: None,
            train: TrainSection::default(),
            optimizer: OptimizerSection::default(),
            schedule: ScheduleSection::default(),
            scaler: GradScalerConfig::default(),
            precision: PrecisionConfig::default(),
            dropout: DropoutSection::default(),
            checkpoint: CheckpointSection::default(),
            telemetry: TelemetrySection::default(),
        }
    }
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            batch_size: 8,
            seq_len: 128,
            grad_accum: 1,
            epochs: 1.0,
            steps: None,
            eval_every: 100,
            eval_batches: 16,
            sample_every: 0,
            sample_tokens: 64,
            temperature: 0.8,
            prompt: String::new(),
            early_stopping: 0,
            recompute: Keep::All,
        }
    }
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self { lr: 5e-5, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.01, max_grad_norm: 1.0 }
    }
}

impl Default for ScheduleSection {
    fn default() -> Self {
        Self { kind: ScheduleKind::Cosine, warmup_ratio: 0.05, warmup_steps: None, min_lr_ratio: 0.1 }
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            dir: "checkpoints".into(),
            run: None,
            save_every: 500,
            keep_last: 2,
            keep_best: true,
            weights_every: 0,
            keep_weights: 2,
            retry_s: 60,
        }
    }
}

impl Default for TelemetrySection {
    fn default() -> Self {
        Self {
            log_every: 128,
            tensors_every: 16,
            exponents_every: 1,
            probe_every: 0,
            variance_every: 0,
            attribute_overflows: true,
            tensorboard: false,
        }
    }
}

/// Top-level keys of earlier versions, which a run's saved configuration may still hold. They change nothing.
const RETIRED: [&str; 1] = ["cuda_graph"];

/// Layers of settings, each over the ones before.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// A configuration file's name and text.
    pub file: Option<(String, String)>,
    /// Dotted keys with their values, from flags and `--set`, in the order in which they were typed.
    pub overrides: Vec<(String, toml::Value)>,
}

impl Config {
    /// The configuration that `layers` make over the defaults, checked.
    pub fn resolve(layers: &Layers) -> Result<Self> {
        let mut said = toml::Table::new();
        if let Some((origin, text)) = &layers.file {
            let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
                Error::config(format!("`{origin}`"), error.to_string().trim_end().to_owned())
            })?;
            table.retain(|key, _| !RETIRED.contains(&key));
            check_keys(leaves(&table).into_iter().map(|(key, _)| key), origin)?;
            merge(&mut said, table);
        }
        for (key, value) in &layers.overrides {
            // Checked before it becomes a table, which a key of a thousand parts would make too deep to handle.
            let mut keys: Vec<String> =
                value.as_table().map(leaves).into_iter().flatten().map(|(rest, _)| format!("{key}.{rest}")).collect();
            if keys.is_empty() {
                keys.push(key.clone());
            }
            check_keys(keys, "the command line")?;
            merge(&mut said, nested(key, value.clone()));
        }
        let mut table = toml::Table::new();
        let model = said.get("model").and_then(|model| model.as_str()).unwrap_or("tiny");
        if model == "tiny" {
            let tiny: toml::Table = TINY.parse().map_err(|error| Error::config("tiny", format!("{error}")))?;
            merge(&mut table, tiny);
        }
        merge(&mut table, said);
        let config = Self::from_table(table)?;
        config.validate()?;
        Ok(config)
    }

    fn from_table(table: toml::Table) -> Result<Self> {
        // One key at a time, so that a value of the wrong type is reported with its key.
        for (key, value) in leaves(&table) {
            let alone = nested(&key, value.clone());
            if let Err(error) = alone.try_into::<Self>() {
                return Err(Error::config(key, format!("`{value}` does not fit: {}", error.message())));
            }
        }
        table.try_into::<Self>().map_err(|error| Error::config("configuration", error.message().to_owned()))
    }

    /// The text that resolves to this configuration again.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|error| Error::config("configuration", error.to_string()))
    }

    /// The training text.
    pub fn source(&self) -> Result<Source> {
        self.data.parse()
    }

    /// AdamW's settings.
    pub fn adamw(&self) -> AdamWConfig {
        let OptimizerSection { betas, eps, weight_decay, .. } = self.optimizer;
        AdamWConfig { betas, eps, weight_decay }
    }

    /// The scaler's settings; disabled where the compute type is not FP16.
    pub fn grad_scaler(&self) -> GradScalerConfig {
        GradScalerConfig { enabled: self.scaler.enabled && self.dtype.needs_loss_scale(), ..self.scaler }
    }

    /// The learning-rate schedule of a run of `total` steps.
    pub fn lr_schedule(&self, total: u64) -> LrSchedule {
        let warmup = (self.schedule.warmup_ratio * total as f64).round() as u64;
        LrSchedule {
            kind: self.schedule.kind,
            peak_lr: self.optimizer.lr,
            warmup_updates: self.schedule.warmup_steps.unwrap_or(warmup),
            total_updates: total,
            min_lr_ratio: self.schedule.min_lr_ratio,
        }
    }

    /// Refuses to go on with `saved`'s run where that would train something else. Says which other settings have changed.
    pub fn check_continues(&self, saved: &Self) -> Result<Vec<String>> {
        let tables = [saved, self].map(|config| toml::Table::try_from(config).unwrap_or_default());
        let value = |table: &toml::Table, key: &str| {
            leaves(table)
                .into_iter()
                .find(|(leaf, _)| leaf == key)
                .map_or("unset".into(), |(_, value)| value.to_string())
        };
        let fixed = ["model", "revision", "init", "tokenizer", "dtype", "data", "val", "seed", "train.seq_len"];
        let mut changes = Vec::new();
        for key in known_keys() {
            let [was, is] = tables.each_ref().map(|table| value(table, &key));
            if was == is {
                continue;
            }
            if fixed.contains(&key.as_str()) {
                let message = format!("was {was} and is now {is}; resume without changing it, or start a new run");
                return Err(Error::config(key, message));
            }
            changes.push(format!("`{key}` was {was} and is now {is}"));
        }
        Ok(changes)
    }

    /// Where the run computes.
    pub fn place(&self) -> Result<Place> {
        let ordinal = match self.device.as_str() {
            "auto" => return Ok(Place::Auto),
            "cpu" => return Ok(Place::Cpu),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        ordinal.map(Place::Cuda).ok_or_else(|| {
            Error::config("device", format!("`{}` is unknown; use `auto`, `cpu`, `cuda` or `cuda:0`", self.device))
        })
    }

    /// Refuses a device that this program cannot use.
    pub fn check_device(&self) -> Result<()> {
        let Place::Cuda(_) = self.place()? else { return Ok(()) };
        if !cfg!(feature = "cuda") {
            let message = "this program was built without GPU support; build it with `--features cuda`, which wants \
                           NVIDIA's compiler, or use `cpu`";
            return Err(Error::config("device", message));
        }
        Err(Error::config("device", "training on a GPU is being rebuilt on candle's kernels; use `cpu`"))
    }

    /// Refuses what makes no sense; [`Config::resolve`] has called it already.
    pub fn validate(&self) -> Result<()> {
        self.place()?;
        let positive = |key: &str, value: usize| match value {
            0 => Err(Error::config(key, "0 makes no sense here; use 1 or more")),
            1..=MOST => Ok(()),
            _ => Err(Error::config(key, format!("{value} is more than {MOST}, the most that makes sense"))),
        };
        positive("train.batch_size", self.train.batch_size)?;
        positive("train.seq_len", self.train.seq_len)?;
        positive("train.grad_accum", self.train.grad_accum)?;
        positive("threads", self.threads.unwrap_or(1))?;
        positive("checkpoint.keep_last", self.checkpoint.keep_last)?;
        positive("checkpoint.keep_weights", self.checkpoint.keep_weights)?;
        let within = |key: &str, value: f64, low: f64, high: f64| {
            if value >= low && value <= high {
                return Ok(());
            }
            Err(Error::config(key, format!("`{value}` is not between {low} and {high}")))
        };
        within("train.epochs", self.train.epochs, 0.0, 1e9)?;
        within("train.temperature", self.train.temperature, 0.0, 100.0)?;
        within("optimizer.lr", self.optimizer.lr, 0.0, 10.0)?;
        within("optimizer.eps", self.optimizer.eps, 0.0, 1.0)?;
        within("optimizer.weight_decay", self.optimizer.weight_decay, 0.0, 100.0)?;
        within("optimizer.max_grad_norm", self.optimizer.max_grad_norm, 0.0, 1e9)?;
        for beta in self.optimizer.betas {
            within("optimizer.betas", beta, 0.0, 1.0 - 1e-9)?;
        }
        within("schedule.warmup_ratio", self.schedule.warmup_ratio, 0.0, 1.0)?;
        within("schedule.min_lr_ratio", self.schedule.min_lr_ratio, 0.0, 1.0)?;
        let DropoutSection { embedding, residual, attention } = self.dropout;
        for (key, rate) in [("embedding", embedding), ("residual", residual), ("attention", attention)] {
            within(&format!("dropout.{key}"), rate, 0.0, 0.99)?;
        }
        let TelemetrySection { log_every, tensors_every, exponents_every, .. } = self.telemetry;
        for (key, every) in
            [("log_every", log_every), ("tensors_every", tensors_every), ("exponents_every", exponents_every)]
        {
            if every == 0 {
                let message = "0 makes no sense here; use 1 or more, more than there are steps for never";
                return Err(Error::config(format!("telemetry.{key}"), message));
            }
        }
        self.scaler.validate().map_err(|error| {
            // The scaler's own message begins with the key.
            let message = error.to_string();
            let (key, message) = message.split_once(": ").unwrap_or(("scaler", &message));
            Error::config(key, message)
        })?;
        self.precision.validate(self.dtype.compute)?;
        if let Some(run) = &self.checkpoint.run
            && (run.is_empty() || run.starts_with('.') || run.contains(['/', '\\', '\0']))
        {
            return Err(Error::config("checkpoint.run", format!("`{run}` is not a folder name")));
        }
        Ok(())
    }
}

/// Every key there is, with a value of its type.
fn template() -> Config {
    let mut config = Config {
        revision: Some(String::new()),
        tokenizer: Some(PathBuf::new()),
        val: Some(String::new()),
        threads: Some(1),
        ..Config::default()
    };
    config.train.steps = Some(1);
    config.schedule.warmup_steps = Some(1);
    config.checkpoint.run = Some(String::new());
    config.precision.fp8.layer = Some(0);
    config.precision.fp8.switch_variance = Some(0.0);
    config
}

/// All dotted keys of a configuration.
pub fn known_keys() -> Vec<String> {
    let table = toml::Table::try_from(template()).unwrap_or_default();
    leaves(&table).into_iter().map(|(key, _)| key).collect()
}

fn leaves(table: &toml::Table) -> Vec<(String, &toml::Value)> {
    let mut out = Vec::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => {
                out.extend(leaves(inner).into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value)));
            }
            value => out.push((key.clone(), value)),
        }
    }
    out
}

fn check_keys(keys: impl IntoIterator<Item = String>, origin: &str) -> Result<()> {
    let known = known_keys();
    for key in keys {
        if known.contains(&key) {
            continue;
        }
        let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
        let closeness = |candidate: &String| {
            strsim::jaro_winkler(candidate, &key).max(strsim::jaro_winkler(&last(candidate), &last(&key)))
        };
        let nearest = known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
        let hint = nearest.map_or_else(String::new, |nearest| format!("; did you mean `{nearest}`?"));
        return Err(Error::config(key, format!("unknown key in {origin}{hint}")));
    }
    Ok(())
}

/// The table in which the dotted `key` has `value`.
fn nested(key: &str, value: toml::Value) -> toml::Table {
    let mut table = toml::Table::new();
    match key.split_once('.') {
        None => table.insert(key.to_owned(), value),
        Some((head, rest)) => table.insert(head.to_owned(), toml::Value::Table(nested(rest, value))),
    };
    table
}

fn merge(base: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(base)), toml::Value::Table(over)) => merge(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    fn resolve(file: &str, overrides: &[(&str, &str)]) -> Result<Config> {
        let overrides = overrides
            .iter()
            .map(|(key, value)| {
                let table: toml::Table = format!("v = {value}").parse().unwrap();
                ((*key).to_owned(), table["v"].clone())
            })
            .collect();
        Config::resolve(&Layers { file: Some(("a.toml".into(), file.into())), overrides })
    }

    #[test]
    fn flags_go_over_the_file_over_the_model_over_the_defaults() {
        let config = resolve("[optimizer]\nlr = 0.5\nweight_decay = 0.2", &[("optimizer.lr", "0.25")]).unwrap();
        assert_eq!((config.optimizer.lr, config.optimizer.weight_decay), (0.25, 0.2));
        let tiny = resolve("", &[]).unwrap();
        let other = resolve("model = \"distilgpt2\"", &[]).unwrap();
        assert_eq!(other.optimizer.lr, Config::default().optimizer.lr);
        assert_ne!(tiny.optimizer.lr, other.optimizer.lr);
    }

    #[test]
    fn a_resolved_configuration_resolves_to_itself() {
        for file in ["", "model = \"gpt2\"\nthreads = 2\n[scaler]\ninit_scale = 1024.0\n[train]\nsteps = 7"] {
            let config = resolve(file, &[]).unwrap();
            assert_eq!(resolve(&config.to_toml().unwrap(), &[]).unwrap(), config);
        }
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let message = |file: &str| resolve(file, &[]).unwrap_err().to_string();
        assert!(message("batch_size = 4").contains("`train.batch_size`"), "{}", message("batch_size = 4"));
        assert!(message("[scaler]\nint_scale = 4").contains("`scaler.init_scale`"));
        assert!(message("[train]\nseqlen = 4").contains("`train.seq_len`"));
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_key() {
        let error = resolve("[train]\nbatch_size = \"many\"", &[]).unwrap_err();
        assert!(error.to_string().starts_with("train.batch_size: "), "{error}");
        let error = resolve("dtype = \"fp8\"", &[]).unwrap_err();
        assert!(error.to_string().starts_with("dtype: "), "{error}");
    }

    #[test]
    fn devices_are_told_by_name() {
        let place = |device: &str| resolve(&format!("device = \"{device}\""), &[]).and_then(|config| config.place());
        assert_eq!(place("auto").unwrap(), Place::Auto);
        assert_eq!(place("cpu").unwrap(), Place::Cpu);
        assert_eq!(place("cuda").unwrap(), Place::Cuda(0));
        assert_eq!(place("cuda:3").unwrap(), Place::Cuda(3));
        for device in ["gpu", "cuda:", "cuda:-1", "cuda3", ""] {
            let message = place(device).unwrap_err().to_string();
            assert!(message.starts_with(&format!("device: `{device}` is unknown")), "{message}");
        }
    }

    #[test]
    fn a_key_of_an_earlier_version_is_no_error() {
        assert_eq!(resolve("cuda_graph = true", &[]).unwrap(), resolve("", &[]).unwrap());
    }

    #[test]
    fn nonsense_is_refused_by_key() {
        for (file, key) in [
            ("[train]\nbatch_size = 0", "train.batch_size"),
            ("[optimizer]\nlr = -1.0", "optimizer.lr"),
            ("[optimizer]\nlr = nan", "optimizer.lr"),
            ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas"),
            ("[scaler]\ngrowth_factor = 1.0", "scaler"),
            ("[dropout]\nresidual = 1.5", "dropout.residual"),
            ("dtype = \"bf16\"\n[precision]\nfallback = \"layer\"", "precision.fallback"),
            ("[precision]\nfallback = \"block\"", "precision.fallback"),
            ("[checkpoint]\nrun = \"../x\"", "checkpoint.run"),
        ] {
            let message = resolve(file, &[]).unwrap_err().to_string();
            assert!(message.starts_with(key), "{message}");
        }
    }
}
