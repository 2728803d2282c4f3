//! Reads the shards of masters and moments, which each process has a part of, for a checkpoint or a probe.

use super::messages::LeaderMessage;
use crate::engine::collective::{ProcessGroup, Shards, range_bytes, write_range};
use crate::engine::model::Parameters;
use crate::engine::optim::{BlockwiseQuantized, QuantizedMoments};
use crate::store::checkpoint::{ShardedTensors, StateTensor};
use crate::train::state::TrainState;
use crate::{Error, Result};
use candle_core::Tensor;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Number of values that the leader requests at a time.
const REQUEST: usize = 1 << 20;

/// The shard of one tensor in this process, and the sizes of all others.
struct TensorShard<'a> {
    tensor: &'a Tensor,
    /// Whether it has a value for each block of 8-bit moments.
    per_block: bool,
    shards: &'a Shards,
    /// The index of the parameter in `shards`.
    parameter: usize,
}

impl<'a> TensorShard<'a> {
    fn new(state: &'a TrainState, kind: StateTensor, index: usize) -> Option<Self> {
        let masters = state.masters.parameters();
        let wide = |parameters: &'a Parameters| {
            let shards = parameters.shards()?;
            Some(Self { tensor: &parameters[index], per_block: false, shards, parameter: index })
        };
        let narrow = |which: usize, per_block: bool| {
            let QuantizedMoments { name, moments, .. } = &state.adamw.quantized_moments[index];
            let tensor = if per_block { &moments[which].absmax } else { &moments[which].codes };
            Some(Self { tensor, per_block, shards: masters.shards()?, parameter: masters.position(name)? })
        };
        match kind {
            StateTensor::Masters => wide(masters),
            StateTensor::ExpAvg => wide(&state.adamw.exp_avg),
            StateTensor::ExpAvgSq => wide(&state.adamw.exp_avg_sq),
            StateTensor::ExpAvgCodes => narrow(0, false),
            StateTensor::ExpAvgAbsmax => narrow(0, true),
            StateTensor::ExpAvgSqCodes => narrow(1, false),
            StateTensor::ExpAvgSqAbsmax => narrow(1, true),
        }
    }

    fn range(&self, rank: usize) -> Range<usize> {
        let elements = self.shards.range(rank, self.parameter);
        if self.per_block { BlockwiseQuantized::blocks(&elements) } else { elements }
    }

    /// Values of this process, which has rank `rank`, as bytes.
    fn bytes(&self, rank: usize, range: &Range<usize>) -> Result<Vec<u8>> {
        let first = self.range(rank).start;
        let mut bytes = Vec::new();
        range_bytes(self.tensor, range.start - first..range.end - first, &mut bytes)?;
        Ok(bytes)
    }
}

/// The state of all processes. The leader reads it, and workers [serve](Self::serve) its requests.
pub(in crate::train::trainer) struct GatheredState<'a> {
    group: &'a dyn ProcessGroup,
    state: &'a TrainState,
    /// Held during each exchange, so that heartbeats come between them.
    pub(in crate::train::trainer) exchange: Mutex<()>,
}

impl<'a> GatheredState<'a> {
    pub(in crate::train::trainer) fn new(group: &'a dyn ProcessGroup, state: &'a TrainState) -> Self {
        Self { group, state, exchange: Mutex::default() }
    }

    /// Passes the values of a tensor to `receive`, in order, a part at a time.
    fn read(&self, tensor: StateTensor, index: usize, mut receive: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let Some(shard) = TensorShard::new(self.state, tensor, index) else { return Ok(()) };
        for owner in 0..self.group.world_size() {
            let range = shard.range(owner);
            for start in range.clone().step_by(REQUEST) {
                let range = start..range.end.min(start + REQUEST);
                if owner == 0 {
                    receive(&shard.bytes(0, &range)?)?;
                    continue;
                }
                let mut bytes = vec![0; range.len() * shard.tensor.dtype().size_in_bytes()];
                let held = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
                self.group.send_message(owner, &LeaderMessage::Read { tensor, index, range })?;
                self.group.receive(owner, &mut bytes)?;
                drop(held);
                receive(&bytes)?;
            }
        }
        Ok(())
    }

    /// Sends the values that a [`LeaderMessage::Read`] requests; ignores other messages.
    pub(super) fn serve(&self, message: &LeaderMessage) -> Result<()> {
        let LeaderMessage::Read { tensor, index, range } = message else { return Ok(()) };
        let Some(shard) = TensorShard::new(self.state, *tensor, *index) else { return Ok(()) };
        self.group.send(0, &shard.bytes(self.group.rank(), range)?)
    }

    /// All masters on the leader; workers serve its requests and return `None`.
    pub(in crate::train::trainer) fn masters(&self) -> Result<Option<Parameters>> {
        if !self.group.is_leader() {
            loop {
                match LeaderMessage::receive(self.group)? {
                    LeaderMessage::ReadsDone => return Ok(None),
                    message => self.serve(&message)?,
                }
            }
        }
        let dtype = self.state.masters.dtype();
        let masters = self.state.weights.zeros_like(dtype)?;
        for parameter in 0..masters.tensors().len() {
            let mut start = 0;
            self.read(StateTensor::Masters, parameter, |bytes| {
                let range = start..start + bytes.len() / dtype.size_in_bytes();
                start = range.end;
                write_range(&masters[parameter], range, bytes).map(drop)
            })?;
        }
        self.group.broadcast(&LeaderMessage::ReadsDone)?;
        Ok(Some(masters))
    }
}

impl ShardedTensors for GatheredState<'_> {
    fn write(&self, tensor: StateTensor, index: usize, out: &mut dyn Write, path: &Path) -> Result<()> {
        // In the same small pieces as the rest of a checkpoint.
        self.read(tensor, index, |bytes| {
            bytes.chunks(1 << 16).try_for_each(|bytes| out.write_all(bytes)).map_err(Error::io("write", path))
        })
    }
}
