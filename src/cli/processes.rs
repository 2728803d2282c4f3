//! The processes of a run, as far as the command line is concerned: who speaks, and how all end together.

use crate::Result;
use crate::engine::collective::{Collective, Solo};
use std::sync::Arc;

#[cfg(feature = "mpi")]
mod job {
    use super::{Arc, Collective, Result, Solo};
    use crate::engine::collective::mpi::Mpi;
    use crate::untrusted::block;
    use std::io::{Write, stderr};
    use std::sync::OnceLock;
    use std::time::Duration;

    static RANK: OnceLock<usize> = OnceLock::new();
    /// How long a process that has failed leaves it to process 0 to say why, which most often has failed as well.
    const DEFERENCE: Duration = Duration::from_secs(2);

    /// Joins the others, if there are any.
    pub(crate) fn join() -> Result<Arc<dyn Collective>> {
        let Some(job) = Mpi::join(|message| fail(message, 1))? else { return Ok(Arc::new(Solo)) };
        RANK.set(job.rank()).ok();
        Ok(Arc::new(job))
    }

    /// Says why, unless another process does, and ends all.
    fn fail(message: &str, code: u8) -> ! {
        if let Some(rank @ 1..) = RANK.get() {
            std::thread::sleep(DEFERENCE + Duration::from_millis(50) * *rank as u32);
            writeln!(stderr(), "error: process {rank}: {}", block(message)).ok();
        } else {
            writeln!(stderr(), "error: {}", block(message)).ok();
        }
        Mpi::abort(code)
    }

    /// Whatever their number, they train together.
    #[expect(clippy::unnecessary_wraps, reason = "a build for one process refuses to be one of several")]
    pub(crate) fn check() -> Result<()> {
        Ok(())
    }

    /// Ends the job, if this process is one of several, with this error.
    pub(crate) fn end_with(message: &str, code: u8) {
        if RANK.get().is_some() {
            fail(message, code);
        }
    }

    /// Ends this process's part.
    pub(crate) fn leave() {
        if RANK.get().is_some() {
            Mpi::leave();
        }
    }
}

#[cfg(not(feature = "mpi"))]
mod job {
    use super::{Arc, Collective, Result, Solo};
    use crate::Error;
    use crate::engine::collective::Launched;
    use std::time::Duration;

    /// How long the others leave it to process 0 to say why; launchers end all when one fails.
    const DEFERENCE: Duration = Duration::from_secs(2);

    #[expect(clippy::unnecessary_wraps, reason = "joining others can fail")]
    pub(crate) fn join() -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(Solo))
    }

    /// Refuses to train where a launcher has started several processes, which would be as many runs of the same. Process 0 says so.
    pub(crate) fn check() -> Result<()> {
        let Some(Launched { variable, world, rank }) = Launched::detect()? else { return Ok(()) };
        if rank > 0 {
            std::thread::sleep(DEFERENCE);
            std::process::exit(2);
        }
        let message = format!(
            "it says that this is one of {world} processes, but this program was built for one; build it with `--features mpi` \
             to train in {world}, or remove the variable for {world} separate runs"
        );
        Err(Error::config(variable, message))
    }

    pub(crate) fn end_with(_: &str, _: u8) {}

    pub(crate) fn leave() {}
}

pub(crate) use job::{check, end_with, join, leave};
