//! Requests a file's metadata and contents from the Hub, with retries.
//!
//! `hf-hub` builds every request: URL, token, agent. Its own downloads are not used, because they have no timeout,
//! accept any contents, follow redirects to any host and send the token there (see docs/faults.md). So requests have
//! timeouts here, and redirects are followed only to the same server, to its subdomains, or from the Hub and its
//! mirrors to the Hub's content network. The token is sent only to the endpoint.

use super::Repo;
use super::cache::{Partial, is_hex};
use super::error::HubError;
use super::settings::{Settings, without_password};
use crate::data::HubListing;
use crate::digest::{Digest, MAX_SMALL_FILE};
use hf_hub::api::sync::{Api, ApiBuilder};
use serde_json::Value;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::{Agent, Body};

/// Attempts per request.
pub(super) const ATTEMPTS: u32 = 5;

/// Maximum number of redirects in a row.
const MAX_REDIRECTS: usize = 5;

/// A server that requests a longer pause than this counts as failed.
const MAX_PAUSE: Duration = Duration::from_mins(1);

/// Bytes that must arrive within [`Settings::timeout`]; a slower server counts as not responding.
const MIN_BYTES: u64 = 16 << 10;

/// A connection that delivered this much before it broke resets the number of attempts.
const GOOD_RUN_BYTES: u64 = 1 << 20;

/// The domain that serves the contents of large files, for the Hub and its mirrors.
const CONTENT_NETWORK: &str = ".hf.co";

/// A file's metadata from the Hub.
pub(super) struct Metadata {
    /// The revision's commit: 40 hexadecimal digits.
    pub(super) commit: String,
    /// SHA-256 of a large file, git SHA-1 of a small one, in hexadecimal.
    pub(super) etag: String,
    /// Size in bytes.
    pub(super) size: u64,
}

pub(super) enum Payload<'a> {
    Text(&'a str),
    File(&'a Path),
}

type Result<T, E = HubError> = std::result::Result<T, E>;

/// Adds time limits to a configuration, and leaves redirects and statuses to the caller. A macro, because the builders
/// of agents and requests share no public trait.
macro_rules! limited {
    ($client:expr, $url:expr, $config:expr) => {{
        let timeout = Some($client.settings.timeout);
        let config = ($config)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(timeout)
            .timeout_connect(timeout)
            .timeout_recv_response(timeout)
            .timeout_per_read(timeout)
            .timeout_per_write(timeout);
        // Do not use a proxy for this machine.
        let is_local = ["http://127.0.0.1:", "http://localhost:"].iter().any(|local| $url.starts_with(local));
        if is_local { config.proxy(None) } else { config }
    }};
}

/// Sends requests to one endpoint.
#[derive(Clone)]
pub(super) struct Client {
    api: Api,
    settings: Settings,
}

impl Client {
    /// A client for the endpoint and token of `settings`, after checking them.
    pub(super) fn new(settings: &Settings) -> Result<Self> {
        settings.check()?;
        let api = ApiBuilder::from_cache(hf_hub::Cache::new(settings.cache.clone()))
            .with_endpoint(settings.endpoint.clone())
            .with_token(settings.token.clone())
            .with_user_agent("finetune", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| HubError::Refused(error.to_string()))?;
        Ok(Self { api, settings: settings.clone() })
    }

    pub(super) fn url(&self, repo: &Repo, file: &str) -> String {
        self.api
            .repo(repo.as_hub_repo(&repo.id))
            .url(&file.split('/').map(percent_encode).collect::<Vec<_>>().join("/"))
    }

    /// Requests the names and sizes of a data set's files.
    pub(super) fn list(&self, repo: &Repo) -> Result<HubListing> {
        let endpoint = &self.settings.endpoint;
        let id = &repo.id;
        let revision = percent_encode(&repo.revision);
        let url = format!("{endpoint}/api/datasets/{id}/revision/{revision}?blobs=true");
        let answer = read_json(&mut self.get(&url, None, ATTEMPTS, |_| false)?)?;
        let Some(commit) = answer["sha"].as_str().filter(|commit| is_hex(commit, 40)) else {
            return Err(HubError::Refused("the server's answer has no commit; is it a Hub?".into()));
        };
        let files = answer["siblings"].as_array().into_iter().flatten();
        let file = |file: &Value| Some((file["rfilename"].as_str()?.into(), file["size"].as_u64().unwrap_or(0)));
        Ok(HubListing { commit: commit.to_owned(), files: files.filter_map(file).collect() })
    }

    /// Requests a file's metadata, up to `attempts` times.
    pub(super) fn metadata(&self, repo: &Repo, file: &str, attempts: u32) -> Result<Metadata> {
        // Request one byte, as `hf-hub` does: the response's headers describe the whole file.
        let url = self.url(repo, file);
        // A large file's redirect already has the metadata.
        let answered = |response: &Response<Body>| header_text(response, "x-linked-etag").is_some();
        let response = match self.get(&url, Some("bytes=0-0"), attempts, answered) {
            // An empty file has no first byte.
            Err(HubError::NoSuchRange) => self.get(&url, None, attempts, answered),
            response => response,
        };
        Metadata::read(&response?)
    }

    /// Appends the contents of `url` to a partial download. Fails unless the result has exactly `size` bytes.
    pub(super) fn download(
        &self,
        url: &str,
        size: u64,
        partial: &Partial,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut done = partial.len;
        let mut attempt = 1;
        loop {
            let before = done;
            match self.receive(url, size, partial, &mut done, on_bytes) {
                Err(failure @ HubError::Network(_)) => {
                    attempt = 1 + if done >= before + GOOD_RUN_BYTES { 1 } else { attempt };
                    if attempt > ATTEMPTS {
                        return Err(failure);
                    }
                    self.pause(attempt);
                }
                result => return result,
            }
        }
    }

    /// Downloads over one connection, continuing after the first `done` bytes.
    fn receive(
        &self,
        url: &str,
        size: u64,
        Partial { file, path, .. }: &Partial,
        done: &mut u64,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut file: &File = file;
        let disk = |error| HubError::disk("write", path)(error);
        let range = (*done > 0).then(|| format!("bytes={done}-"));
        let mut response = self.get(url, range.as_deref(), ATTEMPTS, |_| false)?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            // The server sent the whole file and ignored the range.
            *done = 0;
        }
        file.set_len(*done).and_then(|()| file.seek(SeekFrom::Start(*done))).map_err(disk)?;
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 128 << 10];
        let mut lap = Instant::now();
        let mut lap_start = *done;
        let timeout = self.settings.timeout;
        loop {
            let read = body.read(&mut buffer).map_err(|error| self.network(&error))?;
            if read == 0 {
                break;
            }
            *done += read as u64;
            if *done > size {
                return Err(HubError::SizeMismatch(size));
            }
            file.write_all(&buffer[..read]).map_err(disk)?;
            on_bytes(*done);
            if lap.elapsed() > timeout {
                if *done - lap_start < MIN_BYTES {
                    return Err(HubError::Network(format!("only {} bytes in {timeout:?}", *done - lap_start)));
                }
                lap = Instant::now();
                lap_start = *done;
            }
        }
        if *done < size {
            return Err(HubError::Network(format!("the connection ended after {done} of {size} bytes")));
        }
        Ok(())
    }

    /// Sends a `GET` and follows redirects until a response satisfies `answered`.
    pub(super) fn get(
        &self,
        start: &str,
        range: Option<&str>,
        attempts: u32,
        answered: impl Fn(&Response<Body>) -> bool,
    ) -> Result<Response<Body>> {
        let mut url = start.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let response = self.retry(attempts, || self.send_once(&url, range))?;
            if !response.status().is_redirection() || answered(&response) {
                return Ok(response);
            }
            url = self.redirect(start, &url, &response)?;
        }
        Err(HubError::Refused(format!("`{}` redirects too often", without_password(start))))
    }

    /// Sends `payload` with retries, and with the token if `url` is on the endpoint. Does not follow redirects.
    pub(super) fn upload(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        payload: &Payload<'_>,
    ) -> Result<Response<Body>> {
        let response = self.retry(ATTEMPTS, || self.upload_once(method, url, headers, payload))?;
        if response.status().is_redirection() {
            return Err(HubError::Refused("the server redirects the upload; check the model's name".into()));
        }
        Ok(response)
    }

    /// Calls `send` again after failures of the network or the server; returns a success or a redirect.
    fn retry(&self, attempts: u32, send: impl Fn() -> Result<Response<Body>>) -> Result<Response<Body>> {
        let mut attempt = 1;
        loop {
            let (failure, asked) = match send() {
                Err(failure @ HubError::Network(_)) => (failure, None),
                Err(failure) => return Err(failure),
                Ok(mut response) => match HubError::from_status(&mut response, &self.settings) {
                    None => return Ok(response),
                    Some(failure @ HubError::Server(_)) => {
                        let seconds = header_text(&response, "retry-after").and_then(|text| text.parse().ok());
                        (failure, seconds.map(Duration::from_secs))
                    }
                    Some(failure) => return Err(failure),
                },
            };
            attempt += 1;
            if attempt > attempts || asked.is_some_and(|pause| pause > MAX_PAUSE) {
                return Err(failure);
            }
            match asked {
                Some(pause) => std::thread::sleep(pause),
                None => self.pause(attempt),
            }
        }
    }

    fn upload_once(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        payload: &Payload<'_>,
    ) -> Result<Response<Body>> {
        let agent = Agent::new_with_config(limited!(self, url, Agent::config_builder()).build());
        let mut request = if method == "PUT" { agent.put(url) } else { agent.post(url) };
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = self.settings.token.as_ref()
            && same_origin(url, &self.settings.endpoint)
        {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let sent = match payload {
            Payload::Text(text) => request.send(*text),
            Payload::File(path) => request.send(File::open(path).map_err(HubError::disk("read", path))?),
        };
        sent.map_err(|error| {
            // Only a second read tells a failure of the disk from one of the network.
            let unreadable = match payload {
                Payload::File(path) => Digest::of_file(path).err(),
                Payload::Text(_) => None,
            };
            unreadable.map_or_else(|| self.network(&error), HubError::Local)
        })
    }

    fn send_once(&self, url: &str, range: Option<&str>) -> Result<Response<Body>> {
        let endpoint = &self.settings.endpoint;
        let any = hf_hub::Repo::model(String::new());
        let config = limited!(self, url, self.api.repo(any).info_request().uri(url).config());
        // Sizes and hashes refer to the uncompressed file.
        let mut request = config.build().header(header::ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(header::RANGE, range);
        }
        if !same_origin(url, endpoint) {
            // An invalid request has no headers, and `call` reports why.
            request.headers_mut().map(|headers| headers.remove(header::AUTHORIZATION));
        }
        request.call().map_err(|error| self.network(&error))
    }

    /// A network failure, with the endpoint's password removed from the message.
    fn network(&self, error: &dyn fmt::Display) -> HubError {
        let Settings { endpoint, .. } = &self.settings;
        HubError::Network(error.to_string().replace(endpoint, &without_password(endpoint)))
    }

    /// The target of a redirect, if it is allowed.
    fn redirect(&self, start: &str, from: &str, response: &Response<Body>) -> Result<String> {
        let Some(location) = header_text(response, "location") else {
            return Err(HubError::Refused(format!("`{}` redirects without a target", without_password(from))));
        };
        let authority = |uri: Uri| Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?));
        let target = match from.parse().ok().and_then(authority) {
            Some(server) if location.starts_with('/') && !location.starts_with("//") => server + location,
            _ => location.to_owned(),
        };
        if same_origin(&target, start) || is_below(&target, start) || self.is_content_network(&target, start) {
            return Ok(target);
        }
        let host =
            origin(&target).map_or_else(|| without_password(&target), |(_, host, port)| format!("{host}:{port}"));
        Err(HubError::Refused(format!("the server redirects to another host, `{host}`, which is not followed")))
    }

    fn is_content_network(&self, target: &str, start: &str) -> bool {
        same_origin(start, &self.settings.endpoint)
            && origin(target)
                .is_some_and(|(scheme, host, port)| scheme == "https" && port == 443 && host.ends_with(CONTENT_NETWORK))
    }

    /// Waits before attempt 2, 3, ….
    fn pause(&self, attempt: u32) {
        std::thread::sleep(self.settings.backoff * (1 << (attempt - 2)));
    }
}

impl Metadata {
    fn read(response: &Response<Body>) -> Result<Self> {
        let first = |names: [&str; 2]| names.into_iter().find_map(|name| header_text(response, name));
        let lacks = |what: &str| HubError::Refused(format!("the server's answer has no {what}; is it a Hub?"));
        let commit = header_text(response, "x-repo-commit").filter(|commit| is_hex(commit, 40));
        let etag = first(["x-linked-etag", "etag"]).map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let etag = etag.filter(|etag| is_hex(etag, 40) || is_hex(etag, 64));
        // In a partial response, the whole file's size follows the slash.
        let of_range = header_text(response, "content-range").and_then(|range| Some(range.rsplit_once('/')?.1));
        let size = header_text(response, "x-linked-size").or(of_range);
        let size = size.or_else(|| header_text(response, "content-length")).and_then(|size| size.parse().ok());
        Ok(Self {
            commit: commit.ok_or_else(|| lacks("commit (`X-Repo-Commit`)"))?.to_owned(),
            etag: etag.ok_or_else(|| lacks("hash (`ETag`)"))?.to_owned(),
            size: size.ok_or_else(|| lacks("size (`Content-Length`)"))?,
        })
    }
}

pub(super) fn read_json(response: &mut Response<Body>) -> Result<Value> {
    let text = response.body_mut().with_config().limit(MAX_SMALL_FILE).read_to_string();
    let text = text.map_err(|error| match error {
        ureq::Error::BodyExceedsLimit(limit) => {
            HubError::Refused(format!("the server's answer has more than {limit} bytes, the limit for such an answer"))
        }
        error => HubError::Network(error.to_string()),
    })?;
    serde_json::from_str(&text).map_err(|error| HubError::Refused(format!("the server's answer is not JSON: {error}")))
}

pub(super) fn header_text<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Scheme, host and port of a URL.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_owned();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

fn same_origin(a: &str, b: &str) -> bool {
    origin(a).is_some() && origin(a) == origin(b)
}

/// Whether contents may be sent to `url`, which the endpoint has named.
pub(super) fn is_trusted(url: &str, endpoint: &str) -> bool {
    same_origin(url, endpoint) || origin(url).is_some_and(|(scheme, ..)| scheme == "https")
}

/// Whether `target` is on a subdomain of `start`'s host, and equally secure.
fn is_below(target: &str, start: &str) -> bool {
    match (origin(target), origin(start)) {
        (Some((scheme, host, port)), Some((start_scheme, start_host, start_port))) => {
            scheme == start_scheme && port == start_port && host.ends_with(&format!(".{start_host}"))
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
    use super::super::RepoType;
    use super::*;

    #[test]
    fn urls_are_those_of_the_hub() {
        let client = Client::new(&Settings::from_vars(|_| None)).unwrap();
        let repo = Repo::new(RepoType::Dataset, "o/n", "refs/convert/parquet").unwrap();
        let url = client.url(&repo, "a dir/0.parquet");
        assert_eq!(url, "https://huggingface.co/datasets/o/n/resolve/refs%2Fconvert%2Fparquet/a%20dir/0.parquet");
        let repo = Repo::new(RepoType::Model, "o/n", "main").unwrap();
        assert_eq!(client.url(&repo, "config.json"), "https://huggingface.co/o/n/resolve/main/config.json");
    }

    #[test]
    fn a_failed_read_of_a_file_is_no_failure_of_the_network() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Client::new(&Settings::from_vars(|_| None)).unwrap();
        let url = format!("http://{}/", server.local_addr().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let sent = client.upload("PUT", &url, &[], &Payload::File(folder.path()));
        assert!(matches!(sent, Err(HubError::Local(_))), "{sent:?}");
    }

    /// The storage of large files is on other hosts.
    #[test]
    fn a_request_to_another_host_has_no_token() {
        use std::io::BufRead as _;
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", server.local_addr().unwrap());
        for (endpoint, sent) in [("https://huggingface.co", false), (&*url, true)] {
            let endpoint = endpoint.to_owned();
            let settings = Settings { endpoint, token: Some("hf_a".into()), ..Settings::from_vars(|_| None) };
            let client = Client::new(&settings).unwrap();
            let upload = || client.upload("PUT", &url, &[], &Payload::Text(""));
            let download = || client.send_once(&url, None);
            for request in [&upload as &dyn Fn() -> Result<Response<Body>>, &download] {
                std::thread::scope(|scope| {
                    let served = scope.spawn(|| {
                        let mut stream = server.accept().unwrap().0;
                        let (mut reader, mut head) = (std::io::BufReader::new(&stream), String::new());
                        while !head.ends_with("\r\n\r\n") {
                            reader.read_line(&mut head).unwrap();
                        }
                        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
                        head
                    });
                    request().unwrap();
                    let head = served.join().unwrap();
                    assert_eq!(head.contains("Bearer hf_a"), sent, "{head}");
                });
            }
        }
    }

    #[test]
    fn a_lookalike_is_not_a_subdomain() {
        assert!(is_below("https://cdn.mirror.org/x", "https://mirror.org/y"));
        for target in ["https://evilmirror.org/", "http://cdn.mirror.org/", "https://mirror.org.evil.net/"] {
            assert!(!is_below(target, "https://mirror.org/y") && !same_origin(target, "https://mirror.org/y"));
        }
        assert!(!same_origin("http://127.0.0.1:1/", "http://127.0.0.1:2/"));
        assert!(!same_origin("https://mirror.org@evil.net/", "https://mirror.org/"));
        let client = Client::new(&Settings::from_vars(|_| None)).unwrap();
        let hub = "https://huggingface.co/o/n";
        assert!(client.is_content_network("https://cas-bridge.xethub.hf.co/x", hub));
        assert!(!client.is_content_network("https://evilhf.co/x", hub));
        assert!(!client.is_content_network("http://cdn.hf.co/x", hub));
    }
}
