//! Translates a tokenizer to llama.cpp's metadata: the two kinds that [`super::tokenizer`] reads.

use super::tokenizer::{SPACE, TokenKind, word_pattern};
use crate::data::Tokenizer;
use crate::engine::model::ModelSpec;
use crate::{Error, Result};
use candle_core::quantized::gguf_file::Value;
use serde_json::Value as Json;
use std::collections::{BTreeMap, HashMap};

type MetadataEntries = Vec<(String, Value)>;

/// The metadata of a tokenizer, its special tokens and the chat template, for the model `spec`.
pub(crate) fn vocabulary(tokenizer: &Tokenizer, spec: &ModelSpec, template: Option<&str>) -> Result<MetadataEntries> {
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
        let pattern = word_pattern(&json["pre_tokenizer"]);
        // Without merges the word pattern has no effect.
        let pattern = pattern.or(merges.is_empty().then_some("gpt-2"));
        let pattern = pattern.ok_or_else(|| fail("GGUF has no name for its pre-tokenizer"))?;
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
    // The tokenizer's own end of text comes first, as in llama.cpp's converter. A second end token has its own key.
    let mut ends: Vec<u32> = Vec::new();
    for id in tokenizer.eos_id().iter().chain(&spec.eos_token_ids) {
        if (*id as usize) < tokenizer.vocab_size() && !ends.contains(id) {
            ends.push(*id);
        }
    }
    if let Some(id) = begin.or(spec.bos_token_id).or(ends.first().copied()) {
        put("bos_token_id", Value::U32(id));
    }
    for (key, id) in ["eos_token_id", "eot_token_id"].into_iter().zip(ends) {
        put(key, Value::U32(id));
    }
    if let Some(id) = model["unk_token"].as_str().and_then(|text| vocabulary.id(text)) {
        put("unknown_token_id", Value::U32(id));
    }
    if let Some(template) = template {
        keys.push(("tokenizer.chat_template".to_owned(), Value::String(template.to_owned())));
    }
    Ok(keys)
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
                () if Some(text) == unknown => TokenKind::Unknown,
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
