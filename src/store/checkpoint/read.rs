//! Reads a checkpoint, after verifying every byte of it.

use super::manifest::{
    CONFIG, CheckpointKind, MASTERS, MOMENTS, Manifest, OPTIMIZER, STATE, TOKENIZER, WEIGHTS, missing_or,
};
use super::state::{MAX_BYTES, State};
use crate::digest::{Digest, MAX_SMALL_FILE, read_at_most};
use crate::engine::kernels::view;
use crate::engine::model::{ModelSpec, ParamSpec, Parameters};
use crate::engine::optim::{BlockwiseQuantized, QuantizedMoments};
use crate::store::adapter::{ADAPTER_WEIGHTS, AdapterFolder};
use crate::store::folder::{check_depth, matrix_of};
use crate::store::tensor_file::{Dtype, TensorFile, TensorView};
use crate::{Error, Result};
use candle_core::DType;
use rayon::prelude::*;
use std::cmp::Reverse;
use std::fmt;
use std::path::{Path, PathBuf};

/// The maximum number of blocks of a base that is not available.
const MAX_BLOCKS: usize = 1024;

/// A file of a checkpoint that does not match the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorruptFile {
    /// The file.
    pub path: PathBuf,
    /// The problem.
    pub message: String,
}

impl fmt::Display for CorruptFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.path.display(), self.message)
    }
}

impl From<CorruptFile> for Error {
    fn from(CorruptFile { path, message }: CorruptFile) -> Self {
        Self::Checkpoint { path, message }
    }
}

/// Checks every file of a step directory against its manifest; returns one entry for each damaged file.
pub fn verify(directory: &Path) -> Vec<CorruptFile> {
    verified(directory).err().unwrap_or_default()
}

/// The manifest of an undamaged step directory, or all damage.
pub(super) fn verified(directory: &Path) -> Result<Manifest, Vec<CorruptFile>> {
    let manifest = Manifest::read(directory).map_err(|error| match error {
        Error::Checkpoint { path, message } => vec![CorruptFile { path, message }],
        other => vec![CorruptFile { path: directory.to_path_buf(), message: other.to_string() }],
    })?;
    let check = |(name, expected): (&String, &Digest)| {
        let path = directory.join(name);
        corruption(&path, expected).map(|message| CorruptFile { path, message })
    };
    // The largest first, so that no thread begins it when the others are done.
    let mut files: Vec<_> = manifest.files.iter().collect();
    files.sort_by_key(|(_, digest)| Reverse(digest.bytes));
    let mut corrupt: Vec<_> = files.into_par_iter().with_max_len(1).filter_map(check).collect();
    corrupt.sort_by(|a, b| a.path.cmp(&b.path));
    if corrupt.is_empty() { Ok(manifest) } else { Err(corrupt) }
}

/// Whether a step directory is undamaged. Reads on this thread alone, because steps may be computed meanwhile.
pub(super) fn is_valid(directory: &Path) -> bool {
    let is_unchanged = |(name, expected): (&String, &Digest)| corruption(&directory.join(name), expected).is_none();
    Manifest::read(directory).is_ok_and(|manifest| manifest.files.iter().all(is_unchanged))
}

/// Checks a file against a digest; returns what is wrong. Does not read a file of the wrong size.
fn corruption(path: &Path, expected: &Digest) -> Option<String> {
    match std::fs::metadata(path) {
        Err(error) => return Some(missing_or(&error)),
        Ok(metadata) if !metadata.is_file() => return Some("it is not a file".into()),
        Ok(metadata) if metadata.len() != expected.bytes => {
            return Some(format!("it has {} bytes instead of {}", metadata.len(), expected.bytes));
        }
        Ok(_) => {}
    }
    match Digest::of_file(path) {
        Ok(found) if found == *expected => None,
        Ok(_) => Some("its contents changed since it was written (SHA-256 differs)".into()),
        Err(error) => Some(error.to_string()),
    }
}

/// A full checkpoint whose every file has been verified.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    state: State,
    spec: ModelSpec,
    weights: TensorFile,
    masters: TensorFile,
    optimizer: TensorFile,
}

impl Checkpoint {
    /// Verifies and opens a step directory. Fails with [`Error::Checkpoint`] naming the first file that is damaged, or
    /// saying that it holds weights only.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let manifest = verified(&path).map_err(|mut corrupt| Error::from(corrupt.swap_remove(0)))?;
        Self::read(path, manifest)
    }

    /// Opens a step directory that another process of the run has just verified.
    pub fn open_verified(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let manifest = Manifest::read(&path)?;
        Self::read(path, manifest)
    }

    /// Opens a step directory whose files have just been verified.
    pub(super) fn read(path: PathBuf, manifest: Manifest) -> Result<Self> {
        if manifest.kind != CheckpointKind::Full {
            let model = if manifest.has_adapters() { "its result of `finetune merge`" } else { "it" };
            let message = format!(
                "it contains only weights, so it cannot resume a run; start a new run with {model} as `--model`"
            );
            return Err(Error::checkpoint(&path, message));
        }
        let state = read_state(&path.join(STATE), &manifest)?;
        let file = path.join(CONFIG);
        let text = read_at_most(&file, MAX_SMALL_FILE)?;
        let spec = ModelSpec::from_json(&text, &file.display().to_string())?;
        let weights = TensorFile::open(path.join(if manifest.has_adapters() { ADAPTER_WEIGHTS } else { WEIGHTS }))?;
        // Adapters may be those of a few layers; of no model there are that many.
        let most = if manifest.has_adapters() { MAX_BLOCKS } else { weights.tensors().len() };
        check_depth(&spec, most, &file)?;
        let spec = if manifest.has_adapters() { AdapterFolder::open(&path)?.spec(&spec)? } else { spec };
        Ok(Self {
            spec,
            weights,
            masters: TensorFile::open(path.join(MASTERS))?,
            optimizer: TensorFile::open(path.join(OPTIMIZER))?,
            path,
            manifest,
            state,
        })
    }

    /// The step directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The figures of the run.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The path of the tokenizer.
    pub fn tokenizer(&self) -> PathBuf {
        self.path.join(TOKENIZER)
    }

    /// The compute-dtype weights under their Hugging Face names, including the prefix.
    pub fn weights(&self) -> &TensorFile {
        &self.weights
    }

    /// Reads the master weights, rounded to each tensor's type, into tensors of the same names and shapes, or into
    /// shards of them. Frozen modules have no masters, but weights.
    pub fn read_masters(&self, into: &Parameters) -> Result<()> {
        read_all(into, |name| self.master(name))
    }

    /// Reads the master weights of a parameter, starting at value `first`.
    pub fn read_part(&self, entry: &ParamSpec, first: usize, out: &mut [f32]) -> Result<()> {
        of_shape(self.master(&entry.name)?, entry)?.read_part(first, out)
    }

    fn master(&self, name: &str) -> Result<TensorView<'_>> {
        let weights = |name: &str| self.weights.get(&self.spec.family.stored_name(name));
        let frozen = || matrix_of(&self.spec, name, weights);
        self.masters.get(name).or_else(frozen).map_or_else(|| self.masters.require(name), Ok)
    }

    /// Reads Adam's first and second moments, and those in 8 bits, or the part of them that each entry has.
    pub fn read_moments(&self, wide: [&Parameters; 2], narrow: &mut [QuantizedMoments]) -> Result<()> {
        for (kind, into) in MOMENTS.iter().zip(wide) {
            read_all(into, |name| self.optimizer.require(&format!("{kind}.{name}")))?;
        }
        for QuantizedMoments { name, elements, range, moments } in narrow {
            for (kind, moment) in MOMENTS.iter().zip(moments) {
                let codes = self.optimizer.require(&format!("{kind}.{name}"))?;
                let absmax = self.optimizer.require(&format!("{kind}.{name}.absmax"))?.to_f32()?;
                let whole = codes.dtype == Dtype::U8
                    && codes.bytes.len() == *elements
                    && absmax.len() == BlockwiseQuantized::blocks(&(0..*elements)).len();
                let absmax = absmax.get(BlockwiseQuantized::blocks(range)).filter(|_| whole);
                let restored = absmax.map(|absmax| moment.restore(&codes.bytes[range.clone()], absmax)).transpose()?;
                if restored != Some(true) {
                    return Err(codes.error("it does not contain this parameter's 8-bit moments"));
                }
            }
        }
        Ok(())
    }
}

/// Fills every tensor of `into` from the stored tensor that `find` returns for its name.
fn read_all<'a>(into: &Parameters, find: impl Fn(&str) -> Result<TensorView<'a>>) -> Result<()> {
    for (index, (entry, tensor)) in into.layout().iter().zip(into.tensors()).enumerate() {
        let stored = of_shape(find(&entry.name)?, entry)?;
        let range = into.range(index);
        if tensor.dtype() == DType::F32 && range.len() == stored.len() {
            view::write_f32(tensor, |out| stored.read_f32(out))??;
        } else if !range.is_empty() {
            let values = stored.to_f32()?;
            view::write(tensor, |mut out| out.store(0, &values[range]))?;
        }
    }
    Ok(())
}

fn of_shape<'a>(stored: TensorView<'a>, entry: &ParamSpec) -> Result<TensorView<'a>> {
    if stored.shape != entry.shape {
        return Err(stored.error(format!("shape {:?}, but the model's is {:?}", stored.shape, entry.shape)));
    }
    Ok(stored)
}

fn read_state(path: &Path, manifest: &Manifest) -> Result<State> {
    let text = read_at_most(path, MAX_BYTES)?;
    let state = State::from_json(&text).map_err(|message| Error::checkpoint(path, message))?;
    if state.step != manifest.step {
        let message = format!("it is from step {}, but the manifest is from step {}", state.step, manifest.step);
        return Err(Error::checkpoint(path, message));
    }
    Ok(state)
}
