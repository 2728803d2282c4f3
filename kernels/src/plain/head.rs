//! The language-model head with its cross-entropy loss, one tile of logits at a time; softmax and loss are FP32.

use super::tensors::{accumulate, columns_of_rows, indices, product, require_contiguous, select, store, widen};
use super::{Plain, Replacements};
use crate::columns::{Columns, Factor, Store};
use crate::cross_entropy::{HeadGradient, HeadTensor, HeadWorkspace, IGNORE};
use crate::{HeadHook, Kernels};
use candle_core::{Result, Tensor, bail};

/// See [`Kernels::head`].
pub(super) fn head(
    kernels: &Plain,
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    workspace: &HeadWorkspace,
    gradient: Option<HeadGradient<'_>>,
    mut hook: HeadHook<'_>,
) -> Result<f64> {
    let (rows, vocab) = (x.dim(0)?, weight.dim(0)?);
    if let Some(target) = targets.iter().find(|&&t| t != IGNORE && t as usize >= vocab) {
        bail!("target {target} is outside the model's vocabulary of {vocab}");
    }
    let tile = workspace.logits.dim(0)?;
    let padded = match &hook {
        None if kernels.own.as_deref().is_some_and(Replacements::pads_logits) => padded(&workspace.logits)?,
        _ => None,
    };
    let mut hook = |tensor, first, values: &Tensor| hook.as_mut().map_or(Ok(()), |hook| hook(tensor, first, values));
    for first in (0..rows).step_by(tile) {
        let count = tile.min(rows - first);
        let x = x.narrow(0, first, count)?;
        let logits = padded.as_ref().unwrap_or(&workspace.logits).narrow(0, 0, count)?;
        let (of_x, of_weight, of_logits) = (Columns::all(&x)?, Columns::all(weight)?, Columns::new(&logits, 0..vocab)?);
        kernels.product(Factor::plain(of_x), Factor::transposed(of_weight), 1.0, of_logits, Store::Overwrite)?;
        hook(HeadTensor::Logits, first, &logits)?;
        let losses = workspace.losses.narrow(0, first, count)?;
        let (targets, seed) = (&targets[first..first + count], gradient.map(|gradient| gradient.seed));
        if !kernels.replaced(|own| own.cross_entropy(targets, of_logits, &losses, seed))? {
            cross_entropy(targets, &logits, &losses, seed)?;
        }
        if let Some(gradient) = gradient {
            hook(HeadTensor::LogitsGradient, first, &logits)?;
            let dx = gradient.dx.narrow(0, first, count)?;
            kernels.product(
                Factor::plain(of_logits),
                Factor::plain(of_weight),
                1.0,
                Columns::all(&dx)?,
                Store::Overwrite,
            )?;
            if let Some(out) = gradient.dweight {
                let sum = workspace.weight_sum.as_ref().unwrap_or(out);
                let (left, right) = (Factor::transposed(of_logits), Factor::plain(of_x));
                let how = if first > 0 { Store::Add } else { Store::Overwrite };
                let sums = Columns::all(sum)?;
                if !kernels.replaced(|own| own.product(left, right, 1.0, sums, how))? {
                    // In the gradient's type, where the GPU is fast, also where tiles are summed in FP32.
                    let logits = columns_of_rows(of_logits, 0..count)?;
                    let dweight = product(&logits.t()?, &x, out.dtype())?;
                    if first > 0 { accumulate(&dweight, sum) } else { store(&dweight, sum) }?;
                }
            }
            hook(HeadTensor::InputGradient, first, &dx)?;
        }
    }
    if let Some(dweight) = gradient.and_then(|gradient| gradient.dweight) {
        if let Some(sum) = &workspace.weight_sum
            && !kernels.replaced(|own| own.branch_gradient(sum, None, dweight))?
        {
            store(sum, dweight)?;
        }
        hook(HeadTensor::WeightGradient, 0, dweight)?;
    }
    let losses = workspace.losses.narrow(0, 0, rows)?.to_vec1::<f32>()?;
    Ok(losses.into_iter().map(f64::from).sum())
}

/// Room for logits whose rows begin at multiples of 16 bytes, which makes cuBLAS several times as fast; `None` if those of
/// `logits` do.
fn padded(logits: &Tensor) -> Result<Option<Tensor>> {
    const MULTIPLE: usize = 8;
    let (rows, vocab) = logits.dims2()?;
    let room = || Tensor::zeros((rows, vocab.next_multiple_of(MULTIPLE)), logits.dtype(), logits.device());
    (!vocab.is_multiple_of(MULTIPLE)).then(room).transpose()
}

/// Each row's loss, and with a `seed` the logits' gradient in their place.
pub(crate) fn cross_entropy(targets: &[u32], logits: &Tensor, losses: &Tensor, seed: Option<f32>) -> Result<()> {
    let targets = Targets::new(targets, logits)?;
    let values = widen(logits)?;
    require_contiguous(&targets.ids)?;
    let picked = values.gather(&targets.ids, 1)?;
    let top = values.max_keepdim(1)?;
    let exponentials = values.broadcast_sub(&top)?.exp()?;
    let total = exponentials.sum_keepdim(1)?;
    let loss = (total.log()? + (top - picked)?)?;
    store(&targets.only_valid(&loss)?.squeeze(1)?, losses)?;
    let Some(seed) = seed else { return Ok(()) };
    let factor = (total.recip()? * f64::from(seed))?;
    let grad = exponentials.broadcast_mul(&factor)?;
    let at_targets = Tensor::full(-seed, targets.ids.shape(), logits.device())?;
    grad.scatter_add_set(&targets.ids, &at_targets, 1)?;
    store(&targets.only_valid(&grad)?, logits)
}

/// The targets of a tile.
struct Targets {
    /// `[n, 1]`, U32; 0 where there is none.
    ids: Tensor,
    /// `[n, 1]`, U8: 0 where there is none; `None` if all rows have one.
    valid: Option<Tensor>,
}

impl Targets {
    fn new(targets: &[u32], logits: &Tensor) -> Result<Self> {
        let known: Vec<u32> = targets.iter().map(|&target| if target == IGNORE { 0 } else { target }).collect();
        let valid: Vec<u8> = targets.iter().map(|&target| u8::from(target != IGNORE)).collect();
        let ids = indices(&known, logits.device())?.unsqueeze(1)?;
        let all = valid.iter().all(|&valid| valid == 1);
        let valid = if all { None } else { Some(Tensor::new(valid, logits.device())?.unsqueeze(1)?) };
        Ok(Self { ids, valid })
    }

    /// `x` with zeros in the rows without a target.
    fn only_valid(&self, x: &Tensor) -> Result<Tensor> {
        self.valid.as_ref().map_or_else(|| Ok(x.clone()), |valid| select(valid, x, 0.0))
    }
}
