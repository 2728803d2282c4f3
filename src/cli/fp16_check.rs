//! `finetune fp16-check`: measures whether a model can train in FP16.

use crate::cli::model::{DeviceArgs, ModelSourceArgs};
use crate::data::DatasetBuilder;
use crate::inference::fp16_check::{Fp16Report, PrecisionAdvice, SampleSize, TensorAmax, UnitReport, fp16_check};
use crate::precision::{PrecisionPolicy, PrecisionUnit};
use crate::telemetry::PhaseProgress;
use crate::train::with_loader;
use crate::ui::{Column, Page, plain};
use crate::{Error, Result};
use clap::Args;
use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

/// Exit codes besides 0, which means FP16 without fallback.
const WITH_FALLBACK: u8 = 4;
const BF16: u8 = 5;
/// Maximum of batches and of their sequences: products of both with a context do not overflow.
const MAX_SIZE: usize = 1 << 20;

#[derive(Args, Debug)]
pub(super) struct Fp16CheckArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// The text to measure on
    #[arg(long, short, value_name = "TEXT", default_value = "tiny_shakespeare")]
    data: String,
    /// Number of batches
    #[arg(long, value_name = "N", default_value_t = 4)]
    batches: usize,
    /// Sequences in a batch
    #[arg(long, short, value_name = "N", default_value_t = 2)]
    batch_size: usize,
    /// Tokens in a sequence [default: 128, or the model's context]
    #[arg(long, short = 'l', value_name = "N")]
    seq_len: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks the model and writes the report to `out`; the exit code is 0 for FP16, 4 for FP16 with some units in FP32, 5
/// for BF16.
pub(super) fn run(args: &Fp16CheckArgs, out: &mut dyn Write) -> Result<ExitCode> {
    for (flag, value) in [("--batches", args.batches), ("--batch-size", args.batch_size)] {
        if !(1..=MAX_SIZE).contains(&value) {
            return Err(Error::config(flag, format!("must be between 1 and {MAX_SIZE}")));
        }
    }
    let (trained, reporter) = args.model.open()?;
    let seq_len = args.seq_len.unwrap_or(128.min(trained.spec.max_position_embeddings));
    if seq_len == 0 || seq_len > trained.spec.max_position_embeddings {
        let message =
            format!("{seq_len} is not between 1 and the model's context of {}", trained.spec.max_position_embeddings);
        return Err(Error::config("--seq-len", message));
    }
    let source = &args.data.parse()?;
    let load = |loader: &mut DatasetBuilder<'_>| loader.load_tokens(source, &trained.tokenizer);
    let mut report = |event| reporter.report(event);
    let tokens = with_loader(&[source], trained.dataset_options(), &mut report, load)?;
    reporter.activity.begin("reading weights");
    let size = SampleSize { batches: args.batches, batch_size: args.batch_size, seq_len };
    let open = args.device.open(PrecisionPolicy::FP16)?;
    let (model, masters) = trained.load_merged(PrecisionPolicy::FP32, &open)?;
    reporter.activity.begin("measuring");
    let report = fp16_check(&model, masters, tokens, size, |done, total| {
        reporter.activity.advance("measuring", PhaseProgress::Items(done as u64, total as u64));
    })?;
    drop(reporter);
    let text = if args.json {
        serde_json::to_string(&report).map_err(|error| Error::config("--json", error.to_string()))?
    } else {
        as_text(&report)
    };
    writeln!(out, "{text}").map_err(Error::stdout)?;
    Ok(match report.advice {
        PrecisionAdvice::Fp16 => ExitCode::SUCCESS,
        PrecisionAdvice::Fp16WithFallback { .. } => ExitCode::from(WITH_FALLBACK),
        PrecisionAdvice::Bf16 { .. } => ExitCode::from(BF16),
    })
}

fn as_text(report: &Fp16Report) -> String {
    let largest = |unit: PrecisionUnit, largest: &TensorAmax| {
        // Drop the part up to the block's number, which is the same in every row.
        let block = if let PrecisionUnit::Block(block) = unit { format!(".{block}.") } else { String::new() };
        let name = largest.tensor.split_once(&block).map_or(largest.tensor.as_str(), |(_, name)| name);
        plain(format!("{:<9.3e} {name:.21}", largest.max_abs))
    };
    let mut page = Page::new();
    let columns: &[Column<UnitReport>] = &[
        ("unit", -8, &|it| plain(it.unit)),
        ("largest activation", -32, &|it| largest(it.unit, &it.activation)),
        ("largest gradient", -32, &|it| largest(it.unit, &it.gradient)),
        ("to zero ", 8, &|it| plain(format!("{:.2} %", 100.0 * it.flushed))),
        (" subnormal ", 11, &|it| plain(format!("{:.2} %", 100.0 * it.subnormal))),
    ];
    page.table(&report.units, columns);
    let mut text = page.text();
    let scale = report.best_scale.log2();
    let _ = writeln!(
        text,
        "\n{} tokens; activations overflow above 65504; best loss scale 2^{scale}, at which {:.2} % of the weight gradients in \
         FP16 flush to zero",
        report.tokens,
        100.0 * report.flushed
    );
    text + &match &report.advice {
        PrecisionAdvice::Fp16 => "verdict: fp16 (`--dtype fp16`)".to_owned(),
        PrecisionAdvice::Fp16WithFallback { units } => {
            let units: Vec<String> = units.iter().map(ToString::to_string).collect();
            format!(
                "verdict: fp16 with {} in FP32 (`--dtype fp16 --set precision.fallback=layer --set precision.fallback_overflows=1`), or bf16",
                units.join(", ")
            )
        }
        PrecisionAdvice::Bf16 { reason } => format!("verdict: bf16 (`--dtype bf16`): {reason}"),
    }
}
