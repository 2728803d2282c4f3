//! `finetune compare`: compares runs, as text, JSON or an HTML page.

use crate::cli::lab::{page_width, terminal_width};
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, find_log, output_file};
use crate::compare::{Comparison, RunSummary};
use crate::{Error, Result};
use clap::Args;
use std::io::{IsTerminal, Write, stdout};
use std::path::PathBuf;

#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// Names or folders of runs, or their events files; runs that differ only in the seed are averaged
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Test whether two configurations differ by more than this in perplexity, with 95 % confidence
    #[arg(long, value_name = "PERPLEXITY", value_parser = positive)]
    margin: Option<f64>,
    /// Test whether the second configuration adds more than this many skipped steps in a row, with 95 % confidence
    #[arg(long, value_name = "STEPS", value_parser = positive)]
    skip_margin: Option<f64>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Also write the report as an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Use only ASCII characters [default: on a terminal whose locale is not UTF-8]
    #[arg(long)]
    ascii: bool,
    /// Width of the text [default: the terminal's, or 80]
    #[arg(long, value_name = "COLUMNS", value_parser = page_width())]
    width: Option<usize>,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && f64::is_finite(value) => Ok(value),
        _ => Err("must be above 0, such as 2.0".into()),
    }
}

pub(crate) fn run(args: &CompareArgs, out: &mut dyn Write) -> Result<()> {
    let logs: Vec<_> = args.runs.iter().map(|run| find_log(Some(run), &args.runs_dir.path)).collect::<Result<_>>()?;
    let html = args.html.as_ref().map(|file| output_file("--html", file, &logs)).transpose()?;
    let reporter = Reporter::start();
    let read = |(run, log): (&PathBuf, &PathBuf)| {
        reporter.activity.begin(&format!("reading `{}`", run.display()));
        RunSummary::read(log)
    };
    let summaries = args.runs.iter().zip(&logs).map(read).collect::<Result<_>>()?;
    let report = Comparison::new(summaries, args.margin, args.skip_margin)?;
    drop(reporter);
    if let Some(output) = html {
        output.write(report.html().as_bytes())?;
    }
    let text = if args.json {
        crate::untrusted::sanitize_lines(&format!("{:#}\n", report.json())).into_owned()
    } else {
        report.page(args.width.unwrap_or_else(terminal_width)).printed(args.ascii, stdout().is_terminal())
    };
    out.write_all(text.as_bytes()).map_err(Error::stdout)
}
