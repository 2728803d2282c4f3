//! The size and SHA-256 of files and streams, for manifests and downloads; and reading of whole files with a size
//! limit.

use crate::{Error, Result, untrusted};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

/// Limit on the size of configurations, templates and other small files, in bytes.
pub const MAX_SMALL_FILE: u64 = 16 << 20;

/// Reads a whole file or pipe; [`Error::Io`] if it has more than `limit` bytes.
pub fn read_at_most(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let read = || {
        let mut bytes = Vec::new();
        if untrusted::is_pipe(path) {
            untrusted::Pipe::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
        } else {
            untrusted::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
        }
        if bytes.len() as u64 > limit {
            let message = format!("it has more than the maximum of {limit} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(bytes)
    };
    read().map_err(Error::io("read", path))
}

/// The size and hash of a sequence of bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    /// The number of bytes.
    pub bytes: u64,
    /// Their SHA-256, 64 lower-case hexadecimal digits.
    pub sha256: String,
}

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(bytes)) }
    }

    /// The digest of a file.
    pub fn of_file(path: &Path) -> Result<Self> {
        Self::of_range(path, 0..u64::MAX)
    }

    /// The digest of the bytes of a file in `range`, as far as it has them.
    pub fn of_range(path: &Path, range: Range<u64>) -> Result<Self> {
        let mut file = untrusted::open(path).map_err(Error::io("open", path))?;
        file.seek(SeekFrom::Start(range.start)).map_err(Error::io("read", path))?;
        let mut file = BufReader::with_capacity(1 << 18, file.take(range.end.saturating_sub(range.start)));
        let mut digest = DigestWriter::new(io::sink());
        io::copy(&mut file, &mut digest).map_err(Error::io("read", path))?;
        Ok(digest.finish().1)
    }
}

/// Writes to `inner` and computes the digest of the written bytes.
#[derive(Debug)]
pub struct DigestWriter<W> {
    inner: W,
    bytes: u64,
    hash: Sha256,
}

impl<W: Write> DigestWriter<W> {
    /// A writer with an empty digest.
    pub fn new(inner: W) -> Self {
        Self { inner, bytes: 0, hash: Sha256::new() }
    }

    /// Returns the writer and the digest.
    pub fn finish(self) -> (W, Digest) {
        (self.inner, Digest { bytes: self.bytes, sha256: hex(&self.hash.finalize()) })
    }
}

impl<W: Write> Write for DigestWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.inner.write(bytes)?;
        self.bytes += taken as u64;
        self.hash.update(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// The first digits of a hash in a message.
pub(crate) fn short_hash(sha256: &str) -> &str {
    sha256.get(..12).unwrap_or(sha256)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-2, appendix B.1.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn known_value_for_any_split_of_the_bytes() {
        assert_eq!(Digest::of(b"abc"), Digest { bytes: 3, sha256: ABC.into() });

        let mut writer = DigestWriter::new(Vec::new());
        for byte in b"abc" {
            writer.write_all(&[*byte]).unwrap();
        }
        let (written, digest) = writer.finish();
        assert_eq!((written.as_slice(), digest.sha256.as_str()), (b"abc".as_slice(), ABC));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, b"abc").unwrap();
        assert_eq!(Digest::of_file(&path).unwrap(), digest);
    }

    #[test]
    fn bytes_rejected_by_the_inner_writer_do_not_count() {
        let mut room = [0_u8; 3];
        let mut writer = DigestWriter::new(room.as_mut_slice());
        assert!(writer.write_all(b"abcdef").is_err());
        assert_eq!(writer.finish().1, Digest { bytes: 3, sha256: ABC.into() });
    }
}
