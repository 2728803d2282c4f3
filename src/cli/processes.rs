//! The life cycle of several processes for the command line: their start, their errors and their common end.

use crate::Result;
use crate::engine::collective::{ProcessGroup, SingleProcess};
use std::sync::Arc;

#[cfg(feature = "mpi")]
mod dist {
    use super::{Arc, ProcessGroup, Result, SingleProcess};
    use crate::engine::collective::mpi::Mpi;
    use crate::untrusted::sanitize_block;
    use std::io::{Write, stderr};
    use std::sync::OnceLock;
    use std::time::Duration;

    static RANK: OnceLock<usize> = OnceLock::new();
    /// The time that a failed process leaves the leader, which usually has failed as well, to print the error.
    const RANK0_ERROR_GRACE: Duration = Duration::from_secs(2);

    /// The group of this process: the job, or a single process.
    pub(crate) fn init() -> Result<Arc<dyn ProcessGroup>> {
        let Some(group) = Mpi::init(|message| fail(message, 1))? else { return Ok(Arc::new(SingleProcess)) };
        RANK.set(group.rank()).ok();
        Ok(Arc::new(group))
    }

    /// Prints the error, unless another process does, and ends the job.
    fn fail(message: &str, code: u8) -> ! {
        if let Some(rank @ 1..) = RANK.get() {
            std::thread::sleep(RANK0_ERROR_GRACE + Duration::from_millis(50) * *rank as u32);
            writeln!(stderr(), "error: process {rank}: {}", sanitize_block(message)).ok();
        } else {
            writeln!(stderr(), "error: {}", sanitize_block(message)).ok();
        }
        Mpi::abort(code)
    }

    /// Allows any number of processes.
    #[expect(clippy::unnecessary_wraps, reason = "a build for one process refuses to be one of several")]
    pub(crate) fn check_launch() -> Result<()> {
        Ok(())
    }

    /// Ends the job with an error, if this process is one of several.
    pub(crate) fn abort_with(message: &str, code: u8) {
        if RANK.get().is_some() {
            fail(message, code);
        }
    }

    /// Ends this process's part in the job.
    pub(crate) fn finalize() {
        if RANK.get().is_some() {
            Mpi::finalize();
        }
    }
}

#[cfg(not(feature = "mpi"))]
mod dist {
    use super::{Arc, ProcessGroup, Result, SingleProcess};
    use crate::Error;
    use crate::engine::collective::LaunchEnv;
    use std::time::Duration;

    /// The time that the workers leave the leader to print the error. Launchers end all processes when one fails.
    const RANK0_ERROR_GRACE: Duration = Duration::from_secs(2);

    #[expect(clippy::unnecessary_wraps, reason = "MPI may fail to start")]
    pub(crate) fn init() -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(SingleProcess))
    }

    /// Rejects a launch of several processes, because each would train the same run. The leader prints the error.
    pub(crate) fn check_launch() -> Result<()> {
        let Some(LaunchEnv { variable, world_size, rank }) = LaunchEnv::detect()? else { return Ok(()) };
        if rank > 0 {
            std::thread::sleep(RANK0_ERROR_GRACE);
            std::process::exit(2);
        }
        let message = format!(
            "a launcher started {world_size} processes, but this build has no MPI support; build with `--features \
             mpi` to train with {world_size} processes, or remove the variable for {world_size} separate runs"
        );
        Err(Error::config(variable, message))
    }

    pub(crate) fn abort_with(_: &str, _: u8) {}

    pub(crate) fn finalize() {}
}

pub(crate) use dist::{abort_with, check_launch, finalize, init};
