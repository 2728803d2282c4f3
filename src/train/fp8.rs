//! Blocks in simulated FP8: the inputs of its matrix products are rounded, activations and weights through E4M3,
//! gradients through E5M2, each tensor with a scale from its own amax history. Outputs are stored as usual.
//!
//! The simulation is a hook that rounds activations and gradients in place, and rounded copies of the blocks' weights.
//! So the passes that inspect a step compute the same numbers, and a run without FP8 pays nothing.

use crate::Result;
use crate::engine::collective::ProcessGroup;
use crate::engine::kernels::fp8::round_through;
use crate::engine::kernels::summary::summarize;
use crate::engine::model::{
    Hook, HookPoint, LinearRole, ModuleId, ModuleOp, NormRole, ParamRole, Parameters, TensorKind,
};
use crate::precision::{AmaxHistory, FloatFormat, Fp8Config, Fp8State, PrecisionUnit, scale_for};
use crate::telemetry::{DtypeChange, Event, GradVariance};
use crate::train::callbacks::StepContext;
use crate::train::engine::TrainEngine;
use candle_core::Tensor;
use std::borrow::Cow;

/// The name of a block's type while its products take FP8.
pub(super) const FP8: &str = "fp8";
const E4M3: FloatFormat = FloatFormat::E4M3;
const E5M2: FloatFormat = FloatFormat::E5M2;

/// The inputs of a block's products except weights, by where the passes compute them, in the checkpoint's order.
const INPUTS: [(ModuleOp, TensorKind, FloatFormat); 8] = [
    (ModuleOp::Norm(NormRole::Attention), TensorKind::Output, E4M3),
    (ModuleOp::Attention, TensorKind::Output, E4M3),
    (ModuleOp::Norm(NormRole::Mlp), TensorKind::Output, E4M3),
    (ModuleOp::Activation, TensorKind::Output, E4M3),
    (ModuleOp::Linear(LinearRole::Down), TensorKind::OutputGradient, E5M2),
    (ModuleOp::Activation, TensorKind::InputGradient, E5M2),
    (ModuleOp::Linear(LinearRole::Out), TensorKind::OutputGradient, E5M2),
    (ModuleOp::Attention, TensorKind::InputGradient, E5M2),
];
/// The weights of those products, which follow [`INPUTS`] in the checkpoint; a model has one of `Up` and `GateUp`.
const WEIGHTS: [&[LinearRole]; 4] =
    [&[LinearRole::Qkv], &[LinearRole::Out], &[LinearRole::Up, LinearRole::GateUp], &[LinearRole::Down]];
/// A step's weight in the running mean of the variance.
const SMOOTHING: f64 = 0.1;

/// The blocks that the configuration names.
#[derive(Debug)]
pub struct Fp8Blocks {
    config: Fp8Config,
    blocks: Vec<Fp8Block>,
}

/// A block in FP8, or waiting for its gradient's variance to allow it.
#[derive(Debug)]
struct Fp8Block {
    state: Fp8State,
    /// This step's scales, from earlier steps; `None` if there is no history yet.
    scales: Vec<Option<f32>>,
    /// This step's maxima.
    amax: Vec<f32>,
}

impl Fp8Blocks {
    /// The blocks of a model of `num_layers` that `config` names, each with its `saved` state or a fresh one.
    pub fn new(config: Fp8Config, num_layers: usize, saved: &[Fp8State]) -> Self {
        let named = |block: &usize| config.block.as_ref().is_some_and(|ranges| ranges.contains(*block));
        let blocks = (0..num_layers).filter(named).map(|block| Fp8Block::new(block, &config, saved)).collect();
        Self { config, blocks }
    }

    /// The states that a checkpoint saves.
    pub fn states(&self) -> Vec<Fp8State> {
        self.blocks.iter().map(|block| block.state.clone()).collect()
    }

    /// The blocks whose products take FP8 now.
    pub fn active(&self) -> impl Iterator<Item = PrecisionUnit> {
        self.blocks.iter().filter(|block| block.state.active).map(|block| PrecisionUnit::Block(block.state.block))
    }

    /// Computes the step's scales from the amax history.
    pub(super) fn begin_step(&mut self) {
        self.blocks.iter_mut().for_each(Fp8Block::begin_step);
    }

    /// Adds the step's maxima over all processes to the amax history.
    pub(super) fn end_step(&mut self, group: &dyn ProcessGroup) -> Result<()> {
        for block in self.blocks.iter_mut().filter(|block| block.state.active) {
            group.max(&mut block.amax)?;
            for (history, amax) in block.state.amax.iter_mut().zip(&block.amax) {
                history.push(*amax, self.config.amax_history_len);
            }
        }
        Ok(())
    }

    /// The working weights as the passes use them: with rounded ones for blocks in FP8.
    pub(super) fn step_weights<'a>(&mut self, weights: &'a Parameters) -> Result<Cow<'a, Parameters>> {
        let mut active = self.blocks.iter_mut().filter(|block| block.state.active);
        active.try_fold(Cow::Borrowed(weights), |weights, block| block.round_weights(&weights).map(Cow::Owned))
    }
}

impl Fp8Block {
    fn new(block: usize, config: &Fp8Config, saved: &[Fp8State]) -> Self {
        let tensors = INPUTS.len() + WEIGHTS.len();
        let fresh = || Fp8State {
            block,
            active: config.enter_variance.is_none(),
            variance: None,
            amax: vec![AmaxHistory::default(); tensors],
        };
        let own = saved.iter().find(|state| state.block == block && state.amax.len() == tensors).cloned();
        Self { state: own.unwrap_or_else(fresh), scales: vec![None; tensors], amax: vec![0.0; tensors] }
    }

    fn begin_step(&mut self) {
        self.amax.fill(0.0);
        for (i, history) in self.state.amax.iter().enumerate() {
            self.scales[i] = history.scale(INPUTS.get(i).map_or(E4M3, |(_, _, format)| *format));
        }
    }

    /// `weights` with a copy of the block's weights, rounded with the step's scales.
    fn round_weights(&mut self, weights: &Parameters) -> Result<Parameters> {
        let mut rounded = weights.clone();
        for (i, roles) in WEIGHTS.iter().enumerate() {
            for role in *roles {
                let layer = ModuleId::in_block(self.state.block, ModuleOp::Linear(*role));
                if let Some(weight) = rounded.unshare(layer, ParamRole::Weight)? {
                    self.round(INPUTS.len() + i, E4M3, weight)?;
                }
            }
        }
        Ok(rounded)
    }

    /// Adds the variance of an applied step to the mean. `Some(true)` if that moves the block into FP8, `Some(false)`
    /// if out of it.
    fn switch(&mut self, config: &Fp8Config, variance: f64) -> Option<bool> {
        let mean = self.state.variance.map_or(variance, |mean| mean + SMOOTHING * (variance - mean));
        self.state.variance = Some(mean);
        let active = config.switched(self.state.active, mean);
        let moved = active != self.state.active;
        if moved {
            // The history is too old to scale by.
            self.state.amax.fill(AmaxHistory::default());
            self.scales.fill(None);
        }
        self.state.active = active;
        moved.then_some(active)
    }

    fn round(&mut self, index: usize, format: FloatFormat, tensor: &Tensor) -> candle_core::Result<()> {
        let amax = summarize(tensor, format, false)?.stats.max_abs;
        self.amax[index] = self.amax[index].max(amax);
        round_through(tensor, format, self.scales[index].unwrap_or_else(|| scale_for(amax, format)))
    }
}

impl Hook for Fp8Blocks {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        let of_point = |block: &&mut Fp8Block| block.state.active && point.layer.block == Some(block.state.block);
        let Some(block) = self.blocks.iter_mut().find(of_point) else { return Ok(()) };
        match INPUTS.iter().position(|(op, kind, _)| (*op, *kind) == (point.layer.op, point.kind)) {
            Some(index) => block.round(index, INPUTS[index].2, tensor),
            None => Ok(()),
        }
    }

    fn is_active(&self) -> bool {
        self.blocks.iter().any(|block| block.state.active)
    }
}

/// Reports each layer's gradient variance in the last step, and the blocks that it moves into FP8 or out of it. Call it
/// before anything overwrites the gradients.
pub(super) fn after_step(engine: &mut TrainEngine, context: &mut StepContext<'_>) -> Result<()> {
    let (compute, grad_variance_every) = (context.config.dtype.compute, context.config.telemetry.grad_variance_every);
    let TrainEngine { group, model, state, grads, grad_stats, .. } = engine;
    let step = state.counters.step;
    let wanted = grad_variance_every > 0 && step.is_multiple_of(grad_variance_every);
    let Fp8Blocks { config, blocks } = &mut state.fp8;
    let switches = config.enter_variance.is_some() && !blocks.is_empty();
    if context.is_skipped() || !(wanted || switches) {
        return Ok(());
    }
    let mut variances = grads.variances(grad_stats, model.kernels(), &**group)?;
    for variance in variances.values_mut() {
        *variance /= f64::from(context.report.scale).powi(2);
    }
    for block in blocks {
        let unit = PrecisionUnit::Block(block.state.block);
        let Some(active) = variances.get(&unit).and_then(|variance| block.switch(config, *variance)) else { continue };
        let (from, to) = (compute.to_string(), FP8.to_owned());
        let (from, to) = if active { (from, to) } else { (to, from) };
        let layer = unit.to_string();
        let variance = block.state.variance;
        let change = DtypeChange { step, layer, from, to, overflows: None, variance, restored: !active };
        context.events.push(Event::DtypeChange(change));
    }
    if wanted {
        let layers = variances.into_iter().map(|(unit, variance)| (unit.to_string(), variance)).collect();
        context.events.push(Event::GradVariance(GradVariance { step, layers }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kernels::view;
    use crate::engine::model::ModelSpec;
    use candle_core::{DType, Device};

    /// Between the two thresholds a block keeps its type, which is part of a checkpoint's state.
    #[test]
    fn hysteresis_keeps_a_block_where_it_is_through_a_checkpoint() {
        let resumed = |active, exit_ratio| {
            let config = Fp8Config { enter_variance: Some(1e-6), exit_ratio, ..Fp8Config::default() };
            let mut before = Fp8Block::new(1, &config, &[]);
            let entered = before.switch(&config, if active { 0.9e-6 } else { 1.1e-6 });
            assert_eq!(entered, active.then_some(true));
            let saved = serde_json::to_string(&before.state).unwrap();
            let mut block = Fp8Block::new(1, &config, &[serde_json::from_str(&saved).unwrap()]);
            move |variance| block.switch(&config, variance)
        };
        // A tenth of the way to 3e-6 from 0.9e-6 is a mean of 1.11e-6.
        assert_eq!(resumed(true, 2.0)(3e-6), None);
        assert_eq!(resumed(true, 1.0)(3e-6), Some(false));
        assert_eq!(resumed(true, 2.0)(30e-6), Some(false));
        assert_eq!(resumed(false, 2.0)(1.1e-6), None, "it enters at the lower threshold alone");
        assert_eq!(resumed(false, 2.0)(1e-9), Some(true));
        let config = Fp8Config { enter_variance: Some(1e-6), ..Fp8Config::default() };
        let mut block = Fp8Block::new(1, &config, &[]);
        block.state.amax[0].push(1.0, 16);
        assert_eq!(block.switch(&config, 1e-9), Some(true));
        assert_eq!(block.state.amax[0], AmaxHistory::default(), "a history from before is too old");
    }

    #[test]
    fn the_passes_use_rounded_copies_of_the_blocks_weights() {
        let shape = ModelSpec::named("tiny").unwrap().resized(2, 16, 2);
        let masters = Parameters::random(&shape.parameters(), 5, &Device::Cpu).unwrap();
        let weights = masters.zeros_like(DType::F16).unwrap();
        let mut fp8 = Fp8Blocks::new(Fp8Config { block: Some(1.into()), ..Fp8Config::default() }, 2, &[]);
        let read = |weights: &Parameters, name: &str| -> Vec<f32> {
            let weight = weights.get(name).unwrap().to_dtype(DType::F32).unwrap();
            weight.flatten_all().unwrap().to_vec1().unwrap()
        };
        for (master, weight) in masters.tensors().iter().zip(weights.tensors()) {
            view::copy(master, weight).unwrap();
        }
        let in_fp16 = read(&weights, "h.1.mlp.c_fc.weight");
        fp8.begin_step();
        let rounded = fp8.step_weights(&weights).unwrap();
        for name in ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"] {
            let coarse = |weights: &Parameters, block: usize| {
                read(weights, &format!("h.{block}.{name}.weight")).iter().all(|x| x.to_bits() << 12 == 0)
            };
            assert!(coarse(&rounded, 1) && !coarse(&rounded, 0), "{name}: three bits after the leading one");
            assert!(!coarse(&weights, 1), "{name}: the working copy was rounded");
        }
        // The scale comes from the largest weight, so nothing that FP8 could hold saturates or flushes.
        let in_fp8 = read(&rounded, "h.1.mlp.c_fc.weight");
        let mut errors = in_fp16.iter().zip(in_fp8).map(|(x, y)| (x - y).abs() / x.abs().max(1e-4));
        assert!(errors.all(|error| error <= 1.0 / 16.0));
        assert_eq!(read(&weights, "h.1.mlp.c_fc.weight"), in_fp16);
    }
}
