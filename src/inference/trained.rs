//! Opens a trained model: a Hugging Face folder, a checkpoint, or the newest good checkpoint of a run.

use crate::data::{Bos, ChatSettings, DatasetOptions, Tokenizer};
use crate::engine::device::DeviceContext;
use crate::engine::kernels::view;
use crate::engine::model::{Decoder, ModelSpec, Parameters, candle_dtype, merge_adapters};
use crate::precision::{Dtype, PrecisionPolicy};
use crate::store::adapter::AdapterFolder;
use crate::store::aux_files::CHAT_TEMPLATE;
use crate::store::base::check_range;
use crate::store::checkpoint::{Base, Checkpoint, CorruptFile, latest_valid, verify};
use crate::store::{AdapterSource, AuxFiles, StoredModel, WeightSource};
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model with its tokenizer, before its weights are read.
#[derive(Debug)]
pub struct TrainedModel {
    /// The folder of the weights, or the GGUF file.
    pub path: PathBuf,
    /// The model's shape.
    pub spec: ModelSpec,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The small files stored with its weights.
    pub aux_files: AuxFiles,
    /// Their template and its special tokens.
    pub chat: ChatSettings,
    /// Damaged newer checkpoints of the run, which were skipped.
    pub corrupt_files: Vec<CorruptFile>,
    weights: WeightSource,
    adapters: Option<AdapterSource>,
}

/// Finds a base by its name and revision.
pub type Locate<'a> = dyn FnMut(&str, Option<&str>) -> Result<PathBuf> + 'a;

impl TrainedModel {
    /// Opens `path`: a folder with `config.json`, a GGUF file, a `step-*` or `weights-*` folder (verified first), a
    /// run's folder, or adapters whose base is on this machine. `tokenizer` replaces the model's own. Fails with
    /// [`Error::Model`] or [`Error::Checkpoint`] if there is no model, it is damaged, or the tokenizer does not fit.
    pub fn open(path: &Path, tokenizer: Option<&Path>) -> Result<Self> {
        Self::open_with(path, tokenizer, &mut |name, _| Ok(PathBuf::from(name)))
    }

    /// Opens a model; `locate` finds the base of adapters.
    pub fn open_with(path: &Path, tokenizer: Option<&Path>, locate: &mut Locate<'_>) -> Result<Self> {
        if !path.exists() {
            return Err(Error::model(format!("`{}`", path.display()), "no such folder or file exists"));
        }
        let mut corrupt_files = Vec::new();
        let found = if path.join("manifest.json").is_file() {
            open_step(path)?
        } else if path.join("config.toml").is_file() {
            let found = latest_valid(path)?;
            corrupt_files = found.corrupt_files;
            of_checkpoint(found.checkpoint)
        } else if AdapterFolder::exists(path) {
            OpenedModel::Adapters(AdapterSource::open(path)?)
        } else {
            whole(path)?
        };
        let (weights, spec, adapters) = match found {
            OpenedModel::Whole(weights, spec) => (weights, *spec, None),
            OpenedModel::Adapters(adapters) => {
                let (weights, spec) = base_of(&adapters, locate)?;
                adapters.spec(&spec)?;
                (weights, spec, Some(adapters))
            }
        };
        let place = adapters.as_ref().map(AdapterSource::path).or_else(|| weights.path()).unwrap_or(path);
        let path = place.to_path_buf();
        // A folder of adapters may rely on its base for this.
        let beside = Some(path.join("tokenizer.json")).filter(|file| adapters.is_some() && file.is_file());
        let file = tokenizer.map(Path::to_path_buf).or(beside);
        let own = file.as_ref().map_or_else(|| weights.tokenizer(), |file| Tokenizer::from_file(file).map(Some))?;
        let aux_files = match &adapters {
            Some(AdapterSource::Checkpoint(_)) => AuxFiles::of_folder(&path)?,
            // Adapters were trained with the chat template in their folder.
            Some(AdapterSource::Folder(_)) => weights.aux_files()?.replaced_by(&path)?,
            None => weights.aux_files()?,
        };
        let aux_files = match own.as_ref().zip(file.as_ref()) {
            Some((own, file)) => aux_files.with_tokenizer(own, file)?,
            None => aux_files,
        };
        let file = match file {
            Some(file) => file,
            None if path.is_dir() => path.join("tokenizer.json"),
            None => path.clone(),
        };
        let Some(tokenizer) = own else {
            let message = "it has no `tokenizer.json`; pass one with `--tokenizer FILE`";
            return Err(Error::model(path.display(), message));
        };
        let tokens = tokenizer.vocab_size();
        let rows = spec.vocab_size;
        if tokens > rows {
            let message = format!("it has {tokens} tokens, but the model's vocabulary has {rows}");
            return Err(Error::model(file.display(), message));
        }
        let chat = aux_files.chat()?;
        Self { path, spec, tokenizer, aux_files, chat, corrupt_files, weights, adapters }.with_bos(Bos::Auto)
    }

    /// The model with the BOS token that `rule` determines. Fails with [`Error::Config`] if `rule` asks for a token
    /// that the model does not have.
    pub fn with_bos(mut self, rule: Bos) -> Result<Self> {
        self.tokenizer = self.aux_files.with_special_tokens(self.tokenizer, rule, self.spec.bos_token_id)?;
        Ok(self)
    }

    /// The stop tokens from the configuration, `generation_config.json` and the tokenizer.
    pub fn stop_token_ids(&self) -> Result<Vec<u32>> {
        self.aux_files.stop_token_ids(&self.spec, &self.tokenizer)
    }

    /// How text is read for it, without a configuration: rows by their usual fields, conversations by its template.
    pub fn dataset_options(&self) -> DatasetOptions {
        let chat = self.chat.format(&self.path.display().to_string(), &self.tokenizer);
        DatasetOptions { chat, ..DatasetOptions::default() }
    }

    /// The same model with the adapters in `folder`, in PEFT's format, and their chat template if they have one. Fails
    /// with [`Error::Model`] naming the part that does not fit; [`Error::Config`] if the model already has adapters.
    pub fn with_adapters(self, folder: &Path) -> Result<Self> {
        if self.adapters.is_some() {
            return Err(Error::config(
                "--adapter",
                "the model has adapters already; merge them first, or omit the flag",
            ));
        }
        let adapters = AdapterSource::open(folder)?;
        adapters.spec(&self.spec)?;
        let mut aux_files = self.aux_files;
        if let Some(template) = AuxFiles::of_folder(folder)?.chat()?.template {
            aux_files.insert(CHAT_TEMPLATE, template);
        }
        Ok(Self { adapters: Some(adapters), chat: aux_files.chat()?, aux_files, ..self })
    }

    /// The model with its adapters; `None` without.
    pub fn adapted(&self) -> Result<Option<ModelSpec>> {
        self.adapters.as_ref().map(|adapters| adapters.spec(&self.spec)).transpose()
    }

    /// The name and revision of the base that adapters were trained over.
    pub fn base(&self) -> Option<Base> {
        self.adapters.as_ref().and_then(AdapterSource::base)
    }

    /// The adapters and their base in FP32, on the CPU; `None` without adapters.
    pub fn load_with_base(&self) -> Result<Option<(ModelSpec, Parameters)>> {
        self.load_adapters(Dtype::F32, false)
    }

    fn load_adapters(&self, compute: Dtype, in_blocks: bool) -> Result<Option<(ModelSpec, Parameters)>> {
        let Some(adapters) = &self.adapters else { return Ok(None) };
        let origin = self.path.display().to_string();
        adapters.load((&self.spec, &self.weights), compute, in_blocks, &origin).map(Some)
    }

    /// The weights rounded to `dtype`: a checkpoint's masters, or the folder's weights. Adapters are merged in FP32.
    /// Fails with [`Error::Model`] naming a tensor with infinities or NaNs, or with values beyond the range of `dtype`.
    pub fn weights(&self, dtype: Dtype) -> Result<Parameters> {
        self.weights_on(dtype, &Device::Cpu)
    }

    fn weights_on(&self, dtype: Dtype, device: &Device) -> Result<Parameters> {
        let origin = self.path.display().to_string();
        let Some((spec, adapters)) = self.load_with_base()? else {
            return self.weights.load(&self.spec, dtype, device, &origin);
        };
        let masters = merge_into_base(&spec, &adapters)?;
        check_range(&masters, &origin, dtype)?;
        converted(&masters, candle_dtype(dtype), device)
    }

    /// The model, and its weights in the policy's compute type, on an open device.
    pub fn load(&self, policy: PrecisionPolicy, open: &DeviceContext) -> Result<(Decoder, Parameters)> {
        if let Some((spec, adapters)) = self.load_adapters(policy.compute, open.device.is_cpu())? {
            return load_decoder(&spec, &adapters, policy, open);
        }
        self.load_merged(policy, open)
    }

    /// Loads the model with merged adapters: for measurements of every layer, which frozen layers do not allow.
    pub fn load_merged(&self, policy: PrecisionPolicy, open: &DeviceContext) -> Result<(Decoder, Parameters)> {
        let weights = self.weights_on(policy.compute, &open.device)?;
        Ok((Decoder::new(&self.spec, &weights, open.kernels.clone())?, weights))
    }
}

/// The kind of model found at a path.
enum OpenedModel {
    Whole(WeightSource, Box<ModelSpec>),
    Adapters(AdapterSource),
}

fn of_checkpoint(checkpoint: Checkpoint) -> OpenedModel {
    let checkpoint = Box::new(checkpoint);
    if checkpoint.manifest().has_adapters() {
        OpenedModel::Adapters(AdapterSource::Checkpoint(checkpoint))
    } else {
        let spec = Box::new(checkpoint.spec().clone());
        OpenedModel::Whole(WeightSource::Checkpoint(checkpoint), spec)
    }
}

fn whole(path: &Path) -> Result<OpenedModel> {
    let model = StoredModel::open(path)?;
    let spec = Box::new(model.spec().clone());
    Ok(OpenedModel::Whole(WeightSource::Stored(model), spec))
}

fn open_step(path: &Path) -> Result<OpenedModel> {
    let is_full = path.join("state.json").exists() || path.join("master.safetensors").exists();
    if is_full {
        return Ok(of_checkpoint(Checkpoint::open(path)?));
    }
    if let Some(damage) = verify(path).into_iter().next() {
        return Err(damage.into());
    }
    if AdapterFolder::exists(path) {
        return Ok(OpenedModel::Adapters(AdapterSource::open(path)?));
    }
    whole(path)
}

/// The base that adapters name, and its shape.
fn base_of(adapters: &AdapterSource, locate: &mut Locate<'_>) -> Result<(WeightSource, ModelSpec)> {
    let Some(Base { name, revision, .. }) = adapters.base().filter(|base| !base.name.is_empty()) else {
        let message = "the adapters do not name their base model; pass it as MODEL and this folder with `--adapter`";
        return Err(Error::model(adapters.path().display(), message));
    };
    if let (Some(spec), Some(seed), false) = (ModelSpec::named(&name), adapters.seed(), Path::new(&name).exists()) {
        return Ok((WeightSource::Random(seed), spec));
    }
    let path = locate(&name, revision.as_deref())?;
    if !path.exists() {
        let message =
            format!("the base model `{name}` was not found; pass it as MODEL and this folder with `--adapter`");
        return Err(Error::model(adapters.path().display(), message));
    }
    let model = StoredModel::open(&path)?;
    let spec = model.spec().clone();
    Ok((WeightSource::Stored(model), spec))
}

/// A decoder of `spec` with these FP32 adapters, rounded to the policy's compute type, over their base of that type, on
/// an open device.
fn load_decoder(
    spec: &ModelSpec,
    adapters: &Parameters,
    policy: PrecisionPolicy,
    open: &DeviceContext,
) -> Result<(Decoder, Parameters)> {
    let on_device = |parameters: &Parameters| converted(parameters, candle_dtype(policy.compute), &open.device);
    let base = match adapters.base() {
        Some(base) if !open.device.is_cpu() => Some(Arc::new(on_device(base)?)),
        base => base.cloned(),
    };
    let weights = on_device(adapters)?.with_base(base);
    Ok((Decoder::new(spec, &weights, open.kernels.clone())?, weights))
}

pub(super) fn converted(parameters: &Parameters, dtype: DType, device: &Device) -> Result<Parameters> {
    let converted = Parameters::zeros(parameters.layout(), dtype, device)?;
    for (from, to) in parameters.tensors().iter().zip(converted.tensors()) {
        to.slice_set(&from.to_dtype(dtype)?.to_device(device)?, 0, 0)?;
    }
    Ok(converted)
}

/// The parameters of the base with the adapters added to them, in FP32.
fn merge_into_base(spec: &ModelSpec, adapters: &Parameters) -> Result<Parameters> {
    let plain = ModelSpec { lora: None, ..spec.clone() };
    let merged = Parameters::zeros(&plain.parameters(), DType::F32, &Device::Cpu)?;
    for (name, tensor) in merged.iter() {
        let from = adapters.get(name).or_else(|| adapters.base().and_then(|base| base.get(name)));
        let from = from.ok_or_else(|| Error::model(name, "is missing in both the base model and the adapters"))?;
        view::copy(&view::to_host(from)?, tensor)?;
    }
    merge_adapters(spec, adapters, &merged)?;
    Ok(merged)
}
