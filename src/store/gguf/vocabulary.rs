//! Translates a tokenizer to llama.cpp's metadata: the two kinds that [`super::tokenizer`] reads.

use super::tokenizer::{SPACE, TokenKind, word_pattern};
use crate::data::{Tokenizer, without_generation_tags};
use crate::engine::model::ModelSpec;
use crate::{Error, Result};
use candle_core::quantized::gguf_file::Value;
use serde_json::Value as Json;
use std::collections::{BTreeMap, HashMap};

type MetadataEntries = Vec<(String, Value)>;

/// The keys of the tokens that end a text, a turn and a message, which all end a text in llama.cpp.
pub(crate) const END_KEYS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

/// The metadata of a tokenizer, its special tokens and the chat template, for the model `spec`, whose text the tokens
/// `ends` end.
pub(crate) fn vocabulary(
    tokenizer: &Tokenizer,
    spec: &ModelSpec,
    ends: &[u32],
    template: Option<&str>,
) -> Result<MetadataEntries> {
    let fail =
        |message: &str| Error::model("tokenizer.json", format!("{message}, so it cannot be written to a GGUF file"));
    let json: Json = serde_json::from_slice(tokenizer.json()).map_err(|error| fail(&error.to_string()))?;
    let model = &json["model"];
    // Older files omit the type if it is BPE.
    if !matches!(model["type"].as_str(), None | Some("BPE")) {
        return Err(fail("it is not a BPE"));
    }
    let merges: Vec<[String; 2]> = model["merges"].as_array().into_iter().flatten().filter_map(merge).collect();
    let sentence_piece = model["byte_fallback"] == true;
    let known = if sentence_piece { ["Prepend", "Replace"].as_slice() } else { &["NFC"] };
    if !normalizers(&json).iter().all(|step| step.is_null() || known.iter().any(|kind| step["type"] == *kind)) {
        return Err(fail("GGUF cannot express its normalizer"));
    }
    let vocabulary =
        Vocabulary::new(spec.vocab_size, &json, sentence_piece).ok_or_else(|| fail("it has no vocabulary"))?;
    let mut keys = MetadataEntries::new();
    let mut put = |key: &str, value: Value| keys.push((format!("tokenizer.ggml.{key}"), value));
    if sentence_piece {
        let prefix = space_prefix(&json).ok_or_else(|| fail("GGUF cannot express how it handles spaces"))?;
        put("model", Value::String("llama".into()));
        put("pre", Value::String("default".into()));
        put("add_space_prefix", Value::Bool(prefix));
        put("scores", vocabulary.scores(&merges));
    } else {
        if !is_byte_level(&json) {
            return Err(fail("it is not a byte-level BPE"));
        }
        let pattern = pattern_name(tokenizer, &json);
        let message = "GGUF has no name for its pre-tokenizer, `normalizer` and `ignore_merges` together";
        let pattern = pattern.ok_or_else(|| fail(message))?;
        put("model", Value::String("gpt2".into()));
        put("pre", Value::String(pattern.into()));
        put("merges", Value::Array(merges.iter().map(|[a, b]| Value::String(format!("{a} {b}"))).collect()));
    }
    let texts = vocabulary.tokens.iter().map(|(text, _)| Value::String(text.clone()));
    put("tokens", Value::Array(texts.collect()));
    let kinds = vocabulary.tokens.iter().map(|(_, kind)| Value::I32(*kind as i32));
    put("token_type", Value::Array(kinds.collect()));

    let begin = tokenizer.bos();
    put("add_bos_token", Value::Bool(begin.is_some()));
    if let Some(id) = begin.or(spec.bos_token_id).or(ends.first().copied()) {
        put("bos_token_id", Value::U32(id));
    }
    for (key, id) in END_KEYS.iter().zip(ends) {
        put(key, Value::U32(*id));
    }
    if let Some(id) = model["unk_token"].as_str().and_then(|text| vocabulary.id(text)) {
        put("unknown_token_id", Value::U32(id));
    }
    if let Some(template) = template {
        keys.push(("tokenizer.chat_template".to_owned(), Value::String(without_generation_tags(template))));
    }
    Ok(keys)
}

/// The GGUF name of the word pattern of a byte-level tokenizer, if one implies all its rules.
fn pattern_name(tokenizer: &Tokenizer, json: &Json) -> Option<&'static str> {
    let model = &json["model"];
    let composed = normalizers(json).iter().any(|step| step["type"] == "NFC");
    let whole_first = model["ignore_merges"] == true;
    let named = |whole_first| word_pattern(&json["pre_tokenizer"], composed, whole_first);
    let named = named(whole_first).or_else(|| {
        // Whole words need no rule if merges make them too.
        named(!whole_first).filter(|_| tokenizer.merges_make_all_tokens())
    });
    // Without merges the word pattern has no effect.
    let is_bytes = model["merges"].as_array().is_none_or(Vec::is_empty) && !composed && !whole_first;
    named.or(is_bytes.then_some("gpt-2"))
}

/// The token and its kind for every row of the embedding.
struct Vocabulary {
    tokens: Vec<(String, TokenKind)>,
}

impl Vocabulary {
    fn new(rows: usize, json: &Json, byte_tokens: bool) -> Option<Self> {
        let mut tokens: BTreeMap<usize, (String, TokenKind)> = BTreeMap::new();
        let mut put = |id: &Json, text: String, kind| {
            id.as_u64().map(|id| tokens.insert(id as usize, (text, kind)));
        };
        let unknown = json["model"]["unk_token"].as_str();
        for (text, id) in json["model"]["vocab"].as_object()? {
            let byte = byte_tokens && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
            let kind = match () {
                () if byte => TokenKind::Byte,
                () if Some(text.as_str()) == unknown => TokenKind::Unknown,
                () => TokenKind::Normal,
            };
            put(id, text.clone(), kind);
        }
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let text = token["content"].as_str().unwrap_or_default();
            let kind = match () {
                // An unknown token of a byte-level file is not found in text.
                () if byte_tokens && Some(text) == unknown => TokenKind::Unknown,
                () if token["special"] == true => TokenKind::Control,
                () => TokenKind::UserDefined,
            };
            // llama.cpp finds them before it replaces spaces: Gemma's runs of spaces.
            let has_spaces = byte_tokens && kind == TokenKind::UserDefined;
            let text = if has_spaces { text.replace(SPACE, " ") } else { text.to_owned() };
            put(&token["id"], text, kind);
        }
        // Rows of the embedding without a token need a name too.
        let unused = |id| (format!("[PAD{id}]"), TokenKind::Unused);
        Some(Self { tokens: (0..rows).map(|id| tokens.remove(&id).unwrap_or_else(|| unused(id))).collect() })
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.tokens.iter().position(|(token, _)| token == text).map(|id| id as u32)
    }

    /// Scores that give the tokenizer's order of merges: the negative rank of the first merge that makes a token; lower
    /// scores for tokens that no merge makes.
    fn scores(&self, merges: &[[String; 2]]) -> Value {
        let mut ranks: HashMap<String, usize> = HashMap::new();
        for (rank, [left, right]) in merges.iter().enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        let score = |(id, (text, kind)): (usize, &(String, TokenKind))| match kind {
            TokenKind::Normal => -(ranks.get(text).copied().unwrap_or(merges.len() + id) as f32),
            _ => 0.0,
        };
        Value::Array(self.tokens.iter().enumerate().map(score).map(Value::F32).collect())
    }
}

/// The steps of the normalizer.
fn normalizers(json: &Json) -> &[Json] {
    let normalizer = &json["normalizer"];
    normalizer["normalizers"].as_array().map_or(std::slice::from_ref(normalizer), Vec::as_slice)
}

/// Whether a space is prepended to the text; `None` if spaces are not replaced by `▁`.
fn space_prefix(json: &Json) -> Option<bool> {
    let words = &json["pre_tokenizer"];
    if words["type"] == "Metaspace" {
        let scheme = words["prepend_scheme"].as_str();
        return Some(scheme.map_or(words["add_prefix_space"] != false, |scheme| scheme != "never"));
    }
    let has = |kind: &str| normalizers(json).iter().any(|step| step["type"] == kind);
    has("Replace").then(|| has("Prepend"))
}

/// Whether the pre-tokenizer maps bytes to printable characters, alone or in a sequence.
fn is_byte_level(json: &Json) -> bool {
    let step = &json["pre_tokenizer"];
    let parts = step["pretokenizers"].as_array().into_iter().flatten();
    parts.chain([step]).any(|part| part["type"] == "ByteLevel")
}

/// `"a b"`, which newer files write as `["a", "b"]`.
fn merge(value: &Json) -> Option<[String; 2]> {
    match value {
        Json::String(pair) => pair.split_once(' ').map(|(a, b)| [a.to_owned(), b.to_owned()]),
        Json::Array(pair) => Some([pair.first()?.as_str()?.to_owned(), pair.get(1)?.as_str()?.to_owned()]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::{WORD_PATTERNS, pre_tokenizer};
    use super::*;
    use serde_json::json;

    #[test]
    fn a_name_implies_all_rules_of_the_tokenizer() {
        let name = |like: &str, nfc: bool, whole_first: bool, merged: bool| {
            let vocab = json!({"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4});
            let merges = if merged { json!(["a b", "ab c"]) } else { json!(["a b"]) };
            let json = json!({
                "version": "1.0", "added_tokens": [], "normalizer": nfc.then(|| json!({"type": "NFC"})),
                "pre_tokenizer": pre_tokenizer(like), "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
                "model": {"type": "BPE", "ignore_merges": whole_first, "vocab": vocab, "merges": merges},
            });
            pattern_name(&Tokenizer::from_json(json.to_string().into_bytes(), "x").unwrap(), &json)
        };
        for pattern in WORD_PATTERNS {
            let rules = (["olmo", "qwen2", "qwen35"].contains(&pattern), ["llama-bpe", "tekken"].contains(&pattern));
            assert_eq!(name(pattern, rules.0, rules.1, false), Some(pattern));
        }
        assert_eq!(name("llama-bpe", false, false, false), Some("smaug-bpe"));
        assert_eq!(name("qwen2", false, false, false), Some("deepseek-r1-qwen"));
        // `abc` is one token or two.
        assert_eq!(name("gpt-4o", false, true, true), Some("gpt-4o"));
        assert_eq!(name("gpt-4o", false, true, false), None);
        assert_eq!(name("tekken", false, false, false), None);
        assert_eq!(name("gpt-2", true, false, false), Some("olmo"));
        for pattern in ["smollm", "llama-bpe"] {
            assert_eq!(name(pattern, true, false, true), None, "{pattern}");
        }
    }
}
