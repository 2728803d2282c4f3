//! Fields of rows, and messages in them.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::jinja_python::read_json;

/// Roles that a message may have.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// A row's value under a name; a null counts as none.
pub(super) fn field(row: &Value, name: &str) -> Option<Value> {
    row.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

/// The JSON type of a value.
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

/// A list, or a list as JSON text, as in tables.
pub(super) fn list(value: Value) -> Result<Value, String> {
    match value.kind() {
        ValueKind::Seq => Ok(value),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let read: Value = read_json(text).map_err(|error| format!("is text, but not JSON: {error}"))?;
            if read.kind() == ValueKind::Seq {
                Ok(read)
            } else {
                Err(format!("must be a list, but is {}", json_type(&read)))
            }
        }
        _ => Err(format!("must be a list, but is {}", json_type(&value))),
    }
}

/// The text of `role`, if it is a role that a message may have.
pub(super) fn checked_role(role: &Value) -> Result<String, String> {
    let text = role.as_str().ok_or_else(|| format!("its role must be text, but is {}", json_type(role)))?;
    if ROLES.contains(&text) {
        return Ok(text.to_owned());
    }
    let known = ROLES.map(|role| format!("`{role}`")).join(", ");
    Err(format!("the role `{text}` is unknown; use one of {known}"))
}

/// The messages of a list in field `name`, each read by `read`.
pub(super) fn messages(
    value: Value,
    name: &str,
    read: fn(&Value) -> Result<Value, String>,
) -> Result<Vec<Value>, String> {
    let items = list(value).map_err(|problem| format!("`{name}` {problem}"))?;
    let message = |(index, item): (usize, Value)| {
        read(&item).map_err(|problem| format!("message {} of `{name}`: {problem}", index + 1))
    };
    items.try_iter().into_iter().flatten().enumerate().map(message).collect()
}

/// A message with `role`, `content` and everything else that the template reads.
pub(super) fn message(item: &Value) -> Result<Value, String> {
    if item.kind() != ValueKind::Map {
        return Err(format!("must be an object with `role` and `content`, but is {}", json_type(item)));
    }
    let role = field(item, "role").ok_or("`role` is missing")?;
    checked_role(&role)?;
    match field(item, "content") {
        None if field(item, "tool_calls").is_some() => Ok(item.clone()),
        None => Err("`content` is missing or null".to_owned()),
        Some(content) if matches!(content.kind(), ValueKind::String | ValueKind::Seq) => Ok(item.clone()),
        Some(content) => Err(format!("`content` must be text, but is {}", json_type(&content))),
    }
}
