//! The built-in corpus `grammar`: short sentences whose exact entropy is known, so a loss can be read against the
//! best any model can do.
//!
//! A sentence fills eight slots from left to right; a required slot always takes a word, an optional one on a coin
//! flip; the word is drawn uniformly from the slot's list. Words are separated by one space, and a line feed ends the
//! sentence:
//!
//! ```text
//! the shy fox hid its red key today
//! one hen cut her pie
//! ```
//!
//! No word is in two lists, so a sentence has exactly one derivation and its probability is the product of the
//! choices made. Sentences are independent. The entropy rate of the text is therefore
//!
//! ```text
//! H(sentence) / E[bytes of a sentence, line feed included]   = 15.86 nats / 27.25 bytes = 0.582
//! ```
//!
//! and with byte tokens a model whose context covers a sentence can reach that loss. A window that starts in the
//! middle of a sentence has a slightly higher loss, because its first bytes are predicted without knowing the slot:
//! about 1.6 nats per window, 2 % of the loss at windows of 128 bytes. As every choice depends on the previous word
//! only, that is over after a word.

use super::shuffle::mix;

/// Bytes of the corpus that `--data grammar` trains on.
pub const CORPUS_BYTES: usize = 200_000;

struct GrammarSlot {
    /// Filled on a coin flip only.
    optional: bool,
    words: &'static [&'static str],
}

const fn required(words: &'static [&'static str]) -> GrammarSlot {
    GrammarSlot { optional: false, words }
}

const fn optional(words: &'static [&'static str]) -> GrammarSlot {
    GrammarSlot { optional: true, words }
}

/// The whole grammar. All words are ASCII.
static SLOTS: [GrammarSlot; 8] = [
    required(&["the", "my", "our", "one"]),
    optional(&["shy", "old", "wee", "big", "mad", "sly", "odd", "dim"]),
    required(&[
        "fox", "owl", "cat", "dog", "hen", "pig", "bee", "elk", "ram", "ewe", "jay", "gnu", "yak", "ant", "emu", "cub",
    ]),
    required(&["hid", "saw", "got", "ate", "met", "led", "won", "fed", "put", "cut", "lit", "rid"]),
    required(&["its", "his", "her", "this"]),
    optional(&["red", "new", "raw", "icy", "fat", "wet", "hot", "tan"]),
    required(&[
        "key", "pie", "cup", "jar", "box", "nut", "fig", "bun", "kit", "lamp", "vest", "urn", "quilt", "inn", "rug",
        "zip",
    ]),
    optional(&["today", "again", "twice", "first", "alone", "maybe"]),
];

impl GrammarSlot {
    /// The probability of any one word of the slot.
    fn word_probability(&self) -> f64 {
        self.presence() / self.words.len() as f64
    }

    /// The probability that the slot is filled.
    fn presence(&self) -> f64 {
        if self.optional { 0.5 } else { 1.0 }
    }

    /// Entropy of the slot's choice in nats: of the coin, and of the word, if there is one.
    fn entropy(&self) -> f64 {
        let coin = if self.optional { std::f64::consts::LN_2 } else { 0.0 };
        coin + self.presence() * (self.words.len() as f64).ln()
    }

    /// Expected bytes the slot adds, with the separator that follows its word.
    fn expected_bytes(&self) -> f64 {
        self.words.iter().map(|word| (word.len() + 1) as f64).sum::<f64>() * self.word_probability()
    }
}

/// The exact entropy rate of the text in nats per byte, line feeds included: the minimum loss attainable with byte
/// tokens.
pub fn entropy_per_token() -> f64 {
    let entropy: f64 = SLOTS.iter().map(GrammarSlot::entropy).sum();
    let bytes: f64 = SLOTS.iter().map(GrammarSlot::expected_bytes).sum();
    entropy / bytes
}

/// At least `bytes` bytes of sentences, ending with a whole one; the same `seed` gives the same text everywhere.
pub fn text(seed: u64, bytes: usize) -> String {
    let mut draws = (0..).map(|counter| mix(mix(seed) ^ counter));
    // The high half of a 64-bit draw, scaled: uniform to within 2^-32.
    let mut below = |n: usize| draws.next().map_or(0, |draw| (((draw >> 32) * n as u64) >> 32) as usize);
    let mut text = String::with_capacity(bytes + 64);
    while text.len() < bytes {
        for slot in &SLOTS {
            if !slot.optional || below(2) == 1 {
                text.push_str(slot.words[below(slot.words.len())]);
                text.push(' ');
            }
        }
        text.pop();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// The natural logarithm of the probability of one sentence (without its line feed); `None` if the grammar cannot
    /// produce it.
    fn sentence_log_probability(sentence: &str) -> Option<f64> {
        let mut words = sentence.split(' ').peekable();
        let mut log_probability = 0.0;
        for slot in &SLOTS {
            if words.next_if(|word| slot.words.contains(word)).is_some() {
                log_probability += slot.word_probability().ln();
            } else if slot.optional {
                log_probability += (1.0 - slot.presence()).ln();
            } else {
                return None;
            }
        }
        words.next().is_none().then_some(log_probability)
    }

    /// No word is in two lists, and all are ASCII: a derivation is unique, and a byte is one token.
    #[test]
    fn no_word_is_in_two_slots_and_all_are_ascii_words() {
        let words: Vec<_> = SLOTS.iter().flat_map(|slot| slot.words).collect();
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), words.len());
        assert!(words.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase())));
    }

    /// Walks every combination of slots, and of words by length: probabilities sum to one, and the expectations over
    /// all sentences are the ones that `entropy_per_token` writes as sums over slots.
    #[test]
    fn entropy_is_the_sum_over_all_sentences() {
        // (probability of one such sentence, its bytes, how many there are)
        let mut sentences = vec![(1.0f64, 0usize, 1u64)];
        for slot in &SLOTS {
            let mut longer = Vec::new();
            for &(probability, bytes, count) in &sentences {
                if slot.optional {
                    longer.push((probability * 0.5, bytes, count));
                }
                for length in slot.words.iter().map(|word| word.len()).collect::<HashSet<_>>() {
                    let words = slot.words.iter().filter(|word| word.len() == length).count() as u64;
                    longer.push((probability * slot.word_probability(), bytes + length + 1, count * words));
                }
            }
            sentences = longer;
        }
        let total: f64 = sentences.iter().map(|&(p, _, n)| p * n as f64).sum();
        let entropy: f64 = sentences.iter().map(|&(p, _, n)| -p * p.ln() * n as f64).sum();
        let bytes: f64 = sentences.iter().map(|&(p, bytes, n)| p * bytes as f64 * n as f64).sum();
        assert!((total - 1.0).abs() < 1e-9, "probabilities sum to {total}");
        assert!((entropy / bytes - entropy_per_token()).abs() < 1e-9);
        assert!((0.5..0.7).contains(&entropy_per_token()), "{}", entropy_per_token());
    }

    #[test]
    fn a_sampled_corpus_has_that_entropy() {
        let text = text(1, 1_000_000);
        let surprise: f64 = text.lines().map(|line| -sentence_log_probability(line).unwrap()).sum();
        let measured = surprise / text.len() as f64;
        assert!((measured / entropy_per_token() - 1.0).abs() < 0.01, "{measured} against {}", entropy_per_token());
    }

    /// Compares counts of words in a sampled corpus with their probabilities: the generator matches the formula's
    /// assumption.
    #[test]
    fn words_are_drawn_as_often_as_they_should() {
        let text = text(2, 1_000_000);
        let sentences = text.lines().count() as f64;
        for slot in &SLOTS {
            for word in slot.words {
                let count = text.split_ascii_whitespace().filter(|w| w == word).count() as f64;
                let expected = slot.word_probability() * sentences;
                assert!((count - expected).abs() < 5.0 * expected.sqrt(), "{word}: {count} of {expected}");
            }
        }
    }

    #[test]
    fn the_seed_decides_the_text() {
        assert_eq!(text(3, 1000), text(3, 1000));
        assert_ne!(text(3, 1000), text(4, 1000));
        assert!(text(3, 1000).len() >= 1000 && text(3, 1000).ends_with('\n'));
    }

    #[test]
    fn sentences_outside_the_grammar_have_no_probability() {
        for sentence in ["", "the", "the fox fox", "fox hid its key", "the fox hid its key today today", "the  fox"] {
            assert_eq!(sentence_log_probability(sentence), None, "{sentence:?}");
        }
        assert!(sentence_log_probability("the fox hid its key").is_some());
    }
}
