//! GGUF files: llama.cpp's format for a whole model, weights, shape, tokenizer and chat template in one file.
//!
//! candle's reader parses the file without checking every number, so everything that reading a tensor relies on is
//! checked here when the file is opened: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod architectures;
mod model;
mod mxfp4;
mod rotary;
mod tokenizer;
mod value_heads;
mod vocabulary;

pub use architectures::{GgufHeader, GgufMetadata, gguf_offset};
pub use model::GgufModel;
pub use rotary::{ROPE_FACTORS, RopeFactors};
pub(crate) use vocabulary::{END_KEYS, vocabulary};

use self::model::json_of;
use self::mxfp4::BLOCK_BYTES;
use super::mxfp4::{BLOCK, HALVES, dequantize};
use crate::data::{Tokenizer, catch_panic};
use crate::{Error, Result};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::{CpuStorage, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Metadata in use takes a third of this, with a vocabulary of 262,144 tokens. A value takes up to 32 times its bytes
/// in memory.
const MAX_METADATA: u64 = 32 << 20;

/// candle multiplies a tensor's dimensions without looking for an overflow.
const MAX_ELEMENTS: usize = 1 << 40;

/// A GGUF file whose every tensor lies within it.
pub struct Gguf {
    path: PathBuf,
    file: Mutex<File>,
    content: Content,
    /// The names of tensors in MXFP4; `content` has another type for them.
    mxfp4: BTreeSet<String>,
}

impl Gguf {
    /// Opens the file and checks it from end to end, without reading values. Fails with [`Error::Io`] if it cannot be
    /// read; [`Error::Model`] with the first problem of the file: not GGUF, truncated, metadata of absurd sizes, a
    /// block type that is not built, a tensor that does not fit.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let about = file.metadata().map_err(Error::io("read", &path))?;
        if !about.is_file() {
            return Err(Error::model(path.display(), "it is not a regular file"));
        }
        let mut start = BufReader::new(LimitedReader { file: &file, left: MAX_METADATA, limit_hit: false });
        // A file can make candle's reader divide by zero.
        let content =
            catch_panic(|| Content::read(&mut start)).unwrap_or_else(|| candle_core::bail!("its values are invalid"));
        let limit_hit = start.get_ref().limit_hit;
        let mut mxfp4 = BTreeSet::new();
        let content = match content {
            Err(error) if error.to_string().contains(UNKNOWN_MXFP4) => read_with_mxfp4(&file, &mut mxfp4),
            other => other,
        };
        let content = content.map_err(|error| match error {
            _ if limit_hit => Error::model(path.display(), format!("its metadata exceeds {MAX_METADATA} bytes")),
            error if is_end_of_file(&error) => {
                Error::model(path.display(), "it is truncated: it ends within its metadata; download or copy it again")
            }
            error => {
                let error = Error::from(error).to_string();
                let unknown =
                    UNKNOWN_TYPES.into_iter().find(|(number, _)| error.ends_with(&format!("tensor {number}")));
                let why = unknown.map_or(error, |(_, name)| {
                    format!("it has tensors of the type {name}; take one of Q8_0, Q6_K, Q5_K, Q4_K or 16 bits")
                });
                Error::model(path.display(), format!("not a usable GGUF file: {why}"))
            }
        })?;
        let gguf = Self { path, file: Mutex::new(file), content, mxfp4 };
        gguf.check(about.len())?;
        match gguf.count("split.count")? {
            Some(parts) if parts > 1 => {
                Err(gguf.error(format!("it is one of {parts} parts; join them with `llama-gguf-split --merge`")))
            }
            _ => Ok(gguf),
        }
    }

    fn check(&self, bytes: u64) -> Result<()> {
        let names: BTreeMap<_, _> = self.content.tensor_infos.iter().collect();
        for (name, info) in names {
            let fail = |message: String| Err(self.error(format!("tensor `{}`: {message}", name.escape_debug())));
            let dims = info.shape.dims();
            let count = dims.iter().try_fold(1_usize, |count, &dim| count.checked_mul(dim));
            let Some(count) = count.filter(|&count| count <= MAX_ELEMENTS) else {
                return fail(format!("its shape {dims:?} overflows"));
            };
            if count == 0 {
                return fail(format!("its shape {dims:?} has no elements"));
            }
            let (block, block_bytes) = self.block(name, info.ggml_dtype);
            if !dims.last().unwrap_or(&1).is_multiple_of(block) {
                return fail(format!(
                    "its rows do not divide into blocks of {block} ({:?}): shape {dims:?}",
                    info.ggml_dtype
                ));
            }
            let size = (count / block * block_bytes) as u64;
            let end = self.content.tensor_data_offset.checked_add(info.offset).and_then(|at| at.checked_add(size));
            if end.is_none_or(|end| end > bytes) {
                let at = info.offset;
                return fail(format!(
                    "its {size} bytes starting at {at} exceed the file: truncated; download or copy it again"
                ));
            }
        }
        Ok(())
    }

    /// The numbers and the bytes of a block of a tensor.
    fn block(&self, name: &str, dtype: GgmlDType) -> (usize, usize) {
        if self.mxfp4.contains(name) { (BLOCK, BLOCK_BYTES) } else { (dtype.block_size(), dtype.type_size()) }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names, block types and shapes of all tensors, in no particular order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, GgmlDType, &[usize])> {
        self.content.tensor_infos.iter().map(|(name, info)| (name.as_str(), info.ggml_dtype, info.shape.dims()))
    }

    /// A tensor, dequantized to FP32 on the CPU; the outermost dimension comes first. Fails with [`Error::Model`] if
    /// there is none of this name, or its block type cannot be dequantized.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let shape = &self.info(name)?.shape;
        if self.mxfp4.contains(name) {
            let values = self.part(name, 0..shape.elem_count())?;
            return Ok(Tensor::from_slice(values.as_slice::<f32>()?, shape.dims(), &Device::Cpu)?);
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = || self.content.tensor(&mut *file, name, &Device::Cpu)?.dequantize(&Device::Cpu);
        read().map_err(|error| self.error(format!("tensor `{name}`: {}", Error::from(error))))
    }

    /// The elements `range` of a tensor, dequantized to FP32; they are whole blocks.
    fn part(&self, name: &str, range: Range<usize>) -> Result<CpuStorage> {
        let elements = range.len();
        let dtype = self.info(name)?.ggml_dtype;
        let blocks = self.blocks(name, range)?;
        if self.mxfp4.contains(name) {
            let numbers = |block: &[u8]| dequantize(block[0], &block[1..], HALVES);
            return Ok(CpuStorage::F32(blocks.chunks_exact(BLOCK_BYTES).flat_map(numbers).collect()));
        }
        let read = || dtype.from_data(blocks.into()).dequantize(elements);
        read().map_err(|error| self.error(format!("tensor `{name}`: {}", Error::from(error))))
    }

    /// The blocks of elements `range` of a tensor as they are in the file.
    fn blocks(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let info = self.info(name)?;
        let (block, size) = self.block(name, info.ggml_dtype);
        let [first, count] = [range.start, range.len()].map(|elements| elements / block);
        let mut blocks = vec![0; count * size];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(self.content.tensor_data_offset + info.offset + (first * size) as u64))
            .and_then(|_| file.read_exact(&mut blocks))
            .map_err(Error::io("read", &self.path))?;
        Ok(blocks)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        let info = self.content.tensor_infos.get(name);
        info.ok_or_else(|| self.error(format!("tensor `{name}` is missing")))
    }

    /// `general.architecture`: `llama`, `qwen2`, ….
    pub fn architecture(&self) -> Result<&str> {
        self.text("general.architecture")
    }

    /// A text of the metadata.
    pub fn text(&self, key: &str) -> Result<&str> {
        match self.content.metadata.get(key) {
            Some(Value::String(text)) => Ok(text),
            other => Err(self.type_error(key, "a string", other)),
        }
    }

    /// An integer of any type in the metadata; `None` if the key is missing.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.content.metadata.get(key) else { return Ok(None) };
        let count = json_of(value).as_u64().and_then(|count| usize::try_from(count).ok());
        count.map(Some).ok_or_else(|| self.type_error(key, "a count", Some(value)))
    }

    /// A boolean in the metadata; `None` if the key is missing.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.type_error(key, "true or false", Some(other))),
        }
    }

    /// A list in the metadata, each element converted by `read`; `None` if the key is missing.
    fn list<'a, T>(&'a self, key: &str, what: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<Vec<T>>> {
        let Some(value) = self.content.metadata.get(key) else { return Ok(None) };
        let list = match value {
            Value::Array(values) => values.iter().map(read).collect(),
            _ => None,
        };
        list.map(Some).ok_or_else(|| self.type_error(key, what, Some(value)))
    }

    /// The template that writes a chat, in Jinja.
    pub fn chat_template(&self) -> Option<&str> {
        self.text("tokenizer.chat_template").ok()
    }

    /// The tokens that end a text or a turn.
    pub fn eos_ids(&self) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for key in END_KEYS {
            let id = self.token_id(&format!("tokenizer.ggml.{key}"))?;
            ids.extend(id.filter(|id| !ids.contains(id)));
        }
        Ok(ids)
    }

    fn token_id(&self, key: &str) -> Result<Option<u32>> {
        Ok(self.count(key)?.and_then(|id| u32::try_from(id).ok()))
    }

    /// The tokenizer, in Hugging Face's terms. Fails with [`Error::Model`] for a kind that is not built, or parts that
    /// contradict each other.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        // A separate statement, so that the tree is dropped before its text is read.
        let json = tokenizer::json(self)?.to_string().into_bytes();
        Tokenizer::from_json(json, &self.path.display().to_string())
    }

    fn type_error(&self, key: &str, wanted: &str, found: Option<&Value>) -> Error {
        let found = found.map_or_else(|| "missing".to_owned(), |value| format!("of type {:?}", value.value_type()));
        self.error(format!("metadata `{key}` must be {wanted}, but is {found}"))
    }

    fn error(&self, message: impl Into<String>) -> Error {
        Error::model(self.path.display(), message.into())
    }
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gguf({}, {} tensors)", self.path.display(), self.content.tensor_infos.len())
    }
}

/// The numbers of published block types that candle does not have.
const UNKNOWN_TYPES: [(u32, &str); 11] = [
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
];

/// candle's error for a tensor in MXFP4.
const UNKNOWN_MXFP4: &str = "unknown dtype for tensor 39";

/// Reads the metadata of a file with tensors in MXFP4, and their names.
fn read_with_mxfp4(mut file: &File, names: &mut BTreeSet<String>) -> candle_core::Result<Content> {
    let mut header = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(MAX_METADATA).read_to_end(&mut header)?;
    *names = mxfp4::replace_types(&mut header).unwrap_or_default();
    catch_panic(|| Content::read(&mut io::Cursor::new(&header)))
        .unwrap_or_else(|| candle_core::bail!("its values are invalid"))
}

/// The beginning of a file: an error, where more of it is read.
struct LimitedReader<'a> {
    file: &'a File,
    left: u64,
    limit_hit: bool,
}

impl Read for LimitedReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !buffer.is_empty() {
            self.limit_hit = true;
            return Err(io::Error::other("too much metadata"));
        }
        let len = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.file.read(&mut buffer[..len])?;
        self.left -= read as u64;
        Ok(read)
    }
}

impl Seek for LimitedReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

fn is_end_of_file(error: &candle_core::Error) -> bool {
    match error {
        candle_core::Error::Io(error) => error.kind() == io::ErrorKind::UnexpectedEof,
        candle_core::Error::WithBacktrace { inner, .. } => is_end_of_file(inner),
        _ => false,
    }
}
