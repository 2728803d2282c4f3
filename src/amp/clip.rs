//! Clips gradients to a global norm (Pascanu et al., 2013).

use candle_core::{DType, Result, Var, backprop::GradStore};

use super::upcast;

/// Clips the gradients of `vars` to a global L2 norm of at most `max_norm`; returns the norm before clipping.
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
