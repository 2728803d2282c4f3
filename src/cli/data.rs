//! `finetune data`: what training would read, without training.

use crate::cli::flags::ConfigArgs;
use crate::cli::reporter::Reporter;
use crate::data::{BatchLoader, DatasetKind, DatasetPreview, DatasetStats, PairStats, SequenceIndex, counted};
use crate::train::{ModelSource, dataset, dataset_options};
use crate::ui::may_colour;
use crate::untrusted::sanitize_line;
use crate::{Error, Result};
use clap::{Args, Subcommand};
use serde_json::json;
use std::io::{IsTerminal, Write, stdout};

/// Flags of `finetune data`.
#[derive(Args, Debug)]
pub(super) struct DataArgs {
    #[command(subcommand)]
    what: DataCommand,
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Print one training sample with its loss tokens highlighted, and the token counts
    Show(Box<ShowArgs>),
    /// Print counts: samples, tokens, loss tokens, truncated and skipped samples, rows and steps per epoch
    Stats(Box<StatsArgs>),
}

#[derive(Args, Debug)]
struct ShowArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of the sample, starting at 1 [default: the first with loss tokens]
    #[arg(long, value_name = "N")]
    sample: Option<u64>,
}

#[derive(Args, Debug)]
struct StatsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints to `out`.
pub(super) fn run(args: &DataArgs, out: &mut dyn Write) -> Result<()> {
    let text = match &args.what {
        DataCommand::Show(args) => {
            let (_, preview, validation) = load(&args.config, args.sample)?;
            let colour = stdout().is_terminal() && may_colour();
            format!("{}validation: {validation}\n", preview.text(colour))
        }
        DataCommand::Stats(args) => {
            let (loader, preview, validation) = load(&args.config, None)?;
            let config = args.config.resolve()?;
            let stats = preview.stats;
            let steps = loader.steps_per_epoch(config.train.grad_accum);
            let cells = preview.rows * config.train.seq_len as u64;
            let filled = 100.0 * loader.inputs_per_epoch() as f64 / cells.max(1) as f64;
            // A batch of samples is only as wide as they are.
            let rows = if loader.index().kind() != DatasetKind::Text && !config.train.packing {
                format!("{}, of up to {} tokens", preview.rows, preview.seq_len)
            } else {
                format!("{} of {} tokens, {filled:.1} % filled", preview.rows, preview.seq_len)
            };
            if args.json {
                let mut report = json!({
                    "samples": stats.samples, "tokens": stats.tokens, "learned": stats.loss_tokens, "cut": stats.truncated,
                    "cut_tokens": stats.truncated_tokens, "dropped": stats.skipped, "rows": preview.rows,
                    "steps_per_epoch": steps, "marked_by": preview.marked_by,
                });
                if let Some(PairStats { tokens, longest, longer, equally_long, identical }) = stats.pairs {
                    report["pairs"] = json!({
                        "loss_tokens": tokens, "longest": longest, "longer": longer, "equally_long": equally_long,
                        "identical": identical,
                    });
                }
                if let Some(desirable) = stats.desirable {
                    report["desirable"] = desirable.into();
                }
                format!("{report}\n")
            } else {
                let what = if stats.pairs.is_some() { "pairs" } else { "samples" };
                let preferences = preferences(stats);
                format!(
                    "{what:<7}           {}\ntokens            {}\nloss tokens       {} ({:.1} %)\n{preferences}\
                     truncated         {} {what}, by {} tokens\nskipped           {} {what} without loss tokens\n\
                     rows              {rows}\nsteps per epoch   {steps}\nvalidation        {validation}\n",
                    stats.samples,
                    stats.tokens,
                    stats.loss_tokens,
                    100.0 * stats.loss_tokens as f64 / stats.tokens.max(1) as f64,
                    stats.truncated,
                    stats.truncated_tokens,
                    stats.skipped,
                )
            }
        }
    };
    out.write_all(text.as_bytes()).map_err(Error::stdout)
}

/// Lines about the answers of pairs, or about labels.
fn preferences(DatasetStats { samples, skipped, pairs, desirable, .. }: DatasetStats) -> String {
    if let Some(desirable) = desirable {
        return format!("labels            {desirable} good, {} bad\n", samples - skipped - desirable);
    }
    let Some(PairStats { tokens, longest, longer, equally_long, identical }) = pairs else { return String::new() };
    let kept = (longer[0] + longer[1] + equally_long).max(1) as f64;
    let side =
        |side: usize| format!("{:.1} loss tokens on average, at most {}", tokens[side] as f64 / kept, longest[side]);
    format!(
        "chosen            {}\nrejected          {}\nlonger            chosen in {} pairs, rejected in {}, \
         {equally_long} ties\nidentical         {identical} pairs after truncation, left out\n",
        side(0),
        side(1),
        longer[0],
        longer[1],
    )
}

/// The training rows of a configuration, a preview of their loss tokens, and a description of the validation rows.
fn load(args: &ConfigArgs, sample: Option<u64>) -> Result<(BatchLoader, DatasetPreview, String)> {
    let config = args.resolve()?;
    let reporter = Reporter::start();
    let mut tell = |event| reporter.report(event);
    let source = ModelSource::open(&config, &mut tell)?;
    let data = dataset(&config, &source.chat, &source.tokenizer, &mut tell)?;
    let index = SequenceIndex::new(data.train, config.train.seq_len, config.train.packing, &config.data)?;
    let chat = dataset_options(&config, &source.chat, &source.tokenizer).chat;
    let chat = (index.kind() == DatasetKind::Conversational).then_some(&chat);
    let preview = DatasetPreview::new(&index, sample, &source.tokenizer, chat)?;
    let source = config.val.as_deref().unwrap_or("the end of the text, held out");
    let validation = match SequenceIndex::new(data.validation, config.train.seq_len, config.train.packing, "validation")
    {
        Ok(index) => {
            let DatasetStats { samples, loss_tokens, .. } = index.stats();
            format!("{} with {loss_tokens} loss tokens ({})", counted(samples, "sample"), sanitize_line(source))
        }
        Err(error) => sanitize_line(&error.to_string()).into_owned(),
    };
    Ok((BatchLoader::from_index(index, config.train.batch_size, config.seed)?, preview, validation))
}
