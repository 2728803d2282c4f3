//! The two requests of the Hub's protocol: what a file is (`HEAD`), and its content (`GET`), each tried again when
//! that can help.
//!
//! Redirects are followed by hand. They may lead to the server first asked, to names below it, or from the Hub and its
//! mirrors to the Hub's own content network; anywhere else is refused. The token goes to the endpoint only.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ureq::http::{Response, StatusCode, Uri, header};
use ureq::{Agent, Body};

use super::cache::is_hex;
use super::settings::Settings;
use super::{Kind, Repo};
use crate::Error;

/// How often a request is sent before its failure counts.
pub(super) const ATTEMPTS: u32 = 5;

/// How many redirects in a row are followed.
const MAX_REDIRECTS: usize = 5;

/// A server that asks for a longer pause than this is not waited for.
const MAX_PAUSE: Duration = Duration::from_mins(1);

/// Bytes that have to arrive while [`Settings::patience`] lasts; a slower server counts as silent.
const MIN_BYTES: u64 = 16 << 10;

/// Bytes after which a connection that breaks has been worth another full number of attempts.
const GOOD_RUN_BYTES: u64 = 1 << 20;

/// The domain whose hosts serve the content of large files, for the Hub and for mirrors of it.
const CONTENT_NETWORK: &str = ".hf.co";

/// What the Hub says of a file.
pub(super) struct Metadata {
    /// The commit that the revision stands at: 40 hexadecimal digits.
    pub(super) commit: String,
    /// SHA-256 of a large file, git's SHA-1 of a small one, in hexadecimal.
    pub(super) etag: String,
    /// Bytes.
    pub(super) size: u64,
}

/// Why a file could not be had.
#[derive(Debug)]
pub(super) enum Failure {
    /// No answer, or one that broke off.
    Network(String),
    /// The server is ill or busy, after several attempts.
    Server(StatusCode),
    /// 401 or 403.
    Denied(StatusCode),
    NoSuchFile,
    NoSuchRepo,
    NoSuchRevision,
    /// More bytes than announced.
    TooLong(u64),
    /// The announced number of bytes with another hash.
    WrongContent,
    /// Something this program does not do, whoever asks for it.
    Refused(String),
    /// `HF_HUB_OFFLINE` is set and the cache has no such file.
    NotCached,
    Disk {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// Sends requests to one endpoint.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    patience: Duration,
    backoff: Duration,
}

impl Client {
    pub(super) fn new(settings: &Settings) -> Self {
        let patience = Some(settings.patience);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("finetune/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(patience)
            .timeout_connect(patience)
            .timeout_recv_response(patience)
            .timeout_per_read(patience);
        // A proxy serves the network, not this machine.
        if ["http://127.0.0.1:", "http://localhost:"].iter().any(|local| settings.endpoint.starts_with(local)) {
            config = config.proxy(None);
        }
        let Settings { endpoint, token, patience, backoff, .. } = settings.clone();
        Self { agent: config.build().into(), endpoint, token, patience, backoff }
    }

    /// The address of a file.
    pub(super) fn url(&self, repo: &Repo, file: &str) -> String {
        let kind = match repo.kind {
            Kind::Model => "",
            Kind::Dataset => "datasets/",
        };
        let file = file.split('/').map(percent_encode).collect::<Vec<_>>().join("/");
        format!("{}/{kind}{}/resolve/{}/{file}", self.endpoint, repo.id, percent_encode(&repo.revision))
    }

    /// Asks what a file is, up to `attempts` times.
    pub(super) fn metadata(&self, repo: &Repo, file: &str, attempts: u32) -> Result<Metadata> {
        let start = self.url(repo, file);
        let mut url = start.clone();
        for _ in 0..MAX_REDIRECTS {
            let response = self.send(&url, Method::Head, attempts)?;
            // The redirect of a large file to its content already carries what is asked for.
            let answered = header_text(&response, "x-linked-etag").is_some();
            if !response.status().is_redirection() || answered {
                return Metadata::read(&response);
            }
            url = self.redirect(&start, &url, &response)?;
        }
        Err(Failure::Refused(format!("`{start}` redirects without end")))
    }

    /// Writes the content of `url` to the empty `file`: exactly `size` bytes, or a failure.
    pub(super) fn download(&self, url: &str, size: u64, file: &mut File, tell: &mut dyn FnMut(u64)) -> Result<()> {
        let (mut done, mut attempt) = (0, 1);
        loop {
            let before = done;
            match self.receive(url, size, file, &mut done, tell) {
                Err(failure @ Failure::Network(_)) => {
                    attempt = if done >= before + GOOD_RUN_BYTES { 1 } else { attempt + 1 };
                    if attempt > ATTEMPTS {
                        return Err(failure);
                    }
                    self.pause(attempt);
                }
                result => return result,
            }
        }
    }

    /// One connection's part of a download: goes on after the `done` bytes that `file` already has.
    fn receive(&self, url: &str, size: u64, file: &mut File, done: &mut u64, tell: &mut dyn FnMut(u64)) -> Result<()> {
        let disk = |error| Failure::disk("write", Path::new("the download"))(error);
        let mut response = self.get(url, *done)?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // The whole file, whatever was asked for.
            *done = 0;
            file.set_len(0).and_then(|()| file.rewind()).map_err(disk)?;
        }
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 128 << 10];
        let (mut lap, mut lap_start) = (Instant::now(), *done);
        while *done <= size {
            let read = body.read(&mut buffer).map_err(|error| Failure::Network(error.to_string()))?;
            if read == 0 {
                break;
            }
            *done += read as u64;
            if *done > size {
                return Err(Failure::TooLong(size));
            }
            file.write_all(&buffer[..read]).map_err(disk)?;
            tell(*done);
            if lap.elapsed() > self.patience {
                if *done - lap_start < MIN_BYTES {
                    return Err(Failure::Network(format!("only {} bytes in {:?}", *done - lap_start, self.patience)));
                }
                (lap, lap_start) = (Instant::now(), *done);
            }
        }
        if *done < size {
            return Err(Failure::Network(format!("the connection ended after {done} of {size} bytes")));
        }
        Ok(())
    }

    /// `GET` from byte `from` on, redirects followed.
    fn get(&self, start: &str, from: u64) -> Result<Response<Body>> {
        let mut url = start.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let response = self.send(&url, Method::Get { from }, ATTEMPTS)?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            url = self.redirect(start, &url, &response)?;
        }
        Err(Failure::Refused(format!("`{start}` redirects without end")))
    }

    /// Sends a request until it is answered; what is an answer of success or a redirect comes back.
    fn send(&self, url: &str, method: Method, attempts: u32) -> Result<Response<Body>> {
        let mut attempt = 1;
        loop {
            let failure = match self.send_once(url, method) {
                Err(error) => Failure::Network(error.to_string()),
                Ok(response) => match Failure::of_status(&response) {
                    None => return Ok(response),
                    Some(failure @ Failure::Server(_)) => {
                        if let Some(pause) = retry_after(&response) {
                            if pause > MAX_PAUSE {
                                return Err(failure);
                            }
                            std::thread::sleep(pause);
                        }
                        failure
                    }
                    Some(failure) => return Err(failure),
                },
            };
            attempt += 1;
            if attempt > attempts {
                return Err(failure);
            }
            self.pause(attempt);
        }
    }

    fn send_once(&self, url: &str, method: Method) -> Result<Response<Body>, ureq::Error> {
        let mut request = match method {
            Method::Head => self.agent.head(url),
            Method::Get { .. } => self.agent.get(url),
        };
        // Sizes and hashes are those of the file, not of a compressed transport.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Method::Get { from: from @ 1.. } = method {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        if let Some(token) = self.token.as_ref().filter(|_| same_origin(url, &self.endpoint)) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        request.call()
    }

    /// Where a redirect leads, if it may lead there.
    fn redirect(&self, start: &str, from: &str, response: &Response<Body>) -> Result<String> {
        let Some(location) = header_text(response, "location") else {
            return Err(Failure::Refused(format!("`{from}` redirects to nowhere")));
        };
        let target = match origin(from) {
            Some((scheme, authority)) if location.starts_with('/') && !location.starts_with("//") => {
                format!("{scheme}://{authority}{location}")
            }
            _ => location.to_owned(),
        };
        if same_origin(&target, start) || is_below(&target, start) || self.is_content_network(&target, start) {
            return Ok(target);
        }
        let host = origin(&target).map_or(target, |(_, authority)| authority);
        Err(Failure::Refused(format!("the server redirects to another host, `{host}`, which is not followed")))
    }

    fn is_content_network(&self, target: &str, start: &str) -> bool {
        same_origin(start, &self.endpoint)
            && origin(target).is_some_and(|(scheme, host)| scheme == "https" && host.ends_with(CONTENT_NETWORK))
    }

    /// Waits before attempt 2, 3, ….
    fn pause(&self, attempt: u32) {
        std::thread::sleep(self.backoff * (1 << (attempt - 2)));
    }
}

#[derive(Clone, Copy)]
enum Method {
    Head,
    Get { from: u64 },
}

impl Metadata {
    fn read(response: &Response<Body>) -> Result<Self> {
        let first = |names: [&str; 2]| names.into_iter().find_map(|name| header_text(response, name));
        let lacks = |what: &str| Failure::Refused(format!("the server's answer has no {what}; is it a Hub?"));
        let commit = header_text(response, "x-repo-commit").filter(|commit| is_hex(commit, 40));
        let etag = first(["x-linked-etag", "etag"]).map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let etag = etag.filter(|etag| is_hex(etag, 40) || is_hex(etag, 64));
        let size = first(["x-linked-size", "content-length"]).and_then(|size| size.parse().ok());
        Ok(Self {
            commit: commit.ok_or_else(|| lacks("commit (`X-Repo-Commit`)"))?.to_owned(),
            etag: etag.ok_or_else(|| lacks("hash (`ETag`)"))?.to_owned(),
            size: size.ok_or_else(|| lacks("size (`Content-Length`)"))?,
        })
    }
}

impl Failure {
    pub(super) fn disk(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Disk { action, path, source }
    }

    /// The failure that a status means; `None` for success and redirects.
    fn of_status(response: &Response<Body>) -> Option<Self> {
        let status = response.status();
        match (status.as_u16(), header_text(response, "x-error-code")) {
            (200..=399, _) => None,
            // The Hub answers 401 for a repository that does not exist, so as not to tell private ones apart.
            (_, Some("RepoNotFound")) => Some(Self::NoSuchRepo),
            (_, Some("RevisionNotFound")) => Some(Self::NoSuchRevision),
            (401 | 403, _) => Some(Self::Denied(status)),
            (404 | 410, _) => Some(Self::NoSuchFile),
            (408 | 429 | 500.., _) => Some(Self::Server(status)),
            _ => Some(Self::Refused(format!("the server answers {status}"))),
        }
    }

    /// Whether the file is not there to be had.
    pub(super) fn is_absence(&self) -> bool {
        matches!(self, Self::NoSuchFile | Self::NotCached)
    }

    /// Whether the server is out of reach or ill, so that a cached copy has to do.
    pub(super) fn is_network(&self) -> bool {
        matches!(self, Self::Network(_) | Self::Server(_))
    }

    /// The error the user sees.
    pub(super) fn explain(self, settings: &Settings, repo: &Repo, file: &str) -> Error {
        let Settings { endpoint, .. } = settings;
        let id = &repo.id;
        if let Self::Disk { action, path, source } = self {
            return Error::Io { action, path, source };
        }
        let ways_on = match repo.kind {
            Kind::Model => {
                "go on with a local folder in place of the name, a mirror (`HF_ENDPOINT=URL`) or, to train, random \
                 weights (`--init random`)"
            }
            Kind::Dataset => "go on with a local file (`--data FILE`) or a mirror (`HF_ENDPOINT=URL`)",
        };
        let advice = match self {
            Self::Denied(_) => {
                format!("accept its terms at {endpoint}/{id} and set `HF_TOKEN` to a token that may read it")
            }
            Self::NoSuchRepo => {
                "check the name, which is no local folder either; a private one needs `HF_TOKEN`".to_owned()
            }
            Self::NoSuchRevision => "check `--revision`".to_owned(),
            Self::NoSuchFile => "the repository is not what is needed here".to_owned(),
            Self::NotCached => format!("unset `HF_HUB_OFFLINE` to download it, or {ways_on}"),
            _ => ways_on.to_owned(),
        };
        // What the user asked for or allowed is at fault, or else the network.
        let asked = matches!(
            self,
            Self::Denied(_) | Self::NoSuchRepo | Self::NoSuchRevision | Self::NoSuchFile | Self::NotCached
        );
        let (origin, message) = (format!("{id} at `{endpoint}`"), format!("cannot get `{file}`: {self}; {advice}"));
        if asked { Error::model(origin, message) } else { Error::hub(origin, message) }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(what) => write!(f, "no usable connection ({what})"),
            Self::Server(status) => write!(f, "the server keeps answering {status}"),
            Self::Denied(status) => write!(f, "the server denies access ({status})"),
            Self::NoSuchFile => f.write_str("the server has no such file"),
            Self::NoSuchRepo => f.write_str("the server has no such repository"),
            Self::NoSuchRevision => f.write_str("the repository has no such revision"),
            Self::TooLong(size) => write!(f, "the server sends more than the {size} bytes it announced"),
            Self::WrongContent => f.write_str("what arrived does not match the hash that the server announced"),
            Self::Refused(why) => f.write_str(why),
            Self::NotCached => f.write_str("it is not in the cache, and `HF_HUB_OFFLINE` forbids the download"),
            Self::Disk { action, path, source } => write!(f, "cannot {action} `{}`: {source}", path.display()),
        }
    }
}

fn header_text<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// The pause a busy server asks for, in seconds.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    header_text(response, "retry-after")?.parse().ok().map(Duration::from_secs)
}

/// Scheme and authority (host and port) of a URL.
fn origin(url: &str) -> Option<(String, String)> {
    let uri: Uri = url.parse().ok()?;
    Some((uri.scheme_str()?.to_owned(), uri.authority()?.as_str().to_ascii_lowercase()))
}

fn same_origin(a: &str, b: &str) -> bool {
    origin(a).is_some() && origin(a) == origin(b)
}

/// Whether `target`'s host is a name below that of `start`, reached as safely.
fn is_below(target: &str, start: &str) -> bool {
    match (origin(target), origin(start)) {
        (Some((scheme, host)), Some((start_scheme, start_host))) => {
            scheme == start_scheme && host.ends_with(&format!(".{start_host}"))
        }
        _ => false,
    }
}

/// A path segment with everything but unreserved characters escaped.
fn percent_encode(segment: &str) -> String {
    use fmt::Write as _;
    segment.bytes().fold(String::with_capacity(segment.len()), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_the_hubs() {
        let client = Client::new(&Settings::from_vars(|_| None));
        let repo = Repo { kind: Kind::Dataset, id: "o/n".into(), revision: "refs/convert/parquet".into() };
        let url = client.url(&repo, "a dir/0.parquet");
        assert_eq!(url, "https://huggingface.co/datasets/o/n/resolve/refs%2Fconvert%2Fparquet/a%20dir/0.parquet");
        let repo = Repo { kind: Kind::Model, id: "o/n".into(), revision: "main".into() };
        assert_eq!(client.url(&repo, "config.json"), "https://huggingface.co/o/n/resolve/main/config.json");
    }

    #[test]
    fn a_name_below_is_no_lookalike() {
        assert!(is_below("https://cdn.mirror.org/x", "https://mirror.org/y"));
        for target in ["https://evilmirror.org/", "http://cdn.mirror.org/", "https://mirror.org.evil.net/"] {
            assert!(!is_below(target, "https://mirror.org/y") && !same_origin(target, "https://mirror.org/y"));
        }
        assert!(!same_origin("http://127.0.0.1:1/", "http://127.0.0.1:2/"));
        assert!(!same_origin("https://mirror.org@evil.net/", "https://mirror.org/"));
        let client = Client::new(&Settings::from_vars(|_| None));
        let hub = "https://huggingface.co/o/n";
        assert!(client.is_content_network("https://cas-bridge.xethub.hf.co/x", hub));
        assert!(!client.is_content_network("https://evilhf.co/x", hub));
        assert!(!client.is_content_network("http://cdn.hf.co/x", hub));
    }
}
