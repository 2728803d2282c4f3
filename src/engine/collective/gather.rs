//! Gathers the shards of the working copy in all processes.

use super::{ProcessGroup, Shards, TensorExchange, range_bytes, write_range};
use crate::Result;
use crate::engine::kernels::view;
use crate::engine::model::Parameters;

/// Number of elements of a shard that are sent at a time.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Copies the shard `own` of each process into the `whole` of all processes. `own` may be a part of `whole` itself. A single
/// process has nothing to do.
pub fn all_gather(whole: &Parameters, own: &Parameters, group: &dyn ProcessGroup) -> Result<()> {
    let Some(shards) = own.shards() else { return Ok(()) };
    if let Some(gpus) = group.gpus() {
        return between_gpus(whole, shards, group, gpus);
    }
    let (rank, count, in_place) = (group.rank(), group.world_size(), own.shares_storage(whole));
    let longest = (0..count).map(|owner| shards.len(owner)).max().unwrap_or(0);
    for start in (0..longest).step_by(CHUNK_ELEMENTS) {
        let span = start..start + CHUNK_ELEMENTS;
        let mut here = Vec::new();
        for (parameter, range) in shards.split_by_parameter(rank, span.clone()) {
            let first = own.range(parameter).start;
            range_bytes(&own[parameter], range.start - first..range.end - first, &mut here)?;
        }
        let pieces: Vec<_> = (0..count).map(|owner| shards.split_by_parameter(owner, span.clone())).collect();
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
            for (parameter, range) in pieces {
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
            for (parameter, range) in shards.split_by_parameter(owner, 0..shards.len(owner)) {
                tensors.push((other, view::range(&whole[parameter], range)?));
            }
        }
    }
    gpus.exchange(&out, &into)
}
