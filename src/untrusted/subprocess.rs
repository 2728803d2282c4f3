//! Runs risky work in a subprocess: this program again, with the name of the work as its first argument.
//!
//! Some crates trust the sizes in a file, and a failed allocation aborts the process; a kernel that misbehaves on a GPU
//! ruins the process's context or hangs. In a subprocess, only the subprocess ends. Other programs that use this
//! library do not have such an argument and run the work in their own process.

use crate::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Address space of a process that reads files. A typical Parquet page has 1 MiB, the largest in data sets some
/// hundred.
const MEMORY_LIMIT: u64 = 2 << 30;
/// The time that a process may take to exit after it has closed its output.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between two checks of a process.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The variables by which `torchrun`, this program, Open MPI, MPICH and Slurm tell a process its place in a job.
pub(crate) const JOB_VARIABLES: [&str; 17] = [
    "FINETUNE_JOB",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
];

/// The executable that runs the work.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Declares that `program` does the work that its first argument names.
pub fn register_executable(program: &Path) {
    let _ = PROGRAM.set(program.to_owned());
}

/// The command that starts the program for `work`; `None` if it cannot be started.
pub(crate) fn worker_command(work: &str) -> Option<Command> {
    let mut command = Command::new(PROGRAM.get()?);
    command.arg(work).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // An interrupt on the terminal is for the program that waits.
    command.process_group(0);
    Some(command)
}

/// A command for a program that is not a process of this job: one that takes part in it would wait for the others.
pub(crate) fn outside_job(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for variable in JOB_VARIABLES {
        command.env_remove(variable);
    }
    command
}

/// The command of a user's program, whose text is split at spaces; `key` names the setting, and `folder` the one to run
/// in, if not this process's. The program is not a process of this job, in case it uses `accelerate`. Fails with
/// [`Error::Config`] if the program does not exist.
pub(crate) fn command_of(text: &str, key: &str, folder: Option<&Path>) -> Result<Command> {
    let mut words = text.split_whitespace();
    let Some(program) = words.next() else {
        return Err(Error::config(key, "is empty; use a program with its arguments, such as `notify-send`"));
    };
    let exists = if program.contains('/') {
        folder.unwrap_or(Path::new("")).join(program).is_file()
    } else {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&paths).any(|folder| folder.join(program).is_file())
    };
    if !exists {
        let message = format!("program `{program}` was not found; use its path, or a script for shell commands");
        return Err(Error::config(key, message));
    }
    let mut command = outside_job(program);
    command.args(words);
    command.process_group(0);
    if let Some(folder) = folder {
        command.current_dir(folder);
    }
    Ok(command)
}

/// Limits the memory of this process, as far as the operating system can, and leaves no dump of it.
pub(crate) fn limit_memory() {
    for (resource, most) in [(Resource::As, MEMORY_LIMIT), (Resource::Core, 0)] {
        // Best effort: the work is done without the limit, too.
        let _ = setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
    }
}

/// Ends this process by SIGXCPU when it has computed `seconds` more than until now, as far as the operating system can.
pub(crate) fn limit_computing(seconds: u64) {
    let until = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs() + seconds;
    let maximum = getrlimit(Resource::Cpu).maximum;
    // A limit of the user's that is lower stays.
    let current = Some(maximum.map_or(until, |most| most.min(until)));
    let _ = setrlimit(Resource::Cpu, Rlimit { current, maximum });
}

/// Ends this process with the thread that started it, where the operating system can. Needed where this process reads
/// nothing from the other: it would not notice an end.
pub(crate) fn end_with_parent() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

/// Waits for the end of `child`; kills it after `limit` and returns `None`.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        match child.try_wait()? {
            None if began.elapsed() < limit => std::thread::sleep(POLL_INTERVAL),
            None => {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            status => return Ok(status),
        }
    }
}

/// The reason why a process under [`limit_memory`] or [`limit_computing`] stopped answering.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ExitCause {
    /// An allocation failed, which aborts.
    OutOfMemory,
    /// It exceeded the limit on processor time.
    OutOfTime,
    /// A description that follows the words `its process`.
    Otherwise(String),
}

/// Waits for `child` and returns why it stopped answering.
pub(crate) fn exit_cause(child: &mut Child) -> ExitCause {
    match wait(child, EXIT_TIMEOUT) {
        Ok(Some(status)) => match status.signal() {
            Some(libc::SIGABRT) => ExitCause::OutOfMemory,
            Some(libc::SIGXCPU) => ExitCause::OutOfTime,
            _ => ExitCause::Otherwise(format!("ended ({status})")),
        },
        Ok(None) => ExitCause::Otherwise("sent an unreadable answer".to_owned()),
        Err(error) => ExitCause::Otherwise(format!("cannot be observed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Child {
        Command::new("sh").args(["-c", text]).spawn().unwrap()
    }

    #[test]
    fn the_end_of_a_process_is_told_from_a_want_of_memory() {
        let ended = |text: &str| ExitCause::Otherwise(format!("ended ({text})"));
        for (text, expected) in [
            ("kill -ABRT $$", ExitCause::OutOfMemory),
            ("kill -XCPU $$", ExitCause::OutOfTime),
            ("kill -KILL $$", ended("signal: 9 (SIGKILL)")),
            ("kill -SEGV $$", ended("signal: 11 (SIGSEGV)")),
            ("exit 101", ended("exit status: 101")),
        ] {
            // A dump of the shell is of no use.
            assert_eq!(exit_cause(&mut shell(&format!("ulimit -c 0; {text}"))), expected, "{text}");
        }
    }

    #[test]
    fn a_users_program_is_not_a_process_of_the_job() {
        let command = command_of("sh -c true", "--notify", None).unwrap();
        let removed: Vec<_> = command.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
        assert!(JOB_VARIABLES.iter().all(|variable| removed.contains(&OsStr::new(variable))), "{removed:?}");
    }

    #[test]
    fn a_process_that_does_not_end_is_killed() {
        let mut child = shell("exec sleep 100");
        assert_eq!(wait(&mut child, Duration::from_millis(50)).unwrap(), None);
        assert!(!child.wait().unwrap().success());
    }
}
