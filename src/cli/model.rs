//! Flags shared by the commands that use a model: which one, in which precision, on how many threads.

use crate::cli::run_or_path;
use crate::cli::tell::Teller;
use crate::data::names_in;
use crate::engine::device::{OpenDevice, Place};
use crate::engine::kernels::Choice;
use crate::inference::trained::TrainedModel;
use crate::precision::PrecisionPolicy;
use crate::store::checkpoint::best;
use crate::train::{check_threads, locate, refuse_misspelling};
use crate::untrusted;
use crate::{Error, Result};
use clap::Args;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};

/// The flags that select a model.
#[derive(Args, Debug)]
pub(super) struct NameArgs {
    /// A run by name or folder, a checkpoint in it, a Hugging Face folder, a .gguf file, or one of these on the Hub:
    /// `owner/name`, `hf://owner/name/file.gguf`
    #[arg(value_name = "MODEL")]
    name: String,
    /// The folder of all runs
    #[arg(long, value_name = "FOLDER", default_value = "checkpoints")]
    checkpoint_dir: PathBuf,
    /// Use the run's checkpoint with the lowest validation loss instead of the newest one
    #[arg(long)]
    best: bool,
    /// The Hub's branch, tag or commit
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// A tokenizer.json to use instead of the model's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

impl NameArgs {
    /// Opens the model, downloading it if necessary; warns about damaged checkpoints that were skipped.
    pub(super) fn open(&self) -> Result<TrainedModel> {
        if self.name == "tiny" {
            let message = "the built-in model has no weights of its own; train it, and give the run's folder";
            return Err(Error::model("`tiny`", message));
        }
        let teller = Teller::start();
        let named = run_or_path(Path::new(&self.name), &self.checkpoint_dir);
        if named == Path::new(&self.name) && !named.exists() && self.revision.is_none() {
            refuse_misspelling(&self.name, names_in(&self.checkpoint_dir))?;
        }
        let folder = if self.revision.is_none() && named != Path::new(&self.name) {
            named
        } else {
            locate(&self.name, self.revision.as_deref(), &mut |event| teller.tell(event))?.path
        };
        let folder = if self.best {
            if !folder.join("config.toml").is_file() {
                return Err(Error::config("--best", format!("`{}` is not a run; omit the flag", self.name)));
            }
            best(&folder)?
        } else {
            folder
        };
        let trained = TrainedModel::open(&folder, self.tokenizer.as_deref())?;
        for damage in &trained.damaged {
            let damage = damage.to_string();
            writeln!(stderr(), "warning: skipped a damaged checkpoint: {}", untrusted::line(&damage)).ok();
        }
        Ok(trained)
    }
}

/// The flags that select where and with what a model computes.
#[derive(Args, Debug)]
pub(super) struct DeviceArgs {
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Place,
    /// What computes: auto, candle or fused
    #[arg(long, value_name = "NAME", hide = true, default_value = "auto")]
    kernels: Choice,
}

impl DeviceArgs {
    /// Opens the device for a model under `policy`.
    pub(super) fn open(&self, policy: PrecisionPolicy) -> Result<OpenDevice> {
        self.device.open(policy, self.kernels, &mut |notice| tell_notice(&notice))
    }
}

/// Prints a notice on standard error.
pub(super) fn tell_notice(notice: &str) {
    writeln!(stderr(), "note: {}", untrusted::line(notice)).ok();
}

/// The flags that select a model, its precision, its device and its threads.
#[derive(Args, Debug)]
pub(super) struct ModelArgs {
    #[command(flatten)]
    pub(super) model: NameArgs,
    /// fp32 (a checkpoint's masters), fp16, bf16, or a policy such as p=f32,c=f16,g=f16,r=f32
    #[arg(long, value_name = "DTYPE", default_value = "fp32")]
    pub(super) dtype: PrecisionPolicy,
    #[command(flatten)]
    device: DeviceArgs,
    /// Compute threads [default: all processors]
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<usize>,
}

impl ModelArgs {
    /// Opens the device.
    pub(super) fn open_device(&self) -> Result<OpenDevice> {
        self.device.open(self.dtype)
    }

    /// Runs `work` on the requested number of threads.
    pub(super) fn on_threads<R: Send>(&self, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        check_threads("--threads", self.threads)?;
        rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads.unwrap_or(0))
            .thread_name(|i| format!("compute-{i}"))
            .build()
            .map_err(|error| Error::config("--threads", error.to_string()))?
            .install(work)
    }
}
