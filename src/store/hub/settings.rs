//! Where the Hub is and where its files are kept: the environment variables that Python's `huggingface_hub` reads.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// The Hub's own address.
const HUB: &str = "https://huggingface.co";

/// How to reach the Hub, and the folder of its cache.
#[derive(Clone)]
pub struct Settings {
    /// Address without a slash at the end: `HF_ENDPOINT`.
    pub endpoint: String,
    /// The cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, which is by default `~/.cache/huggingface`.
    pub cache: PathBuf,
    /// Sent to the endpoint and nowhere else: `HF_TOKEN`, else the file that `hf auth login` writes.
    pub token: Option<String>,
    /// Whether only the cache may be used: `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// How long a server may be silent.
    pub patience: Duration,
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
        let home = var("HOME").or_else(|| var("USERPROFILE")).unwrap_or_default();
        let expand = |path: String| match path.strip_prefix("~/") {
            Some(rest) => Path::new(&home).join(rest),
            None => path.into(),
        };
        let user_cache = var("XDG_CACHE_HOME").map_or_else(|| Path::new(&home).join(".cache"), expand);
        let hf_home = var("HF_HOME").map_or_else(|| user_cache.join("huggingface"), expand);
        let cache = var("HF_HUB_CACHE").or_else(|| var("HUGGINGFACE_HUB_CACHE")).map(expand);
        let token_file = var("HF_TOKEN_PATH").map_or_else(|| hf_home.join("token"), expand);
        let token = var("HF_TOKEN").or_else(|| std::fs::read_to_string(token_file).ok());
        let is_on = |value: String| matches!(value.to_ascii_uppercase().as_str(), "1" | "TRUE" | "YES" | "ON");
        Self {
            endpoint: var("HF_ENDPOINT").map_or_else(|| HUB.to_owned(), |url| url.trim_end_matches('/').to_owned()),
            cache: cache.unwrap_or_else(|| hf_home.join("hub")),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].iter().any(|name| var(name).is_some_and(is_on)),
            patience: Duration::from_secs(30),
            backoff: Duration::from_secs(1),
        }
    }
}

/// Without the token, which must not end up in a log.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { endpoint, cache, token, offline, .. } = self;
        let token = token.as_ref().map(|_| "…");
        write!(f, "Settings {{ endpoint: {endpoint:?}, cache: {cache:?}, token: {token:?}, offline: {offline} }}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)]) -> Settings {
        Settings::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn defaults_are_pythons() {
        let settings = with(&[("HOME", "/home/u")]);
        assert_eq!(settings.endpoint, "https://huggingface.co");
        assert_eq!(settings.cache, Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!((settings.token, settings.offline), (None, false));
    }

    #[test]
    fn the_more_special_variable_wins() {
        let cache = |vars: &[(&str, &str)]| with(vars).cache;
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")]), Path::new("/f/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/f")]), Path::new("/h/f/hub"));
    }

    #[test]
    fn switches_and_tokens_are_read() {
        assert_eq!(with(&[("HF_ENDPOINT", "http://mirror:80/")]).endpoint, "http://mirror:80");
        for (value, offline) in [("1", true), ("true", true), ("0", false), ("no", false)] {
            assert_eq!(with(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
        }
        let settings = with(&[("HF_TOKEN", " hf_secret\n")]);
        assert_eq!(settings.token.as_deref(), Some("hf_secret"));
        assert!(!format!("{settings:?}").contains("secret"));
    }
}
