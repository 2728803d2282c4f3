//! Downloads files from the Hugging Face Hub and verifies them, in the cache that Python's libraries also use; uploads
//! models.
//!
//! Only a few known files of a model are downloaded, and no code. Every file is checked against the size and hash that
//! the Hub announces, on download and on every use; a file that does not match is deleted. Pickled weights are
//! rejected, because loading them would run code they contain.

mod cache;
mod client;
mod connectivity;
mod error;
mod push;
mod settings;

use crate::data::{Downloader, HubFile, HubListing, LoadEvent, counted, files_below};
use crate::digest::{MAX_SMALL_FILE, read_at_most};
use crate::store::aux_files::{AuxFiles, CHAT_TEMPLATE, TOOL_TEMPLATE};
use crate::store::folder::{INDEX, SINGLE_FILE, shards};
use crate::{Error, Result};
use cache::RepoCache;
use client::{ATTEMPTS, Client, Metadata};
pub use connectivity::connect;
use error::HubError;
pub use settings::{Settings, without_password};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Short names of models, and their full names, which Python's cache uses.
const ALIASES: [(&str, &str); 5] = [
    ("distilgpt2", "distilbert/distilgpt2"),
    ("gpt2", "openai-community/gpt2"),
    ("gpt2-medium", "openai-community/gpt2-medium"),
    ("gpt2-large", "openai-community/gpt2-large"),
    ("gpt2-xl", "openai-community/gpt2-xl"),
];

const MAX_TOKENIZER: u64 = 512 << 20;

/// Names a repository's list of files in error messages.
const LISTING: &str = "the list of files";

/// Weights that would run code when loaded.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// A model's folder in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    /// Contains `config.json`, `tokenizer.json`, the safetensors weights and optional files.
    pub folder: PathBuf,
    /// `owner/name`, with the alias resolved.
    pub repo: String,
    /// The commit of all files, which a run records to be repeatable.
    pub commit: String,
}

/// The kind of a repository, which determines its URL and its folder in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RepoType {
    Model,
    Dataset,
}

#[derive(Clone, Debug)]
struct Repo {
    kind: RepoType,
    /// `owner/name`, or a legacy name without owner.
    id: String,
    /// The name of its folder in the cache, which may be an alias.
    cached_as: String,
    /// Branch, tag or commit.
    revision: String,
}

struct CachedFile {
    path: PathBuf,
    commit: String,
    /// The hash of its contents; `None` for a plain file, which only the Hub can verify.
    etag: Option<String>,
}

impl CachedFile {
    /// Whether its contents have the hash `etag`.
    fn matches(&self, etag: &str) -> Result<bool, HubError> {
        self.etag.as_ref().map_or_else(|| cache::content_matches(&self.path, etag), |own| Ok(own == etag))
    }
}

enum FileLocation {
    Cached(CachedFile),
    /// On the server. Its blob may already be in the cache.
    Remote(Metadata),
}

/// Access to the Hub.
pub struct Hub<'a> {
    settings: Settings,
    /// Created when the network is first needed.
    client: Option<Client>,
    /// Whether the last request failed.
    unreachable: bool,
    report: Option<&'a mut dyn FnMut(LoadEvent)>,
}

impl<'a> Hub<'a> {
    /// A hub with the given settings.
    pub fn new(settings: Settings) -> Self {
        Self { settings, client: None, unreachable: false, report: None }
    }

    /// Calls `report` as files arrive.
    #[must_use]
    pub fn report_to(mut self, report: &'a mut dyn FnMut(LoadEvent)) -> Self {
        self.report = Some(report);
        self
    }

    /// The files of model `name` (an alias or `owner/name`) at `revision`, which is `main` if not given.
    pub fn model(&mut self, name: &str, revision: Option<&str>) -> Result<ModelFiles> {
        let aliases = ALIASES.iter().find(|(alias, id)| [*alias, *id].contains(&name));
        let id = aliases.map_or(name, |(_, id)| id);
        let mut repo = Repo::new(RepoType::Model, id, revision.unwrap_or("main"))?;
        if let Some((alias, _)) = aliases
            && !RepoCache::new(&self.settings.cache, &repo).exists()
        {
            // Python's libraries store a model under the name that the user wrote.
            let by_alias = Repo { cached_as: (*alias).to_owned(), ..repo.clone() };
            if RepoCache::new(&self.settings.cache, &by_alias).exists() {
                repo = by_alias;
            }
        }
        let config = self.file(&repo, "config.json")?;
        // Use the commit from here on, so that a push in between cannot mix two versions.
        let commit = config.commit;
        repo.revision.clone_from(&commit);
        self.file(&repo, "tokenizer.json")?;
        let folder = config.path.parent().map(Path::to_path_buf).unwrap_or_default();
        for file in AuxFiles::NAMES.into_iter().chain([TOOL_TEMPLATE]) {
            if file == TOOL_TEMPLATE && !folder.join(CHAT_TEMPLATE).is_file() {
                continue;
            }
            match self.fetch_file(&repo, file) {
                Err(failure) if failure.is_not_found() => {}
                // It may exist, but the other files may be in the cache.
                Err(failure) if failure.is_unavailable() => {
                    self.notice(format!("{}: {failure}; continuing without `{file}`", repo.id));
                }
                result => drop(result.map_err(|failure| failure.explain(&self.settings, &repo, file))?),
            }
        }
        self.weights(&repo)?;
        Ok(ModelFiles { folder, repo: repo.id, commit })
    }

    /// One file of model `name` at `revision`, which is `main` if not given, and the commit it comes from.
    pub fn model_file(&mut self, name: &str, revision: Option<&str>, file: &str) -> Result<(PathBuf, String)> {
        let found = self.file(&Repo::new(RepoType::Model, name, revision.unwrap_or("main"))?, file)?;
        Ok((found.path, found.commit))
    }

    /// `model.safetensors`, or the files that its index names.
    fn weights(&mut self, repo: &Repo) -> Result<()> {
        let index = match self.fetch_file(repo, SINGLE_FILE) {
            Ok(_) => return Ok(()),
            Err(failure) if failure.is_not_found() => match self.fetch_file(repo, INDEX) {
                Ok(index) => Some(index),
                Err(failure) if failure.is_not_found() => None,
                Err(failure) => return Err(failure.explain(&self.settings, repo, INDEX)),
            },
            // The cache may contain shards.
            Err(failure) if failure.is_unavailable() => match self.locate(repo, INDEX) {
                Ok(FileLocation::Cached(index)) => Some(index),
                _ => return Err(failure.explain(&self.settings, repo, SINGLE_FILE)),
            },
            Err(failure) => return Err(failure.explain(&self.settings, repo, SINGLE_FILE)),
        };
        if let Some(index) = index {
            let shards = shards(&read_at_most(&index.path, MAX_SMALL_FILE)?)
                .map_err(|error| Error::hub(index.path.display(), error))?;
            let missing = self.missing_shards(repo, &shards)?;
            return missing.iter().try_for_each(|shard| self.file(repo, shard).map(drop));
        }
        if self.settings.offline {
            return self.file(repo, SINGLE_FILE).map(drop);
        }
        let pickled = PICKLED.into_iter().find(|file| self.exists(repo, file));
        let message = match pickled {
            Some(file) => format!(
                "its weights are pickled (`{file}`), and loading a pickle can run arbitrary code; convert them with \
                 `save_pretrained(safe_serialization=True)` and use that folder"
            ),
            None => "has neither `model.safetensors` nor `model.safetensors.index.json`".to_owned(),
        };
        Err(Error::hub(&repo.id, message))
    }

    /// Gets one file: from the cache if it is current, else downloaded.
    fn file(&mut self, repo: &Repo, file: &str) -> Result<CachedFile> {
        self.fetch_file(repo, file).map_err(|failure| failure.explain(&self.settings, repo, file))
    }

    /// Whether the server has a file; `false` if it cannot be reached.
    fn exists(&mut self, repo: &Repo, file: &str) -> bool {
        self.client().is_ok_and(|client| client.metadata(repo, file, ATTEMPTS).is_ok())
    }

    /// The shards that the cache lacks. Fails if they do not fit on the disk together.
    fn missing_shards<'s>(&mut self, repo: &Repo, shards: &'s BTreeSet<String>) -> Result<Vec<&'s String>> {
        let mut missing = Vec::new();
        let mut needed = 0_u64;
        for shard in shards {
            let location = self.locate(repo, shard).map_err(|failure| failure.explain(&self.settings, repo, shard))?;
            if let FileLocation::Remote(metadata) = location {
                missing.push(shard);
                needed = needed.saturating_add(RepoCache::new(&self.settings.cache, repo).missing(&metadata));
            }
        }
        self.require_space(needed).map_err(|failure| failure.explain(&self.settings, repo, "its weights"))?;
        Ok(missing)
    }

    fn require_space(&self, needed: u64) -> Result<(), HubError> {
        match free_bytes(&self.settings.cache) {
            Some(free) if needed > free => Err(HubError::DiskFull { needed, free, cache: self.settings.cache.clone() }),
            _ => Ok(()),
        }
    }

    fn client(&mut self) -> Result<Client, HubError> {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => Client::new(&self.settings)?,
        };
        Ok(self.client.insert(client).clone())
    }

    fn fetch_file(&mut self, repo: &Repo, file: &str) -> Result<CachedFile, HubError> {
        match self.locate(repo, file)? {
            FileLocation::Cached(cached) => Ok(cached),
            FileLocation::Remote(metadata) => self.download(repo, file, &metadata),
        }
    }

    fn locate(&mut self, repo: &Repo, file: &str) -> Result<FileLocation, HubError> {
        if !is_plain_path(file) {
            return Err(HubError::Refused(format!("`{file}` is not a path inside the repository")));
        }
        let cached = match self.verified(&RepoCache::new(&self.settings.cache, repo), &repo.revision, file) {
            Ok(cached) if self.settings.offline => return Ok(FileLocation::Cached(cached)),
            Ok(cached) => Some(cached),
            Err(HubError::NotCached(_)) if !self.settings.offline => None,
            Err(failure) => return Err(failure),
        };
        // Retry a host that did not answer last time only once.
        let attempts = if cached.is_some() || self.unreachable { 1 } else { ATTEMPTS };
        let metadata = match cached {
            // A commit never changes, so no request is needed.
            Some(cached) if cached.commit == repo.revision && cached.etag.is_some() => {
                return Ok(FileLocation::Cached(cached));
            }
            Some(cached) => match self.client()?.metadata(repo, file, attempts) {
                Ok(metadata) if metadata.commit == cached.commit && cached.matches(&metadata.etag)? => {
                    return Ok(FileLocation::Cached(cached));
                }
                Err(failure) if failure.is_unavailable() => {
                    self.unreachable = true;
                    self.notice(format!("{}: {failure}; using the cached `{file}`", repo.id));
                    return Ok(FileLocation::Cached(cached));
                }
                answer => answer?,
            },
            None => self.client()?.metadata(repo, file, attempts)?,
        };
        if cache::is_hex(&repo.revision, 40) && metadata.commit != repo.revision {
            return Err(HubError::Refused(format!(
                "requested commit {}, but the server returned another",
                repo.revision
            )));
        }
        let limit = limit(repo, file);
        if metadata.size > limit {
            return Err(HubError::TooLarge { size: metadata.size, limit });
        }
        Ok(FileLocation::Remote(metadata))
    }

    /// The cached file, if it exists and its contents match its hash; else [`HubError::NotCached`].
    fn verified(&mut self, cache: &RepoCache, revision: &str, file: &str) -> Result<CachedFile, HubError> {
        let cached = cache.find(revision, file).map_err(HubError::NotCached)?;
        let Some(etag) = &cached.etag else { return Ok(cached) };
        if cache::content_matches(&cached.path, etag)? {
            return Ok(cached);
        }
        cache.forget(&cached.commit, file, etag)?;
        let reason = format!("`{}` was damaged, so it was deleted", cached.path.display());
        self.notice(reason.clone());
        Err(HubError::NotCached(reason))
    }

    fn download(&mut self, repo: &Repo, file: &str, metadata: &Metadata) -> Result<CachedFile, HubError> {
        let cache = RepoCache::new(&self.settings.cache, repo);
        if !cache.has_blob(metadata)? {
            cache.sweep();
            self.download_blob(&cache, repo, file, metadata)?;
        }
        let path = cache.link(metadata, &repo.revision, file)?;
        Ok(CachedFile { path, commit: metadata.commit.clone(), etag: Some(metadata.etag.clone()) })
    }

    /// Downloads a file's contents into the cache, where it becomes visible once its hash is verified.
    fn download_blob(
        &mut self,
        cache: &RepoCache,
        repo: &Repo,
        file: &str,
        metadata: &Metadata,
    ) -> Result<(), HubError> {
        let Some(mut partial) = cache.partial(metadata, |text| self.notice(text))? else { return Ok(()) };
        self.require_space(metadata.size - partial.len)?;
        let client = self.client()?;
        let pinned = Repo { revision: metadata.commit.clone(), ..repo.clone() };
        let url = client.url(&pinned, file);
        loop {
            if partial.len < metadata.size || partial.len == 0 {
                let mut on_bytes = |done| {
                    if let Some(report) = &mut self.report {
                        let what = format!("downloading {file}");
                        report(LoadEvent::Progress { what, done, total: metadata.size });
                    }
                };
                let received = client.download(&url, metadata.size, &partial, &mut on_bytes);
                // Keep a partial download to continue later, unless it is empty or of another file.
                let is_empty = partial.file.metadata().is_ok_and(|m| m.len() == 0);
                if matches!(received, Err(HubError::SizeMismatch(_))) || received.is_err() && is_empty {
                    let _ = std::fs::remove_file(&partial.path);
                }
                received?;
            }
            if cache::content_matches(&partial.path, &metadata.etag)? {
                return cache.keep(&partial, metadata);
            }
            // The partial download may be damaged, so retry from the start.
            if partial.len == 0 {
                let _ = std::fs::remove_file(&partial.path);
                return Err(HubError::WrongContent);
            }
            partial.len = 0;
        }
    }

    fn notice(&mut self, text: String) {
        if let Some(report) = &mut self.report {
            report(LoadEvent::Notice(text));
        }
    }
}

/// Maximum size of a file of a repository; weights and texts are limited by the disk.
fn limit(repo: &Repo, file: &str) -> u64 {
    match (repo.kind, file.rsplit_once('.')) {
        (RepoType::Model, _) if file == "tokenizer.json" => MAX_TOKENIZER,
        (RepoType::Model, Some((_, "json" | "jinja"))) => MAX_SMALL_FILE,
        _ => u64::MAX,
    }
}

/// Free bytes on the disk of `path`, which need not exist.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|folder| folder.is_dir())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail * disk.f_frsize)
}

impl Downloader for Hub<'_> {
    fn list(&mut self, repo: &str, revision: &str) -> Result<HubListing> {
        let repo = Repo::new(RepoType::Dataset, repo, revision)?;
        let cache = RepoCache::new(&self.settings.cache, &repo);
        let why_cached = if self.settings.offline {
            "offline".to_owned()
        } else {
            match self.client().and_then(|client| client.list(&repo)) {
                Err(failure) if failure.is_unavailable() && cache.commit(revision).is_ok() => failure.to_string(),
                answer => {
                    let listed = answer.and_then(|listing| {
                        cache.set_revision(revision, &listing.commit)?;
                        Ok(listing)
                    });
                    return listed.map_err(|failure| failure.explain(&self.settings, &repo, LISTING));
                }
            }
        };
        let not_cached = |reason| HubError::NotCached(reason).explain(&self.settings, &repo, LISTING);
        let commit = cache.commit(revision).map_err(not_cached)?;
        let files = files_below(&cache.snapshot(&commit))?;
        let count = counted(files.len(), "file");
        self.notice(format!(
            "{}: {why_cached}; using the {count} in the cache, but the data set may have more",
            repo.id
        ));
        Ok(HubListing { commit, files })
    }

    fn download(&mut self, HubFile { repo, revision, file }: HubFile) -> Result<PathBuf> {
        Ok(self.file(&Repo::new(RepoType::Dataset, repo, revision)?, file)?.path)
    }
}

/// Rejects what cannot be the name of a repository.
pub fn check_name(id: &str) -> Result<()> {
    let name = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && !part.starts_with('.') && !part.contains("..") && part.chars().all(allowed)
    };
    if id.split('/').count() <= 2 && id.split('/').all(name) {
        return Ok(());
    }
    let message = "is neither a local folder nor a name on the Hub, which has the form `owner/name`";
    let home = if id.starts_with('~') { "; only a shell expands `~`: give the whole path" } else { "" };
    Err(Error::model(format!("`{id}`"), format!("{message}{home}")))
}

/// `owner/name` and the file of `owner/name/file`.
pub fn repository_and_file(name: &str) -> Option<(&str, &str)> {
    let (at, _) = name.match_indices('/').nth(1)?;
    Some((&name[..at], &name[at + 1..]))
}

/// The repository of a model of the Hub that was named `owner/name`, by an alias, or `hf://owner/name/file.gguf`;
/// `None` for other names.
pub fn model_repository(name: &str) -> Option<&str> {
    let id = name.strip_prefix("hf://").map_or(name, |file| repository_and_file(file).map_or(file, |(id, _)| id));
    let id = ALIASES.iter().find(|(alias, _)| *alias == id).map_or(id, |(_, id)| id);
    check_name(id).is_ok().then_some(id)
}

impl Repo {
    fn new(kind: RepoType, id: &str, revision: &str) -> Result<Self> {
        check_name(id)?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.+@=/".contains(c);
        if !is_plain_path(revision) || !revision.chars().all(allowed) {
            return Err(Error::model(id, format!("`{revision}` is not a revision")));
        }
        Ok(Self { kind, id: id.to_owned(), cached_as: id.to_owned(), revision: revision.to_owned() })
    }

    /// The repository in `hf-hub`'s terms, with `name`, which is `id` or `cached_as`.
    fn as_hub_repo(&self, name: &str) -> hf_hub::Repo {
        let kind = match self.kind {
            RepoType::Model => hf_hub::RepoType::Model,
            RepoType::Dataset => hf_hub::RepoType::Dataset,
        };
        hf_hub::Repo::with_revision(name.to_owned(), kind, self.revision.clone())
    }
}

/// Whether a path stays inside the folder it is joined to.
fn is_plain_path(path: &str) -> bool {
    !path.contains(|c: char| c == '\\' || c.is_control())
        && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_escape_the_cache_are_rejected() {
        for id in ["", "a/b/c", "../x", "a/..", "a b/c", "/etc", "a/", "a\\b", "https://host/a"] {
            assert!(Repo::new(RepoType::Model, id, "main").is_err(), "{id}");
        }
        for revision in ["", "../main", "a//b", "/main", "main?x", "a b", "a%2Fb", "a#b"] {
            assert!(Repo::new(RepoType::Model, "a/b", revision).is_err(), "{revision}");
        }
        assert!(Repo::new(RepoType::Dataset, "a-b_c/d.e", "refs/convert/parquet").is_ok());
    }

    #[test]
    fn a_name_of_a_model_has_its_repository() {
        for (name, repository) in [
            ("distilgpt2", Some("distilbert/distilgpt2")),
            ("o/n", Some("o/n")),
            ("hf://o/n/a/b.gguf", Some("o/n")),
            ("checkpoints/r/step-1", None),
            ("../base", None),
        ] {
            assert_eq!(model_repository(name), repository, "{name}");
        }
    }
}
