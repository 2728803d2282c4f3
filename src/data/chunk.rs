//! Chunks of text that are tokenized separately, and the positions at which a text may be split.

use crate::Result;
use std::ops::Range;

/// Bytes of text that are tokenized at a time, if they end at a split point.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// Text without a split point is tokenized as a whole up to this length.
pub(super) const MAX_CHUNK_BYTES: usize = 1 << 20;

/// The bytes of a chunk that are in the loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LossMask {
    All,
    None,
    /// The tokens that these bytes are part of.
    Ranges(Vec<Range<usize>>),
}

/// A chunk of text that is tokenized separately.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TextChunk {
    pub(super) text: String,
    pub(super) loss_mask: LossMask,
    pub(super) starts_document: bool,
    pub(super) end: ChunkEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkEnd {
    /// More of the document, or a new document, which the end-of-text token separates.
    Continues,
    /// The end-of-text token, which counts in the loss unless the document is empty.
    Eos,
    /// Nothing: a chat template has ended the document.
    Templated,
}

impl TextChunk {
    /// The end of a document, without text; `starts_document` if nothing precedes it.
    pub(super) fn end(starts_document: bool) -> Self {
        Self { text: String::new(), loss_mask: LossMask::All, starts_document, end: ChunkEnd::Eos }
    }
}

/// Receives the chunks as they are read; an error stops the reader.
pub(super) type ChunkSink<'a> = dyn FnMut(TextChunk) -> Result<()> + 'a;

/// Passes a text of any length to `sink` in chunks. Either all or none of it counts in the loss.
pub(super) fn emit(
    mut text: &str,
    loss_mask: &LossMask,
    mut starts_document: bool,
    sink: &mut ChunkSink,
) -> Result<()> {
    while !text.is_empty() {
        let limit = text.floor_char_boundary(CHUNK_BYTES);
        let cut = if limit == text.len() {
            limit
        } else {
            last_split_point(&text[..limit]).unwrap_or_else(|| next_split_point(text, limit))
        };
        let chunk = text[..cut].to_owned();
        sink(TextChunk { text: chunk, loss_mask: loss_mask.clone(), starts_document, end: ChunkEnd::Continues })?;
        text = &text[cut..];
        starts_document = false;
    }
    Ok(())
}

/// The last position at which a text may be split so that its parts give the tokens of the whole: between a letter or
/// digit and a space. There byte-level BPE and `SentencePiece` start a new word.
pub(super) fn last_split_point(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (1..bytes.len()).rev().find(|&at| is_split_point(text, bytes, at))
}

/// The first such place after `from`, at most [`MAX_CHUNK_BYTES`].
fn next_split_point(text: &str, from: usize) -> usize {
    let limit = text.floor_char_boundary(MAX_CHUNK_BYTES);
    (from.max(1)..limit).find(|&at| is_split_point(text, text.as_bytes(), at)).unwrap_or(limit)
}

fn is_split_point(text: &str, bytes: &[u8], at: usize) -> bool {
    // The text before a space ends with a whole character.
    bytes[at] == b' ' && text[..at].chars().next_back().is_some_and(char::is_alphanumeric)
}
