//! The verdict of `fp16-check` compared with actual training.

use crate::common::launch;
use finetune::data::{TokenSource, grammar};
use finetune::engine::device::OpenDevice;
use finetune::engine::kernels::view;
use finetune::engine::model::{Decoder, Parameters};
use finetune::inference::fp16_check::{Extent, Fp16Report, Verdict, fp16_check};
use finetune::inference::trained::TrainedModel;
use finetune::precision::{Dtype, PrecisionUnit};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn finetune(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let mut command = launch::program();
    let output = command.args(arguments).current_dir(folder).output().unwrap();
    // A verdict is an exit code too. A phase that takes long is named on standard error.
    let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
    (output.status.code().unwrap(), String::from_utf8_lossy(&text).into_owned())
}

/// `tiny`, trained for some steps, as a Hugging Face folder.
fn trained(folder: &Path, steps: &str) -> PathBuf {
    let train = ["--run", "r", "--steps", steps, "--plain", "--set", "train.eval_batches=1"];
    let (code, text) = finetune(folder, &train);
    assert_eq!(code, 0, "{text}");
    let (code, text) = finetune(folder, &["export", "r", "model"]);
    assert_eq!(code, 0, "{text}");
    folder.join("model")
}

fn check(masters: Parameters, model: &TrainedModel) -> Fp16Report {
    let tokens = TokenSource::from_ids(grammar::text(1, 20_000).bytes().map(u32::from).collect());
    let extent = Extent { batches: 2, batch_size: 2, seq_len: 64 };
    let decoder = Decoder::new(&model.config, &masters, OpenDevice::cpu().kernels).unwrap();
    fp16_check(&decoder, masters, tokens, extent, |_, _| ()).unwrap()
}

/// Multiplies what `of` picks of a parameter.
fn scale(masters: &Parameters, name: &str, factor: f32, of: impl Fn(usize) -> bool) {
    view::write_f32(masters.get(name).unwrap(), |values| {
        for (_, value) in values.iter_mut().enumerate().filter(|(i, _)| of(*i)) {
            *value *= factor;
        }
    })
    .unwrap();
}

#[test]
#[ignore = "more than a minute; .ci/run runs it"]
fn the_verdict_is_what_training_shows() {
    let folder = tempfile::tempdir().unwrap();
    let path = trained(folder.path(), "30");
    let model = TrainedModel::open(&path, None).unwrap();

    // A model of its kind trains in FP16, and 200 steps of training skip next to none.
    let report = check(model.weights(Dtype::F32).unwrap(), &model);
    assert_eq!(report.verdict, Verdict::Fp16, "{report:?}");
    let scale_said = format!("scaler.init_scale={}", report.best_scale);
    let log = |run: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(folder.path().join("checkpoints").join(run).join("events.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let train = ["--model", "model", "--data", "grammar", "--dtype", "fp16", "--plain", "--steps", "200"];
    let more = ["--run", "plain", "--set", &scale_said, "--set", "train.eval_batches=1"];
    assert_eq!(finetune(folder.path(), &[&train[..], &more[..]].concat()).0, 0);
    let finished = log("plain")
        .into_iter()
        .find_map(|event| event.get("finished").cloned().or_else(|| (event["event"] == "finished").then_some(event)))
        .unwrap();
    assert!(finished["skipped"].as_u64().unwrap() <= 2, "{finished}");

    // A hidden unit whose activations leave the range, and what reads it makes up for it: the block and tensor are named.
    let masters = model.weights(Dtype::F32).unwrap();
    let (inner, width, factor) = (model.config.inner, model.config.width, 1e6);
    scale(&masters, "h.1.mlp.c_fc.weight", factor, |i| i % inner == 7);
    scale(&masters, "h.1.mlp.c_fc.bias", factor, |i| i == 7);
    scale(&masters, "h.1.mlp.c_proj.weight", 1.0 / factor, |i| i / width == 7);
    let report = check(masters, &model);
    let Verdict::Fp16WithFallback { units } = &report.verdict else { panic!("{report:?}") };
    assert_eq!(units, &[PrecisionUnit::Block(1)]);
    let block = report.units.iter().find(|unit| unit.unit == PrecisionUnit::Block(1)).unwrap();
    assert!(block.activation.tensor.starts_with("h.1.mlp.") && block.activation.max_abs > 65504.0, "{block:?}");

    // With a smaller factor it fits, and the scale is what its gradient allows, which is enough for the others.
    let masters = model.weights(Dtype::F32).unwrap();
    scale(&masters, "h.1.mlp.c_fc.weight", 4096.0, |i| i % inner == 7);
    scale(&masters, "h.1.mlp.c_fc.bias", 4096.0, |i| i == 7);
    scale(&masters, "h.1.mlp.c_proj.weight", 1.0 / 4096.0, |i| i / width == 7);
    let smaller = check(masters, &model);
    assert_eq!(smaller.verdict, Verdict::Fp16, "{smaller:?}");
    let block = smaller.units.iter().find(|unit| unit.unit == PrecisionUnit::Block(1)).unwrap();
    assert_eq!(block.gradient.tensor, "h.1.mlp.c_proj weight gradient");
    assert!(smaller.best_scale < report.best_scale / 4.0, "{} {}", smaller.best_scale, report.best_scale);

    // Where every block is like that, only another type helps.
    let masters = model.weights(Dtype::F32).unwrap();
    for block in 0..model.config.layers {
        scale(&masters, &format!("h.{block}.mlp.c_fc.weight"), factor, |i| i % inner == 7);
        scale(&masters, &format!("h.{block}.mlp.c_fc.bias"), factor, |i| i == 7);
    }
    let report = check(masters, &model);
    assert!(matches!(&report.verdict, Verdict::Bf16 { reason } if reason.contains("units")), "{report:?}");
}

#[test]
fn the_command_says_it_in_text_json_and_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    trained(folder.path(), "10");
    let (code, text) =
        finetune(folder.path(), &["fp16-check", "model", "--data", "grammar", "--batches", "1", "-l", "32"]);
    assert!(code == 0 && text.contains("verdict: fp16 (") && text.contains("h.3"), "{code} {text}");
    let json = ["fp16-check", "model", "--data", "grammar", "--batches", "1", "-l", "32", "--json"];
    let (_, text) = finetune(folder.path(), &json);
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((report["verdict"].as_str(), report["units"].as_array().unwrap().len()), (Some("fp16"), 5));
    for nonsense in [["--batches", "0"], ["-l", "4096"]] {
        let (code, text) =
            finetune(folder.path(), &[&["fp16-check", "model", "--data", "grammar"][..], &nonsense[..]].concat());
        assert!(code == 2 && text.contains("error: "), "{code} {text}");
    }
}
