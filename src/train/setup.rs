//! Prepares training from a configuration: the model, its tokenizer, its text, the engine.

use crate::data::{
    BatchLoader, ChatFormat, ChatSettings, DataSource, Dataset, DatasetBuilder, DatasetKind, DatasetOptions,
    DatasetPreview, EvalLoader, LoadEvent, Mixture, SequenceIndex, TokenSource, Tokenizer, closest_match,
    named_template, names_in,
};
use crate::digest::Digest;
use crate::engine::collective::ProcessGroup;
#[cfg(feature = "cuda")]
use crate::engine::collective::nccl;
use crate::engine::device::DeviceContext;
use crate::engine::gpu;
use crate::engine::kernels::Kernels;
use crate::engine::model::{Decoder, ModelSpec, Parameters, Workspace};
use crate::engine::optim::{GradientStats, Gradients, MasterWeights};
#[cfg(feature = "cuda")]
use crate::engine::preflight;
use crate::precision::{BlockRanges, Fallback, GradScaler, PrecisionUnit};
use crate::store::aux_files::CHAT_TEMPLATE;
use crate::store::base::{AdaptedModel, check_range};
use crate::store::checkpoint::{Base, Checkpoint};
use crate::store::hub::{self, Hub, Settings};
use crate::store::{AuxFiles, ModelFolder, NOT_A_MODEL_FILE, StoredModel, WeightSource, has_gguf_extension, is_gguf};
use crate::telemetry::{available_bytes, bytes};
use crate::train::config::{Config, WeightInit};
use crate::train::engine::TrainEngine;
use crate::train::fp8::Fp8Blocks;
use crate::train::memory::{DistributedLayout, MemoryLimit};
use crate::train::objective::{Objective, Reference, ReferenceLogps};
use crate::train::reward::Reward;
use crate::train::state::TrainState;
use crate::{Error, Result};
use candle_core::Device;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An event during the preparation of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetupEvent {
    /// A phase of unknown length begins; it lasts until the next event.
    Phase(String),
    /// Progress, or a notice.
    Load(LoadEvent),
    /// The preview of the samples and their loss tokens.
    Preview(Box<DatasetPreview>),
}

/// Receives the events of the preparation.
pub type SetupCallback<'a> = dyn FnMut(SetupEvent) + 'a;

/// A model as its source describes it, before any weight is read.
#[derive(Debug)]
pub struct ModelSource {
    /// Its name, as the user wrote it.
    pub name: String,
    /// Its shape, with the run's dropout rates.
    pub spec: ModelSpec,
    /// Its tokenizer, or the user's replacement.
    pub tokenizer: Tokenizer,
    /// The small files stored with its weights.
    pub aux_files: AuxFiles,
    /// Their template and its special tokens.
    pub chat: ChatSettings,
    /// The commit of the Hub's files.
    pub commit: Option<String>,
    /// `None` if a checkpoint contains them.
    weights: Option<WeightSource>,
}

impl ModelSource {
    /// Finds the model of a configuration; downloads it if it is neither built in nor a folder.
    pub fn open(config: &Config, report: &mut SetupCallback<'_>) -> Result<Self> {
        let mut source = Self::find(config, report)?;
        if let Some(named) = &config.chat_template {
            let template = named_template(&config.locate(named).display().to_string())?;
            source.aux_files.insert(CHAT_TEMPLATE, template.as_str());
            source.chat.template = Some(template);
        }
        Ok(source)
    }

    fn find(config: &Config, report: &mut SetupCallback<'_>) -> Result<Self> {
        let file = config.tokenizer.as_ref().map(|file| config.locate(file));
        let given = file.as_ref().map(Tokenizer::from_file).transpose()?;
        let aux_files_of = |own: AuxFiles| match given.as_ref().zip(file.as_ref()) {
            Some((given, file)) => own.with_tokenizer(given, file),
            None => Ok(own),
        };
        let named = ModelSpec::named(&config.model);
        let random = || WeightSource::Random(config.seed);
        let is_tiny = config.model == "tiny";
        let model = &config.locate(&config.model).display().to_string();
        if is_tiny || config.init == WeightInit::Random && !Path::new(model).exists() {
            let unknown =
                || format!("`{}` is neither a folder nor one of {}", config.model, ModelSpec::names().join(", "));
            let spec = named.ok_or_else(|| Error::config("model", unknown()))?;
            let aux_files = aux_files_of(AuxFiles::default())?;
            let tokenizer = given.or_else(|| is_tiny.then(Tokenizer::byte));
            return Self::checked(config, spec, tokenizer, aux_files, None, Some(random()));
        }
        let (path, commit) = locate(model, config.revision.as_deref(), report)?;
        let (spec, own, aux_files, weights) = if config.init == WeightInit::Random && path.is_dir() {
            let own = ModelFolder::tokenizer_in(&path).map(Tokenizer::from_file).transpose()?;
            (ModelFolder::read_config(&path)?, own, AuxFiles::of_folder(&path)?, random())
        } else {
            let model = StoredModel::open(&path)?;
            let own = if given.is_some() { None } else { model.tokenizer()? };
            let aux_files = model.aux_files()?;
            let mut spec = model.spec().clone();
            let weights = if config.init == WeightInit::Random {
                // Drawn weights are in no blocks.
                spec.quantized.clear();
                random()
            } else {
                WeightSource::Stored(model)
            };
            (spec, own, aux_files, weights)
        };
        let aux_files = aux_files_of(aux_files)?;
        Self::checked(config, spec, given.or(own), aux_files, commit, Some(weights))
    }

    /// The model of a resumed run: shape and tokenizer come from the checkpoint, so that nothing else is needed.
    pub fn from_checkpoint(config: &Config, checkpoint: &Checkpoint, report: &mut SetupCallback<'_>) -> Result<Self> {
        let tokenizer = Some(Tokenizer::from_file(checkpoint.tokenizer())?);
        let mut spec = checkpoint.spec().clone();
        let aux_files = AuxFiles::of_folder(checkpoint.path())?;
        let (commit, weights) = if spec.lora.is_some() {
            // The checkpoint has the tokenizer and the chat template.
            let config = Config { tokenizer: Some(checkpoint.tokenizer()), chat_template: None, ..config.clone() };
            let base = Self::open(&config, report)?;
            // It does not know which matrices of a GGUF file stay in blocks.
            spec.quantized = base.spec.quantized;
            (base.commit, base.weights)
        } else {
            let frozen =
                config.train.freeze.as_ref().map(|_| Checkpoint::open_verified(checkpoint.path())).transpose()?;
            (config.revision.clone(), frozen.map(|checkpoint| WeightSource::Checkpoint(Box::new(checkpoint))))
        };
        Self::checked(config, spec, tokenizer, aux_files, commit, weights)
    }

    fn checked(
        config: &Config,
        spec: ModelSpec,
        tokenizer: Option<Tokenizer>,
        mut aux_files: AuxFiles,
        commit: Option<String>,
        weights: Option<WeightSource>,
    ) -> Result<Self> {
        let mut spec = config.with_trained_parts(ModelSpec { lora: None, ..spec })?;
        spec.dropout = config.dropout;
        let Some(tokenizer) = tokenizer else {
            let message = format!(
                "`{}` has no `tokenizer.json`; specify one with `--tokenizer FILE`, or `bytes` (in Python, \
                 `AutoTokenizer.from_pretrained(name).save_pretrained(folder)` converts `tokenizer.model` and tiktoken files)",
                config.model
            );
            return Err(Error::config("tokenizer", message));
        };
        if tokenizer.vocab_size() > spec.vocab_size {
            let tokens = tokenizer.vocab_size();
            let rows = spec.vocab_size;
            let message = format!("has {tokens} tokens, but the vocabulary of `{}` has {rows}", config.model);
            return Err(Error::config("tokenizer", message));
        }
        if config.train.seq_len > spec.max_position_embeddings {
            let message =
                format!("{} exceeds the context of {} tokens", config.train.seq_len, spec.max_position_embeddings);
            return Err(Error::config("train.seq_len", message));
        }
        let tokenizer = aux_files.with_special_tokens(tokenizer, config.bos, spec.bos_token_id)?;
        let chat = aux_files.chat()?;
        Ok(Self { name: config.model.clone(), spec, tokenizer, aux_files, chat, commit, weights })
    }

    /// The initial masters, or the shard of this process, with their working copy, and the identity of their base.
    pub fn initial(
        &self,
        config: &Config,
        device: &Device,
        kernels: &dyn Kernels,
        group: &dyn ProcessGroup,
        report: &mut SetupCallback<'_>,
    ) -> Result<((MasterWeights, Parameters), Option<Base>)> {
        let random = matches!(self.weights, Some(WeightSource::Random(_)));
        report(SetupEvent::Phase(if random { "drawing weights" } else { "reading weights" }.into()));
        let policy = config.dtype;
        let check = |parameters: &Parameters| check_range(parameters, &self.name, policy.compute);
        if !self.spec.frozen_parameters().is_empty() {
            let Some(weights) = &self.weights else {
                return Err(Error::model(&self.name, "adapters need their base model"));
            };
            let AdaptedModel { parameters, sha256 } =
                weights.load_adapters(&self.spec, policy.compute, config.seed, true, device, &self.name)?;
            // A checkpoint contains frozen modules, but not the base of adapters.
            let base = || Base { name: self.name.clone(), revision: self.commit.clone(), sha256 };
            let base = self.spec.lora.is_some().then(base);
            check(&parameters)?;
            if let Some((held, dense)) = parameters.base().and_then(|base| base.quantization_savings()) {
                let (held, dense) = (bytes(held), bytes(dense));
                let message = format!("the base model stays quantized (QLoRA): {held} instead of {dense}");
                report(SetupEvent::Load(LoadEvent::Notice(message)));
            }
            let (masters, weights) = MasterWeights::new(parameters, policy, kernels)?;
            return Ok(((masters.shard(group, &weights)?, weights), base));
        }
        let fill = |into: &Parameters| {
            let Some(weights) = &self.weights else { return Ok(()) };
            weights.read(into)?;
            check(into)
        };
        let entries = self.spec.parameters();
        Ok((MasterWeights::from_shard_fn(&entries, policy, device, group, kernels, fill)?, None))
    }
}

/// Finds the model called `name`: a local folder or GGUF file, or else a model of the Hub, which is downloaded unless
/// it is cached: `owner/name`, or a GGUF file in it, `hf://owner/name/file.gguf`. Returns the folder or file, and the
/// commit of the Hub's files. Fails with [`Error::Model`] or
/// [`Error::Hub`] with the reason why `name` is no model or is unavailable, and a remedy.
pub fn locate(name: &str, revision: Option<&str>, report: &mut SetupCallback<'_>) -> Result<(PathBuf, Option<String>)> {
    let path = Path::new(name);
    let wrong = |message: &str| Err(Error::model(format!("`{name}`"), message));
    if path.is_dir() || is_gguf(path) {
        if revision.is_some() {
            let what = if path.is_dir() { "folder" } else { "file" };
            return Err(Error::config(
                "revision",
                format!("`{name}` is a local {what}, which has no revision; remove it"),
            ));
        }
        return Ok((path.to_path_buf(), None));
    }
    if path.exists() {
        return wrong(NOT_A_MODEL_FILE);
    }
    if path.is_symlink() {
        return wrong("the symbolic link leads to no file or folder; correct it");
    }
    if let Some(remote) = name.strip_prefix("hf://") {
        let Some((repo, file)) = hub::repository_and_file(remote).filter(|(_, file)| has_gguf_extension(file)) else {
            return wrong(
                "write a model of the Hub as `owner/name`, and a GGUF file on it as `hf://owner/name/file.gguf`",
            );
        };
        return find_on_hub(name, report, |hub| hub.model_file(repo, revision, file));
    }
    if has_gguf_extension(name) {
        return wrong("the file does not exist; write a GGUF file on the Hub as `hf://owner/name/file.gguf`");
    }
    if path.ancestors().skip(1).any(|above| !above.as_os_str().is_empty() && above.is_dir()) {
        return wrong("the folder does not exist");
    }
    check_misspelling(name, names_in(Path::new(".")).into_iter().filter(|name| Path::new(name).is_dir()))?;
    hub::check_name(name)?;
    find_on_hub(name, report, |hub| {
        let files = hub.model(name, revision)?;
        Ok((files.folder, files.commit))
    })
}

/// Runs `find` on the Hub, or on its cache if there is no network.
fn find_on_hub(
    name: &str,
    report: &mut SetupCallback<'_>,
    find: impl FnOnce(&mut Hub<'_>) -> Result<(PathBuf, String)>,
) -> Result<(PathBuf, Option<String>)> {
    report(SetupEvent::Phase(format!("resolving {name}")));
    let settings = Settings::from_env().offline_if_unreachable();
    let network_error = settings.network_error.clone();
    let mut progress = |event: LoadEvent| report(SetupEvent::Load(event));
    let (path, commit) = find(&mut Hub::new(settings).report_to(&mut progress))?;
    note_cached_copy(network_error, name, report);
    Ok((path, Some(commit)))
}

/// Reports that a cached copy is used if there is no network.
fn note_cached_copy(network_error: Option<String>, name: &str, report: &mut SetupCallback<'_>) {
    if let Some(why) = network_error {
        let message = format!("the Hub is unreachable ({why}); using the cached copy of `{name}`");
        report(SetupEvent::Load(LoadEvent::Notice(message)));
    }
}

/// Rejects a name that is probably a misspelling of a known one, before a request to the Hub.
pub(crate) fn check_misspelling(name: &str, local: impl IntoIterator<Item = String>) -> Result<()> {
    let known = || ModelSpec::names().into_iter().map(ToString::to_string);
    if name.contains('/') || known().any(|known| known == name) {
        return Ok(());
    }
    closest_match(name, local.into_iter().chain(known())).map_or(Ok(()), |near| {
        let message = format!(
            "no run or folder with this name exists; did you mean `{near}`? A model of the Hub is `owner/name`"
        );
        Err(Error::model(format!("`{name}`"), message))
    })
}

/// The options for reading a configuration's text, for a model with the chat format `chat`.
pub fn dataset_options(config: &Config, chat: &ChatSettings, tokenizer: &Tokenizer) -> DatasetOptions {
    let origin = config.chat_template.as_ref().unwrap_or(&config.model);
    let chat = chat.format(origin, tokenizer);
    let fields = config.fields.clone();
    let loss_on = config.train.loss_on;
    let keeps_rows = config.objective.reward.as_deref().is_some_and(Reward::is_program);
    let samples = config.objective.kind.samples();
    DatasetOptions { format: config.format, fields, samples, loss_on, keeps_rows, chat }
}

/// The tokens of a configuration's data sets for training and validation, with their shares; downloads missing files.
pub fn datasets(
    config: &Config,
    chat: &ChatSettings,
    tokenizer: &Tokenizer,
    report: &mut SetupCallback<'_>,
) -> Result<Vec<(Dataset, f64)>> {
    report(SetupEvent::Phase("reading the chat template".into()));
    let options = dataset_options(config, chat, tokenizer);
    let of_val = |error| match error {
        Error::Config { message, .. } => Error::config("--val", message),
        other => other,
    };
    let held_out = config.held_out()?;
    let named = config.val.as_deref().filter(|_| held_out.is_none());
    let validation = named.map(|val| config.find(val)).transpose().map_err(of_val)?;
    let sets = config.sources()?;
    let all: Vec<&DataSource> = sets.iter().map(|(source, _)| source).chain(&validation).collect();
    with_loader(&all, options, report, |loader| {
        loader.held_out = held_out.unwrap_or_default();
        let sets = sets.iter();
        sets.map(|(source, share)| Ok((loader.load(source, validation.as_ref(), tokenizer)?, *share))).collect()
    })
}

/// The rows that `sets` keep of the training data and of the validation data, by the numbers of their sequences in a
/// mixture. If one text validates all sets, its rows repeat.
pub(super) fn take_rows(sets: &mut [(Dataset, f64)]) -> [Vec<Arc<str>>; 2] {
    let mut all = <[Vec<Arc<str>>; 2]>::default();
    for (set, _) in sets {
        all.iter_mut().zip(&mut set.rows).for_each(|(all, rows)| all.append(rows));
    }
    all
}

/// The fingerprint of the data sets, and a line that describes them.
pub(super) fn describe_data(config: &Config, sets: &[(Dataset, f64)]) -> (String, String) {
    let all = |(set, share): &(Dataset, f64)| format!("{} {share}\n", set.fingerprint);
    let (fingerprint, entropy) = match sets {
        [(set, _)] => (set.fingerprint.clone(), set.entropy_per_token),
        sets => (Digest::of(sets.iter().map(all).collect::<String>().as_bytes()).sha256, None),
    };
    let entropy = entropy.map_or_else(String::new, |h| format!(", entropy {h:.4} nats per token"));
    let tokens = |of: fn(&Dataset) -> usize| sets.iter().map(|(set, _)| of(set)).sum::<usize>();
    let (train, validation) = (tokens(|set| set.train.len()), tokens(|set| set.validation.len()));
    (fingerprint, format!("{}: {train} tokens to train on, {validation} to validate{entropy}", config.data))
}

/// The rows of `sets` for training, and those for validation unless the configuration has none.
pub fn rows(config: &Config, sets: &[(Dataset, f64)]) -> Result<(Mixture, Result<Option<Mixture>>)> {
    let train = &config.train;
    let one = sets.len() == 1;
    let index =
        |tokens: &TokenSource, origin: &str| SequenceIndex::new(tokens.clone(), train.seq_len, train.packing, origin);
    let mix = |origin: &str, tokens: fn(&Dataset) -> &TokenSource, sets: &[(Dataset, f64)]| {
        let named = |name: &String| match (origin, one) {
            ("", _) => name.clone(),
            (_, true) => origin.to_owned(),
            _ => format!("{name}: {origin}"),
        };
        let sets = sets.iter().zip(config.data.names());
        let rows = sets.map(|((set, share), name)| Ok((index(tokens(set), &named(name))?, *share)));
        Mixture::new(rows.collect::<Result<_>>()?)
    };
    let training = mix("", |set| &set.train, sets)?;
    let validation = match config.held_out()? {
        Some(0.0) => Ok(None),
        Some(_) if config.val.is_none() => {
            mix("the last tenth of the text, used for validation", |set| &set.validation, sets).map(Some)
        }
        Some(_) => mix("`--val`", |set| &set.validation, sets).map(Some),
        // One text validates all.
        None => index(&sets[0].0.validation, "`--val`").map(Mixture::from).map(Some),
    };
    Ok((training, validation))
}

/// The loaders of the training rows and of the validation rows, after a preview of the samples. Without validation, the
/// latter reads nothing.
pub(super) fn loaders(
    config: &Config,
    sets: &[(Dataset, f64)],
    format: &ChatFormat,
    tokenizer: &Tokenizer,
    report: &mut SetupCallback<'_>,
) -> Result<(BatchLoader, EvalLoader)> {
    let train = &config.train;
    let (training, validation) = rows(config, sets)?;
    let loader = BatchLoader::from_index(training, train.batch_size, config.seed)?;
    for index in loader.mixture.sets().filter(|index| index.tokens.kind() != DatasetKind::Text) {
        let preview = DatasetPreview::new(index, None, tokenizer, format)?;
        report(SetupEvent::Preview(Box::new(preview)));
    }
    let (rows, limit) = match validation? {
        Some(rows) => (rows, (train.eval_batches > 0).then_some(train.eval_batches)),
        None => (loader.mixture.clone(), Some(0)),
    };
    let eval = EvalLoader::from_index(rows, train.batch_size, limit)?;
    Ok((loader, eval))
}

/// Runs `load` with a loader that can download what `sources` name.
pub fn with_loader<T>(
    sources: &[&DataSource],
    options: DatasetOptions,
    report: &mut SetupCallback<'_>,
    load: impl FnOnce(&mut DatasetBuilder<'_>) -> Result<T>,
) -> Result<T> {
    let remote = sources.iter().find(|source| matches!(source, DataSource::Hub { .. }));
    let mut settings = Settings::from_env();
    if remote.is_some() {
        report(SetupEvent::Phase("resolving the data set".into()));
        settings = settings.offline_if_unreachable();
    }
    let network_error = settings.network_error.clone();
    report(SetupEvent::Phase("reading the text".into()));
    let folder = settings.token_cache.clone();
    let report = RefCell::new(report);
    let tell = |event: LoadEvent| (report.borrow_mut())(SetupEvent::Load(event));
    let (mut downloading, mut loading) = (tell, tell);
    let mut hub = Hub::new(settings).report_to(&mut downloading);
    let builder = DatasetBuilder::new(folder);
    let mut builder = DatasetBuilder { options, downloader: Some(&mut hub), report: Some(&mut loading), ..builder };
    let loaded = load(&mut builder)?;
    if let Some(remote) = remote {
        note_cached_copy(network_error, &remote.to_string(), *report.borrow_mut());
    }
    Ok(loaded)
}

/// Opens the device of one of the processes with the kernels of all, and connects their GPUs if each has one. All
/// processes call it together.
pub fn open_device(
    group: Arc<dyn ProcessGroup>,
    config: &Config,
    report: &mut SetupCallback<'_>,
) -> Result<(Arc<dyn ProcessGroup>, DeviceContext)> {
    let spec = config.device_spec()?.for_local_rank(group.local_rank());
    let mut notices = Vec::new();
    let mut open = spec.open(config.dtype, config.kernels, &mut |notice| notices.push(notice))?;
    #[cfg(feature = "cuda")]
    preflight::agree(&*group, &mut open, &mut notices)?;
    notices.into_iter().map(|notice| SetupEvent::Load(LoadEvent::Notice(notice))).for_each(report);
    // A launcher may show each process only its own GPU, so neither their number nor their ordinals tell.
    let gpus = group.all_gather_messages(&gpu::uuid(&open.device))?;
    open.processes = match gpus[group.rank()] {
        None => group.local_world_size(),
        own => gpus.iter().filter(|gpu| **gpu == own).count(),
    };
    #[cfg(feature = "cuda")]
    let group = nccl::connect(group, &open)?;
    Ok((group, open))
}

/// Rejects a run for which the device has not enough memory; with `train.auto_batch`, changes it so that it fits.
pub(super) fn fit_memory(
    config: Config,
    spec: &ModelSpec,
    open: &DeviceContext,
    group: &dyn ProcessGroup,
    report: &mut SetupCallback<'_>,
) -> Result<Config> {
    let available = if open.device.is_cuda() { open.free_bytes() } else { available_bytes() };
    let Some(available) = available else { return Ok(config) };
    let available = available / open.processes as u64;
    let on_gpu = !open.device.is_cpu();
    let world_size = group.world_size();
    let shards_on_host = on_gpu && group.gpus().is_none();
    let layout = DistributedLayout { world_size, sharding: config.train.shard, on_gpu, shards_on_host };
    let memory = MemoryLimit { spec, kernels: &*open.kernels, layout, available };
    let mut config = config;
    memory.check_weights(&config)?;
    if std::mem::take(&mut config.train.auto_batch) {
        let (fitted, said) = memory.fitted(&config)?;
        if let Some(said) = said {
            report(SetupEvent::Load(LoadEvent::Notice(said)));
        }
        config = fitted;
    }
    memory.check(&config)?;
    Ok(config)
}

/// Rejects blocks in the settings of the precision that the model does not have, `kept` or in FP8.
fn check_blocks(config: &Config, spec: &ModelSpec, kept: &[PrecisionUnit]) -> Result<()> {
    let block_of = |unit: &PrecisionUnit| if let PrecisionUnit::Block(block) = unit { Some(*block) } else { None };
    let blocks = kept.iter().filter_map(block_of).map(|block| ("keep", block));
    let fp8 = config.precision.fp8.block.as_ref().and_then(BlockRanges::last).map(|block| ("fp8.block", block));
    if let Some((key, block)) = blocks.chain(fp8).find(|(_, block)| *block >= spec.num_layers) {
        let message = format!("block {block} does not exist: the model has {}, numbered from 0", spec.num_layers);
        return Err(Error::config(format!("precision.{key}"), message));
    }
    if config.precision.fp8.block.is_some() && (spec.experts.is_some() || spec.recurrent.is_some()) {
        let message = "the FP8 simulation does not support mixtures of experts and recurrent layers";
        return Err(Error::config("precision.fp8.block", message));
    }
    Ok(())
}

/// The engine of one process of `group` for `config` at its first step, from initial masters and their working copy, on
/// the device of both and with its `kernels`.
pub fn engine(
    group: Arc<dyn ProcessGroup>,
    config: &Config,
    spec: &ModelSpec,
    weights: (MasterWeights, Parameters),
    kernels: Arc<dyn Kernels>,
    total_steps: u64,
) -> Result<TrainEngine> {
    let device = weights.1.device();
    let model = Decoder::new(spec, &weights.1, kernels)?;
    if group.world_size() > 1 && device.is_cpu() && model.kernels().name() != "fused" {
        let message = "training with several processes on CPUs needs the fused kernels; use `auto`, or one process";
        return Err(Error::config("kernels", message));
    }
    let policy = config.dtype;
    let train = &config.train;
    let scaler = GradScaler::new(config.grad_scaler())?;
    let mut state = TrainState::new(weights, config.optimizer(), scaler)?;
    state.fallback = Fallback::new(config.precision.clone(), BTreeMap::new());
    state.fp8 = Fp8Blocks::new(config.precision.fp8.clone(), spec.num_layers, &[]);
    let kept: Vec<_> = state.fallback.active().collect();
    check_blocks(config, spec, &kept)?;
    let rows = config.objective.rows(train.batch_size);
    let stored = Reference::Stored(ReferenceLogps::default());
    let reference = if config.objective.has_separate_reference(spec) { stored } else { Reference::Base };
    let mut engine = TrainEngine {
        objective: Objective::new(config.objective.clone(), reference),
        workspace: Workspace::for_training(
            spec,
            policy,
            (rows, train.seq_len),
            train.gradient_checkpointing.into(),
            &device,
        )?,
        grads: Gradients::sharded(&state.weights, policy, train.grad_accum, &*group, train.shard)?,
        group,
        timings: Vec::new(),
        state,
        model,
        schedule: config.lr_schedule(total_steps),
        max_grad_norm: (config.optimizer.max_grad_norm > 0.0).then_some(config.optimizer.max_grad_norm),
        seed: config.seed,
        count_exponents: true,
        update_counts: None,
        grad_stats: GradientStats::default(),
    };
    kept.into_iter().try_for_each(|unit| engine.change_dtype(unit, config.precision.fallback_dtype))?;
    Ok(engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: `all` was accepted, and only some of the products were rounded.
    #[test]
    fn models_with_other_products_have_no_fp8_simulation() {
        for model in [r#"{"model_type": "olmoe"}"#, r#"{"model_type": "lfm2", "full_attn_idxs": [1]}"#] {
            let spec = ModelSpec::from_json(model.as_bytes(), "config.json").unwrap();
            for blocks in ["all", "0"] {
                let mut config = Config::default();
                check_blocks(&config, &spec, &[]).unwrap();
                config.precision.fp8.block = Some(blocks.parse().unwrap());
                let error = check_blocks(&config, &spec, &[]).unwrap_err().to_string();
                assert!(error.contains("precision.fp8.block"), "{model}: {error}");
            }
        }
    }
}
