//! Storage: tensor files, model folders, the Hugging Face Hub, checkpoints.

pub mod adapter;
pub mod base;
pub mod checkpoint;
mod folder;
pub mod gguf;
pub mod hub;
pub mod tensor_file;

pub use folder::ModelFolder;
pub use gguf::Gguf;
