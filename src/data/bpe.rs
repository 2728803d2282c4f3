//! GPT-2's byte-level BPE at some thirty times the general library's speed, with the same ids.
//!
//! The library finds words with a backtracking regular expression and keeps offsets that training does not need. Here a
//! byte loop finds ASCII words and a linear-time expression the others, and each thread caches the ids of words. Text
//! repeats its words, often enough that the library's merges are seldom needed.

use crate::{Error, Result};
use regex::Regex;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokenizers::{Model as _, ModelWrapper, PreTokenizerWrapper};

/// GPT-2's word pattern without its look-ahead `\s+(?!\S)`, which [`FastBpe::word_end`] implements.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// The maximum number of words in a cache, and the length of the longest: about 20 MB per thread.
const CACHE_WORDS: usize = 1 << 17;
const CACHE_WORD_BYTES: usize = 32;

/// The ids of words already met.
type WordCache = HashMap<Box<str>, Box<[u32]>>;

/// A byte-level BPE tokenizer that only needs words and merges.
pub(super) struct FastBpe {
    inner: Arc<tokenizers::Tokenizer>,
    words: Regex,
    /// Texts such as `<|endoftext|>` that become tokens before the text is split into words; the library handles them.
    added_tokens: Vec<String>,
    /// Caches not in use. There is one cache per thread that encodes at the same time.
    caches: Mutex<Vec<WordCache>>,
}

impl FastBpe {
    /// The fast path for `inner`, if it is a tokenizer of GPT-2's kind.
    pub(super) fn new(inner: &Arc<tokenizers::Tokenizer>) -> Option<Self> {
        let words_are_gpt2s = matches!(
            inner.get_pre_tokenizer(),
            Some(PreTokenizerWrapper::ByteLevel(level)) if level.use_regex && !level.add_prefix_space
        );
        let merges_only = matches!(inner.get_model(), ModelWrapper::BPE(bpe) if bpe.dropout.is_none());
        if !words_are_gpt2s || !merges_only || inner.get_normalizer().is_some() {
            return None;
        }
        let added_tokens = inner.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
        Some(Self { inner: Arc::clone(inner), words: Regex::new(WORDS).ok()?, added_tokens, caches: Mutex::default() })
    }

    /// The ids of `text`, or `None` if it holds an added token.
    pub(super) fn encode(&self, text: &str) -> Option<Result<Vec<u32>>> {
        if self.added_tokens.iter().any(|token| text.contains(token.as_str())) {
            return None;
        }
        // A poisoned lock guards a list of finished caches: the panic left none of them half written.
        let lock = || self.caches.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut cache = lock().pop().unwrap_or_default();
        let ids = self.encode_words(text, &mut cache);
        lock().push(cache);
        Some(ids)
    }

    fn encode_words(&self, text: &str, cache: &mut WordCache) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut start = 0;
        while start < text.len() {
            let end = ascii_word_end(text.as_bytes(), start).unwrap_or_else(|| self.word_end(text, start));
            let word = &text[start..end];
            if let Some(known) = cache.get(word) {
                ids.extend_from_slice(known);
            } else {
                let merged = self.merge(word)?;
                ids.extend_from_slice(&merged);
                if word.len() <= CACHE_WORD_BYTES && cache.len() < CACHE_WORDS {
                    cache.insert(word.into(), merged.into());
                }
            }
            start = end;
        }
        Ok(ids)
    }

    /// The end of the word that begins at `start`. The last white-space character before a word belongs to that word.
    fn word_end(&self, text: &str, start: usize) -> usize {
        // Every character starts some word, so the match begins at `start`.
        let end = self.words.find_at(text, start).map_or(text.len(), |found| found.end());
        match text[start..end].char_indices().next_back() {
            Some((last, c)) if last > 0 && c.is_whitespace() && end < text.len() => start + last,
            _ => end,
        }
    }

    /// Applies the library's merges to one word.
    fn merge(&self, word: &str) -> Result<Vec<u32>> {
        let printable: String = word.bytes().map(byte_level_char).collect();
        let tokens = self.inner.get_model().tokenize(&printable);
        let tokens = tokens.map_err(|error| Error::data("tokenizer", format!("cannot encode `{word}`: {error}")))?;
        Ok(tokens.into_iter().map(|token| token.id).collect())
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
    use super::super::tokenizer::{Tokenizer, tests::byte_level_bpe};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// Words, runs of white space, contractions, digits and scripts, in any order.
    const TEXT: &str = "([a-z]{1,6}|[ \\t\\r\\n\u{a0}]{1,4}|'(s|t|re|ve|m|ll|d|x)|[0-9½Ⅷ]{1,3}|[!?.,'\"-]{1,3}|[éßжשд中語🙂\u{301}]{1,3}|\\PC){0,30}";

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn ids_are_the_librarys(text in TEXT, end in prop::bool::ANY) {
            static PAIR: LazyLock<(Tokenizer, tokenizers::Tokenizer)> = LazyLock::new(|| {
                let json = byte_level_bpe();
                let library = tokenizers::Tokenizer::from_bytes(&json).unwrap();
                (Tokenizer::from_json(json, "test").unwrap(), library)
            });
            let (ours, library) = &*PAIR;
            let text = if end { format!("{text}<|endoftext|>{text}") } else { text };
            let ids = ours.encode(&text).unwrap();
            let encoding = library.encode(text, false).unwrap();
            prop_assert_eq!(encoding.get_ids(), &ids);
        }
    }
}
