//! CUDA kernels of our own: the `.cu` files beside their CPU twins, and how each is launched.
//!
//! They are to replace single operations of candle's on GPUs where they are faster. Until then they are compiled with nvcc
//! and run by their tests only: a [`Queue`](launch::Queue) takes launches in order, and the tests' is an emulator, which runs
//! the kernels on a CPU and watches every access. They have never run on a GPU.

pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod emulator;
pub(crate) mod launch;
pub(crate) mod layer_norm;
pub(crate) mod sums;
pub(crate) mod survey;

mod tests;
