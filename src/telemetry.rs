//! What a run says about itself: events, their log on disk, and the bounded series that pictures are drawn from.
//!
//! Training fills in an [`Event`] and hands it to an [`Emitter`], which stamps it, appends it to `events.jsonl` and passes
//! it on to a screen. A screen (`dashboard`, or `finetune watch` in another terminal) knows only these types; what it wants
//! of training it says with a [`Command`]. Nothing here knows tensors, models or terminals.

mod activity;
mod command;
mod emitter;
mod event;
pub(crate) mod float;
mod gpu;
mod log;
pub(crate) mod pace;
mod process;
mod prometheus;
mod run_state;
mod series;
mod tensorboard;

pub use activity::{Activity, Amount, PhaseLines, PhaseNow};
pub use command::Command;
pub use emitter::{Emitter, Sink};
pub use event::{
    ActivationMax, Cpu, Event, FinishReason, Finished, FlushedTensor, GpuStats, GradStats, ModelShape, Origin, Outcome,
    Overflow, Pass, Probe, Record, Retyped, SampleText, Saved, ScaleCause, ScaleMove, ScalerSettings, Started,
    StepRecord, StepTime, TensorRecord, Trouble, VERSION, Validation, Variances,
};
pub use gpu::GpuSampler;
pub use log::{EventLog, Poll, Tail, read, read_whole};
pub use process::{MachineMemory, ProcessId, ProcessStats, available_bytes, cpu_name, is_ignored};
pub use prometheus::Prometheus;
pub use run_state::{
    Curves, Figures, Happening, Layer, OverflowRow, Phase, ProbeTotals, RunState, SMOOTHING, SampleRow, TensorRow,
    Tensors, histogram, smoothing_for,
};
pub use series::{Bucket, ChangePoint, Curve, RECENT, Series, StairCase};
pub use tensorboard::TensorBoard;
