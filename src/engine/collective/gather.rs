//! Shards put together again: every process gets the working copy of all, or process 0 single values of another's.

use super::{Collective, Shards, range_bytes, write_range};
use crate::Result;
use crate::engine::model::Parameters;

/// Elements of a shard that go at a time.
const CHUNK: usize = 1 << 20;

/// Gives every process the elements of `whole` that each owns.
pub fn all_gather(whole: &Parameters, shards: &Shards, world: &dyn Collective) -> Result<()> {
    let (rank, count) = (world.rank(), world.world());
    let longest = (0..count).map(|owner| shards.len(owner)).max().unwrap_or(0);
    for start in (0..longest).step_by(CHUNK) {
        let span = start..start + CHUNK;
        let mut own = Vec::new();
        for (parameter, range) in shards.pieces(rank, span.clone()) {
            range_bytes(&whole[parameter], range, &mut own)?;
        }
        let pieces: Vec<_> = (0..count).map(|owner| shards.pieces(owner, span.clone())).collect();
        let length = |owner: usize| {
            let bytes = pieces[owner].iter().map(|(index, range)| range.len() * whole[*index].dtype().size_in_bytes());
            if owner == rank { 0 } else { bytes.sum() }
        };
        let mut received: Vec<Vec<u8>> = (0..count).map(|owner| vec![0; length(owner)]).collect();
        let out: Vec<&[u8]> = (0..count).map(|to| if to == rank { &[] } else { own.as_slice() }).collect();
        world.exchange(&out, &mut received.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
        for (pieces, bytes) in pieces.iter().zip(&received).filter(|(_, bytes)| !bytes.is_empty()) {
            let mut bytes = bytes.as_slice();
            for (parameter, range) in pieces {
                bytes = write_range(&whole[*parameter], range.clone(), bytes)?;
            }
        }
    }
    Ok(())
}
