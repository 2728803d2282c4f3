//! Layer normalisation over the last dimension, statistics in FP32 (Ba, Kiros and Hinton, 2016).

use crate::NormGradients;
use crate::rows::{
    Rows, STRIPE, WORK, column_sums, dot, for_each_part, for_each_stripe, sum, sum_squared_distance, with_scratch,
};
use crate::view::{View, ViewMut, read, write, write_f32};
use candle_core::{Result, Tensor, bail};

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for each row of `x [N, D]` (residual type) into `y [N, D]`
/// (compute type); `mean [N]` and `rstd [N]` (FP32) are kept for the backward pass.
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    eps: f32,
    y: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<()> {
    let (rows, width) = x.dims2()?;
    let (x, weight, bias) = (read(x)?, read(weight)?, read(bias)?);
    let (x, weight, bias) = (x.view(), weight.view(), bias.view());
    write(y, |y| {
        write_f32(mean, |mean| {
            write_f32(rstd, |rstd| {
                let out = (Rows { view: y, width }, Rows { view: mean, width: 1 }, Rows { view: rstd, width: 1 });
                for_each_part(
                    out,
                    rows,
                    WORK / width + 1,
                    #[inline(always)]
                    |first, rows, (mut y, mean, rstd)| {
                        with_scratch(
                            4 * width,
                            #[inline(always)]
                            |scratch| {
                                let (row, rest) = scratch.split_at_mut(width);
                                let (out, rest) = rest.split_at_mut(width);
                                let (weight_row, bias_row) = rest.split_at_mut(width);
                                let weight = weight.widened(0, weight_row);
                                let bias = bias.widened(0, bias_row);
                                for i in 0..rows {
                                    let row = x.widened((first + i) * width, row);
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
                    },
                );
            })
        })
    })??
}

/// Adds the gradient with respect to `x` to `dx [N, D]` (residual type) and writes those of weight and bias, unless they are frozen.
/// `dy [N, D]` is of the compute type; `x`, `mean` and `rstd` are the forward pass's.
pub fn backward(
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
    dx: &Tensor,
    gradients: Option<NormGradients<'_>>,
) -> Result<()> {
    let (rows, width) = x.dims2()?;
    let (dy, x, weight, mean, rstd) = (read(dy)?, read(x)?, read(weight)?, read(mean)?, read(rstd)?);
    let (mean, rstd) = (mean.typed::<f32>()?, rstd.typed::<f32>()?);
    let (dy, x, weight) = (dy.view(), x.view(), weight.view());
    write(dx, |dx| backward_input(dy, x, weight, mean, rstd, dx, width))?;
    let Some(gradients) = gradients else { return Ok(()) };
    let NormGradients { weight: dweight, bias: Some(dbias) } = gradients else { bail!("a layer norm has a bias") };
    write(dweight, |dweight| {
        write(dbias, |dbias| {
            let out = (Rows { view: dweight, width: 1 }, Rows { view: dbias, width: 1 });
            for_each_stripe(
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
                            let dy = dy.widened(row * width + first, &mut dy_row[..columns]);
                            let x = x.widened(row * width + first, &mut x_row[..columns]);
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
    })?
}

/// `dx += rstd * (g - mean(g) - xhat * mean(g * xhat))` with `g = dy * weight`.
fn backward_input(dy: View, x: View, weight: View, mean: &[f32], rstd: &[f32], dx: ViewMut, width: usize) {
    let rows = mean.len();
    for_each_part(
        Rows { view: dx, width },
        rows,
        WORK / width + 1,
        #[inline(always)]
        |first, rows, mut dx| {
            with_scratch(
                4 * width,
                #[inline(always)]
                |scratch| {
                    let (g, rest) = scratch.split_at_mut(width);
                    let (xhat, rest) = rest.split_at_mut(width);
                    let (total, weight_row) = rest.split_at_mut(width);
                    let weight = weight.widened(0, weight_row);
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
                        dx.view.as_view().load(i * width, total);
                        for ((total, g), xhat) in total.iter_mut().zip(g.iter()).zip(xhat.iter()) {
                            *total += r * (g - mean_g - xhat * mean_gx);
                        }
                        dx.view.store(i * width, total);
                    }
                },
            );
        },
    );
}
