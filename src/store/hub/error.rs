//! Failures of transfers from and to the Hub, and advice for the user.

use super::client::header_text;
use super::settings::{Settings, without_password};
use super::{ALIASES, Repo, RepoType};
use crate::Error;
use crate::untrusted::sanitize_line;
use serde_json::Value;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Instant;
use ureq::Body;
use ureq::http::Response;

/// Characters of a server's reason that are shown.
const MAX_REASON: usize = 300;

/// Bytes of an answer in which the reason is looked for.
const MAX_ANSWER: u64 = 16 << 10;

/// Why a transfer failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HubError {
    /// No response, or an interrupted one.
    #[error("no usable connection ({0})")]
    Network(String),
    /// A server error or a busy server, after all attempts.
    #[error("the server keeps answering {0}")]
    Server(String),
    /// 401 or 403.
    #[error("the server denies access ({0})")]
    Unauthorized(String),
    /// 409 or 412: what should be created exists, or what should be changed has changed.
    #[error("the server reports a conflict ({0})")]
    Conflict(String),
    #[error("the server has no such file")]
    NoSuchFile,
    #[error("the server answers 416 Range Not Satisfiable")]
    NoSuchRange,
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

    /// The failure for a status, with the server's reason; `None` for success and redirects.
    pub(super) fn from_status(response: &mut Response<Body>, settings: &Settings) -> Option<Self> {
        Some(match (response.status().as_u16(), header_text(response, "x-error-code")) {
            (200..=399, _) => return None,
            // The Hub answers 401 for a repository that does not exist, to hide private ones.
            (_, Some("RepoNotFound")) => Self::NoSuchRepo,
            (_, Some("RevisionNotFound")) => Self::NoSuchRevision,
            (404 | 410, _) => Self::NoSuchFile,
            (416, _) => Self::NoSuchRange,
            (401 | 403, _) => Self::Unauthorized(answer(response, settings)),
            (409 | 412, _) => Self::Conflict(answer(response, settings)),
            (408 | 429 | 500.., _) => Self::Server(answer(response, settings)),
            _ => Self::Refused(format!("the server answers {}", answer(response, settings))),
        })
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

/// The status and, if the server gives one, the reason for it.
fn answer(response: &mut Response<Body>, settings: &Settings) -> String {
    let status = response.status();
    let header = header_text(response, "x-error-message").map(str::to_owned);
    match header.or_else(|| reason_in_body(response, settings)) {
        Some(reason) => format!("{status}: {}", shown(&reason, settings)),
        None => status.to_string(),
    }
}

/// The reason in an answer in JSON: `error` of the Hub, `message` of Git LFS.
fn reason_in_body(response: &mut Response<Body>, settings: &Settings) -> Option<String> {
    let mut body = response.body_mut().as_reader().take(MAX_ANSWER);
    let (mut text, mut buffer, began) = (Vec::new(), [0; 1024], Instant::now());
    while began.elapsed() < settings.timeout
        && let Ok(read @ 1..) = body.read(&mut buffer)
    {
        text.extend_from_slice(&buffer[..read]);
    }
    let answer: Value = serde_json::from_slice(&text).ok()?;
    ["error", "message"].iter().find_map(|key| Some(answer[key].as_str()?.to_owned()))
}

/// A server's text for a message: one short line, without the token.
pub(super) fn shown(reason: &str, settings: &Settings) -> String {
    let reason = settings.token.as_ref().map_or_else(|| reason.to_owned(), |token| reason.replace(token, "…"));
    let reason = sanitize_line(reason.trim());
    match reason.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}…", &reason[..end]),
        None => reason.into_owned(),
    }
}
