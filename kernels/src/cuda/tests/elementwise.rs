//! Activations, branches and biases against the CPU's kernels.

use super::super::elementwise;
use super::*;
use crate::Activation;
use crate::dropout::Dropout;

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn activations() {
    let (rows, width) = (5, 24);
    for dtype in TYPES {
        for activation in [Activation::Gelu, Activation::SwiGlu, Activation::GeGlu] {
            let len_of_x = rows * width * if activation.is_gated() { 2 } else { 1 };
            let mut x: Vec<f32> = pattern(len_of_x, 1, DType::F32).into_iter().map(|x| 12.0 * x).collect();
            // Beyond the range of an exponential or a cube.
            (x[0], x[1], x[2], x[3]) = (60_000.0, -60_000.0, 0.0, f32::NAN);
            let (x, dy) = (rounded(x, dtype), pattern(rows * width, 2, dtype));
            let found = in_every_order(|gpu| {
                let (x, y, again) = (gpu.input(&x, dtype), gpu.output(dy.len(), dtype), gpu.output(dy.len(), dtype));
                elementwise::activate(gpu, activation, width, x, y, None).unwrap();
                let gradient = if activation.is_gated() {
                    [gpu.input(&dy, dtype), gpu.output(x.len, dtype)]
                } else {
                    // In place.
                    [gpu.state(&dy, dtype); 2]
                };
                elementwise::activate(gpu, activation, width, x, again, Some(gradient)).unwrap();
                vec![gpu.read(y), gpu.read(gradient[1]), gpu.read(again)]
            });
            let (x, dy) = (tensor(&x, &[rows, x.len() / rows], dtype), tensor(&dy, &[rows, width], dtype));
            let (y, again) = (poisoned(&[rows, width], dtype), poisoned(&[rows, width], dtype));
            let dx = if activation.is_gated() { poisoned(x.dims(), dtype) } else { dy.clone() };
            op::Activate { activation, x: &x, y: &y }.run(&Fused).unwrap();
            op::ActivateBackward { activation, x: &x, dy: &dy, dx: &dx, y: &again }.run(&Fused).unwrap();
            for (what, found, expected) in
                [("y", &found[0], &y), ("dx", &found[1], &dx), ("y again", &found[2], &again)]
            {
                let expected = numbers(expected);
                let kind = |x: &f32| (x.is_nan(), x.is_infinite().then(|| x.signum() as i8));
                assert!(found.iter().map(kind).eq(expected.iter().map(kind)), "{what} of {activation:?}");
                let known = |x: &[f32]| x.iter().map(|x| if x.is_finite() { *x } else { 0.0 }).collect::<Vec<_>>();
                assert_close(&format!("{what} of {activation:?}"), &known(found), &known(&expected), dtype);
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn branches() {
    for [stream, compute] in PAIRS {
        for (len, dropout) in [(5003, None), (64, Dropout::new(0.3, 9, 4, 5)), (131, Dropout::new(0.3, 9, 4, 5))] {
            let (x, y) = (pattern(len, 1, stream), pattern(len, 2, compute));
            let found = in_every_order(|gpu| {
                let (sum, grad) = (gpu.output(len, stream), gpu.output(len, compute));
                let summed = gpu.state(&x, stream);
                elementwise::residual_add(gpu, gpu.input(&x, stream), gpu.input(&y, compute), dropout, sum).unwrap();
                elementwise::residual_add(gpu, summed, gpu.input(&y, compute), dropout, summed).unwrap();
                elementwise::residual_backward(gpu, gpu.input(&x, stream), dropout, grad).unwrap();
                assert_eq!(gpu.read(sum), gpu.read(summed), "a sum in place is another one");
                vec![gpu.read(sum), gpu.read(grad)]
            });
            let (x, y) = (tensor(&x, &[1, len], stream), tensor(&y, &[1, len], compute));
            let (sum, grad) = (poisoned(&[1, len], stream), poisoned(&[1, len], compute));
            op::AddBranch { stream: &x, branch: &y, dropout, out: &sum }.run(&Fused).unwrap();
            op::Copy { x: &x, dropout, out: &grad }.run(&Fused).unwrap();
            // Both round the same FP32 number.
            assert_eq!(found, [numbers(&sum), numbers(&grad)], "{len} of {stream:?} and {compute:?}");
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn the_same_row_in_every_row() {
    for dtype in TYPES {
        let row = pattern(40, 1, dtype);
        let found = in_every_order(|gpu| {
            let out = gpu.output(7 * 40, dtype);
            elementwise::fill_rows(gpu, gpu.input(&row, dtype), out).unwrap();
            vec![gpu.read(out)]
        });
        assert_eq!(found[0], row.repeat(7));
    }
    let gpu = Emulator::new(0);
    elementwise::fill_rows(&gpu, gpu.input(&[0.0; 12], DType::F32), gpu.output(24, DType::F32)).unwrap_err();
}
