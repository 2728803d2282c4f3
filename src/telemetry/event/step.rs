//! One attempted step: its figures, its timings, and the change of the loss scale.

use super::gradients::{GradStats, TensorRecord};
use super::objective::ObjectiveMetrics;
use crate::precision::{ScaleChange, UpdateCounts};
use crate::telemetry::float;
use serde::{Deserialize, Serialize};

/// Whether an attempted step changed the parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepStatus {
    /// The optimizer ran.
    #[default]
    Applied,
    /// Gradients were not finite: parameters, moments and schedule are unchanged.
    Skipped,
}

/// Every figure of one attempted step. The fields that charts need come first, so that [`Tail`](crate::telemetry::Tail)
/// can skim a long log.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepRecord {
    /// Attempted steps, this one included; the first is 1.
    pub step: u64,
    /// Mean cross-entropy of the step's tokens, nats.
    #[serde(with = "float")]
    pub loss: f32,
    /// The factor the loss was multiplied by.
    pub loss_scale: f32,
    /// Applied or skipped.
    pub outcome: StepStatus,
    /// Global norm after unscaling, before clipping.
    #[serde(with = "float")]
    pub grad_norm: f64,
    /// Tokens trained on since the run began.
    pub tokens: u64,
    /// Tokens per second over the last steps.
    pub tokens_per_s: f64,
    /// Applied steps.
    pub updates: u64,
    /// Skipped steps.
    pub skipped: u64,
    /// Epochs seen, with the fraction of the current one.
    pub epoch: f64,
    /// The current learning rate.
    pub lr: f64,
    /// The factor that clipping multiplied the gradients by; 1 if nothing was clipped.
    #[serde(with = "float")]
    pub clip_coef: f64,
    /// Clean steps since the last overflow or growth of the scale.
    pub growth_tracker: u32,
    /// The change of the scale after the step.
    pub scale: ScaleUpdate,
    /// Time spent in each part.
    pub time: StepTime,
    /// Resident memory of the process, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_bytes: Option<u64>,
    /// Largest resident memory of the process so far, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_rss_bytes: Option<u64>,
    /// Processor time of the process so far, all threads, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<f64>,
    /// The GPU's figures, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuStats>,
    /// Metrics of the objective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub objective: Option<ObjectiveMetrics>,
    /// The part of the update that 16-bit weights show, if it was counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost_updates: Option<UpdateCounts>,
    /// Steps the run will attempt, if this step has changed their number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// All scaled gradients together; `norm` is the global norm before unscaling.
    pub grads: GradStats,
    /// Statistics per tensor, in parameter order. Filled every few steps and on an overflow, otherwise empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorRecord>,
}

impl StepRecord {
    /// The record without times and figures of the process, which differ each time a step is taken.
    #[must_use]
    pub fn without_measurements(self) -> Self {
        let time = StepTime::default();
        let tokens_per_s = 0.0;
        let (rss_bytes, peak_rss_bytes, cpu_seconds, gpu) = (None, None, None, None);
        Self { tokens_per_s, time, rss_bytes, peak_rss_bytes, cpu_seconds, gpu, ..self }
    }

    /// log2 of the unscaled gradients' first percentile; `None` if exponents were not counted.
    pub fn log2_grad_p1(&self) -> Option<f64> {
        self.grads.log2_p1(self.loss_scale)
    }
}

/// Wall-clock milliseconds of a step and of its parts. The remainder is waiting for data, logging and the like.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepTime {
    /// The whole step, without waiting for a checkpoint.
    pub step_ms: f64,
    /// Forward passes.
    pub forward_ms: f64,
    /// Backward passes.
    pub backward_ms: f64,
    /// The statistics of the gradients.
    pub grad_stats_ms: f64,
    /// Unscaling, clipping, the optimizer and the new working copy.
    pub optimizer_ms: f64,
}

/// Figures of a GPU from its driver; `None` if the driver does not report one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuStats {
    /// Share of the last sampling period in which a kernel ran, percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f32>,
    /// Memory in use by all processes, in bytes.
    pub memory_bytes: u64,
    /// Total memory, in bytes.
    pub memory_total_bytes: u64,
    /// Power draw, watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f32>,
    /// Temperature, °C.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f32>,
}

/// The change of the loss scale after a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScaleUpdate {
    /// The cause.
    pub cause: ScaleCause,
    /// The scale of the step.
    pub from: f32,
    /// The scale of the next step.
    pub to: f32,
}

impl ScaleUpdate {
    /// Converts the scaler's result for a step whose scale was `from`.
    pub fn new(from: f32, change: ScaleChange) -> Self {
        let (cause, to) = match change {
            ScaleChange::Held => (ScaleCause::Held, from),
            ScaleChange::Grew { to, .. } => (ScaleCause::Grew, to),
            ScaleChange::Lowered { to, .. } => (ScaleCause::Lowered, to),
            ScaleChange::BackedOff { to, .. } => (ScaleCause::BackedOff, to),
            ScaleChange::AtMinScale { scale, .. } => (ScaleCause::AtMinScale, scale),
        };
        Self { cause, from, to }
    }
}

/// The cause of a change of the loss scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleCause {
    /// No change.
    #[default]
    Held,
    /// `growth_interval` steps without an overflow passed, or the predictive mode found enough headroom.
    Grew,
    /// The predictive mode found too little headroom.
    Lowered,
    /// Gradients overflowed.
    BackedOff,
    /// Gradients overflowed, but the scale is already `min_scale`.
    AtMinScale,
}
