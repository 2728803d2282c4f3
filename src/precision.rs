//! Number formats, precision policies, loss scaling and gradient statistics, as pure values and state machines.
//!
//! Nothing here depends on tensors or devices, so every rule of mixed precision is tested without a model.

mod fallback;
mod fp8;
mod grad_scaler;
mod headroom;
mod policy;
mod scaler_config;

pub use finetune_kernels::precision::*;

pub use fallback::{Fallback, FallbackRule, PrecisionConfig, PrecisionUnit, UnitRecord, UnitSet};
pub use fp8::{AmaxHistory, BlockRanges, Fp8Config, Fp8State, scale_for};
pub use grad_scaler::{GradScaler, ScaleChange, ScalerState, StateDict};
pub use headroom::Headroom;
pub use policy::{Dtype, PrecisionPolicy};
pub use scaler_config::{GradScalerConfig, OnOverflow, ScalerMode, exact_log2, scale_text};
