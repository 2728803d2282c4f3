//! Training itself under fire: killed and interrupted at random instants, resumed, and in the end bit for bit like an
//! undisturbed run.

use crate::common::checkpoint::Dice;
use crate::common::cli_fixture::CliFixture;
use finetune::store::checkpoint::{compare, latest_valid, list, verify};
use finetune::telemetry::{Event, StepRecord};
use signal_hook::consts::{SIGKILL, SIGTERM};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const STEPS: u64 = 30;

/// Starts or resumes the run called `run`. It saves every third step, so that many kills hit a save.
fn start(fixture: &CliFixture, run: &str, resume: bool, more: &str) -> Child {
    let how = if resume {
        "--resume".to_owned()
    } else {
        format!(
            "--steps {STEPS} --batch-size 2 --seq-len 16 --save-every 3 --eval-every 10 --set train.eval_batches=2 \
             --set train.sample_tokens=0 --set dropout.residual=0.1 --threads 1 {more}"
        )
    };
    fixture.command(&format!("--run {run} --plain {how}")).stdout(Stdio::null()).spawn().unwrap()
}

fn finish(child: Child) -> ExitStatus {
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 130) | None), "{}: {error}", output.status);
    output.status
}

/// The figures of every step of a run: the bits of its loss, its scale, and its gradients' norm.
fn losses(fixture: &CliFixture, run: &str) -> BTreeMap<u64, (u32, String)> {
    let figures = |step: StepRecord| (step.step, (step.loss.to_bits(), format!("{:?} {:?}", step.scale, step.grads)));
    fixture.steps(run).into_iter().map(figures).collect()
}

/// Asserts that the run has the losses and, at its end, the checkpoint of the undisturbed run.
fn assert_same_as_undisturbed(fixture: &CliFixture, run: &str) {
    let expected = losses(fixture, "undisturbed");
    let found = losses(fixture, run);
    assert_eq!(expected.len() as u64, STEPS);
    assert_eq!(found, expected);
    assert_eq!(compare(&fixture.newest("undisturbed"), &fixture.newest(run)).unwrap(), []);
}

/// Sends `signal` to `count` processes, each after a random time, and lets each run that comes to its end be compared.
fn disturb(fixture: &CliFixture, signal: i32, count: usize, seed: u64, more: &str) {
    let began = Instant::now();
    assert!(finish(start(fixture, "undisturbed", false, more)).success());
    let undisturbed = began.elapsed();

    let mut dice = Dice(seed);
    let (mut run, mut disturbed) = (0, 0);
    while disturbed < count {
        run += 1;
        let name = format!("run-{run}");
        loop {
            let resume = fixture.run(&name).join("config.toml").exists();
            let mut child = start(fixture, &name, resume, more);
            // Half of the time between the start of a process and the end of the run, at most.
            std::thread::sleep(Duration::from_micros(dice.below(undisturbed.as_micros() as usize / 2) as u64));
            if disturbed < count && child.try_wait().unwrap().is_none() {
                let kill = Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status().unwrap();
                assert!(kill.success());
            }
            let status = finish(child);
            if status.success() {
                break;
            }
            disturbed += 1;
            let saved = status.code() == Some(130);
            assert!(saved || status.signal() == Some(signal), "{status}");
            let run = fixture.run(&name);
            // An interrupt during preparation ends the process at once; nothing is saved before the first attempt has
            // started.
            let started = |event: &Event| matches!(event, Event::Started(_));
            if saved && run.join("events.jsonl").exists() && fixture.events(&name).iter().any(started) {
                assert!(latest_valid(&run).unwrap().corrupt_files.is_empty());
            }
            for one in list(&run).unwrap_or_default() {
                assert_eq!(verify(&one.path), []);
            }
        }
        assert_same_as_undisturbed(fixture, &name);
    }
}

#[test]
fn twenty_kills_at_random_instants_change_no_bit() {
    disturb(&CliFixture::in_memory(), SIGKILL, 20, 1, "");
}

#[test]
fn twenty_terminations_at_random_instants_change_no_bit() {
    disturb(&CliFixture::in_memory(), SIGTERM, 20, 2, "");
}

/// Begun by three processes and continued by one.
#[test]
fn ten_kills_of_a_run_by_several_processes_change_no_bit() {
    disturb(&CliFixture::in_memory(), SIGKILL, 10, 6, "--grad-accum 3 --processes 3");
}

/// Rows of several documents, two micro-batches a step, epochs that end in between.
#[test]
fn five_kills_of_a_run_of_packed_samples_change_no_bit() {
    let fixture = CliFixture::in_memory();
    let row = |i: u32| format!("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n", 1 << (i % 9), i * i % 97);
    fixture.write("short.jsonl", (0..90).map(row).collect::<String>());
    disturb(&fixture, SIGKILL, 5, 3, "--data short.jsonl --packing --grad-accum 2");
}

/// A stored reference, with pairs in several micro-batches.
#[test]
fn twenty_kills_of_a_preference_run_change_no_bit() {
    let fixture = CliFixture::in_memory();
    let row =
        |i: u32| format!("{{\"prompt\": \"{i}\", \"chosen\": \"{}\", \"rejected\": \"{}\"}}\n", i + 1, i * i % 97);
    fixture.write("pairs.jsonl", (10..60).map(row).collect::<String>());
    disturb(&fixture, SIGKILL, 20, 4, "--data pairs.jsonl --objective dpo --grad-accum 2");
}

/// Two updates for each sampling, so that some checkpoints contain completions; a program rewards them.
#[test]
fn twenty_kills_of_a_run_that_samples_change_no_bit() {
    let fixture = CliFixture::in_memory();
    let rows: Vec<_> = (10..40).map(|i| format!("{{\"prompt\": \"{i}\"}}\n")).collect();
    fixture.write("prompts.jsonl", rows.concat());
    fixture.write("score.sh", "#!/bin/sh\nwhile read -r line; do echo ${#line}; done\n");
    fs::set_permissions(fixture.path("score.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    let more = "--data prompts.jsonl --objective grpo --reward ./score.sh --num-generations 2 \
                --max-completion-length 5 --set objective.num_iterations=2";
    disturb(&fixture, SIGKILL, 20, 5, more);
    let rollouts = |run: &str| fs::read_to_string(fixture.run(run).join("rollouts.jsonl")).unwrap();
    let expected = rollouts("undisturbed");
    // Two prompts for every second step; 27 are for training, so the last sampling of the one full epoch has one.
    assert_eq!(expected.lines().count() as u64, (STEPS / 2 * 2 - 1) * 2);
    let runs = fs::read_dir(fixture.path("checkpoints")).unwrap().map(|run| run.unwrap().file_name());
    runs.for_each(|run| assert_eq!(rollouts(run.to_str().unwrap()), expected));
}

/// The log is read by users and dashboards: a torn one costs lines, not the run.
#[test]
fn a_truncated_log_costs_its_lines_only() {
    let fixture = CliFixture::in_memory();
    assert!(finish(start(&fixture, "undisturbed", false, "")).success());
    let run = fixture.run("torn");
    // A run may come to its end before it is killed.
    let is_killed = (0..10).any(|_| {
        fs::remove_dir_all(&run).ok();
        let mut child = start(&fixture, "torn", false, "");
        while list(&run).unwrap_or_default().len() < 2 && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        finish(child);
        latest_valid(&run).unwrap().checkpoint.state().step < STEPS
    });
    assert!(is_killed);
    let log = fs::File::options().write(true).open(run.join("events.jsonl")).unwrap();
    let length = log.metadata().unwrap().len();
    log.set_len(length * 2 / 3).unwrap();
    assert!(finish(start(&fixture, "torn", true, "")).success());
    let (expected, found) = (losses(&fixture, "undisturbed"), losses(&fixture, "torn"));
    assert!(found.len() < expected.len() && found.contains_key(&STEPS));
    assert!(found.iter().all(|(step, loss)| expected[step] == *loss));
}
