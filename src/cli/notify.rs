//! `--notify COMMAND`: runs a program at important events.

use crate::telemetry::{Event, Record, Sink};
use crate::ui::format::decimals;
use crate::untrusted::sanitize_line;
use crate::untrusted::subprocess::command_of;
use crate::{Error, Result};
use std::process::{Child, Stdio};

/// The maximum number of running programs: otherwise one that hangs at each best loss would fill the machine.
const MAX_CHILDREN: usize = 8;

/// Runs a program, without a shell, at a new best validation loss, at divergence and at the end. The program gets
/// `best`, `diverged` or `finished`, the run's name and a sentence as its last arguments.
#[derive(Debug)]
pub(super) struct Notify {
    /// The program and its first arguments.
    command: String,
    run: String,
    /// The lowest validation loss so far.
    best: f64,
    children: Vec<Child>,
    /// The first error of the program, until it is reported.
    error: Option<String>,
    error_reported: bool,
}

impl Notify {
    /// Rejects a program that does not exist.
    pub(super) fn new(command: &str) -> Result<Self> {
        command_of(command, "--notify", None)?;
        Ok(Self {
            command: command.to_owned(),
            run: String::new(),
            best: f64::INFINITY,
            children: Vec::new(),
            error: None,
            error_reported: false,
        })
    }

    /// Reports only losses below `best`, the lowest of the run so far.
    pub(super) fn only_below(mut self, best: Option<f64>) -> Self {
        self.best = best.unwrap_or(f64::INFINITY);
        self
    }

    fn spawn(&self, event: &str, text: &str) -> Result<Child> {
        let mut command = command_of(&self.command, "--notify", None)?;
        command.args([event, &sanitize_line(&self.run), &sanitize_line(text)]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map_err(Error::io("run", &self.command))
    }
}

impl Sink for Notify {
    fn write(&mut self, record: &Record) -> Result<()> {
        let (event, text) = match &record.event {
            Event::Started(started) => {
                self.run.clone_from(&started.run);
                return Ok(());
            }
            Event::Eval(eval) if eval.loss < self.best => {
                self.best = eval.loss;
                ("best", format!("validation loss {} at step {}", decimals(eval.loss, 4), eval.step))
            }
            Event::Diverged(error) => ("diverged", error.message.clone()),
            Event::Finished(end) => {
                ("finished", format!("step {}, loss {}, {}", end.step, decimals(end.loss.into(), 4), end.reason))
            }
            _ => return Ok(()),
        };
        let mut error = None;
        // Reaps the children that have exited.
        self.children.retain_mut(|child| match child.try_wait() {
            Ok(Some(status)) if !status.success() => {
                error = Some(format!("failed ({status})"));
                false
            }
            waited => waited.is_ok_and(|exit| exit.is_none()),
        });
        if self.children.len() < MAX_CHILDREN {
            self.children.push(self.spawn(event, &text)?);
        } else {
            error =
                Some(format!("is still running for {MAX_CHILDREN} events; it will start again after one of them ends"));
        }
        if let Some(error) = error
            && !self.error_reported
        {
            self.error_reported = true;
            self.error = Some(format!("`{}` of `--notify` {error}", self.command));
        }
        Ok(())
    }

    fn take_warning(&mut self) -> Option<String> {
        self.error.take()
    }

    fn name(&self) -> &'static str {
        "--notify"
    }
}
