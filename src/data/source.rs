//! The sources that `--data` and `--val` may name, and their files.

use super::chats;
use super::format::{ARROW, DataFormat, conversion};
use crate::untrusted::{Pipe, is_pipe};
use crate::{Error, Result, temporary, untrusted};
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use strum::{Display, EnumString, VariantNames};
use tempfile::NamedTempFile;

/// The advice at the end of errors about a source.
const SUPPORTED_SOURCES: &str = "give `grammar`, `tiny_shakespeare`, `chats`, `preferences`, `sums`, a `.txt`, `.md`, `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` \
                     file, a folder or glob of those, `hf://owner/name`, `hf://datasets/owner/name/path`, or `-` for standard input";

/// The built-in conversations do not depend on the run's seed.
const CHATS_SEED: u64 = 0;

/// Limit on the bytes read from a pipe, which are copied to disk first.
const MAX_SPOOL: u64 = 64 << 30;
/// Name prefix of that copy, in the system's folder of temporary files.
const SPOOL_PREFIX: &str = ".finetune-text-";

/// Karpathy's sample of Shakespeare's plays (public domain), 1,115,394 bytes, compressed with `zstd --ultra -22`.
const TINY_SHAKESPEARE: &[u8] = include_bytes!("tiny_shakespeare.txt.zst");

/// The value of `--data` or `--val`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataSource {
    /// `grammar`: the built-in corpus of known entropy.
    Grammar,
    /// `tiny_shakespeare`: a megabyte of Shakespeare's plays, part of the program.
    TinyShakespeare,
    /// Rows that the program makes; with `-held-out` after their name those for validation.
    BuiltIn {
        /// Their name.
        rows: BuiltInRows,
        /// Whether to use the held-out ones.
        held_out: bool,
    },
    /// `-`: text from standard input.
    Stdin,
    /// `hf://[datasets/]owner/name[@revision]`: a data set on the Hub, or with `/path` a file or a folder of it.
    Hub {
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit; `main` if none is given.
        revision: String,
        /// Path inside the repository, of a file or a folder; `None` for all data files.
        path: Option<String>,
    },
    /// Files that match a pattern with `*`, `?` or `[…]`, in alphabetical order.
    Glob(String),
    /// A file, or a folder whose files of known formats are read in alphabetical order.
    Path(PathBuf),
}

/// The name of built-in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum BuiltInRows {
    /// `chats`: conversations whose answers can be checked.
    Chats,
    /// `preferences`: the same questions, each with two answers, the first in the preferred form.
    Preferences,
    /// `sums`: sums and their results.
    Sums,
}

/// After the name of rows, the name of those for validation.
const HELD_OUT_SUFFIX: &str = "-held-out";

impl BuiltInRows {
    /// The rows as JSON Lines.
    fn json_lines(self, held_out: bool) -> String {
        let pairs = self == Self::Preferences;
        let [train, validation] = match self {
            Self::Sums => return chats::sums(held_out),
            Self::Preferences => [chats::PREFERENCES, chats::HELD_OUT_PREFERENCES],
            Self::Chats => [chats::CHATS, chats::HELD_OUT_CHATS],
        };
        let chats = if held_out { chats::held_out(CHATS_SEED, validation) } else { chats::training(CHATS_SEED, train) };
        chats::json_lines(&chats, pairs)
    }
}

/// A file of a data set on the Hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubFile<'a> {
    /// `owner/name`.
    pub repo: &'a str,
    /// Branch, tag or commit.
    pub revision: &'a str,
    /// Path inside the repository.
    pub file: &'a str,
}

/// The files of a data set on the Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubListing {
    /// The commit that has them.
    pub commit: String,
    /// Their paths inside the repository with their sizes in bytes.
    pub files: Vec<(PathBuf, u64)>,
}

/// Downloads files; `data` itself does not use the network.
pub trait Downloader {
    /// The files of the data set `repo`, which is `owner/name`, at a branch, tag or commit.
    fn list(&mut self, repo: &str, revision: &str) -> Result<HubListing>;

    /// The local path of `remote`, verified.
    fn download(&mut self, remote: HubFile) -> Result<PathBuf>;
}

/// An event while data or a model is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadEvent {
    /// Progress of a download or of tokenization.
    Progress {
        /// The activity, with the file's name.
        what: String,
        /// Bytes done.
        done: u64,
        /// Total bytes.
        total: u64,
    },
    /// Information for the user that needs no action.
    Notice(String),
}

impl FromStr for DataSource {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |problem: &str| Err(Error::config("--data", format!("{problem}; {SUPPORTED_SOURCES}")));
        match text {
            "" => wrong("must not be empty"),
            "grammar" => Ok(Self::Grammar),
            "tiny_shakespeare" => Ok(Self::TinyShakespeare),
            "-" => Ok(Self::Stdin),
            _ => match text.split_once("://") {
                Some(("hf", path)) => on_hub(path).map_or_else(
                    || wrong(&format!("`{text}` is neither `hf://owner/name` nor `hf://datasets/owner/name/path`")),
                    Ok,
                ),
                Some(_) => wrong(&format!("downloads from `{text}` are not supported")),
                None if text.contains(['*', '?', '[']) && !Path::new(text).exists() => Ok(Self::Glob(text.to_owned())),
                None => Ok(built_in(text).unwrap_or_else(|| Self::Path(text.into()))),
            },
        }
    }
}

fn built_in(text: &str) -> Option<DataSource> {
    let (name, held_out) = text.strip_suffix(HELD_OUT_SUFFIX).map_or((text, false), |name| (name, true));
    Some(DataSource::BuiltIn { rows: name.parse().ok()?, held_out })
}

/// The source `hf://path`; without `datasets/`, a file would be one of a model.
fn on_hub(path: &str) -> Option<DataSource> {
    let in_datasets = path.strip_prefix("datasets/");
    let (owner, rest) = in_datasets.unwrap_or(path).split_once('/')?;
    // A revision such as `refs/convert/parquet` has slashes.
    let slashes = if rest.split('/').next()?.ends_with("@refs") { 2 } else { 0 };
    let end = rest.match_indices('/').nth(slashes).map_or(rest.len(), |(at, _)| at);
    let name = &rest[..end];
    let file = rest.get(end + 1..);
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    let complete = [owner, name, revision, file.unwrap_or("all")].iter().all(|part| !part.is_empty());
    let known = complete && (in_datasets.is_some() || file.is_none());
    let repo = format!("{owner}/{name}");
    known.then(|| DataSource::Hub { repo, revision: revision.to_owned(), path: file.map(str::to_owned) })
}

impl fmt::Display for DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grammar => f.write_str("grammar"),
            Self::TinyShakespeare => f.write_str("tiny_shakespeare"),
            Self::BuiltIn { rows, held_out } => write!(f, "{rows}{}", if *held_out { HELD_OUT_SUFFIX } else { "" }),
            Self::Stdin => f.write_str("-"),
            Self::Hub { repo, revision, path } => {
                write!(f, "hf://datasets/{repo}")?;
                if revision != "main" {
                    write!(f, "@{revision}")?;
                }
                path.as_ref().map_or(Ok(()), |path| write!(f, "/{path}"))
            }
            Self::Glob(pattern) => f.write_str(pattern),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// The entry of `names` that a misspelled `name` probably meant.
pub(crate) fn closest_match(name: &str, names: impl IntoIterator<Item = String>) -> Option<String> {
    let distance = |other: &String| strsim::damerau_levenshtein(name, other);
    let allowed = (name.chars().count() / 3).min(2);
    names.into_iter().filter(|other| (1..=allowed).contains(&distance(other))).min_by_key(distance)
}

pub(crate) fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| !name.starts_with('.')).collect()
}

/// "did you mean …?" about a path that does not exist, if a file in the same folder has a similar name.
fn suggest_path(path: &Path) -> String {
    let folder = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default();
    let mut names = names_in(if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
    if folder.as_os_str().is_empty() {
        names.extend(["grammar", "tiny_shakespeare"].iter().chain(BuiltInRows::VARIANTS).map(ToString::to_string));
    }
    let near = closest_match(&name.to_string_lossy(), names);
    near.map_or_else(String::new, |near| format!("did you mean `{}`? Otherwise ", folder.join(near).display()))
}

/// A file of a corpus.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) path: PathBuf,
    /// Its name in error messages, which differs from the path for standard input.
    pub(super) origin: String,
    pub(super) format: DataFormat,
    /// Whether the user said so; text that looks like rows is refused otherwise.
    pub(super) asked: bool,
}

pub(super) struct Files {
    pub(super) documents: Vec<Document>,
    /// The names of files in a folder that are not among the documents.
    pub(super) left_out: Vec<String>,
    /// The temporary copy of a text that comes from a pipe, deleted once it has been read.
    _spool: Option<NamedTempFile>,
}

impl DataSource {
    /// This source, or if it is a path to nothing, the same path in `folder` if it leads to something there.
    #[must_use]
    pub fn or_in(self, folder: &Path) -> Self {
        let exists = |source: &Self| match source {
            Self::Path(path) => path.exists(),
            Self::Glob(pattern) => glob_files(pattern).is_ok(),
            _ => true,
        };
        let moved = match &self {
            Self::Path(path) => Self::Path(folder.join(path)),
            Self::Glob(pattern) => {
                Self::Glob(format!("{}/{pattern}", glob::Pattern::escape(&folder.display().to_string())))
            }
            _ => return self,
        };
        if !exists(&self) && exists(&moved) { moved } else { self }
    }

    /// Finds the files, and downloads missing ones. All have the format `asked`, if it is given. Not
    /// for [`Self::Grammar`].
    pub(super) fn files(
        &self,
        asked: Option<DataFormat>,
        downloader: Option<&mut (dyn Downloader + '_)>,
    ) -> Result<Files> {
        let document = |path: PathBuf| {
            let origin = path.display().to_string();
            Document::new(path, origin, asked)
        };
        let documents = match self {
            Self::Grammar => Vec::new(),
            Self::TinyShakespeare => {
                let broken = |error: std::io::Error| Error::data(self, format!("cannot be decompressed: {error}"));
                let text = zstd::Decoder::new(TINY_SHAKESPEARE).map_err(broken)?;
                return spool(text, "tiny_shakespeare", Some(DataFormat::Text));
            }
            Self::BuiltIn { rows, held_out } => {
                let text = rows.json_lines(*held_out);
                return spool(text.as_bytes(), &self.to_string(), Some(DataFormat::Jsonl));
            }
            Self::Stdin => return spool(std::io::stdin().lock(), "standard input", asked),
            Self::Hub { repo, revision, path } => {
                let downloader = downloader.ok_or_else(|| {
                    Error::data(self, "must be downloaded, but this command does not use the network")
                })?;
                let path = path.as_ref().map(Path::new);
                let (commit, read, left_out) = self.hub_files(repo, revision, path, asked, downloader)?;
                let download = |file: PathBuf| {
                    let name = file.to_string_lossy();
                    let path = downloader.download(HubFile { repo, revision: &commit, file: &name })?;
                    // The cache may call the file by its hash; the requested name determines its format.
                    let source = Self::Hub { repo: repo.clone(), revision: revision.clone(), path: Some(name.into()) };
                    Ok(Document { path, ..Document::new(file, source.to_string(), asked) })
                };
                let documents = read.into_iter().map(download).collect::<Result<_>>()?;
                return Ok(Files { documents, left_out, _spool: None });
            }
            Self::Glob(pattern) => glob_files(pattern)?.into_iter().map(document).collect(),
            Self::Path(path) if is_pipe(path) => {
                let pipe = Pipe::open(path).map_err(Error::io("read", path))?;
                return spool(pipe, &path.display().to_string(), asked.or_else(|| DataFormat::from_path(path)));
            }
            Self::Path(path) if path.is_dir() => {
                let (names, left_out) = data_files(files_below(path)?, asked, self)?;
                let documents = names.into_iter().map(|name| document(path.join(name))).collect();
                return Ok(Files { documents, left_out, _spool: None });
            }
            Self::Path(path) if !path.exists() => {
                return Err(Error::data(
                    path.display(),
                    format!("there is no such file; {}{SUPPORTED_SOURCES}", suggest_path(path)),
                ));
            }
            Self::Path(path) => vec![document(path.clone())],
        };
        Ok(Files { documents, left_out: Vec::new(), _spool: None })
    }

    /// The commit of a repository, its files to read, and the names of the others.
    fn hub_files(
        &self,
        repo: &str,
        revision: &str,
        path: Option<&Path>,
        asked: Option<DataFormat>,
        downloader: &mut dyn Downloader,
    ) -> Result<(String, Vec<PathBuf>, Vec<String>)> {
        if let Some(file) = path.filter(|path| DataFormat::from_path(path).is_some()) {
            return Ok((revision.to_owned(), vec![file.to_owned()], Vec::new()));
        }
        let HubListing { commit, mut files } = downloader.list(repo, revision)?;
        if let Some(file) = path.filter(|path| files.iter().any(|(file, _)| file.as_path() == *path)) {
            return Ok((commit, vec![file.to_owned()], Vec::new()));
        }
        // The folder's own name does not name the split of its files.
        let folder = path.unwrap_or(Path::new(""));
        files.retain(|(file, _)| file.starts_with(folder));
        let files =
            files.into_iter().filter_map(|(file, size)| Some((file.strip_prefix(folder).ok()?.to_owned(), size)));
        let (read, left_out) = data_files(files.collect(), asked, self)?;
        if path.is_none() {
            self.check_configurations(&read)?;
        }
        Ok((commit, read.into_iter().map(|file| folder.join(file)).collect(), left_out))
    }

    /// Rejects `files` of several configurations: their folders have files of the same names, as Python's `datasets`
    /// writes them.
    fn check_configurations(&self, files: &[PathBuf]) -> Result<()> {
        // Their numbers may differ, as in `train-00000-of-00002.parquet`.
        let name = |file: &Path| {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.split("-of-").next().map(str::to_owned)
        };
        let same = files.iter().filter(|file| name(file) == name(&files[0]));
        let folder = |file: &PathBuf| {
            let folder = file.parent().filter(|folder| *folder != Path::new(""));
            format!("`{self}/{}`", folder.unwrap_or(file).display())
        };
        let folders: Vec<_> = same.map(folder).collect();
        if folders.len() < 2 {
            return Ok(());
        }
        let message = format!("has several configurations; add the folder of one: {}", folders.join(", "));
        Err(Error::data(self, message))
    }
}

impl Document {
    /// The file at `path`, in the format asked for, or else the format of its extension; text without either.
    fn new(path: PathBuf, origin: String, asked: Option<DataFormat>) -> Self {
        let format = asked.or_else(|| DataFormat::from_path(&path)).unwrap_or(DataFormat::Text);
        Self { path, origin, format, asked: asked.is_some() }
    }

    pub(super) fn open(&self) -> Result<File> {
        untrusted::open(&self.path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => self.error("there is no such file"),
            _ => Error::io("read", &self.path)(error),
        })
    }

    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        Error::data(&self.origin, message)
    }

    /// The first bytes of the file.
    pub(super) fn start(&self) -> Result<Vec<u8>> {
        let mut start = Vec::new();
        self.open()?.take(64 << 10).read_to_end(&mut start).map_err(Error::io("read", &self.path))?;
        Ok(start)
    }

    /// Rejects UTF-16 and compressed files.
    pub(super) fn check_encoding(&self) -> Result<()> {
        conversion(&self.start()?).map_or(Ok(()), |advice| Err(self.error(advice)))
    }
}

/// Copies a pipe to a file, because text is read twice: once for its hash, once for its tokens.
fn spool(from: impl Read, origin: &str, asked: Option<DataFormat>) -> Result<Files> {
    let mut spool = temporary::file(&std::env::temp_dir(), SPOOL_PREFIX)?;
    let copied = std::io::copy(&mut from.take(MAX_SPOOL), spool.as_file_mut())
        .map_err(Error::io("copy the text to", spool.path()))?;
    if copied == MAX_SPOOL {
        return Err(Error::data(origin, "the pipe delivered more than 64 GiB; use a file instead"));
    }
    let document = Document::new(spool.path().to_path_buf(), origin.to_owned(), asked);
    Ok(Files { documents: vec![document], left_out: Vec::new(), _spool: Some(spool) })
}

fn glob_files(pattern: &str) -> Result<Vec<PathBuf>> {
    let paths = glob::glob(pattern).map_err(|error| Error::config("--data", format!("`{pattern}`: {error}")))?;
    // The crate's option for hidden files panics at names that are not UTF-8. A dot of the pattern matches one of the
    // path, so a path with more hidden parts has one that a wildcard matched.
    let hidden = |path: &Path| path.iter().filter(|part| is_hidden(part)).count();
    let shown = hidden(Path::new(pattern));
    let paths = paths.filter(|path| hidden(path.as_deref().unwrap_or_else(|error| error.path())) <= shown);
    let paths = paths.collect::<Result<Vec<_>, _>>().map_err(|error| {
        let path = error.path().to_owned();
        Error::io("read", path)(error.into())
    })?;
    let paths: Vec<PathBuf> = paths.into_iter().filter(|path| path.is_file()).collect();
    if paths.is_empty() {
        return Err(Error::data(pattern, format!("matches no file; {SUPPORTED_SOURCES}")));
    }
    Ok(paths)
}

fn is_hidden(part: &OsStr) -> bool {
    part.as_encoded_bytes().starts_with(b".") && part != "." && part != ".."
}

/// The `files` of a folder or repository, with their sizes, that are data for training, in alphabetical order: files of
/// the format that most bytes have, or of any known format if one is `asked` for, and only the files of one
/// [`FileSplit`]. Returns the names of the others too. Files about the data set, which every one on the Hub has, are
/// never data.
fn data_files(
    mut files: Vec<(PathBuf, u64)>,
    asked: Option<DataFormat>,
    source: &DataSource,
) -> Result<(Vec<PathBuf>, Vec<String>)> {
    files.retain(|(path, _)| !path.iter().any(is_hidden));
    files.sort();
    let format = |path: &Path| DataFormat::from_path(path).filter(|_| !is_about_the_data(path));
    let mut bytes: Vec<(DataFormat, u64)> = Vec::new();
    for (format, size) in files.iter().filter_map(|(path, size)| Some((format(path)?, size))) {
        match bytes.iter_mut().find(|(known, _)| *known == format) {
            Some((_, sum)) => *sum += size,
            None => bytes.push((format, *size)),
        }
    }
    // Of equals the first in alphabetical order.
    let Some((most, _)) = bytes.into_iter().rev().max_by_key(|(_, sum)| *sum) else {
        let has = |names: &[&str]| {
            let is_one = |path: &Path| path.extension().and_then(OsStr::to_str).is_some_and(|it| names.contains(&it));
            files.iter().any(|(path, _)| is_one(path))
        };
        let compressed = if has(&["gz", "zst", "xz", "bz2"]) { "; decompress its files first" } else { "" };
        let message = format!("contains no {} file{compressed}", DataFormat::EXTENSIONS);
        let message = if has(&["arrow"]) { ARROW.to_owned() } else { message };
        return Err(Error::data(source, message));
    };
    let is_data = |path: &Path| format(path).is_some_and(|format| asked.is_some() || format == most);
    let split = files.iter().map(|(path, _)| path).filter(|path| is_data(path)).map(|path| FileSplit::of(path)).min();
    let is_read = |path: &PathBuf| is_data(path) && Some(FileSplit::of(path)) == split;
    let (read, others): (Vec<_>, Vec<_>) = files.into_iter().map(|(path, _)| path).partition(is_read);
    Ok((read, others.into_iter().map(|path| path.display().to_string()).collect()))
}

/// The part of a data set that a file belongs to. The first that a folder has is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FileSplit {
    Training,
    Unnamed,
    HeldOut,
}

impl FileSplit {
    /// The split that a word of the path names, before a number or not, as in Python's `datasets`.
    fn of(path: &Path) -> Self {
        let path = path.to_string_lossy().to_ascii_lowercase();
        let words = path.split(|c: char| !c.is_alphabetic());
        let named = words.filter_map(|word| match word {
            "train" | "training" => Some(Self::Training),
            "validation" | "valid" | "dev" | "val" | "test" | "testing" | "eval" | "evaluation" => Some(Self::HeldOut),
            _ => None,
        });
        // A name with words of both is one of training.
        named.min().unwrap_or(Self::Unnamed)
    }
}

/// Whether a file in a data set's folder describes the data.
fn is_about_the_data(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let stem = name.split('.').next().unwrap_or_default();
    // Python's `datasets` writes it next to Arrow files.
    name == "state.json"
        || ["readme", "license", "licence", "dataset_info", "dataset_infos", "dataset_dict"].contains(&stem)
}

/// The files below `folder`, without hidden ones and those of runs, as paths in it with their sizes. Does not follow
/// links to folders.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut paths = Vec::new();
    collect(folder, &mut paths)?;
    let file = |path: &PathBuf| {
        let size = path.metadata().map_or(0, |metadata| metadata.len());
        (path.strip_prefix(folder).unwrap_or(path).to_path_buf(), size)
    };
    Ok(paths.iter().map(file).collect())
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let entry = entry.map_err(Error::io("read", folder))?;
        let path = entry.path();
        if is_hidden(&entry.file_name()) {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // Otherwise a run's log would become its training data.
            if ["config.toml", "events.jsonl"].iter().any(|name| !path.join(name).is_file()) {
                collect(&path, paths)?;
            }
        } else if path.is_file() {
            paths.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_round_trip_as_text() {
        for text in [
            "grammar",
            "tiny_shakespeare",
            "chats",
            "chats-held-out",
            "preferences",
            "preferences-held-out",
            "-",
            "some/file.txt",
            "some/*.jsonl",
            "hf://datasets/roneneldan/TinyStories/data/train.parquet",
            "hf://datasets/o/n@v1/a.jsonl",
            "hf://datasets/o/n@refs/convert/parquet",
            "hf://datasets/o/n@refs/pr/1/d/a.jsonl",
            "hf://datasets/o/n",
        ] {
            assert_eq!(text.parse::<DataSource>().unwrap().to_string(), text);
        }
        let hub = |path: Option<&str>| DataSource::Hub {
            repo: "o/n".into(),
            revision: "main".into(),
            path: path.map(str::to_owned),
        };
        assert_eq!("hf://datasets/o/n/d/f.txt".parse::<DataSource>().unwrap(), hub(Some("d/f.txt")));
        assert_eq!("hf://o/n".parse::<DataSource>().unwrap(), hub(None));
        let pull_request = "hf://o/n@refs/pr/1".parse::<DataSource>().unwrap();
        assert!(matches!(pull_request, DataSource::Hub { revision, path: None, .. } if revision == "refs/pr/1"));
    }

    #[test]
    fn tiny_shakespeare_is_the_text_that_everybody_uses() {
        let files = DataSource::TinyShakespeare.files(None, None).unwrap();
        let digest = crate::digest::Digest::of_file(&files.documents[0].path).unwrap();
        assert_eq!(digest.bytes, 1_115_394);
        assert_eq!(digest.sha256, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed");
    }

    /// A data set on the Hub with these files.
    struct FakeHub(&'static [&'static str]);

    impl Downloader for FakeHub {
        fn list(&mut self, _: &str, _: &str) -> Result<HubListing> {
            Ok(HubListing { commit: "c".into(), files: self.0.iter().map(|file| (file.into(), 1)).collect() })
        }

        fn download(&mut self, remote: HubFile) -> Result<PathBuf> {
            Ok(remote.file.into())
        }
    }

    #[test]
    fn a_configuration_of_a_data_set_on_the_hub_is_a_folder() {
        let mut hub = FakeHub(&[
            "LICENSE",
            "README.md",
            "main/test-00000-of-00001.parquet",
            "main/train-00000-of-00001.parquet",
            "other/train-00000-of-00002.parquet",
            "other/train-00001-of-00002.parquet",
            "training/test.parquet",
            "training/train.parquet",
        ]);
        let mut read = |source: &str| {
            let files = source.parse::<DataSource>().unwrap().files(None, Some(&mut hub));
            let path = |document: Document| document.path.display().to_string();
            files.map(|files| files.documents.into_iter().map(path).collect::<Vec<_>>())
        };
        let message = read("hf://o/n@v1").unwrap_err().to_string();
        let expected = "has several configurations; add the folder of one: `hf://datasets/o/n@v1/main`, \
                        `hf://datasets/o/n@v1/other`";
        assert!(message.ends_with(expected), "{message}");
        for (path, expected) in [
            ("main", &["main/train-00000-of-00001.parquet"][..]),
            ("other/", &["other/train-00000-of-00002.parquet", "other/train-00001-of-00002.parquet"]),
            ("training", &["training/train.parquet"]),
            ("README.md", &["README.md"]),
            ("LICENSE", &["LICENSE"]),
        ] {
            assert_eq!(read(&format!("hf://datasets/o/n/{path}")).unwrap(), expected, "{path}");
        }
        assert!(read("hf://datasets/o/n/mai").unwrap_err().to_string().contains("hf://datasets/o/n/mai: contains no"));
    }

    #[test]
    fn folders_and_globs_list_known_files_in_order() {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in [
            ("b.txt", "x"),
            ("a.jsonl", "xx"),
            ("c.bin", "xxxx"),
            (".hidden.jsonl", "x"),
            ("sub/d.jsonl", "x"),
            ("sub/eval.jsonl", "x"),
            ("README.md", "xxxxxxxxx"),
            ("LICENSE", "x"),
            ("dataset_infos.json", "xxxxxxxxx"),
        ] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let read = |source: DataSource, asked: Option<DataFormat>| -> (Vec<String>, Vec<String>) {
            let files = source.files(asked, None).unwrap();
            let name = |document: &Document| document.path.file_name().unwrap().to_string_lossy().into_owned();
            (files.documents.iter().map(name).collect(), files.left_out)
        };
        let names = |source: DataSource| read(source, None).0;
        let source = || DataSource::Path(folder.path().into());
        let left_out =
            ["LICENSE", "README.md", "b.txt", "c.bin", "dataset_infos.json", "sub/eval.jsonl"].map(str::to_owned);
        assert_eq!(read(source(), None), (vec!["a.jsonl".into(), "d.jsonl".into()], left_out.to_vec()));
        let (names_as_text, left_out) = read(source(), Some(DataFormat::Text));
        assert_eq!(names_as_text, ["a.jsonl", "b.txt", "d.jsonl"]);
        assert_eq!(left_out, ["LICENSE", "README.md", "c.bin", "dataset_infos.json", "sub/eval.jsonl"]);
        std::fs::write(folder.path().join("sub/train-0.jsonl"), "x").unwrap();
        assert_eq!(names(source()), ["train-0.jsonl"]);
        for (path, expected) in [
            ("training.csv", FileSplit::Training),
            ("d/Train00001.jsonl", FileSplit::Training),
            ("train/0.txt", FileSplit::Training),
            ("train/dev.txt", FileSplit::Training),
            ("trainer.csv", FileSplit::Unnamed),
            ("tests.csv", FileSplit::Unnamed),
            ("test_set.csv", FileSplit::HeldOut),
            ("val/0.txt", FileSplit::HeldOut),
        ] {
            assert_eq!(FileSplit::of(Path::new(path)), expected, "{path}");
        }
        let pattern = folder.path().join("*.*l").display().to_string();
        assert_eq!(names(DataSource::Glob(pattern)), ["a.jsonl"]);
        let no_utf8 = std::os::unix::ffi::OsStrExt::from_bytes(b"\xff.jsonl");
        std::fs::write(folder.path().join::<&OsStr>(no_utf8), "x").unwrap();
        for (pattern, expected) in
            [("*.jsonl", vec!["a.jsonl"]), (".h*", vec![".hidden.jsonl"]), ("**/d*", vec!["d.jsonl"])]
        {
            let found = names(DataSource::Glob(folder.path().join(pattern).display().to_string()));
            assert!(expected.iter().all(|name| found.iter().any(|found| found == name)), "{pattern}: {found:?}");
            assert_eq!(found.contains(&".hidden.jsonl".to_owned()), pattern == ".h*", "{pattern}: {found:?}");
        }
        let bracket = folder.path().join("a[1].txt");
        std::fs::write(&bracket, "x").unwrap();
        assert_eq!(names(bracket.display().to_string().parse().unwrap()), ["a[1].txt"]);
        let saved = tempfile::tempdir().unwrap();
        for name in ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"] {
            std::fs::write(saved.path().join(name), b"\xFF\xFF\xFF\xFF").unwrap();
        }
        for path in [saved.path().to_path_buf(), saved.path().join("data-00000-of-00001.arrow")] {
            let read = DataSource::Path(path).files(None, None).and_then(|files| files.documents[0].check_encoding());
            assert!(read.unwrap_err().to_string().contains("with `to_parquet`"));
        }
        let nothing = DataSource::Glob(folder.path().join("*.csv").display().to_string());
        assert!(nothing.files(None, None).err().unwrap().to_string().contains("matches no file"));
    }
}
