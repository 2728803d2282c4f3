//! The engine compared with PyTorch, transformers and PEFT: logits, loss, every gradient, twenty steps of AdamW, and
//! half precision.
//!
//! The values are in `tests/golden`, and in `../shared/golden` if that folder exists. `make_families.py` and
//! `make_lora.py` document the purpose of each of their cases.

use crate::common::compare::{relative, skip};
use crate::common::engine::in_group;
use crate::common::golden::Case;
use crate::common::processes::together;
use candle_core::Tensor;
use finetune::engine::model::ModelSpec;
use finetune::precision::{Dtype, PrecisionPolicy};
use finetune::train::StepOutcome;

/// The cases of GPT-2 for every set of kernels. Prints it if the cases of `../shared` are missing.
fn gpt2() -> Vec<Case> {
    if Case::shared().is_none() {
        skip("shared", "there is no ../shared/golden/tiny-gpt2");
    }
    Case::gpt2().iter().flat_map(Case::for_all_kernels).collect()
}

#[test]
fn logits_agree_with_the_reference() {
    for case in Case::all() {
        case.assert_logits();
    }
}

#[test]
fn loss_and_every_gradient_agree_with_the_reference() {
    for case in Case::all() {
        case.assert_first_step();
    }
}

#[test]
fn half_precision_gradients_are_pytorchs_but_for_rounding() {
    for case in gpt2() {
        case.assert_half_precision_gradients([4e-3, 3e-2]);
    }
}

/// Gemma's blocks have twice the norms of the others, and its case has three of them.
#[test]
fn gradients_of_families_in_half_precision_are_pytorchs_but_for_rounding() {
    for case in Case::families() {
        case.assert_half_precision_gradients([6e-3, 4e-2]);
    }
}

#[test]
fn twenty_adamw_steps_agree_with_the_reference() {
    for case in Case::all() {
        case.assert_twenty_steps();
    }
}

/// Processes that share the rows of a batch take the same steps as PyTorch with the whole batch.
#[test]
fn twenty_steps_of_several_processes_agree_with_pytorch() {
    let of_rows = |case: &Case| case.kernels.name() == "fused" && case.rows() > 1;
    for case in gpt2().into_iter().chain(Case::families()).filter(of_rows) {
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
    for case in gpt2() {
        let mut engine = case.engine(PrecisionPolicy::FP16, case.rows());
        let mut skipped = 0;
        for (step, expected) in case.trajectory.fp16.iter().enumerate() {
            let report = engine.step(&case.whole_batch(step)).unwrap();
            let error = (report.loss - expected.loss).abs();
            let ratio = f64::from(report.scale) / expected.scale;
            assert!(error < 2e-2, "{}: loss {} at step {step}, not {}", case.name, report.loss, expected.loss);
            assert!((0.5..=2.0).contains(&ratio), "{}: scale {} at step {step}", case.name, report.scale);
            skipped += usize::from(report.outcome == StepOutcome::Skipped);
        }
        let expected = case.trajectory.fp16.iter().filter(|row| row.skipped).count();
        assert!(skipped > 0 && skipped.abs_diff(expected) <= 1, "{}: {skipped} skipped, not {expected}", case.name);
    }
}

/// Twenty steps in half precision, at a loss scale that overflows nowhere, lose what PyTorch's FP32 run loses.
#[test]
fn half_precision_losses_of_families_follow_those_of_fp32() {
    for case in Case::families() {
        for policy in [PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
            let mut engine = case.calm_engine(policy);
            for (step, expected) in case.trajectory.fp32.iter().enumerate() {
                let report = engine.step(&case.whole_batch(step)).unwrap();
                assert!(report.outcome != StepOutcome::Skipped, "{} {policy}: step {step} overflows", case.name);
                let error = (report.loss / expected.loss - 1.0).abs();
                assert!(error < 1e-2, "{} {policy}: loss {} at step {step}", case.name, report.loss);
            }
        }
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

#[test]
fn configurations_are_written_as_they_were_read() {
    for case in Case::families() {
        let text = std::fs::read(case.folder.join("config.json")).unwrap();
        let spec = ModelSpec::from_json(&text, "config.json").unwrap();
        assert_eq!(ModelSpec::from_json(spec.to_json("float32").as_bytes(), "written").unwrap(), spec, "{}", case.name);
        let elements: usize = case.parameters.values().map(Tensor::elem_count).sum();
        assert_eq!(spec.parameter_count(), elements as u64, "{}", case.name);
    }
}
