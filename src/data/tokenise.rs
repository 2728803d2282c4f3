//! Documents to a token file, on all cores and in bounded memory.
//!
//! Chunks are collected up to a few megabytes, encoded in parallel and written in order, so the result does not depend
//! on the number of threads.

use rayon::prelude::*;

use super::cache::TokenWriter;
use super::document::{Document, End, Learned, Piece};
use super::row::{Reading, RowReader};
use super::source::LoadEvent;
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Bytes of text encoded between two writes.
const BATCH_BYTES: usize = 8 << 20;

/// Reads, encodes and writes; the text seen so far.
pub(super) struct Tokenise<'a> {
    tokenizer: &'a Tokenizer,
    reading: &'a Reading,
    writer: TokenWriter,
    report: &'a mut dyn FnMut(LoadEvent),
    batch: Vec<Piece>,
    batch_bytes: usize,
    text_bytes: u64,
    trained_bytes: u64,
    /// Whether the end-of-text token must precede the next document of running text.
    running: bool,
    trained_tokens: u64,
}

impl<'a> Tokenise<'a> {
    pub(super) fn new(
        (tokenizer, reading): (&'a Tokenizer, &'a Reading),
        writer: TokenWriter,
        report: &'a mut dyn FnMut(LoadEvent),
    ) -> Self {
        let (batch, running) = (Vec::new(), false);
        let (batch_bytes, text_bytes, trained_bytes, trained_tokens) = (0, 0, 0, 0);
        Self {
            tokenizer,
            reading,
            writer,
            report,
            batch,
            batch_bytes,
            text_bytes,
            trained_bytes,
            running,
            trained_tokens,
        }
    }

    /// Tokenizes `documents`; returns the writer to finish and the bytes of text in the loss.
    pub(super) fn run(mut self, documents: &[Document]) -> Result<(TokenWriter, u64)> {
        let sizes: Vec<u64> = documents.iter().map(|d| d.path.metadata().map_or(0, |m| m.len())).collect();
        let total = sizes.iter().sum();
        (self.report)(LoadEvent::Tokenising { done: 0, total });
        let (mut before, mut rows) = (0, RowReader::new(self.reading));
        for (document, size) in documents.iter().zip(sizes) {
            let text_before = self.text_bytes;
            document.read(&mut rows, &mut |piece| {
                self.text_bytes += piece.text.len() as u64;
                self.trained_bytes += match &piece.learned {
                    Learned::All => piece.text.len() as u64,
                    Learned::None => 0,
                    Learned::Parts(parts) => parts.iter().map(|part| part.len() as u64).sum(),
                };
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
        self.writer.documents(rows.documents());
        (self.report)(LoadEvent::Tokenising { done: total, total });
        if self.trained_tokens == 0 {
            let origin = documents.first().map_or("data", |document| &document.origin);
            let message = "nothing to learn: every `completion` is empty, or no message is of the role `assistant`";
            return Err(Error::data(origin, message));
        }
        Ok((self.writer, self.trained_bytes))
    }

    fn flush(&mut self) -> Result<()> {
        let pieces = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let encoded: Vec<Result<Vec<(u32, bool)>>> =
            pieces.par_iter().map(|piece| encode(self.tokenizer, piece)).collect();
        for (piece, ids) in pieces.iter().zip(encoded) {
            let mut ids = ids?;
            // End-of-text tokens alone are not training data.
            self.trained_tokens += ids.iter().filter(|(_, learned)| *learned).count() as u64;
            if let (true, Some(eos)) = (piece.end == End::Marked, self.tokenizer.eos_id()) {
                ids.push((eos, true));
            }
            if piece.starts_document {
                if let (true, Some(eos)) = (self.running, self.tokenizer.eos_id()) {
                    self.writer.push(&[eos], true)?;
                }
                self.writer.start();
                let bos = self.tokenizer.prefix(ids.first().map(|(id, _)| *id));
                // A chat template has written its own.
                if let Some(bos) = bos.filter(|_| piece.end != End::Complete) {
                    self.writer.push(&[bos], false)?;
                }
            }
            self.writer.extend(ids)?;
            self.running = piece.end == End::Open;
        }
        Ok(())
    }
}

/// The piece's ids, each with whether it counts in the loss.
fn encode(tokenizer: &Tokenizer, piece: &Piece) -> Result<Vec<(u32, bool)>> {
    let parts = match &piece.learned {
        Learned::Parts(parts) => parts,
        all_or_none => {
            let learned = *all_or_none == Learned::All;
            return Ok(tokenizer.encode(&piece.text)?.into_iter().map(|id| (id, learned)).collect());
        }
    };
    let spans = tokenizer.encode_with_spans(&piece.text)?;
    // A token that an answer shares with the text before or after it is part of the answer, as in transformers.
    let overlaps = |span: &std::ops::Range<usize>| {
        let next = parts.partition_point(|part| part.end <= span.start);
        parts.get(next).is_some_and(|part| part.start < span.end)
    };
    Ok(spans.into_iter().map(|(id, span)| (id, overlaps(&span))).collect())
}
