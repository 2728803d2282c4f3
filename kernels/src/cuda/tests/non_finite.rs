//! Values that are no numbers.

use super::*;
use crate::columns::{ColumnSlice, WriteMode};
use crate::{NormKind, NormSettings};

/// The loss of a row, whose gradient times `seed` overwrites the logits.
fn loss(logits: &Tensor, target: u32, seed: f32) -> f32 {
    let losses = poisoned(&[1], DType::F32);
    let (targets, seed) = (&[target][..], Some(seed));
    let logits = ColumnSlice::all(logits).unwrap();
    op::CrossEntropy { logits, softcap: None, targets, losses: &losses, seed, weights: None }.run(&kernels(0)).unwrap();
    numbers(&losses)[0]
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn a_logit_that_is_no_number_shows_in_loss_and_gradient() {
    for bad in [f32::NAN, f32::INFINITY] {
        let logits = tensor(&[0.0, bad, 1.0], &[1, 3], DType::F32);
        assert!(loss(&logits, 0, 1.0).is_nan() && numbers(&logits).iter().any(|x| x.is_nan()), "{bad}");
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn logits_of_probability_zero_change_nothing() {
    for dtype in TYPES {
        // A thread meets the infinite ones before the others, which are far below zero.
        let logits: Vec<f32> = (0..4104).map(|i| if i < 4096 { f32::NEG_INFINITY } else { -200.0 }).collect();
        let logits = tensor(&logits, &[1, 4104], dtype);
        assert!((loss(&logits, 4100, 8.0) - 8f32.ln()).abs() < 1e-5, "{dtype:?}");
        let expected: Vec<f32> =
            (0..4104).map(|i| if i < 4096 { 0.0 } else { 1.0 - 8.0 * f32::from(i == 4100) }).collect();
        assert_close("the gradient", &numbers(&logits), &expected, dtype);
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn no_number_spoils_its_row_of_a_layer_norm_and_no_other() {
    let sizes @ [rows, width] = [3, 24];
    let dtype = DType::F16;
    let gpu = kernels(0);
    let mut x = vec![0.5; rows * width];
    x[width + 5] = f32::NAN;
    let x = tensor(&x, &sizes, dtype);
    let ones = tensor(&vec![1.0; rows * width], &sizes, dtype);
    let [y, dx] = [(); 2].map(|()| poisoned(&sizes, dtype));
    let [weight, bias] = [1.0, 0.0].map(|value| tensor(&vec![value; width], &[width], dtype));
    let [mean, rstd] = [(); 2].map(|()| poisoned(&[rows], DType::F32));
    let [dweight, dbias] = [(); 2].map(|()| poisoned(&[width], dtype));
    let settings = NormSettings { norm: NormKind::Layer, eps: 1e-5 };
    let [x_rows, dy, y_rows, dx_rows] = [&x, &ones, &y, &dx].map(|tensor| ColumnSlice::all(tensor).unwrap());
    let mean = Some(&mean);
    let rstd = &rstd;
    let weight = &weight;
    op::Norm { settings, x: x_rows, weight, bias: Some(&bias), y: y_rows, mean, rstd }.run(&gpu).unwrap();
    let mode = WriteMode::Overwrite;
    let gradients = [Some(&dweight), Some(&dbias)];
    let [dweight, dbias] = gradients;
    op::NormBackward { settings, dy, x: x_rows, weight, mean, rstd, dx: dx_rows, mode, dweight, dbias }
        .run(&gpu)
        .unwrap();
    for tensor in [&y, &dx] {
        let nans: Vec<bool> = numbers(tensor).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nans, (0..rows * width).map(|i| i / width == 1).collect::<Vec<_>>());
    }
    let [dweight, dbias] = gradients.map(|gradient| gradient.map(numbers).unwrap());
    assert!(dweight.iter().all(|x| x.is_nan()) && dbias.iter().all(|&x| x == 3.0));
}
