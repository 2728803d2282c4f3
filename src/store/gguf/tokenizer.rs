//! A GGUF file's tokenizer as a `tokenizer.json`.
//!
//! Two kinds are in use: byte-level BPE with its merges (`gpt2`), whose word pattern has a name, and `SentencePiece`'s
//! BPE (`llama`), which has scores instead of merges and falls back to bytes.

use super::Gguf;
use crate::Result;
use candle_core::quantized::gguf_file::Value;
use serde_json::{Map, Value as Json, json};
use std::collections::HashMap;

/// Kinds of tokens, by llama.cpp's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// Made by merges.
    Normal = 1,
    /// Stands for text without a token.
    Unknown,
    /// Controls the model; does not occur in text.
    Control,
    /// Matched before the text is split into words.
    UserDefined,
    /// A row of the embedding without a token.
    Unused,
    /// A byte of text without a token.
    Byte,
}

const NORMAL: i64 = TokenKind::Normal as i64;
const UNKNOWN: i64 = TokenKind::Unknown as i64;
const CONTROL: i64 = TokenKind::Control as i64;
const USER_DEFINED: i64 = TokenKind::UserDefined as i64;

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The word pattern of Qwen 2 and 3.
const QWEN_2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The word pattern of Qwen 3.5, whose words contain combining marks.
const QWEN_3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The word pattern of Mistral's Tekken tokenizers.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The word pattern of gpt-oss and Phi-4 mini.
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The space of `SentencePiece`.
pub(super) const SPACE: &str = "\u{2581}";

/// The vocabulary as the file lists it.
struct GgufVocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<i64>,
}

/// The tokenizer in Hugging Face's terms.
pub(super) fn json(gguf: &Gguf) -> Result<Json> {
    let tokens = gguf.list("tokenizer.ggml.tokens", "a list of strings", text)?;
    let tokens = tokens.ok_or_else(|| gguf.type_error("tokenizer.ggml.tokens", "a list of strings", None))?;
    let kinds = gguf.list("tokenizer.ggml.token_type", "a list of numbers", integer)?;
    let kinds = kinds.unwrap_or_else(|| vec![NORMAL; tokens.len()]);
    if kinds.len() != tokens.len() {
        let message = format!("{} tokens have {} types; the tokenizer is damaged", tokens.len(), kinds.len());
        return Err(gguf.error(message));
    }
    let vocabulary = GgufVocabulary { tokens, kinds };
    let kind = gguf.text("tokenizer.ggml.model")?;
    let mut json = match kind {
        "gpt2" => byte_level(gguf, &vocabulary)?,
        "llama" => sentence_piece(gguf, &vocabulary)?,
        _ => {
            let message =
                format!("tokenizer kind `{}` is not supported (supported: `gpt2`, `llama`)", kind.escape_debug());
            return Err(gguf.error(message));
        }
    };
    json["version"] = "1.0".into();
    json["added_tokens"] = vocabulary.added(kind == "llama", gguf.architecture()? == "phi3").into();
    json["post_processor"] = bos_post_processor(gguf, &vocabulary)?;
    Ok(json)
}

impl GgufVocabulary<'_> {
    /// Ids by token. The first entry of a duplicated token wins, as in llama.cpp.
    fn ids(&self) -> Map<String, Json> {
        let mut ids = Map::new();
        for (id, token) in self.tokens.iter().enumerate() {
            ids.entry(*token).or_insert_with(|| id.into());
        }
        ids
    }

    /// Tokens that are found in the text before it is cut into words. The white space after `SentencePiece`'s in Phi-3
    /// belongs to them, which llama.cpp knows from the model's name.
    fn added(&self, is_sentence_piece: bool, is_phi3: bool) -> Vec<Json> {
        let is_special = |kind| kind == CONTROL || (kind == UNKNOWN && is_sentence_piece);
        let added = self.tokens.iter().zip(&self.kinds).enumerate();
        let added =
            added.filter(|(_, (token, kind))| !token.is_empty() && (is_special(**kind) || **kind == USER_DEFINED));
        let entry = |(id, (token, kind)): (usize, (&&str, &i64))| {
            let rstrip = is_sentence_piece && is_phi3 && !matches!(*token, "<unk>" | "<s>" | "<|endoftext|>");
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": rstrip,
                "normalized": false, "special": is_special(*kind),
            })
        };
        added.map(entry).collect()
    }
}

fn byte_level(gguf: &Gguf, vocabulary: &GgufVocabulary<'_>) -> Result<Json> {
    let merges = gguf.list("tokenizer.ggml.merges", "a list of strings", text)?;
    let merges = merges.ok_or_else(|| gguf.type_error("tokenizer.ggml.merges", "a list of strings", None))?;
    let name = word_pattern_name(gguf)?;
    let Some(pre_tokenizer) = pre_tokenizer(name) else {
        let name = name.escape_debug();
        let built = WORD_PATTERNS.join("`, `");
        let message = format!(
            "pre-tokenizer `{name}` is not supported (supported: `{built}`); use the model's Hub folder instead"
        );
        return Err(gguf.error(message));
    };
    let normalizer = if is_composed(name) { json!({"type": "NFC"}) } else { Json::Null };
    let ignore_merges = is_whole_first(name);
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_step(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocabulary.ids(), "merges": merges,
        },
    }))
}

/// The name of the word pattern; equal patterns with the same rules have one.
fn word_pattern_name(gguf: &Gguf) -> Result<&str> {
    Ok(match gguf.text("tokenizer.ggml.pre")? {
        "gpt2" | "exaone4" => "gpt-2",
        "llama3" | "llama-v3" | "lfm2" => "llama-bpe",
        "refact" => "smollm",
        "dbrx" => "smaug-bpe",
        other => other,
    })
}

/// The supported word patterns, by their names in GGUF.
pub(super) const WORD_PATTERNS: [&str; 10] =
    ["gpt-2", "olmo", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "qwen35", "tekken", "gpt-4o"];

/// Whether a word that is a token is not merged; these tokenizers also begin a text with the BOS token by default.
fn is_whole_first(pattern: &str) -> bool {
    matches!(pattern, "llama-bpe" | "tekken")
}

/// Whether Unicode's composition (NFC) comes before a word pattern.
fn is_composed(pattern: &str) -> bool {
    matches!(pattern, "olmo" | "qwen2" | "qwen35")
}

/// The Hugging Face pre-tokenizer of a word pattern.
pub(super) fn pre_tokenizer(name: &str) -> Option<Json> {
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let sequence = |first: Json, use_regex| json!({"type": "Sequence", "pretokenizers": [first, byte_step(use_regex)]});
    Some(match name {
        "gpt-2" | "olmo" => byte_step(true),
        "smollm" => sequence(json!({"type": "Digits", "individual_digits": true}), true),
        "llama-bpe" | "smaug-bpe" => sequence(split(LLAMA_3), false),
        "qwen2" | "deepseek-r1-qwen" => sequence(split(QWEN_2), false),
        "qwen35" => sequence(split(QWEN_3_5), false),
        "tekken" => sequence(split(TEKKEN), false),
        "gpt-4o" => sequence(split(GPT_4O), false),
        _ => return None,
    })
}

fn byte_step(use_regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// The GGUF name of a Hugging Face pre-tokenizer's word pattern, with the other rules that the name implies.
pub(super) fn word_pattern(step: &Json, composed: bool, whole_first: bool) -> Option<&'static str> {
    let is_same = |name: &&str| is_composed(name) == composed && is_whole_first(name) == whole_first;
    let mut names = WORD_PATTERNS.into_iter().filter(is_same);
    names.find(|name| pre_tokenizer(name).is_some_and(|known| plain(step) == plain(&known)))
}

/// A pre-tokenizer without settings that do not affect the words, and with its defaults filled in.
fn plain(step: &Json) -> Json {
    let mut step = step.clone();
    if let Some(parts) = step["pretokenizers"].as_array_mut() {
        for part in parts {
            *part = plain(part);
        }
    }
    if let Some(object) = step.as_object_mut().filter(|object| object.get("type") == Some(&json!("ByteLevel"))) {
        object.remove("trim_offsets");
        object.entry("use_regex").or_insert(Json::Bool(true));
    }
    step
}

fn sentence_piece(gguf: &Gguf, vocabulary: &GgufVocabulary<'_>) -> Result<Json> {
    let scores = gguf.list("tokenizer.ggml.scores", "a list of numbers", number)?;
    let scores = scores.ok_or_else(|| gguf.type_error("tokenizer.ggml.scores", "a list of numbers", None))?;
    if scores.len() != vocabulary.tokens.len() {
        let message =
            format!("{} tokens have {} scores; the tokenizer is damaged", vocabulary.tokens.len(), scores.len());
        return Err(gguf.error(message));
    }
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let prefix = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let spaces = replace(" ", SPACE);
    let prepend = json!({"type": "Prepend", "prepend": SPACE});
    let normalizer = if prefix { json!({"type": "Sequence", "normalizers": [prepend, spaces]}) } else { spaces };
    let mut decoders = vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    decoders.extend(prefix.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
    let unknown = vocabulary.kinds.iter().position(|kind| *kind == UNKNOWN).map(|id| vocabulary.tokens[id]);
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary.ids(), "merges": merges(gguf, vocabulary, &scores)?,
        },
    }))
}

/// Limit on a token that merges make, in bytes: each of its splits is looked up.
const MAX_TOKEN_BYTES: usize = 1024;

/// The merges that scores stand for: every way to make a token of two others, the best score first, and of one score
/// the longest left part first, as transformers orders them.
fn merges<'a>(gguf: &Gguf, vocabulary: &GgufVocabulary<'a>, scores: &[f64]) -> Result<Vec<[&'a str; 2]>> {
    let normal = vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate();
    let normal = normal.filter(|(_, (_, kind))| **kind == NORMAL).map(|(id, (token, _))| (*token, id));
    let ids: HashMap<&str, usize> = normal.collect();
    if let Some((token, id)) = ids.iter().find(|(token, _)| token.len() > MAX_TOKEN_BYTES) {
        let message = format!("token {id} has {} bytes; the maximum is {MAX_TOKEN_BYTES}", token.len());
        return Err(gguf.error(message));
    }
    let mut merges = Vec::new();
    for (&token, &id) in &ids {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&l), Some(&r)) = (ids.get(left), ids.get(right)) {
                let lengths = (left.chars().count(), right.chars().count());
                merges.push((scores[id], lengths, (id, l, r), [left, right]));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(a.2.cmp(&b.2)));
    Ok(merges.into_iter().map(|(_, _, _, parts)| parts).collect())
}

/// Adds the BOS token to the post-processor if the file specifies it.
fn bos_post_processor(gguf: &Gguf, vocabulary: &GgufVocabulary<'_>) -> Result<Json> {
    // llama.cpp adds it by default for these two.
    let default = gguf.text("tokenizer.ggml.model")? == "llama" || is_whole_first(word_pattern_name(gguf)?);
    let id = gguf.count("tokenizer.ggml.bos_token_id")?;
    let Some(id) = id else { return Ok(Json::Null) };
    if !gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default) {
        return Ok(Json::Null);
    }
    let Some(token) = vocabulary.tokens.get(id) else {
        return Err(gguf.error(format!("its BOS token is {id}, but it has {} tokens", vocabulary.tokens.len())));
    };
    let begin = json!({"SpecialToken": {"id": token, "type_id": 0}});
    let part = |name: &str, type_id: u32| json!({"Sequence": {"id": name, "type_id": type_id}});
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [begin, part("A", 0)],
        "pair": [begin, part("A", 0), part("B", 1)],
        "special_tokens": {*token: {"id": token, "ids": [id], "tokens": [token]}},
    }))
}

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::I32(number) => Some(i64::from(number)),
        Value::U32(number) => Some(i64::from(number)),
        _ => None,
    }
}

fn number(value: &Value) -> Option<f64> {
    match *value {
        Value::F32(number) if number.is_finite() => Some(f64::from(number)),
        _ => None,
    }
}
