//! The language-model head with its cross-entropy loss.
//!
//! Logits exist for one tile of rows at a time, in the compute type; the softmax and the loss are FP32. The logits'
//! gradient overwrites the logits, and goes straight into the gradients of the head's input and weight.

use crate::columns::{ColumnSlice, MatmulOperand, WriteMode};
use crate::math;
use crate::rows::{Rows, STRIPE, WORK, for_each_part_with_scratch, max, scale, sum, write_rows};
use crate::view::{self, AllocFn, View, ViewMut, read, to_host, write, write_f32};
use crate::{HeadHook, Kernels, op};
use candle_core::{DType, Result, Tensor};

/// A target excluded from the loss: padding, or a prompt that is not trained on.
pub const IGNORE: u32 = u32::MAX;

/// The head's buffers: a tile of logits and a sum over tiles.
#[derive(Debug)]
pub struct CrossEntropyWorkspace<T = Tensor> {
    /// `[tile, V]` in the compute type, with space for rows that begin at multiples of 16 bytes.
    pub logits: T,
    /// `[V, D]`, FP32; only if the gradient has a narrower type and is summed over more than one tile.
    pub weight_sum: Option<T>,
    /// One loss per row, FP32.
    pub losses: T,
}

impl CrossEntropyWorkspace {
    /// The first `rows` rows of the tile of logits: `[rows, vocab]`, or wider with rows that begin at multiples of 16
    /// bytes, which makes cuBLAS several times as fast.
    fn tile(&self, rows: usize, vocab: usize, pads: bool) -> Result<Tensor> {
        if pads {
            return self.logits.narrow(0, 0, rows);
        }
        self.logits.flatten_all()?.narrow(0, 0, rows * vocab)?.reshape((rows, vocab))
    }

    /// The sum of the losses of all rows.
    pub fn total_loss(&self) -> Result<f64> {
        let losses = to_host(&self.losses)?;
        Ok(read(&losses)?.typed::<f32>()?.iter().map(|&loss| f64::from(loss)).sum())
    }
}

/// The minimum number of rows of a tile. With fewer, reading the weight and adding to its gradient for each tile would
/// cost more than the products. For a vocabulary of 262,144 a tile takes a fifth of the memory of the embedding's
/// masters, moments and gradient.
const MIN_TILE: usize = 256;

/// Widths of logits in memory are a multiple of this.
const PADDED_TO: usize = 8;

/// The maximum bytes of a tile of logits, which bounds the head's memory for any batch. Tiles of an FP32 gradient are
/// summed in the gradient itself and take no extra memory; each tile costs about 2 % of a step's time. On a GPU, to
/// read and write the sum for each tile takes longer than the tile's products.
fn tile_bytes(grads: Option<DType>, on_gpu: bool) -> usize {
    match grads {
        _ if on_gpu => 1 << 32,
        Some(DType::F32) => 1 << 26,
        _ => 1 << 27,
    }
}

impl<T> CrossEntropyWorkspace<T> {
    /// For `tokens` rows, `vocab` columns and inputs of `width`; `grads` is the weight gradient's type, `None` for a
    /// workspace that only evaluates.
    pub fn alloc(
        [tokens, vocab, width]: [usize; 3],
        compute: DType,
        grads: Option<DType>,
        on_gpu: bool,
        allocate: AllocFn<'_, T>,
    ) -> Result<Self> {
        let tile = (tile_bytes(grads, on_gpu) / compute.size_in_bytes() / vocab).max(MIN_TILE).min(tokens);
        Self::with_tiles(tokens.div_ceil(tile), [tokens, vocab, width], compute, grads, allocate)
    }

    /// Like [`CrossEntropyWorkspace::alloc`], with this number of tiles of about equal size.
    pub fn with_tiles(
        tiles: usize,
        [tokens, vocab, width]: [usize; 3],
        compute: DType,
        grads: Option<DType>,
        allocate: AllocFn<'_, T>,
    ) -> Result<Self> {
        // Each tile starts at a multiple of 8 rows, so that a GPU's widest accesses are aligned.
        let tile = tokens.div_ceil(tiles).next_multiple_of(8).min(tokens);
        let sum_over_tiles = tiles > 1 && grads.is_some_and(|dtype| dtype != DType::F32);
        Ok(Self {
            logits: allocate(&[tile, vocab.next_multiple_of(PADDED_TO)], compute)?,
            weight_sum: sum_over_tiles.then(|| allocate(&[vocab, width], DType::F32)).transpose()?,
            losses: allocate(&[tokens], DType::F32)?,
        })
    }
}

/// The operands of logits, `scale · x · weightᵀ`, which may be capped.
#[derive(Clone, Copy, Debug)]
pub struct HeadInput<'a> {
    /// `[N, D]`.
    pub x: &'a Tensor,
    /// `[V, D]`.
    pub weight: &'a Tensor,
    /// The factor of logits.
    pub scale: f32,
    /// Logits `x` count as `cap · tanh(x / cap)`.
    pub softcap: Option<f32>,
}

/// The outputs of the head's backward pass, and the gradient it starts from.
#[derive(Clone, Copy, Debug)]
pub struct HeadGradient<'a> {
    /// dL/d(row's loss) before its weight: the loss scale over the number of targets.
    pub seed: f32,
    /// A factor of `seed` for each row; 1 if `None`.
    pub weights: Option<&'a [f32]>,
    /// `[N, D]`, compute type, overwritten.
    pub dx: &'a Tensor,
    /// `[V, D]`, gradients' type, overwritten; `None` if the weight is frozen.
    pub dweight: Option<&'a Tensor>,
}

/// A tensor that the head computes, for hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadTensor {
    /// A tile of logits.
    Logits,
    /// The gradient of the logits, which overwrites them.
    LogitsGradient,
    /// The tile's rows of the input's gradient.
    InputGradient,
    /// The weight's gradient, complete.
    WeightGradient,
}

/// Writes the losses `-log softmax(logits)[target]` in nats into the workspace, 0 for targets that are [`IGNORE`]; with
/// `gradient` computes its derivatives too. The host waits for nothing. Calls `hook` with each tensor in the order of
/// [`HeadTensor`].
pub fn write_losses(
    kernels: &dyn Kernels,
    HeadInput { x, weight, scale, softcap }: HeadInput<'_>,
    targets: &[u32],
    workspace: &CrossEntropyWorkspace,
    gradient: Option<HeadGradient<'_>>,
    mut hook: HeadHook<'_>,
) -> Result<()> {
    let pads = hook.is_none() && kernels.pads_logits();
    let mut hook = |tensor, first, values: &Tensor| hook.as_mut().map_or(Ok(()), |hook| hook(tensor, first, values));
    let rows = x.dim(0)?;
    let (vocab, _) = weight.dims2()?;
    let tile = workspace.logits.dim(0)?;
    for first in (0..rows).step_by(tile) {
        let count = tile.min(rows - first);
        let x = x.narrow(0, first, count)?;
        let losses = workspace.losses.narrow(0, first, count)?;
        let tile = workspace.tile(count, vocab, pads)?;
        let logits = ColumnSlice::new(&tile, 0..vocab)?;
        let (a, b) = (MatmulOperand::all(&x)?, MatmulOperand::transpose_of(weight)?);
        op::Matmul { a, b, alpha: scale, c: logits, mode: WriteMode::Overwrite }.run(kernels)?;
        hook(HeadTensor::Logits, first, &tile)?;
        let targets = &targets[first..first + count];
        let seed = gradient.map(|gradient| gradient.seed);
        let weights = gradient.and_then(|gradient| gradient.weights).map(|weights| &weights[first..first + count]);
        op::CrossEntropy { logits, softcap, targets, losses: &losses, seed, weights }.run(kernels)?;
        let Some(gradient) = gradient else { continue };
        hook(HeadTensor::LogitsGradient, first, &tile)?;
        let dx = gradient.dx.narrow(0, first, count)?;
        let (a, b, c) = (MatmulOperand::plain(logits), MatmulOperand::all(weight)?, ColumnSlice::all(&dx)?);
        let input = op::Matmul { a, b, alpha: scale, c, mode: WriteMode::Overwrite };
        if let Some(dweight) = gradient.dweight {
            let sum = workspace.weight_sum.as_ref().unwrap_or(dweight);
            let mode = if first > 0 { WriteMode::Accumulate } else { WriteMode::Overwrite };
            let (a, b, c) = (MatmulOperand::transposed(logits), MatmulOperand::all(&x)?, ColumnSlice::all(sum)?);
            let weight = op::Matmul { a, b, alpha: scale, c, mode };
            if sum.device().is_cpu() || kernels.pads_logits() {
                op::run_both([input.into(), weight.into()], &x, kernels)?;
            } else {
                input.run(kernels)?;
                add_term(kernels, &weight, dweight.dtype())?;
            }
        } else {
            input.run(kernels)?;
        }
        hook(HeadTensor::InputGradient, first, &dx)?;
    }
    if let Some(dweight) = gradient.and_then(|gradient| gradient.dweight) {
        if let Some(sum) = &workspace.weight_sum {
            kernels.copy(sum, dweight)?;
        }
        hook(HeadTensor::WeightGradient, 0, dweight)?;
    }
    Ok(())
}

/// Adds a tile's product to a sum of another type, or starts the sum with it. `dtype` is the weight gradient's type:
/// candle's matmul is fast on a GPU only in the operands' type.
fn add_term(kernels: &dyn Kernels, product: &op::Matmul<'_>, dtype: DType) -> Result<()> {
    let sum = product.c.tensor();
    let term = view::zeros(sum.dims(), dtype, sum.device())?;
    let mode = product.mode;
    op::Matmul { c: ColumnSlice::all(&term)?, mode: WriteMode::Overwrite, ..*product }.run(kernels)?;
    match mode {
        WriteMode::Accumulate => op::Accumulate { x: &term, inner: &[], out: sum }.run(kernels),
        WriteMode::Overwrite => kernels.copy(&term, sum),
    }
}

pub(super) fn soft_cap(op: &op::SoftCap<'_>) -> Result<()> {
    let opened = read(op.x)?;
    let values = opened.view();
    write_rows(
        op.out,
        #[inline(always)]
        |start, row, _| {
            values.load(start, row);
            math::soft_cap(row, op.cap);
        },
    )
}

pub(super) fn rows(op: &op::CrossEntropy<'_>) -> Result<()> {
    let &op::CrossEntropy { logits, softcap, targets, losses, seed, weights } = op;
    let (rows, vocab) = (logits.rows(), logits.count());
    let (stride, column) = (logits.stride(), logits.first());
    let compute = |logits: ViewMut<'_>, losses: &mut [f32]| {
        for_each_part_with_scratch(
            (Rows { view: logits, width: stride }, Rows { view: losses, width: 1 }),
            rows,
            [(WORK / 4 / vocab).max(4), vocab],
            #[inline(always)]
            |first, rows, (mut logits, losses), [row]| {
                for i in 0..rows {
                    let target = targets[first + i];
                    let seed = seed.map(|seed| weights.map_or(seed, |weights| seed * weights[first + i]));
                    losses.view[i] = loss_row((&mut logits.view, i * stride + column), softcap, target, seed, row);
                }
            },
        );
    };
    write(logits.tensor(), |logits| write_f32(losses, |losses| compute(logits, losses)))?
}

#[inline(always)]
fn loss_row(
    (logits, start): (&mut ViewMut<'_>, usize),
    softcap: Option<f32>,
    target: u32,
    seed: Option<f32>,
    row: &mut [f32],
) -> f32 {
    if target == IGNORE {
        if seed.is_some() {
            row.fill(0.0);
            logits.store(start, row);
        }
        return 0.0;
    }
    let target = target as usize;
    logits.as_view().load(start, row);
    if let Some(cap) = softcap {
        math::soft_cap(row, cap);
    }
    let picked = row[target];
    let top = max(row);
    for x in row.iter_mut() {
        *x = math::exp(*x - top);
    }
    let total = sum(row);
    if let Some(seed) = seed {
        scale(row, seed / total);
        row[target] -= seed;
        if let Some(cap) = softcap {
            through_soft_cap(row, logits.as_view().slice(start..start + row.len()), cap);
        }
        logits.store(start, row);
    }
    total.ln() + (top - picked)
}

/// Turns the gradient of capped logits into the gradient of `logits`.
#[inline(always)]
fn through_soft_cap(gradient: &mut [f32], logits: View<'_>, cap: f32) {
    let mut buffer = [0.0; STRIPE];
    for (index, gradient) in gradient.chunks_mut(STRIPE).enumerate() {
        let logits_here = &mut buffer[..gradient.len()];
        logits.load(index * STRIPE, logits_here);
        for (gradient, logit) in gradient.iter_mut().zip(logits_here) {
            let tanh = math::tanh(*logit / cap);
            *gradient *= 1.0 - tanh * tanh;
        }
    }
}
