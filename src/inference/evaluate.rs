//! Evaluates a model on a text: loss, perplexity and bits per byte over a sliding window.
//!
//! Every token except the first is predicted exactly once. With a stride shorter than the window, windows overlap, and
//! a prediction is taken from the window with more context: at least `seq_len - stride` tokens.

use super::{ModelView, not_finite};
use crate::data::{EvalLoader, IGNORE_INDEX, SequenceIndex, TokenSource};
use crate::engine::model::{ForwardMode, InputIds, Workspace};
use crate::{Error, Result};
use serde::Serialize;

/// How a text is split into windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens per window; at most the model's context.
    pub seq_len: usize,
    /// Tokens from one window's start to the next one's; at most `seq_len`.
    pub stride: usize,
    /// Windows per batch.
    pub batch_size: usize,
}

/// Default number of tokens per batch.
const BATCH_TOKENS: usize = 1024;

impl SlidingWindow {
    /// Windows of `seq_len` tokens, or of the whole `context`; without a stride they do not overlap. Fails with
    /// [`Error::Config`] with the flag that is out of range.
    pub fn new(context: usize, seq_len: Option<usize>, stride: Option<usize>, batch: Option<usize>) -> Result<Self> {
        let seq_len = seq_len.unwrap_or(context);
        let within = |flag: &str, value: usize, limit: usize, what: &str| match value {
            0 => Err(Error::config(flag, "must be at least 1")),
            _ if value > limit => Err(Error::config(flag, format!("{value} exceeds the {what} of {limit} tokens"))),
            _ => Ok(value),
        };
        within("--seq-len", seq_len, context, "model's context")?;
        let stride = within("--stride", stride.unwrap_or(seq_len), seq_len, "window")?;
        let batch_size = within("--batch-size", batch.unwrap_or((BATCH_TOKENS / seq_len).max(1)), usize::MAX, "")?;
        Ok(Self { seq_len, stride, batch_size })
    }

    /// Limits the window to a text of `tokens` tokens, because longer buffers only cost memory.
    #[must_use]
    pub fn clamped_to(self, tokens: usize) -> Self {
        let longest = tokens.saturating_sub(1).max(1);
        let (seq_len, stride) = (self.seq_len.min(longest), self.stride.min(longest));
        Self { seq_len, stride, ..self }
    }

    /// The number of windows needed to predict `tokens` tokens except the first.
    pub fn count(&self, tokens: usize) -> usize {
        let labels = tokens.saturating_sub(1);
        if labels == 0 { 0 } else { 1 + labels.saturating_sub(self.seq_len).div_ceil(self.stride) }
    }

    /// The start of window `index`, and the number of its first labels that earlier windows have predicted.
    fn position(&self, index: usize) -> (usize, usize) {
        (index * self.stride, if index == 0 { 0 } else { self.seq_len - self.stride })
    }
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean cross-entropy in nats per token.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Bits to encode a byte of the text with this model.
    pub bits_per_byte: f64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Windows computed, or samples.
    pub windows: usize,
}

impl Evaluation {
    fn of(sum: f64, tokens: u64, windows: usize, bytes_per_token: f64) -> Result<Self> {
        if tokens == 0 {
            return Err(Error::data("the text", "has no token to predict; use a text with at least two tokens"));
        }
        let loss = sum / tokens as f64;
        if !loss.is_finite() {
            return Err(not_finite());
        }
        let bits_per_byte = loss / std::f64::consts::LN_2 / bytes_per_token;
        Ok(Self { loss, perplexity: loss.exp(), bits_per_byte, tokens, windows })
    }
}

/// Evaluates a model on `tokens`; `bytes_per_token` is the average size of a predicted token. Calls `progress` with the
/// number of windows done after every batch. Fails with [`Error::Model`] if the model's logits are not finite,
/// [`Error::Data`] for a text without a token to predict.
pub fn evaluate(
    model: ModelView<'_>,
    tokens: &TokenSource,
    bytes_per_token: f64,
    windows: SlidingWindow,
    mut progress: impl FnMut(usize),
) -> Result<Evaluation> {
    if tokens.is_samples() {
        return evaluate_samples(model, tokens, bytes_per_token, windows, progress);
    }
    let ModelView { decoder, weights, policy } = model;
    let SlidingWindow { seq_len, batch_size, .. } = windows;
    let count = windows.count(tokens.len());
    let batch_size = batch_size.min(count.max(1));
    let mut workspace = Workspace::for_evaluation(decoder.spec(), policy, (batch_size, seq_len), &weights.device())?;
    let mut ids = vec![0; batch_size * seq_len];
    let mut labels = vec![IGNORE_INDEX; batch_size * seq_len];
    let (mut loss, mut predicted) = (0.0, 0);
    let length = |index| seq_len.min(tokens.len() - 1 - windows.position(index).0);
    let mut first = 0;
    while first < count {
        // A text's last window can be shorter. Then it is a separate batch, because some rotary embeddings depend on
        // the length.
        let seq_len = length(first);
        let indices = (first..count).take(batch_size).take_while(|&index| length(index) == seq_len);
        let rows = indices.clone().count();
        let (ids, labels) = (&mut ids[..rows * seq_len], &mut labels[..rows * seq_len]);
        for (index, (ids, labels)) in indices.zip(ids.chunks_exact_mut(seq_len).zip(labels.chunks_exact_mut(seq_len))) {
            let (start, done) = windows.position(index);
            tokens.read_inputs(start, ids);
            tokens.read_labels(start + 1, labels);
            labels[..done.min(seq_len)].fill(IGNORE_INDEX);
            first = index + 1;
        }
        let mut narrow = None;
        let workspace = workspace.for_shape((rows, seq_len), &mut narrow)?;
        decoder.forward(weights, InputIds::new(ids, seq_len), ForwardMode::Eval, workspace, &mut ())?;
        loss += decoder.loss(weights, labels, workspace)?;
        predicted += labels.iter().filter(|&&label| label != IGNORE_INDEX).count() as u64;
        progress(first);
    }
    tokens.check()?;
    Evaluation::of(loss, predicted, count, bytes_per_token)
}

/// Like [`evaluate`], for samples: each is computed separately, truncated to the window's length.
fn evaluate_samples(
    model: ModelView<'_>,
    tokens: &TokenSource,
    bytes_per_token: f64,
    SlidingWindow { seq_len, batch_size, .. }: SlidingWindow,
    mut progress: impl FnMut(usize),
) -> Result<Evaluation> {
    let ModelView { decoder, weights, policy } = model;
    let longest = tokens.documents().map(|sample| sample.len() - 1).max().unwrap_or(0);
    let seq_len = seq_len.min(longest.max(1));
    let index = SequenceIndex::new(tokens.clone(), seq_len, false, "validation data")?;
    let mut batches = EvalLoader::from_index(index, batch_size, None)?;
    let mut batch = batches.batch();
    let shape = (batch.batch_size, seq_len);
    let mut workspace = Workspace::for_evaluation(decoder.spec(), policy, shape, &weights.device())?;
    let (mut loss, mut predicted, mut done) = (0.0, 0, 0);
    while batches.next_batch(&mut batch) {
        let mut narrow = None;
        let workspace = workspace.for_shape(batch.shape(), &mut narrow)?;
        decoder.forward(weights, batch.tokens(), ForwardMode::Eval, workspace, &mut ())?;
        loss += decoder.loss(weights, &batch.labels, workspace)?;
        predicted += batch.num_label_tokens as u64;
        done += batch.labels.chunks(batch.seq_len).filter(|row| row.iter().any(|&id| id != IGNORE_INDEX)).count();
        progress(done);
    }
    batches.check()?;
    Evaluation::of(loss, predicted, done, bytes_per_token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_token_but_the_first_is_predicted_once(
            tokens in 0_usize..200, seq_len in 1_usize..20, stride in 1_usize..20
        ) {
            let windows = SlidingWindow { seq_len, stride: stride.min(seq_len), batch_size: 1 };
            let mut hits = vec![0; tokens];
            for (start, done) in (0..windows.count(tokens)).map(|index| windows.position(index)) {
                for hit in &mut hits[start + 1 + done..=(start + seq_len).min(tokens - 1)] {
                    *hit += 1;
                }
            }
            prop_assert!(hits.iter().skip(1).all(|&hits| hits == 1) && hits.first().is_none_or(|&hits| hits == 0));
        }
    }

    /// Otherwise a model with a context of 2^20 would reserve buffers for it to read 5 kB of text.
    #[test]
    fn a_window_is_no_longer_than_the_text() {
        let windows = SlidingWindow::new(1 << 20, None, None, None).unwrap().clamped_to(4700);
        assert_eq!((windows.seq_len, windows.stride, windows.count(4700)), (4699, 4699, 1));
        let windows = SlidingWindow::new(8, None, Some(4), None).unwrap();
        assert_eq!(windows.clamped_to(4700), windows);
    }
}
