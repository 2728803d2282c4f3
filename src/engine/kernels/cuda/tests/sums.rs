//! Elementwise kernels, layer norm, sums over columns.

use super::super::{elementwise, layer_norm as device, sums};
use super::*;
use crate::engine::kernels::dropout::Dropout;
use crate::engine::kernels::{gelu, layer_norm, residual};

#[test]
fn gelus() {
    for dtype in TYPES {
        for len in [1, 7, 2048, 5003] {
            let x = rounded(pattern(len, 1, DType::F32).into_iter().map(|x| 20.0 * x.powi(3)).collect(), dtype);
            let dy = pattern(len, 2, dtype);
            let [value, gradient] = [poisoned(&[len], dtype), tensor(&dy, &[len], dtype)];
            gelu::forward(&tensor(&x, &[len], dtype), &value).unwrap();
            gelu::backward(&tensor(&x, &[len], dtype), &gradient).unwrap();
            let found = in_every_order(|gpu| {
                let (x, y, dy) = (gpu.input(&x, dtype), gpu.output(len, dtype), gpu.state(&dy, dtype));
                elementwise::gelu_forward(gpu, x, y).unwrap();
                elementwise::gelu_backward(gpu, x, dy).unwrap();
                vec![gpu.read(y), gpu.read(dy)]
            });
            assert_close("gelu", &found[0], &numbers(&value), dtype);
            assert_close("gelu's gradient", &found[1], &numbers(&gradient), dtype);
        }
    }
}

/// Beyond the range of FP16's cubes, at infinity, and for NaN.
#[test]
fn gelu_at_its_limits() {
    let x = [60000.0, -60000.0, f32::INFINITY, f32::NAN, -20.0];
    let gpu = Emulator::new(0);
    let (x, y, dy) = (gpu.input(&x, DType::F16), gpu.output(5, DType::F16), gpu.state(&[1.0; 5], DType::F16));
    elementwise::gelu_forward(&gpu, x, y).unwrap();
    elementwise::gelu_backward(&gpu, x, dy).unwrap();
    let (y, dy) = (gpu.read(y), gpu.read(dy));
    assert_eq!((y[0], y[1].abs(), y[2], y[4].abs()), (59968.0 + 32.0, 0.0, f32::INFINITY, 0.0));
    assert_eq!((dy[0], dy[1], dy[2], dy[4]), (1.0, 0.0, 1.0, 0.0));
    assert!(y[3].is_nan() && dy[3].is_nan());
}

/// Forward with a branch added on the way in or without, backward on top of a gradient or afresh, and on to the branch. The
/// masks and the sums have the same bits as the CPU's.
#[test]
fn layer_norms() {
    for [stream, compute] in STREAM_AND_COMPUTE {
        for (rows, width) in [(1, 8), (7, 24), (40, 65), (9, 1), (2, 768)] {
            layer_norm([stream, compute], [rows, width], false, None);
            layer_norm([stream, compute], [rows, width], true, Dropout::new(0.3, 42, 7, DRAW));
        }
        // Too wide for the registers, and no whole number of packs.
        layer_norm([stream, compute], [2, 1000], true, Dropout::new(0.3, 42, 7, DRAW));
        layer_norm([stream, compute], [3, 771], true, None);
    }
    // More rows than a block takes.
    layer_norm([DType::F32, DType::F16], [300, 12], false, None);
    layer_norm([DType::F32, DType::F16], [1100, 8], true, None);
}

const EPSILON: f32 = 1e-5;
const DRAW: u64 = 5 << 40 | 3;

fn layer_norm([stream, compute]: [DType; 2], shape @ [rows, width]: [usize; 2], added: bool, dropout: Option<Dropout>) {
    let len = rows * width;
    // Away from zero, so that a variance by differences of squares would show.
    let x = rounded(pattern(len, 1, DType::F32).into_iter().map(|x| x + 3.0).collect(), stream);
    let (weight, bias) = (pattern(width, 2, compute), pattern(width, 3, compute));
    let (dy, before, branch) = (pattern(len, 4, compute), pattern(len, 5, stream), pattern(len, 6, compute));

    let sum = tensor(&x, &shape, stream);
    if added {
        residual::add(&tensor(&x, &shape, stream), &tensor(&branch, &shape, compute), dropout, &sum).unwrap();
    }
    let [cpu_weight, cpu_bias] = [&weight, &bias].map(|values| tensor(values, &[width], compute));
    // What a first gradient is written over is nothing that counts.
    let fresh = !added;
    let dx = tensor(&if fresh { vec![0.0; len] } else { before.clone() }, &shape, stream);
    let y = poisoned(&shape, compute);
    let [mean, rstd] = [(); 2].map(|()| poisoned(&[rows], DType::F32));
    let [dweight, dbias] = [(); 2].map(|()| poisoned(&[width], compute));
    layer_norm::forward(&sum, &cpu_weight, &cpu_bias, EPSILON, &y, &mean, &rstd).unwrap();
    let cpu_dy = tensor(&dy, &shape, compute);
    layer_norm::backward(&cpu_dy, &sum, &cpu_weight, &mean, &rstd, &dx, &dweight, &dbias).unwrap();

    let found = in_every_order(|gpu| {
        let (x, dy, branch) = (gpu.input(&x, stream), gpu.input(&dy, compute), gpu.input(&branch, compute));
        let [weight, bias] = [&weight, &bias].map(|values| gpu.input(values, compute));
        let (y, dx) =
            (gpu.output(len, compute), if fresh { gpu.output(len, stream) } else { gpu.state(&before, stream) });
        let (sum, onward) = (gpu.output(len, stream), gpu.output(len, compute));
        let [mean, rstd] = [(); 2].map(|()| gpu.output(rows, DType::F32));
        let [dweight, dbias] = [(); 2].map(|()| gpu.output(width, compute));
        let (statistics, draw) = (device::Statistics { mean, rstd }, draw_words(gpu, DRAW));
        let addition = added.then_some(device::Addition { branch, dropout, draw, sum });
        let to_branch = added.then_some(device::Onward { branch: onward, dropout, draw });
        let normed = if added { sum } else { x };
        device::forward(gpu, shape, x, addition, [weight, bias], EPSILON, y, statistics).unwrap();
        let operands = [dy, normed, weight];
        device::backward(gpu, shape, operands, statistics, dx, fresh, to_branch, [dweight, dbias]).unwrap();
        [y, mean, rstd, dx, dweight, dbias, sum, onward].map(|buffer| gpu.read(buffer)).to_vec()
    });
    let names = ["value", "mean", "rstd", "dx", "dweight", "dbias"];
    let dtypes = [compute, DType::F32, DType::F32, stream, compute, compute];
    let truth = [&y, &mean, &rstd, &dx, &dweight, &dbias].map(numbers);
    for (((name, found), truth), dtype) in names.iter().zip(&found).zip(&truth).zip(dtypes) {
        assert_close(&format!("layer norm {rows}×{width}: {name}"), found, truth, dtype);
    }
    if added {
        assert_eq!(found[6], numbers(&sum), "the stream of {rows}×{width}");
        let onward = poisoned(&shape, compute);
        residual::branch_gradient(&tensor(&found[3], &shape, stream), dropout, &onward).unwrap();
        assert_eq!(found[7], numbers(&onward), "the branch's gradient of {rows}×{width}");
    }
}

#[test]
fn no_number_spoils_its_row_of_a_layer_norm_and_no_other() {
    let (shape @ [rows, width], dtype) = ([3, 24], DType::F16);
    let mut x = vec![0.5; rows * width];
    x[width + 5] = f32::NAN;
    let gpu = Emulator::new(0);
    let (values, ones) = (gpu.input(&x, dtype), gpu.input(&vec![1.0; rows * width], dtype));
    let [sum, y, dx, onward] = [(); 4].map(|()| gpu.output(rows * width, dtype));
    let [weight, bias] = [1.0, 0.0].map(|value| gpu.input(&vec![value; width], dtype));
    let [mean, rstd] = [(); 2].map(|()| gpu.output(rows, DType::F32));
    let [dweight, dbias] = [(); 2].map(|()| gpu.output(width, dtype));
    let (statistics, draw) = (device::Statistics { mean, rstd }, no_draw(&gpu));
    let addition = device::Addition { branch: values, dropout: None, draw, sum };
    let to_branch = device::Onward { branch: onward, dropout: None, draw };
    device::forward(&gpu, shape, ones, Some(addition), [weight, bias], EPSILON, y, statistics).unwrap();
    let operands = [ones, sum, weight];
    device::backward(&gpu, shape, operands, statistics, dx, true, Some(to_branch), [dweight, dbias]).unwrap();
    for buffer in [y, dx, onward] {
        let nans: Vec<bool> = gpu.read(buffer).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nans, (0..rows * width).map(|i| i / width == 1).collect::<Vec<_>>());
    }
    assert!(gpu.read(dweight).iter().all(|x| x.is_nan()) && gpu.read(dbias).iter().all(|&x| x == 3.0));
}

#[test]
fn column_sums() {
    for dtype in TYPES {
        for (rows, columns) in [(1, 1), (9, 130), (200, 33), (70, 256), (4500, 5)] {
            let x = pattern(rows * columns, 1, dtype);
            let mut exact = vec![0.0f64; columns];
            for row in x.chunks_exact(columns) {
                for (sum, x) in exact.iter_mut().zip(row) {
                    *sum += f64::from(*x);
                }
            }
            let found = in_every_order(|gpu| {
                let out = gpu.output(columns, dtype);
                sums::column_sums(gpu, [rows, columns], gpu.input(&x, dtype), out).unwrap();
                vec![gpu.read(out)]
            });
            let exact = rounded(exact.into_iter().map(|x| x as f32).collect(), dtype);
            assert_close(&format!("sums of {rows}×{columns}"), &found[0], &exact, dtype);
        }
    }
}
