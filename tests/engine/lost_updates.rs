//! The counts of lost updates against the files of checkpoints, and training without masters.

use crate::run::{attach, events, steps, trainer};
use finetune::precision::{Dtype, FloatFormat, UpdateCounts};
use finetune::store::checkpoint::Run;
use finetune::store::tensor_file::TensorFile;
use finetune::telemetry::{Activity, Event, StepStatus};
use finetune::train::{Config, ConfigLayers, verify_resume};
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: u64 = 4;

fn config(dtype: &str, masters: bool) -> Config {
    let integer = |key: &str, value: u64| (key.to_owned(), toml::Value::Integer(value as i64));
    let overrides = vec![
        integer("train.steps", STEPS),
        integer("train.batch_size", 2),
        integer("train.seq_len", 16),
        integer("train.sample_tokens", 0),
        integer("train.eval_batches", 1),
        integer("checkpoint.save_every", 1),
        integer("checkpoint.keep_last", 10),
        integer("telemetry.lost_updates_every", 1),
        ("optimizer.lr".into(), 1e-4.into()),
        ("dtype".into(), dtype.into()),
        ("precision.masters".into(), masters.into()),
    ];
    Config::resolve(&ConfigLayers { overrides, ..ConfigLayers::default() }).unwrap()
}

/// The events of a run on `threads` threads.
fn train(config: &Config, folder: &Path, threads: usize) -> Vec<Event> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let mut trainer = trainer(config);
        let records = attach(&mut trainer, Run::open(folder).unwrap());
        trainer.run().unwrap();
        events(&records)
    })
}

/// The tensors of a file of the checkpoint after `step`, by the names of parameters.
fn tensors(run: &Path, step: u64, file: &str) -> BTreeMap<String, Vec<f32>> {
    let file = TensorFile::open(run.join(format!("step-{step:06}")).join(file)).unwrap();
    let name = |name: &str| name.trim_start_matches("transformer.").to_owned();
    file.tensors().map(|tensor| (name(tensor.name), tensor.to_f32().unwrap())).collect()
}

/// The counts of each tensor by their definition, from the files of the checkpoints before and after `step`.
fn counts_from_files(run: &Path, step: u64, format: FloatFormat) -> BTreeMap<String, UpdateCounts> {
    let both = |file: &str| [step - 1, step].map(|step| tensors(run, step, file));
    let [masters, weights] = [both("master.safetensors"), both("model.safetensors")];
    let count = |name: &String| {
        let [[old, new], [before, after]] = [&masters, &weights].map(|files| [&files[0][name], &files[1][name]]);
        let mut counts = UpdateCounts { elements: new.len() as u64, ..UpdateCounts::default() };
        for (i, (new, after)) in new.iter().zip(after).enumerate() {
            let moved = old[i].to_bits() != new.to_bits();
            counts.moved += u64::from(moved);
            counts.lost += u64::from(moved && before[i].to_bits() == after.to_bits());
            let distance = (f64::from(*new) - f64::from(*after)).abs() / format.ulp(f64::from(*after));
            counts.distance += (distance * 65536.0).round_ties_even() as u64;
        }
        counts
    };
    masters[0].keys().map(|name| (name.clone(), count(name))).collect()
}

#[test]
fn counts_are_those_of_the_files_of_two_checkpoints() {
    for dtype in [Dtype::F16, Dtype::BF16] {
        let folder = tempfile::tempdir().unwrap();
        let events = train(&config(&dtype.to_string(), true), folder.path(), 2);
        let mut compared = 0;
        for step in steps(&events).skip(1).filter(|step| step.outcome == StepStatus::Applied) {
            let expected = counts_from_files(folder.path(), step.step, dtype.format());
            let mut sum = UpdateCounts::default();
            assert_eq!(step.tensors.len(), expected.len());
            for tensor in &step.tensors {
                assert_eq!(tensor.lost_updates, Some(expected[&tensor.name]), "{dtype} {} {}", step.step, tensor.name);
                sum += expected[&tensor.name];
            }
            assert_eq!(step.lost_updates, Some(sum));
            assert!(sum.lost > 0 && sum.lost < sum.moved, "{sum:?}");
            compared += 1;
        }
        assert!(compared >= 2, "{compared} steps compared");
    }
}

#[test]
fn counts_do_not_depend_on_the_number_of_threads() {
    let counts = |threads: usize| {
        let folder = tempfile::tempdir().unwrap();
        let events = train(&config("fp16", true), folder.path(), threads);
        steps(&events).map(|step| (step.lost_updates, step.tensors.clone())).collect::<Vec<_>>()
    };
    let one = counts(1);
    assert!(one.iter().any(|(sum, _)| sum.is_some()));
    assert_eq!(one, counts(3));
}

/// Updates go into the 16-bit weights, so most are lost; files, a resume and the counts agree on it.
#[test]
fn weights_without_masters_lose_updates_and_resume() {
    for (dtype, wide) in [(Dtype::F16, "p=f16,c=f16,g=f16,r=f32"), (Dtype::BF16, "p=bf16,c=bf16,g=bf16,r=f32")] {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let config = config(&dtype.to_string(), false);
        assert_eq!(config.dtype.to_string(), wide);
        let events = train(&config, &run, 2);
        let warned = |event: &Event| matches!(event, Event::Warning(it) if it.message.contains("precision.masters"));
        assert!(events.iter().any(warned));
        let applied = steps(&events).filter(|step| step.outcome == StepStatus::Applied);
        let counts: Vec<UpdateCounts> = applied.map(|step| step.lost_updates.unwrap()).collect();
        assert!(counts.len() >= 2);
        for sum in counts {
            assert!(sum.lost > 0 && sum.lost < sum.moved && sum.moved <= sum.elements, "{sum:?}");
        }
        let [masters, weights] = ["master.safetensors", "model.safetensors"].map(|file| tensors(&run, STEPS, file));
        assert_eq!(masters, weights);
        let proof = verify_resume(&config, 4, 2, &folder.path().join("resume"), &Activity::default()).unwrap();
        assert_eq!(proof.differences, [""; 0]);
    }
}

#[test]
fn settings_without_an_effect_are_refused() {
    let refused = |overrides: &[(&str, toml::Value)]| {
        let overrides = overrides.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        Config::resolve(&ConfigLayers { overrides, ..ConfigLayers::default() }).unwrap_err().to_string()
    };
    let message = refused(&[("dtype", "p=f16,c=f16,g=f16,r=f32".into())]);
    assert!(message.contains("`precision.masters = false`"), "{message}");
    let message = refused(&[("dtype", "fp32".into()), ("precision.masters", false.into())]);
    assert!(message.contains("their own masters"), "{message}");
    for dtype in ["fp32", "p=bf16,c=bf16,g=bf16,r=f32"] {
        let message = refused(&[("dtype", dtype.into()), ("telemetry.lost_updates_every", 1.into())]);
        assert!(message.contains("telemetry.lost_updates_every"), "{message}");
    }
}
