//! Storage: tensor files, model folders, the Hugging Face Hub, checkpoints.

pub mod adapter;
pub mod aux_files;
pub mod base;
pub mod checkpoint;
mod folder;
pub mod gguf;
pub mod hub;
pub(crate) mod mxfp4;
mod stored_model;
pub mod tensor_file;
mod weights;

pub use aux_files::AuxFiles;
pub use folder::ModelFolder;
pub use gguf::{Gguf, GgufModel};
pub use stored_model::{NOT_A_MODEL_FILE, StoredModel, has_gguf_extension, is_gguf};
pub use weights::{AdapterSource, WeightSource};
