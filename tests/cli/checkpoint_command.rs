//! `finetune checkpoint list|show|verify|prune|diff` as a user types them.

use crate::common::checkpoint::{Sample, names};
use crate::common::cli_fixture::CliFixture;
use finetune::store::checkpoint::{CheckpointKind, Run};
use std::fs;
use std::path::Path;

/// Two runs: `one` with steps 1 to 4, the second the best, and the weights of step 4; `two` with step 4.
fn runs() -> CliFixture {
    let fixture = CliFixture::empty();
    let mut one = Run::open(fixture.path("one")).unwrap();
    for (step, loss) in [(1, 3.0), (2, 1.25), (3, 2.0), (4, 2.5)] {
        Sample::with_loss(step, loss).save(&mut one).unwrap();
    }
    one.save(&Sample::new(4).contents(), CheckpointKind::Weights).unwrap();
    Sample::new(4).save(&mut Run::open(fixture.path("two")).unwrap()).unwrap();
    fixture
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[3000] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn list_shows_runs_with_the_latest_and_the_best() {
    let fixture = runs();
    fs::write(fixture.path("one/step-000003/manifest.json"), "{").unwrap();
    let (code, out, _) = fixture.output("checkpoint list .");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((code, lines.len()), (Some(0), 8), "{out}");
    assert_eq!(lines[0], "./one");
    assert!(lines[1].starts_with("  step-000001") && lines[1].ends_with("kB  validation loss 3.0000"), "{out}");
    assert!(lines[2].ends_with("validation loss 1.2500, the best"), "{out}");
    assert!(lines[3].starts_with("  step-000003      damaged: "), "{out}");
    assert!(lines[4].starts_with("* step-000004"), "{out}");
    assert!(lines[5].starts_with("  weights-000004"), "{out}");
    assert_eq!(lines[6], "./two");
    assert_eq!(fixture.said("checkpoint list two").lines().count(), 2);
    let json = fixture.json("checkpoint list . --json");
    assert_eq!(json.as_array().unwrap().len(), 6, "{json}");
    assert_eq!((&json[1]["path"], &json[1]["validation_loss"]), (&"./one/step-000002".into(), &1.25.into()));
    assert!(json[2]["bytes"].is_null() && json[2]["error"].is_string() && json[4]["kind"] == "weights", "{json}");

    fixture.assert_refused("checkpoint list", &["`checkpoints`"]);
    assert_eq!(
        fixture.refused("checkpoint list one/step-000001"),
        "error: checkpoint `one/step-000001`: no checkpoint found\n"
    );
}

#[test]
fn show_prints_the_contents_of_a_checkpoint() {
    let fixture = runs();
    let out = fixture.said("checkpoint show one");
    for expected in [
        "checkpoint   one/step-000004",
        "policy       p=f32,c=f16,g=f16,r=f32",
        "step         4, 3 of them applied",
        "loss scale   2^16, 1 clean steps",
        "position     epoch 0, row 4",
        "validation   loss 2.5000",
        "file         optimizer.safetensors",
    ] {
        assert!(out.contains(expected), "{expected}: {out}");
    }
    assert!(fixture.said("checkpoint show one/weights-000004").contains("4, weights only"));
    for path in ["one/step-000004/master.safetensors", "one/weights-000004/model.safetensors"] {
        flip(&fixture.path(path));
        let (code, out, err) = fixture.output(&format!("checkpoint show {}", path.rsplit_once('/').unwrap().0));
        assert_eq!((code, out.as_str()), (Some(2), ""));
        assert!(err.contains(path) && err.contains("contents changed"), "{err}");
    }
}

#[test]
fn verify_names_every_damaged_file_and_fails() {
    let fixture = runs();
    let (code, out, _) = fixture.output("checkpoint verify .");
    assert_eq!((code, out.lines().last()), (Some(0), Some("6 of 6 checkpoints are good")));
    flip(&fixture.path("one/step-000002/master.safetensors"));
    fs::remove_file(fixture.path("one/step-000002/state.json")).unwrap();
    fs::remove_file(fixture.path("two/step-000004/manifest.json")).unwrap();
    let (code, out, _) = fixture.output("checkpoint verify .");
    assert_eq!(code, Some(1));
    for expected in [
        "damaged  `./one/step-000002/master.safetensors`: its contents changed since it was written (SHA-256 differs)",
        "damaged  `./one/step-000002/state.json`: it is missing",
        "damaged  `./two/step-000004/manifest.json`: it is missing",
        "good     ./one/step-000001",
        "4 of 6 checkpoints are good",
    ] {
        assert!(out.lines().any(|line| line == expected), "{expected}: {out}");
    }
    assert_eq!(fixture.output("checkpoint verify two/step-000004").0, Some(1));
    assert_eq!(fixture.output("checkpoint verify one/step-000001").0, Some(0));
}

#[test]
fn prune_keeps_the_last_the_best_and_what_a_run_can_be_resumed_from() {
    let fixture = runs();
    assert_eq!(
        fixture.said("checkpoint prune one --keep-last 1 --dry-run"),
        "would delete one/step-000001\nwould delete one/step-000003\n"
    );
    assert_eq!(names(fixture.path("one")).len(), 2 + 5);

    // The newest is damaged without a change of size: the previous one must stay.
    flip(&fixture.path("one/step-000004/master.safetensors"));
    assert_eq!(fixture.said("checkpoint prune one --keep-last 1"), "deleted one/step-000001\n");
    assert_eq!(
        fixture.said("checkpoint prune one --keep-last 1 --no-best --damaged"),
        "deleted one/step-000002\ndeleted one/step-000004\n"
    );
    assert_eq!(fixture.said("checkpoint prune one --keep-last 1"), "nothing to delete\n");
    assert_eq!(names(fixture.path("one")), [".lock", "latest", "step-000003", "weights-000004"]);
    assert_eq!(fixture.output("checkpoint verify .").0, Some(0));
}

/// A program that reads their format can still use them.
#[test]
fn checkpoints_of_another_format_are_not_damaged() {
    let fixture = runs();
    for path in ["one/step-000002", "one/weights-000004"] {
        let manifest = fixture.path(path).join("manifest.json");
        let text = fs::read_to_string(&manifest).unwrap();
        fs::write(manifest, text.replacen("\"format_version\": ", "\"format_version\": 9", 1)).unwrap();
    }
    let out = fixture.said("checkpoint list one");
    assert!(out.contains("step-000002      unread: ") && out.contains("is newer than"), "{out}");
    let (_, out, _) = fixture.output("checkpoint verify one");
    assert!(out.contains("unread   `one/step-000002/manifest.json`: format version 9"), "{out}");
    assert_eq!(fixture.said("checkpoint prune one --keep-last 3 --damaged"), "nothing to delete\n");
}

#[test]
fn prune_rejects_running_runs_and_other_folders() {
    let fixture = runs();
    fixture.assert_refused("checkpoint prune one --keep-last 0", &["'0'", "--keep-last"]);
    let err = fixture.refused("checkpoint prune .");
    assert!(err.contains("contains no checkpoint; use the folder of one run"), "{err}");
    assert!(!fixture.path(".lock").exists());
    let _training = Run::open(fixture.path("one")).unwrap();
    fixture.assert_refused("checkpoint prune one --keep-last 1", &["is using this run"]);
    flip(&fixture.path("two/step-000004/master.safetensors"));
    fixture.assert_refused("checkpoint prune two --damaged", &["this run has no valid checkpoint"]);
}

#[test]
fn diff_names_tensors_and_figures() {
    let fixture = runs();
    let (code, out, _) = fixture.output("checkpoint diff one/step-000004 two");
    assert_eq!(code, Some(1));
    assert_eq!(out, "state.json: 1 with other values\n\nstate.json: `validation_loss`: 2.5 and null\n");
    let (code, out, _) = fixture.output("checkpoint diff one/step-000001 one/step-000002");
    assert_eq!(code, Some(1));
    assert!(out.contains("state.json: `step`: 1 and 2\n"), "{out}");
    assert!(out.contains("master.safetensors: `wte.weight`: 136 of 136 values differ, the first at 0"), "{out}");
    assert!(out.lines().take_while(|line| !line.is_empty()).all(|line| line.ends_with(" with other values")), "{out}");
    // Another shape and another tensor.
    let [a, b] = ["one/step-000001", "one/step-000002"].map(|step| fixture.path(step));
    let mut weights = fs::read(b.join("model.safetensors")).unwrap();
    let name = weights.windows(10).position(|name| name == b"wte.weight").unwrap();
    weights[name..name + 3].copy_from_slice(b"wtx");
    fs::write(b.join("model.safetensors"), weights).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(a.join("config.json")).unwrap()).unwrap();
    config["n_layer"] = 99.into();
    fs::write(b.join("config.json"), config.to_string()).unwrap();
    let (_, out, _) = fixture.output("checkpoint diff one/step-000001 one/step-000002");
    assert!(out.starts_with("the models differ in `n_layer`\nconfig.json: 1 with other values\n"), "{out}");
    assert!(out.contains("model.safetensors: 1 only in the first, 1 only in the second, "), "{out}");
    assert_eq!(
        fixture.said("checkpoint diff two two/step-000004"),
        "`two/step-000004` and `two/step-000004` are bit-identical\n"
    );
}
