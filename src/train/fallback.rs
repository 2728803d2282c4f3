//! Layers that overflow too often leave the policy's compute type, at a step's boundary.

use crate::Result;
use crate::engine::model::candle_dtype;
use crate::precision::{Dtype, PrecisionPolicy, Unit};
use crate::telemetry::{Origin, Pass, Retyped};
use crate::train::fp8::{FP8, Fp8Layer};
use crate::train::step::{Engine, Outcome, StepReport};
use std::collections::BTreeMap;

impl Engine {
    /// Lets `unit` compute in `compute` from the next step on: its working weights, its buffers, its gradients.
    pub fn retype(&mut self, unit: Unit, compute: Dtype) -> Result<()> {
        self.workspace.retype(self.model.spec(), unit, compute)?;
        let state = &mut self.state;
        for index in state.weights.packs_of(unit) {
            state.masters.retype(index, candle_dtype(compute), &mut state.weights, self.model.kernels())?;
            self.grads.retype(index, compute)?;
        }
        Ok(())
    }

    /// The units in another type than the policy's, each with its type, by name.
    pub(super) fn in_fallback(&self) -> BTreeMap<String, String> {
        let fallback = &self.state.fallback;
        let fp8 = self.state.fp8.as_ref().and_then(Fp8Layer::active);
        let fp8 = fp8.map(|unit| (unit.to_string(), FP8.to_owned()));
        fallback.active().map(|unit| (unit.to_string(), fallback.dtype().to_string())).chain(fp8).collect()
    }
}

/// What the last step, with the `origin` of its overflow, means for who is in fallback. No loss scale helps against an
/// overflow of the forward pass; one of the backward pass says nothing of its layer where the scale was too high.
pub(super) fn after_step(
    engine: &mut Engine,
    policy: PrecisionPolicy,
    report: &StepReport,
    origin: Option<&(Origin, Unit)>,
) -> Result<Vec<Retyped>> {
    let Engine { state, survey, .. } = engine;
    if !state.fallback.is_on() {
        return Ok(Vec::new());
    }
    let (step, wide) = (state.counters.step, state.fallback.dtype());
    let mut moves = Vec::new();
    if report.outcome == Outcome::Skipped {
        let sound_scale = report.scale <= state.fallback.highest_scale();
        if let Some(&(_, unit)) = origin.filter(|(origin, _)| sound_scale || origin.pass == Pass::Forward) {
            let fallen = state.fallback.overflowed(unit, step);
            moves.extend(fallen.map(|overflows| (unit, policy.compute, wide, Some(overflows))));
        }
    } else {
        let top = policy.compute.format().max() as f32;
        let layout = state.weights.layout();
        let fits = |unit| {
            let mut tensors = layout.iter().zip(&survey.tensors).filter(|(entry, _)| entry.layer.unit() == unit);
            tensors.all(|(_, survey)| survey.stats.max_abs <= top)
        };
        moves.extend(state.fallback.clean(fits).into_iter().map(|unit| (unit, wide, policy.compute, None)));
    }
    let mut events = Vec::new();
    for (unit, from, to, overflows) in moves {
        engine.retype(unit, to)?;
        let (layer, from, to) = (unit.to_string(), from.to_string(), to.to_string());
        let back = overflows.is_none();
        events.push(Retyped { step, layer, from, to, overflows, back, ..Retyped::default() });
    }
    Ok(events)
}
