//! What trains and runs a model: kernels, the decoder over them, optimizer.

pub mod collective;
pub mod device;
mod error;
pub(crate) mod gpu;
pub mod model;
pub mod optim;
#[cfg(feature = "cuda")]
pub(crate) mod preflight;

pub use finetune_kernels as kernels;
