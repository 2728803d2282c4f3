//! Measurements between steps: validation, samples, FP32 probes.

use super::gradients::GradStats;
use super::objective::ObjectiveMetrics;
use crate::telemetry::float;
use serde::{Deserialize, Serialize};

/// A validation result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Validation {
    /// Steps attempted before it.
    pub step: u64,
    /// Mean loss; of fine-tuning the cross-entropy in nats.
    #[serde(with = "float")]
    pub loss: f64,
    /// e^loss; NaN if the loss is not a cross-entropy.
    #[serde(with = "float")]
    pub perplexity: f64,
    /// Tokens it was averaged over.
    pub tokens: u64,
    /// Metrics of the objective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub objective: Option<ObjectiveMetrics>,
}

impl Validation {
    /// The perplexity, if the loss is a cross-entropy.
    pub fn perplexity(&self) -> Option<f64> {
        (self.objective.is_none() || !self.perplexity.is_nan()).then_some(self.perplexity)
    }
}

/// A generated text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SampleText {
    /// Steps attempted before it.
    pub step: u64,
    /// The prompt.
    pub prompt: String,
    /// The text generated, without the prompt.
    pub text: String,
}

/// One batch's gradients in FP32 compared with the run's precision, to find values that flush to zero despite loss
/// scaling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fp32Probe {
    /// The step whose batch it was.
    pub step: u64,
    /// The loss scale of that step.
    pub loss_scale: f32,
    /// The FP32 gradients, *unscaled*.
    pub grads: GradStats,
    /// The part that the run's gradient dtype flushed to zero, per tensor, in parameter order.
    pub tensors: Vec<FlushedTensor>,
    /// The largest activations of the FP32 forward pass, by layer in order of computation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub activations: Vec<ActivationMax>,
    /// The share of routers' decisions that differ from FP32's: of tokens and blocks with a different set of experts.
    /// `None` without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<f64>,
}

impl Fp32Probe {
    /// log2 of the smallest FP32 gradient above zero.
    pub fn log2_min(&self) -> Option<f64> {
        self.grads.min_abs.map(|min| f64::from(min).log2())
    }

    /// The share of the elements that are not zero in FP32 that were flushed to zero.
    pub fn flushed_share(&self) -> Option<f64> {
        let (flushed, nonzero) = self.underflow();
        (nonzero > 0).then(|| flushed as f64 / nonzero as f64)
    }

    /// Elements flushed to zero, and elements that are not zero in FP32.
    pub fn underflow(&self) -> (u64, u64) {
        self.tensors.iter().fold((0, 0), |(flushed, of): (u64, u64), tensor| {
            (flushed.saturating_add(tensor.flushed), of.saturating_add(tensor.nonzero))
        })
    }
}

/// The largest magnitude of a layer's output.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ActivationMax {
    /// The layer: `h.3.mlp.c_fc`.
    pub name: String,
    /// Largest finite magnitude.
    pub max_abs: f32,
}

/// The part of a tensor's gradient that the run's dtype flushed to zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlushedTensor {
    /// The parameter's name.
    pub name: String,
    /// Elements.
    pub count: u64,
    /// Elements that are not zero in FP32.
    pub nonzero: u64,
    /// Elements that are not zero in FP32 but zero in the run's dtype: true underflow.
    pub flushed: u64,
}
