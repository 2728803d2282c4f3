//! Layer and RMS normalisation in FP32; candle's own norms round in half precision.

use super::tensors::{column_sums, store, store_columns, upcast, upcast_columns};
use crate::columns::{ColumnSlice, WriteMode};
use crate::{NormSettings, op};
use candle_core::{Result, Tensor};

fn row_means(x: &Tensor) -> Result<Tensor> {
    x.sum_keepdim(1)? / x.dim(1)? as f64
}

/// The factor of normalised elements.
fn gain(settings: NormSettings, weight: &Tensor) -> Result<Tensor> {
    let (weight, offset) = (upcast(weight)?, settings.gain_offset());
    if offset == 0.0 { Ok(weight) } else { weight + f64::from(offset) }
}

/// FP32 rows divided by their root mean square and multiplied by the gain; and the inverse root mean square, `[N, 1]`.
fn normalise(settings: NormSettings, x: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
    let rstd = (row_means(&x.sqr()?)? + f64::from(settings.eps))?.sqrt()?.recip()?;
    Ok((x.broadcast_mul(&rstd)?.broadcast_mul(&gain(settings, weight)?)?, rstd))
}

/// The gradients of `x` and the weight, given the gradient of [`normalise`]'s output.
fn gradients(
    settings: NormSettings,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let normalised = x.broadcast_mul(rstd)?;
    let grad = dy.broadcast_mul(&gain(settings, weight)?)?;
    let along = row_means(&(&grad * &normalised)?)?;
    let mut inner = (&grad - normalised.broadcast_mul(&along)?)?;
    if settings.centers() {
        inner = inner.broadcast_sub(&row_means(&grad)?)?;
    }
    Ok((inner.broadcast_mul(rstd)?, column_sums(&(dy * normalised)?)?))
}

/// The groups of some columns, which are as wide as the weight, as rows of FP32.
fn groups(x: ColumnSlice<'_>, weight: &Tensor) -> Result<Tensor> {
    upcast_columns(x)?.reshape(((), weight.dims1()?))
}

pub(super) fn forward(op: &op::Norm<'_>) -> Result<()> {
    let mut centered = groups(op.x, op.weight)?;
    if let Some(out) = op.mean {
        let mean = row_means(&centered)?;
        centered = centered.broadcast_sub(&mean)?;
        store(&mean.reshape(out.shape())?, out)?;
    }
    let (mut y, rstd) = normalise(op.settings, &centered, op.weight)?;
    if let Some(bias) = op.bias {
        y = y.broadcast_add(&upcast(bias)?)?;
    }
    store(&rstd.reshape(op.rstd.shape())?, op.rstd)?;
    store_columns(&y.reshape((op.y.rows(), ()))?, op.y)
}

pub(super) fn backward(op: &op::NormBackward<'_>) -> Result<()> {
    let (dy, mut centered) = (groups(op.dy, op.weight)?, groups(op.x, op.weight)?);
    if let Some(mean) = op.mean {
        centered = centered.broadcast_sub(&mean.reshape(((), 1))?)?;
    }
    let (mut dx, dweight) = gradients(op.settings, &dy, &centered, op.weight, &op.rstd.reshape(((), 1))?)?;
    dx = dx.reshape((op.dx.rows(), ()))?;
    if op.mode == WriteMode::Accumulate {
        dx = (upcast_columns(op.dx)? + dx)?;
    }
    store_columns(&dx, op.dx)?;
    op.dweight.map_or(Ok(()), |out| store(&dweight, out))?;
    op.dbias.map_or(Ok(()), |out| store(&column_sums(&dy)?, out))
}
