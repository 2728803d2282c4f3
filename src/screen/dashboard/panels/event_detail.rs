//! One event with all of its fields.

use crate::screen::dashboard::event_text;
use crate::telemetry::EventRow;
use crate::ui::{Pad, Role, format};
use serde_json::Value;

/// Draws the event, scrolled to line `top`, over the whole panel.
pub(in crate::screen::dashboard) fn draw(row: &EventRow, top: u16, pad: &mut Pad) {
    let (glyph, role) = event_text::glyph(&row.event);
    let at = format!(" step {} at {}", row.step, format::clock(row.s));
    let mut inner =
        pad.frame(&[(&glyph.to_string(), role), (&at, Role::Title), ("   j k scroll   Esc closes", Role::Dim)]);
    let lines = lines(row, inner.width().into());
    let top = usize::from(top).min(lines.len().saturating_sub(usize::from(inner.height())));
    for (y, (key, value)) in (0..inner.height()).zip(&lines[top..]) {
        let x = inner.text(1, y, key, Role::Dim);
        inner.text(x, y, value, Role::Text);
    }
}

/// The event's lines: its text, wrapped to `width`, then its fields.
fn lines(row: &EventRow, width: usize) -> Vec<(String, String)> {
    let sentence: Vec<char> = format::printable(&event_text::text(row)).chars().collect();
    let sentence = sentence.chunks(width.saturating_sub(2).max(1));
    let mut lines: Vec<_> = sentence.map(|part| (String::new(), part.iter().collect())).collect();
    lines.push(Default::default());
    fields(serde_json::to_value(&row.event).unwrap_or_default(), "", &mut lines);
    if row.more > 0 {
        lines.push((String::new(), format!("and {} more tensors, in the run's log", row.more)));
    }
    lines
}

/// The leaves of a value, each with its path; an array of scalars and a tensor's row take one line.
fn fields(value: Value, path: &str, lines: &mut Vec<(String, String)>) {
    let within = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    let plain = |value: &Value| !value.is_object() && !value.is_array();
    match value {
        Value::Object(map) if map.contains_key("name") => {
            let text = map.iter().filter(|(key, value)| *key != "name" && plain(value));
            let text: Vec<_> = text.map(|(key, value)| format!("{key} {}", leaf(value))).collect();
            lines.push((format!("{path} {}: ", leaf(&map["name"])), text.join("  ")));
        }
        Value::Object(map) => map.into_iter().for_each(|(key, value)| fields(value, &within(&key), lines)),
        Value::Array(values) if values.iter().all(plain) => {
            lines.push((format!("{path}: "), values.iter().map(leaf).collect::<Vec<_>>().join(" ")));
        }
        Value::Array(values) => values.into_iter().for_each(|value| fields(value, path, lines)),
        Value::Null => {}
        value => lines.push((format!("{path}: "), leaf(&value))),
    }
}

fn leaf(value: &Value) -> String {
    format::printable(&value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}
