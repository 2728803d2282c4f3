//! Changes to valid files: bytes overwritten, parts removed or repeated, JSON values replaced.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};

/// Modifications of a valid text.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Byte(u8),
    Insert(&'static str),
    Remove(usize),
    Repeat { length: usize, times: usize },
}

/// Pieces to insert: pieces of the formats, numbers at the edges of their types, and characters of several bytes.
const PIECES: [&str; 28] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "\n",
    "\\",
    "\\u0000",
    "\\ud800",
    "\0",
    "=",
    ".",
    "[[",
    "# ",
    "null",
    "true",
    "-1",
    "1e999",
    "NaN",
    "0.5",
    "65536",
    "4294967296",
    "9223372036854775808",
    "18446744073709551616",
    "é",
    "\u{1F600}",
];

pub(crate) fn changes() -> impl Strategy<Value = Vec<(Index, Change)>> {
    let change = prop_oneof![
        3 => any::<u8>().prop_map(Change::Byte),
        3 => select(&PIECES[..]).prop_map(Change::Insert),
        1 => (1_usize..200).prop_map(Change::Remove),
        1 => (1_usize..30, 1_usize..300).prop_map(|(length, times)| Change::Repeat { length, times }),
    ];
    vec((any::<Index>(), change), 1..4)
}

pub(crate) fn changed(good: &[u8], changes: &[(Index, Change)]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for (at, change) in changes {
        if bytes.is_empty() {
            break;
        }
        let at = at.index(bytes.len());
        let until = |length: usize| (at + length).min(bytes.len());
        match *change {
            Change::Byte(byte) => bytes[at] = byte,
            Change::Insert(text) => drop(bytes.splice(at..at, text.bytes())),
            Change::Remove(length) => drop(bytes.drain(at..until(length))),
            Change::Repeat { length, times } => {
                let part = bytes[at..until(length)].repeat(times);
                drop(bytes.splice(at..at, part));
            }
        }
    }
    bytes
}

/// A place in a JSON value, and its new value.
pub(crate) fn replacement() -> impl Strategy<Value = (Index, Value)> {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1),
        json!(3.5),
        json!(1e300),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(""),
        json!("a"),
        json!("Ġ"),
        json!("\u{0}"),
        json!("é"),
        json!("(a*)*b"),
        json!("["),
        json!([]),
        json!({}),
        json!([["a", "b"]]),
        json!([["", 0.0]]),
        json!({"a": 0}),
        json!({"a": u32::MAX}),
        json!({"type": "ByteLevel"}),
    ];
    (any::<Index>(), select(values.to_vec()))
}

/// Puts each value in the place that its index names among all values within, counted from the outside in.
pub(crate) fn replaced(mut value: Value, replacements: &[(Index, Value)]) -> Value {
    fn count(value: &Value) -> usize {
        1 + match value {
            Value::Array(values) => values.iter().map(count).sum::<usize>(),
            Value::Object(fields) => fields.values().map(count).sum(),
            _ => 0,
        }
    }
    fn put(value: &mut Value, place: usize, new: &Value) {
        if place == 0 {
            value.clone_from(new);
            return;
        }
        let parts: Vec<&mut Value> = match value {
            Value::Array(values) => values.iter_mut().collect(),
            Value::Object(fields) => fields.values_mut().collect(),
            _ => return,
        };
        let mut before = 1;
        for part in parts {
            let within = count(part);
            if place < before + within {
                return put(part, place - before, new);
            }
            before += within;
        }
    }
    for (index, new) in replacements {
        let place = index.index(count(&value));
        put(&mut value, place, new);
    }
    value
}

pub(crate) fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..400),
        vec(select(&PIECES[..]), 0..60).prop_map(|pieces| pieces.concat().into_bytes()),
    ]
}
