//! Work on untrusted files in a separate process with a memory limit.
//!
//! Some crates trust the sizes in a file, and a failed allocation aborts the process. So the program starts itself again with
//! the work's name as its first argument, and only that process aborts. Another program that uses this library has no such
//! argument: there the work is done in place, without the limit.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Address space of the process. A typical Parquet page has 1 MiB, the largest in data sets some hundred.
const MEMORY: u64 = 2 << 30;

/// The program that can be started again.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Declares that `program` calls [`parquet_rows::serve`](super::parquet_rows::serve) and
/// [`template_process::serve`](super::template_process::serve) for their arguments.
pub fn can_serve(program: &Path) {
    let _ = PROGRAM.set(program.to_owned());
}

/// The command that starts the program for `work`; `None` if it cannot be started.
pub(super) fn command(work: &str) -> Option<Command> {
    let mut command = Command::new(PROGRAM.get()?);
    command.arg(work).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // An interrupt on the terminal is for the program that waits.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Some(command)
}

/// Limits the memory of this process, as far as the operating system can.
pub(super) fn limit_memory() {
    #[cfg(unix)]
    {
        let limit = rustix::process::Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) };
        // Best effort: the work is done without the limit, too.
        let _ = rustix::process::setrlimit(rustix::process::Resource::As, limit);
    }
}
