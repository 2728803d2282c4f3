//! The first event of each process that trains a run.

use crate::precision::{GradScalerConfig, PrecisionPolicy, ScalerMode};
use crate::telemetry::process::ProcessId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A run's configuration and environment, so that a log can be read on its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Started {
    /// Program and version.
    pub program: String,
    /// Name of the run's folder.
    pub run: String,
    /// The training process, so that a reader of the log can check whether it is alive.
    pub process: Option<ProcessId>,
    /// The host's processor.
    pub cpu: Cpu,
    /// The device that computes: `cpu`, `cuda:0 NVIDIA …`.
    pub device: String,
    /// Operating system and architecture.
    pub os: String,
    /// Name of the model.
    pub model: String,
    /// Its dimensions.
    pub shape: ModelShape,
    /// Its `config.json`.
    #[serde(default)]
    pub model_config: serde_json::Value,
    /// Parameters of the model, without adapters.
    pub parameters: u64,
    /// The precision policy's text form: `p=f32,c=f16,g=f16,r=f32`.
    pub policy: String,
    /// The loss scaler's settings.
    pub scaler: ScalerSettings,
    /// The optimizer with its settings, as text.
    pub optimizer: String,
    /// Gradients are clipped to this global norm; `None` if they are not.
    pub max_grad_norm: Option<f32>,
    /// The learning-rate schedule, as text.
    pub schedule: String,
    /// A description of the training text.
    pub data: String,
    /// Tokens of one step over all its micro-batches.
    pub tokens_per_step: u64,
    /// Tokens of one epoch.
    pub tokens_per_epoch: u64,
    /// Epochs the run will train, possibly fractional.
    pub epochs: f64,
    /// Steps the run will attempt.
    pub total_steps: u64,
    /// The seed of every random stream.
    pub seed: u64,
    /// The step of the checkpoint that this process resumed from; earlier lines of later steps are void. `None` for a
    /// run from scratch.
    pub resumed_from: Option<u64>,
    /// The layers whose compute dtype differed from the policy's at the start, with their dtype.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub fallback: BTreeMap<String, String>,
    /// The resolved configuration.
    pub config: serde_json::Value,
}

impl Started {
    /// The precision policy; FP16 if it is not known.
    pub fn precision(&self) -> PrecisionPolicy {
        self.policy.parse().unwrap_or(PrecisionPolicy::FP16)
    }
}

/// The host's processor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// Its model name.
    pub name: String,
    /// Threads that compute.
    pub threads: usize,
    /// The widest instruction set in use.
    pub isa: String,
}

/// The dimensions of a GPT-2-like model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelShape {
    /// Layers.
    pub n_layer: usize,
    /// Attention heads.
    pub n_head: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Longest context.
    pub n_positions: usize,
    /// Size of the vocabulary.
    pub vocab_size: usize,
}

/// The loss scaler's settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScalerSettings {
    /// Whether losses are scaled at all.
    pub enabled: bool,
    /// The first scale.
    pub init_scale: f32,
    /// Factor of a growth.
    pub growth_factor: f64,
    /// Factor of a backoff.
    pub backoff_factor: f64,
    /// Clean steps between two growths.
    pub growth_interval: u32,
    /// The scale never falls below this.
    pub min_scale: f32,
    /// Whether the scale is found by trial or predicted.
    pub mode: ScalerMode,
}

impl From<&GradScalerConfig> for ScalerSettings {
    fn from(config: &GradScalerConfig) -> Self {
        Self {
            enabled: config.enabled,
            init_scale: config.init_scale,
            growth_factor: config.growth_factor,
            backoff_factor: config.backoff_factor,
            growth_interval: config.growth_interval,
            min_scale: config.min_scale,
            mode: config.mode,
        }
    }
}
