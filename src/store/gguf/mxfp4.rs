//! Tensors in MXFP4, a block type that candle's reader does not know.

use std::collections::BTreeSet;

/// The number of the type, and of the type that it is replaced by for the reader, FP32.
const MXFP4: u32 = 39;
const REPLACED_BY: u32 = 0;
/// Arrays within arrays of the metadata at most.
const MAX_DEPTH: usize = 4;

/// Bytes of a block: an exponent and 32 numbers.
pub(super) const BLOCK_BYTES: usize = 17;

/// Replaces the type of tensors in MXFP4, and returns their names; `None` if the header is damaged.
pub(super) fn replace_types(header: &mut [u8]) -> Option<BTreeSet<String>> {
    let mut header = HeaderReader { bytes: header, at: 4 };
    // Older versions have no such tensors.
    let _version = header.u32().filter(|version| [2, 3].contains(version))?;
    let (tensors, entries) = (header.u64()?, header.u64()?);
    for _ in 0..entries {
        header.text()?;
        let kind = header.u32()?;
        header.skip_value(kind, MAX_DEPTH)?;
    }
    let mut names = BTreeSet::new();
    for _ in 0..tensors {
        let name = header.text()?.to_vec();
        let dimensions = header.u32()?;
        header.take(u64::from(dimensions).checked_mul(8)?)?;
        if header.u32()? == MXFP4 {
            header.bytes[header.at - 4..header.at].copy_from_slice(&REPLACED_BY.to_le_bytes());
            names.insert(String::from_utf8(name).ok()?);
        }
        header.u64()?;
    }
    Some(names)
}

/// The beginning of a file, and the next byte to read.
struct HeaderReader<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl HeaderReader<'_> {
    fn take(&mut self, count: u64) -> Option<&[u8]> {
        let end = self.at.checked_add(usize::try_from(count).ok()?)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<&[u8]> {
        let count = self.u64()?;
        self.take(count)
    }

    fn skip_value(&mut self, kind: u32, depth: usize) -> Option<()> {
        match kind {
            0 | 1 | 7 => self.take(1).map(drop),
            2 | 3 => self.take(2).map(drop),
            4..=6 => self.take(4).map(drop),
            8 => self.text().map(drop),
            9 if depth > 0 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                (0..count).try_for_each(|_| self.skip_value(kind, depth - 1))
            }
            10..=12 => self.take(8).map(drop),
            _ => None,
        }
    }
}
