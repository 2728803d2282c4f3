//! Python's transformers loads a checkpoint as the model folder that it is, and computes the same loss from it.
//!
//! Needs a Python with PyTorch and transformers in `FINETUNE_PYTHON`, as `.ci/python-env` makes one. Without it the test
//! says so and passes, but for CI, where it fails.
#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is not as it should be")]

mod common {
    pub(crate) mod compare;
    pub(crate) mod engine;
    pub(crate) mod golden;
    pub(crate) mod oracle;
}

use std::path::{Path, PathBuf};
use std::process::Command;

use common::compare::skip;
use common::golden::Case;
use finetune::checkpoint::{Contents, FORMAT_VERSION, Identity, Kind, Run, State, Tensors};
use finetune::data::{Batch, Tokenizer};
use finetune::model::Parameters;
use finetune::precision::PrecisionPolicy;
use finetune::train::Engine;
use serde_json::{Value, json};

#[test]
fn transformers_computes_the_same_loss_from_a_checkpoint() {
    let Some(python) = std::env::var_os("FINETUNE_PYTHON").map(PathBuf::from).filter(|python| python.is_file()) else {
        return skip("`FINETUNE_PYTHON` names no Python; `.ci/python-env DIR` makes one");
    };
    let folder = tempfile::tempdir().unwrap();
    for (name, policy, dtype) in [
        ("deep", PrecisionPolicy::FP32, "float32"),
        ("deep", PrecisionPolicy::FP16, "float16"),
        ("untied", PrecisionPolicy::BF16, "bfloat16"),
    ] {
        let case = Case::own(name);
        let mut engine = case.engine(policy, case.rows());
        for step in 0..10 {
            engine.step(&case.whole_batch(step)).unwrap();
        }
        let step_directory = save(&engine, policy, &folder.path().join(dtype));
        let expected = loss_of_stored_weights(&step_directory, &case);

        let report = ask_transformers(&python, &step_directory, &case);
        assert_eq!(report["dtype"], json!([dtype]));
        assert_eq!(report["text"], "The cat, ünder 3 tables.");
        let loss = report["loss"].as_f64().unwrap();
        assert!((loss - expected).abs() < 2e-6 * expected, "{name} {policy}: {loss} there, {expected} here");

        // What training sees differs from both by the rounding of its activations alone.
        let trained = evaluate(&mut engine, case.whole_batch(0).remove(0));
        assert!((trained - loss).abs() < 1e-2 * loss, "{name} {policy}: {trained} in training, {loss} from the folder");
    }
}

/// Writes a checkpoint the way training does, and returns its `step-*/`.
fn save(engine: &Engine, policy: PrecisionPolicy, run: &Path) -> PathBuf {
    let counters = engine.state.counters;
    let state = State {
        format_version: FORMAT_VERSION,
        step: counters.step,
        updates: counters.updates,
        tokens: counters.tokens,
        seed: engine.seed,
        identity: Identity { model: "golden".into(), policy: policy.to_string(), data: String::new() },
        scaler: serde_json::to_value(engine.state.scaler.state()).unwrap(),
        cursor: Value::Null,
        schedule: Value::Null,
        validation_loss: None,
        best: None,
    };
    let tokenizer = Tokenizer::byte();
    let contents = Contents {
        state: &state,
        config: engine.model.config(),
        tokenizer: tokenizer.json(),
        weights: named(&engine.state.weights),
        masters: named(engine.state.masters.parameters()),
        exp_avg: named(&engine.state.adamw.exp_avg),
        exp_avg_sq: named(&engine.state.adamw.exp_avg_sq),
    };
    Run::open(run).unwrap().save(&contents, Kind::Full).unwrap().path
}

fn named(parameters: &Parameters) -> Tensors {
    parameters.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect()
}

/// The engine's loss in FP32 from the weights in `folder`.
fn loss_of_stored_weights(folder: &Path, case: &Case) -> f64 {
    let case = Case { folder: folder.to_owned(), ..case.clone() };
    let mut engine = case.engine(PrecisionPolicy::FP32, case.rows());
    evaluate(&mut engine, case.whole_batch(0).remove(0))
}

fn evaluate(engine: &mut Engine, batch: Batch) -> f64 {
    let (mut buffer, mut batch) = (batch.clone(), Some(batch));
    let next = |buffer: &mut Batch| batch.take().map(|batch| *buffer = batch).is_some();
    engine.evaluate(&mut buffer, next).unwrap().0
}

fn ask_transformers(python: &Path, folder: &Path, case: &Case) -> Value {
    let (inputs, targets) = &case.batches[0];
    let batch = folder.parent().unwrap().join("batch.json");
    let rows = json!({"inputs": inputs.to_vec2::<i64>().unwrap(), "targets": targets.to_vec2::<i64>().unwrap()});
    std::fs::write(&batch, rows.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transformers_loss.py");
    let output = Command::new(python).arg(script).arg(folder).arg(&batch).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let (answer, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{complaint}");
    serde_json::from_str(answer.lines().last().unwrap_or_default())
        .unwrap_or_else(|e| panic!("{e}: {answer}{complaint}"))
}
