//! A small model's checkpoint that tests can create in a millisecond.

use candle_core::{DType, Device, Tensor};
use finetune::Result;
use finetune::data::DataPosition;
use finetune::engine::model::{ModelSpec, Parameters};
use finetune::precision::ScalerState;
use finetune::store::AuxFiles;
use finetune::store::checkpoint::{CheckpointKind, Contents, FORMAT_VERSION, Fingerprint, Run, SaveResult, State};
use finetune::telemetry::Activity;
use std::path::Path;
use tempfile::TempDir;

/// The sample content of `tokenizer.json`.
pub(crate) const TOKENIZER: &[u8] = br#"{"version":"1.0"}"#;

/// Everything a checkpoint of `step` is made of; another step has other values in every tensor.
pub(crate) struct Sample {
    pub(crate) spec: ModelSpec,
    pub(crate) aux_files: AuxFiles,
    pub(crate) state: State,
    pub(crate) weights: Parameters,
    pub(crate) masters: Parameters,
    pub(crate) exp_avg: Parameters,
    pub(crate) exp_avg_sq: Parameters,
    pub(crate) activity: Activity,
}

impl Sample {
    pub(crate) fn new(step: u64) -> Self {
        let tiny = ModelSpec::named("tiny").unwrap();
        let spec = ModelSpec { vocab_size: 17, max_position_embeddings: 8, ..tiny.resized(1, 8, 2) };
        Self::of(step, &spec)
    }

    /// A sample for the shape `spec`.
    pub(crate) fn of(step: u64, spec: &ModelSpec) -> Self {
        let fingerprint =
            Fingerprint { model: "sample".into(), policy: "p=f32,c=f16,g=f16,r=f32".into(), data: "d".into() };
        let state = State {
            format_version: FORMAT_VERSION,
            step,
            updates: step - 1,
            tokens: 1024 * step,
            seed: 1,
            fingerprint,
            scaler: ScalerState {
                scale: 65536.0,
                growth_tracker: 1,
                hysteresis_left: 1,
                min_scale_streak: 0,
                headroom: None,
            },
            fallback: std::collections::BTreeMap::new(),
            fp8: Vec::new(),
            underflowed_params: std::collections::BTreeSet::new(),
            base: None,
            reference: None,
            rollouts: None,
            data_position: DataPosition { row: step, ..DataPosition::default() },
            schedule: serde_json::Value::Null,
            validation_loss: None,
            best: None,
            early_stopping_counter: 0,
        };
        let masters = fill(spec, step as f32);
        let weights = masters.zeros_like(DType::F16).unwrap();
        for (weight, master) in weights.tensors().iter().zip(masters.tensors()) {
            weight.slice_set(&master.to_dtype(DType::F16).unwrap(), 0, 0).unwrap();
        }
        let (exp_avg, exp_avg_sq) = (fill(spec, 0.01 * step as f32), fill(spec, 0.001 * step as f32));
        let activity = Activity::default();
        let aux_files = AuxFiles::default();
        Self { spec: spec.clone(), state, aux_files, weights, masters, exp_avg, exp_avg_sq, activity }
    }

    /// With a validation loss.
    pub(crate) fn with_loss(step: u64, loss: f64) -> Self {
        let mut sample = Self::new(step);
        sample.state.validation_loss = Some(loss);
        sample
    }

    pub(crate) fn contents(&self) -> Contents<'_> {
        Contents {
            state: &self.state,
            spec: &self.spec,
            tokenizer: TOKENIZER,
            aux_files: &self.aux_files,
            weights: &self.weights,
            sharded: None,
            masters: &self.masters,
            exp_avg: &self.exp_avg,
            exp_avg_sq: &self.exp_avg_sq,
            quantized: &[],
            activity: &self.activity,
        }
    }

    pub(crate) fn save(&self, run: &mut Run) -> Result<SaveResult> {
        run.save(&self.contents(), CheckpointKind::Full)
    }
}

fn fill(spec: &ModelSpec, offset: f32) -> Parameters {
    let parameters = zeros(spec);
    for tensor in parameters.tensors() {
        let values: Vec<f32> = (0..tensor.elem_count()).map(|i| offset + (i as f32).sin()).collect();
        set(tensor, values);
    }
    parameters
}

/// FP32 tensors to read into.
pub(crate) fn zeros(spec: &ModelSpec) -> Parameters {
    Parameters::zeros(&spec.parameters(), DType::F32, &Device::Cpu).unwrap()
}

/// Overwrites the values of a tensor in place.
pub(crate) fn set(tensor: &Tensor, values: Vec<f32>) {
    tensor.slice_set(&Tensor::from_vec(values, tensor.shape(), &Device::Cpu).unwrap(), 0, 0).unwrap();
}

/// A temporary folder, in memory if the system has such a file system: the tests are about the order of operations, and
/// thousands of syncs of a real disk would take minutes.
pub(crate) fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// The values of a tensor, flat.
pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The visible and hidden names in a folder, sorted.
pub(crate) fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Numbers that look random and are the same every time (splitmix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}
