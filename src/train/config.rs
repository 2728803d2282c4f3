//! A run's configuration: what a TOML file, flags and `--set` may say, with defaults for everything.

mod explain;
mod keys;
mod sections;

use crate::data::{Bos, Fields, Format, Source};
pub use crate::engine::device::Place;
use crate::engine::kernels::Choice;
use crate::engine::model::{Lora, ModelSpec};
use crate::engine::optim::{AdamWConfig, LrSchedule, OptimizerConfig};
use crate::precision::{Dtype, FallbackRule, GradScalerConfig, PrecisionConfig, PrecisionPolicy};
use crate::{Error, Result};
pub use keys::known_keys;
use keys::{check_keys, leaves, merge, nested};
use sections::LoraSection;
use sections::{CheckpointSection, DropoutSection, OptimizerSection, ScheduleSection, TelemetrySection, TrainSection};
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
    /// The source of initial weights.
    pub init: Init,
    /// A `tokenizer.json` to use instead of the model's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Training text: `grammar`, `tiny_shakespeare`, a file, a folder, a glob, `hf://datasets/…`, or `-`.
    pub data: String,
    /// Validation text; by default the last tenth of the training text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val: Option<String>,
    /// The format of all text, instead of by the files' names: `text`, `jsonl`, `json`, `csv`, `tsv` or `parquet`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The chat template to use instead of the model's: a file, or `chatml`, `smollm2`, `qwen2.5`, `qwen3`,
    /// `qwen3-2507`, `llama3`, `llama3.1`, `gemma3` or `plain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Whether texts begin with the BOS token: `auto` if the model's tokenizer adds it, `always` or `never`. Chat templates write
    /// their own.
    pub bos: Bos,
    /// `fp32`, `fp16`, `bf16`, or a policy such as `p=f32,c=f16,g=f16,r=f32`.
    pub dtype: PrecisionPolicy,
    /// The seed of every random stream.
    pub seed: u64,
    /// Device: `cpu`, `cuda`, `cuda:N`, or `auto` for a GPU if this program can use one.
    pub device: String,
    /// `auto`, `candle` for candle's own operations, or `fused` for the project's. It is for comparisons; what a user wants
    /// is `auto`, which is left out of files.
    #[serde(skip_serializing_if = "is_auto")]
    pub kernels: Choice,
    /// Compute threads; all processors by default. The numbers do not depend on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Names of the fields with text, if they are not the usual ones.
    pub fields: Fields,
    /// Batches, length of the run, evaluation and samples.
    pub train: TrainSection,
    /// Low-rank adapters, trained in place of the model's parameters.
    pub lora: LoraSection,
    /// AdamW and clipping.
    pub optimizer: OptimizerSection,
    /// The learning rate over time.
    pub schedule: ScheduleSection,
    /// The loss scale, which is used if the policy computes in FP16.
    pub scaler: GradScalerConfig,
    /// Layers that compute in another type than the policy's.
    pub precision: PrecisionConfig,
    /// Dropout rates; off by default.
    pub dropout: DropoutSection,
    /// Checkpoints: where, when, and how many to keep.
    pub checkpoint: CheckpointSection,
    /// What is measured and logged, and how often.
    pub telemetry: TelemetrySection,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model: "tiny".into(),
            revision: None,
            init: Init::Pretrained,
            tokenizer: None,
            data: "tiny_shakespeare".into(),
            val: None,
            format: None,
            chat_template: None,
            bos: Bos::Auto,
            dtype: PrecisionPolicy::FP16,
            seed: 1,
            device: "auto".into(),
            kernels: Choice::Auto,
            threads: None,
            fields: Fields::default(),
            train: TrainSection::default(),
            lora: LoraSection::default(),
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

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_auto(choice: &Choice) -> bool {
    *choice == Choice::Auto
}

/// Top-level keys of earlier versions, which a run's saved configuration may contain. They are ignored.
const RETIRED: [&str; 1] = ["cuda_graph"];

/// Layers of settings; each overrides the previous ones.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// A configuration file's name and text.
    pub file: Option<(String, String)>,
    /// Whether the file is a run's own: older versions wrote both `epochs` and `steps` there, and `steps` took precedence. Those
    /// that did not write `bos` added no BOS token.
    pub saved: bool,
    /// Dotted keys with their values, from flags and `--set`, in the order they were typed.
    pub overrides: Vec<(String, toml::Value)>,
}

impl Config {
    /// Applies `layers` to the defaults and validates the result.
    pub fn resolve(layers: &Layers) -> Result<Self> {
        let mut said = toml::Table::new();
        if let Some((origin, text)) = &layers.file {
            let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
                Error::config(format!("`{origin}`"), error.to_string().trim_end().to_owned())
            })?;
            table.retain(|key, _| !RETIRED.contains(&key));
            check_keys(leaves(&table).into_iter().map(|(key, _)| key), origin)?;
            if layers.saved {
                if says(&table, "steps") {
                    forget(&mut table, "epochs");
                }
                table.entry("bos").or_insert("never".into());
            }
            add_layer(&mut said, table, origin)?;
        }
        let mut typed = toml::Table::new();
        for (key, value) in &layers.overrides {
            // Check keys before building a table, which a key of a thousand parts would nest too deeply.
            let mut keys: Vec<String> =
                value.as_table().map(leaves).into_iter().flatten().map(|(rest, _)| format!("{key}.{rest}")).collect();
            if keys.is_empty() {
                keys.push(key.clone());
            }
            check_keys(keys, "the command line")?;
            merge(&mut typed, nested(key, value.clone()));
        }
        add_layer(&mut said, typed, "the command line")?;
        let mut table = toml::Table::new();
        let model = said.get("model").and_then(|model| model.as_str()).unwrap_or("tiny");
        if model == "tiny" {
            table = TINY.parse().map_err(|error| Error::config("tiny", format!("{error}")))?;
        }
        add_layer(&mut table, said, "the configuration")?;
        let config = Self::from_table(&table)?;
        config.validate()?;
        Ok(config)
    }

    fn from_table(table: &toml::Table) -> Result<Self> {
        let all = leaves(table);
        let read = serde_path_to_error::deserialize(toml::Value::Table(table.clone()));
        read.map_err(|error: serde_path_to_error::Error<toml::de::Error>| {
            let path = error.path().to_string();
            // Report an element of a list as the list.
            let key = path.split('[').next().unwrap_or_default();
            let value = all.iter().find(|(leaf, _)| leaf == key).map(|(_, value)| format!("`{value}` does not fit: "));
            if all.iter().any(|(leaf, value)| leaf == key && value.as_integer().is_some_and(|value| value < 0)) {
                return Error::config(key, "must not be negative");
            }
            Error::config(key, value.unwrap_or_default() + error.inner().message())
        })
    }

    /// TOML text that resolves to this configuration.
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

    /// The optimizer with the way it stores its moments.
    pub fn optimizer(&self) -> OptimizerConfig {
        OptimizerConfig { adamw: self.adamw(), kind: self.train.optimizer, seed: self.seed }
    }

    /// `spec` with the adapters of this configuration, if there are any.
    pub fn adapted(&self, spec: ModelSpec) -> Result<ModelSpec> {
        let LoraSection { r, alpha, dropout, rslora, dora, targets, modules_to_save } = &self.lora;
        let (Some(r), Some(alpha)) = (*r, *alpha) else { return Ok(spec) };
        let targets = Lora::targets(&spec, targets)?;
        let saved = Lora::saved(&spec, modules_to_save)?;
        if let Some(both) = saved.intersection(&targets).next() {
            let message = format!("`{}` has an adapter already; name it in one place", spec.layer_name(*both));
            return Err(Error::config("lora.modules_to_save", message));
        }
        let lora = Lora { r, alpha, dropout: *dropout, rslora: *rslora, dora: *dora, targets, saved };
        Ok(ModelSpec { lora: Some(lora), ..spec })
    }

    /// The scaler's settings; disabled if the compute type is not FP16.
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

    /// Rejects changes from the `saved` configuration that need a new run; returns the other changed settings.
    pub fn check_continues(&self, saved: &Self) -> Result<Vec<String>> {
        let tables = [saved, self].map(|config| toml::Table::try_from(config).unwrap_or_default());
        let value = |table: &toml::Table, key: &str| {
            leaves(table)
                .into_iter()
                .find(|(leaf, _)| leaf == key)
                .map_or("unset".into(), |(_, value)| value.to_string())
        };
        let fixed = [
            "model",
            "revision",
            "init",
            "tokenizer",
            "dtype",
            "data",
            "val",
            "format",
            "chat_template",
            "bos",
            "fields.text",
            "fields.prompt",
            "fields.completion",
            "seed",
            "train.seq_len",
            "train.loss_on",
            "train.packing",
            "train.optimizer",
            "lora.r",
            "lora.alpha",
            "lora.rslora",
            "lora.dora",
            "lora.targets",
            "lora.modules_to_save",
        ];
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

    /// The device to compute on.
    pub fn place(&self) -> Result<Place> {
        self.device.parse().map_err(|message: String| Error::config("device", message))
    }

    /// Rejects invalid settings; [`Config::resolve`] calls it.
    pub fn validate(&self) -> Result<()> {
        self.place()?;
        let positive = |key: &str, value: usize| match value {
            0 => Err(Error::config(key, "must be at least 1")),
            1..=MOST => Ok(()),
            _ => Err(Error::config(key, format!("{value} is more than the maximum of {MOST}"))),
        };
        positive("train.batch_size", self.train.batch_size)?;
        positive("train.seq_len", self.train.seq_len)?;
        positive("train.grad_accum", self.train.grad_accum)?;
        check_threads("threads", self.threads)?;
        positive("checkpoint.keep_last", self.checkpoint.keep_last)?;
        positive("checkpoint.keep_weights", self.checkpoint.keep_weights)?;
        let within = |key: &str, value: f64, low: f64, high: f64| {
            if value >= low && value <= high {
                return Ok(());
            }
            Err(Error::config(key, format!("`{value}` is not between {low} and {high}")))
        };
        let epochs = self.train.epochs.unwrap_or(1.0);
        if epochs == 0.0 || self.train.steps == Some(0) {
            let key = if epochs == 0.0 { "train.epochs" } else { "train.steps" };
            return Err(Error::config(key, "0 would train nothing; use a number above 0"));
        }
        within("train.epochs", epochs, 0.0, 1e9)?;
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
                let message = "must be at least 1; use more than the number of steps for never";
                return Err(Error::config(format!("telemetry.{key}"), message));
            }
        }
        self.scaler.validate().map_err(|error| {
            // The scaler's own message starts with the key.
            let message = error.to_string();
            let (key, message) = message.split_once(": ").unwrap_or(("scaler", &message));
            Error::config(key, message)
        })?;
        self.precision.validate(self.dtype.compute)?;
        self.lora.validate()?;
        let narrowed = self.lora.r.is_some() || self.dtype.params != Dtype::F32;
        if narrowed && (self.precision.fallback != FallbackRule::Off || self.precision.fp8.layer.is_some()) {
            let key = if self.precision.fp8.layer.is_some() { "precision.fp8.layer" } else { "precision.fallback" };
            let message = "needs FP32 masters of every weight; leave it out, or train without `lora` and with `p=f32`";
            return Err(Error::config(key, message));
        }
        if let Some(run) = &self.checkpoint.run
            && (run.is_empty() || run.starts_with('.') || run.contains(['/', '\\', '\0']))
        {
            return Err(Error::config("checkpoint.run", format!("`{run}` is not a folder name")));
        }
        Ok(())
    }
}

/// Upper limit on threads; more are not faster and take long to start.
const MOST_THREADS: usize = 1024;

/// Rejects an invalid number of threads; `key` names the flag or key.
pub fn check_threads(key: &str, threads: Option<usize>) -> Result<()> {
    match threads {
        Some(0) => Err(Error::config(key, "must be at least 1")),
        Some(threads) if threads > MOST_THREADS => {
            Err(Error::config(key, format!("{threads} is more than the maximum of {MOST_THREADS}")))
        }
        _ => Ok(()),
    }
}

/// Whether `[train]` has `key`.
fn says(table: &toml::Table, key: &str) -> bool {
    table.get("train").and_then(toml::Value::as_table).is_some_and(|train| train.contains_key(key))
}

fn forget(table: &mut toml::Table, key: &str) {
    if let Some(toml::Value::Table(train)) = table.get_mut("train") {
        train.remove(key);
    }
}

/// Merges `over` into `base`. `epochs` and `steps` both set a run's length, so either replaces the other.
fn add_layer(base: &mut toml::Table, over: toml::Table, origin: &str) -> Result<()> {
    match (says(&over, "epochs"), says(&over, "steps")) {
        (true, true) => {
            let message = format!("{origin} sets both `epochs` and `steps`; set only one");
            return Err(Error::config("train.epochs", message));
        }
        (true, false) => forget(base, "steps"),
        (false, true) => forget(base, "epochs"),
        (false, false) => {}
    }
    merge(base, over);
    Ok(())
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
        Config::resolve(&Layers { file: Some(("a.toml".into(), file.into())), overrides, saved: false })
    }

    /// N5: `--epochs 1` of the built-in run was 600 steps.
    #[test]
    fn epochs_or_steps_that_are_asked_for_replace_the_presets() {
        let length = |file: &str, overrides: &[(&str, &str)]| {
            resolve(file, overrides).map(|config| (config.train.epochs, config.train.steps)).unwrap()
        };
        assert_eq!(length("", &[]), (None, Some(600)));
        assert_eq!(length("", &[("train.epochs", "1.0")]), (Some(1.0), None));
        assert_eq!(length("[train]\nepochs = 2.0", &[]), (Some(2.0), None));
        assert_eq!(length("[train]\nepochs = 2.0", &[("train.steps", "7")]), (None, Some(7)));
        assert_eq!(length("[train]\nsteps = 7", &[("train.epochs", "0.5")]), (Some(0.5), None));
        assert_eq!(length("model = \"gpt2\"", &[]), (None, None));
        for (file, overrides) in
            [("[train]\nepochs = 2.0\nsteps = 7", &[][..]), ("", &[("train.epochs", "1.0"), ("train.steps", "7")])]
        {
            let message = resolve(file, overrides).unwrap_err().to_string();
            assert!(message.contains("both `epochs` and `steps`"), "{message}");
        }
        for nothing in ["epochs = 0.0", "steps = 0"] {
            let message = resolve(&format!("[train]\n{nothing}"), &[]).unwrap_err().to_string();
            assert!(message.contains("0 would train nothing"), "{message}");
        }
    }

    #[test]
    fn a_run_of_an_older_version_with_both_uses_its_steps() {
        let file = Some(("config.toml".into(), "[train]\nepochs = 1.0\nsteps = 7".into()));
        let layers = Layers { file, saved: true, overrides: Vec::new() };
        assert_eq!(Config::resolve(&layers).unwrap().train.steps, Some(7));
        let epochs = vec![("train.epochs".to_owned(), toml::Value::from(3.0))];
        let train = Config::resolve(&Layers { overrides: epochs, ..layers }).unwrap().train;
        assert_eq!((train.epochs, train.steps), (Some(3.0), None));
    }

    /// N1: every model but `tiny` trained on the toy grammar.
    #[test]
    fn the_default_text_is_shakespeare_but_for_the_built_in_model() {
        assert_eq!(resolve("", &[]).unwrap().data, "grammar");
        assert_eq!(resolve("model = \"distilgpt2\"", &[]).unwrap().data, "tiny_shakespeare");
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
    fn an_unknown_device_is_refused_by_its_key() {
        let message = resolve("device = \"gpu\"", &[]).unwrap_err().to_string();
        assert!(message.starts_with("device: `gpu` is unknown"), "{message}");
    }

    #[test]
    fn a_key_of_an_earlier_version_is_no_error() {
        assert_eq!(resolve("cuda_graph = true", &[]).unwrap(), resolve("", &[]).unwrap());
    }

    #[test]
    fn invalid_settings_are_rejected_by_key() {
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
