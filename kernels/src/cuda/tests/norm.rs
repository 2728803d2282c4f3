//! Layer and RMS norms.

use super::super::launch::Rows;
use super::super::norm as device;
use super::*;
use crate::columns::{Columns, Store};
use crate::{Fused, Kernels, Norm, NormGradients, NormSettings, Normed, layer_norm};

/// Forward, and backward on top of a gradient or afresh.
#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn layer_norms() {
    for types in STREAM_AND_COMPUTE {
        for shape in [[1, 8], [7, 24], [40, 65], [9, 1], [2, 768]] {
            layer_norm(types, shape, true);
            layer_norm(types, shape, false);
        }
        // Too wide for the registers, and no whole number of packs.
        layer_norm(types, [2, 1000], false);
        layer_norm(types, [3, 771], false);
    }
    // More rows than a block takes.
    layer_norm([DType::F32, DType::F16], [300, 12], true);
    layer_norm([DType::F32, DType::F16], [1100, 8], false);
}

const EPSILON: f32 = 1e-5;

fn layer_norm([stream, compute]: [DType; 2], shape @ [rows, width]: [usize; 2], fresh: bool) {
    let len = rows * width;
    // Away from zero, so that a variance by differences of squares would show.
    let x = rounded(pattern(len, 1, DType::F32).into_iter().map(|x| x + 3.0).collect(), stream);
    let (weight, bias) = (pattern(width, 2, compute), pattern(width, 3, compute));
    let (dy, before) = (pattern(len, 4, compute), pattern(len, 5, stream));

    let cpu_x = tensor(&x, &shape, stream);
    let [cpu_weight, cpu_bias] = [&weight, &bias].map(|values| tensor(values, &[width], compute));
    let dx = tensor(&if fresh { vec![0.0; len] } else { before.clone() }, &shape, stream);
    let y = poisoned(&shape, compute);
    let [mean, rstd] = [(); 2].map(|()| poisoned(&[rows], DType::F32));
    let [dweight, dbias] = [(); 2].map(|()| poisoned(&[width], compute));
    layer_norm::forward(&cpu_x, &cpu_weight, &cpu_bias, EPSILON, &y, &mean, &rstd).unwrap();
    let cpu_dy = tensor(&dy, &shape, compute);
    let gradients = NormGradients { weight: &dweight, bias: Some(&dbias) };
    layer_norm::backward(&cpu_dy, &cpu_x, &cpu_weight, &mean, &rstd, &dx, Some(gradients)).unwrap();

    let found = in_every_order(|gpu| {
        let (x, dy) = (gpu.input(&x, stream), gpu.input(&dy, compute));
        let [weight, bias] = [&weight, &bias].map(|values| gpu.input(values, compute));
        let (y, dx) =
            (gpu.output(len, compute), if fresh { gpu.output(len, stream) } else { gpu.state(&before, stream) });
        let [mean, rstd] = [(); 2].map(|()| gpu.output(rows, DType::F32));
        let [dweight, dbias] = [(); 2].map(|()| gpu.output(width, compute));
        let statistics = device::Statistics { mean: Some(mean), rstd };
        let [x, dy, y_rows, dx_rows] = [x, dy, y, dx].map(|buffer| Rows::whole(buffer, [rows, width]));
        device::forward(gpu, width, x, (weight, Some(bias)), (EPSILON, 0.0), y_rows, statistics).unwrap();
        let gradients = Some((dweight, Some(dbias)));
        device::backward(gpu, width, (dy, x, weight), (statistics, 0.0), (dx_rows, fresh), gradients).unwrap();
        [y, mean, rstd, dx, dweight, dbias].map(|buffer| gpu.read(buffer)).to_vec()
    });
    let names = ["value", "mean", "rstd", "dx", "dweight", "dbias"];
    let dtypes = [compute, DType::F32, DType::F32, stream, compute, compute];
    let truth = [&y, &mean, &rstd, &dx, &dweight, &dbias].map(numbers);
    for (((name, found), truth), dtype) in names.iter().zip(&found).zip(&truth).zip(dtypes) {
        assert_close(&format!("layer norm {rows}×{width}: {name}"), found, truth, dtype);
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn no_number_spoils_its_row_of_a_layer_norm_and_no_other() {
    let (rows, width, dtype) = (3, 24, DType::F16);
    let mut x = vec![0.5; rows * width];
    x[width + 5] = f32::NAN;
    let gpu = Emulator::new(0);
    let (values, ones) = (gpu.input(&x, dtype), gpu.input(&vec![1.0; rows * width], dtype));
    let [y, dx] = [(); 2].map(|()| gpu.output(rows * width, dtype));
    let [weight, bias] = [1.0, 0.0].map(|value| gpu.input(&vec![value; width], dtype));
    let [mean, rstd] = [(); 2].map(|()| gpu.output(rows, DType::F32));
    let [dweight, dbias] = [(); 2].map(|()| gpu.output(width, dtype));
    let statistics = device::Statistics { mean: Some(mean), rstd };
    let [values, ones, y_rows, dx_rows] = [values, ones, y, dx].map(|buffer| Rows::whole(buffer, [rows, width]));
    device::forward(&gpu, width, values, (weight, Some(bias)), (EPSILON, 0.0), y_rows, statistics).unwrap();
    let gradients = Some((dweight, Some(dbias)));
    device::backward(&gpu, width, (ones, values, weight), (statistics, 0.0), (dx_rows, true), gradients).unwrap();
    for buffer in [y, dx] {
        let nans: Vec<bool> = gpu.read(buffer).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nans, (0..rows * width).map(|i| i / width == 1).collect::<Vec<_>>());
    }
    assert!(gpu.read(dweight).iter().all(|x| x.is_nan()) && gpu.read(dbias).iter().all(|&x| x == 3.0));
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn rms_norms() {
    for [stream, compute] in STREAM_AND_COMPUTE {
        for (unit_offset, shape @ [rows, width]) in [(false, [7, 24]), (true, [40, 65]), (true, [2, 1000])] {
            let settings = NormSettings { norm: Norm::Rms { unit_offset }, eps: EPSILON };
            let len = rows * width;
            let (x, dy) = (pattern(len, 1, stream), pattern(len, 4, compute));
            let (weight, before) = (pattern(width, 2, compute), pattern(len, 5, stream));
            let (cpu_x, cpu_dy) = (tensor(&x, &shape, stream), tensor(&dy, &shape, compute));
            let (cpu_weight, dx) = (tensor(&weight, &[width], compute), tensor(&before, &shape, stream));
            let normed = Normed { out: poisoned(&shape, compute), mean: None, rstd: poisoned(&[rows], DType::F32) };
            let dweight = poisoned(&[width], compute);
            Fused.norm(settings, &cpu_x, &cpu_weight, None, &normed).unwrap();
            let gradients = Some(NormGradients { weight: &dweight, bias: None });
            Fused.norm_backward(settings, &cpu_dy, &cpu_x, &cpu_weight, &normed, (&dx, Store::Add), gradients).unwrap();
            let offset = if unit_offset { 1.0 } else { 0.0 };
            let found = in_every_order(|gpu| {
                let (x, dy, weight) = (gpu.input(&x, stream), gpu.input(&dy, compute), gpu.input(&weight, compute));
                let (y, rstd, dx) =
                    (gpu.output(len, compute), gpu.output(rows, DType::F32), gpu.state(&before, stream));
                let (frozen, dweight) = (gpu.state(&before, stream), gpu.output(width, compute));
                let statistics = device::Statistics { mean: None, rstd };
                let of = |buffer| Rows::whole(buffer, [rows, width]);
                device::forward(gpu, width, of(x), (weight, None), (EPSILON, offset), of(y), statistics).unwrap();
                let (operands, statistics) = ((of(dy), of(x), weight), (statistics, offset));
                device::backward(gpu, width, operands, statistics, (of(dx), false), Some((dweight, None))).unwrap();
                device::backward(gpu, width, operands, statistics, (of(frozen), false), None).unwrap();
                assert_eq!(gpu.read(dx), gpu.read(frozen), "a frozen weight changes dx");
                [y, rstd, dx, dweight].map(|buffer| gpu.read(buffer)).to_vec()
            });
            let truth = [&normed.out, &normed.rstd, &dx, &dweight].map(numbers);
            let names = ["value", "rstd", "dx", "dweight"];
            let dtypes = [compute, DType::F32, stream, compute];
            for (((name, found), truth), dtype) in names.iter().zip(&found).zip(&truth).zip(dtypes) {
                assert_close(&format!("RMS norm {rows}×{width}: {name}"), found, truth, dtype);
            }
        }
    }
}

/// Heads in some columns of wider rows, as queries and keys lie; what is beside them stays.
#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn rms_norms_of_heads() {
    let settings = NormSettings { norm: Norm::Rms { unit_offset: true }, eps: EPSILON };
    for (dtype, rows, heads, width) in [(DType::F32, 5, 3, 8), (DType::F16, 40, 2, 64), (DType::BF16, 9, 4, 128)] {
        let (first, own) = (16, heads * width);
        let stride = first + own + 8;
        let (x, dy) = (pattern(rows * stride, 1, dtype), pattern(rows * stride, 4, dtype));
        let (weight, before) = (pattern(width, 2, dtype), pattern(rows * stride, 5, dtype));
        let matrix = |values: &[f32]| tensor(values, &[rows, stride], dtype);
        let (cpu_x, cpu_dy, y, dx) = (matrix(&x), matrix(&dy), matrix(&before), matrix(&before));
        let (cpu_weight, dweight) = (tensor(&weight, &[width], dtype), poisoned(&[width], dtype));
        let rstd = poisoned(&[rows, heads], DType::F32);
        let columns = |tensor| Columns::new(tensor, first..first + own).unwrap();
        Fused.head_norm(settings, columns(&cpu_x), &cpu_weight, columns(&y), &rstd).unwrap();
        let operands = (columns(&cpu_dy), columns(&cpu_x));
        Fused
            .head_norm_backward(settings, operands.0, operands.1, &cpu_weight, &rstd, columns(&dx), Some(&dweight))
            .unwrap();
        let found = in_every_order(|gpu| {
            let (x, dy, weight) = (gpu.input(&x, dtype), gpu.input(&dy, dtype), gpu.input(&weight, dtype));
            let (y, dx, rstd) =
                (gpu.state(&before, dtype), gpu.state(&before, dtype), gpu.output(rows * heads, DType::F32));
            let dweight = gpu.output(width, dtype);
            let of = |buffer| Rows { buffer, len: rows, stride, first, count: own };
            let statistics = device::Statistics { mean: None, rstd };
            device::forward(gpu, width, of(x), (weight, None), (EPSILON, 1.0), of(y), statistics).unwrap();
            let operands = (of(dy), of(x), weight);
            device::backward(gpu, width, operands, (statistics, 1.0), (of(dx), true), Some((dweight, None))).unwrap();
            let odd = Rows { first: 1, ..of(y) };
            let refused = device::forward(gpu, width, of(x), (weight, None), (EPSILON, 1.0), odd, statistics);
            assert!(refused.unwrap_err().to_string().contains("no CUDA kernel"));
            [y, rstd, dx, dweight].map(|buffer| gpu.read(buffer)).to_vec()
        });
        let truth = [&y, &rstd, &dx, &dweight].map(numbers);
        let dtypes = [dtype, DType::F32, dtype, dtype];
        for (((name, found), truth), dtype) in
            ["value", "rstd", "dx", "dweight"].iter().zip(&found).zip(&truth).zip(dtypes)
        {
            assert_close(&format!("norm of {heads} heads of {width}: {name}"), found, truth, dtype);
        }
    }
}
