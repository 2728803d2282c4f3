//! What lies on disks and on the Hub: tensor files, model folders, downloads, checkpoints.

pub mod checkpoint;
mod folder;
pub mod gguf;
pub mod hub;
pub mod tensor_file;

pub use folder::ModelFolder;
pub use gguf::Gguf;
