//! The launch of `step.cu`, and what it moves and reports.

use super::launch::{Arguments, Buffer, Launch, Plain, Queue};
use super::survey::RawStats;
use crate::precision::{GradScaler, GradScalerConfig, HysteresisRefill, ScaleChange, ScalerPolicy, ScalerState};
use candle_core::{DType, Result, bail};

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// Counters, the scaler's state and the numbers of the last update, as they lie in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepState {
    /// Attempted steps.
    pub(crate) step: u64,
    /// Applied steps.
    pub(crate) updates: u64,
    scale: f32,
    growth_tracker: u32,
    hysteresis_left: u32,
    floor_streak: u32,
    apply: u32,
    lr: f32,
    grad_factor: f32,
    bias_corrections: [f32; 2],
    halted: u32,
}
// SAFETY: numbers, 56 bytes.
unsafe impl Plain for StepState {}

impl StepState {
    /// Bytes before the loss scale.
    pub(crate) const SCALE_AT: usize = std::mem::offset_of!(Self, scale);

    /// Where a run under the dynamic rule is that has made `step` attempts and `updates` updates.
    pub(crate) fn new(scaler: &GradScaler, step: u64, updates: u64) -> Self {
        let ScalerState { scale, growth_tracker, hysteresis_left, floor_streak, .. } = scaler.state();
        Self { step, updates, scale, growth_tracker, hysteresis_left, floor_streak, ..Self::default() }
    }

    /// The same, for the steps after an overflow that the host has seen.
    pub(crate) fn going_on(self) -> Self {
        Self { halted: 0, ..self }
    }

    /// The scaler's part.
    pub(crate) fn scaler(&self) -> ScalerState {
        let Self { scale, growth_tracker, hysteresis_left, floor_streak, .. } = *self;
        ScalerState { scale, growth_tracker, hysteresis_left, floor_streak, headroom: None }
    }

    #[cfg(test)]
    pub(crate) fn with_update(self, lr: f32, grad_factor: f32, bias_corrections: [f32; 2], apply: bool) -> Self {
        Self { apply: u32::from(apply), lr, grad_factor, bias_corrections, ..self }
    }
}

/// A step's figures as the device reports them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepRecord {
    /// Mean loss over the targets.
    pub(crate) loss: f64,
    /// Global norm after unscaling.
    pub(crate) grad_norm: f64,
    /// What clipping multiplied the gradients with.
    pub(crate) clip: f64,
    /// The learning rate, of the update or of the one that was skipped.
    pub(crate) lr: f64,
    /// All gradients together.
    pub(crate) total: RawStats,
    /// The loss scale during the step.
    pub(crate) scale: f32,
    change: u32,
    applied: u32,
    unused: u32,
    /// The state that the step left.
    pub(crate) after: StepState,
}
// SAFETY: numbers, 160 bytes.
unsafe impl Plain for StepRecord {}

impl StepRecord {
    /// Whether the masters were updated.
    pub(crate) fn applied(&self) -> bool {
        self.applied != 0
    }

    /// What became of the scale.
    pub(crate) fn change(&self) -> ScaleChange {
        let (from, to) = (self.scale, self.after.scale);
        match self.change {
            0 => ScaleChange::Held,
            1 => ScaleChange::Grew { from, to },
            2 => ScaleChange::BackedOff { from, to },
            _ => ScaleChange::AtFloor { scale: to, streak: self.after.floor_streak },
        }
    }
}

/// Where a step's time went, in nanoseconds of the device's clock.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepTimes {
    last: u64,
    /// See [`Part`].
    pub(crate) parts: [u64; 4],
}
// SAFETY: numbers, 40 bytes.
unsafe impl Plain for StepTimes {}

/// Parts of a step, in the order of [`StepTimes::parts`].
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(crate) enum Part {
    /// Forward passes without the head.
    Forward = 0,
    /// The head, and everything from the loss to the gradients.
    Backward = 1,
    /// The look at the gradients, and the verdict.
    Survey = 2,
    /// AdamW.
    Optimizer = 3,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct StepClock {
    times: u64,
    loss: u64,
    part: u64,
}
// SAFETY: mirrors `StepClock`.
unsafe impl Arguments for StepClock {}

/// Not a part's end, but the first one's beginning.
const BEGINNING: u64 = 4;

/// Begins a step: its clock, and its `loss`, which becomes zero.
pub(crate) fn begin(queue: &impl Queue, times: Buffer, loss: Buffer) -> Result<()> {
    read_clock(queue, times, loss, BEGINNING)
}

/// Adds what has passed since the clock was read last to the time of `part`.
pub(crate) fn end_of(queue: &impl Queue, part: Part, times: Buffer, loss: Buffer) -> Result<()> {
    read_clock(queue, times, loss, part as u64)
}

fn read_clock(queue: &impl Queue, times: Buffer, loss: Buffer, part: u64) -> Result<()> {
    let arguments = StepClock {
        times: times.expect("times", DType::U8, size_of::<StepTimes>())?,
        loss: loss.expect("loss", DType::F64, 1)?,
        part,
    };
    let launch = Launch { module: "step", kernel: "step_clock".to_owned(), grid: [1; 3], threads: 32, shared_bytes: 0 };
    // SAFETY: both buffers were found large enough.
    unsafe { queue.launch(&launch, &arguments) }
}

/// The shape of the schedule in the kernels' numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Decay {
    /// No decay.
    Constant = 0,
    /// A straight line.
    Linear = 1,
    /// Half a cosine.
    Cosine = 2,
}

/// The learning rate as the device computes it: it alone knows in time how many steps were applied.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// The highest rate.
    pub(crate) peak_lr: f64,
    /// The final rate over the peak.
    pub(crate) min_lr_ratio: f64,
    /// Updates until the peak.
    pub(crate) warmup_updates: u64,
    /// Updates until the decay ends.
    pub(crate) total_updates: u64,
    /// Its shape.
    pub(crate) decay: Decay,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScalerRules {
    growth_factor: f64,
    backoff_factor: f64,
    min_scale: f32,
    growth_interval: u32,
    hysteresis: u32,
    enabled: u32,
    refill_when_clean: u32,
    unused: u32,
}

impl From<&GradScalerConfig> for ScalerRules {
    fn from(config: &GradScalerConfig) -> Self {
        Self {
            growth_factor: config.growth_factor,
            backoff_factor: config.backoff_factor,
            min_scale: config.min_scale,
            growth_interval: config.growth_interval,
            hysteresis: config.hysteresis,
            enabled: u32::from(config.enabled),
            refill_when_clean: u32::from(config.hysteresis_refill == HysteresisRefill::Clean),
            unused: 0,
        }
    }
}

/// What a step is judged by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules<'a> {
    /// How the scale moves.
    pub(crate) scaler: &'a GradScalerConfig,
    /// How the learning rate does.
    pub(crate) schedule: Schedule,
    /// Gradients are clipped to this global norm.
    pub(crate) max_grad_norm: Option<f64>,
    /// Decay rates of Adam's moments.
    pub(crate) betas: [f64; 2],
}

/// Where a verdict finds what it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VerdictBuffers {
    /// [`RawStats`] for each tensor, as bytes.
    pub(crate) stats: Buffer,
    /// The loss, summed over all targets (f64).
    pub(crate) loss: Buffer,
    /// The step's number of targets (u32).
    pub(crate) targets: Buffer,
    /// A [`StepState`], as bytes.
    pub(crate) state: Buffer,
    /// Where the [`StepRecord`] goes, as bytes.
    pub(crate) record: Buffer,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct StepVerdict {
    stats: u64,
    loss: u64,
    targets: u64,
    state: u64,
    record: u64,
    max_grad_norm: f64,
    betas: [f64; 2],
    scaler: ScalerRules,
    schedule: Schedule,
    tensors: u64,
}
// SAFETY: mirrors `StepVerdict`.
unsafe impl Arguments for StepVerdict {}

/// Judges a step after its survey: moves the [`StepState`], from which AdamW takes its numbers, and writes a record.
pub(crate) fn verdict(queue: &impl Queue, rules: Rules<'_>, buffers: VerdictBuffers) -> Result<()> {
    if rules.scaler.policy == ScalerPolicy::Predictive {
        bail!("the predictive loss scale has no CUDA twin: use the dynamic one");
    }
    let arguments = StepVerdict {
        stats: buffers.stats.address,
        loss: buffers.loss.expect("loss", DType::F64, 1)?,
        targets: buffers.targets.expect("targets", DType::U32, 1)?,
        state: buffers.state.expect("state", DType::U8, size_of::<StepState>())?,
        record: buffers.record.expect("record", DType::U8, size_of::<StepRecord>())?,
        max_grad_norm: rules.max_grad_norm.unwrap_or(0.0),
        betas: rules.betas,
        scaler: rules.scaler.into(),
        schedule: rules.schedule,
        tensors: (buffers.stats.len / size_of::<RawStats>()) as u64,
    };
    let launch = Launch {
        module: "step",
        kernel: "step_verdict".to_owned(),
        grid: [1; 3],
        threads: THREADS,
        shared_bytes: WARPS * size_of::<f64>() as u32,
    };
    // SAFETY: every buffer was found large enough; `stats` gives the number of tensors itself.
    unsafe { queue.launch(&launch, &arguments) }
}
