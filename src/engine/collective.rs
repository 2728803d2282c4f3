//! The processes that train one model together, and the exchange of bytes among them.
//!
//! [`ProcessGroup::all_to_all`] is the only primitive. No library reduction is used, because its order of summation, and so
//! the bits of a sum, would depend on the number of processes. The project sums in one fixed order.

pub mod gather;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod shards;
mod wire;

pub use shards::Shards;
pub(crate) use wire::{range_bytes, write_range};

use crate::{Error, Result};
use bytemuck::Pod;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::time::Duration;

/// The place of this process in a job, from the launcher's environment variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// The variable that contains the number of processes.
    pub variable: &'static str,
    /// Number of processes.
    pub world_size: usize,
    /// Rank of this process.
    pub rank: usize,
}

impl LaunchEnv {
    /// Reads the variables of `mpirun`, `srun` or a Kubernetes MPI job; `None` for a single process.
    ///
    /// # Errors
    /// If a launcher's variable is not a number; training as a single process would be a guess.
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
        for (variable, rank) in [
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            ("PMI_SIZE", "PMI_RANK"),
            ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ] {
            if let Some(world_size) = number(variable, 1)? {
                let rank = number(rank, 0)?.unwrap_or(0);
                return Ok((world_size > 1).then_some(Self { variable, world_size, rank }));
            }
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

    /// Sends `out[r]` to each rank `r` and fills `into[r]` with the bytes that rank `r` sends to this process. Both sides
    /// know the lengths, and empty messages are not sent. Ignores this rank's entries.
    ///
    /// # Errors
    /// If a process cannot be reached, or sends nothing within the time limit. The error names it.
    fn all_to_all(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()>;

    /// The name of a process.
    fn name(&self, rank: usize) -> String {
        format!("process {rank}")
    }

    /// Number of processes on this machine.
    fn local_world_size(&self) -> usize {
        1
    }

    /// The rank of this process among the processes of this machine.
    fn local_rank(&self) -> usize {
        0
    }

    /// Total time of all exchanges so far, including the wait for other processes.
    fn comm_time(&self) -> Duration {
        Duration::ZERO
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

    /// Receives a message from one process.
    ///
    /// # Errors
    /// If it has a different type, which happens only if the processes run different builds.
    pub fn receive_message<T: DeserializeOwned>(&self, from: usize) -> Result<T> {
        let mut length = [0; 8];
        self.receive(from, &mut length)?;
        let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
        self.receive(from, &mut bytes)?;
        from_json(&bytes)
    }

    /// The bytes of all processes, by rank; `lengths` are the byte counts.
    fn gather_bytes(&self, own: &[u8], lengths: impl Iterator<Item = usize>) -> Result<Vec<Vec<u8>>> {
        let rank = self.rank();
        let mut all: Vec<Vec<u8>> = lengths.map(|length| vec![0; length]).collect();
        all[rank].clear();
        let out: Vec<&[u8]> = (0..all.len()).map(|other| if other == rank { &[] } else { own }).collect();
        self.all_to_all(&out, &mut all.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
        all[rank] = own.to_vec();
        Ok(all)
    }

    /// The values of all processes, by rank. Their numbers may differ.
    pub fn all_gather<T: Pod>(&self, own: &[T]) -> Result<Vec<Vec<T>>> {
        let bytes: &[u8] = bytemuck::cast_slice(own);
        let length = (bytes.len() as u64).to_le_bytes();
        let lengths = self.gather_bytes(&length, (0..self.world_size()).map(|_| length.len()))?;
        let lengths = lengths.iter().map(|length| bytemuck::pod_read_unaligned::<u64>(length) as usize);
        let all = self.gather_bytes(bytes, lengths)?;
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

    #[test]
    fn the_variables_of_launchers_are_read() {
        let launched = |variables: &[(&str, &str)]| {
            let find =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            let found = LaunchEnv::from_variables(find).map_err(|error| error.to_string())?;
            Ok::<_, String>(found.map(|it| (it.variable, it.world_size, it.rank)))
        };
        let one = Ok(None);
        assert_eq!(launched(&[]), one);
        assert_eq!(launched(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), one, "`sbatch` alone starts one process");
        assert_eq!(launched(&[("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_RANK", "0")]), one);
        assert_eq!(launched(&[("OMPI_COMM_WORLD_SIZE", "")]), one);
        let open_mpi = [("OMPI_COMM_WORLD_SIZE", "3"), ("OMPI_COMM_WORLD_RANK", "2")];
        assert_eq!(launched(&open_mpi), Ok(Some(("OMPI_COMM_WORLD_SIZE", 3, 2))));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "5")];
        assert_eq!(launched(&slurm), Ok(Some(("SLURM_STEP_NUM_TASKS", 8, 5))));
        for (size, rank, named) in [
            ("banana", "0", "OMPI_COMM_WORLD_SIZE: `banana` is not a whole number of 1 or more"),
            ("0", "0", "OMPI_COMM_WORLD_SIZE: `0` is not a whole number of 1 or more"),
            ("-2", "0", "OMPI_COMM_WORLD_SIZE: `-2` is not"),
            ("2", "x", "OMPI_COMM_WORLD_RANK: `x` is not a whole number of 0 or more"),
        ] {
            let refused = launched(&[("OMPI_COMM_WORLD_SIZE", size), ("OMPI_COMM_WORLD_RANK", rank)]).expect_err(size);
            assert!(refused.starts_with(named), "{refused}");
        }
    }
}
