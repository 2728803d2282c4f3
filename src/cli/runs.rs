//! `finetune runs`: lists and deletes runs.

use crate::cli::flags::read;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::RunsDirArgs;
use crate::store::checkpoint::{CheckpointEntry, Run, list};
use crate::telemetry::{Event, Record, Started};
use crate::train::{Config, ConfigLayers};
use crate::ui::format::{base_name, bytes};
use crate::untrusted::sanitize_line;
use crate::{Error, Result};
use clap::{Args, Subcommand};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, IsTerminal, Read, Seek, SeekFrom, Write, stdin};
use std::path::{Path, PathBuf};

/// Flags of `finetune runs`.
#[derive(Args, Debug)]
pub(super) struct RunsArgs {
    #[command(subcommand)]
    command: Option<RunsCommand>,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// List the runs with date, model, steps, best validation loss and size (the default)
    List,
    /// Delete runs with their checkpoints and logs, after a prompt
    Delete {
        /// Names of runs
        #[arg(value_name = "RUN", required = true)]
        runs: Vec<String>,
        /// Delete without a prompt
        #[arg(long, short)]
        yes: bool,
    },
}

/// Bytes at the end of a log that are searched for its last record; a step's record with its tensors is shorter.
const LOG_END: u64 = 256 << 10;

/// Runs the subcommand and writes its report to `out`.
pub(super) fn run(args: &RunsArgs, out: &mut dyn Write) -> Result<()> {
    match &args.command {
        None | Some(RunsCommand::List) => listing(&args.runs_dir.path, out),
        Some(RunsCommand::Delete { runs, yes }) => {
            let paths = runs.iter().map(|name| find(&args.runs_dir.path, name)).collect::<Result<Vec<_>>>()?;
            paths.iter().try_for_each(|path| delete(path, *yes, out))
        }
    }
}

fn listing(folder: &Path, out: &mut dyn Write) -> Result<()> {
    let mut runs: Vec<Summary> = runs_in(folder)?.iter().map(|path| Summary::of(path)).collect();
    if runs.is_empty() {
        let message = "contains no run yet; `finetune` starts one";
        return Err(Error::checkpoint(folder, message));
    }
    runs.sort_by_key(|run| (run.time, run.cells[0].clone()));
    let mut rows =
        vec![["run", "last written (UTC)", "model", "steps", "best loss", "size", "state"].map(str::to_owned)];
    rows.extend(runs.into_iter().map(|run| run.cells));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let row = cells.collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", row.trim_end()).map_err(Error::io("write to", "standard output"))?;
    }
    Ok(())
}

/// The folders in `folder` that contain a run's configuration.
fn runs_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::io("list", folder))?.flatten(),
    };
    Ok(entries.map(|entry| entry.path()).filter(|path| path.join("config.toml").is_file()).collect())
}

/// A row of the table.
struct Summary {
    /// Time of the log's last change, in milliseconds since 1970.
    time: u64,
    cells: [String; 7],
}

impl Summary {
    /// Summarizes a run; a field that cannot be read is a dash.
    fn of(path: &Path) -> Self {
        let dash = || "-".to_owned();
        let config = read(&path.join("config.toml"))
            .and_then(|file| Config::resolve(&ConfigLayers { file: Some(file), saved: true, overrides: Vec::new() }));
        let model =
            config.map_or_else(|_| dash(), |config| format!("{} {}", base_name(&config.model), config.dtype.compute));
        let log = path.join("events.jsonl");
        let (started, last) = (started(&log), last_record(&log));
        let step = last.as_ref().and_then(|last| last.event.step()).unwrap_or(0);
        let total = started.as_ref().map_or(0, |started| started.total_steps);
        let checkpoints = list(path).unwrap_or_default();
        let loss = |one: &CheckpointEntry| one.manifest.as_ref().ok()?.validation_loss;
        let best = checkpoints.iter().filter_map(loss).min_by(f64::total_cmp);
        let state = match last.as_ref().map(|last| &last.event) {
            Some(Event::Finished(finished)) => finished.reason.to_string(),
            _ => match started.and_then(|started| started.process?.is_alive()) {
                Some(true) => "training".to_owned(),
                _ => "killed or crashed".to_owned(),
            },
        };
        let time = last.map_or(0, |last| last.t);
        // Replace line breaks in names, to keep each run on its row.
        let (name, model) =
            (path.file_name().unwrap_or_default().to_string_lossy(), sanitize_line(&model).into_owned());
        let cells = [
            sanitize_line(&name).into_owned(),
            if time == 0 { dash() } else { date(time / 1000) },
            model,
            if total == 0 { step.to_string() } else { format!("{step}/{total}") },
            best.map_or_else(dash, |best| format!("{best:.4}")),
            bytes(bytes_in(path)),
            state,
        ];
        Self { time, cells }
    }
}

/// The newest `Started` event among the log's last lines, or else the first line's.
fn started(log: &Path) -> Option<Started> {
    let mut line = String::new();
    BufReader::new(File::open(log).ok()?).read_line(&mut line).ok()?;
    let of = |line: &str| match serde_json::from_str::<Record>(line).ok()?.event {
        Event::Started(started) => Some(*started),
        _ => None,
    };
    last_lines(log).lines().rev().find_map(of).or_else(|| of(&line))
}

fn last_record(log: &Path) -> Option<Record> {
    last_lines(log).lines().rev().find_map(|line| serde_json::from_str(line).ok())
}

/// The end of a log; its first line may be incomplete.
fn last_lines(log: &Path) -> String {
    let end = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let start = file.metadata()?.len().saturating_sub(LOG_END);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&end().unwrap_or_default()).into_owned()
}

/// Bytes of all files in a folder.
fn bytes_in(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_in(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}

/// Formats seconds since 1970 in UTC, such as `2026-11-21 23:59`.
fn date(seconds: u64) -> String {
    // Howard Hinnant's `civil_from_days`: years begin in March, so that the leap day comes last.
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}", seconds / 3600 % 24, seconds / 60 % 60)
}

/// The folder of the run called `name`, which must be inside `folder`.
fn find(folder: &Path, name: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    let is_name = Path::new(name).file_name() == Some(name.as_ref());
    if is_name && path.join("config.toml").is_file() {
        return Ok(path);
    }
    let message = format!("no run with this name exists in `{}`; `finetune runs` lists the runs", folder.display());
    Err(Error::config(format!("`{name}`"), message))
}

fn delete(path: &Path, yes: bool, out: &mut dyn Write) -> Result<()> {
    // Opening fails if another process holds the run's lock.
    let run = Run::open(path)?;
    let failed = || Error::io("write to", "standard output");
    let what = format!("run `{}`, {} checkpoints, {}", name_of(path), list(path)?.len(), bytes(bytes_in(path)));
    if !yes {
        if !stdin().is_terminal() {
            let message = "standard input is not a terminal; add `--yes` to delete without a prompt";
            return Err(Error::config("runs delete", message));
        }
        write!(out, "Delete {what}? [y/N] ").and_then(|()| out.flush()).map_err(failed())?;
        let mut answer = String::new();
        stdin().lock().read_line(&mut answer).map_err(Error::io("read", "standard input"))?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            return writeln!(out, "kept").map_err(failed());
        }
    }
    let reporter = Reporter::of("deleting");
    std::fs::remove_dir_all(path).map_err(Error::io("delete", path))?;
    drop((run, reporter));
    writeln!(out, "deleted {what}").map_err(failed())
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00"),
            (951_782_400, "2000-02-29 00:00"),
            (1_709_251_199, "2024-02-29 23:59"),
            (1_795_132_799, "2026-11-19 23:59"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }
}
