//! Processes that train one model together: who they are, how bytes go between them, and what is agreed on by that.
//!
//! There is one primitive, [`Collective::exchange`]. No library reduction is used: those choose their order of summation by
//! the number of processes, and results would hang on it. Everything that is summed here is summed by us, in one order.

pub mod gather;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod shards;
mod wire;

pub use shards::Shards;
pub(crate) use wire::{Reader, Writer, range_bytes, write_range};

use crate::{Error, Result};
use std::fmt;
use std::time::Duration;

/// A process that a launcher has started as one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The launcher's variable that says how many there are.
    pub variable: &'static str,
    /// How many there are.
    pub world: usize,
    /// Which of them this is.
    pub rank: usize,
}

impl Launched {
    /// What `mpirun`, `srun` or a Kubernetes MPI job says in the variables of this process.
    ///
    /// # Errors
    /// If a launcher's variable is not a number: training alone in silence would be a guess.
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
            if let Some(world) = number(variable, 1)? {
                let rank = number(rank, 0)?.unwrap_or(0);
                return Ok((world > 1).then_some(Self { variable, world, rank }));
            }
        }
        Ok(None)
    }
}

/// The processes of a run.
pub trait Collective: fmt::Debug + Send + Sync {
    /// This one, from 0 on. Process 0 leads: it decides, writes and shows.
    fn rank(&self) -> usize;

    /// How many there are.
    fn world(&self) -> usize;

    /// Sends `out[r]` to every process `r` and fills `into[r]` with what it sends to this one. Both sides know the lengths;
    /// where there is nothing to send, nothing is. What a process has for itself stays where it is.
    ///
    /// # Errors
    /// If a process cannot be reached, or sends nothing for too long; it is named.
    fn exchange(&self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<()>;

    /// A process in words.
    fn name(&self, rank: usize) -> String {
        format!("process {rank}")
    }

    /// How many run on this machine.
    fn beside(&self) -> usize {
        1
    }

    /// Which of these this one is.
    fn local_rank(&self) -> usize {
        0
    }

    /// How long exchanges have taken so far, waiting for others included.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
}

/// A process alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn exchange(&self, _: &[&[u8]], _: &mut [&mut [u8]]) -> Result<()> {
        Ok(())
    }
}

impl dyn Collective + '_ {
    /// Whether this process leads.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// What every process has, by rank.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (rank, world) = (self.rank(), self.world());
        if world == 1 {
            return Ok(vec![own.to_vec()]);
        }
        let to_others = |bytes| (0..world).map(|other| if other == rank { &[] as &[u8] } else { bytes }).collect();
        let others = |all: &'_ mut Vec<Vec<u8>>, out: Vec<&[u8]>| {
            let mut into: Vec<&mut [u8]> = all.iter_mut().map(Vec::as_mut_slice).collect();
            self.exchange(&out, &mut into)
        };
        let length = (own.len() as u64).to_le_bytes();
        let mut lengths: Vec<_> = (0..world).map(|other| vec![0; if other == rank { 0 } else { 8 }]).collect();
        others(&mut lengths, to_others(&length))?;
        let mut all = Vec::with_capacity(world);
        for length in &lengths {
            let length: [u8; 8] = length.as_slice().try_into().unwrap_or_default();
            all.push(vec![0; u64::from_le_bytes(length) as usize]);
        }
        others(&mut all, to_others(own))?;
        all[rank] = own.to_vec();
        Ok(all)
    }

    /// The same bytes from process 0 to all: `bytes` is what it sends, or where it arrives.
    pub fn broadcast(&self, bytes: &mut [u8]) -> Result<()> {
        let world = self.world();
        let mut none: Vec<&mut [u8]> = (0..world).map(|_| &mut [] as &mut [u8]).collect();
        if self.leads() {
            let out: Vec<&[u8]> = (0..world).map(|other| if other == 0 { &[] } else { &*bytes }).collect();
            return self.exchange(&out, &mut none);
        }
        none[0] = bytes;
        self.exchange(&vec![&[] as &[u8]; world], &mut none)
    }

    /// Sends bytes to one process.
    pub fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        let mut out = vec![&[] as &[u8]; self.world()];
        out[to] = bytes;
        self.exchange(&out, &mut (0..self.world()).map(|_| &mut [] as &mut [u8]).collect::<Vec<_>>())
    }

    /// Receives bytes from one process.
    pub fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<()> {
        let mut into: Vec<&mut [u8]> = (0..self.world()).map(|_| &mut [] as &mut [u8]).collect();
        into[from] = bytes;
        self.exchange(&vec![&[] as &[u8]; self.world()], &mut into)
    }

    /// The largest of all processes' values, element by element; NaN counts for nothing.
    pub fn max(&self, values: &mut [f32]) -> Result<()> {
        let own: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for other in self.all_gather(&own)? {
            for (value, bytes) in values.iter_mut().zip(other.as_chunks::<4>().0) {
                *value = value.max(f32::from_le_bytes(*bytes));
            }
        }
        Ok(())
    }

    /// The values of all processes one after the other, in the order of their ranks.
    pub fn concatenate(&self, own: &[f64]) -> Result<Vec<f64>> {
        let own: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all = self.all_gather(&own)?.concat();
        Ok(all.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_say_how_many_processes_there_are() {
        let launched = |variables: &[(&str, &str)]| {
            let find =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            let found = Launched::from_variables(find).map_err(|error| error.to_string())?;
            Ok::<_, String>(found.map(|it| (it.variable, it.world, it.rank)))
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
