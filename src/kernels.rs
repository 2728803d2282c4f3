//! The engine's fused operations, one file an operation, and what they share.
//!
//! Kernels work on plain slices of `f32`, `f16` or `bf16`; sums and everything non-linear run in FP32.

#![allow(clippy::inline_always, reason = "code inlines into `isa::vectorize`, or else misses its vector instructions")]

pub mod convert;
pub mod isa;
pub mod math;
pub mod matmul;
pub mod peak;
