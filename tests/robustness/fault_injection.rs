//! The fault matrix: the faults that a run survives, and its messages. `docs/faults.md` has the table.
//!
//! Faults come from `checkpoint::Disk`, through which a save makes all of its changes: a hook refuses an operation, or
//! kills the process before it. A process to kill is this test program again, started for [`child`] alone.

use crate::common::checkpoint::{Dice, Sample, folder, names};
use crate::common::compare::skip;
use crate::common::launch;
use finetune::store::ModelFolder;
use finetune::store::checkpoint::{
    CheckpointKind, Disk, FsOp, Manifest, RetentionPolicy, Run, latest_valid, list, verify,
};
use finetune::{Error, Result};
use signal_hook::consts::SIGKILL;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

const KEEP: RetentionPolicy = RetentionPolicy { last: 2, best: false };

/// A folder of runs, in which `run` has the good checkpoints 1 and 2.
fn with_run() -> (TempDir, PathBuf) {
    let folder = folder();
    let path = folder.path().join("run");
    let mut run = Run::open(&path).unwrap();
    for step in [1, 2] {
        Sample::new(step).save(&mut run).unwrap();
    }
    (folder, path)
}

/// Saves and rotates, as at a step where a checkpoint is due.
fn save_and_rotate(run: &mut Run, step: u64) -> Result<()> {
    let saved = Sample::new(step).save(run)?;
    run.apply_retention(CheckpointKind::Full, KEEP)?;
    saved.warning.map_or(Ok(()), Err)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in names(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        if from.is_dir() { copy(&from, &to) } else { fs::copy(from, to).map(drop).unwrap() }
    }
}

/// Every visible checkpoint is good, there are at least two, and the run can continue.
fn assert_unharmed(path: &Path, newest: std::ops::RangeInclusive<u64>, context: &str) {
    let mut run = Run::open(path).unwrap();
    assert!(names(path).iter().all(|name| !name.starts_with('.') || name == ".lock"), "{context}: {:?}", names(path));
    let listed = list(path).unwrap();
    assert!(listed.len() >= 2, "{context}: {:?}", names(path));
    for one in &listed {
        assert_eq!(verify(&one.path), [], "{context}");
    }
    let found = latest_valid(path).unwrap();
    assert!(found.corrupt_files.is_empty(), "{context}");
    assert!(newest.contains(&found.checkpoint.state().step), "{context}: {}", found.checkpoint.state().step);
    let latest = fs::read_to_string(path.join("latest")).unwrap();
    assert_eq!(verify(&path.join(latest.trim())), [], "{context}: latest is {latest}");
    save_and_rotate(&mut run, 9).unwrap();
    assert_eq!(latest_valid(path).unwrap().checkpoint.state().step, 9, "{context}");
}

/// Not a test itself: other tests run it in a child process that they kill.
#[test]
#[ignore = "started by the other tests"]
fn child() {
    let Ok(path) = std::env::var("FAULTS_RUN") else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let kill_at = number("FAULTS_KILL_AT");
    let operations = AtomicUsize::new(0);
    let disk = Disk::with_hook(move |_, _| {
        if Some(operations.fetch_add(1, Ordering::Relaxed) as u64) == kill_at {
            signal_hook::low_level::raise(SIGKILL)?;
        }
        Ok(())
    });
    let mut run = Run::open_on(path, disk).unwrap();
    if let Some(step) = number("FAULTS_STEP") {
        save_and_rotate(&mut run, step).unwrap();
    } else {
        println!("locked");
        std::thread::sleep(std::time::Duration::from_mins(1));
    }
}

fn start_child(path: &Path, variables: &[(&str, u64)]) -> Child {
    start_child_with(launch::command(std::env::current_exe().unwrap()), path, variables).unwrap()
}

/// Starts [`child`] with `command`, whose last word is this program.
fn start_child_with(mut command: Command, path: &Path, variables: &[(&str, u64)]) -> io::Result<Child> {
    command.args(["--exact", "fault_injection::child", "--ignored", "--nocapture"]).env("FAULTS_RUN", path);
    command.envs(variables.iter().map(|(name, value)| (name, value.to_string())));
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

/// After a power failure only synced data is left: a file's contents are synced before it gets its name, and its folder
/// after it.
#[test]
fn a_named_file_is_on_the_medium() {
    let (_folder, path) = with_run();
    let trace = path.with_file_name("trace");
    let mut strace = launch::command("strace");
    strace.args(["-f", "-y", "-qq", "-e", "signal=none", "-e", "trace=fsync,?rename,?renameat,?renameat2", "-o"]);
    strace.arg(&trace).arg(std::env::current_exe().unwrap());
    let traced = start_child_with(strace, &path, &[("FAULTS_STEP", 3)]).and_then(|mut child| child.wait());
    if !traced.is_ok_and(|status| status.success()) {
        return skip("strace", "`strace` is missing, or may not trace");
    }
    let call = |line: &str| {
        let place = if line.contains(" fsync(") { line.split(['<', '>']).nth(1) } else { line.rsplit('"').nth(1) };
        let name = Path::new(place.unwrap()).strip_prefix(&path).unwrap().display().to_string();
        if line.contains(" fsync(") { format!("sync `{name}`") } else { format!("name `{name}`") }
    };
    let calls: Vec<String> = fs::read_to_string(trace).unwrap().lines().map(call).collect();
    let named = calls.iter().position(|call| call == "name `step-000003`").unwrap();
    let (before, after) = calls.split_at(named);
    let unnamed = ".step-000003.tmp";
    for file in names(path.join("step-000003")) {
        assert!(before.contains(&format!("sync `{unnamed}/{file}`")), "{file}: {calls:?}");
    }
    assert_eq!(before.last(), Some(&format!("sync `{unnamed}`")), "{calls:?}");
    assert_eq!(after[1..5], ["sync ``", "sync `.latest.tmp`", "name `latest`", "sync ``"], "{calls:?}");
}

/// Kills a save of `step` before each of its operations in turn; returns how many there are.
fn kill_before_every_operation_of_saving(step: u64) -> u64 {
    let (_folder, template) = with_run();
    for kill_at in 0.. {
        let folder = folder();
        let path = folder.path().join("run");
        copy(&template, &path);
        let status = start_child(&path, &[("FAULTS_STEP", step), ("FAULTS_KILL_AT", kill_at)]).wait().unwrap();
        if status.success() {
            return kill_at;
        }
        assert_eq!(status.signal(), Some(SIGKILL), "operation {kill_at}");
        assert_unharmed(&path, 2..=step.max(2), &format!("killed before operation {kill_at} of saving step {step}"));
    }
    unreachable!("a save has an end");
}

#[test]
fn a_kill_before_any_operation_of_a_save_costs_that_save_at_most() {
    assert!(kill_before_every_operation_of_saving(3) > 80);
}

#[test]
fn a_kill_before_any_operation_of_a_save_over_an_older_one_costs_that_save_at_most() {
    assert!(kill_before_every_operation_of_saving(2) > 80);
}

/// A disk on which operation `at` fails with `code`, and with `stays` every later one that `also` says, until `healed`.
fn failing(at: usize, code: i32, stays: fn(FsOp) -> bool) -> (Disk, Arc<AtomicUsize>) {
    let operations = Arc::new(AtomicUsize::new(0));
    let counter = operations.clone();
    let disk = Disk::with_hook(move |operation, _| {
        let now = counter.load(Ordering::Relaxed);
        if now == usize::MAX {
            return Ok(());
        }
        counter.store(now + 1, Ordering::Relaxed);
        let fails = now == at || (now > at && stays(operation));
        if fails { Err(io::Error::from_raw_os_error(code)) } else { Ok(()) }
    });
    (disk, operations)
}

/// Lets a save fail at each operation in turn. The run stays open, and once the disk is well again saves as before.
fn fail_every_operation(code: i32, words: &str, stays: fn(FsOp) -> bool) {
    let (_folder, template) = with_run();
    for at in 0.. {
        let folder = folder();
        let path = folder.path().join("run");
        copy(&template, &path);
        let (disk, operations) = failing(at, code, stays);
        operations.store(usize::MAX, Ordering::Relaxed);
        let mut run = Run::open_on(&path, disk).unwrap();
        operations.store(0, Ordering::Relaxed);
        let result = save_and_rotate(&mut run, 3);
        let reached = operations.swap(usize::MAX, Ordering::Relaxed) > at;
        match result {
            Ok(()) if reached => panic!("the failure of operation {at} was not reported"),
            Ok(()) => {
                assert!(at > 80, "a save has more than {at} operations");
                return;
            }
            Err(error) => {
                assert!(matches!(error, Error::Io { .. }) && error.to_string().contains(words), "{error}");
                assert!(error.to_string().contains(&path.display().to_string()), "{error}");
            }
        }
        assert!(latest_valid(&path).unwrap().corrupt_files.is_empty());
        save_and_rotate(&mut run, 4).unwrap();
        assert_eq!(latest_valid(&path).unwrap().checkpoint.state().step, 4);
        drop(run);
        assert_unharmed(&path, 4..=4, &format!("operation {at} failed with {words}"));
    }
}

#[test]
fn an_io_error_at_any_operation_is_told_and_harms_nothing() {
    fail_every_operation(libc::EIO, "Input/output error", |_| false);
}

#[test]
fn a_disk_that_dies_at_any_operation_is_told_and_harms_nothing() {
    fail_every_operation(libc::EIO, "Input/output error", |_| true);
}

#[test]
fn a_disk_that_is_full_from_any_operation_on_is_told_and_harms_nothing() {
    fail_every_operation(libc::ENOSPC, "No space left on device", |operation| {
        matches!(operation, FsOp::CreateFolder | FsOp::CreateFile | FsOp::Write)
    });
}

#[test]
fn a_disk_that_turns_read_only_at_any_operation_is_told_and_harms_nothing() {
    fail_every_operation(libc::EROFS, "Read-only file system", |_| true);
}

#[test]
fn an_operation_that_a_signal_interrupts_is_begun_again() {
    let (_folder, path) = with_run();
    let mut run = Run::open(&path).unwrap();
    for at in 0.. {
        let (disk, operations) = failing(at, libc::EINTR, |_| false);
        drop(run);
        run = Run::open_on(&path, disk).unwrap();
        save_and_rotate(&mut run, 3).unwrap();
        if operations.load(Ordering::Relaxed) <= at {
            assert!(at > 80);
            return;
        }
    }
}

#[test]
fn a_folder_that_is_removed_during_the_run_is_named() {
    let (folder, path) = with_run();
    let neighbor = folder.path().join("neighbor");
    Sample::new(7).save(&mut Run::open(&neighbor).unwrap()).unwrap();
    let mut run = Run::open(&path).unwrap();
    fs::remove_dir_all(&path).unwrap();
    let message = save_and_rotate(&mut run, 3).unwrap_err().to_string();
    assert!(message.contains(&path.display().to_string()) && message.contains("No such file"), "{message}");
    assert_eq!(verify(&neighbor.join("step-000007")), []);
}

/// The step directory's damage is seen and named, and the run falls back to step 1.
fn assert_damage_is_told(run: &Path, file: &str, context: &str) {
    let damaged = latest_valid(run).unwrap();
    assert_eq!(damaged.checkpoint.state().step, 1, "{context}");
    assert_eq!(damaged.corrupt_files.len(), 1, "{context}");
    assert!(damaged.corrupt_files[0].path.ends_with(Path::new("step-000002").join(file)), "{context}");
}

#[test]
fn a_thousand_flipped_bits_are_each_detected_or_harmless() {
    let (_folder, path) = with_run();
    let directory = path.join("step-000002");
    let manifest = Manifest::read(&directory).unwrap();
    let files = names(&directory);
    assert_eq!(files.len(), 7);
    let mut dice = Dice(1);
    let mut harmless = 0;
    for flip in 0..1000 {
        let name = &files[flip % files.len()];
        let file = directory.join(name);
        let good = fs::read(&file).unwrap();
        let mut bad = good.clone();
        let bit = dice.below(8 * bad.len());
        bad[bit / 8] ^= 1 << (bit % 8);
        fs::write(&file, bad).unwrap();
        if verify(&directory).is_empty() {
            // Spaces of the manifest may become other white space.
            assert_eq!(name, "manifest.json", "bit {bit}");
            assert_eq!(Manifest::read(&directory).unwrap(), manifest, "bit {bit}");
            harmless += 1;
        } else {
            assert_damage_is_told(&path, name, &format!("bit {bit} of {name}"));
        }
        fs::write(&file, good).unwrap();
    }
    assert!(harmless < 10, "{harmless}");
    assert_eq!(verify(&directory), []);
}

#[test]
fn a_torn_file_is_detected_wherever_it_is_torn() {
    let (_folder, path) = with_run();
    let directory = path.join("step-000002");
    for name in names(&directory) {
        let file = directory.join(&name);
        let good = fs::read(&file).unwrap();
        let zeroed = |from: usize| [&good[..from], &vec![0; good.len() - from]].concat();
        let half = good.len() / 2;
        for bad in
            [vec![], good[..1].to_vec(), good[..half].to_vec(), zeroed(0), zeroed(half), [&good[..], b"}"].concat()]
        {
            fs::write(&file, bad).unwrap();
            assert_damage_is_told(&path, &name, &name);
        }
        fs::remove_file(&file).unwrap();
        assert_damage_is_told(&path, &name, &name);
        fs::write(&file, good).unwrap();
    }
}

/// Without a manifest a flipped weight cannot be seen, but no flip makes the reader panic or run away.
#[test]
fn a_foreign_model_folder_with_flipped_bits_opens_or_says_why() {
    let (_folder, path) = with_run();
    let directory = path.join("step-000002");
    let mut dice = Dice(2);
    for name in ["config.json", "model.safetensors"] {
        let file = directory.join(name);
        let good = fs::read(&file).unwrap();
        let header =
            if name == "config.json" { good.len() } else { 8 + usize::from(good[0]) + 256 * usize::from(good[1]) };
        let mut refused = 0;
        for _ in 0..1000 {
            let mut bad = good.clone();
            let bit = dice.below(8 * header);
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(&file, bad).unwrap();
            if let Err(error) = ModelFolder::open(&directory) {
                assert!(matches!(error, Error::Model { .. }), "{error}");
                refused += 1;
            }
        }
        fs::write(&file, good).unwrap();
        assert!(refused > 500, "{name}: {refused}");
    }
}

#[test]
fn nothing_depends_on_latest_or_on_the_clock() {
    let (_folder, path) = with_run();
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(path.join("step-000002")).unwrap() {
        fs::File::options().write(true).open(entry.unwrap().path()).unwrap().set_modified(long_ago).unwrap();
    }
    fs::File::open(path.join("step-000002")).unwrap().set_modified(long_ago).unwrap();
    for latest in ["step-000001\n", "step-999999", "", "../../etc"] {
        fs::write(path.join("latest"), latest).unwrap();
        assert_eq!(latest_valid(&path).unwrap().checkpoint.state().step, 2);
    }
    fs::remove_file(path.join("latest")).unwrap();
    assert_eq!(latest_valid(&path).unwrap().checkpoint.state().step, 2);
    save_and_rotate(&mut Run::open(&path).unwrap(), 3).unwrap();
    assert_eq!(fs::read_to_string(path.join("latest")).unwrap(), "step-000003\n");
    assert_eq!(latest_valid(&path).unwrap().checkpoint.state().step, 3);
}

#[test]
fn a_second_process_is_kept_out_until_the_first_is_gone_however_it_went() {
    let (_folder, path) = with_run();
    let mut holder = start_child(&path, &[]);
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("locked")));
    let message = Run::open(&path).unwrap_err().to_string();
    assert!(message.contains(&format!("process {} is using this run", holder.id())), "{message}");
    // Reading needs no lock.
    assert_eq!(latest_valid(&path).unwrap().checkpoint.state().step, 2);
    holder.kill().unwrap();
    holder.wait().unwrap();
    save_and_rotate(&mut Run::open(&path).unwrap(), 3).unwrap();
}
