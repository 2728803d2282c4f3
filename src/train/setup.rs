//! From a configuration to something that can train: the model, its tokenizer, its text, the engine.

use crate::data::{Dataset, Source, Tokenizer};
use crate::kernels::view;
use crate::model::{Gpt2, Gpt2Config, ModelFolder, Parameters, Workspace};
use crate::optim::{Gradients, Survey};
use crate::precision::GradScaler;
use crate::train::config::{Config, Init};
use crate::train::state::TrainState;
use crate::train::step::Engine;
use crate::trained::check_range;
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::path::Path;

/// A model as its source describes it, before any weight is read.
#[derive(Debug)]
pub struct ModelSource {
    /// What the user calls it.
    pub name: String,
    /// Its shape, with the run's dropout rates.
    pub config: Gpt2Config,
    /// Its tokenizer, or the one given in its place.
    pub tokenizer: Tokenizer,
    /// Where its weights are; `None` for random ones.
    folder: Option<ModelFolder>,
}

impl ModelSource {
    /// Finds the model of a configuration.
    pub fn open(config: &Config) -> Result<Self> {
        let given = config.tokenizer.as_ref().map(Tokenizer::from_file).transpose()?;
        let named = Gpt2Config::named(&config.model);
        let (mut shape, own_tokenizer, folder) = if config.model == "tiny" {
            let shape = named.ok_or_else(|| Error::model("tiny", "the built-in model is missing"))?;
            (shape, Some(Tokenizer::byte()), None)
        } else if Path::new(&config.model).is_dir() {
            let folder = ModelFolder::open(&config.model)?;
            let own = match (&given, folder.tokenizer()) {
                (None, Some(path)) => Some(Tokenizer::from_file(path)?),
                _ => None,
            };
            let folder = (config.init == Init::Pretrained).then_some(folder);
            let shape = match &folder {
                Some(folder) => folder.config().clone(),
                None => ModelFolder::open(&config.model)?.config().clone(),
            };
            (shape, own, folder)
        } else {
            match (config.init, named) {
                (Init::Random, Some(shape)) => (shape, None, None),
                (Init::Random, None) => return Err(unknown_architecture(&config.model)),
                (Init::Pretrained, _) => return Err(not_here(&config.model)),
            }
        };
        shape.embd_pdrop = config.dropout.embedding;
        shape.resid_pdrop = config.dropout.residual;
        shape.attn_pdrop = config.dropout.attention;
        let Some(tokenizer) = given.or(own_tokenizer) else {
            return Err(Error::config(
                "tokenizer",
                format!("`{}` brings none; give one with --tokenizer FILE", config.model),
            ));
        };
        if tokenizer.vocab_size() > shape.vocab_size {
            let (tokens, rows) = (tokenizer.vocab_size(), shape.vocab_size);
            let message = format!("its {tokens} tokens do not fit `{}`, whose vocabulary has {rows}", config.model);
            return Err(Error::config("tokenizer", message));
        }
        if config.train.seq_len > shape.n_positions {
            let message = format!("{} exceeds the context of {} tokens", config.train.seq_len, shape.n_positions);
            return Err(Error::config("train.seq_len", message));
        }
        Ok(Self { name: config.model.clone(), config: shape, tokenizer, folder })
    }

    /// The initial weights, in FP32.
    pub fn masters(&self, seed: u64, device: &Device) -> Result<Parameters> {
        let Some(folder) = &self.folder else { return TrainState::random_masters(&self.config, seed, device) };
        let masters = Parameters::zeros(&self.config.parameter_shapes(), DType::F32, device)?;
        for (name, tensor) in masters.iter() {
            view::write_f32(tensor, |out| folder.read_f32(name, out))??;
        }
        Ok(masters)
    }
}

fn unknown_architecture(model: &str) -> Error {
    Error::config("model", format!("`{model}` is neither a folder nor one of {}", Gpt2Config::NAMES.join(", ")))
}

fn not_here(model: &str) -> Error {
    let message = format!(
        "`{model}` is not a folder here, and this version does not download; give a local Hugging Face folder, or \
         `--init random` with one of {}",
        Gpt2Config::NAMES.join(", ")
    );
    Error::config("model", message)
}

/// The tokens of a configuration's training and validation text.
pub fn dataset(config: &Config, tokenizer: &Tokenizer) -> Result<Dataset> {
    let validation = config.val.as_deref().map(str::parse::<Source>).transpose()?;
    Dataset::load(&config.source()?, validation.as_ref(), tokenizer)
}

/// An engine for `config` at its first step, from FP32 initial weights.
pub fn engine(config: &Config, shape: &Gpt2Config, masters: Parameters, total_steps: u64) -> Result<Engine> {
    let device = Device::Cpu;
    let model = Gpt2::new(shape, &masters)?;
    let (policy, train) = (config.dtype, &config.train);
    Ok(Engine {
        workspace: Workspace::new(shape, policy, train.batch_size, train.seq_len, true, &device)?,
        grads: Gradients::new(&shape.parameter_shapes(), policy, train.grad_accum, &device)?,
        state: TrainState::new(masters, policy, config.adamw(), GradScaler::new(config.grad_scaler())?)?,
        model,
        schedule: config.lr_schedule(total_steps),
        max_grad_norm: (config.optimizer.max_grad_norm > 0.0).then_some(config.optimizer.max_grad_norm),
        seed: config.seed,
        exponents: true,
        survey: Survey::default(),
    })
}

/// Refuses initial weights that are not finite or that the compute type cannot hold, naming the tensor.
pub fn check_weights(masters: &Parameters, config: &Config) -> Result<()> {
    check_range(masters, &config.model, config.dtype.compute)
}
