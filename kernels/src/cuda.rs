//! CUDA kernels of our own, which take the place of single operations of candle's: the `.cu` files beside their CPU twins, and
//! how each is launched.
//!
//! A `Queue` takes launches in order: candle's stream on a GPU; or in tests an emulator, which runs the kernels
//! on a CPU and checks every access. A run uses each of them only after its preflight on the run's GPU.

mod adamw;
mod attention;
mod cross_entropy;
mod elementwise;
mod embedding;
#[cfg(test)]
mod emulator;
mod heads;
mod launch;
mod norm;
#[cfg(feature = "cuda")]
mod own;
#[cfg(feature = "cuda")]
mod preflight;
#[cfg(feature = "cuda")]
mod product;
#[cfg(feature = "cuda")]
mod queue;
mod survey;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
use {
    crate::Plain,
    candle_core::{Device, Result},
    std::{collections::BTreeSet, sync::Arc},
};

#[cfg(feature = "cuda")]
pub use {own::Operation, preflight::check};

/// candle's kernels on `device`, with our own for `operations`.
#[cfg(feature = "cuda")]
pub fn replacing(operations: BTreeSet<Operation>, device: &Device) -> Result<Plain> {
    if operations.is_empty() {
        return Ok(Plain::new());
    }
    Ok(Plain::with(Arc::new(own::Own::new(device, operations)?)))
}
