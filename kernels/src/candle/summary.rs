//! Statistics of a tensor: its rows are reduced on the device, and the rows' figures on the host.

use super::tensors::{require_contiguous, select, upcast};
use crate::precision::{FloatFormat, TensorStats};
use crate::summary::{self, TensorSummary};
use crate::view;
use candle_core::{D, DType, Result, Tensor};

/// Elements reduced on the device: counts of them, and sums of their squares, are exact enough in FP32.
const WIDTH: usize = 1024;
/// Range of the largest magnitude in which FP32 sums of squares neither overflow nor underflow.
const SQUARES: std::ops::RangeInclusive<f32> = 1e-12..=1e15;

/// Statistics of one tensor. Exponents are counted on the host: candle has no
/// operation for them.
pub(super) fn summarize(tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<TensorSummary> {
    if exponents {
        return summary::summarize(tensor, format, true);
    }
    let mut stats = TensorStats::default();
    for rows in by_rows(tensor)? {
        stats.merge(&of_rows(&rows, format)?);
    }
    Ok(TensorSummary { stats, ..TensorSummary::default() })
}

pub(super) fn sum(tensor: &Tensor) -> Result<f64> {
    let mut sum = 0.0;
    // Metal has no FP64.
    let tensor = if tensor.device().is_metal() { view::to_host(tensor)? } else { tensor.clone() };
    for rows in by_rows(&tensor)? {
        sum += rows.to_dtype(DType::F64)?.sum(1)?.to_vec1::<f64>()?.iter().sum::<f64>();
    }
    Ok(sum)
}

/// The elements as a matrix with rows of [`WIDTH`], and the remainder.
fn by_rows(tensor: &Tensor) -> Result<Vec<Tensor>> {
    require_contiguous(tensor)?;
    let flat = tensor.flatten_all()?;
    let (rows, rest) = (flat.elem_count() / WIDTH, flat.elem_count() % WIDTH);
    let mut parts = Vec::new();
    if rows > 0 {
        parts.push(flat.narrow(0, 0, rows * WIDTH)?.reshape((rows, WIDTH))?);
    }
    if rest > 0 {
        parts.push(flat.narrow(0, rows * WIDTH, rest)?.unsqueeze(0)?);
    }
    Ok(parts)
}

fn of_rows(rows: &Tensor, format: FloatFormat) -> Result<TensorStats> {
    let x = upcast(rows)?;
    let magnitude = x.abs()?;
    // Comparisons with NaN are false. Maxima are taken of finite values only: CUDA's drops NaN.
    let finite = magnitude.lt(f32::INFINITY)?;
    let nonzero = (&finite * magnitude.gt(0.0f32)?)?;
    let count = |condition: &Tensor| condition.to_dtype(DType::F32)?.sum(1);
    let figures = [
        count(&x.eq(0.0f32)?)?,
        count(&magnitude.lt(format.min_normal() as f32)?)?,
        count(&magnitude.eq(f32::INFINITY)?)?,
        count(&finite)?,
        select(&nonzero, &magnitude, f32::INFINITY)?.min(1)?,
        select(&finite, &magnitude, 0.0)?.max(1)?,
        select(&finite, &x, 0.0)?.sqr()?.sum(1)?,
    ];
    let figures = Tensor::stack(&figures, 0)?.to_vec2::<f32>()?;
    let total = |index: usize| figures[index].iter().map(|x| f64::from(*x)).sum::<f64>();
    let count = x.elem_count() as u64;
    let [zero, below, inf, finite] = [0, 1, 2, 3].map(|index| total(index) as u64);
    let min_nonzero = figures[4].iter().copied().fold(f32::INFINITY, f32::min);
    let max_abs = figures[5].iter().copied().fold(0.0, f32::max);
    let sum_squares =
        if max_abs == 0.0 || SQUARES.contains(&max_abs) { total(6) } else { scaled_squares(&x, max_abs)? };
    Ok(TensorStats {
        count,
        zero,
        subnormal: below - zero,
        inf,
        nan: count - finite - inf,
        min_nonzero: min_nonzero.is_finite().then_some(min_nonzero),
        max_abs,
        sum_squares,
    })
}

/// The sum of squares of finite values whose squares are outside FP32's range.
fn scaled_squares(x: &Tensor, max_abs: f32) -> Result<f64> {
    // A power of two that FP32 holds, subnormal maxima included.
    let factor = 2f64.powi(-(max_abs.log2().floor() as i32).clamp(-126, 127));
    let finite = x.abs()?.lt(f32::INFINITY)?;
    let squares = (select(&finite, x, 0.0)? * factor)?.sqr()?.sum(D::Minus1)?.to_vec1::<f32>()?;
    Ok(squares.iter().map(|x| f64::from(*x)).sum::<f64>() / (factor * factor))
}
