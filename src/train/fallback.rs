//! Moves layers that overflow too often out of the policy's compute type, between steps.

use crate::Result;
use crate::engine::model::candle_dtype;
use crate::precision::{Dtype, PrecisionUnit};
use crate::telemetry::{DtypeChange, Event, Pass};
use crate::train::callbacks::StepContext;
use crate::train::engine::TrainEngine;
use crate::train::fp8::FP8;
use std::collections::BTreeMap;

impl TrainEngine {
    /// Changes the compute dtype of `unit`, starting with the next step: converts its working weights, buffers and
    /// gradients.
    pub fn change_dtype(&mut self, unit: PrecisionUnit, compute: Dtype) -> Result<()> {
        self.workspace.change_dtype(self.model.spec(), unit, compute)?;
        let state = &mut self.state;
        state.masters.change_dtype(unit, candle_dtype(compute), &mut state.weights, self.model.kernels())?;
        for index in state.weights.fused_in(unit) {
            self.grads.change_dtype(index, compute)?;
        }
        Ok(())
    }

    /// The units whose compute dtype differs from the policy's, with their dtype.
    pub(super) fn in_fallback(&self) -> BTreeMap<String, String> {
        let fallback = &self.state.fallback;
        let fp8 = self.state.fp8.active().map(|unit| (unit.to_string(), FP8.to_owned()));
        fallback.active().map(|unit| (unit.to_string(), fallback.dtype().to_string())).chain(fp8).collect()
    }
}

/// Moves units into and out of fallback according to the last step and the origin of its overflow. A forward overflow
/// always counts, because no loss scale prevents it; a backward overflow counts only if the scale was not too high.
pub(super) fn after_step(engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
    let TrainEngine { state, grad_stats, .. } = engine;
    let (policy, max_scale) = (context.config.dtype, context.config.precision.fallback_max_scale);
    let step = state.counters.step;
    let wide = state.fallback.dtype();
    let mut moves = Vec::new();
    if context.is_skipped() {
        let sound_scale = context.report.scale <= max_scale;
        let origin = context.first_nonfinite.as_ref();
        if let Some(&(_, unit)) = origin.filter(|(origin, _)| sound_scale || origin.pass == Pass::Forward) {
            let fallen = state.fallback.overflowed(unit, step);
            moves.extend(fallen.map(|overflows| (unit, policy.compute, wide, Some(overflows))));
        }
    } else {
        let top = policy.compute.format().max() as f32;
        let layout = state.weights.layout();
        let fits = |unit| {
            let mut tensors = layout.iter().zip(&grad_stats.tensors).filter(|(entry, _)| entry.layer.unit() == unit);
            tensors.all(|(_, grad_stats)| grad_stats.stats.max_abs <= top)
        };
        moves.extend(state.fallback.clean(fits).into_iter().map(|unit| (unit, wide, policy.compute, None)));
    }
    let moved = !moves.is_empty();
    for (unit, from, to, overflows) in moves {
        engine.change_dtype(unit, to)?;
        let (layer, from, to) = (unit.to_string(), from.to_string(), to.to_string());
        let restored = overflows.is_none();
        let change = DtypeChange { step, layer, from, to, overflows, restored, ..DtypeChange::default() };
        context.events.push(Event::DtypeChange(change));
    }
    if moved && engine.state.masters.parameters().shards().is_some() {
        let TrainEngine { state, model, group, .. } = engine;
        state.masters.copy_to_weights(&state.weights, model.kernels(), &**group)?;
    }
    Ok(())
}
