//! `finetune generate`: generates a text and streams it to standard output, or a text for each prompt in a file.

use crate::cli::model::ModelArgs;
use crate::cli::run_lookup::output_file;
use crate::data::{Prompt, PromptRow, counted};
use crate::engine::model::KvCache;
use crate::inference::ModelView;
use crate::inference::chat::Chat;
use crate::inference::generate::{
    BATCH_SIZE, GenerationRequest, Sampling, StopReason, TextStream, decode_after, generate, generate_batch, prompt_ids,
};
use crate::inference::trained::TrainedModel;
use crate::settings::number;
use crate::telemetry::PhaseProgress;
use crate::train::with_loader;
use crate::{Error, Result};
use clap::Args;
use minijinja::Value;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;
use std::time::Instant;

#[derive(Args, Debug)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Start of the text [default: none, so the model starts it]
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prompt: String,
    /// A file with rows of `prompt` or `messages`, for which texts are generated at once
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    input: Option<String>,
    /// The file for `--input`'s rows with their `completion`, in JSON Lines [default: standard output]
    #[arg(long, value_name = "FILE", requires = "input")]
    output: Option<PathBuf>,
    /// Texts of `--input` that are generated at a time
    #[arg(long, short, value_name = "N", default_value_t = BATCH_SIZE, requires = "input")]
    batch_size: usize,
    /// Maximum number of tokens
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Sampling temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "X", value_parser = number, default_value_t = 1.0)]
    temperature: f64,
    /// Sample from the N likeliest tokens
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Sample from the likeliest tokens with this total probability
    #[arg(long, value_name = "P", value_parser = number)]
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
    if let Some(input) = &args.input {
        return run_file(args, input, &sampling, out);
    }
    let (trained, reporter) = args.model.model.open()?;
    let prompt = prompt_ids(&trained.tokenizer, &args.prompt)?;
    let context = trained.spec.max_position_embeddings;
    if prompt.len() > context {
        let message = format!("its {} tokens exceed the context of {context}; shorten it", prompt.len());
        return Err(Error::config("--prompt", message));
    }
    let (model, weights) = args.model.load(&trained)?;
    let capacity = context.min(prompt.len().saturating_add(args.max_tokens));
    let mut cache = KvCache::new(model.spec(), args.model.dtype, capacity, &weights.device())?;
    let stop_token_ids = trained.stop_token_ids()?;
    let request = GenerationRequest {
        prompt: &prompt,
        max_tokens: args.max_tokens,
        stop_token_ids: &stop_token_ids,
        sampling: &sampling,
    };

    let mut stream = TextStream::after(&trained.tokenizer, &prompt)?;
    let began = Instant::now();
    let mut count = 0;
    reporter.activity.begin("reading the prompt");
    let mut reporter = Some(reporter);
    let receive = |id| {
        drop(reporter.take());
        count += 1;
        write_text(out, &stream.push(id)?)
    };
    let stop = weights.with_packed(|| generate(&model, &weights, &mut cache, request, receive))?;
    drop(reporter);
    write_text(out, &(stream.finish()? + "\n"))?;
    report(stop, count, context, began);
    Ok(())
}

/// Generates a text for each row of `input`. The seed of a row is its number, counted from 0, more than `sampling`'s.
fn run_file(args: &GenerateArgs, input: &str, sampling: &Sampling, out: &mut dyn Write) -> Result<()> {
    if args.batch_size == 0 {
        return Err(Error::config("--batch-size", "must be at least 1"));
    }
    let create = |path| Ok::<_, Error>((path, output_file("--output", path, &[input.into()])?));
    let output = args.output.as_deref().map(create).transpose()?;
    let (trained, reporter) = args.model.model.open()?;
    let source = &input.parse()?;
    let mut report = |event| reporter.report(event);
    let rows = with_loader(&[source], trained.dataset_options(), &mut report, |loader| loader.prompts(source))?;
    let ids = encode(&trained, &rows)?;
    reporter.activity.begin("reading weights");
    let loaded = args.model.load(&trained)?;
    let model = ModelView::new(&loaded, args.model.dtype);
    let seeded = |number| Sampling { seed: sampling.seed.wrapping_add(number), ..sampling.clone() };
    let samplings: Vec<Sampling> = (0..rows.len() as u64).map(seeded).collect();
    let stop_token_ids = &trained.stop_token_ids()?[..];
    let max_tokens = args.max_tokens;
    let request = |(prompt, sampling)| GenerationRequest { prompt, max_tokens, stop_token_ids, sampling };
    let requests: Vec<GenerationRequest<'_>> = ids.iter().map(|ids| &ids[..]).zip(&samplings).map(request).collect();
    reporter.activity.begin("generating");
    let activity = reporter.activity.clone();
    let mut reporter = Some(reporter);
    let began = Instant::now();
    let (mut tokens, mut done, mut written) = (0, 0, 0);
    // Lines that wait for those of earlier rows.
    let mut lines: Vec<Option<String>> = vec![None; rows.len()];
    let mut write_lines = |write: &mut dyn FnMut(&str) -> Result<()>| {
        generate_batch(model, &requests, args.batch_size, |number, found| {
            let text = match rows[number].prompt {
                Prompt::Text(_) => decode_after(&trained.tokenizer, &ids[number], found.text_ids()),
                Prompt::Conversation(..) => trained.tokenizer.decode(found.text_ids()),
            };
            lines[number] = Some(line(&rows[number], text?, found.reason)?);
            tokens += found.text_ids().len();
            done += 1;
            activity.advance("generating", PhaseProgress::Items(done, requests.len() as u64));
            while let Some(line) = lines.get_mut(written).and_then(Option::take) {
                write(&line)?;
                written += 1;
            }
            Ok(())
        })
    };
    let Some((path, output)) = output else {
        return write_lines(&mut |line| {
            // On a terminal the status line would mix with the lines.
            reporter.take_if(|_| stdout().is_terminal());
            out.write_all(line.as_bytes()).and_then(|()| out.flush()).map_err(Error::stdout)
        });
    };
    output.write_with(|file| {
        write_lines(&mut |line| file.write_all(line.as_bytes()).map_err(Error::io("write", path)))
    })?;
    let seconds = began.elapsed().as_secs_f64();
    drop(reporter);
    let rate = tokens as f64 / seconds.max(1e-9);
    let (texts, tokens) = (counted(rows.len(), "text"), counted(tokens, "token"));
    writeln!(out, "{}: {texts}, {tokens}, {rate:.1} tokens/s", path.display()).map_err(Error::stdout)
}

fn encode(trained: &TrainedModel, rows: &[PromptRow]) -> Result<Vec<Vec<u32>>> {
    let is_conversation = |row: &PromptRow| matches!(row.prompt, Prompt::Conversation(..));
    let chat = rows.iter().any(is_conversation).then(|| Chat::new(trained, None)).transpose()?;
    let tokenizer = &trained.tokenizer;
    let context = trained.spec.max_position_embeddings;
    let ids = |row: &PromptRow| {
        let ids = match (&row.prompt, &chat) {
            (Prompt::Conversation(conversation, variables), Some(chat)) => {
                let text = chat.asking(conversation, variables.as_ref());
                tokenizer.encode(&text.map_err(|error| row.error(&error.to_string()))?)?
            }
            (Prompt::Text(text), _) => prompt_ids(tokenizer, text)?,
            (Prompt::Conversation(..), None) => Vec::new(),
        };
        match ids.len() {
            0 => Err(row.error("the chat template writes nothing for its messages")),
            1.. if ids.len() > context => {
                let message = format!("its {} tokens exceed the context of {context}; shorten it", ids.len());
                Err(row.error(&message))
            }
            _ => Ok(ids),
        }
    };
    rows.iter().map(ids).collect()
}

/// The row with its text, as a line of JSON. Fields keep their order, in which templates write tools.
fn line(row: &PromptRow, text: String, reason: StopReason) -> Result<String> {
    let reason = if reason == StopReason::EndOfText { "stop" } else { "length" };
    let names = row.row.try_iter().into_iter().flatten();
    let fields = names.map(|name| (name.clone(), row.row.get_item(&name).unwrap_or_default()));
    let new = [("completion".into(), text.into()), ("finish_reason".into(), reason.into())];
    let line = serde_json::to_string(&Value::from_pairs(fields.chain(new)));
    Ok(line.map_err(|error| row.error(&error.to_string()))? + "\n")
}

/// Writes and flushes; `false` if the reader has closed the pipe.
fn write_text(out: &mut dyn Write, text: &str) -> Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::stdout(error)),
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
        let tokens = counted(count, "token");
        writeln!(stderr(), "stopped after {tokens}: {why} ({rate:.1} tokens/s)").ok();
    }
}
