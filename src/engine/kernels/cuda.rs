//! The kernels on NVIDIA GPUs: the `.cu` files beside their CPU twins, and how each is launched.
//!
//! A [`Queue`](launch::Queue) takes launches in order: a stream of the driver, or the tests' emulator, which runs the same
//! kernels on a CPU and watches every access. Arguments, grids and scratch memory are thus tested without a GPU; how fast the
//! kernels are, and what they do on a GPU, is not known.

pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
#[cfg(feature = "cuda")]
pub(crate) mod driver;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod launch;
pub(crate) mod layer_norm;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod peak;
pub(crate) mod product;
pub(crate) mod step;
pub(crate) mod sums;
pub(crate) mod survey;

#[cfg(test)]
pub(crate) mod emulator;
#[cfg(test)]
pub(crate) mod testbed;
#[cfg(test)]
mod tests;
