//! The language-model head fused with its cross-entropy loss.
//!
//! Logits exist for one tile of rows at a time, in the compute type; the softmax and the loss are FP32. The logits'
//! gradient overwrites the logits, and goes straight into the gradients of the head's input and weight.

use crate::HeadHook;
use crate::convert::Element;
use crate::linear::product;
use crate::math;
use crate::matmul::{Epilogue, Operand};
use crate::rows::{Rows, WORK, for_each_part, max, sum, with_scratch};
use crate::view::{Allocate, ViewMut, copy, read, with_element, write, write_f32};
use candle_core::{DType, Result, Tensor, bail};

/// A target excluded from the loss: padding, or a prompt that is not trained on.
pub const IGNORE: u32 = u32::MAX;

/// The head's buffers: a tile of logits and a sum over tiles.
#[derive(Debug)]
pub struct HeadWorkspace<T = Tensor> {
    /// `[tile, V]`, compute type.
    pub logits: T,
    /// `[V, D]`, FP32; only if the gradient has a narrower type and is summed over more than one tile.
    pub weight_sum: Option<T>,
    /// One loss a row, FP32.
    pub losses: T,
}

/// The fewest rows of a tile. With fewer, reading the weight and adding to its gradient for each tile would cost more than
/// the products. For a vocabulary of 262,144 a tile takes a fifth of the memory of the embedding's masters, moments and
/// gradient.
const MIN_TILE: usize = 256;

/// The most bytes of a tile of logits, which bounds the head's memory for any batch. Tiles of an FP32 gradient are summed in
/// the gradient itself and take no extra memory; each tile costs about 2 % of a step's time.
fn tile_bytes(grads: Option<DType>) -> usize {
    if grads == Some(DType::F32) { 1 << 26 } else { 1 << 27 }
}

impl<T> HeadWorkspace<T> {
    /// For `tokens` rows, `vocab` columns and inputs of `width`; `grads` is the weight gradient's type, `None` for a
    /// workspace that only evaluates.
    pub fn lay_out(
        tokens: usize,
        vocab: usize,
        width: usize,
        compute: DType,
        grads: Option<DType>,
        allocate: Allocate<'_, T>,
    ) -> Result<Self> {
        let tile = (tile_bytes(grads) / compute.size_in_bytes() / vocab).max(MIN_TILE).min(tokens);
        Self::with_tiles(tokens.div_ceil(tile), [tokens, vocab, width], compute, grads, allocate)
    }

    /// Like [`HeadWorkspace::lay_out`], with this number of tiles of about equal size.
    pub fn with_tiles(
        tiles: usize,
        [tokens, vocab, width]: [usize; 3],
        compute: DType,
        grads: Option<DType>,
        allocate: Allocate<'_, T>,
    ) -> Result<Self> {
        // Every tile but the last begins where a GPU's widest accesses may.
        let tile = tokens.div_ceil(tiles).next_multiple_of(8).min(tokens);
        let sum_over_tiles = tiles > 1 && grads.is_some_and(|dtype| dtype != DType::F32);
        Ok(Self {
            logits: allocate(&[tile, vocab], compute)?,
            weight_sum: sum_over_tiles.then(|| allocate(&[vocab, width], DType::F32)).transpose()?,
            losses: allocate(&[tokens], DType::F32)?,
        })
    }
}

/// The outputs of the head's backward pass, and the gradient it starts from.
#[derive(Clone, Copy, Debug)]
pub struct HeadGradient<'a> {
    /// dL/d(row's loss): the loss scale over the number of targets.
    pub seed: f32,
    /// `[N, D]`, compute type, overwritten.
    pub dx: &'a Tensor,
    /// `[V, D]`, gradients' type, overwritten; none where the weight is frozen.
    pub dweight: Option<&'a Tensor>,
}

/// What the head computes, for hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadTensor {
    /// A tile of logits.
    Logits,
    /// Their gradient, in their place.
    LogitsGradient,
    /// The tile's rows of the input's gradient.
    InputGradient,
    /// The weight's gradient, complete.
    WeightGradient,
}

/// Sum of the losses `-log softmax(x · weightᵀ)[target]` over rows whose target is not [`IGNORE`], for `x [N, D]` and
/// `weight [V, D]`. With `gradient`, its products too. `hook` is called with each tensor as it is made, in the
/// order of [`HeadTensor`].
pub fn head(
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    workspace: &HeadWorkspace,
    gradient: Option<HeadGradient<'_>>,
    mut hook: HeadHook<'_>,
) -> Result<f64> {
    let mut hook = |tensor, first, values: &Tensor| hook.as_mut().map_or(Ok(()), |hook| hook(tensor, first, values));
    let ((rows, width), (vocab, _)) = (x.dims2()?, weight.dims2()?);
    if let Some(target) = targets.iter().find(|&&t| t != IGNORE && t as usize >= vocab) {
        bail!("target {target} is outside the model's vocabulary of {vocab}");
    }
    let tile = workspace.logits.dim(0)?;
    let (x, weight) = (read(x)?, read(weight)?);
    with_element!(workspace.logits.dtype(), T => {
        let (x, weight) = (x.typed::<T>()?, weight.typed::<T>()?);
        for first in (0..rows).step_by(tile) {
            let count = tile.min(rows - first);
            let x = Operand::new(&x[first * width..(first + count) * width], count, width);
            let weight = Operand::new(weight, vocab, width);
            let logits = workspace.logits.narrow(0, 0, count)?;
            product(x, weight.transposed(), None, &logits, Epilogue::default())?;
            hook(HeadTensor::Logits, first, &logits)?;
            let losses = workspace.losses.narrow(0, first, count)?;
            loss_rows(&logits, &targets[first..first + count], &losses, gradient.map(|g| g.seed))?;
            if let Some(gradient) = gradient {
                hook(HeadTensor::LogitsGradient, first, &logits)?;
                let dx = gradient.dx.narrow(0, first, count)?;
                let dweight = gradient.dweight.map(|dweight| workspace.weight_sum.as_ref().unwrap_or(dweight));
                backward_tile::<T>(&logits, x, weight, &dx, dweight, first > 0)?;
                hook(HeadTensor::InputGradient, first, &dx)?;
            }
        }
    });
    if let Some(dweight) = gradient.and_then(|gradient| gradient.dweight) {
        if let Some(sum) = &workspace.weight_sum {
            copy(sum, dweight)?;
        }
        hook(HeadTensor::WeightGradient, 0, dweight)?;
    }
    let losses = read(&workspace.losses)?;
    Ok(losses.typed::<f32>()?[..rows].iter().map(|&loss| f64::from(loss)).sum())
}

fn backward_tile<T: Element>(
    dlogits: &Tensor,
    x: Operand<'_, T>,
    weight: Operand<'_, T>,
    dx: &Tensor,
    dweight: Option<&Tensor>,
    accumulate: bool,
) -> Result<()> {
    let (count, vocab) = dlogits.dims2()?;
    let dlogits = read(dlogits)?;
    let dlogits = Operand::new(dlogits.typed::<T>()?, count, vocab);
    product(dlogits, weight, None, dx, Epilogue::default())?;
    let accumulate = Epilogue { accumulate, ..Epilogue::default() };
    dweight.map_or(Ok(()), |dweight| product(dlogits.transposed(), x, None, dweight, accumulate))
}

/// Each row's loss, and with a `seed` the logits' gradient in their place.
fn loss_rows(logits: &Tensor, targets: &[u32], losses: &Tensor, seed: Option<f32>) -> Result<()> {
    let (rows, vocab) = logits.dims2()?;
    write(logits, |logits| {
        write_f32(losses, |losses| {
            let out = (Rows { view: logits, width: vocab }, Rows { view: losses, width: 1 });
            for_each_part(
                out,
                rows,
                (WORK / 4 / vocab).max(4),
                #[inline(always)]
                |first, rows, (mut logits, losses)| {
                    with_scratch(
                        vocab,
                        #[inline(always)]
                        |row| {
                            for i in 0..rows {
                                let target = targets[first + i];
                                losses.view[i] = loss_row(&mut logits.view, i * vocab, target, seed, row);
                            }
                        },
                    );
                },
            );
        })
    })?
}

#[inline(always)]
fn loss_row(logits: &mut ViewMut<'_>, start: usize, target: u32, seed: Option<f32>, row: &mut [f32]) -> f32 {
    if target == IGNORE {
        if seed.is_some() {
            row.fill(0.0);
            logits.store(start, row);
        }
        return 0.0;
    }
    let target = target as usize;
    logits.as_view().load(start, row);
    let picked = row[target];
    let top = max(row);
    for x in row.iter_mut() {
        *x = math::exp(*x - top);
    }
    let total = sum(row);
    if let Some(seed) = seed {
        let factor = seed / total;
        for x in row.iter_mut() {
            *x *= factor;
        }
        row[target] -= seed;
        logits.store(start, row);
    }
    total.ln() + (top - picked)
}
