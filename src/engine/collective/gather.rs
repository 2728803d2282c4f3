//! Shards put together again: every process gets the working copy of all, or process 0 single values of another's.

use super::{Collective, range_bytes, write_range};
use crate::Result;
use crate::engine::model::Parameters;

/// Elements of a shard that go at a time.
const CHUNK: usize = 1 << 20;

/// Gives the `whole` of every process what each owns: its `own`, a shard, which may be a part of `whole` itself. A process alone
/// has nothing to do.
pub fn all_gather(whole: &Parameters, own: &Parameters, world: &dyn Collective) -> Result<()> {
    let Some(shards) = own.shards() else { return Ok(()) };
    let (rank, count, in_place) = (world.rank(), world.world(), own.shares_storage(whole));
    let longest = (0..count).map(|owner| shards.len(owner)).max().unwrap_or(0);
    for start in (0..longest).step_by(CHUNK) {
        let span = start..start + CHUNK;
        let mut here = Vec::new();
        for (parameter, range) in shards.pieces(rank, span.clone()) {
            let first = own.range(parameter).start;
            range_bytes(&own[parameter], range.start - first..range.end - first, &mut here)?;
        }
        let pieces: Vec<_> = (0..count).map(|owner| shards.pieces(owner, span.clone())).collect();
        let length = |owner: usize| {
            let bytes = pieces[owner].iter().map(|(index, range)| range.len() * whole[*index].dtype().size_in_bytes());
            if owner == rank { 0 } else { bytes.sum() }
        };
        let mut received: Vec<Vec<u8>> = (0..count).map(|owner| vec![0; length(owner)]).collect();
        let out: Vec<&[u8]> = (0..count).map(|to| if to == rank { &[] } else { here.as_slice() }).collect();
        world.exchange(&out, &mut received.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
        if !in_place {
            received[rank] = here;
        }
        for (pieces, bytes) in pieces.iter().zip(&received).filter(|(_, bytes)| !bytes.is_empty()) {
            let mut bytes = bytes.as_slice();
            for (parameter, range) in pieces {
                bytes = write_range(&whole[*parameter], range.clone(), bytes)?;
            }
        }
    }
    Ok(())
}
