//! Reference values from PyTorch: the project's in `tests/golden`, and the external ones in `../shared/golden`.
//!
//! Both become a [`Case`] with the project's parameter names. `make_golden.py` in either folder documents their origin.

use super::reference::IGNORED;
use candle_core::{Device, Tensor};
use finetune::engine::kernels::{CandleKernels, Fused, Kernels};
use finetune::engine::optim::AdamWConfig;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The cases of GPT-2 under `tests/golden`.
const CASES: [&str; 5] = ["narrow", "long", "head64", "untied", "deep"];

/// Every set of kernels that computes on a CPU.
pub(crate) fn all_kernels() -> [Arc<dyn Kernels>; 2] {
    [Arc::new(Fused), Arc::new(CandleKernels)]
}

/// A model, batches for it, and PyTorch's results.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// A Hugging Face model folder: `config.json` and `model.safetensors`.
    pub(crate) folder: PathBuf,
    pub(crate) parameters: HashMap<String, Tensor>,
    /// Inputs and targets `[B,T]` of each step, I64; a target may be [`IGNORED`].
    pub(crate) batches: Vec<(Tensor, Tensor)>,
    /// Logits `[B,T,V]` of the first batch.
    pub(crate) logits: Tensor,
    /// The first batch's gradients.
    pub(crate) gradients: BTreeMap<String, Tensor>,
    /// The parameters after all steps in FP32.
    pub(crate) final_parameters: BTreeMap<String, Tensor>,
    pub(crate) trajectory: Trajectory,
    /// PEFT's folder, of a case of adapters.
    pub(crate) adapter: Option<PathBuf>,
    /// The kernels of this case's engine.
    pub(crate) kernels: Arc<dyn Kernels>,
}

/// `trajectory.json`.
#[derive(Clone, Deserialize)]
pub(crate) struct Trajectory {
    #[serde(alias = "settings")]
    pub(crate) adamw: AdamWSettings,
    pub(crate) scaler: ScalerSettings,
    /// The folder of the base, of a case of adapters.
    pub(crate) base: Option<String>,
    pub(crate) fp32: Vec<Step>,
    pub(crate) fp16: Vec<Step>,
}

/// The optimizer of both runs: AdamW that decays parameters of two or more dimensions.
#[derive(Clone, Deserialize)]
pub(crate) struct AdamWSettings {
    pub(crate) lr: f64,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) max_grad_norm: f64,
}

impl AdamWSettings {
    pub(crate) fn config(&self) -> AdamWConfig {
        AdamWConfig { betas: self.betas.into(), eps: self.eps, weight_decay: self.weight_decay }
    }
}

/// PyTorch's `GradScaler` of the FP16 run.
#[derive(Clone, Deserialize)]
pub(crate) struct ScalerSettings {
    pub(crate) init_scale: f64,
    pub(crate) growth_factor: f64,
    pub(crate) backoff_factor: f64,
    pub(crate) growth_interval: u32,
}

/// One step of a run.
#[derive(Clone, Deserialize)]
pub(crate) struct Step {
    pub(crate) loss: f64,
    /// The norm of the unscaled gradients before clipping; none if the step was skipped.
    #[serde(alias = "grad_norm")]
    pub(crate) norm: Option<f64>,
    /// Before the step.
    pub(crate) scale: f64,
    pub(crate) skipped: bool,
}

impl Case {
    /// The case `name` of the project.
    pub(crate) fn own(name: &str) -> Self {
        let folder = path(name);
        let reference = tensors(&folder.join("reference.safetensors"));
        let steps = reference["inputs"].dim(0).unwrap();
        let batch = |step: usize| (reference["inputs"].get(step).unwrap(), reference["targets"].get(step).unwrap());
        let batches = (0..steps).map(batch).collect();
        Self::assemble(name, &folder, batches, &reference, with_prefix(&reference, "final."))
    }

    /// The case next to the project, or none if its folder is missing.
    pub(crate) fn shared() -> Option<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden/tiny-gpt2");
        if !folder.is_dir() {
            return None;
        }
        let batches = tensors(&folder.join("batches.safetensors")).remove("batches").unwrap();
        let batches = (0..batches.dim(0).unwrap()).map(|step| next_tokens(&batches.get(step).unwrap())).collect();
        let reference = tensors(&folder.join("reference.safetensors"));
        let final_parameters = with_prefix(&tensors(&folder.join("final.safetensors")), "");
        Some(Self::assemble("shared/tiny-gpt2", &folder, batches, &reference, final_parameters))
    }

    /// Every case of a family other than GPT-2, for every set of kernels.
    pub(crate) fn families() -> Vec<Self> {
        names("families").iter().flat_map(|name| Self::own(&format!("families/{name}")).for_all_kernels()).collect()
    }

    /// The case `name` of adapters: the base's batches, and PyTorch's results with the adapters.
    pub(crate) fn lora_of(name: &str) -> Self {
        let folder = path("lora").join(name);
        let trajectory: Trajectory = json(&folder.join("trajectory.json"));
        let base = trajectory.base.as_ref().unwrap();
        let mut reference = tensors(&folder.join("reference.safetensors"));
        stack_by_expert(&mut reference, &config(base));
        Self {
            name: format!("lora/{name}"),
            logits: reference["logits"].clone(),
            gradients: with_prefix(&reference, "grad."),
            final_parameters: with_prefix(&reference, "final."),
            adapter: Some(folder),
            ..Self::own(base)
        }
        .with(trajectory)
    }

    fn with(self, trajectory: Trajectory) -> Self {
        Self { trajectory, ..self }
    }

    /// Every case of adapters, for every set of kernels.
    pub(crate) fn lora() -> Vec<Self> {
        names("lora").iter().flat_map(|name| Self::lora_of(name).for_all_kernels()).collect()
    }

    /// Every available case of GPT-2; the project's own are always available.
    pub(crate) fn gpt2() -> Vec<Self> {
        CASES.iter().map(|name| Self::own(name)).chain(Self::shared()).collect()
    }

    /// Every available case of every model, for every set of kernels.
    pub(crate) fn all() -> Vec<Self> {
        let gpt2 = Self::gpt2();
        gpt2.iter().flat_map(Self::for_all_kernels).chain(Self::families()).chain(Self::lora()).collect()
    }

    /// The same case for every set of kernels that computes on a CPU.
    pub(crate) fn for_all_kernels(&self) -> [Self; 2] {
        all_kernels().map(|kernels| {
            let name = format!("{} by {}", self.name, kernels.name());
            Self { name, kernels, ..self.clone() }
        })
    }

    fn assemble(
        name: &str,
        folder: &Path,
        batches: Vec<(Tensor, Tensor)>,
        reference: &HashMap<String, Tensor>,
        final_parameters: BTreeMap<String, Tensor>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            folder: folder.to_owned(),
            parameters: with_prefix(&tensors(&folder.join("model.safetensors")), "").into_iter().collect(),
            batches,
            logits: reference["logits"].clone(),
            gradients: with_prefix(reference, "grad."),
            final_parameters,
            trajectory: json(&folder.join("trajectory.json")),
            adapter: None,
            kernels: Arc::new(Fused),
        }
    }
}

/// A file or folder of `tests/golden`.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The configuration of a model of `tests/golden`.
pub(crate) fn config(name: &str) -> serde_json::Value {
    json(&path(name).join("config.json"))
}

/// The names of the cases in a folder of `tests/golden`, sorted.
pub(crate) fn names(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(path(folder)).unwrap().map(|entry| entry.unwrap());
    let cases = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<_> = cases.map(|case| case.file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

/// Inputs and targets of rows of tokens `[B,T]`: each position's target is the next token, the last one's is ignored.
fn next_tokens(rows: &Tensor) -> (Tensor, Tensor) {
    let targets = rows.to_vec2::<i64>().unwrap().into_iter().map(|mut row| {
        row.rotate_left(1);
        *row.last_mut().unwrap() = IGNORED;
        row
    });
    (rows.clone(), Tensor::new(targets.collect::<Vec<_>>(), &Device::Cpu).unwrap())
}

pub(crate) fn tensors(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn json<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Stacks the second factors of experts, which PEFT stores side by side, column by column: `[out, r · experts]` becomes
/// `[experts · out, r]`.
fn stack_by_expert(tensors: &mut HashMap<String, Tensor>, config: &serde_json::Value) {
    let experts = ["num_experts", "num_local_experts"].into_iter().find_map(|key| config[key].as_u64());
    let factors = tensors.iter_mut().filter(|(name, _)| name.contains("experts.") && name.contains("lora_B"));
    for (_, factor) in factors {
        let (outputs, columns) = factor.dims2().unwrap();
        let experts = experts.unwrap() as usize;
        let by_column = factor.t().unwrap().reshape((columns / experts, experts, outputs)).unwrap();
        let by_expert = by_column.permute((1, 2, 0)).unwrap().contiguous().unwrap();
        *factor = by_expert.flatten(0, 1).unwrap();
    }
}

/// The tensors whose names begin with `prefix`, under the project's names.
pub(crate) fn with_prefix(tensors: &HashMap<String, Tensor>, prefix: &str) -> BTreeMap<String, Tensor> {
    let renamed = |(name, tensor): (&String, &Tensor)| {
        let name = name.strip_prefix(prefix)?;
        let prefix = ["transformer.", "model."].into_iter().find(|prefix| name.starts_with(prefix));
        Some((name.strip_prefix(prefix.unwrap_or_default())?.to_owned(), tensor.clone()))
    };
    tensors.iter().filter_map(renamed).collect()
}
