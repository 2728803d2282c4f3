//! Commands from a screen to training.

/// A request from the dashboard, served between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Stop at the next step boundary and wait.
    Pause,
    /// Continue after a pause.
    Resume,
    /// Write a checkpoint.
    SaveNow,
    /// Compute the validation loss.
    EvalNow,
    /// Generate a text sample.
    SampleNow,
    /// Repeat the next batch's backward pass in FP32 and report true underflow.
    ProbeNow,
    /// End the run at the next step boundary.
    Stop {
        /// Whether to write a checkpoint first.
        save: bool,
    },
    /// End the run at the next step boundary as a signal does: saved, and interrupted.
    Interrupt,
    /// The screen has closed; continue training.
    Detach,
    /// End the process now, without a checkpoint.
    Abort,
}
