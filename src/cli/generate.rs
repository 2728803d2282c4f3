//! `finetune generate`: generates text and streams it to standard output.

use crate::cli::model::ModelArgs;
use crate::engine::model::KvCache;
use crate::inference::generate::{GenerationRequest, Sampling, StopReason, TextStream, generate, prompt_ids};
use crate::{Error, Result};
use clap::Args;
use std::io::{ErrorKind, IsTerminal, Write, stderr};
use std::time::Instant;

/// Flags of `finetune generate`.
#[derive(Args, Debug)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Start of the text [default: none, so the model starts it]
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prompt: String,
    /// Maximum number of tokens
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Sampling temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    temperature: f64,
    /// Sample from the N likeliest tokens
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Sample from the likeliest tokens with this total probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Repetition penalty; above 1, tokens that occurred become less likely
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Seed of the text; equal seeds give equal texts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Writes the text after the prompt to `out`, and why it ended to standard error.
pub(super) fn run(args: &GenerateArgs, out: &mut dyn Write) -> Result<()> {
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
    };
    sampling.validate()?;
    let (trained, reporter) = args.model.model.open()?;
    let prompt = prompt_ids(&trained.tokenizer, &args.prompt)?;
    let context = trained.config.max_position_embeddings;
    if prompt.len() > context {
        let message = format!("its {} tokens exceed the context of {context}; shorten it", prompt.len());
        return Err(Error::config("--prompt", message));
    }
    let open = args.model.open_device()?;
    let (model, weights) = trained.load(args.model.dtype, &open)?;
    let capacity = context.min(prompt.len().saturating_add(args.max_tokens));
    let mut cache = KvCache::new(model.spec(), args.model.dtype, capacity, &open.device)?;
    let stop_token_ids = trained.stop_token_ids()?;
    let request = GenerationRequest {
        prompt: &prompt,
        max_tokens: args.max_tokens,
        stop_token_ids: &stop_token_ids,
        sampling: &sampling,
    };

    let mut stream = TextStream::new(&trained.tokenizer);
    let (began, mut count) = (Instant::now(), 0);
    reporter.begin("reading the prompt");
    let mut reporter = Some(reporter);
    let stop = generate(&model, &weights, &mut cache, request, |id| {
        drop(reporter.take());
        count += 1;
        write_text(out, &stream.push(id)?)
    })?;
    drop(reporter);
    write_text(out, &(stream.finish()? + "\n"))?;
    report(stop, count, context, began);
    Ok(())
}

/// Writes and flushes; `false` if the reader has closed the pipe.
fn write_text(out: &mut dyn Write, text: &str) -> Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::io("write to", "standard output")(error)),
    }
}

/// Prints why it ended if standard error is a terminal or the context is full.
fn report(reason: StopReason, count: usize, context: usize, began: Instant) {
    let seconds = began.elapsed().as_secs_f64();
    let why = match reason {
        StopReason::EndOfText => "the text is complete".to_owned(),
        StopReason::Length => "`--max-tokens` reached".to_owned(),
        StopReason::ContextFull => format!("the context of {context} tokens is full"),
        StopReason::Callback => return,
    };
    if reason == StopReason::ContextFull || stderr().is_terminal() {
        let rate = count as f64 / seconds.max(1e-9);
        writeln!(stderr(), "stopped after {count} tokens: {why} ({rate:.1} tokens/s)").ok();
    }
}
