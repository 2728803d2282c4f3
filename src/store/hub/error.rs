//! Failures of transfers from and to the Hub, and advice for the user.

use super::client::header_text;
use super::settings::{Settings, without_password};
use super::{ALIASES, Repo, RepoType};
use crate::Error;
use std::io;
use std::path::{Path, PathBuf};
use ureq::Body;
use ureq::http::{Response, StatusCode};

/// Why a transfer failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HubError {
    /// No response, or an interrupted one.
    #[error("no usable connection ({0})")]
    Network(String),
    /// A server error or a busy server, after all attempts.
    #[error("the server keeps answering {0}")]
    Server(StatusCode),
    /// 401 or 403.
    #[error("the server denies access ({0})")]
    Unauthorized(StatusCode),
    /// 409 or 412: what should be created exists, or what should be changed has changed.
    #[error("the server reports a conflict")]
    Conflict,
    #[error("the server has no such file")]
    NoSuchFile,
    #[error("the server has no such repository")]
    NoSuchRepo,
    #[error("the repository has no such revision")]
    NoSuchRevision,
    /// The server sent more bytes than announced.
    #[error("the server sends more than the {0} bytes it announced")]
    SizeMismatch(u64),
    /// The contents have the announced size but another hash.
    #[error("the contents do not match the hash that the server announced")]
    WrongContent,
    /// The announced size exceeds the limit for this kind of file.
    #[error("the server announces {size} bytes; the limit for such a file is {limit}")]
    TooLarge { size: u64, limit: u64 },
    /// The cache's disk has too little space.
    #[error("it needs {needed} bytes, but the disk of `{}` has only {free} free", cache.display())]
    DiskFull { needed: u64, free: u64, cache: PathBuf },
    /// The server's response is invalid or not allowed.
    #[error("{0}")]
    Refused(String),
    /// The cache has no such file, for this reason, and the user forbids downloads or there is no network.
    #[error("it is not in the cache ({0})")]
    NotCached(String),
    /// A failure on this machine: of a file, or because `HF_ENDPOINT` or `HF_TOKEN` is malformed.
    #[error(transparent)]
    Local(#[from] Error),
}

impl HubError {
    pub(super) fn disk(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let failure = Error::io(action, path);
        move |source| Self::Local(failure(source))
    }

    /// The failure for a status; `None` for success and redirects.
    pub(super) fn from_status(response: &Response<Body>) -> Option<Self> {
        let status = response.status();
        match (status.as_u16(), header_text(response, "x-error-code")) {
            (200..=399, _) => None,
            // The Hub answers 401 for a repository that does not exist, to hide private ones.
            (_, Some("RepoNotFound")) => Some(Self::NoSuchRepo),
            (_, Some("RevisionNotFound")) => Some(Self::NoSuchRevision),
            (401 | 403, _) => Some(Self::Unauthorized(status)),
            (409 | 412, _) => Some(Self::Conflict),
            (404 | 410, _) => Some(Self::NoSuchFile),
            (408 | 429 | 500.., _) => Some(Self::Server(status)),
            _ => Some(Self::Refused(format!("the server answers {status}"))),
        }
    }

    /// Whether the file does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::NoSuchFile | Self::NotCached(_))
    }

    /// Whether the server is unreachable, failing or denies access, so that a cached copy should be used, as in Python.
    pub(super) fn is_unavailable(&self) -> bool {
        matches!(self, Self::Network(_) | Self::Server(_) | Self::Unauthorized(_) | Self::NoSuchRepo)
    }

    /// The error the user sees.
    pub(super) fn explain(self, settings: &Settings, repo: &Repo, file: &str) -> Error {
        let endpoint = without_password(&settings.endpoint);
        let id = &repo.id;
        if let Self::Local(error) = self {
            return error;
        }
        let cache = settings.cache.display();
        let (local, download) = match repo.kind {
            RepoType::Model => ("folder", id.clone()),
            RepoType::Dataset => ("file (`--data FILE`)", format!("--repo-type dataset {id}")),
        };
        let copy = format!("copy the output of `hf download {download}` on another machine into `{cache}`");
        let last = if ALIASES.iter().any(|(_, full_name)| full_name == id) {
            format!("{copy}, or train random weights (`--init random --tokenizer bytes`)")
        } else {
            format!("or {copy}")
        };
        let alternatives = format!("use a local {local} or a mirror (`HF_ENDPOINT=URL`), {last}");
        let advice = match self {
            Self::Unauthorized(_) => {
                format!("accept its terms at {endpoint}/{id} and set `HF_TOKEN` to a token that may read it")
            }
            Self::NoSuchRepo => {
                "check the name, which is no local folder either; a private repository needs `HF_TOKEN`".to_owned()
            }
            Self::NoSuchRevision => "check `--revision`".to_owned(),
            Self::NoSuchFile => "the repository does not have the required files".to_owned(),
            Self::DiskFull { .. } => "free some space, or set `HF_HUB_CACHE` to a folder on a larger disk".to_owned(),
            Self::NotCached(_) if settings.network_error.is_none() => {
                format!("unset `{}` to download it, {alternatives}", settings.offline_variable)
            }
            _ => alternatives,
        };
        // Blame the configuration if the user can change it, else the network.
        let asked = match self {
            Self::NotCached(_) => settings.network_error.is_none(),
            Self::Unauthorized(_) | Self::NoSuchRepo | Self::NoSuchRevision | Self::NoSuchFile => true,
            _ => false,
        };
        let offline = match (&self, &settings.network_error) {
            (Self::NotCached(_), Some(why)) => format!(", and the Hub is unreachable ({why})"),
            (Self::NotCached(_), None) => format!(", and `{}` forbids the download", settings.offline_variable),
            _ => String::new(),
        };
        let (origin, message) =
            (format!("{id} at `{endpoint}`"), format!("cannot get `{file}`: {self}{offline}; {advice}"));
        if asked { Error::model(origin, message) } else { Error::hub(origin, message) }
    }
}
