//! The token that begins a text (BOS): which one it is, and whether texts get it.
//!
//! Documents, prompts and windows of running text begin with [`Tokenizer::bos`](super::Tokenizer::bos). A chat template
//! writes the token itself. The token is an input and never a label.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::str::FromStr;

/// The rule for adding the tokenizer's BOS token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bos {
    /// If `add_bos_token` in `tokenizer_config.json` is true; without that key, if the tokenizer's post-processor adds
    /// one.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Bos {
    /// Whether texts get the token, for a model with this `add_bos_token` and a post-processor that adds it if `added`.
    pub(super) fn applies(self, add_bos_token: Option<bool>, added: bool) -> bool {
        match self {
            Self::Auto => add_bos_token.unwrap_or(added),
            Self::Always => true,
            Self::Never => false,
        }
    }
}

impl FromStr for Bos {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rule = Self::deserialize(Value::from(text));
        rule.map_err(|_| format!("`{text}` is unknown; use `auto`, `always` or `never`"))
    }
}

/// The name of the token that a `tokenizer.json`'s post-processor adds before a text.
pub(super) fn added_by(post_processor: &Value) -> Option<&str> {
    if let Some(parts) = post_processor["processors"].as_array() {
        return parts.iter().find_map(added_by);
    }
    // BERT's and RoBERTa's processors have a fixed form.
    let fixed = || post_processor["cls"][0].as_str();
    post_processor["single"][0]["SpecialToken"]["id"].as_str().or_else(fixed)
}
