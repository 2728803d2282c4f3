//! A run's folder, locked by one process at a time: saves and removes checkpoints.

use super::disk::Disk;
use super::find::{RetentionPolicy, expired, list, max_save_index};
use super::manifest::{CheckpointKind, MANIFEST, MAX_SAVE_INDEX, Manifest};
use super::save::Contents;
use crate::{Error, Result, temporary, untrusted};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const LOCK: &str = ".lock";
const LATEST: &str = "latest";
pub(super) const CONFIG: &str = "config.toml";
const EVENTS: &str = "events.jsonl";
/// How long to wait for a lock; the kernel releases a killed process's lock with a delay.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// A run's folder, locked by this process until the value is dropped or the process ends.
#[derive(Debug)]
pub struct Run {
    path: PathBuf,
    disk: Disk,
    /// The save index of the last save, or of the opening before the first save.
    save_index: u64,
    lock: File,
}

/// The result of a save.
#[derive(Debug)]
pub struct SaveResult {
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// The checkpoint's manifest.
    pub manifest: Manifest,
    /// An error after the checkpoint was complete: updating `latest`, or removing the one it replaces.
    pub warning: Option<Error>,
}

impl Run {
    /// Creates the folder if necessary, locks it, and removes unfinished files of a killed process. Fails with
    /// [`Error::Checkpoint`] naming the process that holds the folder; [`Error::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        Self::open_on(path, Disk::default())
    }

    /// [`Run::open`] on a disk that may fail.
    pub fn open_on(path: impl Into<PathBuf>, disk: Disk) -> Result<Self> {
        let path = path.into();
        disk.create_folders(&path)?;
        Self::acquire(path, disk)
    }

    /// Creates and opens the folder of a new run; `None` if the name is taken. If several processes create the same
    /// name at once, exactly one succeeds.
    pub fn create(path: impl Into<PathBuf>) -> Result<Option<Self>> {
        let path = path.into();
        let disk = Disk::default();
        disk.create_folders(path.parent().unwrap_or(Path::new(".")))?;
        match disk.create_folder(&path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => Ok(None),
            made => made.and_then(|()| Self::acquire(path, disk)).map(Some),
        }
    }

    /// Whether this folder already contains a run.
    pub fn exists(path: &Path) -> bool {
        let has_checkpoints = || list(path).is_ok_and(|listed| !listed.is_empty());
        path.join(CONFIG).exists() || path.join(EVENTS).exists() || has_checkpoints()
    }

    /// Whether a file is a run's own or in a checkpoint. Follows links.
    pub fn owns(file: &Path) -> bool {
        let Ok(file) = file.canonicalize() else { return false };
        let folder = file.parent().unwrap_or(&file);
        let is_named = [LOCK, LATEST, CONFIG, EVENTS].iter().any(|name| file.ends_with(name));
        is_named && Self::exists(folder) || folder.join(MANIFEST).exists()
    }

    fn acquire(path: PathBuf, disk: Disk) -> Result<Self> {
        let mut lock = lock(&path)?;
        let neighbors = path.canonicalize().ok().and_then(|path| path.parent().map(max_save_index));
        let save_index = neighbors.unwrap_or(0) + 1;
        // Ignore errors: opening a run must work on a full disk, so that it can be pruned.
        let _ = write_lock_info(&mut lock, save_index);
        let run = Self { path, disk, save_index, lock };
        run.clear_leftovers()?;
        Ok(run)
    }

    /// The run's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes how training ended in the lock file, whose block has room for it on a full disk, unlike the log.
    pub fn note_end(&self, end: impl std::fmt::Display) {
        // There is no other place for an error.
        let _ = writeln!(&self.lock, "{end}");
    }

    /// Writes the run's configuration atomically.
    pub fn write_config(&self, text: &str) -> Result<()> {
        self.replace(CONFIG, text)
    }

    /// Writes a checkpoint and points `latest` to it. Older checkpoints stay untouched until [`Run::apply_retention`],
    /// also on an error. Fails with [`Error::Io`] from the operating system, such as for a full disk;
    /// [`Error::Checkpoint`] if another process has taken over the folder.
    pub fn save(&mut self, contents: &Contents<'_>, kind: CheckpointKind) -> Result<SaveResult> {
        self.keep_lock()?;
        let name = kind.directory(contents.state.step);
        let temporary = self.hidden(&name, "tmp");
        // Files left by a save that failed on a full disk take the space for this one.
        self.clear_leftovers()?;
        // Incremented even if this save fails: no two checkpoints ever share a number.
        self.save_index += 1;
        let manifest = contents.write(&self.disk, &temporary, kind, self.save_index).inspect_err(|_| {
            // Report the original error; if this removal fails too, the next save retries it.
            let _ = self.disk.remove(&temporary);
        })?;
        let replaced = self.publish(&temporary, &name)?;
        let latest = if kind == CheckpointKind::Full { self.replace(LATEST, &format!("{name}\n")) } else { Ok(()) };
        let removed = replaced.map_or(Ok(()), |old| self.disk.remove(&old));
        Ok(SaveResult { path: self.path.join(name), manifest, warning: latest.and(removed).err() })
    }

    /// Removes the [`expired`](super::expired) checkpoints and returns their paths.
    pub fn apply_retention(&self, kind: CheckpointKind, keep: RetentionPolicy) -> Result<Vec<PathBuf>> {
        self.check_lock()?;
        let old = expired(&self.path, kind, keep)?;
        old.iter().try_for_each(|path| self.remove(path))?;
        Ok(old)
    }

    /// Removes one checkpoint of this run; for readers it disappears atomically.
    pub fn remove(&self, directory: &Path) -> Result<()> {
        self.check_lock()?;
        let name = directory.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let gone = self.hidden(name, "deleted");
        self.disk.rename(&self.path.join(name), &gone)?;
        self.disk.remove(&gone)
    }

    /// Checks that the lock file at the run's path is still the one this process holds, because another process may
    /// have removed and recreated the folder.
    fn check_lock(&self) -> Result<()> {
        let path = self.path.join(LOCK);
        let check = || Ok(untrusted::same_file(&self.lock.metadata()?, &std::fs::symlink_metadata(&path)?));
        if check().map_err(Error::io("find the run's lock", &path))? {
            return Ok(());
        }
        let message = "another process has recreated the folder, so this process no longer writes to it";
        Err(Error::checkpoint(&self.path, message))
    }

    /// Like [`Self::check_lock`], but locks again if only the lock file was removed.
    fn keep_lock(&mut self) -> Result<()> {
        match self.check_lock() {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound && self.path.is_dir() => {
                self.lock = lock(&self.path)?;
                Ok(())
            }
            checked => checked,
        }
    }

    /// Renames a complete directory to its final name. An existing one of the same step (after a resume from an older
    /// step) is renamed first, and restored by [`Run::clear_leftovers`] after a kill in between. Returns its path, for
    /// removal.
    fn publish(&self, temporary: &Path, name: &str) -> Result<Option<PathBuf>> {
        let path = self.path.join(name);
        let aside = self.hidden(name, "old");
        let replaces = path.exists();
        if replaces {
            self.disk.rename(&path, &aside)?;
        }
        self.disk.rename(temporary, &path)?;
        self.disk.sync_folder(&self.path)?;
        Ok(replaces.then_some(aside))
    }

    /// Replaces a small file of the folder atomically.
    pub(crate) fn replace(&self, name: &str, text: &str) -> Result<()> {
        let temporary = self.hidden(name, "tmp");
        self.disk.remove(&temporary)?;
        let write = |out: &mut dyn Write| out.write_all(text.as_bytes()).map_err(Error::io("write", &temporary));
        self.disk.write_file(&temporary, write)?;
        self.disk.rename(&temporary, &self.path.join(name))?;
        self.disk.sync_folder(&self.path)
    }

    /// Removes the leftovers of a killed process. Temporary files with `tempfile`'s own names come from a `TMPDIR` in
    /// the folder.
    fn clear_leftovers(&self) -> Result<()> {
        temporary::sweep(&self.path, temporary::is_default_name);
        for entry in std::fs::read_dir(&self.path).map_err(Error::io("list", &self.path))? {
            let entry = entry.map_err(Error::io("list", &self.path))?;
            let name = entry.file_name();
            let Some((name, suffix)) = name.to_str().and_then(|name| name.strip_prefix('.')?.rsplit_once('.')) else {
                continue;
            };
            if CheckpointKind::parse_directory(name).is_none() && name != LATEST && name != CONFIG {
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
        // Closing the file is not enough: a child process being started briefly holds a copy of it.
        let _ = self.lock.unlock();
    }
}

/// Locks the folder. The operating system releases the lock when the process ends in any way.
fn lock(run: &Path) -> Result<File> {
    let path = run.join(LOCK);
    let mut file =
        untrusted::open_run_file(&path, OpenOptions::new().read(true).write(true).create(true).truncate(false))
            .map_err(Error::io("open", &path))?;
    let began = Instant::now();
    let locked = loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if began.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Interrupted => {}
            done => break done,
        }
    };
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            let process = holder.split_whitespace().next().unwrap_or("?");
            let message = format!("process {process} is using this run; wait for it, stop it, or use another run");
            return Err(Error::checkpoint(run, message));
        }
        Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
    }
    Ok(file)
}

/// Whether a process uses the run in `folder`.
pub fn is_in_use(folder: &Path) -> bool {
    let lock = untrusted::open(&folder.join(LOCK));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Writes the process id (for the message above) and the save index (the age of a run without checkpoints) into the
/// lock file.
fn write_lock_info(file: &mut File, save_index: u64) -> std::io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{} {save_index}", std::process::id())
}

fn lock_info(run: &Path) -> Option<String> {
    untrusted::open(&run.join(LOCK)).and_then(|file| std::io::read_to_string(file.take(100))).ok()
}

/// The end of training that [`Run::note_end`] has noted since a run was last opened.
pub fn noted_end(run: &Path) -> Option<String> {
    lock_info(run)?.lines().nth(1).map(str::to_owned)
}

/// The save index at which a run was last opened.
pub(super) fn opened_at(run: &Path) -> Option<u64> {
    lock_info(run)?.split_whitespace().nth(1)?.parse().ok().filter(|save_index| *save_index <= MAX_SAVE_INDEX)
}
