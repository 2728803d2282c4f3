//! Generates text: a forward pass with a KV cache, and sampling of the next token.

mod batch;
mod stream;

pub use batch::{BATCH_SIZE, Completion, generate_batch};
pub use stream::{TextStream, decode_after};

use super::not_finite;
use crate::data::Tokenizer;
use crate::engine::kernels::view::to_host;
use crate::engine::model::{Decoder, KvCache, Parameters};
use crate::random::{Domain, Stream};
use crate::settings::in_digits;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::generation::Sampling as CandleSampling;
use candle_transformers::utils::apply_repeat_penalty;

/// How the next token is sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Samples from this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Samples from the smallest set of likeliest tokens with this total probability.
    pub top_p: Option<f64>,
    /// Makes tokens that occurred less likely, from 1 (no change) upwards (Keskar et al., "CTRL", 2019).
    pub repetition_penalty: f32,
    /// The seed; equal seeds give equal choices.
    pub seed: u64,
}

/// Dividing logits by a lower temperature may overflow.
const MIN_TEMPERATURE: f64 = 1e-3;

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// This sampling for completion `index` of a prompt in a training step. The seed is a random number of `self.seed`,
    /// the step, the prompt's index and the completion's, so a completion does not depend on the others.
    #[must_use]
    pub fn of_completion(&self, step: u64, prompt: u32, index: u32) -> Self {
        let [low, high, ..] = Stream::new(self.seed, Domain::Sample).block(prompt, step, index);
        Self { seed: u64::from(high) << 32 | u64::from(low), ..self.clone() }
    }

    /// Rejects invalid values by the name of their flag.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, flag: &str, message: String| if ok { Ok(()) } else { Err(Error::config(flag, message)) };
        let (temperature, penalty) = (self.temperature, self.repetition_penalty);
        let fine = (0.0..=100.0).contains(&temperature);
        let shown = in_digits(temperature);
        check(fine, "--temperature", format!("`{shown}` is not between 0 (the likeliest token) and 100"))?;
        check(self.top_k != Some(0), "--top-k", "`0` leaves no token to choose; omit the flag for all".into())?;
        if let Some(p) = self.top_p {
            check(p > 0.0 && p <= 1.0, "--top-p", format!("`{p}` is not a probability above 0 and up to 1"))?;
        }
        let fine = (0.01..=100.0).contains(&penalty);
        check(fine, "--repetition-penalty", format!("`{penalty}` is not between 0.01 and 100; 1 changes nothing"))
    }

    /// Prepares the logits for sampling. With both top-k and top-p, keeps only the k largest before probabilities are
    /// summed, as in transformers; at a temperature so low that dividing would overflow, shifts the largest to 0.
    fn prepared(&self, logits: &Tensor) -> Result<Tensor> {
        let both = self.top_p.and(self.top_k).filter(|_| self.temperature > 0.0);
        let cold = self.temperature > 0.0 && self.temperature < MIN_TEMPERATURE;
        if both.is_none() && !cold {
            return Ok(logits.clone());
        }
        let mut values = logits.to_vec1::<f32>()?;
        if let Some(k) = both.filter(|k| *k < values.len()) {
            let mut sorted = values.clone();
            let (_, least, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            let least = *least;
            values.iter_mut().filter(|value| **value < least).for_each(|value| *value = f32::NEG_INFINITY);
        }
        if cold {
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for value in &mut values {
                *value -= largest;
            }
        }
        Ok(Tensor::new(values, logits.device())?)
    }

    fn choice(&self) -> CandleSampling {
        // At lower temperatures the reciprocal overflows FP32, and only the largest logits have any probability.
        let temperature = if self.temperature == 0.0 { 0.0 } else { self.temperature.max(1e-30) };
        match (self.top_k, self.top_p) {
            _ if temperature == 0.0 => CandleSampling::ArgMax,
            (None, None) => CandleSampling::All { temperature },
            (Some(k), None) => CandleSampling::TopK { k, temperature },
            // With a top-k, `prepared` has already removed the other logits.
            (_, Some(p)) => CandleSampling::TopP { p, temperature },
        }
    }
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model generated the end-of-text token.
    EndOfText,
    /// The requested number of tokens was generated.
    Length,
    /// The model's context is full.
    ContextFull,
    /// The callback stopped it.
    Callback,
}

/// One text to generate.
#[derive(Clone, Copy, Debug)]
pub struct GenerationRequest<'a> {
    /// The start of the text; at least one token.
    pub prompt: &'a [u32],
    /// Maximum number of tokens to generate.
    pub max_tokens: usize,
    /// The tokens that end a text.
    pub stop_token_ids: &'a [u32],
    /// How tokens are sampled.
    pub sampling: &'a Sampling,
}

/// The ids of a prompt; without any, the end-of-text token, which precedes a text.
pub fn prompt_ids(tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>> {
    let ids = tokenizer.encode_document(prompt)?;
    Ok(if ids.is_empty() { vec![tokenizer.eos_id().unwrap_or(0)] } else { ids })
}

/// Generates text after the tokens of the prompt that `cache` has ([`KvCache::prepare`]). Calls `on_token` with each
/// token except the one that ends the text; it returns whether to continue. Equal weights and requests give equal
/// tokens. Fails with [`Error::Model`] if the model's logits are not finite; [`Error::Data`] for a prompt without
/// tokens; errors of `on_token`.
pub fn generate(
    model: &Decoder,
    weights: &Parameters,
    cache: &mut KvCache,
    request: GenerationRequest<'_>,
    mut on_token: impl FnMut(u32) -> Result<bool>,
) -> Result<StopReason> {
    let mut text = Continuation::new(request, cache.capacity())?;
    loop {
        if let Some(reason) = text.stopped() {
            return Ok(reason);
        }
        let undecoded = &text.seen[cache.reusable(model.spec(), 0, text.seen.len())..];
        let last = model.decode(weights, undecoded, cache)?.narrow(0, undecoded.len() - 1, 1)?;
        // On the CPU, because candle's sampling has no GPU kernels.
        let logits = to_host(&model.logits(weights, &last)?.squeeze(0)?.to_dtype(DType::F32)?)?;
        let next = text.choose(logits)?;
        if !text.ended && !on_token(next)? {
            return Ok(StopReason::Callback);
        }
    }
}

/// A text that is being generated.
struct Continuation<'a> {
    request: GenerationRequest<'a>,
    /// The maximum number of tokens of the prompt and the text, except the last one, which is not decoded.
    capacity: usize,
    processor: LogitsProcessor,
    /// The prompt and the new tokens.
    seen: Vec<u32>,
    /// Whether the last token ends the text.
    ended: bool,
}

impl<'a> Continuation<'a> {
    fn new(request: GenerationRequest<'a>, capacity: usize) -> Result<Self> {
        if request.prompt.is_empty() {
            return Err(Error::data("the prompt", "has no tokens; the chat template writes nothing for its messages"));
        }
        let processor = LogitsProcessor::from_sampling(request.sampling.seed, request.sampling.choice());
        Ok(Self { request, capacity, processor, seen: request.prompt.to_vec(), ended: false })
    }

    fn new_ids(&self) -> &[u32] {
        &self.seen[self.request.prompt.len()..]
    }

    /// Why no further token follows, if none does.
    fn stopped(&self) -> Option<StopReason> {
        if self.ended {
            Some(StopReason::EndOfText)
        } else if self.new_ids().len() >= self.request.max_tokens {
            Some(StopReason::Length)
        } else {
            (self.seen.len() > self.capacity).then_some(StopReason::ContextFull)
        }
    }

    /// Appends the next token, sampled from FP32 `logits`, and returns it.
    fn choose(&mut self, logits: Tensor) -> Result<u32> {
        let sampling = self.request.sampling;
        let logits = with_repetition_penalty(logits, sampling.repetition_penalty, &self.seen)?;
        let next = self.processor.sample(&sampling.prepared(&logits)?)?;
        self.ended = self.request.stop_token_ids.contains(&next);
        self.seen.push(next);
        Ok(next)
    }
}

fn with_repetition_penalty(logits: Tensor, penalty: f32, seen: &[u32]) -> Result<Tensor> {
    // Otherwise a NaN would cause an error about the weights of a distribution, or be chosen as the largest.
    if !logits.sum_all()?.to_scalar::<f32>()?.is_finite() {
        return Err(not_finite());
    }
    Ok(if penalty == 1.0 { logits } else { apply_repeat_penalty(&logits, penalty, seen)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// transformers 5.0: `TopKLogitsWarper(3)`, then `TopPLogitsWarper(0.5)`, keep the first two of these; half of the
    /// whole distribution would be the first three.
    #[test]
    fn top_p_applies_to_what_top_k_keeps() {
        let probabilities = [0.25f32, 0.2, 0.15, 0.14, 0.13, 0.13];
        let logits = Tensor::new(&probabilities.map(f32::ln), &candle_core::Device::Cpu).unwrap();
        let chosen = |sampling: Sampling| {
            let choose = |seed| {
                let mut processor = LogitsProcessor::from_sampling(seed, sampling.choice());
                processor.sample(&sampling.prepared(&logits).unwrap()).unwrap()
            };
            (0..300).map(choose).collect::<std::collections::BTreeSet<u32>>()
        };
        let base = Sampling { top_p: Some(0.5), ..Sampling::default() };
        assert_eq!(chosen(base).into_iter().collect::<Vec<_>>(), [0, 1, 2]);
        // The fourth would bring the third back.
        for top_p in [0.5, 0.7] {
            let both = Sampling { top_k: Some(3), top_p: Some(top_p), ..Sampling::default() };
            assert_eq!(chosen(both).into_iter().collect::<Vec<_>>(), [0, 1], "{top_p}");
        }
    }

    #[test]
    fn the_coldest_temperature_takes_the_likeliest_token() {
        // FP32 has the last ones, but not divided by these temperatures.
        let [small, large] = [1.0, 1e8].map(|scale| [80.0f32, -3.0, 90.0, 89.9].map(|logit| logit * scale));
        let logits = [small, large].map(|logits| Tensor::new(&logits, &candle_core::Device::Cpu).unwrap());
        for temperature in [1e-5, 1e-38, 1e-300, f64::MIN_POSITIVE] {
            for (top_k, top_p) in [(None, None), (Some(2), None), (None, Some(0.9)), (Some(3), Some(0.9))] {
                let sampling = Sampling { temperature, top_k, top_p, ..Sampling::default() };
                for logits in &logits {
                    let mut processor = LogitsProcessor::from_sampling(0, sampling.choice());
                    assert_eq!(processor.sample(&sampling.prepared(logits).unwrap()).unwrap(), 2, "{sampling:?}");
                }
            }
        }
    }

    #[test]
    fn a_penalty_pushes_seen_logits_down_on_both_sides_of_zero() {
        let logits = Tensor::new(&[2.0f32, -2.0, 3.0], &candle_core::Device::Cpu).unwrap();
        let changed = with_repetition_penalty(logits.clone(), 2.0, &[0, 1, 1]).unwrap();
        assert_eq!(changed.to_vec1::<f32>().unwrap(), [1.0, -4.0, 3.0]);
        let message = with_repetition_penalty((logits * f64::NAN).unwrap(), 2.0, &[0]).unwrap_err().to_string();
        assert!(message.contains("not finite"), "{message}");
    }
}
