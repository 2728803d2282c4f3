//! Samples with loss on some of their tokens: losses and gradients against PyTorch's with labels of -100, packed and
//! not, accumulated and not.

use crate::common::compare::assert_close;
use crate::common::engine::unscaled;
use crate::common::golden::{Case, json, path, tensors, with_prefix};
use candle_core::{Device, Tensor};
use finetune::data::{Batch, BatchLoader, SequenceIndex, TokenSource};
use finetune::engine::model::{Checkpointing, Workspace};
use finetune::engine::optim::Gradients;
use finetune::precision::PrecisionPolicy;
use finetune::train::TrainEngine;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};

/// `masked.json`.
#[derive(Deserialize)]
struct Masked {
    seq_len: usize,
    cases: BTreeMap<String, Samples>,
}

#[derive(Deserialize)]
struct Samples {
    #[serde(rename = "samples")]
    tokens: Vec<Vec<(u32, bool)>>,
    loss: f64,
    targets: usize,
}

fn masked() -> (Masked, HashMap<String, Tensor>) {
    (json(&path("masked.json")), tensors(&path("masked.safetensors")))
}

/// An epoch's batches of `rows` rows.
fn batches(samples: &[Vec<(u32, bool)>], seq_len: usize, packing: bool, rows: usize) -> Vec<Batch> {
    let index = SequenceIndex::new(TokenSource::from_samples(samples), seq_len, packing, "samples").unwrap();
    let mut loader = BatchLoader::from_index(index, rows, 7).unwrap();
    let mut batches = Vec::new();
    while loader.position().epoch == 0 {
        let mut batch = loader.batch();
        loader.next_batch(&mut batch);
        batches.push(batch);
    }
    batches
}

/// The engine of a case for micro-batches of other numbers of rows and columns.
fn engine(case: &Case, policy: PrecisionPolicy, shape: (usize, usize), keep: Checkpointing) -> TrainEngine {
    let mut engine = case.engine(policy, shape.0);
    let spec = engine.model.spec();
    engine.workspace = Workspace::for_training(spec, policy, shape, keep, &Device::Cpu).unwrap();
    engine.grads = Gradients::new(&engine.state.weights, policy, 2).unwrap();
    engine
}

#[test]
fn masked_cut_packed_and_accumulated_samples_have_pytorchs_loss_and_gradients() {
    let (masked, gradients) = masked();
    for (name, Samples { tokens: samples, loss, targets }) in &masked.cases {
        let expected = with_prefix(&gradients, &format!("{name}/"));
        for case in Case::own(name).for_all_kernels() {
            for (packing, rows, keep) in [
                (false, 8, Checkpointing::None),
                (false, 3, Checkpointing::PerBlock),
                (true, 5, Checkpointing::None),
                (true, 2, Checkpointing::PerBlock),
            ] {
                let what = format!("{}, packing {packing}, {rows} rows", case.name);
                let micro_batches = batches(samples, masked.seq_len, packing, rows);
                assert!(!packing || micro_batches.iter().all(|batch| !batch.document_starts.is_empty()));
                let mut engine = engine(&case, PrecisionPolicy::FP32, (rows, masked.seq_len), keep);
                let report = engine.step(&micro_batches).unwrap();
                assert_eq!(report.targets, *targets, "{what}");
                assert!((report.loss / loss - 1.0).abs() < 2e-6, "{what}: loss {}, not {loss}", report.loss);
                assert_close(&what, &unscaled(&engine, 1.0), &expected, 1e-5, 1e-5);
            }
        }
    }
}

/// In half precision too, packing changes nothing but the order of sums.
#[test]
fn packed_samples_are_learned_as_if_alone_in_half_precision() {
    let (masked, _) = masked();
    for policy in [PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
        for name in ["deep", "families/gemma3"] {
            let samples = &masked.cases[name].tokens;
            let case = Case::own(name);
            let step = |packing: bool, rows: usize| {
                let mut engine = engine(&case, policy, (rows, masked.seq_len), Checkpointing::None);
                if policy.needs_loss_scale() {
                    engine.state.scaler.set_scale(1024.0).unwrap();
                }
                let report = engine.step(&batches(samples, masked.seq_len, packing, rows)).unwrap();
                (report.loss, unscaled(&engine, report.scale))
            };
            let (alone, expected) = step(false, 8);
            let (packed, found) = step(true, 5);
            let tolerance = if policy.needs_loss_scale() { 6e-3 } else { 4e-2 };
            assert!((packed / alone - 1.0).abs() < tolerance / 10.0, "{name} {policy}: {packed} and {alone}");
            assert_close(&format!("{name} {policy}"), &found, &expected, tolerance, tolerance);
        }
    }
}

/// Only their bounds separate documents: without the bounds the losses are different.
#[test]
fn a_packed_row_without_its_bounds_is_another_text() {
    let (masked, _) = masked();
    let Samples { tokens: samples, loss, .. } = &masked.cases["families/llama"];
    let case = Case::own("families/llama");
    let mut leaking = batches(samples, masked.seq_len, true, 5);
    for batch in &mut leaking {
        batch.document_starts.clear();
    }
    let mut engine = engine(&case, PrecisionPolicy::FP32, (5, masked.seq_len), Checkpointing::None);
    let report = engine.step(&leaking).unwrap();
    assert!((report.loss / loss - 1.0).abs() > 1e-3, "{} is as good as {loss}", report.loss);
}

#[test]
fn batches_are_as_wide_as_their_longest_sample() {
    let samples: Vec<Vec<(u32, bool)>> = (0..600).map(|i| vec![(1, true); 3 + i * 7 % 250]).collect();
    let mut widths: Vec<usize> = batches(&samples, 256, false, 8).iter().map(|batch| batch.seq_len).collect();
    let cells: usize = widths.iter().map(|width| 8 * width).sum();
    let tokens: usize = samples.iter().map(|sample| sample.len() - 1).sum();
    assert!(cells < tokens * 115 / 100, "{cells} cells for {tokens} tokens");
    assert!(!widths.is_sorted() && widths.iter().all(|width| width.is_multiple_of(16)), "{widths:?}");
    widths.dedup();
    assert!(widths.len() > 10);
    // An epoch has every sample once, in any order.
    let targets: usize = batches(&samples, 256, false, 8).iter().map(|batch| batch.num_label_tokens).sum();
    assert_eq!(targets, tokens);
}
