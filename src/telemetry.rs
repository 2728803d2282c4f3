//! A run's telemetry: events, their log on disk, and the bounded series that charts are drawn from.
//!
//! Training passes each [`Event`] to an [`Emitter`], which stamps it, appends it to `events.jsonl` and sends it to a screen.
//! A screen (`dashboard`, or `finetune watch` in another terminal) knows only these types and controls training with
//! [`Command`]s. Nothing here knows tensors, models or terminals.

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
    ActivationMax, Cpu, Diagnostic, Event, FinishReason, Finished, FlushedTensor, GpuStats, GradStats, LayerMaxima,
    ModelShape, Origin, Outcome, Overflow, Pass, Probe, ProcessRate, Processes, Record, Retyped, SampleText, Saved,
    ScaleCause, ScaleMove, ScalerSettings, Started, StepRecord, StepTime, TensorRecord, Touched, VERSION, Validation,
    Variances,
};
pub use gpu::GpuSampler;
pub use log::{EventLog, Poll, Tail, for_each, read};
pub use process::{MachineMemory, ProcessId, ProcessStats, available_bytes, cpu_name, is_bound, is_ignored};
pub use prometheus::Prometheus;
pub use run_state::{
    Curves, EventRow, Figures, Layer, OverflowRow, Phase, ProbeTotals, RunState, SMOOTHING, SampleRow, TensorRow,
    Tensors, histogram, smoothing_for,
};
pub use series::{Bucket, ChangePoint, Curve, RECENT, Series, StairCase};
pub use tensorboard::TensorBoard;
