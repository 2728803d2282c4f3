//! Temporary files and folders, and the removal of those that killed processes have left.

use crate::{Error, Result, untrusted};
use std::fs::File;
use std::io::ErrorKind::PermissionDenied;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::{Builder, NamedTempFile, TempDir};

/// A process locks its new file within less than this. The age also protects files on a file system without locks.
const YOUNG: Duration = Duration::from_mins(1);

/// Creates and locks a file in `folder`, named `prefix` and random characters, after removing abandoned ones of that
/// prefix.
pub(crate) fn file(folder: &Path, prefix: &str) -> Result<NamedTempFile> {
    sweep(folder, |name| name.starts_with(prefix));
    let file = NamedTempFile::with_prefix_in(prefix, folder).map_err(|error| without_path(&error));
    let file = file.map_err(Error::io("create a file in", folder))?;
    let _ = file.as_file().try_lock();
    Ok(file)
}

/// An error of the operating system without the random path that `tempfile` adds.
fn without_path(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string().split(" at path ").next().unwrap_or_default())
}

/// Like [`file`], but a folder. The second value holds its lock.
pub(crate) fn folder(parent: &Path, prefix: &str) -> Result<(TempDir, Option<File>)> {
    locked_folder(parent, prefix).map_err(Error::io("create a folder in", parent))
}

fn locked_folder(parent: &Path, prefix: &str) -> io::Result<(TempDir, Option<File>)> {
    sweep(parent, |name| name.starts_with(prefix));
    let made = Builder::new().prefix(prefix).tempdir_in(parent).map_err(|error| without_path(&error))?;
    let lock = File::open(made.path()).ok();
    let _ = lock.as_ref().map(File::try_lock);
    Ok((made, lock))
}

/// Like [`folder`], next to `target`, for writing it before [`publish`].
pub(crate) fn staging_folder(target: &Path, prefix: &str) -> Result<(TempDir, Option<File>)> {
    locked_folder(parent(target), prefix).map_err(Error::io("write", target))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Moves the files in `folder` to their destinations, in this order, so that visible files are complete.
pub(crate) fn publish(folder: &TempDir, files: &[PathBuf]) -> Result<()> {
    for file in files {
        let written = folder.path().join(file.file_name().unwrap_or_default());
        std::fs::rename(&written, file).map_err(Error::io("create", file))?;
    }
    Ok(())
}

/// A file that appears, or replaces an older one of the same mode, when it is complete. Pipes, devices, and files in
/// folders that take no new ones are written directly.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    out: BufWriter<File>,
    /// The folder that holds it until it is complete, and the folder's lock.
    staging: Option<(TempDir, Option<File>)>,
}

impl OutputFile {
    /// Creates the file; follows links.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let linked = path.is_symlink().then(|| path.canonicalize().ok()).flatten();
        let path = linked.unwrap_or_else(|| path.to_path_buf());
        let earlier = path.metadata().ok();
        parent(&path).metadata().map_err(Error::io("write", &path))?;
        let is_special = earlier.as_ref().is_some_and(|metadata| !metadata.is_file());
        let staging = (!is_special).then(|| staging_folder(&path, ".output-"));
        let staging = match staging.transpose() {
            // The file may be writable although its folder is not.
            Err(Error::Io { source, .. }) if earlier.is_some() && source.kind() == PermissionDenied => None,
            staging => staging?,
        };
        let name = path.file_name().unwrap_or_default();
        let written = staging.as_ref().map_or_else(|| path.clone(), |(folder, _)| folder.path().join(name));
        let out = File::create(written).map_err(Error::io("write", &path))?;
        if let (Some(earlier), Some(_)) = (earlier, &staging) {
            out.set_permissions(earlier.permissions()).map_err(Error::io("write", &path))?;
        }
        Ok(Self { path, out: BufWriter::new(out), staging })
    }

    /// Writes the whole file.
    pub(crate) fn write(mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(Error::io("write", &self.path))?;
        self.finish()
    }

    /// Writes the whole file with `fill`.
    pub(crate) fn write_with(mut self, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        fill(&mut self.out)?;
        self.finish()
    }

    fn finish(mut self) -> Result<()> {
        self.out.flush().map_err(Error::io("write", &self.path))?;
        self.staging.map_or(Ok(()), |(folder, _)| publish(&folder, &[self.path]))
    }
}

/// Whether the crate `tempfile` gives this name to a file without a prefix.
pub(crate) fn is_default_name(name: &str) -> bool {
    name.strip_prefix(".tmp")
        .is_some_and(|rest| rest.len() == 6 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

/// Removes the old entries of `folder` whose names are `ours` and that no process has locked. Ignores errors.
pub(crate) fn sweep(folder: &Path, ours: impl Fn(&str) -> bool) {
    sweep_older_than(folder, YOUNG, ours);
}

/// Like [`sweep`], for entries that have not changed for `young`.
pub(crate) fn sweep_older_than(folder: &Path, young: Duration, ours: impl Fn(&str) -> bool) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(metadata) = entry.metadata() else { continue };
        let old = metadata.modified().is_ok_and(|time| time.elapsed().is_ok_and(|age| age >= young));
        if !old || !entry.file_name().to_str().is_some_and(&ours) {
            continue;
        }
        let opened = if metadata.is_dir() { File::open(&path) } else { untrusted::open(&path) };
        if opened.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = if metadata.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn what_a_killed_process_has_left_is_removed_and_a_living_ones_is_not() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path();
        let kept = file(path, ".a-").unwrap();
        let (kept_folder, _lock) = folder(path, ".a-").unwrap();
        std::fs::write(path.join(".a-left"), "half").unwrap();
        std::fs::create_dir_all(path.join(".a-left-folder/more")).unwrap();
        std::fs::write(path.join("other.a-"), "stays").unwrap();
        let names = || std::fs::read_dir(path).unwrap().count();
        let ours = |name: &str| name.starts_with(".a-");
        sweep(path, ours);
        assert_eq!(names(), 5, "all are too young to be called left");
        sweep_older_than(path, Duration::ZERO, ours);
        assert!(kept.path().exists() && kept_folder.path().exists() && path.join("other.a-").exists());
        assert_eq!(names(), 3);
    }

    #[test]
    fn an_output_file_is_replaced_when_it_is_complete() {
        let root = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| root.path().join(name));
        std::fs::write(&file, "earlier").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let full =
            |out: &mut dyn Write| out.write_all(b"half").map_err(Error::stdout).and(Err(Error::data("", "full")));
        OutputFile::create(&link).unwrap().write_with(full).unwrap_err();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "earlier");
        OutputFile::create(&link).unwrap().write(b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new");
        assert!(link.is_symlink() && file.metadata().unwrap().mode() & 0o777 == 0o640);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 2);
        OutputFile::create(Path::new("/dev/null")).unwrap().write(b"new").unwrap();
        OutputFile::create(Path::new("/dev/full")).unwrap().write(b"new").unwrap_err();
    }

    #[test]
    fn an_error_names_no_temporary_file() {
        let missing = Path::new("/nowhere");
        let text = |error: Error| error.to_string();
        let expected = |action: &str| format!("cannot {action}: No such file or directory (os error 2)");
        assert_eq!(text(file(missing, ".a-").unwrap_err()), expected("create a file in `/nowhere`"));
        assert_eq!(text(folder(missing, ".a-").unwrap_err()), expected("create a folder in `/nowhere`"));
        assert_eq!(text(staging_folder(&missing.join("a"), ".a-").unwrap_err()), expected("write `/nowhere/a`"));
    }

    #[test]
    fn the_default_name_of_a_temporary_file_is_recognized() {
        let made = NamedTempFile::new().unwrap();
        assert!(is_default_name(made.path().file_name().unwrap().to_str().unwrap()));
        for name in [".tmp", ".tmp12345", ".tmp1234567", ".tmp12-456", "tmp123456", ".tmp123456.txt"] {
            assert!(!is_default_name(name), "{name}");
        }
    }
}
