//! Starts processes for tests: with the default actions of signals, and for a limited time.

use finetune::telemetry::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::process::{Command, Output};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

/// Seconds that a test's process may take, instead of [`LIMIT`].
pub(crate) const LIMIT_VARIABLE: &str = "FINETUNE_TEST_LIMIT";
/// Longer than the longest of them takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_mins(30);

/// The program under test, by default with one thread, because threads that wait actively slow down other tests.
pub(crate) fn program() -> Command {
    let mut command = command(env!("CARGO_BIN_EXE_finetune"));
    command.env("RAYON_NUM_THREADS", "1");
    command
}

/// Like [`Command::new`], but under `nohup` too the process does not inherit ignored signals. It is killed after
/// [`LIMIT`], so that no test waits for ever.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        // A child inherits an ignored signal, but not a handler.
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ] {
            if is_ignored(signal) {
                signal_hook::flag::register(signal, Arc::default()).unwrap();
            }
        }
        let seconds = std::env::var(LIMIT_VARIABLE).ok().map(|seconds| seconds.parse().unwrap());
        thread::spawn(move || end_children_after(seconds.map_or(LIMIT, Duration::from_secs)));
    });
    Command::new(program)
}

/// The exit code, standard output and standard error of a process that has ended.
pub(crate) fn texts(output: Output) -> (Option<i32>, String, String) {
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), out, err)
}

/// Runs a command to its end; returns its exit code, standard output and standard error.
pub(crate) fn finish(command: &mut Command) -> (Option<i32>, String, String) {
    texts(command.output().unwrap())
}

/// The standard output of a command, which must succeed.
pub(crate) fn succeed(command: &mut Command) -> String {
    let (code, out, err) = finish(command);
    assert_eq!(code, Some(0), "{out}{err}");
    out
}

/// Kills each child of this process that `/proc` lists, once it has run for `limit`.
#[expect(clippy::print_stderr, reason = "a killed process is named in the test's output")]
fn end_children_after(limit: Duration) {
    let mut seen: HashMap<String, Instant> = HashMap::new();
    loop {
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let text: String = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect();
        let children: Vec<&str> = text.split_whitespace().collect();
        seen.retain(|id, _| children.contains(&id.as_str()));
        for id in children {
            let since = seen.entry(id.to_owned()).or_insert_with(Instant::now);
            if since.elapsed() > limit {
                eprintln!("process {id} has taken more than {} s: killed", limit.as_secs());
                Command::new("kill").args(["-KILL", id]).status().unwrap();
            }
        }
        thread::sleep(limit.min(Duration::from_secs(5)));
    }
}
