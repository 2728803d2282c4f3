//! `finetune checkpoint list|show|verify|prune|diff` as a user types them.

use std::fs;
use std::path::Path;

use crate::common::checkpoint::{Sample, folder, names};
use crate::common::launch;
use finetune::store::checkpoint::{Kind, Run};
use tempfile::TempDir;

/// Two runs: `one` with steps 1 to 4, the second the best, and the weights of step 4; `two` with step 4.
fn runs() -> TempDir {
    let folder = folder();
    let mut one = Run::open(folder.path().join("one")).unwrap();
    for (step, loss) in [(1, 3.0), (2, 1.25), (3, 2.0), (4, 2.5)] {
        Sample::with_loss(step, loss).save(&mut one).unwrap();
    }
    one.save(&Sample::new(4).contents(), Kind::Weights).unwrap();
    Sample::new(4).save(&mut Run::open(folder.path().join("two")).unwrap()).unwrap();
    folder
}

/// Runs `finetune checkpoint …` in `folder`: exit code, standard output, standard error.
fn finetune(folder: &Path, arguments: &str) -> (i32, String, String) {
    let mut command = launch::program();
    let output = command.arg("checkpoint").args(arguments.split(' ')).current_dir(folder).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[3000] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn list_shows_runs_with_the_latest_and_the_best() {
    let folder = runs();
    fs::write(folder.path().join("one/step-000003/manifest.json"), "{").unwrap();
    let (code, out, _) = finetune(folder.path(), "list .");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((code, lines.len()), (0, 8), "{out}");
    assert_eq!(lines[0], "./one");
    assert!(lines[1].starts_with("  step-000001") && lines[1].ends_with("kB  validation loss 3.0000"), "{out}");
    assert!(lines[2].ends_with("validation loss 1.2500, the best"), "{out}");
    assert!(lines[3].starts_with("  step-000003      damaged: "), "{out}");
    assert!(lines[4].starts_with("* step-000004"), "{out}");
    assert!(lines[5].starts_with("  weights-000004"), "{out}");
    assert_eq!(lines[6], "./two");
    assert_eq!(finetune(folder.path(), "list two").1.lines().count(), 2);

    let (code, _, err) = finetune(folder.path(), "list");
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("`checkpoints`"), "{err}");
    let (code, _, err) = finetune(folder.path(), "list one/step-000001");
    assert_eq!((code, err.as_str()), (2, "error: checkpoint `one/step-000001`: no checkpoint found\n"));
}

#[test]
fn show_prints_the_contents_of_a_checkpoint() {
    let folder = runs();
    let (code, out, _) = finetune(folder.path(), "show one");
    assert_eq!(code, 0);
    for expected in [
        "checkpoint   one/step-000004",
        "policy       p=f32,c=f16,g=f16,r=f32",
        "step         4, 3 of them applied",
        "loss scale   2^16, 1 clean steps",
        "cursor       epoch 0, window 4",
        "validation   loss 2.5000",
        "file         optimizer.safetensors",
    ] {
        assert!(out.contains(expected), "{expected}: {out}");
    }
    assert!(finetune(folder.path(), "show one/weights-000004").1.contains("4, weights only"));
    for path in ["one/step-000004/master.safetensors", "one/weights-000004/model.safetensors"] {
        flip(&folder.path().join(path));
        let (code, out, err) = finetune(folder.path(), &format!("show {}", path.rsplit_once('/').unwrap().0));
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains(path) && err.contains("contents changed"), "{err}");
    }
}

#[test]
fn verify_names_every_damaged_file_and_fails() {
    let folder = runs();
    let (code, out, _) = finetune(folder.path(), "verify .");
    assert_eq!((code, out.lines().last()), (0, Some("6 of 6 checkpoints are good")));
    flip(&folder.path().join("one/step-000002/master.safetensors"));
    fs::remove_file(folder.path().join("one/step-000002/state.json")).unwrap();
    fs::remove_file(folder.path().join("two/step-000004/manifest.json")).unwrap();
    let (code, out, _) = finetune(folder.path(), "verify .");
    assert_eq!(code, 1);
    for expected in [
        "damaged  `./one/step-000002/master.safetensors`: its contents changed since it was written (SHA-256 differs)",
        "damaged  `./one/step-000002/state.json`: it is missing",
        "damaged  `./two/step-000004/manifest.json`: it is missing",
        "good     ./one/step-000001",
        "4 of 6 checkpoints are good",
    ] {
        assert!(out.lines().any(|line| line == expected), "{expected}: {out}");
    }
    assert_eq!(finetune(folder.path(), "verify two/step-000004").0, 1);
    assert_eq!(finetune(folder.path(), "verify one/step-000001").0, 0);
}

#[test]
fn prune_keeps_the_last_the_best_and_what_a_run_can_be_resumed_from() {
    let folder = runs();
    let (code, out, _) = finetune(folder.path(), "prune one --keep-last 1 --dry-run");
    assert_eq!((code, out.as_str()), (0, "would delete one/step-000001\nwould delete one/step-000003\n"));
    assert_eq!(names(&folder.path().join("one")).len(), 2 + 5);

    // The newest is damaged without a change of size: the previous one must stay.
    flip(&folder.path().join("one/step-000004/master.safetensors"));
    let (code, out, _) = finetune(folder.path(), "prune one --keep-last 1");
    assert_eq!((code, out.as_str()), (0, "deleted one/step-000001\n"));
    let (code, out, _) = finetune(folder.path(), "prune one --keep-last 1 --no-best --damaged");
    assert_eq!((code, out.as_str()), (0, "deleted one/step-000002\ndeleted one/step-000004\n"));
    assert_eq!(finetune(folder.path(), "prune one --keep-last 1").1, "nothing to delete\n");
    assert_eq!(names(&folder.path().join("one")), [".lock", "latest", "step-000003", "weights-000004"]);
    assert_eq!(finetune(folder.path(), "verify .").0, 0);
}

#[test]
fn prune_rejects_running_runs_and_other_folders() {
    let folder = runs();
    let (code, _, err) = finetune(folder.path(), "prune .");
    assert_eq!(code, 2);
    assert!(err.contains("there is no checkpoint in this folder; give the folder of one run"), "{err}");
    assert!(!folder.path().join(".lock").exists());
    let _training = Run::open(folder.path().join("one")).unwrap();
    let (code, _, err) = finetune(folder.path(), "prune one --keep-last 1");
    assert_eq!(code, 2);
    assert!(err.contains("is using this run"), "{err}");
    flip(&folder.path().join("two/step-000004/master.safetensors"));
    let (code, _, err) = finetune(folder.path(), "prune two --damaged");
    assert_eq!(code, 2);
    assert!(err.contains("no checkpoint of this run is good"), "{err}");
}

#[test]
fn diff_names_tensors_and_figures() {
    let folder = runs();
    let (code, out, _) = finetune(folder.path(), "diff one/step-000004 two");
    assert_eq!(code, 1);
    assert_eq!(out, "state.json: `validation_loss`: 2.5 and null\n");
    let (code, out, _) = finetune(folder.path(), "diff one/step-000001 one/step-000002");
    assert_eq!(code, 1);
    assert!(out.contains("state.json: `step`: 1 and 2\n"), "{out}");
    assert!(out.contains("master.safetensors: `wte.weight`: 136 of 136 values differ, the first at 0"), "{out}");
    let (code, out, _) = finetune(folder.path(), "diff two two/step-000004");
    assert_eq!((code, out.as_str()), (0, "`two/step-000004` and `two/step-000004` are bit-identical\n"));
}
