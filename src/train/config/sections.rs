//! The sections of a configuration file with their defaults. `finetune config --explain` prints the fields' comments.

use crate::data::LossOn;
use crate::engine::model::ALL_LINEAR;
use crate::engine::model::Keep;
use crate::engine::optim::{OptimizerKind, ScheduleKind};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Batches, length of the run, evaluation and samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Sequences in a micro-batch.
    pub batch_size: usize,
    /// Tokens in a sequence; at most the model's context.
    pub seq_len: usize,
    /// Micro-batches in a step.
    pub grad_accum: usize,
    /// What the backward pass recomputes instead of keeping it: `none`, or `block` for everything inside a block (gradient
    /// checkpointing). The numbers are the same; a step takes less memory and about a third longer.
    pub recompute: Keep,
    /// The part of chats and of prompts with answers that is trained on: `answers`, `last_answer`, or `all`.
    pub loss_on: LossOn,
    /// Whether to pack several short documents into a row. Attention stays within each document, and positions restart in each.
    pub packing: bool,
    /// Whether to cut a batch that does not fit into memory into smaller micro-batches, and to recompute blocks if need be. The
    /// run saves what was chosen.
    pub auto_batch: bool,
    /// How Adam's moments are stored: `adamw` in FP32, `adamw8bit` in 8 bits with a maximum for each block of 256.
    pub optimizer: OptimizerKind,
    /// Passes over the training text, instead of `steps`; 1 if neither is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Number of steps, instead of `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Steps between two validations; 0 for only one at the end.
    pub eval_every: u64,
    /// Maximum number of validation batches; 0 for all.
    pub eval_batches: u64,
    /// Steps between two text samples; 0 for only one at the end.
    pub sample_every: u64,
    /// Tokens of a sample.
    pub sample_tokens: usize,
    /// Sampling temperature; 0 takes the likeliest token.
    pub temperature: f64,
    /// The prompt of a sample.
    pub prompt: String,
    /// Stop after this many evaluations without a new best validation loss; 0 for never.
    pub early_stopping: u64,
}

/// Low-rank adapters, trained in place of the model's parameters. Their base is kept once, in the compute type, and not changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSection {
    /// The rank; without one the model itself is trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r: Option<usize>,
    /// Factor of the adapters' output, divided by the rank; twice the rank is usual.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Dropout of the adapters' input.
    pub dropout: f64,
    /// Whether the factor is divided by the root of the rank instead (rsLoRA).
    pub rslora: bool,
    /// Whether the length of each output's weights is trained too (DoRA).
    pub dora: bool,
    /// The linear layers that have an adapter, by the ends of their names; `all-linear` for all within the blocks.
    pub targets: Vec<String>,
    /// Other layers that are trained as they are.
    pub modules_to_save: Vec<String>,
}

impl Default for LoraSection {
    fn default() -> Self {
        let targets = vec![ALL_LINEAR.to_owned()];
        Self { r: None, alpha: None, dropout: 0.0, rslora: false, dora: false, targets, modules_to_save: Vec::new() }
    }
}

impl LoraSection {
    pub(super) fn validate(&self) -> Result<()> {
        const LARGEST: usize = 1 << 16;
        match (self.r, self.alpha) {
            (None, Some(_)) => {
                return Err(Error::config("lora.r", "is missing beside `lora.alpha`; give the rank, such as 16"));
            }
            (Some(r), _) if r == 0 || r > LARGEST => {
                return Err(Error::config("lora.r", format!("`{r}` is not a rank from 1 to {LARGEST}")));
            }
            (Some(r), None) => {
                let message = format!("is missing beside `lora.r`; twice the rank is usual: `alpha={}`", 2 * r);
                return Err(Error::config("lora.alpha", message));
            }
            (_, Some(alpha)) if !(alpha > 0.0 && alpha <= 1e6) => {
                return Err(Error::config("lora.alpha", format!("`{alpha}` is not a number above 0 and up to 1e6")));
            }
            _ => {}
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::config("lora.dropout", format!("`{}` is not a probability in [0, 1)", self.dropout)));
        }
        if self.targets.is_empty() {
            let message = format!("names no layer; give names such as `q_proj`, or `{ALL_LINEAR}`");
            return Err(Error::config("lora.targets", message));
        }
        Ok(())
    }
}

/// AdamW and clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// The highest learning rate.
    pub lr: f64,
    /// Decay rates of Adam's moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of parameters of two or more dimensions.
    pub weight_decay: f64,
    /// Clip gradients to this global norm; 0 for no clipping.
    pub max_grad_norm: f64,
}

/// The learning rate over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleSection {
    /// `constant`, `linear` or `cosine`.
    pub kind: ScheduleKind,
    /// Warm-up as a share of the run's steps.
    pub warmup_ratio: f64,
    /// Warm-up steps, instead of the share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Ratio of the final learning rate to the highest.
    pub min_lr_ratio: f64,
}

/// Dropout rates in training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DropoutSection {
    /// For the sum of the embeddings.
    pub embedding: f64,
    /// For the branches added to the residual stream.
    pub residual: f64,
    /// For the attention weights.
    pub attention: f64,
}

/// Checkpoints: where, when, and how many to keep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// The folder of all runs.
    pub dir: PathBuf,
    /// The run's folder within; by default named after model and dtype, with a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// Steps between two checkpoints; 0 for only one at the end.
    pub save_every: u64,
    /// Number of checkpoints to keep; older ones are removed when a newer one is complete.
    pub keep_last: usize,
    /// Whether to keep the checkpoint with the best validation loss too.
    pub keep_best: bool,
    /// Steps between two weights-only checkpoints, which are small but cannot be resumed; 0 for none.
    pub weights_every: u64,
    /// Number of weights-only checkpoints to keep, besides the best one with `keep_best`.
    pub keep_weights: usize,
    /// Seconds to retry a failing last checkpoint of a run, before trying the weights alone.
    pub retry_s: u64,
}

/// What is measured and logged, and how often.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetrySection {
    /// Steps between two printed lines without a dashboard.
    pub log_every: u64,
    /// Steps between two tables of all tensors (every overflow has one too).
    pub tensors_every: u64,
    /// Steps between two counts of gradient exponents. candle's operations cannot count them on a GPU: each such step copies all
    /// gradients to the host, unless the project's own survey counts.
    pub exponents_every: u64,
    /// Steps between two FP32 probes; 0 for none.
    pub probe_every: u64,
    /// Steps between two measurements of each layer's gradient variance; 0 for none.
    pub variance_every: u64,
    /// Steps between two records, and printed lines, of each layer's largest gradient; 0 for none.
    pub layer_maxima_every: u64,
    /// Whether the passes of an overflowing step run once more, to find the tensor where it began.
    pub attribute_overflows: bool,
    /// Whether scalars and histograms are written for TensorBoard too, into `tensorboard` in the run's folder.
    pub tensorboard: bool,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            batch_size: 8,
            seq_len: 128,
            grad_accum: 1,
            epochs: None,
            steps: None,
            eval_every: 100,
            eval_batches: 16,
            sample_every: 0,
            sample_tokens: 64,
            temperature: 0.8,
            prompt: String::new(),
            early_stopping: 0,
            recompute: Keep::All,
            loss_on: LossOn::Answers,
            packing: false,
            auto_batch: false,
            optimizer: OptimizerKind::AdamW,
        }
    }
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self { lr: 5e-5, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.01, max_grad_norm: 1.0 }
    }
}

impl Default for ScheduleSection {
    fn default() -> Self {
        Self { kind: ScheduleKind::Cosine, warmup_ratio: 0.05, warmup_steps: None, min_lr_ratio: 0.1 }
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            dir: "checkpoints".into(),
            run: None,
            save_every: 500,
            keep_last: 2,
            keep_best: true,
            weights_every: 0,
            keep_weights: 2,
            retry_s: 60,
        }
    }
}

impl Default for TelemetrySection {
    fn default() -> Self {
        Self {
            log_every: 128,
            tensors_every: 16,
            exponents_every: 1,
            probe_every: 0,
            variance_every: 0,
            layer_maxima_every: 0,
            attribute_overflows: true,
            tensorboard: false,
        }
    }
}
