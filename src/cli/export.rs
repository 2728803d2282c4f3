//! `finetune export`: writes a trained model for other programs.

use crate::cli::model::ModelSourceArgs;
use crate::inference::export::{ExportFormat, ExportScope, OnnxOptions, WeightDtype, export};
use crate::precision::Dtype;
use crate::{Error, Result};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::PathBuf;

/// Flags of `finetune export`.
#[derive(Args, Debug)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    #[command(flatten)]
    out: OutArgs,
    /// Type of the weights; fp32 is a checkpoint's masters, `q8_0` and `q4_k` are for GGUF files
    #[arg(long, value_enum, default_value = "fp32")]
    dtype: DtypeName,
    /// ONNX: products in INT8, with a scale for each output of a weight
    #[arg(long)]
    int8: bool,
    /// ONNX: keys and values of earlier tokens as inputs, of all tokens as outputs
    #[arg(long)]
    kv_cache: bool,
    /// Of a model with adapters, write the whole with the adapters merged, not the adapters in PEFT's format
    #[arg(long)]
    merge: bool,
}

/// The flags of an export's output.
#[derive(Args, Debug)]
pub(super) struct OutArgs {
    /// A folder, or a file that ends in .gguf or .onnx
    #[arg(value_name = "OUT")]
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

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DtypeName {
    Fp32,
    Fp16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_k")]
    Q4K,
}

impl DtypeName {
    pub(super) fn encoding(self) -> WeightDtype {
        match self {
            Self::Fp32 => WeightDtype::Plain(Dtype::F32),
            Self::Fp16 => WeightDtype::Plain(Dtype::F16),
            Self::Bf16 => WeightDtype::Plain(Dtype::BF16),
            Self::Q8_0 => WeightDtype::Q8_0,
            Self::Q4K => WeightDtype::Q4K,
        }
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

/// Prints the written files, one per line.
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
    reporter.begin("exporting");
    let written = export(&trained, args.dtype.encoding(), format, scope, &args.out.out)?;
    drop(reporter);
    print_paths(&written, out)
}
