//! Documents to a token file, on all cores and in bounded memory.
//!
//! Pieces are read until a few megabytes are together, encoded in parallel and written in the order they were read,
//! so the result does not depend on the number of threads.

use rayon::prelude::*;

use super::cache::TokenWriter;
use super::document::{Document, Piece};
use super::source::LoadEvent;
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Bytes of text encoded between two writes.
const BATCH_BYTES: usize = 8 << 20;

/// Reads, encodes and writes; the text seen so far.
pub(super) struct Tokenise<'a> {
    tokenizer: &'a Tokenizer,
    writer: TokenWriter,
    report: &'a mut dyn FnMut(LoadEvent),
    batch: Vec<Piece>,
    batch_bytes: usize,
    text_bytes: u64,
    trained_bytes: u64,
    /// Whether the last piece written was trained on; then so is the end of its document. `None` before the first.
    last_trained: Option<bool>,
    trained_tokens: u64,
}

impl<'a> Tokenise<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, writer: TokenWriter, report: &'a mut dyn FnMut(LoadEvent)) -> Self {
        let (batch, last_trained) = (Vec::new(), None);
        let (batch_bytes, text_bytes, trained_bytes, trained_tokens) = (0, 0, 0, 0);
        Self { tokenizer, writer, report, batch, batch_bytes, text_bytes, trained_bytes, last_trained, trained_tokens }
    }

    /// Tokenises `documents`; the writer to finish, and the bytes of the text that is trained on.
    pub(super) fn run(mut self, documents: &[Document]) -> Result<(TokenWriter, u64)> {
        let sizes: Vec<u64> = documents.iter().map(|d| d.path.metadata().map_or(0, |m| m.len())).collect();
        let total = sizes.iter().sum();
        (self.report)(LoadEvent::Tokenising { done: 0, total });
        let mut before = 0;
        for (document, size) in documents.iter().zip(sizes) {
            let text_before = self.text_bytes;
            document.read(&mut |piece| {
                self.text_bytes += piece.text.len() as u64;
                self.trained_bytes += if piece.trained { piece.text.len() as u64 } else { 0 };
                self.batch_bytes += piece.text.len();
                self.batch.push(piece);
                if self.batch_bytes >= BATCH_BYTES {
                    self.flush()?;
                    // A Parquet file unpacks to more text than it has bytes.
                    let done = before + (self.text_bytes - text_before).min(size);
                    (self.report)(LoadEvent::Tokenising { done, total });
                }
                Ok(())
            })?;
            before += size;
        }
        self.flush()?;
        (self.report)(LoadEvent::Tokenising { done: total, total });
        if self.trained_tokens == 0 {
            let origin = documents.first().map_or("data", |document| &document.origin);
            return Err(Error::data(
                origin,
                "nothing to learn: no `completion` and no message of the role `assistant`",
            ));
        }
        Ok((self.writer, self.trained_bytes))
    }

    fn flush(&mut self) -> Result<()> {
        let pieces = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let encoded: Vec<Result<Vec<u32>>> =
            pieces.par_iter().map(|piece| self.tokenizer.encode(&piece.text)).collect();
        for (piece, ids) in pieces.iter().zip(encoded) {
            if let (true, Some(trained), Some(eos)) =
                (piece.starts_document, self.last_trained, self.tokenizer.eos_id())
            {
                self.writer.push(&[eos], trained)?;
            }
            let ids = ids?;
            self.writer.push(&ids, piece.trained)?;
            self.last_trained = Some(piece.trained);
            self.trained_tokens += if piece.trained { ids.len() as u64 } else { 0 };
        }
        Ok(())
    }
}
