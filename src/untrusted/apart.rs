//! Work in a separate process: this program again, with the work's name as its first argument.
//!
//! Some crates trust the sizes in a file, and a failed allocation aborts the process; a kernel that misbehaves on a GPU
//! ruins the process's context or hangs. Apart, only that process ends. Another program that uses this library has no
//! such argument: it does without.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Address space of a process that reads files. A typical Parquet page has 1 MiB, the largest in data sets some
/// hundred.
const MEMORY: u64 = 2 << 30;
/// How long a process that has closed its output may take to end.
const ENDING: Duration = Duration::from_secs(10);
/// Between two looks at a process.
const PAUSE: Duration = Duration::from_millis(5);

/// The program that can be started again.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Declares that `program` does the work that its first argument names.
pub fn can_serve(program: &Path) {
    let _ = PROGRAM.set(program.to_owned());
}

/// The command that starts the program for `work`; `None` if it cannot be started.
pub(crate) fn command(work: &str) -> Option<Command> {
    let mut command = Command::new(PROGRAM.get()?);
    command.arg(work).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // An interrupt on the terminal is for the program that waits.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Some(command)
}

/// Limits the memory of this process, as far as the operating system can, and leaves no dump of it.
pub(crate) fn limit_memory() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        for (resource, most) in [(Resource::As, MEMORY), (Resource::Core, 0)] {
            // Best effort: the work is done without the limit, too.
            let _ = setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
        }
    }
}

/// Ends this process by SIGXCPU when it has computed `seconds` more than until now, as far as the operating system can.
pub(crate) fn limit_computing(seconds: u64) {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        use rustix::time::{ClockId, clock_gettime};
        let until = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs() + seconds;
        let maximum = getrlimit(Resource::Cpu).maximum;
        // A limit of the user's that is lower stays.
        let current = Some(maximum.map_or(until, |most| most.min(until)));
        let _ = setrlimit(Resource::Cpu, Rlimit { current, maximum });
    }
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
            None if began.elapsed() < limit => std::thread::sleep(PAUSE),
            None => {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            status => return Ok(status),
        }
    }
}

/// Why a process within [`limit_memory`] or [`limit_computing`] answers no more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// An allocation failed, which aborts.
    OutOfMemory,
    /// It has computed for too long.
    OutOfTime,
    /// A description that follows the words `its process`.
    Otherwise(String),
}

/// The signal that ended a process.
fn signal(status: ExitStatus) -> Option<i32> {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(not(unix))]
    let signal = {
        let _ = status;
        None
    };
    signal
}

/// Why `child` answers no more.
pub(crate) fn end(child: &mut Child) -> End {
    match wait(child, ENDING) {
        Ok(Some(status)) => match signal(status) {
            #[cfg(unix)]
            Some(libc::SIGABRT) => End::OutOfMemory,
            #[cfg(unix)]
            Some(libc::SIGXCPU) => End::OutOfTime,
            _ => End::Otherwise(format!("ended ({status})")),
        },
        Ok(None) => End::Otherwise("answered nothing readable".to_owned()),
        Err(error) => End::Otherwise(format!("is lost: {error}")),
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Child {
        Command::new("sh").args(["-c", text]).spawn().unwrap()
    }

    #[test]
    fn the_end_of_a_process_is_told_from_a_want_of_memory() {
        let ended = |text: &str| End::Otherwise(format!("ended ({text})"));
        for (text, expected) in [
            ("kill -ABRT $$", End::OutOfMemory),
            ("kill -XCPU $$", End::OutOfTime),
            ("kill -KILL $$", ended("signal: 9 (SIGKILL)")),
            ("kill -SEGV $$", ended("signal: 11 (SIGSEGV)")),
            ("exit 101", ended("exit status: 101")),
        ] {
            // A dump of the shell is of no use.
            assert_eq!(end(&mut shell(&format!("ulimit -c 0; {text}"))), expected, "{text}");
        }
    }

    #[test]
    fn a_process_that_does_not_end_is_killed() {
        let mut child = shell("exec sleep 100");
        assert_eq!(wait(&mut child, Duration::from_millis(50)).unwrap(), None);
        assert!(!child.wait().unwrap().success());
    }
}
