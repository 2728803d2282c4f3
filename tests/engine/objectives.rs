//! Preference tuning and GRPO compared with PyTorch: losses and their derivatives, the gradient of every parameter, ten
//! steps of DPO; and with itself: sums over micro-batches and processes, weights of samples, the base of adapters as
//! reference.
//!
//! `tests/golden/make_preferences.py` and `make_grpo.py` make the reference values.

use crate::common::compare::{assert_close, values};
use crate::common::engine::{Settings, by_name, engine_of, in_group, read_model, unscaled};
use crate::common::golden::{AdamWSettings, Case, json, path, tensors, with_prefix};
use crate::common::processes::{compute_alone, together};
use crate::distributed::{assert_same_bits, assert_same_end, train};
use crate::run;
use candle_core::{Device, Tensor};
use finetune::data::{Batch, IGNORE_INDEX, SampledRow, Sequence, SequenceRole};
use finetune::engine::collective::SingleProcess;
use finetune::engine::kernels::view::write_f32;
use finetune::engine::model::{Checkpointing, Decoder, Workspace};
use finetune::engine::optim::Gradients;
use finetune::precision::{GradScalerConfig, OnOverflow, PrecisionPolicy};
use finetune::store::checkpoint::{Checkpoint, Disk, FsOp, Run, compare};
use finetune::telemetry::{Event, ObjectiveMetric};
use finetune::train::{
    CompletionLogp, Config, DataSets, Interval, Objective, ObjectiveKind, ObjectiveSection, Reference, ReferenceLogps,
    ReferenceModel, RolloutRecord, Split, TrainEngine, Trainer, advantages, completion_loss, pair_loss,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

/// `preferences.json`.
#[derive(Deserialize)]
struct Golden {
    pairs: Vec<GoldenPair>,
    single: Vec<GoldenCompletion>,
    adamw: AdamWSettings,
    models: BTreeMap<String, GoldenModel>,
}

#[derive(Deserialize)]
struct GoldenPair {
    kind: ObjectiveKind,
    beta: f64,
    label_smoothing: f64,
    logp: [f64; 2],
    reference: [f64; 2],
    lengths: [usize; 2],
    loss: f64,
    slopes: [f64; 2],
}

#[derive(Deserialize)]
struct GoldenCompletion {
    beta: f64,
    desirable_weight: f64,
    undesirable_weight: f64,
    logp: f64,
    reference: f64,
    desirable: bool,
    kl: f64,
    loss: f64,
    slope: f64,
}

#[derive(Deserialize)]
struct GoldenModel {
    /// Prompt, chosen answer, rejected answer.
    pairs: Vec<[Vec<u32>; 3]>,
    reference: Vec<f64>,
    base: Vec<f64>,
    objectives: BTreeMap<String, GoldenObjective>,
    dpo_steps: Vec<f64>,
    kto: GoldenKto,
}

#[derive(Deserialize)]
struct GoldenKto {
    loss: f64,
    kl: f64,
    /// The reference's log-probabilities of each prompt with the next row's answer.
    references: Vec<f64>,
}

#[derive(Deserialize)]
struct GoldenObjective {
    beta: f64,
    label_smoothing: f64,
    loss: f64,
    logps: [f64; 2],
    rewards: [f64; 2],
    accuracy: f64,
}

fn golden() -> Golden {
    json(&path("preferences.json"))
}

fn pytorchs_gradients() -> HashMap<String, Tensor> {
    tensors(&path("preferences.safetensors"))
}

/// Compares a step's gradients with those of a case.
fn assert_gradients(what: &str, engine: &TrainEngine, all: &HashMap<String, Tensor>, case: &str) {
    assert_close(what, &unscaled(engine, 1.0), &with_prefix(all, &format!("{case}/")), 1e-5, 1e-5);
}

fn dpo(reference: Reference) -> Objective {
    let settings = ObjectiveSection { kind: ObjectiveKind::Dpo, ..ObjectiveSection::default() };
    Objective::new(settings, reference)
}

/// Pairs as batches of `pairs_per_batch`, padded to one width.
fn batches(pairs: &[[Vec<u32>; 3]], pairs_per_batch: usize) -> Vec<Batch> {
    let width = pairs.iter().map(|[prompt, a, b]| prompt.len() + a.len().max(b.len()) - 1).max().unwrap();
    let mut index = 0;
    let mut batch_of = |pairs: &[[Vec<u32>; 3]]| {
        let mut batch = Batch::new(2 * pairs.len(), width);
        for (row, (prompt, answer)) in pairs.iter().flat_map(|[prompt, a, b]| [(prompt, a), (prompt, b)]).enumerate() {
            let whole = [&prompt[..], &answer[..]].concat();
            let start = row * width;
            batch.inputs[start..start + whole.len() - 1].copy_from_slice(&whole[..whole.len() - 1]);
            let first = start + prompt.len() - 1;
            batch.labels[first..first + answer.len()].copy_from_slice(answer);
            let role = if row % 2 == 0 { SequenceRole::Chosen } else { SequenceRole::Rejected };
            batch.sequences.push(Sequence { labels: start..start + whole.len() - 1, index, role });
            index += 1;
        }
        batch.num_label_tokens = batch.labels.iter().filter(|&&label| label != IGNORE_INDEX).count();
        batch
    };
    pairs.chunks(pairs_per_batch).map(&mut batch_of).collect()
}

fn stored(logps: &[f64]) -> Reference {
    let mut reference = ReferenceLogps::default();
    for (index, logp) in (0..).zip(logps) {
        for split in [Split::Train, Split::Validation] {
            reference.insert(split, index, *logp);
        }
    }
    Reference::Stored(reference)
}

fn assert_near(what: &str, found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance * expected.abs().max(1e-3), "{what}: {found}, not {expected}");
}

/// The engine of a case for `micro_batches` batches of `rows` rows.
fn engine_for(case: &Case, adamw: &AdamWSettings, (rows, width): (usize, usize), micro_batches: usize) -> TrainEngine {
    compute_alone();
    let (config, masters) = read_model(&case.folder);
    let settings = Settings {
        adamw: adamw.config(),
        max_grad_norm: Some(adamw.max_grad_norm),
        grad_accum: micro_batches,
        ..Settings::new(PrecisionPolicy::FP32, GradScalerConfig::default(), adamw.lr, (rows, width))
    };
    engine_of(case.kernels.clone(), &config, masters, settings)
}

#[test]
fn losses_and_their_derivatives_agree_with_pytorch() {
    let golden = golden();
    assert!(golden.pairs.len() > 200 && golden.single.len() > 10);
    for pair in &golden.pairs {
        let GoldenPair { kind, beta, label_smoothing, logp, reference, lengths, .. } = *pair;
        let settings = ObjectiveSection { kind, beta: Some(beta), label_smoothing, ..ObjectiveSection::default() };
        let side = |at: usize| CompletionLogp { logp: logp[at], reference: reference[at], targets: lengths[at] };
        let found = pair_loss(&settings, [side(0), side(1)]);
        let what = format!("{kind:?} with beta {beta} and label smoothing {label_smoothing} of {logp:?}");
        let near = |found: f64, expected: f64| {
            // PyTorch's sigmoid loses the digits of 1 - p.
            let error = (found - expected).abs();
            assert!(error <= 1e-9 * expected.abs() + 1e-15, "{what}: {found}, not {expected}");
        };
        near(found.loss, pair.loss);
        found.slopes.into_iter().zip(pair.slopes).for_each(|(found, expected)| near(found, expected));
    }
    for one in &golden.single {
        let settings = ObjectiveSection {
            kind: ObjectiveKind::Kto,
            beta: Some(one.beta),
            desirable_weight: one.desirable_weight,
            undesirable_weight: one.undesirable_weight,
            ..ObjectiveSection::default()
        };
        let completion = CompletionLogp { logp: one.logp, reference: one.reference, targets: 3 };
        let found = completion_loss(&settings, completion, one.desirable, one.kl);
        let what = format!("kto of {} at {}", one.logp, one.kl);
        for (found, expected) in [(found.loss, one.loss), (found.slope, one.slope)] {
            assert!((found - expected).abs() <= 1e-12, "{what}: {found}, not {expected}");
        }
    }
}

#[test]
fn gradients_of_every_parameter_agree_with_pytorch() {
    let (golden, gradients) = (golden(), pytorchs_gradients());
    for (name, model) in &golden.models {
        let batch = &batches(&model.pairs, model.pairs.len())[0];
        for case in Case::own(name).for_all_kernels() {
            for (objective, expected) in &model.objectives {
                let kind: ObjectiveKind = serde_json::from_value(objective.as_str().into()).unwrap();
                let GoldenObjective { beta, label_smoothing, .. } = *expected;
                let settings =
                    ObjectiveSection { kind, beta: Some(beta), label_smoothing, ..ObjectiveSection::default() };
                let mut engine = engine_for(&case, &golden.adamw, (batch.batch_size, batch.seq_len), 1);
                engine.objective = Objective::new(settings, stored(&model.reference));
                let report = engine.step(std::slice::from_ref(batch)).unwrap();
                let what = format!("{objective} of {}", case.name);
                assert_near(&what, report.loss, expected.loss, 2e-6);
                let metrics = report.metrics.unwrap();
                let found = [
                    ObjectiveMetric::LogpsChosen,
                    ObjectiveMetric::LogpsRejected,
                    ObjectiveMetric::RewardsChosen,
                    ObjectiveMetric::RewardsRejected,
                ];
                for (found, expected) in found.into_iter().zip(expected.logps.into_iter().chain(expected.rewards)) {
                    assert_near(&what, metrics.get(found).unwrap(), expected, 1e-5);
                }
                assert_eq!(metrics.get(ObjectiveMetric::RewardsAccuracies), Some(expected.accuracy), "{what}");
                assert_gradients(&what, &engine, &gradients, &format!("{name}/{objective}"));
            }
        }
    }
}

#[test]
fn ten_steps_of_dpo_agree_with_pytorch() {
    let golden = golden();
    for (name, model) in &golden.models {
        let batch = &batches(&model.pairs, model.pairs.len())[0];
        let mut engine = engine_for(&Case::own(name), &golden.adamw, (batch.batch_size, batch.seq_len), 1);
        engine.objective = dpo(stored(&model.base));
        assert_eq!(model.dpo_steps.len(), 10);
        for (step, expected) in model.dpo_steps.iter().enumerate() {
            let report = engine.step(std::slice::from_ref(batch)).unwrap();
            assert_near(&format!("{name}, step {step}"), report.loss, *expected, 1e-4);
        }
        assert!(model.dpo_steps[9] < model.dpo_steps[0], "{name} learns nothing");
    }
}

/// Four pairs, a pair a micro-batch: any number of processes sums them to the same bits.
#[test]
fn any_number_of_processes_takes_the_same_steps() {
    let golden = golden();
    let model = &golden.models["families/llama"];
    let pairs: Vec<_> = model.pairs.iter().cycle().take(4).cloned().collect();
    let parts = batches(&pairs, 1);
    let case = Case::own("families/llama");
    for kind in [ObjectiveKind::Dpo, ObjectiveKind::Orpo] {
        let steps = |world: usize| {
            let found = together(world, |process| {
                let engine = engine_for(&case, &golden.adamw, (2, parts[0].seq_len), parts.len());
                let mut engine = in_group(process, engine, parts.len());
                let settings = ObjectiveSection { kind, ..ObjectiveSection::default() };
                engine.objective = Objective::new(settings, stored(&[-9.0; 8]));
                let reports: Vec<_> = (0..3).map(|_| engine.step(&parts).unwrap()).collect();
                let figures: Vec<_> = reports.iter().map(|report| (report.loss.to_bits(), report.metrics)).collect();
                let mut rest = parts.iter();
                let evaluation = engine
                    .evaluate(&mut parts[0].clone(), |batch| rest.next().map(|next| batch.clone_from(next)).is_some());
                let evaluation = evaluation.unwrap();
                (figures, (evaluation.loss.to_bits(), evaluation.metrics), weights(&engine))
            });
            assert!(found.iter().all(|one| *one == found[0]));
            found.into_iter().next().unwrap()
        };
        let one = steps(1);
        for world in [2, 3, 4] {
            assert_eq!(steps(world), one, "{kind:?}, {world} processes");
        }
    }
}

/// The working copy of an engine.
fn weights(engine: &TrainEngine) -> Vec<Vec<f64>> {
    by_name(&engine.state.weights).values().map(values).collect()
}

/// Micro-batches of one pair make the step of all pairs at once.
#[test]
fn losses_are_divided_by_the_pairs_of_the_step() {
    let golden = golden();
    let model = &golden.models["narrow"];
    let step = |pairs_per_batch: usize| {
        let parts = batches(&model.pairs, pairs_per_batch);
        let shape = (2 * pairs_per_batch, parts[0].seq_len);
        let mut engine = engine_for(&Case::own("narrow"), &golden.adamw, shape, parts.len());
        engine.objective = dpo(stored(&model.reference));
        let report = engine.step(&parts).unwrap();
        (report.loss, unscaled(&engine, 1.0))
    };
    let (whole, parts) = (step(3), step(1));
    assert_near("the loss", parts.0, whole.0, 1e-6);
    assert_close("one pair at a time", &parts.1, &whole.1, 2e-6, 2e-6);
}

/// A sample of weight 0 teaches nothing, and a weight of 2 counts a loss twice.
#[test]
fn weights_of_samples_scale_their_losses() {
    let golden = golden();
    let pairs = &golden.models["narrow"].pairs;
    let step = |weights: &[f32], keep: &[usize]| {
        let mut batch = batches(pairs, 2).remove(0);
        for (row, sequence) in batch.sequences.iter_mut().enumerate() {
            sequence.role = SequenceRole::Weighted(weights[row]);
            if !keep.contains(&row) {
                batch.labels[sequence.labels.clone()].fill(IGNORE_INDEX);
            }
        }
        let mut engine = engine_for(&Case::own("narrow"), &golden.adamw, (batch.batch_size, batch.seq_len), 1);
        // The divisor is the number of targets, also if their weights are 0.
        batch.num_label_tokens = 8;
        let mut left = Some(batch.clone());
        let mut read = batch.clone();
        let validation = engine.evaluate(&mut read, |batch| {
            left.take().is_some_and(|next| {
                *batch = next;
                true
            })
        });
        let report = engine.step(&[batch]).unwrap();
        (report.loss, unscaled(&engine, 1.0), validation.unwrap().loss)
    };
    let (loss, gradients, validation) = step(&[0.0, 2.0, 0.0, 2.0], &[0, 1, 2, 3]);
    assert_eq!(validation, step(&[1.0; 4], &[0, 1, 2, 3]).2, "a validation has no weights");
    let (half, halves, _) = step(&[1.0; 4], &[1, 3]);
    assert_near("the loss", loss, 2.0 * half, 1e-7);
    let doubled = halves.into_iter().map(|(name, tensor)| (name, (tensor * 2.0).unwrap())).collect();
    assert_close("weights of samples", &gradients, &doubled, 1e-6, 1e-6);
}

/// Prompts with the answers of other rows estimate the divergence; their reference has separate keys.
#[test]
fn kto_and_its_estimate_of_the_divergence_agree_with_pytorch() {
    let (golden, gradients) = (golden(), pytorchs_gradients());
    for (name, model) in &golden.models {
        let mut batch = batches(&model.pairs, model.pairs.len()).remove(0);
        for (row, sequence) in batch.sequences.iter_mut().enumerate() {
            sequence.role = if row % 2 == 0 { SequenceRole::Desirable } else { SequenceRole::Undesirable };
        }
        let last = batch.batch_size as u64 - 1;
        let references = |more: f64| {
            let Reference::Stored(mut reference) = stored(&model.reference) else { panic!("not stored") };
            for (row, logp) in (0_u64..).zip(&model.kto.references) {
                reference.insert(
                    Split::Train,
                    (1 << 63) | (row << 32) | row.checked_sub(1).unwrap_or(last),
                    *logp + more,
                );
            }
            Reference::Stored(reference)
        };
        let mut engine = engine_for(&Case::own(name), &golden.adamw, (batch.batch_size, batch.seq_len), 1);
        let settings = ObjectiveSection { kind: ObjectiveKind::Kto, ..ObjectiveSection::default() };
        engine.objective = Objective::new(settings, references(0.0));
        let report = engine.step(std::slice::from_ref(&batch)).unwrap();
        assert!(model.kto.kl > 0.1, "{name}: an estimate of {} tests nothing", model.kto.kl);
        assert_near(name, report.metrics.unwrap().get(ObjectiveMetric::Kl).unwrap(), model.kto.kl, 1e-5);
        assert_near(name, report.loss, model.kto.loss, 2e-6);
        assert_gradients(name, &engine, &gradients, &format!("{name}/kto"));
        // A mean below 0 is no divergence.
        engine.objective.reference = references(100.0);
        let report = engine.step(&[batch]).unwrap();
        assert_eq!(report.metrics.unwrap().get(ObjectiveMetric::Kl), Some(0.0), "{name}");
    }
}

/// Regression: an answer to another prompt was cut at the width of its batch, so it had several log-probabilities.
#[test]
fn an_answer_to_another_prompt_does_not_depend_on_the_rest_of_its_batch() {
    let file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    let row = |(number, (prompt, answer)): (usize, (usize, usize))| {
        let (prompt, completion) = (number.to_string() + &"p".repeat(prompt - 1), "a".repeat(answer));
        serde_json::json!({"prompt": prompt, "completion": completion, "label": answer > 9}).to_string() + "\n"
    };
    let rows = [(39, 3), (39, 3), (2, 40), (2, 40), (2, 40), (51, 50)];
    std::fs::write(file.path(), rows.into_iter().enumerate().map(row).collect::<String>()).unwrap();
    let mut config = dpo_run(false);
    config.data = DataSets::One(file.path().display().to_string());
    config.val = Some("none".into());
    config.dtype = PrecisionPolicy::FP32;
    config.optimizer.lr = 1e-12;
    config.objective.kind = ObjectiveKind::Kto;
    // The first pair of batch 18 was in a wider batch before.
    config.seed = 3;
    (config.train.batch_size, config.train.grad_accum) = (3, 1);
    (config.train.seq_len, config.train.steps) = (128, Some(24));
    let events = train(1, &config, tempfile::tempdir().unwrap().path(), None);
    let kl =
        |event: &Event| if let Event::Step(step) = event { step.objective?.get(ObjectiveMetric::Kl) } else { None };
    let found: Vec<f64> = events.iter().filter_map(kl).collect();
    assert_eq!(found.len(), 24);
    assert!(found.iter().all(|kl| *kl < 1e-3), "the model has not changed: {found:?}");
}

/// The reference of adapters is their base, with the bits of the model without adapters, also while they are
/// recomputed.
#[test]
fn the_base_of_adapters_is_their_reference() {
    let golden = golden();
    for lora in ["gpt2", "llama-rslora", "qwen3-dora"] {
        let case = Case::lora_of(lora);
        // Vocabularies are small.
        let pairs = golden.models["narrow"].pairs[..1].iter();
        let pairs = pairs.map(|parts| parts.clone().map(|ids| ids.into_iter().map(|id| id % 30).collect()));
        let pair = &batches(&pairs.collect::<Vec<_>>(), 1)[..];
        let shape = (2, pair[0].seq_len);
        let mut plain = engine_for(&case, &golden.adamw, shape, 1);
        plain.objective = dpo(stored(&[0.0; 2]));
        let metrics = plain.step(pair).unwrap().metrics.unwrap();
        let base = [ObjectiveMetric::LogpsChosen, ObjectiveMetric::LogpsRejected].map(|it| metrics.get(it).unwrap());
        let adapted = |reference| {
            let mut engine = case.engine(PrecisionPolicy::FP32, 1);
            let spec = engine.model.spec().clone();
            let device = Device::Cpu;
            let policy = PrecisionPolicy::FP32;
            engine.workspace = Workspace::for_training(&spec, policy, shape, Checkpointing::None, &device).unwrap();
            engine.grads = Gradients::new(&engine.state.weights, policy, 1).unwrap();
            engine.objective = dpo(reference);
            let report = engine.step(pair).unwrap();
            (report.loss, report.metrics, weights(&engine))
        };
        let found = adapted(Reference::Base);
        let expected = adapted(stored(&base));
        assert_eq!(found, expected, "{lora}");
        assert!(
            found.1.unwrap().get(ObjectiveMetric::RewardsChosen).unwrap().abs() > 1e-4,
            "{lora}: adapters that change nothing test nothing"
        );
    }
}

/// Four steps of three pairs of the built-in data.
fn dpo_run(lora: bool) -> Config {
    let mut config =
        Config { data: DataSets::One("preferences".into()), dtype: PrecisionPolicy::FP16, ..Config::default() };
    let train = &mut config.train;
    train.batch_size = 1;
    train.grad_accum = 3;
    train.seq_len = 96;
    train.steps = Some(4);
    train.eval_every = Interval::Steps(2);
    train.eval_batches = 3;
    train.sample_tokens = 0;
    config.checkpoint.save_every = Interval::Steps(2);
    config.checkpoint.keep_last = 10;
    config.dropout.residual = 0.1;
    config.scaler.init_scale = 4096.0;
    config.objective.kind = ObjectiveKind::Dpo;
    if lora {
        config.lora.r = Some(3);
        config.lora.alpha = Some(6.0);
    }
    config
}

/// Also with a reference that is computed again because its file is missing.
#[test]
fn runs_have_the_same_bits_in_any_number_of_processes_and_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    for (name, lora, keep) in [("dense", false, ""), ("kept", false, "h.1,head"), ("lora", true, "")] {
        let mut config = dpo_run(lora);
        if !keep.is_empty() {
            config.precision.keep = keep.to_owned().try_into().unwrap();
        }
        let runs = folder.path().join(name);
        let one = assert_same_bits(&config, &runs, &[3]);
        let reference = runs.join("1/reference.json");
        assert_eq!(reference.exists(), !lora);
        let is_measured = |event: &Event| match event {
            Event::Step(step) => step.objective.is_some_and(|it| it.get(ObjectiveMetric::RewardsMargins).is_some()),
            Event::Eval(eval) => eval.objective.is_some_and(|it| it.get(ObjectiveMetric::RewardsAccuracies).is_some()),
            _ => false,
        };
        assert_eq!(one.iter().filter(|event| is_measured(event)).count(), 4 + 2);
        for (name, world, keeps_file) in [("resumed", 1, true), ("recomputed", 1, false), ("resumed by 2", 2, false)] {
            let run = runs.join(name);
            if keeps_file && !lora {
                std::fs::create_dir_all(&run).unwrap();
                std::fs::copy(&reference, run.join("reference.json")).unwrap();
            }
            train(world, &config, &run, Some(&runs.join("1/step-000002")));
            assert_same_end(&runs, name);
        }
    }
}

/// `grpo.json`.
#[derive(Deserialize)]
struct GoldenGroups {
    reference: f32,
    longest: usize,
    models: BTreeMap<String, GoldenGroupModel>,
}

#[derive(Deserialize)]
struct GoldenGroupModel {
    /// Each prompt with its completions.
    prompts: Vec<(Vec<u32>, Vec<Vec<u32>>)>,
    rewards: Vec<Vec<f64>>,
    /// The log-probabilities of each completion, as training and as the sampler computed them.
    old: Vec<Vec<f32>>,
    sampled: Vec<Vec<f32>>,
    objectives: BTreeMap<String, GoldenGroupObjective>,
}

#[derive(Deserialize)]
struct GoldenGroupObjective {
    beta: f64,
    epsilon: f64,
    cap: f64,
    loss: f64,
    kl: f64,
    clip_ratio: f64,
}

/// The completions of the prompts as one batch.
fn groups(model: &GoldenGroupModel, settings: &ObjectiveSection) -> Batch {
    let mut rows = Vec::new();
    for ((prompt, completions), rewards) in model.prompts.iter().zip(&model.rewards) {
        for ((ids, reward), advantage) in completions.iter().zip(rewards).zip(advantages(settings, rewards)) {
            let role = SequenceRole::Sampled { reward: *reward, advantage, is_cut: false };
            let at = rows.len();
            rows.push(SampledRow { prompt, ids, logps: &model.sampled[at], index: at as u64, role });
        }
    }
    let mut batch = Batch::of_completions(&rows, rows.len(), 16);
    batch.old_logps = vec![0.0; batch.labels.len()];
    for (sequence, old) in batch.sequences.iter().zip(&model.old) {
        let end = sequence.labels.end;
        batch.old_logps[end - old.len()..end].copy_from_slice(old);
    }
    batch
}

/// With ratios that are clipped, completions that are left out, and a reference.
#[test]
fn grpo_agrees_with_pytorch() {
    let golden: GoldenGroups = json(&path("grpo.json"));
    let gradients = tensors(&path("grpo.safetensors"));
    let adamw = self::golden().adamw;
    for (name, model) in &golden.models {
        for case in Case::own(name).for_all_kernels() {
            for (objective, expected) in &model.objectives {
                let settings = ObjectiveSection {
                    kind: serde_json::from_value(objective.as_str().into()).unwrap(),
                    beta: Some(expected.beta),
                    epsilon: expected.epsilon,
                    importance_sampling_cap: expected.cap,
                    num_generations: model.rewards[0].len(),
                    max_completion_length: golden.longest,
                    ..ObjectiveSection::default()
                };
                let batch = groups(model, &settings);
                let mut engine = engine_for(&case, &adamw, (batch.batch_size, batch.seq_len), 1);
                let (spec, masters) = read_model(&case.folder);
                for tensor in masters.tensors() {
                    let scale = |values: &mut [f32]| values.iter_mut().for_each(|value| *value *= golden.reference);
                    write_f32(tensor, scale).unwrap();
                }
                let shape = (batch.batch_size, batch.seq_len);
                let reference = ReferenceModel {
                    model: Decoder::new(&spec, &masters, case.kernels.clone()).unwrap(),
                    workspace: Workspace::for_evaluation(&spec, PrecisionPolicy::FP32, shape, &Device::Cpu).unwrap(),
                    weights: masters,
                };
                engine.objective = Objective::new(settings, Reference::Model(Box::new(reference)));
                let report = engine.step(std::slice::from_ref(&batch)).unwrap();
                let what = format!("{objective} of {}", case.name);
                assert_near(&what, report.loss, expected.loss, 1e-5);
                let metrics = report.metrics.unwrap();
                assert_near(&what, metrics.get(ObjectiveMetric::ClipRatio).unwrap(), expected.clip_ratio, 1e-12);
                let pairs = model.old.iter().flatten().zip(model.sampled.iter().flatten());
                let differences: Vec<f64> =
                    pairs.map(|(old, sampled)| (f64::from(*old) - f64::from(*sampled)).abs()).collect();
                let mean = differences.iter().sum::<f64>() / differences.len() as f64;
                assert_near(&what, metrics.get(ObjectiveMetric::SamplingLogpDifference).unwrap(), mean, 1e-9);
                assert_eq!(metrics.get(ObjectiveMetric::ClippedRatio), Some(0.0), "{what}: no completion is cut");
                let kl = metrics.get(ObjectiveMetric::Kl);
                assert_eq!(kl.is_some(), expected.beta > 0.0, "{what}");
                if let Some(kl) = kl {
                    assert_near(&what, kl, expected.kl, 1e-4);
                }
                assert_gradients(&what, &engine, &gradients, &format!("{name}/{objective}"));
            }
        }
    }
}

/// The steps before were larger, so the run ends later in the data than `steps` × `grad_accum` batches.
#[test]
fn a_resumed_run_with_smaller_steps_has_its_reference() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = dpo_run(false);
    train(1, &config, folder.path(), None);
    config.train.grad_accum = 1;
    config.train.steps = Some(7);
    let checkpoint = Checkpoint::open(folder.path().join("step-000002")).unwrap();
    let mut trainer = Trainer::new(Arc::new(SingleProcess), config, Some(&checkpoint), &mut |_| ()).unwrap();
    trainer.advance(5).unwrap();
}

/// Regression: a full disk ended the run.
#[test]
fn a_run_without_room_for_its_reference_trains_without_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |operation, path: &Path| {
        let is_reference = operation == FsOp::CreateFile && path.to_string_lossy().contains("reference.json");
        if is_reference { Err(ErrorKind::StorageFull.into()) } else { Ok(()) }
    };
    let mut trainer = run::trainer(&dpo_run(false));
    let records = run::attach(&mut trainer, Run::open_on(folder.path(), Disk::with_hook(refuse)).unwrap());
    trainer.advance(1).unwrap();
    let events = run::events(&records);
    let warned = |event: &Event| matches!(event, Event::Warning(it) if it.message.contains("computes the reference"));
    assert!(events.iter().any(warned), "{events:?}");
}

/// Four steps of three prompts with three completions each.
fn grpo_run(iterations: usize, beta: f64) -> Config {
    let mut config = dpo_run(false);
    config.data = DataSets::One("sums".into());
    config.train.seq_len = 40;
    config.checkpoint.keep_last = 20;
    config.dropout.residual = 0.0;
    config.checkpoint.save_every = Interval::Steps(1);
    let objective = &mut config.objective;
    objective.kind = ObjectiveKind::Grpo;
    objective.beta = Some(beta);
    objective.reward = Some("regex:[a-z]".into());
    objective.num_generations = 3;
    objective.max_completion_length = 6;
    objective.num_iterations = iterations;
    config
}

/// Regression: the noise of dropout counted as a difference of the sampler, and as a change of the policy.
#[test]
fn dropout_changes_no_ratio_of_a_policy_that_has_not_changed() {
    for iterations in [1, 2] {
        let mut config = grpo_run(iterations, 0.1);
        config.dtype = PrecisionPolicy::FP32;
        config.dropout.residual = 0.1;
        config.optimizer.lr = 1e-12;
        let events = train(1, &config, tempfile::tempdir().unwrap().path(), None);
        let steps = events.iter().filter_map(|event| if let Event::Step(step) = event { step.objective } else { None });
        for metrics in steps {
            assert_eq!(metrics.get(ObjectiveMetric::ClipRatio), Some(0.0), "{iterations} iterations");
            for metric in [ObjectiveMetric::SamplingLogpDifference, ObjectiveMetric::Kl] {
                let found = metrics.get(metric).unwrap();
                assert!(found < 1e-4, "{metric:?}, {iterations} iterations: {found}");
            }
        }
    }
}

/// Also with a checkpoint between two updates on the same completions, and with the first step repeated after
/// overflows.
#[test]
fn sampled_completions_are_the_same_in_any_number_of_processes_and_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    for (iterations, beta, retries) in [(1, 0.0, false), (2, 0.1, false), (1, 0.0, true), (2, 0.0, true)] {
        let mut config = grpo_run(iterations, beta);
        if retries {
            config.scaler.init_scale = 4_194_304.0;
            config.scaler.on_overflow = OnOverflow::Retry;
            config.train.steps = Some(12);
        }
        let last = format!("step-{:06}", config.train.steps.unwrap());
        let path = |name: &str| folder.path().join(format!("{iterations}-{retries}-{name}"));
        let rollouts = |name: &str| std::fs::read_to_string(path(name).join("rollouts.jsonl")).unwrap();
        let one = train(1, &config, &path("1"), None);
        let records: Vec<RolloutRecord> =
            rollouts("1").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let skipped = one.iter().filter(|event| matches!(event, Event::Overflow(_))).count();
        assert_eq!(skipped > 0, retries, "{skipped} overflows");
        if !retries {
            assert_eq!(records.len(), 4 / iterations * 3 * 3);
        }
        assert!(records.iter().any(|record| record.advantage != 0.0));
        let kls = one.iter().filter_map(|event| match event {
            Event::Step(step) => step.objective?.get(ObjectiveMetric::Kl),
            _ => None,
        });
        assert_eq!(kls.clone().any(|kl| kl > 0.0), beta > 0.0, "the reference stays, and the policy moves");
        let is_measured = |event: &&Event| match event {
            Event::Step(step) => step.objective.is_some_and(|it| {
                it.get(ObjectiveMetric::Reward).is_some() && it.get(ObjectiveMetric::Kl).is_some() == (beta > 0.0)
            }),
            Event::Eval(eval) => eval.objective.is_some_and(|it| it.get(ObjectiveMetric::Reward) == Some(-eval.loss)),
            _ => false,
        };
        assert!(one.iter().filter(is_measured).count() >= 4 + 2);
        for world in if retries { vec![3] } else { vec![2, 3, 4] } {
            let many = train(world, &config, &path("many"), None);
            assert_eq!(format!("{many:#?}"), format!("{one:#?}"), "{world} processes");
            assert_eq!(rollouts("many"), rollouts("1"));
            assert_eq!(compare(&path("1").join(&last), &path("many").join(&last)).unwrap(), [], "{world} processes");
            std::fs::remove_dir_all(path("many")).unwrap();
        }
        for step in 1..4 {
            let name = format!("resumed at {step}");
            std::fs::create_dir_all(path(&name)).unwrap();
            std::fs::copy(path("1").join("rollouts.jsonl"), path(&name).join("rollouts.jsonl")).unwrap();
            train(1 + step % 2, &config, &path(&name), Some(&path("1").join(format!("step-{step:06}"))));
            assert_eq!(compare(&path("1").join(&last), &path(&name).join(&last)).unwrap(), [], "{name}");
            assert_eq!(rollouts(&name), rollouts("1"), "{name}");
        }
    }
}

#[test]
fn a_completion_may_fill_the_sequence() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("prompts.jsonl");
    std::fs::write(&data, "{\"prompt\": \"abcdefgh\", \"completion\": \"i\"}\n".repeat(9)).unwrap();
    let mut config = grpo_run(1, 0.0);
    config.data = DataSets::One(data.to_str().unwrap().to_owned());
    config.val = Some("none".into());
    config.train.seq_len = 11;
    config.train.steps = Some(1);
    // The last of the twelve tokens is a target, but no input.
    config.objective.reward = Some("length:4".into());
    let run = folder.path().join("run");
    train(1, &config, &run, None);
    let text = std::fs::read_to_string(run.join("rollouts.jsonl")).unwrap();
    let mut records = text.lines().map(|line| serde_json::from_str::<RolloutRecord>(line).unwrap());
    assert!(records.any(|record| record.reward == Some(1.0)), "{text}");
}

#[test]
fn a_step_on_old_completions_has_the_old_batches() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = grpo_run(2, 0.0);
    train(1, &config, folder.path(), None);
    config.train.grad_accum = 2;
    let resume = |step: u64| {
        let checkpoint = Checkpoint::open(folder.path().join(format!("step-{step:06}"))).unwrap();
        Trainer::new(Arc::new(SingleProcess), config.clone(), Some(&checkpoint), &mut |_| ()).map(drop)
    };
    let message = resume(1).unwrap_err().to_string();
    assert!(message.contains("`train.grad_accum` was 3 and is now 2, but its next step uses"), "{message}");
    resume(2).unwrap();
}

/// Regression: each repetition of a prompt in a step got the same completions.
#[test]
fn a_prompt_that_a_mixture_repeats_in_a_step_gets_other_completions() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("one.jsonl");
    std::fs::write(&data, "{\"prompt\": \"1+1\"}\n").unwrap();
    let mut config = grpo_run(1, 0.0);
    config.data = DataSets::Several(vec![format!("{}=0.5", data.display()), "sums=0.5".into()]);
    config.val = Some("none".into());
    config.train.steps = Some(2);
    train(1, &config, folder.path(), None);
    let text = std::fs::read_to_string(folder.path().join("rollouts.jsonl")).unwrap();
    let records = || text.lines().map(|line| serde_json::from_str::<RolloutRecord>(line).unwrap());
    let repeated = records().filter(|record| record.step == 1 && record.prompt.contains("1+1")).count();
    assert!(repeated > 3, "one group of three tests nothing");
    let seeds = records().map(|record| record.seed).collect::<BTreeSet<_>>();
    assert_eq!(seeds.len(), records().count());
}

/// An epoch ends with the last of the steps on its last completions.
#[test]
fn an_epoch_of_sampled_completions_ends_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("sums.jsonl");
    let row = |sum: usize| {
        let [user, assistant] = [("user", format!("{sum}+1")), ("assistant", (sum + 1).to_string())]
            .map(|(role, content)| serde_json::json!({"role": role, "content": content}));
        serde_json::json!({"messages": [user, assistant]}).to_string() + "\n"
    };
    std::fs::write(&data, (0..6).map(row).collect::<String>()).unwrap();
    let mut config = grpo_run(2, 0.0);
    config.data = DataSets::One(data.to_str().unwrap().to_owned());
    config.val = Some("none".into());
    config.train.steps = Some(6);
    config.checkpoint.save_every = Interval::Epoch;
    let run = folder.path().join("run");
    train(1, &config, &run, None);
    let saved = [3, 4, 6].map(|step| run.join(format!("step-{step:06}")).exists());
    assert_eq!(saved, [false, true, true], "two steps on each of two batches are an epoch");
}
