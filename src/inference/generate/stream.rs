//! Text as it comes, token by token: a token may end in the middle of a character.

use crate::Result;
use crate::data::Tokenizer;

/// What a decoder puts in place of bytes that are not UTF-8, an unfinished character among them.
const REPLACEMENT: char = '\u{FFFD}';

/// Turns ids into pieces of text. All pieces together are the text that [`Tokenizer::decode`] gives for all ids.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the piece at hand, and before them the last one of the piece before: some decoders treat the first
    /// token of a text differently.
    ids: Vec<u32>,
    /// Bytes of `ids`' text that have been handed out.
    said: usize,
}

impl<'a> TextStream<'a> {
    /// An empty text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), said: 0 }
    }

    /// The text that one more token makes certain; empty while a character is unfinished.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let certain = text.strip_suffix(REPLACEMENT).unwrap_or(&text);
        let piece = certain.get(self.said..).unwrap_or_default().to_owned();
        if certain.len() == text.len() {
            self.ids.drain(..self.ids.len() - 1);
            self.said = self.tokenizer.decode(&self.ids)?.len();
        } else {
            self.said = self.said.max(certain.len());
        }
        Ok(piece)
    }

    /// What is left of an unfinished character.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.said..).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;
    use proptest::prelude::*;

    fn pieces(ids: &[u32]) -> Vec<String> {
        let tokenizer = Tokenizer::byte();
        let mut stream = TextStream::new(&tokenizer);
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces
    }

    #[test]
    fn a_character_comes_whole() {
        let ids: Vec<u32> = "aé€😀b".bytes().map(u32::from).collect();
        assert_eq!(pieces(&ids), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]);
        assert_eq!(pieces(&[0x61, 0xE2, 0x82]), ["a", "", "", "\u{FFFD}"]);
    }

    proptest! {
        #[test]
        fn pieces_add_up_to_the_text(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let ids: Vec<u32> = bytes.iter().copied().map(u32::from).collect();
            prop_assert_eq!(pieces(&ids).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
