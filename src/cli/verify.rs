//! `finetune verify`: repeats a recorded run, or proves that a configuration resumes.

use crate::cli::flags::ConfigArgs;
use crate::cli::processes::{self, ProcessArgs};
use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{file_of_run, output_file, run_folder};
use crate::cli::train::thread_pool;
use crate::data::counted;
use crate::digest::read_at_most;
use crate::engine::collective::ProcessGroup;
use crate::engine::kernels::isa::Isa;
use crate::store::checkpoint::{Checkpoint, CheckpointKind, check_proofs, logged_checkpoints};
use crate::telemetry::CheckpointSaved;
use crate::temporary::OutputFile;
use crate::train::{Config, RecordedRun, RunStart, Trainer, verify_resume};
use crate::{Error, Result, temporary};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Flags of `verify`, including those that define a run.
#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    /// The run to verify (name or folder), or a claim; it is not changed. Without it, or with `--at` or `--steps`, a
    /// configuration is trained with and without an interruption
    // Not `run`, which is the id of a flag below.
    #[arg(value_name = "RUN", conflicts_with = "config")]
    like: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
    /// Step after which to save and load, without a recorded run [default: half of the steps]
    #[arg(long, value_name = "K")]
    at: Option<u64>,
    /// Repeat the steps after this one, which has a checkpoint; 0 for all [default: the last checkpoint but one]
    #[arg(long, value_name = "STEP", requires = "like")]
    from: Option<u64>,
    /// Repeat up to this step [default: the last checkpoint]
    #[arg(long, value_name = "STEP", requires = "like")]
    to: Option<u64>,
    /// Write a claim: the configuration and the hashes that another person needs to check the run with `verify FILE`
    #[arg(long, value_name = "FILE", requires = "like")]
    claim: Option<PathBuf>,
    #[command(flatten)]
    processes: ProcessArgs,
}

impl VerifyArgs {
    /// Rejects flags that have no effect on the verification of a configuration.
    fn check_configuration_flags(&self) -> Result<()> {
        let flags = [
            self.from.map(|_| "--from"),
            self.to.map(|_| "--to"),
            self.claim.as_ref().map(|_| "--claim"),
            self.processes.flag(),
        ];
        match flags.into_iter().flatten().next() {
            Some(flag) => Err(Error::config(flag, "is for a recorded run; name one, without `--at` and `--steps`")),
            None => Ok(()),
        }
    }
}

/// A run's configuration and the hashes of its checkpoints.
#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    program: String,
    /// Bits depend on it.
    instruction_set: String,
    kernels: String,
    threads: usize,
    processes: usize,
    /// The steps that were repeated with the same bits.
    repeated: [u64; 2],
    config: String,
    checkpoints: Vec<CheckpointSaved>,
}

/// The record to verify: a run's folder and log, or a claim.
struct Subject {
    /// Empty for a claim.
    folder: PathBuf,
    recorded: RecordedRun,
    config: Option<String>,
    instruction_set: String,
    /// Files and log entries that contradict the log's proofs.
    differences: Vec<String>,
}

impl Subject {
    fn of_claim(path: &Path) -> Result<Self> {
        let claim: Claim = serde_json::from_slice(&read_at_most(path, MAX_CLAIM)?).map_err(|error| {
            Error::data(
                path.display(),
                format!("is not a claim of `verify --claim` ({error}); name a run by its folder"),
            )
        })?;
        let checkpoints = claim.checkpoints.into_iter().map(|saved| (saved.step, saved)).collect();
        Ok(Self {
            folder: PathBuf::new(),
            recorded: RecordedRun { checkpoints, ..RecordedRun::default() },
            config: Some(claim.config),
            instruction_set: claim.instruction_set,
            differences: Vec::new(),
        })
    }

    fn of_run(folder: PathBuf) -> Result<Self> {
        let log = file_of_run(&folder, "events.jsonl")?;
        let checkpoints = logged_checkpoints(&log)?;
        if checkpoints.is_empty() {
            return Err(Error::checkpoint(&folder, NO_CHECKPOINT));
        }
        let recorded = RecordedRun::read(&log)?;
        let mut differences = check_proofs(&folder, &log, &checkpoints)?;
        if recorded.unreadable > 0 {
            differences.push(format!("log: {} unreadable lines", recorded.unreadable));
        }
        Ok(Self { folder, recorded, config: None, instruction_set: Isa::current().to_string(), differences })
    }

    fn checkpoint(&self, step: u64) -> PathBuf {
        self.folder.join(CheckpointKind::Full.directory(step))
    }

    /// The steps to repeat: those after the first number, up to the second.
    fn steps(&self, args: &VerifyArgs) -> Result<[u64; 2]> {
        let checkpoints = self.recorded.checkpoints.keys().copied();
        let Some(last) = checkpoints.clone().next_back() else {
            return Err(Error::checkpoint(&self.folder, NO_CHECKPOINT));
        };
        let mut to = args.to.unwrap_or(last);
        let is_claim = self.folder.as_os_str().is_empty();
        let mut exist = checkpoints.clone().filter(|step| *step < to && !is_claim && self.checkpoint(*step).exists());
        // An earlier log may have been deleted.
        let first = self.recorded.configs.first().map_or(0, |(first, _)| *first);
        let from = args.from.or_else(|| exist.next_back()).unwrap_or(first);
        if from < first {
            return Err(Error::config("--from", format!("the log begins after step {first}; use {first} or more")));
        }
        if from > 0 && is_claim {
            return Err(Error::config("--from", "a claim has no checkpoints; leave the flag out to repeat all steps"));
        }
        let end = self.recorded.numbers.last().map_or(last, |step| last.max(*step));
        if !(1..=end).contains(&to) {
            return Err(Error::config("--to", format!("{to} is not a recorded step; the last is {end}")));
        }
        if is_claim {
            // Later steps have no hash.
            to = checkpoints.clone().rfind(|step| *step <= to).ok_or_else(|| {
                let first = checkpoints.clone().next().unwrap_or(last);
                Error::config("--to", format!("the claim has no hash up to step {to}; use {first} or more"))
            })?;
        }
        if from >= to {
            return Err(Error::config("--from", format!("{from} is not below {to}, the last step to repeat")));
        }
        Ok([from, to])
    }
}

/// Verifies a recorded run or a claim, or proves that a configuration resumes; exit code 1 if anything differs.
pub(crate) fn run(args: &VerifyArgs, group: &Arc<dyn ProcessGroup>, out: &mut dyn Write) -> Result<ExitCode> {
    let Some(run) = args.like.as_ref().filter(|_| args.at.is_none() && args.config.steps().is_none()) else {
        RunStart::cancel(&**group)?;
        args.check_configuration_flags()?;
        return verify_configuration(args, out);
    };
    let claim = args.claim.as_ref().map(|file| output_file("--claim", file, &[])).transpose()?;
    let reporter = Reporter::of("reading the run");
    let mut subject = match run {
        file if file.is_file() => Subject::of_claim(file)?,
        run => Subject::of_run(run_folder(run, &args.config.runs())?)?,
    };
    let steps @ [from, to] = subject.steps(args)?;
    if let (Some(_), Some(step)) = (&claim, subject.recorded.changed_between(0, u64::MAX)) {
        let message =
            format!("the settings changed after step {step}, and a claim has one configuration for all steps");
        return Err(Error::config("--claim", message));
    }
    let config = match subject.config.clone().or_else(|| subject.recorded.config_after(from)) {
        Some(text) => args.config.resolve_from_text(&run.display().to_string(), text)?,
        None => args.config.resolve_from_run(&subject.folder)?,
    };
    let isa = Isa::current().to_string();
    if subject.instruction_set != isa {
        let other = &subject.instruction_set;
        reporter.notice(&format!("the claim is of a processor with {other}, this one has {isa}: bits may differ"));
    }
    if !subject.differences.is_empty() {
        RunStart::cancel(&**group)?;
        drop(reporter);
        return report(&subject.differences, "the run", out);
    }
    if subject.config.is_none() {
        subject.recorded.read_steps(&subject.folder.join("events.jsonl"), from + 1..=to)?;
    }
    let group = &args.processes.start(group, &config)?;
    let difference = thread_pool(&config, group.core_sharers())?
        .install(|| repeat(&subject, config, steps, group, claim, &reporter))?;
    drop(reporter);
    let summary = if difference.is_some() {
        "the run".into()
    } else {
        let mut checkpoints = subject.recorded.checkpoints.range(from + 1..=to);
        let hashes = checkpoints.next().map_or("", |_| ", the hashes of their checkpoints");
        format!("steps {} to {to} repeated{hashes} and the files", from + 1)
    };
    report(difference.as_slice(), &summary, out)
}

/// Repeats the steps and returns the first difference. If there is none, writes a claim to `claim`.
fn repeat(
    subject: &Subject,
    config: Config,
    [from, to]: [u64; 2],
    group: &Arc<dyn ProcessGroup>,
    claim: Option<OutputFile>,
    reporter: &Reporter,
) -> Result<Option<String>> {
    let Subject { folder, recorded, .. } = subject;
    let checkpoint = (from > 0).then(|| Checkpoint::open_verified(subject.checkpoint(from))).transpose()?;
    let (temporary, _lock) = temporary::folder(&std::env::temp_dir(), ".finetune-verify-")?;
    let mut tell = |event| reporter.report(event);
    let mut trainer = Trainer::lead(group, config, checkpoint.as_ref(), &mut tell)?;
    processes::start_workers(&trainer, checkpoint.as_ref(), &**group)?;
    let difference = recorded.repeat(&mut trainer, folder, to, temporary.path(), &reporter.activity)?;
    trainer.stop_workers()?;
    if let Some(output) = claim
        && difference.is_none()
    {
        let claim = Claim {
            program: format!("finetune {}", env!("CARGO_PKG_VERSION")),
            instruction_set: Isa::current().to_string(),
            kernels: trainer.engine.model.kernels().name().to_owned(),
            threads: rayon::current_num_threads(),
            processes: group.world_size(),
            repeated: [from, to],
            config: trainer.config.to_toml()?,
            checkpoints: recorded.checkpoints.values().cloned().collect(),
        };
        let text = serde_json::to_string_pretty(&claim).map_err(|error| Error::data("a claim", error.to_string()))?;
        output.write((text + "\n").as_bytes())?;
    }
    Ok(difference)
}

/// Prints the differences and the verdict.
fn report(differences: &[String], what: &str, out: &mut dyn Write) -> Result<ExitCode> {
    let mut say = |text: String| writeln!(out, "{text}").map_err(Error::stdout);
    for difference in differences {
        say(format!("differs: {difference}"))?;
    }
    let verdict = if differences.is_empty() { "bit-identical" } else { "NOT identical" };
    say(format!("{verdict}: {what}"))?;
    Ok(if differences.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

const NO_CHECKPOINT: &str = "the log has no full checkpoint to compare with";

/// Limit on the size of a claim.
const MAX_CLAIM: u64 = 64 << 20;

/// Default number of steps: enough for overflows, a growth of the scale and an epoch's end in the built-in run.
const STEPS: u64 = 100;

/// Trains a configuration with and without an interruption, and prints the result.
fn verify_configuration(args: &VerifyArgs, out: &mut dyn Write) -> Result<ExitCode> {
    let config = match &args.like {
        Some(run) => args.config.resolve_from_run(&run_folder(run, &args.config.runs())?)?,
        None => args.config.resolve()?,
    };
    let steps = args.config.steps().map_or(STEPS, |steps| steps.max(0) as u64);
    let at = args.at.unwrap_or(steps / 2);
    let (folder, _lock) = temporary::folder(&std::env::temp_dir(), ".finetune-verify-")?;
    let reporter = Reporter::start();
    let activity = &reporter.activity;
    let proof = thread_pool(&config, 1)?.install(|| verify_resume(&config, steps, at, folder.path(), activity))?;
    reporter.activity.begin("deleting the checkpoints of the proof");
    drop(folder);
    drop(reporter);
    let (tensors, elements, skipped) = (proof.tensors, proof.elements, proof.skipped);
    let what = format!(
        "{} against {at} + save + load + {}: {tensors} tensors, {elements} values, the scaler and the counters \
         ({} overflowed)",
        counted(steps, "step"),
        steps - at,
        counted(skipped, "step")
    );
    report(&proof.differences, &what, out)
}
