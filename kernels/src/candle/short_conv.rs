//! Gated short convolutions as sums of shifted rows.

use super::tensors::{column_sums, rows_at, store, store_columns, upcast, upcast_columns};
use crate::columns::ColumnSlice;
use crate::rope::PositionIds;
use crate::short_conv::{ConvSequence, DecodeShortConv, ShortConv, ShortConvBackward, sizes};
use candle_core::{Result, Tensor};

/// The parts `b`, `c` and `x` of a matrix.
fn parts(input: &Tensor) -> Result<[ColumnSlice<'_>; 3]> {
    ColumnSlice::split(input, [input.dim(1)? / 3; 3])
}

/// The weights of each number of tokens before, `[1, D]` each.
pub(super) fn taps(weight: &Tensor) -> Result<Vec<Tensor>> {
    let [width, taps] = sizes(weight)?;
    let by_tap = upcast(weight)?.reshape((width, taps))?.t()?.contiguous()?;
    (0..taps).map(|before| by_tap.narrow(0, taps - 1 - before, 1)).collect()
}

fn zeros(rows: usize, like: &Tensor) -> Result<Tensor> {
    Tensor::zeros((rows, like.dim(1)?), like.dtype(), like.device())
}

/// The rows of `x` that are `before` places earlier, and zeros for those outside the document.
fn earlier(x: &Tensor, before: usize, positions: PositionIds<'_>) -> Result<Tensor> {
    if before == 0 {
        return Ok(x.clone());
    }
    let rows = x.dim(0)?;
    let kept = rows.saturating_sub(before);
    Tensor::cat(&[&zeros(rows - kept, x)?, &x.narrow(0, 0, kept)?], 0)?
        .broadcast_mul(&has_earlier(x, before, positions)?)
}

/// The sum of gradients of [`earlier`]: the rows of `x` that are `before` places later in the document.
fn later(x: &Tensor, before: usize, positions: PositionIds<'_>) -> Result<Tensor> {
    if before == 0 {
        return Ok(x.clone());
    }
    let rows = x.dim(0)?;
    let kept = rows.saturating_sub(before);
    let masked = x.broadcast_mul(&has_earlier(x, before, positions)?)?;
    Tensor::cat(&[&masked.narrow(0, rows - kept, kept)?, &zeros(rows - kept, x)?], 0)
}

/// `[N, 1]`: 1 for each row whose document has a row `before` places earlier.
fn has_earlier(x: &Tensor, before: usize, positions: PositionIds<'_>) -> Result<Tensor> {
    let mask: Vec<f32> = (0..x.dim(0)?).map(|row| f32::from(u8::from(positions.of(row) >= before))).collect();
    let rows = mask.len();
    Tensor::from_vec(mask, (rows, 1), x.device())?.to_dtype(x.dtype())
}

fn sum(mut terms: impl Iterator<Item = Result<Tensor>>, zero: &Tensor) -> Result<Tensor> {
    terms.try_fold(zero.zeros_like()?, |sum, term| sum + term?)
}

/// The convolution of whole sequences.
pub(super) fn convolved(products: &Tensor, taps: &[Tensor], positions: PositionIds<'_>) -> Result<Tensor> {
    let term = |(before, tap): (usize, &Tensor)| earlier(products, before, positions)?.broadcast_mul(tap);
    sum(taps.iter().enumerate().map(term), products)
}

pub(super) fn forward(op: &ShortConv<'_>) -> Result<()> {
    let [b, c, x] = parts(op.input)?.map(upcast_columns);
    store(&(c? * convolved(&(b? * x?)?, &taps(op.weight)?, op.positions)?)?, op.out)
}

pub(super) fn backward(op: &ShortConvBackward<'_>) -> Result<()> {
    let [b, c, x] = parts(op.input)?.map(upcast_columns);
    let (b, c, x, dy) = (b?, c?, x?, upcast(op.dy)?);
    let taps = taps(op.weight)?;
    let products = (&b * &x)?;
    let gradient = (&dy * c)?;
    let term = |(before, tap): (usize, &Tensor)| later(&gradient, before, op.positions)?.broadcast_mul(tap);
    let dproducts = sum(taps.iter().enumerate().map(term), &products)?;
    let [db, dc, dx] = parts(op.dinput)?;
    store_columns(&(&dproducts * x)?, db)?;
    store_columns(&(dy * convolved(&products, &taps, op.positions)?)?, dc)?;
    store_columns(&(dproducts * b)?, dx)?;
    let Some(dweight) = op.dweight else { return Ok(()) };
    let of_tap = |before| column_sums(&(&gradient * earlier(&products, before, op.positions)?)?);
    let by_tap = (0..taps.len()).rev().map(of_tap).collect::<Result<Vec<_>>>()?;
    store(&Tensor::stack(&by_tap, 1)?.contiguous()?.reshape(dweight.shape())?, dweight)
}

/// The convolution of `products`, the rows after the first `past` ones of a sequence, whose last ones are in `cached`;
/// adds the new ones there.
pub(super) fn convolved_after(products: &Tensor, cached: &Tensor, past: usize, taps: &[Tensor]) -> Result<Tensor> {
    let (new, count) = (products.dim(0)?, taps.len());
    let known = past.min(count - 1);
    let places: Vec<u32> = (past - known..past).map(|position| (position % count) as u32).collect();
    let mut rows = vec![zeros(count - 1 - known, products)?];
    if known > 0 {
        rows.push(rows_at(cached, &places)?);
    }
    rows.push(products.clone());
    let rows = Tensor::cat(&rows, 0)?;
    for row in new.saturating_sub(count)..new {
        cached.slice_set(&products.narrow(0, row, 1)?.contiguous()?, 0, (past + row) % count)?;
    }
    let term = |(before, tap): (usize, &Tensor)| rows.narrow(0, count - 1 - before, new)?.broadcast_mul(tap);
    sum(taps.iter().enumerate().map(term), products)
}

pub(super) fn decode(op: &DecodeShortConv<'_>) -> Result<()> {
    let [b, c, x] = parts(op.input)?.map(upcast_columns);
    let (products, c, taps) = ((b? * x?)?, c?, taps(op.weight)?);
    let mut first = 0;
    for &ConvSequence { cache, past, new } in op.sequences {
        let part = |x: &Tensor| x.narrow(0, first, new)?.contiguous();
        let convolved = convolved_after(&part(&products)?, &cache.products, past, &taps)?;
        store(&(part(&c)? * convolved)?, &op.out.narrow(0, first, new)?)?;
        first += new;
    }
    Ok(())
}
