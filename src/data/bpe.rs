//! Byte-level BPE at many times the general library's speed, with the same ids: GPT-2's, and those of newer models.
//!
//! The library finds words with a backtracking regular expression and keeps offsets of every character. Here a byte
//! loop finds GPT-2's ASCII words and linear-time expressions the others, and each thread caches the ids of words. Text
//! repeats its words, often enough that the library's merges are seldom needed.

use regex::Regex;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokenizers::{Model as _, ModelWrapper, NormalizerWrapper, OffsetReferential, OffsetType};

/// The words of GPT-2, the default of a byte-level pre-tokenizer.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The end of patterns that leave a word the last white-space character before it. Only backtracking expressions can
/// look ahead.
const LOOK_AHEAD: &str = r"|\s+(?!\S)|\s+";
/// Quantifiers that never give back their characters. The regex crate would read them as repetitions.
const POSSESSIVE: &str = r"[?*+]\+|\d\}\+";

/// The maximum number of patterns; tokenizers have up to four.
const MAX_SPLITS: usize = 8;
/// The maximum number of words in a cache, and the length of the longest: about 25 MB per thread.
const CACHE_WORDS: usize = 1 << 17;
const CACHE_WORD_BYTES: usize = 32;

/// The tokens of words already met: each one's id, and the number of bytes that it stands for.
type WordCache = HashMap<Box<str>, Box<[(u32, usize)]>>;

/// A byte-level BPE tokenizer that only needs words and merges.
pub(super) struct FastBpe {
    inner: Arc<tokenizers::Tokenizer>,
    /// Each one splits the pieces of the one before.
    splits: Vec<WordPattern>,
    /// Texts such as `<|endoftext|>` that become tokens before the text is split into words.
    added_tokens: Option<Regex>,
    /// Caches not in use. There is one cache per thread that encodes at the same time.
    caches: Mutex<Vec<WordCache>>,
}

/// The pre-tokenizers of `tokenizer.json` that patterns can stand for.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizer {
    Sequence { pretokenizers: Vec<PreTokenizer> },
    Digits { individual_digits: bool },
    Split { pattern: SplitPattern, behavior: String, invert: bool },
    ByteLevel { add_prefix_space: bool, use_regex: bool },
}

#[derive(Deserialize)]
enum SplitPattern {
    Regex(String),
}

impl PreTokenizer {
    /// Adds the patterns of this pre-tokenizer, or returns `None` if it does more than split. Its last part must turn
    /// bytes to characters, which no other part may do.
    fn add_patterns(self, is_last: bool, to: &mut Vec<WordPattern>) -> Option<()> {
        match self {
            Self::Sequence { pretokenizers } => {
                let count = pretokenizers.len();
                let mut parts = pretokenizers.into_iter().enumerate();
                return parts.try_for_each(|(index, part)| part.add_patterns(is_last && index + 1 == count, to));
            }
            Self::Digits { individual_digits } if !is_last => {
                to.push(WordPattern::new(if individual_digits { r"\p{N}" } else { r"\p{N}+" })?);
            }
            Self::Split { pattern: SplitPattern::Regex(pattern), behavior, invert: false }
                if !is_last && behavior == "Isolated" =>
            {
                to.push(WordPattern::new(&pattern)?);
            }
            Self::ByteLevel { add_prefix_space: false, use_regex } if is_last => {
                if use_regex {
                    to.push(WordPattern::new(GPT2)?);
                }
            }
            _ => return None,
        }
        Some(())
    }
}

impl FastBpe {
    /// The fast path for `inner`, if it is a tokenizer of this kind.
    pub(super) fn new(inner: &Arc<tokenizers::Tokenizer>) -> Option<Self> {
        let merges_only = matches!(inner.get_model(), ModelWrapper::BPE(bpe) if bpe.dropout.is_none());
        let composes = matches!(inner.get_normalizer(), None | Some(NormalizerWrapper::NFC(_)));
        if !merges_only || !composes {
            return None;
        }
        let pre_tokenizer = serde_json::to_value(inner.get_pre_tokenizer()?).ok()?;
        let mut splits = Vec::new();
        PreTokenizer::deserialize(pre_tokenizer).ok()?.add_patterns(true, &mut splits)?;
        if splits.len() > MAX_SPLITS {
            return None;
        }
        let added: Vec<_> =
            inner.get_added_tokens_decoder().values().map(|token| regex::escape(&token.content)).collect();
        let added_tokens = if added.is_empty() { None } else { Some(Regex::new(&added.join("|")).ok()?) };
        Some(Self { inner: Arc::clone(inner), splits, added_tokens, caches: Mutex::default() })
    }

    /// The tokens of `text`: each one's id, and the number of bytes that it stands for. `None` if the library has to
    /// encode it.
    pub(super) fn encode(&self, text: &str) -> Option<Vec<(u32, usize)>> {
        // A poisoned lock guards a list of finished caches: the panic left none of them half written.
        let lock = || self.caches.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut cache = lock().pop().unwrap_or_default();
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let encoded = self.encode_pieces(text, &mut cache, &mut tokens);
        lock().push(cache);
        encoded.map(|()| tokens)
    }

    /// Adds the tokens of the pieces between added tokens.
    fn encode_pieces(&self, text: &str, cache: &mut WordCache, to: &mut Vec<(u32, usize)>) -> Option<()> {
        let normalizer = self.inner.get_normalizer();
        let is_normal = normalizer.is_none() || text.is_ascii();
        if is_normal && self.added_tokens.as_ref().is_none_or(|added| !added.is_match(text)) {
            return self.encode_words(text, &self.splits, cache, to);
        }
        let pieces = self.inner.get_added_vocabulary().extract_and_normalize(normalizer, text);
        for (piece, (start, end), added) in pieces.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            match added {
                Some(tokens) => to.extend(tokens.iter().map(|token| (token.id, end - start))),
                None if piece == &text[start..end] => self.encode_words(piece, &self.splits, cache, to)?,
                None => return None,
            }
        }
        Some(())
    }

    /// Adds the tokens of the words into which `splits` divide `text`.
    fn encode_words(
        &self,
        text: &str,
        splits: &[WordPattern],
        cache: &mut WordCache,
        to: &mut Vec<(u32, usize)>,
    ) -> Option<()> {
        let Some((split, finer)) = splits.split_first() else { return self.encode_word(text, cache, to) };
        let mut start = 0;
        while start < text.len() {
            let end = split.word_end(text, start);
            self.encode_words(&text[start..end], finer, cache, to)?;
            start = end;
        }
        Some(())
    }

    fn encode_word(&self, word: &str, cache: &mut WordCache, to: &mut Vec<(u32, usize)>) -> Option<()> {
        if let Some(known) = cache.get(word) {
            to.extend_from_slice(known);
            return Some(());
        }
        let merged = self.merge(word)?;
        to.extend_from_slice(&merged);
        if word.len() <= CACHE_WORD_BYTES && cache.len() < CACHE_WORDS {
            cache.insert(word.into(), merged.into());
        }
        Some(())
    }

    /// Applies the library's merges to one word. `None` if they fail, or if the vocabulary lacks one of its bytes.
    fn merge(&self, word: &str) -> Option<Vec<(u32, usize)>> {
        let printable: String = word.bytes().map(byte_level_char).collect();
        let tokens = self.inner.get_model().tokenize(&printable).ok()?;
        let bytes = |(start, end): (usize, usize)| printable[start..end].chars().count();
        let merged: Vec<_> = tokens.into_iter().map(|token| (token.id, bytes(token.offsets))).collect();
        (merged.iter().map(|(_, len)| len).sum::<usize>() == word.len()).then_some(merged)
    }
}

/// A pattern whose matches are words, as is the text between them.
struct WordPattern {
    words: Regex,
    /// The alternatives before [`LOOK_AHEAD`], if the pattern has it.
    before_look_ahead: Option<Regex>,
    is_gpt2: bool,
}

impl WordPattern {
    /// The pattern, unless it may match an empty text or only a backtracking expression can find its words: it looks
    /// around in another way, or has a possessive quantifier.
    fn new(pattern: &str) -> Option<Self> {
        if Regex::new(POSSESSIVE).ok()?.is_match(pattern) {
            return None;
        }
        let before = pattern.strip_suffix(LOOK_AHEAD);
        let words = before.map_or_else(|| Regex::new(pattern), |before| Regex::new(&format!(r"{before}|\s+"))).ok()?;
        let before_look_ahead = before.map(Regex::new).transpose().ok()?;
        (!words.is_match("")).then_some(Self { words, before_look_ahead, is_gpt2: pattern == GPT2 })
    }

    /// The end of the word, or of the text between words, that begins at `start`.
    fn word_end(&self, text: &str, start: usize) -> usize {
        if self.is_gpt2
            && let Some(end) = ascii_word_end(text.as_bytes(), start)
        {
            return end;
        }
        let Some(found) = self.words.find_at(text, start) else { return text.len() };
        if found.start() > start {
            return found.start();
        }
        let Some(before) = &self.before_look_ahead else { return found.end() };
        let is_other = || before.find_at(text, start).is_some_and(|other| other.start() == start);
        match found.as_str().char_indices().next_back() {
            // The last white-space character before a word belongs to that word.
            Some((last, c)) if last > 0 && c.is_whitespace() && found.end() < text.len() && !is_other() => start + last,
            _ => found.end(),
        }
    }
}

/// The end of the word that begins at `start`, if ASCII characters alone determine it.
fn ascii_word_end(text: &[u8], start: usize) -> Option<usize> {
    let rest = &text[start..];
    if rest[0] == b'\'' {
        let suffixes: [&[u8]; 7] = [b"s", b"t", b"re", b"ve", b"m", b"ll", b"d"];
        if let Some(suffix) = suffixes.iter().find(|suffix| rest[1..].starts_with(suffix)) {
            return Some(start + 1 + suffix.len());
        }
    }
    // A space belongs to the word after it.
    let lead =
        usize::from(rest[0] == b' ' && rest.get(1).is_some_and(|&byte| CharClass::from_byte(byte) != CharClass::Space));
    let class = CharClass::from_byte(rest[lead]);
    let run = rest[lead..].iter().take_while(|&&byte| CharClass::from_byte(byte) == class).count();
    let next = rest.get(lead + run).map(|&byte| CharClass::from_byte(byte));
    match (class, next) {
        (CharClass::Wide, _) | (_, Some(CharClass::Wide)) => None,
        (CharClass::Space, Some(_)) if run > 1 => Some(start + run - 1),
        _ => Some(start + lead + run),
    }
}

/// The character classes of GPT-2's word pattern.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CharClass {
    Letter,
    Digit,
    Space,
    Other,
    /// Outside ASCII.
    Wide,
}

impl CharClass {
    fn from_byte(byte: u8) -> Self {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Self::Letter,
            b'0'..=b'9' => Self::Digit,
            b'\t'..=b'\r' | b' ' => Self::Space,
            0..=0x7F => Self::Other,
            _ => Self::Wide,
        }
    }
}

/// The printable character by which GPT-2's vocabulary writes a byte: itself if it is printable in Latin-1, otherwise
/// the next unused one, starting at U+0100.
pub(super) fn byte_level_char(byte: u8) -> char {
    let code = match byte {
        0..=32 => 0x100 + u32::from(byte),
        127..=160 => 0x100 + 33 + u32::from(byte - 127),
        173 => 0x100 + 33 + 34,
        _ => u32::from(byte),
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::byte_level_bpe;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::sync::LazyLock;

    /// Words, runs of white space, contractions, digits, scripts and added tokens, in any order.
    const TEXT: &str = "([a-zA-Z]{1,6}|[ \\t\\r\\n\u{a0}]{1,4}|'(s|t|re|ve|m|LL|d|x)|[0-9½Ⅷ]{1,5}|[!?.,/'\"-]{1,3}|[éßжשд中語🙂\u{301}]{1,3}|\\PC|<mask>|<\\|endoftext\\|>){0,30}";
    /// The words of Llama 3; Qwen 2's differ in their digits.
    const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    /// The words of gpt-oss: a capital letter may begin one.
    const GPT_OSS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn tokenizers() -> Vec<(Arc<tokenizers::Tokenizer>, FastBpe)> {
        let byte_level = |use_regex| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let split =
            |pattern| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let sequence = |parts: [Value; 2]| json!({"type": "Sequence", "pretokenizers": parts});
        let digits = |individual| json!({"type": "Digits", "individual_digits": individual});
        let pre_tokenizers = [
            byte_level(true),
            sequence([split(LLAMA3), byte_level(false)]),
            sequence([split(GPT_OSS), byte_level(false)]),
            sequence([digits(true), byte_level(true)]),
            sequence([digits(false), byte_level(true)]),
            sequence([split(r"[!-/]\s*|\p{L}+"), byte_level(false)]),
        ];
        let mut json: Value = serde_json::from_slice(&byte_level_bpe()).unwrap();
        let mut mask = json["added_tokens"][0].clone();
        (mask["content"], mask["lstrip"]) = ("<mask>".into(), true.into());
        mask["id"] = (mask["id"].as_u64().unwrap() + 1).into();
        json["added_tokens"].as_array_mut().unwrap().push(mask);
        let mut all = Vec::new();
        for (pre_tokenizer, normalizer) in
            pre_tokenizers.iter().zip([Value::Null, json!({"type": "NFC"})].iter().cycle())
        {
            json["pre_tokenizer"] = pre_tokenizer.clone();
            json["normalizer"] = normalizer.clone();
            let library = Arc::new(tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap());
            let fast = FastBpe::new(&library).unwrap_or_else(|| panic!("no fast path for {pre_tokenizer}"));
            all.push((library, fast));
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn tokens_are_the_librarys(text in TEXT) {
            static TOKENIZERS: LazyLock<Vec<(Arc<tokenizers::Tokenizer>, FastBpe)>> = LazyLock::new(tokenizers);
            for (library, fast) in &*TOKENIZERS {
                let Some(ours) = fast.encode(&text) else {
                    prop_assert!(library.get_normalizer().is_some() && !text.is_ascii());
                    continue;
                };
                let encoding = library.encode(&*text, false).unwrap();
                let ids: Vec<u32> = ours.iter().map(|&(id, _)| id).collect();
                prop_assert_eq!(encoding.get_ids(), &ids);
                let mut end = 0;
                for (&(_, len), &(first, last)) in ours.iter().zip(encoding.get_offsets()) {
                    let start = end;
                    end += len;
                    // The library's tokens of a part of a character stand for all of it.
                    prop_assert_eq!((text.floor_char_boundary(start), text.ceil_char_boundary(end)), (first, last));
                }
                prop_assert_eq!(end, text.len());
            }
        }
    }

    #[test]
    fn other_kinds_of_tokenizers_are_left_to_the_library() {
        let base: Value = serde_json::from_slice(&byte_level_bpe()).unwrap();
        let sequence = |parts: &[&Value]| json!({"type": "Sequence", "pretokenizers": parts});
        let digits = &json!({"type": "Digits", "individual_digits": true});
        let bytes = &base["pre_tokenizer"];
        // From GPT-4's pattern.
        let mut possessive = json!({"type": "Split", "behavior": "Isolated", "invert": false});
        possessive["pattern"]["Regex"] = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\s+(?!\S)|\s+".into();
        let changes = [
            ("/pre_tokenizer/add_prefix_space", true.into()),
            ("/normalizer", json!({"type": "Lowercase"})),
            ("/model/dropout", 0.1.into()),
            ("/pre_tokenizer", sequence(&[digits])),
            ("/pre_tokenizer", sequence(&[&possessive, bytes])),
            ("/pre_tokenizer", sequence(&[&[digits; MAX_SPLITS][..], &[bytes]].concat())),
        ];
        for (place, value) in changes {
            let mut json = base.clone();
            *json.pointer_mut(place).unwrap() = value;
            let library = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
            assert!(FastBpe::new(&Arc::new(library)).is_none(), "{place}");
        }
    }
}
