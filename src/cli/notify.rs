//! `--notify COMMAND`: a program of the user's that is run when something worth a message happens.

use crate::telemetry::{Event, Record};
use crate::{Error, Result};
use std::io::{Write, stderr};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};

/// Records that a screen may lag behind, as in [`crate::telemetry::Emitter`].
const QUEUE: usize = 8192;

/// A program and its first arguments. No shell is asked.
#[derive(Clone, Debug)]
pub(super) struct Notify {
    words: Vec<String>,
}

impl Notify {
    /// Takes the command apart at spaces.
    pub(super) fn new(command: &str) -> Result<Self> {
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let Some(program) = words.first() else {
            return Err(Error::config(
                "--notify",
                "names no program; give one with its arguments, such as `notify-send`",
            ));
        };
        let is_there = if program.contains('/') {
            std::path::Path::new(program).is_file()
        } else {
            let paths = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&paths).any(|folder| folder.join(program).is_file())
        };
        if !is_there {
            let message =
                format!("there is no program `{program}`; give its path, and a script for what needs a shell");
            return Err(Error::config("--notify", message));
        }
        Ok(Self { words })
    }

    /// Passes records on, and runs the command at a new best validation loss, below `best` at first, at divergence and at
    /// the end. The command gets `best`, `diverged` or `finished`, the run's name and a sentence as its last arguments.
    pub(super) fn watch(self, records: Receiver<Record>, best: Option<f64>) -> Receiver<Record> {
        let (sender, passed) = sync_channel(QUEUE);
        let watch = move || {
            let (mut run, mut best, mut children) = (String::new(), best.unwrap_or(f64::INFINITY), Vec::new());
            for record in records {
                let message = match &record.event {
                    Event::Started(started) => {
                        run.clone_from(&started.run);
                        None
                    }
                    Event::Eval(eval) if eval.loss < best => {
                        best = eval.loss;
                        Some(("best", format!("validation loss {:.4} at step {}", eval.loss, eval.step)))
                    }
                    Event::Diverged(trouble) => Some(("diverged", trouble.message.clone())),
                    Event::Finished(end) => {
                        Some(("finished", format!("step {}, loss {:.4}, {:?}", end.step, end.loss, end.reason)))
                    }
                    _ => None,
                };
                if let Some((event, text)) = message {
                    // Those that have ended are waited for, so that they do not stay as zombies.
                    children.retain_mut(|child: &mut Child| child.try_wait().is_ok_and(|end| end.is_none()));
                    children.extend(self.run(event, &run, &text));
                }
                // A screen that is gone is no reason to miss an event.
                sender.send(record).ok();
            }
        };
        if std::thread::Builder::new().name("notify".into()).spawn(watch).is_err() {
            writeln!(stderr(), "warning: no thread for `--notify`").ok();
        }
        passed
    }

    fn run(&self, event: &str, run: &str, text: &str) -> Option<Child> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args([event, run, text]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let failed = |error: &std::io::Error| {
            writeln!(stderr(), "warning: cannot run `{}`: {error}", self.words[0]).ok();
        };
        command.spawn().inspect_err(failed).ok()
    }
}
