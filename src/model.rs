//! GPT-2: its shape and its parameters.

mod config;
mod folder;

pub use config::Gpt2Config;
pub use folder::ModelFolder;
