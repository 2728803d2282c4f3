//! Refuses a `tokenizer.json` that would need gigabytes of memory for a short text.
//!
//! Normalizers replace text with longer text, and chained ones multiply. A `Precompiled` table specifies its size,
//! which the crate that reads it trusts.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

/// The largest accepted expansion of a text. The tokenizers in use stay below 40: a `SentencePiece` table whose longest
/// entry has 33 bytes, and three bytes for a space.
const MAX_EXPANSION: f64 = 64.0;

/// Returns the problem of a `tokenizer.json` that would make a text too long, or whose table has a wrong size.
pub(super) fn check(json: &Value) -> Result<(), String> {
    let before = expansion_factor(&json["normalizer"])? * expansion_factor(&json["pre_tokenizer"])?;
    for (part, factor) in [("normalizer", before), ("decoder", expansion_factor(&json["decoder"])?)] {
        if factor > MAX_EXPANSION {
            return Err(format!("its {part} can make text {factor:.0} times as long; the maximum is {MAX_EXPANSION}"));
        }
    }
    Ok(())
}

/// How many times as long a step can make a text, in bytes.
fn expansion_factor(step: &Value) -> Result<f64, String> {
    let length = |key: &str| step[key].as_str().map_or(0, str::len) as f64;
    Ok(match step["type"].as_str().unwrap_or_default() {
        "Sequence" => {
            let steps = ["normalizers", "pretokenizers", "decoders"].iter().filter_map(|key| step[*key].as_array());
            steps.flatten().try_fold(1.0, |product, step| Ok::<f64, String>(product * expansion_factor(step)?))?
        }
        "Replace" => {
            let pattern = &step["pattern"];
            let shortest = match pattern["Regex"].as_str() {
                // Converters of `SentencePiece` models write it.
                Some(" {2,}") => 2,
                Some(_) => 0,
                None => pattern["String"].as_str().map_or(0, str::len),
            };
            // A pattern that can match nothing matches around every character.
            if shortest == 0 { 1.0 + length("content") } else { length("content") / shortest as f64 }
        }
        "Prepend" => 1.0 + length("prepend"),
        "Metaspace" => 1.0 + length("replacement"),
        "Precompiled" => longest_entry(step["precompiled_charsmap"].as_str().unwrap_or_default())?,
        "ByteLevel" => 2.0,
        // Unicode's own normalizations lengthen a few characters, and no file can change them.
        _ => 1.0,
    }
    .max(1.0))
}

/// The factor by which the longest entry of a `SentencePiece` table lengthens a character of at least four bytes, which
/// all characters with long entries have. An error for a table that is shorter than the size in its header.
///
/// The table is base64: the size of a trie in bytes (32 bits, little endian), the trie, and entries that end in a zero
/// byte.
fn longest_entry(base64: &str) -> Result<f64, String> {
    let bytes = BASE64_STANDARD.decode(base64).map_err(|_| "its `precompiled_charsmap` is not base64")?;
    let size = bytes.first_chunk().map_or(0, |size| u32::from_le_bytes(*size)) as usize;
    let entries = bytes.get(4 + size..).filter(|_| size.is_multiple_of(4));
    let entries = entries.ok_or_else(|| format!("its `precompiled_charsmap` of {} bytes is damaged", bytes.len()))?;
    Ok(entries.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0) as f64 / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_normalizer_that_explodes_and_a_table_that_lies_are_refused() {
        let replace = |from: &str, to: String| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "normalizers": steps});
        for (normalizer, message) in [
            (replace("a", "a".repeat(1000)), "text 1000 times as long"),
            (sequence(vec![replace("a", "aa".into()); 20]), "times as long"),
            (json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "b".repeat(70)}), "text 71 times"),
            (json!({"type": "Prepend", "prepend": "x".repeat(100)}), "text 101 times"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}), "of 8 bytes is damaged"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "?"}), "not base64"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "a b"}), "not base64"),
        ] {
            let error = check(&json!({"normalizer": normalizer.clone()})).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        assert!(check(&json!({"decoder": replace("a", "a".repeat(1000))})).unwrap_err().contains("decoder"));
    }

    #[test]
    fn what_tokenizers_in_use_do_is_accepted() {
        let llama = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
        // As T5's, whose table's longest entry has 33 bytes.
        let table = BASE64_STANDARD.encode([&[0; 4], [b'x'; 33].as_slice()].concat());
        let t5 = json!({"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": table},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}]});
        for normalizer in [llama, t5, json!({"type": "NFKC"}), Value::Null] {
            check(&json!({"normalizer": normalizer, "pre_tokenizer": metaspace})).unwrap();
        }
    }
}
