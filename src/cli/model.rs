//! What the commands that use a model have in common: which one, in which precision, on how many threads.

use crate::precision::PrecisionPolicy;
use crate::trained::TrainedModel;
use crate::{Error, Result};
use clap::Args;
use std::io::{Write, stderr};
use std::path::{Path, PathBuf};

/// A model, its precision and its threads.
#[derive(Args, Debug)]
pub(super) struct ModelArgs {
    /// A run's folder, a checkpoint in it, or a Hugging Face folder
    #[arg(value_name = "MODEL")]
    pub(super) model: PathBuf,
    /// A tokenizer.json in place of the model's own
    #[arg(long, value_name = "FILE")]
    pub(super) tokenizer: Option<PathBuf>,
    /// fp32 (a checkpoint's masters), fp16, bf16, or a policy such as p=f32,c=f16,g=f16,r=f32
    #[arg(long, value_name = "DTYPE", default_value = "fp32")]
    pub(super) dtype: PrecisionPolicy,
    /// Threads that compute [default: all processors]
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<usize>,
}

impl ModelArgs {
    /// Opens the model.
    pub(super) fn open(&self) -> Result<TrainedModel> {
        open(&self.model, self.tokenizer.as_deref())
    }

    /// Runs `work` on the threads asked for.
    pub(super) fn on_threads<R: Send>(&self, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        if self.threads == Some(0) {
            return Err(Error::config("--threads", "0 makes no sense here; use 1 or more"));
        }
        rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads.unwrap_or(0))
            .thread_name(|i| format!("compute-{i}"))
            .build()
            .map_err(|error| Error::config("--threads", error.to_string()))?
            .install(work)
    }
}

/// Opens a model, and tells of damaged checkpoints that were passed over.
pub(super) fn open(path: &Path, tokenizer: Option<&Path>) -> Result<TrainedModel> {
    let trained = TrainedModel::open(path, tokenizer)?;
    for damage in &trained.damaged {
        writeln!(stderr(), "warning: damaged and passed over: {damage}").ok();
    }
    Ok(trained)
}
