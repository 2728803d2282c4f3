//! What `finetune lab memory` predicts for a run is what the run took.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test stops at the first thing that is not as it should be"
)]

use std::path::Path;
use std::process::Command;

use finetune::data::{Tokenizer, grammar};
use serde_json::Value;

/// How far a prediction may be off.
const TOLERANCE: f64 = 0.1;

fn finetune(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    let output = command.args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Trains, asks the laboratory, and compares with the peak that the kernel has counted.
fn check(arguments: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    finetune(
        folder.path(),
        &[arguments, &["--run", "run", "--plain", "--steps", "3", "--init-scale", "65536"]].concat(),
    );
    let report = finetune(folder.path(), &["lab", "memory", "--run", "checkpoints/run", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    let (policy, measured) = (&report["measured"][0], report["measured"][1].as_f64().unwrap());
    let recipe = if arguments.contains(&"fp32") {
        "fp32"
    } else if arguments.contains(&"bf16") {
        "bf16_amp"
    } else {
        "fp16_amp"
    };
    let plan = report["plans"].as_array().unwrap().iter().find(|plan| plan["recipe"] == recipe).unwrap();
    let items = plan["engine"].as_array().unwrap();
    let predicted: f64 = items.iter().map(|item| item["bytes"].as_f64().unwrap()).sum();
    let error = predicted / measured - 1.0;
    println!(
        "{arguments:?} {policy}: predicted {:.1} MiB, measured {:.1} MiB, {:+.1} %",
        predicted / 1_048_576.0,
        measured / 1_048_576.0,
        error * 100.0
    );
    for item in items {
        println!("  {} {:.1}", item["group"], item["bytes"].as_f64().unwrap() / 1_048_576.0);
    }
    assert!(error.abs() <= TOLERANCE, "{arguments:?}: predicted {predicted}, measured {measured}");
}

#[test]
fn tiny() {
    for dtype in ["fp32", "fp16", "bf16"] {
        check(&["--dtype", dtype]);
    }
    check(&["--dtype", "fp16", "--grad-accum", "2"]);
}

/// The real architecture, with random weights and a tokenizer that needs no download.
#[test]
#[ignore = "trains 82 M parameters twice and writes two gigabytes; cargo test --test memory -- --ignored"]
fn distilgpt2() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (tokenizer, text) = (path("tokenizer.json"), path("text.txt"));
    std::fs::write(&tokenizer, Tokenizer::byte().json()).unwrap();
    std::fs::write(&text, grammar::text(1, 40_000)).unwrap();
    for dtype in ["fp32", "fp16"] {
        let model = ["--model", "distilgpt2", "--init", "random", "--tokenizer", &tokenizer, "--data", &text];
        check(&[&model[..], &["--dtype", dtype, "--batch-size", "4", "--seq-len", "32"]].concat());
    }
}
