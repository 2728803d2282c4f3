//! Answers in `OpenAI`'s Harmony format, found in the text: each message names its author after `<|start|>`, so that a
//! mask needs no second template.

use super::template::{Rendered, is_answer};
use minijinja::Value;
use std::ops::Range;

/// The start of a message, and of one of the assistant's.
const START: &str = "<|start|>";
const ANSWER: &str = "<|start|>assistant";
/// The ends of messages; the model writes them.
const ENDS: [&str; 3] = ["<|end|>", "<|return|>", "<|call|>"];

/// Whether a text with the answer `b` is in this format.
pub(super) fn is_harmony(text: &str) -> bool {
    text.contains("<|start|>assistant<|channel|>final<|message|>b<|return|>")
}

/// The text with the ranges of its answers, without the start that a prompt ends with. Messages of the assistant that
/// follow each other are one answer. `None` if one of the `contents`, messages and tools, contains a start, or an
/// answer an end, which would look like the format's.
pub(super) fn marked<'a>(text: String, contents: impl IntoIterator<Item = &'a Value>) -> Option<Rendered> {
    let misleads = |content: &Value| {
        let text = content.to_string();
        text.contains(START) || is_answer(content) && ENDS.iter().any(|end| text.contains(end))
    };
    if contents.into_iter().any(misleads) {
        return None;
    }
    let mut assistant_ranges: Vec<Range<usize>> = Vec::new();
    for (start, _) in text.match_indices(ANSWER) {
        let from = start + ANSWER.len();
        let ends = ENDS.iter().filter_map(|end| text[from..].find(end).map(|at| from + at + end.len()));
        let Some(end) = ends.min() else { continue };
        match assistant_ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => assistant_ranges.push(from..end),
        }
    }
    Some(Rendered { text, assistant_ranges })
}
