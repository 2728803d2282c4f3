//! The project's own CUDA kernels for single operations: the `.cu` files next to their CPU counterparts, and
//! the launch code of each.
//!
//! A `Queue` takes launches in order: candle's stream on a GPU; or in tests an emulator, which runs the kernels
//! on a CPU and checks every access. A run uses each of them only after its preflight on the run's GPU.

mod adamw;
mod attention;
mod cross_entropy;
mod dispatch;
mod elementwise;
mod embedding;
#[cfg(test)]
mod emulator;
mod graph;
mod inputs;
mod launch;
mod norm;
#[cfg(feature = "cuda")]
mod preflight;
#[cfg(feature = "cuda")]
mod product;
#[cfg(feature = "cuda")]
mod queue;
mod rope;
mod summary;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
use {
    crate::{CandleKernels, Chain, Kernels},
    candle_core::{Device, Result},
    std::{collections::BTreeSet, sync::Arc},
};

pub use dispatch::KernelFamily;
#[cfg(feature = "cuda")]
pub use preflight::check;

/// The CUDA kernels of `families`, and candle's for all other operations.
#[cfg(feature = "cuda")]
pub fn before_candle(families: BTreeSet<KernelFamily>, device: &Device) -> Result<Arc<dyn Kernels>> {
    if families.is_empty() {
        return Ok(Arc::new(CandleKernels));
    }
    let queue = queue::CudaQueue::new(device.as_cuda_device()?);
    Ok(Arc::new(Chain(vec![Box::new(dispatch::CudaKernels::new(queue, families)), Box::new(CandleKernels)])))
}
