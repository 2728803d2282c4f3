//! The hardware under the kernels: memory, threads, and the peak compute rate of the processor.

pub mod allocator;
pub mod awake;
pub mod peak;
