//! `finetune report`: reports a run as one HTML page.

use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, find_log, output_file};
use crate::{Error, Result, report};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    /// A run's name or folder, or its events file [default: the newest run]
    run: Option<PathBuf>,
    /// The file to write [default: `report.html` in the run's folder]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

pub(crate) fn run(args: &ReportArgs, out: &mut dyn Write) -> Result<()> {
    let log = find_log(args.run.as_deref(), &args.runs_dir.path)?;
    let file = args.output.clone().unwrap_or_else(|| log.with_file_name("report.html"));
    let output = output_file("--output", &file, std::slice::from_ref(&log))?;
    let reporter = Reporter::of("reading the log");
    output.write(report::page(&log)?.as_bytes())?;
    drop(reporter);
    writeln!(out, "wrote {}", file.display()).map_err(Error::stdout)
}
