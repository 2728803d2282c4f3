//! Fine-tunes language models in mixed precision (Micikevicius et al., 2018), and shows the numbers doing it.
//!
//! `docs/ARCHITECTURE.md` has the map and the order in which modules may use each other; `tests/architecture.rs` holds
//! the code to it. The recipe itself stands in `train/step.rs`.

pub mod amp;
pub mod checkpoint;
pub mod cli;
pub mod compare;
pub mod dashboard;
pub mod data;
pub mod digest;
pub mod doctor;
pub mod error;
pub mod evaluate;
pub mod export;
pub mod generate;
pub mod hub;
pub mod kernels;
pub mod lab;
pub mod model;
pub mod optim;
pub mod precision;
pub mod random;
pub mod telemetry;
pub mod tensor_file;
pub mod terminal;
pub mod train;
pub mod trained;

pub use error::{Error, Result};
