//! The FP32 probe: how much of a batch's true gradient the run's gradient type loses.
//!
//! A zero in a low-precision gradient may be real (a token that does not occur) or flushed. Only the same batch's
//! backward pass in FP32, from the FP32 masters, distinguishes the two. Its forward pass gives the activations' maxima
//! without saturation.

use crate::Result;
use crate::data::Batch;
use crate::engine::collective::SingleProcess;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::summary::summarize;
use crate::engine::kernels::view::{read, to_host};
use crate::engine::model::{
    Checkpointing, ExpertChoices, Hook, HookPoint, ModelSpec, Parameters, TensorKind, Workspace, differing_choices,
};
use crate::engine::optim::{GradientStats, Gradients};
use crate::precision::{FloatFormat, PrecisionPolicy};
use crate::telemetry::{ActivationMax, FlushedTensor, Fp32Probe};
use crate::train::engine::{Passes, TrainEngine};
use crate::train::objective::LossFactors;
use crate::train::records::grad_stats;
use candle_core::{DType, Tensor};
use std::borrow::Cow;
use std::slice;
use std::sync::Arc;

/// Elements compared at a time.
const CHUNK_ELEMENTS: usize = 1024;

/// Compares the gradients of `batch` in the run's precision and loss scale with FP32 gradients without a loss scale.
/// `masters` are the whole masters, if this process holds only a shard.
/// Overwrites the engine's buffers and gradients, and nothing that outlives a step.
pub(super) fn probe(engine: &mut TrainEngine, batch: &Batch, masters: Option<&Parameters>) -> Result<Fp32Probe> {
    let mut whole;
    let (mut passes, state) = engine.passes()?;
    whole = passes.grads.unshared()?;
    if let Some(whole) = &mut whole {
        passes.grads = whole;
    }
    // Without FP8's rounding of weights.
    passes.weights = Cow::Borrowed(state.weights);
    let model = passes.model;
    let counters = passes.counters;
    let scale = passes.scaler.scale();
    let spec = model.spec();
    let device = state.weights.device();
    let mut workspace =
        Workspace::for_training(spec, PrecisionPolicy::FP32, batch.shape(), Checkpointing::None, &device)?;
    let mut exact = Gradients::new(state.weights, PrecisionPolicy::FP32, 1)?;
    let [factors, exact_factors] =
        [scale, 1.0].map(|scale| LossFactors::new(scale, passes.objective, slice::from_ref(batch)));
    let mut choices = [spec.experts, spec.experts].map(|experts| experts.map(ExpertChoices::new));
    passes.micro_batch(0, batch, factors, &mut choices[0], &mut |_, _| Ok(()))?;
    let masters = to_fp32(state.weights, masters.unwrap_or(state.masters), model.kernels())?;
    let mut maxima = AmaxHook { spec, maxima: Vec::new() };
    let weights = Cow::Borrowed(&masters);
    let hook = &mut ();
    let mut in_fp32 = Passes { weights, hook, workspace: &mut workspace, grads: &mut exact, ..passes };
    let hook = &mut (&mut maxima, &mut choices[1]);
    in_fp32.micro_batch(0, batch, exact_factors, hook, &mut |_, _| Ok(()))?;
    let grads = passes.grads.micro_batch_grads();
    let exact_grads = exact.micro_batch_grads();

    let mut stats = GradientStats::default();
    exact.compute_stats(true, &mut stats, model.kernels(), &SingleProcess)?;
    let layout = masters.layout();
    let tensors = layout
        .iter()
        .zip(exact_grads.tensors().iter().zip(grads.tensors()))
        .map(|(entry, (exact, stored))| count_flushed(&entry.name, exact, stored))
        .collect::<Result<_>>()?;
    let grads = grad_stats(&stats.total);
    let experts = match &choices {
        // Recomputed blocks repeat decisions at the end.
        [Some(found), Some(exact)] => differing_choices(&exact.sets, &found.sets),
        _ => None,
    };
    Ok(Fp32Probe { step: counters.step + 1, loss_scale: scale, grads, tensors, activations: maxima.maxima, experts })
}

/// The weights in FP32: the masters, over their base. Tensors that are FP32 already are shared.
pub(super) fn to_fp32(weights: &Parameters, masters: &Parameters, kernels: &dyn Kernels) -> Result<Parameters> {
    let widened = |parameters: &Parameters| -> Result<Parameters> {
        let is_wide = parameters.tensors().iter().all(|tensor| tensor.dtype() == DType::F32);
        if is_wide { Ok(parameters.clone()) } else { Ok(parameters.to_dtype(DType::F32, kernels)?) }
    };
    let base = weights.base().map(|base| widened(base).map(Arc::new));
    Ok(widened(masters)?.with_base(base.transpose()?))
}

/// The largest magnitude of each layer's output.
struct AmaxHook<'a> {
    spec: &'a ModelSpec,
    maxima: Vec<ActivationMax>,
}

impl Hook for AmaxHook<'_> {
    fn record(&mut self, point: HookPoint, tensor: &Tensor) -> candle_core::Result<()> {
        if point.kind == TensorKind::Output {
            let name = self.spec.layer_name(point.layer);
            let max_abs = summarize(tensor, FloatFormat::FP32, false)?.stats.max_abs;
            match self.maxima.last_mut() {
                // The head computes its logits a tile at a time.
                Some(last) if last.name == name => last.max_abs = last.max_abs.max(max_abs),
                _ => self.maxima.push(ActivationMax { name, max_abs }),
            }
        }
        Ok(())
    }
}

fn count_flushed(name: &str, exact: &Tensor, stored: &Tensor) -> Result<FlushedTensor> {
    let (exact, stored) = (to_host(exact)?, to_host(stored)?);
    let (exact, stored) = (read(&exact)?, read(&stored)?);
    let (exact, stored) = (exact.view(), stored.view());
    let mut out = FlushedTensor { name: name.to_owned(), count: exact.len() as u64, nonzero: 0, flushed: 0 };
    let (mut a, mut b) = ([0.0; CHUNK_ELEMENTS], [0.0; CHUNK_ELEMENTS]);
    for start in (0..exact.len()).step_by(CHUNK_ELEMENTS) {
        let width = CHUNK_ELEMENTS.min(exact.len() - start);
        exact.load(start, &mut a[..width]);
        stored.load(start, &mut b[..width]);
        for (exact, stored) in a[..width].iter().zip(&b[..width]) {
            out.nonzero += u64::from(*exact != 0.0);
            out.flushed += u64::from(*exact != 0.0 && *stored == 0.0);
        }
    }
    Ok(out)
}
