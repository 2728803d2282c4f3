//! The token that the post-processor of a `tokenizer.json` adds before a text.

use serde_json::{Value, json};

/// The name of the token.
pub(super) fn added_by(post_processor: &Value) -> Option<&str> {
    if let Some(parts) = post_processor["processors"].as_array() {
        return parts.iter().find_map(added_by);
    }
    // BERT's and RoBERTa's processors have a fixed form.
    let fixed = || post_processor["cls"][0].as_str();
    post_processor["single"][0]["SpecialToken"]["id"].as_str().or_else(fixed)
}

/// Makes the post-processor add this token too.
pub(super) fn add(post_processor: &mut Value, token: &str, id: u32) {
    let special = |sequence: u32| json!({"SpecialToken": {"id": token, "type_id": sequence}});
    let text = |name: &str, sequence: u32| json!({"Sequence": {"id": name, "type_id": sequence}});
    let template = json!({
        "type": "TemplateProcessing",
        "single": [special(0), text("A", 0)],
        "pair": [special(0), text("A", 0), special(1), text("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    });
    let mut parts = vec![post_processor.take(), template];
    parts.retain(|part| !part.is_null());
    *post_processor = json!({"type": "Sequence", "processors": parts});
}

/// Makes the post-processor add no token before a text. Processors of a fixed form stay as they are.
pub(super) fn remove(post_processor: &mut Value) {
    if let Some(parts) = post_processor.get_mut("processors").and_then(Value::as_array_mut) {
        parts.iter_mut().filter(|part| added_by(part).is_some()).take(1).for_each(remove);
    }
    for template in ["single", "pair"] {
        let Some(pieces) = post_processor.get_mut(template).and_then(Value::as_array_mut) else { continue };
        for at in (1..pieces.len()).rev() {
            if pieces[at]["Sequence"].is_object() && pieces[at - 1]["SpecialToken"].is_object() {
                pieces.remove(at - 1);
            }
        }
    }
}
