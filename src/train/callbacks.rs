//! Callbacks that run before and after each step. Their state is part of [`TrainState`](super::TrainState), and so of
//! the checkpoint.

use crate::Result;
use crate::data::Batch;
use crate::precision::{FallbackRule, FloatFormat, PrecisionUnit, ScaleChange, ScalerMode};
use crate::telemetry::{Event, FirstNonFinite, GradMax, UnderflowOnset};
use crate::train::config::Config;
use crate::train::engine::{StepOutcome, StepReport, TrainEngine};
use crate::train::{fallback, fp8, headroom, overflow_trace};
use candle_core::DType;
use std::collections::BTreeMap;

/// A finished step. Callbacks read it and add to it.
pub(super) struct StepContext<'a> {
    pub(super) config: &'a Config,
    /// The micro-batches of the step.
    pub(super) batches: &'a [Batch],
    pub(super) report: StepReport,
    /// The first non-finite tensor of an overflow, and its precision unit.
    pub(super) first_nonfinite: Option<(FirstNonFinite, PrecisionUnit)>,
    /// Events to log after the event of the step.
    pub(super) events: Vec<Event>,
}

impl StepContext<'_> {
    /// Whether the step changed only the scaler.
    pub(super) fn is_skipped(&self) -> bool {
        self.report.outcome == StepOutcome::Skipped
    }
}

/// Runs before a step over its batches.
type BeforeStep = fn(&mut TrainEngine, &[Batch]) -> Result<()>;
type AfterStep = fn(&mut TrainEngine, &mut StepContext<'_>) -> Result<()>;

pub(super) struct Callbacks {
    pub(super) begin: Option<BeforeStep>,
    /// Run after the step, in this order. Buffers and gradients contain the step's values until one runs passes, so
    /// those that read gradients come first.
    pub(super) end: Vec<AfterStep>,
}

impl Callbacks {
    /// The callbacks that `config` needs.
    pub(super) fn new(config: &Config) -> Self {
        let mut callbacks = Self { begin: None, end: vec![report_underflow_onsets] };
        if config.telemetry.grad_max_every > 0 {
            callbacks.end.push(report_grad_maxima);
        }
        if config.telemetry.grad_variance_every > 0 || config.precision.fp8.block.is_some() {
            callbacks.end.push(fp8::after_step);
        }
        let falls_back = config.precision.fallback != FallbackRule::Off;
        if config.telemetry.trace_overflows || falls_back {
            callbacks.end.push(overflow_trace::after_step);
        }
        if falls_back {
            callbacks.end.push(fallback::after_step);
        }
        let is_predictive = config.scaler.mode == ScalerMode::Predictive;
        if is_predictive {
            callbacks.end.push(predict_scale_after_overflow);
        }
        if config.grad_scaler().enabled && (is_predictive || config.scaler.measure_first) {
            callbacks.begin = Some(measure_first_scale);
        }
        callbacks
    }
}

#[expect(clippy::unnecessary_wraps, reason = "other callbacks fail")]
/// Reports the first step in which a gradient contains FP16's smallest magnitude. Smaller values were flushed to zero.
fn report_underflow_onsets(engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
    let TrainEngine { state, grads, grad_stats, .. } = engine;
    let min_subnormal = 2f32.powi(FloatFormat::FP16.min_subnormal_exponent());
    let mut tensors = Vec::new();
    for ((name, grad), summary) in grads.micro_batch_grads().iter().zip(&grad_stats.tensors) {
        let underflows =
            grad.dtype() == DType::F16 && summary.stats.min_nonzero.is_some_and(|min| min <= min_subnormal);
        if underflows && state.underflowed_params.insert(name.to_owned()) {
            tensors.push(name.to_owned());
        }
    }
    if !tensors.is_empty() {
        context.events.push(Event::UnderflowOnset(UnderflowOnset { step: state.counters.step, tensors }));
    }
    Ok(())
}

#[expect(clippy::unnecessary_wraps, reason = "other callbacks fail")]
/// Reports the largest gradient of each layer every few steps.
fn report_grad_maxima(engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
    let step = engine.state.counters.step;
    if !step.is_multiple_of(context.config.telemetry.grad_max_every) {
        return Ok(());
    }
    let mut layers: BTreeMap<String, f32> = BTreeMap::new();
    for (entry, summary) in engine.state.weights.layout().iter().zip(&engine.grad_stats.tensors) {
        let largest = layers.entry(entry.layer.unit().to_string()).or_default();
        *largest = largest.max(summary.stats.max_abs);
    }
    context.events.push(Event::GradMax(GradMax { step, loss_scale: context.report.scale, layers }));
    Ok(())
}

/// Measures gradients before the first step: for the predictive loss scale, or to lower an initial scale at which they
/// would overflow.
fn measure_first_scale(engine: &mut TrainEngine, batches: &[Batch]) -> Result<()> {
    let scaler = &engine.state.scaler;
    let counters = engine.state.counters;
    let (scale, is_predictive) = (scaler.scale(), scaler.is_predictive());
    let is_due = if is_predictive { scaler.needs_amax() } else { counters.step == 0 };
    if is_due && let Some(largest) = headroom::largest_gradient(engine, batches, counters, scale)? {
        if is_predictive {
            engine.state.scaler.set_amax(largest);
        } else {
            engine.state.scaler.lower_for(largest);
        }
    }
    Ok(())
}

/// Measures gradients for the predictive loss scale after an overflow, because the step itself cannot.
fn predict_scale_after_overflow(engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
    if let ScaleChange::BackedOff { to, .. } = &mut context.report.change {
        let scale = context.report.scale;
        let counters = engine.state.counters.before_skipped();
        if let Some(largest) = headroom::largest_gradient(engine, context.batches, counters, scale)? {
            *to = engine.state.scaler.set_amax(largest);
        }
    }
    Ok(())
}
