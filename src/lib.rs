//! Fine-tunes language models in mixed precision (Micikevicius et al., 2018), and shows the numbers doing it.
//!
//! The modules stand in dependency order: each uses only those above it. `tests/architecture.rs` holds that order.

pub mod dashboard;
pub mod error;
pub mod telemetry;

pub use error::{Error, Result};
