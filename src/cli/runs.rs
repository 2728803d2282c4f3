//! `finetune runs`: lists and deletes runs.

use crate::cli::flags::ConfigArgs;
use crate::cli::lab::terminal_width;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, command_for, did_you_mean, is_run, name_of};
use crate::data::counted;
use crate::doctor::size_of_folder;
use crate::store::checkpoint::{CheckpointEntry, Run, by_loss, is_in_use, list, noted_end};
use crate::telemetry::{Event, Record, Started, last_records};
use crate::ui::format::{base_name, bytes, columns, decimals, padded, steps};
use crate::untrusted::{self, sanitize_line};
use crate::{Error, Result};
use chrono::DateTime;
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;
use std::io::{BufRead, BufReader, ErrorKind, IsTerminal, Write, stdin, stdout};
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
pub(super) struct RunsArgs {
    #[command(subcommand)]
    command: Option<RunsCommand>,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

#[derive(Args, Debug)]
struct ListArgs {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// List the runs with date, model, steps, best validation loss and size (the default)
    List(ListArgs),
    /// Delete runs with their checkpoints and logs, after a prompt
    Delete {
        /// Names of runs
        #[arg(value_name = "RUN", required = true)]
        runs: Vec<PathBuf>,
        /// Delete without a prompt
        #[arg(long, short)]
        yes: bool,
    },
}

/// Bytes at the end of a log that are searched for its last record.
pub(super) const LOG_END: u64 = 256 << 10;
/// Columns of a run's name that a narrow terminal shows too.
const MIN_NAME: usize = 12;

pub(super) fn run(args: &RunsArgs, out: &mut dyn Write) -> Result<()> {
    match &args.command {
        None => listing(&args.runs_dir.path, args.list.json, out),
        Some(RunsCommand::List(list)) => listing(&args.runs_dir.path, list.json || args.list.json, out),
        Some(RunsCommand::Delete { runs, yes }) => {
            let mut paths = runs.iter().map(|name| find(&args.runs_dir.path, name)).collect::<Result<Vec<_>>>()?;
            // A run may be named twice.
            paths.sort();
            paths.dedup();
            paths.iter().try_for_each(|path| delete(path, *yes, out))
        }
    }
}

fn listing(folder: &Path, as_json: bool, out: &mut dyn Write) -> Result<()> {
    let mut runs: Vec<Summary> = runs_in(folder)?.iter().map(|path| Summary::of(path)).collect();
    if runs.is_empty() {
        let message = format!("contains no run yet; {} starts one", command_for("finetune", folder));
        return Err(Error::checkpoint(folder, message));
    }
    runs.sort_by_key(|run| (run.last_written, run.run.clone()));
    if as_json {
        return writeln!(out, "{}", json!(runs)).map_err(Error::stdout);
    }
    let mut rows =
        vec![["run", "last written (UTC)", "model", "steps", "best loss", "size", "state"].map(str::to_owned)];
    rows.extend(runs.iter().map(Summary::cells));
    let width = |column: usize| rows.iter().map(|row| columns(&row[column])).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    if stdout().is_terminal() {
        let others: usize = widths[1..].iter().map(|width| width + 2).sum();
        widths[0] = widths[0].min(terminal_width().saturating_sub(others).max(MIN_NAME));
    }
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| padded(cell, *width));
        let row = cells.collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", row.trim_end()).map_err(Error::stdout)?;
    }
    Ok(())
}

/// The folders in `folder` that contain a run's configuration.
fn runs_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::io("list", folder))?.flatten(),
    };
    Ok(entries.map(|entry| entry.path()).filter(|path| is_run(path)).collect())
}

/// A run; what cannot be read is `None`.
#[derive(Serialize)]
struct Summary {
    run: String,
    /// Milliseconds since 1970.
    last_written: Option<u64>,
    model: Option<String>,
    steps: u64,
    /// 0 if unknown.
    total_steps: u64,
    best_loss: Option<f64>,
    bytes: u64,
    state: String,
}

impl Summary {
    fn of(path: &Path) -> Self {
        let config = ConfigArgs::default().resolve_from_run(path).ok();
        let log = path.join("events.jsonl");
        let started = started(&log);
        let last = last_records(&log, LOG_END).next();
        let steps = last.as_ref().and_then(|last| match &last.event {
            Event::Started(started) => started.resumed_from,
            event => event.step(),
        });
        let steps = steps.unwrap_or(0);
        // Repeated steps may have raised the number.
        let total_steps = started.as_ref().map_or(0, |started| started.total_steps.max(steps));
        let checkpoints = list(path).unwrap_or_default();
        let process = started.and_then(|started| started.process);
        let state = match last.as_ref().map(|last| &last.event) {
            Some(Event::Finished(finished)) => finished.reason.to_string(),
            // The lock is visible in other containers, where the process id is not.
            _ if is_in_use(path) || process.is_some_and(|process| process.is_alive() == Some(true)) => {
                "training".to_owned()
            }
            _ => noted_end(path).unwrap_or_else(|| "killed or crashed".to_owned()),
        };
        Self {
            run: name_of(path),
            last_written: last.as_ref().map(|last| last.t).filter(|time| *time > 0),
            model: config.map(|config| format!("{} {}", base_name(&config.model), config.dtype.compute)),
            steps,
            total_steps,
            best_loss: by_loss(&checkpoints).next().and_then(CheckpointEntry::validation_loss),
            bytes: size_of_folder(path),
            state,
        }
    }

    /// The cells of the table. Line breaks in names are replaced, to keep each run on its row.
    fn cells(&self) -> [String; 7] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            sanitize_line(&self.run).into_owned(),
            or_dash(self.last_written.map(date)),
            sanitize_line(&or_dash(self.model.clone())).into_owned(),
            steps(self.steps, self.total_steps),
            or_dash(self.best_loss.map(|best| decimals(best, 4))),
            bytes(self.bytes),
            self.state.clone(),
        ]
    }
}

/// The newest `Started` event among the log's last lines, or else the first line's.
fn started(log: &Path) -> Option<Started> {
    let of = |record: Record| match record.event {
        Event::Started(started) => Some(*started),
        _ => None,
    };
    last_records(log, LOG_END).find_map(of).or_else(|| {
        let mut line = String::new();
        BufReader::new(untrusted::open(log).ok()?).read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok().and_then(of)
    })
}

/// Formats milliseconds since 1970 in UTC, such as `2026-11-21 23:59`.
fn date(milliseconds: u64) -> String {
    let time = DateTime::from_timestamp_millis(milliseconds as i64).unwrap_or_default();
    time.format("%Y-%m-%d %H:%M").to_string()
}

/// The folder of the run called `name`, which must be inside `folder`.
fn find(folder: &Path, name: &Path) -> Result<PathBuf> {
    let path = folder.join(name);
    if name.file_name() == Some(name.as_os_str()) && is_run(&path) {
        return Ok(path);
    }
    let near = did_you_mean(name, folder);
    let message = format!("no run with this name exists in `{}`{near}", folder.display());
    Err(Error::config(format!("`{}`", name.display()), message))
}

fn delete(path: &Path, yes: bool, out: &mut dyn Write) -> Result<()> {
    let checkpoints = counted(list(path)?.len(), "checkpoint");
    let what = if path.is_symlink() {
        format!("the link `{}`, but not the run that it points to", name_of(path))
    } else {
        format!("run `{}`, {checkpoints}, {}", name_of(path), bytes(size_of_folder(path)))
    };
    if !yes && !confirmed(&format!("Delete {what}?"), "runs delete", out)? {
        return Ok(());
    }
    // Opening fails if another process holds the run's lock. It also makes the run the newest one.
    let run = Run::open(path)?;
    let reporter = Reporter::of("deleting");
    std::fs::remove_dir_all(path).map_err(Error::io("delete", path))?;
    drop((run, reporter));
    writeln!(out, "deleted {what}").map_err(Error::stdout)
}

/// Asks a question that only `yes` confirms. Without a terminal, it is an error of the flag or command `origin`.
pub(super) fn confirmed(question: &str, origin: &str, out: &mut dyn Write) -> Result<bool> {
    if !stdin().is_terminal() {
        let message = "standard input is not a terminal; add `--yes` to skip the prompt";
        return Err(Error::config(origin, message));
    }
    write!(out, "{question} [y/N] ").and_then(|()| out.flush()).map_err(Error::stdout)?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer).map_err(Error::io("read", "standard input"))?;
    let confirmed = matches!(answer.trim(), "y" | "Y" | "yes");
    if !confirmed {
        writeln!(out, "nothing was changed").map_err(Error::stdout)?;
    }
    Ok(confirmed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        for (milliseconds, expected) in [
            (0, "1970-01-01 00:00"),
            (951_782_400_000, "2000-02-29 00:00"),
            (1_709_251_199_999, "2024-02-29 23:59"),
            (1_795_132_799_000, "2026-11-19 23:59"),
        ] {
            assert_eq!(date(milliseconds), expected);
        }
    }
}
