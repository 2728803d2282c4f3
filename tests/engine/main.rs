//! The engine as a library: numbers against PyTorch, transformers, PEFT and candle, training as a whole, and files. One
//! program, because each links everything once more.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first failure and prints its measurements"
)]

#[path = "../common/mod.rs"]
mod common;

mod amp;
mod async_save;
mod candle_transformers;
mod checkpoint;
mod comparators;
mod consistency;
mod convergence;
mod distributed;
mod fallback;
mod fp8;
mod freeze;
mod gguf;
mod gguf_models;
mod gradscaler;
mod layers;
mod lora;
mod lost_updates;
mod mismatch;
mod mixtures;
mod objectives;
mod packing;
mod parity;
mod predictive;
mod probe;
mod qlora;
mod real_weights;
mod run;
mod training_loop;
mod transformers;
