//! The engine as a library: numbers against PyTorch, transformers, PEFT and candle, training as a whole, and files. One program,
//! because each links everything once more.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first thing that is not as it should be, and prints what it has measured"
)]

#[path = "../common"]
mod common {
    pub(crate) mod compare;
    pub(crate) mod engine;
    pub(crate) mod family_oracle;
    pub(crate) mod gguf;
    pub(crate) mod golden;
    pub(crate) mod launch;
    pub(crate) mod layer;
    pub(crate) mod oracle;
    pub(crate) mod processes;
    pub(crate) mod python;
}
#[path = "../support/checkpoint.rs"]
mod support;

mod amp;
mod candle_transformers;
mod checkpoint;
mod comparators;
mod fallback;
mod families;
mod family_layers;
mod fp8;
mod gguf;
mod gguf_models;
mod gradscaler;
mod layers;
mod lora;
mod oracle;
mod packing;
mod parity;
mod predictive;
mod probe;
mod qlora;
mod saving;
mod tracking;
mod training_loop;
mod transformers;
