//! Named tensors in a safetensors file: a reader that checks the header before it uses it, and a streaming writer.
//!
//! The format is 8 bytes of header length (little-endian), a JSON header of `name → {dtype, shape, data_offsets}`, and
//! the values, little-endian, in row-major order: <https://github.com/huggingface/safetensors#format>. Files are
//! untrusted, so headers are checked: see [`Header::parse`].

mod header;
mod write;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::{Mmap, UncheckedAdvice};
use rayon::prelude::*;
pub use safetensors::Dtype;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use self::header::{Entry, Header, MAX_HEADER_BYTES};
pub use self::write::{write_header, write_tensors, write_values};
use crate::{Error, Result, untrusted};

/// Values that a thread reads at a time.
const VALUES_PER_TASK: usize = 1 << 18;

/// A memory-mapped safetensors file. Access to values reads the disk.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl TensorFile {
    /// Maps the file and checks its header. Fails with [`Error::Io`] if it cannot be read, [`Error::Model`] with the
    /// file and what is wrong with its header.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = untrusted::open(&path).map_err(Error::io("open", &path))?;
        // SAFETY: the map is read-only and outlives the values borrowed from it. Another process could change the file
        // meanwhile, but finetune never modifies a finished file: it writes a new one and renames it.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?;
        let header = Header::parse(&map).map_err(|message| Error::model(path.display(), message))?;
        Ok(Self { path, map, header })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors in the order of their values.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.header.entries().iter().map(|entry| self.view(entry))
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        self.header.get(name).map(|entry| self.view(entry))
    }

    /// The tensor called `name`, or an error that it is missing.
    pub fn require(&self, name: &str) -> Result<TensorView<'_>> {
        self.get(name).ok_or_else(|| Error::model(self.path.display(), format!("tensor `{name}` is missing")))
    }

    fn view<'a>(&'a self, entry: &'a Entry) -> TensorView<'a> {
        TensorView {
            file: &self.path,
            map: &self.map,
            begin: entry.begin,
            name: &entry.name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.map[entry.begin..entry.end],
        }
    }
}

/// One tensor of a [`TensorFile`].
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    file: &'a Path,
    map: &'a Mmap,
    /// The offset of its values in the file, in bytes.
    begin: usize,
    /// Its name in the file.
    pub name: &'a str,
    /// The type of its elements on disk.
    pub dtype: Dtype,
    /// Its dimensions; none for a scalar.
    pub shape: &'a [usize],
    /// Its values: row-major, little-endian, not necessarily aligned.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// Element `place` of the first dimension, if that has `count` elements; otherwise the whole tensor.
    #[must_use]
    pub fn matrix(self, place: usize, count: usize) -> Self {
        match self.shape {
            [first, shape @ ..] if *first == count && place < count => {
                let size = self.bytes.len() / count;
                let range = place * size..(place + 1) * size;
                Self { begin: self.begin + range.start, shape, bytes: &self.bytes[range], ..self }
            }
            _ => self,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Widens F32, F16 or BF16 values, all exactly, into `out`. Fails with [`Error::Model`] naming the tensor, if its
    /// dtype or length does not match.
    pub fn read_f32(&self, out: &mut [f32]) -> Result<()> {
        if out.len() != self.len() {
            return Err(self.error(format!(
                "shape {:?} does not match the {} requested values",
                self.shape,
                out.len()
            )));
        }
        self.read_part(0, out)
    }

    /// Like [`TensorView::read_f32`], but fills `out` starting at value `first`.
    pub fn read_part(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let size = match self.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => return Err(self.error(format!("dtype {other} is not one of F32, F16, BF16"))),
        };
        let range = first * size..(first + out.len()) * size;
        let Some(bytes) = self.bytes.get(range.clone()) else {
            return Err(self.error(format!("shape {:?} has no values {first}..{}", self.shape, first + out.len())));
        };
        out.par_chunks_mut(VALUES_PER_TASK).zip(bytes.par_chunks(size * VALUES_PER_TASK)).for_each(|(out, bytes)| {
            match self.dtype {
                Dtype::F16 => upcast(bytes, out, f16::from_le_bytes, HalfFloatSliceExt::convert_to_f32_slice),
                Dtype::BF16 => upcast(bytes, out, bf16::from_le_bytes, HalfFloatSliceExt::convert_to_f32_slice),
                _ => {
                    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *value = f32::from_le_bytes(*bytes);
                    }
                }
            }
        });
        self.release(range);
        Ok(())
    }

    /// Releases the pages that were read. Otherwise they count as memory of this process until the file is closed, in
    /// addition to the tensors that they were read into.
    pub(super) fn release(&self, range: Range<usize>) {
        // SAFETY: the map is of a file and read-only, so that a page that is let go has the same bytes when it is read
        // again. A failure costs memory and nothing else.
        _ = unsafe {
            self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, self.begin + range.start, range.len())
        };
    }

    /// Like [`TensorView::read_f32`], into a new vector.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        // Limited by the file's bytes, so that an unsupported dtype cannot allocate more.
        let mut values = vec![0.0; self.len().min(self.bytes.len())];
        self.read_f32(&mut values)?;
        Ok(values)
    }

    /// An [`Error::Model`] that names the file and this tensor.
    pub fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::model(self.file.display(), format!("tensor `{}`: {message}", self.name))
    }
}

/// Widens 16-bit values through a small aligned buffer, because a file's bytes may be unaligned.
fn upcast<T: Copy + Default>(bytes: &[u8], out: &mut [f32], from: fn([u8; 2]) -> T, convert: fn(&[T], &mut [f32])) {
    const BLOCK: usize = 1024;
    let mut block = [T::default(); BLOCK];
    for (out, bytes) in out.chunks_mut(BLOCK).zip(bytes.as_chunks::<2>().0.chunks(BLOCK)) {
        for (value, bytes) in block.iter_mut().zip(bytes) {
            *value = from(*bytes);
        }
        convert(&block[..bytes.len()], out);
    }
}
