//! Prompts and answers of a row: one answer, or a chosen and a rejected one, as text or as messages.
//!
//! The formats are TRL's. If `chosen` and `rejected` contain the prompt, it is their common prefix.

use super::fields::{field, json_type, list, messages, with_system};
use super::template::Conversation;
use crate::Error;
use minijinja::Value;
use minijinja::value::ValueKind;

/// A prompt and its answer.
pub(super) enum Sample {
    Completion(String, String),
    Conversation {
        conversation: Conversation,
        /// The messages before the answer; 0 if all answers count.
        prompt: usize,
        /// The variables of its chat template.
        variables: Option<Value>,
    },
}

impl Sample {
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Completion(prompt, answer) if prompt.is_empty() && answer.is_empty())
    }
}

/// A row with a prompt that a model answers.
#[derive(Clone, Debug)]
pub struct PromptRow {
    /// The name of its file.
    pub(super) origin: String,
    pub(super) location: String,
    /// All its fields.
    pub row: Value,
    /// The prompt.
    pub prompt: Prompt,
}

/// A prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// The start of a text.
    Text(String),
    /// Messages, and the variables of their chat template.
    Conversation(Conversation, Option<Value>),
}

impl PromptRow {
    /// An error about this row.
    pub fn error(&self, message: &str) -> Error {
        Error::data(&self.origin, format!("{}: {message}", self.location))
    }
}

#[derive(Clone, Debug, PartialEq)]
enum TextOrMessages {
    Text(String),
    Messages(Vec<Value>),
}

impl TextOrMessages {
    /// The part in field `name`; `None` if it is missing or null.
    fn read(row: &Value, name: &str) -> Result<Option<Self>, String> {
        let Some(value) = field(row, name) else { return Ok(None) };
        let in_table = |text: &str| text.trim_start().starts_with("[{");
        match value.as_str() {
            // Tables have messages as JSON text, but a text may also be a list of other objects.
            Some(text) if in_table(text) && list(value.clone()).is_ok_and(|list| is_messages(&list)) => {}
            Some(text) => return Ok(Some(Self::Text(text.to_owned()))),
            None if value.kind() == ValueKind::Seq => {}
            None => return Err(format!("`{name}` must be text or a list of messages, but is {}", json_type(&value))),
        }
        Ok(Some(Self::Messages(messages(value, name)?)))
    }

    fn require(row: &Value, name: &str) -> Result<Self, String> {
        Self::read(row, name)?.ok_or_else(|| format!("`{name}` is missing or null"))
    }

    /// A prompt after the `system` instructions of its row, if it has messages, or a text is the question before
    /// messages.
    fn with_system(self, row: &Value, before_messages: bool) -> Result<Self, String> {
        let messages = match self {
            Self::Messages(messages) => messages,
            Self::Text(content) if before_messages => vec![minijinja::context! { role => "user", content }],
            Self::Text(_) => return Ok(self),
        };
        Ok(Self::Messages(with_system(row, messages)?))
    }

    fn is_messages(&self) -> bool {
        matches!(self, Self::Messages(_))
    }

    /// The end of the prompt that the two answers of a pair begin with, as in TRL: the first difference, and at least
    /// one character or message before the end of the shorter one. A space at the end of a text's prompt belongs to the
    /// answers.
    fn shared_prompt(&self, other: &Self) -> usize {
        fn common<T: PartialEq>(one: &[T], other: &[T]) -> Option<usize> {
            one.iter().zip(other).position(|(a, b)| a != b)
        }
        match (self, other) {
            (Self::Text(one), Self::Text(other)) => {
                let last = |text: &str| text.char_indices().next_back().map_or(0, |(at, _)| at);
                let Some(at) = common(one.as_bytes(), other.as_bytes()) else {
                    return if one.len() < other.len() { last(one) } else { last(other) };
                };
                let at = one.floor_char_boundary(at);
                at - usize::from(one[..at].ends_with(' '))
            }
            (Self::Messages(one), Self::Messages(other)) => {
                common(one, other).unwrap_or(one.len().min(other.len()).saturating_sub(1))
            }
            _ => 0,
        }
    }

    /// Splits off the end, starting at `at`.
    fn split_off(&mut self, at: usize) -> Self {
        match self {
            Self::Text(text) => Self::Text(text.split_off(at)),
            Self::Messages(messages) => Self::Messages(messages.split_off(at)),
        }
    }

    /// Joins a prompt and its answer, which is field `name`.
    fn join(self, answer: Self, name: &str, variables: Option<Value>) -> Result<Sample, String> {
        let mut messages = match (self, &answer) {
            (Self::Text(prompt), Self::Text(answer)) => return Ok(Sample::Completion(prompt, answer.clone())),
            (Self::Messages(prompt), Self::Messages(_)) => prompt,
            _ => {
                return Err(format!("the prompt is a list of messages, but `{name}` is text; use one form for both"));
            }
        };
        let prompt = messages.len();
        if let Self::Messages(answer) = answer {
            messages.extend(answer);
        }
        let conversation = Conversation { messages };
        if !conversation.has_answer(prompt) {
            return Err(format!("`{name}` contains no message with the role `assistant`"));
        }
        Ok(Sample::Conversation { conversation, prompt, variables })
    }
}

fn is_messages(list: &Value) -> bool {
    let has = |item: &Value, names: &[&str]| names.iter().any(|name| field(item, name).is_some());
    let is_message = |item: Value| {
        has(&item, &["role"]) && has(&item, &["content", "tool_calls"])
            || has(&item, &["from"]) && has(&item, &["value"])
    };
    list.try_iter().is_ok_and(|mut items| items.all(is_message))
}

/// The prompt of `row`, in field `name` or `messages`.
pub(super) fn prompt(row: &Value, name: &str, variables: Option<Value>) -> Result<Prompt, String> {
    let found =
        TextOrMessages::read(row, name).transpose().or_else(|| TextOrMessages::read(row, "messages").transpose());
    match found.ok_or_else(|| format!("`{name}` is missing or null"))??.with_system(row, false)? {
        TextOrMessages::Text(text) => Ok(Prompt::Text(text)),
        TextOrMessages::Messages(messages) => Ok(Prompt::Conversation(Conversation { messages }, variables)),
    }
}

/// The prompt of a row with the answer in field `name`.
pub(super) fn answered(row: &Value, prompt: &str, name: &str, variables: Option<Value>) -> Result<Sample, String> {
    let [prompt, answer] = [TextOrMessages::require(row, prompt)?, TextOrMessages::require(row, name)?];
    let prompt = prompt.with_system(row, answer.is_messages())?;
    prompt.join(answer, name, variables)
}

/// The chosen and the rejected answer of a row, each with its prompt; `None` if they are identical.
pub(super) fn pair(row: &Value, prompt: &str, variables: Option<&Value>) -> Result<Option<[Sample; 2]>, String> {
    let names = ["chosen", "rejected"];
    let [mut chosen, mut rejected] = [TextOrMessages::require(row, names[0])?, TextOrMessages::require(row, names[1])?];
    if chosen.is_messages() != rejected.is_messages() {
        return Err(
            "one of `chosen` and `rejected` is text, the other a list of messages; use one form for both".into()
        );
    }
    if chosen == rejected {
        return Ok(None);
    }
    let shared = chosen.shared_prompt(&rejected);
    // A prompt as text next to conversations repeats their beginning, or is the question before them.
    let prompt = match TextOrMessages::read(row, prompt)? {
        Some(prompt) if prompt.is_messages() || !chosen.is_messages() || shared == 0 => prompt,
        _ => {
            let [answer, other] = [chosen.split_off(shared), rejected.split_off(shared)];
            let prompt = std::mem::replace(&mut chosen, answer);
            rejected = other;
            prompt
        }
    };
    let prompt = prompt.with_system(row, chosen.is_messages())?;
    let second = prompt.clone();
    let pair =
        [prompt.join(chosen, names[0], variables.cloned())?, second.join(rejected, names[1], variables.cloned())?];
    if let Some(at) = pair.iter().position(Sample::is_empty) {
        return Err(format!("`prompt` and `{}` are empty", names[at]));
    }
    Ok(Some(pair))
}

/// The label of an answer: whether it is good. Tables have it as text, and some data sets as a number.
pub(super) fn label(row: &Value) -> Result<bool, String> {
    let value = field(row, "label").ok_or("`label` is missing or null")?;
    match value.to_string().to_ascii_lowercase().as_str() {
        "true" | "1" | "1.0" => Ok(true),
        "false" | "0" | "0.0" => Ok(false),
        _ => Err(format!("`label` must be true or false, but is {value}")),
    }
}

/// The weight of a sample in the loss, if it has one. Tables have it as text, and an empty text for none.
pub(super) fn weight(row: &Value) -> Result<Option<f32>, String> {
    let Some(value) = field(row, "weight").filter(|value| value.as_str() != Some("")) else { return Ok(None) };
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok().filter(|_| value.kind() == ValueKind::Number),
    };
    let number = number.map(|number| number as f32).filter(|number| number.is_finite() && *number >= 0.0);
    number.map(Some).ok_or_else(|| format!("`weight` must be a number of at least 0, but is {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::exact_json::read_json;

    fn row(text: &str) -> Value {
        read_json(text).unwrap()
    }

    /// Prompt and answer of each side; messages as `role: content` lines.
    fn sides(text: &str) -> [(String, String); 2] {
        let sides = pair(&row(text), "prompt", None).unwrap().unwrap();
        sides.map(|sample| match sample {
            Sample::Completion(prompt, answer) => (prompt, answer),
            Sample::Conversation { conversation, prompt, .. } => {
                let lines: Vec<String> = conversation
                    .messages
                    .iter()
                    .map(|m| format!("{}: {}", m.get_attr("role").unwrap(), m.get_attr("content").unwrap()))
                    .collect();
                (lines[..prompt].join("\n"), lines[prompt..].join("\n"))
            }
        })
    }

    fn pairs(prompt: &str, chosen: &str, rejected: &str) -> [(String, String); 2] {
        [chosen, rejected].map(|answer| (prompt.to_owned(), answer.to_owned()))
    }

    #[test]
    fn texts_are_split_as_in_trl() {
        for (text, expected) in [
            (
                r#"{"prompt": "Sky is", "chosen": " blue.", "rejected": " green."}"#,
                pairs("Sky is", " blue.", " green."),
            ),
            (
                r#"{"chosen": "The sky is blue", "rejected": "The sky is green"}"#,
                pairs("The sky is", " blue", " green"),
            ),
            (r#"{"chosen": "ab", "rejected": "abc"}"#, pairs("a", "b", "bc")),
            (r#"{"chosen": "né", "rejected": "nè"}"#, pairs("n", "é", "è")),
            (r#"{"chosen": "x", "rejected": "y"}"#, pairs("", "x", "y")),
        ] {
            assert_eq!(sides(text), expected, "{text}");
        }
    }

    #[test]
    fn conversations_share_their_beginning_or_follow_their_prompt() {
        let question = r#"{"role": "user", "content": "Sky?"}"#;
        let good = r#"{"role": "assistant", "content": "Blue."}"#;
        let bad = r#"{"role": "assistant", "content": "Red."}"#;
        let expected = pairs("user: Sky?", "assistant: Blue.", "assistant: Red.");
        for text in [
            format!(r#"{{"prompt": [{question}], "chosen": [{good}], "rejected": [{bad}]}}"#),
            format!(r#"{{"chosen": [{question}, {good}], "rejected": [{question}, {bad}]}}"#),
            format!(r#"{{"prompt": "Sky?", "chosen": [{question}, {good}], "rejected": [{question}, {bad}]}}"#),
            format!(r#"{{"prompt": "Sky?", "chosen": [{good}], "rejected": [{bad}]}}"#),
        ] {
            assert_eq!(sides(&text), expected, "{text}");
        }
        let table =
            serde_json::json!({"chosen": format!("[{question}, {good}]"), "rejected": format!("[{question}, {bad}]")});
        assert_eq!(sides(&table.to_string()), expected);
        let objects =
            serde_json::json!({"prompt": "Route:", "chosen": r#"[{"from": "A", "to": "B"}]"#, "rejected": "[{}]"});
        assert_eq!(sides(&objects.to_string())[0].1, r#"[{"from": "A", "to": "B"}]"#);
        let longer =
            format!(r#"{{"chosen": [{question}, {good}], "rejected": [{question}, {good}, {question}, {bad}]}}"#);
        assert_eq!(sides(&longer)[0], ("user: Sky?".to_owned(), "assistant: Blue.".to_owned()));
    }

    #[test]
    fn labels_and_weights_are_read_from_tables_too() {
        for good in ["true", "\"True\"", "1", "\"1\"", "1.0"] {
            assert_eq!(label(&row(&format!("{{\"label\": {good}}}"))), Ok(true), "{good}");
        }
        for bad in ["false", "\"FALSE\"", "0", "\"0\"", "0.0"] {
            assert_eq!(label(&row(&format!("{{\"label\": {bad}}}"))), Ok(false), "{bad}");
        }
        for other in ["3", "-1", "0.5", "[1]", "\"\""] {
            assert!(label(&row(&format!("{{\"label\": {other}}}"))).unwrap_err().contains("but is"), "{other}");
        }
        for (text, expected) in [("2", 2.0), ("\"0.5\"", 0.5), ("0", 0.0)] {
            assert_eq!(weight(&row(&format!("{{\"weight\": {text}}}"))), Ok(Some(expected)));
        }
        assert_eq!(weight(&row("{}")), Ok(None));
        for text in ["-1", "true", "\"heavy\"", "1e60"] {
            assert!(weight(&row(&format!("{{\"weight\": {text}}}"))).unwrap_err().contains("at least 0"), "{text}");
        }
    }
}
