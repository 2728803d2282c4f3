//! Gathers the shards of the working copy in all processes.

use super::shards::CHUNK_ELEMENTS;
use super::{ProcessGroup, Shards, TensorExchange, range_bytes, write_range};
use crate::Result;
use crate::engine::kernels::view;
use crate::engine::model::Parameters;
use std::ops::Range;

/// Copies the shard `own` of each process into the `whole` of all processes. `own` may be a part of `whole` itself. A
/// single process has nothing to do.
pub fn all_gather(whole: &Parameters, own: &Parameters, group: &dyn ProcessGroup) -> Result<()> {
    let Some(shards) = own.shards() else { return Ok(()) };
    if let Some(gpus) = group.gpus() {
        return between_gpus(whole, shards, group, gpus);
    }
    let rank = group.rank();
    let count = group.world_size();
    let in_place = own.shares_storage(whole);
    let rounds: Vec<_> =
        (0..count).map(|owner| shards.rounds(owner, 0..whole.tensors().len(), CHUNK_ELEMENTS)).collect();
    for round in 0..rounds.iter().map(Vec::len).max().unwrap_or(0) {
        let pieces: Vec<_> = rounds.iter().map(|rounds| rounds.get(round).map_or(&[][..], Vec::as_slice)).collect();
        let mut here = Vec::new();
        for (parameter, range) in pieces[rank] {
            let first = own.range(*parameter).start;
            range_bytes(&own[*parameter], range.start - first..range.end - first, &mut here)?;
        }
        let size = |(index, range): &(usize, Range<usize>)| range.len() * whole[*index].dtype().size_in_bytes();
        let mut received = group.gather_bytes(here, pieces.iter().map(|pieces| pieces.iter().map(size).sum()))?;
        if in_place {
            received[rank].clear();
        }
        for (pieces, bytes) in pieces.iter().zip(&received).filter(|(_, bytes)| !bytes.is_empty()) {
            let mut bytes = bytes.as_slice();
            for (parameter, range) in *pieces {
                bytes = write_range(&whole[*parameter], range.clone(), bytes)?;
            }
        }
    }
    Ok(())
}

/// [`all_gather`] of shards that are parts of `whole`.
fn between_gpus(
    whole: &Parameters,
    shards: &Shards,
    group: &dyn ProcessGroup,
    gpus: &dyn TensorExchange,
) -> Result<()> {
    let (mut out, mut into) = (Vec::new(), Vec::new());
    for other in (0..group.world_size()).filter(|other| *other != group.rank()) {
        for (owner, tensors) in [(group.rank(), &mut out), (other, &mut into)] {
            for (parameter, range) in shards.rounds(owner, 0..whole.tensors().len(), usize::MAX / 2).concat() {
                tensors.push((other, view::range(&whole[parameter], range)?));
            }
        }
    }
    gpus.start(out, into)?;
    gpus.wait().map(drop)
}
