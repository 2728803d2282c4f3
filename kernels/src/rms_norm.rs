//! RMS normalisation over rows or over the heads within rows, statistics in FP32 (Zhang and Sennrich, 2019).
//!
//! A row consists of groups as wide as the weight: one group for a whole row, or one for each head.

use crate::columns::WriteMode;
use crate::op;
use crate::rows::{Rows, STRIPE, WORK, column_sums, dot, for_each_part_with_scratch, par_columns};
use crate::view::{View, read, write, write_f32};
use candle_core::Result;

/// The gains of a group in FP32.
#[inline(always)]
fn load_gain(weight: View<'_>, offset: f32, out: &mut [f32]) {
    weight.load(0, out);
    for weight in out.iter_mut() {
        *weight += offset;
    }
}

/// Computes [`op::Norm`]: `y = x * rstd * (weight + offset)` with `rstd = 1 / sqrt(mean(x²) + eps)` for each group of each row. `x`
/// and `y` are different tensors.
pub fn forward(op: &op::Norm<'_>) -> Result<()> {
    let &op::Norm { settings, x, weight, y, rstd, .. } = op;
    let (width, rows, eps, offset) = (weight.dims1()?, x.rows(), settings.eps, settings.gain_offset());
    let groups = x.count() / width;
    let (opened, weight) = (read(x.tensor())?, read(weight)?);
    let (x, weight) = (x.source(&opened), weight.view());
    write(y.tensor(), |out| {
        write_f32(rstd, |rstd| {
            let out = (Rows { view: out, width: y.stride() }, Rows { view: rstd, width: groups });
            for_each_part_with_scratch(
                out,
                rows,
                [WORK / (groups * width) + 1, width],
                #[inline(always)]
                |first, rows, (mut out, rstd), [gains, row, result]| {
                    load_gain(weight, offset, gains);
                    for (i, group) in (0..rows).flat_map(|i| (0..groups).map(move |group| (i, group))) {
                        let row = x.as_f32(first + i, group * width, row);
                        let r = 1.0 / (dot(row, row) / width as f32 + eps).sqrt();
                        for ((result, x), gain) in result.iter_mut().zip(row).zip(gains.iter()) {
                            *result = x * r * gain;
                        }
                        out.view.store(i * y.stride() + y.first() + group * width, result);
                        rstd.view[i * groups + group] = r;
                    }
                },
            );
        })
    })?
}

/// Computes [`op::NormBackward`]. `dx` must not alias `dy` or `x`.
pub fn backward(op: &op::NormBackward<'_>) -> Result<()> {
    let &op::NormBackward { settings, dy, x, weight, rstd, dx, mode, dweight, .. } = op;
    let (width, rows, offset) = (weight.dims1()?, x.rows(), settings.gain_offset());
    let groups = x.count() / width;
    let (dy_opened, x_opened, weight, rstd) = (read(dy.tensor())?, read(x.tensor())?, read(weight)?, read(rstd)?);
    let (dy, x, weight, rstd) = (dy.source(&dy_opened), x.source(&x_opened), weight.view(), rstd.typed::<f32>()?);
    write(dx.tensor(), |out| {
        for_each_part_with_scratch(
            Rows { view: out, width: dx.stride() },
            rows,
            [WORK / (groups * width) + 1, width],
            #[inline(always)]
            |first, rows, mut out, [gains, g, xhat, total]| {
                load_gain(weight, offset, gains);
                for (i, group) in (0..rows).flat_map(|i| (0..groups).map(move |group| (i, group))) {
                    let r = rstd[(first + i) * groups + group];
                    dy.load(first + i, group * width, g);
                    x.load(first + i, group * width, xhat);
                    for ((g, xhat), gain) in g.iter_mut().zip(xhat.iter_mut()).zip(gains.iter()) {
                        *g *= gain;
                        *xhat *= r;
                    }
                    let mean = dot(g, xhat) / width as f32;
                    let at = i * dx.stride() + dx.first() + group * width;
                    match mode {
                        WriteMode::Accumulate => out.view.as_view().load(at, total),
                        WriteMode::Overwrite => total.fill(0.0),
                    }
                    for ((total, g), xhat) in total.iter_mut().zip(g.iter()).zip(xhat.iter()) {
                        *total += r * (g - xhat * mean);
                    }
                    out.view.store(at, total);
                }
            },
        );
    })?;
    let Some(dweight) = dweight else { return Ok(()) };
    write(dweight, |dweight| {
        par_columns(
            Rows { view: dweight, width: 1 },
            width,
            rows * groups,
            #[inline(always)]
            |first, columns, mut dweight| {
                let [sums] = column_sums(
                    rows * groups,
                    first,
                    columns,
                    #[inline(always)]
                    |index, first, [sums]| {
                        let (mut dy_row, mut x_row) = ([0.0; STRIPE], [0.0; STRIPE]);
                        let (row, column) = (index / groups, index % groups * width + first);
                        let dy = dy.as_f32(row, column, &mut dy_row[..columns]);
                        let x = x.as_f32(row, column, &mut x_row[..columns]);
                        let r = rstd[index];
                        for ((sum, dy), x) in sums.iter_mut().zip(dy).zip(x) {
                            *sum += dy * (x * r);
                        }
                    },
                );
                dweight.view.store(0, &sums[..columns]);
            },
        );
    })
}
