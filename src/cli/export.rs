//! `finetune export`: writes a trained model for other programs.

use crate::cli::flags::ConfigArgs;
use crate::cli::model::{ModelSourceArgs, print_notice};
use crate::cli::reporter::Reporter;
use crate::cli::runs::confirmed;
use crate::inference::export::{ExportFormat, ExportScope, OnnxOptions, WeightDtype, export, loss_of_format};
use crate::inference::trained::TrainedModel;
use crate::precision::Dtype;
use crate::store::adapter::AdapterFolder;
use crate::store::hub::{Hub, Settings, model_repository};
use crate::train::WeightInit;
use crate::ui::format::{base_name, printable, short};
use crate::{Error, Result, temporary};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    #[command(flatten)]
    out: OutArgs,
    /// Type of the weights; fp32 is a checkpoint's masters, `q8_0` and `q4_k` are for GGUF files
    #[arg(long, value_enum, default_value = "fp32")]
    dtype: WeightDtype,
    /// ONNX: products in INT8, with a scale for each output of a weight
    #[arg(long)]
    int8: bool,
    /// ONNX: keys and values of earlier tokens as inputs, of all tokens as outputs
    #[arg(long)]
    kv_cache: bool,
    /// Of a model with adapters, write the whole with the adapters merged, not the adapters in PEFT's format
    #[arg(long)]
    merge: bool,
    #[command(flatten)]
    push: PushArgs,
}

#[derive(Args, Debug)]
struct PushArgs {
    /// Upload the result with a model card to a model on the Hub, which is created if it does not exist. The token
    /// comes from `HF_TOKEN` or `hf auth login`
    #[arg(long, value_name = "OWNER/NAME")]
    push: Option<String>,
    /// With `--push`, overwrite files of a model that exists without a question
    #[arg(long, requires = "push")]
    yes: bool,
}

/// The flags of an export's output.
#[derive(Args, Debug)]
pub(super) struct OutArgs {
    /// A folder, or a file that ends in .gguf or .onnx
    pub(super) out: PathBuf,
    /// The format [default: by the name of OUT]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatName {
    /// A Hugging Face folder
    Hf,
    /// One file for llama.cpp and compatible programs
    Gguf,
    /// A graph for ONNX runtimes, with its weights in a second file
    Onnx,
}

impl ValueEnum for WeightDtype {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Plain(Dtype::F32), Self::Plain(Dtype::F16), Self::Plain(Dtype::BF16), Self::Q8_0, Self::Q4K]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Plain(Dtype::F32) => "fp32",
            Self::Plain(Dtype::F16) => "fp16",
            Self::Plain(Dtype::BF16) => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
        }))
    }
}

impl OutArgs {
    /// The format asked for, else that of the name.
    pub(super) fn format(&self) -> Result<ExportFormat> {
        let ending = self.out.extension().and_then(|ending| ending.to_str()).filter(|_| !self.out.is_dir());
        Ok(match (self.format, ending) {
            (Some(FormatName::Hf), _) => ExportFormat::HuggingFace,
            (Some(FormatName::Gguf), _) => ExportFormat::Gguf,
            (Some(FormatName::Onnx), _) => ExportFormat::Onnx(OnnxOptions::default()),
            (None, Some(ending @ ("bin" | "safetensors" | "pt" | "pth" | "ckpt" | "zip"))) => {
                let message = format!(
                    "`{}` would be a folder; leave `.{ending}` out for a folder with `model.safetensors`, or end the name in \
                     `.gguf` or `.onnx`",
                    self.out.display()
                );
                return Err(Error::config("OUT", message));
            }
            (None, _) => ExportFormat::from_path(&self.out),
        })
    }
}

pub(super) fn print_paths(written: &[PathBuf], out: &mut dyn Write) -> Result<()> {
    written.iter().try_for_each(|path| writeln!(out, "{}", path.display())).map_err(Error::stdout)
}

/// Exports the model and prints the written files to `out`, one per line.
pub(super) fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<()> {
    let options = OnnxOptions { kv_cache: args.kv_cache, int8: args.int8 };
    let format = match args.out.format()? {
        ExportFormat::Onnx(_) => ExportFormat::Onnx(options),
        other if options == OnnxOptions::default() => other,
        _ => {
            let flag = if args.int8 { "--int8" } else { "--kv-cache" };
            return Err(Error::config(flag, "is for ONNX; give OUT a name that ends in `.onnx`"));
        }
    };
    let scope = if args.merge { ExportScope::Merged } else { ExportScope::Adapters };
    let (trained, reporter) = args.model.open()?;
    reporter.activity.begin("asking the Hub");
    let mut hub = Hub::new(Settings::from_env());
    let push = args.push.push.as_deref();
    let exists = push.map(|id| hub.has_model(id)).transpose()? == Some(true);
    // It would write over a question.
    drop(reporter);
    if let Some(id) = push
        && exists
        && !(args.push.yes || confirmed(&format!("Overwrite files of `{id}` on the Hub?"), "--push", out)?)
    {
        return Ok(());
    }
    let reporter = Reporter::of("exporting");
    if let Some(loss) = loss_of_format(&trained, format)? {
        reporter.notice(&format!("warning: {loss}"));
    }
    let written = export(&trained, args.dtype, format, scope, &args.out.out)?;
    let upload = |id| {
        reporter.activity.begin("uploading");
        // A single file has no folder for its card.
        let (folder, _lock) = temporary::folder(&std::env::temp_dir(), ".card-")?;
        let folder = written.iter().find(|path| path.is_dir()).map_or(folder.path(), PathBuf::as_path);
        let card = folder.join("README.md");
        std::fs::write(&card, model_card(&trained, id, folder)).map_err(Error::io("write", &card))?;
        hub.push(id, exists, &files_to_push(&written, folder)?)
    };
    let address = push.map(upload).transpose();
    drop(reporter);
    if address.is_err() {
        let paths: Vec<_> = written.iter().map(|path| format!("`{}`", path.display())).collect();
        let paths = paths.join(" and ");
        // The failed command may have created the model, which would be asked about.
        let consent = if args.push.yes { "" } else { " with `--yes`" };
        print_notice(&format!("the export is complete; remove {paths} before you start the command again{consent}"));
    }
    if let Some(address) = address? {
        writeln!(out, "{address}").map_err(Error::stdout)?;
    }
    print_paths(&written, out)
}

/// The written files and those in `folder`, with their names on the Hub.
fn files_to_push(written: &[PathBuf], folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let entries = std::fs::read_dir(folder).map_err(Error::io("read", folder))?.filter_map(Result::ok);
    let files = written.iter().cloned().chain(entries.map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = files.filter(|path| path.is_file()).collect();
    files.sort();
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(files.into_iter().map(|path| (name(&path), path)).collect())
}

/// A model card in the Hub's form for an export in `folder`, which has only the card if the export is a single file.
fn model_card(trained: &TrainedModel, id: &str, folder: &Path) -> String {
    let run = trained.path.canonicalize().ok().and_then(|path| path.parent().map(Path::to_path_buf));
    let config = run.and_then(|run| ConfigArgs::default().resolve_from_run(&run).ok());
    let library = match () {
        () if AdapterFolder::exists(folder) => "library_name: peft\n",
        () if folder.join("config.json").is_file() => "library_name: transformers\n",
        () => "",
    };
    let (mut base, mut text) = (String::new(), String::new());
    if let Some(config) = config {
        // Only a model of the Hub has a page to link to. A run records the commit of such a model.
        let pretrained = config.revision.is_some() && config.init == WeightInit::Pretrained;
        if let Some(repository) = model_repository(&config.model).filter(|_| pretrained) {
            base = format!("base_model: {repository}\n");
        }
        let data: Vec<&str> = config.data.names().iter().map(|name| base_name(name)).collect();
        text = format!(
            " It was trained from `{}` on `{}` with learning rate {} and the types `{}`.",
            printable(base_name(&config.model)),
            printable(&data.join("`, `")),
            short(config.optimizer.lr),
            config.dtype
        );
    }
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "---\n{library}pipeline_tag: text-generation\n{base}tags: [finetune]\n---\n\n# {id}\n\n\
         This model was fine-tuned with finetune {version}.{text}\n"
    )
}
