//! Fine-tunes language models in mixed precision (Micikevicius et al., 2018), and shows the numbers doing it.
//!
//! The modules stand in dependency order: each uses only those above it. `tests/architecture.rs` holds that order.

pub mod error;
pub mod precision;

pub use error::{Error, Result};
