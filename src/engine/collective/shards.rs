//! The partition of the parameters' elements among processes. Only the owner of an element has its master and moments (`ZeRO`
//! stage 1).
//!
//! All parameters, concatenated in their order, are split into one range per process. The boundaries are multiples of the blocks
//! of the gradient statistics, so that statistics merge in the order of a single process.

use crate::engine::kernels::summary::PART;
use std::ops::Range;

/// The shards of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    /// The offset of each parameter, and the total.
    starts: Vec<usize>,
    /// The offset of each shard, and the total.
    boundaries: Vec<usize>,
    /// Whether masters, moments and sums of a shard are on the CPU even if the parameters are on a GPU.
    pub(crate) on_host: bool,
}

impl Shards {
    /// Splits parameters with `lengths` elements among `world_size` processes.
    pub fn new(lengths: impl IntoIterator<Item = usize>, world_size: usize) -> Self {
        let mut starts = vec![0];
        for length in lengths {
            starts.push(starts[starts.len() - 1] + length);
        }
        let total = starts[starts.len() - 1];
        let cut = |rank: usize| {
            let ideal = (total as u128 * rank as u128 / world_size as u128) as usize;
            let parameter = starts.partition_point(|start| *start <= ideal) - 1;
            let Some(end) = starts.get(parameter + 1) else { return total };
            let within = (ideal - starts[parameter] + PART / 2) / PART * PART;
            // The last block of a parameter is shorter.
            let within = if ideal - starts[parameter] > (end - starts[parameter]) / PART * PART {
                let block = starts[parameter] + (end - starts[parameter]) / PART * PART;
                if ideal - block >= end - ideal { end - starts[parameter] } else { block - starts[parameter] }
            } else {
                within
            };
            (starts[parameter] + within).min(*end)
        };
        let boundaries = (0..=world_size).map(cut).collect();
        Self { starts, boundaries, on_host: true }
    }

    /// The same shards, restricted to the parameters `kept`, in order.
    #[must_use]
    pub fn select(&self, kept: &[usize]) -> Self {
        let within = |at: usize, parameter: usize| {
            let (start, end) = (self.starts[parameter], self.starts[parameter + 1]);
            at.clamp(start, end) - start
        };
        let before = |at: usize, kept: &[usize]| kept.iter().map(|parameter| within(at, *parameter)).sum::<usize>();
        let starts = (0..=kept.len()).map(|count| before(usize::MAX, &kept[..count])).collect();
        let boundaries = self.boundaries.iter().map(|cut| before(*cut, kept)).collect();
        Self { starts, boundaries, on_host: self.on_host }
    }

    /// Number of elements of a shard.
    pub fn len(&self, rank: usize) -> usize {
        self.boundaries[rank + 1] - self.boundaries[rank]
    }

    /// The range of a parameter that process `rank` owns; may be empty.
    pub fn range(&self, rank: usize, parameter: usize) -> Range<usize> {
        let (start, end) = (self.starts[parameter], self.starts[parameter + 1]);
        let within = |at: usize| at.clamp(start, end) - start;
        within(self.boundaries[rank])..within(self.boundaries[rank + 1])
    }

    /// Splits a shard by parameter, and each parameter's part into pieces of at most `elements`, a multiple of [`PART`], so that
    /// every piece begins at a block. Groups the pieces into rounds, in order, and ends a round that has `elements`.
    pub fn rounds(&self, rank: usize, elements: usize) -> Vec<Vec<(usize, Range<usize>)>> {
        let (mut rounds, mut room) = (Vec::new(), 0);
        for parameter in 0..self.starts.len() - 1 {
            let range = self.range(rank, parameter);
            for start in range.clone().step_by(elements) {
                let piece = start..range.end.min(start + elements);
                if room == 0 {
                    rounds.push(Vec::new());
                    room = elements;
                }
                room = room.saturating_sub(piece.len());
                rounds.last_mut().into_iter().for_each(|round| round.push((parameter, piece.clone())));
            }
        }
        rounds
    }

    /// Splits elements `range` of a shard by parameter: the index of each parameter and its elements.
    pub fn split_by_parameter(&self, rank: usize, range: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let end = (self.boundaries[rank] + range.end).min(self.boundaries[rank + 1]);
        let mut at = (self.boundaries[rank] + range.start).min(end);
        let mut pieces = Vec::new();
        while at < end {
            let parameter = self.starts.partition_point(|start| *start <= at) - 1;
            let start = self.starts[parameter];
            let until = self.starts[parameter + 1].min(end);
            pieces.push((parameter, at - start..until - start));
            at = until;
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once_in_order_and_are_even() {
        let lengths = [3, 0, 200, 40 * PART + 7, PART, 5, PART - 1, 2 * PART + 1, 9];
        let total: usize = lengths.iter().sum();
        for world in 1..=9 {
            let shards = Shards::new(lengths, world);
            assert_eq!((0..world).map(|rank| shards.len(rank)).sum::<usize>(), total);
            for (parameter, length) in lengths.into_iter().enumerate() {
                let mut next = 0;
                for rank in 0..world {
                    let range = shards.range(rank, parameter);
                    if !range.is_empty() {
                        assert_eq!(range.start, next);
                        assert!(range.start.is_multiple_of(PART), "a cut inside of a block: {range:?}");
                        next = range.end;
                    }
                }
                assert_eq!(next, length);
            }
            for rank in 0..world {
                assert!(shards.len(rank).abs_diff(total / world) <= PART, "{world} processes: {}", shards.len(rank));
                let pieces = shards.split_by_parameter(rank, 0..usize::MAX / 2);
                let all: Vec<_> = (0..lengths.len()).map(|i| (i, shards.range(rank, i))).collect();
                let all: Vec<_> = all.into_iter().filter(|(_, range)| !range.is_empty()).collect();
                assert_eq!(pieces, all);
                let chunks: Vec<_> = (0..shards.len(rank))
                    .step_by(1000)
                    .flat_map(|at| shards.split_by_parameter(rank, at..at + 1000))
                    .collect();
                assert_eq!(chunks.iter().map(|(_, range)| range.len()).sum::<usize>(), shards.len(rank));
                let rounds = shards.rounds(rank, 2 * PART);
                let sizes: Vec<usize> =
                    rounds.iter().map(|round| round.iter().map(|(_, range)| range.len()).sum()).collect();
                let (last, full) = sizes.split_last().unwrap();
                assert!(*last > 0 && full.iter().all(|size| (2 * PART..4 * PART).contains(size)), "{sizes:?}");
                let mut joined: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
                for (parameter, range) in rounds.concat() {
                    assert!(range.start.is_multiple_of(PART) && (1..=2 * PART).contains(&range.len()), "{range:?}");
                    match joined.last_mut() {
                        Some((last, joined)) if *last == parameter && joined.end == range.start => {
                            joined.end = range.end;
                        }
                        _ => joined.push((parameter, range)),
                    }
                }
                assert_eq!(joined, pieces);
                let kept = [0, 3, 5, 7];
                let some = shards.select(&kept);
                let parts: Vec<_> = kept.iter().map(|parameter| shards.range(rank, *parameter)).collect();
                assert_eq!((0..kept.len()).map(|index| some.range(rank, index)).collect::<Vec<_>>(), parts);
                assert_eq!(some.len(rank), parts.iter().map(Range::len).sum::<usize>());
            }
        }
    }
}
