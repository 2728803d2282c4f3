//! `finetune export`: writes a trained model for other programs.

use crate::cli::model::NameArgs;
use crate::inference::export::{Format, export};
use crate::precision::Dtype;
use crate::{Error, Result};
use clap::{Args, ValueEnum};
use std::io::Write;
use std::path::PathBuf;

/// Flags of `finetune export`.
#[derive(Args, Debug)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    model: NameArgs,
    /// A folder, or a file that ends in .gguf or .onnx
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The format [default: by the name of OUT]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// Type of the weights; fp32 is a checkpoint's masters
    #[arg(long, value_enum, default_value = "fp32")]
    dtype: DtypeName,
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
enum DtypeName {
    Fp32,
    Fp16,
    Bf16,
}

/// Exports the model and prints the written files to `out`, one per line.
pub(super) fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<()> {
    let format = match args.format {
        None => Format::of(&args.out),
        Some(FormatName::Hf) => Format::HuggingFace,
        Some(FormatName::Gguf) => Format::Gguf,
        Some(FormatName::Onnx) => Format::Onnx,
    };
    let dtype = match args.dtype {
        DtypeName::Fp32 => Dtype::F32,
        DtypeName::Fp16 => Dtype::F16,
        DtypeName::Bf16 => Dtype::BF16,
    };
    let trained = args.model.open()?;
    for path in export(&trained, dtype, format, &args.out)? {
        writeln!(out, "{}", path.display()).map_err(Error::io("write to", "standard output"))?;
    }
    Ok(())
}
