//! Uploads files to a model on the Hub: large ones by Git LFS, then one commit with the small ones.
//!
//! A file that the server already has is not sent again, so a command that is started again continues. The model
//! changes only with the commit.

use super::client::{ATTEMPTS, Client, Payload, is_trusted, read_json};
use super::error::{HubError, shown};
use super::settings::without_password;
use super::{Hub, check_name};
use crate::digest::{Digest, read_at_most};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use ureq::Body;
use ureq::http::Response;

/// The largest file that the Hub takes in one part.
const MAX_PART: u64 = 5_000_000_000;
/// The bytes at the start of a file that the Hub judges it by.
const SAMPLE: usize = 512;
/// Media types of the requests.
const JSON: &str = "application/json";
const LFS: &str = "application/vnd.git-lfs+json";

struct Upload {
    /// Its path in the repository.
    name: String,
    path: PathBuf,
    digest: Digest,
    /// Whether Git LFS stores it.
    large: bool,
}

impl Hub<'_> {
    /// Whether the model `id`, `owner/name`, exists. Fails with [`Error::Config`] for no token or an invalid name, and
    /// [`Error::Hub`].
    pub fn has_model(&mut self, id: &str) -> Result<bool> {
        check_name(id)?;
        if !id.contains('/') {
            return Err(Error::config("--push", format!("`{id}` has no owner; write the model as `owner/name`")));
        }
        let wrong = |message: &str| Err(Error::config("--push", message));
        match (&self.settings.token, self.settings.offline) {
            (_, true) => wrong(&format!("needs the network; unset `{}`", self.settings.offline_variable)),
            (None, _) => wrong("needs a token that may write; set `HF_TOKEN`, or run `hf auth login`"),
            _ => {
                let url = format!("{}/api/models/{id}", self.settings.endpoint);
                match self.client().and_then(|client| client.get(&url, None, ATTEMPTS, |_| false)) {
                    Err(HubError::NoSuchRepo | HubError::NoSuchFile) => Ok(false),
                    answer => answer.map(|_| true).map_err(|failure| self.cannot_push(id, failure)),
                }
            }
        }
    }

    /// Uploads files, each with its path in the repository, to the model `id` in one commit. Creates the model unless
    /// it `exists`, because a token that may write to it need not be allowed to create one. Returns its address.
    pub fn push(&mut self, id: &str, exists: bool, files: &[(String, PathBuf)]) -> Result<String> {
        let mut uploads = Vec::new();
        for (name, path) in files {
            let bytes = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
            if bytes > MAX_PART {
                let message = format!("`{}` has more than 5 GB; use `hf upload`, which sends parts", path.display());
                return Err(Error::config("--push", message));
            }
            let digest = Digest::of_file(path)?;
            uploads.push(Upload { name: name.clone(), path: path.clone(), digest, large: false });
        }
        let created = if exists { Ok(()) } else { self.create(id) };
        let uploaded = created.and_then(|()| self.upload(id, &mut uploads));
        uploaded.map_err(|failure| self.cannot_push(id, failure))?;
        Ok(format!("{}/{id}", without_password(&self.settings.endpoint)))
    }

    fn create(&mut self, id: &str) -> Result<(), HubError> {
        let (owner, name) = id.split_once('/').unwrap_or_default();
        let body = json!({ "type": "model", "organization": owner, "name": name }).to_string();
        self.post("/api/repos/create", JSON, &body).map(drop)
    }

    fn upload(&mut self, id: &str, uploads: &mut [Upload]) -> Result<(), HubError> {
        self.ask_for_modes(id, uploads)?;
        let large: Vec<&Upload> = uploads.iter().filter(|upload| upload.large).collect();
        if !large.is_empty() {
            self.send_large(id, &large)?;
        }
        let header =
            json!({ "key": "header", "value": { "summary": "Upload model with finetune", "description": "" } });
        let mut lines = vec![header.to_string()];
        for Upload { name, path, digest, large } in &*uploads {
            let line = if *large {
                let value = json!({ "path": name, "algo": "sha256", "oid": digest.sha256, "size": digest.bytes });
                json!({ "key": "lfsFile", "value": value })
            } else {
                let content = base64_of(&read_at_most(path, digest.bytes)?);
                json!({ "key": "file", "value": { "path": name, "content": content, "encoding": "base64" } })
            };
            lines.push(line.to_string());
        }
        self.post(&format!("/api/models/{id}/commit/main"), "application/x-ndjson", &lines.join("\n")).map(drop)
    }

    /// Asks the server which files Git LFS stores.
    fn ask_for_modes(&mut self, id: &str, uploads: &mut [Upload]) -> Result<(), HubError> {
        let about = |upload: &Upload| -> Result<Value, HubError> {
            let start = read_start(&upload.path)?;
            Ok(json!({ "path": upload.name, "sample": base64_of(&start), "size": upload.digest.bytes }))
        };
        let files = uploads.iter().map(about).collect::<Result<Vec<_>, _>>()?;
        let body = json!({ "files": files }).to_string();
        let mut answer = self.post(&format!("/api/models/{id}/preupload/main"), JSON, &body)?;
        let modes = read_json(&mut answer)?;
        for upload in uploads {
            let mut all = modes["files"].as_array().into_iter().flatten();
            let mode = all.find(|file| file["path"] == upload.name.as_str()).map(|file| &file["uploadMode"]);
            upload.large = match mode.and_then(Value::as_str) {
                Some("lfs") => true,
                Some("regular") => false,
                _ => return Err(HubError::Refused(format!("the server does not know how to store `{}`", upload.name))),
            };
        }
        Ok(())
    }

    /// Sends the contents of files that the server does not have.
    fn send_large(&mut self, id: &str, uploads: &[&Upload]) -> Result<(), HubError> {
        let objects: Vec<Value> = uploads.iter().map(|upload| object_of(upload)).collect();
        let body = json!({ "operation": "upload", "transfers": ["basic"], "objects": objects, "hash_algo": "sha256" });
        let mut answer = self.post(&format!("/{id}.git/info/lfs/objects/batch"), LFS, &body.to_string())?;
        let answer = read_json(&mut answer)?;
        for upload in uploads {
            let mut all = answer["objects"].as_array().into_iter().flatten();
            let Some(object) = all.find(|object| object["oid"] == upload.digest.sha256.as_str()) else {
                return Err(HubError::Refused(format!("the server does not know where to store `{}`", upload.name)));
            };
            if let Some(message) = object["error"]["message"].as_str() {
                return Err(HubError::Refused(format!(
                    "the server refuses `{}`: {}",
                    upload.name,
                    shown(message, &self.settings)
                )));
            }
            let actions = &object["actions"];
            let (to, verify) = (&actions["upload"], &actions["verify"]);
            if to["href"].is_null() {
                // The Hub has these contents.
                continue;
            }
            self.follow("PUT", to, &Payload::File(&upload.path))?;
            if !verify["href"].is_null() {
                self.follow("POST", verify, &Payload::Text(&object_of(upload).to_string()))?;
            }
        }
        Ok(())
    }

    /// Sends a request that the server has asked for.
    fn follow(&mut self, method: &str, action: &Value, payload: &Payload<'_>) -> Result<(), HubError> {
        let url = action["href"].as_str().unwrap_or_default();
        if !is_trusted(url, &self.settings.endpoint) {
            return Err(HubError::Refused(format!("the server names an unsafe address, `{}`", without_password(url))));
        }
        let headers = action["header"].as_object().into_iter().flatten();
        let mut headers: Vec<(&str, &str)> =
            headers.filter_map(|(name, value)| Some((name.as_str(), value.as_str()?))).collect();
        if method == "POST" {
            headers.push(("content-type", LFS));
        }
        self.client()?.upload(method, url, &headers, payload).map(drop)
    }

    fn post(&mut self, path: &str, kind: &str, body: &str) -> Result<Response<Body>, HubError> {
        let url = format!("{}{path}", self.settings.endpoint);
        let client: Client = self.client()?;
        client.upload("POST", &url, &[("content-type", kind), ("accept", kind)], &Payload::Text(body))
    }

    fn cannot_push(&self, id: &str, failure: HubError) -> Error {
        if let HubError::Local(error) = failure {
            return error;
        }
        let advice = match failure {
            HubError::Unauthorized(_) | HubError::NoSuchRepo => {
                "; set `HF_TOKEN` to a token that may write to this model, or run `hf auth login`"
            }
            HubError::Conflict(_) => "; the model was changed at the same time; start the command again",
            HubError::Network(_) | HubError::Server(_) => {
                "; start the command again; files that have arrived are not sent again"
            }
            _ => "",
        };
        let origin = format!("{id} at `{}`", without_password(&self.settings.endpoint));
        Error::hub(origin, format!("cannot upload: {failure}{advice}"))
    }
}

/// A file's identity in the protocol of Git LFS.
fn object_of(upload: &Upload) -> Value {
    json!({ "oid": upload.digest.sha256, "size": upload.digest.bytes })
}

fn base64_of(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn read_start(path: &Path) -> Result<Vec<u8>, HubError> {
    use std::io::Read as _;
    let mut start = Vec::new();
    let file = std::fs::File::open(path).map_err(HubError::disk("read", path))?;
    file.take(SAMPLE as u64).read_to_end(&mut start).map_err(HubError::disk("read", path))?;
    Ok(start)
}
