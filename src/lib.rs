//! Fine-tunes language models in mixed precision (Micikevicius et al., 2018), and shows the numbers doing it.
//!
//! `docs/ARCHITECTURE.md` maps the modules and the order in which they may use each other, which
//! `tests/architecture.rs` enforces. The training step is in `train/step.rs`.

pub mod amp;
pub mod cli;
mod compare;
pub mod data;
pub mod digest;
mod doctor;
pub mod engine;
pub mod error;
pub mod inference;
pub mod lab;
pub mod precision;
mod protobuf;
mod report;
pub mod screen;
mod settings;
pub mod store;
pub mod telemetry;
mod temporary;
pub mod train;
pub mod ui;
pub mod untrusted;

pub use error::{Error, Result};
pub use finetune_kernels::random;
