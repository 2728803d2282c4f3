//! Files from the Hugging Face Hub, verified, through the cache that Python's libraries use too.
//!
//! A model is a handful of files asked for by name; nothing else is downloaded, and no code. Every file is held against
//! the size and hash the Hub announces, whenever it is used and not only when it arrives; what does not match is
//! deleted. Pickled weights are refused, because loading them would run whatever they contain.

mod cache;
mod client;
mod settings;

use std::path::{Path, PathBuf};

use crate::data::{Fetch, Remote};
use crate::digest::{Digest, read_at_most};
use crate::{Error, Result};

use cache::RepoCache;
use client::{ATTEMPTS, Client, Failure, Metadata};
pub use settings::Settings;

/// Short names of models, and where they live now. The full name is what Python's cache calls them.
const ALIASES: [(&str, &str); 5] = [
    ("distilgpt2", "distilbert/distilgpt2"),
    ("gpt2", "openai-community/gpt2"),
    ("gpt2-medium", "openai-community/gpt2-medium"),
    ("gpt2-large", "openai-community/gpt2-large"),
    ("gpt2-xl", "openai-community/gpt2-xl"),
];

/// Files of a model that may be missing.
const OPTIONAL_FILES: [&str; 2] = ["tokenizer_config.json", "generation_config.json"];

/// An index of shards is small.
const MAX_INDEX: u64 = 16 << 20;

/// Weights that would run code when loaded.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Called while files arrive.
pub type ProgressFn<'a> = dyn FnMut(Progress) + 'a;

/// What happens while files are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A part of a file has arrived.
    Bytes {
        /// The file's name in its repository.
        file: String,
        /// Bytes already here.
        done: u64,
        /// Bytes of the whole file.
        total: u64,
    },
    /// Something the user should know and need not act on.
    Notice(String),
}

/// A model's folder in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// Holds `config.json`, `tokenizer.json`, the safetensors weights and what else there was.
    pub folder: PathBuf,
    /// `owner/name`, with the alias resolved.
    pub repo: String,
    /// The commit all files come from: what a run records to be repeatable.
    pub commit: String,
}

/// What kind of repository; decides its address and its folder in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Model,
    Dataset,
}

/// A repository at a revision.
#[derive(Clone, Debug)]
struct Repo {
    kind: Kind,
    /// `owner/name`, or a plain name of the Hub's early days.
    id: String,
    /// Branch, tag or commit.
    revision: String,
}

/// A file in the cache, and the commit it belongs to.
struct Cached {
    path: PathBuf,
    commit: String,
}

/// The Hub, as the environment sets it up.
pub struct Hub<'a> {
    settings: Settings,
    client: Client,
    /// Whether the last question went unanswered.
    unreachable: bool,
    progress: Option<&'a mut ProgressFn<'a>>,
}

impl<'a> Hub<'a> {
    /// A hub with the given settings.
    pub fn new(settings: Settings) -> Self {
        let client = Client::new(&settings);
        Self { settings, client, unreachable: false, progress: None }
    }

    /// Calls `progress` as files arrive.
    #[must_use]
    pub fn report_to(mut self, progress: &'a mut ProgressFn<'a>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// The files of model `name` (an alias or `owner/name`) at `revision`, which is `main` if not given.
    pub fn model(&mut self, name: &str, revision: Option<&str>) -> Result<ModelFiles> {
        let id = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, id)| id);
        let mut repo = Repo::new(Kind::Model, id, revision.unwrap_or("main"))?;
        let config = self.file(&repo, "config.json")?;
        // From here on the commit, so that a push in between cannot mix two versions.
        let commit = config.commit;
        repo.revision.clone_from(&commit);
        self.file(&repo, "tokenizer.json")?;
        self.weights(&repo)?;
        for file in OPTIONAL_FILES {
            match self.lookup(&repo, file) {
                // What is missing, or cannot be asked for while the rest is cached, is done without.
                Err(failure) if failure.is_absence() || failure.is_network() => {}
                result => drop(result.map_err(|failure| failure.explain(&self.settings, &repo, file))?),
            }
        }
        let folder = config.path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(ModelFiles { folder, repo: repo.id, commit })
    }

    /// `model.safetensors`, or the files that its index names.
    fn weights(&mut self, repo: &Repo) -> Result<()> {
        if self.optional_file(repo, "model.safetensors")?.is_some() {
            return Ok(());
        }
        if let Some(index) = self.optional_file(repo, "model.safetensors.index.json")? {
            for shard in shards(&index.path)? {
                self.file(repo, &shard)?;
            }
            return Ok(());
        }
        let pickled = PICKLED.into_iter().find(|file| self.exists(repo, file));
        let message = match pickled {
            Some(file) => format!(
                "its weights are only there as `{file}`, a pickle: loading one runs the code in it; convert it with \
                 `save_pretrained(safe_serialization=True)` and give the folder"
            ),
            None => "has neither `model.safetensors` nor `model.safetensors.index.json`".to_owned(),
        };
        Err(Error::hub(&repo.id, message))
    }

    /// One file: from the cache if it is the current one, else downloaded.
    fn file(&mut self, repo: &Repo, file: &str) -> Result<Cached> {
        self.lookup(repo, file).map_err(|failure| failure.explain(&self.settings, repo, file))
    }

    /// Like [`Self::file`], where the repository may not have it.
    fn optional_file(&mut self, repo: &Repo, file: &str) -> Result<Option<Cached>> {
        match self.lookup(repo, file) {
            Ok(cached) => Ok(Some(cached)),
            Err(failure) if failure.is_absence() => Ok(None),
            Err(failure) => Err(failure.explain(&self.settings, repo, file)),
        }
    }

    /// Whether the server has a file; no when it cannot be asked.
    fn exists(&self, repo: &Repo, file: &str) -> bool {
        !self.settings.offline && self.client.metadata(repo, file, ATTEMPTS).is_ok()
    }

    fn lookup(&mut self, repo: &Repo, file: &str) -> Result<Cached, Failure> {
        if !is_plain_path(file) {
            return Err(Failure::Refused(format!("`{file}` is not a path inside the repository")));
        }
        let cache = RepoCache::new(&self.settings.cache, repo);
        let cached = self.verified(&cache, &repo.revision, file)?;
        if self.settings.offline {
            return cached.ok_or(Failure::NotCached);
        }
        match cached {
            // A commit never changes, so there is nothing to ask.
            Some(cached) if cached.commit == repo.revision => Ok(cached),
            Some(cached) => match self.client.metadata(repo, file, 1) {
                Ok(metadata) => self.download(&cache, repo, file, &metadata),
                Err(failure) if failure.is_network() => {
                    self.unreachable = true;
                    self.notice(format!("{}: {failure}; using the cached `{file}`", repo.id));
                    Ok(cached)
                }
                Err(failure) => Err(failure),
            },
            None => {
                // Who was silent a moment ago is asked again, but not waited for.
                let metadata = self.client.metadata(repo, file, if self.unreachable { 1 } else { ATTEMPTS })?;
                self.download(&cache, repo, file, &metadata)
            }
        }
    }

    /// The cached file if it is there and its content is what its name in the cache says.
    fn verified(&mut self, cache: &RepoCache, revision: &str, file: &str) -> Result<Option<Cached>, Failure> {
        let Some(commit) = cache.commit(revision) else { return Ok(None) };
        let Some((path, etag)) = cache.find(&commit, file) else { return Ok(None) };
        if cache::content_matches(&path, &etag)? {
            return Ok(Some(Cached { path, commit }));
        }
        self.notice(format!("`{}` is damaged and was deleted", path.display()));
        cache.forget(&commit, file)?;
        Ok(None)
    }

    fn download(&mut self, cache: &RepoCache, repo: &Repo, file: &str, metadata: &Metadata) -> Result<Cached, Failure> {
        if !cache.has_blob(metadata)? {
            let mut partial = cache.create_blob()?;
            let mut tell = |done| {
                if let Some(progress) = &mut self.progress {
                    progress(Progress::Bytes { file: file.to_owned(), done, total: metadata.size });
                }
            };
            let pinned = Repo { revision: metadata.commit.clone(), ..repo.clone() };
            let url = self.client.url(&pinned, file);
            self.client.download(&url, metadata.size, partial.as_file_mut(), &mut tell)?;
            if !cache::content_matches(partial.path(), &metadata.etag)? {
                return Err(Failure::WrongContent);
            }
            cache.keep_blob(partial, metadata)?;
        }
        let path = cache.link(metadata, &repo.revision, file)?;
        Ok(Cached { path, commit: metadata.commit.clone() })
    }

    /// Downloads a file of known content to `folder`.
    fn url(&mut self, url: &str, file: &str, bytes: u64, sha256: &str, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(file);
        let by_hand = |why: String| {
            Error::hub(url, format!("{why}; on a machine with a network, download it to `{}`", path.display()))
        };
        if self.settings.offline {
            return Err(by_hand("`HF_HUB_OFFLINE` forbids the download".to_owned()));
        }
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let mut partial = tempfile::NamedTempFile::with_prefix_in(".download-", folder)
            .map_err(Error::io("create a file in", folder))?;
        let mut tell = |done| {
            if let Some(progress) = &mut self.progress {
                progress(Progress::Bytes { file: file.to_owned(), done, total: bytes });
            }
        };
        self.client
            .download(url, bytes, partial.as_file_mut(), &mut tell)
            .map_err(|failure| by_hand(failure.to_string()))?;
        let digest = Digest::of_file(partial.path())?;
        if digest.sha256 != sha256 {
            return Err(by_hand(format!("the server sent another file (SHA-256 {})", digest.sha256)));
        }
        partial.persist(&path).map_err(|error| Error::io("create", &path)(error.error))?;
        Ok(path)
    }

    fn notice(&mut self, text: String) {
        if let Some(progress) = &mut self.progress {
            progress(Progress::Notice(text));
        }
    }
}

impl Fetch for Hub<'_> {
    fn fetch(&mut self, remote: Remote, folder: &Path) -> Result<PathBuf> {
        match remote {
            Remote::Url { url, file, bytes, sha256 } => self.url(url, file, bytes, sha256, folder),
            Remote::Dataset { repo, revision, file } => {
                Ok(self.file(&Repo::new(Kind::Dataset, repo, revision)?, file)?.path)
            }
        }
    }
}

impl Repo {
    fn new(kind: Kind, id: &str, revision: &str) -> Result<Self> {
        let name = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !part.is_empty() && !part.starts_with('.') && !part.contains("..") && part.chars().all(allowed)
        };
        if id.split('/').count() > 2 || !id.split('/').all(name) {
            let message = "is no local folder, and no name on the Hub either, which is `owner/name`";
            return Err(Error::model(format!("`{id}`"), message));
        }
        if !is_plain_path(revision) {
            return Err(Error::model(id, format!("`{revision}` is not a revision")));
        }
        Ok(Self { kind, id: id.to_owned(), revision: revision.to_owned() })
    }
}

/// The files an index of sharded weights names. The index is outside data: its names are checked before use.
fn shards(index: &Path) -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let bytes = read_at_most(index, MAX_INDEX)?;
    let Index { weight_map } = serde_json::from_slice(&bytes)
        .map_err(|error| Error::hub(index.display(), format!("not an index of weights: {error}")))?;
    let files: std::collections::BTreeSet<String> = weight_map.into_values().collect();
    let safe = |file: &String| is_plain_path(file) && file.ends_with(".safetensors");
    match files.iter().find(|file| !safe(file)) {
        Some(file) => Err(Error::hub(index.display(), format!("names `{file}`, which is no safetensors file"))),
        None => Ok(files.into_iter().collect()),
    }
}

/// Whether a path stays inside the folder it is joined to.
fn is_plain_path(path: &str) -> bool {
    !path.contains(['\\', '\0']) && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_cache_are_refused() {
        for id in ["", "a/b/c", "../x", "a/..", "a b/c", "/etc", "a/", "a\\b", "https://host/a"] {
            assert!(Repo::new(Kind::Model, id, "main").is_err(), "{id}");
        }
        for revision in ["", "../main", "a//b", "/main"] {
            assert!(Repo::new(Kind::Model, "a/b", revision).is_err(), "{revision}");
        }
        assert!(Repo::new(Kind::Dataset, "a-b_c/d.e", "refs/convert/parquet").is_ok());
    }

    #[test]
    fn an_index_names_safetensors_files_only() {
        let folder = tempfile::tempdir().unwrap();
        let index = folder.path().join("index.json");
        let with = |file: &str| {
            std::fs::write(&index, format!(r#"{{"weight_map": {{"a": "{file}", "b": "{file}"}}}}"#)).unwrap();
            shards(&index)
        };
        assert_eq!(with("model-1.safetensors").unwrap(), ["model-1.safetensors"]);
        for file in ["../x.safetensors", "/x.safetensors", "code.py", "pytorch_model-1.bin"] {
            assert!(with(file).is_err(), "{file}");
        }
    }
}
