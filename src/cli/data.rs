//! `finetune data`: what training would read, without training.

use crate::cli::flags::ConfigArgs;
use crate::cli::reporter::Reporter;
use crate::data::{
    BatchLoader, DataSource, DatasetKind, DatasetPreview, DatasetStats, PairStats, SequenceIndex, counted,
};
use crate::train::{Config, ModelSource, dataset_options, datasets, rows};
use crate::ui::may_color;
use crate::untrusted::sanitize_line;
use crate::{Error, Result};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write, stdout};

#[derive(Args, Debug)]
pub(super) struct DataArgs {
    #[command(subcommand)]
    what: DataCommand,
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Print one training sample with its loss tokens highlighted, and the token counts
    Show(Box<DataShowArgs>),
    /// Print counts: samples, tokens, loss tokens, truncated and skipped samples, rows and steps per epoch
    Stats(Box<StatsArgs>),
}

#[derive(Args, Debug)]
struct DataShowArgs {
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

pub(super) fn run(args: &DataArgs, out: &mut dyn Write) -> Result<()> {
    let text = match &args.what {
        DataCommand::Show(args) => {
            let Loaded { sets, validation, .. } = load(&args.config, args.sample)?;
            let color = stdout().is_terminal() && may_color();
            let sets = sets.iter().map(|(heading, preview)| format!("{heading}{}", preview.text(color)));
            format!("{}validation: {validation}\n", sets.collect::<String>())
        }
        DataCommand::Stats(args) => {
            let Loaded { config, loader, sets, validation } = load(&args.config, None)?;
            let steps = loader.steps_per_epoch(config.train.grad_accum);
            if args.json {
                let mut reports: Vec<Value> = sets.iter().map(|(_, preview)| as_json(preview)).collect();
                let mut report = if reports.len() == 1 {
                    reports.remove(0)
                } else {
                    json!({ "data": config.data, "sets": reports })
                };
                report["steps_per_epoch"] = steps.into();
                format!("{}\n", sanitize_line(&report.to_string()))
            } else {
                let sets = sets.iter().zip(loader.mixture.sets());
                let sets: String = sets.map(|(set, index)| as_text(set, index, &config)).collect();
                format!("{sets}steps per epoch   {steps}\nvalidation        {validation}\n")
            }
        }
    };
    out.write_all(text.as_bytes()).map_err(Error::stdout)
}

/// The counts of a data set as JSON.
fn as_json(DatasetPreview { stats, rows, marked_by, .. }: &DatasetPreview) -> Value {
    let mut report = json!(stats);
    report["rows"] = (*rows).into();
    report["marked_by"] = marked_by.as_deref().into();
    report
}

/// The counts of a data set as lines.
fn as_text((heading, preview): &(String, DatasetPreview), index: &SequenceIndex, config: &Config) -> String {
    let DatasetPreview { stats, rows, seq_len, .. } = preview;
    let filled = 100.0 * index.inputs() as f64 / (rows * *seq_len as u64).max(1) as f64;
    // A batch of samples is only as wide as they are.
    let rows = if index.tokens.kind() != DatasetKind::Text && !config.train.packing {
        format!("{rows}, of up to {seq_len} tokens")
    } else {
        format!("{rows} of {seq_len} tokens, {filled:.1} % filled")
    };
    let what = if stats.pairs.is_some() { "pairs" } else { "samples" };
    format!(
        "{heading}{what:<7}           {}\ntokens            {}\nloss tokens       {} ({:.1} %)\n{}\
         truncated         {} {what}, by {} tokens\nskipped           {} {what} without loss tokens\n\
         rows              {rows}\n",
        stats.samples,
        stats.tokens,
        stats.loss_tokens,
        100.0 * stats.loss_tokens as f64 / stats.tokens.max(1) as f64,
        preferences(*stats),
        stats.truncated,
        stats.truncated_tokens,
        stats.skipped,
    )
}

/// Lines about the answers of pairs, or about labels.
fn preferences(DatasetStats { samples, skipped, pairs, desirable, .. }: DatasetStats) -> String {
    if let Some(desirable) = desirable {
        return format!("labels            {desirable} good, {} bad\n", samples - skipped - desirable);
    }
    let Some(PairStats { loss_tokens, longest, longer, equally_long, identical }) = pairs else { return String::new() };
    let kept = (longer[0] + longer[1] + equally_long).max(1) as f64;
    let side = |side: usize| {
        format!("{:.1} loss tokens on average, at most {}", loss_tokens[side] as f64 / kept, longest[side])
    };
    format!(
        "chosen            {}\nrejected          {}\nlonger            chosen in {} pairs, rejected in {}, \
         {equally_long} ties\nidentical         {identical} pairs after truncation, left out\n",
        side(0),
        side(1),
        longer[0],
        longer[1],
    )
}

struct Loaded {
    config: Config,
    loader: BatchLoader,
    /// A preview of each data set, and a heading if there are several.
    sets: Vec<(String, DatasetPreview)>,
    /// A description of the validation rows.
    validation: String,
}

fn load(args: &ConfigArgs, sample: Option<u64>) -> Result<Loaded> {
    let config = args.resolve()?;
    let reporter = Reporter::start();
    let mut tell = |event| reporter.report(event);
    let source = ModelSource::open(&config, &mut tell)?;
    let data = datasets(&config, &source.chat, &source.tokenizer, &mut tell)?;
    let (training, validation) = rows(&config, &data)?;
    let chat = dataset_options(&config, &source.chat, &source.tokenizer).chat;
    let preview = |(index, (name, (_, share))): (&SequenceIndex, (&DataSource, &(_, f64)))| {
        let name = sanitize_line(&name.to_string()).into_owned();
        let heading =
            if data.len() == 1 { String::new() } else { format!("{name}: {:.1} % of the tokens\n", 100.0 * share) };
        Ok((heading, DatasetPreview::new(index, sample, &source.tokenizer, &chat)?))
    };
    let names: Vec<DataSource> = config.sources()?.into_iter().map(|(name, _)| name).collect();
    let sets = training.sets().zip(names.iter().zip(&data)).map(preview).collect::<Result<_>>()?;
    let origin = config.val.as_deref().unwrap_or("the end of the text, held out");
    let validation = match validation {
        Ok(None) => "none".to_owned(),
        Ok(Some(mixture)) => {
            let stats = mixture.sets().map(|set| set.stats);
            let what = if mixture.sets().any(|set| set.stats.pairs.is_some()) { "pair" } else { "sample" };
            let [samples, loss_tokens] =
                stats.fold([0; 2], |[samples, tokens], stats| [samples + stats.samples, tokens + stats.loss_tokens]);
            format!("{} with {loss_tokens} loss tokens ({})", counted(samples, what), sanitize_line(origin))
        }
        Err(error) => sanitize_line(&error.to_string()).into_owned(),
    };
    let loader = BatchLoader::from_index(training, config.train.batch_size, config.seed)?;
    Ok(Loaded { config, loader, sets, validation })
}
