//! `finetune watch`: the dashboard of a run in another process, or of a finished one.

use crate::cli::did_you_mean;
use crate::cli::show::LookArgs;
use crate::screen::dashboard::{self, Format, Output, Terminal};
use crate::{Error, Result};
use clap::Args;
use std::io::stdout;
use std::path::{Path, PathBuf};

/// Flags of `watch`.
#[derive(Args, Clone, Debug)]
pub(crate) struct WatchArgs {
    /// A run's name or folder, or its events file [default: the newest run]; further runs are overlaid on its charts
    #[arg(value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Replay the run from its start, this many times as fast as it ran
    #[arg(long, value_name = "FACTOR")]
    speed: Option<f64>,
    /// Print lines of key=value pairs instead of drawing
    #[arg(long)]
    plain: bool,
    /// The look of the dashboard.
    #[command(flatten)]
    look: LookArgs,
    /// Write one frame to an SVG file and exit
    #[arg(long, value_name = "FILE", conflicts_with_all = ["speed", "plain", "png"])]
    svg: Option<PathBuf>,
    /// Write one frame to a PNG file and exit
    #[arg(long, value_name = "FILE", conflicts_with_all = ["speed", "plain"])]
    png: Option<PathBuf>,
    /// Columns and rows of the picture
    #[arg(long, value_name = "COLUMNSxROWS", default_value = "120x36", value_parser = size)]
    size: (u16, u16),
    /// Keys to press before the picture is drawn, such as `2u`
    #[arg(long, value_name = "KEYS", default_value = "", hide_default_value = true)]
    keys: String,
    /// The folder of all runs
    #[arg(long, value_name = "FOLDER", default_value = "checkpoints")]
    checkpoint_dir: PathBuf,
}

/// Steps between two plain lines.
const LOG_EVERY: u64 = 128;

/// Watches until the user quits, or as plain lines until the run ends.
pub(crate) fn run(args: &WatchArgs) -> Result<()> {
    let logs = match &args.runs[..] {
        [] => vec![find_log(None, &args.checkpoint_dir)?],
        runs => runs.iter().map(|run| find_log(Some(run), &args.checkpoint_dir)).collect::<Result<_>>()?,
    };
    for (file, format) in [(&args.svg, Format::Svg), (&args.png, Format::Png)] {
        let Some(file) = file else { continue };
        let picture = dashboard::picture(&logs, &args.keys, args.size, args.look.theme().look(), format)?;
        return std::fs::write(file, picture).map_err(Error::io("write", file));
    }
    if args.speed.is_some_and(|speed| !speed.is_finite() || speed <= 0.0) {
        return Err(Error::config("--speed", "must be above 0, such as 10"));
    }
    let asked = if args.plain { Output::Plain } else { Output::Dashboard };
    if Terminal::current().output(Some(asked)) == Output::Dashboard {
        dashboard::watch(&logs, args.speed, args.look.theme(), !args.look.no_mouse)?;
        Ok(())
    } else {
        dashboard::watch_plain(&logs[0], args.speed, stdout(), LOG_EVERY)
    }
}

/// Parses columns and rows such as `120x36`.
fn size(text: &str) -> Result<(u16, u16), String> {
    let pair = text.split_once('x').and_then(|(columns, rows)| Some((columns.parse().ok()?, rows.parse().ok()?)));
    let fits = |(columns, rows): &(u16, u16)| (1..=500).contains(columns) && (1..=300).contains(rows);
    pair.filter(fits).ok_or_else(|| "must be COLUMNSxROWS up to 500x300, such as 120x36".to_owned())
}

/// The events file of a run given as a file, as a folder, or by its name in `runs`.
pub(super) fn find_log(run: Option<&Path>, runs: &Path) -> Result<PathBuf> {
    let Some(run) = run else {
        let message = format!("no run in `{}` yet; `finetune` starts one", runs.display());
        return newest_log(runs).ok_or_else(|| Error::config("watch", message));
    };
    let candidates = [run.to_path_buf(), run.join("events.jsonl"), runs.join(run).join("events.jsonl")];
    candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        let message = format!(
            "is not an events file, a run's folder, or the name of a run in `{}`{}",
            runs.display(),
            did_you_mean(run, runs)
        );
        Error::config(format!("`{}`", run.display()), message)
    })
}

/// The most recently written events file of all runs, even of a run without a checkpoint.
fn newest_log(runs: &Path) -> Option<PathBuf> {
    let logs = std::fs::read_dir(runs).ok()?.filter_map(|entry| Some(entry.ok()?.path().join("events.jsonl")));
    logs.filter_map(|log| Some((log.metadata().ok()?.modified().ok()?, log))).max().map(|(_, log)| log)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    #[test]
    fn a_run_is_found_by_file_folder_or_name() {
        let runs = tempfile::tempdir().unwrap();
        let folder = runs.path().join("0007");
        let log = folder.join("events.jsonl");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&log, "").unwrap();
        for run in [&log, &folder, Path::new("0007")] {
            assert_eq!(find_log(Some(run), runs.path()).unwrap(), log);
        }
        assert_eq!(find_log(None, runs.path()).unwrap(), log);
        assert!(find_log(None, &folder).unwrap_err().to_string().contains("no run in"));
        let error = find_log(Some(Path::new("0008")), runs.path()).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().contains("`0008`")), (2, true), "{error}");
    }
}
