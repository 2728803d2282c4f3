//! Settings of the Hub from the environment variables that Python's `huggingface_hub` reads.

use crate::{Error, Result};
use std::path::PathBuf;
use std::time::Duration;
use ureq::http::Uri;

const HUB: &str = "https://huggingface.co";

/// How to reach the Hub, and the folder of its cache.
#[derive(Clone)]
pub struct Settings {
    /// URL without a trailing slash: `HF_ENDPOINT`.
    pub endpoint: String,
    /// The cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, whose default is `~/.cache/huggingface`.
    pub cache: PathBuf,
    /// The folder of token caches: `FINETUNE_CACHE`, else `finetune` in `XDG_CACHE_HOME`, whose default is `~/.cache`.
    pub token_cache: PathBuf,
    /// Sent only to the endpoint: `HF_TOKEN` or `HUGGING_FACE_HUB_TOKEN`, else the file that `hf auth login` writes.
    pub token: Option<String>,
    /// Whether only the cache may be used: `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`, or without a network.
    pub offline: bool,
    /// The variable that determines it.
    pub offline_variable: &'static str,
    /// The reason if there is no network.
    pub network_error: Option<String>,
    /// The timeout for a server that sends nothing.
    pub timeout: Duration,
    /// The first pause between two attempts; each later one is twice as long.
    pub backoff: Duration,
}

impl Settings {
    /// Reads the environment.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Reads variables from `var`.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        // A user without a home, as in some containers, has no caches in the working folder.
        let home = var("HOME").or_else(|| var("USERPROFILE")).map_or_else(std::env::temp_dir, PathBuf::from);
        let expand = |path: String| match path.strip_prefix("~/") {
            Some(rest) => home.join(rest),
            None => path.into(),
        };
        let user_cache = var("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), expand);
        let hf_home = var("HF_HOME").map_or_else(|| user_cache.join("huggingface"), expand);
        let cache = var("HF_HUB_CACHE").or_else(|| var("HUGGINGFACE_HUB_CACHE")).map(expand);
        let token_file = var("HF_TOKEN_PATH").map_or_else(|| hf_home.join("token"), expand);
        let token = var("HF_TOKEN").or_else(|| var("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| std::fs::read_to_string(token_file).ok());
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
        let offline = offline.into_iter().find(|name| var(name).is_some()).unwrap_or(offline[0]);
        let is_on = |value: String| matches!(value.to_ascii_uppercase().as_str(), "1" | "TRUE" | "YES" | "ON");
        Self {
            endpoint: var("HF_ENDPOINT").map_or_else(|| HUB.to_owned(), |url| url.trim_end_matches('/').to_owned()),
            cache: cache.unwrap_or_else(|| hf_home.join("hub")),
            token_cache: var("FINETUNE_CACHE").map_or_else(|| user_cache.join("finetune"), expand),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline: var(offline).is_some_and(is_on),
            offline_variable: offline,
            network_error: None,
            timeout: Duration::from_secs(30),
            backoff: Duration::from_secs(1),
        }
    }

    /// Rejects an endpoint or a token that cannot be used in a request. Fails with [`Error::Config`] that names the
    /// variable.
    pub fn check(&self) -> Result<()> {
        if self.host_and_port().is_none() {
            let shown = without_password(&self.endpoint);
            let message = format!("`{shown}` is not a Hub URL; write it as `https://host` or unset the variable");
            return Err(Error::config("HF_ENDPOINT", message));
        }
        let is_printable = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        if self.token.as_ref().is_some_and(|token| !is_printable(token)) {
            let message = "the token contains invalid characters; set it again, or run `hf auth login`";
            return Err(Error::config("HF_TOKEN", message));
        }
        Ok(())
    }

    /// The endpoint's host and port; `None` if it is not a plain HTTP or HTTPS URL.
    pub fn host_and_port(&self) -> Option<(String, u16)> {
        let uri: Uri = self.endpoint.parse().ok()?;
        let default = match uri.scheme_str()? {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
        (!host.is_empty() && has_plain_authority(&uri) && uri.query().is_none())
            .then(|| (host.to_owned(), uri.port_u16().unwrap_or(default)))
    }
}

/// Whether the authority is a host, optionally with a port number.
fn has_plain_authority(uri: &Uri) -> bool {
    uri.authority().is_some_and(|it| it.port().is_some() || it.as_str().ends_with(it.host()))
}

/// A URL for display, without user name, password and control characters.
pub fn without_password(url: &str) -> String {
    // In a malformed URL the end of the authority is unknown, so remove everything up to the last `@`.
    let well_formed = url.parse::<Uri>().is_ok_and(|uri| has_plain_authority(&uri));
    let start = url.find("://").map_or(0, |at| at + 3);
    let path = url[start..].find('/').filter(|_| well_formed).map_or(url.len(), |at| start + at);
    let shown = match url[start..path].rfind('@') {
        Some(at) => format!("{}…{}", &url[..start], &url[start + at..]),
        None => url.to_owned(),
    };
    shown.replace(|c: char| c.is_control(), "�")
}

/// Omits the token and the endpoint's password, which must not be logged.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { endpoint, cache, token, offline, .. } = self;
        let endpoint = without_password(endpoint);
        let token = token.as_ref().map(|_| "…");
        write!(f, "Settings {{ endpoint: {endpoint:?}, cache: {cache:?}, token: {token:?}, offline: {offline} }}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn with(vars: &[(&str, &str)]) -> Settings {
        Settings::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn defaults_are_those_of_python() {
        let settings = with(&[("HOME", "/home/u")]);
        assert_eq!(settings.endpoint, "https://huggingface.co");
        assert_eq!(settings.cache, Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!((settings.token, settings.offline), (None, false));
    }

    #[test]
    fn the_more_specific_variable_wins() {
        let cache = |vars: &[(&str, &str)]| with(vars).cache;
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")]), Path::new("/f/hub"));
        assert_eq!(cache(&[]), std::env::temp_dir().join(".cache/huggingface/hub"));
        for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"] {
            assert_eq!(cache(&[("HF_HOME", "/f"), (name, "/c")]), Path::new("/c"));
        }
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/f")]), Path::new("/h/f/hub"));
    }

    #[test]
    fn switches_and_tokens_are_read() {
        assert_eq!(with(&[("HF_ENDPOINT", "http://mirror:80/")]).endpoint, "http://mirror:80");
        for (value, offline) in [("1", true), ("true", true), ("0", false), ("no", false)] {
            assert_eq!(with(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
        }
        let settings = with(&[("TRANSFORMERS_OFFLINE", "1")]);
        assert_eq!((settings.offline, settings.offline_variable), (true, "TRANSFORMERS_OFFLINE"));
        assert!(!with(&[("HF_HUB_OFFLINE", "0"), ("TRANSFORMERS_OFFLINE", "1")]).offline);
        for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
            assert_eq!(with(&[(name, " hf_secret\n")]).token.as_deref(), Some("hf_secret"));
        }
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_stored\n").unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(with(&[("HF_HOME", home)]).token.as_deref(), Some("hf_stored"));
        assert_eq!(with(&[("HF_TOKEN_PATH", &*format!("{home}/token"))]).token.as_deref(), Some("hf_stored"));
        assert_eq!(with(&[("HF_HOME", home), ("HF_TOKEN", "hf_given")]).token.as_deref(), Some("hf_given"));
        let settings = with(&[("HF_TOKEN", "hf_secret"), ("HF_ENDPOINT", "https://me:secret@mirror")]);
        assert!(!format!("{settings:?}").contains("secret"), "{settings:?}");
    }

    #[test]
    fn urls_are_parsed_and_shown_without_the_password() {
        for (endpoint, expected) in [
            ("https://hub.test", Some(("hub.test", 443))),
            ("http://hub.test/a/b", Some(("hub.test", 80))),
            ("http://user:word@127.0.0.1:8080", Some(("127.0.0.1", 8080))),
            ("http://[::1]:9", Some(("::1", 9))),
            ("https://[::1]", Some(("::1", 443))),
            ("ftp://hub.test", None),
            ("hub.test", None),
            ("http://:80", None),
            ("http://", None),
            ("http://hub.test:port", None),
            ("http://hub.test:99999", None),
            ("http://hub .test", None),
            ("http://hub.test?x=1", None),
            ("http://user:pass word@hub.test", None),
        ] {
            let settings = with(&[("HF_ENDPOINT", endpoint)]);
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(settings.host_and_port(), expected, "{endpoint}");
            assert_eq!(settings.check().is_ok(), expected.is_some(), "{endpoint}");
        }
        assert_eq!(without_password("http://user:w/o@rd@hub.test"), "http://…@hub.test");
        assert_eq!(without_password("https://user:word@hub.test/a@b"), "https://…@hub.test/a@b");
        assert_eq!(without_password("user:word@hub.test"), "…@hub.test");
        let error = with(&[("HF_ENDPOINT", "ftp://user:word@hub.test/\u{1b}[2J")]).check().unwrap_err().to_string();
        assert!(error.contains("`ftp://…@hub.test/�[2J`"), "{error}");
        assert!(with(&[("HF_TOKEN", "hf_a\nX: b")]).check().is_err());
    }
}
