//! Tokens as the loader reads them: one immutable sequence, shared by the views that training and validation hold.

use super::cache::{DOCUMENT_START_FLAG, DatasetContents, DatasetKind, NO_LOSS_FLAG, TokenFile};
use super::samples::{SampleKind, SequenceRole};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// The label that is excluded from the loss: padding, and prompts before an answer.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// A contiguous view of a token sequence; cloning and splitting share the storage.
#[derive(Clone, Debug)]
pub struct TokenSource {
    store: Arc<TokenStore>,
    view: Range<usize>,
    /// The token at the start of windows of running text.
    bos: Option<u32>,
}

/// The sequence itself. Ids may carry [`NO_LOSS_FLAG`] and [`DOCUMENT_START_FLAG`].
#[derive(Debug)]
enum TokenStore {
    Memory {
        ids: Vec<u32>,
        /// The start positions of documents.
        starts: Vec<usize>,
        contents: DatasetContents,
    },
    File(TokenFile),
}

impl TokenSource {
    /// A sequence of ids in memory.
    pub fn from_ids(ids: Vec<u32>) -> Self {
        let starts = if ids.is_empty() { Vec::new() } else { vec![0] };
        Self::from_store(TokenStore::Memory { ids, starts, contents: DatasetContents::default() })
    }

    /// Samples in memory: ids, each with whether it is in the loss.
    pub fn from_samples(samples: &[Vec<(u32, bool)>]) -> Self {
        Self::from_kind(samples, SampleKind::Plain, &[])
    }

    /// Like [`Self::from_samples`], for samples of any kind. `values` has one number per sample: its weight, or 1 for a
    /// good and 0 for a bad answer; empty if there are none, as for pairs, which are a chosen and a rejected sample.
    pub fn from_kind(samples: &[Vec<(u32, bool)>], kind: SampleKind, values: &[f32]) -> Self {
        let (mut ids, mut starts) = (Vec::new(), Vec::new());
        for sample in samples.iter().filter(|sample| !sample.is_empty()) {
            starts.push(ids.len());
            ids.extend(sample.iter().map(|&(id, in_loss)| if in_loss { id } else { id | NO_LOSS_FLAG }));
        }
        let contents = DatasetContents { kind: DatasetKind::PromptCompletion, samples: kind, values: values.to_vec() };
        Self::from_store(TokenStore::Memory { ids, starts, contents })
    }

    pub(super) fn from_file(file: TokenFile) -> Self {
        Self::from_store(TokenStore::File(file))
    }

    fn from_store(store: TokenStore) -> Self {
        Self { view: 0..store.len(), store: Arc::new(store), bos: None }
    }

    /// Sets the token that the tokenizer adds before a text.
    #[must_use]
    pub fn with_bos(self, bos: Option<u32>) -> Self {
        Self { bos, ..self }
    }

    /// Tokens in the view.
    pub fn len(&self) -> usize {
        self.view.len()
    }

    /// Whether the view is empty.
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }

    /// Copies ids into `out`, starting at position `start`.
    ///
    /// # Panics
    /// If the range is not inside the view.
    pub fn read(&self, start: usize, out: &mut [u32]) {
        self.read_flagged(start, out);
        for id in out {
            *id &= !(NO_LOSS_FLAG | DOCUMENT_START_FLAG);
        }
    }

    /// Like [`Self::read`], for the inputs of a row. A row that begins within a running text has the BOS token instead
    /// of its first token, because models that were trained with that token predict badly without it.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub fn read_inputs(&self, start: usize, out: &mut [u32]) {
        self.read(start, out);
        if let (Some(bos), false, [first, ..]) = (self.bos, self.is_samples(), out) {
            *first = bos;
        }
    }

    /// Like [`Self::read`], for labels: tokens outside the loss become [`IGNORE_INDEX`].
    ///
    /// # Panics
    /// As [`Self::read`].
    pub fn read_labels(&self, start: usize, out: &mut [u32]) {
        self.read_flagged(start, out);
        for id in out {
            *id = if *id & NO_LOSS_FLAG == 0 { *id & !DOCUMENT_START_FLAG } else { IGNORE_INDEX };
        }
    }

    /// The first ids of a document, at most `count`.
    pub(super) fn prefix(&self, document: &Range<usize>, count: usize) -> Vec<u32> {
        let mut ids = vec![0; count.min(document.len())];
        self.read(document.start, &mut ids);
        ids
    }

    fn read_flagged(&self, start: usize, out: &mut [u32]) {
        let range = self.view.start + start..self.view.start + start + out.len();
        assert!(range.end <= self.view.end, "tokens {start}..{} of {}", start + out.len(), self.len());
        match &*self.store {
            TokenStore::Memory { ids, .. } => out.copy_from_slice(&ids[range]),
            TokenStore::File(file) => file.read(range.start, out),
        }
    }

    /// Returns the error of an earlier read that returned no tokens.
    pub fn check(&self) -> Result<()> {
        let TokenStore::File(file) = &*self.store else { return Ok(()) };
        file.failure.get().map_or(Ok(()), |failure| {
            let message = format!("the token cache was damaged while it was in use ({failure}); start again");
            Err(Error::data("data", message))
        })
    }

    /// Splits the view at token `at`.
    pub fn split_at(&self, at: usize) -> (Self, Self) {
        let middle = self.view.start + at.min(self.len());
        let view = |view| Self { store: Arc::clone(&self.store), view, bos: self.bos };
        (view(self.view.start..middle), view(middle..self.view.end))
    }

    /// Whether each document is a separate sample, not a part of one long text.
    pub fn is_samples(&self) -> bool {
        self.kind() != DatasetKind::Text
    }

    fn contents(&self) -> &DatasetContents {
        match &*self.store {
            TokenStore::Memory { contents, .. } => contents,
            TokenStore::File(file) => &file.contents,
        }
    }

    /// The kind of the documents.
    pub fn kind(&self) -> DatasetKind {
        self.contents().kind
    }

    /// The kind of the samples.
    pub fn samples(&self) -> SampleKind {
        self.contents().samples
    }

    /// Documents per sample: the two of a pair, or one.
    pub(super) fn documents_per_sample(&self) -> usize {
        if self.samples() == SampleKind::Preference { 2 } else { 1 }
    }

    /// The number of the document that begins at `start`, in the order of the whole data set, and its role in the
    /// objective; `None` for plain samples without weights.
    pub(super) fn role(&self, start: usize) -> Option<(u64, SequenceRole)> {
        let DatasetContents { samples, values, .. } = self.contents();
        if *samples == SampleKind::Plain && values.is_empty() {
            return None;
        }
        let number = self.sequence_at(start) as usize;
        let value = values.get(number).copied().unwrap_or(1.0);
        let role = match samples {
            SampleKind::Plain => SequenceRole::Weighted(value),
            SampleKind::Preference if number.is_multiple_of(2) => SequenceRole::Chosen,
            SampleKind::Preference => SequenceRole::Rejected,
            SampleKind::UnpairedPreference if value > 0.0 => SequenceRole::Desirable,
            SampleKind::UnpairedPreference => SequenceRole::Undesirable,
            SampleKind::Prompt => SequenceRole::Prompt,
        };
        Some((number as u64, role))
    }

    /// The number of the document at token `start`, in the order of the whole data set.
    pub(super) fn sequence_at(&self, start: usize) -> u64 {
        self.starts().partition_point(|&at| at <= self.view.start + start).saturating_sub(1) as u64
    }

    /// The documents of the whole data set.
    pub(super) fn sequences(&self) -> u64 {
        self.starts().len() as u64
    }

    /// The start positions of the documents of the whole data set.
    fn starts(&self) -> &[usize] {
        match &*self.store {
            TokenStore::Memory { starts, .. } => starts,
            TokenStore::File(file) => &file.starts,
        }
    }

    /// The documents in the view, in order; the first may begin before the view.
    pub fn documents(&self) -> impl ExactSizeIterator<Item = Range<usize>> {
        let starts = self.starts();
        let Range { start, end } = self.view;
        // The document at the start of the view, and those that begin in the view.
        let first = starts.partition_point(|&at| at <= start).saturating_sub(1);
        let last = starts.partition_point(|&at| at < end).max(first);
        let starts = if start == end { &[] } else { &starts[first..last] };
        (0..starts.len()).map(move |i| {
            let until = starts.get(i + 1).map_or(end, |&next| next);
            starts[i].max(start) - start..until - start
        })
    }

    /// Splits off the last `share` of the tokens for validation; the rest is for training. Samples and pairs are not
    /// split, and each side has at least one if there are two and the share is not 0.
    pub(super) fn hold_out(&self, share: f64) -> (Self, Self) {
        const PARTS: usize = 1_000_000;
        let rest = PARTS - (share * PARTS as f64).round() as usize;
        if !self.is_samples() {
            return self.split_at(self.len() * rest / PARTS);
        }
        let each = self.documents_per_sample();
        let train = (self.documents().len() / each * rest / PARTS).max(1) * each;
        let at = self.documents().nth(train).map_or(self.len(), |sample| sample.start);
        self.split_at(at)
    }

    /// Rejects a view that is too short for a training window: `seq_len` inputs and the token after each.
    pub fn require(&self, seq_len: usize, origin: &str) -> Result<()> {
        if self.len() > seq_len {
            return Ok(());
        }
        let message = format!(
            "too few tokens: {}, but one window of `--seq-len {seq_len}` needs {}; use more text or a smaller \
             `--seq-len`",
            self.len(),
            seq_len + 1
        );
        Err(Error::data(origin, message))
    }
}

impl TokenStore {
    fn len(&self) -> usize {
        match self {
            Self::Memory { ids, .. } => ids.len(),
            Self::File(file) => file.tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_only_context_is_read_but_not_predicted() {
        let source = TokenSource::from_ids(vec![5, 6 | NO_LOSS_FLAG, 7]);
        let mut out = [0; 3];
        source.read(0, &mut out);
        assert_eq!(out, [5, 6, 7]);
        source.read_labels(0, &mut out);
        assert_eq!(out, [5, IGNORE_INDEX, 7]);
    }

    #[test]
    fn a_split_is_two_views_of_the_same_tokens() {
        let (head, tail) = TokenSource::from_ids((0..10).collect()).split_at(7);
        assert_eq!((head.len(), tail.len()), (7, 3));
        let mut out = [0; 3];
        tail.read(0, &mut out);
        assert_eq!(out, [7, 8, 9]);
        let (all, none) = tail.split_at(99);
        assert_eq!((all.len(), none.is_empty()), (3, true));
    }

    #[test]
    fn pairs_stay_together_and_keep_their_numbers() {
        let sample = |len: usize| (0..len as u32).map(|id| (id, true)).collect::<Vec<_>>();
        let samples: Vec<_> = [2, 3, 4, 5, 6, 7].map(sample).into();
        let (train, validation) = TokenSource::from_kind(&samples, SampleKind::Preference, &[]).hold_out(0.1);
        let roles = |tokens: &TokenSource| {
            tokens.documents().map(|document| tokens.role(document.start).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(
            roles(&train),
            [
                (0, SequenceRole::Chosen),
                (1, SequenceRole::Rejected),
                (2, SequenceRole::Chosen),
                (3, SequenceRole::Rejected)
            ]
        );
        assert_eq!(roles(&validation), [(4, SequenceRole::Chosen), (5, SequenceRole::Rejected)]);
        let labelled = TokenSource::from_kind(&samples[..2], SampleKind::UnpairedPreference, &[0.0, 1.0]);
        assert_eq!(roles(&labelled), [(0, SequenceRole::Undesirable), (1, SequenceRole::Desirable)]);
        let weighted = TokenSource::from_kind(&samples[..2], SampleKind::Plain, &[0.5, 2.0]);
        assert_eq!(roles(&weighted), [(0, SequenceRole::Weighted(0.5)), (1, SequenceRole::Weighted(2.0))]);
        assert_eq!(TokenSource::from_samples(&samples).role(0), None);
    }

    #[test]
    fn too_few_tokens_are_refused_with_the_numbers() {
        let source = TokenSource::from_ids(vec![1; 8]);
        assert!(source.require(7, "x").is_ok());
        let message = source.require(8, "notes.txt").unwrap_err().to_string();
        assert!(message.starts_with("notes.txt: too few tokens: 8, but") && message.contains("needs 9"), "{message}");
    }
}
