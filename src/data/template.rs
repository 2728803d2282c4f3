//! Chat templates: the models' Jinja templates, which convert a conversation to the text format of their training.
//!
//! The environment follows transformers' `apply_chat_template`: blocks are trimmed, `raise_exception` exists, and
//! values are written and have methods as in Python. There is no clock, so that a text does not depend on the day:
//! `strftime_now` is undefined, and templates that use it fall back on their fixed date; one without a fallback gets
//! [`DAY`].
//!
//! A template may mark the assistant's tokens with `{% generation %}` … `{% endgeneration %}`. The engine does not have
//! this block, so it is replaced by expressions that print a marker, and the markers are converted to ranges of the
//! text.

use super::exact_json::{entries, read_json};
use super::fields::field;
use super::jinja_python::{install, with_percent};
use crate::{Error, Result};
use chrono::NaiveDate;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;

/// The longest accepted template in bytes; the longest in use has about 20 kB.
const MAX_SOURCE: usize = 1 << 20;
/// Limit on the instructions of a rendering, which ends infinite loops.
const FUEL: u64 = 50_000_000;
/// The output of `{% generation %}` and of its end. Unicode keeps these code points free for programs' own use.
const GENERATION_MARKERS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];
const NAME: &str = "chat template";
/// The names of a message's thoughts; the first is the usual one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// The day of templates that need one.
const DAY: Option<NaiveDate> = NaiveDate::from_ymd_opt(2025, 8, 5);

/// A conversation's messages, each an object with `role`, `content` and any other fields that its template reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Conversation {
    /// The messages.
    pub messages: Vec<Value>,
}

impl Conversation {
    /// Reads a JSON array of messages; the order of keys is kept.
    pub fn from_json(text: &str) -> Result<Self> {
        let read = read_json(text).map_err(|error| error.to_string());
        let messages = read.and_then(|read| Vec::deserialize(read).map_err(|error| error.to_string()));
        Ok(Self { messages: messages.map_err(|error| Error::data("a conversation", error))? })
    }

    pub(super) fn first(&self, count: usize) -> Self {
        Self { messages: self.messages[..count].to_vec() }
    }

    /// Whether the assistant has a message, starting at number `from`.
    pub(super) fn has_answer(&self, from: usize) -> bool {
        self.messages[from..].iter().any(is_answer)
    }

    /// Whether an answer's content is a list. Reading a row joins a list of texts.
    pub(super) fn has_parts(&self) -> bool {
        let is_list = |content: Value| content.kind() == ValueKind::Seq && content.len() != Some(0);
        self.messages.iter().any(|message| is_answer(message) && field(message, "content").is_some_and(is_list))
    }

    /// Adds a message of `role`.
    pub fn push(&mut self, role: &str, content: &str) {
        self.messages.push(context! { role, content });
    }

    /// The content of the last message, if it is the assistant's.
    pub fn last_answer(&self) -> Option<String> {
        let last = self.messages.last().filter(|message| is_answer(message))?;
        Some(last.get_attr("content").ok()?.as_str()?.to_owned())
    }

    /// The names of the functions that its messages call.
    pub(super) fn called_functions(&self) -> Vec<String> {
        let calls = self.messages.iter().filter_map(|message| message.get_attr("tool_calls").ok()?.try_iter().ok());
        let name = |call: Value| {
            let function = call.get_attr("function").ok().filter(|function| !function.is_undefined()).unwrap_or(call);
            Some(function.get_attr("name").ok()?.as_str()?.to_owned())
        };
        calls.flatten().filter_map(name).collect()
    }

    /// A JSON array of the messages.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(&self.messages).map_err(|error| Error::data("a conversation", error.to_string()))
    }
}

/// A conversation split into prompt and reference answer.
#[derive(Clone, Debug)]
pub struct EvalExample {
    /// The conversation before the answer.
    pub prompt: Conversation,
    /// The variables of its chat template.
    pub variables: Option<Value>,
    /// The answer.
    pub answer: String,
}

/// A conversation as text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rendered {
    /// The text, special tokens included: it is tokenized without adding any.
    pub text: String,
    /// The bytes that the template marks as the model's own words, in order; empty where it marks none.
    pub assistant_ranges: Vec<Range<usize>>,
}

/// The special tokens that templates use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateTokens {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct Template {
    pub(super) environment: Environment<'static>,
    origin: String,
    tokens: TemplateTokens,
    pub(super) has_generation_blocks: bool,
}

impl Template {
    /// Parses `source`; `origin` is its name in error messages. Fails with [`Error::Model`] naming the line of a syntax
    /// error.
    pub fn new(source: &str, origin: &str, tokens: TemplateTokens) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            let message = format!("its chat template has {} bytes; the maximum is {MAX_SOURCE}", source.len());
            return Err(Error::model(origin, message));
        }
        let mut environment = Environment::new();
        let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| explain(origin, &error))?);
        environment.set_fuel(Some(FUEL));
        install(&mut environment);
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        if source.contains("strftime_now(") && !source.contains("strftime_now is defined") {
            environment.add_function("strftime_now", |format: String| {
                let mut text = String::new();
                let midnight = DAY.and_then(|day| day.and_hms_opt(0, 0, 0));
                // An unknown code is an error of the formatter.
                if midnight.is_none_or(|time| write!(text, "{}", time.format(&format)).is_err()) {
                    let message = format!("`strftime_now` does not know a code of `{format}`");
                    return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
                }
                Ok(text)
            });
        }
        // Jinja reads every end of a line as a line feed.
        let source = &source.replace("\r\n", "\n").replace('\r', "\n");
        let source = with_percent(&replace_generation_tags(source, &GENERATION_MARKERS.map(String::from)));
        let has_generation_blocks = source.contains(GENERATION_MARKERS);
        environment.add_template_owned(NAME, source).map_err(|error| explain(origin, &error))?;
        Ok(Self { environment, origin: origin.to_owned(), tokens, has_generation_blocks })
    }

    /// Converts `conversation` to text; `variables` is an object with further variables, such as `tools`.
    /// `add_generation_prompt` appends the start of the next answer. Fails with [`Error::Model`] naming the template's
    /// line: what it refuses (two users in a row, an unknown role) or cannot compute.
    pub fn render(
        &self,
        conversation: &Conversation,
        variables: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Rendered> {
        let fail = |error: minijinja::Error| explain(&self.origin, &error);
        let TemplateTokens { bos, eos } = &self.tokens;
        let template = self.environment.get_template(NAME).map_err(fail)?;
        let mut all = BTreeMap::from([("tools".to_owned(), ().into()), ("documents".to_owned(), ().into())]);
        // A missing token stays undefined, which templates test for.
        for (name, token) in [("bos_token", bos), ("eos_token", eos)] {
            all.extend(token.iter().map(|token| (name.to_owned(), Value::from(token.as_str()))));
        }
        all.extend(variables.into_iter().flat_map(entries).map(|(name, value)| (name.to_string(), value)));
        let messages = conversation.messages.iter().map(with_reasoning).collect();
        let own = [("messages", messages), ("add_generation_prompt", add_generation_prompt.into())];
        all.extend(own.map(|(name, value)| (name.to_owned(), value)));
        if !self.has_generation_blocks {
            let text = template.render(all).map_err(fail)?;
            return Ok(Rendered { text, assistant_ranges: Vec::new() });
        }
        if conversation.messages.iter().chain(variables).any(contains_marker) {
            let message = "a message or a tool contains U+FDD0 or U+FDD1, which are noncharacters and reserved for \
                 marking answers; remove them";
            return Err(Error::model(&self.origin, message));
        }
        let marked = template.render(all).map_err(fail)?;
        extract_ranges(&marked).ok_or_else(|| {
            Error::model(&self.origin, "its chat template has an unpaired `{% generation %}` or `{% endgeneration %}`")
        })
    }
}

pub(super) fn is_answer(message: &Value) -> bool {
    field(message, "role").is_some_and(|role| role.as_str() == Some("assistant"))
}

/// A message with its thoughts under the names that templates read, as in transformers: `reasoning_content`, and for
/// gpt-oss `thinking`.
fn with_reasoning(message: &Value) -> Value {
    let Some(thoughts) = REASONING.iter().find_map(|name| field(message, name)) else { return message.clone() };
    let named = |name: &str| (Value::from(name), thoughts.clone());
    let (thinking, reasoning) = (named("thinking"), named("reasoning_content"));
    Value::from_pairs(std::iter::once(thinking).chain(entries(message)).chain([reasoning]))
}

fn contains_marker(value: &Value) -> bool {
    match value.as_str() {
        Some(text) => text.contains(GENERATION_MARKERS),
        None => value.try_iter().is_ok_and(|mut items| {
            items.any(|item| contains_marker(&item) || value.get_item(&item).is_ok_and(|value| contains_marker(&value)))
        }),
    }
}

fn explain(origin: &str, error: &minijinja::Error) -> Error {
    let line = error.line().map_or_else(String::new, |line| format!(", line {line}"));
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    Error::model(origin, format!("its chat template{line}: {detail}"))
}

/// The template with the same output and without the tags of generation blocks, which programs except transformers
/// refuse.
pub(crate) fn without_generation_tags(source: &str) -> String {
    replace_generation_tags(source, &[String::new(), String::new()])
}

/// Replaces the tags of generation blocks by expressions that print `markers`, with the same control of white space.
fn replace_generation_tags(source: &str, markers: &[String; 2]) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start + 2..].find("%}").map(|end| end + 4) else { break };
        let tag = &rest[start..start + length];
        let inner = &tag[2..length - 2];
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        out.push_str(&rest[..start]);
        rest = &rest[start + length..];
        let Some(mark) = ["generation", "endgeneration"].iter().position(|name| *name == word) else {
            out.push_str(tag);
            continue;
        };
        // A block at the start of a line removes the blanks before it and the line's end; an expression does not.
        let (before, after) = (inner.starts_with('-'), inner.ends_with('-'));
        if !before {
            let line = out.rfind('\n').map_or(0, |at| at + 1);
            if out[line..].chars().all(|c| c == ' ' || c == '\t') {
                out.truncate(line);
            }
        }
        let dash = |yes: bool| if yes { "-" } else { "" };
        let _ = write!(out, "{{{{{} '{}' {}}}}}", dash(before), markers[mark], dash(after));
        if !after {
            rest = rest.strip_prefix("\r\n").or_else(|| rest.strip_prefix('\n')).unwrap_or(rest);
        }
    }
    out.push_str(rest);
    out
}

/// Takes the marks out of a text; `None` if they do not pair up.
fn extract_ranges(marked: &str) -> Option<Rendered> {
    let mut rendered = Rendered::default();
    let mut open = None;
    for c in marked.chars() {
        if c == GENERATION_MARKERS[0] {
            if open.replace(rendered.text.len()).is_some() {
                return None;
            }
        } else if c == GENERATION_MARKERS[1] {
            rendered.assistant_ranges.push(open.take()?..rendered.text.len());
        } else {
            rendered.text.push(c);
        }
    }
    open.is_none().then_some(rendered)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for message in messages %}\n  {% if message.role == 'assistant' %}\n<|im_start|>assistant\n\
                          {% generation %}\n{{ message.content }}<|im_end|>\n{% endgeneration %}\n{% else %}\n\
                          <|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}\n{% endfor %}\n\
                          {% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n";

    fn template(source: &str) -> Template {
        let tokens = TemplateTokens { bos: Some("<s>".into()), eos: None };
        Template::new(source, "model", tokens).unwrap()
    }

    fn conversation(turns: &[(&str, &str)]) -> Conversation {
        let mut conversation = Conversation::default();
        for (role, content) in turns {
            conversation.push(role, content);
        }
        conversation
    }

    #[test]
    fn assistant_ranges_are_the_generation_blocks() {
        let chat = conversation(&[("user", "Hi"), ("assistant", "Ho ✓"), ("user", "?"), ("assistant", "!")]);
        let Rendered { text, assistant_ranges } = template(CHATML).render(&chat, None, false).unwrap();
        assert_eq!(
            text,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo ✓<|im_end|>\n<|im_start|>user\n?<|im_end|>\n\
             <|im_start|>assistant\n!<|im_end|>\n"
        );
        let words: Vec<&str> = assistant_ranges.into_iter().map(|range| &text[range]).collect();
        assert_eq!(words, ["Ho ✓<|im_end|>\n", "!<|im_end|>\n"]);
    }

    #[test]
    fn a_template_without_generation_tags_gives_the_same_text() {
        let chat = conversation(&[("user", "Hi"), ("assistant", " Ho "), ("user", "?"), ("assistant", "!")]);
        let dashed = "{% for m in messages %}\na \n {%- generation -%}\n {{ m.content }}\n {%- endgeneration %}\n\n\
                      \t{% generation -%} b {% endgeneration %}{% endfor %}";
        for source in [CHATML, dashed] {
            let plain = without_generation_tags(source);
            assert!(!plain.contains("generation %") && !plain.contains("generation -%"), "{plain}");
            let text = |source: &str| template(source).render(&chat, None, false).unwrap().text;
            assert_eq!(text(&plain), text(source));
        }
        assert_eq!(without_generation_tags("{% if generation %}a{% endif %}"), "{% if generation %}a{% endif %}");
    }

    /// As `_alias_reasoning_fields` of transformers 5.23.
    #[test]
    fn thoughts_have_the_names_that_templates_read() {
        let rendered = |message: &str| {
            let chat = Conversation::from_json(&format!("[{message}]")).unwrap();
            template("{{ messages[0] | tojson }}").render(&chat, None, false).unwrap().text
        };
        for (message, expected) in [
            (
                r#"{"role": "assistant", "reasoning": "a", "content": "b"}"#,
                r#"{"thinking": "a", "role": "assistant", "reasoning": "a", "content": "b", "reasoning_content": "a"}"#,
            ),
            (
                r#"{"thinking": "c", "reasoning_content": null, "content": "b"}"#,
                r#"{"thinking": "c", "reasoning_content": "c", "content": "b"}"#,
            ),
            (r#"{"thinking": "d", "reasoning_content": "e"}"#, r#"{"thinking": "d", "reasoning_content": "e"}"#),
            (r#"{"reasoning": null, "content": "b"}"#, r#"{"reasoning": null, "content": "b"}"#),
        ] {
            assert_eq!(rendered(message), expected);
        }
    }

    /// A template without marked answers writes the characters that mark them in others.
    #[test]
    fn the_characters_of_marks_are_text_or_refused() {
        let chat = conversation(&[("user", "a\u{FDD0}b\u{FDD1}")]);
        let plain = template("{{ messages[0].content }}").render(&chat, None, false).unwrap();
        assert_eq!((plain.text.as_str(), &plain.assistant_ranges[..]), ("a\u{FDD0}b\u{FDD1}", &[][..]));
        assert!(template(CHATML).render(&chat, None, false).is_err());
        let tools = read_json(r#"{"tools": [{"name": "\ufdd0f\ufdd1"}]}"#).unwrap();
        let marking = template("{{ tools }}{% generation %}{% endgeneration %}");
        let message = marking.render(&Conversation::default(), Some(&tools), false).unwrap_err().to_string();
        assert!(message.contains("a message or a tool contains U+FDD0"), "{message}");
        assert!(template("{% endgeneration %}").render(&chat, None, false).is_err());
    }

    #[test]
    fn a_reply_is_asked_for() {
        let text = template(CHATML).render(&conversation(&[("user", "Hi")]), None, true).unwrap().text;
        assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    }

    #[test]
    fn tools_are_written_as_python_writes_json() {
        let tools = r#"{"tools": [{"type": "function", "b": [1, 2.5, true, null], "a": {"é": "<x>"}}]}"#;
        let rendered = template("{{ tools[0] | tojson }}|{{ tools | tojson(indent=2) }}")
            .render(&Conversation::default(), Some(&read_json(tools).unwrap()), false)
            .unwrap();
        assert_eq!(
            rendered.text,
            "{\"type\": \"function\", \"b\": [1, 2.5, true, null], \"a\": {\"é\": \"<x>\"}}|[\n  {\n    \"type\": \"function\",\n    \
             \"b\": [\n      1,\n      2.5,\n      true,\n      null\n    ],\n    \"a\": {\n      \"é\": \"<x>\"\n    }\n  }\n]"
        );
    }

    #[test]
    fn a_day_without_a_clock_has_every_form() {
        let render = |source: &str| template(source).render(&Conversation::default(), None, false);
        let text = render("{{ strftime_now('%A, %-d %b %y, %d %B %Y, %H:%M') }}").unwrap().text;
        assert_eq!(text, "Tuesday, 5 Aug 25, 05 August 2025, 00:00");
        assert!(render("{{ strftime_now('%Q') }}").unwrap_err().to_string().contains("a code of `%Q`"));
    }

    #[test]
    fn python_methods_and_namespaces_work() {
        let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m['content'].startswith('x') %}\
                      {% continue %}{% endif %}{{ m.content.strip().split('-')[-1] }}{% endfor %}{{ ns.n }}";
        let chat = conversation(&[("user", " a-b "), ("user", "x"), ("user", "c-d")]);
        assert_eq!(template(source).render(&chat, None, false).unwrap().text, "bd3");
    }

    #[test]
    fn endless_templates_end_and_huge_ones_are_refused() {
        let message = template("{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}")
            .render(&Conversation::default(), None, false)
            .unwrap_err()
            .to_string();
        assert!(message.contains("fuel"), "{message}");
        assert!(Template::new(&" ".repeat(MAX_SOURCE + 1), "model", TemplateTokens::default()).is_err());
    }
}
