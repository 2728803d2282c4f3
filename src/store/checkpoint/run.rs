//! A run's folder, owned by one process at a time: saving into it and thinning it out.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::disk::Disk;
use super::find::{Keep, list, newest_sequence, outdated};
use super::manifest::{Kind, MAX_SEQUENCE, Manifest};
use super::save::Contents;
use crate::{Error, Result, untrusted};

const LOCK: &str = ".lock";
const LATEST: &str = "latest";
const CONFIG: &str = "config.toml";
const EVENTS: &str = "events.jsonl";
/// How long to wait for a lock: a killed process holds its lock until the kernel has torn it down.
const PATIENCE: Duration = Duration::from_secs(1);

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
#[derive(Debug)]
pub struct Saved {
    /// Its directory.
    pub path: PathBuf,
    /// What it holds.
    pub manifest: Manifest,
    /// What failed once it was complete: `latest`, or the removal of the one that it replaces.
    pub trouble: Option<Error>,
}

impl Run {
    /// Creates the folder if need be, locks it, and removes what a killed process left unfinished.
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
        Self::take(path, disk)
    }

    /// Creates and opens the folder of a new run; `None` if the name is taken. Of several processes that ask for one name at
    /// once, exactly one gets it.
    ///
    /// # Errors
    /// As [`Run::open`].
    pub fn create(path: impl Into<PathBuf>) -> Result<Option<Self>> {
        let (path, disk) = (path.into(), Disk::default());
        disk.create_folders(path.parent().unwrap_or(Path::new(".")))?;
        match disk.create_folder(&path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => Ok(None),
            made => made.and_then(|()| Self::take(path, disk)).map(Some),
        }
    }

    /// Whether this folder holds a run already, with which a new one would mix.
    pub fn is_begun(path: &Path) -> bool {
        let has_checkpoints = || list(path).is_ok_and(|listed| !listed.is_empty());
        path.join(CONFIG).exists() || path.join(EVENTS).exists() || has_checkpoints()
    }

    fn take(path: PathBuf, disk: Disk) -> Result<Self> {
        let mut lock = lock(&path)?;
        let neighbours = path.canonicalize().ok().and_then(|path| path.parent().map(newest_sequence));
        let sequence = neighbours.unwrap_or(0) + 1;
        // Not worth failing for: on a full disk, opening the run is what allows pruning it.
        let _ = sign(&mut lock, sequence);
        let run = Self { path, disk, sequence, lock };
        run.clear_leftovers()?;
        Ok(run)
    }

    /// The run's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the run's configuration atomically.
    ///
    /// # Errors
    /// [`Error::Io`] with what the operating system refused.
    pub fn write_config(&self, text: &str) -> Result<()> {
        self.replace(CONFIG, text)
    }

    /// Writes a checkpoint and points `latest` to it. Only when this returns is anything older given up by
    /// [`Run::rotate`]; on an error everything older is as it was.
    ///
    /// # Errors
    /// [`Error::Io`] with what the operating system refused, such as a full disk; [`Error::Checkpoint`] if the folder is
    /// another process's by now.
    pub fn save(&mut self, contents: &Contents<'_>, kind: Kind) -> Result<Saved> {
        self.keep_lock()?;
        let name = kind.directory(contents.state.step);
        let temporary = self.hidden(&name, "tmp");
        // Files left by a save that failed on a full disk take up the room for this one.
        self.clear_leftovers()?;
        // Incremented even if this save fails: no two checkpoints ever share a number.
        self.sequence += 1;
        let manifest = contents.write(&self.disk, &temporary, kind, self.sequence).inspect_err(|_| {
            // The error is what matters; if this fails too, the next save tries again.
            let _ = self.disk.remove(&temporary);
        })?;
        let replaced = self.publish(&temporary, &name)?;
        let latest = if kind == Kind::Full { self.replace(LATEST, &format!("{name}\n")) } else { Ok(()) };
        let removed = replaced.map_or(Ok(()), |old| self.disk.remove(&old));
        Ok(Saved { path: self.path.join(name), manifest, trouble: latest.and(removed).err() })
    }

    /// Removes the checkpoints that are [`outdated`](super::outdated), and says which.
    pub fn rotate(&self, kind: Kind, keep: Keep) -> Result<Vec<PathBuf>> {
        self.check_lock()?;
        let old = outdated(&self.path, kind, keep)?;
        old.iter().try_for_each(|path| self.remove(path))?;
        Ok(old)
    }

    /// Removes one checkpoint of this run; to readers it disappears at once.
    pub fn remove(&self, directory: &Path) -> Result<()> {
        self.check_lock()?;
        let name = directory.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let gone = self.hidden(name, "deleted");
        self.disk.rename(&self.path.join(name), &gone)?;
        self.disk.remove(&gone)
    }

    /// Checks that the lock file at the run's path is the one this process holds: the folder may have been removed and made
    /// anew by another process.
    fn check_lock(&self) -> Result<()> {
        let path = self.path.join(LOCK);
        let check = || Ok(untrusted::same_file(&self.lock.metadata()?, &std::fs::symlink_metadata(&path)?));
        if check().map_err(Error::io("find the run's lock", &path))? {
            return Ok(());
        }
        let message = "the folder was removed and belongs to another process by now, so that nothing is written there";
        Err(Error::checkpoint(&self.path, message))
    }

    /// [`Self::check_lock`], but takes the lock again where only its file was removed.
    fn keep_lock(&mut self) -> Result<()> {
        match self.check_lock() {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound && self.path.is_dir() => {
                self.lock = lock(&self.path)?;
                Ok(())
            }
            checked => checked,
        }
    }

    /// Gives a complete directory its name. One that is there already (a run that went back to an older step comes past
    /// it again) steps aside first, and back in [`Run::clear_leftovers`] if a kill falls in between. Returns where the old one
    /// is, to be removed.
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

    /// Replaces a small file atomically.
    fn replace(&self, name: &str, text: &str) -> Result<()> {
        let temporary = self.hidden(name, "tmp");
        self.disk.remove(&temporary)?;
        let write = |out: &mut dyn Write| out.write_all(text.as_bytes()).map_err(Error::io("write", &temporary));
        self.disk.write_file(&temporary, write)?;
        self.disk.rename(&temporary, &self.path.join(name))?;
        self.disk.sync_folder(&self.path)
    }

    fn clear_leftovers(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.path).map_err(Error::io("list", &self.path))? {
            let entry = entry.map_err(Error::io("list", &self.path))?;
            let name = entry.file_name();
            let Some((name, suffix)) = name.to_str().and_then(|name| name.strip_prefix('.')?.rsplit_once('.')) else {
                continue;
            };
            if Kind::parse_directory(name).is_none() && name != LATEST && name != CONFIG {
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
    let mut file = untrusted::open_own(&path, OpenOptions::new().read(true).write(true).create(true).truncate(false))
        .map_err(Error::io("open", &path))?;
    let began = Instant::now();
    let locked = loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if began.elapsed() < PATIENCE => {
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
    let note = untrusted::open(&run.join(LOCK)).and_then(|file| std::io::read_to_string(file.take(100))).ok()?;
    note.split_whitespace().nth(1)?.parse().ok().filter(|sequence| *sequence <= MAX_SEQUENCE)
}
