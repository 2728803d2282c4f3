//! Blocks in simulated FP8, and the variance of gradients that can switch it.

use crate::common::checkpoint::values;
use crate::common::launch;
use crate::common::of_kind;
use crate::run::{self, advanced, steps};
use candle_core::{DType, Tensor};
use finetune::engine::model::{
    Checkpointing, ForwardMode, Hook, HookPoint, InputIds, ModelSpec, TensorKind, Workspace,
};
use finetune::precision::{Fp8Config, PrecisionPolicy};
use finetune::telemetry::{Activity, Event};
use finetune::train::{Config, Fp8Blocks, Trainer, verify_resume};
use std::collections::BTreeSet;
use std::path::Path;

fn config(fp8: Fp8Config) -> Config {
    let mut config = run::config(PrecisionPolicy::FP16, (1, 32));
    config.scaler.init_scale = 65536.0;
    config.precision.fp8 = fp8;
    config
}

fn fp8(layer: usize) -> Fp8Config {
    Fp8Config { block: Some(layer.into()), ..Fp8Config::default() }
}

/// The maximum number of bits after the leading one in any value of a tensor: 3 in E4M3, 2 in E5M2, up to 10 in FP16.
fn mantissa_bits(tensor: &Tensor) -> u32 {
    values(tensor)
        .into_iter()
        .filter(|x| *x != 0.0)
        .map(|x| 23 - (x.to_bits() | 1 << 23).trailing_zeros())
        .max()
        .unwrap()
}

/// The values of a pass: layer, part, and the bits of its values.
struct Bits {
    spec: ModelSpec,
    recorded: Vec<(String, u32)>,
}

impl Hook for Bits {
    fn record(&mut self, HookPoint { layer, kind: part, .. }: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        self.recorded.push((format!("{} {}", self.spec.layer_name(layer), part.name()), mantissa_bits(tensor)));
        Ok(())
    }
}

impl Bits {
    fn of(&self, place: &str) -> u32 {
        self.recorded.iter().find(|(name, _)| name == place).unwrap_or_else(|| panic!("{place} was not recorded")).1
    }
}

#[test]
fn only_the_inputs_of_the_blocks_products_are_fp8() {
    let (trainer, _) = advanced(&config(fp8(1)), 3);
    let engine = &trainer.engine;
    let model = &engine.model;
    let weights = &engine.state.weights;
    let grads = engine.grads.micro_batch_grads();
    let ids: Vec<u32> = (0..32).map(|i| (i * 7) % 64 + 30).collect();
    let tokens = InputIds::new(&ids, 32);
    let shape = model.spec();
    let device = candle_core::Device::Cpu;
    let mut workspace =
        Workspace::for_training(shape, PrecisionPolicy::FP16, (1, 32), Checkpointing::None, &device).unwrap();
    let mut layer = Fp8Blocks::new(fp8(1), shape.num_layers, &engine.state.fp8.states());
    let mut bits = Bits { spec: shape.clone(), recorded: Vec::new() };
    let hook = &mut (&mut layer, &mut bits);
    model.forward(weights, tokens, ForwardMode::Eval, &mut workspace, hook).unwrap();
    model.loss_and_head_gradient(weights, &ids, (100.0, None), &workspace, grads, &mut ()).unwrap();
    model.backward(weights, tokens, ForwardMode::Eval, &mut workspace, grads, hook).unwrap();
    for place in ["ln_1 output", "attn output", "ln_2 output", "mlp.gelu output"] {
        assert!(bits.of(&format!("h.1.{place}")) <= 3, "{place}");
        assert!(bits.of(&format!("h.0.{place}")) > 3, "{place}");
    }
    for place in
        ["mlp.c_proj output_gradient", "mlp.gelu input_gradient", "attn.c_proj output_gradient", "attn input_gradient"]
    {
        assert!(bits.of(&format!("h.1.{place}")) <= 2, "{place}");
        assert!(bits.of(&format!("h.0.{place}")) > 2, "{place}");
    }
    for place in ["h.1.mlp.c_fc output", "h.1.attn.c_attn output", "h.1.mlp.c_fc weight_gradient"] {
        assert!(bits.of(place) > 3, "{place}: products are stored as before");
    }
    let recorded = bits.recorded.iter().filter(|(place, _)| place.starts_with("h.1.")).count();
    assert!(recorded > 20 && TensorKind::Output.is_forward());
}

/// The masters move, and after an update the working copy is theirs, in FP16 and not in FP8.
#[test]
fn a_block_in_fp8_trains_and_keeps_its_masters() {
    let (trainer, events) = advanced(&config(fp8(1)), 12);
    let (plain, _) = advanced(&config(Fp8Config::default()), 12);
    let losses: Vec<f32> = steps(&events).map(|step| step.loss).collect();
    assert!(losses[11] < losses[0] - 0.2, "{losses:?}");
    let state = &trainer.engine.state;
    for (name, weight) in state.weights.iter() {
        let master = state.masters.parameters().get(name).unwrap().to_dtype(DType::F16).unwrap();
        assert_eq!(values(weight), values(&master), "{name}");
    }
    let moved = |name: &str| {
        let of = |trainer: &Trainer| values(trainer.engine.state.masters.parameters().get(name).unwrap());
        of(&trainer) != of(&plain)
    };
    assert!(moved("h.1.mlp.c_fc.weight") && moved("h.0.mlp.c_fc.weight"), "it computes as without");
}

#[test]
fn a_run_resumes_bit_for_bit_in_fp8_and_through_a_switch() {
    let folder = tempfile::tempdir().unwrap();
    let variance = first_variance();
    for (name, enter_variance) in [("always", None), ("switched", Some(variance * 0.7))] {
        let mut config = config(Fp8Config { amax_history_len: 3, enter_variance, ..fp8(1) });
        // The first steps overflow.
        config.scaler.init_scale = 2f32.powi(19);
        let proof = verify_resume(&config, 14, 7, &folder.path().join(name), &Activity::default()).unwrap();
        assert!(proof.differences.is_empty(), "{name}: {:?}", proof.differences);
        assert!(proof.skipped > 0);
    }
}

#[test]
fn the_state_of_another_block_is_discarded() {
    let (trainer, _) = advanced(&config(fp8(1)), 2);
    let states = trainer.engine.state.fp8.states();
    let again = |layer| Fp8Blocks::new(fp8(layer), 4, &states).states();
    let fresh = Fp8Blocks::new(fp8(2), 4, &[]).states();
    assert_eq!(again(1), states);
    assert_eq!(again(2), fresh);
    assert_ne!(fresh[0].amax, states[0].amax);
}

/// Each block has its own maxima and its own decisions, also through a resume.
#[test]
fn several_blocks_are_in_fp8_and_each_switches_by_itself() {
    let several = |blocks: &str| Fp8Config { block: Some(blocks.parse().unwrap()), ..Fp8Config::default() };
    let in_fp8 = |blocks: &str| -> Vec<String> {
        let (trainer, _) = advanced(&config(several(blocks)), 1);
        trainer.engine.state.fp8.active().map(|unit| unit.to_string()).collect()
    };
    assert_eq!(in_fp8("0,2-3"), ["h.0", "h.2", "h.3"]);
    assert_eq!(in_fp8("all"), ["h.0", "h.1", "h.2", "h.3"]);
    let weight = |fp8: Fp8Config| {
        let (trainer, _) = advanced(&config(fp8), 8);
        values(trainer.engine.state.masters.parameters().get("h.0.mlp.c_fc.weight").unwrap())
    };
    assert!(weight(several("1-2")) != weight(fp8(1)) && weight(several("1-2")) != weight(fp8(2)));
    assert_eq!(weight(several("1-1")), weight(fp8(1)));
    let folder = tempfile::tempdir().unwrap();
    let mut switched = config(Fp8Config { enter_variance: Some(first_variance()), ..several("0-2") });
    switched.scaler.init_scale = 1024.0;
    let proof = verify_resume(&switched, 10, 5, &folder.path().join("run"), &Activity::default()).unwrap();
    assert_eq!(proof.differences, [""; 0]);
    let (_, events) = advanced(&switched, 10);
    let moved: BTreeSet<&str> = of_kind!(&events, Event::DtypeChange).map(|moved| &*moved.layer).collect();
    assert!(moved.len() > 1, "{moved:?}");
}

/// The variance of block 1's gradient at the first step.
fn first_variance() -> f64 {
    let mut config = config(Fp8Config::default());
    config.telemetry.grad_variance_every = 1;
    let (trainer, events) = advanced(&config, 1);
    let variances = of_kind!(&events, Event::GradVariance).next().unwrap();
    let names: Vec<_> = variances.layers.keys().map(String::as_str).collect();
    let blocks = trainer.engine.model.spec().num_layers;
    assert_eq!((names.len(), names[0], *names.last().unwrap()), (blocks + 1, "h.0", "head"));
    variances.layers["h.1"]
}

#[test]
fn the_variance_is_that_of_the_unscaled_gradients_elements() {
    let mut config = config(Fp8Config::default());
    config.telemetry.grad_variance_every = 1;
    let (trainer, events) = advanced(&config, 1);
    let scale = f64::from(steps(&events).next().unwrap().loss_scale);
    let born = trainer.engine.grads.micro_batch_grads();
    let elements: Vec<f64> = born
        .iter()
        .filter(|(name, _)| name.starts_with("h.1."))
        .flat_map(|(_, tensor)| values(tensor))
        .map(|x| f64::from(x) / scale)
        .collect();
    let mean = elements.iter().sum::<f64>() / elements.len() as f64;
    let expected = elements.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / elements.len() as f64;
    let found = first_variance();
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
    let (_, events) = advanced(&self::config(Fp8Config::default()), 2);
    assert_eq!(of_kind!(&events, Event::GradVariance).count(), 0);
}

#[test]
fn the_variance_switches_the_block_and_the_log_says_so() {
    let variance = first_variance();
    let switched = |threshold: f64| {
        let config = config(Fp8Config { enter_variance: Some(threshold), ..fp8(1) });
        let (trainer, events) = advanced(&config, 8);
        let moves = of_kind!(&events, Event::DtypeChange).map(|moved| (moved.step, moved.to.clone(), moved.restored));
        let moves: Vec<_> = moves.collect();
        (moves, trainer.engine.state.fp8.active().next().is_some())
    };
    let (moves, active) = switched(variance * 1e6);
    assert_eq!((moves, active), (vec![(1, "fp8".to_owned(), false)], true));
    assert_eq!(switched(variance * 1e-9), (vec![], false), "it begins in FP16 and stays");
}

/// The experiment in `configs/experiments`, in small: three groups that `compare` distinguishes.
#[test]
fn the_experiment_runs_and_is_compared() {
    let runs = tempfile::tempdir().unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/experiments/fp8-variance");
    let finetune = || {
        let mut command = launch::program();
        command.current_dir(runs.path());
        command
    };
    for arm in ["fp16", "fp8", "switched"] {
        let mut command = finetune();
        command.arg("--config").arg(folder.join(format!("{arm}.toml"))).args(["--run", arm, "--plain"]);
        command.args(["--steps", "12", "--batch-size", "1", "--seq-len", "32", "--checkpoint-dir", "."]);
        command.args(["--set", "train.eval_batches=2", "--set", "telemetry.grad_variance_every=4"]);
        command.args(["--set", "scaler.init_scale=4194304.0"]);
        launch::succeed(&mut command);
    }
    let compared =
        launch::succeed(finetune().args(["compare", "--checkpoint-dir", ".", "fp16", "fp8", "switched", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&compared).unwrap();
    let keys: Vec<_> = json["differences"].as_array().unwrap().iter().map(|d| d["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["precision.fp8.block", "precision.fp8.enter_variance"]);
    for group in 0..3 {
        let figures = &json["groups"][group]["runs"][0]["figures"];
        assert!(figures["longest_streak"].as_f64().unwrap() >= 3.0, "2^22 is too high: {figures}");
        assert!(figures["longest_streak"].as_f64() <= figures["skipped"].as_f64());
    }
    let log = std::fs::read_to_string(runs.path().join("fp8/events.jsonl")).unwrap();
    assert!(log.contains(r#""fallback":{"h.0":"fp8"}"#) && log.contains(r#""event":"grad_variance""#));
}

/// The table in the documentation matches the results.
#[test]
fn the_documented_figures_are_the_results() {
    let results: serde_json::Value =
        serde_json::from_str(include_str!("../../configs/experiments/fp8-variance/results.json")).unwrap();
    let documentation = include_str!("../../docs/numerics.md");
    for arm in ["fp16", "fp8", "switched", "single"] {
        let cell = |key: &str| {
            let figure = |run: &serde_json::Value| match run[key].as_u64() {
                Some(count) => count.to_string(),
                None => format!("{:.3}", run[key].as_f64().unwrap()),
            };
            results[arm].as_array().unwrap().iter().map(figure).collect::<Vec<_>>().join(", ")
        };
        let cells = ["skipped", "longest_streak", "switches", "perplexity"].map(cell).join(" | ");
        let row = format!("| `{arm}` | {cells} |");
        assert!(documentation.contains(&row), "the documentation lacks: {row}");
    }
}
