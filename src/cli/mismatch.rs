//! `finetune mismatch`: measures the difference between training and generation in each type.

use crate::cli::model::{DeviceArgs, DtypeList, ModelSourceArgs};
use crate::data::counted;
use crate::engine::model::differing_choices;
use crate::inference::ModelView;
use crate::inference::generate::prompt_ids;
use crate::inference::mismatch::{Mismatch, Ratios, Sequences, chosen_experts, log_probs};
use crate::precision::PrecisionPolicy;
use crate::telemetry::PhaseProgress;
use crate::ui::{Column, Line, Page, plain};
use crate::{Error, Result};
use clap::Args;
use serde_json::json;
use std::io::Write;

#[derive(Args, Debug)]
pub(super) struct MismatchArgs {
    #[command(flatten)]
    model: ModelSourceArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// The types to compare: fp32, fp16, bf16, or one policy such as p=f32,c=f16,g=f16,r=f32
    #[arg(long, value_name = "DTYPE,…", default_value = "fp32,bf16,fp16")]
    dtype: DtypeList,
    /// Start of each sequence [default: the model's own text]
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prompt: String,
    /// Predicted tokens per sequence [default: 128, at most what fits the context]
    #[arg(long, short = 'n', value_name = "N")]
    max_tokens: Option<usize>,
    /// Sequences, sampled in FP32 for all types
    #[arg(long, value_name = "N", default_value_t = 4)]
    sequences: usize,
    /// Equal seeds sample equal sequences
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &MismatchArgs, out: &mut dyn Write) -> Result<()> {
    for (flag, count) in [("--sequences", Some(args.sequences)), ("--max-tokens", args.max_tokens)] {
        if count == Some(0) {
            return Err(Error::config(flag, "must be at least 1"));
        }
    }
    let (trained, reporter) = args.model.open()?;
    let prompt = prompt_ids(&trained.tokenizer, &args.prompt)?;
    let context = trained.spec.max_position_embeddings;
    let room = context.saturating_sub(prompt.len());
    let tokens = args.max_tokens.unwrap_or(room.clamp(1, 128));
    if tokens > room {
        let message = format!("a prompt of {} tokens plus {tokens} exceeds the context of {context}", prompt.len());
        return Err(Error::config("--max-tokens", message));
    }
    let total = args.sequences as u64;
    let advance = |what: &str, done: usize| reporter.activity.advance(what, PhaseProgress::Items(done as u64, total));
    let (sequences, exact) = {
        let policy = PrecisionPolicy::FP32;
        let loaded = trained.load(policy, &args.device.open(policy)?)?;
        let model = ModelView::new(&loaded, policy);
        let extent = (args.sequences, tokens);
        let advance = |done| advance("sampling", done);
        let sequences = Sequences::sample(model, &prompt, extent, args.seed, advance)?;
        let experts = chosen_experts(model, &sequences)?;
        (sequences, experts)
    };
    let mut found = Vec::new();
    for (name, policy) in &args.dtype.0 {
        let what = format!("measuring {name}");
        reporter.activity.begin(&what);
        let loaded = trained.load(*policy, &args.device.open(*policy)?)?;
        let model = ModelView::new(&loaded, *policy);
        let probs = log_probs(model, &sequences, |done| advance(&what, done))?;
        let experts = differing_choices(&exact, &chosen_experts(model, &sequences)?);
        found.push((name.clone(), Mismatch { experts, ..Mismatch::new(&probs, tokens) }));
    }
    drop(reporter);
    let text = if args.json {
        let types: serde_json::Map<_, _> = found.iter().map(|(name, found)| (name.clone(), json!(found))).collect();
        json!({
            "model": trained.path.display().to_string(),
            "sequences": args.sequences,
            "tokens_each": tokens,
            "seed": args.seed,
            "types": types,
        })
        .to_string()
    } else {
        as_text(&found, args.sequences, tokens)
    };
    writeln!(out, "{text}").map_err(Error::stdout)
}

fn as_text(found: &[(String, Mismatch)], sequences: usize, tokens: usize) -> String {
    let width = found.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(5);
    let span = |ratios: Ratios| plain(format!("   {:.5} to {:.5}", ratios.min, ratios.max));
    let columns: &[Column<(String, Mismatch)>] = &[
        ("type", -(width as isize), &|(name, _)| plain(name)),
        ("mean", 10, &|(_, it)| plain(format!("{:.2e}", it.mean))),
        ("largest", 10, &|(_, it)| plain(format!("{:.2e}", it.largest))),
        ("KL", 10, &|(_, it)| plain(format!("{:.1e}", it.kl))),
        ("   of a token", -21, &|(_, it)| span(it.token_ratio)),
        ("   of a sequence", -16, &|(_, it)| span(it.sequence_ratio)),
    ];
    let mut page = Page::new();
    let heading = format!("{:<width$}  |log p(training) - log p(generation)|   p(training) / p(generation)", "");
    page.title(heading);
    page.table(found, columns);
    let shares = found.iter().filter_map(|(name, it)| Some(format!("{name} {:.2} %", 100.0 * it.experts?)));
    let shares: Vec<String> = shares.collect();
    if !shares.is_empty() {
        let shares = shares.join(", ");
        page.push(Line::new().plain(format!("Choices of experts that differ from FP32's: {shares}")));
    }
    let sequences = counted(sequences, "sequence");
    page.text()
        + &format!(
            "\n{sequences} of {tokens} tokens, sampled in FP32, went through the training forward pass and, token by \
         token,\nthrough generation with its KV cache. KL is computed over the whole distributions, in nats per token. A step of\n\
         reinforcement learning weighs what it learns from a token by the ratio: in exact arithmetic it is 1."
        )
}
