//! The processes of a job that `mpirun`, `srun` or Kubernetes has started, which exchange bytes through MPI.
//!
//! MPI is initialized only if a launcher has set its variables, so the same program also runs as a single process. Every wait has
//! a limit: if a process sends nothing for too long, the job ends with its name.

use super::{LaunchEnv, ProcessGroup};
use crate::{Error, Result};
use mpi::Threading;
use mpi::environment::{Universe, processor_name};
use mpi::request::scope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The variable with the time limit in seconds; [`DEFAULT_TIMEOUT_SECS`] without it.
const TIMEOUT_VARIABLE: &str = "FINETUNE_MPI_TIMEOUT_S";
const DEFAULT_TIMEOUT_SECS: u64 = 600;
/// Messages are polled without a pause for this long, then at intervals of [`POLL_INTERVAL`].
const BUSY_POLLING: Duration = Duration::from_millis(2);
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Bytes of an MPI message. Libraries send as much over TCP without a handshake. A handshake would wait for the data in the
/// same direction, so two processes would send large data one after the other instead of at the same time.
const MESSAGE_BYTES: usize = 60 << 10;

static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);

/// The processes of an MPI job.
#[derive(Debug)]
pub struct Mpi {
    rank: usize,
    world_size: usize,
    /// Host of each process.
    hosts: Vec<String>,
    limit: Duration,
    comm_nanos: AtomicU64,
    on_timeout: fn(&str) -> !,
}

impl Mpi {
    /// Initializes MPI, if a launcher has started this process as one of several. `on_timeout` ends the process, and with it the
    /// job, after the time limit.
    ///
    /// # Errors
    /// If MPI does not start, or does not support several threads.
    pub fn init(on_timeout: fn(&str) -> !) -> Result<Option<Self>> {
        if LaunchEnv::detect()?.is_none() {
            return Ok(None);
        }
        let seconds = match std::env::var(TIMEOUT_VARIABLE) {
            Err(_) => DEFAULT_TIMEOUT_SECS,
            Ok(text) => text.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| {
                Error::config(TIMEOUT_VARIABLE, format!("`{text}` is not a whole number of seconds, at least 1"))
            })?,
        };
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| Error::Collective("MPI was started twice in one process".into()))?;
        let world = universe.world();
        let (rank, world_size) = (world.rank() as usize, world.size() as usize);
        *UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner) = Some(universe);
        if threading < Threading::Serialized {
            let message = "this MPI library serves only the thread that started it; use one with MPI_THREAD_SERIALIZED";
            return Err(Error::Collective(message.into()));
        }
        let limit = Duration::from_secs(seconds);
        let mut group = Self { rank, world_size, hosts: Vec::new(), limit, comm_nanos: AtomicU64::new(0), on_timeout };
        let host = processor_name().unwrap_or_default();
        group.hosts = (&group as &dyn ProcessGroup).all_gather_messages(&host)?;
        Ok((world_size > 1).then_some(group))
    }

    /// Number of processes on this machine among the first `ranks`.
    fn ranks_on_host(&self, ranks: usize) -> usize {
        let own = self.hosts.get(self.rank);
        self.hosts.iter().take(ranks).filter(|host| Some(*host) == own).count()
    }

    /// Finalizes MPI, which waits for the other processes.
    pub fn finalize() {
        UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Ends the job with an exit code.
    pub fn abort(code: u8) -> ! {
        SimpleCommunicator::world().abort(code.into())
    }
}

impl ProcessGroup for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn name(&self, rank: usize) -> String {
        let host = self.hosts.get(rank).map_or_else(String::new, |host| format!(" on `{host}`"));
        format!("process {rank}{host}")
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
                let idle = moved.elapsed();
                match () {
                    () if done => moved = Instant::now(),
                    () if idle > self.limit => {
                        let message = format!(
                            "no message from {} for {} s; aborting the job. If this can be normal, raise \
                             {TIMEOUT_VARIABLE}",
                            self.name(other),
                            self.limit.as_secs()
                        );
                        (self.on_timeout)(&message)
                    }
                    () if idle > BUSY_POLLING => std::thread::sleep(POLL_INTERVAL),
                    () => std::thread::yield_now(),
                }
            }
        });
        self.comm_nanos.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn comm_time(&self) -> Duration {
        Duration::from_nanos(self.comm_nanos.load(Ordering::Relaxed))
    }

    fn local_world_size(&self) -> usize {
        self.ranks_on_host(self.world_size).max(1)
    }

    fn local_rank(&self) -> usize {
        self.ranks_on_host(self.rank)
    }
}
