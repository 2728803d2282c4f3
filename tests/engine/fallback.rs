//! Layers that overflow too often compute in a wider type: the benefit, that nothing else changes, and that a
//! killed run resumes with it. `docs/numerics.md` quotes [`ROWS`].

use crate::common::checkpoint::values;
use crate::common::engine::{Settings, engine};
use crate::common::launch;
use crate::common::of_kind;
use crate::run::{self, attach, events, steps};
use candle_core::{DType, Device};
use finetune::Error;
use finetune::data::Batch;
use finetune::engine::kernels::view;
use finetune::engine::model::{ForwardMode, InputIds, KvCache, ModelSpec, Parameters};
use finetune::precision::{Dtype, FallbackRule, GradScaler, GradScalerConfig, PrecisionPolicy, PrecisionUnit};
use finetune::store::checkpoint::{Run, compare, latest_valid};
use finetune::store::tensor_file::TensorFile;
use finetune::telemetry::{Activity, DtypeChange, Emitter, Event, StepStatus, read};
use finetune::train::{Config, ConfigLayers, TrainEngine, Trainer, verify_resume};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// `tiny` with random weights. One hidden unit of block 1's MLP is 2^10 times as large, and the weights that read it
/// are as much smaller. The function is nearly the same; the unit's activations are an outlier channel, as large models
/// have them, and the gradient of the weights that read them is 2^10 times as large.
fn with_outlier(folder: &Path) -> PathBuf {
    let mut trainer = run::trainer(&Config::resolve(&ConfigLayers::default()).unwrap());
    let config = trainer.engine.model.spec().clone();
    let masters = trainer.engine.state.masters.parameters().clone();
    let scale = |name: &str, of_unit: &dyn Fn(usize) -> bool, factor: f32| {
        let change = |(i, x): (usize, &mut f32)| *x *= if of_unit(i) { factor } else { 1.0 };
        view::write_f32(masters.get(name).unwrap(), |values| values.iter_mut().enumerate().for_each(change)).unwrap();
    };
    scale("h.1.mlp.c_fc.weight", &|i| i % config.intermediate_size == 7, 1024.0);
    scale("h.1.mlp.c_proj.weight", &|i| i / config.hidden_size == 7, 1.0 / 1024.0);
    trainer.attach(Run::open(folder.join("source")).unwrap(), Emitter::new(None));
    trainer.save().unwrap();
    let model = folder.join("model");
    std::fs::create_dir_all(&model).unwrap();
    let tensors: HashMap<_, _> = masters.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    candle_core::safetensors::save(&tensors, model.join("model.safetensors")).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(trainer.checkpoint().unwrap().join(file), model.join(file)).unwrap();
    }
    model
}

/// A run of that model on small batches; `scale` is the first loss scale, and if `constant` the only one.
fn config(model: &Path, rule: FallbackRule, scale: f32, constant: bool) -> Config {
    let said = [("model", model.display().to_string()), ("data", "grammar".to_owned())];
    let overrides = said.map(|(key, value)| (key.to_owned(), toml::Value::String(value))).into();
    let mut config = Config::resolve(&ConfigLayers { file: None, overrides }).unwrap();
    config.train.batch_size = 2;
    config.train.seq_len = 32;
    config.optimizer.lr = 1e-4;
    config.train.sample_tokens = 4;
    config.train.eval_batches = 1;
    config.scaler.init_scale = scale;
    if constant {
        config.scaler.min_scale = scale;
        config.scaler.max_overflows_at_min_scale = 1000;
    }
    config.precision.fallback = rule;
    config
}

/// A run's events.
fn train(mut config: Config, steps: u64, folder: &Path) -> (Trainer, Vec<Event>) {
    config.train.steps = Some(steps);
    let mut trainer = run::trainer(&config);
    let records = attach(&mut trainer, Run::open(folder).unwrap());
    // A run whose every step was skipped ends as diverged.
    assert!(matches!(trainer.run(), Ok(_) | Err(Error::Diverged { .. })));
    (trainer, events(&records))
}

fn retyped(events: &[Event]) -> Vec<&DtypeChange> {
    of_kind!(events, Event::DtypeChange).collect()
}

/// Skipped steps, log2 of the last loss scale, and the subnormal share of the applied steps' gradients that are not
/// zero, in percent.
type Figures = (u64, f32, f64);

/// Computes a run's figures.
fn figures(events: &[Event]) -> Figures {
    let (mut skipped, mut scale, mut subnormal, mut stored) = (0, 0.0, 0, 0);
    for step in steps(events) {
        scale = step.scale.to;
        if step.outcome == StepStatus::Skipped {
            skipped += 1;
        } else {
            subnormal += step.grads.subnormal;
            stored += step.grads.count - step.grads.zero;
        }
    }
    (skipped, scale.log2(), 100.0 * subnormal as f64 / stored as f64)
}

/// The table of the documentation: first loss scale, whether it stays, the rule; and what [`figures`] were found.
const ROWS: [(f32, bool, FallbackRule, Figures); 4] = [
    (65536.0, false, FallbackRule::Off, (6, 10.0, 2.7)),
    (65536.0, false, FallbackRule::Layer, (3, 13.0, 2.1)),
    (16384.0, true, FallbackRule::Off, (40, 14.0, f64::NAN)),
    (16384.0, true, FallbackRule::Layer, (3, 14.0, 1.2)),
];

#[test]
fn a_layer_in_fallback_costs_no_more_steps_and_leaves_the_scale_to_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_outlier(folder.path());
    let documentation = include_str!("../../docs/numerics.md");
    for (i, (scale, constant, rule, expected)) in ROWS.into_iter().enumerate() {
        let (_, events) = train(config(&model, rule, scale, constant), 40, &folder.path().join(i.to_string()));
        let (skipped, log2, subnormal) = figures(&events);
        assert_eq!((skipped, log2), (expected.0, expected.1), "row {i}");
        assert!((subnormal - expected.2).abs() < 0.1 || (subnormal.is_nan() && expected.2.is_nan()), "{subnormal}");
        let kind = if constant { "constant" } else { "dynamic" };
        let name = if rule == FallbackRule::Off { "`off`" } else { "`layer`" };
        let share = if subnormal.is_nan() { "–".to_owned() } else { format!("{:.1} %", expected.2) };
        let row = format!("| {kind}, from 2^{} | {name} | {skipped} | 2^{log2} | {share} |", scale.log2());
        assert!(documentation.contains(&row), "the documentation lacks: {row}");
        let moved = retyped(&events);
        if rule == FallbackRule::Layer {
            let (layer, from, to) = ("h.1".into(), "f16".into(), "f32".into());
            let expected = DtypeChange { step: 3, layer, from, to, overflows: Some(3), ..DtypeChange::default() };
            assert_eq!(moved, [&expected]);
        } else {
            assert!(moved.is_empty());
        }
    }
}

/// In a checkpoint the file of weights stores each tensor in its compute type, and records the type.
#[test]
fn a_checkpoint_says_which_weights_are_wide() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_outlier(folder.path());
    let (trainer, _) = train(config(&model, FallbackRule::Layer, 65536.0, false), 4, &folder.path().join("run"));
    let state = &trainer.engine.state;
    let path = trainer.checkpoint().unwrap();
    let file = TensorFile::open(path.join("model.safetensors")).unwrap();
    let mut wide = 0;
    for (name, weight) in state.weights.iter() {
        let stored = file.require(&format!("transformer.{name}")).unwrap();
        let in_fallback = name.starts_with("h.1.");
        wide += u64::from(in_fallback);
        assert_eq!(weight.dtype(), if in_fallback { DType::F32 } else { DType::F16 }, "{name}");
        assert_eq!(stored.dtype.to_string(), if in_fallback { "F32" } else { "F16" }, "{name}");
        assert_eq!(stored.to_f32().unwrap(), values(weight), "{name}");
        let gradient = trainer.engine.grads.micro_batch_grads().get(name).unwrap();
        assert_eq!(gradient.dtype(), weight.dtype(), "{name}");
    }
    assert_eq!(wide, 12);
    let text = std::fs::read_to_string(path.join("config.json")).unwrap();
    assert!(text.contains(r#""torch_dtype": "float32""#), "{text}");
    let text = launch::succeed(launch::program().args(["checkpoint", "show"]).arg(path));
    assert!(text.contains("\nfallback     h.1 since step 3\n"), "{text}");
}

#[test]
fn a_run_resumes_bit_for_bit_with_a_layer_in_fallback_and_through_its_return() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_outlier(folder.path());
    for (quiet, at) in [(0, 6), (0, 2), (2, 4)] {
        let mut config = config(&model, FallbackRule::Layer, 65536.0, false);
        config.train.batch_size = 1;
        config.train.seq_len = 16;
        config.precision.fallback_cooldown = quiet;
        let run = folder.path().join(format!("{quiet}-{at}"));
        let proof = verify_resume(&config, 10, at, &run, &Activity::default()).unwrap();
        assert!(proof.differences.is_empty(), "{:?}", proof.differences);
        assert!(proof.skipped >= 3, "nothing fell back");
    }
}

#[test]
fn a_layer_comes_back_where_its_gradients_have_room_again() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_outlier(folder.path());
    let mut config = config(&model, FallbackRule::Layer, 16384.0, true);
    config.precision.fallback_cooldown = 4;
    config.precision.fallback_overflows = 2;
    let (trainer, events) = train(config.clone(), 10, &folder.path().join("high"));
    assert_eq!(retyped(&events).len(), 1, "its gradients are beyond FP16 at every step");
    assert_eq!(trainer.engine.state.weights.get("h.1.ln_1.bias").unwrap().dtype(), DType::F32);
    // One overflow halves this scale to where the layer fits.
    config.scaler.min_scale = 1.0;
    config.scaler.init_scale = 2048.0;
    config.precision.fallback_overflows = 1;
    let (trainer, events) = train(config, 12, &folder.path().join("low"));
    let moves: Vec<_> = retyped(&events).iter().map(|moved| (moved.layer.as_str(), moved.to.as_str())).collect();
    assert_eq!(moves, [("h.1", "f32"), ("h.1", "f16")], "{moves:?}");
    assert_eq!(trainer.engine.state.weights.get("h.1.ln_1.bias").unwrap().dtype(), DType::F16);
    let skipped_after = events.iter().skip_while(|event| !matches!(event, Event::DtypeChange(_)));
    assert!(!skipped_after.into_iter().any(|event| matches!(event, Event::Overflow(_))), "it fits at this scale");
}

/// A process is killed when its log reports the fallback. Another process resumes, and the result is as if nothing had
/// happened.
#[cfg(unix)]
#[test]
fn a_killed_run_goes_on_with_the_layer_in_fallback() {
    let folder = tempfile::tempdir().unwrap();
    let model = with_outlier(folder.path());
    let start = |run: &str, resume: bool| {
        let mut command = launch::program();
        command.current_dir(folder.path()).args(["--run", run, "--plain", "--threads", "1"]);
        if resume {
            command.arg("--resume");
        } else {
            command.arg("--model").arg(&model).args(["--steps", "14", "--batch-size", "1", "--seq-len", "16"]);
            command.args(["--save-every", "2", "--set", "train.eval_batches=1", "--set", "train.sample_tokens=4"]);
            command.args(["--set", "precision.fallback=\"layer\"", "--set", "optimizer.lr=1e-4"]);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    assert!(start("whole", false).wait().unwrap().success());
    let killed = folder.path().join("checkpoints/killed");
    let log = killed.join("events.jsonl");
    // The third step is the last before the fallback, the fourth is saved.
    let saved =
        || std::fs::read_to_string(&log).is_ok_and(|text| text.contains(r#""event":"checkpoint_saved","step":4"#));
    // A run may come to its end before it is killed.
    let is_killed = (0..10).any(|_| {
        std::fs::remove_dir_all(&killed).ok();
        let mut child = start("killed", false);
        while !saved() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        latest_valid(&killed).unwrap().checkpoint.state().step < 14
    });
    assert!(is_killed);
    assert!(start("killed", true).wait().unwrap().success());
    let resumed = read(&log).unwrap().into_iter().find_map(|record| match record.event {
        Event::Started(started) if started.resumed_from.is_some() => Some(started.fallback),
        _ => None,
    });
    assert_eq!(resumed.unwrap().get("h.1").map(String::as_str), Some("f32"));
    let last = |run| latest_valid(&folder.path().join("checkpoints").join(run)).unwrap();
    assert_eq!(compare(last("whole").checkpoint.path(), last("killed").checkpoint.path()).unwrap(), []);
}

fn small(policy: PrecisionPolicy, grad_accum: usize) -> TrainEngine {
    let tiny = ModelSpec::named("tiny").unwrap();
    let shape = ModelSpec { vocab_size: 64, ..tiny.resized(2, 16, 2) };
    let masters = Parameters::random(&shape.parameters(), 5, &Device::Cpu).unwrap();
    let scaler = GradScalerConfig { init_scale: 1024.0, ..GradScalerConfig::default() };
    let scaler = GradScaler::new(scaler).unwrap();
    let settings = Settings::new(policy, GradScalerConfig::default(), 1e-2, (2, 8));
    engine(&shape, masters, Settings { scaler, grad_accum, ..settings })
}

fn batch(first: u32) -> Batch {
    let inputs: Vec<u32> = (0..16).map(|i| (first + 7 * i) % 64).collect();
    Batch {
        labels: inputs.iter().map(|id| (id + 8) % 64).collect(),
        num_label_tokens: inputs.len(),
        inputs,
        ..Batch::new(2, 8)
    }
}

const UNITS: [PrecisionUnit; 3] = [PrecisionUnit::Block(0), PrecisionUnit::Block(1), PrecisionUnit::NonBlock];

fn retype_all(engine: &mut TrainEngine, dtype: Dtype) {
    for unit in UNITS {
        engine.change_dtype(unit, dtype).unwrap();
    }
}

fn bits(engine: &TrainEngine) -> Vec<Vec<u32>> {
    let all = engine.state.masters.parameters().tensors().iter().chain(engine.grads.total().tensors());
    all.map(|tensor| values(tensor).into_iter().map(f32::to_bits).collect()).collect()
}

/// A model in which every unit has fallen back computes, bit for bit, like a run in that type.
#[test]
fn units_in_another_type_compute_as_a_run_in_that_type() {
    for (dtype, policy) in [(Dtype::F32, PrecisionPolicy::FP32), (Dtype::BF16, PrecisionPolicy::BF16)] {
        for grad_accum in [1, 2] {
            let batches = [batch(1), batch(20)];
            let mut fallen = small(PrecisionPolicy::FP16, grad_accum);
            let mut whole = small(policy, grad_accum);
            retype_all(&mut fallen, dtype);
            for _ in 0..3 {
                let losses = [&mut fallen, &mut whole].map(|engine| engine.step(&batches[..grad_accum]).unwrap().loss);
                assert_eq!(losses[0].to_bits(), losses[1].to_bits());
            }
            assert_eq!(bits(&fallen), bits(&whole));
            // Switched back, it computes the original result.
            let mut same = small(PrecisionPolicy::FP16, grad_accum);
            let mut back = small(PrecisionPolicy::FP16, grad_accum);
            for dtype in [dtype, Dtype::F16] {
                retype_all(&mut back, dtype);
            }
            for engine in [&mut same, &mut back] {
                engine.step(&batches[..grad_accum]).unwrap();
            }
            assert_eq!(bits(&same), bits(&back));
        }
    }
}

/// If only one unit computes in FP32, the result is close to FP16, but not equal.
#[test]
fn one_unit_in_fp32_among_others_in_fp16() {
    for unit in UNITS {
        let (mut mixed, mut narrow, mut exact) =
            (small(PrecisionPolicy::FP16, 1), small(PrecisionPolicy::FP16, 1), small(PrecisionPolicy::FP32, 1));
        mixed.change_dtype(unit, Dtype::F32).unwrap();
        let losses = [&mut mixed, &mut narrow, &mut exact].map(|engine| engine.step(&[batch(3)]).unwrap().loss);
        assert!((losses[0] - losses[2]).abs() < 1e-3 && losses[0].to_bits() != losses[1].to_bits(), "{losses:?}");
        for (name, gradient) in mixed.grads.micro_batch_grads().iter() {
            let wide = if PrecisionUnit::of(name) == unit { DType::F32 } else { DType::F16 };
            assert_eq!(gradient.dtype(), wide, "{name}");
            let of = |engine: &TrainEngine| values(engine.grads.micro_batch_grads().get(name).unwrap());
            let (found, expected) = (of(&mixed), of(&exact));
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
            let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
            assert!(error <= 1e-2 * norm(&mut expected.iter().copied()) + 1e-2, "{unit} {name}: {error}");
        }
    }
}

/// Text is generated from the weights as they are, each layer's keys and values in its own type.
#[test]
fn decoding_follows_the_types_of_the_weights() {
    let mut engine = small(PrecisionPolicy::FP16, 1);
    let mut cache = KvCache::new(engine.model.spec(), PrecisionPolicy::FP16, 8, &Device::Cpu).unwrap();
    for unit in UNITS {
        engine.change_dtype(unit, Dtype::F32).unwrap();
        let TrainEngine { model, state, workspace, .. } = &mut engine;
        let ids = batch(5).inputs;
        let tokens = InputIds::new(&ids, 8);
        model.forward(&state.weights, tokens, ForwardMode::Eval, workspace, &mut ()).unwrap();
        let expected = workspace.hidden().narrow(0, 0, 8).unwrap();
        cache.truncate(0);
        model.decode(&state.weights, &ids[..5], &mut cache).unwrap();
        let found = model.decode(&state.weights, &ids[5..8], &mut cache).unwrap();
        assert_eq!(found.dtype(), expected.dtype());
        for (found, expected) in values(found).iter().zip(values(&expected.narrow(0, 5, 3).unwrap())) {
            assert!((found - expected).abs() < 1e-2, "{unit}: {found} {expected}");
        }
    }
}
