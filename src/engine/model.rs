//! GPT-2: its shape, its parameters and its layers.

mod config;
mod gpt2;
mod layers;
mod parameters;
mod watch;

pub use config::Gpt2Config;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use gpt2::device::{DeviceGradients, DevicePass};
pub use gpt2::{Gpt2, KvCache, Mode, Tokens, Workspace, WorkspaceBytes, candle_dtype};
pub use parameters::{Entry, Parameters};
pub use watch::{Layer, Part, Place, Watch};
