//! What a screen may ask of training.

/// A wish of the person at the screen. Training looks for one between two steps, never within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Stop at the next step boundary and wait.
    Pause,
    /// Go on after a pause.
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
    /// The screen is gone; train on.
    Detach,
    /// End the process now, without a checkpoint.
    Abort,
}
