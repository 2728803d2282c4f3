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
    let targets = Targets::new(op.targets, &values)?;
    require_contiguous(&targets.ids)?;
    let picked = values.gather(&targets.ids, 1)?;
    let top = values.max_keepdim(1)?;
    let exponentials = values.broadcast_sub(&top)?.exp()?;
    let total = exponentials.sum_keepdim(1)?;
    let loss = (total.log()? + (top - picked)?)?;
    store(&targets.only_valid(&loss)?.squeeze(1)?, op.losses)?;
    let Some(seed) = op.seed else { return Ok(()) };
    let seeds = match op.weights {
        None => Tensor::full(seed, targets.ids.shape(), values.device())?,
        Some(weights) => (Tensor::new(weights, values.device())?.unsqueeze(1)? * f64::from(seed))?,
    };
    let seeds = seeds.to_dtype(values.dtype())?;
    let grad = exponentials.broadcast_mul(&(total.recip()? * &seeds)?)?;
    grad.scatter_add_set(&targets.ids, &seeds.neg()?, 1)?;
    let grad = match op.softcap {
        Some(cap) => (grad * ((values / f64::from(cap))?.sqr()?.neg()? + 1.0)?)?,
        None => grad,
    };
    store_columns(&targets.only_valid(&grad)?, op.logits)
}

struct Targets {
    /// `[n, 1]`, U32; 0 if a row has none.
    ids: Tensor,
    /// `[n, 1]`, U8: 0 if a row has none; `None` if all rows have one.
    valid: Option<Tensor>,
}

impl Targets {
    fn new(targets: &[u32], logits: &Tensor) -> Result<Self> {
        let known: Vec<u32> = targets.iter().map(|&target| if target == IGNORE { 0 } else { target }).collect();
        let valid: Vec<u8> = targets.iter().map(|&target| u8::from(target != IGNORE)).collect();
        let ids = Tensor::new(known, logits.device())?.unsqueeze(1)?;
        let all = valid.iter().all(|&valid| valid == 1);
        let valid = if all { None } else { Some(Tensor::new(valid, logits.device())?.unsqueeze(1)?) };
        Ok(Self { ids, valid })
    }

    /// `x` with zeros in the rows without a target.
    fn only_valid(&self, x: &Tensor) -> Result<Tensor> {
        self.valid.as_ref().map_or_else(|| Ok(x.clone()), |valid| select(valid, x, 0.0))
    }
}
