//! What trains and runs a model: kernels, the decoder over them, optimizer.

pub mod collective;
pub mod device;
pub mod kernels;
pub mod model;
pub mod optim;
