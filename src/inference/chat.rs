//! A conversation with a model: its template, its history, and the tokens that end a turn.

use crate::data::{Conversation, Template, TemplateTokens};
use crate::digest::read_at_most;
use crate::inference::trained::TrainedModel;
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Maximum size of a template and of the files with special tokens.
const MAX_FILE: u64 = 16 << 20;
/// The template for a model without one: a line per turn, as training formats `messages`.
const PLAIN: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
                     {% if add_generation_prompt %}assistant:{% endif %}";

/// A conversation with a model.
#[derive(Debug)]
pub struct Chat {
    template: Template,
    /// Whether the model has no template.
    pub plain: bool,
    /// Tokens that end an answer.
    pub ends: Vec<u32>,
    /// The messages so far.
    pub history: Conversation,
}

impl Chat {
    /// A conversation with `trained`, with the template in `file`, else the model's own, else one line per turn.
    ///
    /// # Errors
    /// [`Error::Model`] or [`Error::Io`] for a template that cannot be read or parsed.
    pub fn new(trained: &TrainedModel, file: Option<&Path>) -> Result<Self> {
        let config = json_file(&trained.path.join("tokenizer_config.json"))?;
        let (source, origin) = match file {
            Some(file) => (Some(text_file(file)?), file.display().to_string()),
            None => (own_template(&trained.path, &config)?, trained.path.display().to_string()),
        };
        let tokens = TemplateTokens { bos: special(&config, "bos_token"), eos: special(&config, "eos_token") };
        let mut ends = ends(&trained.path)?;
        ends.extend(trained.config.eos_token_id);
        ends.extend(trained.tokenizer.eos_id());
        let plain = source.is_none();
        Ok(Self {
            template: Template::new(source.as_deref().unwrap_or(PLAIN), &origin, tokens)?,
            plain,
            ends,
            history: Conversation::default(),
        })
    }

    /// The prompt for the model's next answer.
    pub fn prompt(&self) -> Result<String> {
        Ok(self.template.render(&self.history, None, true)?.text)
    }
}

fn text_file(path: &Path) -> Result<String> {
    let bytes = read_at_most(path, MAX_FILE)?;
    String::from_utf8(bytes).map_err(|_| Error::model(path.display(), "not UTF-8"))
}

/// A JSON file that may be missing.
fn json_file(path: &Path) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&read_at_most(path, MAX_FILE)?)
        .map_err(|error| Error::model(path.display(), format!("not JSON: {error}")))
}

/// `chat_template.jinja`, or the template in `tokenizer_config.json`: a string, or the one named `default` in a list.
fn own_template(folder: &Path, config: &Value) -> Result<Option<String>> {
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        return text_file(&file).map(Some);
    }
    let template = &config["chat_template"];
    let named = template.as_array().into_iter().flatten().find(|entry| entry["name"] == "default");
    let text = template.as_str().or_else(|| named.and_then(|entry| entry["template"].as_str()));
    Ok(text.map(str::to_owned))
}

/// A special token, stored as a string or an object.
fn special(config: &Value, key: &str) -> Option<String> {
    config[key].as_str().or_else(|| config[key]["content"].as_str()).map(str::to_owned)
}

/// The end tokens in `generation_config.json`: one or a list.
fn ends(folder: &Path) -> Result<Vec<u32>> {
    let config = json_file(&folder.join("generation_config.json"))?;
    let ids = &config["eos_token_id"];
    let ids = ids.as_array().cloned().unwrap_or_else(|| vec![ids.clone()]);
    Ok(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect())
}
