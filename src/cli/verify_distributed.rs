//! `finetune verify-distributed`.

use crate::cli::flags::ConfigArgs;
use crate::store::checkpoint::{compare, latest_valid};
use crate::telemetry::{Event, read};
use crate::untrusted::subprocess::outside_job;
use crate::{Error, Result, temporary};
use clap::Args;
use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Flags of `verify-distributed`, including those that define a run.
#[derive(Args, Debug)]
pub(crate) struct VerifyDistributedArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The launcher, such as `mpirun --oversubscribe`, called with `-n`, the number of processes, and this program
    /// [default: `--processes`]
    #[arg(long, value_name = "COMMAND")]
    launcher: Option<String>,
}

const STEPS: u64 = 20;
/// Micro-batches of a step, and the numbers of processes that share them.
const MICRO_BATCHES: usize = 4;
const PROCESSES: [usize; 3] = [1, 2, 4];

/// Trains the same run with each number of processes and prints the differences; exit code 1 if there are any.
pub(crate) fn run(args: &VerifyDistributedArgs, out: &mut dyn Write) -> Result<ExitCode> {
    let mut config = args.config.resolve()?;
    let (folder, _lock) = temporary::folder(&std::env::temp_dir(), ".finetune-verify-")?;
    let steps = args.config.steps().map_or(STEPS, |steps| steps.max(1) as u64);
    config.train.steps = Some(steps);
    config.train.epochs = None;
    config.train.grad_accum = config.train.grad_accum.max(MICRO_BATCHES);
    config.telemetry.grad_stats_every = 1;
    config.telemetry.grad_histogram_every = 1;
    config.checkpoint.dir = folder.path().to_path_buf();
    config.checkpoint.run = None;
    let file = folder.path().join("config.toml");
    std::fs::write(&file, config.to_toml()?).map_err(Error::io("write", &file))?;
    for count in PROCESSES {
        train(args.launcher.as_deref(), count, &file)?;
    }
    let mut say = |text: String| writeln!(out, "{text}").map_err(Error::stdout);
    let run = |count: usize| folder.path().join(name(count));
    let whole = latest_valid(&run(1))?.checkpoint;
    let first = figures(&run(1))?;
    let mut differs = false;
    for count in PROCESSES.into_iter().skip(1) {
        let shared = latest_valid(&run(count))?.checkpoint;
        let mut differences: Vec<String> =
            compare(whole.path(), shared.path())?.iter().map(ToString::to_string).collect();
        let figures = figures(&run(count))?;
        let at = first.iter().zip(&figures).position(|(a, b)| a != b);
        if let Some(at) = at.or((first.len() != figures.len()).then_some(first.len().min(figures.len()))) {
            differences.push(format!("log: line {} of its steps, evaluations and overflows", at + 1));
        }
        for difference in &differences {
            say(format!("differs, 1 process against {count}: {difference}"))?;
        }
        differs |= !differences.is_empty();
    }
    let verdict = if differs { "NOT identical" } else { "bit-identical" };
    say(format!(
        "{verdict}: {steps} steps of {} micro-batches by 1, 2 and 4 processes: {} tensors of weights, masters and \
         moments, and {} lines of losses, scales, norms and histograms",
        config.train.grad_accum,
        4 * whole.weights().tensors().len(),
        first.len()
    ))?;
    Ok(if differs { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn name(count: usize) -> String {
    format!("by-{count}")
}

fn train(launcher: Option<&str>, count: usize, config: &Path) -> Result<()> {
    let program = std::env::current_exe().map_err(Error::io("find", "this program"))?;
    let number = count.to_string();
    let mut words = launcher.filter(|_| count > 1).unwrap_or_default().split_whitespace();
    let mut command = outside_job(words.next().map_or(program.as_os_str(), OsStr::new));
    if launcher.is_none() {
        command.args(["--processes", &number]);
    } else if count > 1 {
        command.args(words).args(["-n", &number]);
        if rustix::process::getuid().is_root() && command.get_program().as_encoded_bytes().ends_with(b"mpirun") {
            command.arg("--allow-run-as-root");
        }
        command.arg(&program);
    }
    command.args(["--plain", "--run", &name(count), "--config"]).arg(config);
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(Error::io("start", &program))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::Collective(format!("`{program}` ended with {}: {}", output.status, said.trim())))
}

/// The records of a run's log without times and per-process fields, as text so that NaN equals itself.
fn figures(run: &Path) -> Result<Vec<String>> {
    let mut events: Vec<Event> = read(run.join("events.jsonl"))?.into_iter().map(|record| record.event).collect();
    events
        .retain(|event| matches!(event, Event::Step(_) | Event::Eval(_) | Event::Overflow(_) | Event::DtypeChange(_)));
    for event in &mut events {
        if let Event::Step(step) = event {
            **step = std::mem::take(&mut **step).without_measurements();
        }
    }
    Ok(events.iter().map(|event| format!("{event:?}")).collect())
}
