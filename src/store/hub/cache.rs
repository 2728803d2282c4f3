//! The cache, in the layout of Python's `huggingface_hub`:
//!
//! ```text
//! models--owner--name/refs/main                      the commit of a branch
//! models--owner--name/blobs/<etag>                   a file's contents, named by their hash
//! models--owner--name/blobs/<etag>.incomplete        a partial download
//! .locks/models--owner--name/<etag>.lock             locked during a download
//! models--owner--name/snapshots/<commit>/config.json a link to the blob
//! ```
//!
//! The etag of a large file is its SHA-256, that of a small one its git SHA-1, so a blob's name verifies its contents.
//! Since version 2, Python stores large files in `blobs/<2 digits>/<another hash>` of the whole cache, and a
//! repository's blob is a link to one. A snapshot may also have plain files, as copies and file systems without links
//! have: only the Hub can verify them.

use super::client::Metadata;
use super::error::HubError;
use super::{CachedFile, Repo};
use crate::digest::{Digest, hex, read_at_most};
use crate::temporary;
use sha1::{Digest as _, Sha1};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The extension of an unfinished download.
const INCOMPLETE: &str = ".incomplete";

/// Unfinished downloads that have been idle for this long are deleted.
const MAX_IDLE: Duration = Duration::from_hours(24);

/// One repository's part of the cache.
pub(super) struct RepoCache {
    repo: hf_hub::CacheRepo,
    root: PathBuf,
    /// The blobs that all repositories share.
    shared: PathBuf,
    locks: PathBuf,
}

/// A file being downloaded, locked against other processes.
pub(super) struct Partial {
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// Bytes from an earlier, interrupted attempt.
    pub(super) len: u64,
    /// The lock, released when the file is closed.
    _lock: Option<File>,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, repo: &Repo) -> Self {
        let repo = repo.as_hub_repo(&repo.cached_as);
        let root = cache.join(repo.folder_name());
        let shared = cache.join("blobs");
        let locks = cache.join(".locks").join(repo.folder_name());
        Self { repo: hf_hub::Cache::new(cache.to_owned()).repo(repo), root, shared, locks }
    }

    /// Whether the cache has a folder for the repository.
    pub(super) fn exists(&self) -> bool {
        self.root.is_dir()
    }

    /// The last known commit of a revision; a commit is its own.
    pub(super) fn commit(&self, revision: &str) -> Result<String, String> {
        if is_hex(revision, 40) {
            return Ok(revision.to_owned());
        }
        if !self.exists() {
            return Err(format!("the cache has no `{}`", self.root.display()));
        }
        let path = self.root.join("refs").join(revision);
        let commit = read_at_most(&path, 1024).map_err(|error| error.to_string())?;
        Some(String::from_utf8_lossy(&commit).trim().to_owned())
            .filter(|commit| is_hex(commit, 40))
            .ok_or_else(|| format!("`{}` contains no commit", path.display()))
    }

    /// A file of a snapshot. Ignores links to anything except this repository's blobs and those that all share.
    pub(super) fn find(&self, revision: &str, file: &str) -> Result<CachedFile, String> {
        let commit = self.commit(revision)?;
        let path = self.repo.pointer_path(&commit).join(file);
        let shown = path.display();
        let real = match (path.symlink_metadata(), path.canonicalize()) {
            (Err(_), _) => return Err(format!("`{shown}` is missing")),
            (Ok(_), Err(_)) => return Err(format!("`{shown}` is a link to a missing file")),
            (Ok(_), Ok(real)) => real,
        };
        let is_in = |path: &Path, folder: &Path| folder.canonicalize().is_ok_and(|folder| path.starts_with(folder));
        let blob = if is_in(&real, &self.shared) {
            // The link to the shared blob has the name.
            path.read_link().ok().and_then(|link| {
                let blob = path.parent()?.join(link);
                Some(blob.parent()?.canonicalize().ok()?.join(blob.file_name()?))
            })
        } else {
            Some(real.clone())
        };
        let blob = blob.filter(|blob| real.is_file() && is_in(blob, &self.root));
        let blob = blob.ok_or_else(|| format!("`{shown}` is not a file of this cache"))?;
        let etag = if is_in(&blob, &self.blobs()) {
            let name =
                blob.file_name().and_then(|name| name.to_str()).filter(|name| is_hex(name, 40) || is_hex(name, 64));
            Some(name.ok_or_else(|| format!("`{shown}` is a link to a file whose name is not a hash"))?.to_owned())
        } else {
            None
        };
        Ok(CachedFile { path, commit, etag })
    }

    /// Removes a damaged file and its link.
    pub(super) fn forget(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        for path in [self.repo.blob_path(etag), self.repo.pointer_path(commit).join(file)] {
            std::fs::remove_file(&path).map_err(HubError::disk("delete", &path))?;
        }
        Ok(())
    }

    /// Whether the blob exists and is undamaged, as for a file that did not change between two commits.
    pub(super) fn has_blob(&self, metadata: &Metadata) -> Result<bool, HubError> {
        let path = self.repo.blob_path(&metadata.etag);
        Ok(path.metadata().is_ok_and(|m| m.is_file() && m.len() == metadata.size)
            && content_matches(&path, &metadata.etag)?)
    }

    /// The number of bytes left to download, judging by the sizes of the blob and the partial download.
    pub(super) fn missing(&self, metadata: &Metadata) -> u64 {
        let blob = self.repo.blob_path(&metadata.etag);
        let partial = blob.with_extension(&INCOMPLETE[1..]);
        let len = |path: PathBuf| path.metadata().map_or(0, |m| m.len());
        metadata.size.saturating_sub(len(blob).max(len(partial)))
    }

    /// Opens the partial download. If another process is downloading the file, calls `notice` and waits; `None` if that
    /// completed it.
    pub(super) fn partial(
        &self,
        metadata: &Metadata,
        notice: impl FnOnce(String),
    ) -> Result<Option<Partial>, HubError> {
        let folder = self.blobs();
        std::fs::create_dir_all(&folder).map_err(HubError::disk("create", &folder))?;
        std::fs::create_dir_all(&self.locks).map_err(HubError::disk("create", &self.locks))?;
        let lock = self.locks.join(format!("{}.lock", metadata.etag));
        let lock = open_file(&lock).map_err(HubError::disk("open", &lock))?;
        let path = self.repo.blob_path(&metadata.etag).with_extension(&INCOMPLETE[1..]);
        let mut notice = Some(notice);
        // Continue without a lock on a file system that has none.
        while let Err(std::fs::TryLockError::WouldBlock) = lock.try_lock() {
            if let Some(notice) = notice.take() {
                notice(format!("waiting for another process that is downloading `{}`", path.display()));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        if self.has_blob(metadata)? {
            return Ok(None);
        }
        let file = open_file(&path).map_err(HubError::disk("open", &path))?;
        let len = file.metadata().map_err(HubError::disk("read", &path))?.len();
        // One that is too long begins again.
        let len = if len > metadata.size { 0 } else { len };
        Ok(Some(Partial { file, path, len, _lock: Some(lock) }))
    }

    /// Renames a verified download to its blob.
    pub(super) fn keep(&self, partial: &Partial, metadata: &Metadata) -> Result<(), HubError> {
        let path = self.repo.blob_path(&metadata.etag);
        partial.file.sync_all().map_err(HubError::disk("write", &partial.path))?;
        std::fs::rename(&partial.path, &path).map_err(HubError::disk("create", &path))
    }

    /// Deletes unfinished downloads older than [`MAX_IDLE`].
    pub(super) fn sweep(&self) {
        temporary::sweep_older_than(&self.blobs(), MAX_IDLE, |name| name.ends_with(INCOMPLETE));
    }

    /// Links a blob into its snapshot and updates the revision; returns the path in the snapshot.
    pub(super) fn link(&self, metadata: &Metadata, revision: &str, file: &str) -> Result<PathBuf, HubError> {
        let path = self.repo.pointer_path(&metadata.commit).join(file);
        let folder = path.parent().unwrap_or(&self.root);
        std::fs::create_dir_all(folder).map_err(HubError::disk("create", folder))?;
        // Use a relative link, so that the cache can be moved.
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", metadata.etag));
        if symlink(&target, &path).is_err() {
            replace(&path, |temporary| symlink(&target, temporary))?;
        }
        self.set_revision(revision, &metadata.commit)?;
        Ok(path)
    }

    /// Records the commit of a branch or tag.
    pub(super) fn set_revision(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_hex(revision, 40) {
            return Ok(());
        }
        replace(&self.root.join("refs").join(revision), |temporary| std::fs::write(temporary, commit))
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.repo.pointer_path(commit)
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }
}

/// Opens or creates a file for reading and writing, with the umask's mode. Follows no links and opens no devices, which
/// may be attacks in a shared cache.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}

/// Creates `path` atomically: creates a temporary sibling and renames it.
fn replace(path: &Path, make: impl FnMut(&Path) -> io::Result<()>) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(HubError::disk("create", folder))?;
    let temporary = tempfile::Builder::new().make_in(folder, make).map_err(HubError::disk("write to", folder))?;
    temporary.into_temp_path().persist(path).map_err(|error| HubError::disk("create", path)(error.error))
}

pub(super) fn content_matches(path: &Path, etag: &str) -> Result<bool, HubError> {
    if etag.len() == 64 {
        return Ok(Digest::of_file(path)?.sha256 == etag);
    }
    git_sha1(path).map(|sha1| sha1 == etag).map_err(HubError::disk("read", path))
}

fn git_sha1(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha1::new_with_prefix(format!("blob {}\0", file.metadata()?.len()));
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hash.update(&buffer[..read]),
        }
    }
    Ok(hex(&hash.finalize()))
}

/// Whether `text` is `digits` lower-case hexadecimal digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::hub::RepoType;

    #[test]
    fn a_partial_download_is_not_missing() {
        let folder = tempfile::tempdir().unwrap();
        let repo = Repo::new(RepoType::Model, "owner/name", "main").unwrap();
        let cache = RepoCache::new(folder.path(), &repo);
        let metadata = Metadata { commit: String::new(), etag: "0".repeat(40), size: 10 };
        let partial = cache.partial(&metadata, |_| ()).unwrap().unwrap();
        assert_eq!(cache.missing(&metadata), 10);
        partial.file.set_len(4).unwrap();
        assert_eq!(cache.missing(&metadata), 6);
    }

    #[test]
    fn the_hash_of_a_small_file_is_that_of_git() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hello\n").unwrap();
        // `git hash-object` of the same file.
        assert!(content_matches(file.path(), "ce013625030ba8dba906f756967f9e9ca394464a").unwrap());
        assert!(!content_matches(file.path(), "ce013625030ba8dba906f756967f9e9ca394464b").unwrap());
    }

    #[test]
    fn the_hash_of_a_large_file_is_its_sha256() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let etag = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert!(content_matches(file.path(), etag).unwrap());
        std::fs::write(file.path(), "x").unwrap();
        assert!(!content_matches(file.path(), etag).unwrap());
    }
}
