//! The FP32 probe: how much of a batch's true gradient the run's gradient type loses.
//!
//! A zero in a low-precision gradient may be real (a token that does not occur) or flushed. Only the same batch's
//! backward pass in FP32, from the FP32 masters, distinguishes the two. Its forward pass gives the activations' maxima
//! without saturation.

use crate::Result;
use crate::data::Batch;
use crate::engine::collective::Solo;
use crate::engine::kernels::Kernels;
use crate::engine::kernels::survey::survey;
use crate::engine::kernels::view::{host, read};
use crate::engine::model::{Hook, Keep, Mode, ModelSpec, Parameters, Part, Place, Workspace};
use crate::engine::optim::{Gradients, Survey};
use crate::precision::{FloatFormat, PrecisionPolicy};
use crate::telemetry::{ActivationMax, FlushedTensor, Fp32Probe};
use crate::train::TrainState;
use crate::train::passes::passes;
use crate::train::records::grad_stats;
use crate::train::step::Engine;
use candle_core::{DType, Tensor};
use std::sync::Arc;

/// Elements compared at a time.
const WIDTH: usize = 1024;

/// Compares the gradients of `batch` in the run's precision with its loss scale with those in FP32 without one.
/// `masters` are all of them, where this process holds a part.
/// Overwrites the engine's buffers and gradients, and nothing that outlives a step.
pub(super) fn probe(engine: &mut Engine, batch: &Batch, masters: Option<&Parameters>) -> Result<Fp32Probe> {
    let spec = engine.model.spec();
    let device = engine.state.weights.device();
    let shape = (batch.batch_size, batch.seq_len);
    let mut workspace = Workspace::for_training(spec, PrecisionPolicy::FP32, shape, Keep::All, &device)?;
    let exact = Gradients::new(&engine.state.weights, PrecisionPolicy::FP32, 1)?;
    let scale = engine.state.scaler.scale();
    let step = engine.state.counters.step;
    let mode = Mode::Train { seed: engine.seed, draw: engine.state.counters.draw(0) };
    let seed = |scale: f32| scale / batch.target_count.max(1) as f32;
    let Engine { model, state, grads, workspace: stored, .. } = engine;
    let grads = grads.micro_batch();
    passes(model, &state.weights, &mut state.fp8, batch, mode, seed(scale), stored, grads, &mut ())?;
    let masters = wide(state, masters.unwrap_or(state.masters.parameters()), model.kernels())?;
    let mut maxima = Maxima { spec: model.spec(), maxima: Vec::new() };
    passes(model, &masters, &mut None, batch, mode, seed(1.0), &mut workspace, exact.micro_batch(), &mut maxima)?;

    let mut survey = Survey::default();
    exact.survey(true, &mut survey, model.kernels(), &Solo)?;
    let layout = masters.layout();
    let tensors = layout
        .iter()
        .zip(exact.micro_batch().tensors().iter().zip(grads.tensors()))
        .map(|(entry, (exact, stored))| flushed(&entry.name, exact, stored))
        .collect::<Result<_>>()?;
    let grads = grad_stats(&survey.total);
    Ok(Fp32Probe { step: step + 1, loss_scale: scale, grads, tensors, activations: maxima.maxima })
}

/// The weights in FP32: the masters, over their base. What is in FP32 already is shared.
fn wide(state: &TrainState, masters: &Parameters, kernels: &dyn Kernels) -> Result<Parameters> {
    let is_wide = |parameters: &Parameters| parameters.tensors().iter().all(|tensor| tensor.dtype() == DType::F32);
    let widened = |parameters: &Parameters| -> Result<Parameters> {
        if is_wide(parameters) {
            return Ok(parameters.clone());
        }
        let wide = parameters.zeros_like(DType::F32)?;
        let mut pairs = parameters.tensors().iter().zip(wide.tensors());
        pairs.try_for_each(|(from, to)| kernels.copy(from, to))?;
        Ok(wide)
    };
    let wide_base = |base: &Arc<Parameters>| -> Result<Arc<Parameters>> {
        Ok(if is_wide(base) { base.clone() } else { Arc::new(base.converted(DType::F32, kernels)?) })
    };
    Ok(widened(masters)?.over(state.weights.base().map(wide_base).transpose()?))
}

/// The largest magnitude of each layer's output.
struct Maxima<'a> {
    spec: &'a ModelSpec,
    maxima: Vec<ActivationMax>,
}

impl Hook for Maxima<'_> {
    fn record(&mut self, place: Place, tensor: &Tensor) -> candle_core::Result<()> {
        if place.part == Part::Output {
            let (name, max_abs) =
                (self.spec.layer_name(place.layer), survey(tensor, FloatFormat::FP32, false)?.stats.max_abs);
            match self.maxima.last_mut() {
                // The head computes its logits a tile at a time.
                Some(last) if last.name == name => last.max_abs = last.max_abs.max(max_abs),
                _ => self.maxima.push(ActivationMax { name, max_abs }),
            }
        }
        Ok(())
    }
}

fn flushed(name: &str, exact: &Tensor, stored: &Tensor) -> Result<FlushedTensor> {
    let (exact, stored) = (host(exact)?, host(stored)?);
    let (exact, stored) = (read(&exact)?, read(&stored)?);
    let (exact, stored) = (exact.view(), stored.view());
    let mut out = FlushedTensor { name: name.to_owned(), count: exact.len() as u64, nonzero: 0, flushed: 0 };
    let (mut a, mut b) = ([0.0; WIDTH], [0.0; WIDTH]);
    for start in (0..exact.len()).step_by(WIDTH) {
        let width = WIDTH.min(exact.len() - start);
        exact.load(start, &mut a[..width]);
        stored.load(start, &mut b[..width]);
        for (exact, stored) in a[..width].iter().zip(&b[..width]) {
            out.nonzero += u64::from(*exact != 0.0);
            out.flushed += u64::from(*exact != 0.0 && *stored == 0.0);
        }
    }
    Ok(out)
}
