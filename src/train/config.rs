//! A run's configuration: the settings of a TOML file, flags and `--set`, all with defaults.

mod keys;
mod sections;

use crate::data::{Bos, DataFormat, DataSource, FieldNames, HELD_OUT, LossOn, SampleKind};
pub use crate::engine::device::DeviceSpec;
use crate::engine::kernels::KernelBackend;
use crate::engine::model::{DropoutRates, Lora, ModelSpec};
use crate::engine::optim::{AdamWConfig, LrSchedule, OptimizerConfig};
use crate::precision::{Dtype, FallbackRule, GradScalerConfig, PrecisionConfig, PrecisionPolicy, UnitSet};
use crate::settings::Heading::{Machine, Text, Training};
pub use crate::settings::Interval;
use crate::settings::{Kind, number, settings, whole_number};
use crate::train::trainer::LrRangeTest;
use crate::{Error, Result};
pub(crate) use keys::{check_floats, settings_at};
use keys::{check_keys, known, leaves, merge, nested, toml_message, value_at, value_error};
pub use sections::ObjectiveSection;
use sections::{CheckpointSection, LoraSection, OptimizerSection, ScheduleSection, TelemetrySection, TrainSection};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The defaults of a run of the model `tiny`; the user's settings override them.
const TINY_PRESET: &str = include_str!("../../configs/tiny-grammar.toml");

/// The source of the initial weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightInit {
    /// The model's published or stored weights; random ones for `tiny`, which has none.
    #[default]
    Pretrained,
    /// GPT-2's initialization from the seed.
    Random,
}

/// One data set, or several that are mixed: sources, with weights if they end in `=WEIGHT`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "name a data set, or several in a list, in quotes")]
pub enum DataSets {
    /// A source.
    One(String),
    /// Sources.
    Several(Vec<String>),
}

impl DataSets {
    /// The sources, as the user wrote them.
    pub fn names(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Several(names) => names,
        }
    }
}

impl fmt::Display for DataSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(", "))
    }
}

settings! {
    /// Everything that defines a run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Config {
        /// `tiny`, a local Hugging Face folder, a model of the Hugging Face Hub, or with `init = "random"` an
        /// architecture.
        model: String = "tiny".into(), fixed(), flag("model", Text, 0, "NAME|PATH"), short('m'),
            help("`tiny`, a model of the Hugging Face Hub, a folder, a .gguf file, or an architecture with `--init \
                  random`");
        /// The Hub's branch, tag or commit.
        revision: Option<String> = None, fixed(), flag("revision", Text, 0, "REVISION");
        /// The source of initial weights.
        init: WeightInit = WeightInit::Pretrained, fixed(), flag("init", Text, 0, "INIT"),
            help("Initial weights: pretrained or random");
        /// A `tokenizer.json` to use instead of the model's, or `bytes` for one token per byte.
        tokenizer: Option<PathBuf> = None, fixed(), flag("tokenizer", Text, 0, "FILE"),
            help("A tokenizer.json to use instead of the model's, or `bytes`");
        /// Training text: `grammar`, `tiny_shakespeare`, `chats`, `preferences`, `sums`, a file, a folder, a glob,
        /// `hf://datasets/…`, or `-`. A list mixes several, `["a.jsonl=0.7", "b.txt=0.3"]`, by their shares of the
        /// tokens; without weights they are equal.
        data: DataSets = DataSets::One("tiny_shakespeare".into()), fixed(), flag("data", Text, 0, "TEXT"), short('d'),
            repeated(),
            help("Training text: `grammar`, `tiny_shakespeare`, `chats`, `preferences`, `sums`, a file or folder, \
                  `hf://datasets/…`, or `-`; repeat it to mix several, with their shares of the tokens: \
                  `--data a.jsonl=0.7 --data b.txt=0.3`");
        /// Validation text, the share of the training text that is held out, such as `5%`, or `none`; by default the
        /// last tenth.
        val: Option<String> = None, fixed(), flag("val", Text, 0, "TEXT"),
            help("Validation text, a share of the training text such as 5%, or `none` [default: its last tenth]");
        /// The input format, overriding file extensions: `text`, `jsonl`, `json`, `csv`, `tsv` or `parquet`.
        format: Option<DataFormat> = None, fixed(), flag("format", Text, 0, "FORMAT"),
            help("Input format, overriding the file extension: text, jsonl, json, csv, tsv or parquet");
        /// The chat template to use instead of the model's: a file, or `chatml`, `smollm2`, `qwen2.5`, `qwen3`,
        /// `qwen3-2507`, `llama3`, `llama3.1`, `gemma3`, `phi3` or `plain`.
        chat_template: Option<String> = None, fixed(), flag("chat-template", Text, 1, "FILE|NAME"),
            help("Chat template: a file, or a name such as chatml or llama3.1 [default: the model's]");
        /// Whether texts begin with the BOS token: `auto` if the model's tokenizer adds it, `always` or `never`. Chat
        /// templates write their own.
        bos: Bos = Bos::Auto, fixed(), flag("bos", Text, 1, "RULE"),
            help("Whether texts begin with the BOS token: auto (if the model's tokenizer adds it), always or never");
        /// `fp32`, `fp16`, `bf16`, or a policy such as `p=f32,c=f16,g=f16,r=f32`.
        dtype: PrecisionPolicy = PrecisionPolicy::FP16, fixed(), flag("dtype", Text, 3, "DTYPE"),
            help("fp16, bf16, fp32, or a policy such as p=f32,c=f16,g=f16,r=f32 [default: fp16]");
        /// The seed of every random stream.
        seed: u64 = 1, fixed(), flag("seed", Training, 0, "SEED"), help("Seed of every random stream");
        /// Device: `cpu`, `cuda`, `cuda:N`, `metal`, or `auto` for an NVIDIA GPU if this program can use one.
        device: String = "auto".into(), flag("device", Machine, 0, "DEVICE"),
            help("Device: auto, cpu, cuda, cuda:N or metal");
        /// Kernels: `auto`, `candle` for candle's operations, or `fused` for this program's. Use `auto`, which is not
        /// written to files; the others are for comparisons.
        kernels: KernelBackend = KernelBackend::Auto, flag("kernels", Machine, 0, "NAME"), hidden(),
            help("Kernels: auto, candle or fused");
        /// Compute threads; all processors by default. The numbers do not depend on it.
        threads: Option<usize> = None, flag("threads", Machine, 0, "THREADS"),
            help("Compute threads [default: all processors]");
        /// The folder that the run was started in. A resumed run looks there for paths that do not exist in its own.
        folder: Option<PathBuf> = None;
        /// Names of the fields that contain text, if they differ from the usual names.
        fields: FieldNames = FieldNames::default(), section(FieldNames::settings);
        /// Batches, length of the run, evaluation and samples.
        train: TrainSection = TrainSection::default(), section(TrainSection::settings);
        /// Low-rank adapters, trained instead of the model's weights.
        lora: LoraSection = LoraSection::default(), section(LoraSection::settings),
            flag("lora", Training, 3, "SETTINGS"),
            help("Train low-rank adapters (LoRA) instead of the full model: a rank such as 16, and `alpha=32`, \
                 `target_modules=q_proj+v_proj`, `dropout=0.05`, `use_rslora`, `use_dora`, `modules_to_save=norm`");
        /// The training signal.
        objective: ObjectiveSection = ObjectiveSection::default(), section(ObjectiveSection::settings);
        /// AdamW and clipping.
        optimizer: OptimizerSection = OptimizerSection::default(), section(OptimizerSection::settings);
        /// The learning rate over time.
        schedule: ScheduleSection = ScheduleSection::default(), section(ScheduleSection::settings);
        /// The loss scale, used if the policy computes in FP16.
        scaler: GradScalerConfig = GradScalerConfig::default(), section(GradScalerConfig::settings);
        /// Layers whose compute dtype differs from the policy's.
        precision: PrecisionConfig = PrecisionConfig::default(), section(PrecisionConfig::settings);
        /// Dropout rates; off by default.
        dropout: DropoutRates = DropoutRates::default(), section(DropoutRates::settings);
        /// Checkpoints: folder, interval, and number to keep.
        checkpoint: CheckpointSection = CheckpointSection::default(), section(CheckpointSection::settings);
        /// Measurements and logs, and their intervals.
        telemetry: TelemetrySection = TelemetrySection::default(), section(TelemetrySection::settings);
    }
}

/// Layers of settings; each overrides the previous ones.
#[derive(Clone, Debug, Default)]
pub struct ConfigLayers {
    /// A configuration file's name and text.
    pub file: Option<(String, String)>,
    /// Dotted keys with their values, from flags and `--set`, in the order they were typed.
    pub overrides: Vec<(String, toml::Value)>,
}

impl Config {
    /// Applies `layers` to the defaults and validates the result. An error about a key names the file that sets it.
    pub fn resolve(layers: &ConfigLayers) -> Result<Self> {
        Self::merged(layers).map_err(|error| match (error, &layers.file) {
            (Error::Config { key, message }, Some((origin, text)))
                if !layers.overrides.iter().any(|(typed, _)| key.starts_with(typed.as_str()))
                    && text.parse().is_ok_and(|table| value_at(&table, &key).is_some()) =>
            {
                Error::Config { key: format!("`{origin}`: {key}"), message }
            }
            (error, _) => error,
        })
    }

    fn merged(layers: &ConfigLayers) -> Result<Self> {
        let mut said = toml::Table::new();
        if let Some((origin, text)) = &layers.file {
            let wrong = |error: toml::de::Error| Error::config(format!("`{origin}`"), toml_message(text, &error));
            let table: toml::Table = text.parse().map_err(wrong)?;
            check_floats(text).map_err(|problem| Error::config(format!("`{origin}`"), problem))?;
            check_keys(leaves(&table).into_iter().map(|(key, _)| key))?;
            merge_layer(&mut said, table)?;
        }
        let mut typed = toml::Table::new();
        for (key, value) in &layers.overrides {
            // Check keys before building a table, which a key of a thousand parts would nest too deeply.
            check_keys(settings_at(key, value.clone()).into_iter().map(|(key, _)| key))?;
            merge(&mut typed, nested(key, value.clone()));
        }
        merge_layer(&mut said, typed)?;
        let said = with_numbers(&said);
        let mut table = toml::Table::new();
        let model = said.get("model").and_then(|model| model.as_str()).unwrap_or("tiny");
        if model == "tiny" {
            table = TINY_PRESET.parse().map_err(|error| Error::config("tiny", format!("{error}")))?;
            // The preset's scale needs some steps to settle, which only its own run shall show.
            let measured = !is_demonstration(&said);
            merge(&mut table, nested("scaler.measure_first", measured.into()));
        }
        merge_layer(&mut table, said)?;
        let mut config = Self::from_table(&table)?;
        // Also one that is typed with its default value: without adapters, the whole model would be trained.
        if let (None, Some((key, _))) =
            (config.lora.r, layers.overrides.iter().find(|(key, _)| key.starts_with("lora.")))
        {
            return Err(LoraSection::without_rank(key));
        }
        if !config.precision.masters {
            config.dtype.params = config.dtype.compute;
        }
        config.validate()?;
        Ok(config)
    }

    fn from_table(table: &toml::Table) -> Result<Self> {
        // Here numbers are still as they were typed: 1e-300 would be 0 in FP32.
        known()
            .iter()
            .filter_map(|setting| Some(setting.check(value_at(table, &setting.key)?)))
            .collect::<Result<()>>()?;
        let read = serde_path_to_error::deserialize(toml::Value::Table(table.clone()));
        read.map_err(|error: serde_path_to_error::Error<toml::de::Error>| {
            value_error(table, &error.path().to_string(), error.inner().message())
        })
    }

    /// The value of every key that has one.
    pub fn values(&self) -> Result<BTreeMap<String, toml::Value>> {
        let table = toml::Table::try_from(self).map_err(|error| Error::config("configuration", error.to_string()))?;
        Ok(leaves(&table).into_iter().map(|(key, value)| (key, value.clone())).collect())
    }

    /// TOML text that resolves to this configuration.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|error| Error::config("configuration", error.to_string()))
    }

    /// [`Config::to_toml`] with a comment above each key. Keys without a value are comments themselves.
    pub fn explained(&self) -> Result<String> {
        let values = self.values()?;
        let mut text = String::new();
        for setting in Self::settings() {
            if setting.kind == Kind::Section {
                _ = write!(text, "\n[{}]\n", setting.key);
                continue;
            }
            for line in setting.comment {
                _ = writeln!(text, "#{line}");
            }
            _ = match values.get(&setting.key) {
                Some(value) => writeln!(text, "{} = {value}", setting.name()),
                None => writeln!(text, "# {} =", setting.name()),
            };
        }
        Ok(text)
    }

    /// The data sets with their shares of the tokens.
    pub fn sources(&self) -> Result<Vec<(DataSource, f64)>> {
        let sets = self.data.names().iter().map(|name| self.weighted(name)).collect::<Result<Vec<_>>>()?;
        if sets.is_empty() {
            return Err(Error::config("data", "the list is empty; name a data set"));
        }
        let without = sets.iter().find(|(_, weight)| weight.is_none());
        if let Some((without, _)) = without
            && sets.iter().any(|(_, weight)| weight.is_some())
        {
            return Err(Error::config(
                "data",
                format!("`{without}` needs a weight, such as `{without}=0.5`, because others have one"),
            ));
        }
        let sum: f64 = sets.iter().map(|(_, weight)| weight.unwrap_or(1.0)).sum();
        sets.iter().map(|(name, weight)| Ok((self.find(name)?, weight.unwrap_or(1.0) / sum))).collect()
    }

    /// The number of times that a run reads standard input.
    pub fn stdin_reads(&self) -> Result<usize> {
        let sources = self.sources()?;
        let training = sources.iter().filter(|(source, _)| *source == DataSource::Stdin).count();
        // Each data set reads the validation data.
        Ok(training + if self.val.as_deref() == Some("-") { sources.len() } else { 0 })
    }

    /// Splits `name=weight`; `text` is a name if it is a path that exists.
    fn weighted<'a>(&self, text: &'a str) -> Result<(&'a str, Option<f64>)> {
        let exists = |name: &str| self.locate(name).exists();
        let Some((name, weight)) = text.rsplit_once('=').filter(|_| !exists(text)) else { return Ok((text, None)) };
        match number(weight) {
            Ok(weight) if weight > 0.0 && weight.is_finite() => Ok((name, Some(weight))),
            Err(_) if !exists(name) => Ok((text, None)),
            _ => Err(Error::config("data", format!("`{weight}`, the weight of `{name}`, is not a number above 0"))),
        }
    }

    /// `path`, or the same path in the folder that the run was started in, if it leads to something only there.
    pub fn locate(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        let there = self.folder.iter().map(|folder| folder.join(path)).find(|there| there.exists());
        there.filter(|_| !path.exists()).unwrap_or_else(|| path.to_path_buf())
    }

    /// The source `text`; a relative path may also be in the folder that the run was started in.
    pub fn find(&self, text: &str) -> Result<DataSource> {
        let source: DataSource = text.parse()?;
        Ok(self.folder.iter().fold(source, |source, folder| source.or_in(folder)))
    }

    /// This configuration for a test of learning rates, which is short and begins with a loss scale that fits. Fails
    /// with [`Error::Config`] for an objective whose loss shows no progress.
    pub fn for_range_test(mut self) -> Result<Self> {
        if self.objective.kind.samples_completions() {
            let message = "the loss of sampled completions stays near 0 at every rate, because it compares those of a \
                           prompt with each other; compare the rewards of short runs with different `--lr`";
            return Err(Error::config("--find-lr", message));
        }
        self.train.steps = Some(LrRangeTest::STEPS);
        self.train.epochs = None;
        self.scaler.measure_first = true;
        Ok(self)
    }

    /// The share of the training text that is held out for validation; `None` if `val` names a text.
    pub fn held_out(&self) -> Result<Option<f64>> {
        let Some(val) = &self.val else { return Ok(Some(HELD_OUT)) };
        let percent = val.strip_suffix('%').and_then(|percent| number(percent).ok());
        match percent {
            None => Ok((val == "none").then_some(0.0)),
            Some(percent) if percent > 0.0 && percent < 100.0 => Ok(Some(percent / 100.0)),
            Some(_) => {
                Err(Error::config("val", format!("`{val}` is not between 0% and 100%; for no validation, use `none`")))
            }
        }
    }

    /// AdamW's settings.
    pub fn adamw(&self) -> AdamWConfig {
        let OptimizerSection { betas, eps, weight_decay, .. } = self.optimizer;
        AdamWConfig { betas, eps, weight_decay }
    }

    /// The optimizer with the way it stores its moments.
    pub fn optimizer(&self) -> OptimizerConfig {
        let rounding_seed = self.precision.masters.then_some(self.seed);
        OptimizerConfig { adamw: self.adamw(), kind: self.train.optimizer, rounding_seed }
    }

    /// `spec` with the adapters or the frozen modules of this configuration.
    pub fn with_trained_parts(&self, spec: ModelSpec) -> Result<ModelSpec> {
        let LoraSection { r, alpha, dropout, use_rslora, use_dora, target_modules, modules_to_save } = &self.lora;
        let Some(r) = *r else {
            return match &self.train.freeze {
                Some(names) => spec.with_frozen(FREEZE, names),
                None => Ok(spec),
            };
        };
        let alpha = alpha.unwrap_or(2.0 * r as f64);
        let targets = Lora::targets(&spec, target_modules)?;
        let saved = Lora::modules_to_save(&spec, modules_to_save)?;
        if let Some(both) = saved.iter().find(|layer| targets.contains(&spec.adapter_layer(**layer))) {
            let message =
                format!("`{}` already has an adapter; remove it from one of the two lists", spec.layer_name(*both));
            return Err(Error::config("lora.modules_to_save", message));
        }
        let (dropout, rslora, dora) = (*dropout, *use_rslora, *use_dora);
        let lora = Lora { r, alpha, dropout, rslora, dora, targets, modules_to_save: saved };
        lora.check_experts()?;
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
    pub fn check_resumable(&self, saved: &Self) -> Result<Vec<String>> {
        let values = [saved.values()?, self.values()?];
        let mut changes = Vec::new();
        for setting in known() {
            let value = |values: &BTreeMap<_, toml::Value>| values.get(&setting.key).map(ToString::to_string);
            let [was, is] = values.each_ref().map(|values| value(values).unwrap_or_else(|| "unset".into()));
            if was == is {
                continue;
            }
            if setting.fixed {
                let message = format!("was {was} and is now {is}; resume without changing it, or start a new run");
                return Err(Error::config(setting.key, message));
            }
            changes.push(format!("`{}` was {was} and is now {is}", setting.key));
        }
        Ok(changes)
    }

    /// The device to compute on.
    pub fn device_spec(&self) -> Result<DeviceSpec> {
        self.device.parse().map_err(|message: String| Error::config("device", message))
    }

    /// Rejects invalid settings; [`Config::resolve`] calls it.
    pub fn validate(&self) -> Result<()> {
        self.device_spec()?;
        check_threads("threads", self.threads)?;
        for (key, zero) in [("epochs", self.train.epochs == Some(0.0)), ("steps", self.train.steps == Some(0))] {
            if zero {
                return Err(Error::config(format!("train.{key}"), "0 would train nothing; use a number above 0"));
            }
        }
        if self.optimizer.lr == 0.0 {
            return Err(Error::config("optimizer.lr", "0 would change nothing; use a number above 0"));
        }
        if self.optimizer.eps as f32 == 0.0 {
            let message = "0 in FP32 would make parameters without a gradient NaN; use a larger number, such as 1e-8";
            return Err(Error::config("optimizer.eps", message));
        }
        let reads = self.stdin_reads()?;
        if reads > 1 {
            let message = format!("`-` is read {reads} times, but standard input can be read only once");
            return Err(Error::config("data", message));
        }
        let never = [
            ("`val` is `none`", self.held_out()? == Some(0.0)),
            ("`train.eval_every` is 0", self.train.eval_every == Interval::Steps(0)),
        ];
        if let Some((why, _)) = never.into_iter().find(|(_, is_never)| *is_never && self.train.early_stopping > 0) {
            return Err(Error::config("train.early_stopping", format!("needs validation between steps, but {why}")));
        }
        let TelemetrySection { log_every, grad_stats_every, grad_histogram_every, .. } = self.telemetry;
        for (key, every) in [
            ("log_every", log_every),
            ("grad_stats_every", grad_stats_every),
            ("grad_histogram_every", grad_histogram_every),
        ] {
            if every == 0 {
                let message = "must be at least 1; for never, use more than the number of steps";
                return Err(Error::config(format!("telemetry.{key}"), message));
            }
        }
        self.scaler.validate()?;
        self.precision.validate(self.dtype.compute)?;
        self.validate_masters()?;
        self.lora.validate()?;
        self.objective.validate(self.train.batch_size)?;
        if self.objective.kind.samples() != SampleKind::Plain && self.train.loss_on == LossOn::All {
            let message = "`all` is for `--objective sft`; the other objectives compare answers, so remove it";
            return Err(Error::config("train.loss_on", message));
        }
        if self.lora.r.is_some() && self.train.freeze.is_some() {
            let message =
                "has no use with adapters, whose base is frozen; list the layers to adapt in `lora.target_modules`";
            return Err(Error::config(FREEZE, message));
        }
        let partial = self.lora.r.is_some() || self.train.freeze.is_some();
        let narrowed = partial || self.dtype.params != Dtype::F32;
        let PrecisionConfig { fallback, keep, fp8, .. } = &self.precision;
        let retyped = [
            ("fp8.block", fp8.block.is_some()),
            ("fallback", *fallback != FallbackRule::Off),
            ("keep", *keep != UnitSet::default()),
        ];
        if let Some((key, _)) = retyped.into_iter().find(|(_, there)| narrowed && *there) {
            let message =
                "needs FP32 masters of every weight; remove it, or train without `lora` and `freeze`, and with `p=f32`";
            return Err(Error::config(format!("precision.{key}"), message));
        }
        self.checkpoint.validate()?;
        for (key, path) in [("model", Path::new(&self.model)), ("checkpoint.dir", &self.checkpoint.dir)] {
            if path.as_os_str().is_empty() || path.as_os_str().as_encoded_bytes().contains(&0) {
                let message = format!("`{}` is neither a name nor a path", path.display());
                return Err(Error::config(key, message));
            }
        }
        Ok(())
    }

    /// Rejects weights without masters unless `precision.masters` allows them, and counts of lost updates that cannot
    /// be made.
    fn validate_masters(&self) -> Result<()> {
        let PrecisionPolicy { params, compute, .. } = self.dtype;
        let masters = self.precision.masters;
        if masters && params == Dtype::F16 {
            let message = "FP16 weights lose most updates; use `p=f32`, or set `precision.masters = false` to compare";
            return Err(Error::config("dtype", message));
        }
        if !masters && compute == Dtype::F32 {
            return Err(Error::config("precision.masters", "FP32 weights are their own masters; use fp16 or bf16"));
        }
        let stochastic = masters && params == Dtype::BF16;
        if self.telemetry.lost_updates_every > 0 && (compute == Dtype::F32 || stochastic) {
            let message = "counts updates that rounding to the nearest 16-bit weight loses; this run does not round so";
            return Err(Error::config("telemetry.lost_updates_every", message));
        }
        Ok(())
    }
}

/// `table` with numbers instead of texts such as `2^24`, and with whole numbers instead of floats such as `1e3`.
fn with_numbers(table: &toml::Table) -> toml::Table {
    let mut out = table.clone();
    let settings = known();
    for (key, value) in leaves(table) {
        let kind = settings.iter().find(|setting| setting.key == key).map(|setting| setting.kind);
        let value = match (kind, value) {
            (Some(Kind::Integer), value) => whole_number(value).map(toml::Value::from).ok(),
            (Some(Kind::Float), toml::Value::String(text)) => number(text).map(toml::Value::from).ok(),
            _ => None,
        };
        if let Some(value) = value {
            merge(&mut out, nested(&key, value));
        }
    }
    out
}

/// The key of frozen modules.
const FREEZE: &str = "train.freeze";

/// The least number of steps of a run in which the preset's loss scale may settle by trial.
const DEMONSTRATION_STEPS: i64 = 100;

/// Whether a run of `tiny` with these settings keeps the preset's loss scale, or has its own.
fn is_demonstration(said: &toml::Table) -> bool {
    let value = |key| value_at(said, key);
    let is_long = match (value("train.steps"), value("train.epochs")) {
        (Some(steps), _) => steps.as_integer().is_some_and(|steps| steps >= DEMONSTRATION_STEPS),
        (None, epochs) => epochs.is_none(),
    };
    let is_grammar = value("data").is_none_or(|data| data.as_str() == Some("grammar"));
    value("scaler.init_scale").is_some() || (is_long && is_grammar)
}

/// Upper limit on threads; more are not faster and take long to start.
const MAX_THREADS: usize = 1024;

/// Rejects an invalid number of threads; `key` names the flag or key.
pub fn check_threads(key: &str, threads: Option<usize>) -> Result<()> {
    match threads {
        Some(0) => Err(Error::config(key, "must be at least 1")),
        Some(threads) if threads > MAX_THREADS => {
            Err(Error::config(key, format!("{threads} is more than the maximum of {MAX_THREADS}")))
        }
        _ => Ok(()),
    }
}

fn remove_key(table: &mut toml::Table, key: &str) {
    if let Some(toml::Value::Table(train)) = table.get_mut("train") {
        train.remove(key);
    }
}

/// Merges `over` into `base`. `epochs` and `steps` both set a run's length, so either replaces the other.
fn merge_layer(base: &mut toml::Table, over: toml::Table) -> Result<()> {
    let has = |key| value_at(&over, key).is_some();
    match (has("train.epochs"), has("train.steps")) {
        (true, true) => {
            return Err(Error::config("train.epochs", "`steps` is set as well; set only one of the two"));
        }
        (true, false) => remove_key(base, "steps"),
        (false, true) => remove_key(base, "epochs"),
        (false, false) => {}
    }
    merge(base, over);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(file: &str, overrides: &[(&str, &str)]) -> Result<Config> {
        let overrides = overrides
            .iter()
            .map(|(key, value)| {
                let table: toml::Table = format!("v = {value}").parse().unwrap();
                ((*key).to_owned(), table["v"].clone())
            })
            .collect();
        Config::resolve(&ConfigLayers { file: Some(("a.toml".into(), file.into())), overrides })
    }

    #[test]
    fn an_error_names_the_file_only_if_no_flag_sets_the_key() {
        let message = |file, overrides: &[_]| resolve(file, overrides).unwrap_err().to_string();
        assert!(message("[train]\nsteps = 0", &[]).starts_with("`a.toml`: train.steps"));
        for typed in [("train.steps", "0"), ("train", "{ steps = 0 }")] {
            assert!(message("[train]\nsteps = 9", &[typed]).starts_with("train.steps"));
        }
    }

    /// Regression: the first update made the embeddings of unused tokens NaN.
    #[test]
    fn an_epsilon_that_fp32_rounds_to_0_is_refused() {
        for eps in ["0.0", "1e-50"] {
            let message = resolve("", &[("optimizer.eps", eps)]).unwrap_err().to_string();
            assert!(message.starts_with("optimizer.eps: 0 in FP32"), "{message}");
        }
        resolve("", &[("optimizer.eps", "1e-40")]).unwrap();
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
    }

    #[test]
    fn whole_numbers_are_written_as_users_write_them() {
        for steps in ["1000", "1e3", "1000.0", "\"1e3\"", "\"10^3\""] {
            let config = resolve(&format!("[train]\nsteps = {steps}\neval_every = {steps}"), &[]).unwrap();
            assert_eq!((config.train.steps, config.scaler.measure_first), (Some(1000), false), "{steps}");
            assert_eq!(config.train.eval_every, Interval::Steps(1000), "{steps}");
        }
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
            assert_eq!(resolve(&config.explained().unwrap(), &[]).unwrap(), config);
        }
    }
}
