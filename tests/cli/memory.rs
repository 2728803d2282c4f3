//! The prediction of `finetune lab memory` for a run matches the run's measured memory.

use crate::common::cli_fixture::CliFixture;
use candle_core::{Device, Tensor};
use finetune::data::{Tokenizer, grammar};
use finetune::engine::model::{ModelSpec, Parameters};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// How far a prediction may be off.
const TOLERANCE: f64 = 0.1;
/// The tolerance if the tokenizer takes most of the memory. It is measured by reading it, and training reuses part of
/// the memory that reading frees: predictions were from 11 % too low to 3 % too high.
const TOKENIZER_TOLERANCE: f64 = 0.2;

/// Trains, asks the laboratory, and compares with the peak that the kernel has counted.
fn check(line: &str, tolerance: f64) {
    let fixture = CliFixture::empty();
    train(&fixture, line);
    predict(&fixture, line, tolerance);
}

/// Checks a run whose second process resumed from a checkpoint.
fn check_resumed(line: &str, tolerance: f64) {
    let fixture = CliFixture::empty();
    train(&fixture, line);
    fixture.said("--resume run --steps 6 --plain");
    predict(&fixture, line, tolerance);
}

fn train(fixture: &CliFixture, line: &str) {
    // A sample of the default number of tokens takes longer than the steps.
    fixture.said(&format!(
        "--set train.sample_tokens=8 {line} --run run --plain --steps 3 --init-scale 65536 --set train.eval_batches=1"
    ));
}

fn predict(fixture: &CliFixture, line: &str, tolerance: f64) {
    let report = fixture.json("lab memory --run checkpoints/run --json");
    let run = &report["measured"];
    let policy = format!("{}{}", run["policy"], run["recipe"]);
    let measured = run["peak"].as_f64().unwrap();
    let items = run["engine"].as_array().unwrap();
    let predicted: f64 = items.iter().map(|item| item["bytes"].as_f64().unwrap()).sum();
    let error = predicted / measured - 1.0;
    println!(
        "{line} {policy}: predicted {:.1} MiB, measured {:.1} MiB, {:+.1} %",
        predicted / 1_048_576.0,
        measured / 1_048_576.0,
        error * 100.0
    );
    for item in items {
        println!("  {} {:.1}", item["group"], item["bytes"].as_f64().unwrap() / 1_048_576.0);
    }
    assert!(error.abs() <= tolerance, "{line}: predicted {predicted}, measured {measured}");
}

#[test]
fn tiny() {
    for line in [
        "--dtype fp32",
        "--dtype fp16",
        "--dtype bf16",
        "--dtype fp16 --grad-accum 2",
        "--dtype fp16 --set telemetry.probe_every=1",
        "--dtype bf16 --batch-size 32 --gradient-checkpointing",
    ] {
        check(line, TOLERANCE);
    }
}

/// A vocabulary of 50,257 tokens over a model of a few million weights: the tokenizer takes as much as a third of the
/// whole. Once from a folder, whose file is mapped while its weights are read, once with FP32 probes, once resumed.
#[test]
fn a_large_vocabulary_with_and_without_probes() {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary = 50_257;
    let spec = ModelSpec { vocab_size: vocabulary, ..ModelSpec::named("distilgpt2").unwrap().resized(2, 64, 2) };
    let path = save(folder.path(), &spec, tokenizer(vocabulary).as_bytes());
    let shape = format!("--model {path} --data grammar --dtype fp16 --batch-size 2 --seq-len 32");
    check(&shape, TOKENIZER_TOLERANCE);
    check(&format!("{shape} --set telemetry.probe_every=2"), TOKENIZER_TOLERANCE);
    check_resumed(&shape, TOKENIZER_TOLERANCE);
}

/// A folder with a model of random weights.
fn save(folder: &Path, spec: &ModelSpec, tokenizer: &[u8]) -> String {
    let model = folder.join("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join("config.json"), spec.to_json("float32")).unwrap();
    std::fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
    let weights = Parameters::random(&spec.parameters(), 1, &Device::Cpu).unwrap();
    let named: HashMap<String, Tensor> =
        weights.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    candle_core::safetensors::save(&named, model.join("model.safetensors")).unwrap();
    model.display().to_string()
}

const SHAPE: &str = "--data grammar --batch-size 4 --seq-len 64";

/// A folder with a model of `blocks` blocks of width `width`, over bytes.
fn of_width(folder: &Path, blocks: usize, width: usize) -> String {
    let spec = ModelSpec { vocab_size: 257, ..ModelSpec::named("distilgpt2").unwrap().resized(blocks, width, 8) };
    save(folder, &spec, Tokenizer::byte().json())
}

/// Twelve million weights: whole with 16 bytes each, or ten with moments in 8 bits; under adapters with two, and with
/// one where they stay in blocks.
#[test]
fn adapters_are_predicted_as_such() {
    let fixture = CliFixture::empty();
    let path = of_width(fixture.folder(), 4, 512);
    let quantized = fixture.path("model.gguf").display().to_string();
    fixture.said(&format!("export {path} {quantized} --dtype q8_0"));
    let shape = format!("{SHAPE} --dtype bf16 --model");
    check(&format!("{shape} {path}"), TOLERANCE);
    // A save makes no copy of the moments.
    check(&format!("{shape} {path} --optimizer adamw8bit"), TOLERANCE);
    for base in [&path, &quantized] {
        check(&format!("{shape} {base} --lora r=8,alpha=16"), TOLERANCE);
        // A probe copies a dense base to FP32, and shares blocks.
        check(&format!("{shape} {base} --lora r=8,alpha=16 --set telemetry.probe_every=2"), TOLERANCE);
    }
    // Keys and values of a long text sample were not counted: with the packed buffers, the prediction was 19 % too low.
    check(&format!("{shape} {quantized} --lora r=8,alpha=16 --set train.sample_tokens=900"), TOLERANCE);
}

/// The table of a large vocabulary, 98 MiB in FP32, is read some rows at a time: whole, it would take more than the
/// rest.
#[test]
fn a_frozen_table_is_read_in_parts() {
    let fixture = CliFixture::empty();
    let spec = ModelSpec { vocab_size: 50_000, ..ModelSpec::named("distilgpt2").unwrap().resized(1, 512, 8) };
    let path = save(fixture.folder(), &spec, Tokenizer::byte().json());
    let quantized = fixture.path("model.gguf").display().to_string();
    fixture.said(&format!("export {path} {quantized} --dtype q8_0"));
    // A GGUF file has a separate vocabulary, and the memory that reading its 50,000 tokens leaves with the allocator is
    // not counted.
    for (base, tolerance) in [(&path, TOLERANCE), (&quantized, 0.15)] {
        let line = "--data grammar --batch-size 1 --seq-len 32 --dtype bf16 --lora r=8,alpha=16";
        check(&format!("{line} --model {base}"), tolerance);
    }
}

/// One wide block over many tokens: without packed operands and partial sums the prediction was 17 % too low.
#[test]
fn packed_operands_are_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let path = of_width(folder.path(), 1, 1024);
    let line = "--data grammar --dtype bf16 --batch-size 4 --seq-len 512 --lora r=8,alpha=16";
    check(&format!("{line} --model {path}"), TOLERANCE);
}

/// A probe widens masters that are not in FP32.
#[test]
fn a_probe_of_narrow_masters_is_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let path = of_width(folder.path(), 4, 512);
    let narrow = "--dtype p=bf16,c=bf16,g=bf16,r=f32 --set telemetry.probe_every=2";
    check(&format!("{SHAPE} {narrow} --model {path}"), TOLERANCE);
}

/// A byte-level BPE of `tokens` tokens: the bytes, and pairs of earlier tokens.
fn tokenizer(tokens: usize) -> String {
    let mut json: Value = serde_json::from_slice(Tokenizer::byte().json()).unwrap();
    let mut vocabulary = json["model"]["vocab"].as_object().unwrap().clone();
    let mut names: Vec<String> = vocabulary.keys().filter(|name| name.chars().count() == 1).cloned().collect();
    names.sort();
    let mut merges = Vec::new();
    let bytes = names.len();
    'grown: for second in 0.. {
        for first in 0..bytes * bytes {
            // The end-of-text token comes last.
            if vocabulary.len() + 1 == tokens {
                break 'grown;
            }
            let pair = (names[first % names.len()].clone(), names[(first / bytes + second) % bytes].clone());
            let name = format!("{}{}", pair.0, pair.1);
            if !vocabulary.contains_key(&name) {
                vocabulary.insert(name.clone(), vocabulary.len().into());
                merges.push(Value::from(vec![pair.0, pair.1]));
                names.push(name);
            }
        }
    }
    json["model"]["vocab"] = vocabulary.into();
    json["model"]["merges"] = merges.into();
    json.to_string()
}

/// The real architecture, with random weights and a tokenizer that needs no download.
#[test]
#[ignore = "trains 82 M parameters twice and writes two gigabytes; .ci/full runs it"]
fn distilgpt2() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (tokenizer, text) = (path("tokenizer.json"), path("text.txt"));
    std::fs::write(&tokenizer, Tokenizer::byte().json()).unwrap();
    std::fs::write(&text, grammar::text(1, 40_000)).unwrap();
    for dtype in ["fp32", "fp16"] {
        let model = format!("--model distilgpt2 --init random --tokenizer {tokenizer} --data {text}");
        check(&format!("{model} --dtype {dtype} --batch-size 4 --seq-len 32"), TOLERANCE);
    }
}
