//! Streams text token by token; a token may end in the middle of a character.

use crate::Result;
use crate::data::Tokenizer;

/// Decoders replace bytes that are not UTF-8, including an incomplete character, with this.
const REPLACEMENT: char = '\u{FFFD}';

/// The text of `ids` after a `prompt`. Some decoders remove the space before the first token of a text, which this is
/// not.
pub fn decode_after(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> Result<String> {
    let mut stream = TextStream::after(tokenizer, prompt)?;
    let pieces = ids.iter().map(|&id| stream.push(id)).collect::<Result<String>>()?;
    Ok(pieces + &stream.finish()?)
}

/// Converts ids to pieces of text, whose concatenation is the result of [`Tokenizer::decode`] for all ids.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens that are a text by themselves, because some decoders treat the first token of a text
    /// differently, and the tokens after them.
    ids: Vec<u32>,
    /// Bytes of `ids`' text that have been returned.
    returned: usize,
}

impl<'a> TextStream<'a> {
    /// An empty text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), returned: 0 }
    }

    /// The text after a `prompt`.
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self> {
        let mut stream = Self::new(tokenizer);
        prompt.iter().try_for_each(|&id| stream.push(id).map(drop))?;
        Ok(stream)
    }

    /// The text that one more token completes; empty while a character is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        // Some decoders replace every byte of an incomplete character.
        let certain = text.trim_end_matches(REPLACEMENT);
        let piece = certain.get(self.returned..).unwrap_or_default().to_owned();
        self.returned = self.returned.max(certain.len());
        // A special token has no text, and must not be taken for the first token.
        if certain.len() == text.len() && !piece.is_empty() {
            // Without its other bytes, the last byte of a character would spoil the next one.
            for start in (0..self.ids.len()).rev() {
                let tail = self.tokenizer.decode(&self.ids[start..])?;
                if !tail.contains(REPLACEMENT) {
                    self.ids.drain(..start);
                    self.returned = tail.len();
                    break;
                }
            }
        }
        Ok(piece)
    }

    /// The rest, if the text ends in an incomplete character.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.returned..).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tokenizer::tests::word_level;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn pieces(ids: &[u32]) -> Vec<String> {
        pieces_of(&Tokenizer::byte(), ids)
    }

    fn pieces_of(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut stream = TextStream::new(tokenizer);
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces
    }

    #[test]
    fn a_character_is_returned_whole() {
        let ids: Vec<u32> = "aé€😀b".bytes().map(u32::from).collect();
        assert_eq!(pieces(&ids), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]);
        assert_eq!(pieces(&[0x61, 0xE2, 0x82]), ["a", "", "", "\u{FFFD}"]);
    }

    /// A tokenizer of words, whose decoder puts a space between two of them, with `<pad>` as token 3.
    fn words() -> Tokenizer {
        word_level(&["a", "bc", "?"], Some("<pad>"), &Value::Null)
    }

    #[test]
    fn a_special_token_does_not_take_the_space_after_it() {
        assert_eq!(pieces_of(&words(), &[0, 3, 1, 3, 3, 0]), ["a", "", " bc", "", "", " a", ""]);
    }

    /// The decoder of Llama 2.
    #[test]
    fn a_text_after_a_prompt_keeps_its_space() {
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        let tokenizer = word_level(&["▁a", "▁b", "c"], Some("<s>"), &json!({"decoder": decoder}));
        assert_eq!(tokenizer.decode(&[1, 2]).unwrap(), "bc");
        for (prompt, text) in [(&[3, 0][..], " bc"), (&[3, 0, 2], " bc"), (&[3], "bc"), (&[], "bc")] {
            assert_eq!(decode_after(&tokenizer, prompt, &[1, 2]).unwrap(), text, "{prompt:?}");
        }
    }

    /// Bytes outside of the vocabulary are tokens, as in Llama 2 and Gemma.
    #[test]
    fn characters_of_byte_tokens_are_returned_whole() {
        let decoder = json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]});
        let tokenizer = word_level(&["a", "<0xE8>", "<0xAA>", "<0x9E>"], None, &json!({"decoder": decoder}));
        let ids = [0, 1, 2, 3, 1, 2, 3, 0];
        assert_eq!(pieces_of(&tokenizer, &ids), ["a", "", "", "語", "", "", "語", "a", ""]);
    }

    proptest! {
        #[test]
        fn pieces_of_words_and_special_tokens_add_up_to_the_text(ids in proptest::collection::vec(0u32..4, 0..20)) {
            prop_assert_eq!(pieces_of(&words(), &ids).concat(), words().decode(&ids).unwrap());
        }

        #[test]
        fn pieces_add_up_to_the_text(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let ids: Vec<u32> = bytes.iter().copied().map(u32::from).collect();
            prop_assert_eq!(pieces(&ids).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
