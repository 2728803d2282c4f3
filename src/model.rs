//! GPT-2: its shape, its parameters, its layers, and the folders it is stored in.

mod config;
mod folder;
mod gpt2;
mod layers;
mod parameters;
mod watch;

pub use config::Gpt2Config;
pub use folder::ModelFolder;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use gpt2::device::{DeviceGradients, DevicePass};
pub use gpt2::{Gpt2, KvCache, Mode, Tokens, Workspace, WorkspaceBytes, candle_dtype};
pub use parameters::{Entry, Parameters};
pub use watch::{Layer, Part, Place, Watch};
