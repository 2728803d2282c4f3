//! Measures a step's largest gradient, including gradients of activations, for the predictive loss scale: before the
//! first step and after an overflow.

use crate::Result;
use crate::data::Batch;
use crate::engine::kernels::summary::summarize;
use crate::engine::model::{Hook, HookPoint};
use crate::precision::FloatFormat;
use crate::train::engine::TrainEngine;
use crate::train::objective::LossFactors;
use crate::train::state::Counters;
use candle_core::{DType, Tensor};

/// The first try's scale is the current one divided by this; each next try divides again.
const STEP_DOWN: f32 = 256.0;

/// The largest unscaled FP16 gradient of the step after `counters` on `micro_batches`, from passes at a scale far below
/// `scale`; `None` if it is not finite even at the lowest. Overwrites buffers and gradients, and nothing that outlives
/// a step.
pub(super) fn largest_gradient(
    engine: &mut TrainEngine,
    micro_batches: &[Batch],
    counters: Counters,
    scale: f32,
) -> Result<Option<f32>> {
    let (mut passes, _) = engine.passes()?;
    passes.counters = counters;
    let share: Vec<usize> = passes.grads.local_micro_batches(micro_batches.len()).collect();
    let lowest = passes.scaler.config().min_scale;
    let mut tried = scale;
    while tried > lowest {
        tried = (tried / STEP_DOWN).max(lowest);
        let factors = LossFactors::new(tried, passes.objective, micro_batches);
        let mut largest = GradAmaxHook { max_abs: 0.0, finite: true };
        for index in share.iter().copied() {
            let batch = &micro_batches[index];
            passes.micro_batch(index, batch, factors, &mut largest, &mut |_, _| Ok(()))?;
        }
        // The maximum over all processes, which then agree.
        let mut seen = [largest.max_abs, if largest.finite { 0.0 } else { 1.0 }];
        passes.group.max(&mut seen)?;
        if seen[1] == 0.0 {
            return Ok(Some(seen[0] / tried));
        }
    }
    Ok(None)
}

struct GradAmaxHook {
    max_abs: f32,
    finite: bool,
}

impl Hook for GradAmaxHook {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        // Tensors in wider types do not overflow at FP16's maximum.
        if point.kind.is_forward() || tensor.dtype() != DType::F16 || !self.finite {
            return Ok(());
        }
        let stats = summarize(tensor, FloatFormat::FP16, false)?.stats;
        self.max_abs = self.max_abs.max(stats.max_abs);
        self.finite = stats.is_finite();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::{ModuleId, ModuleOp, TensorKind};
    use candle_core::Device;

    #[test]
    fn the_largest_of_all_gradients_counts_and_each_must_be_finite() {
        let layer = ModuleId { block: None, op: ModuleOp::Embedding };
        let measured = |values: &[f32]| {
            let mut hook = GradAmaxHook { max_abs: 0.0, finite: true };
            for value in values {
                let tensor = Tensor::new(&[*value], &Device::Cpu).unwrap().to_dtype(DType::F16).unwrap();
                let point = |kind| HookPoint { layer, kind, first_token: None };
                hook.record(point(TensorKind::OutputGradient), &tensor).unwrap();
                hook.record(point(TensorKind::Output), &(tensor * 100.0).unwrap()).unwrap();
            }
            hook
        };
        let hook = measured(&[2.0, -8.0, 4.0]);
        assert_eq!((hook.max_abs, hook.finite), (8.0, true));
        assert!(!measured(&[2.0, f32::INFINITY, 4.0]).finite);
    }
}
