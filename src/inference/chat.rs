//! A conversation with a model: its template, its history, and the tokens that end a turn.

use crate::Result;
use crate::data::{Conversation, TemplateSandbox, named_template};
use crate::inference::trained::TrainedModel;

/// A conversation with a model.
#[derive(Debug)]
pub struct Chat {
    template: TemplateSandbox,
    /// Whether the model has no template.
    pub plain: bool,
    /// Tokens that end an answer.
    pub stop_token_ids: Vec<u32>,
    /// The messages so far.
    pub history: Conversation,
}

impl Chat {
    /// A conversation with `trained`, with the template that is `named`, else the model's own, else one line per turn.
    /// Fails like [`named_template`], and for a template that cannot be parsed.
    pub fn new(trained: &TrainedModel, named: Option<&str>) -> Result<Self> {
        let chat = &trained.chat;
        let (source, origin) = match named {
            Some(named) => (Some(named_template(named)?), named.to_owned()),
            None => (chat.template.clone(), trained.path.display().to_string()),
        };
        let plain = source.is_none();
        let source = source.unwrap_or_else(|| chat.format(&origin, &trained.tokenizer).source);
        let stop_token_ids = trained.stop_token_ids()?;
        Ok(Self {
            template: TemplateSandbox::new(&source, &origin, &chat.tokens)?,
            plain,
            stop_token_ids,
            history: Conversation::default(),
        })
    }

    /// The text of a `conversation` up to the start of the next answer, with further `variables` of the template.
    pub fn asking(&self, conversation: &Conversation, variables: Option<&minijinja::Value>) -> Result<String> {
        Ok(self.template.render(conversation, variables, true)?.text)
    }
}
