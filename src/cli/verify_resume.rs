//! `finetune verify-resume`.

use crate::cli::flags::ConfigArgs;
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::run_folder;
use crate::cli::train::thread_pool;
use crate::train::verify_resume;
use crate::{Error, Result, temporary};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `verify-resume`, including those that define a run.
#[derive(Args, Debug)]
pub(crate) struct VerifyResumeArgs {
    /// Use the configuration of this run (name or folder); the run itself is not changed
    // Not `run`, which is the id of a flag below.
    #[arg(value_name = "RUN", conflicts_with = "config")]
    like: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
    /// Step after which to save and load [default: half of the steps]
    #[arg(long, value_name = "K")]
    at: Option<u64>,
}

/// Default number of steps: enough for overflows, a growth of the scale and an epoch's end in the built-in run.
const STEPS: u64 = 100;

/// Runs the proof and prints the result; exit code 1 if anything differs.
pub(crate) fn run(args: &VerifyResumeArgs, out: &mut dyn Write) -> Result<ExitCode> {
    let config = match &args.like {
        Some(run) => args.config.resolve_from_run(&run_folder(run, args.config.runs())?)?,
        None => args.config.resolve()?,
    };
    let steps = args.config.steps().map_or(STEPS, |steps| steps.max(0) as u64);
    let at = args.at.unwrap_or(steps / 2);
    let (folder, _lock) = temporary::folder(&std::env::temp_dir(), ".finetune-verify-")?;
    let reporter = Reporter::start();
    let activity = reporter.activity();
    let proof = thread_pool(&config, 1)?.install(|| verify_resume(&config, steps, at, folder.path(), activity))?;
    reporter.begin("deleting the checkpoints of the proof");
    drop(folder);
    drop(reporter);
    let mut say = |text: String| writeln!(out, "{text}").map_err(Error::stdout);
    for difference in &proof.differences {
        say(format!("differs: {difference}"))?;
    }
    let (tensors, elements, skipped) = (proof.tensors, proof.elements, proof.skipped);
    let verdict = if proof.differences.is_empty() { "bit-identical" } else { "NOT identical" };
    say(format!(
        "{verdict}: {steps} steps against {at} + save + load + {}: {tensors} tensors, {elements} values, the scaler \
         and the counters ({skipped} steps overflowed)",
        steps - at
    ))?;
    Ok(if proof.differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
