//! The vocabulary of a run: one [`Record`] is one line of `events.jsonl`.
//!
//! A line is a JSON object that begins `{"v":1,"t":…,"s":…,"event":"step",…}`. Within a version fields are only added, and
//! a reader takes a missing one as its default, so an old log stays readable. Floats that are not finite are written as
//! strings (`"NaN"`, `"inf"`, `"-inf"`).
//!
//! Magnitudes and counts of gradients are those of the *scaled* gradients, as the gradient dtype stores them, unless the
//! name says otherwise.

use super::float;
use super::process::ProcessId;
use crate::precision::{ExponentHistogram, GradScalerConfig, ScaleChange, ScalerPolicy, TensorStats};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The version of the log's format, written as `v` on every line.
pub const VERSION: u32 = 1;

/// An event with its time: one line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Format version, [`VERSION`].
    pub v: u32,
    /// Wall clock, milliseconds since 1970-01-01 UTC.
    pub t: u64,
    /// Seconds the run has been running; continues over a resume, so it never falls within a log.
    pub s: f64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// Something that happened in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A process began to train, anew or from a checkpoint.
    Started(Box<Started>),
    /// A step was attempted.
    Step(Box<StepRecord>),
    /// A step was skipped because gradients were not finite. Follows its `Step`.
    Overflow(Overflow),
    /// A layer computes in another type from the next step on. Follows the `Step` that caused it.
    Retyped(Retyped),
    /// The variance of each layer's gradient.
    Variances(Variances),
    /// The validation loss was computed.
    Eval(Validation),
    /// Text was generated.
    Sample(SampleText),
    /// A batch's backward pass was repeated in FP32.
    Probe(Box<Probe>),
    /// A checkpoint was written.
    Saved(Saved),
    /// Training waits, on request.
    Paused {
        /// Steps attempted so far.
        step: u64,
    },
    /// Training goes on after a pause.
    Resumed {
        /// Steps attempted so far.
        step: u64,
    },
    /// Something a person should know, which does not end the run.
    Warning(Trouble),
    /// The run's numbers broke; a `Finished` follows.
    Diverged(Trouble),
    /// The process stopped training.
    Finished(Finished),
}

/// The whole environment of a run, so that a log can be read without the program that wrote it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Started {
    /// Program and version.
    pub program: String,
    /// Name of the run: its folder's.
    pub run: String,
    /// The process that trains, so that a reader of the log can see whether it lives.
    pub process: Option<ProcessId>,
    /// The host's processor.
    pub cpu: Cpu,
    /// Where the model computes: `cpu`, `cuda:0 NVIDIA …`.
    pub device: String,
    /// Operating system and architecture.
    pub os: String,
    /// Name of the model.
    pub model: String,
    /// Its dimensions.
    pub shape: ModelShape,
    /// Trained parameters.
    pub parameters: u64,
    /// The precision policy's text form: `p=f32,c=f16,g=f16,r=f32`.
    pub policy: String,
    /// The loss scaler's settings.
    pub scaler: ScalerSettings,
    /// The optimizer with its settings, in words.
    pub optimizer: String,
    /// Gradients are clipped to this global norm; `None` if they are not.
    pub max_grad_norm: Option<f32>,
    /// The learning-rate schedule, in words.
    pub schedule: String,
    /// The training text, in words.
    pub data: String,
    /// Tokens of one step over all its micro-batches.
    pub tokens_per_step: u64,
    /// Tokens of one epoch.
    pub tokens_per_epoch: u64,
    /// Epochs the run will see, possibly a fraction.
    pub epochs: f64,
    /// Steps the run will attempt.
    pub total_steps: u64,
    /// The seed of every random stream.
    pub seed: u64,
    /// The step of the checkpoint this process went on from. Earlier lines of later steps are void.
    pub resumed_from: Option<u64>,
    /// The layers that computed in another type than the policy's at that moment, each with its type.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub fallback: BTreeMap<String, String>,
    /// The resolved configuration.
    pub config: serde_json::Value,
}

/// The host's processor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// Its model name.
    pub name: String,
    /// Threads that compute.
    pub threads: usize,
    /// The widest instruction set in use.
    pub isa: String,
}

/// The dimensions of a GPT-2-like model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelShape {
    /// Layers.
    pub n_layer: usize,
    /// Attention heads.
    pub n_head: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Longest context.
    pub n_positions: usize,
    /// Size of the vocabulary.
    pub vocab_size: usize,
}

/// The loss scaler's settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScalerSettings {
    /// Whether losses are scaled at all.
    pub enabled: bool,
    /// The first scale.
    pub init_scale: f32,
    /// Factor of a growth.
    pub growth_factor: f64,
    /// Factor of a backoff.
    pub backoff_factor: f64,
    /// Clean steps between two growths.
    pub growth_interval: u32,
    /// The scale never falls below this.
    pub min_scale: f32,
    /// What it is chosen by.
    pub policy: ScalerPolicy,
}

impl From<&GradScalerConfig> for ScalerSettings {
    fn from(config: &GradScalerConfig) -> Self {
        Self {
            enabled: config.enabled,
            init_scale: config.init_scale,
            growth_factor: config.growth_factor,
            backoff_factor: config.backoff_factor,
            growth_interval: config.growth_interval,
            min_scale: config.min_scale,
            policy: config.policy,
        }
    }
}

/// Whether an attempted step changed the parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The optimizer ran.
    #[default]
    Applied,
    /// Gradients were not finite: parameters, moments and schedule are as before.
    Skipped,
}

/// Every figure of one attempted step. The fields a long series is drawn from come first, so that a reader in a hurry
/// need not look at the rest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepRecord {
    /// Attempted steps, this one included; the first is 1.
    pub step: u64,
    /// Mean cross-entropy of the step's tokens, nats.
    #[serde(with = "float")]
    pub loss: f32,
    /// The scale the loss was multiplied with.
    pub loss_scale: f32,
    /// Applied or skipped.
    pub outcome: Outcome,
    /// Global norm after unscaling, before clipping.
    #[serde(with = "float")]
    pub grad_norm: f64,
    /// Tokens trained on since the run began.
    pub tokens: u64,
    /// Tokens a second over the last steps.
    pub tokens_per_s: f64,
    /// Applied steps.
    pub updates: u64,
    /// Skipped steps.
    pub skipped: u64,
    /// Epochs seen, with the fraction of the current one.
    pub epoch: f64,
    /// The learning rate in force.
    pub lr: f64,
    /// What clipping multiplied the gradients with; 1 if nothing was clipped.
    #[serde(with = "float")]
    pub clip: f64,
    /// Clean steps since the scale last changed.
    pub growth_tracker: u32,
    /// What became of the scale after the step.
    pub scale: ScaleMove,
    /// Where the time went.
    pub time: StepTime,
    /// Resident memory of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_bytes: Option<u64>,
    /// Processor time of the process so far, all threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<f64>,
    /// The GPU, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuStats>,
    /// All scaled gradients together; `norm` is the global norm before unscaling.
    pub grads: GradStats,
    /// The same for each tensor, in parameter order. Empty on most steps: filled every few steps and on an overflow.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorRecord>,
}

/// Wall-clock milliseconds of a step and of its parts. What is left over is waiting for data, logging and the like.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepTime {
    /// The whole step.
    pub step_ms: f64,
    /// Forward passes.
    pub forward_ms: f64,
    /// Backward passes.
    pub backward_ms: f64,
    /// The look at the gradients.
    pub survey_ms: f64,
    /// Unscaling, clipping, the optimizer and the new working copy.
    pub optimizer_ms: f64,
}

/// What a GPU is doing, as its driver says. What it has no figure for is missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuStats {
    /// Share of the last moments in which a kernel ran, percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilisation: Option<f32>,
    /// Memory in use, by anyone.
    pub memory_bytes: u64,
    /// Memory there is.
    pub memory_total_bytes: u64,
    /// Power draw, watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f32>,
    /// Temperature, °C.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f32>,
}

/// What became of the loss scale, and why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScaleMove {
    /// Why.
    pub cause: ScaleCause,
    /// The scale of the step.
    pub from: f32,
    /// The scale of the next step.
    pub to: f32,
}

impl ScaleMove {
    /// What the scaler answered about a step whose scale was `from`.
    pub fn new(from: f32, change: ScaleChange) -> Self {
        let (cause, to) = match change {
            ScaleChange::Held => (ScaleCause::Held, from),
            ScaleChange::Grew { to, .. } => (ScaleCause::Grew, to),
            ScaleChange::Lowered { to, .. } => (ScaleCause::Lowered, to),
            ScaleChange::BackedOff { to, .. } => (ScaleCause::BackedOff, to),
            ScaleChange::AtFloor { scale, .. } => (ScaleCause::AtFloor, scale),
        };
        Self { cause, from, to }
    }
}

/// Why the loss scale is what it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleCause {
    /// Nothing happened.
    #[default]
    Held,
    /// A quiet stretch of `growth_interval` steps ended, or the predictive rule found room above.
    Grew,
    /// The predictive rule found the room above too small.
    Lowered,
    /// Gradients overflowed.
    BackedOff,
    /// Gradients overflowed, but the scale is already the smallest allowed.
    AtFloor,
}

/// A look at scaled gradients as their dtype stores them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GradStats {
    /// Elements.
    pub count: u64,
    /// Smallest magnitude above zero; `None` where there is none.
    pub min_abs: Option<f32>,
    /// Largest finite magnitude.
    pub max_abs: f32,
    /// Exact zeros, true ones and flushed ones alike.
    pub zero: u64,
    /// Subnormal values.
    pub subnormal: u64,
    /// Infinities.
    pub inf: u64,
    /// NaNs.
    pub nan: u64,
    /// Euclidean norm.
    #[serde(with = "float")]
    pub norm: f64,
    /// How many finite non-zero values have exponent e, 2^e ≤ |g| < 2^(e+1): pairs (e, count), e rising, counts above zero.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exponents: Vec<(i16, u64)>,
}

impl GradStats {
    /// A survey's figures, with the counts of exponents where they were taken.
    pub fn new(stats: &TensorStats, histogram: Option<&ExponentHistogram>) -> Self {
        let exponents = histogram.map_or_else(Vec::new, |histogram| {
            histogram.iter().map(|(exponent, count)| (exponent as i16, count)).collect()
        });
        Self {
            count: stats.count,
            min_abs: stats.min_nonzero,
            max_abs: stats.max_abs,
            zero: stats.zero,
            subnormal: stats.subnormal,
            inf: stats.inf,
            nan: stats.nan,
            norm: stats.norm(),
            exponents,
        }
    }

    /// Elements that are infinite or NaN.
    pub fn not_finite(&self) -> u64 {
        self.inf + self.nan
    }
}

/// A look at one tensor's gradient.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TensorRecord {
    /// The parameter's name.
    pub name: String,
    /// Its gradient.
    #[serde(flatten)]
    pub stats: GradStats,
}

/// A skipped step: where it overflowed and what that did to the scale.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overflow {
    /// The step.
    pub step: u64,
    /// The scale before and after.
    pub scale: ScaleMove,
    /// The loss, which tells an overflow of the backward pass (finite) from one of the forward pass (not finite).
    #[serde(with = "float")]
    pub loss: f32,
    /// Largest finite magnitude among all scaled gradients.
    pub max_abs: f32,
    /// The tensors with infinities or NaNs, in parameter order.
    pub tensors: Vec<TensorRecord>,
    /// Where it began, if that was looked for and found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// The first tensor of a step, in order of computation, that was not finite. Found by running the step's passes again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Origin {
    /// The pass.
    pub pass: Pass,
    /// The layer or operation: `h.3.mlp.c_fc`, `h.3.attn`, `lm_head`.
    pub layer: String,
    /// What of it: `output`, or the gradient of its `output`, `input`, `weight` or `bias`, such as `input_gradient`.
    pub tensor: String,
    /// Elements.
    pub count: u64,
    /// Infinities.
    pub inf: u64,
    /// NaNs.
    pub nan: u64,
    /// Largest finite magnitude.
    pub max_abs: f32,
    /// The micro-batch of the step, from 0.
    pub micro_batch: usize,
    /// The sequences of the micro-batch with infinities or NaNs, from 0. Empty for a weight's or bias's gradient, which
    /// is a sum over all of them.
    pub samples: Vec<usize>,
}

/// A layer that now computes in another type: wider after too many overflows, FP8 or not by its gradient's variance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Retyped {
    /// The step after which it did.
    pub step: u64,
    /// A block, `h.3`, or `head`: all that is outside the blocks.
    pub layer: String,
    /// The type it has computed in.
    pub from: String,
    /// The type it will compute in.
    pub to: String,
    /// Its overflows of late that made it fall back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflows: Option<usize>,
    /// The running mean of its gradient's variance that moved it into FP8 or out of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variance: Option<f64>,
    /// Whether it computes in the policy's type again.
    pub back: bool,
}

/// How the elements of each layer's gradient spread in an applied step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Variances {
    /// The step.
    pub step: u64,
    /// The variance of the *unscaled* gradient's elements, by layer: a block, `h.3`, or `head`.
    pub layers: BTreeMap<String, f64>,
}

/// Half of a step's computation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// From tokens to the loss.
    #[default]
    Forward,
    /// From the loss to gradients.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// A look at the validation text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Validation {
    /// Steps attempted before it.
    pub step: u64,
    /// Mean cross-entropy, nats.
    #[serde(with = "float")]
    pub loss: f64,
    /// e^loss.
    #[serde(with = "float")]
    pub perplexity: f64,
    /// Tokens it was averaged over.
    pub tokens: u64,
}

/// A generated text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SampleText {
    /// Steps attempted before it.
    pub step: u64,
    /// The text given.
    pub prompt: String,
    /// The text generated, without the prompt.
    pub text: String,
}

/// One batch's backward pass in FP32, beside the same batch in the run's own precision: what scaling saves, and what is
/// lost all the same.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Probe {
    /// The step whose batch it was.
    pub step: u64,
    /// The loss scale of that step.
    pub loss_scale: f32,
    /// The FP32 gradients, *unscaled*.
    pub grads: GradStats,
    /// What the run's gradient dtype lost of them, by tensor, in parameter order.
    pub tensors: Vec<FlushedTensor>,
    /// The largest activations of the FP32 forward pass, by layer in order of computation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub activations: Vec<ActivationMax>,
}

/// The largest magnitude in what a layer puts out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ActivationMax {
    /// The layer: `h.3.mlp.c_fc`.
    pub name: String,
    /// Largest finite magnitude.
    pub max_abs: f32,
}

/// How much of a tensor's gradient the run's dtype flushed to zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlushedTensor {
    /// The parameter's name.
    pub name: String,
    /// Elements.
    pub count: u64,
    /// Elements that are not zero in FP32.
    pub nonzero: u64,
    /// Elements that are not zero in FP32 but zero in the run's dtype: true underflow.
    pub flushed: u64,
}

/// A written checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Saved {
    /// The step it holds.
    pub step: u64,
    /// The step's folder.
    pub path: String,
    /// Size of all its files.
    pub bytes: u64,
    /// How long training waited for it.
    pub seconds: f64,
    /// Whether it holds the weights alone, so that a run cannot go on from it.
    pub weights_only: bool,
}

/// A message about a step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// The step; 0 before the first.
    pub step: u64,
    /// What happened and what to do.
    pub message: String,
}

/// Why a process stopped training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// All steps are done.
    #[default]
    Done,
    /// By a signal.
    Interrupted,
    /// By a person at the screen.
    Stopped,
    /// The numbers broke.
    Diverged,
}

/// The end of a process's training, with the run's totals.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Steps attempted.
    pub step: u64,
    /// Steps applied.
    pub updates: u64,
    /// Steps skipped.
    pub skipped: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// The last step's loss; NaN where there was no step.
    #[serde(with = "float")]
    pub loss: f32,
    /// The last validation loss.
    pub val_loss: Option<f64>,
    /// The loss scale at the end.
    pub loss_scale: f32,
    /// Seconds of this process's training.
    pub seconds: f64,
    /// Largest resident memory.
    pub peak_rss_bytes: Option<u64>,
    /// The newest checkpoint's folder.
    pub checkpoint: Option<String>,
}

impl Event {
    /// The step it belongs to; `None` for `Started`.
    pub fn step(&self) -> Option<u64> {
        Some(match self {
            Self::Started(_) => return None,
            Self::Step(step) => step.step,
            Self::Overflow(overflow) => overflow.step,
            Self::Retyped(retyped) => retyped.step,
            Self::Variances(variances) => variances.step,
            Self::Eval(eval) => eval.step,
            Self::Sample(sample) => sample.step,
            Self::Probe(probe) => probe.step,
            Self::Saved(saved) => saved.step,
            Self::Paused { step } | Self::Resumed { step } => *step,
            Self::Warning(trouble) | Self::Diverged(trouble) => trouble.step,
            Self::Finished(finished) => finished.step,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    fn round_trip(event: Event) -> (String, Record) {
        let line = serde_json::to_string(&Record { v: VERSION, t: 1, s: 0.5, event }).unwrap();
        let back = serde_json::from_str(&line).unwrap();
        (line, back)
    }

    #[test]
    fn a_line_begins_with_version_time_and_kind() {
        let (line, _) = round_trip(Event::Step(Box::new(StepRecord { step: 7, ..Default::default() })));
        assert!(line.starts_with(r#"{"v":1,"t":1,"s":0.5,"event":"step","step":7,"loss":0.0,"#), "{line}");
    }

    #[test]
    fn numbers_that_are_not_finite_survive() {
        for loss in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.1, 3.0] {
            let (line, back) = round_trip(Event::Step(Box::new(StepRecord { loss, ..Default::default() })));
            let Event::Step(step) = back.event else { panic!("{line}") };
            assert_eq!(step.loss.to_bits(), loss.to_bits(), "{line}");
        }
    }

    #[test]
    fn nested_tables_round_trip() {
        let stats =
            GradStats { count: 9, min_abs: Some(6e-8), exponents: vec![(-24, 3), (2, 5)], ..Default::default() };
        let tensors = vec![TensorRecord { name: "wte.weight".into(), stats: stats.clone() }];
        let event = Event::Step(Box::new(StepRecord { grads: stats, tensors, ..Default::default() }));
        assert_eq!(round_trip(event.clone()).1.event, event);
        let event = Event::Finished(Finished { val_loss: Some(1.5), ..Default::default() });
        assert_eq!(round_trip(event.clone()).1.event, event);
        let origin = Origin { pass: Pass::Backward, layer: "h.0.attn".into(), samples: vec![1], ..Default::default() };
        let event = Event::Overflow(Overflow { origin: Some(origin), ..Default::default() });
        assert_eq!(round_trip(event.clone()).1.event, event);
        let event = Event::Paused { step: 3 };
        assert_eq!(round_trip(event.clone()).1.event, event);
    }

    #[test]
    fn fields_that_an_older_program_did_not_write_are_defaults() {
        let record: Record = serde_json::from_str(r#"{"v":1,"t":0,"s":0,"event":"step","step":3,"new":1}"#).unwrap();
        assert_eq!(record.event, Event::Step(Box::new(StepRecord { step: 3, ..Default::default() })));
    }
}
