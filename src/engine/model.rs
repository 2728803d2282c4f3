//! GPT-2: its shape, its parameters and its layers.

mod config;
mod gpt2;
mod layers;
mod parameters;
mod watch;

pub use config::Gpt2Config;
pub use gpt2::{Gpt2, KvCache, Mode, Tokens, Workspace, WorkspaceBytes, candle_dtype};
pub use parameters::{Entry, Parameters};
pub use watch::{Layer, Part, Place, Watch};
