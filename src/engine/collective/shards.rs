//! The partition of the parameters' elements among processes. Only the owner of an element has its master and moments
//! (`ZeRO` stage 1).
//!
//! The parameters of each unit, concatenated in their order, are split into one range per process, so that every
//! process receives and sends equal parts of a unit's gradients. The boundaries are multiples of the blocks of the
//! gradient statistics, so that statistics merge in the order of a single process.

use crate::engine::kernels::summary::TASK_ELEMENTS;
use crate::precision::PrecisionUnit;
use std::collections::BTreeMap;
use std::ops::Range;

/// Number of elements of a shard that are exchanged through host memory at a time. It limits the memory of the
/// exchange.
pub(crate) const CHUNK_ELEMENTS: usize = 1 << 20;

/// The shards of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    /// For each parameter, the first element of each process's range, and the number of elements.
    cuts: Vec<Vec<usize>>,
    /// Whether masters, moments and sums of a shard are on the CPU even if the parameters are on a GPU.
    pub(crate) on_host: bool,
}

impl Shards {
    /// Splits parameters with these units and numbers of elements among `world_size` processes.
    pub fn new(parameters: impl IntoIterator<Item = (PrecisionUnit, usize)>, world_size: usize) -> Self {
        let parameters: Vec<_> = parameters.into_iter().collect();
        let mut units: BTreeMap<PrecisionUnit, Vec<usize>> = BTreeMap::new();
        for (index, (unit, _)) in parameters.iter().enumerate() {
            units.entry(*unit).or_default().push(index);
        }
        // The ends of the shards in the units so far, and their elements.
        let mut cuts = vec![Vec::new(); parameters.len()];
        let mut ends = vec![0; world_size + 1];
        let mut total = 0;
        for members in units.values() {
            let lengths: Vec<usize> = members.iter().map(|member| parameters[*member].1).collect();
            let length = lengths.iter().sum::<usize>();
            let mut last = 0;
            total += length;
            for (rank, end) in ends.iter_mut().enumerate() {
                // This unit rounds down if earlier ones have rounded up.
                let ideal = (total as u128 * rank as u128 / world_size as u128) as usize;
                last = nearest_border(&lengths, ideal.saturating_sub(*end).min(length)).max(last);
                *end += last;
                let mut start = 0;
                for (member, length) in members.iter().zip(&lengths) {
                    cuts[*member].push(last.saturating_sub(start).min(*length));
                    start += length;
                }
            }
        }
        Self { cuts, on_host: true }
    }

    /// The same shards, restricted to the parameters `kept`, in order.
    #[must_use]
    pub fn select(&self, kept: &[usize]) -> Self {
        Self { cuts: kept.iter().map(|parameter| self.cuts[*parameter].clone()).collect(), ..self.clone() }
    }

    /// The range of a parameter that process `rank` owns; may be empty.
    pub fn range(&self, rank: usize, parameter: usize) -> Range<usize> {
        self.cuts[parameter][rank]..self.cuts[parameter][rank + 1]
    }

    /// Splits a shard of `parameters` by parameter, and each parameter's part into pieces of at most `elements`, a
    /// multiple of [`TASK_ELEMENTS`], so that every piece begins at a block. Groups the pieces into rounds, in order,
    /// and ends a round that has `elements`.
    pub fn rounds(
        &self,
        rank: usize,
        parameters: impl IntoIterator<Item = usize>,
        elements: usize,
    ) -> Vec<Vec<(usize, Range<usize>)>> {
        let mut rounds = Vec::new();
        let mut room = 0;
        for parameter in parameters {
            let range = self.range(rank, parameter);
            for start in range.clone().step_by(elements) {
                let piece = start..range.end.min(start + elements);
                if room == 0 {
                    rounds.push(Vec::new());
                    room = elements;
                }
                room = room.saturating_sub(piece.len());
                if let Some(round) = rounds.last_mut() {
                    round.push((parameter, piece.clone()));
                }
            }
        }
        rounds
    }
}

/// The border of a block or parameter that is nearest to element `at` of parameters with these lengths; of two the
/// later one.
fn nearest_border(lengths: &[usize], at: usize) -> usize {
    let mut start = 0;
    for length in lengths {
        if at < start + length {
            let low = (at - start) / TASK_ELEMENTS * TASK_ELEMENTS;
            let high = (low + TASK_ELEMENTS).min(*length);
            return start + if at - start - low >= high - (at - start) { high } else { low };
        }
        start += length;
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once_in_order_and_are_even() {
        let lengths =
            [3, 0, 200, 40 * TASK_ELEMENTS + 7, TASK_ELEMENTS, 5, TASK_ELEMENTS - 1, 2 * TASK_ELEMENTS + 1, 9];
        let total: usize = lengths.iter().sum();
        // All parameters in one unit, in units of three, in units of one, and in two that take turns.
        for (units, world) in [9, 3, 1, 0].into_iter().flat_map(|units| (1..=9).map(move |world| (units, world))) {
            let unit = |index: usize| index.checked_div(units).unwrap_or(index % 2);
            let parameters = lengths.iter().enumerate().map(|(index, len)| (PrecisionUnit::Block(unit(index)), *len));
            let shards = Shards::new(parameters, world);
            for (parameter, length) in lengths.into_iter().enumerate() {
                let mut next = 0;
                for rank in 0..world {
                    let range = shards.range(rank, parameter);
                    if !range.is_empty() {
                        assert_eq!(range.start, next);
                        assert!(range.start.is_multiple_of(TASK_ELEMENTS), "a cut inside of a block: {range:?}");
                        next = range.end;
                    }
                }
                assert_eq!(next, length);
            }
            for rank in 0..world {
                let pieces: Vec<_> = (0..lengths.len()).map(|i| (i, shards.range(rank, i))).collect();
                let pieces: Vec<_> = pieces.into_iter().filter(|(_, range)| !range.is_empty()).collect();
                let len: usize = pieces.iter().map(|(_, range)| range.len()).sum();
                assert!(len.abs_diff(total / world) <= TASK_ELEMENTS, "{world} processes: {len}");
                let rounds = shards.rounds(rank, 0..lengths.len(), 2 * TASK_ELEMENTS);
                let sizes: Vec<usize> =
                    rounds.iter().map(|round| round.iter().map(|(_, range)| range.len()).sum()).collect();
                let (last, full) = sizes.split_last().unwrap();
                assert!(
                    *last > 0 && full.iter().all(|size| (2 * TASK_ELEMENTS..4 * TASK_ELEMENTS).contains(size)),
                    "{sizes:?}"
                );
                let mut joined: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
                for (parameter, range) in rounds.concat() {
                    assert!(
                        range.start.is_multiple_of(TASK_ELEMENTS) && (1..=2 * TASK_ELEMENTS).contains(&range.len()),
                        "{range:?}"
                    );
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
            }
        }
    }
}
