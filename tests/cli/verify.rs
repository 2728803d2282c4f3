//! `finetune verify`: a recorded run repeats bit for bit, and no bit of its files can change unnoticed.

use crate::common::cli_fixture::CliFixture;
use finetune::engine::collective::SingleProcess;
use finetune::telemetry::{Activity, Event};
use finetune::train::{Config, ConfigLayers, RecordedRun, Trainer};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run called `v` whose first loss scale is too high, with checkpoints after steps 4, 8 and 12.
const RUN: &str = "--run v --steps 12 --batch-size 2 --seq-len 16 --threads 1 --plain --save-every 4 --keep-last 10 \
                   --init-scale 2^24 --eval-every 6 --set train.eval_batches=1 --set train.sample_tokens=0 \
                   --set telemetry.grad_stats_every=1";

fn trained() -> CliFixture {
    let fixture = CliFixture::empty();
    fixture.said(RUN);
    fixture
}

/// The exit code and standard output of a command.
fn verdict(fixture: &CliFixture, line: &str) -> (Option<i32>, String) {
    let (code, out, _) = fixture.output(line);
    (code, out)
}

/// Flips the lowest bit of the byte at a share of a file's length, and returns the original bytes.
fn flip(path: &Path, share: f64) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let mut changed = bytes.clone();
    let at = (share * (bytes.len() - 1) as f64) as usize;
    changed[at] ^= 1;
    std::fs::write(path, changed).unwrap();
    bytes
}

#[test]
fn a_run_repeats_on_any_number_of_threads_and_others_can_check_its_claim() {
    let fixture = trained();
    for line in ["verify v", "verify v --threads 2", "verify v --threads 4 --from 0", "verify v --from 4 --to 6"] {
        let (code, out) = verdict(&fixture, line);
        assert!(code == Some(0) && out.starts_with("bit-identical: steps "), "{line}: {out}");
    }
    let hashes = ", the hashes of their checkpoints and the files";
    assert!(fixture.said("verify v").contains(&format!("steps 9 to 12 repeated{hashes}")));
    assert!(fixture.said("verify v --from 4 --to 5").contains("steps 5 to 5 repeated and the files"));
    // Regression: steps that the run never made were called identical.
    for to in [0, 13] {
        fixture.assert_refused(&format!("verify v --to {to}"), &["--to: ", " is not a recorded step; the last is 12"]);
    }
    fixture.assert_refused("verify checkpoints/v/events.jsonl", &["is not a claim", "name a run by its folder"]);
    fixture.said("verify v --from 0 --claim claim.json");
    // With the last settings alone, it would be refuted.
    fixture.said("--resume v --steps 16 --plain");
    fixture.assert_refused("verify v --claim late.json", &["--claim: the settings changed after step 12"]);
    assert!(!fixture.path("late.json").exists());
    // The claim alone is enough: it contains the configuration.
    std::fs::rename(fixture.path("checkpoints"), fixture.path("elsewhere")).unwrap();
    let (code, out, err) = fixture.output("verify claim.json --threads 2");
    assert!(code == Some(0) && out.contains("steps 1 to 12 repeated"), "{out}");
    assert!(!err.contains("the claim is of a processor"), "{err}");
    // Regression: steps after the last hash were called identical.
    assert!(fixture.said("verify claim.json --to 7").contains("steps 1 to 6 repeated"));
    fixture.assert_refused("verify claim.json --to 3", &["--to: the claim has no hash up to step 3; use 4 or more"]);
    fixture.assert_refused("verify claim.json --from 4", &["--from: a claim has no checkpoints"]);
    let text = std::fs::read_to_string(fixture.path("claim.json")).unwrap();
    fixture.write("other.json", text.replace(r#""instruction_set": ""#, r#""instruction_set": "old-"#));
    let (code, _, err) = fixture.output("verify other.json --to 4");
    assert!(code == Some(0) && err.contains("the claim is of a processor with old-"), "{err}");
    fixture.write("false.json", text.replace("seed = 1\\n", "seed = 2\\n"));
    let (code, out) = verdict(&fixture, "verify false.json");
    assert!(code == Some(1) && out.starts_with("differs: step 4: the checkpoint's masters"), "{out}");
}

#[test]
fn flags_without_effect_are_refused() {
    let fixture = CliFixture::empty();
    for (line, flag) in
        [("--processes 2", "--processes"), ("v --steps 4 --from 2", "--from"), ("v --at 2 --claim c.json", "--claim")]
    {
        fixture.assert_refused(&format!("verify {line}"), &[&format!("{flag}: is for a recorded run")]);
    }
}

#[test]
fn a_resumed_run_continues_the_chain_of_hashes() {
    let fixture = trained();
    // More steps, so another learning rate after step 8.
    fixture.said("--resume v/step-000008 --plain --steps 16");
    for (line, steps) in [("verify v --from 8", "steps 9 to 16"), ("verify v --from 4 --to 8", "steps 5 to 8")] {
        let (code, out) = verdict(&fixture, line);
        assert!(code == Some(0) && out.contains(steps), "{line}: {out}");
    }
    // Regression: the steps after the change were called different.
    fixture.assert_refused("verify v --from 4", &["--to: the settings changed after step 8"]);
    let proofs = fixture.events("v").into_iter().filter_map(|event| match event {
        Event::CheckpointSaved(saved) => saved.proof,
        _ => None,
    });
    let proofs: Vec<_> = proofs.collect();
    assert!(proofs.len() >= 4 && proofs.windows(2).all(|pair| pair[0].chain != pair[1].chain));
}

/// Regression: the steps before the log were repeated, with settings that they were not trained with.
#[test]
fn a_run_whose_log_was_deleted_is_verified_from_its_resume() {
    let fixture = trained();
    std::fs::remove_file(fixture.path("checkpoints/v/events.jsonl")).unwrap();
    fixture.said("--resume v --plain --steps 16");
    let (code, out) = verdict(&fixture, "verify v");
    assert!(code == Some(0) && out.contains("steps 13 to 16 repeated"), "{out}");
    fixture.assert_refused("verify v --from 4", &["--from: the log begins after step 12"]);
}

#[test]
fn a_flipped_bit_in_any_file_is_found() {
    let fixture = trained();
    let checkpoint = fixture.path("checkpoints/v/step-000008");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&checkpoint).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 7);
    files.push(fixture.path("checkpoints/v/events.jsonl"));
    for file in files {
        for share in [0.1, 0.6] {
            let original = flip(&file, share);
            let (code, out) = verdict(&fixture, "verify v");
            assert!(code == Some(1) && out.contains("differs: "), "{} at {share}: {out}", file.display());
            std::fs::write(&file, original).unwrap();
        }
    }
    // Regression: a checkpoint without a readable record was not compared.
    let log = fixture.path("checkpoints/v/events.jsonl");
    let text = std::fs::read_to_string(&log).unwrap();
    let last = text.rfind("\"chain\":").unwrap();
    std::fs::write(&log, format!("{}#{}", &text[..last], &text[last + 1..])).unwrap();
    let (code, out) = verdict(&fixture, "verify v");
    assert!(code == Some(1) && out.contains("differs: log: 1 unreadable lines"), "{out}");
    std::fs::write(&log, text).unwrap();
    assert_eq!(verdict(&fixture, "verify v").0, Some(0));
    // Settings that change the numbers.
    let settings = fixture.path("checkpoints/v/config.toml");
    let text = std::fs::read_to_string(&settings).unwrap();
    std::fs::write(&settings, text.replace("weight_decay = 0.1", "weight_decay = 0.2")).unwrap();
    let (code, out) = verdict(&fixture, "verify v");
    assert!(code == Some(1) && out.contains("differs: config.toml"), "{out}");
    // A process that has resumed the run may have changed them, and ended before its first checkpoint.
    let mut text = std::fs::read_to_string(&log).unwrap();
    let mut started: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    started["resumed_from"] = 12.into();
    writeln!(text, "{started}").unwrap();
    std::fs::write(&log, text).unwrap();
    assert_eq!(verdict(&fixture, "verify v").0, Some(0));
}

/// A step whose record was changed together with the hashes is found by repeating it.
#[test]
fn the_first_step_and_tensor_that_differ_are_named() {
    let fixture = trained();
    let run = fixture.path("checkpoints/v");
    let config = std::fs::read_to_string(run.join("config.toml")).unwrap();
    let file = Some(("config.toml".to_owned(), config));
    let config = Config::resolve(&ConfigLayers { file, overrides: Vec::new() }).unwrap();
    let log = run.join("events.jsonl");
    let repeat = |change: &dyn Fn(&mut RecordedRun)| {
        let folder = tempfile::tempdir().unwrap();
        let mut recorded = RecordedRun::read(&log).unwrap();
        recorded.read_steps(&log, 0..=8).unwrap();
        change(&mut recorded);
        let mut trainer = Trainer::new(Arc::new(SingleProcess), config.clone(), None, &mut |_| ()).unwrap();
        recorded.repeat(&mut trainer, &run, 8, folder.path(), &Activity::default()).unwrap()
    };
    assert_eq!(repeat(&|_| ()), None);
    let found = repeat(&|recorded| {
        let tensor = &mut recorded.steps.get_mut(&3).unwrap().tensors[5];
        tensor.stats.max_abs = f32::from_bits(tensor.stats.max_abs.to_bits() ^ 1);
        recorded.steps.get_mut(&6).unwrap().loss += 1.0;
    });
    let mut recorded = RecordedRun::read(&log).unwrap();
    recorded.read_steps(&log, 3..=3).unwrap();
    let name = &recorded.steps[&3].tensors[5].name;
    assert!(found.as_ref().unwrap().starts_with(&format!("step 3: tensors.`{name}`.max_abs was ")), "{found:?}");
    let found = repeat(&|recorded| {
        recorded.checkpoints.get_mut(&4).unwrap().proof.as_mut().unwrap().moments.replace_range(..1, "x");
    });
    assert_eq!(found.unwrap(), "step 4: the checkpoint's moments differ");
}
