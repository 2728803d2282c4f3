//! Fine-tunes language models in mixed precision (Micikevicius et al., 2018), and shows the numbers doing it.
//!
//! The modules stand in dependency order: each uses only those above it. `tests/architecture.rs` holds that order.

pub mod checkpoint;
pub mod digest;
pub mod error;
pub mod model;
pub mod tensor_file;

pub use error::{Error, Result};
