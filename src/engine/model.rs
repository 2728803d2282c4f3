//! Decoders: model families as data, and one traversal of the layers for all families.

mod adapter;
mod decoder;
mod dora;
mod families;
mod family;
mod gemm_shapes;
mod hook;
mod layers;
mod lora;
mod mixture;
mod module_names;
mod parameters;
mod quantized_base;
mod rope;
mod spec;
mod workspace;

pub use decoder::{Decoder, ForwardMode, InputIds, KvCache};
pub(crate) use families::of_gguf;
pub use family::Family;
pub(crate) use family::{ConfigReader, GgufFormat, one_or_more};
pub use hook::{Hook, HookPoint, TensorKind};
pub use lora::{ALL_LINEAR, Lora, init_dora_magnitude, merge_adapters};
pub(crate) use lora::{is_parameter, stacked_experts};
pub use mixture::{ExpertChoices, Experts, differing_choices};
pub use parameters::{Parameters, sample_init};
pub use rope::{QueryScale, Rope, RopeType};
pub use spec::{
    Biases, DropoutRates, EmbeddingScale, LinearRole, ModelSpec, ModuleId, ModuleOp, NormRole, ParamInit, ParamRole,
    ParamSpec, QkNorm, Recurrence, RecurrentLayers, Sliding,
};
pub use workspace::{Checkpointing, Workspace, WorkspaceBytes, candle_dtype};
