//! A conversation with a model: its template, its history, and the tokens that end a turn.

use crate::data::{Conversation, Template, TemplateTokens};
use crate::digest::read_at_most;
use crate::inference::trained::TrainedModel;
use crate::{Error, Result};
use std::path::Path;

/// Maximum size of a template.
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
        let companions = &trained.companions;
        let (source, origin) = match file {
            Some(file) => (Some(text_file(file)?), file.display().to_string()),
            None => (companions.chat_template()?, trained.path.display().to_string()),
        };
        let tokens =
            TemplateTokens { bos: companions.special_token("bos_token")?, eos: companions.special_token("eos_token")? };
        let ends = trained.ends()?;
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
