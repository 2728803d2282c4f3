//! The rows of one data set, or of several that are mixed by weights.
//!
//! Each position of a mixture draws its data set from a counter-based random stream. The probabilities give every set
//! its share of the tokens, regardless of the length of its rows. The draws of a set walk through its own shuffled
//! epochs, so a small set repeats within an epoch of the mixture, which has as many groups as the sets together. A
//! position is a function of the seed and of its number, so a checkpoint needs nothing else.

use super::samples::SequenceRole;
use super::sequence_index::SequenceIndex;
use super::shuffle::Permutation;
use crate::random::{Domain, Stream};
use crate::{Error, Result};
use std::ops::Range;

/// Makes the orders of the sets independent of each other.
const SET_SALT: u64 = 0x7365_745f_6f72_6465;

/// A group of rows: the number of its data set, and its number within the set.
pub(super) type GroupId = (usize, u64);

/// The rows of one or several data sets.
#[derive(Clone, Debug)]
pub struct Mixture {
    sets: Vec<MixedSet>,
    /// The number of a position, and the draws of each set before it.
    drawn: (u64, Vec<u64>),
}

#[derive(Clone, Debug)]
struct MixedSet {
    index: SequenceIndex,
    /// The probability of this set or an earlier one.
    until: f64,
    /// The expected passes over this set in an epoch of the mixture.
    passes: f64,
    /// The number of sequences of earlier sets.
    first_sequence: u64,
}

impl From<SequenceIndex> for Mixture {
    fn from(index: SequenceIndex) -> Self {
        let sets = vec![MixedSet { index, until: 1.0, passes: 1.0, first_sequence: 0 }];
        Self { sets, drawn: (0, vec![0]) }
    }
}

impl Mixture {
    /// The rows of `sets`, each with the weight of its tokens. Fails with [`Error::Config`] for no set, or for sets
    /// of different kinds.
    pub fn new(sets: Vec<(SequenceIndex, f64)>) -> Result<Self> {
        let refused = |message: &str| Err(Error::config("data", message));
        let Some((first, _)) = sets.first() else { return refused("needs a data set") };
        if sets.iter().any(|(index, _)| index.tokens.samples() != first.tokens.samples()) {
            return refused("pairs, labelled answers and texts cannot be mixed");
        }
        let groups: u64 = sets.iter().map(|(index, _)| index.groups()).sum();
        // Draws of a set per token of the mixture.
        let rate = |(index, weight): &(SequenceIndex, f64)| weight * index.groups() as f64 / index.inputs() as f64;
        let rates: f64 = sets.iter().map(rate).sum();
        let (mut until, mut first_sequence) = (0.0, 0);
        let drawn = (0, vec![0; sets.len()]);
        let mixed = |set: (SequenceIndex, f64)| {
            let probability = rate(&set) / rates;
            until += probability;
            let passes = probability * (groups as f64 / set.0.groups() as f64);
            let first = first_sequence;
            first_sequence += set.0.tokens.sequences();
            MixedSet { index: set.0, until, passes, first_sequence: first }
        };
        Ok(Self { sets: sets.into_iter().map(mixed).collect(), drawn })
    }

    /// The rows of each set.
    pub fn sets(&self) -> impl ExactSizeIterator<Item = &SequenceIndex> {
        self.sets.iter().map(|set| &set.index)
    }

    /// Any set's rows, for the facts that all share.
    pub(super) fn any(&self) -> &SequenceIndex {
        &self.sets[0].index
    }

    /// Whether rows differ in length.
    pub(super) fn is_ragged(&self) -> bool {
        self.sets().any(SequenceIndex::is_ragged)
    }

    /// The columns of a batch whose longest row has `longest` inputs.
    pub(super) fn columns(&self, longest: usize) -> usize {
        self.sets().map(|index| index.columns(longest)).min().unwrap_or(longest)
    }

    /// The number of groups in an epoch.
    pub(super) fn groups(&self) -> u64 {
        self.sets().map(SequenceIndex::groups).sum()
    }

    /// The sum over an epoch of something that a set has in one pass.
    pub(super) fn per_epoch(&self, of: impl Fn(&SequenceIndex) -> u64) -> u64 {
        self.sets.iter().map(|set| (of(&set.index) as f64 * set.passes).round() as u64).sum()
    }

    /// Returns the error of an earlier read that returned no tokens.
    pub(super) fn check(&self) -> Result<()> {
        self.sets().try_for_each(|index| index.tokens.check())
    }

    /// The inputs of a group's longest row.
    pub(super) fn group_len(&self, (set, group): GroupId) -> usize {
        self.sets[set].index.group_len(group)
    }

    /// The rows of `groups`, in their order, each with the number of its set.
    pub(super) fn rows_of(
        &self,
        groups: impl Iterator<Item = GroupId> + Clone,
    ) -> impl Iterator<Item = (usize, &SequenceIndex, u64)> + Clone {
        groups.flat_map(move |(set, group)| {
            let index = &self.sets[set].index;
            index.rows_of(group).map(move |row| (set, index, row))
        })
    }

    /// The number of the sequence of set `set` that begins at token `start`, different for every sequence of the
    /// mixture, and its part in the objective; `None` if no set has weights or preferences.
    pub(super) fn role(&self, set: usize, start: usize) -> Option<(u64, SequenceRole)> {
        let MixedSet { index, first_sequence, .. } = &self.sets[set];
        let plain = || {
            let weighted = self.sets().any(|other| other.tokens.role(0).is_some());
            weighted.then(|| (index.tokens.sequence_at(start), SequenceRole::Weighted(1.0)))
        };
        index.tokens.role(start).or_else(plain).map(|(number, role)| (number + first_sequence, role))
    }

    /// The set of the position with this number.
    fn draw(&self, stream: Stream, number: u64) -> usize {
        let [a, b, ..] = stream.block(0, number, 0);
        let uniform = (f64::from(a) + f64::from(b) / 4_294_967_296.0) / 4_294_967_296.0;
        self.sets.iter().position(|set| uniform < set.until).unwrap_or(self.sets.len() - 1)
    }

    /// The groups at these positions of an epoch.
    pub(super) fn shuffled(&mut self, seed: u64, epoch: u64, positions: Range<u64>) -> Vec<GroupId> {
        let first = epoch * self.groups() + positions.start;
        let count = positions.end - positions.start;
        if self.sets.len() == 1 {
            self.drawn.0 = first;
            self.drawn.1[0] = first;
        } else if self.drawn.0 > first {
            self.drawn = (0, vec![0; self.sets.len()]);
        }
        let stream = Stream::new(seed, Domain::Shuffle);
        let mut drawn = std::mem::take(&mut self.drawn.1);
        let mut next = |number: u64| {
            let set = self.draw(stream, number);
            drawn[set] += 1;
            (set, drawn[set] - 1)
        };
        (self.drawn.0..first).for_each(|number| {
            next(number);
        });
        let draws: Vec<GroupId> = (first..first + count).map(&mut next).collect();
        self.drawn = (first + count, drawn);
        let group = |(set, draw): GroupId| {
            let groups = self.sets[set].index.groups();
            let order = Permutation::new(groups, seed ^ SET_SALT.wrapping_mul(set as u64), draw / groups);
            (set, order.at(draw % groups))
        };
        draws.into_iter().map(group).collect()
    }

    /// The first `count` groups of a pass over all sets in their stored order. The sets alternate by their shares,
    /// until one has no group left.
    pub(super) fn in_order(&self, count: u64) -> Vec<GroupId> {
        let stream = Stream::new(0, Domain::Shuffle);
        let mut read = vec![0; self.sets.len()];
        let group = |number| {
            let drawn = self.draw(stream, number);
            let candidates = (drawn..self.sets.len()).chain(0..drawn);
            let set = candidates.into_iter().find(|set| read[*set] < self.sets[*set].index.groups()).unwrap_or(drawn);
            read[set] += 1;
            (set, read[set] - 1)
        };
        (0..count.min(self.groups())).map(group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{BatchLoader, EvalLoader, SampleKind, TokenSource};

    /// Rows of `len` inputs, whose ids are `first` plus their number.
    fn set(first: u32, rows: u32, len: usize) -> SequenceIndex {
        let samples: Vec<_> = (0..rows).map(|row| vec![(first + row, true); len + 1]).collect();
        SequenceIndex::new(TokenSource::from_samples(&samples), 32, false, "x").unwrap()
    }

    fn mixed(weights: [f64; 2]) -> Mixture {
        Mixture::new(vec![(set(0, 40, 24), weights[0]), (set(1000, 400, 8), weights[1])]).unwrap()
    }

    /// The ids of a loader's rows, with the positions before their batches.
    fn ids(loader: &mut BatchLoader, batches: usize) -> Vec<Vec<u32>> {
        let mut batch = loader.batch();
        let mut next = || {
            loader.next_batch(&mut batch);
            let rows = batch.inputs.chunks(batch.seq_len).zip(batch.labels.chunks(batch.seq_len));
            rows.filter(|(_, labels)| labels[0] != u32::MAX).map(|(inputs, _)| inputs[0]).collect()
        };
        (0..batches).map(|_| next()).collect()
    }

    #[test]
    fn every_set_has_its_share_of_the_tokens() {
        for share in [0.5, 0.9] {
            let mut loader = BatchLoader::from_index(mixed([share, 1.0 - share]), 8, 3).unwrap();
            let expected = 440.0 / (share / 24.0 + (1.0 - share) / 8.0);
            assert!((loader.tokens_per_epoch() as f64 - expected).abs() <= 1.0, "{expected}");
            let rows = ids(&mut loader, 550).concat();
            let first = rows.iter().filter(|id| **id < 1000).count();
            let tokens = [24 * first, 8 * (rows.len() - first)].map(|tokens| tokens as f64);
            let found = tokens[0] / (tokens[0] + tokens[1]);
            assert!((found - share).abs() < 0.02, "{found} instead of {share}");
        }
    }

    /// A set's draws are whole epochs of that set, in a new order each.
    #[test]
    fn no_row_repeats_before_its_set_is_over() {
        let mut mixture = mixed([0.7, 0.3]);
        let drawn: Vec<GroupId> = (0..4).flat_map(|epoch| mixture.shuffled(9, epoch, 0..mixture.groups())).collect();
        for (set, groups) in [(0, 40), (1, 400)] {
            let draws: Vec<u64> = drawn.iter().filter(|group| group.0 == set).map(|group| group.1).collect();
            let passes: Vec<Vec<u64>> =
                draws.chunks(groups).filter(|pass| pass.len() == groups).map(<[u64]>::to_vec).collect();
            assert!(passes.len() > 1, "{set}");
            assert!(passes.windows(2).all(|two| two[0] != two[1]), "{set}");
            for mut pass in passes {
                pass.sort_unstable();
                assert_eq!(pass, (0..groups as u64).collect::<Vec<_>>());
            }
        }
    }

    /// Otherwise the rows of one set would always come with the same rows of the other.
    #[test]
    fn sets_of_one_length_have_different_orders() {
        let mut mixture = Mixture::new(vec![(set(0, 40, 8), 0.5), (set(1000, 40, 8), 0.5)]).unwrap();
        let drawn = mixture.shuffled(9, 0, 0..80);
        let order = |set| drawn.iter().filter(|group| group.0 == set).map(|group| group.1).take(20).collect::<Vec<_>>();
        assert_ne!(order(0), order(1));
    }

    #[test]
    fn each_epoch_alternates_the_sets_differently() {
        let mut mixture = mixed([0.5, 0.5]);
        let mut sets = |epoch| mixture.shuffled(9, epoch, 0..40).iter().map(|group| group.0).collect::<Vec<_>>();
        assert_ne!(sets(0), sets(1));
    }

    #[test]
    fn a_position_resumes_with_identical_batches() {
        let new = || BatchLoader::from_index(mixed([0.7, 0.3]), 4, 5).unwrap();
        let mut whole = new();
        for batches in [1, 7, 109, 113] {
            ids(&mut whole, batches);
            let mut resumed = new();
            resumed.seek(whole.position()).unwrap();
            let mut goes_on = whole.clone();
            let expected = ids(&mut goes_on, 9);
            assert_eq!(ids(&mut resumed, 9), expected);
            goes_on.seek(whole.position()).unwrap();
            assert_eq!(ids(&mut goes_on, 9), expected, "a loader that has read further");
        }
    }

    /// Windows of a text fill all columns. Samples have fewer, so both are sorted by length.
    #[test]
    fn batches_are_of_a_text_or_of_samples() {
        let text = SequenceIndex::new(TokenSource::from_ids((0..641).collect()), 32, false, "x").unwrap();
        let mixture = Mixture::new(vec![(text, 0.5), (set(1000, 40, 8), 0.5)]).unwrap();
        let mut loader = BatchLoader::from_index(mixture, 4, 3).unwrap();
        let mut batch = loader.batch();
        let widths = std::iter::from_fn(|| {
            loader.next_batch(&mut batch);
            Some((batch.seq_len, batch.row_lens.windows(2).all(|two| two[0] == two[1])))
        });
        let widths: Vec<_> = widths.take(15).collect();
        assert!(widths.contains(&(16, true)) && widths.contains(&(32, true)), "{widths:?}");
        assert!(widths.iter().filter(|(_, equal)| !equal).count() <= 1, "{widths:?}");
    }

    #[test]
    fn validation_reads_every_row_of_every_set_once() {
        // Either set may be the first to end.
        for first in [0.5, 0.01] {
            let mut loader = EvalLoader::from_index(mixed([first, 1.0 - first]), 8, None).unwrap();
            let mut batch = loader.batch();
            let mut seen = Vec::new();
            while loader.next_batch(&mut batch) {
                seen.extend(batch.inputs.chunks(batch.seq_len).map(|row| row[0]));
            }
            let starts = seen[..64].iter().filter(|id| **id < 1000).count();
            assert_eq!((5..30).contains(&starts), first == 0.5, "{starts} of the first 64 rows");
            seen.sort_unstable();
            assert_eq!(seen, (0..40).chain(1000..1400).collect::<Vec<_>>());
        }
    }

    #[test]
    fn sequences_of_all_sets_have_different_numbers() {
        let weighted =
            TokenSource::from_kind(&[vec![(1, true); 5], vec![(2, true); 5]], SampleKind::Plain, &[0.5, 2.0]);
        let weighted = SequenceIndex::new(weighted, 32, false, "x").unwrap();
        let mixture = Mixture::new(vec![(set(0, 3, 4), 1.0), (weighted, 1.0)]).unwrap();
        let starts = [(0, 0), (0, 5), (0, 10), (1, 0), (1, 5)];
        let roles = starts.map(|(set, start)| mixture.role(set, start).unwrap());
        let weights = [1.0, 1.0, 1.0, 0.5, 2.0];
        assert_eq!(roles, std::array::from_fn(|at| (at as u64, SequenceRole::Weighted(weights[at]))));
    }

    #[test]
    fn pairs_and_texts_are_not_mixed() {
        let pair = TokenSource::from_kind(&[vec![(1, true); 5], vec![(2, true); 5]], SampleKind::Preference, &[]);
        let pair = SequenceIndex::new(pair, 32, false, "x").unwrap();
        let error = Mixture::new(vec![(pair, 1.0), (set(0, 3, 4), 1.0)]).unwrap_err();
        assert!(error.to_string().contains("cannot be mixed"), "{error}");
    }
}
