//! Lists the checkpoints of a run, and finds the newest good one.

use super::manifest::{CheckpointKind, Manifest};
use super::read::{Checkpoint, CorruptFile, is_valid, verified};
use super::run::opened_at;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A step directory of a run.
#[derive(Debug)]
pub struct CheckpointEntry {
    /// The directory.
    pub path: PathBuf,
    /// Full, or weights only.
    pub kind: CheckpointKind,
    /// Steps attempted when it was written.
    pub step: u64,
    /// Its manifest, or why it is invalid. The files themselves are not checked: see [`verify`](super::verify).
    pub manifest: Result<Manifest>,
}

impl CheckpointEntry {
    fn save_index(&self) -> Option<u64> {
        self.manifest.as_ref().ok().map(|manifest| manifest.save_index)
    }

    /// Its validation loss, if it was measured.
    pub fn validation_loss(&self) -> Option<f64> {
        self.manifest.as_ref().ok()?.validation_loss
    }
}

/// All step directories of a run, by step, full ones before weights.
pub fn list(run: &Path) -> Result<Vec<CheckpointEntry>> {
    let mut listed = Vec::new();
    for entry in std::fs::read_dir(run).map_err(Error::io("list", run))? {
        let path = entry.map_err(Error::io("list", run))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some((kind, step)) = CheckpointKind::parse_directory(&name)
            && path.is_dir()
        {
            let manifest = Manifest::read(&path);
            listed.push(CheckpointEntry { path, kind, step, manifest });
        }
    }
    listed.sort_by_key(|one| (one.step, one.kind == CheckpointKind::Weights));
    Ok(listed)
}

/// The checkpoint to resume from, and the newer ones that are damaged.
#[derive(Debug)]
pub struct ResumeCandidate {
    /// The newest full checkpoint whose files are all unchanged since they were written.
    pub checkpoint: Checkpoint,
    /// The damaged files of the newer ones.
    pub corrupt_files: Vec<CorruptFile>,
}

/// Finds the newest good full checkpoint of a run, falling back from damaged ones to older ones. Fails with
/// [`Error::Checkpoint`] if the run has no good one; lists all damage.
pub fn latest_valid(run: &Path) -> Result<ResumeCandidate> {
    let (candidates, weights): (Vec<_>, Vec<_>) =
        list(run)?.into_iter().partition(|one| one.kind == CheckpointKind::Full);
    if candidates.is_empty() {
        let message = match weights.last() {
            None => "this run has no checkpoint yet".to_owned(),
            Some(last) => {
                format!("this run has no checkpoint to resume; its newest weights are `{}`", last.path.display())
            }
        };
        return Err(Error::checkpoint(run, message));
    }
    let mut corrupt_files = Vec::new();
    for candidate in newest_first(candidates) {
        match verified(&candidate.path) {
            Ok(manifest) => {
                return Ok(ResumeCandidate { checkpoint: Checkpoint::read(candidate.path, manifest)?, corrupt_files });
            }
            Err(corrupt) => corrupt_files.extend(corrupt),
        }
    }
    let wrong: Vec<String> = corrupt_files.iter().map(ToString::to_string).collect();
    Err(Error::checkpoint(run, format!("this run has no valid checkpoint: {}", wrong.join("; "))))
}

/// The good checkpoint of a run with the lowest validation loss; prefers a full one of the same step. Fails with
/// [`Error::Checkpoint`] if no good one has a validation loss.
pub fn best(run: &Path) -> Result<PathBuf> {
    let good = by_loss(&list(run)?).map(|one| one.path.clone()).find(|path| verified(path).is_ok());
    good.ok_or_else(|| Error::checkpoint(run, "no valid checkpoint of this run has a validation loss"))
}

/// The checkpoints of a run that have a validation loss, lowest first. Leaves out those that a resume from an older
/// step has abandoned: a newer one has an earlier step.
pub fn by_loss(listed: &[CheckpointEntry]) -> impl Iterator<Item = &CheckpointEntry> {
    let is_abandoned = |one: &CheckpointEntry| {
        listed.iter().any(|other| other.step < one.step && other.save_index() > one.save_index())
    };
    let with_loss = listed.iter().filter_map(|one| Some((one.validation_loss()?, one)));
    let mut found: Vec<_> = with_loss.filter(|(_, one)| !is_abandoned(one)).collect();
    // The sort is stable, and full checkpoints are listed before weights of the same step.
    found.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    found.into_iter().map(|(_, one)| one)
}

/// Sorts the result of [`list`] by save index, newest first. A checkpoint with an unreadable manifest has no save index
/// and is assumed to follow the previous one by step.
fn newest_first(listed: Vec<CheckpointEntry>) -> Vec<CheckpointEntry> {
    let mut before = 0;
    let mut keyed: Vec<(u64, CheckpointEntry)> = Vec::with_capacity(listed.len());
    for one in listed {
        before = one.save_index().unwrap_or(before);
        keyed.push((before, one));
    }
    // The sort is stable, so equal keys stay ordered by step.
    keyed.sort_by_key(|(save_index, _)| *save_index);
    keyed.into_iter().rev().map(|(_, one)| one).collect()
}

/// Which checkpoints of one kind to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionPolicy {
    /// The number of newest ones; 0 counts as 1.
    pub last: usize,
    /// Also the one with the lowest validation loss.
    pub best: bool,
}

/// The checkpoints of `kind` to remove, oldest first. Only [verified](super::verify) checkpoints count as kept. Damaged
/// ones among the kept, and ones with an unreadable manifest or a file that is missing or of the wrong size, are never
/// returned: the user decides about those.
pub fn expired(run: &Path, kind: CheckpointKind, keep: RetentionPolicy) -> Result<Vec<PathBuf>> {
    let mut listed = list(run)?;
    let is_whole = |one: &CheckpointEntry| one.kind == kind && is_complete(one);
    let best = by_loss(&listed).find(|one| is_whole(one)).filter(|_| keep.best).map(|one| one.path.clone());
    listed.retain(is_whole);
    listed.sort_by_key(CheckpointEntry::save_index);
    let wanted = keep.last.max(1);
    if listed.len() <= wanted {
        return Ok(Vec::new());
    }
    let mut good = (0..listed.len()).rev().filter(|&at| is_valid(&listed[at].path));
    let oldest_kept = good.nth(wanted - 1);
    listed.truncate(oldest_kept.unwrap_or(0));
    Ok(listed.into_iter().map(|one| one.path).filter(|path| Some(path) != best.as_ref()).collect())
}

/// Whether every file exists with the right size: the quick part of [`verify`](super::verify).
fn is_complete(CheckpointEntry { path, manifest, .. }: &CheckpointEntry) -> bool {
    manifest.as_ref().is_ok_and(|manifest| {
        manifest.files.iter().all(|(name, digest)| {
            std::fs::metadata(path.join(name)).is_ok_and(|found| found.is_file() && found.len() == digest.bytes)
        })
    })
}

/// The run in `folder` that saved last, or that was started since then. Fails with [`Error::Checkpoint`] if there is no
/// run; [`Error::Io`] if the folder cannot be listed.
pub fn latest_run(folder: &Path) -> Result<PathBuf> {
    let newest = runs(folder)?.into_iter().max_by_key(|(path, save_index)| (*save_index, path.clone()));
    newest
        .map(|(path, _)| path)
        .ok_or_else(|| Error::checkpoint(folder, "this folder contains no run yet; start one without `--resume`"))
}

/// The largest save index in any run of `folder`; 0 without runs, or if it cannot be listed.
pub(super) fn max_save_index(folder: &Path) -> u64 {
    runs(folder).unwrap_or_default().into_iter().map(|(_, save_index)| save_index).max().unwrap_or(0)
}

/// The runs in a folder, each with the largest save index of its checkpoints or, before the first, of its start; none
/// if the folder does not exist. Skips unreadable folders within it, which may not be runs.
fn runs(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::io("list", folder))?,
    };
    let folders = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    Ok(folders.filter_map(|path| newest_of(&path).map(|save_index| (path, save_index))).collect())
}

fn newest_of(run: &Path) -> Option<u64> {
    let listed = list(run).ok()?;
    let saved = listed.iter().map(|one| one.save_index().unwrap_or(0)).max();
    // A run without checkpoints can only be started over if it has its configuration.
    saved.or_else(|| opened_at(run).filter(|_| run.join("config.toml").is_file()))
}
