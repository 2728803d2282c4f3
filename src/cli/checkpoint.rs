//! `finetune checkpoint`: list, show, verify, prune and compare checkpoints.

use crate::cli::reporter::Reporter;
use crate::cli::run_lookup::{RunsDirArgs, did_you_mean, is_run_or_step, is_step, name_of, run_or_path};
use crate::digest::read_at_most;
use crate::precision::PrecisionPolicy;
use crate::store::checkpoint::{
    Checkpoint, CheckpointDifference, CheckpointEntry, CheckpointKind, Manifest, RetentionPolicy, Run, by_loss,
    compare, expired, latest_valid, list, verify,
};
use crate::ui::format::{bytes, decimals, scale};
use crate::{Error, Result, untrusted};
use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(super) struct CheckpointArgs {
    #[command(subcommand)]
    command: CheckpointCommand,
    #[command(flatten)]
    runs_dir: RunsDirArgs,
}

/// The subcommands. A PATH is a run's name or folder, a step folder in it (`NAME/step-000200`), or a folder of runs.
#[derive(Debug, Subcommand)]
enum CheckpointCommand {
    /// List checkpoints with size and validation loss
    List {
        /// A run, or a folder of runs [default: checkpoints]
        path: Option<PathBuf>,
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// Verify a checkpoint's files and show its contents
    Show {
        /// A step folder, or a run for its newest valid checkpoint
        path: PathBuf,
    },
    /// Check the size and SHA-256 of every file; exit code 1 if any differs
    Verify {
        /// A run, a step folder, or a folder of runs [default: checkpoints]
        path: Option<PathBuf>,
    },
    /// Delete a run's older checkpoints
    Prune(PruneArgs),
    /// Compare two checkpoints bit for bit; exit code 1 if they differ
    Diff {
        /// A step folder, or a run for its newest valid checkpoint
        a: PathBuf,
        /// The other checkpoint
        b: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(super) struct PruneArgs {
    /// The run's name or folder
    run: PathBuf,
    /// Keep the newest N of the full and of the weights-only checkpoints
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    keep_last: usize,
    /// Also delete the checkpoint with the best validation loss if it is old
    #[arg(long)]
    no_best: bool,
    /// Also delete damaged checkpoints
    #[arg(long)]
    damaged: bool,
    /// Print what would be deleted, and delete nothing
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(args: &CheckpointArgs, out: &mut dyn Write) -> Result<ExitCode> {
    let runs = &args.runs_dir.path;
    let existing = |path: PathBuf| {
        let message = || format!("no run or folder with this name exists{}", did_you_mean(&path, runs));
        if path.is_dir() { Ok(path) } else { Err(Error::checkpoint(&path, message())) }
    };
    let named = |path: &Path| existing(run_or_path(path, runs, is_run_or_step));
    let some_or_all = |path: &Option<PathBuf>| path.as_deref().map_or_else(|| existing(runs.clone()), named);
    let reporter = Reporter::of("reading checkpoints");
    let (lines, fine) = match &args.command {
        CheckpointCommand::List { path, json: true } => (vec![json_listing(&some_or_all(path)?)?], true),
        CheckpointCommand::List { path, .. } => (listing(&some_or_all(path)?)?, true),
        CheckpointCommand::Show { path } => (description(&named(path)?)?, true),
        CheckpointCommand::Verify { path } => verification(&some_or_all(path)?)?,
        CheckpointCommand::Prune(args) => (prune(args, &named(&args.run)?)?, true),
        CheckpointCommand::Diff { a, b } => difference(&named(a)?, &named(b)?)?,
    };
    drop(reporter);
    for line in lines {
        writeln!(out, "{}", untrusted::sanitize_line(&line)).map_err(Error::stdout)?;
    }
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The run at `path`, or the runs in it.
fn runs(path: &Path) -> Result<Vec<PathBuf>> {
    let has_checkpoints = |path: &PathBuf| path.is_dir() && list(path).is_ok_and(|listed| !listed.is_empty());
    if has_checkpoints(&path.to_path_buf()) {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).map_err(Error::io("list", path))?;
    let mut runs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(has_checkpoints).collect();
    runs.sort();
    if runs.is_empty() { Err(Error::checkpoint(path, "no checkpoint found")) } else { Ok(runs) }
}

/// The step folder itself, or the newest good one of a run.
fn step(path: &Path) -> Result<PathBuf> {
    if is_step(path) { Ok(path.to_path_buf()) } else { Ok(latest_valid(path)?.checkpoint.path().to_path_buf()) }
}

fn listing(path: &Path) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for run in runs(path)? {
        let latest = read_at_most(&run.join("latest"), 1024).unwrap_or_default();
        let latest = String::from_utf8_lossy(&latest);
        lines.push(run.display().to_string());
        let listed = list(&run)?;
        let best = by_loss(&listed).next().and_then(CheckpointEntry::validation_loss);
        for one in &listed {
            let name = name_of(&one.path);
            let mark = if name == latest.trim() { '*' } else { ' ' };
            let about = match &one.manifest {
                Ok(manifest) => about(manifest, best),
                Err(error) => format!("{}: {error}", fault(&one.path)),
            };
            lines.push(format!("{mark} {name:<16} {about}"));
        }
    }
    Ok(lines)
}

/// The reason that a step folder cannot be used.
fn fault(path: &Path) -> &'static str {
    if Manifest::has_other_format(path) { "unread" } else { "damaged" }
}

fn json_listing(path: &Path) -> Result<String> {
    let entry = |one: CheckpointEntry| {
        json!({
            "path": one.path.display().to_string(),
            "step": one.step,
            "kind": one.kind,
            "bytes": one.manifest.as_ref().ok().map(Manifest::bytes),
            "validation_loss": one.validation_loss(),
            "error": one.manifest.as_ref().err().map(ToString::to_string),
        })
    };
    let mut entries = Vec::new();
    for run in runs(path)? {
        entries.extend(list(&run)?.into_iter().map(entry));
    }
    Ok(Value::from(entries).to_string())
}

fn about(manifest: &Manifest, best: Option<f64>) -> String {
    let loss = match manifest.validation_loss {
        Some(loss) if Some(loss) == best => format!("validation loss {}, the best", decimals(loss, 4)),
        Some(loss) => format!("validation loss {}", decimals(loss, 4)),
        None => String::new(),
    };
    format!("{:>9}  {loss}", bytes(manifest.bytes())).trim_end().to_owned()
}

fn description(path: &Path) -> Result<Vec<String>> {
    let path = step(path)?;
    let manifest = Manifest::read(&path)?;
    let mut lines = Vec::new();
    let mut say = |key: &str, value: String| lines.push(format!("{key:<12} {value}"));
    say("checkpoint", path.display().to_string());
    if manifest.kind == CheckpointKind::Full {
        describe_state(&Checkpoint::open(&path)?, &mut say);
    } else {
        if let Some(damage) = verify(&path).into_iter().next() {
            return Err(damage.into());
        }
        say("step", format!("{}, weights only", manifest.step));
    }
    if let Some(loss) = manifest.validation_loss {
        say("validation", format!("loss {}", decimals(loss, 4)));
    }
    for (name, digest) in &manifest.files {
        say("file", format!("{name:<22} {:>9}  sha256 {}", bytes(digest.bytes), digest.sha256));
    }
    Ok(lines)
}

fn describe_state(checkpoint: &Checkpoint, say: &mut dyn FnMut(&str, String)) {
    let (state, spec) = (checkpoint.state(), checkpoint.spec());
    say("model", format!("{}, {} parameters", state.fingerprint.model, spec.parameter_count()));
    say("policy", state.fingerprint.policy.clone());
    say("data", state.fingerprint.data.clone());
    say("step", format!("{}, {} of them applied", state.step, state.updates));
    say("tokens", state.tokens.to_string());
    if state.fingerprint.policy.parse().is_ok_and(PrecisionPolicy::needs_loss_scale) {
        say("loss scale", format!("{}, {} clean steps", scale(state.scaler.scale), state.scaler.growth_tracker));
    }
    let fallen =
        state.fallback.iter().filter_map(|(unit, record)| Some(format!("{unit} since step {}", record.since?)));
    let fallen: Vec<_> = fallen.collect();
    if !fallen.is_empty() {
        say("fallback", fallen.join(", "));
    }
    let position = state.data_position;
    say("position", format!("epoch {}, row {}", position.epoch, position.row));
    say("seed", state.seed.to_string());
    if let Some(best) = state.best {
        let others = checkpoint.path().parent().and_then(|run| list(run).ok()).unwrap_or_default();
        let is_kept = others.iter().any(|one| one.step == best.step && one.validation_loss().is_some());
        let kept = if is_kept { "" } else { ", not kept" };
        say("best", format!("validation loss {} at step {}{kept}", decimals(best.loss, 4), best.step));
    }
}

fn verification(path: &Path) -> Result<(Vec<String>, bool)> {
    let mut steps = Vec::new();
    if is_step(path) {
        steps.push(path.to_path_buf());
    } else {
        for run in runs(path)? {
            steps.extend(list(&run)?.into_iter().map(|one| one.path));
        }
    }
    let mut lines = Vec::new();
    let mut bad = 0;
    for step in &steps {
        let damages = verify(step);
        if damages.is_empty() {
            lines.push(format!("good     {}", step.display()));
        } else {
            bad += 1;
            lines.extend(damages.iter().map(|damage| format!("{:<8} {damage}", fault(step))));
        }
    }
    lines.push(format!("{} of {} checkpoints are good", steps.len() - bad, steps.len()));
    Ok((lines, bad == 0))
}

fn prune(args: &PruneArgs, path: &Path) -> Result<Vec<String>> {
    if list(path)?.is_empty() {
        return Err(Error::checkpoint(path, "contains no checkpoint; use the folder of one run"));
    }
    let run = Run::open(path)?;
    let keep = RetentionPolicy { last: args.keep_last, best: !args.no_best };
    let mut gone = Vec::new();
    for kind in CheckpointKind::ALL {
        gone.extend(expired(run.path(), kind, keep)?);
    }
    if args.damaged {
        // Only now no other process can change the run.
        let listed = list(run.path())?;
        if listed.iter().any(|one| one.kind == CheckpointKind::Full) {
            // If no checkpoint is valid, the damaged ones may be all that is left of the run.
            latest_valid(run.path())?;
        }
        let mut damaged: Vec<_> = listed.into_iter().map(|one| one.path).collect();
        let is_damaged = |path: &PathBuf| !Manifest::has_other_format(path) && !verify(path).is_empty();
        damaged.retain(|path| !gone.contains(path) && is_damaged(path));
        gone.extend(damaged);
    }
    let verb = if args.dry_run { "would delete" } else { "deleted" };
    let mut lines = Vec::new();
    for path in gone {
        if !args.dry_run {
            run.remove(&path)?;
        }
        lines.push(format!("{verb} {}", path.display()));
    }
    if lines.is_empty() {
        lines.push("nothing to delete".into());
    }
    Ok(lines)
}

fn difference(a: &Path, b: &Path) -> Result<(Vec<String>, bool)> {
    let (a, b) = (step(a)?, step(b)?);
    let differences = compare(&a, &b)?;
    if differences.is_empty() {
        return Ok((vec![format!("`{}` and `{}` are bit-identical", a.display(), b.display())], true));
    }
    let mut lines = summary(&differences);
    lines.extend(differences.iter().map(ToString::to_string));
    Ok((lines, false))
}

/// The number of differences of each kind in each file, and the settings that make the models unlike.
fn summary(differences: &[CheckpointDifference]) -> Vec<String> {
    let of_model = |one: &&CheckpointDifference| one.file == "config.json";
    let unlike: Vec<_> = differences.iter().filter(of_model).map(|one| format!("`{}`", one.name)).collect();
    let mut lines = Vec::new();
    if !unlike.is_empty() {
        lines.push(format!("the models differ in {}", unlike.join(", ")));
    }
    for in_file in differences.chunk_by(|a, b| a.file == b.file) {
        let mut kinds = BTreeMap::new();
        for one in in_file {
            *kinds.entry(one.kind).or_insert(0) += 1;
        }
        let kinds: Vec<_> = kinds.into_iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        lines.push(format!("{}: {}", in_file[0].file, kinds.join(", ")));
    }
    lines.push(String::new());
    lines
}
