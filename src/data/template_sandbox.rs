//! Renders a model's chat template in a separate process with limits on memory and time.
//!
//! A template's fuel limits its instructions, not their allocations: forty times `{% set x = x + x %}` needs terabytes.
//! Here the processor time is limited instead.

use super::exact_json::read_json;
use super::template::{Conversation, Rendered, Template, TemplateTokens};
use crate::untrusted::subprocess::{self, ExitCause};
use crate::{Error, Result};
use minijinja::Value;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};

/// The first argument that makes the program call [`worker_main`].
pub const ARGUMENT: &str = "__chat-template";
/// Limit on the processor time per conversation, in seconds; the longest take milliseconds.
const MAX_SECONDS: u64 = 5;
/// Limit on a line between the processes, in bytes.
const MAX_LINE: u64 = 1 << 30;

/// The first line to the worker.
#[derive(Debug, Serialize, Deserialize)]
struct TemplateSetup {
    source: String,
    origin: String,
    tokens: TemplateTokens,
}

/// Every later line to the worker.
#[derive(Serialize, Deserialize)]
struct RenderRequest {
    conversation: Conversation,
    variables: Option<Value>,
    add_generation_prompt: bool,
}

/// A line from it: a text, or why there is none.
type Response = std::result::Result<Rendered, String>;

/// A model's template, rendered in a worker process if this program can start itself. The worker starts with the first
/// conversation.
#[derive(Debug)]
pub struct TemplateSandbox {
    pub(super) template: Template,
    setup: TemplateSetup,
    worker: Mutex<Option<Worker>>,
}

#[derive(Debug)]
struct Worker {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TemplateSandbox {
    /// Like [`Template::new`].
    pub fn new(source: &str, origin: &str, tokens: &TemplateTokens) -> Result<Self> {
        let template = Template::new(source, origin, tokens.clone())?;
        let setup = TemplateSetup { source: source.to_owned(), origin: origin.to_owned(), tokens: tokens.clone() };
        Ok(Self { template, setup, worker: Mutex::new(None) })
    }

    /// Like [`Template::render`].
    pub fn render(
        &self,
        conversation: &Conversation,
        variables: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Rendered> {
        self.try_render(conversation, variables, add_generation_prompt)?
    }

    /// Like [`Template::render`]. The outer error is for a template that exceeds its limits.
    pub(super) fn try_render(
        &self,
        conversation: &Conversation,
        variables: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Result<Rendered>> {
        let Some(command) = subprocess::worker_command(ARGUMENT) else {
            return Ok(self.template.render(conversation, variables, add_generation_prompt));
        };
        let request =
            RenderRequest { conversation: conversation.clone(), variables: variables.cloned(), add_generation_prompt };
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = |mut process: Worker| matches!(process.child.try_wait(), Ok(None)).then_some(process);
        let mut process = match worker.take().and_then(alive) {
            Some(process) => process,
            None => self.start(command).map_err(|error| self.wrong(&format!("cannot be rendered: {error}")))?,
        };
        let answer = write_line(&mut process.requests, &request).and_then(|()| {
            let mut line = Vec::new();
            (&mut process.answers).take(MAX_LINE).read_until(b'\n', &mut line)?;
            Ok(serde_json::from_slice::<Response>(&line)?)
        });
        let exceeds =
            |limit: &str| self.wrong(&format!("takes more than {limit}; use another template with `--chat-template`"));
        match answer {
            Ok(answer) => {
                *worker = Some(process);
                Ok(answer.map_err(|message| Error::model(&self.setup.origin, message)))
            }
            Err(_) => Err(match subprocess::exit_cause(&mut process.child) {
                ExitCause::OutOfMemory => exceeds("2 GiB of memory for a conversation, or calls itself too often"),
                ExitCause::OutOfTime => exceeds(&format!("{MAX_SECONDS} s of processor time for a conversation")),
                ExitCause::Otherwise(how) => self.wrong(&format!("cannot be rendered: its process {how}")),
            }),
        }
    }

    fn start(&self, mut command: Command) -> std::io::Result<Worker> {
        let mut child = command.stdin(Stdio::piped()).spawn()?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        };
        let mut worker = Worker { child, requests, answers: BufReader::new(answers) };
        write_line(&mut worker.requests, &self.setup)?;
        Ok(worker)
    }

    fn wrong(&self, message: &str) -> Error {
        Error::model(&self.setup.origin, format!("its chat template {message}"))
    }
}

fn write_line(mut to: impl Write, value: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads a template and conversations from standard input and writes each one's text to standard output, within the
/// limits.
pub fn worker_main() -> ExitCode {
    subprocess::limit_memory();
    match answer_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn answer_all() -> std::io::Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let Some(setup) = lines.next() else { return Ok(()) };
    let TemplateSetup { source, origin, tokens } = serde_json::from_str(&setup?)?;
    let mut template = Template::new(&source, &origin, tokens).map_err(Error::into_message);
    if let Ok(template) = &mut template {
        template.environment.set_fuel(None);
    }
    for line in lines {
        let request = RenderRequest::deserialize(read_json(&line?)?).map_err(std::io::Error::other)?;
        let RenderRequest { conversation, variables, add_generation_prompt } = request;
        subprocess::limit_computing(MAX_SECONDS);
        // The other process adds the origin.
        let rendered: Response = template.as_ref().map_err(Clone::clone).and_then(|template| {
            template.render(&conversation, variables.as_ref(), add_generation_prompt).map_err(Error::into_message)
        });
        write_line(std::io::stdout().lock(), &rendered)?;
    }
    Ok(())
}
