//! Callbacks that run before and after each step. Their state is part of [`TrainState`](super::TrainState), and so of
//! the checkpoint.

use crate::Result;
use crate::data::Batch;
use crate::precision::{Dtype, FallbackRule, FloatFormat, PrecisionPolicy, PrecisionUnit, ScaleChange, ScalerMode};
use crate::telemetry::{self, Event, FirstNonFinite};
use crate::train::config::Config;
use crate::train::engine::{StepOutcome, StepReport, TrainEngine};
use crate::train::{fallback, fp8, headroom, overflow_trace};
use candle_core::DType;
use std::collections::BTreeMap;

/// A finished step. Callbacks read it and add to it.
pub(super) struct StepContext<'a> {
    /// The micro-batches of the step.
    pub(super) batches: &'a [Batch],
    /// The result of the step.
    pub(super) report: StepReport,
    /// The first non-finite tensor of an overflow, and its precision unit.
    pub(super) first_nonfinite: Option<(FirstNonFinite, PrecisionUnit)>,
    /// Events to log after the event of the step.
    pub(super) events: Vec<Event>,
}

impl StepContext<'_> {
    fn is_skipped(&self) -> bool {
        self.report.outcome == StepOutcome::Skipped
    }
}

/// Runs code before and after each step.
pub(super) trait StepCallback: Send {
    /// Runs before the step over `batches`.
    fn on_step_begin(&mut self, engine: &mut TrainEngine, batches: &[Batch]) -> Result<()> {
        let _ = (engine, batches);
        Ok(())
    }

    /// Runs after the step. Buffers and gradients contain the step's values until a callback runs passes.
    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()>;
}

/// The callbacks of a configuration in the order they run. Callbacks that read the step's gradients come first.
pub(super) fn callbacks(config: &Config) -> Vec<Box<dyn StepCallback>> {
    let mut callbacks: Vec<Box<dyn StepCallback>> = Vec::new();
    callbacks.push(Box::new(UnderflowOnsetCallback));
    let maxima_every = config.telemetry.layer_maxima_every;
    if maxima_every > 0 {
        callbacks.push(Box::new(GradMaxCallback { every: maxima_every }));
    }
    let variance_every = config.telemetry.variance_every;
    if variance_every > 0 || config.precision.fp8.block.is_some() {
        callbacks.push(Box::new(GradVarianceCallback { compute: config.dtype.compute, every: variance_every }));
    }
    let falls_back = config.precision.fallback != FallbackRule::Off;
    if config.telemetry.attribute_overflows || falls_back {
        callbacks.push(Box::new(OverflowTracer));
    }
    if falls_back {
        callbacks.push(Box::new(FallbackCallback { policy: config.dtype }));
    }
    if config.scaler.mode == ScalerMode::Predictive {
        callbacks.push(Box::new(PredictiveScaleCallback));
    } else if config.scaler.measure_first && config.grad_scaler().enabled {
        callbacks.push(Box::new(FirstScaleCallback));
    }
    callbacks
}

/// Reports the first step in which a gradient contains FP16's smallest magnitude. Smaller values were flushed to zero.
struct UnderflowOnsetCallback;

impl StepCallback for UnderflowOnsetCallback {
    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
        let TrainEngine { state, grads, grad_stats, .. } = engine;
        let min_subnormal = 2f32.powi(FloatFormat::FP16.min_subnormal_exponent());
        let mut tensors = Vec::new();
        for ((name, grad), summary) in grads.micro_batch_grads().iter().zip(&grad_stats.tensors) {
            let underflows =
                grad.dtype() == DType::F16 && summary.stats.min_nonzero.is_some_and(|min| min <= min_subnormal);
            if underflows && !state.underflowed_params.contains(name) {
                state.underflowed_params.insert(name.to_owned());
                tensors.push(name.to_owned());
            }
        }
        if !tensors.is_empty() {
            context
                .events
                .push(Event::UnderflowOnset(telemetry::UnderflowOnset { step: state.counters.step, tensors }));
        }
        Ok(())
    }
}

/// Reports the largest gradient of each layer every few steps.
struct GradMaxCallback {
    every: u64,
}

impl StepCallback for GradMaxCallback {
    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
        let step = engine.state.counters.step;
        if !step.is_multiple_of(self.every) {
            return Ok(());
        }
        let mut layers: BTreeMap<String, f32> = BTreeMap::new();
        for (entry, summary) in engine.state.weights.layout().iter().zip(&engine.grad_stats.tensors) {
            let largest = layers.entry(entry.layer.unit().to_string()).or_default();
            *largest = largest.max(summary.stats.max_abs);
        }
        let loss_scale = context.report.scale;
        context.events.push(Event::GradMax(telemetry::GradMax { step, loss_scale, layers }));
        Ok(())
    }
}

/// Reports the variance of each layer's gradient, and uses it to move a block into and out of FP8.
struct GradVarianceCallback {
    compute: Dtype,
    every: u64,
}

impl StepCallback for GradVarianceCallback {
    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
        context.events.extend(fp8::after_step(engine, self.compute, &context.report, self.every)?);
        Ok(())
    }
}

/// Finds the tensor that overflowed first.
struct OverflowTracer;

impl StepCallback for OverflowTracer {
    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
        if context.is_skipped() {
            context.first_nonfinite = overflow_trace::first_nonfinite(engine, context.batches, &context.report)?;
        }
        Ok(())
    }
}

/// Moves layers that overflow too often to a wider type.
struct FallbackCallback {
    policy: PrecisionPolicy,
}

impl StepCallback for FallbackCallback {
    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
        let retyped = fallback::after_step(engine, self.policy, &context.report, context.first_nonfinite.as_ref())?;
        context.events.extend(retyped.into_iter().map(Event::DtypeChange));
        Ok(())
    }
}

/// Lowers the initial scale if the first step's gradients would overflow.
struct FirstScaleCallback;

impl StepCallback for FirstScaleCallback {
    fn on_step_begin(&mut self, engine: &mut TrainEngine, batches: &[Batch]) -> Result<()> {
        let (scale, counters) = (engine.state.scaler.scale(), engine.state.counters);
        if counters.step == 0
            && let Some(largest) = headroom::largest_gradient(engine, batches, counters, scale)?
        {
            engine.state.scaler.lower_for(largest);
        }
        Ok(())
    }

    fn on_step_end(&mut self, _: &mut TrainEngine, _: &mut StepContext<'_>) -> Result<()> {
        Ok(())
    }
}

/// Measures gradients for the predictive loss scale when the step itself cannot: before the first step, and after an
/// overflow.
struct PredictiveScaleCallback;

impl StepCallback for PredictiveScaleCallback {
    fn on_step_begin(&mut self, engine: &mut TrainEngine, batches: &[Batch]) -> Result<()> {
        let scaler = &engine.state.scaler;
        if scaler.needs_amax() {
            let (scale, counters) = (scaler.scale(), engine.state.counters);
            if let Some(largest) = headroom::largest_gradient(engine, batches, counters, scale)? {
                engine.state.scaler.set_amax(largest);
            }
        }
        Ok(())
    }

    fn on_step_end(&mut self, engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
        if let ScaleChange::BackedOff { to, .. } = &mut context.report.change {
            let (scale, counters) = (context.report.scale, engine.state.counters.before_skipped());
            if let Some(largest) = headroom::largest_gradient(engine, context.batches, counters, scale)? {
                *to = engine.state.scaler.set_amax(largest);
            }
        }
        Ok(())
    }
}
