//! Gathers the shards of the working copy in all processes.

use super::shards::CHUNK_ELEMENTS;
use super::{ProcessGroup, Shards, TensorExchange, range_bytes, write_range};
use crate::Result;
use crate::engine::kernels::view;
use crate::engine::model::Parameters;

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
        let length = |owner: usize| {
            let bytes = pieces[owner].iter().map(|(index, range)| range.len() * whole[*index].dtype().size_in_bytes());
            if owner == rank { 0 } else { bytes.sum() }
        };
        let mut received: Vec<Vec<u8>> = (0..count).map(|owner| vec![0; length(owner)]).collect();
        let out: Vec<&[u8]> = (0..count).map(|to| if to == rank { &[] } else { here.as_slice() }).collect();
        group.all_to_all(&out, &mut received.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
        if !in_place {
            received[rank] = here;
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
