//! Parses JSON with whole numbers of any size that Jinja's values hold.

use super::jinja_python::string_end;
use minijinja::value::{Value, ValueKind};
use serde_json::Result as JsonResult;

/// Marks the digits of an integer that was written as a string; a Unicode noncharacter.
const WHOLE: char = '\u{FDD2}';
/// The number of digits that always fit a `u64`.
const SAFE_DIGITS: usize = 19;

/// Parses JSON. Integers of up to 128 bits stay exact, as in Python; the parser alone converts those above 64 bits to
/// floats.
pub(crate) fn read_json(text: &str) -> JsonResult<Value> {
    let marked = mark_large_numbers(text);
    match marked.map(|marked| serde_json::from_str(&marked)) {
        Some(Ok(value)) => Ok(unmark(&value)),
        // Only an error in the original text has the right position.
        Some(Err(_)) | None => serde_json::from_str(text),
    }
}

/// The text with its large integers as marked strings; `None` if it has none.
fn mark_large_numbers(text: &str) -> Option<String> {
    if text.as_bytes().split(|byte| !byte.is_ascii_digit()).all(|digits| digits.len() < SAFE_DIGITS) {
        return None;
    }
    let mut out = String::new();
    let mut rest = text;
    let mut found = false;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let token = if rest.starts_with('"') {
            string_end(rest, 0)
        } else {
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || "+-.".contains(c))).unwrap_or(rest.len())
        };
        let (token, after) = rest.split_at(token);
        rest = after;
        let large =
            token.len() > SAFE_DIGITS && token.parse::<i128>().is_ok_and(|number| u64::try_from(number).is_err());
        if large {
            found = true;
            out.extend(['"', WHOLE]);
        }
        out.push_str(token);
        out.extend(large.then_some('"'));
    }
    found.then(|| out + rest)
}

pub(crate) fn entries(object: &Value) -> impl Iterator<Item = (Value, Value)> {
    let names = object.try_iter().into_iter().flatten();
    names.map(|name| (name.clone(), object.get_item(&name).unwrap_or_default()))
}

fn unmark(value: &Value) -> Value {
    match value.kind() {
        ValueKind::String => {
            let number = value.as_str().and_then(|text| text.strip_prefix(WHOLE)?.parse::<i128>().ok());
            number.map_or_else(|| value.clone(), Value::from)
        }
        ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| unmark(&item)).collect(),
        ValueKind::Map => Value::from_pairs(entries(value).map(|(key, item)| (key, unmark(&item)))),
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn json_is_read_as_by_the_parser(text in r#"[\[\]{}"\\0-9eE+\-.,: é]{0,60}"#) {
            let expected = serde_json::from_str::<Value>(&text).ok();
            let found = read_json(&text).ok();
            proptest::prop_assert_eq!(found.is_some(), expected.is_some());
        }
    }
}
