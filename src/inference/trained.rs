//! Opens a trained model: a Hugging Face folder, a checkpoint, or the newest good checkpoint of a run.

use crate::data::{Reading, Tokenizer};
use crate::engine::device::OpenDevice;
use crate::engine::kernels::view;
use crate::engine::model::{Decoder, ModelSpec, Parameters, candle_dtype};
use crate::precision::{Dtype, PrecisionPolicy};
use crate::store::base::check_range;
use crate::store::checkpoint::{Checkpoint, Damage, newest_good, verify};
use crate::store::{Companions, StoredModel};
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::path::{Path, PathBuf};

/// A model with its tokenizer, before its weights are read.
#[derive(Debug)]
pub struct TrainedModel {
    /// The folder of the weights, or the GGUF file.
    pub path: PathBuf,
    /// The model's shape.
    pub config: ModelSpec,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The files beside its weights.
    pub companions: Companions,
    /// Damaged newer checkpoints of the run, which were skipped.
    pub damaged: Vec<Damage>,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Stored(StoredModel),
    /// A full checkpoint, which has the FP32 masters.
    Checkpoint(Box<Checkpoint>),
}

impl TrainedModel {
    /// Opens `path`: a folder with `config.json`, a GGUF file, a `step-*` or `weights-*` folder (verified first), or a run's
    /// folder. `tokenizer` replaces the model's own.
    ///
    /// # Errors
    /// [`Error::Model`] or [`Error::Checkpoint`] if there is no model, it is damaged, or the tokenizer does not fit.
    pub fn open(path: &Path, tokenizer: Option<&Path>) -> Result<Self> {
        if !path.exists() {
            return Err(Error::model(format!("`{}`", path.display()), "there is no such folder or file"));
        }
        let mut damaged = Vec::new();
        let weights = if path.join("manifest.json").is_file() {
            open_step(path)?
        } else if path.join("config.toml").is_file() {
            let found = newest_good(path)?;
            damaged = found.damaged;
            Weights::Checkpoint(Box::new(found.checkpoint))
        } else {
            Weights::Stored(StoredModel::open(path)?)
        };
        let (path, config) = match &weights {
            Weights::Stored(model) => (model.path(), model.config()),
            Weights::Checkpoint(checkpoint) => (checkpoint.path(), checkpoint.config()),
        };
        let (path, config) = (path.to_path_buf(), config.clone());
        let own = match (tokenizer, &weights) {
            (Some(file), _) => Some(Tokenizer::from_file(file)?),
            (None, Weights::Stored(model)) => model.tokenizer()?,
            (None, Weights::Checkpoint(checkpoint)) => Some(Tokenizer::from_file(checkpoint.tokenizer())?),
        };
        let companions = match &weights {
            Weights::Stored(model) => model.companions()?,
            Weights::Checkpoint(checkpoint) => Companions::of_folder(checkpoint.path())?,
        };
        let file = match tokenizer {
            Some(file) => file.to_path_buf(),
            None if path.is_dir() => path.join("tokenizer.json"),
            None => path.clone(),
        };
        let Some(tokenizer) = own else {
            let message = "it has no `tokenizer.json`; give one with `--tokenizer FILE`";
            return Err(Error::model(path.display(), message));
        };
        check_vocabulary(&tokenizer, &file, &config)?;
        Ok(Self { path, config, tokenizer, companions, damaged, weights })
    }

    /// The tokens that end a text: those of the configuration, of `generation_config.json` and of the tokenizer.
    pub fn ends(&self) -> Result<Vec<u32>> {
        let mut ends = self.config.eos_token_ids.clone();
        ends.extend(self.companions.eos_ids()?);
        ends.extend(self.tokenizer.eos_id());
        Ok(ends)
    }

    /// How text is read for it, without a configuration: rows by their usual fields, conversations by its template.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Model`] where the files about conversations cannot be read.
    pub fn reading(&self) -> Result<Reading> {
        let chat = self.companions.chat()?.format(&self.path.display().to_string(), &self.tokenizer);
        Ok(Reading { chat, ..Reading::default() })
    }

    /// The weights in FP32: a checkpoint's masters, or the folder's weights widened.
    pub fn masters(&self) -> Result<Parameters> {
        let masters = Parameters::zeros(&self.config.parameters(), DType::F32, &Device::Cpu)?;
        match &self.weights {
            Weights::Stored(model) => model.read_parameters(&masters)?,
            Weights::Checkpoint(checkpoint) => checkpoint.read_masters(&masters)?,
        }
        Ok(masters)
    }

    /// The weights rounded to `dtype`.
    ///
    /// # Errors
    /// [`Error::Model`] naming a tensor with infinities or NaNs, or with values beyond the range of `dtype`.
    pub fn weights(&self, dtype: Dtype) -> Result<Parameters> {
        let masters = self.masters()?;
        check_range(&masters, &self.path.display().to_string(), dtype)?;
        if dtype == Dtype::F32 {
            return Ok(masters);
        }
        let weights = masters.zeros_like(candle_dtype(dtype))?;
        for (master, weight) in masters.tensors().iter().zip(weights.tensors()) {
            view::copy(master, weight)?;
        }
        Ok(weights)
    }

    /// The model, and its weights in the policy's compute type, on an open device.
    pub fn load(&self, policy: PrecisionPolicy, open: &OpenDevice) -> Result<(Decoder, Parameters)> {
        let mut weights = self.weights(policy.compute)?;
        if !open.device.is_cpu() {
            let there = Parameters::zeros(weights.layout(), candle_dtype(policy.compute), &open.device)?;
            for (from, to) in weights.tensors().iter().zip(there.tensors()) {
                to.slice_set(&from.to_device(&open.device)?, 0, 0)?;
            }
            weights = there;
        }
        Ok((Decoder::new(&self.config, &weights, open.kernels.clone())?, weights))
    }
}

fn open_step(path: &Path) -> Result<Weights> {
    let is_full = path.join("state.json").exists() || path.join("master.safetensors").exists();
    if is_full {
        return Ok(Weights::Checkpoint(Box::new(Checkpoint::open(path)?)));
    }
    match verify(path).into_iter().next() {
        Some(damage) => Err(damage.into()),
        None => Ok(Weights::Stored(StoredModel::open(path)?)),
    }
}

fn check_vocabulary(tokenizer: &Tokenizer, file: &Path, config: &ModelSpec) -> Result<()> {
    let (tokens, rows) = (tokenizer.vocab_size(), config.vocab_size);
    if tokens <= rows {
        return Ok(());
    }
    Err(Error::model(file.display(), format!("its {tokens} tokens do not fit the model, whose vocabulary has {rows}")))
}
