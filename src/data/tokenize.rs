//! Documents to a token file, on all cores and in bounded memory.
//!
//! Chunks are collected up to a few megabytes, encoded in parallel and written in order, so the result does not depend
//! on the number of threads.

use super::cache::TokenWriter;
use super::chunk::{ChunkEnd, LossMask, TextChunk};
use super::preview::counted;
use super::row::{DatasetOptions, RowReader};
use super::samples::SampleKind;
use super::source::{Document, LoadEvent};
use super::tokenizer::Tokenizer;
use crate::{Error, Result};
use rayon::prelude::*;

/// Bytes of text encoded between two writes.
const BATCH_BYTES: usize = 8 << 20;

/// The text seen so far.
struct TokenizeJob<'a> {
    tokenizer: &'a Tokenizer,
    writer: TokenWriter,
    batch: Vec<TextChunk>,
    batch_bytes: usize,
    text_bytes: u64,
    trained_bytes: u64,
    /// Whether the end-of-text token must precede the next document of running text.
    running: bool,
    /// Whether the last token is the end-of-text token, and in the loss: an answer or a text may contain it.
    ended: bool,
    trained_tokens: u64,
}

/// Tokenizes `documents`; returns the writer to finish and the bytes of text in the loss.
pub(super) fn tokenize(
    documents: &[Document],
    tokenizer: &Tokenizer,
    options: &DatasetOptions,
    writer: TokenWriter,
    report: &mut dyn FnMut(LoadEvent),
) -> Result<(TokenWriter, u64)> {
    let mut job = TokenizeJob {
        tokenizer,
        writer,
        batch: Vec::new(),
        batch_bytes: 0,
        text_bytes: 0,
        trained_bytes: 0,
        running: false,
        ended: false,
        trained_tokens: 0,
    };
    let sizes: Vec<u64> = documents.iter().map(|d| d.path.metadata().map_or(0, |m| m.len())).collect();
    let total = sizes.iter().sum();
    let mut report = |done| report(LoadEvent::Progress { what: "tokenizing".into(), done, total });
    report(0);
    let mut before = 0;
    let mut rows = RowReader::new(options);
    for (document, size) in documents.iter().zip(sizes) {
        let text_before = job.text_bytes;
        document.read(&mut rows, &mut |chunk| {
            job.push(chunk);
            if job.batch_bytes >= BATCH_BYTES {
                job.flush()?;
                // A Parquet file unpacks to more text than it has bytes.
                report(before + (job.text_bytes - text_before).min(size));
            }
            Ok(())
        })?;
        before += size;
    }
    job.flush()?;
    job.writer.contents = rows.contents()?;
    report(total);
    let origin = documents.first().map_or("data", |document| &document.origin);
    let missing = job.writer.missing_documents();
    if missing > 0 {
        let missing = counted(missing, "sample");
        let message = format!("has {missing} without tokens; remove empty texts, or use another tokenizer");
        return Err(Error::data(origin, message));
    }
    if job.trained_tokens == 0 && options.samples != SampleKind::Prompt {
        let message = "no loss tokens: every `text` or `completion` is empty, or no message has the role `assistant`";
        return Err(Error::data(origin, message));
    }
    Ok((job.writer, job.trained_bytes))
}

impl TokenizeJob<'_> {
    fn push(&mut self, chunk: TextChunk) {
        self.text_bytes += chunk.text.len() as u64;
        self.trained_bytes += match &chunk.loss_mask {
            LossMask::All => chunk.text.len() as u64,
            LossMask::None => 0,
            LossMask::Ranges(parts) => parts.iter().map(|part| part.len() as u64).sum(),
        };
        self.batch_bytes += chunk.text.len();
        self.batch.push(chunk);
    }

    fn flush(&mut self) -> Result<()> {
        let chunks = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let encoded: Vec<Result<Vec<(u32, bool)>>> =
            chunks.par_iter().map(|chunk| encode(self.tokenizer, chunk)).collect();
        for (chunk, ids) in chunks.iter().zip(encoded) {
            let mut ids = ids?;
            // End-of-text tokens alone are not training data.
            self.trained_tokens += ids.iter().filter(|(_, trained)| *trained).count() as u64;
            let eos = self.tokenizer.eos_id();
            if chunk.end == ChunkEnd::Eos && (chunk.starts_document || !self.ended) {
                ids.extend(eos.map(|eos| (eos, !chunk.starts_document)));
            }
            if chunk.starts_document {
                if let (true, Some(eos)) = (self.running && !self.ended, eos) {
                    self.writer.push(&[eos], true)?;
                }
                self.writer.start();
                let bos = self.tokenizer.prefix(ids.first().map(|(id, _)| *id));
                // A chat template has written its own.
                if let Some(bos) = bos
                    && chunk.end != ChunkEnd::Templated
                {
                    self.writer.push(&[bos], false)?;
                }
            }
            let inherited = self.ended && !chunk.starts_document;
            self.ended = ids.last().map_or(inherited, |(id, trained)| *trained && Some(*id) == eos);
            self.writer.extend(ids)?;
            self.running = chunk.end == ChunkEnd::Continues;
        }
        Ok(())
    }
}

/// The chunk's ids, each with whether it counts in the loss.
fn encode(tokenizer: &Tokenizer, chunk: &TextChunk) -> Result<Vec<(u32, bool)>> {
    let parts = match &chunk.loss_mask {
        LossMask::Ranges(parts) => parts,
        all_or_none => {
            let trained = *all_or_none == LossMask::All;
            let text = &chunk.text;
            let ids = if chunk.starts_document { tokenizer.encode(text) } else { tokenizer.encode_continuation(text) };
            return Ok(ids?.into_iter().map(|id| (id, trained)).collect());
        }
    };
    let spans = tokenizer.encode_with_offsets(&chunk.text)?;
    // A token that an answer shares with the text before or after it is part of the answer, as in transformers.
    let overlaps = |span: &std::ops::Range<usize>| {
        let next = parts.partition_point(|part| part.end <= span.start);
        parts.get(next).is_some_and(|part| part.start < span.end)
    };
    Ok(spans.into_iter().map(|(id, span)| (id, overlaps(&span))).collect())
}
