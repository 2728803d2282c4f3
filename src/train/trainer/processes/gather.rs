//! Reads the shards of masters and moments, which each process has a part of, for a checkpoint or a probe.

use super::messages::LeaderMessage;
use crate::engine::collective::{ProcessGroup, Shards, range_bytes, write_range};
use crate::engine::kernels::view::host_range;
use crate::engine::model::Parameters;
use crate::engine::optim::BlockwiseQuantized;
use crate::store::checkpoint::{ShardedTensors, StateTensor};
use crate::train::state::TrainState;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

/// Number of values that the leader requests at a time.
const REQUEST: usize = 1 << 20;

/// A kind of values of a sharded tensor.
enum ShardData<'a> {
    Tensors(&'a Parameters),
    Codes(&'a Tensor),
    Absmax(&'a Tensor),
}

/// The shard of one tensor in this process, and the sizes of all others.
struct TensorShard<'a> {
    data: ShardData<'a>,
    index: usize,
    shards: &'a Shards,
    /// The index of the parameter in `shards`.
    parameter: usize,
}

impl<'a> TensorShard<'a> {
    fn new(state: &'a TrainState, tensor: StateTensor, index: usize) -> Option<Self> {
        let masters = state.masters.parameters();
        let tensors = |parameters: &'a Parameters| {
            let shards = parameters.shards()?;
            Some(Self { data: ShardData::Tensors(parameters), index, shards, parameter: index })
        };
        let moment = |which: usize, data: fn(&'a BlockwiseQuantized) -> ShardData<'a>| {
            let tensor = &state.adamw.quantized_moments()[index];
            let parameter = masters.position(&tensor.name)?;
            Some(Self { data: data(&tensor.moments[which]), index, shards: masters.shards()?, parameter })
        };
        match tensor {
            StateTensor::Masters => tensors(masters),
            StateTensor::ExpAvg => tensors(&state.adamw.exp_avg),
            StateTensor::ExpAvgSq => tensors(&state.adamw.exp_avg_sq),
            StateTensor::ExpAvgCodes => moment(0, |it| ShardData::Codes(&it.codes)),
            StateTensor::ExpAvgAbsmax => moment(0, |it| ShardData::Absmax(&it.absmax)),
            StateTensor::ExpAvgSqCodes => moment(1, |it| ShardData::Codes(&it.codes)),
            StateTensor::ExpAvgSqAbsmax => moment(1, |it| ShardData::Absmax(&it.absmax)),
        }
    }

    /// The values of process `rank`.
    fn range(&self, rank: usize) -> Range<usize> {
        let elements = self.shards.range(rank, self.parameter);
        if matches!(self.data, ShardData::Absmax(_)) { BlockwiseQuantized::blocks(&elements) } else { elements }
    }

    fn bytes_per_value(&self) -> usize {
        match self.data {
            ShardData::Tensors(parameters) => parameters[self.index].dtype().size_in_bytes(),
            ShardData::Codes(_) => 1,
            ShardData::Absmax(_) => DType::F32.size_in_bytes(),
        }
    }

    /// Values of this process, which has rank `rank`, as bytes.
    fn bytes(&self, rank: usize, range: &Range<usize>) -> Result<Vec<u8>> {
        let first = self.range(rank).start;
        let range = range.start - first..range.end - first;
        let mut bytes = Vec::new();
        match self.data {
            ShardData::Tensors(parameters) => range_bytes(&parameters[self.index], range, &mut bytes)?,
            ShardData::Codes(codes) => bytes = host_range(codes, range)?.to_vec1()?,
            ShardData::Absmax(absmax) => range_bytes(absmax, range, &mut bytes)?,
        }
        Ok(bytes)
    }
}

/// The state of all processes. The leader reads it, and workers [serve](Self::serve) its requests.
pub(in crate::train::trainer) struct GatheredState<'a> {
    pub(in crate::train::trainer) group: &'a dyn ProcessGroup,
    pub(in crate::train::trainer) state: &'a TrainState,
}

impl GatheredState<'_> {
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
                let mut bytes = vec![0; range.len() * shard.bytes_per_value()];
                self.group.send_message(owner, &LeaderMessage::Read { tensor, index, range })?;
                self.group.receive(owner, &mut bytes)?;
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
        for parameter in 0..masters.len() {
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
