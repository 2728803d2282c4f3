//! The engine's fused operations, one file an operation, and what they share.
//!
//! An operation reads and writes whole candle tensors; its storage may be FP32, FP16 or BF16. What is not linear, and
//! every sum, is computed in FP32. Softmax, layer-norm statistics and losses never exist in half precision.

#![allow(clippy::inline_always, reason = "code inlines into `isa::vectorize`, or else misses its vector instructions")]

pub mod adamw;
pub mod allocator;
pub mod attention;
pub mod convert;
pub mod cross_entropy;
#[cfg(all(test, feature = "emulator"))]
pub(crate) mod cuda;
pub mod decode_attention;
pub mod dropout;
pub mod embedding;
pub mod fp8;
pub mod gelu;
pub mod isa;
pub mod layer_norm;
pub mod linear;
pub mod math;
pub mod matmul;
pub mod peak;
pub mod residual;
pub mod rows;
pub mod survey;
pub mod view;
