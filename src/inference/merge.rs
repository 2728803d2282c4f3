//! The largest difference of logits between a merged model as written and its base with adapters.

use crate::engine::device::DeviceContext;
use crate::engine::kernels::Fused;
use crate::engine::kernels::view::{self, read};
use crate::engine::model::{Decoder, ForwardMode, InputIds, Parameters, Workspace};
use crate::inference::export::{ExportFormat, WeightDtype};
use crate::inference::trained::TrainedModel;
use crate::precision::PrecisionPolicy;
use crate::random::{Domain, Stream};
use crate::{Error, Result};
use candle_core::DType;
use std::path::Path;

/// How far the merged model is from base and adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeError {
    /// The largest difference of two logits.
    pub max_abs_diff: f32,
    /// The largest magnitude of a logit.
    pub max_abs_logit: f32,
    /// Tokens looked at.
    pub tokens: usize,
}

/// Compares base and adapters with the merged model in `out`, whose weights have `encoding`, on random tokens and on
/// `open`'s device, in FP32. An ONNX graph is compared by the weights that were written to it. Fails with
/// [`Error::Model`] if `out` cannot be read, or a logit is not finite.
pub fn merge_error(
    trained: &TrainedModel,
    out: &Path,
    format: ExportFormat,
    encoding: WeightDtype,
    open: &DeviceContext,
) -> Result<MergeError> {
    const TOKENS: usize = 64;
    let tokens = TOKENS.min(trained.spec.max_position_embeddings);
    let stream = Stream::new(0, Domain::Bench);
    let ids: Vec<u32> =
        (0..tokens as u32).map(|at| stream.block(0, 0, at)[0] % trained.spec.vocab_size as u32).collect();
    let logits_of = |what: &str, (model, weights): (Decoder, Parameters)| {
        let device = weights.device();
        let mut workspace = Workspace::for_evaluation(model.spec(), PrecisionPolicy::FP32, (1, tokens), &device)?;
        model.forward(&weights, InputIds::new(&ids, tokens), ForwardMode::Eval, &mut workspace, &mut ())?;
        let logits = view::to_host(&model.logits(&weights, workspace.hidden())?)?;
        let logits = read(&logits)?.typed::<f32>()?.to_vec();
        if logits.iter().all(|logit| logit.is_finite()) {
            Ok(logits)
        } else {
            Err(Error::model(what, "its logits are not finite, so they cannot be compared"))
        }
    };
    let unmerged = logits_of("the model with its adapters", trained.load(PrecisionPolicy::FP32, open)?)?;
    let merged = match (format, encoding) {
        (ExportFormat::Onnx(_), WeightDtype::Plain(dtype)) => {
            let merged = trained.weights(dtype)?.to_dtype(DType::F32, &Fused)?;
            (Decoder::new(&trained.spec, &merged, open.kernels.clone())?, merged)
        }
        _ => TrainedModel::open(out, None)?.load(PrecisionPolicy::FP32, open)?,
    };
    let merged_logits = logits_of("the merged model", merged)?;
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, |most: f32, value| most.max(value.abs()));
    Ok(MergeError {
        max_abs_diff: largest(&mut unmerged.iter().zip(&merged_logits).map(|(a, b)| a - b)),
        max_abs_logit: largest(&mut unmerged.iter().copied()),
        tokens,
    })
}
