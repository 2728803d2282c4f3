//! `finetune watch`: the dashboard of a run in another process, or of a finished one.

use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, command_for, find_log, output_file};
use crate::cli::runs::LOG_END;
use crate::cli::show::ThemeArgs;
use crate::screen::{self, DisplayMode, ImageFormat, Terminal};
use crate::store::checkpoint::is_in_use;
use crate::telemetry::last_records;
use crate::{Error, Result};
use clap::Args;
use std::io::stdout;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct WatchArgs {
    /// A run's name or folder, or its events file [default: the newest run]; further runs are overlaid on its charts
    #[arg(value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Replay the run from its start at this multiple of its speed; longer waits for a record are cut to 10 seconds
    #[arg(long, value_name = "FACTOR")]
    speed: Option<f64>,
    /// Print lines of key=value pairs instead of drawing
    #[arg(long)]
    plain: bool,
    #[command(flatten)]
    scheme: ThemeArgs,
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
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

/// Steps between two plain lines.
const LOG_EVERY: u64 = 128;

/// Watches until the user quits, or as plain lines until the run ends.
pub(crate) fn run(args: &WatchArgs) -> Result<()> {
    let logs = match &args.runs[..] {
        [] => vec![find_log(None, &args.runs_dir.path)?],
        runs => runs.iter().map(|run| find_log(Some(run), &args.runs_dir.path)).collect::<Result<_>>()?,
    };
    let check = |log: &PathBuf| {
        if last_records(log, LOG_END).next().is_none() && !log.parent().is_some_and(is_in_use) {
            let list = command_for("finetune runs", &args.runs_dir.path);
            let message = format!("has no record that can be read, and no process writes one; {list} lists the runs");
            return Err(Error::config(format!("`{}`", log.display()), message));
        }
        Ok(())
    };
    for (flag, file, format) in [("--svg", &args.svg, ImageFormat::Svg), ("--png", &args.png, ImageFormat::Png)] {
        let Some(file) = file else { continue };
        logs.iter().try_for_each(check)?;
        let output = output_file(flag, file, &logs)?;
        let _reporter = Reporter::of("reading the log");
        let picture = screen::picture(&logs, &args.keys, args.size, args.scheme.theme().scheme, format)?;
        return output.write(&picture);
    }
    if args.speed.is_some_and(|speed| !speed.is_finite() || speed <= 0.0) {
        return Err(Error::config("--speed", "must be above 0, such as 10"));
    }
    let asked = if args.plain { DisplayMode::Plain } else { DisplayMode::Dashboard };
    if Terminal::current().output(Some(asked)) == DisplayMode::Dashboard {
        screen::watch(&logs, args.speed, args.scheme.theme(), !args.scheme.no_mouse)
    } else if logs.len() > 1 {
        let message = "plain lines show one run; leave the others out, or let `finetune compare` print all of them";
        Err(Error::config("watch", message))
    } else {
        check(&logs[0])?;
        screen::watch_plain(&logs[0], args.speed, stdout(), LOG_EVERY)
    }
}

/// Parses columns and rows such as `120x36`.
fn size(text: &str) -> Result<(u16, u16), String> {
    let pair = text.split_once('x').and_then(|(columns, rows)| Some((columns.parse().ok()?, rows.parse().ok()?)));
    let fits = |(columns, rows): &(u16, u16)| (1..=500).contains(columns) && (1..=300).contains(rows);
    pair.filter(fits).ok_or_else(|| "must be COLUMNSxROWS up to 500x300, such as 120x36".to_owned())
}
