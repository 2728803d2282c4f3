//! The kinds of samples, and the parts of their sequences in an objective.

use strum::VariantArray;

/// The kind of samples that an objective trains on. Token files have the number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, VariantArray)]
pub enum SampleKind {
    /// Text, prompts with answers, or conversations.
    #[default]
    Plain = 0,
    /// Pairs of a chosen and a rejected answer: TRL's preference data.
    Preference = 1 << 10,
    /// Answers that are labelled good or bad: TRL's unpaired preference data.
    UnpairedPreference = 1 << 11,
    /// Prompts to sample completions of, with or without a right answer.
    Prompt = 1 << 12,
}

impl SampleKind {
    /// The rows of this kind, for an error, and the value of `--objective` for them.
    fn rows_and_objective(self) -> (&'static str, &'static str) {
        match self {
            Self::Plain => ("text, prompts with completions, or conversations", "sft"),
            Self::Preference => ("pairs, in rows with `prompt`, `chosen` and `rejected`", "dpo"),
            Self::UnpairedPreference => ("labelled answers, in rows with `prompt`, `completion` and `label`", "kto"),
            Self::Prompt => ("prompts, in rows with `prompt` or `messages`", "grpo"),
        }
    }

    /// Checks that `found`, the data's kind, is this one. `rows` describes the rows found.
    pub(super) fn require(self, found: Self, rows: &str) -> Result<(), String> {
        if found == self {
            return Ok(());
        }
        let ((needed, _), (_, objective)) = (self.rows_and_objective(), found.rows_and_objective());
        Err(format!("contains {rows}, but needs {needed}; to train on these rows, use `--objective {objective}`"))
    }
}

/// The part of a sequence in the objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SequenceRole {
    /// The better answer of a pair; the next sequence of the batch is the worse one.
    Chosen,
    /// The worse answer of the pair of the sequence before it.
    Rejected,
    /// A completion that is labelled good.
    Desirable,
    /// A completion that is labelled bad.
    Undesirable,
    /// A sample with its weight in the loss.
    Weighted(f32),
    /// A prompt with its right answer.
    Prompt,
    /// A sampled completion of a prompt; those of one prompt follow each other.
    Sampled {
        /// Its reward; NaN if it has none.
        reward: f64,
        /// Its advantage over the other completions of the prompt.
        advantage: f64,
        /// Whether it ended at the maximum length.
        is_cut: bool,
    },
}
