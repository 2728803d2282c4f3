//! Training and inference of a model: kernels, the decoder that uses them, and the optimizer.

pub mod collective;
pub mod device;
mod error;
pub(crate) mod gpu;
pub mod model;
pub mod optim;
#[cfg(feature = "cuda")]
pub(crate) mod preflight;

pub use finetune_kernels as kernels;
