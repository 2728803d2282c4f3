//! Adapters, for plain LoRA, rsLoRA and DoRA: half precision, dropout, files, and subsets of the layers.
//!
//! The values are in `tests/golden/lora`; `make_lora.py` documents how they were made. `parity` compares FP32 with
//! them.

use crate::common::compare::{assert_close, max_difference, relative, values};
use crate::common::engine::{POLICIES, by_name, over_folder, unscaled};
use crate::common::golden::{Case, names};
use candle_core::{DType, Device, Tensor};
use finetune::engine::model::{
    ForwardMode, Lora, ModelSpec, ModuleId, ParamRole, Parameters, Recurrence, merge_adapters,
};
use finetune::precision::{Dtype, PrecisionPolicy};
use finetune::store::ModelFolder;
use finetune::store::adapter::{AdapterFolder, adapter_config, write_adapter};
use finetune::store::checkpoint::Base;
use finetune::train::TrainEngine;
use std::collections::BTreeSet;
use std::path::Path;

/// The largest error of a gradient in BF16, and their root mean square. PyTorch's own gradients of a model in BF16 have
/// errors of this size: of Gemma 3 0.103 and 0.037. There as here that of `layers.1.self_attn.k_proj.lora_B` is the
/// largest: softmax ignores a number added to all scores, so most of a key's gradient cancels, but only after its parts
/// were rounded.
const BF16_ERRORS: [(&str, f64, f64); 25] = [
    ("gemma2", 0.05, 0.03),
    ("gemma3", 0.100, 0.046),
    ("gemma3-dora", 0.075, 0.044),
    ("gpt-oss", 0.05, 0.03),
    ("gpt2", 0.017, 0.010),
    ("gpt2-dora", 0.022, 0.013),
    ("granite-dora", 0.05, 0.03),
    ("granite4", 0.05, 0.03),
    ("granitemoe", 0.05, 0.03),
    ("lfm2", 0.05, 0.03),
    ("llama-biases-dora", 0.050, 0.029),
    ("llama-rslora", 0.026, 0.017),
    ("ministral3", 0.05, 0.03),
    ("mistral", 0.05, 0.03),
    ("olmo2", 0.05, 0.03),
    ("olmo3", 0.05, 0.035),
    ("olmoe", 0.05, 0.03),
    ("olmoe-experts", 0.05, 0.03),
    ("phi3", 0.05, 0.03),
    ("qwen2", 0.05, 0.03),
    ("qwen3", 0.040, 0.022),
    ("qwen3-dora", 0.052, 0.030),
    ("qwen3-moe", 0.08, 0.045),
    ("qwen3_5", 0.05, 0.03),
    ("smollm3", 0.03, 0.02),
];

/// FP16 has three more bits than BF16, and so an eighth of its errors.
#[test]
fn half_precision_gradients_are_pefts_but_for_rounding() {
    assert_eq!(BF16_ERRORS.map(|(name, ..)| name)[..], names("lora"));
    let cases =
        |(name, worst, mean)| Case::lora_of(name).for_all_kernels().into_iter().map(move |case| (case, worst, mean));
    for (case, worst, mean) in BF16_ERRORS.into_iter().flat_map(cases) {
        for (policy, share) in [(PrecisionPolicy::FP16, 0.125), (PrecisionPolicy::BF16, 1.0)] {
            let gradients = case.gradients_in(policy);
            let errors = case.gradients.iter().map(|(name, truth)| relative(&gradients[name], truth));
            let errors: Vec<f64> = errors.collect();
            let mean_square = errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64;
            assert_close(&format!("{} {policy}", case.name), &gradients, &case.gradients, share * worst, share * worst);
            assert!(mean_square.sqrt() <= share * mean, "{} {policy}: {:.2e}", case.name, mean_square.sqrt());
        }
    }
}

/// The base's weights with the adapters merged into them have the logits that PEFT computes with both.
#[test]
fn merged_weights_have_pefts_logits() {
    for name in names("lora") {
        let case = Case::lora_of(&name);
        let adapted = case.engine(PrecisionPolicy::FP32, case.rows());
        let spec = adapted.model.spec();
        let adapters = &adapted.state.weights;
        let plain = ModelSpec { lora: None, ..spec.clone() };
        let merged = Parameters::zeros(&plain.parameters(), DType::F32, &Device::Cpu).unwrap();
        for (name, tensor) in merged.iter() {
            let from = adapters.get(name).or_else(|| adapters.base().unwrap().get(name)).unwrap();
            tensor.slice_set(from, 0, 0).unwrap();
        }
        merge_adapters(spec, adapters, &merged).unwrap();
        let logits = case.logits_of(&mut case.engine_over(&plain, merged, PrecisionPolicy::FP32, case.rows()));
        let difference = max_difference(&logits, &case.logits);
        assert!(difference < 1e-5, "{name}: logits differ by {difference:.1e}");
    }
}

/// The base has no masters, moments or gradients, and no step changes it.
#[test]
fn the_base_stays_as_it_is() {
    for case in Case::lora() {
        for policy in POLICIES {
            let mut engine = case.engine(policy, case.rows());
            let base = |engine: &TrainEngine| by_name(engine.state.weights.base().unwrap());
            let copy = |(name, tensor): (String, Tensor)| (name, values(&tensor));
            let before: Vec<_> = base(&engine).into_iter().map(copy).collect();
            for step in 0..3 {
                engine.step(&case.whole_batch(step)).unwrap();
            }
            assert_eq!(base(&engine).into_iter().map(copy).collect::<Vec<_>>(), before, "{} {policy}", case.name);
            let trained = engine.state.masters.parameters().elements();
            assert_eq!(trained, engine.model.spec().trained_count());
            assert_eq!(engine.grads.total().elements(), trained);
            assert_eq!(engine.state.adamw.exp_avg.elements(), trained);
        }
    }
}

/// Gradients under dropout against differences of the loss, which sees the same masks.
#[test]
fn gradients_under_dropout_are_those_of_the_loss() {
    for name in ["gpt2", "qwen3"] {
        for case in Case::lora_of(name).for_all_kernels() {
            let mut engine = case.engine_with_dropout(PrecisionPolicy::FP32, 0.4);
            let batches = case.whole_batch(0);
            let mode =
                ForwardMode::Train { seed: engine.seed, micro_batch: engine.state.counters.micro_batch_index(0) };
            let weights = by_name(&engine.state.weights);
            let loss = |engine: &mut TrainEngine| {
                let tokens = batches[0].tokens();
                engine.model.forward(&engine.state.weights, tokens, mode, &mut engine.workspace, &mut ()).unwrap();
                let sum = engine.model.loss(&engine.state.weights, &batches[0].labels, &engine.workspace).unwrap();
                sum / batches[0].num_label_tokens as f64
            };
            let mut differences = Vec::new();
            for name in weights.keys().filter(|name| name.contains("lora_")) {
                let tensor = &weights[name];
                let h = 2e-3;
                let at = values(tensor);
                let direction: Vec<f32> = (0..at.len()).map(|i| [1.0, -1.0, 0.5][i % 3]).collect();
                let mut moved = |by: f32| {
                    let moved: Vec<f32> = at.iter().zip(&direction).map(|(x, d)| *x as f32 + by * d).collect();
                    tensor.slice_set(&Tensor::from_vec(moved, tensor.shape(), &Device::Cpu).unwrap(), 0, 0).unwrap();
                    loss(&mut engine)
                };
                let slope = (moved(h) - moved(-h)) / (2.0 * f64::from(h));
                moved(0.0);
                differences.push((name.clone(), slope, direction));
            }
            engine.max_grad_norm = None;
            engine.step(&batches).unwrap();
            let gradients = unscaled(&engine, 1.0);
            for (name, slope, direction) in differences {
                let along: f64 = values(&gradients[&name]).iter().zip(direction).map(|(g, d)| *g * f64::from(d)).sum();
                assert!((along - slope).abs() < 3e-3 * slope.abs().max(0.05), "{} {name}: {along} {slope}", case.name);
            }
        }
    }
}

/// A written adapter reads back to the same bits, and names the same layers.
#[test]
fn a_written_adapter_reads_back() {
    for name in names("lora") {
        let case = Case::lora_of(&name);
        let trained = case.engine(PrecisionPolicy::FP32, case.rows());
        let spec = trained.model.spec();
        let masters = trained.state.masters.parameters();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter_model.safetensors");
        let mut bytes = Vec::new();
        write_adapter(&mut bytes, &path, spec, masters).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let base = Base { name: "base".into(), revision: None, sha256: String::new() };
        let config = adapter_config(spec, Some(&base));
        std::fs::write(folder.path().join("adapter_config.json"), config).unwrap();
        let read = AdapterFolder::open(folder.path()).unwrap();
        let base = ModelFolder::open(&case.folder).unwrap();
        assert_eq!(&read.spec(base.spec()).unwrap(), spec, "{name}");
        let over = over_folder(&case.folder, spec, Dtype::F32);
        read.read_parameters(spec, &over).unwrap();
        let same = |(name, tensor): (&str, &Tensor)| assert_eq!(values(tensor), values(masters.get(name).unwrap()));
        over.iter().for_each(same);
        assert!(Path::new(&path).is_file());
    }
}

/// PEFT compares by letters: `norm` would name every norm, and `conv` LFM2's convolutions with their products. It saves
/// modules with all that are inside.
#[test]
fn the_name_of_a_saved_module_is_that_of_no_other() {
    for case in Case::families() {
        let base = ModelFolder::open(&case.folder).unwrap();
        let name = match base.spec().recurrent.as_ref().map(|recurrent| recurrent.recurrence) {
            Some(Recurrence::ShortConv { .. }) => "conv.conv",
            Some(Recurrence::GatedDelta { .. }) => "linear_attn.norm",
            None => "norm",
        };
        let saved = Lora::modules_to_save(base.spec(), &[name]).unwrap();
        let expected = if name == "norm" { "model.norm" } else { name };
        assert_eq!(Lora::names(base.spec(), &saved, true), [expected], "{}", case.name);
        let outer = Lora::modules_to_save(base.spec(), &[if name == "norm" { "self_attn" } else { "linear_attn" }]);
        assert!(outer.is_err(), "{}", case.name);
    }
}

/// An engine over the base of `case` with adapters of `targets` that add nothing yet, and that no step changes.
fn untrained(case: &Case, dora: bool, targets: BTreeSet<ModuleId>) -> TrainEngine {
    let base = ModelFolder::open(&case.folder).unwrap();
    let lora = Lora { r: 2, alpha: 3.0, dropout: 0.0, rslora: false, dora, targets, modules_to_save: BTreeSet::new() };
    let spec = ModelSpec { lora: Some(lora), ..base.spec().clone() };
    let over = over_folder(&case.folder, &spec, Dtype::F32);
    let mut engine = case.engine_over(&spec, over, PrecisionPolicy::FP32, case.rows());
    engine.schedule.peak_lr = 0.0;
    engine.max_grad_norm = None;
    engine
}

/// Gives the adapters of `active` values of `initial` with an effect, and adapters of other layers values without one.
fn activate(engine: &TrainEngine, initial: &Parameters, active: &BTreeSet<ModuleId>) {
    for entry in engine.model.spec().parameters() {
        let at = values(initial.get(&entry.name).unwrap());
        let wave = |i: usize| 0.1 * ((i + entry.name.len()) as f64).sin();
        let value = |(i, value): (usize, f64)| match entry.role {
            ParamRole::LoraB if active.contains(&entry.layer) => wave(i) as f32,
            ParamRole::Magnitude if active.contains(&entry.layer) => (value * (1.0 + wave(i))) as f32,
            _ => value as f32,
        };
        let tensor = Tensor::from_iter(at.into_iter().enumerate().map(value), &Device::Cpu).unwrap();
        let parameter = engine.state.weights.get(&entry.name).unwrap();
        parameter.slice_set(&tensor.reshape(parameter.shape()).unwrap(), 0, 0).unwrap();
    }
}

/// Compares every subset of the linear layers in all blocks, and each layer of the last block alone, with adapters on
/// all layers that add nothing outside of the subset; of most families only single layers and pairs. One family is also
/// tried with DoRA and with every set of kernels.
#[test]
fn every_subset_of_target_modules_has_the_gradients_of_all_of_them() {
    let first = Case::own("families/llama-biases").for_all_kernels();
    let first = first.into_iter().flat_map(|case| [(case.clone(), false), (case, true)]);
    let thorough =
        ["families/llama-biases", "families/mistral", "families/qwen2", "families/qwen3", "families/gemma3", "narrow"];
    let others = names("families").into_iter().filter(|name| !name.starts_with("llama"));
    let others = others.map(|name| format!("families/{name}")).chain(["narrow".to_owned()]);
    for (case, dora) in first.chain(others.map(|name| (Case::own(&name), false))) {
        let all = Lora::targets(ModelFolder::open(&case.folder).unwrap().spec(), &["all-linear"]).unwrap();
        let modules: Vec<_> = all.iter().map(|layer| layer.op).collect::<BTreeSet<_>>().into_iter().collect();
        let subset = |mask: usize| {
            let chosen = |layer: &&ModuleId| mask >> modules.iter().position(|op| *op == layer.op).unwrap() & 1 == 1;
            all.iter().filter(chosen).copied().collect::<BTreeSet<_>>()
        };
        let last = all.iter().filter(|layer| layer.block == all.last().unwrap().block);
        let is_tried = |mask: &usize| mask.count_ones() <= 2 || thorough.iter().any(|name| case.name == *name);
        let subsets =
            (1..1 << modules.len()).filter(is_tried).map(subset).chain(last.map(|layer| BTreeSet::from([*layer])));
        let mut whole = untrained(&case, dora, all.clone());
        let initial = whole.state.weights.deep_clone().unwrap();
        for targets in subsets {
            let what = format!("{}{} {targets:?}", case.name, if dora { " with DoRA" } else { "" });
            activate(&whole, &initial, &targets);
            let mut part = untrained(&case, dora, targets.clone());
            activate(&part, &initial, &targets);
            let [expected, found] = [&mut whole, &mut part].map(|e| e.step(&case.whole_batch(0)).unwrap().loss);
            assert!((expected - found).abs() < 1e-6 * expected, "{what}: loss {found}, not {expected}");
            let (mut expected, found) = (unscaled(&whole, 1.0), unscaled(&part, 1.0));
            expected.retain(|name, _| found.contains_key(name));
            assert_close(&what, &found, &expected, 1e-5, 1e-5);
        }
    }
}
