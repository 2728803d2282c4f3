//! Uploads to a local server that speaks the Hub's protocol, and to one that fails.

use crate::common::cli_fixture::CliFixture;
use crate::common::launch;
use base64::Engine as _;
use finetune::store::hub::{Hub, Settings};
use serde_json::{Value, json};
use sha2::Digest as _;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const TOKEN: &str = "hf_geheim";
const LFS: &str = "application/vnd.git-lfs+json";

#[derive(Default)]
struct State {
    address: String,
    /// Names of models that exist.
    models: Vec<String>,
    /// The contents of Git LFS by their SHA-256.
    objects: BTreeMap<String, Vec<u8>>,
    /// The files of the last commit.
    committed: BTreeMap<String, Vec<u8>>,
    /// Method and path of each request, with `+token` if the token came along.
    log: Vec<String>,
    /// Statuses of the next requests whose path contains the text, after `|` the body; `drop` closes the connection in
    /// the middle.
    faults: Vec<(&'static str, &'static str)>,
    /// A file to delete before its contents are sent.
    deleted: Option<PathBuf>,
    /// A key and a value that replace those of each object in the answer of Git LFS.
    object: Option<(&'static str, Value)>,
}

struct Server(Arc<Mutex<State>>);

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { address, ..State::default() }));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let state = shared.clone();
                // A client that hangs up is one of the cases.
                std::thread::spawn(move || drop(answer(&stream.unwrap(), &state)));
            }
        });
        Self(state)
    }

    fn fault(&self, path: &'static str, fault: &'static str) {
        self.0.lock().unwrap().faults.push((path, fault));
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().log)
    }

    fn committed(&self) -> BTreeMap<String, Vec<u8>> {
        self.0.lock().unwrap().committed.clone()
    }

    /// The exit code and the output of `finetune LINE`.
    fn finetune(&self, fixture: &CliFixture, line: &str, token: &str) -> (i32, String) {
        let mut command = fixture.command(line);
        command.env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", &self.0.lock().unwrap().address).env("HF_TOKEN", token);
        let (code, out, err) = launch::finish(&mut command);
        let said = out + &err;
        assert!(!said.contains(TOKEN), "the token is printed: {said}");
        (code.unwrap(), said)
    }
}

fn answer(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut line) = (Vec::new(), String::new());
    while reader.read_line(&mut line)? > 2 {
        head.push(std::mem::take(&mut line));
    }
    let first: Vec<&str> = head[0].split(' ').collect();
    let (method, path) = (first[0], first[1]);
    let header = |name: &str| {
        head.iter()
            .find_map(|line| line.to_ascii_lowercase().starts_with(name).then(|| line[name.len()..].trim().to_owned()))
    };
    let token = if header("authorization: bearer ").is_some() { "+token" } else { "" };
    let length: usize = header("content-length: ").map_or(0, |length| length.parse().unwrap());
    let fault = {
        let mut state = state.lock().unwrap();
        state.log.push(format!("{method} {path}{token}"));
        let at = state.faults.iter().position(|(part, _)| path.contains(part));
        at.map(|at| state.faults.remove(at).1)
    };
    let mut body = vec![0; if fault == Some("drop") { length / 2 } else { length }];
    reader.read_exact(&mut body)?;
    let (status, text) = match fault {
        Some("drop") => return Ok(()),
        Some(fault) => fault.split_once('|').map_or((fault, String::new()), |(status, body)| (status, body.to_owned())),
        // Amazon's storage requires the signed headers.
        None if method == "PUT" && header("x-signed: ").is_none() => ("403 Forbidden", String::new()),
        None if path.contains("/verify/") && header("content-type: ").as_deref() != Some(LFS) => {
            ("415 Unsupported Media Type", String::new())
        }
        None => respond(method, path, &body, &mut state.lock().unwrap()),
    };
    let mut out = stream;
    write!(out, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}", text.len())
}

fn respond(method: &str, path: &str, body: &[u8], state: &mut State) -> (&'static str, String) {
    let json = || serde_json::from_slice::<Value>(body).unwrap();
    let sha256 = |bytes: &[u8]| {
        sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
    };
    match (method, path) {
        ("GET", path) if path.starts_with("/api/models/") => {
            let exists = state.models.iter().any(|model| path.ends_with(model));
            (if exists { "200 OK" } else { "404 Not Found\r\nX-Error-Code: RepoNotFound" }, String::new())
        }
        ("POST", "/api/repos/create") => {
            let model = format!("{}/{}", json()["organization"].as_str().unwrap(), json()["name"].as_str().unwrap());
            if state.models.contains(&model) {
                return ("409 Conflict", String::new());
            }
            state.models.push(model);
            ("200 OK", json!({ "url": "u" }).to_string())
        }
        ("POST", "/api/models/me/mine/preupload/main") => {
            let mode = |file: &Value| {
                let start = base64::engine::general_purpose::STANDARD.decode(file["sample"].as_str().unwrap()).unwrap();
                assert_eq!(start.len() as u64, file["size"].as_u64().unwrap().min(512));
                let name = file["path"].as_str().unwrap();
                let extension = name.rsplit('.').next();
                let mode = if matches!(extension, Some("safetensors" | "gguf")) { "lfs" } else { "regular" };
                json!({ "path": name, "uploadMode": mode })
            };
            let files: Vec<Value> = json()["files"].as_array().unwrap().iter().map(mode).collect();
            ("200 OK", json!({ "files": files }).to_string())
        }
        ("POST", "/me/mine.git/info/lfs/objects/batch") => {
            assert_eq!(json()["operation"], "upload");
            if let Some(path) = state.deleted.take() {
                fs::remove_file(path).unwrap();
            }
            let object = |object: &Value| {
                let oid = object["oid"].as_str().unwrap();
                let mut answer = object.clone();
                if !state.objects.contains_key(oid) {
                    let href = |what: &str| format!("{}/{what}/{oid}", state.address);
                    answer["actions"] = json!({
                        "upload": { "href": href("storage"), "header": { "x-signed": "yes" } },
                        "verify": { "href": href("verify") },
                    });
                }
                if let Some((key, value)) = &state.object {
                    answer[*key] = value.clone();
                }
                answer
            };
            let objects: Vec<Value> = json()["objects"].as_array().unwrap().iter().map(object).collect();
            ("200 OK", json!({ "objects": objects }).to_string())
        }
        ("PUT", path) if path.starts_with("/storage/") => {
            assert_eq!(path, format!("/storage/{}", sha256(body)));
            state.objects.insert(sha256(body), body.to_vec());
            ("200 OK", String::new())
        }
        ("POST", path) if path.starts_with("/verify/") => {
            assert_eq!(state.objects[json()["oid"].as_str().unwrap()].len() as u64, json()["size"].as_u64().unwrap());
            ("200 OK", String::new())
        }
        ("POST", "/api/models/me/mine/commit/main") => {
            let lines = body.split(|byte| *byte == b'\n').map(|line| serde_json::from_slice::<Value>(line).unwrap());
            for line in lines {
                let value = &line["value"];
                let name = value["path"].as_str().unwrap_or_default().to_owned();
                match line["key"].as_str().unwrap() {
                    "header" => assert!(!value["summary"].as_str().unwrap().is_empty()),
                    "lfsFile" => {
                        let content = state.objects[value["oid"].as_str().unwrap()].clone();
                        state.committed.insert(name, content);
                    }
                    "file" => {
                        let content = value["content"].as_str().unwrap();
                        let content = base64::engine::general_purpose::STANDARD.decode(content).unwrap();
                        state.committed.insert(name, content);
                    }
                    other => panic!("{other}"),
                }
            }
            ("200 OK", json!({ "commitUrl": "c" }).to_string())
        }
        _ => ("404 Not Found", String::new()),
    }
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

#[test]
fn a_model_is_uploaded_with_a_card_and_overwritten_only_with_consent() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    let (code, said) = server.finetune(&fixture, "export model out --push me/mine", TOKEN);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("/me/mine\n"), "{said}");
    assert_eq!(server.committed(), files(&fixture.path("out")));
    let card = String::from_utf8(server.committed()["README.md"].clone()).unwrap();
    assert!(card.starts_with("---\nlibrary_name: transformers\n") && card.contains("# me/mine\n"), "{card}");
    let requests = server.requests();
    assert!(requests.iter().all(|request| request.ends_with("+token")), "{requests:?}");
    assert!(requests.iter().any(|request| request.starts_with("POST /verify/")), "{requests:?}");

    // It exists now.
    server.0.lock().unwrap().committed.clear();
    let (code, said) = server.finetune(&fixture, "export model again --push me/mine", TOKEN);
    assert!(code == 2 && said.contains("add `--yes`"), "{said}");
    assert!(server.committed().is_empty());
    server.requests();
    let (code, said) = server.finetune(&fixture, "export model again --push me/mine --yes", TOKEN);
    assert_eq!(code, 0, "{said}");
    assert!(server.committed().contains_key("model.safetensors"));
    // The server had the contents.
    assert!(!server.requests().iter().any(|request| request.starts_with("PUT")));
}

#[test]
fn an_interrupted_upload_is_repeated_and_continued() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    server.fault("/storage/", "drop");
    server.fault("/commit/", "503 Service Unavailable");
    let (code, said) = server.finetune(&fixture, "export model model.gguf --push me/mine", TOKEN);
    assert_eq!(code, 0, "{said}");
    let mut committed = server.committed();
    let card = String::from_utf8(committed.remove("README.md").unwrap()).unwrap();
    assert!(card.starts_with("---\npipeline_tag: ") && card.contains("# me/mine\n"), "{card}");
    assert!(!fixture.path("README.md").exists());
    let file = fs::read(fixture.path("model.gguf")).unwrap();
    assert_eq!(committed, BTreeMap::from([("model.gguf".to_owned(), file)]));
    assert_eq!(server.requests().iter().filter(|request| request.starts_with("PUT")).count(), 2);
}

#[test]
fn a_file_that_cannot_be_read_is_no_failure_of_the_network() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    server.0.lock().unwrap().deleted = Some(fixture.path("model.gguf"));
    let (code, said) = server.finetune(&fixture, "export model model.gguf --push me/mine", TOKEN);
    assert!(code == 2 && said.contains("error: cannot read `") && said.contains("model.gguf`: No such file"), "{said}");
    assert!(!server.requests().iter().any(|request| request.starts_with("PUT")));
}

#[test]
fn refusals_name_the_cause_and_change_nothing() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    for (path, status, expected) in [
        ("/api/models/me/mine", "401 Unauthorized", "set `HF_TOKEN` to a token that may write"),
        ("/create", "401 Unauthorized", "set `HF_TOKEN` to a token that may write"),
        ("/create", "403 X\r\nX-Error-Message: Not your name", "denies access (403 Forbidden: Not your name); set"),
        ("/preupload/", "403 Forbidden", "set `HF_TOKEN` to a token that may write"),
        (
            "/preupload/",
            "403 X|{\"error\": \"hf_geheim: out of\\u001b[2J quota\"}",
            "(403 Forbidden: …: out of\\u001b[2J quota)",
        ),
        ("/objects/batch", "400 Bad Request", "the server answers 400 Bad Request\n"),
        ("/objects/batch", "422 X|{\"message\": \"too many\"}", "answers 422 Unprocessable Entity: too many\n"),
        ("/objects/batch", "422 X|no JSON", "answers 422 Unprocessable Entity\n"),
        ("/storage/", "307 X\r\nLocation: /storage/", "the server redirects the upload"),
        ("/commit/", "412 Precondition Failed", "the model was changed at the same time"),
        ("/commit/", "409 Conflict", "the model was changed at the same time"),
    ] {
        server.fault(path, status);
        let line = format!("export model out{} --push me/mine --yes", fs::read_dir(fixture.folder()).unwrap().count());
        let (code, said) = server.finetune(&fixture, &line, TOKEN);
        assert!(code == 1 && said.contains(expected), "{path} {status}: {code} {said}");
        assert!(server.committed().is_empty());
    }
    for (line, token, expected) in [
        ("export model out --push me/mine", "", "needs a token"),
        ("export model out --push mine", TOKEN, "write the model as `owner/name`"),
        ("export model out --push ../x", TOKEN, "is neither a local folder nor a name"),
    ] {
        let (code, said) = server.finetune(&fixture, line, token);
        assert!(code == 2 && said.contains(expected), "{line}: {said}");
    }
    // An export that fails creates nothing on the Hub.
    server.requests();
    for line in ["export ./missing out --push me/new", "export model model --push me/new"] {
        let (code, said) = server.finetune(&fixture, line, TOKEN);
        assert!(code == 2 && !server.requests().iter().any(|request| request.contains("/create")), "{said}");
    }
}

/// A member of an organization may write to a model of it, but create none.
#[test]
fn a_model_that_exists_needs_no_permission_to_create_one() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    server.0.lock().unwrap().models.push("me/mine".to_owned());
    server.fault("/create", "403 Forbidden");
    let (code, said) = server.finetune(&fixture, "export model out --push me/mine --yes", TOKEN);
    assert_eq!(code, 0, "{said}");
    assert!(server.committed().contains_key("model.safetensors"));
}

#[test]
fn a_failed_push_says_how_to_repeat_it() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    server.fault("/commit/", "429 X\r\nRetry-After: 3600");
    let (code, said) = server.finetune(&fixture, "export model out --push me/mine", TOKEN);
    let note = "the export is complete; remove `out` before you start the command again with `--yes`\n";
    assert!(code == 1 && said.contains(note), "{said}");
    assert!(said.contains("start the command again; files that have arrived are not sent again"), "{said}");
    fs::remove_dir_all(fixture.path("out")).unwrap();
    server.requests();
    assert_eq!(server.finetune(&fixture, "export model out --push me/mine --yes", TOKEN).0, 0);
    assert_eq!(server.committed(), files(&fixture.path("out")));
    assert!(!server.requests().iter().any(|request| request.starts_with("PUT")));
}

/// A path of this machine has no page on the Hub.
#[test]
fn the_card_names_the_base_only_if_it_is_a_model_of_the_hub() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let (server, fixture) = (Server::start(), CliFixture::new());
    fixture.model("bases/one", |_| {});
    fixture.said("--model bases/one --data text.txt --val none --seq-len 8 --batch-size 1 --steps 1 --run r --plain");
    fs::rename(fixture.path("bases"), fixture.path("moved")).unwrap();
    let config = fs::read_to_string(fixture.run("r").join("config.toml")).unwrap();
    let model = "model = \"bases/one\"\n";
    assert!(config.contains(model), "{config}");
    let at_commit = |name: &str| format!("model = \"{name}\"\nrevision = \"{COMMIT}\"\n");
    for (model, init, base) in [
        (model.to_owned(), "pretrained", None),
        (at_commit("distilgpt2"), "pretrained", Some("distilbert/distilgpt2")),
        (at_commit("hf://o/n/a/b.gguf"), "pretrained", Some("o/n")),
        (at_commit("o/n"), "random", None),
    ] {
        let config = config.replace("model = \"bases/one\"\n", &model).replace("pretrained", init);
        fs::write(fixture.run("r").join("config.toml"), config).unwrap();
        let (code, said) = server.finetune(&fixture, "export r out --push me/mine --yes", TOKEN);
        assert_eq!(code, 0, "{said}");
        let card = String::from_utf8(server.committed()["README.md"].clone()).unwrap();
        let found = card.lines().find_map(|line| line.strip_prefix("base_model: "));
        assert_eq!(found, base, "{model}: {card}");
        assert!(card.contains("It was trained from"), "{card}");
        fs::remove_dir_all(fixture.path("out")).unwrap();
    }
}

#[test]
fn nothing_is_sent_offline_or_of_a_file_above_5_gb() {
    let server = Server::start();
    let endpoint = server.0.lock().unwrap().address.clone();
    let settings = Settings { endpoint, token: Some(TOKEN.to_owned()), ..Settings::from_vars(|_| None) };
    let error = Hub::new(Settings { offline: true, ..settings.clone() }).has_model("me/mine").unwrap_err().to_string();
    assert!(error.contains("needs the network; unset `HF_HUB_OFFLINE`"), "{error}");
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(5_000_000_001).unwrap();
    let files = [("model.safetensors".to_owned(), file.path().to_owned())];
    let error = Hub::new(settings).push("me/mine", false, &files).unwrap_err().to_string();
    assert!(error.contains("has more than 5 GB; use `hf upload`"), "{error}");
    assert!(server.requests().is_empty());
}

#[test]
fn storage_that_refuses_a_file_or_is_not_safe_gets_no_contents() {
    let (server, fixture) = (Server::start(), CliFixture::new());
    let elsewhere = Server::start();
    let address = format!("{}/storage/x", elsewhere.0.lock().unwrap().address);
    for (key, value, expected) in [
        ("error", json!({ "message": "too big" }), "the server refuses `error.gguf`: too big"),
        ("actions", json!({ "upload": { "href": address } }), "the server names an unsafe address"),
        ("oid", json!("0"), "the server does not know where to store `oid.gguf`"),
    ] {
        server.0.lock().unwrap().object = Some((key, value));
        let line = format!("export model {key}.gguf --push me/mine --yes");
        let (code, said) = server.finetune(&fixture, &line, TOKEN);
        assert!(code == 1 && said.contains(expected), "{key}: {code} {said}");
    }
    assert!(server.committed().is_empty() && elsewhere.requests().is_empty());
    assert!(!server.requests().iter().any(|request| request.starts_with("PUT")));
}
