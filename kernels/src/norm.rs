//! Layer normalization (Ba, Kiros and Hinton, 2016) and RMS normalization (Zhang and Sennrich, 2019), statistics in
//! FP32.
//!
//! A row consists of groups as wide as the weight: one group for a whole row, or one for each head.

use crate::columns::{ColumnReader, WriteMode};
use crate::op;
use crate::rows::{
    Rows, STRIPE, WORK, column_sums, dot, for_each_part_with_scratch, par_columns, sum, sum_squared_distance,
};
use crate::view::{ReadGuard, View, ViewMut, read, write, write_f32, write_optional};
use candle_core::{Result, Tensor};

/// Computes [`op::Norm`]: `y = (x - mean) * rstd * weight + bias` for each group of each row, without centering
/// `y = x * rstd * (weight + offset)`. `x` and `y` are different tensors.
pub fn forward(op: &op::Norm<'_>) -> Result<()> {
    if op.settings.centers() { forward_as::<true>(op) } else { forward_as::<false>(op) }
}

/// Computes [`op::NormBackward`]. `dx` must not alias `dy` or `x`.
pub fn backward(op: &op::NormBackward<'_>) -> Result<()> {
    if op.settings.centers() { backward_as::<true>(op) } else { backward_as::<false>(op) }
}

/// The gains of a group in FP32.
#[inline(always)]
fn load_gains<const CENTERS: bool>(weight: View<'_>, offset: f32, out: &mut [f32]) {
    weight.load(0, out);
    // Adding 0 would change the sign of a zero.
    if !CENTERS {
        for weight in out.iter_mut() {
            *weight += offset;
        }
    }
}

/// The stored mean of a group; 0 without centering.
#[inline(always)]
fn mean_of<const CENTERS: bool>(mean: Option<&[f32]>, index: usize) -> f32 {
    mean.filter(|_| CENTERS).map_or(0.0, |mean| mean[index])
}

fn forward_as<const CENTERS: bool>(op: &op::Norm<'_>) -> Result<()> {
    let &op::Norm { settings, x, weight, bias, y, mean, rstd } = op;
    let rows = x.rows();
    let width = weight.elem_count();
    let eps = settings.eps;
    let groups = x.count() / width;
    let opened = read(x.tensor())?;
    let weight = read(weight)?;
    let bias = bias.map(read).transpose()?;
    let x = x.source(&opened);
    let weight = weight.view();
    let bias = bias.as_ref().map(ReadGuard::view);
    let normalize = |out: ViewMut<'_>, mean: Option<ViewMut<'_>>, rstd: &mut [f32]| {
        let statistics = (mean.map(|view| Rows { view, width: groups }), Rows { view: rstd, width: groups });
        for_each_part_with_scratch(
            (Rows { view: out, width: y.stride() }, statistics),
            rows,
            [WORK / (groups * width) + 1, width],
            #[inline(always)]
            |first, rows, (mut out, (mut mean, rstd)), [gains, biases, row, result]| {
                load_gains::<CENTERS>(weight, settings.gain_offset(), gains);
                if let Some(bias) = bias {
                    bias.load(0, biases);
                }
                for index in 0..rows * groups {
                    let (i, column) = (index / groups, index % groups * width);
                    let row = x.as_f32(first + i, column, row);
                    let m = if CENTERS { sum(row) / width as f32 } else { 0.0 };
                    let r = 1.0 / (sum_squared_distance(row, m) / width as f32 + eps).sqrt();
                    for (((result, x), gain), bias) in result.iter_mut().zip(row).zip(&*gains).zip(&*biases) {
                        let scaled = (x - m) * r * gain;
                        *result = if CENTERS { scaled + bias } else { scaled };
                    }
                    out.view.store(i * y.stride() + y.first() + column, result);
                    if let Some(mean) = &mut mean {
                        mean.view.store(index, &[m]);
                    }
                    rstd.view[index] = r;
                }
            },
        );
    };
    write(y.tensor(), |out| write_optional(mean, |mean| write_f32(rstd, |rstd| normalize(out, mean, rstd))))??
}

/// The operands that both gradients read.
#[derive(Clone, Copy)]
struct BackwardInputs<'a> {
    dy: ColumnReader<'a>,
    x: ColumnReader<'a>,
    mean: Option<&'a [f32]>,
    rstd: &'a [f32],
}

fn backward_as<const CENTERS: bool>(op: &op::NormBackward<'_>) -> Result<()> {
    let dy = read(op.dy.tensor())?;
    let x = read(op.x.tensor())?;
    let rstd = read(op.rstd)?;
    let mean = op.mean.map(read).transpose()?;
    let mean = mean.as_ref().map(ReadGuard::typed::<f32>).transpose()?;
    let inputs = BackwardInputs { dy: op.dy.source(&dy), x: op.x.source(&x), mean, rstd: rstd.typed::<f32>()? };
    input_gradient::<CENTERS>(op, inputs)?;
    op.dweight.map_or(Ok(()), |dweight| parameter_gradients::<CENTERS>(op, dweight, inputs))
}

/// `dx += rstd * (g - mean(g) - xhat * mean(g * xhat))` with `g = dy * weight`, and without centering without
/// `mean(g)`.
fn input_gradient<const CENTERS: bool>(
    &op::NormBackward { settings, x: rows, weight, dx, mode, .. }: &op::NormBackward<'_>,
    BackwardInputs { dy, x, mean, rstd }: BackwardInputs<'_>,
) -> Result<()> {
    let width = weight.elem_count();
    let weight = read(weight)?;
    let (rows, groups, weight) = (rows.rows(), rows.count() / width, weight.view());
    write(dx.tensor(), |out| {
        for_each_part_with_scratch(
            Rows { view: out, width: dx.stride() },
            rows,
            [WORK / (groups * width) + 1, width],
            #[inline(always)]
            |first, rows, mut out, [gains, g, xhat, total]| {
                load_gains::<CENTERS>(weight, settings.gain_offset(), gains);
                for (i, group) in (0..rows).flat_map(|i| (0..groups).map(move |group| (i, group))) {
                    let index = (first + i) * groups + group;
                    let m = mean_of::<CENTERS>(mean, index);
                    let r = rstd[index];
                    dy.load(first + i, group * width, g);
                    x.load(first + i, group * width, xhat);
                    for ((g, xhat), gain) in g.iter_mut().zip(xhat.iter_mut()).zip(&*gains) {
                        *g *= gain;
                        *xhat = (*xhat - m) * r;
                    }
                    let mean_g = if CENTERS { sum(g) / width as f32 } else { 0.0 };
                    let mean_gx = dot(g, xhat) / width as f32;
                    let at = i * dx.stride() + dx.first() + group * width;
                    match mode {
                        WriteMode::Accumulate => out.view.as_view().load(at, total),
                        WriteMode::Overwrite => total.fill(0.0),
                    }
                    for ((total, g), xhat) in total.iter_mut().zip(&*g).zip(&*xhat) {
                        *total += r * (g - mean_g - xhat * mean_gx);
                    }
                    out.view.store(at, total);
                }
            },
        );
    })
}

/// `dweight = sum(dy * xhat)` and `dbias = sum(dy)`, over all groups of all rows.
fn parameter_gradients<const CENTERS: bool>(
    &op::NormBackward { x: rows, dbias, .. }: &op::NormBackward<'_>,
    dweight: &Tensor,
    BackwardInputs { dy, x, mean, rstd }: BackwardInputs<'_>,
) -> Result<()> {
    let width = dweight.elem_count();
    let (rows, groups) = (rows.rows(), rows.count() / width);
    let sum_terms = |dweight: ViewMut<'_>, dbias: Option<ViewMut<'_>>| {
        par_columns(
            (Rows { view: dweight, width: 1 }, dbias.map(|view| Rows { view, width: 1 })),
            width,
            rows * groups,
            #[inline(always)]
            |first, columns, (mut dweight, mut dbias)| {
                let [dw, db] = column_sums(
                    rows * groups,
                    first,
                    columns,
                    #[inline(always)]
                    |index, first, [dw, db]| {
                        let (mut dy_row, mut x_row) = ([0.0; STRIPE], [0.0; STRIPE]);
                        let row = index / groups;
                        let column = index % groups * width + first;
                        let dy = dy.as_f32(row, column, &mut dy_row[..columns]);
                        let x = x.as_f32(row, column, &mut x_row[..columns]);
                        let m = mean_of::<CENTERS>(mean, index);
                        let r = rstd[index];
                        for (((dw, db), dy), x) in dw.iter_mut().zip(db).zip(dy).zip(x) {
                            *dw += dy * ((x - m) * r);
                            *db += dy;
                        }
                    },
                );
                dweight.view.store(0, &dw[..columns]);
                if let Some(dbias) = &mut dbias {
                    dbias.view.store(0, &db[..columns]);
                }
            },
        );
    };
    write(dweight, |dweight| write_optional(dbias, |dbias| sum_terms(dweight, dbias)))?
}
