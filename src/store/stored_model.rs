//! A model on disk: a Hugging Face folder or a GGUF file.

use super::aux_files::AuxFiles;
use super::{GgufModel, ModelFolder};
use crate::data::Tokenizer;
use crate::engine::model::{ModelSpec, ParamSpec};
use crate::{Error, Result};
use std::ffi::OsStr;
use std::path::Path;

/// A model in which every tensor was found with the right shape.
#[derive(Debug)]
pub enum StoredModel {
    /// A Hugging Face folder.
    Folder(Box<ModelFolder>),
    /// A GGUF file.
    Gguf(Box<GgufModel>),
}

impl StoredModel {
    /// Opens a folder or a file.
    pub fn open(path: &Path) -> Result<Self> {
        if is_gguf(path) {
            return Ok(Self::Gguf(Box::new(GgufModel::open(path)?)));
        }
        if path.exists() && !path.is_dir() {
            return Err(Error::model(format!("`{}`", path.display()), NOT_A_MODEL_FILE));
        }
        Ok(Self::Folder(Box::new(ModelFolder::open(path)?)))
    }

    /// The shape of the model at `path`; a folder does not need weights.
    pub fn shape(path: &Path) -> Result<ModelSpec> {
        if path.is_dir() { ModelFolder::read_config(path) } else { Ok(Self::open(path)?.spec().clone()) }
    }

    /// The path of the folder or file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::Gguf(model) => model.gguf.path(),
        }
    }

    /// The model's shape; `tied` follows the tensors.
    pub fn spec(&self) -> &ModelSpec {
        match self {
            Self::Folder(folder) => folder.spec(),
            Self::Gguf(model) => model.spec(),
        }
    }

    /// The model's tokenizer, if it has one.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        match self {
            Self::Folder(folder) => ModelFolder::tokenizer_in(folder.path()).map(Tokenizer::from_file).transpose(),
            Self::Gguf(model) => model.gguf.tokenizer().map(Some),
        }
    }

    /// The small files stored with its weights.
    pub fn aux_files(&self) -> Result<AuxFiles> {
        match self {
            Self::Folder(folder) => AuxFiles::of_folder(folder.path()),
            Self::Gguf(model) => model.aux_files(),
        }
    }

    /// The GGUF file, whose matrices may be in blocks.
    pub fn gguf(&self) -> Option<&GgufModel> {
        match self {
            Self::Folder(_) => None,
            Self::Gguf(model) => Some(model),
        }
    }

    /// Reads a parameter into `out`, converted to FP32; or some rows of a token embedding, starting at value `first`.
    pub fn read_part(&self, entry: &ParamSpec, first: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Self::Folder(folder) => folder.read_part(&entry.name, first, out),
            Self::Gguf(model) => model.read_part(entry, first, out),
        }
    }
}

/// The message for a file that is not GGUF.
pub const NOT_A_MODEL_FILE: &str =
    "this is not a GGUF file; use a `.gguf` file, or the folder with `config.json` and the weights";

/// Whether `path` is a file with the extension `.gguf`.
pub fn is_gguf(path: &Path) -> bool {
    has_gguf_extension(path) && path.is_file()
}

/// Whether a name or path ends in `.gguf`, in letters of any case.
pub fn has_gguf_extension(name: impl AsRef<OsStr>) -> bool {
    name.as_ref().as_encoded_bytes().to_ascii_lowercase().ends_with(b".gguf")
}
