//! What the kernels run on: memory, threads, and the fastest that the processor can compute.

pub mod allocator;
pub mod awake;
pub mod peak;
