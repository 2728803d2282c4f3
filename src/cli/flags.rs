//! The flags that define a run. What was typed becomes dotted keys; what it means is [`Config`]'s business.

use crate::digest::read_at_most;
use crate::train::{Config, Layers};
use crate::{Error, Result};
use clap::Args;
use std::path::{Path, PathBuf};

/// No configuration is longer.
const MAX_BYTES: u64 = 1 << 20;

/// Flags go over the configuration file, which goes over the defaults.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfigArgs {
    /// A configuration file (TOML); see configs/
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// `tiny`, a model of the Hugging Face Hub, a folder, or an architecture with `--init random` [default: tiny]
    #[arg(long, short, value_name = "NAME|FOLDER")]
    pub(crate) model: Option<String>,
    /// The Hub's branch, tag or commit
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
    /// Where initial weights come from: pretrained or random
    #[arg(long, value_name = "INIT")]
    pub(crate) init: Option<String>,
    /// A tokenizer.json in place of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<String>,
    /// Training text: `grammar`, `tiny_shakespeare`, a file or folder, `hf://datasets/…`, or `-` [default: grammar]
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) data: Option<String>,
    /// Validation text; without it the last tenth of the training text
    #[arg(long, value_name = "TEXT")]
    pub(crate) val: Option<String>,
    /// fp16, bf16, fp32, or a policy such as p=f32,c=f16,g=f16,r=f32 [default: fp16]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) dtype: Option<String>,
    /// Seed of every random stream
    #[arg(long)]
    pub(crate) seed: Option<i64>,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// Threads that compute [default: all processors]
    #[arg(long)]
    pub(crate) threads: Option<i64>,
    /// Sequences in a micro-batch
    #[arg(long, short, value_name = "N")]
    pub(crate) batch_size: Option<i64>,
    /// Tokens in a sequence
    #[arg(long, short = 'l', value_name = "N")]
    pub(crate) seq_len: Option<i64>,
    /// Micro-batches in a step
    #[arg(long, value_name = "N")]
    pub(crate) grad_accum: Option<i64>,
    /// Passes over the training text
    #[arg(long, value_name = "X")]
    pub(crate) epochs: Option<f64>,
    /// Steps to attempt, in place of epochs
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<i64>,
    /// The highest learning rate
    #[arg(long, value_name = "X")]
    pub(crate) lr: Option<f64>,
    /// Decoupled weight decay
    #[arg(long, value_name = "X")]
    pub(crate) weight_decay: Option<f64>,
    /// Global gradient norm to clip to; 0 for none
    #[arg(long, value_name = "X")]
    pub(crate) max_grad_norm: Option<f64>,
    /// constant, linear or cosine
    #[arg(long, value_name = "KIND")]
    pub(crate) schedule: Option<String>,
    /// Updates that warm up
    #[arg(long, value_name = "N")]
    pub(crate) warmup_steps: Option<i64>,
    /// The first loss scale
    #[arg(long, value_name = "X")]
    pub(crate) init_scale: Option<f64>,
    /// Clean steps between two growths of the scale
    #[arg(long, value_name = "N")]
    pub(crate) growth_interval: Option<i64>,
    /// Steps between two looks at the validation text
    #[arg(long, value_name = "N")]
    pub(crate) eval_every: Option<i64>,
    /// Steps between two text samples
    #[arg(long, value_name = "N")]
    pub(crate) sample_every: Option<i64>,
    /// What a text sample begins with
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N")]
    pub(crate) save_every: Option<i64>,
    /// Steps between two printed lines
    #[arg(long, value_name = "N")]
    pub(crate) log_every: Option<i64>,
    /// The folder of all runs [default: checkpoints]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) checkpoint_dir: Option<String>,
    /// The run's name [default: model, dtype and a number]
    #[arg(long, value_name = "NAME")]
    pub(crate) run: Option<String>,
    /// Any other key of the configuration, e.g. `--set scaler.hysteresis=2`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

impl ConfigArgs {
    /// The configuration that the flags and their file make.
    pub(crate) fn resolve(&self) -> Result<Config> {
        let file = self.config.as_deref().map(read).transpose()?;
        Config::resolve(&Layers { file, overrides: self.overrides()? })
    }

    /// The configuration that the flags make over that of the run in `folder`, and what they change; an error if it is
    /// another run's.
    pub(crate) fn resolve_over(&self, folder: &Path) -> Result<(Config, Vec<String>)> {
        if self.config.is_some() {
            let message = "a resumed run has its own configuration; give changes as flags or with --set";
            return Err(Error::config("--config", message));
        }
        let file = Some(read(&folder.join("config.toml"))?);
        let saved = Config::resolve(&Layers { file: file.clone(), overrides: Vec::new() })?;
        let config = Config::resolve(&Layers { file, overrides: self.overrides()? })?;
        let changes = config.check_continues(&saved)?;
        Ok((config, changes))
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
            ("dtype", text(&self.dtype)),
            ("seed", int(&self.seed)),
            ("device", text(&self.device)),
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
            ("schedule.kind", text(&self.schedule)),
            ("schedule.warmup_steps", int(&self.warmup_steps)),
            ("scaler.init_scale", float(&self.init_scale)),
            ("scaler.growth_interval", int(&self.growth_interval)),
            ("checkpoint.dir", text(&self.checkpoint_dir)),
            ("checkpoint.run", text(&self.run)),
            ("checkpoint.save_every", int(&self.save_every)),
            ("telemetry.log_every", int(&self.log_every)),
        ];
        let mut out: Vec<_> = flags.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        for pair in &self.set {
            let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !key.trim().is_empty()) else {
                return Err(Error::config("--set", format!("`{pair}` is not of the form key=value")));
            };
            // What is no TOML value is a string: `--set data=a.txt` needs no quotes.
            let parsed = format!("v = {value}").parse::<toml::Table>().ok().and_then(|mut table| table.remove("v"));
            out.push((key.trim().to_owned(), parsed.unwrap_or_else(|| value.into())));
        }
        Ok(out)
    }
}

/// The name and text of a configuration file.
pub(crate) fn read(path: &Path) -> Result<(String, String)> {
    let origin = path.display().to_string();
    let text = String::from_utf8(read_at_most(path, MAX_BYTES)?);
    let text = text.map_err(|error| Error::config(format!("`{origin}`"), error.to_string()))?;
    Ok((origin, text))
}
