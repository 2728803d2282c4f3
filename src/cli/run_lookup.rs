//! Finds a run by name, folder or events file.

use crate::data::{closest_match, names_in};
use crate::store::adapter::AdapterFolder;
use crate::store::checkpoint::{CheckpointKind, Run};
use crate::temporary::OutputFile;
use crate::untrusted::same_file;
use crate::{Error, Result};
use clap::Args;
use std::path::{Path, PathBuf};

/// The default folder of all runs.
pub(super) const RUNS_DIR: &str = "checkpoints";

/// The flag of commands that look up runs.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunsDirArgs {
    /// The folder of all runs
    // A separate id, because clap would otherwise pass a global value to the flag of training.
    #[arg(
        id = "runs_folder",
        long = "checkpoint-dir",
        value_name = "FOLDER",
        default_value = RUNS_DIR,
        global = true
    )]
    pub(super) path: PathBuf,
}

/// The last part of a path.
pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether this is a step folder, valid or damaged.
pub(super) fn is_step(path: &Path) -> bool {
    path.join("manifest.json").is_file() || (path.is_dir() && CheckpointKind::parse_directory(&name_of(path)).is_some())
}

pub(super) fn is_run(path: &Path) -> bool {
    path.join("config.toml").is_file()
}

pub(super) fn is_run_or_step(path: &Path) -> bool {
    is_run(path) || is_step(path)
}

/// The folder of the run that this is, or that this checkpoint belongs to.
pub(super) fn run_of(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok()?.ancestors().take(2).find(|folder| is_run(folder)).map(Path::to_path_buf)
}

/// Whether this is a file or a folder with a model.
pub(super) fn is_model(path: &Path) -> bool {
    path.is_file() || is_run_or_step(path) || AdapterFolder::exists(path) || path.join("config.json").is_file()
}

/// Resolves `name` to an existing file or folder, or else to the run of that name in `runs`. A folder of the same name,
/// such as an export of the run, hides the run only if it `fits`.
pub(super) fn run_or_path(name: &Path, runs: &Path, fits: impl Fn(&Path) -> bool) -> PathBuf {
    let run = runs.join(name);
    let is_hidden = name.exists() && (fits(name) || !fits(&run));
    if run.is_dir() && !is_hidden { run } else { name.to_path_buf() }
}

/// `text` as one word of a shell's command line.
pub(super) fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "._-/".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// A command for the runs in `runs`, as messages show it.
pub(super) fn command_for(command: &str, runs: &Path) -> String {
    if runs == Path::new(RUNS_DIR) {
        return format!("`{command}`");
    }
    format!("`{command} --checkpoint-dir {}`", quoted(&runs.to_string_lossy()))
}

/// "; did you mean …?" if a run in `runs` has a name similar to the missing `name`, else the command that lists them.
pub(super) fn did_you_mean(name: &Path, runs: &Path) -> String {
    let near = closest_match(&name.to_string_lossy(), names_in(runs));
    let list = || format!("; {} lists the runs", command_for("finetune runs", runs));
    near.map_or_else(list, |near| format!("; did you mean `{near}`?"))
}

/// The folder of a run given by name or folder.
pub(super) fn run_folder(run: &Path, runs: &Path) -> Result<PathBuf> {
    let folder = run_or_path(run, runs, is_run);
    if is_run(&folder) {
        return Ok(folder);
    }
    if Run::exists(&folder) {
        return file_of_run(&folder, "config.toml").map(|_| folder);
    }
    let near = did_you_mean(run, runs);
    let message = format!("is neither a run's folder nor the name of a run in `{}`{near}", runs.display());
    Err(Error::config(format!("`{}`", run.display()), message))
}

/// The path of a run's file. Fails if it is missing.
pub(super) fn file_of_run(folder: &Path, name: &str) -> Result<PathBuf> {
    let file = folder.join(name);
    if file.exists() {
        return Ok(file);
    }
    let message = "is missing in the run's folder; restore this file, or select a different run";
    Err(Error::config(format!("`{}`", file.display()), message))
}

/// The events file of a run given as a file, as a folder, or by its name in `runs`.
pub(super) fn find_log(run: Option<&Path>, runs: &Path) -> Result<PathBuf> {
    let Some(run) = run else {
        let message = format!("no run in `{}` yet; {} starts one", runs.display(), command_for("finetune", runs));
        return newest_log(runs).ok_or_else(|| Error::config("runs", message));
    };
    let log = |path: &Path| [path.to_path_buf(), path.join("events.jsonl")].into_iter().find(|path| path.is_file());
    let path = run_or_path(run, runs, |path| log(path).is_some());
    if Run::exists(&path) {
        return file_of_run(&path, "events.jsonl");
    }
    log(&path).ok_or_else(|| {
        let message = format!(
            "is neither an events file, a run's folder, nor the name of a run in `{}`{}",
            runs.display(),
            did_you_mean(run, runs)
        );
        Error::config(format!("`{}`", run.display()), message)
    })
}

/// Fails if writing `file` for `flag` would destroy a file of a run, or one of `inputs`, which the command reads.
pub(super) fn check_output(flag: &str, file: &Path, inputs: &[PathBuf]) -> Result<()> {
    let is = |input: &PathBuf| Ok::<_, std::io::Error>(same_file(&file.metadata()?, &input.metadata()?));
    if Run::owns(file) || inputs.iter().any(|input| is(input).unwrap_or(false)) {
        let message =
            format!("`{}` is an input or a run's own file, which would be lost; use another name", file.display());
        return Err(Error::config(flag, message));
    }
    Ok(())
}

/// The file to write for `flag`, after [`check_output`].
pub(super) fn output_file(flag: &str, file: &Path, inputs: &[PathBuf]) -> Result<OutputFile> {
    check_output(flag, file, inputs)?;
    if file.is_dir() || file.file_name().is_none() {
        return Err(Error::config(flag, format!("`{}` is not the name of a file", file.display())));
    }
    OutputFile::create(file)
}

/// The most recently written events file of all runs, even of a run without a checkpoint.
fn newest_log(runs: &Path) -> Option<PathBuf> {
    let logs = std::fs::read_dir(runs).ok()?.filter_map(|entry| Some(entry.ok()?.path().join("events.jsonl")));
    logs.filter_map(|log| Some((log.metadata().ok()?.modified().ok()?, log))).max().map(|(_, log)| log)
}

#[cfg(test)]
mod tests {
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
        let error = find_log(None, Path::new("no runs")).unwrap_err().to_string();
        let expected = "no run in `no runs` yet; `finetune --checkpoint-dir 'no runs'` starts one";
        assert!(error.contains(expected), "{error}");
        let error = find_log(Some(Path::new("0008")), runs.path()).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().contains("`0008`")), (2, true), "{error}");
        // Regression: the message denied that this is a run.
        let missing = run_folder(Path::new("0007"), runs.path()).unwrap_err().to_string();
        std::fs::rename(&log, folder.join("config.toml")).unwrap();
        for (error, file) in
            [(missing, "config.toml"), (find_log(Some(&folder), runs.path()).unwrap_err().to_string(), "events.jsonl")]
        {
            assert!(error.starts_with(&format!("`{}`: is missing", folder.join(file).display())), "{error}");
        }
    }

    /// The tests run in a folder with `src` and, in `tests/golden`, models.
    #[test]
    fn a_folder_without_a_run_does_not_hide_the_run_of_its_name() {
        let runs = tempfile::tempdir().unwrap();
        let [run, model] = ["src", "tests/golden/untied"].map(Path::new);
        let folder = runs.path().join(run);
        std::fs::create_dir(&folder).unwrap();
        assert!(run_folder(run, runs.path()).is_err() && find_log(Some(run), runs.path()).is_err());
        assert_eq!(run_or_path(run, runs.path(), is_model), run);
        for run in [run, model] {
            let folder = runs.path().join(run);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("config.toml"), "").unwrap();
            std::fs::write(folder.join("events.jsonl"), "").unwrap();
            assert_eq!(run_folder(run, runs.path()).unwrap(), folder);
            assert_eq!(find_log(Some(run), runs.path()).unwrap(), folder.join("events.jsonl"));
            assert_eq!(run_or_path(run, runs.path(), is_run_or_step), folder);
        }
        assert_eq!(run_or_path(run, runs.path(), is_model), folder);
        assert_eq!(run_or_path(model, runs.path(), is_model), model);
        assert_eq!(run_folder(&folder, Path::new("elsewhere")).unwrap(), folder);
    }
}
