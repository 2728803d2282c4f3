//! `finetune merge`: writes a model with its adapters merged into its weights.

use crate::cli::export::{DtypeName, FormatName, format_of};
use crate::cli::model::{DeviceArgs, ModelSourceArgs};
use crate::inference::export::{ExportScope, export};
use crate::inference::merge::merge_error;
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Flags of `finetune merge`.
#[derive(Args, Debug)]
pub(super) struct MergeArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    /// A folder, or a file that ends in .gguf or .onnx
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The format [default: by the name of OUT]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// Type of the weights, rounded once from the sum in FP32
    #[arg(long, value_enum, default_value = "fp32")]
    dtype: DtypeName,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Merges, writes, and prints the paths and the largest difference of logits.
pub(super) fn run(args: &MergeArgs, out: &mut dyn Write) -> Result<()> {
    let format = format_of(&args.out, args.format)?;
    let (trained, reporter) = args.model.open()?;
    let encoding = args.dtype.encoding();
    if trained.adapted()?.is_none() {
        return Err(Error::config("MODEL", "has no adapters to merge; specify them with `--adapter FOLDER`"));
    }
    reporter.begin("exporting");
    let written = export(&trained, encoding, format, ExportScope::Merged, &args.out)?;
    reporter.begin("comparing logits");
    let open = args.device.open(PrecisionPolicy::FP32)?;
    let found = merge_error(&trained, (&args.out, format, encoding), &open)?;
    drop(reporter);
    for path in written {
        writeln!(out, "{}", path.display()).map_err(Error::io("write to", "standard output"))?;
    }
    let (largest, logit, tokens) = (found.max_abs_diff, found.max_abs_logit, found.tokens);
    let line = format!("largest logit error: {largest:.1e} (largest logit {logit:.1}), on {tokens} random tokens");
    writeln!(out, "{line}").map_err(Error::io("write to", "standard output"))
}
