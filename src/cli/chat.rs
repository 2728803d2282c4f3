//! `finetune chat`: a conversation in the terminal, with streamed answers.

use crate::cli::model::ModelArgs;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::check_output;
use crate::data::Conversation;
use crate::engine::model::{Decoder, KvCache, Parameters};
use crate::inference::chat::Chat;
use crate::inference::generate::{GenerationRequest, Sampling, StopReason, TextStream, generate};
use crate::inference::trained::TrainedModel;
use crate::screen::Terminal;
use crate::screen::terminal::{MessageEditor, interrupt_flag};
use crate::settings::number;
use crate::untrusted::sanitize_lines;
use crate::{Error, Result};
use clap::Args;
use std::io::{BufRead, IsTerminal, Read, Write, stderr, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const HELP: &str = "\
/help          show this list
/reset         clear the conversation
/system TEXT   restart it with system instructions
/regenerate    replace the last answer by one with the next seed
/save FILE     append the conversation to FILE as JSON Lines
/quit, Ctrl-D  end the chat
A backslash before Enter, or Alt-Enter, continues the message on the next line. Ctrl-C stops an answer.";
/// Ends an answer if the model has no template: each turn is a line.
const LINE_END: char = '\n';
/// Limit of a line of standard input, in bytes.
const MAX_LINE: u64 = 1 << 20;

#[derive(Args, Debug)]
pub(super) struct ChatArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// System instructions at the start of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// A chat template to use instead of the model's: a file, or a name such as chatml or llama3.1
    #[arg(long, value_name = "FILE|NAME", alias = "template")]
    chat_template: Option<String>,
    /// Maximum tokens per answer
    #[arg(long, short = 'n', value_name = "N", default_value_t = 512)]
    max_tokens: usize,
    /// Sampling temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "X", value_parser = number, default_value_t = 0.7)]
    temperature: f64,
    /// Sample from the likeliest tokens with this total probability
    #[arg(long, value_name = "P", value_parser = number)]
    top_p: Option<f64>,
    /// Seed of the answers; equal seeds and inputs give equal answers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Chats until the input ends; answers go to `out`, everything else to standard error.
pub(super) fn run(args: &ChatArgs, out: &mut dyn Write) -> Result<()> {
    let sampling =
        Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed, ..Sampling::default() };
    sampling.validate()?;
    let (trained, reporter) = args.model.model.open()?;
    let mut chat = Chat::new(&trained, args.chat_template.as_deref())?;
    let (model, weights) = args.model.load(&trained)?;
    drop(reporter);
    // The editor draws on standard error, but asks for the position of the cursor on standard output.
    let terminal = stdin().is_terminal() && stdout().is_terminal() && stderr().is_terminal();
    let terminal = terminal && !Terminal::current().dumb;
    if chat.plain {
        print_notice(
            "this model has no chat template; turns are formatted as lines of `role: content`, like `messages` in \
             training data",
        );
    }
    let mut editor = terminal.then(|| MessageEditor::new("/help lists the commands, Ctrl-D ends the chat"));
    let stopped = match &editor {
        Some(_) => MessageEditor::handle_signals().and_then(|()| interrupt_flag()),
        None => Ok(Arc::default()),
    };
    let stopped = stopped.map_err(Error::io("watch for signals on", "terminal"))?;
    let cache = KvCache::empty(args.model.dtype, &weights.device());
    let mut speaker =
        ChatResponder { args, trained: &trained, model, weights: &weights, cache, sampling, stopped, out };
    begin(&mut chat, args.system.as_deref());
    weights.with_packed(|| converse(&mut chat, &mut speaker, &mut editor))
}

/// Answers messages and runs commands until the input ends.
fn converse(chat: &mut Chat, speaker: &mut ChatResponder<'_>, editor: &mut Option<MessageEditor>) -> Result<()> {
    let args = speaker.args;
    while let Some(line) = next_message(editor)? {
        let line = line.trim();
        let before = chat.history.clone();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => {}
            "/quit" => break,
            "/help" => print_notice(HELP),
            "/reset" => begin(chat, args.system.as_deref()),
            "/system" => begin(chat, Some(rest).filter(|text| !text.is_empty())),
            "/save" if rest.is_empty() => print_notice("`/save` needs a file name"),
            "/save" | "/regenerate" if chat.history.last_answer().is_none() => print_notice("there is no answer yet"),
            "/save" => match save(chat, rest) {
                Ok(()) => print_notice(&format!("saved {} messages to `{rest}`", chat.history.messages.len())),
                Err(error) => print_notice(&error.to_string()),
            },
            "/regenerate" => {
                chat.history.messages.pop();
                speaker.sampling.seed = speaker.sampling.seed.wrapping_add(1);
                speaker.reply(chat, before)?;
            }
            unknown if unknown.starts_with('/') => {
                print_notice(&format!("unknown command `{unknown}`; /help lists the commands"));
            }
            _ => {
                chat.history.push("user", line);
                speaker.reply(chat, before)?;
            }
        }
    }
    Ok(())
}

/// The next message or command, from the editor or as a line of standard input; `None` at the end.
fn next_message(editor: &mut Option<MessageEditor>) -> Result<Option<String>> {
    if let Some(open) = editor {
        match open.read() {
            Ok(message) => return Ok(message),
            // A terminal on a slow line, or `script` without one, does not report where its cursor is.
            Err(error) => print_notice(&format!("messages are plain lines from now on: {error}")),
        }
        *editor = None;
    }
    if stdin().is_terminal() {
        write!(stderr(), "> ").and_then(|()| stderr().flush()).ok();
    }
    let mut line = String::new();
    let read = stdin().lock().take(MAX_LINE).read_line(&mut line).map_err(Error::io("read from", "standard input"))?;
    if line.is_empty() && stdin().is_terminal() {
        print_notice("");
    }
    if line.len() as u64 == MAX_LINE {
        return Err(Error::config("standard input", "a line has 1 MiB or more; use shorter messages"));
    }
    Ok((read > 0).then_some(line))
}

/// Restarts the conversation.
fn begin(chat: &mut Chat, system: Option<&str>) {
    chat.history.messages.clear();
    if let Some(text) = system {
        chat.history.push("system", text);
    }
}

fn print_notice(text: &str) {
    writeln!(stderr(), "{}", sanitize_lines(text)).ok();
}

/// Appends the conversation to a file that `--data` takes.
fn save(chat: &Chat, file: &str) -> Result<()> {
    check_output("/save", file.as_ref(), &[])?;
    let line = format!("{{\"messages\": {}}}\n", chat.history.to_json()?);
    let mut file_handle =
        std::fs::OpenOptions::new().create(true).append(true).open(file).map_err(Error::io("open", file))?;
    file_handle.write_all(line.as_bytes()).map_err(Error::io("write", file))
}

/// Adds an answer. Restores `before` if the template or the context rejects the message, or the answer is stopped at
/// once.
fn add_answer(history: &mut Conversation, before: Conversation, answer: Result<String>, stopped: bool) -> Result<()> {
    match answer {
        Ok(answer) if stopped && answer.is_empty() => *history = before,
        Ok(answer) => history.push("assistant", &answer),
        Err(error @ (Error::Model { .. } | Error::Config { .. })) => {
            *history = before;
            print_notice(&error.to_string());
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Generates the model's answers.
struct ChatResponder<'a> {
    args: &'a ChatArgs,
    trained: &'a TrainedModel,
    model: Decoder,
    weights: &'a Parameters,
    /// The tokens of the last prompt and answer: the next prompt begins with most of them.
    cache: KvCache,
    sampling: Sampling,
    /// Set to stop an answer.
    stopped: Arc<AtomicBool>,
    out: &'a mut dyn Write,
}

impl ChatResponder<'_> {
    /// Answers the last message. The conversation becomes `before` again if there is no answer.
    fn reply(&mut self, chat: &mut Chat, before: Conversation) -> Result<()> {
        self.stopped.store(false, Ordering::SeqCst);
        let answer = self.answer(chat);
        let stopped = self.stopped.swap(false, Ordering::SeqCst);
        if stopped {
            print_notice("(stopped)");
        }
        add_answer(&mut chat.history, before, answer, stopped)
    }

    /// Generates the answer and prints it as it is generated.
    fn answer(&mut self, chat: &Chat) -> Result<String> {
        let Self { args, trained, model, weights, cache, sampling, stopped, out } = self;
        let mut reporter = Some(Reporter::of("reading the conversation"));
        // The template has already added every special token.
        let prompt = trained.tokenizer.encode(&chat.asking(&chat.history, None)?)?;
        let context = trained.spec.max_position_embeddings;
        if prompt.len() >= context {
            let message = format!(
                "the conversation has {} tokens, but the model's context is {context}; /reset restarts it",
                prompt.len()
            );
            return Err(Error::config("chat", message));
        }
        let capacity = context.min(prompt.len().saturating_add(args.max_tokens));
        cache.prepare(model.spec(), &prompt, capacity)?;
        let request = GenerationRequest {
            prompt: &prompt,
            max_tokens: args.max_tokens,
            stop_token_ids: &chat.stop_token_ids,
            sampling,
        };
        let mut stream = TextStream::new(&trained.tokenizer);
        let mut answer = String::new();
        let mut say = |answer: &mut String, piece: &str| {
            answer.push_str(piece);
            out.write_all(piece.as_bytes()).and_then(|()| out.flush()).map_err(Error::stdout)
        };
        let receive = |id| {
            drop(reporter.take());
            if stopped.load(Ordering::SeqCst) || chat.plain && answer.contains(LINE_END) {
                return Ok(false);
            }
            say(&mut answer, &stream.push(id)?)?;
            Ok(true)
        };
        let reason = generate(model, weights, cache, request, receive)?;
        drop(reporter);
        let rest = stream.finish()?;
        say(&mut answer, &rest)?;
        out.write_all(b"\n").map_err(Error::stdout)?;
        match reason {
            StopReason::Length => print_notice("(stopped at `--max-tokens`)"),
            StopReason::ContextFull => print_notice("(the context is full; /reset restarts it)"),
            StopReason::EndOfText | StopReason::Callback => {}
        }
        Ok(answer.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: `/regenerate` that was stopped at once lost the question.
    #[test]
    fn without_an_answer_the_conversation_is_as_before() {
        let mut before = Conversation::default();
        before.push("user", "question");
        let question = before.clone();
        before.push("assistant", "old");
        let after = |answer, stopped| {
            let mut history = question.clone();
            add_answer(&mut history, before.clone(), answer, stopped).map(|()| history.to_json().unwrap())
        };
        let unchanged = before.to_json().unwrap();
        assert_eq!(after(Ok(String::new()), true).unwrap(), unchanged);
        assert_eq!(after(Err(Error::config("chat", "too long")), false).unwrap(), unchanged);
        assert!(after(Ok("new".into()), true).unwrap().contains("new"));
    }
}
