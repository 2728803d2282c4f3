//! Fields of rows, and messages in them.

use super::exact_json::{entries, read_json};
use minijinja::value::ValueKind;
use minijinja::{Value, context};

/// Roles that a message may have.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];
/// Roles of messages with `from` and `value`, and their usual names.
const SHAREGPT_ROLES: [(&str, &str); 4] =
    [("human", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"), ("observation", "tool")];

/// A row's value under a name; a null counts as none.
pub(super) fn field(row: &Value, name: &str) -> Option<Value> {
    row.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

pub(super) fn json_type(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => "null",
        ValueKind::Bool => "a boolean",
        ValueKind::Number => "a number",
        ValueKind::String => "text",
        ValueKind::Map => "an object",
        _ => "a list",
    }
}

/// A value of this kind, or its JSON text, as in tables.
fn parsed(value: Value, kind: ValueKind) -> Result<Value, String> {
    let value: Value = match value.as_str() {
        Some(text) => read_json(text).map_err(|error| format!("is text, but not JSON: {error}"))?,
        None => value,
    };
    if value.kind() == kind {
        return Ok(value);
    }
    let wanted = if kind == ValueKind::Map { "an object" } else { "a list" };
    Err(format!("must be {wanted}, but is {}", json_type(&value)))
}

/// A list, or a list as JSON text.
pub(super) fn list(value: Value) -> Result<Value, String> {
    parsed(value, ValueKind::Seq)
}

/// The text of `role`, if it is a role that a message may have.
fn checked_role(role: &Value) -> Result<&str, String> {
    let text = role.as_str().ok_or_else(|| format!("its role must be text, but is {}", json_type(role)))?;
    if ROLES.contains(&text) {
        return Ok(text);
    }
    let advice = if text == "function_call" {
        "write the call into `tool_calls` of an `assistant` message".to_owned()
    } else {
        format!("use one of {}", ROLES.map(|role| format!("`{role}`")).join(", "))
    };
    Err(format!("the role `{text}` is unknown; {advice}"))
}

pub(super) fn messages(value: Value, name: &str) -> Result<Vec<Value>, String> {
    let items = list(value).map_err(|problem| format!("`{name}` {problem}"))?;
    let message = |(index, item): (usize, Value)| {
        message(&item).map_err(|problem| format!("message {} of `{name}`: {problem}", index + 1))
    };
    items.try_iter().into_iter().flatten().enumerate().map(message).collect()
}

/// A message with `role`, `content` and everything else that the template reads; instead of these two fields it may
/// have `from` and `value`. Other fields that are null are left out, because templates ask whether a message has
/// `tool_calls`.
fn message(item: &Value) -> Result<Value, String> {
    if item.kind() != ValueKind::Map {
        return Err(format!("must be an object with `role` and `content`, but is {}", json_type(item)));
    }
    let is_sharegpt = field(item, "role").is_none() && field(item, "from").is_some();
    let [role_name, content_name] = if is_sharegpt { ["from", "value"] } else { ["role", "content"] };
    let role = field(item, role_name).ok_or("`role` or `from` is missing")?;
    let known = SHAREGPT_ROLES.iter().find(|(other, _)| is_sharegpt && role.as_str() == Some(*other));
    let role = known.map_or_else(|| checked_role(&role), |(_, role)| Ok(role))?;
    let content = field(item, content_name).map(text_of_parts).transpose()?;
    match &content {
        None if field(item, "tool_calls").is_some() => {}
        None => return Err(format!("`{content_name}` is missing or null")),
        Some(content) if matches!(content.kind(), ValueKind::String | ValueKind::Seq) => {}
        Some(content) => return Err(format!("`{content_name}` must be text, but is {}", json_type(content))),
    }
    let fields = entries(item).filter(|(name, value)| name.as_str() == Some("content") || !value.is_none());
    if !is_sharegpt {
        let read = |(name, value): (Value, Value)| match &content {
            Some(content) if name.as_str() == Some("content") => (name, content.clone()),
            _ => (name, value),
        };
        return Ok(Value::from_pairs(fields.map(read)));
    }
    let is_other = |name: &Value| !matches!(name.as_str(), Some("from" | "value" | "role" | "content"));
    let others = fields.filter(|(name, _)| is_other(name));
    let renamed = [("role", Some(role.into())), ("content", content)];
    let renamed = renamed.into_iter().filter_map(|(name, value)| Some((name.into(), value?)));
    Ok(Value::from_pairs(renamed.chain(others)))
}

/// The text of a `content` that is a list of texts, which some templates leave out or write in Python's format; any
/// other `content` as it is. An image, a video or a sound is an error, because no model reads it.
fn text_of_parts(content: Value) -> Result<Value, String> {
    if content.kind() != ValueKind::Seq || content.len() == Some(0) {
        return Ok(content);
    }
    let mut joined = Some(String::new());
    for part in content.try_iter().into_iter().flatten() {
        let kind = field(&part, "type").map_or_else(String::new, |kind| kind.to_string());
        if ["image", "video", "audio"].iter().any(|media| kind.contains(media)) {
            return Err(format!(
                "a part of its `content` is of type `{kind}`, but only texts are trained on; remove it"
            ));
        }
        let text = field(&part, "text").filter(|_| kind == "text");
        joined = joined.zip(text).and_then(|(joined, text)| Some(joined + text.as_str()?));
    }
    Ok(joined.map_or(content, Value::from))
}

/// `messages` after the `system` instructions of their row, unless they begin with others. Fails if they are not text.
pub(super) fn with_system(row: &Value, mut messages: Vec<Value>) -> Result<Vec<Value>, String> {
    let is_system = |message: &Value| {
        matches!(field(message, "role").as_ref().and_then(Value::as_str), Some("system" | "developer"))
    };
    let system = field(row, "system");
    if let Some(wrong) = system.as_ref().filter(|system| system.as_str().is_none()) {
        return Err(format!("`system` must be text, but is {}", json_type(wrong)));
    }
    if let Some(content) = system.filter(|text| text.as_str() != Some(""))
        && !messages.first().is_some_and(is_system)
    {
        messages.insert(0, context! { role => "system", content });
    }
    Ok(messages)
}

/// The variables of a row's chat template besides its messages: `tools`, and those in `chat_template_kwargs`, as in
/// TRL; `None` if there are none. A table has an empty text for none.
pub(super) fn template_variables(row: &Value) -> Result<Option<Value>, String> {
    let given = |name: &str, kind: ValueKind| {
        let value = field(row, name).filter(|value| value.as_str() != Some(""));
        value.map(|value| parsed(value, kind)).transpose().map_err(|problem| format!("`{name}` {problem}"))
    };
    // Some templates introduce the tools of an empty list.
    let tools = given("tools", ValueKind::Seq)?.filter(|tools| tools.len() != Some(0));
    let tools = tools.map(|tools| ("tools".into(), tools));
    let others = given("chat_template_kwargs", ValueKind::Map)?;
    let all: Vec<_> = tools.into_iter().chain(others.iter().flat_map(entries)).collect();
    Ok((!all.is_empty()).then(|| Value::from_pairs(all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Templates such as Qwen 3's write nothing for a list.
    #[test]
    fn a_content_of_texts_is_one_text() {
        let read = |content: &str| {
            messages(format!(r#"[{{"role": "user", "content": {content}, "name": "n"}}]"#).into(), "messages")
                .map(|messages| serde_json::to_string(&messages[0]).unwrap())
        };
        for (content, expected) in [
            (r#"[{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": null}]"#, r#""a b""#),
            (r#"[{"type": "thinking", "thinking": "a"}]"#, r#"[{"type":"thinking","thinking":"a"}]"#),
            (r#"["a"]"#, r#"["a"]"#),
            ("[]", "[]"),
        ] {
            assert_eq!(read(content).unwrap(), format!(r#"{{"role":"user","content":{expected},"name":"n"}}"#));
        }
    }

    #[test]
    fn null_fields_of_a_message_are_left_out_except_its_content() {
        let rows = r#"[{"role": "user", "content": "a", "tool_calls": null},
            {"role": "assistant", "content": null, "tool_calls": []}, {"from": "gpt", "value": "b", "name": null}]"#;
        let read = messages(rows.into(), "messages").unwrap();
        let expected = r#"[{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":[]},{"role":"assistant","content":"b"}]"#;
        assert_eq!(serde_json::to_string(&read).unwrap(), expected);
    }
}
