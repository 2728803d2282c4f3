//! `finetune eval`: evaluates a model on a text: loss, perplexity and bits per byte.

use crate::cli::flags::ConfigArgs;
use crate::cli::model::ModelArgs;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::run_of;
use crate::data::{Bos, DatasetBuilder, SampleKind, TokenSource};
use crate::inference::ModelView;
use crate::inference::evaluate::{Evaluation, SlidingWindow, evaluate};
use crate::inference::exact_match::{ExactMatch, exact_match};
use crate::inference::trained::TrainedModel;
use crate::telemetry::PhaseProgress;
use crate::train::{datasets, with_loader};
use crate::{Error, Result};
use clap::Args;
use serde_json::json;
use std::io::Write;

#[derive(Args, Debug)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// The text [default: the validation text of the model's run]
    #[arg(long, short, value_name = "TEXT")]
    data: Option<String>,
    /// Tokens per window [default: the model's context]
    #[arg(long, short = 'l', value_name = "N")]
    seq_len: Option<usize>,
    /// Tokens from one window's start to the next's [default: the window]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Windows per batch [default: about 1,024 tokens]
    #[arg(long, short, value_name = "N")]
    batch_size: Option<usize>,
    /// Ask the last question of each conversation in `--data`, such as `chats-held-out`, and count the answers that
    /// match exactly
    #[arg(long, requires = "data", conflicts_with_all = ["seq_len", "stride", "batch_size"])]
    exact_match: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &EvalArgs, out: &mut dyn Write) -> Result<()> {
    let (trained, reporter) = args.model.model.open()?;
    if let (true, Some(data)) = (args.exact_match, &args.data) {
        return count_exact(args, &trained, reporter, data, out);
    }
    let windows = SlidingWindow::new(trained.spec.max_position_embeddings, args.seq_len, args.stride, args.batch_size)?;
    let (data, (tokens, bytes_per_token)) = match &args.data {
        Some(data) => {
            let source = &data.parse()?;
            let load = |loader: &mut DatasetBuilder<'_>| loader.load_unsplit(source, &trained.tokenizer);
            let mut report = |event| reporter.report(event);
            (data.clone(), with_loader(&[source], trained.dataset_options(), &mut report, load)?)
        }
        None => validation(&trained, args.model.model.bos, &reporter)?,
    };
    let windows = if args.seq_len.is_none() { windows.clamped_to(tokens.len()) } else { windows };
    reporter.activity.begin("reading weights");
    let loaded = args.model.load(&trained)?;
    let model = ModelView::new(&loaded, args.model.dtype);
    let count = windows.count(tokens.len()) as u64;
    reporter.activity.begin("evaluating");
    let found = evaluate(model, &tokens, bytes_per_token, windows, |done| {
        reporter.activity.advance("evaluating", PhaseProgress::Items(done as u64, count));
    })?;
    drop(reporter);
    let report =
        if args.json { as_json(args, &trained, &data, windows, found) } else { as_text(&data, windows, found) };
    writeln!(out, "{report}").map_err(Error::stdout)
}

/// Counts the questions of `data` whose answers match exactly.
fn count_exact(
    args: &EvalArgs,
    trained: &TrainedModel,
    reporter: Reporter,
    data: &str,
    out: &mut dyn Write,
) -> Result<()> {
    let source = &data.parse()?;
    let mut report = |event| reporter.report(event);
    let options = trained.dataset_options();
    let examples = with_loader(&[source], options, &mut report, |loader| loader.eval_examples(source))?;
    reporter.activity.begin("reading weights");
    let loaded = args.model.load(trained)?;
    let model = ModelView::new(&loaded, args.model.dtype);
    let count = examples.len() as u64;
    reporter.activity.begin("answering");
    let found = exact_match(trained, model, &examples, |done| {
        reporter.activity.advance("answering", PhaseProgress::Items(done as u64, count));
    })?;
    drop(reporter);
    let ExactMatch { asked, exact, wrong } = &found;
    let report = if args.json {
        serde_json::to_string(&found).map_err(|error| Error::config("--json", error.to_string()))?
    } else {
        let share = 100.0 * *exact as f64 / *asked as f64;
        let mut report = format!("exact answers   {exact} of {asked} ({share:.1} %)");
        for (expected, said) in wrong {
            let [expected, said] = [expected, said].map(|text| crate::untrusted::sanitize_line(text));
            report.extend(["\n  expected: ", &expected, "\n  said:     ", &said]);
        }
        report
    };
    writeln!(out, "{report}").map_err(Error::stdout)
}

/// The validation text of the model's run, with the BOS token that the run uses unless the user has given a rule.
fn validation(trained: &TrainedModel, bos: Bos, reporter: &Reporter) -> Result<(String, (TokenSource, f64))> {
    let run = run_of(&trained.path).ok_or_else(|| {
        Error::config("--data", "this model is not from a run; name a text with `--data`: `grammar` or a file")
    })?;
    let config = ConfigArgs::default().resolve_from_run(&run)?;
    let rule = if bos == Bos::Auto { config.bos } else { bos };
    let id = trained.spec.bos_token_id;
    let tokenizer = trained.aux_files.clone().with_special_tokens(trained.tokenizer.clone(), rule, id)?;
    let mut sets = datasets(&config, &trained.chat, &tokenizer, &mut |event| reporter.report(event))?;
    let (1, Some((set, _))) = (sets.len(), sets.pop()) else {
        return Err(Error::config("--data", "this run has several data sets; name one text with `--data`"));
    };
    if set.validation.samples() != SampleKind::Plain {
        let message = "this run validates on pairs, labelled answers or prompts; name a text with `--data`";
        return Err(Error::config("--data", message));
    }
    let data = match (config.held_out()?, &config.val) {
        (Some(0.0), _) => {
            return Err(Error::config("--data", "this run has no validation text; name one with `--data`"));
        }
        (Some(share), _) => format!("{}, the last {} %", config.data, (100.0 * share) as f32),
        (None, val) => val.clone().unwrap_or_default(),
    };
    Ok((data, (set.validation, set.validation_bytes_per_token)))
}

fn as_json(args: &EvalArgs, trained: &TrainedModel, data: &str, windows: SlidingWindow, found: Evaluation) -> String {
    let mut report = json!({
        "model": trained.path.display().to_string(),
        "data": data,
        "policy": args.model.dtype.to_string(),
        "seq_len": windows.seq_len,
        "stride": windows.stride,
    });
    if let (Some(report), Ok(serde_json::Value::Object(found))) = (report.as_object_mut(), serde_json::to_value(found))
    {
        report.extend(found);
    }
    report.to_string()
}

fn as_text(data: &str, windows: SlidingWindow, found: Evaluation) -> String {
    let Evaluation { loss, perplexity, bits_per_byte, tokens, windows: count } = found;
    let SlidingWindow { seq_len, stride, .. } = windows;
    let data = crate::untrusted::sanitize_line(data);
    format!(
        "loss            {loss:.6} nats per token\nperplexity      {perplexity:.4}\nbits per byte   \
         {bits_per_byte:.4}\n\
         predicted       {tokens} tokens of {data}\nwindows         {count} of {seq_len} tokens, stride {stride}"
    )
}
