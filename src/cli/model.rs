//! Flags shared by the commands that use a model: which one, in which precision, on how many threads.

use crate::cli::flags::ConfigArgs;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, is_model, is_run, run_of, run_or_path};
use crate::data::{Bos, names_in};
use crate::engine::device::{DeviceContext, DeviceSpec};
use crate::engine::kernels::KernelBackend;
use crate::engine::model::{Decoder, Parameters};
use crate::inference::trained::TrainedModel;
use crate::precision::PrecisionPolicy;
use crate::store::checkpoint::best;
use crate::store::is_gguf;
use crate::train::{check_misspelling, check_threads, locate};
use crate::untrusted;
use crate::{Error, Result};
use clap::Args;
use std::io::{Write, stderr};
use std::path::PathBuf;
use std::str::FromStr;

/// The flags that select a model.
#[derive(Args, Debug)]
pub(super) struct ModelSourceArgs {
    /// A run by name or folder, a checkpoint in it, a Hugging Face folder, a .gguf file, or one of these on the Hub:
    /// `owner/name`, `hf://owner/name/file.gguf`
    #[arg(value_name = "MODEL")]
    name: PathBuf,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
    /// Use the run's checkpoint with the lowest validation loss instead of the newest one
    #[arg(long)]
    best: bool,
    /// Adapters in PEFT's format, to be used over the model
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// The Hub's branch, tag or commit
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// A tokenizer.json to use instead of the model's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Whether texts begin with the BOS token: auto (if the model's tokenizer adds it), always or never
    #[arg(long, value_name = "RULE", default_value = "auto")]
    pub(super) bos: Bos,
}

impl ModelSourceArgs {
    /// Opens the model, downloading it if necessary; warns about damaged checkpoints that were skipped. The reporter
    /// shows the command's activity until it is dropped.
    pub(super) fn open(&self) -> Result<(TrainedModel, Reporter)> {
        let name = &*self.name.to_string_lossy();
        if name == "tiny" {
            let message = "the built-in model has no pretrained weights; train it, and use the run's name or folder";
            return Err(Error::model("`tiny`", message));
        }
        let reporter = Reporter::of("reading the model");
        let found = run_or_path(&self.name, &self.runs_dir.path, is_model);
        if !found.exists() && self.revision.is_none() {
            check_misspelling(name, names_in(&self.runs_dir.path))?;
        }
        let find =
            |name: &str, revision: Option<&str>| Ok(locate(name, revision, &mut |event| reporter.report(event))?.0);
        let is_local = self.revision.is_none() && (found.is_dir() || is_gguf(&found));
        let mut folder = if is_local { found } else { find(name, self.revision.as_deref())? };
        if self.best {
            if !is_run(&folder) {
                return Err(Error::config("--best", format!("`{name}` is not a run; omit the flag")));
            }
            folder = best(&folder)?;
        }
        reporter.activity.begin("reading the model");
        // The path of adapters' base may be relative to the folder that their run was started in.
        let mut find_base = |name: &str, revision: Option<&str>| {
            let run = run_of(&folder).and_then(|run| ConfigArgs::default().resolve_from_run(&run).ok());
            let there = run.as_ref().map_or_else(|| name.into(), |config| config.locate(name));
            find(&there.to_string_lossy(), revision)
        };
        let trained = TrainedModel::open_with(&folder, self.tokenizer.as_deref(), &mut find_base)?;
        let mut trained = trained.with_bos(self.bos)?;
        if let Some(adapter) = &self.adapter {
            trained = trained.with_adapters(adapter)?;
        }
        for damage in &trained.corrupt_files {
            reporter.notice(&format!("warning: skipped a damaged checkpoint: {damage}"));
        }
        reporter.activity.begin("reading weights");
        Ok((trained, reporter))
    }
}

/// The flags that select a model's device and kernels.
#[derive(Args, Debug)]
pub(super) struct DeviceArgs {
    /// Device: auto, cpu, cuda, cuda:N or metal
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceSpec,
    /// Kernels: auto, candle or fused
    #[arg(long, value_name = "NAME", hide = true, default_value = "auto")]
    kernels: KernelBackend,
}

impl DeviceArgs {
    /// Opens the device for a model under `policy`.
    pub(super) fn open(&self, policy: PrecisionPolicy) -> Result<DeviceContext> {
        let auto = self.kernels == KernelBackend::Auto;
        // A few passes are over sooner than a GPU's preflight.
        let kernels = if auto { KernelBackend::Candle } else { self.kernels };
        let open = self.device.open(policy, kernels, &mut |notice| print_notice(&notice))?;
        Ok(if auto && open.device.is_cpu() { DeviceContext::cpu() } else { open })
    }
}

/// Prints a notice on standard error.
pub(super) fn print_notice(notice: &str) {
    writeln!(stderr(), "note: {}", untrusted::sanitize_line(notice)).ok();
}

/// One type or policy, or several types: `fp32,fp16,bf16`. Each with its name as it was typed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DtypeList(pub(super) Vec<(String, PrecisionPolicy)>);

impl FromStr for DtypeList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A policy with keys contains commas itself.
        let names: Vec<&str> = if text.contains('=') { vec![text] } else { text.split(',').map(str::trim).collect() };
        let mut policies: Vec<(String, PrecisionPolicy)> = Vec::new();
        for name in names {
            let policy = name.parse()?;
            if policies.iter().any(|(_, other)| *other == policy) {
                return Err(format!("`{name}` is listed twice"));
            }
            policies.push((name.to_owned(), policy));
        }
        Ok(Self(policies))
    }
}

/// The flags that select a model, its precision, its device and its threads.
#[derive(Args, Debug)]
pub(super) struct ModelArgs {
    #[command(flatten)]
    pub(super) model: ModelSourceArgs,
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
    pub(super) fn load(&self, trained: &TrainedModel) -> Result<(Decoder, Parameters)> {
        trained.load(self.dtype, &self.device.open(self.dtype)?)
    }
}

/// Runs `work` on a number of threads, by default one for each processor.
pub(super) fn on_threads<R: Send>(threads: Option<usize>, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    check_threads("--threads", threads)?;
    pool("--threads", threads.unwrap_or(0))?.install(work)
}

/// A pool of `threads` threads, 0 for one per processor; `key` names the flag or key in an error.
pub(super) fn pool(key: &str, threads: usize) -> Result<rayon::ThreadPool> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("compute-{i}"));
    builder.build().map_err(|error| Error::config(key, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_listed_and_a_policy_stands_alone() {
        let names = |text: &str| -> Vec<String> {
            text.parse::<DtypeList>().unwrap().0.into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names("fp32, bf16,half"), ["fp32", "bf16", "half"]);
        assert_eq!(names("p=f32,c=f16,g=f32,r=f32"), ["p=f32,c=f16,g=f32,r=f32"]);
        assert!("fp16,half".parse::<DtypeList>().unwrap_err().contains("`half` is listed twice"));
        assert!("fp32,".parse::<DtypeList>().is_err() && "fp32,int8".parse::<DtypeList>().is_err());
    }
}
