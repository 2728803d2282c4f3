//! The laboratory's figures against numpy, PyTorch, `ml_dtypes` and torchao, and its replay against a real run.
//!
//! The libraries are looked for in the Python of `FINETUNE_PYTHON`. Without it the test prints a message and passes,
//! except in CI, where it fails.

use crate::common::cli_fixture::CliFixture;
use crate::common::python::{python_with, run_script};
use serde_json::{Map, Value};

fn report(fixture: &CliFixture, typed: &str) -> Value {
    fixture.json(&format!("lab {typed} --json"))
}

#[test]
fn the_libraries_compute_the_same_figures() {
    let Some(python) = python_with("torchao") else { return };
    let fixture = CliFixture::empty();
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
        "blocks --outlier 1e-3 --stale-amax 0.25 --columns 128",
    ];
    let reports: Map<String, Value> =
        views.iter().map(|typed| ((*typed).to_owned(), report(&fixture, typed))).collect();
    let path = fixture.path("reports.json");
    std::fs::write(&path, serde_json::to_vec(&reports).unwrap()).unwrap();
    let answer = run_script(&python, "lab_figures.py", &[path.as_os_str()]);
    assert_eq!(answer.as_object().unwrap().len(), views.len());
    for (view, wrong) in answer.as_object().unwrap() {
        assert_eq!(wrong.as_array().unwrap().len(), 0, "{view}: {wrong}");
    }
}

/// Fed a run's largest gradients, the closed loop has the run's overflows: the same steps, the same scales. An FP32
/// probe before each step measures max|g| whether the step then overflows or not, so that nothing but scale × max|g|
/// decides: with this seed it always is a tenth or more from FP16's limit, where roundings would decide. Without probes
/// an overflow tells only that its scale was too large.
#[test]
fn the_loop_reproduces_a_runs_overflows() {
    let fixture = CliFixture::empty();
    let config = "seed = 2\nmodel = \"tiny\"\ndata = \"grammar\"\ndtype = \"fp16\"\n[train]\nbatch_size = 2\nseq_len = 32\nsteps = 90\n\
                  eval_every = 0\nsample_tokens = 0\n[scaler]\ninit_scale = 16777216.0\ngrowth_interval = 8\n\
                  [checkpoint]\nsave_every = 0\n[telemetry]\nprobe_every = 1\n";
    fixture.write("run.toml", config);
    fixture.said("--config run.toml --run run --plain");
    let log = std::fs::read_to_string(fixture.path("checkpoints/run/events.jsonl")).unwrap();
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
    let replay = |run: &str| -> (Vec<(u64, f64, bool)>, f64) {
        let replay = report(&fixture, &format!("scaler --run {run}"));
        let attempts = replay["trajectories"][0]["attempts"].as_array().unwrap().iter();
        let largest = attempts.clone().filter_map(|attempt| attempt["largest"].as_f64()).fold(0.0, f64::max);
        let steps = attempts.map(|attempt| {
            let finite = attempt["finite"].as_bool().unwrap();
            (attempt["step"].as_u64().unwrap(), attempt["scale"].as_f64().unwrap(), finite)
        });
        (steps.collect(), largest)
    };
    let (replayed, largest) = replay("checkpoints/run");
    assert_eq!(replayed, steps);
    let probed = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let probed =
        probed.filter(|event| event["event"] == "fp32_probe").map(|probe| probe["grads"]["max_abs"].as_f64().unwrap());
    let measured = probed.fold(0.0, f64::max);
    assert!((largest / measured - 1.0).abs() < 1e-6, "the series is the probes': {largest} {measured}");

    let kept: Vec<&str> = log.lines().filter(|line| !line.contains(r#""event":"fp32_probe""#)).collect();
    fixture.write("unprobed/events.jsonl", kept.join("\n") + "\n");
    assert_eq!(replay("unprobed").0, steps);
}

/// Each of the views that can begins with a run's own numbers.
#[test]
fn views_take_their_numbers_from_a_run() {
    let fixture = CliFixture::empty();
    let train = "--run r --plain --steps 8 --batch-size 2 --seq-len 48 --dtype bf16 --lr 2e-4 --set train.eval_batches=1 \
                 --set telemetry.probe_every=3";
    fixture.said(train);
    let run = fixture.run("r");
    let log = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |view: &str| report(&fixture, &format!("{view} --run checkpoints/r"));
    let all = |event: &'static str| events.iter().filter(move |one| one["event"] == event);
    let started = all("started").next().unwrap();

    let sums = of("sums");
    let inner = 4 * started["shape"]["n_embd"].as_u64().unwrap();
    assert_eq!(sums["lengths"].as_array().unwrap().last().unwrap(), inner, "{}", sums["lengths"]);

    let logits = all("fp32_probe").flat_map(|probe| probe["activations"].as_array().unwrap());
    let logits =
        logits.filter(|activation| activation["name"] == "lm_head").map(|logit| logit["max_abs"].as_f64().unwrap());
    let softmax = of("softmax");
    assert_eq!(softmax["length"], 48);
    let largest = logits.fold(0.0, f64::max);
    assert!(largest > 0.0 && (softmax["logit"].as_f64().unwrap() / largest - 1.0).abs() < 1e-6, "{softmax}");

    let gradients = |key: &'static str| all("step").map(move |step| step["grads"][key].as_f64().unwrap());
    let failures = of("failures");
    let close = |key: &str, expected: f64| {
        let found = failures[key].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 1e-6, "{key}: {found} {expected}");
    };
    close("small", gradients("min_abs").fold(f64::INFINITY, f64::min));
    close("large", gradients("max_abs").fold(0.0, f64::max));
    close("update", all("step").map(|step| step["lr"].as_f64().unwrap()).fold(0.0, f64::max));
    close("scale", 1.0);

    let dtypes = of("dtypes");
    assert_eq!(dtypes["policy"], started["policy"]);
    assert!(dtypes["policy"].as_str().unwrap().contains("c=bf16"));

    // The matrix is the checkpoint's, bit for bit.
    let blocks = of("blocks");
    let (name, _) = blocks["source"].as_str().unwrap().split_once(" of ").unwrap();
    let latest = std::fs::read_to_string(run.join("latest")).unwrap();
    let masters = std::fs::read(run.join(latest.trim()).join("master.safetensors")).unwrap();
    let masters = safetensors::SafeTensors::deserialize(&masters).unwrap();
    let matrix = masters.tensor(name).unwrap();
    let values = matrix.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let shown = blocks["tensor"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32);
    assert!(values.eq(shown), "{name} is another");
}

/// Each entry of the page on common mistakes has a command that shows the correct result.
#[test]
fn the_commands_of_the_folklore_show_what_it_says() {
    const SHOWN: [(&str, &str); 20] = [
        ("bits pi", "stored  3.140625  error 9.677e-4"),
        ("bits 0.99995", "stored  1  error 5.000e-5"),
        ("ranges 6e-8 6.1e-5", "6e-8                 ● normal    ◐ subn"),
        ("bits 2^-12", "stored  0.000244140625  no error"),
        ("ulp --center 1 --update 0.05", "FP8 E4M3       2^-3 ✕ lost                     1         > 2^-4"),
        ("bits 50256", "stored  50240  error 1.600e1"),
        ("ulp --center 1 --update 0.001", "BF16           2^-7 ✕ lost"),
        ("scaler --base growth_interval=50 --seeds 100", "31.00 ± 0.21"),
        ("underflow --scale 30", "overflow 2.28 %"),
        ("bits 100000", "inf by overflow"),
        ("sums --terms tenths --length 65536", "sequential BF16 summation stagnates at 32 from term 276"),
        (
            "sums --terms tenths --length 1048576",
            "BF16  Kahan               0 %      0 %   0.49 %   0.98 %  68.78 %  92.20 %",
        ),
        ("memory --model 7b --batch 10 --seq 2048", "FP16 or BF16 10.7 GB"),
        ("memory --model 7b --batch 1 --seq 2048 --memory 80GB", "-26.6G   none"),
        ("memory --model 70B --batch 1 --seq 2048 --memory 80GB", "FP16 AMP          142G"),
        ("memory --model gpt2 --batch 1", "FP16 AMP          249M   498M   249M   996M"),
        ("memory --model 7b --batch 1 --seq 2048", "FP16 AMP     115G     138G"),
        ("memory --model gpt2", "–   498M   498M   996M"),
        ("softmax --logit 2 --length 65536", "2.644e-4"),
        ("softmax --position 4095", "BF16              2^12      -0.59375"),
    ];
    let folklore = include_str!("../../docs/folklore.md");
    let entries = folklore.lines().filter(|line| line.contains("`finetune lab")).count();
    // One is for a run with probes; `views_take_their_numbers_from_a_run` checks its figures.
    assert_eq!(entries, SHOWN.len() + 1);
    let fixture = CliFixture::empty();
    for (view, shown) in SHOWN {
        assert!(folklore.contains(&format!("`finetune lab {view}` |")), "no entry has `{view}`");
        let text = fixture.said(&format!("lab {view}"));
        assert!(text.contains(shown), "`{view}` does not show `{shown}`:\n{text}");
    }
}
