//! Token files: a tokenized corpus on disk, read as it is needed, so that a second run starts at once and memory does
//! not grow with the corpus.
//!
//! A file is a header of 64 bytes (magic, format version, bytes per token and kind of the documents, tokens, bytes of
//! text in the loss, SHA-256 of everything else), the ids in little endian, and, if documents have values, one FP32
//! number per document. It is written under
//! a temporary name and renamed when complete: other processes see the whole file or none, and a process that has
//! opened an older file keeps it.

use super::samples::SampleKind;
use crate::{Error, Result, temporary};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;
use strum::VariantArray;
use tempfile::TempPath;

const MAGIC: [u8; 8] = *b"FTTOKENS";
const VERSION: u32 = 12;
const HEADER_BYTES: usize = 64;

/// Set in an id that is read but not trained on.
pub(super) const NO_LOSS_FLAG: u32 = 1 << 31;
/// Set in the first id of a document.
pub(super) const DOCUMENT_START_FLAG: u32 = 1 << 30;

/// A description of a data set's documents.
#[derive(Clone, Debug, Default)]
pub(super) struct DatasetContents {
    pub(super) kind: DatasetKind,
    /// With [`SampleKind::Preference`], two documents form a pair: the chosen and the rejected sample.
    pub(super) samples: SampleKind,
    /// One value per document, or none: its weight in the loss, or 1 for a good and 0 for a bad answer.
    pub(super) values: Vec<f32>,
}

/// The kind of a data set's documents. A token file has the number in the header's word with the width, as that of a
/// [`SampleKind`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, VariantArray)]
pub enum DatasetKind {
    /// Parts of one long text.
    #[default]
    Text = 0,
    /// Samples: prompts with their answers.
    PromptCompletion = 1 << 8,
    /// Samples: conversations.
    Conversational = 1 << 9,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdWidth {
    /// 16 bits: one document, all of it trained on.
    U16 = 2,
    /// 32 bits; the two highest are [`NO_LOSS_FLAG`] and [`DOCUMENT_START_FLAG`].
    U32Flagged = 4,
}

/// Name prefix of an incomplete file, which its writer has locked.
const UNFINISHED: &str = ".tokens-";

/// A verified token file. Ids are read on demand, not mapped: truncating a mapped file kills its readers with SIGBUS.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: File,
    width: IdWidth,
    pub(super) tokens: usize,
    /// Tokens in the loss.
    pub(super) trained: u64,
    /// Bytes of text in the loss.
    pub(super) text_bytes: u64,
    /// The start positions of documents; the first is 0.
    pub(super) starts: Vec<usize>,
    pub(super) contents: DatasetContents,
    /// Why ids could not be read, the first time.
    pub(super) failure: OnceLock<String>,
}

impl TokenFile {
    /// Opens a token file after checking every byte of it. `Err` describes the damage.
    pub(super) fn open(mut file: File) -> Result<Self, String> {
        let mut header = [0; HEADER_BYTES];
        let length = file.metadata().map_err(|error| error.to_string())?.len();
        file.rewind().and_then(|()| file.read_exact(&mut header)).map_err(|_| format!("{length} bytes are too few"))?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        if header[..8] != MAGIC || number(8) as u32 != VERSION {
            return Err("its header has an unknown format or version".to_owned());
        }
        let word = (number(8) >> 32) as u32;
        let kind = DatasetKind::VARIANTS.iter().find(|kind| word & 0x300 == **kind as u32);
        let samples = SampleKind::VARIANTS.iter().find(|samples| word & !0x3FF == **samples as u32);
        let (kind, samples) = kind.copied().zip(samples.copied()).ok_or("the kind of its documents is unknown")?;
        let width = match word & 0xFF {
            2 => IdWidth::U16,
            4 => IdWidth::U32Flagged,
            other => return Err(format!("it specifies {other} bytes per token")),
        };
        let tokens = number(16);
        let bytes = length - HEADER_BYTES as u64;
        let id_bytes = tokens.checked_mul(width as u64).filter(|id_bytes| *id_bytes <= bytes);
        let id_bytes = id_bytes.ok_or_else(|| format!("its {bytes} bytes do not match its {tokens} tokens"))?;
        let mut hash = Sha256::new();
        let mut trained = tokens;
        let mut starts = Vec::new();
        let mut position = 0;
        let mut buffer = Vec::with_capacity(1 << 18);
        let mut rest = (&mut file).take(id_bytes);
        loop {
            buffer.clear();
            let count = rest.by_ref().take(1 << 18).read_to_end(&mut buffer).map_err(|error| error.to_string())?;
            hash.update(&buffer);
            if width == IdWidth::U32Flagged {
                for id in buffer.as_chunks::<4>().0 {
                    let id = u32::from_le_bytes(*id);
                    trained -= u64::from(id & NO_LOSS_FLAG != 0);
                    if id & DOCUMENT_START_FLAG != 0 {
                        starts.push(position);
                    }
                    position += 1;
                }
            }
            if count < 1 << 18 {
                break;
            }
        }
        if starts.first() != Some(&0) && tokens > 0 {
            starts.insert(0, 0);
        }
        let mut tail = Vec::new();
        file.read_to_end(&mut tail).map_err(|error| error.to_string())?;
        if hash.chain_update(&tail).chain_update(&header[..32]).finalize()[..] != header[32..] {
            return Err("its SHA-256 does not match".to_owned());
        }
        let values: Vec<f32> = tail.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        if !tail.is_empty() && tail.len() != 4 * starts.len() {
            return Err(format!("its {} documents have {} values", starts.len(), values.len()));
        }
        if samples == SampleKind::Preference && !starts.len().is_multiple_of(2) {
            return Err("a document has no second one that forms a pair".to_owned());
        }
        let contents = DatasetContents { kind, samples, values };
        let tokens = tokens as usize;
        let failure = OnceLock::new();
        Ok(Self { file, width, tokens, trained, text_bytes: number(24), starts, contents, failure })
    }

    /// Copies ids with their flags, starting at position `start`. If the file cannot be read, fills with zeros and sets
    /// [`Self::failure`].
    pub(super) fn read(&self, start: usize, out: &mut [u32]) {
        let width = self.width as usize;
        let mut buffer = [0; 4096];
        for (part, out) in out.chunks_mut(buffer.len() / width).enumerate() {
            let first = start + part * (buffer.len() / width);
            let bytes = &mut buffer[..out.len() * width];
            if let Err(error) = self.file.read_exact_at(bytes, (HEADER_BYTES + first * width) as u64) {
                let _ = self.failure.set(error.to_string());
                bytes.fill(0);
            }
            for (out, id) in out.iter_mut().zip(bytes.chunks_exact(width)) {
                *out = id.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
            }
        }
    }
}

/// Writes a token file piece by piece.
pub(super) struct TokenWriter {
    out: BufWriter<File>,
    temporary: TempPath,
    hash: Sha256,
    width: IdWidth,
    tokens: u64,
    /// Whether the next id starts a document.
    starts: bool,
    /// Documents started, and documents with tokens.
    documents: [u64; 2],
    pub(super) contents: DatasetContents,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// A new file in `folder`, which is created if need be.
    pub(super) fn create(folder: &Path, width: IdWidth) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let (file, temporary) = temporary::file(folder, UNFINISHED)?.into_parts();
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&[0; HEADER_BYTES]).map_err(Error::io("write", folder))?;
        let (hash, bytes) = (Sha256::new(), Vec::new());
        let tokens = 0;
        let starts = true;
        let documents = [0; 2];
        let contents = DatasetContents::default();
        Ok(Self { out, temporary, hash, width, tokens, starts, documents, contents, bytes })
    }

    pub(super) fn start(&mut self) {
        self.starts = true;
        self.documents[0] += 1;
    }

    /// The number of documents without tokens, which are not in the file. They would shift the values of the others, or
    /// the sides of pairs.
    pub(super) fn missing_documents(&self) -> u64 {
        let DatasetContents { samples, values, .. } = &self.contents;
        let [started, written] = self.documents;
        if values.is_empty() && *samples != SampleKind::Preference { 0 } else { started.saturating_sub(written) }
    }

    /// Appends ids that are all in the loss, or all outside it.
    pub(super) fn push(&mut self, ids: &[u32], trained: bool) -> Result<()> {
        self.extend(ids.iter().map(|&id| (id, trained)))
    }

    /// Appends ids, each with whether it is in the loss.
    pub(super) fn extend(&mut self, ids: impl IntoIterator<Item = (u32, bool)>) -> Result<()> {
        self.bytes.clear();
        for (id, trained) in ids {
            match self.width {
                IdWidth::U16 => self.bytes.extend((id as u16).to_le_bytes()),
                IdWidth::U32Flagged => {
                    let starts = std::mem::take(&mut self.starts);
                    self.documents[1] += u64::from(starts);
                    let start = if starts { DOCUMENT_START_FLAG } else { 0 };
                    self.bytes.extend((id | start | if trained { 0 } else { NO_LOSS_FLAG }).to_le_bytes());
                }
            }
            self.tokens += 1;
        }
        self.hash.update(&self.bytes);
        self.out.write_all(&self.bytes).map_err(Error::io("write", &self.temporary))
    }

    /// Completes the file and opens it. Without a `path` it is unnamed and deleted when closed.
    pub(super) fn finish(mut self, text_bytes: u64, path: Option<&Path>) -> Result<TokenFile> {
        let temporary = self.temporary;
        let DatasetContents { kind, samples, values } = &self.contents;
        let tail: &[u8] = bytemuck::cast_slice(values);
        self.hash.update(tail);
        self.out.write_all(tail).map_err(Error::io("write", &temporary))?;
        let mut file = self.out.into_inner().map_err(|error| Error::io("write", &temporary)(error.into_error()))?;
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let word = self.width as u32 | *kind as u32 | *samples as u32;
        header[12..16].copy_from_slice(&word.to_le_bytes());
        header[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        header[24..32].copy_from_slice(&text_bytes.to_le_bytes());
        self.hash.update(&header[..32]);
        header[32..].copy_from_slice(&self.hash.finalize());
        file.rewind()
            .and_then(|()| file.write_all(&header))
            .and_then(|()| file.sync_all())
            .map_err(Error::io("write", &temporary))?;
        let opened = TokenFile::open(file).map_err(|problem| Error::data(temporary.display(), problem))?;
        if let Some(path) = path {
            temporary.persist(path).map_err(|error| Error::io("create", path)(error.error))?;
        }
        Ok(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::mixture::Mixture;
    use crate::data::{BatchLoader, SequenceIndex, TokenSource};
    use proptest::prelude::*;
    use std::path::PathBuf;

    fn written(ids: &[u32], width: IdWidth) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        let mut writer = TokenWriter::create(folder.path(), width).unwrap();
        ids.chunks(7).enumerate().for_each(|(i, ids)| writer.push(ids, i % 2 == 0).unwrap());
        writer.finish(99, Some(&path)).unwrap();
        (folder, path)
    }

    #[test]
    fn a_file_that_is_cut_short_while_it_is_read_is_told_and_ends_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        let mut writer = TokenWriter::create(folder.path(), IdWidth::U16).unwrap();
        writer.push(&vec![7; 100_000], true).unwrap();
        let file = writer.finish(100_000, Some(&path)).unwrap();
        let mut out = vec![0; 5000];
        file.read(90_000, &mut out);
        assert!(out.iter().all(|&id| id == 7) && file.failure.get().is_none());
        File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
        file.read(90_000, &mut out);
        assert!(out.iter().all(|&id| id == 0) && file.failure.get().is_some());
        // A loader stops for any of its data sets.
        let index = |tokens| SequenceIndex::new(tokens, 8, false, "x").unwrap();
        let whole = index(TokenSource::from_ids(vec![7; 100]));
        let sets = vec![(whole, 0.5), (index(TokenSource::from_file(file)), 0.5)];
        let loader = BatchLoader::from_index(Mixture::new(sets).unwrap(), 1, 1).unwrap();
        let message = loader.check().unwrap_err().to_string();
        assert!(message.contains("damaged while it was in use"), "{message}");
    }

    #[test]
    fn ids_survive_in_both_widths() {
        for (width, top) in [(IdWidth::U16, 65_535), (IdWidth::U32Flagged, 70_000)] {
            let ids: Vec<u32> = (0..20).chain([top]).collect();
            let (_folder, path) = written(&ids, width);
            let file = TokenFile::open(File::open(path).unwrap()).unwrap();
            assert_eq!((file.tokens, file.text_bytes), (21, 99));
            let mut out = vec![0; 21];
            file.read(0, &mut out);
            let flagged = out.iter().filter(|&&id| id & NO_LOSS_FLAG != 0).count();
            assert_eq!(flagged, if width == IdWidth::U16 { 0 } else { 7 });
            assert_eq!(out.iter().map(|id| id & !(NO_LOSS_FLAG | DOCUMENT_START_FLAG)).collect::<Vec<_>>(), ids);
        }
    }

    #[test]
    fn pairs_and_the_values_of_documents_survive() {
        let folder = tempfile::tempdir().unwrap();
        let write = |documents: usize, samples: SampleKind, values: Vec<f32>| {
            let mut writer = TokenWriter::create(folder.path(), IdWidth::U32Flagged).unwrap();
            for _ in 0..documents {
                writer.start();
                writer.push(&[7, 8], true).unwrap();
            }
            writer.contents = DatasetContents { kind: DatasetKind::PromptCompletion, samples, values };
            writer.finish(0, None)
        };
        for (samples, values) in [
            (SampleKind::Preference, vec![]),
            (SampleKind::UnpairedPreference, vec![1.0, 0.0]),
            (SampleKind::Plain, vec![0.5, 2.0]),
        ] {
            let file = write(2, samples, values.clone()).unwrap();
            assert_eq!((file.contents.samples, &file.contents.values), (samples, &values));
            assert_eq!((file.tokens, &file.starts[..]), (4, &[0, 2][..]));
        }
        assert!(write(3, SampleKind::Preference, vec![]).is_err());
        assert!(write(2, SampleKind::Plain, vec![0.5]).is_err());
    }

    #[test]
    fn an_unfinished_file_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        TokenWriter::create(folder.path(), IdWidth::U16).unwrap().push(&[1, 2], true).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    proptest! {
        #[test]
        fn every_flipped_bit_and_every_cut_is_noticed(at: prop::sample::Index, bit in 0u8..8, keep: prop::sample::Index) {
            let (_folder, path) = written(&[1, 2, 3, 4], IdWidth::U16);
            let good = std::fs::read(&path).unwrap();
            let mut bad = good.clone();
            let at = at.index(bad.len());
            bad[at] ^= 1 << bit;
            std::fs::write(&path, &bad).unwrap();
            prop_assert!(TokenFile::open(File::open(&path).unwrap()).is_err());
            std::fs::write(&path, &good[..keep.index(good.len())]).unwrap();
            prop_assert!(TokenFile::open(File::open(&path).unwrap()).is_err());
        }
    }
}
