//! Mixed precision for any candle program: the gradient scaler of PyTorch's `torch.amp`, and AdamW over FP32 masters.
//!
//! This crate's own engine has fused kernels for this; this module is for programs that use candle's operations, on any
//! device. The loop has PyTorch's names and order:
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use candle_nn::{Optimizer, ParamsAdamW, loss::mse};
//! use finetune::amp::{AdamW, GradScaler, ScaledOptimizer, clip_grad_norm};
//! use finetune::precision::GradScalerConfig;
//!
//! // Learn y = 2a - b with a weight in FP16.
//! let x = Tensor::new(&[[1f32, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.5]], &Device::Cpu)?;
//! let y = x.matmul(&Tensor::new(&[[2f32], [-1.0]], &Device::Cpu)?)?;
//! let weight = Var::zeros((2, 1), DType::F16, &Device::Cpu)?;
//!
//! let params = ParamsAdamW { lr: 0.05, weight_decay: 0.0, ..ParamsAdamW::default() };
//! let mut optimizer = AdamW::new(vec![weight.clone()], params)?;
//! let mut scaler = GradScaler::new(GradScalerConfig::default())?;
//!
//! let mut updates = 0;
//! for _step in 0..200 {
//!     let output = x.to_dtype(DType::F16)?.matmul(&weight)?;
//!     let loss = mse(&output.to_dtype(DType::F32)?, &y)?; // losses in FP32
//!     let mut grads = scaler.scale(&loss)?.backward()?;
//!     scaler.unscale(&optimizer, &mut grads)?; // only needed for clipping; otherwise `step` does it
//!     clip_grad_norm(&mut grads, optimizer.vars(), 1.0)?;
//!     if scaler.step(&mut optimizer, &mut grads)? {
//!         updates += 1; // a learning-rate schedule counts these
//!     }
//!     scaler.update()?;
//! }
//! // Gradients overflowed FP16 at scales 65536 and 32768, so the scaler skipped two steps.
//! assert_eq!((updates, scaler.get_scale()), (198, 16384.0));
//! let error = (weight.to_dtype(DType::F32)? - Tensor::new(&[[2f32], [-1.0]], &Device::Cpu)?)?.abs()?;
//! assert!(error.max_all()?.to_scalar::<f32>()? < 0.05);
//! # Ok::<(), finetune::Error>(())
//! ```
//!
//! To accumulate gradients, divide every micro-batch's loss by their number, scale it, add the gradients with
//! `GradStore::extend` (in the parameters' own type), and unscale, clip, step and update once. For FP32 parameters that
//! are only cast to half precision for matrix products, candle's own optimizers work too: see [`WithVars`].

mod adamw;
mod grad_scaler;
mod optimizer;
mod policy;
mod stages;

pub use adamw::AdamW;
pub use grad_scaler::GradScaler;
pub use optimizer::{OptimizerId, ScaledOptimizer, WithVars};
pub use policy::{Autocast, AutocastOp, CastRule};

use candle_core::{DType, Result, Tensor, Var, backprop::GradStore};

/// The type in which values of `dtype` are scaled, summed and updated: FP64 for FP64, else FP32.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// `tensor` in [`wide`] precision; shares storage if it already is.
fn upcast(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(wide(tensor.dtype()))
}

/// Clips the gradients of `vars` to a global L2 norm of at most `max_norm` (Pascanu et al., 2013); returns the norm
/// before clipping.
///
/// Unscale first, or pass `max_norm` times the scale. The norm is summed in FP64, so that squares of finite gradients
/// do not overflow. Gradients whose norm is not finite are left unchanged for the scaler to detect.
pub fn clip_grad_norm(grads: &mut GradStore, vars: &[Var], max_norm: f64) -> Result<f64> {
    let mut sum_squares = 0.0;
    for grad in vars.iter().filter_map(|var| grads.get(var)) {
        sum_squares += upcast(grad)?.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
    }
    let norm = sum_squares.sqrt();
    if norm.is_finite() && norm > max_norm {
        for var in vars {
            if let Some(grad) = grads.get(var) {
                let clipped = upcast(grad)?.affine(max_norm / norm, 0.0)?.to_dtype(grad.dtype())?;
                grads.insert(var, clipped);
            }
        }
    }
    Ok(norm)
}
