//! The sources of a model's weights and of adapters.

use super::adapter::AdapterFolder;
use super::base::{AdaptedModel, check_range};
use super::checkpoint::{Base, Checkpoint};
use super::{AuxFiles, GgufModel, StoredModel};
use crate::data::Tokenizer;
use crate::digest::short_hash;
use crate::engine::kernels::view;
use crate::engine::model::{ModelSpec, ParamSpec, Parameters, sample_init};
use crate::precision::Dtype;
use crate::{Error, Result};
use candle_core::Device;
use std::path::Path;

/// The source of a model's weights.
#[derive(Debug)]
pub enum WeightSource {
    /// Random values of this seed.
    Random(u64),
    /// A model's files.
    Stored(StoredModel),
    /// A full checkpoint, which has the FP32 masters.
    Checkpoint(Box<Checkpoint>),
}

impl WeightSource {
    /// The path of the files; `None` for random values.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Random(_) => None,
            Self::Stored(model) => Some(model.path()),
            Self::Checkpoint(checkpoint) => Some(checkpoint.path()),
        }
    }

    /// The tokenizer stored with the weights, if there is one.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        match self {
            Self::Random(_) => Ok(None),
            Self::Stored(model) => model.tokenizer(),
            Self::Checkpoint(checkpoint) => Tokenizer::from_file(checkpoint.tokenizer()).map(Some),
        }
    }

    /// The small files stored with the weights.
    pub fn aux_files(&self) -> Result<AuxFiles> {
        match self {
            Self::Random(_) => Ok(AuxFiles::default()),
            Self::Stored(model) => model.aux_files(),
            Self::Checkpoint(checkpoint) => AuxFiles::of_folder(checkpoint.path()),
        }
    }

    /// Reads every parameter into the FP32 tensors of `into`.
    pub fn read(&self, into: &Parameters) -> Result<()> {
        for (entry, tensor) in into.layout().iter().zip(into.tensors()) {
            view::write_f32(tensor, |out| self.read_part(entry, 0, out))??;
        }
        Ok(())
    }

    /// Reads values of a parameter in FP32, starting at value `first`: all of them, or some rows of a table of tokens.
    pub(super) fn read_part(&self, entry: &ParamSpec, first: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Self::Random(seed) => {
                sample_init(entry, *seed, first, out);
                Ok(())
            }
            Self::Stored(model) => model.read_part(entry, first, out),
            Self::Checkpoint(checkpoint) => checkpoint.read_part(entry, first, out),
        }
    }

    /// The GGUF file, whose matrices may be in blocks.
    pub(super) fn gguf(&self) -> Option<&GgufModel> {
        if let Self::Stored(model) = self { model.gguf() } else { None }
    }
}

/// The source of adapters.
#[derive(Debug)]
pub enum AdapterSource {
    /// A folder in PEFT's format.
    Folder(Box<AdapterFolder>),
    /// A full checkpoint, which has the FP32 masters.
    Checkpoint(Box<Checkpoint>),
}

impl AdapterSource {
    /// Opens a folder in PEFT's format.
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(Self::Folder(Box::new(AdapterFolder::open(folder)?)))
    }

    /// The path of the folder or checkpoint.
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder.path(),
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }

    /// The base that they were trained over, if it is known.
    pub fn base(&self) -> Option<Base> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.state().base.clone(),
            Self::Folder(folder) => folder.base().cloned(),
        }
    }

    /// The seed of a random base.
    pub fn seed(&self) -> Option<u64> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint.state().seed),
            Self::Folder(_) => None,
        }
    }

    /// `base` with these adapters.
    pub fn spec(&self, base: &ModelSpec) -> Result<ModelSpec> {
        match self {
            Self::Folder(folder) => folder.spec(base),
            Self::Checkpoint(checkpoint) => {
                let spec = ModelSpec { lora: checkpoint.spec().lora.clone(), ..base.clone() };
                if spec.base_parameters() == (ModelSpec { lora: None, ..checkpoint.spec().clone() }).base_parameters() {
                    return Ok(spec);
                }
                Err(Error::checkpoint(
                    checkpoint.path(),
                    "its adapters were trained on a base model with a different shape",
                ))
            }
        }
    }

    /// Loads them in FP32 over the weights of `base` in `compute`, on the CPU. With `in_blocks`, the matrices of a GGUF
    /// file stay in their blocks. `origin` is the base's name, used in error texts. Fails with [`Error::Model`] if the
    /// base is not the one that they were trained over.
    pub fn load(
        &self,
        (base, weights): (&ModelSpec, &WeightSource),
        compute: Dtype,
        in_blocks: bool,
        origin: &str,
    ) -> Result<(ModelSpec, Parameters)> {
        let spec = self.spec(base)?;
        let AdaptedModel { parameters, sha256 } =
            weights.load_adapters(&spec, compute, 0, in_blocks, &Device::Cpu, origin)?;
        if let Some(Base { name, sha256: wanted, .. }) = self.base().filter(|base| !base.sha256.is_empty())
            && wanted != sha256
        {
            let message = format!(
                "the adapters of `{}` were trained on a different base model: `{name}` with SHA-256 {}…, but this one has {}…",
                self.path().display(),
                short_hash(&wanted),
                short_hash(&sha256)
            );
            return Err(Error::model(origin, message));
        }
        match self {
            Self::Folder(folder) => folder.read_parameters(&spec, &parameters)?,
            Self::Checkpoint(checkpoint) => checkpoint.read_masters(&parameters)?,
        }
        check_range(&parameters, &self.path().display().to_string(), compute)?;
        Ok((spec, parameters))
    }
}
