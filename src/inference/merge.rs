//! What merging adapters changes: the largest difference of logits.

use crate::engine::device::OpenDevice;
use crate::engine::kernels::view::{self, read};
use crate::engine::model::{Decoder, Mode, Parameters, Tokens, Workspace};
use crate::inference::trained::TrainedModel;
use crate::precision::{Dtype, PrecisionPolicy};
use crate::random::{Domain, Stream};
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// How far the merged model is from base and adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeDifference {
    /// The largest difference of two logits.
    pub largest: f32,
    /// The largest magnitude of a logit.
    pub logit: f32,
    /// Tokens looked at.
    pub tokens: usize,
}

/// Compares base and adapters in FP32 with the merged weights rounded to `dtype`, on random tokens, on `open`'s device.
///
/// # Errors
/// [`Error::Config`] where the model has no adapters.
pub fn merge_difference(trained: &TrainedModel, dtype: Dtype, open: &OpenDevice) -> Result<MergeDifference> {
    const TOKENS: usize = 64;
    if trained.adapted()?.is_none() {
        return Err(Error::config("MODEL", "it has no adapters to merge; give some with `--adapter FOLDER`"));
    }
    let tokens = TOKENS.min(trained.config.context);
    let stream = Stream::new(0, Domain::Bench);
    let ids: Vec<u32> =
        (0..tokens as u32).map(|at| stream.block(0, 0, at)[0] % trained.config.vocab_size as u32).collect();
    let (model, weights) = trained.load(PrecisionPolicy::FP32, open)?;
    let apart = logits(&model, &weights, &ids)?;
    drop(weights);
    let rounded = trained.weights(dtype)?;
    let merged = rounded.zeros_like(DType::F32)?;
    for (from, to) in rounded.tensors().iter().zip(merged.tensors()) {
        view::copy(from, to)?;
    }
    let model = Decoder::new(&trained.config, &merged, open.kernels.clone())?;
    let together = logits(&model, &merged, &ids)?;
    let (a, b) = (read(&apart)?, read(&together)?);
    let pairs = || a.typed::<f32>().into_iter().flatten().zip(b.typed::<f32>().into_iter().flatten());
    let largest = pairs().fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()));
    Ok(MergeDifference { largest, logit: pairs().fold(0.0, |most, (a, _)| most.max(a.abs())), tokens })
}

fn logits(model: &Decoder, weights: &Parameters, ids: &[u32]) -> Result<Tensor> {
    let shape = (1, ids.len());
    let mut workspace = Workspace::for_evaluation(model.spec(), PrecisionPolicy::FP32, shape, &weights.device())?;
    let tokens = Tokens { ids, seq_len: ids.len(), documents: None };
    model.forward(weights, tokens, Mode::Eval, &mut workspace, &mut ())?;
    Ok(view::host(&model.logits(weights, workspace.hidden())?)?)
}
