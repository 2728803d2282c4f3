//! `finetune merge`: writes a model with its adapters merged into its weights.

use crate::cli::export::{OutArgs, print_paths};
use crate::cli::model::{DeviceArgs, ModelSourceArgs};
use crate::inference::export::{ExportScope, WeightDtype, export, loss_of_format};
use crate::inference::merge::merge_error;
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use clap::Args;
use std::io::Write;

#[derive(Args, Debug)]
pub(super) struct MergeArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    #[command(flatten)]
    out: OutArgs,
    /// Type of the weights, rounded once from the sum in FP32
    #[arg(long, value_enum, default_value = "fp32")]
    dtype: WeightDtype,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Merges, writes, and prints the paths and the largest difference of logits.
pub(super) fn run(args: &MergeArgs, out: &mut dyn Write) -> Result<()> {
    let format = args.out.format()?;
    let path = &args.out.out;
    let (trained, reporter) = args.model.open()?;
    if trained.adapted()?.is_none() {
        return Err(Error::config("MODEL", "has no adapters to merge; specify them with `--adapter FOLDER`"));
    }
    reporter.activity.begin("exporting");
    if let Some(loss) = loss_of_format(&trained, format)? {
        reporter.notice(&format!("warning: {loss}"));
    }
    let written = export(&trained, args.dtype, format, ExportScope::Merged, path)?;
    reporter.activity.begin("comparing logits");
    let open = args.device.open(PrecisionPolicy::FP32)?;
    let found = merge_error(&trained, path, format, args.dtype, &open)?;
    drop(reporter);
    print_paths(&written, out)?;
    let (largest, logit, tokens) = (found.max_abs_diff, found.max_abs_logit, found.tokens);
    let line = format!("largest logit error: {largest:.1e} (largest logit {logit:.1}), on {tokens} random tokens");
    writeln!(out, "{line}").map_err(Error::stdout)
}
