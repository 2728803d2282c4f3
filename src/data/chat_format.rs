//! How conversations are written for training. The model's own template determines the text. Its `{% generation %}`
//! blocks mark the answers; if it has none, one of our templates that gives the same text does, or the text itself.
//!
//! A training template is chosen by its output, not by the model's name: it must produce the model's text for a few
//! conversations, and later for every conversation of the training data. A difference is an error, so a mask is never
//! wrong.

use super::exact_json::read_json;
use super::harmony;
use super::template::{Conversation, Rendered, Template, TemplateTokens};
use super::template_sandbox::TemplateSandbox;
use super::tokenizer::Tokenizer;
use crate::digest::{Digest, MAX_SMALL_FILE, read_at_most};
use crate::{Error, Result};
use minijinja::Value;
use serde_json::Value as Json;
use std::path::Path;
use std::sync::OnceLock;

const CHATML: &str = include_str!("templates/chatml.jinja");
const QWEN: &str = include_str!("templates/qwen.jinja");
const LLAMA: &str = include_str!("templates/llama3.jinja");
const GEMMA: &str = include_str!("templates/gemma.jinja");
const PHI: &str = include_str!("templates/phi.jinja");
const PLAIN: &str = include_str!("templates/plain.jinja");

/// The built-in training templates: name, settings, and text.
const BUILT_IN: [(&str, &str, &str); 10] = [
    ("chatml", "", CHATML),
    (
        "smollm2",
        "{%- set default_system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}",
        CHATML,
    ),
    (
        "qwen2.5",
        "{%- set default_system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}",
        QWEN,
    ),
    ("qwen3", "{%- set thinking = true %}", QWEN),
    ("qwen3-2507", "", QWEN),
    ("llama3", "", LLAMA),
    ("llama3.1", "{%- set dated = true %}", LLAMA),
    ("gemma3", "", GEMMA),
    ("phi3", "", PHI),
    ("plain", "", PLAIN),
];

/// Conversations for which a training template must produce the model's text, and variables of the templates.
const PROBES: [(&str, Option<&str>); 3] = [
    (r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#, None),
    (
        r#"[{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]"#,
        None,
    ),
    (
        TOOL_CALL,
        Some(r#"{"tools": [{"type": "function", "function": {"name": "look_up", "parameters": {"x": "int"}}}]}"#),
    ),
];

/// A conversation that calls a function and quotes its result.
const TOOL_CALL: &str = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "look_up", "arguments": {"x": 1}}}]}, {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "b"}]"#;
/// An answer in parts.
const PARTS: &str = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": [
    {"type": "thinking", "thinking": "b"}, {"type": "text", "text": "look_up"}]}]"#;

/// A model's settings for conversations.
#[derive(Clone, Debug, Default)]
pub struct ChatSettings {
    /// The model's template.
    pub template: Option<String>,
    /// The tokens that templates name.
    pub tokens: TemplateTokens,
}

/// Returns the template that a user names: a built-in one, or a file. Fails with [`Error::Config`] if the name is
/// unknown; [`Error::Io`] or [`Error::Model`] if the file cannot be read.
pub fn named_template(named: &str) -> Result<String> {
    match built_in(named) {
        Some(source) => Ok(source),
        None if Path::new(named).is_file() => String::from_utf8(read_at_most(Path::new(named), MAX_SMALL_FILE)?)
            .map_err(|_| Error::model(named, "not UTF-8")),
        None => {
            let known = BUILT_IN.map(|(name, _, _)| format!("`{name}`")).join(", ");
            Err(Error::config("chat_template", format!("`{named}` is neither a file nor one of {known}")))
        }
    }
}

impl ChatSettings {
    /// The format of a model: its template, or one line per message if it has none. `model` is its name in error
    /// messages.
    pub fn format(&self, model: &str, tokenizer: &Tokenizer) -> ChatFormat {
        if let Some(source) = &self.template {
            return ChatFormat::new(source, model, &self.tokens);
        }
        let [bos, eos] = [tokenizer.bos(), tokenizer.eos_id()].map(|id| id.and_then(|id| tokenizer.token(id)));
        ChatFormat::plain(bos.as_deref(), eos.as_deref())
    }
}

/// The source of the built-in template `name`.
fn built_in(name: &str) -> Option<String> {
    BUILT_IN.iter().find(|(built_in, _, _)| *built_in == name).map(|(_, settings, text)| format!("{settings}{text}"))
}

/// Converts conversations to text with marked answers.
#[derive(Debug)]
pub struct ChatFormat {
    /// The template for other programs and `finetune chat`.
    pub(crate) source: String,
    /// A description of the source of the marks.
    pub name: String,
    /// The state for writing conversations; an error with the reason if none can be written.
    renderer: Result<ChatRenderer, String>,
    /// Whether the template writes answers in parts, once one was rendered.
    writes_parts: OnceLock<bool>,
    origin: String,
    /// The special tokens that the template may write.
    pub(super) tokens: TemplateTokens,
}

#[derive(Debug)]
struct ChatRenderer {
    template: TemplateSandbox,
    mask: Option<Mask>,
}

/// The source of the answers' ranges.
#[derive(Debug)]
enum Mask {
    /// The template's own blocks.
    Blocks,
    /// A template that produces the same text with marked answers.
    Template(Box<Template>),
    /// The text, which is in the Harmony format.
    Text,
}

impl Default for ChatFormat {
    /// The plain format, for the byte tokenizer.
    fn default() -> Self {
        Self::plain(None, Some("<|endoftext|>"))
    }
}

impl ChatFormat {
    /// One line per message; `bos` begins the conversation, and `eos` ends the answers.
    pub fn plain(bos: Option<&str>, eos: Option<&str>) -> Self {
        let begin = bos.map_or_else(String::new, |bos| format!("{{{{- {} }}}}", Json::from(bos)));
        let set = eos.map_or_else(String::new, |eos| format!("{{%- set eos_token = {} %}}", Json::from(eos)));
        let set = begin + &set;
        Self::new(&format!("{set}{PLAIN}"), "the plain template", &TemplateTokens::default())
    }

    /// The format of the template `source`; `origin` is its name in error messages.
    pub fn new(source: &str, origin: &str, tokens: &TemplateTokens) -> Self {
        let made = TemplateSandbox::new(source, origin, tokens).and_then(|template| {
            let (name, mask) = choose_mask(&template, tokens, true)?;
            Ok((name, ChatRenderer { template, mask }))
        });
        let (name, renderer) = match made {
            Ok((name, renderer)) => (name, Ok(renderer)),
            Err(error) => (String::new(), Err(error.into_message())),
        };
        Self {
            source: source.to_owned(),
            name,
            renderer,
            writes_parts: OnceLock::new(),
            origin: origin.to_owned(),
            tokens: tokens.clone(),
        }
    }

    /// All inputs that determine text and marks, except the tokens.
    pub(super) fn key(&self) -> String {
        format!("{} {}", self.name, Digest::of(self.source.as_bytes()).sha256)
    }

    /// Renders `conversation` up to the start of the next answer.
    pub(super) fn prompt(&self, conversation: &Conversation, variables: Option<&Value>) -> Result<String> {
        let renderer = self.renderer.as_ref().map_err(|message| Error::model(&self.origin, message.clone()))?;
        Ok(renderer.template.render(conversation, variables, true)?.text)
    }

    /// Renders `conversation`, with the byte ranges of its answers unless `unmarked`. Fails with [`Error::Model`] if
    /// the template fails, with its line; if no block marks its answers; or if the training template writes a different
    /// text.
    pub fn render(&self, conversation: &Conversation, variables: Option<&Value>, unmarked: bool) -> Result<Rendered> {
        let wrong = |message: &str| Error::model(&self.origin, message);
        let renderer = self.renderer.as_ref().map_err(|message| wrong(message))?;
        let renders = |probe: &Conversation| renderer.template.render(probe, None, false);
        // Some templates leave out an answer that is a list.
        if conversation.has_parts() && !self.writes_parts.get_or_init(|| writes(PARTS, renders)) {
            return Err(wrong(
                "its chat template does not write answers in parts of several types; write the text as `content`, and \
                 thoughts as `reasoning_content`",
            ));
        }
        let own = renderer.template.render(conversation, variables, false);
        let calls = conversation.called_functions();
        let has_calls = |text: &str| calls.iter().all(|function| text.contains(function.as_str()));
        let own = match own {
            Ok(own) if has_calls(&own.text) => own,
            // The template may refuse these calls for another reason.
            Err(error) if calls.is_empty() || writes(TOOL_CALL, renders) => return Err(error),
            other => {
                let why = other.err().map_or_else(String::new, |error| format!(" ({})", error.into_message()));
                let advice = templates_with_calls()?;
                return Err(wrong(&format!("its chat template does not write tool calls{why}; {advice}")));
            }
        };
        if unmarked {
            return Ok(own);
        }
        let masking = match &renderer.mask {
            None => {
                return Err(wrong(
                    "its chat template has no `{% generation %}` blocks, and no built-in training template produces the \
                     same text, so assistant turns cannot be located; add `{% generation %}` to a custom template and \
                     pass it with `--chat-template FILE`, or train on all tokens with `--loss-on all`",
                ));
            }
            Some(Mask::Text) => {
                let message = "a message or a tool contains `<|start|>`, or an answer `<|end|>`, `<|return|>` or \
                     `<|call|>`, which mark messages in the Harmony format; remove them";
                let contents = conversation.messages.iter().chain(variables);
                return harmony::marked(own.text, contents).ok_or_else(|| wrong(message));
            }
            Some(Mask::Blocks) => return Ok(own),
            Some(Mask::Template(masking)) => masking,
        };
        let marked = masking.render(conversation, variables, false)?;
        if marked.text != own.text {
            let same = own.text.bytes().zip(marked.text.bytes()).take_while(|(a, b)| a == b).count();
            let from = own.text.floor_char_boundary(same.saturating_sub(20));
            let part = |text: &str| text.chars().skip(own.text[..from].chars().count()).take(60).collect::<String>();
            return Err(wrong(&format!(
                "its chat template writes {:?} where {}, which locates the answers, writes {:?}; pass a template with \
                 `{{% generation %}}` blocks with `--chat-template FILE`, or train on all tokens with `--loss-on all`",
                part(&own.text),
                self.name,
                part(&marked.text)
            )));
        }
        Ok(marked)
    }
}

/// Finds the answers' ranges in the text of `template`, with a description of their source. If the
/// probes find nothing `with_tools`, they are written without.
fn choose_mask(
    template: &TemplateSandbox,
    tokens: &TemplateTokens,
    with_tools: bool,
) -> Result<(String, Option<Mask>)> {
    if template.template.has_generation_blocks {
        return Ok(("the template's generation blocks".into(), Some(Mask::Blocks)));
    }
    let mut texts = Vec::new();
    for (messages, variables) in PROBES {
        let conversation = Conversation::from_json(messages)?;
        let variables = variables.filter(|_| with_tools).and_then(|variables| read_json(variables).ok());
        match template.try_render(&conversation, variables.as_ref(), false) {
            Ok(Ok(own)) => texts.push((conversation, variables, own.text)),
            // Each further probe would take as long.
            Err(error) if texts.is_empty() => return Err(error),
            _ => {}
        }
    }
    for (name, settings, text) in BUILT_IN {
        let candidate = Template::new(&format!("{settings}{text}"), name, tokens.clone())?;
        let agrees = |(conversation, variables, text): &(Conversation, Option<Value>, String)| {
            candidate.render(conversation, variables.as_ref(), false).is_ok_and(|other| other.text == *text)
        };
        if !texts.is_empty() && texts.iter().all(agrees) {
            return Ok((format!("the training template `{name}`"), Some(Mask::Template(Box::new(candidate)))));
        }
    }
    Ok(if texts.iter().any(|(_, _, text)| harmony::is_harmony(text)) {
        ("the messages of the Harmony format".into(), Some(Mask::Text))
    } else if with_tools {
        return choose_mask(template, tokens, false);
    } else {
        ("nothing".into(), None)
    })
}

/// Whether a template writes the word `look_up` of a conversation.
fn writes(probe: &str, render: impl Fn(&Conversation) -> Result<Rendered>) -> bool {
    let rendered = Conversation::from_json(probe).and_then(|probe| render(&probe));
    rendered.is_ok_and(|rendered| rendered.text.contains("look_up"))
}

/// The advice to use a built-in template that writes tool calls.
fn templates_with_calls() -> Result<String> {
    let mut names = Vec::new();
    for (name, settings, text) in BUILT_IN {
        let template = Template::new(&format!("{settings}{text}"), name, TemplateTokens::default())?;
        if writes(TOOL_CALL, |probe| template.render(probe, None, false)) {
            names.push(format!("`{name}`"));
        }
    }
    Ok(format!("these do, with `--chat-template NAME`: {}", names.join(", ")))
}
