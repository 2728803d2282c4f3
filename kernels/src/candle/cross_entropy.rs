//! Cross-entropy; softmax and loss are FP32.

use super::tensors::{require_contiguous, select, soft_cap, store, store_columns, upcast_columns};
use crate::cross_entropy::IGNORE;
use crate::op;
use candle_core::{Result, Tensor};

pub(super) fn rows(op: &op::CrossEntropy<'_>) -> Result<()> {
    let values = upcast_columns(op.logits)?;
    let values = match op.softcap {
        Some(cap) => soft_cap(&values, cap)?,
        None => values,
    };
    let known: Vec<u32> = op.targets.iter().map(|&target| if target == IGNORE { 0 } else { target }).collect();
    let ids = Tensor::new(known, values.device())?.unsqueeze(1)?;
    let valid: Vec<u8> = op.targets.iter().map(|&target| u8::from(target != IGNORE)).collect();
    let is_complete = !op.targets.contains(&IGNORE);
    let valid = if is_complete { None } else { Some(Tensor::new(valid, values.device())?.unsqueeze(1)?) };
    // With zeros in the rows without a target.
    let only_valid = |x: Tensor| valid.as_ref().map_or_else(|| Ok(x.clone()), |valid| select(valid, &x, 0.0));
    require_contiguous(&ids)?;
    let picked = values.gather(&ids, 1)?;
    let top = values.max_keepdim(1)?;
    let exponentials = values.broadcast_sub(&top)?.exp()?;
    let total = exponentials.sum_keepdim(1)?;
    let loss = (total.log()? + (top - picked)?)?;
    store(&only_valid(loss)?.squeeze(1)?, op.losses)?;
    let Some(seed) = op.seed else { return Ok(()) };
    let seeds = match op.weights {
        None => Tensor::full(seed, ids.shape(), values.device())?,
        Some(weights) => (Tensor::new(weights, values.device())?.unsqueeze(1)? * f64::from(seed))?,
    };
    let seeds = seeds.to_dtype(values.dtype())?;
    let grad = exponentials.broadcast_mul(&(total.recip()? * &seeds)?)?;
    grad.scatter_add_set(&ids, &seeds.neg()?, 1)?;
    let grad = match op.softcap {
        Some(cap) => (grad * ((values / f64::from(cap))?.sqr()?.neg()? + 1.0)?)?,
        None => grad,
    };
    store_columns(&only_valid(grad)?, op.logits)
}
