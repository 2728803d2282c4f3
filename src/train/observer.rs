//! Observers act before and after each step. Their state is part of [`TrainState`](super::TrainState), and so of the
//! checkpoint.

use crate::Result;
use crate::data::Batch;
use crate::precision::{Dtype, FallbackRule, FloatFormat, PrecisionPolicy, PrecisionUnit, ScaleChange, ScalerMode};
use crate::telemetry::{self, Event, FirstNonFinite};
use crate::train::config::Config;
use crate::train::engine::{Engine, Outcome, StepReport};
use crate::train::{attribution, fallback, fp8, headroom};
use candle_core::DType;
use std::collections::BTreeMap;

/// A finished step; observers read it and add to it.
pub(super) struct Taken<'a> {
    /// Its micro-batches.
    pub(super) batches: &'a [Batch],
    /// Its figures.
    pub(super) report: StepReport,
    /// The first non-finite tensor of its overflow, and the tensor's unit.
    pub(super) origin: Option<(FirstNonFinite, PrecisionUnit)>,
    /// Events to log after the step's own.
    pub(super) events: Vec<Event>,
}

impl Taken<'_> {
    fn is_skipped(&self) -> bool {
        self.report.outcome == Outcome::Skipped
    }
}

/// Acts around each step.
pub(super) trait StepObserver: Send {
    /// Before the step over `batches`.
    fn before(&mut self, engine: &mut Engine, batches: &[Batch]) -> Result<()> {
        let _ = (engine, batches);
        Ok(())
    }

    /// After it. Buffers and gradients are the step's until an observer overwrites them with its own passes.
    fn after(&mut self, engine: &mut Engine, step: &mut Taken<'_>) -> Result<()>;
}

/// The observers of a configuration in the order they run. Observers that read the step's gradients come first.
pub(super) fn observers(config: &Config) -> Vec<Box<dyn StepObserver>> {
    let mut observers: Vec<Box<dyn StepObserver>> = Vec::new();
    observers.push(Box::new(Touched));
    let maxima_every = config.telemetry.layer_maxima_every;
    if maxima_every > 0 {
        observers.push(Box::new(Maxima { every: maxima_every }));
    }
    let variance_every = config.telemetry.variance_every;
    if variance_every > 0 || config.precision.fp8.block.is_some() {
        observers.push(Box::new(Variances { compute: config.dtype.compute, every: variance_every }));
    }
    let falls_back = config.precision.fallback != FallbackRule::Off;
    if config.telemetry.attribute_overflows || falls_back {
        observers.push(Box::new(Attribution));
    }
    if falls_back {
        observers.push(Box::new(LayerFallback { policy: config.dtype }));
    }
    if config.scaler.mode == ScalerMode::Predictive {
        observers.push(Box::new(PredictiveScale));
    }
    observers
}

/// The first step in which a gradient contains FP16's smallest magnitude; smaller values were flushed to zero.
struct Touched;

impl StepObserver for Touched {
    fn after(&mut self, engine: &mut Engine, taken: &mut Taken<'_>) -> Result<()> {
        let Engine { state, grads, survey, .. } = engine;
        let least = 2f32.powi(FloatFormat::FP16.min_subnormal_exponent());
        let mut tensors = Vec::new();
        for ((name, grad), looked) in grads.micro_batch().iter().zip(&survey.tensors) {
            let touches = grad.dtype() == DType::F16 && looked.stats.min_nonzero.is_some_and(|min| min <= least);
            if touches && !state.touched.contains(name) {
                state.touched.insert(name.to_owned());
                tensors.push(name.to_owned());
            }
        }
        if !tensors.is_empty() {
            taken.events.push(Event::UnderflowOnset(telemetry::UnderflowOnset { step: state.counters.step, tensors }));
        }
        Ok(())
    }
}

/// The largest gradient of each layer, every few steps.
struct Maxima {
    every: u64,
}

impl StepObserver for Maxima {
    fn after(&mut self, engine: &mut Engine, taken: &mut Taken<'_>) -> Result<()> {
        let step = engine.state.counters.step;
        if !step.is_multiple_of(self.every) {
            return Ok(());
        }
        let mut layers: BTreeMap<String, f32> = BTreeMap::new();
        for (entry, looked) in engine.state.weights.layout().iter().zip(&engine.survey.tensors) {
            let largest = layers.entry(entry.layer.unit().to_string()).or_default();
            *largest = largest.max(looked.stats.max_abs);
        }
        let loss_scale = taken.report.scale;
        taken.events.push(Event::GradMax(telemetry::GradMax { step, loss_scale, layers }));
        Ok(())
    }
}

/// Reports the variance of each layer's gradient, and uses it to move a block into and out of FP8.
struct Variances {
    compute: Dtype,
    every: u64,
}

impl StepObserver for Variances {
    fn after(&mut self, engine: &mut Engine, step: &mut Taken<'_>) -> Result<()> {
        step.events.extend(fp8::after_step(engine, self.compute, &step.report, self.every)?);
        Ok(())
    }
}

/// Finds the tensor that overflowed first.
struct Attribution;

impl StepObserver for Attribution {
    fn after(&mut self, engine: &mut Engine, step: &mut Taken<'_>) -> Result<()> {
        if step.is_skipped() {
            step.origin = attribution::origin(engine, step.batches, &step.report)?;
        }
        Ok(())
    }
}

/// Moves layers that overflow too often to a wider type.
struct LayerFallback {
    policy: PrecisionPolicy,
}

impl StepObserver for LayerFallback {
    fn after(&mut self, engine: &mut Engine, step: &mut Taken<'_>) -> Result<()> {
        let retyped = fallback::after_step(engine, self.policy, &step.report, step.origin.as_ref())?;
        step.events.extend(retyped.into_iter().map(Event::DtypeChange));
        Ok(())
    }
}

/// Measures gradients for the predictive loss scale when the step itself cannot: before the first step, and after an
/// overflow.
struct PredictiveScale;

impl StepObserver for PredictiveScale {
    fn before(&mut self, engine: &mut Engine, batches: &[Batch]) -> Result<()> {
        let scaler = &engine.state.scaler;
        if scaler.needs_amax() {
            let (scale, counters) = (scaler.scale(), engine.state.counters);
            if let Some(largest) = headroom::largest_gradient(engine, batches, counters, scale)? {
                engine.state.scaler.set_amax(largest);
            }
        }
        Ok(())
    }

    fn after(&mut self, engine: &mut Engine, step: &mut Taken<'_>) -> Result<()> {
        if let ScaleChange::BackedOff { to, .. } = &mut step.report.change {
            let (scale, counters) = (step.report.scale, engine.state.counters.before_skipped());
            if let Some(largest) = headroom::largest_gradient(engine, step.batches, counters, scale)? {
                *to = engine.state.scaler.set_amax(largest);
            }
        }
        Ok(())
    }
}
