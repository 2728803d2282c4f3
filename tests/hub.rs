//! The Hub as a local server plays it: every way it can misbehave, and what is left in the cache afterwards.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::format_collect, clippy::assigning_clones, reason = "a test may take the short way")]

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use finetune::data::{Fetch, Remote, Tokenizer};
use finetune::store::hub::{Hub, ModelFiles, Progress, Settings};
use finetune::{Error, Result};
use sha1::Digest as _;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LATER_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// What the server does with a file's content instead of sending it.
#[derive(Clone)]
enum Fault {
    /// Answers every request with a status line and headers.
    Status(&'static str),
    /// Answers so for the first `n` requests.
    StatusFor(u32, &'static str),
    /// Sends the first half and closes the connection, however often it is asked.
    Truncated,
    /// Sends the first half of what was asked for and closes the connection, once.
    DropsOnce,
    /// Sends other bytes of the right length.
    WrongHash,
    /// Sends bytes and never stops.
    Endless,
    /// Sends nothing for a long time.
    Silent,
    /// Sends a byte now and then.
    Trickle,
    /// Sends the client to another address.
    Redirect(String),
    /// Announces hashes, sizes or commits that make no sense.
    Header(&'static str, &'static str),
}

#[derive(Default)]
struct State {
    files: HashMap<String, Vec<u8>>,
    faults: HashMap<String, Fault>,
    commit: String,
    /// "METHOD file" of each request, with `+token` and `+range` where they were sent.
    log: Vec<String>,
}

/// A server on a port of its own; it lives as long as the test process.
#[derive(Clone)]
struct Server {
    address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// A server with a small model.
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { address, state: Arc::default() };
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

    fn settings(&self, cache: &Path) -> Settings {
        let mut settings = Settings::from_vars(|_| None);
        settings.endpoint.clone_from(&self.address);
        settings.cache = cache.to_owned();
        settings.patience = Duration::from_millis(500);
        settings.backoff = Duration::from_millis(1);
        settings
    }

    fn model(&self, cache: &Path) -> Result<ModelFiles> {
        Hub::new(self.settings(cache)).model("distilgpt2", None)
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

/// Reads one request, answers it and closes the connection.
fn answer(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut out = stream;
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let headers: Vec<String> = lines
        .map_while(std::result::Result::ok)
        .take_while(|line| !line.is_empty())
        .map(|l| l.to_lowercase())
        .collect();
    let header = |name: &str| headers.iter().find_map(|line| line.strip_prefix(name));
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    // /owner/name/resolve/revision/file
    let file = path.split("/resolve/").nth(1).and_then(|rest| rest.split_once('/')).map_or(path, |(_, file)| file);
    let from = header("range: bytes=").and_then(|range| range.trim_end_matches('-').parse::<usize>().ok());

    let (content, fault, commit) = {
        let mut state = state.lock().unwrap();
        let token = header("authorization:").map_or("", |_| "+token");
        let range = from.map_or("", |_| "+range");
        state.log.push(format!("{method} {file}{token}{range}"));
        let fault = state.faults.get(file).cloned();
        match &fault {
            Some(Fault::StatusFor(1, _) | Fault::DropsOnce)
                if method == "GET" || !matches!(fault, Some(Fault::DropsOnce)) =>
            {
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
    let mut headers = vec![("ETag", format!("\"{}\"", etag(&content))), ("X-Repo-Commit", commit)];
    if let Some(Fault::Header(name, value)) = fault {
        headers.retain(|(known, _)| *known != name);
        headers.push((name, value.to_owned()));
    }
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let headers = format!("{headers}Connection: close\r\n");
    if method == "HEAD" {
        return write!(out, "HTTP/1.1 200 OK\r\n{headers}Content-Length: {}\r\n\r\n", content.len());
    }
    let part = &content[from.unwrap_or(0)..];
    let status = if from.is_some() { "206 Partial Content" } else { "200 OK" };
    let begin =
        |mut out: &TcpStream| write!(out, "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", part.len());
    match fault {
        Some(Fault::Truncated) => {
            write!(out, "HTTP/1.1 200 OK\r\n{headers}\r\n")?;
            out.write_all(&content[..content.len() / 2])
        }
        Some(Fault::DropsOnce) => {
            begin(out)?;
            out.write_all(&part[..part.len() / 2])
        }
        Some(Fault::WrongHash) => {
            begin(out)?;
            out.write_all(&part.iter().map(|byte| byte ^ 1).collect::<Vec<_>>())
        }
        Some(Fault::Endless) => {
            write!(out, "HTTP/1.1 200 OK\r\n{headers}\r\n")?;
            loop {
                out.write_all(&[b' '; 8192])?;
            }
        }
        Some(Fault::Silent) => {
            std::thread::sleep(Duration::from_secs(20));
            Ok(())
        }
        Some(Fault::Trickle) => {
            begin(out)?;
            loop {
                out.write_all(b" ")?;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Some(Fault::Redirect(to)) => {
            write!(out, "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        }
        _ => {
            begin(out)?;
            out.write_all(part)
        }
    }
}

/// Every file below the cache whose content is not what its name says, or which is not finished.
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
            } else if path.parent().unwrap().ends_with("blobs") {
                let right = etag(&fs::read(&path).unwrap()) == path.file_name().unwrap().to_string_lossy();
                bad.extend((!right).then_some(path));
            }
        }
    }
    bad
}

fn text(result: Result<ModelFiles>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Hub { .. } | Error::Model { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn a_model_arrives_in_pythons_layout_and_is_not_asked_for_twice() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    let mut progress = Vec::new();
    let mut report = |event| progress.push(event);
    let files = Hub::new(server.settings(cache.path())).report_to(&mut report).model("distilgpt2", None).unwrap();
    let repo = cache.path().join("models--distilbert--distilgpt2");
    assert_eq!(files.folder, repo.join("snapshots").join(COMMIT));
    assert_eq!((files.repo.as_str(), files.commit.as_str()), ("distilbert/distilgpt2", COMMIT));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let weights = fs::read(files.folder.join("model.safetensors")).unwrap();
    let link = fs::read_link(files.folder.join("model.safetensors")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(sha256(&weights)));
    let last = progress
        .iter()
        .rev()
        .find(|event| matches!(event, Progress::Bytes { file, .. } if file == "model.safetensors"));
    let size = weights.len() as u64;
    assert_eq!(last, Some(&Progress::Bytes { file: "model.safetensors".into(), done: size, total: size }));
    assert_eq!(bad_files(cache.path()), [] as [PathBuf; 0]);

    // Again: only whether the branch has moved, and whether the optional files exist now, is asked.
    server.requests();
    assert_eq!(server.model(cache.path()).unwrap(), files);
    assert_eq!(server.requests(), ["HEAD config.json", "HEAD tokenizer_config.json", "HEAD generation_config.json"]);
    // A commit cannot move.
    Hub::new(server.settings(cache.path())).model("distilgpt2", Some(COMMIT)).unwrap();
    assert_eq!(server.requests(), ["HEAD tokenizer_config.json", "HEAD generation_config.json"]);
}

#[test]
fn offline_uses_the_cache_and_nothing_else() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    let files = server.model(cache.path()).unwrap();
    server.requests();
    let offline = Settings { offline: true, ..server.settings(cache.path()) };
    assert_eq!(Hub::new(offline.clone()).model("distilgpt2", None).unwrap(), files);
    let message = text(Hub::new(offline).model("gpt2", None));
    for way in ["`HF_HUB_OFFLINE`", "a local folder", "`HF_ENDPOINT=URL`", "`--init random`"] {
        assert!(message.contains(way), "{message}");
    }
    assert_eq!(server.requests(), [] as [String; 0]);
}

#[test]
fn without_a_network_the_cached_copy_serves_or_three_ways_on_are_named() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    let files = server.model(cache.path()).unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = Settings { endpoint: format!("http://{gone}"), ..server.settings(cache.path()) };
    let mut notices = 0;
    let mut report = |event| notices += u32::from(matches!(event, Progress::Notice(_)));
    // The optional files are not cached, and nobody can say whether they exist.
    let found = Hub::new(settings.clone()).report_to(&mut report).model("distilgpt2", None);
    assert_eq!(found.unwrap(), files);
    assert!(notices > 0);
    let message = text(Hub::new(settings).model("gpt2", None));
    for way in ["no usable connection", "a local folder", "`HF_ENDPOINT=URL`", "`--init random`"] {
        assert!(message.contains(way), "{message}");
    }
}

#[test]
fn a_moved_branch_is_noticed_and_the_old_commit_stays() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    let old = server.model(cache.path()).unwrap();
    server.state.lock().unwrap().commit = LATER_COMMIT.to_owned();
    server.put("config.json", br#"{"model_type": "gpt2", "n_layer": 2}"#);
    server.requests();
    let new = server.model(cache.path()).unwrap();
    assert_eq!(new.commit, LATER_COMMIT);
    assert!(!server.requests().iter().any(|request| request == "GET model.safetensors"), "the weights did not change");
    assert!(old.folder.join("config.json").exists() && new.folder.join("model.safetensors").exists());
    let pinned = Hub::new(server.settings(cache.path())).model("distilgpt2", Some(COMMIT)).unwrap();
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
        ("429 Too Many Requests", "keeps answering 429", 5),
        ("429 Too Many Requests\r\nRetry-After: 3600", "keeps answering 429", 1),
        ("500 Internal Server Error", "keeps answering 500", 5),
        ("418 I'm a teapot", "the server answers 418", 1),
    ];
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    for (status, expected, requests) in cases {
        server.fault("config.json", Fault::Status(status));
        let message = text(server.model(cache.path()));
        assert!(message.contains(expected), "{status}: {message}");
        assert_eq!(server.requests().len(), requests, "{status}");
    }
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0, "nothing was stored");
}

#[test]
fn a_passing_illness_is_outlived() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    server.fault("config.json", Fault::StatusFor(2, "500 Internal Server Error"));
    server.fault("tokenizer.json", Fault::StatusFor(1, "429 Too Many Requests\r\nRetry-After: 1"));
    let start = Instant::now();
    server.model(cache.path()).unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "the pause asked for is kept");
}

#[test]
fn a_dropped_connection_goes_on_where_it_broke() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    server.fault("model.safetensors", Fault::DropsOnce);
    server.model(cache.path()).unwrap();
    let requests = server.requests();
    assert!(requests.contains(&"GET model.safetensors+range".to_owned()), "{requests:?}");
    assert_eq!(bad_files(cache.path()), [] as [PathBuf; 0]);
}

#[test]
fn bad_content_never_stays() {
    let cases = [
        (Fault::Truncated, "the connection ended after 300000 of 600000 bytes"),
        (Fault::WrongHash, "does not match the hash"),
        (Fault::Endless, "more than the 600000 bytes"),
        (Fault::Silent, "no usable connection"),
        (Fault::Trickle, "no usable connection"),
        (Fault::Header("ETag", "\"nonsense\""), "no hash"),
        (Fault::Header("ETag", "\"../../../../evil\""), "no hash"),
        (Fault::Header("X-Repo-Commit", "main"), "no commit"),
    ];
    // Side by side: some of them have to wait.
    std::thread::scope(|scope| {
        for (fault, expected) in cases {
            scope.spawn(move || {
                let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
                server.fault("model.safetensors", fault);
                let start = Instant::now();
                let message = text(server.model(cache.path()));
                assert!(message.contains(expected), "{message}");
                assert!(start.elapsed() < Duration::from_secs(15), "{message}: {:?}", start.elapsed());
                assert_eq!(bad_files(cache.path()), [] as [PathBuf; 0], "{message}");
                server.heal();
                server.model(cache.path()).unwrap();
            });
        }
    });
}

#[test]
fn no_redirect_leaves_the_endpoint() {
    let (server, elsewhere, cache) = (Server::start(), Server::start(), tempfile::tempdir().unwrap());
    let settings = Settings { token: Some("hf_secret".to_owned()), ..server.settings(cache.path()) };
    let away = format!("{}/owner/name/resolve/main/model.safetensors", elsewhere.address);
    server.fault("model.safetensors", Fault::Redirect(away));
    let message = text(Hub::new(settings.clone()).model("distilgpt2", None));
    assert!(message.contains("redirects to another host, `127.0.0.1:"), "{message}");
    assert_eq!(elsewhere.requests(), [] as [String; 0]);
    assert!(server.requests().iter().all(|request| request.contains("+token")), "the token goes to the endpoint");

    // On the same host, by path or in full, it is followed; in circles it is not for ever.
    let weights = server.state.lock().unwrap().files["model.safetensors"].clone();
    server.put("there", &weights);
    for address in ["", &server.address] {
        server.fault("model.safetensors", Fault::Redirect(format!("{address}/o/n/resolve/main/there")));
        Hub::new(settings.clone()).model("owner/other", None).unwrap();
        fs::remove_dir_all(cache.path().join("models--owner--other")).unwrap();
    }
    server.fault("model.safetensors", Fault::Redirect("/o/n/resolve/main/model.safetensors".into()));
    let message = text(Hub::new(settings).model("owner/other", None));
    assert!(message.contains("redirects without end"), "{message}");
}

#[test]
fn a_damaged_cache_is_repaired_and_offline_it_is_not_used() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    let files = server.model(cache.path()).unwrap();
    let damage = || {
        let path = files.folder.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[1000] ^= 4;
        fs::write(&path, bytes).unwrap();
    };
    damage();
    assert_eq!(server.model(cache.path()).unwrap(), files);
    assert_eq!(bad_files(cache.path()), [] as [PathBuf; 0]);
    damage();
    let offline = Settings { offline: true, ..server.settings(cache.path()) };
    assert!(Hub::new(offline).model("distilgpt2", None).is_err());
    assert_eq!(bad_files(cache.path()), [] as [PathBuf; 0]);
}

#[test]
fn pickled_weights_are_refused_with_the_reason() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    server.remove("model.safetensors");
    let message = text(server.model(cache.path()));
    assert!(message.contains("neither `model.safetensors` nor"), "{message}");
    server.put("pytorch_model.bin", b"a pickle");
    let message = text(server.model(cache.path()));
    assert!(message.contains("`pytorch_model.bin`, a pickle: loading one runs the code in it"), "{message}");
    assert!(!server.requests().contains(&"GET pytorch_model.bin".to_owned()));
}

#[test]
fn sharded_weights_arrive_whole() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    server.remove("model.safetensors");
    server.put("model-1.safetensors", b"one");
    server.put("model-2.safetensors", b"two");
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    server.put("model.safetensors.index.json", index);
    let files = server.model(cache.path()).unwrap();
    assert_eq!(fs::read(files.folder.join("model-2.safetensors")).unwrap(), b"two");
    server.put("model.safetensors.index.json", br#"{"weight_map": {"a": "../../../evil.safetensors"}}"#);
    server.state.lock().unwrap().commit = LATER_COMMIT.to_owned();
    let message = text(server.model(cache.path()));
    assert!(message.contains("which is no safetensors file"), "{message}");
}

#[test]
fn several_at_once_share_a_cache() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| server.model(cache.path()).unwrap())).collect();
        let all: Vec<ModelFiles> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    });
    assert_eq!(bad_files(cache.path()), [] as [PathBuf; 0]);
}

#[test]
fn data_sets_and_plain_addresses_are_fetched_for_data() {
    let (server, cache) = (Server::start(), tempfile::tempdir().unwrap());
    server.put("dir/rows.jsonl", b"{\"text\": \"x\"}");
    let mut hub = Hub::new(server.settings(cache.path()));
    let remote = Remote::Dataset { repo: "o/n", revision: "main", file: "dir/rows.jsonl" };
    let path = hub.fetch(remote, cache.path()).unwrap();
    assert_eq!(path, cache.path().join("datasets--o--n/snapshots").join(COMMIT).join("dir/rows.jsonl"));
    assert_eq!(fs::read(path).unwrap(), b"{\"text\": \"x\"}");

    let folder = cache.path().join("data");
    let (url, content) = (format!("{}/text.txt", server.address), b"some text");
    server.put("/text.txt", content);
    let remote = |sha256| Remote::Url { url: &url, file: "text.txt", bytes: 9, sha256 };
    let error = hub.fetch(remote("00"), &folder).unwrap_err().to_string();
    assert!(error.contains("sent another file") && error.contains("download it to"), "{error}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    let path = hub.fetch(remote(&sha256(content)), &folder).unwrap();
    assert_eq!((fs::read(&path).unwrap().as_slice(), path), (&content[..], folder.join("text.txt")));
}

/// The commands that use a model take it from the Hub as training does.
#[test]
fn generate_eval_and_export_take_names_of_the_hub() {
    let (server, desk) = (Server::start(), tempfile::tempdir().unwrap());
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deep");
    let local = desk.path().join("local");
    fs::create_dir(&local).unwrap();
    let files = ["config.json", "model.safetensors"].map(|name| (name, fs::read(golden.join(name)).unwrap()));
    for (name, content) in files.into_iter().chain([("tokenizer.json", Tokenizer::byte().json().to_vec())]) {
        server.put(name, &content);
        fs::write(local.join(name), content).unwrap();
    }
    fs::write(desk.path().join("text.txt"), "a text to be measured on").unwrap();
    let finetune = |line: &str, offline: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_finetune"));
        command.current_dir(desk.path()).args(line.split(' ')).env_clear();
        command
            .env("HF_ENDPOINT", &server.address)
            .env("HF_HOME", desk.path().join("hf"))
            .env("HF_HUB_OFFLINE", offline);
        let output = command.output().unwrap();
        let [said, complaint] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code().unwrap(), said, complaint)
    };
    let generate = |model: &str| format!("generate {model} --prompt so -n 12 --temperature 0");
    let (_, expected, _) = finetune(&generate("local"), "0");
    assert!(server.requests().is_empty() && !expected.is_empty());
    assert_eq!(finetune(&generate("distilgpt2"), "0"), (0, expected.clone(), String::new()));
    assert!(desk.path().join("hf/hub/models--distilbert--distilgpt2/snapshots").join(COMMIT).is_dir());
    assert!(server.requests().contains(&"GET model.safetensors".to_owned()));

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
    assert_eq!(finetune("export distilgpt2 exported", "1"), (0, "exported\n".into(), String::new()));
    assert_eq!(finetune(&generate("exported"), "1").1, expected);
    assert_eq!(server.requests(), [] as [String; 0]);

    // What is not there is told as it is to training: with the ways on, and nothing is left behind.
    for line in [generate("gpt2"), "eval gpt2 --data text.txt".into(), "export gpt2 there".into()] {
        let (code, said, complaint) = finetune(&line, "1");
        assert_eq!((code, said.as_str()), (2, ""), "{line}");
        for way in ["`HF_HUB_OFFLINE`", "a local folder", "`HF_ENDPOINT=URL`", "`--init random`"] {
            assert!(complaint.contains(way), "{line}: {complaint}");
        }
    }
    server.fault("config.json", Fault::Status("404 Not Found\r\nX-Error-Code: RevisionNotFound"));
    let (code, _, complaint) = finetune(&format!("{} --revision v9", generate("distilgpt2")), "0");
    assert!(code == 2 && complaint.contains("check `--revision`"), "{complaint}");
    assert!(!desk.path().join("there").exists());
    assert_eq!(bad_files(&desk.path().join("hf/hub")), [] as [PathBuf; 0]);
}

/// The server itself: what the client never does, it must notice.
#[test]
fn the_server_speaks_http() {
    let server = Server::start();
    let mut stream = TcpStream::connect(server.address.trim_start_matches("http://")).unwrap();
    write!(stream, "GET /o/n/resolve/main/config.json HTTP/1.1\r\nRange: bytes=2-\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 206") && answer.ends_with("\r\n\r\nmodel_type\": \"gpt2\"}"), "{answer}");
}
