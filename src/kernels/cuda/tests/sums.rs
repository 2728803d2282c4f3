//! Elementwise kernels, layer norm, sums over columns.

use super::super::{elementwise, layer_norm as device, sums};
use super::*;
use crate::kernels::dropout::Dropout;
use crate::kernels::{gelu, layer_norm, residual, view};

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
    let gpu = Testbed::new(0);
    let (x, y, dy) = (gpu.input(&x, DType::F16), gpu.output(5, DType::F16), gpu.state(&[1.0; 5], DType::F16));
    elementwise::gelu_forward(&gpu, x, y).unwrap();
    elementwise::gelu_backward(&gpu, x, dy).unwrap();
    let (y, dy) = (gpu.read(y), gpu.read(dy));
    assert_eq!((y[0], y[1].abs(), y[2], y[4].abs()), (59968.0 + 32.0, 0.0, f32::INFINITY, 0.0));
    assert_eq!((dy[0], dy[1], dy[2], dy[4]), (1.0, 0.0, 1.0, 0.0));
    assert!(y[3].is_nan() && dy[3].is_nan());
}

#[test]
fn copies_and_sums() {
    for (from, to) in [(DType::F32, DType::BF16), (DType::F16, DType::F32), (DType::BF16, DType::BF16)] {
        let (x, before) = (pattern(3001, 1, from), pattern(3001, 2, to));
        let [copied, sum] = [poisoned(&[3001], to), tensor(&before, &[3001], to)];
        view::copy(&tensor(&x, &[3001], from), &copied).unwrap();
        view::accumulate(&tensor(&x, &[3001], from), &sum).unwrap();
        let found = in_every_order(|gpu| {
            let (x, copied, sum) = (gpu.input(&x, from), gpu.output(3001, to), gpu.state(&before, to));
            elementwise::copy(gpu, x, copied).unwrap();
            elementwise::accumulate(gpu, x, sum).unwrap();
            vec![gpu.read(copied), gpu.read(sum)]
        });
        assert_eq!(found, [numbers(&copied), numbers(&sum)]);
    }
}

/// The masks have the same bits as the CPU's, and so have the sums.
#[test]
fn residual_sums_with_dropout() {
    let draw = 5 << 40 | 3;
    for [stream_type, dtype] in STREAM_AND_COMPUTE {
        for (rows, width) in [(1, 3), (5, 24), (17, 97)] {
            let len = rows * width;
            let (stream, branch) = (pattern(len, 1, stream_type), pattern(len, 2, dtype));
            for dropout in [None, Dropout::new(0.3, 42, 7, draw)] {
                let shape = [rows, width];
                let [sum, gradient] = [poisoned(&shape, stream_type), poisoned(&shape, dtype)];
                let cpu_stream = tensor(&stream, &shape, stream_type);
                residual::add(&cpu_stream, &tensor(&branch, &shape, dtype), dropout, &sum).unwrap();
                residual::branch_gradient(&cpu_stream, dropout, &gradient).unwrap();
                let found = in_every_order(|gpu| {
                    let (stream, branch) = (gpu.input(&stream, stream_type), gpu.input(&branch, dtype));
                    let (sum, gradient) = (gpu.output(len, stream_type), gpu.output(len, dtype));
                    let draw = draw_words(gpu, draw);
                    elementwise::residual_add(gpu, stream, branch, dropout, draw, sum).unwrap();
                    elementwise::branch_gradient(gpu, stream, dropout, draw, gradient).unwrap();
                    vec![gpu.read(sum), gpu.read(gradient)]
                });
                assert_eq!(found, [numbers(&sum), numbers(&gradient)]);
            }
        }
    }
}

#[test]
fn layer_norms() {
    const EPSILON: f32 = 1e-5;
    for [stream, compute] in STREAM_AND_COMPUTE {
        for (rows, width) in [(1, 8), (7, 24), (40, 65), (9, 1), (3, 768), (300, 12)] {
            let shape = [rows, width];
            // Away from zero, so that a variance by differences of squares would show.
            let x = rounded(pattern(rows * width, 1, DType::F32).into_iter().map(|x| x + 3.0).collect(), stream);
            let (weight, bias) = (pattern(width, 2, compute), pattern(width, 3, compute));
            let (dy, before) = (pattern(rows * width, 4, compute), pattern(rows * width, 5, stream));

            let cpu_x = tensor(&x, &shape, stream);
            let [cpu_weight, cpu_bias] = [&weight, &bias].map(|values| tensor(values, &[width], compute));
            let (y, dx) = (poisoned(&shape, compute), tensor(&before, &shape, stream));
            let [mean, rstd] = [(); 2].map(|()| poisoned(&[rows], DType::F32));
            let [dweight, dbias] = [(); 2].map(|()| poisoned(&[width], compute));
            layer_norm::forward(&cpu_x, &cpu_weight, &cpu_bias, EPSILON, &y, &mean, &rstd).unwrap();
            let cpu_dy = tensor(&dy, &shape, compute);
            layer_norm::backward(&cpu_dy, &cpu_x, &cpu_weight, &mean, &rstd, &dx, &dweight, &dbias).unwrap();

            let found = in_every_order(|gpu| {
                let (x, dy) = (gpu.input(&x, stream), gpu.input(&dy, compute));
                let [weight, bias] = [&weight, &bias].map(|values| gpu.input(values, compute));
                let (y, dx) = (gpu.output(rows * width, compute), gpu.state(&before, stream));
                let [mean, rstd] = [(); 2].map(|()| gpu.output(rows, DType::F32));
                let [dweight, dbias] = [(); 2].map(|()| gpu.output(width, compute));
                let statistics = device::Statistics { mean, rstd };
                device::forward(gpu, shape, x, [weight, bias], EPSILON, y, statistics).unwrap();
                device::backward(gpu, shape, [dy, x, weight], statistics, dx, [dweight, dbias]).unwrap();
                [y, mean, rstd, dx, dweight, dbias].map(|buffer| gpu.read(buffer)).to_vec()
            });
            let truth = [&y, &mean, &rstd, &dx, &dweight, &dbias].map(numbers);
            let names = ["value", "mean", "rstd", "dx", "dweight", "dbias"];
            for ((name, found), (truth, dtype)) in names.iter().zip(&found).zip(truth.iter().zip([
                compute,
                DType::F32,
                DType::F32,
                stream,
                compute,
                compute,
            ])) {
                assert_close(&format!("layer norm {rows}×{width}: {name}"), found, truth, dtype);
            }
        }
    }
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
