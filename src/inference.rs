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
