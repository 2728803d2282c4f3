//! Text to token ids and back: plain bytes, or any Hugging Face `tokenizer.json`.
//!
//! The byte tokenizer is also a Hugging Face one: [`Tokenizer::json`] describes it as a byte-level BPE without merges,
//! so that the checkpoint of a byte model loads in transformers, and [`Tokenizer::from_json`] recognizes it.

use super::bpe::{FastBpe, byte_level_char};
use super::catch_panic::catch_panic;
use super::post_processor;
use crate::digest::{Digest, MAX_SMALL_FILE, read_at_most};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use strum::EnumString;
use tokenizers::{DecoderWrapper, Model, ModelWrapper};

/// Usual names of the end-of-text token. The first one in the vocabulary is used if the model has no `eos_token`.
const END_OF_TEXT: [&str; 7] =
    ["<|endoftext|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<|eot_id|>"];

/// The byte tokenizer's end-of-text id, after the 256 bytes.
const BYTE_EOS: u32 = 256;

/// Limit on a `tokenizer.json` in bytes; the largest vocabularies in use, of 260,000 tokens, take a third of it.
const MAX_BYTES: u64 = 128 << 20;

/// Converts text to token ids and back. Cheap to clone, and shared between threads.
#[derive(Clone)]
pub struct Tokenizer {
    kind: TokenizerKind,
    json: Arc<[u8]>,
    /// The token that the post-processor adds before a text.
    added: Option<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
}

#[derive(Clone)]
enum TokenizerKind {
    /// A byte is its own id.
    Byte,
    HuggingFace {
        inner: Arc<tokenizers::Tokenizer>,
        /// The fast path, for byte-level BPE like GPT-2's.
        fast: Option<Arc<FastBpe>>,
        /// The same tokenizer without the space that it adds before a text, if it adds one. Read when it is first used.
        unprefixed: Option<Arc<OnceLock<Parsed>>>,
        vocab_size: usize,
    },
}

/// The library's form of a `tokenizer.json`, or a description of its fault.
type Parsed = std::result::Result<tokenizers::Tokenizer, String>;

impl TokenizerKind {
    /// Reads the text of a `tokenizer.json` that adds a space before a text if it is `prefixing`; an error describes
    /// its fault.
    fn hugging_face(json: &[u8], prefixing: bool) -> std::result::Result<Self, String> {
        let inner = parse(json)?;
        // Ids index the embedding, so the size of a vocabulary with gaps is its largest id plus one.
        let Some(last) = inner.get_vocab(true).into_values().max() else {
            return Err("its vocabulary is empty".into());
        };
        let inner = Arc::new(inner);
        let fast = FastBpe::new(&inner).map(Arc::new);
        let unprefixed = prefixing.then(Arc::default);
        Ok(Self::HuggingFace { inner, fast, unprefixed, vocab_size: last as usize + 1 })
    }
}

fn parse(json: &[u8]) -> Parsed {
    let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
    // These are settings for batched inference; training text is neither truncated nor padded.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|error| error.to_string())?;
    Ok(inner)
}

/// Reads a `tokenizer.json` without the space that it adds before a text.
fn parse_unprefixed(json: &[u8]) -> Parsed {
    let mut value: Value = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    remove_prefix(&mut value);
    let json = value.to_string();
    // Frees the JSON value, which takes as much memory as the library's form.
    drop(value);
    parse(json.as_bytes())
}

impl Tokenizer {
    /// Bytes as ids 0 to 255, and `<|endoftext|>` as 256.
    pub fn byte() -> Self {
        let json = byte_json().to_string().into_bytes().into();
        Self { kind: TokenizerKind::Byte, json, added: None, bos: None, eos: Some(BYTE_EOS) }
    }

    /// Reads a `tokenizer.json`, with the tokens that only `added_tokens_decoder` in the folder's
    /// `tokenizer_config.json` lists, as in transformers; or returns [`Self::byte`] for the name `bytes`.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path == Path::new("bytes") {
            return Ok(Self::byte());
        }
        let json = read_at_most(path, MAX_BYTES)?;
        let config = path.with_file_name("tokenizer_config.json");
        let config = if config.is_file() { read_at_most(&config, MAX_SMALL_FILE)? } else { Vec::new() };
        // Its own reader reports a file that is not JSON.
        let config: Value = serde_json::from_slice(&config).unwrap_or_default();
        Self::parse(json, &config["added_tokens_decoder"], &path.display().to_string())
    }

    /// Parses the text of a `tokenizer.json`; `origin` is its name in error messages.
    pub fn from_json(json: Vec<u8>, origin: &str) -> Result<Self> {
        Self::parse(json, &Value::Null, origin)
    }

    /// Like [`Self::from_json`], with the added tokens in `further`, an object by ids. Fails also if one of them would
    /// get another id.
    fn parse(mut json: Vec<u8>, further: &Value, origin: &str) -> Result<Self> {
        let mut value: Value = serde_json::from_slice(&json)
            .map_err(|error| Error::model(origin, format!("not a `tokenizer.json`: {error}")))?;
        let further = missing_tokens(&value["added_tokens"], further);
        if value.is_object() && !further.is_empty() {
            let listed = value["added_tokens"].as_array().into_iter().flatten();
            value["added_tokens"] = listed.chain(&further).cloned().collect();
            json = value.to_string().into_bytes();
        }
        if value == byte_json() {
            return Ok(Self { json: json.into(), ..Self::byte() });
        }
        let unusable = |problem: String| Error::model(origin, format!("not a usable `tokenizer.json`: {problem}"));
        super::tokenizer_limits::check(&value).map_err(unusable)?;
        let added = post_processor::added_by(&value["post_processor"]).map(str::to_owned);
        let prefixing = remove_prefix(&mut value);
        // Frees the JSON value, which takes as much memory as the library's form.
        drop(value);
        let read = catch_panic(|| TokenizerKind::hugging_face(&json, prefixing))
            .unwrap_or_else(|| Err("its parts contradict each other".into()));
        let kind = read.map_err(unusable)?;
        let mut tokenizer = Self { kind, json: json.into(), added: None, bos: None, eos: None };
        tokenizer.added = added.and_then(|token| tokenizer.id(&token));
        let has_id = |token: &&Value| tokenizer.id(token["content"].as_str().unwrap_or_default()).map(Value::from);
        if let Some(token) = further.iter().find(|token| has_id(token).as_ref() != Some(&token["id"])) {
            let message = format!(
                "has no room for the added token {} with the id {}, which `tokenizer_config.json` lists; save the \
                 tokenizer with a current version of transformers",
                token["content"], token["id"]
            );
            return Err(Error::model(origin, message));
        }
        Ok(Self { bos: tokenizer.added, eos: tokenizer.usual_eos(), ..tokenizer })
    }

    /// The tokenizer with `name`, a model's `eos_token` in `tokenizer_config.json`, as its end-of-text token, as in
    /// transformers. Keeps the current one if the vocabulary has no such token.
    #[must_use]
    pub fn with_eos(self, name: Option<&str>) -> Self {
        Self { eos: name.and_then(|name| self.id(name)).or(self.eos), ..self }
    }

    /// The token of the vocabulary with a usual name of the end-of-text token.
    fn usual_eos(&self) -> Option<u32> {
        END_OF_TEXT.iter().find_map(|name| self.id(name))
    }

    /// The tokenizer with the BOS token that `rule` determines for a model with these values of `add_bos_token` and
    /// `bos_token` in its `tokenizer_config.json` and `bos_token_id` in its `config.json`. A new tokenizer has what its
    /// post-processor adds. Fails with [`Error::Config`] if `rule` asks for a token that the model does not have.
    pub fn with_bos(self, rule: Bos, add_bos_token: Option<bool>, name: Option<&str>, id: Option<u32>) -> Result<Self> {
        let applies = match rule {
            Bos::Auto => add_bos_token.unwrap_or(self.added.is_some()),
            Bos::Always => true,
            Bos::Never => false,
        };
        let bos = if applies { self.added.or_else(|| self.id(name?)) } else { None };
        if rule == Bos::Always && bos.is_none() {
            let id = id.filter(|id| self.token(*id).is_some());
            let message = "`always` needs a `bos_token` in `tokenizer_config.json`, but this model has none; use \
                 `auto` or `never`";
            return Ok(Self { bos: Some(id.ok_or_else(|| Error::config("bos", message))?), ..self });
        }
        Ok(Self { bos, ..self })
    }

    /// The token at the start of documents, prompts and windows of running text, if any.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token to add before a document or prompt: BOS, unless `first` is BOS already.
    pub(super) fn prefix(&self, first: Option<u32>) -> Option<u32> {
        self.bos.filter(|bos| first != Some(*bos))
    }

    /// The ids of a document or prompt: the BOS token, if any, and the result of [`Self::encode`].
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        if let Some(bos) = self.prefix(ids.first().copied()) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The id of the token that the vocabulary spells as `token`.
    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            TokenizerKind::Byte => (token == END_OF_TEXT[0]).then_some(BYTE_EOS),
            TokenizerKind::HuggingFace { inner, .. } => inner.token_to_id(token),
        }
    }

    /// Whether this is the byte tokenizer, whose losses are in nats per byte.
    pub fn is_byte(&self) -> bool {
        matches!(self.kind, TokenizerKind::Byte)
    }

    /// The ids of `text`, without added tokens. `<|endoftext|>` in the text becomes that token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            TokenizerKind::Byte => {
                let mut ids = Vec::with_capacity(text.len());
                for (index, part) in text.split(END_OF_TEXT[0]).enumerate() {
                    ids.extend((index > 0).then_some(BYTE_EOS));
                    ids.extend(part.bytes().map(u32::from));
                }
                Ok(ids)
            }
            TokenizerKind::HuggingFace { inner, fast, .. } => {
                contained(|| match fast.as_ref().and_then(|fast| fast.encode(text)) {
                    Some(tokens) => Ok(tokens.into_iter().map(|(id, _)| id).collect()),
                    None => encode(inner, text),
                })
            }
        }
    }

    /// Like [`Self::encode`], for a `text` that continues another one: without the space that some tokenizers, such as
    /// Llama 2's, add before a text. They also add one after each added token.
    pub(super) fn encode_continuation(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            TokenizerKind::HuggingFace { inner, unprefixed: Some(unprefixed), .. } => contained(|| {
                let unprefixed = unprefixed.get_or_init(|| parse_unprefixed(&self.json)).as_ref();
                let mut ids = encode(unprefixed.map_err(|problem| Error::data("tokenizer", problem))?, text)?;
                let is_added = |id: &u32| inner.get_added_vocabulary().simple_id_to_token(*id).is_some();
                if let Some(at) = ids.iter().position(is_added) {
                    ids.truncate(at);
                    ids.extend(encode(inner, text)?.into_iter().skip_while(|id| !is_added(id)));
                }
                Ok(ids)
            }),
            _ => self.encode(text),
        }
    }

    /// The ids of `text` as [`Self::encode`] has them, each with the bytes that it stands for.
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let spans = |tokens: Vec<(u32, usize)>| {
            let mut end = 0;
            let span = |(id, len)| {
                end += len;
                (id, end - len..end)
            };
            tokens.into_iter().map(span).collect()
        };
        let TokenizerKind::HuggingFace { inner, fast, .. } = &self.kind else {
            let len = |id| if id == BYTE_EOS { END_OF_TEXT[0].len() } else { 1 };
            return Ok(spans(self.encode(text)?.into_iter().map(|id| (id, len(id))).collect()));
        };
        let encode = || {
            if let Some(tokens) = fast.as_ref().and_then(|fast| fast.encode(text)) {
                return Ok(spans(tokens));
            }
            let encoding = inner.encode(text, false);
            let encoding = encoding.map_err(|error| Error::data("tokenizer", format!("cannot encode: {error}")))?;
            // Offsets may leave out a token's white space, and the tokens of one character share its bytes: each token
            // starts at the end of the previous one.
            let mut end = 0;
            let spans = encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(&id, &(start, stop))| {
                let start = start.min(end);
                end = end.max(stop);
                (id, start..stop.max(start))
            });
            Ok(spans.collect())
        };
        contained(encode)
    }

    /// The text of `ids` without special tokens; invalid UTF-8 becomes U+FFFD, and unknown ids are dropped.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            TokenizerKind::Byte => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            TokenizerKind::HuggingFace { inner, .. } => decode(inner, ids, true),
        }
    }

    pub(super) fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            TokenizerKind::Byte => ids
                .split_inclusive(|&id| id == BYTE_EOS)
                .map(|part| {
                    let end = if part.last() == Some(&BYTE_EOS) { END_OF_TEXT[0] } else { "" };
                    Ok(self.decode(part)? + end)
                })
                .collect(),
            TokenizerKind::HuggingFace { inner, .. } => decode(inner, ids, false),
        }
    }

    /// The largest id plus one, which is the minimum vocabulary size of a model.
    pub fn vocab_size(&self) -> usize {
        match self.kind {
            TokenizerKind::Byte => BYTE_EOS as usize + 1,
            TokenizerKind::HuggingFace { vocab_size, .. } => vocab_size,
        }
    }

    /// The token that separates documents, if the vocabulary has one.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// The spelling of a token in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.kind {
            TokenizerKind::Byte if id == BYTE_EOS => Some(END_OF_TEXT[0].to_owned()),
            TokenizerKind::Byte => u8::try_from(id).ok().map(|byte| byte_level_char(byte).to_string()),
            TokenizerKind::HuggingFace { inner, .. } => inner.id_to_token(id),
        }
    }

    /// Whether merges make every token of a BPE, so that finding whole words first changes nothing.
    pub(crate) fn merges_make_all_tokens(&self) -> bool {
        let TokenizerKind::HuggingFace { inner, .. } = &self.kind else { return true };
        let ModelWrapper::BPE(bpe) = inner.get_model() else { return false };
        let mut bpe = bpe.clone();
        bpe.ignore_merges = false;
        let is_added = |id: &u32| inner.get_added_vocabulary().simple_id_to_token(*id).is_some();
        let is_made = |token: &str| bpe.tokenize(token).is_ok_and(|tokens| tokens.len() == 1);
        bpe.get_vocab().iter().all(|(token, id)| is_added(id) || is_made(token))
    }

    /// The number of bytes of a token's text, if tokens are bytes; 0 for the end of text.
    pub(super) fn token_bytes(&self, id: u32) -> Option<usize> {
        let byte_level = match &self.kind {
            TokenizerKind::Byte => true,
            TokenizerKind::HuggingFace { inner, .. } => {
                matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
            }
        };
        if !byte_level {
            return None;
        }
        // A byte-level vocabulary has a character for each byte.
        if self.eos_id() == Some(id) { Some(0) } else { Some(self.token(id)?.chars().count()) }
    }

    /// The `tokenizer.json` to save with a model's weights, with the bytes that were read.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// The `tokenizer.json` to export: its post-processor adds the BOS token if, and only if, this tokenizer has one.
    /// Other programs may not read `add_bos_token`.
    pub(crate) fn exported_json(&self) -> Cow<'_, [u8]> {
        if self.bos == self.added {
            return Cow::Borrowed(&self.json);
        }
        let mut value: Value = serde_json::from_slice(&self.json).unwrap_or_default();
        let post_processor = &mut value["post_processor"];
        match self.bos.and_then(|id| Some((self.token(id)?, id))) {
            Some((token, id)) => post_processor::add(post_processor, &token, id),
            None => post_processor::remove(post_processor),
        }
        Cow::Owned(format!("{value:#}").into())
    }

    /// SHA-256 of [`Self::json`] in hexadecimal, the BOS token, an unusual end-of-text token, and whether the start of
    /// a text that continues another one gets no space: equal fingerprints mean equal ids.
    pub fn fingerprint(&self) -> String {
        let eos = self.eos.filter(|_| self.eos != self.usual_eos());
        let token = |name, id: Option<u32>| id.map_or_else(String::new, |id| format!(" {name} {id}"));
        let unprefixed = matches!(self.kind, TokenizerKind::HuggingFace { unprefixed: Some(_), .. });
        let prefix = if unprefixed { " unprefixed start" } else { "" };
        Digest::of(&self.json).sha256 + &token("bos", self.bos) + &token("eos", eos) + prefix
    }
}

/// The rule for adding the tokenizer's BOS token, which begins documents, prompts and windows of running text. A chat
/// template writes the token itself. The token is an input and never a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, EnumString)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_rule)]
pub enum Bos {
    /// If `add_bos_token` in `tokenizer_config.json` is true; without that key, if the tokenizer's post-processor adds
    /// one.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

fn unknown_rule(text: &str) -> String {
    format!("`{text}` is unknown; use `auto`, `always` or `never`")
}

/// The tokens of an `added_tokens_decoder` that are not in `listed`, in the form of a `tokenizer.json`, by their ids.
fn missing_tokens(listed: &Value, decoder: &Value) -> Vec<Value> {
    let listed: HashSet<&str> =
        listed.as_array().into_iter().flatten().filter_map(|it| it["content"].as_str()).collect();
    let is_missing = |token: &Value| token["content"].as_str().is_some_and(|content| !listed.contains(content));
    let missing = decoder.as_object().into_iter().flatten().filter(|(_, token)| is_missing(token));
    let entry = |(id, token): (&String, &Value)| {
        let id: u32 = id.parse().ok()?;
        let mut entry = json!({"id": id, "single_word": false, "lstrip": false, "rstrip": false, "special": false});
        entry["normalized"] = (token["special"] != true).into();
        entry.as_object_mut()?.extend(token.as_object()?.clone());
        Some((id, entry))
    };
    let tokens: BTreeMap<u32, Value> = missing.filter_map(entry).collect();
    tokens.into_values().collect()
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_byte() { "byte" } else { "hugging face" };
        write!(f, "Tokenizer({kind}, {} ids)", self.vocab_size())
    }
}

/// Makes a `tokenizer.json` add no space before a text; returns whether it did.
fn remove_prefix(json: &mut Value) -> bool {
    let steps = ["normalizer", "pre_tokenizer"].into_iter();
    steps.filter(|step| json.get_mut(step).is_some_and(remove_prefix_of)).count() > 0
}

/// Makes a step of a `tokenizer.json` add no space before a text; returns whether it did.
fn remove_prefix_of(step: &mut Value) -> bool {
    let kind = step["type"].as_str().unwrap_or_default().to_owned();
    match kind.as_str() {
        "Sequence" => {
            let key = if step["normalizers"].is_array() { "normalizers" } else { "pretokenizers" };
            let steps = step.get_mut(key).and_then(Value::as_array_mut).into_iter().flatten();
            let mut removed = false;
            for step in steps {
                removed |= remove_prefix_of(step);
            }
            removed
        }
        "Prepend" => {
            *step = json!({"type": "Sequence", "normalizers": []});
            true
        }
        "Metaspace" if step["prepend_scheme"] != "never" && step["add_prefix_space"] != false => {
            step["prepend_scheme"] = "never".into();
            true
        }
        "ByteLevel" if step["add_prefix_space"] == true => {
            step["add_prefix_space"] = false.into();
            true
        }
        _ => false,
    }
}

fn encode(inner: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = inner.encode_fast(text, false);
    let encoding = encoding.map_err(|error| Error::data("tokenizer", format!("cannot encode: {error}")))?;
    Ok(encoding.get_ids().to_vec())
}

/// Turns a panic of the library into an error.
fn contained<T>(encode: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_panic(encode).unwrap_or_else(|| Err(Error::data("tokenizer", "it is damaged and cannot encode")))
}

fn decode(inner: &tokenizers::Tokenizer, ids: &[u32], skip_special: bool) -> Result<String> {
    catch_panic(|| inner.decode(ids, skip_special))
        .unwrap_or_else(|| Err("it is damaged".into()))
        .map_err(|error| Error::data("tokenizer", format!("cannot decode {} ids: {error}", ids.len())))
}

/// The byte tokenizer as a `tokenizer.json`.
fn byte_json() -> Value {
    let vocab: serde_json::Map<String, Value> =
        (0..=u8::MAX).map(|byte| (byte_level_char(byte).to_string(), byte.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": BYTE_EOS, "content": END_OF_TEXT[0], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A `tokenizer.json` of GPT-2's kind with a handful of merges.
    pub(in crate::data) fn byte_level_bpe() -> Vec<u8> {
        let mut json = byte_json();
        json["pre_tokenizer"]["use_regex"] = true.into();
        let merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r", "Ċ Ċ", "Ġ Ġ", "1 2", "' s", "Ã ©"];
        json["model"]["merges"] = merges.into();
        for (index, merge) in merges.iter().enumerate() {
            json["model"]["vocab"][merge.replace(' ', "")] = (257 + index).into();
        }
        // An added token's id has to be the next free one.
        json["added_tokens"][0]["id"] = (257 + merges.len()).into();
        json["model"]["vocab"]["!!"] = 256.into();
        json.to_string().into_bytes()
    }

    /// A tokenizer of words, and perhaps a special token; the last word stands for unknown ones. `further` has other
    /// parts of its `tokenizer.json`.
    pub(crate) fn word_level(vocab: &[&str], special: Option<&str>, further: &Value) -> Tokenizer {
        let ids: serde_json::Map<String, Value> =
            vocab.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), Value::from(id))).collect();
        let added = special.map(|content| {
            let mut token = byte_json()["added_tokens"][0].clone();
            (token["content"], token["id"]) = (content.into(), vocab.len().into());
            token
        });
        let mut json = json!({
            "added_tokens": added.as_slice(), "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": ids, "unk_token": vocab.last()},
        });
        for (name, part) in further.as_object().into_iter().flatten() {
            json[name] = part.clone();
        }
        Tokenizer::from_json(json.to_string().into_bytes(), "words").unwrap()
    }

    fn byte_as_hugging_face() -> tokenizers::Tokenizer {
        tokenizers::Tokenizer::from_bytes(Tokenizer::byte().json()).unwrap()
    }

    #[test]
    fn bytes_names_the_built_in_tokenizer() {
        assert!(Tokenizer::from_file("bytes").unwrap().is_byte());
        assert!(Tokenizer::from_file("./bytes").is_err());
    }

    #[test]
    fn tokens_that_only_the_configuration_lists_are_added() {
        let folder = tempfile::tempdir().unwrap();
        let open = |decoder: Value| {
            let config = json!({ "added_tokens_decoder": decoder }).to_string();
            std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
            Tokenizer::from_file(folder.path().join("tokenizer.json"))
        };
        std::fs::write(folder.path().join("tokenizer.json"), byte_json().to_string()).unwrap();
        let token = |content: &str| json!({"content": content, "special": true, "lstrip": false});
        assert!(open(json!({"256": token("<|endoftext|>")})).unwrap().is_byte());
        let tokenizer = open(json!({"258": token("<b>"), "257": token("<a>")})).unwrap();
        assert_eq!(tokenizer.encode("a<b><a>").unwrap(), [97, 258, 257]);
        let message = open(json!({"300": token("<a>")})).unwrap_err().to_string();
        assert!(message.contains("no room for the added token \"<a>\" with the id 300"), "{message}");
    }

    proptest! {
        #[test]
        fn bytes_survive_the_round_trip(text: String) {
            let tokenizer = Tokenizer::byte();
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(ids.len(), text.len());
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }

        /// The emitted `tokenizer.json` gives the same ids in the Hugging Face crate.
        #[test]
        fn the_json_describes_the_byte_tokenizer(parts in prop::collection::vec(".*", 1..4)) {
            let text = parts.join("<|endoftext|>");
            let theirs = byte_as_hugging_face();
            let ids = Tokenizer::byte().encode(&text).unwrap();
            let encoding = theirs.encode(text, false).unwrap();
            prop_assert_eq!(encoding.get_ids(), &ids);
            prop_assert_eq!(theirs.decode(&ids, true).unwrap(), Tokenizer::byte().decode(&ids).unwrap());
        }
    }

    #[test]
    fn every_byte_is_its_own_id() {
        let theirs = byte_as_hugging_face();
        for byte in 0..=u8::MAX {
            assert_eq!(theirs.token_to_id(&byte_level_char(byte).to_string()), Some(byte.into()));
        }
        assert_eq!(theirs.get_vocab_size(true), Tokenizer::byte().vocab_size());
        assert_eq!(theirs.token_to_id("<|endoftext|>"), Tokenizer::byte().eos_id());
    }

    #[test]
    fn the_byte_tokenizer_is_known_again() {
        let byte = Tokenizer::byte();
        let again = Tokenizer::from_json(byte.json().to_vec(), "tokenizer.json").unwrap();
        assert!(again.is_byte());
        assert_eq!(again.fingerprint(), byte.fingerprint());
        // Also when another program wrote it back with its own spacing.
        let value: Value = serde_json::from_slice(byte.json()).unwrap();
        assert!(Tokenizer::from_json(serde_json::to_vec_pretty(&value).unwrap(), "x").unwrap().is_byte());
    }

    /// The two forms of tokenizers that add a space before a text: Llama 2's, and that of newer conversions.
    pub(in crate::data) fn prefixing() -> [Tokenizer; 2] {
        let prepend = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
        [(prepend, Value::Null), (Value::Null, metaspace.clone())].map(|(normalizer, pre_tokenizer)| {
            let json = json!({
                "version": "1.0", "truncation": null, "padding": null, "post_processor": null, "decoder": metaspace,
                "added_tokens": [{"id": 5, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true}],
                "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                "model": {
                    "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                    "vocab": {"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4}, "merges": ["▁ a", "▁ b"],
                },
            });
            Tokenizer::from_json(json.to_string().into_bytes(), "prefixing").unwrap()
        })
    }

    #[test]
    fn a_text_that_continues_another_one_gets_no_space() {
        for tokenizer in prefixing() {
            assert_eq!(tokenizer.encode("ab a").unwrap(), [3, 2, 3]);
            for (start, end) in [("a", "b a"), ("ab", " a"), ("a", "</s>b</s> a"), ("a", "b</s>ab"), ("", "ab a")] {
                let mut ids = tokenizer.encode(start).unwrap();
                ids.extend(tokenizer.encode_continuation(end).unwrap());
                let whole =
                    if start.is_empty() { vec![1, 2, 3] } else { tokenizer.encode(&(start.to_owned() + end)).unwrap() };
                assert_eq!(ids, whole, "{start}|{end}");
            }
        }
        let bytes = Tokenizer::byte();
        assert_eq!(bytes.encode_continuation(" a").unwrap(), bytes.encode(" a").unwrap());
    }

    #[test]
    fn the_tokenizer_without_the_space_is_read_when_a_text_is_continued() {
        for tokenizer in prefixing() {
            let TokenizerKind::HuggingFace { unprefixed: Some(unprefixed), .. } = &tokenizer.kind else { panic!() };
            tokenizer.encode("a b").unwrap();
            assert!(unprefixed.get().is_none());
            tokenizer.clone().encode_continuation("a b").unwrap();
            assert!(unprefixed.get().is_some());
        }
    }

    #[test]
    fn a_hugging_face_tokenizer_is_read_without_padding_or_truncation() {
        let truncation = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        let tokenizer = word_level(&["a", "b", "?"], Some("</s>"), &json!({"truncation": truncation}));
        assert_eq!(tokenizer.encode("a b c a</s>").unwrap(), [0, 1, 2, 0, 3]);
        assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (4, Some(3)));
        assert!(!tokenizer.is_byte());
    }

    /// The vocabulary of a model distilled into Llama 3 has the names of both.
    #[test]
    fn deepseeks_end_of_text_is_known() {
        let tokenizer = word_level(&["a", "<|eot_id|>", "<｜end▁of▁sentence｜>"], None, &Value::Null);
        assert_eq!(tokenizer.eos_id(), Some(2));
    }

    #[test]
    fn other_files_are_refused_by_name() {
        for text in ["", "not json", "{}", "[]", r#"{"model": {"type": "Unheard"}}"#] {
            let message = Tokenizer::from_json(text.into(), "folder/tokenizer.json").unwrap_err().to_string();
            assert!(message.starts_with("folder/tokenizer.json: not a"), "{message}");
        }
    }
}
