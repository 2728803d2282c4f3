//! Overflows: which tensors were not finite, where it began, and which layers change their type because of it.

use super::gradients::TensorRecord;
use super::step::ScaleMove;
use crate::telemetry::float;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A skipped step: where it overflowed and what that did to the scale.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overflow {
    /// The step.
    pub step: u64,
    /// The scale before and after.
    pub scale: ScaleMove,
    /// The loss, which tells an overflow of the backward pass (finite) from one of the forward pass (not finite).
    #[serde(with = "float")]
    pub loss: f32,
    /// Largest finite magnitude among all scaled gradients.
    pub max_abs: f32,
    /// The tensors with infinities or NaNs, in parameter order.
    pub tensors: Vec<TensorRecord>,
    /// Where it began, if that was looked for and found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// The first tensor of a step, in order of computation, that was not finite. Found by running the step's passes again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Origin {
    /// The pass.
    pub pass: Pass,
    /// The layer or operation: `h.3.mlp.c_fc`, `h.3.attn`, `lm_head`.
    pub layer: String,
    /// What of it: `output`, or the gradient of its `output`, `input`, `weight` or `bias`, such as `input_gradient`.
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
    /// The sequences of the micro-batch with infinities or NaNs, from 0. Empty for a weight's or bias's gradient, which
    /// is a sum over all of them.
    pub samples: Vec<usize>,
}

/// A layer that now computes in another type: wider after too many overflows, FP8 or not by its gradient's variance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Retyped {
    /// The step after which it did.
    pub step: u64,
    /// A block, `h.3`, or `head`: all that is outside the blocks.
    pub layer: String,
    /// The type it has computed in.
    pub from: String,
    /// The type it will compute in.
    pub to: String,
    /// Its overflows of late that made it fall back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflows: Option<usize>,
    /// The running mean of its gradient's variance that moved it into FP8 or out of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variance: Option<f64>,
    /// Whether it computes in the policy's type again.
    pub back: bool,
}

/// Half of a step's computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// From tokens to the loss.
    #[default]
    Forward,
    /// From the loss to gradients.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}
