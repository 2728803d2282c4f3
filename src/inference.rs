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

fn not_finite() -> Error {
    let message =
        "its logits are not finite; use `--dtype bf16` or `--dtype fp32` instead of fp16, or an earlier checkpoint";
    Error::model("the model", message)
}
