//! The Hub client against a local server that misbehaves in every way, and the state of the cache afterwards.

#![allow(clippy::format_collect, clippy::assigning_clones, reason = "a test may take the short way")]

use crate::common::{golden, launch};
use finetune::data::{DataSource, DatasetBuilder, Downloader, HubFile, LoadEvent, Tokenizer};
use finetune::store::hub::{Hub, ModelFiles, Settings};
use finetune::{Error, Result};
use sha1::Digest as _;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Requests for optional files of a model.
const OPTIONAL: [&str; 4] = [
    "ASK tokenizer_config.json",
    "ASK special_tokens_map.json",
    "ASK generation_config.json",
    "ASK chat_template.jinja",
];
const LATER_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// The server's fault for a file.
#[derive(Clone)]
enum Fault {
    /// Answers every request with a status line and headers.
    Status(&'static str),
    /// Answers so for the first `n` requests.
    StatusFor(u32, &'static str),
    /// Sends the first half of the requested bytes and closes the connection, once.
    DropsOnce,
    /// Sends the first half and then nothing for a long time.
    Stalls,
    /// Sends this many of the requested bytes and closes the connection, each time.
    DropsAfter(usize),
    /// Answers with this text: `ask` to the request about the file, `get` to the download. `None` is the right answer.
    Raw { ask: Option<String>, get: Option<String> },
}

/// At the end of a raw answer: bytes without end, single bytes with pauses, or silence.
const FOREVER: char = '∞';
const TRICKLE: char = '⋯';
const SILENCE: char = '…';

#[derive(Default)]
struct State {
    files: HashMap<String, Vec<u8>>,
    faults: HashMap<String, Fault>,
    commit: String,
    /// "ASK file" or "GET file" of each request, with `+token` and `+range` if they were sent.
    log: Vec<String>,
}

/// A server on a separate port, which lives as long as the test process, and a cache for its files.
struct Server {
    address: String,
    state: Arc<Mutex<State>>,
    cache: TempDir,
}

impl Server {
    /// A server with a small model.
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { address, state: Arc::default(), cache: tempfile::tempdir().unwrap() };
        server.state.lock().unwrap().commit = COMMIT.to_owned();
        server.put("config.json", br#"{"model_type": "gpt2"}"#);
        server.put("tokenizer.json", b"{}");
        // Long enough to come in several parts.
        server
            .put("model.safetensors", &(0..600_000u32).map(|i| (i % 251 * (i % 241) % 251) as u8).collect::<Vec<_>>());
        let state = Arc::clone(&server.state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let state = Arc::clone(&state);
                // A client that hangs up is one of the cases.
                std::thread::spawn(move || drop(answer(&stream.unwrap(), &state)));
            }
        });
        server
    }

    fn put(&self, file: &str, content: &[u8]) {
        self.state.lock().unwrap().files.insert(file.to_owned(), content.to_vec());
    }

    fn remove(&self, file: &str) {
        self.state.lock().unwrap().files.remove(file);
    }

    fn fault(&self, file: &str, fault: Fault) {
        self.state.lock().unwrap().faults.insert(file.to_owned(), fault);
    }

    fn heal(&self) {
        self.state.lock().unwrap().faults.clear();
    }

    /// The requests since the last call.
    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    fn cache(&self) -> &Path {
        self.cache.path()
    }

    fn settings(&self) -> Settings {
        let mut settings = Settings::from_vars(|_| None);
        settings.endpoint.clone_from(&self.address);
        settings.cache = self.cache().to_owned();
        settings.backoff = Duration::from_millis(1);
        settings
    }

    fn offline(&self) -> Settings {
        Settings { offline: true, ..self.settings() }
    }

    fn model(&self) -> Result<ModelFiles> {
        Hub::new(self.settings()).model("distilgpt2", None)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256(content: &[u8]) -> String {
    hex(&sha2::Sha256::digest(content))
}

/// Large files are known by their SHA-256, small ones by git's SHA-1.
fn etag(content: &[u8]) -> String {
    if content.len() > 1000 {
        return sha256(content);
    }
    hex(&sha1::Sha1::digest([format!("blob {}\0", content.len()).as_bytes(), content].concat()))
}

/// The lines of a request, which may come in several parts; none if there is no further request.
fn read_request(stream: &mut impl BufRead) -> Vec<String> {
    stream.lines().map_while(std::result::Result::ok).take_while(|line| !line.is_empty()).collect()
}

/// Reads one request, answers it and closes the connection.
fn answer(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut out = stream;
    let lines = read_request(&mut BufReader::new(stream));
    // A connection without a request only looks whether there is a network.
    let Some((request, headers)) = lines.split_first() else { return Ok(()) };
    let headers: Vec<String> = headers.iter().map(|line| line.to_lowercase()).collect();
    let header = |name: &str| headers.iter().find_map(|line| line.strip_prefix(name));
    let mut words = request.split(' ');
    let path = words.nth(1).unwrap_or_default();
    // /owner/name/resolve/revision/file
    let file = path.split("/resolve/").nth(1).and_then(|rest| rest.split_once('/')).map_or(path, |(_, file)| file);
    // A request for the first byte asks for the file's metadata.
    let ask = header("range: bytes=") == Some("0-0");
    let from = header("range: bytes=").and_then(|range| range.trim_end_matches('-').parse::<usize>().ok());

    let (content, fault, commit) = {
        let mut state = state.lock().unwrap();
        let token = header("authorization:").map_or("", |_| "+token");
        let range = from.map_or("", |_| "+range");
        state.log.push(format!("{} {file}{token}{range}", if ask { "ASK" } else { "GET" }));
        let fault = state.faults.get(file).cloned();
        match &fault {
            Some(Fault::StatusFor(1, _) | Fault::DropsOnce) if !ask || !matches!(fault, Some(Fault::DropsOnce)) => {
                state.faults.remove(file);
            }
            Some(Fault::StatusFor(n, status)) => {
                let next = Fault::StatusFor(n - 1, status);
                state.faults.insert(file.to_owned(), next);
            }
            _ => {}
        }
        (state.files.get(file).cloned(), fault, state.commit.clone())
    };
    if let Some(Fault::Status(status) | Fault::StatusFor(_, status)) = fault {
        return write!(out, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    let Some(content) = content else {
        let code = "X-Error-Code: EntryNotFound\r\n";
        return write!(out, "HTTP/1.1 404 Not Found\r\n{code}Content-Length: 0\r\nConnection: close\r\n\r\n");
    };
    if let Some(Fault::Raw { ask: at_ask, get }) = &fault
        && let Some(text) = if ask { at_ask } else { get }
    {
        let about = format!("ETag: \"{}\"\r\nX-Repo-Commit: {commit}\r\n", etag(&content));
        let range = format!("Content-Range: bytes 0-0/{}\r\nContent-Length: 1\r\n", content.len());
        let text = text.replace("{about}", &about).replace("{range}", &range);
        let text = text.replace("{half}", &" ".repeat(content.len() / 2));
        out.write_all(text.trim_end_matches([FOREVER, TRICKLE, SILENCE]).as_bytes())?;
        while text.ends_with(FOREVER) {
            out.write_all(&[b' '; 8192])?;
        }
        while text.ends_with(TRICKLE) {
            out.write_all(b" ")?;
            std::thread::sleep(Duration::from_millis(50));
        }
        if text.ends_with(SILENCE) {
            std::thread::sleep(Duration::from_secs(20));
        }
        return Ok(());
    }
    // A server that compresses answers has weak hashes.
    let weak = if ask { "W/" } else { "" };
    let headers = format!("ETag: {weak}\"{}\"\r\nX-Repo-Commit: {commit}\r\nConnection: close\r\n", etag(&content));
    if ask && content.is_empty() {
        let range = "Content-Range: bytes */0\r\nContent-Length: 0";
        return write!(out, "HTTP/1.1 416 Range Not Satisfiable\r\n{range}\r\nConnection: close\r\n\r\n");
    }
    if ask {
        let range = format!("Content-Range: bytes 0-0/{}\r\nContent-Length: 1", content.len());
        write!(out, "HTTP/1.1 206 Partial Content\r\n{headers}{range}\r\n\r\n")?;
        return out.write_all(&content[..1]);
    }
    let part = &content[from.unwrap_or(0)..];
    let status = if from.is_some() { "206 Partial Content" } else { "200 OK" };
    write!(out, "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", part.len())?;
    let sent = match fault {
        Some(Fault::DropsOnce | Fault::Stalls) => part.len() / 2,
        Some(Fault::DropsAfter(bytes)) => bytes.min(part.len()),
        _ => part.len(),
    };
    out.write_all(&part[..sent])?;
    if matches!(fault, Some(Fault::Stalls)) {
        std::thread::sleep(Duration::from_secs(20));
    }
    Ok(())
}

/// Every file below the cache whose content does not match its name. An unfinished download is marked as unfinished by
/// its name.
fn bad_files(cache: &Path) -> Vec<PathBuf> {
    let mut bad = Vec::new();
    let mut folders = vec![cache.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_symlink() {
                bad.extend((!path.exists()).then_some(path));
            } else if path.is_dir() {
                folders.push(path);
            } else if path.parent().unwrap().ends_with("blobs") && path.extension().is_none() {
                let right = etag(&fs::read(&path).unwrap()) == path.file_name().unwrap().to_string_lossy();
                bad.extend((!right).then_some(path));
            }
        }
    }
    bad
}

/// Downloads of `distilgpt2` that are not finished.
fn unfinished(cache: &Path) -> Vec<PathBuf> {
    let blobs = fs::read_dir(cache.join("models--distilbert--distilgpt2/blobs")).into_iter().flatten();
    blobs.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some()).collect()
}

fn text<T>(result: Result<T>) -> String {
    let error = result.err().unwrap();
    assert!(matches!(error, Error::Hub { .. } | Error::Model { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn a_model_arrives_in_pythons_layout_and_is_not_asked_for_twice() {
    let server = Server::start();
    let mut progress = Vec::new();
    let mut report = |event| progress.push(event);
    let files = Hub::new(server.settings()).report_to(&mut report).model("distilgpt2", None).unwrap();
    let repo = server.cache().join("models--distilbert--distilgpt2");
    assert_eq!(files.folder, repo.join("snapshots").join(COMMIT));
    assert_eq!((files.repo.as_str(), files.commit.as_str()), ("distilbert/distilgpt2", COMMIT));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let weights = fs::read(files.folder.join("model.safetensors")).unwrap();
    let link = fs::read_link(files.folder.join("model.safetensors")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(sha256(&weights)));
    let last = progress
        .iter()
        .rev()
        .find(|event| matches!(event, LoadEvent::Progress { what, .. } if what == "downloading model.safetensors"));
    let size = weights.len() as u64;
    let what = "downloading model.safetensors".into();
    assert_eq!(last, Some(&LoadEvent::Progress { what, done: size, total: size }));
    assert_eq!(bad_files(server.cache()), [] as [PathBuf; 0]);

    // Again: only whether the branch has moved, and whether the optional files exist now, is asked.
    server.requests();
    assert_eq!(server.model().unwrap(), files);
    assert_eq!(server.requests(), ["ASK config.json"].into_iter().chain(OPTIONAL).collect::<Vec<_>>());
    // A commit cannot move.
    Hub::new(server.settings()).model("distilgpt2", Some(COMMIT)).unwrap();
    assert_eq!(server.requests(), OPTIONAL);
    // A model with a template may have one for tools, too.
    let tools = "additional_chat_templates/tool_use.jinja";
    server.put("chat_template.jinja", b"{{ tools }}");
    server.put(tools, b"{{ tools }}");
    server.model().unwrap();
    assert_eq!(fs::read(files.folder.join(tools)).unwrap(), b"{{ tools }}");
}

#[test]
fn offline_uses_the_cache_and_nothing_else() {
    let server = Server::start();
    let files = server.model().unwrap();
    server.requests();
    assert_eq!(Hub::new(server.offline()).model("distilgpt2", None).unwrap(), files);
    let message = text(Hub::new(server.offline()).model("gpt2", None));
    for way in ["`HF_HUB_OFFLINE`", "a local folder", "`HF_ENDPOINT=URL`", "`--init random"] {
        assert!(message.contains(way), "{message}");
    }
    let other = Settings { offline_variable: "TRANSFORMERS_OFFLINE", ..server.offline() };
    let message = text(Hub::new(other).model("gpt2", None));
    assert!(message.contains("unset `TRANSFORMERS_OFFLINE`") && !message.contains("HF_HUB_OFFLINE"), "{message}");
    // The model has weights, but they are not cached.
    fs::remove_file(files.folder.join("model.safetensors")).unwrap();
    let message = text(Hub::new(server.offline()).model("distilgpt2", None));
    assert!(message.contains("cannot get `model.safetensors`: it is not in the cache"), "{message}");
    assert_eq!(server.requests(), [] as [String; 0]);
}

/// Replaces the links of a snapshot by plain files and removes the blobs, as copying a cache does.
fn make_plain(files: &ModelFiles) {
    for entry in fs::read_dir(&files.folder).unwrap() {
        let path = entry.unwrap().path();
        let content = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
    }
    fs::remove_dir_all(files.folder.join("../../blobs")).unwrap();
}

#[test]
fn snapshots_of_plain_files_serve_offline_and_are_verified_online() {
    let server = Server::start();
    let files = server.model().unwrap();
    make_plain(&files);
    assert_eq!(Hub::new(server.offline()).model("distilgpt2", None).unwrap(), files);
    // Online nothing is downloaded again, except what does not match.
    server.requests();
    assert_eq!(server.model().unwrap(), files);
    assert!(!server.requests().iter().any(|request| request.starts_with("GET")));
    let weights = fs::read(files.folder.join("model.safetensors")).unwrap();
    fs::write(files.folder.join("model.safetensors"), b"damaged").unwrap();
    assert_eq!(server.model().unwrap(), files);
    assert_eq!(fs::read(files.folder.join("model.safetensors")).unwrap(), weights);
    // A commit does not change, but the plain file may have.
    make_plain(&files);
    fs::write(files.folder.join("model.safetensors"), b"damaged").unwrap();
    assert_eq!(Hub::new(server.settings()).model("distilgpt2", Some(COMMIT)).unwrap(), files);
    assert_eq!(fs::read(files.folder.join("model.safetensors")).unwrap(), weights);
}

/// Since version 2, Python stores a large file once for all repositories of a cache.
#[test]
fn weights_that_python_shares_between_repositories_are_found() {
    let server = Server::start();
    let files = server.model().unwrap();
    let weights = fs::read(files.folder.join("model.safetensors")).unwrap();
    let blob = server.cache().join("models--distilbert--distilgpt2/blobs").join(sha256(&weights));
    let hash = "ab".repeat(32);
    let shared = server.cache().join("blobs/ab").join(&hash);
    fs::create_dir_all(shared.parent().unwrap()).unwrap();
    fs::rename(&blob, &shared).unwrap();
    std::os::unix::fs::symlink(format!("../../blobs/ab/{hash}"), &blob).unwrap();
    assert_eq!(Hub::new(server.offline()).model("distilgpt2", None).unwrap(), files);
    server.requests();
    assert_eq!(server.model().unwrap(), files);
    assert_eq!(server.requests(), ["ASK config.json"].into_iter().chain(OPTIONAL).collect::<Vec<_>>());
    // A damaged one is not used, and stays as it is.
    fs::write(&shared, b"damaged").unwrap();
    assert_eq!(server.model().unwrap(), files);
    assert_eq!(fs::read(files.folder.join("model.safetensors")).unwrap(), weights);
    assert_eq!(fs::read(&shared).unwrap(), b"damaged");
    // Only the name of a repository's blob verifies the contents.
    fs::write(&shared, &weights).unwrap();
    fs::remove_file(files.folder.join("model.safetensors")).unwrap();
    let direct = format!("../../../blobs/ab/{hash}");
    std::os::unix::fs::symlink(direct, files.folder.join("model.safetensors")).unwrap();
    let message = text(Hub::new(server.offline()).model("distilgpt2", None));
    assert!(message.contains("is not a file of this cache"), "{message}");
}

/// As in Python: a token may expire, and a private model may become invisible.
#[test]
fn a_cached_model_serves_while_the_server_denies_access_or_fails() {
    for status in [
        "401 Unauthorized",
        "401 Unauthorized\r\nX-Error-Code: RepoNotFound",
        "403 Forbidden",
        "503 Service Unavailable",
    ] {
        let server = Server::start();
        server.remove("model.safetensors");
        server.put("model-1.safetensors", b"one");
        server.put("model.safetensors.index.json", br#"{"weight_map": {"a": "model-1.safetensors"}}"#);
        let files = server.model().unwrap();
        let optional = OPTIONAL.map(|request| request.trim_start_matches("ASK "));
        let others = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"];
        for file in optional.into_iter().chain(others).chain(["model-1.safetensors"]) {
            server.fault(file, Fault::Status(status));
        }
        server.requests();
        assert_eq!(server.model().unwrap(), files, "{status}");
        let requests = server.requests();
        let different: HashSet<_> = requests.iter().collect();
        assert_eq!(different.len(), requests.len(), "{status}: a server that fails is asked once per file");
        // Without the shard, the first failure is the reason.
        fs::remove_file(files.folder.join("model.safetensors.index.json")).unwrap();
        let message = text(server.model());
        assert!(message.contains("cannot get `model.safetensors`: the server"), "{status}: {message}");
    }
}

#[test]
fn pythons_short_name_is_found_and_a_broken_entry_is_explained() {
    let server = Server::start();
    server.model().unwrap();
    let [full, short] = ["models--distilbert--distilgpt2", "models--distilgpt2"].map(|name| server.cache().join(name));
    let open = |name| Hub::new(server.offline()).model(name, None);
    fs::create_dir(&short).unwrap();
    assert!(open("distilgpt2").unwrap().folder.starts_with(&full), "the full name comes first");
    fs::remove_dir(&short).unwrap();
    fs::rename(&full, &short).unwrap();
    for name in ["distilgpt2", "distilbert/distilgpt2"] {
        assert_eq!(open(name).unwrap().folder, short.join("snapshots").join(COMMIT));
    }
    let message = text(open("gpt2"));
    assert!(message.contains("`hf download openai-community/gpt2`"), "{message}");
    assert!(message.contains(&server.cache().display().to_string()), "{message}");
    assert!(!text(open("owner/name")).contains("--init random"));
    // From the last cause to the first, as each hides the later ones.
    let tokenizer = short.join("snapshots").join(COMMIT).join("tokenizer.json");
    fs::remove_file(tokenizer.canonicalize().unwrap()).unwrap();
    assert!(text(open("distilgpt2")).contains("tokenizer.json` is a link to a missing file"));
    fs::remove_file(&tokenizer).unwrap();
    assert!(text(open("distilgpt2")).contains("tokenizer.json` is missing"));
    fs::write(short.join("refs/main"), "none").unwrap();
    assert!(text(open("distilgpt2")).contains("refs/main` contains no commit"));
}

#[test]
fn without_a_network_the_cached_copy_serves_or_three_ways_on_are_named() {
    let server = Server::start();
    let files = server.model().unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = Settings { endpoint: format!("http://{gone}"), ..server.settings() };
    let mut notices = Vec::new();
    let mut report = |event| {
        if let LoadEvent::Notice(notice) = event {
            notices.push(notice);
        }
    };
    // The optional files are not cached, and their existence is unknown.
    let found = Hub::new(settings.clone()).report_to(&mut report).model("distilgpt2", None);
    assert_eq!(found.unwrap(), files);
    assert!(notices[0].ends_with("using the cached `config.json`"), "{notices:?}");
    assert!(notices.iter().any(|it| it.ends_with("continuing without `chat_template.jinja`")), "{notices:?}");
    let message = text(Hub::new(settings).model("gpt2", None));
    for way in ["no usable connection", "a local folder", "`HF_ENDPOINT=URL`", "`--init random"] {
        assert!(message.contains(way), "{message}");
    }
}

#[test]
fn a_moved_branch_is_noticed_and_the_old_commit_stays() {
    let server = Server::start();
    let old = server.model().unwrap();
    server.state.lock().unwrap().commit = LATER_COMMIT.to_owned();
    server.put("config.json", br#"{"model_type": "gpt2", "n_layer": 2}"#);
    server.requests();
    let new = server.model().unwrap();
    assert_eq!(new.commit, LATER_COMMIT);
    assert!(!server.requests().iter().any(|request| request == "GET model.safetensors"), "the weights did not change");
    assert!(old.folder.join("config.json").exists() && new.folder.join("model.safetensors").exists());
    let pinned = Hub::new(server.settings()).model("distilgpt2", Some(COMMIT)).unwrap();
    assert_eq!(pinned, old);
}

#[test]
fn refusals_by_status_say_what_to_do_and_leave_nothing() {
    let cases = [
        ("404 Not Found", "has no such file", 1),
        ("404 Not Found\r\nX-Error-Code: RepoNotFound", "no such repository; check the name", 1),
        ("401 Unauthorized\r\nX-Error-Code: RepoNotFound", "needs `HF_TOKEN`", 1),
        ("404 Not Found\r\nX-Error-Code: RevisionNotFound", "check `--revision`", 1),
        ("401 Unauthorized", "set `HF_TOKEN`", 1),
        ("403 Forbidden", "accept its terms at", 1),
        ("403 X\r\nX-Error-Message: Ask the author", "denies access (403 Forbidden: Ask the author); accept", 1),
        ("429 Too Many Requests", "keeps answering 429", 5),
        ("429 Too Many Requests\r\nRetry-After: 3600", "keeps answering 429", 1),
        ("500 Internal Server Error", "keeps answering 500", 5),
        ("418 I'm a teapot", "the server answers 418", 1),
        (&*format!("418 X\r\nX-Error-Message: {}", "a".repeat(1000)).leak(), &format!(": {}…; ", "a".repeat(300)), 1),
    ];
    let server = Server::start();
    for (status, expected, requests) in cases {
        server.fault("config.json", Fault::Status(status));
        let message = text(server.model());
        assert!(message.contains(expected), "{status}: {message}");
        assert_eq!(server.requests().len(), requests, "{status}");
    }
    assert_eq!(fs::read_dir(server.cache()).unwrap().count(), 0, "nothing was stored");
}

#[test]
fn a_temporary_failure_is_retried() {
    let server = Server::start();
    server.fault("config.json", Fault::StatusFor(2, "500 Internal Server Error"));
    server.fault("tokenizer.json", Fault::StatusFor(1, "429 Too Many Requests\r\nRetry-After: 1"));
    let start = Instant::now();
    server.model().unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "the pause asked for is kept");
}

#[test]
fn a_dropped_connection_goes_on_where_it_broke() {
    let server = Server::start();
    server.fault("model.safetensors", Fault::DropsOnce);
    server.model().unwrap();
    let requests = server.requests();
    assert!(requests.contains(&"GET model.safetensors+range".to_owned()), "{requests:?}");
    assert_eq!(bad_files(server.cache()), [] as [PathBuf; 0]);
}

/// Regression: the pause after a good run lasted 68 years.
#[test]
fn connections_may_break_often_if_each_delivers_much() {
    let server = Server::start();
    let weights: Vec<u8> = (0..7 << 20).map(|i| (i % 251) as u8).collect();
    server.put("model.safetensors", &weights);
    server.fault("model.safetensors", Fault::DropsAfter(1 << 19));
    assert!(text(server.model()).contains("no usable connection"));
    server.fault("model.safetensors", Fault::DropsAfter(1 << 20));
    let files = server.model().unwrap();
    assert_eq!(fs::read(files.folder.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn an_unfinished_download_that_is_too_long_begins_again() {
    let server = Server::start();
    let weights = server.state.lock().unwrap().files["model.safetensors"].clone();
    let blobs = server.cache().join("models--distilbert--distilgpt2/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), [&weights[..], b"more"].concat()).unwrap();
    let files = server.model().unwrap();
    assert_eq!(fs::read(files.folder.join("model.safetensors")).unwrap(), weights);
    assert!(server.requests().contains(&"GET model.safetensors".to_owned()));
}

#[test]
fn a_redirect_within_the_endpoint_is_followed() {
    let server = Server::start();
    let weights = server.state.lock().unwrap().files["model.safetensors"].clone();
    server.put("there", &weights);
    for address in ["", &server.address] {
        let redirect = format!("HTTP/1.1 302 X\r\nLocation: {address}/o/n/resolve/main/there\r\n\r\n");
        server.fault("model.safetensors", Fault::Raw { ask: None, get: Some(redirect) });
        server.model().unwrap();
        fs::remove_dir_all(server.cache().join("models--distilbert--distilgpt2")).unwrap();
    }
}

/// A server refuses to send the first byte of an empty file.
#[test]
fn an_empty_file_arrives() {
    let server = Server::start();
    server.put("generation_config.json", b"");
    for _ in 0..2 {
        let files = server.model().unwrap();
        assert_eq!(fs::read(files.folder.join("generation_config.json")).unwrap(), b"");
    }
    assert_eq!(bad_files(server.cache()), [] as [PathBuf; 0]);
}

#[test]
fn a_damaged_cache_is_repaired_and_offline_it_is_not_used() {
    let server = Server::start();
    let files = server.model().unwrap();
    let damage = || {
        let path = files.folder.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[1000] ^= 4;
        fs::write(&path, bytes).unwrap();
    };
    damage();
    assert_eq!(server.model().unwrap(), files);
    assert_eq!(bad_files(server.cache()), [] as [PathBuf; 0]);
    damage();
    assert!(Hub::new(server.offline()).model("distilgpt2", None).is_err());
    assert_eq!(bad_files(server.cache()), [] as [PathBuf; 0]);
}

#[test]
fn pickled_weights_are_refused_with_the_reason() {
    let server = Server::start();
    server.remove("model.safetensors");
    let message = text(server.model());
    assert!(message.contains("neither `model.safetensors` nor"), "{message}");
    server.put("pytorch_model.bin", b"a pickle");
    let message = text(server.model());
    assert!(message.contains("its weights are pickled (`pytorch_model.bin`)"), "{message}");
    assert!(!server.requests().contains(&"GET pytorch_model.bin".to_owned()));
}

#[test]
fn sharded_weights_arrive_whole() {
    let server = Server::start();
    server.remove("model.safetensors");
    server.put("model-1.safetensors", b"one");
    server.put("model-2.safetensors", b"two");
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    server.put("model.safetensors.index.json", index);
    let files = server.model().unwrap();
    assert_eq!(fs::read(files.folder.join("model-2.safetensors")).unwrap(), b"two");
    server.put("model.safetensors.index.json", br#"{"weight_map": {"a": "../../../evil.safetensors"}}"#);
    server.state.lock().unwrap().commit = LATER_COMMIT.to_owned();
    let message = text(server.model());
    assert!(message.contains("which is not a safetensors file"), "{message}");
}

#[test]
fn several_at_once_share_a_cache() {
    let server = Server::start();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| server.model().unwrap())).collect();
        let all: Vec<ModelFiles> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    });
    let requests = server.requests();
    let downloads: Vec<_> = requests.iter().filter(|request| request.starts_with("GET")).collect();
    assert_eq!(downloads.iter().collect::<HashSet<_>>().len(), downloads.len(), "the others wait: {downloads:?}");
    assert_eq!(bad_files(server.cache()), [] as [PathBuf; 0]);
}

#[test]
fn data_sets_are_fetched_for_data() {
    let server = Server::start();
    server.put("dir/rows.jsonl", b"{\"text\": \"x\"}");
    let mut hub = Hub::new(server.settings());
    let path = hub.download(HubFile { repo: "o/n", revision: "main", file: "dir/rows.jsonl" }).unwrap();
    assert_eq!(path, server.cache().join("datasets--o--n/snapshots").join(COMMIT).join("dir/rows.jsonl"));
    assert_eq!(fs::read(path).unwrap(), b"{\"text\": \"x\"}");
}

/// The data files for training of a repository, from the server and then from the cache.
#[test]
fn a_whole_data_set_is_its_files_for_training() {
    let server = Server::start();
    let files = [
        (".gitattributes", "*.bin lfs"),
        ("README.md", "A long text about the data set, longer than its rows."),
        ("data/test-0.jsonl", r#"{"text": "never read"}"#),
        ("data/train-0.jsonl", r#"{"text": "one"}"#),
        ("data/train-1.jsonl", r#"{"text": "two"}"#),
    ];
    let listed = |(name, content): (&str, &str)| format!(r#"{{"rfilename": "{name}", "size": {}}}"#, content.len());
    let siblings = files.map(listed).join(", ");
    let api = "/api/datasets/o/n/revision/main?blobs=true";
    server.put(api, format!(r#"{{"sha": "{COMMIT}", "siblings": [{siblings}]}}"#).as_bytes());
    for (name, content) in files {
        server.put(name, content.as_bytes());
    }
    let source: DataSource = "hf://o/n".parse().unwrap();
    let read = |settings: Settings| {
        let mut hub = Hub::new(settings);
        let mut notices = Vec::new();
        let mut report = |event| {
            if let LoadEvent::Notice(text) = event {
                notices.push(text);
            }
        };
        let mut loader = DatasetBuilder {
            downloader: Some(&mut hub),
            report: Some(&mut report),
            ..DatasetBuilder::new(server.cache())
        };
        let (tokens, _) = loader.load_unsplit(&source, &Tokenizer::byte())?;
        Ok::<_, Error>((tokens.len(), notices))
    };
    let (tokens, notices) = read(server.settings()).unwrap();
    // A token separates both documents.
    assert_eq!(tokens, 7);
    assert_eq!(notices, ["`hf://datasets/o/n`: reading its jsonl files; left out: `README.md`, `data/test-0.jsonl`"]);
    let requests = server.requests();
    let fetched: Vec<_> = requests.iter().filter(|request| request.starts_with("GET data")).collect();
    assert_eq!(fetched, ["GET data/train-0.jsonl", "GET data/train-1.jsonl"]);
    assert_eq!(read(server.offline()).unwrap(), (tokens, Vec::new()));
    assert_eq!(server.requests(), [] as [String; 0]);
    server.fault(api, Fault::Status("403 Forbidden"));
    assert_eq!(read(server.settings()).unwrap(), (tokens, Vec::new()));
    let empty = tempfile::tempdir().unwrap();
    let message = text(read(Settings { cache: empty.path().to_owned(), ..server.settings() }));
    assert!(message.contains("the server denies access"), "the reason is not the cache: {message}");
    server.heal();
    let mut notices = Vec::new();
    let mut report = |event| notices.push(event);
    Hub::new(server.offline()).report_to(&mut report).list("o/n", "main").unwrap();
    let notice = "o/n: offline; using the 2 files in the cache, but the data set may have more";
    assert_eq!(notices, [LoadEvent::Notice(notice.to_owned())]);
    server.put(api, b"{}");
    assert!(text(read(server.settings())).contains("the server's answer has no commit"));
    server.put(api, &vec![b' '; (16 << 20) + 1]);
    let message = text(read(server.settings()));
    assert!(message.contains("answer has more than 16777216 bytes") && !message.contains("connection"), "{message}");
    server.remove(api);
    assert!(text(read(server.settings())).contains("cannot get `the list of files`"));
}

/// The commands that use a model take it from the Hub as training does.
#[test]
fn generate_eval_and_export_take_names_of_the_hub() {
    let server = Server::start();
    let fixture = tempfile::tempdir().unwrap();
    let local = fixture.path().join("local");
    fs::create_dir(&local).unwrap();
    let files =
        ["config.json", "model.safetensors"].map(|name| (name, fs::read(golden::path("deep").join(name)).unwrap()));
    for (name, content) in files.into_iter().chain([("tokenizer.json", Tokenizer::byte().json().to_vec())]) {
        server.put(name, &content);
        fs::write(local.join(name), content).unwrap();
    }
    fs::write(fixture.path().join("text.txt"), "a text to be measured on").unwrap();
    let finetune = |line: &str, offline: &str| {
        let mut command = launch::program();
        command.current_dir(fixture.path()).args(line.split(' ')).env_clear();
        command
            .env("HF_ENDPOINT", &server.address)
            .env("HF_HOME", fixture.path().join("hf"))
            .env("HF_HUB_OFFLINE", offline);
        let (code, said, complaint) = launch::finish(&mut command);
        (code.unwrap(), said, complaint)
    };
    let generate = |model: &str| format!("generate {model} --prompt so -n 12 --temperature 0");
    let (_, expected, _) = finetune(&generate("local"), "0");
    assert!(server.requests().is_empty() && !expected.is_empty());
    assert_eq!(finetune(&generate("distilgpt2"), "0"), (0, expected.clone(), String::new()));
    assert!(fixture.path().join("hf/hub/models--distilbert--distilgpt2/snapshots").join(COMMIT).is_dir());
    assert!(server.requests().contains(&"GET model.safetensors".to_owned()));

    // A GGUF file of a repository, and nothing else of it.
    assert_eq!(finetune("export local there.gguf", "0").0, 0);
    server.put("files/model.gguf", &fs::read(fixture.path().join("there.gguf")).unwrap());
    let gguf = generate("hf://owner/name/files/model.gguf");
    for offline in ["0", "1"] {
        assert_eq!(finetune(&gguf, offline), (0, expected.clone(), String::new()));
        let asked = server.requests();
        assert!(asked.iter().all(|request| request.ends_with("files/model.gguf")), "{asked:?}");
    }

    // From here on the cache serves, on a network and without one.
    assert_eq!(finetune(&generate("distilbert/distilgpt2"), "0").1, expected);
    assert!(!server.requests().iter().any(|request| request.starts_with("GET")));
    for line in [generate("distilgpt2"), format!("{} --revision {COMMIT}", generate("distilgpt2"))] {
        assert_eq!(finetune(&line, "1").1, expected, "{line}");
    }
    let loss = |model: &str| {
        let (code, said, complaint) = finetune(&format!("eval {model} --data text.txt --json"), "1");
        assert_eq!(code, 0, "{complaint}");
        serde_json::from_str::<serde_json::Value>(&said).unwrap()["loss"].as_f64().unwrap()
    };
    assert_eq!(loss("distilgpt2"), loss("local"));
    // A run records the commit that its branch had.
    let training = "--model distilgpt2 --data text.txt --val none --seq-len 8 --batch-size 1 --steps 1 --run r --plain";
    assert_eq!(finetune(training, "1").0, 0);
    let config = fs::read_to_string(fixture.path().join("checkpoints/r/config.toml")).unwrap();
    assert!(config.contains(&format!("revision = \"{COMMIT}\"")), "{config}");
    assert_eq!(finetune("export distilgpt2 exported", "1"), (0, "exported\n".into(), String::new()));
    assert_eq!(finetune(&generate("exported"), "1").1, expected);
    assert_eq!(server.requests(), [] as [String; 0]);

    // A missing model is reported as in training: with the alternatives, and no files are left over.
    for line in [generate("gpt2"), "eval gpt2 --data text.txt".into(), "export gpt2 there".into()] {
        let (code, said, complaint) = finetune(&line, "1");
        assert_eq!((code, said.as_str()), (2, ""), "{line}");
        for way in ["`HF_HUB_OFFLINE`", "a local folder", "`HF_ENDPOINT=URL`", "`--init random"] {
            assert!(complaint.contains(way), "{line}: {complaint}");
        }
    }
    server.fault("config.json", Fault::Status("404 Not Found\r\nX-Error-Code: RevisionNotFound"));
    let (code, _, complaint) = finetune(&format!("{} --revision v9", generate("distilgpt2")), "0");
    assert!(code == 2 && complaint.contains("check `--revision`"), "{complaint}");
    assert!(!fixture.path().join("there").exists());
    assert_eq!(bad_files(&fixture.path().join("hf/hub")), [] as [PathBuf; 0]);
}

/// A Hub's possible attacks on a file: the answer about it, the answer to its download, and the resulting message.
/// `{about}` stands for the right hash and commit, `{range}` for the right size, `{half}` for half as many bytes,
/// `{elsewhere}` for another host.
#[rustfmt::skip]
const ATTACKS: [(&str, &str, &str, &str); 63] = [
    // Sizes.
    ("config.json", "206 X\r\n{about}Content-Range: bytes 0-0/1099511627776\r\n\r\n", "", "announces 1099511627776 bytes; the limit for such a file is 16777216"),
    ("config.json", "206 X\r\n{about}X-Linked-Size: 1099511627776\r\n{range}\r\n", "", "announces 1099511627776 bytes"),
    ("config.json", "200 X\r\n{about}Content-Length: 16777217\r\n\r\n", "", "announces 16777217 bytes"),
    ("tokenizer.json", "206 X\r\n{about}Content-Range: bytes 0-0/536870913\r\n\r\n", "", "the limit for such a file is 536870912"),
    ("model.safetensors", "206 X\r\n{about}Content-Range: bytes 0-0/9223372036854775807\r\n\r\n", "", "it needs 9223372036854775807 bytes, but the disk of"),
    ("model.safetensors", "206 X\r\n{about}Content-Range: bytes 0-0/18446744073709551616\r\n\r\n", "", "no size"),
    ("model.safetensors", "206 X\r\n{about}Content-Range: bytes 0-0/-5\r\n\r\n", "", "no size"),
    ("model.safetensors", "206 X\r\n{about}Content-Range: bytes 0-0/*\r\n\r\n", "", "no size"),
    ("model.safetensors", "200 X\r\n{about}Transfer-Encoding: chunked\r\n\r\n", "", "no size"),
    ("model.safetensors", "200 X\r\n{about}\r\n∞", "", "no size"),
    // Hashes and commits.
    ("model.safetensors", "206 X\r\nX-Repo-Commit: 0123456789abcdef0123456789abcdef01234567\r\n{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nETag: \"../../../../evil\"\r\nX-Repo-Commit: 0123456789abcdef0123456789abcdef01234567\r\n{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nETag: \"\"\r\nX-Repo-Commit: 0123456789abcdef0123456789abcdef01234567\r\n{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nETag: \"ABCDEF0123456789ABCDEF0123456789ABCDEF01\"\r\nX-Repo-Commit: 0123456789abcdef0123456789abcdef01234567\r\n{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b85\"\r\nX-Repo-Commit: 0123456789abcdef0123456789abcdef01234567\r\n{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nETag: \"nonsense\"\r\nX-Repo-Commit: 0123456789abcdef0123456789abcdef01234567\r\n{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nX-Linked-ETag: \"a/b\"\r\n{about}{range}\r\n", "", "no hash"),
    ("model.safetensors", "206 X\r\nETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4\"\r\nX-Repo-Commit: main\r\n{range}\r\n", "", "no commit"),
    ("config.json", "206 X\r\nETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4\"\r\n{range}\r\n", "", "no commit"),
    ("config.json", "206 X\r\nETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4\"\r\nX-Repo-Commit: ../../../../../../../../../../../../../evil\r\n{range}\r\n", "", "no commit"),
    ("config.json", "206 X\r\nETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4\"\r\nX-Repo-Commit: 0123456789ABCDEF0123456789ABCDEF01234567\r\n{range}\r\n", "", "no commit"),
    ("tokenizer.json", "206 X\r\nETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4\"\r\nX-Repo-Commit: 89abcdef0123456789abcdef0123456789abcdef\r\n{range}\r\n", "", "the server returned another"),
    ("config.json", "200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n<html>log in</html> ", "", "no commit"),
    // Answers that are none.
    ("config.json", "200 X\r\nX: ∞", "", "no usable connection"),
    ("config.json", "\u{1b}[2J\r\n\r\n", "", "no usable connection"),
    ("config.json", "99999 X\r\n\r\n", "", "no usable connection"),
    ("config.json", "206 X\r\nETag: \"\0\"\r\n\r\n", "", "no usable connection"),
    ("config.json", "206 X\r\n{about}Content-Length: -1\r\n\r\n", "", "no usable connection"),
    ("config.json", "100 Continue\r\n\r\n…", "", "no usable connection"),
    ("config.json", "206 X\r\n…", "", "no usable connection"),
    ("config.json", "304 Not Modified\r\n{about}\r\n", "", "redirects without a target"),
    ("config.json", "416 X\r\n{about}\r\n", "416 X\r\n\r\n", "the server answers 416"),
    ("config.json", "401 X\r\n\r\n∞", "", "set `HF_TOKEN`"),
    ("config.json", "404 X\r\nX-Error-Code: \u{7f}\r\n\r\n∞", "", "cannot get `config.json`"),
    ("config.json", "503 X\r\nRetry-After: 99999999999999999999\r\nContent-Length: 0\r\n\r\n", "", "keeps answering 503"),
    ("config.json", "429 X\r\nRetry-After: 61\r\nContent-Length: 0\r\n\r\n", "", "keeps answering 429"),
    // Redirects.
    ("model.safetensors", "302 X\r\nLocation: {elsewhere}/a/b/resolve/main/x\r\n\r\n", "", "redirects to another host, `127.0.0.1:"),
    ("model.safetensors", "", "302 X\r\nLocation: {elsewhere}/a/b/resolve/main/x\r\n\r\n", "redirects to another host, `127.0.0.1:"),
    ("model.safetensors", "302 X\r\n{about}X-Linked-ETag: \"e3b0c44298fc1c149afbf4c8996fb92427ae41e4\"\r\nX-Linked-Size: 5\r\nLocation: {elsewhere}\r\n\r\n", "302 X\r\nLocation: {elsewhere}/x\r\n\r\n", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation: //{host}/x\r\n\r\n", "", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation: http://localhost@{host}/x\r\n\r\n", "", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation: https://127.0.0.1/x\r\n\r\n", "", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation: file:///etc/passwd\r\n\r\n", "", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation: https://evilhf.co/x\r\n\r\n", "", "redirects to another host, `evilhf.co:443`"),
    ("model.safetensors", "302 X\r\nLocation: http://cdn.hf.co/x\r\n\r\n", "", "redirects to another host, `cdn.hf.co:80`"),
    ("model.safetensors", "302 X\r\nLocation: https://user:secret@evil.test/\r\n\r\n", "", "`evil.test:443`"),
    ("model.safetensors", "302 X\r\nLocation: x/y\r\n\r\n", "", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation:\r\n\r\n", "", "redirects to another host"),
    ("model.safetensors", "302 X\r\nLocation: /o/n/resolve/main/model.safetensors\r\n\r\n", "", "redirects too often"),
    ("model.safetensors", "", "302 X\r\nLocation: /o/n/resolve/main/model.safetensors\r\n\r\n", "redirects too often"),
    // Contents.
    ("model.safetensors", "", "200 X\r\n\r\n∞", "more than the 600000 bytes"),
    ("config.json", "", "200 X\r\n\r\n∞", "more than the 22 bytes"),
    ("model.safetensors", "", "…", "no usable connection"),
    ("model.safetensors", "", "200 X\r\n{about}Content-Length: 600000\r\n\r\n⋯", "no usable connection"),
    ("model.safetensors", "", "200 X\r\n{about}\r\n{half}", "the connection ended after 300000 of 600000 bytes"),
    ("model.safetensors", "", "200 X\r\n{about}Content-Length: 600000\r\n\r\n{half}{half}", "do not match the hash"),
    ("model.safetensors", "", "206 X\r\nContent-Range: bytes 599999-599999/600000\r\nContent-Length: 1\r\n\r\n ", "the connection ended after"),
    ("config.json", "", "200 X\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n…", "no usable connection"),
    ("config.json", "", "200 X\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "no usable connection"),
    ("config.json", "", "200 X\r\nContent-Encoding: gzip\r\n\r\nno gzip at all, of 22 b", "no usable connection"),
    ("config.json", "", "200 X\r\nContent-Length: 22\r\n\r\n{\"model_type\": \"gpt3\"} ", "do not match the hash"),
    ("config.json", "", "204 X\r\n\r\n", "the connection ended after 0 of 22 bytes"),
    ("config.json", "", "200 X\r\nContent-Length: 22\r\n\r\n{…", "no usable connection"),
];

/// For every attack: one quick error, nothing wrong in the cache and nothing outside of it, no request and no token to
/// another host; and the model once the server behaves again.
#[test]
fn attacks_by_a_hub_are_refused() {
    let attack = |(file, ask, get, expected): (&str, &str, &str, &str)| {
        let server = Server::start();
        let elsewhere = Server::start();
        let fixture = tempfile::tempdir().unwrap();
        let cache = fixture.path().join("cache");
        let raw = |text: &str| {
            let host = elsewhere.address.trim_start_matches("http://");
            let text = text.replace("{elsewhere}", &elsewhere.address).replace("{host}", host);
            (!text.is_empty()).then(|| format!("HTTP/1.1 {text}"))
        };
        server.fault(file, Fault::Raw { ask: raw(ask), get: raw(get) });
        let settings = Settings { token: Some("hf_secret".to_owned()), cache: cache.clone(), ..server.settings() };
        let start = Instant::now();
        let impatient = Settings { timeout: Duration::from_millis(500), ..settings.clone() };
        let message = text(Hub::new(impatient).model("distilgpt2", None));
        let about = format!("{file}: {ask:?} {get:?}: {message}");
        assert!(message.contains(expected), "{about}");
        assert!(!message.contains("secret") && !message.contains(char::is_control), "{about}");
        assert!(start.elapsed() < Duration::from_secs(20), "{about}: {:?}", start.elapsed());
        assert_eq!(bad_files(&cache), [] as [PathBuf; 0], "{about}");
        assert_eq!(fs::read_dir(fixture.path()).unwrap().count(), usize::from(cache.exists()), "{about}");
        assert!(!unfinished(&cache).iter().any(|path| path.metadata().unwrap().len() > 600_000), "{about}");
        assert_eq!(elsewhere.requests(), [] as [String; 0], "{about}");
        assert!(server.requests().iter().all(|request| request.contains("+token")), "{about}");
        server.heal();
        Hub::new(settings).model("distilgpt2", None).unwrap();
        assert_eq!((bad_files(&cache), unfinished(&cache)), (vec![], vec![]), "{about}");
    };
    // Side by side: some of them have to wait.
    std::thread::scope(|scope| {
        let attacks = ATTACKS.map(|row| scope.spawn(move || attack(row)));
        let failed = attacks.into_iter().filter_map(|thread| thread.join().err()).count();
        assert_eq!(failed, 0, "of {} attacks", ATTACKS.len());
    });
}

/// An index is untrusted too.
#[test]
fn an_index_that_harms_is_refused() {
    let many = (0..5000).map(|i| format!("\"{i}\": \"{i}.safetensors\"")).collect::<Vec<_>>().join(",");
    let cases = [
        ("{\"weight_map\": {\"a\": \"../evil.safetensors\"}}".to_owned(), "not a safetensors file"),
        ("{\"weight_map\": {\"a\": \"/etc/evil.safetensors\"}}".to_owned(), "not a safetensors file"),
        ("{\"weight_map\": {\"a\": \"a\\u0000b.safetensors\"}}".to_owned(), "not a safetensors file"),
        ("{\"weight_map\": {\"a\": \"\\u001b[2J.safetensors\"}}".to_owned(), "`\\u{1b}[2J.safetensors`"),
        ("{\"weight_map\": {\"a\": \"code.py\"}}".to_owned(), "not a safetensors file"),
        (format!("{{\"weight_map\": {{{many}}}}}"), "lists 5000 files; the maximum is 4096"),
        ("[".repeat(100_000), "not an index"),
        ("{\"weight_map\": 1}".to_owned(), "not an index"),
    ];
    for (index, expected) in cases {
        let server = Server::start();
        server.remove("model.safetensors");
        server.put("model.safetensors.index.json", index.as_bytes());
        let message = text(server.model());
        assert!(message.contains(expected) && !message.contains(char::is_control), "{message}");
        assert!(!server.requests().iter().any(|request| request.ends_with(".safetensors+range")), "{expected}");
    }
}

/// The sizes of all shards are known before the first is fetched.
#[test]
fn shards_that_do_not_fit_on_the_disk_are_refused_before_the_first() {
    let server = Server::start();
    server.remove("model.safetensors");
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    server.put("model.safetensors.index.json", index);
    server.put("model-1.safetensors", b"one");
    server.put("model-2.safetensors", b"two");
    let huge = "HTTP/1.1 206 X\r\n{about}Content-Range: bytes 0-0/1125899906842624\r\n\r\n";
    server.fault("model-2.safetensors", Fault::Raw { ask: Some(huge.to_owned()), get: None });
    let message = text(server.model());
    assert!(message.contains("cannot get `its weights`: it needs 1125899906842627 bytes"), "{message}");
    assert!(message.contains("`HF_HUB_CACHE`"), "{message}");
    assert!(!server.requests().contains(&"GET model-1.safetensors".to_owned()));
    let server = Server::start();
    server.fault("model.safetensors", Fault::Raw { ask: Some(huge.to_owned()), get: None });
    let message = text(server.model());
    assert!(message.contains("cannot get `model.safetensors`: it needs 1125899906842624 bytes"), "{message}");
    assert!(!server.requests().contains(&"GET model.safetensors".to_owned()));
}

/// Runs the program with this Hub; the command can still be changed.
fn program(server: &Server, fixture: &Path, line: &str) -> std::process::Command {
    let mut command = launch::program();
    command.current_dir(fixture).args(line.split(' ')).env_clear();
    command.env("HF_ENDPOINT", &server.address).env("HF_HOME", fixture.join("hf"));
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command
}

#[test]
fn a_killed_download_is_resumed_and_leaves_nothing() {
    let server = Server::start();
    let fixture = tempfile::tempdir().unwrap();
    let half = server.state.lock().unwrap().files["model.safetensors"][..300_000].to_vec();
    server.fault("model.safetensors", Fault::Stalls);
    let mut child = program(&server, fixture.path(), "generate distilgpt2 --prompt so").spawn().unwrap();
    let cache = fixture.path().join("hf/hub");
    let start = Instant::now();
    while unfinished(&cache).first().is_none_or(|path| path.metadata().unwrap().len() < 300_000) {
        assert!(start.elapsed() < Duration::from_mins(1));
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(fs::read(&unfinished(&cache)[0]).unwrap(), half);
    server.heal();
    server.requests();
    Hub::new(Settings { cache: cache.clone(), ..server.settings() }).model("distilgpt2", None).unwrap();
    assert!(server.requests().contains(&"GET model.safetensors+range".to_owned()));
    assert_eq!((bad_files(&cache), unfinished(&cache)), (vec![], vec![]));
}

#[test]
fn a_download_that_nobody_goes_on_with_is_deleted_after_a_day() {
    let server = Server::start();
    let blobs = server.cache().join("models--distilbert--distilgpt2/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let day = Duration::from_hours(24);
    for (name, age) in [("a.incomplete", day * 2), ("b.incomplete", day / 2), ("c", day * 2)] {
        let file = fs::File::create(blobs.join(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - age).unwrap();
    }
    server.model().unwrap();
    assert_eq!(["a.incomplete", "b.incomplete", "c"].map(|name| blobs.join(name).exists()), [false, true, true]);
}

#[test]
fn blobs_have_the_mode_that_the_umask_leaves() {
    use std::os::unix::fs::PermissionsExt;
    let server = Server::start();
    let files = server.model().unwrap();
    fs::File::create(server.cache().join("plain")).unwrap();
    let mode = |path: PathBuf| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(files.folder.join("model.safetensors")), mode(server.cache().join("plain")));
}

/// A shared cache may hold links that another user made.
#[test]
fn links_out_of_the_cache_are_not_followed_to_write_or_delete() {
    let server = Server::start();
    let fixture = tempfile::tempdir().unwrap();
    let files = server.model().unwrap();
    let blobs = server.cache().join("models--distilbert--distilgpt2/blobs");
    let weights = fs::read(files.folder.join("model.safetensors")).unwrap();
    let outside = fixture.path().join(sha256(&weights));
    let damaged = b"damaged".to_vec();
    fs::write(&outside, &damaged).unwrap();
    // The snapshot's link leads out; the blob is a link; the unfinished download is one.
    for link in [files.folder.join("model.safetensors"), blobs.join(sha256(&weights))] {
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        assert_eq!(server.model().unwrap(), files);
        assert_eq!(fs::read(files.folder.join("model.safetensors")).unwrap(), weights);
        assert_eq!(fs::read(&outside).unwrap(), damaged, "{}", link.display());
    }
    fs::remove_file(blobs.join(sha256(&weights))).unwrap();
    let partial = blobs.join(format!("{}.incomplete", sha256(&weights)));
    std::os::unix::fs::symlink(&outside, &partial).unwrap();
    let error = server.model().unwrap_err().to_string();
    assert!(error.contains("cannot open") && error.contains(".incomplete"), "{error}");
    assert_eq!(fs::read(&outside).unwrap(), damaged);
}

#[test]
fn a_malformed_endpoint_or_token_is_refused_at_once_and_no_password_is_shown() {
    let server = Server::start();
    let fixture = tempfile::tempdir().unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let cases = [
        ("HF_ENDPOINT", "ftp://me:geheim@hub.test".to_owned(), "is not a Hub URL"),
        ("HF_ENDPOINT", "me:geheim@hub.test".to_owned(), "is not a Hub URL"),
        ("HF_ENDPOINT", "http://me:geheim@hub.test:port".to_owned(), "is not a Hub URL"),
        ("HF_ENDPOINT", "http://me:ge heim/geheim@hub.test".to_owned(), "is not a Hub URL"),
        ("HF_TOKEN", "hf_geheim\u{1b}".to_owned(), "HF_TOKEN: the token contains invalid characters"),
    ];
    for (name, value, expected) in cases {
        for line in ["generate distilgpt2 --prompt so", "doctor"] {
            let start = Instant::now();
            let (code, out, err) = launch::finish(program(&server, fixture.path(), line).env(name, &value));
            let said = out + &err;
            assert!(said.contains(expected) && !said.contains("geheim"), "{line} {value}: {said}");
            assert_eq!(code, Some(if line == "doctor" { 0 } else { 2 }), "{said}");
            assert!(start.elapsed() < Duration::from_secs(10), "{line} {value}: {:?}", start.elapsed());
        }
    }
    // A good address with a password: it is used, and not shown if no server answers.
    let endpoint = format!("http://me:geheim@{closed}");
    let settings = Settings { endpoint, ..server.settings() };
    let message = text(Hub::new(settings).model("distilgpt2", None));
    assert!(message.contains("http://…@127.0.0.1") && !message.contains("geheim"), "{message}");
    let endpoint = server.address.replace("http://", "http://me:geheim@");
    Hub::new(Settings { endpoint, ..server.settings() }).model("distilgpt2", None).unwrap();
    assert!(server.requests().iter().all(|request| request.contains("+token")), "as basic authentication");
}

/// Only the proxy knows the host.
#[test]
fn every_variable_of_a_proxy_lets_requests_leave() {
    let fixture = tempfile::tempdir().unwrap();
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", proxy.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in proxy.incoming() {
            let mut stream = stream.unwrap();
            let mut requests = BufReader::new(stream.try_clone().unwrap());
            // The request to connect, and the one that goes to the host. A part that is not read resets the connection.
            read_request(&mut requests);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            read_request(&mut requests);
            let _ = write!(stream, "HTTP/1.1 403 X\r\nX-Error-Message: of the proxy\r\nContent-Length: 0\r\n\r\n");
        }
    });
    for variable in ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        let mut command = launch::program();
        command.current_dir(fixture.path()).args(["generate", "o/n", "--prompt", "so"]).env_clear();
        command.env("HF_ENDPOINT", "http://hub.invalid").env("HF_HOME", fixture.path()).env(variable, &address);
        let (_, _, said) = launch::finish(&mut command);
        assert!(said.contains("denies access (403 Forbidden: of the proxy)"), "{variable}: {said}");
    }
}

/// The server itself must detect requests that the client never sends.
#[test]
fn the_server_speaks_http() {
    let server = Server::start();
    let mut stream = TcpStream::connect(server.address.trim_start_matches("http://")).unwrap();
    write!(stream, "GET /o/n/resolve/main/config.json HTTP/1.1\r\nRange: bytes=2-\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 206") && answer.ends_with("\r\n\r\nmodel_type\": \"gpt2\"}"), "{answer}");
}
