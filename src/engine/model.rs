//! Decoders: what a family of models is, as data, and the one walk over its layers.

mod adapter;
mod architecture;
mod blocks;
mod decoder;
mod dora;
mod gemma3;
mod gpt2;
mod hook;
mod layers;
mod llama;
mod lora;
mod mistral;
mod parameters;
mod products;
mod qwen2;
mod qwen3;
mod rope;
mod spec;
mod workspace;

pub(crate) use architecture::{Keys, one_or_more};
pub use decoder::{Decoder, KvCache, Mode, Tokens};
pub use hook::{Hook, Part, Place};
pub use lora::{ALL_LINEAR, Lora, merge, set_output_norms};
pub use parameters::{Parameters, draw};
pub use rope::{Rope, RopeType};
pub use spec::{
    Biases, DropoutRates, Family, Init, Layer, LinearRole, ModelSpec, NormRole, Op, ParamRole, ParamSpec, Sliding,
};
pub use workspace::{Keep, Workspace, WorkspaceBytes, candle_dtype};
