//! A preview of the training samples, shown before the first step: counts, and the first sample or pair with its loss
//! tokens marked.

use super::chat_format::ChatFormat;
use super::samples::SampleKind;
use super::sequence_index::{DatasetStats, PairStats, SequenceIndex};
use super::tokenizer::Tokenizer;
use crate::{Error, Result, untrusted};
use std::fmt::{Display, Write as _};

/// The maximum number of bytes of a sample in the preview; the middle of a longer sample is left out.
const SHOWN: usize = 2400;

/// A preview of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetPreview {
    /// The kind of the samples.
    pub samples: SampleKind,
    /// Their counts.
    pub stats: DatasetStats,
    /// Rows that they make.
    pub rows: u64,
    /// The maximum number of tokens per row.
    pub seq_len: usize,
    /// The source of the marked answers, if the samples are conversations.
    pub marked_by: Option<String>,
    /// The number of the sample, if the user selected one.
    pub number: Option<u64>,
    /// The sample, truncated as in its row, in pieces with whether they are in the loss. A pair has two: the chosen one
    /// and the rejected one.
    pub sides: Vec<Vec<(String, bool)>>,
}

impl DatasetPreview {
    /// A preview of the rows of `index`, with sample `number` or the first; `chat` is the format of conversations.
    pub fn new(index: &SequenceIndex, number: Option<u64>, tokenizer: &Tokenizer, chat: &ChatFormat) -> Result<Self> {
        let Some(sides) = index.sample(number) else {
            let message = format!("the data has {}, counted from 1", counted(index.stats.samples, "sample"));
            return Err(Error::config("--sample", message));
        };
        index.tokens.check()?;
        let decode = |tokens: &[(u32, bool)]| {
            tokenizer.decode_with_special(&tokens.iter().map(|(id, _)| *id).collect::<Vec<_>>())
        };
        let pieces = |tokens: &Vec<(u32, bool)>| {
            let mut start = 0;
            let piece = |stretch: &[(u32, bool)]| {
                // Some decoders remove the space before the first token of a text, so the token before it is decoded,
                // too.
                let (before, end) = (start.max(1) - 1, start + stretch.len());
                let text = decode(&tokens[before..end])?;
                let own = text.strip_prefix(&decode(&tokens[before..start])?).map(str::to_owned);
                start = end;
                Ok((own.map_or_else(|| decode(stretch), Ok)?, stretch[0].1))
            };
            tokens.chunk_by(|a, b| a.1 == b.1).map(piece).collect()
        };
        let sides = sides.iter().map(pieces).collect::<Result<_>>()?;
        Ok(Self {
            samples: index.tokens.samples(),
            stats: index.stats,
            rows: index.rows(),
            seq_len: index.seq_len,
            marked_by: index.is_chat().then(|| chat.name.clone()),
            number,
            sides,
        })
    }

    /// The counts on one line.
    pub fn summary(&self) -> String {
        let DatasetStats { samples, tokens, loss_tokens, truncated, truncated_tokens, skipped, pairs, .. } = self.stats;
        let what = if pairs.is_some() { "pair" } else { "sample" };
        let samples = counted(samples, what);
        let rows = counted(self.rows, "row");
        let marked = if self.samples == SampleKind::Prompt { "right answers" } else { "the loss" };
        let mut text = format!("{samples} in {rows}, {tokens} tokens, {loss_tokens} of them in {marked}");
        if truncated > 0 {
            let seq_len = self.seq_len;
            _ = write!(
                text,
                "; {truncated} truncated to `--seq-len {seq_len}`, which removes {truncated_tokens} tokens"
            );
        }
        if skipped > 0 {
            _ = write!(text, "; {skipped} skipped because they have no loss tokens");
        }
        if let Some(PairStats { identical: identical @ 1.., .. }) = pairs {
            _ = write!(text, "; {identical} skipped because they are identical after the cut");
        }
        text
    }

    /// The counts and the sample, with loss tokens in color or in brackets. Its text has no control characters.
    pub fn text(&self, color: bool) -> String {
        let mut out = self.summary();
        let prompts = self.samples == SampleKind::Prompt;
        _ = match &self.marked_by {
            _ if prompts => Ok(()),
            Some(marked_by) => write!(out, "; answers are located by {}", untrusted::sanitize_line(marked_by)),
            None => write!(
                out,
                "; read as plain text: a chat template applies to messages, and to `instruction` with `output`"
            ),
        };
        let (how, open, close) = if color { ("green", "\x1b[1;32m", "\x1b[0m") } else { ("[brackets]", "[", "]") };
        // Its lines are indented, so that none looks like a message.
        let what = if self.sides.len() > 1 { "pair" } else { "sample" };
        let which = self.number.map_or_else(|| format!("the first {what}"), |number| format!("{what} {number}"));
        let marked = if prompts { "right answer" } else { "loss tokens" };
        _ = write!(out, "\n{which}, with its {marked} in {how}:");
        for (side, name) in self.sides.iter().zip(["chosen", "rejected"]) {
            out += "\n  ";
            if self.sides.len() > 1 {
                _ = write!(out, "{name}:\n  ");
            }
            let total: usize = side.iter().map(|(text, _)| text.len()).sum();
            let mut at = 0;
            for (text, in_loss) in side {
                let shown = middle_left_out(text, at, total);
                at += text.len();
                let clean = untrusted::sanitize_block(&shown);
                _ = if *in_loss { write!(out, "{open}{clean}{close}") } else { write!(out, "{clean}") };
            }
            out.truncate(out.trim_end().len());
        }
        out.push('\n');
        out
    }
}

/// A count with its noun: `1 sample`, `2 samples`.
pub(crate) fn counted<N: Copy + From<u8> + PartialEq + Display>(count: N, what: &str) -> String {
    format!("{count} {what}{}", if count == N::from(1) { "" } else { "s" })
}

/// The part of `text` in the preview; the text begins at byte `at` of `total`.
fn middle_left_out(text: &str, at: usize, total: usize) -> String {
    if total <= SHOWN {
        return text.to_owned();
    }
    let head = SHOWN / 2;
    let tail = total - SHOWN / 2;
    let local = |position: usize| text.floor_char_boundary(position.saturating_sub(at).min(text.len()));
    let (until, from) = (local(head), local(tail));
    if until == from {
        return text.to_owned();
    }
    let gap = if at <= head { " … " } else { "" };
    format!("{}{gap}{}", &text[..until], &text[from..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::TokenSource;
    use crate::data::tokenizer::tests::prefixing;

    #[test]
    fn an_answer_begins_with_its_space() {
        for tokenizer in prefixing() {
            let sample = vec![(3, false), (2, false), (3, true)];
            let index = SequenceIndex::new(TokenSource::from_samples(&[sample]), 32, false, "x").unwrap();
            let preview = DatasetPreview::new(&index, None, &tokenizer, &ChatFormat::plain(None, None)).unwrap();
            assert_eq!(preview.sides[0][1], (" a".to_owned(), true));
        }
    }
}
