//! Processes that `mpirun`, `srun` or a Kubernetes MPI job has started, and bytes between them by MPI.
//!
//! MPI is started only where a launcher has set its variables, so the same program runs alone as ever. Nothing waits without
//! limit: a process that sends nothing for too long is named, and the job ends.

use super::{Collective, Launched};
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

/// Seconds that a process may send nothing for, if not these.
const LIMIT: &str = "FINETUNE_MPI_TIMEOUT_S";
const DEFAULT_LIMIT: u64 = 600;
/// How long to look for messages without a pause; then every so often.
const BUSY: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_micros(50);

/// Bytes of a message: as much as libraries send over TCP without asking first. The answer would stand in line behind what
/// goes the same way, and two processes that send each other much would do so in turn instead of at once.
const PIECE: usize = 60 << 10;

static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);

/// The processes of an MPI job.
#[derive(Debug)]
pub struct Mpi {
    rank: usize,
    world: usize,
    /// Host of each process.
    hosts: Vec<String>,
    limit: Duration,
    waited: AtomicU64,
    give_up: fn(&str) -> !,
}

impl Mpi {
    /// Joins the job, if a launcher has started this process as one of several. `give_up` ends the process, and with it the
    /// job, after a wait of too long.
    ///
    /// # Errors
    /// If MPI does not start, or not for several threads.
    pub fn join(give_up: fn(&str) -> !) -> Result<Option<Self>> {
        if Launched::detect()?.is_none() {
            return Ok(None);
        }
        let seconds = match std::env::var(LIMIT) {
            Err(_) => DEFAULT_LIMIT,
            Ok(text) => text.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| {
                Error::config(LIMIT, format!("`{text}` is not a whole number of seconds of 1 or more"))
            })?,
        };
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| Error::Collective("MPI was started twice in one process".into()))?;
        let world = universe.world();
        let (rank, count) = (world.rank() as usize, world.size() as usize);
        *UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner) = Some(universe);
        if threading < Threading::Serialized {
            let message = "this MPI library serves the thread that started it only; it needs MPI_THREAD_SERIALIZED";
            return Err(Error::Collective(message.into()));
        }
        let limit = Duration::from_secs(seconds);
        let mut joined = Self { rank, world: count, hosts: Vec::new(), limit, waited: AtomicU64::new(0), give_up };
        let host = processor_name().unwrap_or_default();
        let hosts = (&joined as &dyn Collective).all_gather(host.as_bytes())?;
        joined.hosts = hosts.iter().map(|host| String::from_utf8_lossy(host).into_owned()).collect();
        Ok((count > 1).then_some(joined))
    }

    /// How many of the first `ranks` processes run on this machine.
    fn on_this_host(&self, ranks: usize) -> usize {
        let own = self.hosts.get(self.rank);
        self.hosts.iter().take(ranks).filter(|host| Some(*host) == own).count()
    }

    /// Ends this process's part in the job; waits for the others.
    pub fn leave() {
        UNIVERSE.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Ends the job with an exit code.
    pub fn abort(code: u8) -> ! {
        SimpleCommunicator::world().abort(code.into())
    }
}

impl Collective for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn name(&self, rank: usize) -> String {
        let host = self.hosts.get(rank).map_or_else(String::new, |host| format!(" on `{host}`"));
        format!("process {rank}{host}")
    }

    fn exchange(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()> {
        let began = Instant::now();
        let world = SimpleCommunicator::world();
        scope(|scope| {
            let mut queues = Vec::new();
            for (from, bytes) in into.iter_mut().enumerate() {
                let process = world.process_at_rank(from as i32);
                let pieces = bytes.chunks_mut(PIECE).map(|piece| process.immediate_receive_into(scope, piece));
                queues.push((from, pieces.collect::<VecDeque<_>>()));
            }
            for (to, bytes) in out.iter().enumerate() {
                let process = world.process_at_rank(to as i32);
                let pieces = bytes.chunks(PIECE).map(|piece| process.immediate_send(scope, piece));
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
                            "{} has sent or taken nothing for {} s, so the job ends; where that is how long it may take, \
                             raise {LIMIT}",
                            self.name(other),
                            self.limit.as_secs()
                        );
                        (self.give_up)(&message)
                    }
                    () if idle > BUSY => std::thread::sleep(PAUSE),
                    () => std::thread::yield_now(),
                }
            }
        });
        self.waited.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    fn beside(&self) -> usize {
        self.on_this_host(self.world).max(1)
    }

    fn local_rank(&self) -> usize {
        self.on_this_host(self.rank)
    }
}
