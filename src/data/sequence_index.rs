//! The tokens of each row of a batch: a window of a long text, a sample, or several documents packed into one row.
//!
//! A text is split into windows: the inputs of window `w` are the tokens `w*T .. w*T + T`, and the label of each is the
//! token after it. A sample is a separate row, truncated to `T` inputs. Packing puts as many documents into a row as
//! fit: longest first, each into the fullest row that has room (best fit). Documents of a text are split into pieces of
//! `T` first, and longer samples are truncated. The right answer after a prompt stays whole, because no pass reads it.
//! The chosen and the rejected sample of a pair are two consecutive rows, which form a group: batches consist of whole
//! groups.

use super::cache::DatasetKind;
use super::samples::{SampleKind, SequenceRole};
use super::tokens::{IGNORE_INDEX, TokenSource};
use crate::{Error, Result};
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

/// Inputs in a row are padded to a multiple of this.
const LENGTH_STEP: usize = 16;

/// Statistics of a data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DatasetStats {
    /// Samples, or documents of a text.
    pub samples: u64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Loss tokens: the tokens that rows hold as counted labels.
    pub loss_tokens: u64,
    /// Samples that are longer than a row; what does not fit is cut off.
    pub truncated: u64,
    /// Tokens that are cut off.
    pub truncated_tokens: u64,
    /// Samples without loss tokens, at all or after the cut. They are left out, and so are pairs that have one.
    pub skipped: u64,
    /// Statistics of pairs. A pair counts as one sample above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairStats>,
    /// Answers that are labelled good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desirable: Option<u64>,
}

/// Statistics of the loss tokens of the pairs that are trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PairStats {
    /// The sums for chosen and for rejected answers.
    pub loss_tokens: [u64; 2],
    /// The maxima for chosen and for rejected answers.
    pub longest: [u64; 2],
    /// Pairs whose chosen answer is longer, and whose rejected answer is.
    pub longer: [u64; 2],
    /// Pairs whose answers are equally long.
    pub equally_long: u64,
    /// Pairs that are identical after the cut. They are left out.
    pub identical: u64,
}

impl PairStats {
    fn add(&mut self, [chosen, rejected]: [u64; 2]) {
        for (side, tokens) in [chosen, rejected].into_iter().enumerate() {
            self.loss_tokens[side] += tokens;
            self.longest[side] = self.longest[side].max(tokens);
        }
        match chosen.cmp(&rejected) {
            Ordering::Greater => self.longer[0] += 1,
            Ordering::Less => self.longer[1] += 1,
            Ordering::Equal => self.equally_long += 1,
        }
    }
}

/// Consecutive inputs; the label of each is the token after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenSpan {
    pub(super) start: usize,
    pub(super) len: usize,
}

impl TokenSpan {
    /// The inputs of a sample, truncated to `seq_len` unless it is a prompt with its right answer.
    fn of(document: &Range<usize>, seq_len: usize, kind: SampleKind) -> Self {
        let whole = document.len() - 1;
        Self { start: document.start, len: if kind == SampleKind::Prompt { whole } else { whole.min(seq_len) } }
    }
}

/// The rows of a set of tokens.
#[derive(Clone, Debug)]
pub struct SequenceIndex {
    pub(crate) tokens: TokenSource,
    pub(super) seq_len: usize,
    rows: RowSpans,
    /// The counts of the rows.
    pub stats: DatasetStats,
}

#[derive(Clone, Debug)]
enum RowSpans {
    Windows,
    Spans {
        spans: Vec<TokenSpan>,
        /// The end of each row's spans.
        ends: Vec<u32>,
        /// Whether a row may contain more than one.
        packed: bool,
    },
}

impl SequenceIndex {
    /// Lays out `tokens` as rows of `seq_len` inputs. `origin` names the tokens in an error. Fails with [`Error::Data`]
    /// if there is no row: too few tokens for a window, or no sample with loss tokens.
    pub fn new(tokens: TokenSource, seq_len: usize, packing: bool, origin: &str) -> Result<Self> {
        if tokens.is_samples() {
            return Self::of_samples(tokens, seq_len, packing, origin);
        }
        tokens.require(if packing { 1 } else { seq_len }, origin)?;
        Ok(Self::of_text(tokens, seq_len, packing))
    }

    /// The rows of running text of any length.
    pub(super) fn of_text(tokens: TokenSource, seq_len: usize, packing: bool) -> Self {
        let samples = tokens.documents().len() as u64;
        let all = tokens.len() as u64;
        // The first token has no predecessor, and BOS tokens are never labels.
        let is_label = |at: &usize| {
            let mut label = [IGNORE_INDEX];
            tokens.read_labels(*at, &mut label);
            label != [IGNORE_INDEX]
        };
        let begun = tokens.documents().map(|document| document.start).filter(|at| *at > 0 && !is_label(at)).count();
        let loss_tokens = all.saturating_sub(1 + begun as u64);
        let stats = DatasetStats { samples, tokens: all, loss_tokens, ..DatasetStats::default() };
        if !packing {
            return Self { tokens, seq_len, rows: RowSpans::Windows, stats };
        }
        let mut spans = Vec::new();
        for document in tokens.documents() {
            let inputs = document.start..document.end - 1;
            spans.extend(
                inputs.clone().step_by(seq_len).map(|start| TokenSpan { start, len: seq_len.min(inputs.end - start) }),
            );
        }
        let loss_tokens = spans.iter().map(|span| span.len as u64).sum();
        let rows = pack(&spans, seq_len);
        Self { tokens, seq_len, rows, stats: DatasetStats { loss_tokens, ..stats } }
    }

    fn of_samples(tokens: TokenSource, seq_len: usize, packing: bool, origin: &str) -> Result<Self> {
        if tokens.is_empty() {
            let message = "one sample is too few for training and validation; give validation data with `--val`";
            return Err(Error::data(origin, message));
        }
        let (kind, each) = (tokens.samples(), tokens.documents_per_sample());
        if packing && kind != SampleKind::Plain {
            return Err(Error::config(
                "--packing",
                "pairs, labelled answers and prompts cannot be packed; omit `--packing`",
            ));
        }
        let (mut stats, mut spans) = (DatasetStats::default(), Vec::new());
        stats.pairs = (kind == SampleKind::Preference).then(PairStats::default);
        stats.desirable = (kind == SampleKind::UnpairedPreference).then_some(0);
        let span = |document: &Range<usize>| TokenSpan::of(document, seq_len, kind);
        let mut labels = Vec::new();
        let mut count_loss_tokens = |TokenSpan { start, len }| {
            labels.resize(len, 0);
            tokens.read_labels(start + 1.min(len), &mut labels);
            let count = |labels: &[u32]| labels.iter().filter(|&&label| label != IGNORE_INDEX).count() as u64;
            // The first one has to be within `seq_len`, also after a prompt.
            if count(&labels[..len.min(seq_len)]) > 0 { count(&labels) } else { 0 }
        };
        let documents: Vec<Range<usize>> = tokens.documents().collect();
        for sample in documents.chunks(each) {
            let cut: u64 = sample.iter().map(|document| (document.len() - 1 - span(document).len) as u64).sum();
            let mut loss_tokens = [0; 2];
            for (document, count) in sample.iter().zip(&mut loss_tokens) {
                *count = count_loss_tokens(span(document));
            }
            stats.samples += 1;
            stats.tokens += sample.iter().map(|document| document.len() as u64).sum::<u64>();
            stats.truncated += u64::from(cut > 0);
            stats.truncated_tokens += cut;
            if loss_tokens[..each].contains(&0) {
                stats.skipped += 1;
                continue;
            }
            if let Some(pairs) = &mut stats.pairs {
                let [chosen, rejected] = [0, 1].map(|side| tokens.prefix(&sample[side], seq_len + 1));
                if chosen == rejected {
                    pairs.identical += 1;
                    continue;
                }
                pairs.add(loss_tokens);
            }
            if let (Some(desirable), Some((_, SequenceRole::Desirable))) =
                (&mut stats.desirable, tokens.role(sample[0].start))
            {
                *desirable += 1;
            }
            stats.loss_tokens += loss_tokens.iter().sum::<u64>();
            spans.extend(sample.iter().map(span));
        }
        if spans.is_empty() {
            let is_long = |sample: &&[Range<usize>]| sample.iter().any(|document| document.len() - 1 > seq_len);
            let message = format!(
                "no loss tokens: {} of {} samples are longer than `--seq-len {seq_len}`, and no answer begins within \
                 it; raise `--seq-len`, or check the answers with `finetune data show`",
                documents.chunks(each).filter(is_long).count(),
                stats.samples
            );
            return Err(Error::data(origin, message));
        }
        let rows = if packing {
            pack(&spans, seq_len)
        } else {
            let ends = (1..=spans.len() as u32).collect();
            RowSpans::Spans { spans, ends, packed: false }
        };
        Ok(Self { tokens, seq_len, rows, stats })
    }

    /// The number of rows.
    pub fn rows(&self) -> u64 {
        match &self.rows {
            RowSpans::Windows => (self.tokens.len() as u64).saturating_sub(1).div_ceil(self.seq_len as u64),
            RowSpans::Spans { ends, .. } => ends.len() as u64,
        }
    }

    /// The rows of a group: the two of a pair, or one.
    pub fn group_rows(&self) -> usize {
        self.tokens.documents_per_sample()
    }

    /// The number of groups.
    pub fn groups(&self) -> u64 {
        self.rows() / self.group_rows() as u64
    }

    pub(super) fn rows_of(&self, group: u64) -> Range<u64> {
        let each = self.group_rows() as u64;
        group * each..(group + 1) * each
    }

    /// Inputs of a group's longest row.
    pub(super) fn group_len(&self, group: u64) -> usize {
        self.rows_of(group).map(|row| self.row_len(row)).max().unwrap_or(0)
    }

    /// Whether rows differ in length, so that a batch may be narrower than `seq_len`.
    pub(super) fn is_ragged(&self) -> bool {
        matches!(self.rows, RowSpans::Spans { .. })
    }

    /// Whether a row may hold several documents.
    pub(super) fn is_packed(&self) -> bool {
        matches!(self.rows, RowSpans::Spans { packed: true, .. })
    }

    pub(super) fn row(&self, row: u64) -> impl Iterator<Item = TokenSpan> {
        let (one, several) = match &self.rows {
            RowSpans::Windows => {
                let start = row as usize * self.seq_len;
                let len = self.tokens.len().saturating_sub(start + 1).min(self.seq_len);
                (Some(TokenSpan { start, len }), &[][..])
            }
            RowSpans::Spans { spans, ends, .. } => {
                let (row, end) = (row as usize, |row: usize| ends[row] as usize);
                (None, &spans[row.checked_sub(1).map_or(0, end)..end(row)])
            }
        };
        one.into_iter().chain(several.iter().copied())
    }

    /// The tokens of a sample, or of the first one in the rows, each with whether it is in the loss; a pair has two
    /// such sequences. They are truncated as in their rows. `None` if there is no such sample.
    pub(super) fn sample(&self, number: Option<u64>) -> Option<Vec<Vec<(u32, bool)>>> {
        let each = self.group_rows();
        let spans: Vec<TokenSpan> = match (number, &self.rows) {
            (Some(number), _) => {
                let first = number.checked_sub(1)? as usize * each;
                let documents = self.tokens.documents().skip(first).take(each);
                documents.map(|document| TokenSpan::of(&document, self.seq_len, self.tokens.samples())).collect()
            }
            (None, RowSpans::Windows) => self.row(0).collect(),
            (None, RowSpans::Spans { spans, packed: true, .. }) => {
                spans.iter().copied().min_by_key(|span| span.start).into_iter().collect()
            }
            (None, RowSpans::Spans { spans, .. }) => spans.iter().copied().take(each).collect(),
        };
        let sequence = |TokenSpan { start, len }| {
            let mut ids = vec![0; len + 1];
            let mut labels = vec![IGNORE_INDEX; len + 1];
            self.tokens.read_inputs(start, &mut ids);
            self.tokens.read_labels(start + 1, &mut labels[1..]);
            ids.into_iter().zip(labels).map(|(id, label)| (id, label != IGNORE_INDEX)).collect()
        };
        (!spans.is_empty()).then(|| spans.into_iter().map(sequence).collect())
    }

    /// Whether the samples are conversations.
    pub fn is_chat(&self) -> bool {
        self.tokens.kind() == DatasetKind::Conversational
    }

    /// Inputs of all rows.
    pub fn inputs(&self) -> u64 {
        match &self.rows {
            RowSpans::Windows => (self.tokens.len() as u64).saturating_sub(1),
            RowSpans::Spans { spans, .. } => spans.iter().map(|span| span.len as u64).sum(),
        }
    }

    /// Inputs of a row.
    pub(super) fn row_len(&self, row: u64) -> usize {
        self.row(row).map(|span| span.len).sum()
    }

    /// The columns of a batch whose longest row has `longest` inputs. Only prompts with their answers exceed `seq_len`.
    pub(super) fn columns(&self, longest: usize) -> usize {
        if self.is_ragged() { padded_len(longest, self.seq_len.max(longest)) } else { self.seq_len }
    }
}

/// The columns for `longest` inputs, of at most `seq_len`.
pub(crate) fn padded_len(longest: usize, seq_len: usize) -> usize {
    longest.next_multiple_of(LENGTH_STEP).min(seq_len)
}

/// Packs by best fit, the longest first: each span goes into the row with the smallest free room that still takes it.
/// Among several such rows it takes the last begun, so that the result depends only on the lengths.
fn pack(spans: &[TokenSpan], seq_len: usize) -> RowSpans {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(spans[i].len), i));
    let mut rows: Vec<Vec<usize>> = Vec::new();
    // Rows by remaining room.
    let mut room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in order {
        let len = spans[i].len;
        let fitting = room.range_mut(len..).next().and_then(|(&left, rows)| Some((left, rows.pop()?, rows.is_empty())));
        let (left, row) = if let Some((left, row, last)) = fitting {
            if last {
                room.remove(&left);
            }
            (left, row)
        } else {
            rows.push(Vec::new());
            (seq_len, rows.len() - 1)
        };
        rows[row].push(i);
        if left > len {
            room.entry(left - len).or_default().push(row);
        }
    }
    let mut packed = Vec::with_capacity(spans.len());
    let ends = rows.into_iter().map(|row| {
        packed.extend(row.into_iter().map(|i| spans[i]));
        packed.len() as u32
    });
    let ends = ends.collect();
    RowSpans::Spans { spans: packed, ends, packed: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::BatchLoader;
    use proptest::prelude::*;

    /// Samples of these lengths; the last token of each is in the loss.
    fn samples(lens: &[usize]) -> TokenSource {
        let samples: Vec<Vec<(u32, bool)>> =
            lens.iter().map(|&len| (0..len).map(|i| (i as u32, i + 1 == len)).collect()).collect();
        TokenSource::from_samples(&samples)
    }

    fn lens(index: &SequenceIndex) -> Vec<Vec<usize>> {
        (0..index.rows()).map(|row| index.row(row).map(|span| span.len).collect()).collect()
    }

    #[test]
    fn samples_are_rows_and_what_has_no_answer_is_counted() {
        let index = SequenceIndex::new(samples(&[5, 1, 9, 20, 3]), 8, false, "x").unwrap();
        assert_eq!(lens(&index), [vec![4], vec![8], vec![2]]);
        let stats = DatasetStats {
            samples: 5,
            tokens: 38,
            loss_tokens: 3,
            truncated: 1,
            truncated_tokens: 11,
            skipped: 2,
            ..DatasetStats::default()
        };
        assert_eq!(index.stats, stats);
        let message = SequenceIndex::new(samples(&[20, 30]), 8, false, "a.jsonl").unwrap_err().to_string();
        assert!(message.contains("a.jsonl: no loss tokens: 2 of 2 samples are longer than `--seq-len 8`"), "{message}");
    }

    #[test]
    fn a_pair_is_two_rows_and_is_left_out_as_a_whole() {
        // Ids of the prompt, then of the answer.
        let sample = |prompt: usize, answer: &[u32]| -> Vec<(u32, bool)> {
            (0..prompt).map(|id| (id as u32, false)).chain(answer.iter().map(|&id| (id, true))).collect()
        };
        let pairs = [
            [sample(2, &[10, 11]), sample(2, &[12])],
            [sample(3, &[10; 9]), sample(3, &[12, 13])],
            [sample(8, &[10]), sample(8, &[11])],
            // Nothing of an answer is left, and nothing of the difference.
            [sample(9, &[10]), sample(2, &[11])],
            [sample(6, &[10, 11, 12, 13]), sample(6, &[10, 11, 12, 14])],
        ];
        let samples: Vec<_> = pairs.iter().flatten().cloned().collect();
        let tokens = TokenSource::from_kind(&samples, SampleKind::Preference, &[]);
        let index = SequenceIndex::new(tokens.clone(), 8, false, "x").unwrap();
        assert_eq!(lens(&index), [vec![3], vec![2], vec![8], vec![4], vec![8], vec![8]]);
        assert_eq!((index.groups(), index.group_rows(), index.group_len(1)), (3, 2, 8));
        let stats = index.stats;
        assert_eq!((stats.samples, stats.truncated, stats.skipped, stats.loss_tokens), (5, 3, 1, 13));
        let expected =
            PairStats { loss_tokens: [9, 4], longest: [6, 2], longer: [2, 0], equally_long: 1, identical: 1 };
        assert_eq!(stats.pairs, Some(expected));
        let sides = index.sample(Some(1)).unwrap();
        assert_eq!(sides, pairs[0]);
        assert!(index.sample(Some(6)).is_none());
        let message = SequenceIndex::new(tokens, 8, true, "x").unwrap_err().to_string();
        assert!(message.contains("--packing: pairs, labelled answers and prompts cannot be packed"), "{message}");
    }

    #[test]
    fn the_right_answer_after_a_prompt_is_whole() {
        let sample = |prompt: usize, answer: usize| -> Vec<(u32, bool)> {
            (0..prompt + answer).map(|id| (id as u32, id >= prompt)).collect()
        };
        let tokens = |samples: &[_]| TokenSource::from_kind(samples, SampleKind::Prompt, &[]);
        let index = SequenceIndex::new(tokens(&[sample(3, 20), sample(9, 2), sample(8, 1)]), 8, false, "x").unwrap();
        assert_eq!(lens(&index), [vec![22], vec![8]]);
        let DatasetStats { truncated, skipped, loss_tokens, .. } = index.stats;
        assert_eq!((truncated, skipped, loss_tokens), (0, 1, 21));
        assert_eq!(index.sample(Some(1)).unwrap(), [sample(3, 20)]);
        let mut loader = BatchLoader::from_index(index, 2, 1).unwrap();
        let mut batch = loader.batch();
        loader.next_batch(&mut batch);
        assert_eq!((batch.seq_len, batch.num_label_tokens), (22, 21));
        let message = SequenceIndex::new(tokens(&[sample(9, 2)]), 8, false, "x").unwrap_err().to_string();
        assert!(message.contains("1 of 1 samples are longer than `--seq-len 8`"), "{message}");
    }

    #[test]
    fn documents_fill_the_row_with_the_least_room() {
        let index = SequenceIndex::new(samples(&[4, 8, 5, 3, 2, 7]), 10, true, "x").unwrap();
        assert_eq!(lens(&index), [vec![7, 3], vec![6, 4], vec![2, 1]]);
    }

    proptest! {
        #[test]
        fn packing_keeps_every_token_and_no_row_is_too_long(
            lens in prop::collection::vec(2usize..40, 1..60), seq_len in 1usize..30,
        ) {
            let tokens = TokenSource::from_ids((0..lens.iter().sum::<usize>() as u32).collect());
            for index in [SequenceIndex::of_text(tokens, seq_len, true), SequenceIndex::of_text(samples(&lens), seq_len, true)] {
                let mut inputs: Vec<usize> = Vec::new();
                for row in 0..index.rows() {
                    prop_assert!((1..=seq_len).contains(&index.row_len(row)));
                    inputs.extend(index.row(row).flat_map(|span| span.start..span.start + span.len));
                }
                inputs.sort_unstable();
                let last: Vec<usize> = index.tokens.documents().map(|document| document.end - 1).collect();
                let expected: Vec<usize> = (0..index.tokens.len()).filter(|at| !last.contains(at)).collect();
                prop_assert_eq!(inputs, expected);
            }
        }
    }
}
