//! Activations, branches and biases against the CPU's kernels.

use super::*;
use crate::Activation;
use crate::dropout::Dropout;

const SIZES: [usize; 2] = [5, 24];

/// The output, the gradient, and the output that the backward pass computes again.
fn activate(kernels: &dyn Kernels, activation: Activation, x: &Tensor, dy: &[f32]) -> Vec<Vec<f32>> {
    let dtype = x.dtype();
    let dy = tensor(dy, &SIZES, dtype);
    let [y, again] = [(); 2].map(|()| poisoned(&SIZES, dtype));
    // In place without a gate.
    let dx = if activation.is_gated() { poisoned(x.dims(), dtype) } else { dy.clone() };
    op::Activate { activation, x, y: &y }.run(kernels).unwrap();
    op::ActivateBackward { activation, x, dy: &dy, dx: &dx, y: &again }.run(kernels).unwrap();
    [y, dx, again].iter().map(numbers).collect()
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn activations() {
    let [rows, width] = SIZES;
    for dtype in TYPES {
        for activation in [Activation::Gelu, Activation::SwiGlu, Activation::GeGlu] {
            let width_of_x = width * if activation.is_gated() { 2 } else { 1 };
            let mut x: Vec<f32> = pattern(rows * width_of_x, 1, DType::F32).into_iter().map(|x| 12.0 * x).collect();
            // Beyond the range of an exponential or a cube.
            (x[0], x[1], x[2], x[3]) = (60_000.0, -60_000.0, 0.0, f32::NAN);
            let x = tensor(&x, &[rows, width_of_x], dtype);
            let dy = pattern(rows * width, 2, dtype);
            let found = in_every_order(|order| activate(&kernels(order), activation, &x, &dy));
            let expected = activate(&Fused, activation, &x, &dy);
            for (what, (found, expected)) in ["y", "dx", "y again"].into_iter().zip(found.iter().zip(&expected)) {
                let kind = |x: &f32| (x.is_nan(), x.is_infinite().then(|| x.signum() as i8));
                assert!(found.iter().map(kind).eq(expected.iter().map(kind)), "{what} of {activation:?}");
                let known = |x: &[f32]| x.iter().map(|x| if x.is_finite() { *x } else { 0.0 }).collect::<Vec<_>>();
                assert_close(&format!("{what} of {activation:?}"), &known(found), &known(expected), dtype);
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn branches() {
    for [stream, compute] in PAIRS {
        for (len, dropout) in [(5003, None), (64, Dropout::new(0.3, 9, 4, 5)), (131, Dropout::new(0.3, 9, 4, 5))] {
            let x = tensor(&pattern(len, 1, stream), &[1, len], stream);
            let y = tensor(&pattern(len, 2, compute), &[1, len], compute);
            let add = |kernels: &dyn Kernels| {
                let (sum, grad) = (poisoned(&[1, len], stream), poisoned(&[1, len], compute));
                op::AddBranch { stream: &x, branch: &y, dropout, out: &sum }.run(kernels).unwrap();
                op::Copy { x: &x, dropout, out: &grad }.run(kernels).unwrap();
                vec![numbers(&sum), numbers(&grad)]
            };
            let found = in_every_order(|order| {
                let gpu = kernels(order);
                let sum = x.copy().unwrap();
                let found = add(&gpu);
                op::AddBranch { stream: &sum, branch: &y, dropout, out: &sum }.run(&gpu).unwrap();
                assert_eq!(numbers(&sum), found[0], "a sum in place is another one");
                found
            });
            // Both round the same FP32 number.
            assert_eq!(found, add(&Fused), "{len} of {stream:?} and {compute:?}");
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn sums_of_rows() {
    // One row, a width that is no multiple of a pack, and several parts of several tiles.
    for sizes @ [rows, width] in [[1, 8], [37, 101], [300, 520], [1100, 300]] {
        for [of_sums, dtype] in PAIRS {
            let values = pattern(rows * width, 1, dtype);
            let found = in_every_order(|order| {
                let sums = poisoned(&[width], of_sums);
                op::SumRows { x: &tensor(&values, &sizes, dtype), out: &sums }.run(&kernels(order)).unwrap();
                vec![numbers(&sums)]
            });
            let sum = |column| (0..rows).map(|row| f64::from(values[row * width + column])).sum::<f64>() as f32;
            let expected: Vec<f32> = (0..width).map(sum).collect();
            assert_close(&format!("{sizes:?}"), &found[0], &expected, of_sums);
        }
    }
}
