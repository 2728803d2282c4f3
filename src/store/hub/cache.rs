//! The cache's layout, which is that of Python's `huggingface_hub`:
//!
//! ```text
//! models--owner--name/refs/main                      the commit a branch stood at
//! models--owner--name/blobs/<etag>                   a file's content under its hash
//! models--owner--name/snapshots/<commit>/config.json a link to the blob
//! ```
//!
//! The etag of a large file is its SHA-256, of a small one the SHA-1 that git gives it: a blob's name says what its
//! content must be.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha1::{Digest as _, Sha1};
use tempfile::NamedTempFile;

use super::client::{Failure, Metadata};
use super::{Kind, Repo};
use crate::digest::Digest;

/// One repository's part of the cache.
pub(super) struct RepoCache {
    root: PathBuf,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, repo: &Repo) -> Self {
        let kind = match repo.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        };
        Self { root: cache.join(format!("{kind}--{}", repo.id.replace('/', "--"))) }
    }

    /// The commit a revision stood at when it was last asked for; a commit is its own.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_hex(revision, 40) {
            return Some(revision.to_owned());
        }
        let commit = std::fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_hex(commit, 40))
    }

    /// A file of a snapshot, and the etag it was stored under.
    pub(super) fn find(&self, commit: &str, file: &str) -> Option<(PathBuf, String)> {
        let path = self.snapshot(commit).join(file);
        let blob = path.canonicalize().ok()?;
        let etag = blob.file_name()?.to_str()?.to_owned();
        (is_hex(&etag, 40) || is_hex(&etag, 64)).then_some((path, etag))
    }

    /// Removes a damaged file and its link.
    pub(super) fn forget(&self, commit: &str, file: &str) -> Result<(), Failure> {
        let path = self.snapshot(commit).join(file);
        let blob = path.canonicalize().map_err(Failure::disk("find", &path))?;
        std::fs::remove_file(&blob).map_err(Failure::disk("delete", &blob))?;
        std::fs::remove_file(&path).map_err(Failure::disk("delete", &path))
    }

    /// Whether the content is already here and whole, as of a file that did not change between two commits.
    pub(super) fn has_blob(&self, metadata: &Metadata) -> Result<bool, Failure> {
        let path = self.blob(metadata);
        Ok(path.metadata().is_ok_and(|m| m.len() == metadata.size) && content_matches(&path, &metadata.etag)?)
    }

    /// A file beside the blobs to download into; it goes when it is dropped.
    pub(super) fn create_blob(&self) -> Result<NamedTempFile, Failure> {
        let folder = self.root.join("blobs");
        std::fs::create_dir_all(&folder).map_err(Failure::disk("create", &folder))?;
        tempfile::Builder::new().suffix(".incomplete").tempfile_in(&folder).map_err(Failure::disk("write to", &folder))
    }

    /// Gives a downloaded and verified file its name.
    pub(super) fn keep_blob(&self, partial: NamedTempFile, metadata: &Metadata) -> Result<(), Failure> {
        let path = self.blob(metadata);
        partial.as_file().sync_all().map_err(Failure::disk("write", &path))?;
        partial.persist(&path).map(drop).map_err(|error| Failure::disk("create", &path)(error.error))
    }

    /// Enters a blob into its snapshot and moves the revision there; the path in the snapshot.
    pub(super) fn link(&self, metadata: &Metadata, revision: &str, file: &str) -> Result<PathBuf, Failure> {
        let path = self.snapshot(&metadata.commit).join(file);
        let folder = path.parent().unwrap_or(&self.root);
        std::fs::create_dir_all(folder).map_err(Failure::disk("create", folder))?;
        // Relative, so that the cache can be moved: up to the repository, then down to the blob.
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", metadata.etag));
        replace(&path, |temporary| link_or_copy(&target, &self.blob(metadata), temporary))?;
        if !is_hex(revision, 40) {
            let reference = self.root.join("refs").join(revision);
            replace(&reference, |temporary| std::fs::write(temporary, &metadata.commit))?;
        }
        Ok(path)
    }

    fn blob(&self, metadata: &Metadata) -> PathBuf {
        self.root.join("blobs").join(&metadata.etag)
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }
}

/// Makes `path` by making a temporary sibling and renaming it.
fn replace(path: &Path, make: impl FnMut(&Path) -> io::Result<()>) -> Result<(), Failure> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Failure::disk("create", folder))?;
    let temporary = tempfile::Builder::new().make_in(folder, make).map_err(Failure::disk("write to", folder))?;
    temporary.into_temp_path().persist(path).map_err(|error| Failure::disk("create", path)(error.error))
}

#[cfg(unix)]
fn link_or_copy(target: &Path, _blob: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

#[cfg(not(unix))]
fn link_or_copy(_target: &Path, blob: &Path, path: &Path) -> io::Result<()> {
    std::fs::copy(blob, path).map(drop)
}

/// Whether a file's content is what its etag says.
pub(super) fn content_matches(path: &Path, etag: &str) -> Result<bool, Failure> {
    if etag.len() == 64 {
        let digest = Digest::of_file(path).map_err(|error| Failure::Refused(error.to_string()))?;
        return Ok(digest.sha256 == etag);
    }
    git_sha1(path).map(|sha1| sha1 == etag).map_err(Failure::disk("read", path))
}

/// The hash by which git knows a file's content.
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
    Ok(hash.finalize().iter().fold(String::with_capacity(40), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}

/// Whether `text` is `digits` lower-case hexadecimal digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_small_file_is_gits() {
        let file = NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hello\n").unwrap();
        // `git hash-object` of the same file.
        assert!(content_matches(file.path(), "ce013625030ba8dba906f756967f9e9ca394464a").unwrap());
        assert!(!content_matches(file.path(), "ce013625030ba8dba906f756967f9e9ca394464b").unwrap());
    }

    #[test]
    fn the_hash_of_a_large_file_is_its_sha256() {
        let file = NamedTempFile::new().unwrap();
        let etag = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert!(content_matches(file.path(), etag).unwrap());
        std::fs::write(file.path(), "x").unwrap();
        assert!(!content_matches(file.path(), etag).unwrap());
    }
}
