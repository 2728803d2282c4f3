//! Layer and RMS normalisation in FP32; candle's own norms round in half precision.

use super::tensors::{accumulate, column_sums, store, store_columns, widen, widen_columns};
use crate::columns::{Columns, Store};
use crate::{Norm, NormGradients, NormSettings, Normed};
use candle_core::{Result, Tensor, bail};

/// The mean of each row: `[N, 1]`.
fn row_means(x: &Tensor) -> Result<Tensor> {
    x.sum_keepdim(1)? / x.dim(1)? as f64
}

/// The factor of normalised elements.
fn gain(norm: Norm, weight: &Tensor) -> Result<Tensor> {
    let weight = widen(weight)?;
    match norm {
        Norm::Rms { unit_offset: true } => weight + 1.0,
        _ => Ok(weight),
    }
}

/// FP32 rows divided by their root mean square and multiplied by the gain; and the inverse root mean square, `[N, 1]`.
fn normalise(settings: NormSettings, x: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
    let rstd = (row_means(&x.sqr()?)? + f64::from(settings.eps))?.sqrt()?.recip()?;
    Ok((x.broadcast_mul(&rstd)?.broadcast_mul(&gain(settings.norm, weight)?)?, rstd))
}

/// The gradients of `x` and the weight, given that of the output of [`normalise`].
fn gradients(
    settings: NormSettings,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let normalised = x.broadcast_mul(rstd)?;
    let grad = dy.broadcast_mul(&gain(settings.norm, weight)?)?;
    let along = row_means(&(&grad * &normalised)?)?;
    let mut inner = (&grad - normalised.broadcast_mul(&along)?)?;
    if settings.norm == Norm::Layer {
        inner = inner.broadcast_sub(&row_means(&grad)?)?;
    }
    Ok((inner.broadcast_mul(rstd)?, column_sums(&(dy * normalised)?)?))
}

/// See [`Kernels::norm`](crate::Kernels::norm).
pub(super) fn forward(
    settings: NormSettings,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    to: &Normed,
) -> Result<()> {
    let mut centered = widen(x)?;
    match (settings.norm, &to.mean) {
        (Norm::Layer, Some(out)) => {
            let mean = row_means(&centered)?;
            centered = centered.broadcast_sub(&mean)?;
            store(&mean.squeeze(1)?, out)?;
        }
        (Norm::Rms { .. }, None) => {}
        (norm, _) => bail!("{norm:?} without its statistics"),
    }
    let (mut y, rstd) = normalise(settings, &centered, weight)?;
    if let Some(bias) = bias {
        y = y.broadcast_add(&widen(bias)?)?;
    }
    store(&rstd.squeeze(1)?, &to.rstd)?;
    store(&y, &to.out)
}

/// See [`Kernels::norm_backward`](crate::Kernels::norm_backward).
pub(super) fn backward(
    settings: NormSettings,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    normed: &Normed,
    (dx, how): (&Tensor, Store),
    own: Option<NormGradients<'_>>,
) -> Result<()> {
    let (dy, mut centered) = (widen(dy)?, widen(x)?);
    if let Some(mean) = &normed.mean {
        centered = centered.broadcast_sub(&mean.unsqueeze(1)?)?;
    }
    let (grad, weight_grad) = gradients(settings, &dy, &centered, weight, &normed.rstd.unsqueeze(1)?)?;
    match how {
        Store::Add => accumulate(&grad, dx)?,
        Store::Overwrite => store(&grad, dx)?,
    }
    let Some(own) = own else { return Ok(()) };
    store(&weight_grad, own.weight)?;
    own.bias.map_or(Ok(()), |dbias| store(&column_sums(&dy)?, dbias))
}

/// The heads in some columns as rows of FP32.
fn heads(x: Columns<'_>, width: usize) -> Result<Tensor> {
    widen_columns(x)?.reshape(((), width))
}

/// See [`Kernels::head_norm`](crate::Kernels::head_norm).
pub(super) fn heads_forward(
    settings: NormSettings,
    x: Columns<'_>,
    weight: &Tensor,
    y: Columns<'_>,
    rstd: &Tensor,
) -> Result<()> {
    let (value, inverse) = normalise(settings, &heads(x, weight.dims1()?)?, weight)?;
    store(&inverse.reshape(rstd.shape())?, rstd)?;
    store_columns(&value.reshape((x.rows(), ()))?, y)
}

/// See [`Kernels::head_norm_backward`](crate::Kernels::head_norm_backward).
pub(super) fn heads_backward(
    settings: NormSettings,
    dy: Columns<'_>,
    x: Columns<'_>,
    weight: &Tensor,
    rstd: &Tensor,
    dx: Columns<'_>,
    dweight: Option<&Tensor>,
) -> Result<()> {
    let width = weight.dims1()?;
    let rstd = rstd.reshape(((), 1))?;
    let (grad, weight_grad) = gradients(settings, &heads(dy, width)?, &heads(x, width)?, weight, &rstd)?;
    if let Some(dweight) = dweight {
        store(&weight_grad, dweight)?;
    }
    store_columns(&grad.reshape((x.rows(), ()))?, dx)
}
