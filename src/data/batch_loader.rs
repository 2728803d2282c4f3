//! Rows of tokens to batches, in an order that is a function of the seed and the epoch.
//!
//! Every token of a text except the first is a label once per epoch, regardless of the batch size. The last batch may
//! have fewer rows, and the last window may be short: its labels are padded with [`IGNORE_INDEX`].
//!
//! Rows of samples differ in length. Buckets of 1,024 consecutive rows of the epoch's order are sorted by length, so
//! that the rows of a batch have similar lengths; a batch is as wide as its longest row. The batches of a bucket are
//! then shuffled. The two rows of a pair count as one in all of this, and stay together. A [`Mixture`] determines the
//! order of the rows of several data sets.

use super::mixture::{GroupId, Mixture};
use super::samples::SequenceRole;
use super::sequence_index::{SequenceIndex, padded_len};
use super::shuffle::Permutation;
use super::tokens::{IGNORE_INDEX, TokenSource};
use crate::engine::model::InputIds;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// One sequence of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// The positions of its columns in [`Batch::labels`]; some may contain [`IGNORE_INDEX`].
    pub labels: Range<usize>,
    /// Its number in the data set, in the order of the file and different for every sequence.
    pub index: u64,
    /// Its part in the objective.
    pub role: SequenceRole,
}

/// A prompt with a sampled completion of at least one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledRow<'a> {
    /// The prompt.
    pub prompt: &'a [u32],
    /// The completion.
    pub ids: &'a [u32],
    /// The sampler's log-probability of each id.
    pub logps: &'a [f32],
    /// Its number.
    pub index: u64,
    /// Its reward and advantage.
    pub role: SequenceRole,
}

/// One micro-batch: inputs and labels of shape `[batch_size, seq_len]`, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Token ids; 0 for padding.
    pub inputs: Vec<u32>,
    /// The id that follows each input, or [`IGNORE_INDEX`].
    pub labels: Vec<u32>,
    /// For each input, the column that its document starts in; empty where a row is one document.
    pub document_starts: Vec<u32>,
    /// The sequences, in the order of their rows; empty for plain fine-tuning without weights.
    pub sequences: Vec<Sequence>,
    /// The sampler's log-probability of each label, for sampled completions; empty for data.
    pub sampled_logps: Vec<f32>,
    /// The log-probabilities that training computed before the first of several updates on the completions.
    pub old_logps: Vec<f32>,
    /// The inputs of each row without padding; empty if there is none.
    pub row_lens: Vec<usize>,
    /// Rows.
    pub batch_size: usize,
    /// Columns; for samples, the length of the longest one, rounded up.
    pub seq_len: usize,
    /// The number of labels that are not [`IGNORE_INDEX`]. Micro-batches of a step are weighted by it.
    pub num_label_tokens: usize,
    /// Whether the epoch is over after this batch.
    pub ends_epoch: bool,
}

impl Batch {
    /// Buffers for a shape, to be filled by [`BatchLoader::next_batch`].
    pub fn new(batch_size: usize, seq_len: usize) -> Self {
        let inputs = vec![0; batch_size * seq_len];
        let labels = vec![IGNORE_INDEX; batch_size * seq_len];
        Self { inputs, labels, batch_size, seq_len, ..Self::default() }
    }

    /// An empty batch of `groups` groups.
    fn of_groups(mixture: &Mixture, groups: usize) -> Self {
        Self::new(groups * mixture.any().group_rows(), mixture.any().seq_len)
    }

    /// A batch of `rows` rows of completions, as wide as the longest one needs and at most `seq_len`.
    pub fn of_completions(completions: &[SampledRow<'_>], rows: usize, seq_len: usize) -> Self {
        let longest = completions.iter().map(|it| it.prompt.len() + it.ids.len() - 1).max().unwrap_or(0);
        let width = padded_len(longest, seq_len);
        let mut batch = Self { sampled_logps: vec![0.0; rows * width], ..Self::new(rows, width) };
        for (row, SampledRow { prompt, ids, logps, index, role }) in completions.iter().enumerate() {
            let start = row * width;
            let len = prompt.len() + ids.len() - 1;
            let first = start + prompt.len() - 1;
            batch.inputs[start..=first].copy_from_slice(prompt);
            batch.inputs[first + 1..start + len].copy_from_slice(&ids[..ids.len() - 1]);
            batch.labels[first..start + len].copy_from_slice(ids);
            batch.sampled_logps[first..start + len].copy_from_slice(logps);
            batch.sequences.push(Sequence { labels: start..start + len, index: *index, role: *role });
            batch.num_label_tokens += ids.len();
            batch.row_lens.push(len);
        }
        batch.row_lens.resize(rows, 0);
        batch
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.batch_size, self.seq_len)
    }

    /// The inputs in the form that a model takes.
    pub fn tokens(&self) -> InputIds<'_> {
        let documents = (!self.document_starts.is_empty()).then_some(&self.document_starts[..]);
        InputIds { ids: &self.inputs, seq_len: self.seq_len, documents }
    }

    /// Fills row after row with the rows of `groups` of `mixture`.
    fn fill(&mut self, mixture: &Mixture, groups: impl Iterator<Item = GroupId> + Clone) {
        let rows = mixture.rows_of(groups);
        self.batch_size = rows.clone().count();
        let seq_len = mixture.columns(rows.clone().map(|(_, index, row)| index.row_len(row)).max().unwrap_or(0));
        self.seq_len = seq_len;
        for (ids, padding) in [(&mut self.inputs, 0), (&mut self.labels, IGNORE_INDEX)] {
            ids.clear();
            ids.resize(self.batch_size * seq_len, padding);
        }
        self.sequences.clear();
        self.row_lens.clear();
        self.document_starts.clear();
        if mixture.any().is_packed() {
            // Each token of padding is a document, so that its position does not count as that of a long one.
            self.document_starts.extend((0..self.batch_size * seq_len).map(|at| (at % seq_len) as u32));
        }
        for (row_index, (set, index, row)) in rows.enumerate() {
            let mut at = row_index * seq_len;
            for span in index.row(row) {
                index.tokens.read_inputs(span.start, &mut self.inputs[at..at + span.len]);
                index.tokens.read_labels(span.start + span.len.min(1), &mut self.labels[at..at + span.len]);
                if let Some(documents) = self.document_starts.get_mut(at..at + span.len) {
                    documents.fill((at - row_index * seq_len) as u32);
                }
                let role = mixture.role(set, span.start);
                self.sequences.extend(role.map(|(index, role)| Sequence { labels: at..at + span.len, index, role }));
                at += span.len;
            }
            self.row_lens.push(at - row_index * seq_len);
        }
        self.num_label_tokens = self.labels.iter().filter(|&&label| label != IGNORE_INDEX).count();
    }
}

/// Rows that are sorted by length together.
const BUCKET_ROWS: u64 = 1024;
/// Makes the order of batches independent of the order of rows.
const BATCH_ORDER_SALT: u64 = 0x6261_7463_6865_7300;

/// The position of the next batch, which is the loader's whole state in a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// Epochs completed.
    pub epoch: u64,
    /// Rows of the running epoch already handed out; a pair counts as one.
    pub row: u64,
    /// The batch size that the rows of the running epoch are sorted for; 0 if rows are not sorted. A resumed run may
    /// have a different one.
    pub sorted_for: u64,
}

/// An endless stream of training batches, reshuffled each epoch; a batch never crosses from one epoch into the next.
#[derive(Clone, Debug)]
pub struct BatchLoader {
    pub(crate) mixture: Mixture,
    batch_size: usize,
    seed: u64,
    position: DataPosition,
    /// The rows around the position in the order of their batches, if they are sorted by length.
    bucket: LengthBucket,
}

/// Rows of one group of an epoch, sorted into batches.
#[derive(Clone, Debug, Default)]
struct LengthBucket {
    /// Epoch and first position.
    key: Option<(u64, u64)>,
    rows: Vec<GroupId>,
}

impl BatchLoader {
    /// A loader at the start of epoch 0, without packing. Fails if the tokens do not fill one row.
    pub fn new(tokens: TokenSource, batch_size: usize, seq_len: usize, seed: u64) -> Result<Self> {
        check_shape(batch_size, seq_len)?;
        Self::from_index(SequenceIndex::new(tokens, seq_len, false, "training data")?, batch_size, seed)
    }

    /// A loader of the rows of one data set or of several, at the start of epoch 0.
    pub fn from_index(rows: impl Into<Mixture>, batch_size: usize, seed: u64) -> Result<Self> {
        let mixture = rows.into();
        check_shape(batch_size, mixture.any().seq_len)?;
        Ok(Self { mixture, batch_size, seed, position: DataPosition::default(), bucket: LengthBucket::default() })
    }

    /// The start of the next batch.
    pub fn position(&self) -> DataPosition {
        self.position
    }

    /// Resumes from a checkpoint's position. Fails if it is beyond the epoch, as after a change of the data.
    pub fn seek(&mut self, position: DataPosition) -> Result<()> {
        let rows = self.rows_per_epoch();
        if position.row >= rows {
            let message = format!("the checkpoint is at row {} of {rows}: the data changed", position.row);
            return Err(Error::data("training data", message));
        }
        self.position = DataPosition { sorted_for: position.sorted_for.min(rows), ..position };
        self.bucket = LengthBucket::default();
        Ok(())
    }

    /// An empty batch of the shape that [`Self::next_batch`] fills.
    pub fn batch(&self) -> Batch {
        Batch::of_groups(&self.mixture, self.batch_size)
    }

    /// Fills `batch` with the next rows and advances.
    pub fn next_batch(&mut self, batch: &mut Batch) {
        let DataPosition { epoch, row, sorted_for: began_with } = self.position;
        let rows = self.rows_per_epoch();
        let end = (row + self.batch_size as u64).min(rows);
        let mut sorted_for = 0;
        let mut groups = Vec::new();
        if self.mixture.is_ragged() && !self.mixture.any().is_packed() {
            sorted_for = if row == 0 || began_with == 0 { self.batch_size as u64 } else { began_with };
            // A bucket consists of whole batches of the size that it is sorted for; another size may cross its end.
            let stretch = BUCKET_ROWS.next_multiple_of(sorted_for);
            while (groups.len() as u64) < end - row {
                let at = row + groups.len() as u64;
                let first = at / stretch * stretch;
                self.fill_bucket(epoch, first..(first + stretch).min(rows), sorted_for as usize);
                let until = end.min(first + stretch);
                groups.extend_from_slice(&self.bucket.rows[(at - first) as usize..(until - first) as usize]);
            }
        } else {
            groups = self.mixture.shuffled(self.seed, epoch, row..end);
        }
        batch.fill(&self.mixture, groups.into_iter());
        batch.ends_epoch = end == rows;
        self.position = if batch.ends_epoch {
            DataPosition { epoch: epoch + 1, ..DataPosition::default() }
        } else {
            DataPosition { epoch, row: end, sorted_for }
        };
    }

    /// Sorts the rows at these positions of an epoch into batches of `size` rows of about one length.
    fn fill_bucket(&mut self, epoch: u64, positions: Range<u64>, size: usize) {
        let first = positions.start;
        if self.bucket.key == Some((epoch, first)) {
            return;
        }
        let mut rows = self.mixture.shuffled(self.seed, epoch, positions);
        rows.sort_by_key(|&place| self.mixture.group_len(place));
        // A batch with fewer rows is the epoch's last one and keeps its position.
        let whole = rows.len() / size;
        let batches = Permutation::new(whole as u64, self.seed ^ BATCH_ORDER_SALT, epoch.wrapping_mul(1 << 32) + first);
        let order = (0..whole).map(|batch| batches.at(batch as u64) as usize).chain(whole..rows.len().div_ceil(size));
        let batch = |batch: usize| rows[batch * size..].iter().take(size).copied();
        self.bucket = LengthBucket { key: Some((epoch, first)), rows: order.flat_map(batch).collect() };
    }

    /// Fails if an earlier batch has no text because its tokens could not be read.
    pub fn check(&self) -> Result<()> {
        self.mixture.check()
    }

    /// Rows that make an epoch; a pair counts as one.
    pub fn rows_per_epoch(&self) -> u64 {
        self.mixture.groups()
    }

    /// Micro-batches per epoch; the last one may have fewer rows.
    pub fn batches_per_epoch(&self) -> u64 {
        self.rows_per_epoch().div_ceil(self.batch_size as u64)
    }

    /// Optimizer steps per epoch with `grad_accum` micro-batches each; the step that meets [`Batch::ends_epoch`] has
    /// fewer.
    pub fn steps_per_epoch(&self, grad_accum: usize) -> u64 {
        self.batches_per_epoch().div_ceil(grad_accum as u64)
    }

    /// Optimizer steps of the current shape that lead to the position.
    pub fn steps_to_position(&self, grad_accum: usize) -> u64 {
        let DataPosition { epoch, row, .. } = self.position;
        let rows_left = self.rows_per_epoch() - row;
        let left = rows_left.div_ceil(self.batch_size as u64).div_ceil(grad_accum as u64);
        (epoch + 1) * self.steps_per_epoch(grad_accum) - left
    }

    /// Epochs in this many optimizer steps, in the unit of [`BatchLoader::epochs`].
    pub fn epochs_in(&self, steps: u64, grad_accum: usize) -> f64 {
        let per_epoch = self.steps_per_epoch(grad_accum).max(1);
        let rows = steps % per_epoch * (self.batch_size * grad_accum) as u64;
        (steps / per_epoch) as f64 + rows as f64 / self.rows_per_epoch() as f64
    }

    /// Epochs returned so far, including the fraction of the current one.
    pub fn epochs(&self) -> f64 {
        self.position.epoch as f64 + self.position.row as f64 / self.rows_per_epoch() as f64
    }

    /// Labels per epoch.
    pub fn tokens_per_epoch(&self) -> u64 {
        self.mixture.per_epoch(|index| index.stats.loss_tokens)
    }
}

/// One pass over tokens in their stored order, for validation.
#[derive(Clone, Debug)]
pub struct EvalLoader {
    mixture: Mixture,
    groups: Vec<GroupId>,
    batch_size: usize,
    read: usize,
}

impl EvalLoader {
    /// Batches over the rows of one data set or of several, at most `max_batches` of them.
    pub fn from_index(rows: impl Into<Mixture>, batch_size: usize, max_batches: Option<u64>) -> Result<Self> {
        let mixture = rows.into();
        check_shape(batch_size, mixture.any().seq_len)?;
        let limit = max_batches.map_or(u64::MAX, |batches| batches.saturating_mul(batch_size as u64));
        let groups = mixture.in_order(limit);
        Ok(Self { mixture, groups, batch_size, read: 0 })
    }

    /// An empty batch of the shape that [`Self::next_batch`] fills.
    pub fn batch(&self) -> Batch {
        Batch::of_groups(&self.mixture, self.batch_size)
    }

    /// Fills `batch` and returns `true`, or `false` at the end of the pass. Reuses the buffers and allocates nothing.
    pub fn next_batch(&mut self, batch: &mut Batch) -> bool {
        if self.read == self.groups.len() {
            return false;
        }
        let end = (self.read + self.batch_size).min(self.groups.len());
        batch.fill(&self.mixture, self.groups[self.read..end].iter().copied());
        batch.ends_epoch = end == self.groups.len();
        self.read = end;
        true
    }

    /// Fails if an earlier batch has no text because its tokens could not be read.
    pub fn check(&self) -> Result<()> {
        self.mixture.check()
    }

    /// Whether a pass has no batch.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Batches left.
    pub fn remaining(&self) -> u64 {
        (self.groups.len() - self.read).div_ceil(self.batch_size) as u64
    }

    /// Starts over.
    pub fn rewind(&mut self) {
        self.read = 0;
    }
}

fn check_shape(batch_size: usize, seq_len: usize) -> Result<()> {
    for (key, value) in [("--batch-size", batch_size), ("--seq-len", seq_len)] {
        if value == 0 {
            return Err(Error::config(key, "must be at least 1"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::SampleKind;
    use proptest::prelude::*;

    /// Tokens whose id is their position, so that a label reveals its origin.
    fn numbered(len: usize) -> TokenSource {
        TokenSource::from_ids((0..len as u32).collect())
    }

    proptest! {
        #[test]
        fn every_token_is_a_label_once_per_epoch_after_the_one_before_it(
            len in 9usize..400, batch_size in 1usize..6, seq_len in 1usize..9, seed: u64,
        ) {
            let mut loader = BatchLoader::new(numbered(len), batch_size, seq_len, seed).unwrap();
            let mut batch = loader.batch();
            for epoch in 0..2 {
                let mut seen = vec![0; len];
                let mut batches = 0;
                while loader.position().epoch == epoch {
                    loader.next_batch(&mut batch);
                    batches += 1;
                    let mut count = 0;
                    for (&input, &label) in batch.inputs.iter().zip(&batch.labels) {
                        if label != IGNORE_INDEX {
                            prop_assert_eq!(input + 1, label);
                            seen[label as usize] += 1;
                            count += 1;
                        }
                    }
                    prop_assert_eq!(count, batch.num_label_tokens);
                    prop_assert!(count > 0);
                    prop_assert_eq!(batch.ends_epoch, loader.position().epoch != epoch);
                }
                prop_assert_eq!(batches, loader.batches_per_epoch());
                prop_assert_eq!(seen[0], 0);
                prop_assert!(seen[1..].iter().all(|&times| times == 1), "{:?}", seen);
            }
        }

        #[test]
        fn a_position_resumes_with_identical_batches(
            len in 9usize..300, batch_size in 1usize..5, seed: u64, before in 0usize..40, after in 1usize..20,
        ) {
            let mut loader = BatchLoader::new(numbered(len), batch_size, 8, seed).unwrap();
            let (mut batch, mut other_batch) = (loader.batch(), loader.batch());
            (0..before).for_each(|_| loader.next_batch(&mut batch));
            let text = serde_json::to_string(&loader.position()).unwrap();
            let mut resumed = BatchLoader::new(numbered(len), batch_size, 8, seed).unwrap();
            resumed.seek(serde_json::from_str(&text).unwrap()).unwrap();
            for _ in 0..after {
                loader.next_batch(&mut batch);
                resumed.next_batch(&mut other_batch);
                prop_assert_eq!(&batch, &other_batch);
            }
        }

        #[test]
        fn evaluation_reads_in_order_and_everything(len in 2usize..300, batch_size in 1usize..5, seq_len in 1usize..20) {
            let index = SequenceIndex::of_text(numbered(len), seq_len, false);
            let mut eval = EvalLoader::from_index(index, batch_size, None).unwrap();
            let mut batch = Batch::new(batch_size, seq_len);
            let expected: Vec<u32> = (1..len as u32).collect();
            for _ in 0..2 {
                let mut labels: Vec<u32> = Vec::new();
                let batches = eval.remaining();
                let mut seen = 0;
                while eval.next_batch(&mut batch) {
                    labels.extend(batch.labels.iter().filter(|&&label| label != IGNORE_INDEX));
                    seen += 1;
                }
                prop_assert_eq!(&labels, &expected);
                prop_assert_eq!(seen, batches);
                eval.rewind();
            }
        }
    }

    #[test]
    fn accumulating_visits_the_same_windows_as_a_larger_batch() {
        let mut large = BatchLoader::new(numbered(1000), 8, 10, 3).unwrap();
        let mut small = BatchLoader::new(numbered(1000), 2, 10, 3).unwrap();
        let (mut whole, mut part) = (large.batch(), small.batch());
        for step in 1..=30 {
            large.next_batch(&mut whole);
            let mut inputs = Vec::new();
            for _ in 0..4 {
                small.next_batch(&mut part);
                inputs.extend_from_slice(&part.inputs);
                if part.ends_epoch {
                    break;
                }
            }
            inputs.resize(whole.inputs.len(), 0);
            assert_eq!(inputs, whole.inputs);
            assert_eq!([large.epochs_in(step, 1), small.epochs_in(step, 4)], [large.epochs(), small.epochs()]);
        }
        assert_eq!(large.position(), small.position());
        assert_eq!(large.steps_per_epoch(1), small.steps_per_epoch(4));
    }

    /// Twenty-four samples of different lengths, whose first id is their number.
    fn samples() -> Vec<Vec<(u32, bool)>> {
        let sample = |number: u32| (0..3 + number * 7 % 13).map(|at| (number + 100 * at, at > 0)).collect();
        (0..24).map(sample).collect()
    }

    #[test]
    fn a_pair_is_in_one_batch_and_every_pair_in_an_epoch() {
        let tokens = TokenSource::from_kind(&samples(), SampleKind::Preference, &[]);
        let mut loader = BatchLoader::new(tokens.clone(), 5, 32, 3).unwrap();
        let mut batch = loader.batch();
        let mut seen = Vec::new();
        while loader.position().epoch == 0 {
            loader.next_batch(&mut batch);
            // No row of a batch is empty.
            let rows = if batch.ends_epoch { 4 } else { 10 };
            assert_eq!((batch.batch_size, batch.inputs.len()), (rows, rows * batch.seq_len));
            for (row, Sequence { labels, index, role }) in batch.sequences.iter().enumerate() {
                assert_eq!(
                    (labels.start, *role),
                    (row * batch.seq_len, [SequenceRole::Chosen, SequenceRole::Rejected][row % 2])
                );
                assert_eq!(
                    (batch.inputs[labels.start], labels.len()),
                    (*index as u32, samples()[*index as usize].len() - 1)
                );
                seen.push(*index);
            }
        }
        assert!(seen.chunks(2).all(|pair| pair[0] + 1 == pair[1]));
        seen.sort_unstable();
        assert_eq!(seen, (0..24).collect::<Vec<_>>());
        assert_eq!((loader.rows_per_epoch(), loader.batches_per_epoch()), (12, 3));
        let index = SequenceIndex::new(tokens, 32, false, "x").unwrap();
        let mut eval = EvalLoader::from_index(index, 5, None).unwrap();
        let mut batch = eval.batch();
        assert!(eval.next_batch(&mut batch));
        assert_eq!(
            batch.sequences.iter().map(|sequence| sequence.index).collect::<Vec<_>>(),
            (0..10).collect::<Vec<_>>()
        );
    }

    #[test]
    fn each_bucket_and_each_epoch_shuffles_its_batches_differently() {
        let samples: Vec<Vec<(u32, bool)>> = (0..4096).map(|number| vec![(1, true); 3 + number % 30]).collect();
        let mut loader = BatchLoader::new(TokenSource::from_samples(&samples), 64, 32, 3).unwrap();
        let mut batch = loader.batch();
        // The batches of a bucket from the shortest to the longest, which is their order before the shuffle.
        let mut order = || {
            let inputs = (0..16).map(|number| {
                loader.next_batch(&mut batch);
                (batch.row_lens.iter().sum::<usize>(), number)
            });
            let mut sorted: Vec<(usize, usize)> = inputs.collect();
            sorted.sort_unstable();
            sorted.into_iter().map(|(_, number)| number).collect::<Vec<_>>()
        };
        let orders: Vec<_> = (0..8).map(|_| order()).collect();
        assert!((1..8).all(|at| !orders[..at].contains(&orders[at])), "{orders:?}");
    }

    #[test]
    fn another_batch_size_within_an_epoch_repeats_no_sample() {
        // With the last number, the samples have several buckets.
        for (copies, [before, after]) in [(1, [3, 5]), (1, [5, 3]), (1, [4, 8]), (1, [8, 1]), (150, [5, 1000])] {
            let samples: Vec<_> = std::iter::repeat_n(samples(), copies).flatten().collect();
            let weights = vec![1.0; samples.len()];
            let tokens = TokenSource::from_kind(&samples, SampleKind::Plain, &weights);
            let mut loader = BatchLoader::new(tokens.clone(), before, 32, 3).unwrap();
            let mut seen = Vec::new();
            let mut next = |loader: &mut BatchLoader| {
                let mut batch = loader.batch();
                loader.next_batch(&mut batch);
                seen.extend(batch.sequences.iter().map(|sequence| sequence.index));
            };
            (0..2).for_each(|_| next(&mut loader));
            let mut resumed = BatchLoader::new(tokens.clone(), after, 32, 3).unwrap();
            resumed.seek(loader.position()).unwrap();
            let batches = (samples.len() - 2 * before).div_ceil(after);
            (0..batches).for_each(|_| next(&mut resumed));
            assert_eq!(resumed.position(), DataPosition { epoch: 1, ..DataPosition::default() });
            seen.sort_unstable();
            assert_eq!(seen, (0..samples.len() as u64).collect::<Vec<_>>(), "{before} and {after}");
        }
    }

    #[test]
    fn weights_are_of_sequences_and_plain_samples_have_none() {
        let weights: Vec<f32> = (0..24).map(|number| number as f32 / 8.0).collect();
        let weighted = TokenSource::from_kind(&samples(), SampleKind::Plain, &weights);
        for packing in [false, true] {
            let index = SequenceIndex::new(weighted.clone(), 32, packing, "x").unwrap();
            let mut loader = BatchLoader::from_index(index, 4, 1).unwrap();
            let mut batch = loader.batch();
            loader.next_batch(&mut batch);
            assert!(batch.sequences.len() >= 4);
            for Sequence { labels, index, role } in &batch.sequences {
                assert_eq!(batch.inputs[labels.start], *index as u32);
                assert_eq!(*role, SequenceRole::Weighted(weights[*index as usize]));
                assert_eq!(labels.len(), samples()[*index as usize].len() - 1);
            }
        }
        let mut plain = BatchLoader::new(TokenSource::from_samples(&samples()), 4, 32, 1).unwrap();
        let mut batch = plain.batch();
        plain.next_batch(&mut batch);
        assert!(batch.sequences.is_empty());
    }

    #[test]
    fn each_token_of_padding_is_a_document() {
        let index = SequenceIndex::new(TokenSource::from_samples(&samples()), 32, true, "x").unwrap();
        let mut eval = EvalLoader::from_index(index, 4, None).unwrap();
        let mut batch = Batch::new(4, 32);
        let mut padding = 0;
        while eval.next_batch(&mut batch) {
            for (starts, len) in batch.document_starts.chunks(batch.seq_len).zip(&batch.row_lens) {
                assert!((*len..batch.seq_len).all(|column| starts[column] as usize == column), "{starts:?}");
                padding += batch.seq_len - len;
            }
        }
        assert!(padding > 0);
    }

    #[test]
    fn limited_evaluation_stops_early() {
        let index = SequenceIndex::new(numbered(1000), 10, false, "x").unwrap();
        let mut eval = EvalLoader::from_index(index, 2, Some(3)).unwrap();
        let mut batch = Batch::new(2, 10);
        assert_eq!(eval.remaining(), 3);
        assert_eq!((0..10).filter(|_| eval.next_batch(&mut batch)).count(), 3);
    }

    #[test]
    fn a_cursor_from_other_data_is_refused() {
        let mut loader = BatchLoader::new(numbered(100), 2, 10, 0).unwrap();
        let message = loader.seek(DataPosition { row: 10, ..DataPosition::default() }).unwrap_err().to_string();
        assert!(message.contains("row 10 of 10"), "{message}");
    }

    #[test]
    fn empty_shapes_and_short_data_are_refused() {
        assert!(BatchLoader::new(numbered(100), 0, 10, 0).is_err());
        assert!(BatchLoader::new(numbered(100), 1, 0, 0).is_err());
        assert!(BatchLoader::new(numbered(10), 1, 10, 0).is_err());
    }
}
