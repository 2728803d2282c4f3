//! Python's transformers loads a checkpoint as the model folder that it is, and computes the same loss from it.
//!
//! Needs a Python with PyTorch and transformers in `FINETUNE_PYTHON`, as `.ci/python-env` makes one. Without it the
//! test prints a message and passes, except in CI, where it fails.

use crate::common::golden::Case;
use crate::common::launch;
use crate::common::python::{python, run_script};
use candle_core::Device;
use finetune::data::{Batch, BatchLoader, TokenSource, Tokenizer, grammar};
use finetune::engine::kernels::Fused;
use finetune::engine::model::{Decoder, ForwardMode, Workspace};
use finetune::precision::PrecisionPolicy;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const STEPS: &str = "6";

#[test]
fn transformers_computes_the_same_loss_from_a_checkpoint() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let batch = batch();
    let runs = [
        ("fp32", "float32", "tied"),
        ("fp16", "float16", "tied"),
        ("bf16", "bfloat16", "tied"),
        ("fp16", "float16", "separate"),
    ];
    let checkpoints = runs.map(|(dtype, _, head)| {
        let model = model_folder(&folder.path().join(format!("model-{dtype}-{head}")), head == "tied");
        train(&model, dtype, folder.path(), &format!("{dtype}-{head}"))
    });
    let reports = ask_transformers(&python, &checkpoints, &batch, &folder.path().join("batch.json"));
    assert_eq!(reports.len(), runs.len());
    for (report, (checkpoint, (_, torch_dtype, _))) in reports.iter().zip(checkpoints.iter().zip(runs)) {
        let name = checkpoint.display();
        assert_eq!(report["dtypes"], json!([torch_dtype]), "{name}");
        assert_eq!(report["text"], "The cat, ünder 3 tables.", "{name}");
        let loss = report["loss"].as_f64().unwrap();
        let expected = loss_of(checkpoint, &batch);
        assert!((loss - expected).abs() < 2e-6 * expected, "{name}: {loss} there, {expected} here");
    }
}

/// A model to train, whose vocabulary is the byte tokenizer's: `deep`, as it is or with a separate head.
fn model_folder(folder: &Path, tied: bool) -> PathBuf {
    std::fs::create_dir(folder).unwrap();
    let case = Case::own("deep");
    let mut tensors = case.parameters.clone();
    let mut config: Value = serde_json::from_slice(&std::fs::read(case.folder.join("config.json")).unwrap()).unwrap();
    if !tied {
        config["tie_word_embeddings"] = json!(false);
        tensors.insert("lm_head.weight".into(), (&tensors["wte.weight"] * 0.5).unwrap());
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer.json"), Tokenizer::byte().json()).unwrap();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    folder.to_owned()
}

/// Fine-tunes `model` with the program itself; the last step's directory.
fn train(model: &Path, dtype: &str, runs: &Path, run: &str) -> PathBuf {
    let mut command = launch::program();
    command.args(["--plain", "--steps", STEPS, "--batch-size", "4", "--seq-len", "32", "--dtype", dtype, "--run", run]);
    launch::succeed(command.args([Path::new("--model"), model, Path::new("--checkpoint-dir"), runs]));
    runs.join(run).join(format!("step-{STEPS:0>6}"))
}

fn batch() -> Batch {
    let tokens = TokenSource::from_ids(grammar::text(9, 2000).bytes().map(u32::from).collect());
    let mut loader = BatchLoader::new(tokens, 4, 32, 1).unwrap();
    let mut batch = loader.batch();
    loader.next_batch(&mut batch);
    batch
}

/// The engine's loss in FP32 from the weights in `folder`.
fn loss_of(folder: &Path, batch: &Batch) -> f64 {
    let (config, weights) = crate::common::engine::read_model(folder);
    let model = Decoder::new(&config, &weights, Arc::new(Fused)).unwrap();
    let shape = (batch.batch_size, batch.seq_len);
    let mut workspace =
        Workspace::for_evaluation(&config, PrecisionPolicy::FP32, (shape.0, shape.1), &Device::Cpu).unwrap();
    let tokens = batch.tokens();
    model.forward(&weights, tokens, ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    model.loss(&weights, &batch.labels, &workspace).unwrap() / batch.num_label_tokens as f64
}

fn ask_transformers(python: &Path, folders: &[PathBuf], batch: &Batch, file: &Path) -> Vec<Value> {
    let rows = |ids: &[u32]| ids.chunks(batch.seq_len).map(<[u32]>::to_vec).collect::<Vec<_>>();
    let text = json!({"inputs": rows(&batch.inputs), "targets": rows(&batch.labels)}).to_string();
    std::fs::write(file, text).unwrap();
    let arguments: Vec<&OsStr> =
        std::iter::once(file.as_os_str()).chain(folders.iter().map(|f| f.as_os_str())).collect();
    serde_json::from_value(run_script(python, "transformers_loss.py", &arguments)).unwrap()
}
