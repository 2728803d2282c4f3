//! Rewards of sampled completions: built-in rules, or a program that stays running.
//!
//! The program reads a line of JSON per completion and writes a line with a number. A program that ends, takes too long
//! or writes something else is started again, and reads the completion a second time.

use crate::data::{entries, read_json};
use crate::train::config::ObjectiveSection;
use crate::untrusted::sanitize_line;
use crate::untrusted::subprocess::{command_of, wait};
use crate::{Error, Result};
use minijinja::Value;
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Longer lines of a program are not read.
const MAX_LINE: u64 = 4096;
/// Lines of a program that may wait to be read.
const MAX_WAITING: usize = 1024;
/// How often a completion is given to the program before it goes without a reward.
const ATTEMPTS: usize = 2;
/// The advice about a program that fails.
const MEND: &str = "mend the program and resume the run";

/// The consequence of a completion without a reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnRewardError {
    /// Ends the run, which can be resumed.
    #[default]
    Stop,
    /// Leaves the completion out of its group.
    Drop,
}

/// A completion to reward.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answered {
    /// The prompt, as the model reads it.
    pub prompt: String,
    pub completion: String,
    /// The right answer; empty if the row has none.
    pub answer: String,
    /// Tokens of the completion.
    pub tokens: usize,
    /// The row of the prompt as JSON, if a program reads it.
    pub row: Option<Arc<str>>,
}

impl Answered {
    /// The line of JSON that a program reads. Fields of the row do not replace prompt and completion.
    fn line(&self) -> serde_json::Result<String> {
        let own = [("prompt", &self.prompt), ("completion", &self.completion), ("answer", &self.answer)];
        let own = own.map(|(name, text)| (Value::from(name), Value::from(text.as_str())));
        let row = self.row.as_deref().map(read_json).transpose()?.unwrap_or_default();
        let others = entries(&row).filter(|(name, _)| !matches!(name.as_str(), Some("prompt" | "completion")));
        serde_json::to_string(&Value::from_pairs(own.into_iter().chain(others)))
    }
}

#[derive(Debug)]
pub(crate) enum Reward {
    /// 1 for the right answer, and 0 for others.
    Exact,
    /// 1 for a completion that matches.
    Regex(Regex),
    /// 1 at this number of tokens, less with the distance, at least 0.
    Length(usize),
    Program(RewardProgram),
}

impl Reward {
    /// The reward that a setting names; a program runs in `folder`, if it exists. Fails with [`Error::Config`] for a
    /// pattern or a length that is none.
    pub(crate) fn new(rule: &str, folder: Option<&Path>) -> Result<Self> {
        let wrong = |message: String| Err(Error::config("objective.reward", message));
        match rule.split_once(':') {
            _ if rule.trim().is_empty() => {
                wrong("is empty; use `exact`, `regex:PATTERN`, `length:N` or a program".into())
            }
            None if rule == "exact" => Ok(Self::Exact),
            Some(("regex", pattern)) => match Regex::new(pattern) {
                Ok(regex) => Ok(Self::Regex(regex)),
                Err(error) => wrong(format!("`{pattern}` is not a regular expression: {error}")),
            },
            Some(("length", number)) => match number.parse() {
                Ok(tokens) if tokens > 0 => Ok(Self::Length(tokens)),
                _ => wrong(format!("`{number}` is not a number of tokens; write `length:20`")),
            },
            _ => Ok(Self::Program(RewardProgram::new(rule, folder))),
        }
    }

    /// Whether a setting names a program.
    pub(crate) fn is_program(rule: &str) -> bool {
        matches!(Self::new(rule, None), Ok(Self::Program(_)))
    }

    /// Rejects a program that does not exist.
    pub(crate) fn check(&self) -> Result<()> {
        if let Self::Program(program) = self {
            program.to_run()?;
        }
        Ok(())
    }

    /// The rewards of `completions`; `None` for one that is to be dropped. Fails with [`Error::Reward`] if the program
    /// failed and `on_reward_error` is to stop, or if it gave no reward at all.
    pub(crate) fn score(&mut self, completions: &[Answered], settings: &ObjectiveSection) -> Result<Vec<Option<f32>>> {
        let one_if = |yes: bool| f32::from(u8::from(yes));
        let rule = |rule: &dyn Fn(&Answered) -> f32| Ok(completions.iter().map(|it| Some(rule(it))).collect());
        match self {
            Self::Exact => rule(&|it| one_if(it.completion.trim() == it.answer.trim())),
            Self::Regex(regex) => rule(&|it| one_if(regex.is_match(&it.completion))),
            Self::Length(target) => {
                let target = *target as f32;
                rule(&|it| (1.0 - (it.tokens as f32 - target).abs() / target).max(0.0))
            }
            Self::Program(program) => program.score(completions, settings),
        }
    }
}

#[derive(Debug)]
pub(crate) struct RewardProgram {
    command: String,
    folder: Option<PathBuf>,
    running: Option<RunningProgram>,
}

impl RewardProgram {
    /// A program with its arguments, which is started when it is needed.
    fn new(command: &str, folder: Option<&Path>) -> Self {
        let folder = folder.filter(|folder| folder.is_dir()).map(Path::to_path_buf);
        Self { command: command.to_owned(), folder, running: None }
    }

    /// The command that starts it.
    fn to_run(&self) -> Result<Command> {
        command_of(&self.command, "objective.reward", self.folder.as_deref())
    }

    fn score(&mut self, completions: &[Answered], settings: &ObjectiveSection) -> Result<Vec<Option<f32>>> {
        let timeout = Duration::from_secs_f64(settings.reward_timeout_s);
        let lines = completions.iter().map(Answered::line).collect::<serde_json::Result<Vec<String>>>();
        let lines = lines.map_err(candle_core::Error::wrap)?;
        let mut rewards = Vec::with_capacity(lines.len());
        let mut attempts = 0;
        let mut problem = String::new();
        let mut running = self.running.take().filter(RunningProgram::is_silent);
        if let Some(running) = &running {
            running.send(&lines);
        }
        while rewards.len() < lines.len() {
            let program = match &mut running {
                Some(program) => program,
                none => {
                    let program = none.insert(RunningProgram::start(self.to_run()?, &self.command)?);
                    program.send(&lines[rewards.len()..]);
                    program
                }
            };
            match program.reward(timeout) {
                Ok(reward) => {
                    rewards.push(reward);
                    attempts = 0;
                    continue;
                }
                Err(found) => problem = found,
            }
            running = None;
            attempts += 1;
            if attempts == ATTEMPTS {
                if settings.on_reward_error == OnRewardError::Stop {
                    let number = rewards.len() + 1;
                    let total = lines.len();
                    let message = format!(
                        "{problem}, twice, for completion {number} of {total} of a step; {MEND}, or leave such \
                         completions out with `--set objective.on_reward_error=drop`"
                    );
                    return Err(self.error(&message));
                }
                rewards.push(None);
                attempts = 0;
            }
        }
        self.running = running;
        if rewards.iter().all(Option::is_none) && !rewards.is_empty() {
            let problem = if problem.is_empty() { "it wrote `none`" } else { &problem };
            return Err(self.error(&format!("{problem}, for every completion of a step; {MEND}")));
        }
        Ok(rewards)
    }

    fn error(&self, message: &str) -> Error {
        Error::Reward { origin: format!("the reward program `{}`", self.command), message: message.into() }
    }
}

/// A started program.
#[derive(Debug)]
struct RunningProgram {
    child: Child,
    requests: Sender<String>,
    replies: Receiver<String>,
    /// The last line of its standard error, once it has ended.
    complaints: Receiver<String>,
}

impl RunningProgram {
    fn start(mut child: Command, name: &str) -> Result<Self> {
        // A program that keeps its answers in a buffer would wait forever.
        child.env("PYTHONUNBUFFERED", "1");
        child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().map_err(Error::io("run", name))?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut input), Some(output), Some(errors)) = pipes else {
            return Err(Error::engine("a program was started without pipes"));
        };
        let (requests, lines) = channel::<String>();
        thread::spawn(move || lines.iter().try_for_each(|line| input.write_all(line.as_bytes())));
        let (sender, replies) = sync_channel(MAX_WAITING);
        thread::spawn(move || lines_of(output).try_for_each(|line| sender.send(line)));
        let (sender, complaints) = channel();
        thread::spawn(move || sender.send(lines_of(errors).filter(|line| !line.is_empty()).last().unwrap_or_default()));
        Ok(Self { child, requests, replies, complaints })
    }

    /// Whether it runs and has written nothing that it was not asked for.
    fn is_silent(&self) -> bool {
        self.replies.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty)
    }

    /// Queues lines. A program that has ended is noticed when its reply is read.
    fn send(&self, lines: &[String]) {
        for line in lines {
            drop(self.requests.send(format!("{line}\n")));
        }
    }

    /// The next reward, or `None` if the program has none for the completion; an error describes the fault.
    fn reward(&mut self, timeout: Duration) -> Result<Option<f32>, String> {
        match self.replies.recv_timeout(timeout) {
            // Python prints `None`.
            Ok(line) if line.eq_ignore_ascii_case("none") => Ok(None),
            Ok(line) => match line.parse::<f32>() {
                Ok(reward) if reward.is_finite() => Ok(Some(reward)),
                _ => Err(format!("it wrote `{}`, neither a finite number nor `none`", sanitize_line(&line))),
            },
            Err(RecvTimeoutError::Timeout) => Err(format!(
                "it wrote nothing for {} s (a program has to flush its output after each line)",
                timeout.as_secs_f64()
            )),
            Err(RecvTimeoutError::Disconnected) => {
                let ended = match wait(&mut self.child, timeout).map_err(|error| error.to_string())? {
                    Some(status) => format!("it ended ({status})"),
                    None => "it closed its standard output".to_owned(),
                };
                let last = self.complaints.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
                let last = if last.is_empty() { last } else { format!(": {}", sanitize_line(&last)) };
                Err(ended + &last)
            }
        }
    }
}

/// The lines of a program's output until its end, without white space around them; a longer line counts as several.
fn lines_of(output: impl Read) -> impl Iterator<Item = String> {
    let mut output = BufReader::new(output);
    std::iter::from_fn(move || {
        let mut line = Vec::new();
        let read = output.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).ok()?;
        (read > 0).then(|| String::from_utf8_lossy(&line).trim().to_owned())
    })
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(completion: &str) -> Answered {
        let [prompt, completion, answer] = ["p", completion, "4"].map(str::to_owned);
        Answered { tokens: completion.len(), prompt, completion, answer, ..Answered::default() }
    }

    /// Stops after an error; the time limit is longer than a program takes to start on a busy machine.
    fn stop() -> ObjectiveSection {
        ObjectiveSection::default()
    }

    fn score(rule: &str, completions: &[&str], settings: &ObjectiveSection) -> Result<Vec<Option<f32>>> {
        let completions: Vec<Answered> = completions.iter().map(|text| answered(text)).collect();
        Reward::new(rule, None).unwrap().score(&completions, settings)
    }

    /// A script whose body sees each line as `$line`.
    fn script(folder: &std::path::Path, body: &str) -> String {
        let path = folder.join("score.sh");
        std::fs::write(&path, format!("while read -r line; do\n{body}\ndone\n")).unwrap();
        format!("sh {}", path.display())
    }

    #[test]
    fn rules_reward_answers_patterns_and_lengths() {
        let stop = &stop();
        assert_eq!(score("exact", &[" 4\n", "5"], stop).unwrap(), [Some(1.0), Some(0.0)]);
        assert_eq!(score("regex:^[0-9]+$", &["17", "a"], stop).unwrap(), [Some(1.0), Some(0.0)]);
        assert_eq!(score("length:4", &["abcd", "ab", "", "123456789"], stop).unwrap(), [1.0, 0.5, 0.0, 0.0].map(Some));
        for rule in ["", "regex:(", "length:0", "length:x"] {
            assert!(Reward::new(rule, None).unwrap_err().to_string().starts_with("objective.reward: "), "{rule}");
        }
    }

    #[test]
    fn a_program_is_asked_line_by_line_and_stays_running() {
        let folder = tempfile::tempdir().unwrap();
        let command = script(
            folder.path(),
            "n=$((n + 1)); case $line in *'\"completion\":\"x\"'*) echo -1.5;; *) echo $n;; esac",
        );
        let mut reward = Reward::new(&command, None).unwrap();
        for expected in [[1.0, -1.5], [3.0, -1.5]] {
            let found = reward.score(&[answered("a"), answered("x")], &stop());
            assert_eq!(found.unwrap(), expected.map(Some));
        }
    }

    /// TRL's reward functions return `None` for it.
    #[test]
    fn a_program_may_have_no_reward_for_a_completion() {
        let folder = tempfile::tempdir().unwrap();
        let command = script(folder.path(), "case $line in *odd*) echo None;; *) echo 2;; esac");
        let stop = &stop();
        assert_eq!(score(&command, &["a", "odd", "b"], stop).unwrap(), [Some(2.0), None, Some(2.0)]);
        let message = score(&command, &["odd", "odd"], stop).unwrap_err().to_string();
        assert!(message.contains("it wrote `none`, for every completion of a step"), "{message}");
    }

    #[test]
    fn a_program_that_fails_ends_the_run_or_drops_the_completion() {
        let folder = tempfile::tempdir().unwrap();
        for (body, problem) in [
            ("echo broken >&2; exit 3", "it ended (exit status: 3): broken"),
            ("sleep 60", "it wrote nothing for 1.5 s"),
            ("exec >&-; exec sleep 60", "it closed its standard output"),
            ("echo good", "it wrote `good`, neither a finite number nor `none`"),
            ("echo nan", "it wrote `nan`, neither a finite number nor `none`"),
        ] {
            let command = script(folder.path(), &format!("case $line in *bad*) {body};; *) echo 2;; esac"));
            let reward_timeout_s = if body.contains("sleep") { 1.5 } else { stop().reward_timeout_s };
            let score = |completions: &[&str], on_reward_error| {
                score(&command, completions, &ObjectiveSection { reward_timeout_s, on_reward_error, ..stop() })
            };
            let error = score(&["a", "bad", "b"], OnRewardError::Stop).unwrap_err();
            assert!(matches!(error, Error::Reward { .. }), "{error:?}");
            let message = error.to_string();
            assert!(message.contains(problem) && message.contains("completion 2 of 3"), "{message}");
            let dropped = score(&["a", "bad", "b"], OnRewardError::Drop).unwrap();
            assert_eq!(dropped, [Some(2.0), None, Some(2.0)], "{body}");
            let message = score(&["bad", "bad"], OnRewardError::Drop).unwrap_err().to_string();
            assert!(message.contains("for every completion"), "{message}");
        }
        let message = score("no-such-program --x", &["a"], &stop()).unwrap_err().to_string();
        assert!(message.contains("objective.reward: program `no-such-program` was not found"), "{message}");
    }

    /// A run may be resumed from a different folder.
    #[test]
    fn a_program_runs_in_the_folder_of_its_run() {
        let folder = tempfile::tempdir().unwrap();
        script(folder.path(), "echo 3");
        std::fs::write(folder.path().join("own"), "#!/bin/sh\n. ./score.sh\n").unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.path().join("own"), executable).unwrap();
        for command in ["sh score.sh", "./own"] {
            let mut reward = Reward::new(command, Some(folder.path())).unwrap();
            reward.check().unwrap();
            let found = reward.score(&[answered("a")], &stop());
            assert_eq!(found.unwrap(), [Some(3.0)], "{command}");
        }
        assert!(Reward::new("./own", None).unwrap().check().is_err());
        Reward::new("sh", Some(&folder.path().join("gone"))).unwrap().check().unwrap();
    }

    /// Each line is refused once.
    #[test]
    fn a_program_that_ends_once_is_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let body = format!(
            "case $line in *bad*) m={0}1;; *) m={0}2;; esac; if [ ! -e $m ]; then touch $m; exit 1; fi; echo 7",
            mark.display()
        );
        let command = script(folder.path(), &body);
        assert_eq!(score(&command, &["a", "bad"], &stop()).unwrap(), [Some(7.0), Some(7.0)]);
    }

    /// A line that nothing was asked for would be the next completion's reward.
    #[test]
    fn a_program_that_writes_too_much_is_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut reward = Reward::new(&script(folder.path(), "printf '1\\n2\\n'"), None).unwrap();
        for _ in 0..2 {
            let found = reward.score(&[answered("a")], &stop());
            assert_eq!(found.unwrap(), [Some(1.0)]);
            thread::sleep(Duration::from_millis(50));
        }
    }
}
