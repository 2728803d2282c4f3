//! Cuts tokens into windows and windows into batches, so that every token of an epoch is seen once as a target.
//!
//! Window `w` takes the tokens `w*T .. w*T + T` as inputs and the token after each as target; the next window starts
//! where this one's inputs end. The last window may be short: its missing targets are [`IGNORE_INDEX`], as are those
//! of the rows that a last batch has too many. (Only the very first token is never a target: nothing precedes it.)
//! Shapes therefore never change, and no token is dropped or shown twice.

use serde::{Deserialize, Serialize};

use super::shuffle::Permutation;
use super::tokens::TokenSource;
use crate::{Error, Result};

/// The target that takes no part in the loss: padding, and prompts in front of an answer.
pub const IGNORE_INDEX: u32 = u32::MAX;

/// One micro-batch: inputs and targets of shape `[batch_size, seq_len]`, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids; 0 where there is none.
    pub inputs: Vec<u32>,
    /// The id that follows each input, or [`IGNORE_INDEX`].
    pub targets: Vec<u32>,
    /// Rows.
    pub batch_size: usize,
    /// Columns.
    pub seq_len: usize,
    /// Targets that count: those that are not [`IGNORE_INDEX`]. Micro-batches of a step are weighted by it.
    pub target_count: usize,
    /// Whether the epoch is over after this batch.
    pub ends_epoch: bool,
}

impl Batch {
    /// Buffers for a shape, to be filled by [`BatchLoader::next_batch`].
    pub fn new(batch_size: usize, seq_len: usize) -> Self {
        let (inputs, targets) = (vec![0; batch_size * seq_len], vec![IGNORE_INDEX; batch_size * seq_len]);
        Self { inputs, targets, batch_size, seq_len, target_count: 0, ends_epoch: false }
    }

    /// Fills row after row from `windows`, and pads the rows that are left.
    fn fill(&mut self, tokens: &TokenSource, windows: impl Iterator<Item = u64>) {
        let seq_len = self.seq_len;
        let mut windows = windows.fuse();
        for (inputs, targets) in self.inputs.chunks_exact_mut(seq_len).zip(self.targets.chunks_exact_mut(seq_len)) {
            let start = windows.next().map_or(tokens.len(), |window| window as usize * seq_len);
            let n = tokens.len().saturating_sub(start + 1).min(seq_len);
            tokens.read(start, &mut inputs[..n]);
            tokens.read_targets(start + n.min(1), &mut targets[..n]);
            inputs[n..].fill(0);
            targets[n..].fill(IGNORE_INDEX);
        }
        self.target_count = self.targets.iter().filter(|&&target| target != IGNORE_INDEX).count();
    }
}

/// Where the next batch starts: all a checkpoint keeps of the loader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Epochs completed.
    pub epoch: u64,
    /// Windows of the running epoch already handed out.
    pub window: u64,
}

/// An endless stream of training batches, reshuffled each epoch; a batch never crosses from one epoch into the next.
#[derive(Clone, Debug)]
pub struct BatchLoader {
    tokens: TokenSource,
    batch_size: usize,
    seq_len: usize,
    seed: u64,
    cursor: Cursor,
}

impl BatchLoader {
    /// A loader at the start of epoch 0. Fails if `tokens` do not fill one window.
    pub fn new(tokens: TokenSource, batch_size: usize, seq_len: usize, seed: u64) -> Result<Self> {
        check_shape(batch_size, seq_len)?;
        tokens.require(seq_len, "training data")?;
        Ok(Self { tokens, batch_size, seq_len, seed, cursor: Cursor::default() })
    }

    /// Where the next batch starts.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Goes on from a checkpoint's cursor. Fails if it lies beyond the epoch, as after a change of the data.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let windows = self.windows_per_epoch();
        if cursor.window >= windows {
            let message = format!("the checkpoint stands at window {} of {windows}: the data changed", cursor.window);
            return Err(Error::data("training data", message));
        }
        self.cursor = cursor;
        Ok(())
    }

    /// An empty batch of the shape that [`Self::next_batch`] fills.
    pub fn batch(&self) -> Batch {
        Batch::new(self.batch_size, self.seq_len)
    }

    /// Fills `batch` with the next windows and moves on; allocates nothing.
    pub fn next_batch(&mut self, batch: &mut Batch) {
        debug_assert_eq!((batch.batch_size, batch.seq_len), (self.batch_size, self.seq_len));
        let Cursor { epoch, window } = self.cursor;
        let windows = self.windows_per_epoch();
        let end = (window + self.batch_size as u64).min(windows);
        let order = Permutation::new(windows, self.seed, epoch);
        batch.fill(&self.tokens, (window..end).map(|index| order.at(index)));
        batch.ends_epoch = end == windows;
        self.cursor =
            if batch.ends_epoch { Cursor { epoch: epoch + 1, window: 0 } } else { Cursor { epoch, window: end } };
    }

    /// Fails if a batch holds no text, because its tokens could not be read.
    pub fn check(&self) -> Result<()> {
        self.tokens.check()
    }

    /// Windows that make an epoch.
    pub fn windows_per_epoch(&self) -> u64 {
        window_count(&self.tokens, self.seq_len)
    }

    /// Micro-batches that make an epoch; the last one may be padded.
    pub fn batches_per_epoch(&self) -> u64 {
        self.windows_per_epoch().div_ceil(self.batch_size as u64)
    }

    /// Optimizer steps that make an epoch of `grad_accum` micro-batches each, where the step that meets
    /// [`Batch::ends_epoch`] stops early.
    pub fn steps_per_epoch(&self, grad_accum: usize) -> u64 {
        self.batches_per_epoch().div_ceil(grad_accum as u64)
    }

    /// Epochs handed out so far, the running one as a fraction.
    pub fn epochs(&self) -> f64 {
        self.cursor.epoch as f64 + self.cursor.window as f64 / self.windows_per_epoch() as f64
    }

    /// Targets of an epoch, masked ones included.
    pub fn tokens_per_epoch(&self) -> u64 {
        self.tokens.len() as u64 - 1
    }
}

/// One pass over tokens in their own order, for validation.
#[derive(Clone, Debug)]
pub struct EvalBatches {
    tokens: TokenSource,
    batch_size: usize,
    seq_len: usize,
    /// The next window, and the one to stop at.
    window: u64,
    end: u64,
}

impl EvalBatches {
    /// Batches over `tokens`, at most `max_batches` of them. Fails if there is not one target.
    pub fn new(tokens: TokenSource, batch_size: usize, seq_len: usize, max_batches: Option<u64>) -> Result<Self> {
        check_shape(batch_size, seq_len)?;
        tokens.require(1, "validation data")?;
        let limit = max_batches.map_or(u64::MAX, |batches| batches.saturating_mul(batch_size as u64));
        let end = window_count(&tokens, seq_len).min(limit);
        Ok(Self { tokens, batch_size, seq_len, window: 0, end })
    }

    /// Fills `batch` and says so, or says that the pass is over. The buffers are reused; nothing is allocated.
    pub fn next_batch(&mut self, batch: &mut Batch) -> bool {
        debug_assert_eq!((batch.batch_size, batch.seq_len), (self.batch_size, self.seq_len));
        if self.window == self.end {
            return false;
        }
        let end = (self.window + self.batch_size as u64).min(self.end);
        batch.fill(&self.tokens, self.window..end);
        batch.ends_epoch = end == self.end;
        self.window = end;
        true
    }

    /// Fails if a batch held no text, because its tokens could not be read.
    pub fn check(&self) -> Result<()> {
        self.tokens.check()
    }

    /// Batches still to come.
    pub fn remaining(&self) -> u64 {
        (self.end - self.window).div_ceil(self.batch_size as u64)
    }

    /// Starts over.
    pub fn rewind(&mut self) {
        self.window = 0;
    }
}

fn window_count(tokens: &TokenSource, seq_len: usize) -> u64 {
    (tokens.len() as u64 - 1).div_ceil(seq_len as u64)
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
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tokens whose id is their position, so that a target names the place it came from.
    fn numbered(len: usize) -> TokenSource {
        TokenSource::from_ids((0..len as u32).collect())
    }

    proptest! {
        #[test]
        fn every_token_is_a_target_once_an_epoch_after_the_one_before_it(
            len in 9usize..400, batch_size in 1usize..6, seq_len in 1usize..9, seed: u64,
        ) {
            let mut loader = BatchLoader::new(numbered(len), batch_size, seq_len, seed).unwrap();
            let mut batch = loader.batch();
            for epoch in 0..2 {
                let mut seen = vec![0; len];
                let mut batches = 0;
                while loader.cursor().epoch == epoch {
                    loader.next_batch(&mut batch);
                    batches += 1;
                    let mut count = 0;
                    for (&input, &target) in batch.inputs.iter().zip(&batch.targets) {
                        if target != IGNORE_INDEX {
                            prop_assert_eq!(input + 1, target);
                            seen[target as usize] += 1;
                            count += 1;
                        }
                    }
                    prop_assert_eq!(count, batch.target_count);
                    prop_assert!(count > 0);
                    prop_assert_eq!(batch.ends_epoch, loader.cursor().epoch != epoch);
                }
                prop_assert_eq!(batches, loader.batches_per_epoch());
                prop_assert_eq!(seen[0], 0);
                prop_assert!(seen[1..].iter().all(|&times| times == 1), "{:?}", seen);
            }
        }

        #[test]
        fn a_cursor_resumes_with_identical_batches(
            len in 9usize..300, batch_size in 1usize..5, seed: u64, before in 0usize..40, after in 1usize..20,
        ) {
            let mut loader = BatchLoader::new(numbered(len), batch_size, 8, seed).unwrap();
            let (mut batch, mut other_batch) = (loader.batch(), loader.batch());
            (0..before).for_each(|_| loader.next_batch(&mut batch));
            let text = serde_json::to_string(&loader.cursor()).unwrap();
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
            let mut eval = EvalBatches::new(numbered(len), batch_size, seq_len, None).unwrap();
            let mut batch = Batch::new(batch_size, seq_len);
            let expected: Vec<u32> = (1..len as u32).collect();
            for _ in 0..2 {
                let mut targets: Vec<u32> = Vec::new();
                let batches = eval.remaining();
                let mut seen = 0;
                while eval.next_batch(&mut batch) {
                    targets.extend(batch.targets.iter().filter(|&&target| target != IGNORE_INDEX));
                    seen += 1;
                }
                prop_assert_eq!(&targets, &expected);
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
        for _ in 0..30 {
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
        }
        assert_eq!(large.cursor(), small.cursor());
        assert_eq!(large.steps_per_epoch(1), small.steps_per_epoch(4));
    }

    #[test]
    fn limited_evaluation_stops_early() {
        let mut eval = EvalBatches::new(numbered(1000), 2, 10, Some(3)).unwrap();
        let mut batch = Batch::new(2, 10);
        assert_eq!(eval.remaining(), 3);
        assert_eq!((0..10).filter(|_| eval.next_batch(&mut batch)).count(), 3);
    }

    #[test]
    fn a_cursor_from_other_data_is_refused() {
        let mut loader = BatchLoader::new(numbered(100), 2, 10, 0).unwrap();
        let message = loader.seek(Cursor { epoch: 0, window: 10 }).unwrap_err().to_string();
        assert!(message.contains("window 10 of 10"), "{message}");
    }

    #[test]
    fn empty_shapes_and_short_data_are_refused() {
        assert!(BatchLoader::new(numbered(100), 0, 10, 0).is_err());
        assert!(BatchLoader::new(numbered(100), 1, 0, 0).is_err());
        assert!(BatchLoader::new(numbered(10), 1, 10, 0).is_err());
        assert!(EvalBatches::new(numbered(1), 1, 10, None).is_err());
    }
}
