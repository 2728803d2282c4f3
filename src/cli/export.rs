//! `finetune export`: writes a trained model for other programs.

use crate::cli::model::ModelSourceArgs;
use crate::inference::export::{ExportFormat, ExportScope, OnnxOptions, WeightDtype, export};
use crate::precision::Dtype;
use crate::{Error, Result};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Flags of `finetune export`.
#[derive(Args, Debug)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    /// A folder, or a file that ends in .gguf or .onnx
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The format [default: by the name of OUT]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
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

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum FormatName {
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

impl FormatName {
    pub(super) fn format(self) -> ExportFormat {
        match self {
            Self::Hf => ExportFormat::HuggingFace,
            Self::Gguf => ExportFormat::Gguf,
            Self::Onnx => ExportFormat::Onnx(OnnxOptions::default()),
        }
    }
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

/// The format asked for, else that of `out`'s name.
pub(super) fn format_of(out: &Path, asked: Option<FormatName>) -> Result<ExportFormat> {
    if let Some(asked) = asked {
        return Ok(asked.format());
    }
    let ending = out.extension().and_then(|ending| ending.to_str()).filter(|_| !out.is_dir());
    if let Some(ending @ ("bin" | "safetensors" | "pt" | "pth" | "ckpt" | "zip")) = ending {
        let message = format!(
            "`{}` would be a folder; leave `.{ending}` out for a folder with `model.safetensors`, or end the name in `.gguf` \
             or `.onnx`",
            out.display()
        );
        return Err(Error::config("OUT", message));
    }
    Ok(ExportFormat::from_path(out))
}

/// Exports the model and prints the written files to `out`, one per line.
pub(super) fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<()> {
    let options = OnnxOptions { kv_cache: args.kv_cache, int8: args.int8 };
    let format = match format_of(&args.out, args.format)? {
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
    let written = export(&trained, args.dtype.encoding(), format, scope, &args.out)?;
    drop(reporter);
    for path in written {
        writeln!(out, "{}", path.display()).map_err(Error::io("write to", "standard output"))?;
    }
    Ok(())
}
