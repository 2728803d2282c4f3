//! A run's folder, owned by one process at a time: saving into it and thinning it out.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::disk::Disk;
use super::find::{Keep, newest_sequence, outdated};
use super::manifest::{Kind, Manifest};
use super::save::Contents;
use crate::{Error, Result};

const LOCK: &str = ".lock";
const LATEST: &str = "latest";

/// A run's folder that this process alone may write into, until the value is dropped or the process ends.
#[derive(Debug)]
pub struct Run {
    path: PathBuf,
    disk: Disk,
    /// Of the last save, or of the opening before the first.
    sequence: u64,
    lock: File,
}

/// A checkpoint just written.
#[derive(Debug, Clone)]
pub struct Saved {
    /// Its directory.
    pub path: PathBuf,
    /// What it holds.
    pub manifest: Manifest,
}

impl Run {
    /// Makes the folder if need be, locks it, and clears away what a killed process left half done.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the process that holds the folder; [`Error::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        Self::open_on(path, Disk::default())
    }

    /// [`Run::open`] on a disk that may fail.
    pub fn open_on(path: impl Into<PathBuf>, disk: Disk) -> Result<Self> {
        let path = path.into();
        disk.create_folders(&path)?;
        let mut lock = lock(&path)?;
        let neighbours = path.canonicalize().ok().and_then(|path| path.parent().map(newest_sequence));
        let sequence = neighbours.unwrap_or(0) + 1;
        // Not worth failing for: on a full disk it is this that lets old checkpoints be pruned.
        let _ = sign(&mut lock, sequence);
        let run = Self { path, disk, sequence, lock };
        run.clear_leftovers()?;
        Ok(run)
    }

    /// The run's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a checkpoint and points `latest` to it. Only when this returns is anything older given up by
    /// [`Run::rotate`]; on an error everything older is as it was.
    ///
    /// # Errors
    /// [`Error::Io`] with what the operating system refused, such as a full disk.
    pub fn save(&mut self, contents: &Contents<'_>, kind: Kind) -> Result<Saved> {
        let name = kind.directory(contents.state.step);
        let temporary = self.hidden(&name, "tmp");
        // A save that failed on a full disk may have left its files there, which take up the room for this one.
        self.clear_leftovers()?;
        // Counted up even if this save fails half-way: no two checkpoints ever share a number.
        self.sequence += 1;
        let manifest = contents.write(&self.disk, &temporary, kind, self.sequence).inspect_err(|_| {
            // The error is what matters; if this fails too, the next save tries again.
            let _ = self.disk.remove(&temporary);
        })?;
        self.publish(&temporary, &name)?;
        if kind == Kind::Full {
            self.point_latest(&name)?;
        }
        Ok(Saved { path: self.path.join(name), manifest })
    }

    /// Removes the checkpoints that are [`outdated`](super::outdated), and says which.
    pub fn rotate(&self, kind: Kind, keep: Keep) -> Result<Vec<PathBuf>> {
        let old = outdated(&self.path, kind, keep)?;
        old.iter().try_for_each(|path| self.remove(path))?;
        Ok(old)
    }

    /// Removes one checkpoint of this run, at once as far as anybody can see.
    pub fn remove(&self, directory: &Path) -> Result<()> {
        let name = directory.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let gone = self.hidden(name, "deleted");
        self.disk.rename(&self.path.join(name), &gone)?;
        self.disk.remove(&gone)
    }

    /// Gives a complete directory its name. One that is there already (a run that went back to an older step comes past
    /// it again) steps aside first, and back in [`Run::clear_leftovers`] if a kill falls in between.
    fn publish(&self, temporary: &Path, name: &str) -> Result<()> {
        let path = self.path.join(name);
        let aside = self.hidden(name, "old");
        let replaces = path.exists();
        if replaces {
            self.disk.rename(&path, &aside)?;
        }
        self.disk.rename(temporary, &path)?;
        self.disk.sync_folder(&self.path)?;
        if replaces { self.disk.remove(&aside) } else { Ok(()) }
    }

    fn point_latest(&self, name: &str) -> Result<()> {
        let temporary = self.hidden(LATEST, "tmp");
        self.disk.write_file(&temporary, |out| writeln!(out, "{name}").map_err(Error::io("write", &temporary)))?;
        self.disk.rename(&temporary, &self.path.join(LATEST))?;
        self.disk.sync_folder(&self.path)
    }

    fn clear_leftovers(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.path).map_err(Error::io("list", &self.path))? {
            let entry = entry.map_err(Error::io("list", &self.path))?;
            let name = entry.file_name();
            let Some((name, suffix)) = name.to_str().and_then(|name| name.strip_prefix('.')?.rsplit_once('.')) else {
                continue;
            };
            if Kind::parse_directory(name).is_none() && name != LATEST {
                continue;
            }
            match suffix {
                "old" if !self.path.join(name).exists() => self.disk.rename(&entry.path(), &self.path.join(name))?,
                "old" | "tmp" | "deleted" => self.disk.remove(&entry.path())?,
                _ => {}
            }
        }
        Ok(())
    }

    fn hidden(&self, name: &str, suffix: &str) -> PathBuf {
        self.path.join(format!(".{name}.{suffix}"))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Closing the file is not enough if a child process is being started just now: it holds a copy for a moment.
        let _ = self.lock.unlock();
    }
}

/// Takes the folder's lock, which the operating system drops with the process, however that ends.
fn lock(run: &Path) -> Result<File> {
    let path = run.join(LOCK);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(Error::io("open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            let process = holder.split_whitespace().next().unwrap_or("?");
            let message = format!(
                "process {process} is working in this run; wait for it or stop it, or use another run's folder"
            );
            return Err(Error::checkpoint(run, message));
        }
        Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
    }
    Ok(file)
}

/// Leaves a note in the lock file: the process, for the message above, and the sequence, which says how new a run is that has
/// no checkpoint yet. The lock, not the note, keeps others out.
fn sign(file: &mut File, sequence: u64) -> std::io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{} {sequence}", std::process::id())
}

/// The sequence at which a run was last opened.
pub(super) fn opened_at(run: &Path) -> Option<u64> {
    std::fs::read_to_string(run.join(LOCK)).ok()?.split_whitespace().nth(1)?.parse().ok()
}
