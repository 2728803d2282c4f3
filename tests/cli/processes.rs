//! Several processes on this machine, started by the program itself and by `torchrun`.

use crate::common::cli_fixture::CliFixture;
use crate::common::launch;
use crate::common::python::python_with;
use finetune::store::checkpoint::compare;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Micro-batches for three processes.
const SMALL: &str = "--batch-size 1 --seq-len 16 --grad-accum 3 --threads 1 --plain \
                     --set train.sample_tokens=0 --set train.eval_batches=1";

fn free_port() -> String {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port().to_string()
}

/// `command` in a job of two processes, which meet at `port`.
fn one_of_two(mut command: Command, port: &str, rank: &str) -> Command {
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("WORLD_SIZE", "2"), ("RANK", rank)]);
    command
}

#[test]
fn several_processes_compute_the_bits_of_one() {
    let fixture = CliFixture::empty();
    // In a job of two processes, which the runs of the verification do not join.
    // Regression: a number of epochs was refused.
    let line = "verify-distributed --epochs 1 --init-scale 2^22 --batch-size 1 --seq-len 16";
    let port = free_port();
    let in_job = |rank| one_of_two(fixture.command(line), &port, rank);
    let mut other = in_job("1").spawn().unwrap();
    let out = in_job("0").output().unwrap();
    assert!(other.wait().unwrap().success());
    let out = String::from_utf8(out.stdout).unwrap();
    assert!(out.starts_with("bit-identical: 20 steps of 4 micro-batches by 1, 2 and 4 processes: "), "{out}");
}

#[test]
fn a_run_repeats_in_another_number_of_processes() {
    let fixture = CliFixture::empty();
    fixture.said(&format!("{SMALL} --steps 6 --init-scale 2^22 --run shared --processes 3"));
    let out = fixture.said("verify shared --processes 2 --from 0");
    assert!(out.starts_with("bit-identical: steps 1 to 6"), "{out}");
}

#[test]
fn torchrun_starts_processes() {
    let Some(python) = python_with("torch") else { return };
    let fixture = CliFixture::empty();
    let torchrun = python.with_file_name("torchrun");
    let mut job = launch::command(torchrun);
    job.args(["--standalone", "--no-python", "--nproc-per-node", "2", "--"]).arg(env!("CARGO_BIN_EXE_finetune"));
    job.args(SMALL.split_whitespace()).args(["--steps", "6", "--run", "launched"]).current_dir(fixture.folder());
    let done = job.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    fixture.said(&format!("{SMALL} --steps 6 --run alone"));
    assert_eq!(compare(&fixture.newest("launched"), &fixture.newest("alone")).unwrap(), []);
}

/// Repeats `ask` until it returns something.
fn wait_for<T>(wanted: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = ask() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_mins(1), "no {wanted} within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts a run that would not end, and returns it with the ids of its other processes when it has saved.
fn started(fixture: &CliFixture) -> (Child, Vec<String>) {
    let line = format!("{SMALL} --steps 1000000 --init-scale 2^10 --save-every 1 --run long --processes 3");
    let run = fixture.command(&line).stdout(Stdio::null()).spawn().unwrap();
    wait_for("checkpoint", || fixture.run("long").join("latest").exists().then_some(()));
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap();
    (run, children.split_whitespace().map(str::to_owned).collect())
}

fn kill(id: &str) {
    assert!(Command::new("kill").args(["-KILL", id]).status().unwrap().success());
}

#[test]
fn all_processes_end_together() {
    let fixture = CliFixture::empty();
    let (run, others) = started(&fixture);
    assert_eq!(others.len(), 2);
    kill(&others[1]);
    let done = run.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{error}");
    for part in ["error: lost connection to process 2 on `", "process 2 ended with signal: 9 (SIGKILL)"] {
        assert!(error.contains(part), "{error}");
    }
    fs::remove_dir_all(fixture.run("long")).unwrap();
    let (mut run, others) = started(&fixture);
    run.kill().unwrap();
    run.wait().unwrap();
    for id in others {
        wait_for("end of the other processes", || (!Path::new("/proc").join(&id).exists()).then_some(()));
    }
    let step = fixture.steps("long").len() + 1;
    fixture.said(&format!("--resume long --steps {step} --processes 2 --plain"));
}

#[test]
fn a_program_may_think_longer_than_the_others_wait_for_a_message() {
    let fixture = CliFixture::empty();
    fixture.write("prompts.jsonl", "{\"prompt\": \"1\"}\n{\"prompt\": \"2\"}\n".repeat(9));
    fixture.write("score.sh", "sleep 15\nwhile read -r line; do echo ${#line}; done\n");
    let mut run = fixture.command_of(&["--reward", "sh score.sh", "--processes", "2", "--steps", "1", "--plain"]);
    let more = "--data prompts.jsonl --objective grpo --num-generations 2 --max-completion-length 4 --seq-len 16";
    let done = run.args(more.split(' ')).env("FINETUNE_MPI_TIMEOUT_S", "12").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The leader may end before the signal of its end reaches the processes that it has started.
#[test]
fn a_started_process_does_not_wait_for_a_leader_that_has_ended() {
    let fixture = CliFixture::empty();
    let mut command = one_of_two(fixture.command("--steps 1"), &free_port(), "1");
    let mut started = command.env("FINETUNE_JOB", "a").spawn().unwrap();
    assert_eq!(wait_for("end", || started.try_wait().unwrap()).code(), Some(1));
}

/// The weights are in a folder of this name on both.
#[test]
fn processes_with_other_weights_are_refused() {
    let [here, there] = [CliFixture::new(), CliFixture::new()];
    let weights = there.path("model/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(weights, bytes).unwrap();
    let line = format!("--model model --data text.txt {SMALL} --steps 1 --run r");
    let port = free_port();
    let mut other = one_of_two(there.command(&line), &port, "1").spawn().unwrap();
    let done = one_of_two(here.command(&line), &port, "0").output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(error.contains("error: model differs between ranks: "), "{error}");
    assert!(!other.wait().unwrap().success());
}

#[test]
fn a_process_that_ends_before_it_connects_ends_the_job() {
    let fixture = CliFixture::empty();
    let mut command = fixture.command("--processes 2 --steps 1 --plain");
    let mut run = command.stderr(Stdio::piped()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", run.id());
    let child = wait_for("process", || fs::read_to_string(&children).ok().filter(|ids| !ids.is_empty()));
    Command::new("kill").args(["-KILL", child.trim()]).status().unwrap();
    assert_eq!(wait_for("end", || run.try_wait().unwrap()).code(), Some(1));
    let mut error = String::new();
    run.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert!(error.contains("process 1 ended with signal: 9 (SIGKILL)"), "{error}");
}

#[test]
fn processes_that_cannot_be_are_refused() {
    let fixture = CliFixture::empty();
    fixture.assert_refused("--gpus 2 --device cpu", &["--gpus: the device is `cpu`; use `--processes 2`"]);
    fixture.assert_refused("--processes 0", &["0 is not in 1..=1024"]);
    fixture.assert_refused("--processes 2 --gpus 2", &["cannot be used with"]);
    // A deadline that far ahead cannot be computed.
    let mut endless = fixture.command("--processes 2 --steps 1");
    let done = endless.env("FINETUNE_MPI_TIMEOUT_S", u64::MAX.to_string()).output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2), "{error}");
    assert!(error.starts_with("error: FINETUNE_MPI_TIMEOUT_S: `18446744073709551615` is not a whole"), "{error}");
    let mut launched = fixture.command("--processes 2 --steps 1");
    launched.envs([("MASTER_ADDR", "127.0.0.1"), ("WORLD_SIZE", "2"), ("RANK", "2")]);
    let done = launched.output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!((done.status.code(), error.as_str()), (Some(2), "error: RANK: 2 is not below WORLD_SIZE, which is 2\n"));
}
