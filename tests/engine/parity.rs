//! The engine compared with PyTorch: logits, loss, every gradient, twenty steps of AdamW, and FP16 with its loss scale.
//!
//! The values are in `tests/golden`, and in `../shared/golden` if that folder exists.

use crate::common::compare::{assert_close, relative, skip};
use crate::common::engine::{POLICIES, in_group, unscaled};
use crate::common::golden::Case;
use crate::common::processes::together;
use finetune::precision::{Dtype, PrecisionPolicy};
use finetune::train::StepOutcome;

/// Every case for every set of kernels. Prints it if the cases of `../shared` are missing.
fn cases() -> Vec<Case> {
    if Case::shared().is_none() {
        skip("shared", "there is no ../shared/golden/tiny-gpt2");
    }
    Case::all().iter().flat_map(Case::for_all_kernels).collect()
}

#[test]
fn logits_agree_with_pytorch() {
    for case in cases() {
        case.assert_logits();
    }
}

#[test]
fn loss_and_every_gradient_agree_with_pytorch() {
    for case in cases() {
        case.assert_first_step();
    }
}

#[test]
fn half_precision_gradients_are_pytorchs_but_for_rounding() {
    for case in cases() {
        case.assert_half_precision_gradients([4e-3, 3e-2]);
    }
}

#[test]
fn every_parameter_receives_a_gradient() {
    for case in cases() {
        case.assert_every_parameter_learns();
    }
}

#[test]
fn twenty_adamw_steps_agree_with_pytorch() {
    for case in cases() {
        case.assert_twenty_steps();
    }
}

/// Processes that share the rows of a batch take the same steps as PyTorch with the whole batch.
#[test]
fn twenty_steps_of_several_processes_agree_with_pytorch() {
    let of_rows = |case: &Case| case.kernels.name() == "fused" && case.rows() > 1;
    for case in cases().into_iter().chain(Case::families()).filter(of_rows) {
        for world in [2, 3, 4] {
            together(world, |process| {
                let engine = case.engine(PrecisionPolicy::FP32, 1);
                case.assert_twenty_steps_of(&mut in_group(process, engine, case.rows()), 1);
            });
        }
    }
}

/// PyTorch's run is FP16 autocast with `GradScaler`. Which steps overflow depends on single roundings near 65504, so
/// that the scales may differ for a while, by one factor.
#[test]
fn fp16_losses_and_scales_follow_pytorch() {
    for case in cases() {
        let mut engine = case.engine(PrecisionPolicy::FP16, case.rows());
        let mut skipped = 0;
        for (step, expected) in case.trajectory.fp16.iter().enumerate() {
            let report = engine.step(&case.whole_batch(step)).unwrap();
            let (error, ratio) = ((report.loss - expected.loss).abs(), f64::from(report.scale) / expected.scale);
            assert!(error < 2e-2, "{}: loss {} at step {step}, not {}", case.name, report.loss, expected.loss);
            assert!((0.5..=2.0).contains(&ratio), "{}: scale {} at step {step}", case.name, report.scale);
            skipped += usize::from(report.outcome == StepOutcome::Skipped);
        }
        let expected = case.trajectory.fp16.iter().filter(|row| row.skipped).count();
        assert!(skipped > 0 && skipped.abs_diff(expected) <= 1, "{}: {skipped} skipped, not {expected}", case.name);
    }
}

/// Rows of `untied` differ in their numbers of targets, and one has none: micro-batches must weigh by them.
#[test]
fn micro_batches_make_the_same_step_as_the_whole_batch() {
    for case in cases() {
        let mut whole = case.engine(PrecisionPolicy::FP32, case.rows());
        let mut parts = case.engine(PrecisionPolicy::FP32, 1);
        let report = whole.step(&case.whole_batch(0)).unwrap();
        let parts_report = parts.step(&case.micro_batches(0, 1)).unwrap();
        assert_eq!(report.targets, parts_report.targets);
        assert!((report.loss - parts_report.loss).abs() < 1e-6, "{}: loss {}", case.name, parts_report.loss);
        assert_close(&case.name, &unscaled(&parts, 1.0), &unscaled(&whole, 1.0), 2e-6, 2e-6);
    }
}

/// A gradient type of FP32 keeps the products' accumulators: closer to PyTorch's FP32 than FP16 gradients.
#[test]
fn fp32_gradients_are_closer_than_fp16_gradients() {
    let distance = |case: &Case, grads: Dtype| -> f64 {
        let gradients = case.gradients_in(PrecisionPolicy { grads, ..PrecisionPolicy::FP16 });
        gradients.iter().map(|(name, gradient)| relative(gradient, &case.gradients[name]).powi(2)).sum()
    };
    for case in Case::own("deep").for_all_kernels() {
        let (wide, narrow) = (distance(&case, Dtype::F32), distance(&case, Dtype::F16));
        assert!(wide < narrow, "{}: {wide:.2e} with FP32, {narrow:.2e} with FP16", case.name);
    }
}

/// With the same state and batches, two runs are the same to the last bit, regardless of the threads.
#[test]
fn a_step_is_deterministic() {
    let cases = Case::own("deep").for_all_kernels();
    for (case, policy) in cases.iter().flat_map(|case| POLICIES.map(|policy| (case, policy))) {
        let run = || case.learned(&mut case.engine(policy, case.rows()), 5);
        assert!(run() == run(), "{} {policy}: two runs differ", case.name);
    }
}
