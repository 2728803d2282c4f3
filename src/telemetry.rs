//! A run's telemetry: events, their log on disk, and the bounded series that charts are drawn from.
//!
//! Training passes each [`Event`] to an [`Emitter`], which stamps it, appends it to `events.jsonl` and sends it to a
//! screen. A screen (`dashboard`, or `finetune watch` in another terminal) knows only these types and controls training
//! with
//! [`Command`]s. Nothing here depends on tensors, models or terminals.

mod activity;
mod command;
mod emitter;
pub(crate) mod eta;
mod event;
pub(crate) mod float;
mod gpu;
mod log;
mod process;
mod prometheus;
mod run_state;
mod series;
mod tensorboard;

pub use activity::{Activity, CurrentPhase, PhaseLines, PhaseProgress, bytes, bytes_of};
pub use command::Command;
pub(crate) use emitter::wall_clock;
pub use emitter::{Emitter, Sink};
pub use event::{
    ActivationMax, CheckpointProof, CheckpointSaved, Cpu, Diagnostic, DtypeChange, Event, FinishReason, Finished,
    FirstNonFinite, FlushedTensor, Fp32Probe, GpuStats, GradMax, GradStats, GradVariance, ModelShape, ObjectiveMetric,
    ObjectiveMetrics, Overflow, Pass, ProcessRate, Record, SampleText, ScaleCause, ScaleUpdate, ScalerSettings,
    Started, StepRecord, StepStatus, StepTime, TensorRecord, Throughput, UnderflowOnset, VERSION, Validation,
};
pub use gpu::GpuSampler;
pub use log::{Detail, EventLog, Poll, Tail, for_each, last_records, read};
pub use process::{MachineMemory, ProcessId, ProcessStats, allowed_cpus, available_bytes, cpu_name, is_ignored};
pub use prometheus::Prometheus;
pub use run_state::{
    Curves, EventRow, LayerStats, OverflowRow, PLOTTED, Phase, Plotted, ProbeTotals, Quantity, RunMetrics, RunState,
    SMOOTHING, SampleRow, TensorRow, Tensors, smoothing_for,
};
pub use series::{Bucket, ChangePoint, Curve, RECENT, Series, StepSeries};
pub use tensorboard::TensorBoard;
