//! The processes that train one model together, and the exchange of bytes among them.
//!
//! [`ProcessGroup::all_to_all`] is the only primitive. No library reduction is used, because its order of summation,
//! and so the bits of a sum, would depend on the number of processes. The project sums in one fixed order.

pub(crate) mod async_exchange;
pub mod gather;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
pub mod shards;
mod tcp;
mod wire;

pub use shards::Shards;
pub use tcp::Tcp;
pub(crate) use wire::{range_bytes, write_range};

use crate::telemetry::allowed_cpus;
use crate::{Error, Result};
use bytemuck::Pod;
use candle_core::Tensor;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The variable with the time limit of an exchange in seconds.
const TIMEOUT_VARIABLE: &str = "FINETUNE_MPI_TIMEOUT_S";
const DEFAULT_TIMEOUT_SECS: u32 = 600;
/// The port of [`Master`] without `MASTER_PORT`, as `torchrun` has it.
const DEFAULT_PORT: usize = 29500;
/// The beginning of the error that a process's connection is lost, which is rarely the cause of a job's end.
pub(crate) const LOST: &str = "lost connection to";
/// The variable with [`Master::job`] where this program starts the processes.
pub(crate) const JOB_VARIABLE: &str = "FINETUNE_JOB";

/// The place of this process in a job, from the launcher's environment variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// The variable that contains the number of processes.
    pub variable: &'static str,
    /// Number of processes.
    pub world_size: usize,
    /// Rank of this process.
    pub rank: usize,
    /// The meeting point, if the processes connect by TCP.
    pub master: Option<Master>,
}

/// The address at which rank 0 of a job listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// A name or an address.
    pub host: String,
    /// A port.
    pub port: u16,
    /// The job's name, which its processes tell each other when they connect.
    pub job: String,
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl LaunchEnv {
    /// Reads the variables of `mpirun`, `srun` or a Kubernetes MPI job, or, if `MASTER_ADDR` is set, of `torchrun`;
    /// `None` for a single process. Fails if a launcher's variable is missing or not a number; training as a single
    /// process would be a guess.
    pub fn detect() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let number = |name, least: usize| {
            let Some(text) = variable(name).filter(|text| !text.is_empty()) else { return Ok(None) };
            text.parse().ok().filter(|number| *number >= least).map(Some).ok_or_else(|| {
                Error::config(name, format!("`{text}` is not a whole number of {least} or more; correct or remove it"))
            })
        };
        let master = match variable("MASTER_ADDR").filter(|host| !host.is_empty()) {
            None => None,
            Some(host) => {
                let port = number("MASTER_PORT", 1)?.unwrap_or(DEFAULT_PORT);
                // At its own port `torchrun` listens itself. Linux gives listeners odd ports and connections even ones,
                // so the port after an odd one may be in use.
                let is_taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
                let above = if is_taken { 2 } else { 0 };
                let port = u16::try_from(port).ok().and_then(|port| port.checked_add(above)).ok_or_else(|| {
                    Error::config("MASTER_PORT", format!("{port} is not a port from 1 to {}", u16::MAX - above))
                })?;
                let job = [JOB_VARIABLE, "TORCHELASTIC_RUN_ID"].into_iter().find_map(&variable);
                Some(Master { host, port, job: job.unwrap_or_default() })
            }
        };
        let torchrun = master.is_some().then_some(("WORLD_SIZE", "RANK"));
        let mut unranked = None;
        for (variable, of) in torchrun.into_iter().chain([
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            ("PMI_SIZE", "PMI_RANK"),
            ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ]) {
            let Some(world_size) = number(variable, 1)? else { continue };
            let Some(rank) = number(of, 0)? else {
                // A script for Slurm often sets `WORLD_SIZE` alone.
                unranked = unranked.or((world_size > 1).then_some((variable, of)));
                continue;
            };
            if rank >= world_size {
                return Err(Error::config(of, format!("{rank} is not below {variable}, which is {world_size}")));
            }
            return Ok((world_size > 1).then_some(Self { variable, world_size, rank, master }));
        }
        if let Some((variable, of)) = unranked {
            return Err(Error::config(of, format!("is missing next to {variable}; set it, or remove {variable}")));
        }
        Ok(None)
    }
}

/// The processes of a run. A single process is a group of one.
pub trait ProcessGroup: fmt::Debug + Send + Sync {
    /// The rank of this process, from 0. Rank 0 is the leader: it decides, writes files and drives the screen.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn world_size(&self) -> usize;

    /// Sends `out[r]` to each rank `r` and fills `into[r]` with the bytes that rank `r` sends to this process. Both
    /// sides know the lengths, and empty messages are not sent. This rank's own entries are empty. Fails if a process
    /// cannot be reached, or sends nothing within the time limit. The error names it.
    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()>;

    /// The facts about the processes of a real job; `None` if they are one, or threads.
    fn job(&self) -> Option<&Job> {
        None
    }

    /// The exchange between the GPUs of all processes; `None` if tensors go through host memory.
    fn gpus(&self) -> Option<&dyn TensorExchange> {
        None
    }

    /// Checks that no other process has ended, if this can be known without a message. Fails with an error that names
    /// the process.
    fn check_peers(&self) -> Result<()> {
        Ok(())
    }
}

/// An exchange of tensors between the GPUs of several processes.
pub trait TensorExchange: fmt::Debug + Send + Sync {
    /// Sends each tensor of `out` to its rank and fills each of `into` from its rank, after all that has been queued on
    /// the GPU and after earlier exchanges. Tensors are contiguous and not empty. Two processes list the tensors
    /// between them in the same order. Until [`Self::wait`] returns, `out` must not be written, and `into` not be used.
    /// Fails if NCCL refuses it, or an exchange has failed before.
    fn start(&self, out: Vec<(usize, Tensor)>, into: Vec<(usize, Tensor)>) -> Result<()>;

    /// Waits for the first exchange that has not been waited for. Returns the time after the end of the work before it.
    /// Fails if a process ends, or the exchange takes longer than the time limit.
    fn wait(&self) -> Result<Duration>;
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    host: String,
    /// The processors that it may use.
    cpus: Option<String>,
}

impl Place {
    fn on(host: String) -> Self {
        Self { host, cpus: allowed_cpus() }
    }

    fn has_host_of(&self, other: &Self) -> bool {
        self.host == other.host
    }
}

/// Facts about the processes of a job, and its measurements.
#[derive(Debug)]
pub struct Job {
    rank: usize,
    places: Vec<Place>,
    /// The longest time that an exchange waits for another process.
    limit: Duration,
    comm_nanos: AtomicU64,
    on_timeout: fn(&str) -> !,
}

impl Job {
    /// The facts before the processes know each other's places. `on_timeout` ends the process, and with it the job.
    fn new(rank: usize, on_timeout: fn(&str) -> !) -> Result<Self> {
        let seconds = match std::env::var(TIMEOUT_VARIABLE) {
            Err(_) => DEFAULT_TIMEOUT_SECS,
            Ok(text) => text.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| {
                let most = u32::MAX;
                Error::config(TIMEOUT_VARIABLE, format!("`{text}` is not a whole number of seconds from 1 to {most}"))
            })?,
        };
        let limit = Duration::from_secs(seconds.into());
        Ok(Self { rank, places: Vec::new(), limit, comm_nanos: AtomicU64::new(0), on_timeout })
    }

    fn name(&self, rank: usize) -> String {
        let host = self.places.get(rank).map_or_else(String::new, |place| format!(" on `{}`", place.host));
        format!("process {rank}{host}")
    }

    /// Number of processes among the first `ranks` whose place `is_near` this one's.
    fn count_near(&self, ranks: usize, is_near: impl Fn(&Place, &Place) -> bool) -> usize {
        let Some(own) = self.places.get(self.rank) else { return 0 };
        self.places.iter().take(ranks).filter(|place| is_near(place, own)).count()
    }

    /// Ends the job if nothing has moved since `moved` for too long, while process `other` has bytes to send or to
    /// take.
    fn check_silence(&self, moved: Instant, other: usize) {
        if moved.elapsed() > self.limit {
            let name = self.name(other);
            let seconds = self.limit.as_secs();
            (self.on_timeout)(&format!(
                "no message from {name} for {seconds} s; aborting the job. If this can be normal, raise {TIMEOUT_VARIABLE}"
            ));
        }
    }

    fn add_comm_time(&self, began: Instant) {
        self.comm_nanos.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

/// A group of one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl ProcessGroup for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_to_all(&self, _: &[&[u8]], _: &mut [&mut [u8]]) -> Result<()> {
        Ok(())
    }
}

impl dyn ProcessGroup + '_ {
    /// Whether this process has rank 0.
    pub fn is_leader(&self) -> bool {
        self.rank() == 0
    }

    /// The name of a process.
    pub fn name(&self, rank: usize) -> String {
        self.job().map_or_else(|| format!("process {rank}"), |job| job.name(rank))
    }

    /// Number of processes on this machine.
    pub fn local_world_size(&self) -> usize {
        self.job().map_or(1, |job| job.count_near(job.places.len(), Place::has_host_of).max(1))
    }

    /// The rank of this process among the processes of this machine.
    pub fn local_rank(&self) -> usize {
        self.job().map_or(0, |job| job.count_near(job.rank, Place::has_host_of))
    }

    /// Number of processes that share the cores of this one. A launcher may have bound each to separate ones.
    pub fn core_sharers(&self) -> usize {
        self.job().map_or(1, |job| job.count_near(job.places.len(), Place::eq).max(1))
    }

    /// Total time of all exchanges so far, including the wait for other processes.
    pub fn comm_time(&self) -> Duration {
        self.job().map_or(Duration::ZERO, |job| Duration::from_nanos(job.comm_nanos.load(Ordering::Relaxed)))
    }

    /// Sends `bytes` to the ranks that `is_recipient` selects.
    fn send_where(&self, is_recipient: impl Fn(usize) -> bool, bytes: &[u8]) -> Result<()> {
        let recipients = 0..self.world_size();
        let out: Vec<&[u8]> = recipients.map(|rank| if is_recipient(rank) { bytes } else { &[] }).collect();
        self.all_to_all(&out, &mut (0..self.world_size()).map(|_| &mut [] as &mut [u8]).collect::<Vec<_>>())
    }

    /// Sends bytes to one process.
    pub fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        self.send_where(|rank| rank == to, bytes)
    }

    /// Receives `bytes.len()` bytes from one process.
    pub fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        let mut into: Vec<&mut [u8]> = (0..self.world_size()).map(|_| &mut [] as &mut [u8]).collect();
        into[from] = bytes;
        self.all_to_all(&vec![&[] as &[u8]; self.world_size()], &mut into)
    }

    /// Sends a message to one process, which calls `receive_message`.
    pub fn send_message(&self, to: usize, message: &impl Serialize) -> Result<()> {
        to_frames(message)?.iter().try_for_each(|bytes| self.send(to, bytes))
    }

    /// Sends a message to all other processes, which call `receive_message`.
    pub fn broadcast(&self, message: &impl Serialize) -> Result<()> {
        let own = self.rank();
        to_frames(message)?.iter().try_for_each(|bytes| self.send_where(|rank| rank != own, bytes))
    }

    /// Receives a message from one process. Fails if it has a different type, which happens only if the processes run
    /// different builds.
    pub fn receive_message<T: DeserializeOwned>(&self, from: usize) -> Result<T> {
        let mut length = [0; 8];
        self.receive(from, &mut length)?;
        let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
        self.receive(from, &mut bytes)?;
        from_json(&bytes)
    }

    /// The bytes of all processes, by rank; `lengths` are the byte counts.
    fn gather_bytes(&self, own: Vec<u8>, lengths: impl Iterator<Item = usize>) -> Result<Vec<Vec<u8>>> {
        let rank = self.rank();
        let length = |(other, length)| if other == rank { 0 } else { length };
        let mut all: Vec<Vec<u8>> = lengths.enumerate().map(length).map(|length| vec![0; length]).collect();
        let out: Vec<&[u8]> = (0..all.len()).map(|other| if other == rank { &[] } else { &own[..] }).collect();
        self.all_to_all(&out, &mut all.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
        all[rank] = own;
        Ok(all)
    }

    /// The values of all processes, by rank. Their numbers may differ.
    pub fn all_gather<T: Pod>(&self, own: &[T]) -> Result<Vec<Vec<T>>> {
        let bytes: &[u8] = bytemuck::cast_slice(own);
        let length = (bytes.len() as u64).to_le_bytes();
        let lengths = self.gather_bytes(length.to_vec(), (0..self.world_size()).map(|_| length.len()))?;
        let lengths = lengths.iter().map(|length| bytemuck::pod_read_unaligned::<u64>(length) as usize);
        let all = self.gather_bytes(bytes.to_vec(), lengths)?;
        let values = |bytes: &Vec<u8>| bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        Ok(all.iter().map(values).collect())
    }

    /// The messages of all processes, by rank.
    pub fn all_gather_messages<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        self.all_gather(&to_json(own)?)?.iter().map(|bytes| from_json(bytes)).collect()
    }

    /// Replaces each value by its maximum over all processes; ignores NaN.
    pub fn max(&self, values: &mut [f32]) -> Result<()> {
        for others in self.all_gather(values)? {
            for (value, other) in values.iter_mut().zip(others) {
                *value = value.max(other);
            }
        }
        Ok(())
    }
}

/// Between two polls of an exchange in which nothing has moved since `moved`: sleeps if that is long ago.
#[cfg(any(feature = "cuda", feature = "mpi"))]
fn pause(moved: Instant) {
    if moved.elapsed() > Duration::from_millis(2) {
        std::thread::sleep(Duration::from_micros(50));
    } else {
        std::thread::yield_now();
    }
}

fn to_json(message: &impl Serialize) -> Result<Vec<u8>> {
    Ok(serde_json::to_vec(message).map_err(candle_core::Error::wrap)?)
}

/// A message as its length and its bytes.
fn to_frames(message: &impl Serialize) -> Result<[Vec<u8>; 2]> {
    let bytes = to_json(message)?;
    Ok([(bytes.len() as u64).to_le_bytes().to_vec(), bytes])
}

fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::Collective(format!("received an unknown message ({error}); all processes must run the same build"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::subprocess::JOB_VARIABLES;

    #[test]
    fn only_processes_with_the_same_processors_share_cores() {
        let mut job = Job::new(1, |message| panic!("{message}")).unwrap();
        let place = |(host, cpus): (&str, &str)| Place { host: host.into(), cpus: Some(cpus.into()) };
        // Those of the second machine, and one that a launcher has bound to other processors.
        job.places = [("a", "0-3"), ("a", "0-3"), ("a", "4-7"), ("b", "0-3")].map(place).into();
        assert_eq!((job.count_near(4, Place::eq), job.count_near(1, Place::eq)), (2, 1));
        assert_eq!(job.count_near(4, Place::has_host_of), 3);
    }

    #[test]
    fn the_variables_of_launchers_are_read() {
        let launched = |variables: &[(&str, &str)]| {
            let find = |name: &str| {
                assert!(JOB_VARIABLES.contains(&name), "a user's program would inherit {name}");
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            let found = LaunchEnv::from_variables(find).map_err(|error| error.to_string())?;
            Ok::<_, String>(found.map(|it| (it.variable, it.world_size, it.rank, it.master)))
        };
        let one = Ok(None);
        assert_eq!(launched(&[]), one);
        assert_eq!(launched(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), one, "`sbatch` alone starts one process");
        assert_eq!(launched(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")]), one);
        assert_eq!(launched(&[("OMPI_COMM_WORLD_SIZE", "")]), one);
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "3"), ("OMPI_COMM_WORLD_RANK", "2")];
        assert_eq!(launched(&open_mpi), Ok(Some(("OMPI_COMM_WORLD_SIZE", 3, 2, None))));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "5")];
        assert_eq!(launched(&slurm), Ok(Some(("SLURM_STEP_NUM_TASKS", 8, 5, None))));
        let torchrun = [("WORLD_SIZE", "2"), ("RANK", "1")];
        assert_eq!(launched(&torchrun), one, "other programs have such a variable");
        let with = |more: &[(&'static str, &'static str)]| {
            launched(&[&torchrun[..], &[("MASTER_ADDR", "node1")], more].concat())
        };
        let at = |port, job: &str| {
            Ok(Some(("WORLD_SIZE", 2, 1, Some(Master { host: "node1".into(), port, job: job.into() }))))
        };
        assert_eq!(with(&[]), at(29500, ""));
        let sized = [("WORLD_SIZE", "8"), ("MASTER_ADDR", "node1")];
        let at_29500 = Some(Master { host: "node1".into(), port: 29500, job: String::new() });
        assert_eq!(launched(&[sized, slurm].concat()), Ok(Some(("SLURM_STEP_NUM_TASKS", 8, 5, at_29500))));
        assert_eq!(
            launched(&sized).expect_err("no rank"),
            "RANK: is missing next to WORLD_SIZE; set it, or remove WORLD_SIZE"
        );
        let elastic =
            [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "a7"), ("MASTER_PORT", "1234")];
        assert_eq!(with(&elastic), at(1236, "a7"));
        let refused = |port, most: &str| Err(format!("MASTER_PORT: {port} is not a port from 1 to {most}"));
        assert_eq!(with(&[("MASTER_PORT", "65536")]), refused("65536", "65535"));
        assert_eq!(with(&[elastic[0], ("MASTER_PORT", "65534")]), refused("65534", "65533"));
        for (size, rank, named) in [
            ("banana", "0", "OMPI_COMM_WORLD_SIZE: `banana` is not a whole number of 1 or more"),
            ("0", "0", "OMPI_COMM_WORLD_SIZE: `0` is not a whole number of 1 or more"),
            ("-2", "0", "OMPI_COMM_WORLD_SIZE: `-2` is not"),
            ("2", "x", "OMPI_COMM_WORLD_RANK: `x` is not a whole number of 0 or more"),
            ("2", "2", "OMPI_COMM_WORLD_RANK: 2 is not below OMPI_COMM_WORLD_SIZE, which is 2"),
        ] {
            let refused = launched(&[("OMPI_COMM_WORLD_SIZE", size), ("OMPI_COMM_WORLD_RANK", rank)]).expect_err(size);
            assert!(refused.starts_with(named), "{refused}");
        }
    }
}
