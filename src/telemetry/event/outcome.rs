//! Checkpoints, warnings, and the end of training.

use crate::telemetry::float;
use serde::{Deserialize, Serialize};
use strum::Display;

/// A written checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckpointSaved {
    /// The step it holds.
    pub step: u64,
    /// The step's folder.
    pub path: String,
    /// Size of all its files, in bytes.
    pub bytes: u64,
    /// Duration in seconds; passes of the next step may have run at the same time.
    pub seconds: f64,
    /// Whether it holds only the weights, so that a run cannot resume from it.
    pub weights_only: bool,
    /// The hashes of a full checkpoint; `None` for weights alone, or if the log cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proof: Option<CheckpointProof>,
}

/// Hashes of a checkpoint and of everything that led to it: SHA-256 in hexadecimal digits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckpointProof {
    /// The master weights' file.
    pub masters: String,
    /// The file of Adam's moments.
    pub moments: String,
    /// Loss scale, counters and the other figures that determine later steps.
    pub state: String,
    /// The run's configuration as a file.
    pub config: String,
    /// Tokenizer and text.
    pub data: String,
    /// The log from the end of the previous checkpoint's part to `log_bytes`.
    pub log: String,
    /// Size of the log, in bytes, when the checkpoint was written.
    pub log_bytes: u64,
    /// All of the above, the step, and the previous checkpoint's `chain`.
    pub chain: String,
}

/// A message about a step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Diagnostic {
    /// The step; 0 before the first.
    pub step: u64,
    /// The problem and the next step.
    pub message: String,
}

/// The speed of each process of a distributed run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Throughput {
    /// The last step that was measured.
    pub step: u64,
    /// One entry per process, by rank.
    pub processes: Vec<ProcessRate>,
    /// The names of processes whose passes take much longer than the median.
    pub stragglers: Vec<String>,
}

/// One process's share in the last steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessRate {
    /// Its rank and host.
    pub name: String,
    /// Tokens per second of its passes.
    pub tokens_per_s: f64,
    /// The fraction of its time spent in communication, including waiting for other processes.
    pub comm_fraction: f64,
}

/// The reason for the end of training in a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum FinishReason {
    /// All steps are done.
    #[default]
    Done,
    /// The validation loss stopped improving.
    #[strum(serialize = "stopped early")]
    EarlyStopped,
    /// Interrupted by a signal.
    Interrupted,
    /// Stopped from the dashboard.
    Stopped,
    /// Training diverged.
    Diverged,
    /// An error ended training, such as a full disk.
    Failed,
}

/// The end of training in this process, with the run's totals.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finished {
    /// The reason for the end.
    pub reason: FinishReason,
    /// Steps attempted.
    pub step: u64,
    /// Steps applied.
    pub updates: u64,
    /// Steps skipped.
    pub skipped: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// The last step's loss; NaN if there was no step.
    #[serde(with = "float")]
    pub loss: f32,
    /// The last validation loss.
    #[serde(with = "float::optional")]
    pub val_loss: Option<f64>,
    /// The loss scale at the end.
    pub loss_scale: f32,
    /// Seconds of this process's training.
    pub seconds: f64,
    /// Largest resident memory, in bytes.
    pub peak_rss_bytes: Option<u64>,
    /// The newest checkpoint's folder.
    pub checkpoint: Option<String>,
}
