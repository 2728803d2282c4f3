//! The processes of a job that `mpirun`, `srun` or Kubernetes has started, which exchange bytes through MPI.
//!
//! MPI is initialized only if a launcher has set its variables, so the same program also runs as a single process.
//! Every wait has a limit: if a process sends nothing for too long, the job ends with its name.

use super::{Job, LaunchEnv, Place, ProcessGroup, pause};
use crate::{Error, Result};
use mpi::Threading;
use mpi::environment::{Universe, processor_name};
use mpi::request::scope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Bytes of an MPI message. Libraries send as much over TCP without a handshake. A handshake would wait for the data in
/// the same direction, so two processes would send large data one after the other instead of at the same time.
const MESSAGE_BYTES: usize = 60 << 10;

static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);

/// The processes of an MPI job.
#[derive(Debug)]
pub struct Mpi {
    world_size: usize,
    job: Job,
}

impl Mpi {
    /// Initializes MPI, if a launcher has started this process as one of several. `on_timeout` ends the process, and
    /// with it the job, after the time limit. Fails if MPI does not start, or does not support several threads.
    pub fn init(on_timeout: fn(&str) -> !) -> Result<Option<Self>> {
        let Some(launch) = LaunchEnv::detect()? else { return Ok(None) };
        let mut job = Job::new(launch.rank, on_timeout)?;
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| Error::Collective("MPI was started twice in one process".into()))?;
        let world = universe.world();
        let world_size = world.size() as usize;
        job.rank = world.rank() as usize;
        *UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner) = Some(universe);
        if threading < Threading::Serialized {
            let message = "this MPI library serves only the thread that started it; use one with MPI_THREAD_SERIALIZED";
            return Err(Error::Collective(message.into()));
        }
        let mut group = Self { world_size, job };
        let host = processor_name().unwrap_or_default();
        group.job.places = (&group as &dyn ProcessGroup).all_gather_messages(&Place::on(host))?;
        Ok((world_size > 1).then_some(group))
    }

    /// Finalizes MPI, which waits for the other processes.
    pub fn finalize() {
        UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Ends the job with an exit code, if this process belongs to one.
    pub fn abort(code: u8) {
        if UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            SimpleCommunicator::world().abort(code.into())
        }
    }
}

impl ProcessGroup for Mpi {
    fn rank(&self) -> usize {
        self.job.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn job(&self) -> Option<&Job> {
        Some(&self.job)
    }

    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        let began = Instant::now();
        let world = SimpleCommunicator::world();
        scope(|scope| {
            let mut queues = Vec::new();
            for (from, bytes) in into.iter_mut().enumerate() {
                let process = world.process_at_rank(from as i32);
                let pieces = bytes.chunks_mut(MESSAGE_BYTES).map(|piece| process.immediate_receive_into(scope, piece));
                queues.push((from, pieces.collect::<VecDeque<_>>()));
            }
            for (to, bytes) in out.iter().enumerate() {
                let process = world.process_at_rank(to as i32);
                let pieces = bytes.chunks(MESSAGE_BYTES).map(|piece| process.immediate_send(scope, piece));
                queues.push((to, pieces.collect()));
            }
            let mut moved = Instant::now();
            while let Some(other) = queues.iter().find(|(_, queue)| !queue.is_empty()).map(|(other, _)| *other) {
                let mut done = false;
                for (_, queue) in &mut queues {
                    while let Some(request) = queue.pop_front() {
                        if let Err(request) = request.test() {
                            queue.push_front(request);
                            break;
                        }
                        done = true;
                    }
                }
                if done {
                    moved = Instant::now();
                    continue;
                }
                self.job.check_silence(moved, other);
                pause(moved);
            }
        });
        self.job.add_comm_time(began);
        Ok(())
    }
}
