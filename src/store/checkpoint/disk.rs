//! File-system operations of a save. They all go through [`Disk`], so that a test can make any of them fail or kill the
//! process before it.

use crate::digest::{Digest, DigestWriter};
use crate::{Error, Result};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use strum::IntoStaticStr;

/// A file-system operation that can fail. Its text is the verb of an error: "cannot … `path`".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum FsOp {
    /// Create a folder.
    #[strum(serialize = "create folder")]
    CreateFolder,
    /// Create a new, empty file.
    #[strum(serialize = "create")]
    CreateFile,
    /// Append bytes to a file; at most 64 KiB of tensor values at a time.
    Write,
    /// Sync a file to the medium.
    #[strum(serialize = "sync")]
    SyncFile,
    /// Sync a folder's entries to the medium.
    #[strum(serialize = "sync folder")]
    SyncFolder,
    /// Rename a file or folder.
    Rename,
    /// Remove a file, or a folder and its contents.
    Remove,
}

type DiskHook = Arc<dyn Fn(FsOp, &Path) -> io::Result<()> + Send + Sync>;

/// The real disk, with an optional hook that can make operations fail.
#[derive(Clone, Default)]
pub struct Disk {
    hook: Option<DiskHook>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("hooked", &self.hook.is_some()).finish()
    }
}

impl Disk {
    /// A disk that calls `hook` before every operation. An error from the hook is treated like one from the operating
    /// system.
    pub fn with_hook(hook: impl Fn(FsOp, &Path) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { hook: Some(Arc::new(hook)) }
    }

    /// Creates `path` and its missing parents.
    pub(super) fn create_folders(&self, path: &Path) -> Result<()> {
        self.perform(FsOp::CreateFolder, path, || fs::create_dir_all(path))
    }

    /// Creates `path`, whose parent must exist.
    pub(super) fn create_folder(&self, path: &Path) -> Result<()> {
        self.perform(FsOp::CreateFolder, path, || fs::create_dir(path))
    }

    /// Creates a file, writes it with `fill`, syncs it, and returns its digest.
    pub(super) fn write_file(&self, path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<Digest> {
        let create = || OpenOptions::new().write(true).create_new(true).open(path);
        let file = self.perform(FsOp::CreateFile, path, create)?;
        let mut out = DigestWriter::new(HookedFile { disk: self, path, file });
        fill(&mut out)?;
        let (HookedFile { file, .. }, digest) = out.finish();
        self.perform(FsOp::SyncFile, path, || file.sync_all())?;
        Ok(digest)
    }

    /// Syncs a folder's entries to the medium.
    pub(super) fn sync_folder(&self, path: &Path) -> Result<()> {
        self.perform(FsOp::SyncFolder, path, || File::open(path)?.sync_all())
    }

    /// Renames within one file system; `to` must not be a non-empty folder.
    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.perform(FsOp::Rename, from, || fs::rename(from, to))
    }

    /// Removes a file or a whole folder; a missing one is not an error.
    pub(super) fn remove(&self, path: &Path) -> Result<()> {
        let remove = || match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(error) => Err(error),
        };
        self.perform(FsOp::Remove, path, || match remove() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        })
    }

    /// Runs an operation, and retries it after EINTR, which network file systems return from any of them.
    fn perform<T>(&self, operation: FsOp, path: &Path, run: impl Fn() -> io::Result<T>) -> Result<T> {
        loop {
            match self.call_hook(operation, path).and_then(|()| run()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map_err(Error::io(operation.into(), path)),
            }
        }
    }

    fn call_hook(&self, operation: FsOp, path: &Path) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(operation, path))
    }
}

struct HookedFile<'a> {
    disk: &'a Disk,
    path: &'a Path,
    file: File,
}

impl Write for HookedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.disk.call_hook(FsOp::Write, self.path)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
