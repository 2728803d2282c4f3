//! The engine compared with itself, for every case of `tests/golden`: micro-batches, threads, recomputation, decoding.

use crate::common::compare::{assert_close, relative, values};
use crate::common::engine::{POLICIES, calm, unscaled};
use crate::common::golden::Case;
use candle_core::Device;
use finetune::engine::kernels::{Fused, Kernels};
use finetune::engine::model::{Checkpointing, KvCache, Recurrence, Workspace};
use finetune::precision::PrecisionPolicy;

/// Except experts without tokens.
#[test]
fn every_parameter_receives_a_gradient() {
    for case in Case::all() {
        for policy in POLICIES {
            let mut engine = case.engine(policy, case.rows());
            engine.step(&case.whole_batch(0)).unwrap();
            for (name, gradient) in engine.grads.total().iter() {
                let is_zero = |gradient| values(gradient).iter().all(|&g| g == 0.0);
                let expected = name.contains("expert") && is_zero(&case.gradients[name]);
                assert!(!is_zero(gradient) || expected, "{} {policy}: `{name}` has none", case.name);
            }
        }
    }
}

/// Rows of `untied` differ in their numbers of targets, and one has none: micro-batches must weigh by them.
#[test]
fn micro_batches_make_the_same_step_as_the_whole_batch() {
    for case in Case::all() {
        let mut whole = case.engine(PrecisionPolicy::FP32, case.rows());
        let mut parts = case.engine(PrecisionPolicy::FP32, 1);
        let report = whole.step(&case.whole_batch(0)).unwrap();
        let parts_report = parts.step(&case.micro_batches(0, 1)).unwrap();
        assert_eq!(report.targets, parts_report.targets);
        assert!((report.loss - parts_report.loss).abs() < 1e-6, "{}: loss {}", case.name, parts_report.loss);
        let tolerance = if case.adapter.is_some() { 5e-6 } else { 2e-6 };
        assert_close(&case.name, &unscaled(&parts, 1.0), &unscaled(&whole, 1.0), tolerance, tolerance);
    }
}

/// With the same state and batches, two runs are the same to the last bit, for any number of threads, dropout of
/// adapters included.
#[test]
fn a_step_is_deterministic() {
    for case in Case::all() {
        for policy in POLICIES {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| case.learned(&mut case.engine_with_dropout(policy, 0.1), 3))
            };
            assert!(run(1) == run(3), "{} {policy}: two runs differ", case.name);
        }
    }
}

/// Gradient checkpointing recomputes the values that it did not keep, bit for bit, dropout of adapters included.
#[test]
fn recomputed_blocks_change_no_bit() {
    for case in Case::all() {
        for policy in POLICIES {
            let run = |keep| {
                // An overflow's NaN is equal to nothing.
                let mut engine = calm(case.engine_with_dropout(policy, 0.3));
                let shape = (case.rows(), engine.workspace.seq_len());
                engine.workspace =
                    Workspace::for_training(engine.model.spec(), policy, shape, keep, &Device::Cpu).unwrap();
                let learned = case.learned(&mut engine, 3);
                (learned, engine.grads.total().tensors().iter().map(values).collect::<Vec<_>>())
            };
            assert!(run(Checkpointing::None) == run(Checkpointing::PerBlock), "{} {policy}", case.name);
        }
    }
}

/// A sequence decoded in pieces, over a cache, has the logits of the whole. Angles of the dynamic type depend on the
/// tokens so far, and cached keys keep theirs, so only one piece has; `generate::` compares its pieces with
/// transformers.
#[test]
fn decoding_with_a_cache_is_the_forward_pass() {
    for case in Case::all() {
        // Generation by the fused kernels computes training's bits. Adapters round more often in half precision.
        let exact = case.kernels.name() == Fused.name() && case.name.starts_with("families/");
        let tolerances: &[f64] = match &case.adapter {
            _ if exact => &[0.0; 3],
            Some(_) => &[1e-5],
            None => &[2e-6, 2e-3, 2e-2],
        };
        for (policy, &tolerance) in POLICIES.into_iter().zip(tolerances) {
            let mut engine = case.engine(policy, case.rows());
            let whole = case.logits_of(&mut engine);
            let batch = &case.whole_batch(0)[0];
            let ids = &batch.inputs[..batch.seq_len];
            let dynamic = ["llama-dynamic", "longrope"].iter().any(|name| case.name.contains(name));
            let several = || vec![vec![3, 1, 1, ids.len() - 5], vec![1; ids.len()]];
            for pieces in if dynamic { vec![vec![ids.len()]] } else { several() } {
                let mut cache = KvCache::new(engine.model.spec(), policy, ids.len(), &Device::Cpu).unwrap();
                let mut past = 0;
                for new in pieces {
                    let hidden =
                        engine.model.decode(&engine.state.weights, &ids[past..past + new], &mut cache).unwrap();
                    let found = engine.model.logits(&engine.state.weights, hidden).unwrap();
                    let error = relative(&found, &whole.get(0).unwrap().narrow(0, past, new).unwrap());
                    assert!(error <= tolerance, "{} {policy}: {error:.1e} after {past} tokens", case.name);
                    past += new;
                }
                cache.prepare(engine.model.spec(), ids, ids.len()).unwrap();
                // A state cannot go back to fewer tokens.
                let recurrence = engine.model.spec().recurrence(0);
                let restarts = dynamic || matches!(recurrence, Some(Recurrence::GatedDelta { .. }));
                let kept = if restarts { 0 } else { ids.len() - 1 };
                assert_eq!(cache.reusable(engine.model.spec(), 0, ids.len()), kept, "{}", case.name);
            }
        }
    }
}
