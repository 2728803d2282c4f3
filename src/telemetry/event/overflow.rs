//! Overflows: the tensors that were not finite, the first of them, and layers that change their dtype because of it.

use super::gradients::TensorRecord;
use super::step::ScaleUpdate;
use crate::telemetry::float;
use serde::{Deserialize, Serialize};
use strum::Display;

/// A skipped step: the tensors that overflowed and the change of the scale.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overflow {
    /// The step.
    pub step: u64,
    /// The scale before and after.
    pub scale: ScaleUpdate,
    /// The loss: finite if the backward pass overflowed, not finite if the forward pass did.
    #[serde(with = "float")]
    pub loss: f32,
    /// Largest finite magnitude among all scaled gradients.
    pub max_abs: f32,
    /// The tensors with infinities or NaNs, in parameter order.
    pub tensors: Vec<TensorRecord>,
    /// The first non-finite tensor, if it was traced and found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_nonfinite: Option<FirstNonFinite>,
}

/// The first tensor of a step, in order of computation, that was not finite. Found by repeating the step's passes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FirstNonFinite {
    /// The pass.
    pub pass: Pass,
    /// The layer or operation: `h.3.mlp.c_fc`, `h.3.attn`, `lm_head`.
    pub layer: String,
    /// The layer's tensor: `output`, or the gradient of its `output`, `input`, `weight` or `bias`, such as
    /// `input_gradient`.
    pub tensor: String,
    /// Elements.
    pub count: u64,
    /// Infinities.
    pub inf: u64,
    /// NaNs.
    pub nan: u64,
    /// Largest finite magnitude.
    pub max_abs: f32,
    /// The micro-batch of the step, from 0.
    pub micro_batch: usize,
    /// The sequences of the micro-batch with infinities or NaNs, from 0. Empty for the gradient of a weight or bias,
    /// which sums over all sequences.
    pub samples: Vec<usize>,
}

/// A layer that changed its compute dtype: to a wider one after too many overflows, or to or from FP8 by its gradient
/// variance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DtypeChange {
    /// The step after which it changed.
    pub step: u64,
    /// A block, `h.3`, or `head`: everything outside the blocks.
    pub layer: String,
    /// The previous dtype.
    pub from: String,
    /// The new dtype.
    pub to: String,
    /// The number of recent overflows that made it fall back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflows: Option<usize>,
    /// The running mean of its gradient variance that caused a change to or from FP8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variance: Option<f64>,
    /// Whether it returned to the policy's dtype.
    pub restored: bool,
}

/// A pass of a step's computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Pass {
    /// From tokens to the loss.
    #[default]
    Forward,
    /// From the loss to gradients.
    Backward,
}
