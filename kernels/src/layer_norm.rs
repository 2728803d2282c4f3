//! Layer normalisation over the last dimension, statistics in FP32 (Ba, Kiros and Hinton, 2016).

use crate::Ran;
use crate::columns::{ColumnSlice, WriteMode};
use crate::op;
use crate::rows::{
    Rows, STRIPE, WORK, column_sums, dot, for_each_part_with_scratch, par_columns, sum, sum_squared_distance,
};
use crate::view::{View, ViewMut, read, write, write_f32};
use candle_core::Result;

/// Whether these are whole rows of one group.
fn are_whole(columns: &[ColumnSlice<'_>], width: usize) -> bool {
    columns.iter().all(|x| [x.stride(), x.count()] == [width; 2])
}

/// Computes [`op::Norm`]: `y = (x - mean) / sqrt(var + eps) * weight + bias` for each row.
pub fn forward(op: &op::Norm<'_>) -> Result<Ran> {
    let &op::Norm { x, weight, y, rstd, .. } = op;
    let (rows, width, eps) = (x.rows(), weight.elem_count(), op.settings.eps);
    let (Some(bias), Some(mean), true) = (op.bias, op.mean, are_whole(&[x, y], width)) else {
        return Ok(Ran::Unsupported);
    };
    let (x, y) = (x.tensor(), y.tensor());
    let (x, weight, bias) = (read(x)?, read(weight)?, read(bias)?);
    let (x, weight, bias) = (x.view(), weight.view(), bias.view());
    write(y, |y| {
        write_f32(mean, |mean| {
            write_f32(rstd, |rstd| {
                let out = (Rows { view: y, width }, Rows { view: mean, width: 1 }, Rows { view: rstd, width: 1 });
                for_each_part_with_scratch(
                    out,
                    rows,
                    [WORK / width + 1, width],
                    #[inline(always)]
                    |first, rows, (mut y, mean, rstd), [row, out, weight_row, bias_row]| {
                        let weight = weight.as_f32(0, weight_row);
                        let bias = bias.as_f32(0, bias_row);
                        for i in 0..rows {
                            let row = x.as_f32((first + i) * width, row);
                            let m = sum(row) / width as f32;
                            let r = 1.0 / (sum_squared_distance(row, m) / width as f32 + eps).sqrt();
                            for (((out, x), w), b) in out.iter_mut().zip(row).zip(weight).zip(bias) {
                                *out = (x - m) * r * w + b;
                            }
                            y.view.store(i * width, out);
                            mean.view[i] = m;
                            rstd.view[i] = r;
                        }
                    },
                );
            })
        })
    })???;
    Ok(Ran::Done)
}

/// Computes [`op::NormBackward`].
pub fn backward(op: &op::NormBackward<'_>) -> Result<Ran> {
    let &op::NormBackward { dy, x, weight, rstd, dx, mode, .. } = op;
    let (rows, width) = (x.rows(), weight.elem_count());
    let (Some(mean), true) = (op.mean, are_whole(&[dy, x, dx], width)) else { return Ok(Ran::Unsupported) };
    let (dy, x, dx) = (dy.tensor(), x.tensor(), dx.tensor());
    let (dy, x, weight, mean, rstd) = (read(dy)?, read(x)?, read(weight)?, read(mean)?, read(rstd)?);
    let (mean, rstd) = (mean.typed::<f32>()?, rstd.typed::<f32>()?);
    let (dy, x, weight) = (dy.view(), x.view(), weight.view());
    write(dx, |dx| backward_input([dy, x, weight], [mean, rstd], (dx, mode), width))?;
    let (Some(dweight), Some(dbias)) = (op.dweight, op.dbias) else { return Ok(Ran::Done) };
    write(dweight, |dweight| {
        write(dbias, |dbias| {
            let out = (Rows { view: dweight, width: 1 }, Rows { view: dbias, width: 1 });
            par_columns(
                out,
                width,
                rows,
                #[inline(always)]
                |first, columns, (mut dweight, mut dbias)| {
                    let [dw, db] = column_sums(
                        rows,
                        first,
                        columns,
                        #[inline(always)]
                        |row, first, [dw, db]| {
                            let (mut dy_row, mut x_row) = ([0.0; STRIPE], [0.0; STRIPE]);
                            let dy = dy.as_f32(row * width + first, &mut dy_row[..columns]);
                            let x = x.as_f32(row * width + first, &mut x_row[..columns]);
                            let (m, r) = (mean[row], rstd[row]);
                            for (((dw, db), dy), x) in dw.iter_mut().zip(db).zip(dy).zip(x) {
                                *dw += dy * ((x - m) * r);
                                *db += dy;
                            }
                        },
                    );
                    dweight.view.store(0, &dw[..columns]);
                    dbias.view.store(0, &db[..columns]);
                },
            );
        })
    })??;
    Ok(Ran::Done)
}

/// `dx += rstd * (g - mean(g) - xhat * mean(g * xhat))` with `g = dy * weight`.
fn backward_input(
    [dy, x, weight]: [View<'_>; 3],
    [mean, rstd]: [&[f32]; 2],
    (dx, mode): (ViewMut<'_>, WriteMode),
    width: usize,
) {
    let rows = mean.len();
    for_each_part_with_scratch(
        Rows { view: dx, width },
        rows,
        [WORK / width + 1, width],
        #[inline(always)]
        |first, rows, mut dx, [g, xhat, total, weight_row]| {
            let weight = weight.as_f32(0, weight_row);
            for i in 0..rows {
                let row = first + i;
                dy.load(row * width, g);
                x.load(row * width, xhat);
                let (m, r) = (mean[row], rstd[row]);
                for ((g, xhat), w) in g.iter_mut().zip(xhat.iter_mut()).zip(weight) {
                    *g *= w;
                    *xhat = (*xhat - m) * r;
                }
                let mean_g = sum(g) / width as f32;
                let mean_gx = dot(g, xhat) / width as f32;
                match mode {
                    WriteMode::Accumulate => dx.view.as_view().load(i * width, total),
                    WriteMode::Overwrite => total.fill(0.0),
                }
                for ((total, g), xhat) in total.iter_mut().zip(g.iter()).zip(xhat.iter()) {
                    *total += r * (g - mean_g - xhat * mean_gx);
                }
                dx.view.store(i * width, total);
            }
        },
    );
}
