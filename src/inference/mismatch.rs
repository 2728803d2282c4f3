//! Compares the probabilities of tokens in training and in generation. Reinforcement learning samples with one, trains
//! with the other, and weights each token by the ratio of the two: rounding alone moves it away from 1 (arXiv
//! 2510.26788).
//!
//! The same tokens go through the training forward pass, all positions at once, and through generation, one at a time
//! over the KV cache. Both take the same weights, so that what differs is rounding, in an order that differs.

use crate::engine::kernels::view::to_host;
use crate::engine::model::{ExpertChoices, ForwardMode, InputIds, KvCache, Workspace};
use crate::inference::ModelView;
use crate::inference::generate::{GenerationRequest, Sampling, generate};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use serde::Serialize;

/// Sequences of equal length that begin with the same prompt.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Tokens of the prompt: at least one. They are given, not predicted.
    pub prompt: usize,
    /// Each with its prompt.
    pub ids: Vec<Vec<u32>>,
}

/// The log-probabilities of each predicted token in both passes, sequence by sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogProbs {
    /// By the training forward pass, in nats.
    pub training: Vec<f64>,
    /// By generation.
    pub generation: Vec<f64>,
    /// The divergence of training's distribution from generation's at that place, KL(generation ‖ training), in nats.
    pub kl: Vec<f64>,
}

/// The least, the mean and the most of some ratios.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratios {
    /// The least.
    pub min: f64,
    /// The mean.
    pub mean: f64,
    /// The most.
    pub max: f64,
}

/// The mismatch between training and generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    /// Tokens predicted.
    pub tokens: usize,
    /// Mean of |log p(training) − log p(generation)|.
    pub mean: f64,
    /// The largest of them.
    pub largest: f64,
    /// Mean of KL(generation ‖ training) over all places.
    pub kl: f64,
    /// p(training) / p(generation) of each token: what an RL step weighs it by.
    pub token_ratio: Ratios,
    /// The product of these over a sequence: what a step that corrects whole sequences weighs one by.
    pub sequence_ratio: Ratios,
    /// The share of routers' decisions that differ from FP32's: of tokens and blocks with another set of experts.
    /// `None` without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<f64>,
}

impl Sequences {
    /// Sequences of `tokens` predicted tokens, sampled by the model after `prompt`.
    pub fn sample(
        ModelView { decoder, weights, policy }: ModelView<'_>,
        prompt: &[u32],
        (count, tokens): (usize, usize),
        seed: u64,
        mut progress: impl FnMut(usize),
    ) -> Result<Self> {
        let mut cache = KvCache::new(decoder.spec(), policy, prompt.len() + tokens, &weights.device())?;
        let ids = (0..count as u64).map(|sequence| {
            progress(sequence as usize);
            let mut ids = prompt.to_vec();
            // No token ends a sequence, so that all have the same length.
            let sampling = Sampling { seed: seed.wrapping_add(sequence), ..Sampling::default() };
            let request = GenerationRequest { prompt, max_tokens: tokens, stop_token_ids: &[], sampling: &sampling };
            cache.truncate(0);
            generate(decoder, weights, &mut cache, request, |id| {
                ids.push(id);
                Ok(true)
            })?;
            Ok(ids)
        });
        Ok(Self { prompt: prompt.len(), ids: ids.collect::<Result<_>>()? })
    }
}

/// The log-probabilities of each predicted token of `sequences`, in training and in generation. Fails with
/// [`Error::Model`] where logits are not finite.
pub fn log_probs(model: ModelView<'_>, sequences: &Sequences, mut progress: impl FnMut(usize)) -> Result<LogProbs> {
    let ModelView { decoder, weights, policy } = model;
    let device = weights.device();
    let batch = sequences.ids.len();
    let length = sequences.ids.first().map_or(0, Vec::len);
    if sequences.prompt == 0 || length <= sequences.prompt {
        return Ok(LogProbs::default());
    }
    let seq_len = length - 1;
    let mut workspace = Workspace::for_evaluation(decoder.spec(), policy, (batch, seq_len), &device)?;
    let ids: Vec<u32> = sequences.ids.iter().flat_map(|ids| ids[..seq_len].iter().copied()).collect();
    decoder.forward(weights, InputIds::new(&ids, seq_len), ForwardMode::Eval, &mut workspace, &mut ())?;
    let targets: Vec<u32> = sequences.ids.iter().flat_map(|ids| ids[1..].iter().copied()).collect();
    decoder.loss(weights, &targets, &workspace)?;
    let losses = to_host(workspace.losses())?.to_vec1::<f32>()?;
    let mut cache = KvCache::new(decoder.spec(), policy, seq_len, &device)?;
    let mut found = LogProbs::default();
    for (row, ids) in sequences.ids.iter().enumerate() {
        progress(row);
        // All rows in one product, as the training head computes them.
        let hidden = workspace.hidden().narrow(0, row * seq_len, seq_len)?;
        let training = rows(&decoder.logits(weights, &hidden)?)?;
        cache.truncate(0);
        for place in sequences.prompt..length {
            let cached = cache.reusable(decoder.spec(), 0, place);
            let hidden = decoder.decode(weights, &ids[cached..place], &mut cache)?;
            let last = hidden.narrow(0, place - cached - 1, 1)?;
            let logits = decoder.logits(weights, &last)?;
            found.training.push(-f64::from(losses[row * seq_len + place - 1]));
            found.generation.extend(decoder.log_probs(&logits, &ids[place..=place])?.into_iter().map(f64::from));
            let [training, generation] = [log_softmax(&training[place - 1])?, log_softmax(&rows(&logits)?[0])?];
            let terms = generation.iter().zip(&training).map(|(p, q)| p.exp() * (p - q));
            found.kl.push(terms.sum());
        }
    }
    Ok(found)
}

/// The sets of experts that the training forward pass chooses for each token and block of `sequences`; none without
/// experts.
pub fn chosen_experts(model: ModelView<'_>, sequences: &Sequences) -> Result<Vec<Vec<u32>>> {
    let ModelView { decoder, weights, policy } = model;
    let (Some(experts), Some(first)) = (decoder.spec().experts, sequences.ids.first()) else { return Ok(Vec::new()) };
    let shape = (sequences.ids.len(), first.len());
    let mut workspace = Workspace::for_evaluation(decoder.spec(), policy, shape, &weights.device())?;
    let mut hook = ExpertChoices::new(experts);
    let ids = sequences.ids.concat();
    decoder.forward(weights, InputIds::new(&ids, shape.1), ForwardMode::Eval, &mut workspace, &mut hook)?;
    Ok(hook.sets)
}

fn rows(logits: &Tensor) -> Result<Vec<Vec<f32>>> {
    Ok(to_host(&logits.to_dtype(DType::F32)?)?.to_vec2()?)
}

/// Log-probabilities in FP64, so that they add no rounding error.
fn log_softmax(logits: &[f32]) -> Result<Vec<f64>> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - f64::from(largest)).exp()).sum();
    if !(sum.is_finite() && largest.is_finite()) {
        return Err(Error::model("the model", "its logits are not finite in this dtype; remove it from `--dtype`"));
    }
    let log_sum = f64::from(largest) + sum.ln();
    Ok(logits.iter().map(|x| f64::from(*x) - log_sum).collect())
}

impl Mismatch {
    /// The statistics of `found`, with `tokens_each` predicted tokens per sequence.
    pub fn new(found: &LogProbs, tokens_each: usize) -> Self {
        let differences: Vec<f64> = found.training.iter().zip(&found.generation).map(|(t, g)| t - g).collect();
        let tokens = differences.len();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / tokens.max(1) as f64;
        Self {
            tokens,
            mean: mean(&mut differences.iter().map(|difference| difference.abs())),
            largest: differences.iter().map(|difference| difference.abs()).fold(0.0, f64::max),
            kl: mean(&mut found.kl.iter().copied()),
            token_ratio: Ratios::of(differences.iter().map(|difference| difference.exp())),
            sequence_ratio: Ratios::of(
                differences.chunks(tokens_each.max(1)).map(|each| each.iter().sum::<f64>().exp()),
            ),
            experts: None,
        }
    }
}

impl Ratios {
    fn of(ratios: impl Iterator<Item = f64>) -> Self {
        let ratios: Vec<f64> = ratios.collect();
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        let min = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let max = ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self { min, mean, max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences of two tokens. Training gives their tokens half, a quarter, a half and all of generation's
    /// probability.
    #[test]
    fn a_case_that_is_worked_out_by_hand() {
        let logs = |probabilities: [f64; 4]| probabilities.map(f64::ln).to_vec();
        let found = LogProbs {
            training: logs([0.25, 0.125, 0.1, 0.4]),
            generation: logs([0.5, 0.5, 0.2, 0.4]),
            kl: vec![0.1, 0.3, 0.0, 0.0],
        };
        let Mismatch { tokens, mean, largest, kl, token_ratio, sequence_ratio, .. } = Mismatch::new(&found, 2);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        assert_eq!(tokens, 4);
        close(mean, (1.0 + 2.0 + 1.0) * 2f64.ln() / 4.0);
        close(largest, 2.0 * 2f64.ln());
        close(kl, 0.1);
        [token_ratio.min, token_ratio.mean, token_ratio.max]
            .into_iter()
            .zip([0.25, 0.5625, 1.0])
            .for_each(|(a, b)| close(a, b));
        [sequence_ratio.min, sequence_ratio.mean, sequence_ratio.max]
            .into_iter()
            .zip([0.125, 0.3125, 0.5])
            .for_each(|(a, b)| close(a, b));
    }

    #[test]
    fn probabilities_add_up_whatever_the_logits() {
        for logits in [vec![0.0f32, 1.0, -2.0], vec![65504.0, 65472.0], vec![-1e30, 0.0, f32::NEG_INFINITY]] {
            let sum: f64 = log_softmax(&logits).unwrap().into_iter().map(f64::exp).sum();
            assert!((sum - 1.0).abs() < 1e-12, "{logits:?} {sum}");
        }
        assert!((log_softmax(&[0.0, 3f32.ln()]).unwrap()[1] - 0.75f64.ln()).abs() < 1e-7);
        assert!(log_softmax(&[f32::NAN, 0.0]).is_err() && log_softmax(&[f32::INFINITY]).is_err());
    }
}
