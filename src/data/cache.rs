//! Token files: a tokenised corpus on disk, memory-mapped, so that a second run starts at once and memory does not
//! grow with the corpus.
//!
//! A file is a header of 64 bytes (magic, format version, bytes a token, tokens, bytes of text, SHA-256 of the ids and
//! of the header so far) and the ids in little endian. It is written under a temporary name and renamed when complete: other
//! processes see the whole file or none, and whoever has mapped an older one keeps it.

use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use memmap2::Mmap;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"FTTOKENS";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;

/// Set in an id that is read but not trained on.
pub(super) const CONTEXT_ONLY: u32 = 1 << 31;

/// How ids are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// 16 bits, all of them trained on.
    Two = 2,
    /// 32 bits, of which the highest is [`CONTEXT_ONLY`].
    Four = 4,
}

/// How a file is called until it is complete. Its writer has it locked.
const UNFINISHED: &str = ".tokens-";
/// A writer locks its file as soon as it is there, which is sooner than this.
const YOUNG: Duration = Duration::from_mins(1);

/// Removes what killed writers have left in `folder`.
fn sweep(folder: &Path, young: Duration) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.filter_map(std::result::Result::ok) {
        let unfinished = entry.file_name().to_str().is_some_and(|name| name.starts_with(UNFINISHED));
        let Ok(modified) = entry.metadata().and_then(|metadata| metadata.modified()) else { continue };
        let old = modified.elapsed().is_ok_and(|age| age >= young);
        if unfinished && old && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            // Another process may have been faster.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A token file, verified and mapped.
#[derive(Debug)]
pub(super) struct TokenFile {
    map: Mmap,
    width: Width,
    text_bytes: u64,
}

impl TokenFile {
    /// Maps a token file after checking every byte of it. `Err` says what is wrong with the file.
    pub(super) fn open(file: &File) -> Result<Self, String> {
        // SAFETY: token files are only ever created under another name, renamed into place and removed; none is
        // written to once it can be opened here, so the bytes behind the map do not change.
        let map = unsafe { Mmap::map(file) }.map_err(|error| error.to_string())?;
        let (Some(header), Some(body)) = (map.get(..HEADER_BYTES), map.get(HEADER_BYTES..)) else {
            return Err(format!("{} bytes are too few", map.len()));
        };
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        if header[..8] != MAGIC || number(8) as u32 != VERSION {
            return Err("its header is of another kind".to_owned());
        }
        let width = match (number(8) >> 32) as u32 {
            2 => Width::Two,
            4 => Width::Four,
            other => return Err(format!("it claims {other} bytes a token")),
        };
        if number(16).checked_mul(width as u64) != Some(body.len() as u64) {
            return Err(format!("it should hold {} tokens and holds {} bytes", number(16), body.len()));
        }
        if Sha256::new().chain_update(body).chain_update(&header[..32]).finalize()[..] != header[32..] {
            return Err("its SHA-256 does not match".to_owned());
        }
        let text_bytes = number(24);
        Ok(Self { map, width, text_bytes })
    }

    /// Tokens in the file.
    pub(super) fn len(&self) -> usize {
        (self.map.len() - HEADER_BYTES) / self.width as usize
    }

    /// Bytes of text they were made from.
    pub(super) fn text_bytes(&self) -> u64 {
        self.text_bytes
    }

    /// Copies ids from position `start` on, with [`CONTEXT_ONLY`] where it is set.
    pub(super) fn read(&self, start: usize, out: &mut [u32]) {
        let width = self.width as usize;
        let from = HEADER_BYTES + start * width;
        let bytes = &self.map[from..from + out.len() * width];
        match self.width {
            Width::Two => {
                let ids = bytes.as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes).into());
                out.iter_mut().zip(ids).for_each(|(out, id)| *out = id);
            }
            Width::Four => {
                let ids = bytes.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes));
                out.iter_mut().zip(ids).for_each(|(out, id)| *out = id);
            }
        }
    }
}

/// Writes a token file piece by piece.
pub(super) struct TokenWriter {
    out: BufWriter<NamedTempFile>,
    hash: Sha256,
    width: Width,
    tokens: u64,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// A new file in `folder`, which is created if need be.
    pub(super) fn create(folder: &Path, width: Width) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        sweep(folder, YOUNG);
        let file = NamedTempFile::with_prefix_in(UNFINISHED, folder).map_err(Error::io("create a file in", folder))?;
        // Where a file system has no locks, a file that is written to is not old.
        let _ = file.as_file().try_lock();
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&[0; HEADER_BYTES]).map_err(Error::io("write", folder))?;
        Ok(Self { out, hash: Sha256::new(), width, tokens: 0, bytes: Vec::new() })
    }

    /// Appends ids, all of them in or out of the loss.
    pub(super) fn push(&mut self, ids: &[u32], trained: bool) -> Result<()> {
        self.bytes.clear();
        match self.width {
            Width::Two => self.bytes.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            Width::Four => {
                let flag = if trained { 0 } else { CONTEXT_ONLY };
                self.bytes.extend(ids.iter().flat_map(|&id| (id | flag).to_le_bytes()));
            }
        }
        self.tokens += ids.len() as u64;
        self.hash.update(&self.bytes);
        self.out.write_all(&self.bytes).map_err(Error::io("write", self.out.get_ref().path()))
    }

    /// Completes the file and maps it; without a `path` it keeps no name and goes when the map does.
    pub(super) fn finish(mut self, text_bytes: u64, path: Option<&Path>) -> Result<TokenFile> {
        let temporary: PathBuf = self.out.get_ref().path().to_owned();
        let mut file = self.out.into_inner().map_err(|error| Error::io("write", &temporary)(error.into_error()))?;
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        header[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        header[24..32].copy_from_slice(&text_bytes.to_le_bytes());
        self.hash.update(&header[..32]);
        header[32..].copy_from_slice(&self.hash.finalize());
        file.rewind()
            .and_then(|()| file.write_all(&header))
            .and_then(|()| file.as_file().sync_all())
            .map_err(Error::io("write", &temporary))?;
        let file = match path {
            Some(path) => file.persist(path).map_err(|error| Error::io("create", path)(error.error))?,
            None => file.into_file(),
        };
        TokenFile::open(&file).map_err(|problem| Error::data(temporary.display(), problem))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(ids: &[u32], width: Width) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        let mut writer = TokenWriter::create(folder.path(), width).unwrap();
        ids.chunks(7).enumerate().for_each(|(i, ids)| writer.push(ids, i % 2 == 0).unwrap());
        writer.finish(99, Some(&path)).unwrap();
        (folder, path)
    }

    #[test]
    fn ids_survive_in_both_widths() {
        for (width, top) in [(Width::Two, 65_535), (Width::Four, 70_000)] {
            let ids: Vec<u32> = (0..20).chain([top]).collect();
            let (_folder, path) = written(&ids, width);
            let file = TokenFile::open(&File::open(path).unwrap()).unwrap();
            assert_eq!((file.len(), file.text_bytes()), (21, 99));
            let mut out = vec![0; 21];
            file.read(0, &mut out);
            let flagged = out.iter().filter(|&&id| id & CONTEXT_ONLY != 0).count();
            assert_eq!(flagged, if width == Width::Two { 0 } else { 7 });
            assert_eq!(out.iter().map(|id| id & !CONTEXT_ONLY).collect::<Vec<_>>(), ids);
        }
    }

    #[test]
    fn an_unfinished_file_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        TokenWriter::create(folder.path(), Width::Two).unwrap().push(&[1, 2], true).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_killed_writer_has_left_is_removed_and_a_living_ones_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let writer = TokenWriter::create(folder.path(), Width::Two).unwrap();
        let left = folder.path().join(".tokens-left");
        std::fs::write(&left, "half").unwrap();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        sweep(folder.path(), YOUNG);
        assert_eq!(files(), 2, "the file is too young to be called left");
        sweep(folder.path(), Duration::ZERO);
        assert!(!left.exists());
        writer.finish(0, Some(&folder.path().join("a.tokens"))).unwrap();
        assert_eq!(files(), 1);
    }

    proptest! {
        #[test]
        fn every_flipped_bit_and_every_cut_is_noticed(at: prop::sample::Index, bit in 0u8..8, keep: prop::sample::Index) {
            let (_folder, path) = written(&[1, 2, 3, 4], Width::Two);
            let good = std::fs::read(&path).unwrap();
            let mut bad = good.clone();
            let at = at.index(bad.len());
            bad[at] ^= 1 << bit;
            std::fs::write(&path, &bad).unwrap();
            prop_assert!(TokenFile::open(&File::open(&path).unwrap()).is_err());
            std::fs::write(&path, &good[..keep.index(good.len())]).unwrap();
            prop_assert!(TokenFile::open(&File::open(&path).unwrap()).is_err());
        }
    }
}
