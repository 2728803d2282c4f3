//! The hardware under the kernels: memory, threads, and the peak compute rate of the processor.

pub mod allocator;
pub mod peak;
pub mod spin;
