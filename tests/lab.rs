//! The laboratory's figures against numpy, PyTorch, `ml_dtypes` and torchao, and its replay against a real run.
//!
//! The libraries are looked for in the Python of `FINETUNE_PYTHON`. Without it the test says so and passes, but for CI,
//! where it fails.
#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is not as it should be")]

mod common {
    pub(crate) mod compare;
    pub(crate) mod python;
}

use std::path::Path;
use std::process::Command;

use common::python::{has_module, python, run_script};
use serde_json::{Map, Value};

fn finetune(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    let output = command.args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn report(folder: &Path, typed: &str) -> Value {
    let arguments: Vec<&str> = ["lab"].into_iter().chain(typed.split(' ')).chain(["--json"]).collect();
    serde_json::from_str(&finetune(folder, &arguments)).unwrap()
}

#[test]
fn the_libraries_compute_the_same_figures() {
    let Some(python) = python() else { return };
    if !has_module(&python, "ml_dtypes") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let views = [
        "bits pi",
        "bits 1e-8",
        "bits 65520",
        "bits 449",
        "bits 1000",
        "bits 1e-300",
        "ulp --center 1 --update 5e-5",
        "ulp --center 65504 --update 20",
        "ulp --center 448 --update 16",
        "ulp --center 3 --update -0.01",
        "sums --length 4096",
        "sums --length 4096 --terms tenths --dot",
        "sums --length 1024 --terms signed",
        "softmax --position 4095",
        "softmax --position 2049",
        "scaler --base growth_interval=50 --setting growth_interval=100 --seeds 100",
        "blocks",
        "blocks --outlier 10000 --seed 3",
        "blocks --outlier 1e-3 --remembered 0.25 --columns 128",
    ];
    let reports: Map<String, Value> =
        views.iter().map(|typed| ((*typed).to_owned(), report(folder.path(), typed))).collect();
    let path = folder.path().join("reports.json");
    std::fs::write(&path, serde_json::to_vec(&reports).unwrap()).unwrap();
    let answer = run_script(&python, "lab_figures.py", &[path.as_os_str()]);
    assert_eq!(answer["wrong"].as_object().unwrap().len(), views.len());
    for (view, wrong) in answer["wrong"].as_object().unwrap() {
        assert_eq!(wrong.as_array().unwrap().len(), 0, "{view}: {wrong}");
    }
}

/// Fed a run's largest gradients, the closed loop has the run's overflows: the same steps, the same scales.
#[test]
fn the_loop_reproduces_a_runs_overflows() {
    let folder = tempfile::tempdir().unwrap();
    let config = "model = \"tiny\"\ndata = \"grammar\"\ndtype = \"fp16\"\n[train]\nbatch_size = 2\nseq_len = 32\nsteps = 90\n\
                  eval_every = 0\nsample_tokens = 0\n[scaler]\ninit_scale = 16777216.0\ngrowth_interval = 8\n\
                  [checkpoint]\nsave_every = 0\n";
    std::fs::write(folder.path().join("run.toml"), config).unwrap();
    finetune(folder.path(), &["--config", "run.toml", "--run", "run", "--plain"]);
    let log = std::fs::read_to_string(folder.path().join("checkpoints/run/events.jsonl")).unwrap();
    let events = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps: Vec<(u64, f64, bool)> = events
        .filter(|event| event["event"] == "step")
        .map(|step| {
            let applied = step["outcome"] == "applied";
            (step["step"].as_u64().unwrap(), step["loss_scale"].as_f64().unwrap(), applied)
        })
        .collect();
    let overflows = steps.iter().filter(|(.., applied)| !applied).count();
    assert!(steps.len() == 90 && overflows >= 5, "{overflows} overflows in {} steps", steps.len());
    let replay = report(folder.path(), "scaler --run checkpoints/run");
    let attempts = replay["trajectories"][0]["attempts"].as_array().unwrap();
    let replayed: Vec<(u64, f64, bool)> = attempts
        .iter()
        .map(|attempt| {
            let finite = attempt["finite"].as_bool().unwrap();
            (attempt["step"].as_u64().unwrap(), attempt["scale"].as_f64().unwrap(), finite)
        })
        .collect();
    assert_eq!(replayed, steps);
}
