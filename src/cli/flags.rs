//! The flags that define a run. They become dotted keys, which [`Config`] interprets.

use crate::digest::read_at_most;
use crate::train::{Config, Layers};
use crate::{Error, Result};
use clap::Args;
use std::path::{Path, PathBuf};

/// Maximum size of a configuration file.
const MAX_BYTES: u64 = 1 << 20;

/// The flags of a configuration. Flags override the configuration file, which overrides the defaults.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfigArgs {
    /// A configuration file (TOML); see configs/
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub(crate) config: Option<PathBuf>,
    /// `tiny`, a model of the Hugging Face Hub, a folder, a .gguf file, or an architecture with `--init random` [default: tiny]
    #[arg(long, short, value_name = "NAME|PATH", help_heading = "Model and text")]
    pub(crate) model: Option<String>,
    /// The Hub's branch, tag or commit
    #[arg(long, value_name = "REVISION", help_heading = "Model and text")]
    pub(crate) revision: Option<String>,
    /// Where initial weights come from: pretrained or random [default: pretrained]
    #[arg(long, value_name = "INIT", help_heading = "Model and text")]
    pub(crate) init: Option<String>,
    /// A tokenizer.json to use instead of the model's
    #[arg(long, value_name = "FILE", help_heading = "Model and text")]
    pub(crate) tokenizer: Option<String>,
    /// Training text: `grammar`, `tiny_shakespeare`, a file or folder, `hf://datasets/…`, or `-` [default: `tiny_shakespeare`; `grammar` for `tiny`]
    #[arg(long, short, value_name = "TEXT", help_heading = "Model and text")]
    pub(crate) data: Option<String>,
    /// Validation text [default: the last tenth of the training text]
    #[arg(long, value_name = "TEXT", help_heading = "Model and text")]
    pub(crate) val: Option<String>,
    /// How the text is read, in place of what files' names say: text, jsonl, json, csv, tsv or parquet
    #[arg(long, value_name = "FORMAT", help_heading = "Model and text")]
    pub(crate) format: Option<String>,
    /// The field of rows that holds running text [default: text]
    #[arg(long, value_name = "NAME", help_heading = "Model and text")]
    pub(crate) text_field: Option<String>,
    /// The field of rows that holds a prompt [default: prompt]
    #[arg(long, value_name = "NAME", help_heading = "Model and text")]
    pub(crate) prompt_field: Option<String>,
    /// The field of rows that holds a prompt's answer [default: completion]
    #[arg(long, value_name = "NAME", help_heading = "Model and text")]
    pub(crate) completion_field: Option<String>,
    /// How chats are written: a template's file, or one such as chatml or llama3.1 [default: the model's own]
    #[arg(long, value_name = "FILE|NAME", help_heading = "Model and text")]
    pub(crate) chat_template: Option<String>,
    /// Whether texts begin with the BOS token: auto (if the model's tokenizer adds it), always or never [default: auto]
    #[arg(long, value_name = "RULE", help_heading = "Model and text")]
    pub(crate) bos: Option<String>,
    /// What of chats is learned: `answers`, `last_answer` or `all` [default: answers]
    #[arg(long, value_name = "PART", help_heading = "Model and text")]
    pub(crate) loss_on: Option<String>,
    /// fp16, bf16, fp32, or a policy such as p=f32,c=f16,g=f16,r=f32 [default: fp16]
    #[arg(long, value_name = "DTYPE", help_heading = "Model and text")]
    pub(crate) dtype: Option<String>,
    /// Seed of every random stream [default: 1]
    #[arg(long, help_heading = "Training")]
    pub(crate) seed: Option<i64>,
    /// Device: auto, cpu, cuda or cuda:N [default: auto]
    #[arg(long, value_name = "DEVICE", help_heading = "Machine")]
    pub(crate) device: Option<String>,
    /// Kernels: auto, candle or fused
    #[arg(long, value_name = "NAME", hide = true)]
    pub(crate) kernels: Option<String>,
    /// Compute threads [default: all processors]
    #[arg(long, help_heading = "Machine")]
    pub(crate) threads: Option<i64>,
    /// Sequences in a micro-batch [default: 8]
    #[arg(long, short, value_name = "N", help_heading = "Training")]
    pub(crate) batch_size: Option<i64>,
    /// Tokens in a sequence [default: 128]
    #[arg(long, short = 'l', value_name = "N", help_heading = "Training")]
    pub(crate) seq_len: Option<i64>,
    /// Put several short documents into a row, each with attention and positions of its own
    #[arg(long, help_heading = "Training")]
    pub(crate) packing: bool,
    /// Cut a batch that does not fit into memory into micro-batches, and recompute blocks if need be
    #[arg(long, help_heading = "Training")]
    pub(crate) auto_batch: bool,
    /// Micro-batches in a step [default: 1]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(crate) grad_accum: Option<i64>,
    /// Passes over the training text [default: 1]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub(crate) epochs: Option<f64>,
    /// Number of steps, instead of `--epochs`
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(crate) steps: Option<i64>,
    /// The highest learning rate [default: 5e-5]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub(crate) lr: Option<f64>,
    /// Decoupled weight decay [default: 0.01]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub(crate) weight_decay: Option<f64>,
    /// Clip gradients to this global norm; 0 to disable [default: 1]
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub(crate) max_grad_norm: Option<f64>,
    /// Train low-rank adapters in place of the model: `r=16,alpha=32`, and `targets=q_proj+v_proj`, `dropout=0.05`, `rslora`, `dora`,
    /// `save=norm`
    #[arg(long, value_name = "SETTINGS", help_heading = "Training")]
    pub(crate) lora: Option<String>,
    /// How Adam's moments are stored: adamw (FP32) or adamw8bit [default: adamw]
    #[arg(long, value_name = "KIND", help_heading = "Training")]
    pub(crate) optimizer: Option<String>,
    /// Learning-rate schedule: constant, linear or cosine [default: cosine]
    #[arg(long, value_name = "KIND", help_heading = "Training")]
    pub(crate) schedule: Option<String>,
    /// Warm-up updates [default: 5 % of the run]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(crate) warmup_steps: Option<i64>,
    /// The first loss scale [default: 65536]
    #[arg(long, value_name = "X", help_heading = "Loss scale")]
    pub(crate) init_scale: Option<f64>,
    /// Steps without an overflow before the scale grows [default: 2000]
    #[arg(long, value_name = "N", help_heading = "Loss scale")]
    pub(crate) growth_interval: Option<i64>,
    /// Steps between two validations [default: 100]
    #[arg(long, value_name = "N", help_heading = "Along the way")]
    pub(crate) eval_every: Option<i64>,
    /// Steps between two text samples [default: 0, only at the end]
    #[arg(long, value_name = "N", help_heading = "Along the way")]
    pub(crate) sample_every: Option<i64>,
    /// Prompt of the text samples
    #[arg(long, value_name = "TEXT", help_heading = "Along the way")]
    pub(crate) prompt: Option<String>,
    /// Steps between two checkpoints [default: 500]
    #[arg(long, value_name = "N", help_heading = "Along the way")]
    pub(crate) save_every: Option<i64>,
    /// Stop after this many evaluations without a new best validation loss; 0 for never [default: 0]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(crate) early_stopping: Option<i64>,
    /// Full checkpoints to keep besides the best one [default: 2]
    #[arg(long, value_name = "N", help_heading = "Along the way")]
    pub(crate) keep_last: Option<i64>,
    /// Steps between two printed lines; slow steps have one every 10 s [default: 128]
    #[arg(long, value_name = "N", help_heading = "Along the way")]
    pub(crate) log_every: Option<i64>,
    /// The folder of all runs [default: checkpoints]
    #[arg(long, value_name = "FOLDER", help_heading = "Along the way")]
    pub(crate) checkpoint_dir: Option<String>,
    /// The run's name [default: model, dtype and a number]
    #[arg(long, value_name = "NAME", help_heading = "Along the way")]
    pub(crate) run: Option<String>,
    /// Any other key of the configuration, e.g. `--set scaler.hysteresis=2`
    #[arg(long = "set", value_name = "KEY=VALUE", help_heading = "Configuration")]
    pub(crate) set: Vec<String>,
}

impl ConfigArgs {
    /// The configuration from the flags and their file.
    pub(crate) fn resolve(&self) -> Result<Config> {
        let file = self.config.as_deref().map(read).transpose()?;
        Config::resolve(&Layers { file, overrides: self.overrides()?, saved: false })
    }

    /// The configuration of the run in `folder` with the flags applied, and the changes; an error if a change needs a new run.
    pub(crate) fn resolve_over(&self, folder: &Path) -> Result<(Config, Vec<String>)> {
        if self.config.is_some() {
            let message = "a resumed run uses its own configuration; make changes with flags or --set";
            return Err(Error::config("--config", message));
        }
        let file = Some(read(&folder.join("config.toml"))?);
        let saved = Config::resolve(&Layers { file, overrides: Vec::new(), saved: true })?;
        let config = self.resolve_like(folder)?;
        let changes = config.check_continues(&saved)?;
        Ok((config, changes))
    }

    /// The configuration of the run in `folder` with the flags applied, for another run.
    pub(crate) fn resolve_like(&self, folder: &Path) -> Result<Config> {
        let file = Some(read(&folder.join("config.toml"))?);
        Config::resolve(&Layers { file, overrides: self.overrides()?, saved: true })
    }

    /// The folder of all runs.
    pub(crate) fn runs(&self) -> &Path {
        Path::new(self.checkpoint_dir.as_deref().unwrap_or("checkpoints"))
    }

    fn overrides(&self) -> Result<Vec<(String, toml::Value)>> {
        let text = |value: &Option<String>| value.clone().map(toml::Value::from);
        let int = |value: &Option<i64>| value.map(toml::Value::from);
        let float = |value: &Option<f64>| value.map(toml::Value::from);
        let flags = [
            ("model", text(&self.model)),
            ("revision", text(&self.revision)),
            ("init", text(&self.init)),
            ("tokenizer", text(&self.tokenizer)),
            ("data", text(&self.data)),
            ("val", text(&self.val)),
            ("format", text(&self.format)),
            ("fields.text", text(&self.text_field)),
            ("fields.prompt", text(&self.prompt_field)),
            ("fields.completion", text(&self.completion_field)),
            ("chat_template", text(&self.chat_template)),
            ("bos", text(&self.bos)),
            ("train.loss_on", text(&self.loss_on)),
            ("train.packing", self.packing.then(|| true.into())),
            ("dtype", text(&self.dtype)),
            ("seed", int(&self.seed)),
            ("device", text(&self.device)),
            ("kernels", text(&self.kernels)),
            ("threads", int(&self.threads)),
            ("train.batch_size", int(&self.batch_size)),
            ("train.seq_len", int(&self.seq_len)),
            ("train.grad_accum", int(&self.grad_accum)),
            ("train.epochs", float(&self.epochs)),
            ("train.steps", int(&self.steps)),
            ("train.eval_every", int(&self.eval_every)),
            ("train.sample_every", int(&self.sample_every)),
            ("train.prompt", text(&self.prompt)),
            ("optimizer.lr", float(&self.lr)),
            ("optimizer.weight_decay", float(&self.weight_decay)),
            ("optimizer.max_grad_norm", float(&self.max_grad_norm)),
            ("train.auto_batch", self.auto_batch.then_some(true.into())),
            ("train.optimizer", text(&self.optimizer)),
            ("schedule.kind", text(&self.schedule)),
            ("schedule.warmup_steps", int(&self.warmup_steps)),
            ("scaler.init_scale", float(&self.init_scale)),
            ("scaler.growth_interval", int(&self.growth_interval)),
            ("checkpoint.dir", text(&self.checkpoint_dir)),
            ("checkpoint.run", text(&self.run)),
            ("checkpoint.save_every", int(&self.save_every)),
            ("checkpoint.keep_last", int(&self.keep_last)),
            ("train.early_stopping", int(&self.early_stopping)),
            ("telemetry.log_every", int(&self.log_every)),
        ];
        let mut out: Vec<_> = flags.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        if let Some(settings) = &self.lora {
            out.extend(lora(settings)?);
        }
        for pair in &self.set {
            let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !key.trim().is_empty()) else {
                return Err(Error::config("--set", format!("`{pair}` is not of the form key=value")));
            };
            // Anything that is not a TOML value is a string, so `--set data=a.txt` needs no quotes.
            let parsed = format!("v = {value}").parse::<toml::Table>().ok().and_then(|mut table| table.remove("v"));
            out.push((key.trim().to_owned(), parsed.unwrap_or_else(|| value.into())));
        }
        Ok(out)
    }
}

/// The keys that `--lora` sets.
fn lora(settings: &str) -> Result<Vec<(String, toml::Value)>> {
    let wrong = |message: String| Err(Error::config("--lora", message));
    let mut out = Vec::new();
    for setting in settings.split(',').map(str::trim) {
        let (key, value) = setting.split_once('=').map_or((setting, None), |(key, value)| (key, Some(value)));
        let names = |value: &str| value.split('+').map(toml::Value::from).collect::<Vec<_>>();
        let (key, value) = match (key, value) {
            ("r", Some(value)) => ("r", value.parse::<i64>().map(toml::Value::from).ok()),
            ("alpha" | "dropout", Some(value)) => (key, value.parse::<f64>().map(toml::Value::from).ok()),
            ("targets", Some(value)) => ("targets", Some(names(value).into())),
            ("save", Some(value)) => ("modules_to_save", Some(names(value).into())),
            ("rslora" | "dora", None) => (key, Some(true.into())),
            _ => {
                let known =
                    "`r=16`, `alpha=32`, `targets=q_proj+v_proj`, `dropout=0.05`, `rslora`, `dora`, `save=norm`";
                return wrong(format!("`{setting}` is not one of {known}"));
            }
        };
        let Some(value) = value else { return wrong(format!("`{setting}` has no number behind `=`")) };
        out.push((format!("lora.{key}"), value));
    }
    Ok(out)
}

/// The name and text of a configuration file.
pub(crate) fn read(path: &Path) -> Result<(String, String)> {
    let origin = path.display().to_string();
    let text = String::from_utf8(read_at_most(path, MAX_BYTES)?);
    let text = text.map_err(|error| Error::config(format!("`{origin}`"), error.to_string()))?;
    Ok((origin, text))
}
