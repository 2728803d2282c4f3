//! Layer and RMS normalization in FP32; candle's own norms round in half precision.

use super::tensors::{column_sums, store, store_columns, upcast, upcast_columns};
use crate::columns::{ColumnSlice, WriteMode};
use crate::{NormSettings, op};
use candle_core::{Result, Tensor};

fn row_means(x: &Tensor) -> Result<Tensor> {
    x.sum_keepdim(1)? / x.dim(1)? as f64
}

/// The factor of normalized elements.
fn gain(settings: NormSettings, weight: &Tensor) -> Result<Tensor> {
    let weight = upcast(weight)?;
    let offset = settings.gain_offset();
    if offset == 0.0 { Ok(weight) } else { weight + f64::from(offset) }
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
    let rstd = (row_means(&centered.sqr()?)? + f64::from(op.settings.eps))?.sqrt()?.recip()?;
    let mut y = centered.broadcast_mul(&rstd)?.broadcast_mul(&gain(op.settings, op.weight)?)?;
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
    let rstd = op.rstd.reshape(((), 1))?;
    let normalized = centered.broadcast_mul(&rstd)?;
    let grad = dy.broadcast_mul(&gain(op.settings, op.weight)?)?;
    let along = row_means(&(&grad * &normalized)?)?;
    let mut inner = (&grad - normalized.broadcast_mul(&along)?)?;
    if op.settings.centers() {
        inner = inner.broadcast_sub(&row_means(&grad)?)?;
    }
    let mut dx = inner.broadcast_mul(&rstd)?.reshape((op.dx.rows(), ()))?;
    if op.mode == WriteMode::Accumulate {
        dx = (upcast_columns(op.dx)? + dx)?;
    }
    store_columns(&dx, op.dx)?;
    if let Some(out) = op.dweight {
        store(&column_sums(&(&dy * normalized)?)?, out)?;
    }
    op.dbias.map_or(Ok(()), |out| store(&column_sums(&dy)?, out))
}
