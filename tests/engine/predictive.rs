//! The predictive loss scale against the dynamic one, on three runs. The long ones print the table in
//! `docs/numerics.md`, and check its conclusions.

use crate::common::compare::gpt2_tokenizer;
use crate::run::advanced;
use candle_core::Device;
use finetune::data::grammar;
use finetune::engine::model::{ModelSpec, Parameters};
use finetune::precision::ScalerMode;
use finetune::random::{Domain, Stream};
use finetune::telemetry::{Activity, Event, ScaleCause, StepStatus};
use finetune::train::{Config, ConfigLayers, DataSets, verify_resume};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

/// The figures of a run.
#[derive(Debug, Default)]
struct Figures {
    overflows: u64,
    moves: u64,
    /// Share of the values that are not zero in FP32 but are in FP16, over all probes.
    flushed: f64,
    /// Share of subnormal values among those stored that are not zero, over all applied steps.
    subnormal: f64,
    mean_log2_scale: f64,
    /// Mean of the last 50 losses.
    loss: f64,
}

fn train(mut config: Config, policy: ScalerMode, steps: u64) -> Figures {
    config.scaler.mode = policy;
    config.train.steps = Some(steps);
    config.telemetry.probe_every = 20;
    let mut found = Figures::default();
    let (mut nonzero, mut flushed, mut stored, mut subnormal) = (0, 0, 0, 0);
    for event in advanced(&config, steps).1 {
        match event {
            Event::Step(step) => {
                found.moves += u64::from(step.scale.cause != ScaleCause::Held);
                found.mean_log2_scale += f64::from(step.loss_scale).log2() / steps as f64;
                if step.step + 50 > steps {
                    found.loss += f64::from(step.loss) / 50.0;
                }
                if step.outcome == StepStatus::Applied {
                    stored += step.grads.count - step.grads.zero;
                    subnormal += step.grads.subnormal;
                }
            }
            Event::Overflow(_) => found.overflows += 1,
            Event::Fp32Probe(probe) => {
                nonzero += probe.tensors.iter().map(|tensor| tensor.nonzero).sum::<u64>();
                flushed += probe.tensors.iter().map(|tensor| tensor.flushed).sum::<u64>();
            }
            _ => {}
        }
    }
    found.flushed = flushed as f64 / nonzero as f64;
    found.subnormal = subnormal as f64 / stored as f64;
    found
}

fn compare(name: &str, config: &Config, steps: u64) -> [Figures; 2] {
    let both = [ScalerMode::Dynamic, ScalerMode::Predictive].map(|policy| train(config.clone(), policy, steps));
    for (rule, found) in ["dynamic", "predictive"].iter().zip(&both) {
        let Figures { overflows, moves, flushed, subnormal, mean_log2_scale, loss } = found;
        println!(
            "| {name} | {rule} | {overflows} | {moves} | 2^{mean_log2_scale:.2} | {:.4} % | {:.3} % | {loss:.4} |",
            flushed * 100.0,
            subnormal * 100.0
        );
    }
    both
}

/// Checks the conclusions of `docs/numerics.md` from the long runs. One seed's loss varies by about as much as is
/// allowed.
fn assert_predicted([dynamic, predictive]: &[Figures; 2]) {
    assert!(dynamic.overflows >= 2 && 10 * predictive.overflows <= dynamic.overflows, "{dynamic:?} {predictive:?}");
    assert!((predictive.loss / dynamic.loss).ln() < 0.03, "not the same loss: {dynamic:?} {predictive:?}");
    let lower = dynamic.mean_log2_scale - predictive.mean_log2_scale;
    assert!((0.0..4.0).contains(&lower), "not a slightly lower scale: {dynamic:?} {predictive:?}");
    // About one in a thousand, and one in a million.
    assert!(predictive.subnormal < 1.5e-3 && predictive.flushed < 5e-6, "{predictive:?}");
}

/// `tiny` on small batches.
fn tiny() -> Config {
    let mut config = Config::resolve(&ConfigLayers::default()).unwrap();
    config.train.batch_size = 4;
    config.train.seq_len = 64;
    config
}

/// The built-in grammar, in which one line in `every` is noise: what the model has learned is wrong there, and its
/// gradients are many times the others'.
fn spiked(folder: &Path, every: u32) -> String {
    let stream = Stream::new(7, Domain::Bench);
    let mut text = String::new();
    for (i, line) in (0..).zip(grammar::text(1, 180_000).lines()) {
        if stream.block(0, i, 0)[0].is_multiple_of(every) {
            for j in 0..64 {
                let block = stream.block(1, i, j);
                write!(text, "{}", char::from(33 + (block[0] % 94) as u8)).unwrap();
            }
        } else {
            text.push_str(line);
        }
        text.push('\n');
    }
    let path = folder.join("spiked.txt");
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// The short version of the first run, which must already show the effects of the long runs.
#[test]
fn the_predictive_rule_overflows_less_than_the_dynamic_one() {
    let mut config = tiny();
    config.train.batch_size = 1;
    config.train.seq_len = 32;
    let [dynamic, predictive] = compare("tiny, 60 steps", &config, 60);
    assert!(dynamic.overflows >= 8, "the default run begins with overflows: {dynamic:?}");
    assert!(predictive.overflows <= 1, "{predictive:?}");
    assert!(predictive.loss < 5.0 && predictive.flushed < 1e-3, "{predictive:?}");
}

#[test]
fn a_run_resumes_bit_for_bit_with_what_was_measured() {
    let mut config = tiny();
    config.train.batch_size = 1;
    config.train.seq_len = 16;
    config.scaler.mode = ScalerMode::Predictive;
    let folder = tempfile::tempdir().unwrap();
    let proof = verify_resume(&config, 16, 9, folder.path(), &Activity::default()).unwrap();
    assert!(proof.differences.is_empty(), "{:?}", proof.differences);
}

#[test]
#[ignore = "minutes; .ci/full runs it"]
fn tiny_on_grammar() {
    assert_predicted(&compare("`tiny`, grammar", &tiny(), 600));
}

#[test]
#[ignore = "minutes; .ci/full runs it"]
fn tiny_on_grammar_with_spikes() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { data: DataSets::One(spiked(folder.path(), 150)), ..tiny() };
    assert_predicted(&compare("`tiny`, grammar with noise", &config, 600));
}

#[test]
#[ignore = "minutes; .ci/full runs it"]
fn narrow_distilgpt2_on_tiny_shakespeare() {
    let Some(tokenizer) = gpt2_tokenizer() else { return };
    let folder = tempfile::tempdir().unwrap();
    let shape = ModelSpec::named("distilgpt2").unwrap().resized(6, 64, 4);
    let masters = Parameters::random(&shape.parameters(), 11, &Device::Cpu).unwrap();
    let tensors: HashMap<_, _> = masters.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    std::fs::write(folder.path().join("config.json"), shape.to_json("float32")).unwrap();
    let overrides = [
        ("model", folder.path().display().to_string()),
        ("tokenizer", tokenizer.display().to_string()),
        ("data", "tiny_shakespeare".to_owned()),
    ];
    let overrides = overrides.map(|(key, value)| (key.to_owned(), toml::Value::String(value))).to_vec();
    let mut config = Config::resolve(&ConfigLayers { file: None, overrides }).unwrap();
    config.train.batch_size = 4;
    config.train.seq_len = 64;
    // An interval short enough that the dynamic rule tries a few times within the run's few steps.
    (config.scaler.growth_interval, config.optimizer.lr) = (25, 5e-4);
    assert_predicted(&compare("narrow distilgpt2, Tiny Shakespeare", &config, 150));
}
