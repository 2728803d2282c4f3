//! Number formats, precision policies, loss scaling and gradient statistics, as pure values and state machines.
//!
//! Nothing here depends on tensors or devices, so every rule of mixed precision is tested without a model.

mod exponent_histogram;
mod fallback;
mod float_format;
mod fp8;
mod grad_scaler;
mod headroom;
mod optimizer_stages;
mod policy;
mod scaler_config;
mod tensor_stats;

pub use exponent_histogram::{ExponentHistogram, RangeShares};
pub use fallback::{Fallback, FallbackRule, PrecisionConfig, Unit, UnitRecord};
pub use float_format::{FloatClass, FloatFormat};
pub use fp8::{AmaxHistory, Fp8Config, Fp8State, scale_for};
pub use grad_scaler::{GradScaler, ScaleChange, ScalerState, StateDict};
pub use headroom::Headroom;
pub use optimizer_stages::OptimizerStages;
pub use policy::{Dtype, PrecisionPolicy};
pub use scaler_config::{GradScalerConfig, HysteresisRefill, OnOverflow, ScalerPolicy};
pub use tensor_stats::{Element, TensorStats};
