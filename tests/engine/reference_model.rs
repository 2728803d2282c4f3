//! The oracle of the other tests is itself right: it agrees with PyTorch, and its gradients with finite differences.

use crate::common::compare::{assert_close, max_difference};
use crate::common::golden::Case;
use crate::common::reference_model::ReferenceModel;
use candle_core::{DType, Tensor};

/// The reference values are rounded to FP32, 6e-8; the FP32 reference of the shared case is 5e-7 from its own FP64 run.
const F64_TOLERANCE: f64 = 1e-6;
const F32_TOLERANCE: f64 = 2e-6;

#[test]
fn logits_loss_and_gradients_agree_with_pytorch() {
    for case in Case::gpt2() {
        for (dtype, tolerance) in [(DType::F64, F64_TOLERANCE), (DType::F32, F32_TOLERANCE)] {
            let oracle = ReferenceModel::new(case.shape, &case.parameters, dtype).unwrap();
            let (inputs, targets) = &case.batches[0];
            let logits = oracle.logits(inputs).unwrap();
            let difference = max_difference(&logits, &case.logits);
            assert!(difference < 5e-6, "{}: logits in {dtype:?} differ by {difference:.1e}", case.name);
            let loss = scalar(&oracle.loss(inputs, targets).unwrap());
            let expected = case.trajectory.fp32[0].loss;
            assert!((loss - expected).abs() < 2e-6 * expected, "{}: loss {loss}, not {expected}", case.name);
            let gradients = oracle.gradients(inputs, targets).unwrap();
            assert_close(&format!("{} in {dtype:?}", case.name), &gradients, &case.gradients, tolerance, tolerance);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    const STEP: f64 = 1e-4;
    for case in [Case::own("narrow"), Case::own("untied")] {
        let oracle = ReferenceModel::new(case.shape, &case.parameters, DType::F64).unwrap();
        let (inputs, targets) = &case.batches[0];
        for (name, gradient) in oracle.gradients(inputs, targets).unwrap() {
            let variable = &oracle.parameters()[&name];
            let start = variable.as_tensor().copy().unwrap();
            let direction = direction(&start);
            let loss_at = |step: f64| {
                variable.set(&(&start + (&direction * step).unwrap()).unwrap()).unwrap();
                scalar(&oracle.loss(inputs, targets).unwrap())
            };
            let measured = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
            variable.set(&start).unwrap();
            let slope = scalar(&(&gradient * direction).unwrap().sum_all().unwrap());
            let size = scalar(&gradient.sqr().unwrap().sum_all().unwrap()).sqrt();
            let error = (measured - slope).abs() / size;
            assert!(error < 1e-6, "{}: slope of `{name}` {slope:e} against {measured:e}, {error:.1e}", case.name);
        }
    }
}

/// A direction of length one in which no entry is zero.
fn direction(like: &Tensor) -> Tensor {
    let entries: Vec<f64> = (0..like.elem_count()).map(|i| (1.0 + 1.7 * i as f64).sin()).collect();
    let length = entries.iter().map(|v| v * v).sum::<f64>().sqrt();
    (Tensor::from_vec(entries, like.shape(), like.device()).unwrap() / length).unwrap()
}

fn scalar(tensor: &Tensor) -> f64 {
    tensor.to_dtype(DType::F64).unwrap().to_scalar().unwrap()
}
