//! Sets up the engine for a test: a model with its state, the engine's batches, and its tensors by name.

use super::compare::{assert_close, max_difference, values};
use super::golden::{Case, Trajectory};
use super::processes::compute_alone;
use candle_core::{DType, Device, Tensor};
use finetune::data::{Batch, IGNORE_INDEX};
use finetune::engine::collective::{ProcessGroup, SingleProcess};
use finetune::engine::kernels::{Fused, Kernels, view};
use finetune::engine::model::{Checkpointing, Decoder, ForwardMode, Lora, ModelSpec, Parameters, Workspace};
use finetune::engine::optim::{
    AdamWConfig, GradientStats, Gradients, LrSchedule, MasterWeights, OptimizerConfig, OptimizerKind, ScheduleKind,
    Sharding,
};
use finetune::precision::{Dtype, GradScaler, GradScalerConfig, PrecisionPolicy};
use finetune::store::adapter::AdapterFolder;
use finetune::store::{ModelFolder, StoredModel, WeightSource};
use finetune::train::{Objective, StepOutcome, StepReport, TrainEngine, TrainState};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub(crate) const POLICIES: [PrecisionPolicy; 3] = [PrecisionPolicy::FP32, PrecisionPolicy::FP16, PrecisionPolicy::BF16];

/// The settings of a run besides its initial weights.
pub(crate) struct Settings {
    pub(crate) policy: PrecisionPolicy,
    pub(crate) scaler: GradScaler,
    pub(crate) adamw: AdamWConfig,
    pub(crate) lr: f64,
    pub(crate) max_grad_norm: Option<f64>,
    /// Rows and columns of a micro-batch.
    pub(crate) batch: (usize, usize),
    pub(crate) grad_accum: usize,
}

impl Settings {
    /// A policy with AdamW's usual settings, and with `scaler` if the policy needs one; one micro-batch per step.
    pub(crate) fn new(policy: PrecisionPolicy, scaler: GradScalerConfig, lr: f64, batch: (usize, usize)) -> Self {
        Self {
            policy,
            scaler: if policy.needs_loss_scale() { GradScaler::new(scaler).unwrap() } else { GradScaler::disabled() },
            adamw: AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
            lr,
            max_grad_norm: Some(1.0),
            batch,
            grad_accum: 1,
        }
    }
}

/// An engine that starts from `masters` at a constant learning rate.
pub(crate) fn engine(spec: &ModelSpec, masters: Parameters, settings: Settings) -> TrainEngine {
    engine_of(Arc::new(Fused), spec, masters, settings)
}

fn optimizer(adamw: AdamWConfig) -> OptimizerConfig {
    OptimizerConfig { adamw, kind: OptimizerKind::AdamW, rounding_seed: Some(0) }
}

/// Like `engine`, but computes with `kernels`.
pub(crate) fn engine_of(
    kernels: Arc<dyn Kernels>,
    spec: &ModelSpec,
    masters: Parameters,
    settings: Settings,
) -> TrainEngine {
    let Settings { policy, scaler, adamw, lr, max_grad_norm, batch: (rows, seq_len), grad_accum } = settings;
    let weights = MasterWeights::new(masters, policy, &*kernels).unwrap();
    let model = Decoder::new(spec, &weights.1, kernels).unwrap();
    let state = TrainState::new(weights, optimizer(adamw), scaler).unwrap();
    TrainEngine {
        group: Arc::new(SingleProcess),
        timings: Vec::new(),
        model,
        schedule: LrSchedule {
            kind: ScheduleKind::Constant,
            peak_lr: lr,
            warmup_updates: 0,
            total_updates: 0,
            min_lr_ratio: 1.0,
        },
        max_grad_norm,
        seed: 0,
        count_exponents: false,
        update_counts: None,
        objective: Objective::default(),
        workspace: Workspace::for_training(spec, policy, (rows, seq_len), Checkpointing::None, &Device::Cpu).unwrap(),
        grads: Gradients::new(&state.weights, policy, grad_accum).unwrap(),
        grad_stats: GradientStats::default(),
        state,
    }
}

/// The model in a Hugging Face folder, its weights in FP32.
pub(crate) fn read_model(folder: &Path) -> (ModelSpec, Parameters) {
    let folder = ModelFolder::open(folder).unwrap();
    let spec = folder.spec().clone();
    let masters = Parameters::zeros(&spec.parameters(), DType::F32, &Device::Cpu).unwrap();
    for (name, tensor) in masters.iter() {
        view::write_f32(tensor, |out| folder.read_part(name, 0, out)).unwrap().unwrap();
    }
    (spec, masters)
}

/// Adapters over the model in a folder, which is read in `compute`.
pub(crate) fn over_folder(folder: &Path, spec: &ModelSpec, compute: Dtype) -> Parameters {
    let weights = WeightSource::Stored(StoredModel::open(folder).unwrap());
    weights.load_adapters(spec, compute, 1, false, &Device::Cpu, "base").unwrap().parameters
}

impl Case {
    /// The engine with this case's initial weights and settings, for micro-batches of `rows` rows.
    pub(crate) fn engine(&self, policy: PrecisionPolicy, rows: usize) -> TrainEngine {
        let Some(adapter) = &self.adapter else {
            let (spec, masters) = read_model(&self.folder);
            return self.engine_over(&spec, masters, policy, rows);
        };
        let adapter = AdapterFolder::open(adapter).unwrap();
        let base = ModelFolder::open(&self.folder).unwrap();
        let spec = adapter.spec(base.spec()).unwrap();
        let over = over_folder(&self.folder, &spec, policy.compute);
        adapter.read_parameters(&spec, &over).unwrap();
        self.engine_over(&spec, over, policy, rows)
    }

    /// The engine for whole batches. Its loss scale is one at which no case overflows.
    pub(crate) fn calm_engine(&self, policy: PrecisionPolicy) -> TrainEngine {
        calm(self.engine(policy, self.rows()))
    }

    /// The engine for whole batches, with this dropout of its adapters if it has any.
    pub(crate) fn engine_with_dropout(&self, policy: PrecisionPolicy, dropout: f64) -> TrainEngine {
        let engine = self.engine(policy, self.rows());
        let spec = engine.model.spec().clone();
        let spec = ModelSpec { lora: spec.lora.clone().map(|lora| Lora { dropout, ..lora }), ..spec };
        let base = engine.state.weights.base().cloned();
        let masters = engine.state.masters.parameters().clone().with_base(base);
        self.engine_over(&spec, masters, policy, self.rows())
    }

    /// The first batch's gradients in this type, whose norm the step must have reported without the loss scale.
    pub(crate) fn gradients_in(&self, policy: PrecisionPolicy) -> BTreeMap<String, Tensor> {
        let mut engine = self.calm_engine(policy);
        let report = engine.step(&self.whole_batch(0)).unwrap();
        let gradients = unscaled(&engine, report.scale);
        let squares = gradients.values().flat_map(values).map(|x| x * x);
        let norm = squares.sum::<f64>().sqrt();
        let reported = norm_of(&report).unwrap();
        assert!((reported / norm - 1.0).abs() < 1e-4, "{} {policy}: norm {reported}, not {norm}", self.name);
        gradients
    }

    /// Asserts that FP32 logits are this case's.
    pub(crate) fn assert_logits(&self) {
        let logits = self.logits_of(&mut self.engine(PrecisionPolicy::FP32, self.rows()));
        let difference = max_difference(&logits, &self.logits);
        assert!(difference < 1e-5, "{}: logits differ by {difference:.1e}", self.name);
    }

    /// Asserts that rounding is all that separates half-precision gradients from this case's: 2^-11 and 2^-8 a value,
    /// times the depth.
    pub(crate) fn assert_half_precision_gradients(&self, [fp16, bf16]: [f64; 2]) {
        for (policy, tolerance) in [(PrecisionPolicy::FP16, fp16), (PrecisionPolicy::BF16, bf16)] {
            let what = format!("{} {policy}", self.name);
            assert_close(&what, &self.gradients_in(policy), &self.gradients, tolerance, tolerance);
        }
    }

    /// The losses of `steps` steps of `engine`, and its masters afterwards.
    pub(crate) fn learned(&self, engine: &mut TrainEngine, steps: usize) -> (Vec<f64>, Vec<Vec<f64>>) {
        let losses = (0..steps).map(|step| engine.step(&self.whole_batch(step)).unwrap().loss).collect();
        (losses, by_name(engine.state.masters.parameters()).values().map(values).collect())
    }

    /// Builds the engine of this case with other weights.
    pub(crate) fn engine_over(
        &self,
        spec: &ModelSpec,
        masters: Parameters,
        policy: PrecisionPolicy,
        rows: usize,
    ) -> TrainEngine {
        compute_alone();
        let Trajectory { adamw, scaler, .. } = &self.trajectory;
        let scaler = GradScalerConfig {
            init_scale: scaler.init_scale as f32,
            growth_factor: scaler.growth_factor,
            backoff_factor: scaler.backoff_factor,
            growth_interval: scaler.growth_interval,
            ..GradScalerConfig::default()
        };
        let (all_rows, seq_len) = self.batches[0].0.dims2().unwrap();
        let settings = Settings {
            adamw: adamw.config(),
            max_grad_norm: Some(adamw.max_grad_norm),
            grad_accum: all_rows / rows,
            ..Settings::new(policy, scaler, adamw.lr, (rows, seq_len))
        };
        engine_of(self.kernels.clone(), spec, masters, settings)
    }

    /// Batch `step` in micro-batches of `rows` rows.
    pub(crate) fn micro_batches(&self, step: usize, rows: usize) -> Vec<Batch> {
        let (inputs, targets) = &self.batches[step];
        let seq_len = inputs.dim(1).unwrap();
        let ids = |tensor: &Tensor| -> Vec<u32> {
            let ids = tensor.flatten_all().unwrap().to_vec1::<i64>().unwrap();
            ids.into_iter().map(|id| u32::try_from(id).unwrap_or(IGNORE_INDEX)).collect()
        };
        let (inputs, targets) = (ids(inputs), ids(targets));
        let part = |(inputs, targets): (&[u32], &[u32])| Batch {
            inputs: inputs.to_vec(),
            labels: targets.to_vec(),
            num_label_tokens: targets.iter().filter(|&&target| target != IGNORE_INDEX).count(),
            ..Batch::new(rows, seq_len)
        };
        inputs.chunks_exact(rows * seq_len).zip(targets.chunks_exact(rows * seq_len)).map(part).collect()
    }

    /// Batch `step` in one piece.
    pub(crate) fn whole_batch(&self, step: usize) -> Vec<Batch> {
        self.micro_batches(step, self.rows())
    }

    /// The logits `[B,T,V]` that `engine` computes for the first batch.
    pub(crate) fn logits_of(&self, engine: &mut TrainEngine) -> Tensor {
        let batch = &self.whole_batch(0)[0];
        let tokens = batch.tokens();
        engine.model.forward(&engine.state.weights, tokens, ForwardMode::Eval, &mut engine.workspace, &mut ()).unwrap();
        let logits = engine.model.logits(&engine.state.weights, engine.workspace.hidden()).unwrap();
        logits.reshape(self.logits.shape()).unwrap()
    }

    /// Asserts that the first FP32 step has this case's loss and gradients.
    pub(crate) fn assert_first_step(&self) {
        let engine = &mut self.engine(PrecisionPolicy::FP32, self.rows());
        let report = engine.step(&self.whole_batch(0)).unwrap();
        let expected = &self.trajectory.fp32[0];
        assert!((report.loss - expected.loss).abs() < 2e-6 * expected.loss, "{}: loss {}", self.name, report.loss);
        let norm = norm_of(&report).unwrap();
        assert!((norm / expected.norm.unwrap() - 1.0).abs() < 1e-5, "{}: norm {norm}", self.name);
        assert_close(&self.name, &unscaled(engine, 1.0), &self.gradients, 1e-5, 1e-5);
    }

    /// Asserts that twenty FP32 steps have this case's losses and end in its parameters.
    pub(crate) fn assert_twenty_steps(&self) {
        self.assert_twenty_steps_of(&mut self.engine(PrecisionPolicy::FP32, self.rows()), self.rows());
    }

    /// Like `assert_twenty_steps`, but with micro-batches of `rows` rows.
    pub(crate) fn assert_twenty_steps_of(&self, engine: &mut TrainEngine, rows: usize) {
        for (step, expected) in self.trajectory.fp32.iter().enumerate() {
            let report = engine.step(&self.micro_batches(step, rows)).unwrap();
            let error = (report.loss - expected.loss).abs();
            let norm = norm_of(&report).unwrap();
            assert!(error < 1e-5 * expected.loss, "{}: loss {} at step {step}", self.name, report.loss);
            let norm_error = (norm / expected.norm.unwrap() - 1.0).abs();
            assert!(norm_error < 1e-4, "{}: norm {norm} at step {step}", self.name);
        }
        // In FP32 the working copy equals the masters, and every process has all of it.
        assert_close(&self.name, &by_name(&engine.state.weights), &self.final_parameters, 2e-5, 1e-3);
    }

    /// Rows of a batch.
    pub(crate) fn rows(&self) -> usize {
        self.batches[0].0.dim(0).unwrap()
    }
}

/// The same engine at a loss scale at which no case overflows.
pub(crate) fn calm(mut engine: TrainEngine) -> TrainEngine {
    // The scale of a run without one stays 1.
    engine.state.scaler.set_scale(1024.0).unwrap();
    engine
}

/// The same engine as one process of `group`, which keeps a shard of its masters and moments.
pub(crate) fn in_group(group: Arc<dyn ProcessGroup>, engine: TrainEngine, grad_accum: usize) -> TrainEngine {
    let TrainState { masters, weights, adamw, scaler, .. } = engine.state;
    let weights = (masters.shard(&*group, &weights).unwrap(), weights);
    let state = TrainState::new(weights, optimizer(adamw.config), scaler).unwrap();
    let grads =
        Gradients::sharded(&state.weights, PrecisionPolicy::FP32, grad_accum, &*group, Sharding::Optimizer).unwrap();
    TrainEngine { group, state, grads, ..engine }
}

/// The norm of an applied step's gradients.
fn norm_of(report: &StepReport) -> Option<f64> {
    match report.outcome {
        StepOutcome::Applied { grad_norm, .. } => Some(grad_norm),
        StepOutcome::Skipped => None,
    }
}

/// The tensors by name.
pub(crate) fn by_name(parameters: &Parameters) -> BTreeMap<String, Tensor> {
    parameters.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect()
}

/// The last step's gradients by name, without the loss scale it ran at.
pub(crate) fn unscaled(engine: &TrainEngine, scale: f32) -> BTreeMap<String, Tensor> {
    let unscale = |(name, tensor): (&str, &Tensor)| {
        let tensor = tensor.to_dtype(DType::F64).unwrap();
        (name.to_owned(), (tensor / f64::from(scale)).unwrap())
    };
    engine.grads.total().iter().map(unscale).collect()
}
