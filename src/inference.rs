//! Uses a trained model: opens it, generates text, evaluates, exports.

pub mod chat;
pub mod evaluate;
pub mod exact_match;
pub mod export;
pub mod fp16_check;
pub mod generate;
pub mod merge;
pub mod mismatch;
pub mod trained;

use crate::Error;
use crate::engine::model::{Decoder, Parameters};
use crate::precision::PrecisionPolicy;

/// A model that computes with its weights under a policy.
#[derive(Clone, Copy, Debug)]
pub struct ModelView<'a> {
    /// The architecture.
    pub decoder: &'a Decoder,
    /// The weights.
    pub weights: &'a Parameters,
    /// The types of its buffers.
    pub policy: PrecisionPolicy,
}

impl<'a> ModelView<'a> {
    /// A model that [`TrainedModel::load`](trained::TrainedModel::load) has loaded.
    pub fn new((decoder, weights): &'a (Decoder, Parameters), policy: PrecisionPolicy) -> Self {
        Self { decoder, weights, policy }
    }
}

fn not_finite() -> Error {
    let message =
        "its logits are not finite; use `--dtype bf16` or `--dtype fp32` instead of fp16, or an earlier checkpoint";
    Error::model("the model", message)
}
