//! Guarantees of checkpoints: order, rotation, damage reports, fallback, locking.

use crate::common::checkpoint::{Sample, TOKENIZER, names, set, values, zeros};
use finetune::engine::model::{ModelSpec, Parameters};
use finetune::store::ModelFolder;
use finetune::store::checkpoint::{
    Checkpoint, CheckpointKind, Contents, RetentionPolicy, Run, best, compare, latest_run, latest_valid, list, verify,
};
use finetune::telemetry::EventLog;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn steps(run: &Path) -> Vec<String> {
    names(run).into_iter().filter(|name| CheckpointKind::parse_directory(name).is_some()).collect()
}

#[test]
fn what_is_saved_comes_back_bit_for_bit() {
    let folder = tempdir().unwrap();
    let sample = Sample::new(128);
    let saved = sample.save(&mut Run::open(folder.path().join("run")).unwrap()).unwrap();
    assert_eq!(saved.path.file_name().unwrap(), "step-000128");

    let checkpoint = Checkpoint::open(&saved.path).unwrap();
    assert_eq!(checkpoint.state(), &sample.state);
    assert_eq!(checkpoint.spec(), &sample.spec);
    assert_eq!(checkpoint.manifest(), &saved.manifest);
    assert_eq!(fs::read(checkpoint.tokenizer()).unwrap(), TOKENIZER);
    let read = zeros(&sample.spec);
    let assert_reads = |expected: &Parameters| {
        for (read, expected) in read.tensors().iter().zip(expected.tensors()) {
            assert_eq!(values(read), values(expected));
        }
    };
    checkpoint.read_masters(&read).unwrap();
    assert_reads(&sample.masters);
    checkpoint.read_moments([&read, &zeros(&sample.spec)], &mut []).unwrap();
    assert_reads(&sample.exp_avg);
    checkpoint.read_moments([&zeros(&sample.spec), &read], &mut []).unwrap();
    assert_reads(&sample.exp_avg_sq);

    let wider = sample.spec.clone().resized(1, 16, 2);
    let message = checkpoint.read_masters(&zeros(&wider)).unwrap_err().to_string();
    assert!(message.contains("tensor `h.0.attn.c_attn.bias`: shape [24], but the model's is [48]"), "{message}");
}

#[test]
fn many_completions_come_back_and_too_many_are_not_saved() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    let mut sample = Sample::new(1);
    sample.state.rollouts = Some("x".repeat(32 << 20).into());
    let saved = sample.save(&mut run).unwrap();
    assert!(Checkpoint::open(&saved.path).unwrap().state() == &sample.state);
    sample.state.rollouts = Some("x".repeat(128 << 20).into());
    let message = sample.save(&mut run).unwrap_err().to_string();
    assert!(message.contains("more than the maximum of 134217728; sample fewer"), "{message}");
    assert!(Checkpoint::open(&saved.path).is_ok());
}

#[test]
fn a_step_directory_is_a_hugging_face_folder() {
    let folder = tempdir().unwrap();
    let sample = Sample::new(1);
    let mut run = Run::open(folder.path()).unwrap();
    for kind in CheckpointKind::ALL {
        let saved = run.save(&sample.contents(), kind).unwrap();
        assert!(verify(&saved.path).is_empty());
        let model = ModelFolder::open(&saved.path).unwrap();
        assert_eq!(model.spec(), &sample.spec);
        assert_eq!(model.get("wte.weight").unwrap().name, "transformer.wte.weight");
        for (name, weight) in sample.weights.iter() {
            let mut out = vec![0.0; weight.elem_count()];
            model.read_part(name, 0, &mut out).unwrap();
            assert_eq!(out, values(weight));
        }
    }
    assert_eq!(fs::read_to_string(folder.path().join("latest")).unwrap(), "step-000001\n");
    let config = fs::read_to_string(folder.path().join("weights-000001/config.json")).unwrap();
    assert!(config.contains(r#""dtype": "float16""#));
    let message = Checkpoint::open(folder.path().join("weights-000001")).unwrap_err().to_string();
    assert!(message.contains("only weights"), "{message}");
}

#[test]
fn latest_and_the_newest_good_are_the_last_save() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path().join("run")).unwrap();
    for step in [100, 200, 300] {
        Sample::new(step).save(&mut run).unwrap();
    }
    assert_eq!(fs::read_to_string(run.path().join("latest")).unwrap(), "step-000300\n");
    assert_eq!(latest_valid(run.path()).unwrap().checkpoint.state().step, 300);

    // Resume from step 100: the new step 200 is newer than the old step 300.
    Sample::with_loss(200, 1.5).save(&mut run).unwrap();
    let found = latest_valid(run.path()).unwrap();
    assert_eq!(found.checkpoint.state().validation_loss, Some(1.5));
    assert_eq!(fs::read_to_string(run.path().join("latest")).unwrap(), "step-000200\n");
    assert_eq!(names(run.path()), [".lock", "latest", "step-000100", "step-000200", "step-000300"]);
    run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 1, best: false }).unwrap();
    assert_eq!(steps(run.path()), ["step-000200"]);
}

#[test]
fn the_newest_run_is_the_one_that_saved_last_whatever_the_clock_says() {
    let folder = tempdir().unwrap();
    assert!(latest_run(folder.path()).unwrap_err().to_string().contains("contains no run yet"));
    for (name, step) in [("zebra", 900), ("aardvark", 5), ("zebra", 950), ("monkey", 7)] {
        let mut run = Run::open(folder.path().join(name)).unwrap();
        Sample::new(step).save(&mut run).unwrap();
        let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(step);
        for file in ["latest", "."] {
            fs::File::open(run.path().join(file)).unwrap().set_modified(long_ago).unwrap();
        }
        assert_eq!(latest_run(folder.path()).unwrap(), folder.path().join(name));
    }
    // Opening an old run does not make it newer, and a folder that was never a run does not count.
    for name in ["zebra", "without-a-configuration"] {
        Run::open(folder.path().join(name)).unwrap();
        assert_eq!(latest_run(folder.path()).unwrap(), folder.path().join("monkey"));
    }
    let started = Run::open(folder.path().join("started")).unwrap();
    fs::write(started.path().join("config.toml"), "").unwrap();
    assert_eq!(latest_run(folder.path()).unwrap(), started.path());
    let message = latest_valid(started.path()).unwrap_err().to_string();
    assert!(message.contains("this run has no checkpoint yet"), "{message}");
    Sample::new(3).save(&mut Run::open(folder.path().join("zebra")).unwrap()).unwrap();
    assert_eq!(latest_run(folder.path()).unwrap(), folder.path().join("zebra"));
}

#[test]
fn damage_is_named_and_an_older_checkpoint_takes_over() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    for step in 1..=7 {
        Sample::new(step).save(&mut run).unwrap();
    }
    let file = |step: u64, name: &str| folder.path().join(CheckpointKind::Full.directory(step)).join(name);
    let flip = |path: &Path, at: usize| {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    fs::remove_file(file(7, "master.safetensors")).unwrap();
    flip(&file(6, "model.safetensors"), 3000);
    fs::File::options().write(true).open(file(5, "optimizer.safetensors")).unwrap().set_len(99).unwrap();
    fs::remove_file(file(4, "manifest.json")).unwrap();
    fs::write(file(3, "manifest.json"), r#"{"format_version": 9}"#).unwrap();
    fs::write(file(1, "manifest.json"), "").unwrap();

    let found = latest_valid(folder.path()).unwrap();
    assert_eq!(found.checkpoint.state().step, 2);
    let said: Vec<String> = found.corrupt_files.iter().map(ToString::to_string).collect();
    for (said, expected) in said.iter().zip([
        "step-000007/master.safetensors`: it is missing",
        "step-000006/model.safetensors`: its contents changed",
        "step-000005/optimizer.safetensors`: it has 99 bytes instead of",
        "step-000004/manifest.json`: it is missing",
        "step-000003/manifest.json`: format version 9 is newer than 3",
    ]) {
        assert!(said.contains(expected), "{said}");
    }
    assert_eq!(said.len(), 5, "the first is older than the one found: {said:?}");

    fs::remove_file(file(2, "tokenizer.json")).unwrap();
    let message = latest_valid(folder.path()).unwrap_err().to_string();
    assert!(message.contains("this run has no valid checkpoint") && message.contains("step-000001"), "{message}");
    assert!(Checkpoint::open(file(6, "")).unwrap_err().to_string().contains("model.safetensors`: its contents"));
}

#[test]
fn rotation_keeps_the_last_and_the_best_of_each_kind() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path().join("run")).unwrap();
    let mut neighbor = Run::open(folder.path().join("neighbor")).unwrap();
    Sample::new(1).save(&mut neighbor).unwrap();
    for (step, loss) in [(1, 3.0), (2, 1.0), (3, f64::NAN), (4, 2.0), (5, 2.5), (6, 4.0)] {
        let sample = Sample::with_loss(step, loss);
        sample.save(&mut run).unwrap();
        run.save(&sample.contents(), CheckpointKind::Weights).unwrap();
    }
    let removed = run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 2, best: true }).unwrap();
    assert_eq!(removed.len(), 3);
    assert_eq!(steps(run.path())[..3], ["step-000002", "step-000005", "step-000006"]);
    assert_eq!(list(run.path()).unwrap().iter().filter(|one| one.kind == CheckpointKind::Weights).count(), 6);

    run.apply_retention(CheckpointKind::Weights, RetentionPolicy { last: 1, best: true }).unwrap();
    assert_eq!(steps(run.path())[3..], ["weights-000002", "weights-000006"]);
    run.apply_retention(CheckpointKind::Weights, RetentionPolicy { last: 0, best: false }).unwrap();
    assert_eq!(steps(run.path()), ["step-000002", "step-000005", "step-000006", "weights-000006"]);
    assert_eq!(steps(neighbor.path()), ["step-000001"]);
    assert!(run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 2, best: true }).unwrap().is_empty());
}

/// A resume from an older step abandons the later checkpoints, and with them their losses.
#[test]
fn the_best_is_none_of_the_abandoned_checkpoints() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    for (step, loss) in [(1, 3.0), (2, 2.5), (3, 1.0)] {
        Sample::with_loss(step, loss).save(&mut run).unwrap();
    }
    assert_eq!(best(run.path()).unwrap(), folder.path().join("step-000003"));
    // Resumed from step 1.
    for (step, loss) in [(2, 2.0), (4, 2.2), (5, 2.4)] {
        Sample::with_loss(step, loss).save(&mut run).unwrap();
        assert_eq!(best(run.path()).unwrap(), folder.path().join("step-000002"), "step {step}");
    }
    run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 1, best: true }).unwrap();
    assert_eq!(steps(run.path()), ["step-000002", "step-000005"]);
    fs::write(folder.path().join("step-000002/tokenizer.json"), "{").unwrap();
    assert_eq!(best(run.path()).unwrap(), folder.path().join("step-000005"), "the best is damaged");
}

#[test]
fn rotation_does_not_count_torn_checkpoints() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    for step in 1..=5 {
        Sample::new(step).save(&mut run).unwrap();
    }
    for torn in ["step-000001", "step-000005"] {
        fs::write(folder.path().join(torn).join("state.json"), "{").unwrap();
    }
    fs::remove_file(folder.path().join("step-000004/manifest.json")).unwrap();
    let removed = run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 1, best: false }).unwrap();
    assert_eq!(removed, [folder.path().join("step-000002")]);
    assert_eq!(latest_valid(folder.path()).unwrap().checkpoint.state().step, 3);
}

#[test]
fn rotation_never_leaves_fewer_than_keep_last_verified_checkpoints() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    let damage = |step: u64| {
        let file = folder.path().join(format!("step-{step:06}/master.safetensors"));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(file, bytes).unwrap();
    };
    let keep = RetentionPolicy { last: 2, best: false };
    for step in [1, 2] {
        Sample::new(step).save(&mut run).unwrap();
    }
    damage(2);
    Sample::new(3).save(&mut run).unwrap();
    assert!(run.apply_retention(CheckpointKind::Full, keep).unwrap().is_empty(), "of three only two are good");
    Sample::new(4).save(&mut run).unwrap();
    assert_eq!(
        run.apply_retention(CheckpointKind::Full, keep).unwrap(),
        [folder.path().join("step-000001"), folder.path().join("step-000002")]
    );
    damage(3);
    damage(4);
    assert!(
        run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 1, best: false }).unwrap().is_empty(),
        "none is good"
    );
}

#[test]
fn a_latest_that_cannot_be_written_costs_nothing_but_itself() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    fs::create_dir_all(folder.path().join("latest/in-the-way")).unwrap();
    for step in 1..=3 {
        let saved = Sample::new(step).save(&mut run).unwrap();
        assert!(saved.warning.unwrap().to_string().contains("latest"));
        assert_eq!(verify(&saved.path), []);
    }
    assert_eq!(run.apply_retention(CheckpointKind::Full, RetentionPolicy { last: 1, best: false }).unwrap().len(), 2);
    assert_eq!(latest_valid(folder.path()).unwrap().checkpoint.state().step, 3);
}

#[test]
fn a_folder_that_another_process_has_made_anew_is_left_alone() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("run");
    let mut first = Run::open(&path).unwrap();
    Sample::new(1).save(&mut first).unwrap();
    fs::remove_dir_all(&path).unwrap();
    let mut second = Run::open(&path).unwrap();
    for step in [1, 2, 3] {
        Sample::new(step).save(&mut second).unwrap();
    }
    let before = names(&path);
    let keep = RetentionPolicy { last: 1, best: false };
    for result in [
        Sample::new(9).save(&mut first).map(drop),
        first.apply_retention(CheckpointKind::Full, keep).map(drop),
        first.remove(&path.join("step-000001")),
    ] {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("another process has recreated"), "{message}");
    }
    assert_eq!(names(&path), before);
    second.apply_retention(CheckpointKind::Full, keep).unwrap();
}

#[test]
fn a_lock_whose_file_was_removed_is_taken_again() {
    let folder = tempdir().unwrap();
    let mut run = Run::open(folder.path()).unwrap();
    fs::remove_file(folder.path().join(".lock")).unwrap();
    Sample::new(1).save(&mut run).unwrap();
    assert!(Run::open(folder.path()).unwrap_err().to_string().contains("is using this run"));
}

#[test]
fn a_lock_that_comes_free_at_once_is_waited_for() {
    let folder = tempdir().unwrap();
    let dying = Run::open(folder.path()).unwrap();
    let end = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(dying);
    });
    Run::open(folder.path()).unwrap();
    end.join().unwrap();
}

#[cfg(unix)]
#[test]
fn neither_lock_nor_log_is_written_through_a_link() {
    let folder = tempdir().unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "mine").unwrap();
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    for name in [".lock", "events.jsonl"] {
        let link = run.join(name);
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let error = match name {
            ".lock" => Run::open(&run).map(drop).unwrap_err(),
            _ => EventLog::open(&link).map(drop).unwrap_err(),
        };
        assert!(error.to_string().contains("it is a symbolic link, and is not followed"), "{error}");
        assert_eq!(error.exit_code(), 2);
        fs::remove_file(link).unwrap();
    }
    assert_eq!(fs::read_to_string(precious).unwrap(), "mine");
}

#[test]
fn of_eight_that_ask_for_one_name_one_gets_it() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("runs/one");
    let start = std::sync::Barrier::new(8);
    let got = std::thread::scope(|scope| {
        let one = || {
            start.wait();
            Run::create(&path).unwrap().is_some()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum::<usize>()
    });
    assert_eq!(got, 1);
}

#[test]
fn what_a_kill_left_behind_is_cleared_and_nothing_else() {
    let folder = tempdir().unwrap();
    Sample::new(1).save(&mut Run::open(folder.path()).unwrap()).unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in [".step-000002.tmp", ".step-000001.old", ".weights-000001.deleted", ".mine.tmp", "notes"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at(".latest.tmp"), "step-0").unwrap();
    fs::write(at(".config.toml.tmp"), "[tra").unwrap();
    // Killed between the two renames of a save that replaces step 9: the old one must be restored.
    fs::create_dir(at(".step-000009.old")).unwrap();
    Run::open(folder.path()).unwrap();
    assert_eq!(names(folder.path()), [".lock", ".mine.tmp", "latest", "notes", "step-000001", "step-000009"]);
}

#[test]
fn two_processes_cannot_use_one_run() {
    let folder = tempdir().unwrap();
    let run = Run::open(folder.path()).unwrap();
    let message = Run::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains(&format!("process {} is using this run", std::process::id())), "{message}");
    drop(run);
    Run::open(folder.path()).unwrap();
}

#[test]
fn comparing_names_the_tensor_and_the_figure() {
    let folder = tempdir().unwrap();
    let (mut one, mut two) = (Run::open(folder.path().join("1")).unwrap(), Run::open(folder.path().join("2")).unwrap());
    let sample = Sample::new(5);
    let mut other = Sample::new(5);
    let a = sample.save(&mut one).unwrap().path;
    assert_eq!(compare(&a, &other.save(&mut two).unwrap().path).unwrap(), []);

    let tensor = &other.exp_avg_sq[3];
    let mut changed = values(tensor);
    changed[2] += 0.5;
    set(tensor, changed);
    other.state.scaler.scale = 2.0;
    let deeper = Sample::of(5, &ModelSpec { num_layers: 2, ..sample.spec.clone() });
    let contents = Contents { masters: &deeper.masters, ..other.contents() };
    let b = two.save(&contents, CheckpointKind::Full).unwrap().path;
    let said: Vec<String> = compare(&a, &b).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 1 + 12 + 1, "{said:?}");
    assert_eq!(said[0], "state.json: `scaler.scale`: 65536.0 and 2.0");
    assert_eq!(said[1], "master.safetensors: `h.1.attn.c_attn.bias`: only in the second");
    let name = &sample.masters.layout()[3].name;
    let last = said.last().unwrap();
    assert!(last.contains(&format!("`exp_avg_sq.{name}`: 1 of ")) && last.contains("the first at 2"), "{last}");

    let weights = two.save(&sample.contents(), CheckpointKind::Weights).unwrap().path;
    assert!(compare(&a, &weights).unwrap().iter().any(|one| one.to_string() == "state.json: only in the first"));
}
