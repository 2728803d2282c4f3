//! Llama, Mistral, Qwen 2 and 3, and Gemma 3 against PyTorch and transformers: logits, loss, every gradient, twenty steps of
//! AdamW, half precision; and against themselves: decoding with a cache, written configurations, threads.
//!
//! The values are in `tests/golden/families`; `make_families.py` documents the purpose of each case.

use crate::common::compare::{relative, values};
use crate::common::engine::POLICIES;
use crate::common::golden::Case;
use candle_core::{Device, Tensor};
use finetune::engine::kernels::{Fused, Kernels};
use finetune::engine::model::{Checkpointing, KvCache, ModelSpec, Workspace};
use finetune::precision::PrecisionPolicy;
use finetune::train::StepOutcome;

#[test]
fn logits_agree_with_transformers() {
    for case in Case::families() {
        case.assert_logits();
    }
}

#[test]
fn loss_and_every_gradient_agree_with_transformers() {
    for case in Case::families() {
        case.assert_first_step();
    }
}

#[test]
fn twenty_adamw_steps_agree_with_transformers() {
    for case in Case::families() {
        case.assert_twenty_steps();
    }
}

/// Gemma's blocks have twice the norms of the others, and its case has three of them.
#[test]
fn half_precision_gradients_are_pytorchs_but_for_rounding() {
    for case in Case::families() {
        case.assert_half_precision_gradients([6e-3, 4e-2]);
    }
}

#[test]
fn every_parameter_receives_a_gradient() {
    for case in Case::families() {
        case.assert_every_parameter_learns();
    }
}

/// Twenty steps in half precision, at a loss scale that overflows nowhere, lose what PyTorch's FP32 run loses.
#[test]
fn half_precision_losses_follow_those_of_fp32() {
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

/// A sequence decoded in pieces, over a cache, has the logits of the whole. Angles of the dynamic type depend on the tokens so far,
/// and cached keys keep theirs, so only one piece has; `generate::` compares its pieces with transformers.
#[test]
fn decoding_with_a_cache_is_the_forward_pass() {
    for case in Case::families() {
        for (policy, tolerance) in POLICIES.into_iter().zip([2e-6, 2e-3, 2e-2]) {
            let mut engine = case.engine(policy, case.rows());
            let tolerance = if case.kernels.name() == Fused.name() { 0.0 } else { tolerance };
            let whole = case.logits_of(&mut engine);
            let batch = &case.whole_batch(0)[0];
            let ids = &batch.inputs[..batch.seq_len];
            let mut cache = KvCache::new(engine.model.spec(), policy, ids.len(), &Device::Cpu).unwrap();
            let mut past = 0;
            let dynamic = ["llama-dynamic", "longrope"].iter().any(|name| case.name.contains(name));
            for new in if dynamic { vec![ids.len()] } else { vec![3, 1, 1, ids.len() - 5] } {
                let hidden = engine.model.decode(&engine.state.weights, &ids[past..past + new], &mut cache).unwrap();
                let found = engine.model.logits(&engine.state.weights, hidden).unwrap();
                let error = relative(&found, &whole.get(0).unwrap().narrow(0, past, new).unwrap());
                assert!(error <= tolerance, "{} {policy}: {error:.1e} after {past} tokens", case.name);
                past += new;
            }
        }
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

/// Gradient checkpointing recomputes the values that it did not keep, bit for bit.
#[test]
fn recomputed_blocks_change_no_bit() {
    for case in Case::families() {
        for policy in POLICIES {
            let step = |keep| {
                // An overflow's NaN is equal to nothing.
                let mut engine = case.calm_engine(policy);
                let shape = (case.rows(), engine.workspace.seq_len());
                engine.workspace =
                    Workspace::for_training(engine.model.spec(), policy, shape, keep, &Device::Cpu).unwrap();
                let report = engine.step(&case.whole_batch(0)).unwrap();
                (report.loss, engine.grads.total().tensors().iter().map(values).collect::<Vec<_>>())
            };
            assert!(step(Checkpointing::None) == step(Checkpointing::PerBlock), "{} {policy}", case.name);
        }
    }
}

/// With the same state and batches, two runs are the same to the last bit, for any number of threads.
#[test]
fn a_step_is_deterministic() {
    for case in Case::families() {
        for policy in POLICIES {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| case.learned(&mut case.engine(policy, case.rows()), 2))
            };
            assert!(run(1) == run(3), "{} {policy}: two runs differ", case.name);
        }
    }
}
