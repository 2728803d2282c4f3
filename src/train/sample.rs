//! Text samples during training.

use crate::data::Tokenizer;
use crate::engine::model::{Decoder, KvCache, Parameters};
use crate::inference::generate::{GenerationRequest, Sampling, decode_after, generate, prompt_ids};
use crate::train::config::Config;
use crate::{Error, Result};
use candle_core::Device;

/// Continues a prompt; owns the buffers for it.
#[derive(Debug)]
pub struct Sampler {
    tokenizer: Tokenizer,
    prompt: Vec<u32>,
    tokens: usize,
    temperature: f64,
    stop_token_ids: Vec<u32>,
    cache: KvCache,
}

impl Sampler {
    /// A sampler of up to `train.sample_tokens` tokens after `train.prompt`, limited by the model's context; `None` if
    /// that is 0. An empty prompt is the end-of-text token.
    pub fn new(
        model: &Decoder,
        config: &Config,
        tokenizer: &Tokenizer,
        stop_token_ids: Vec<u32>,
        device: &Device,
    ) -> Result<Option<Self>> {
        let train = &config.train;
        if train.sample_tokens == 0 {
            return Ok(None);
        }
        let prompt = prompt_ids(tokenizer, &train.prompt)?;
        let context = model.spec().max_position_embeddings;
        if prompt.len() >= context {
            let message = format!("has {} tokens, which fill the context of {context}", prompt.len());
            return Err(Error::config("train.prompt", message));
        }
        let tokens = train.sample_tokens.min(context - prompt.len());
        let cache = KvCache::new(model.spec(), config.dtype, prompt.len() + tokens, device)?;
        let tokenizer = tokenizer.clone();
        Ok(Some(Self { tokenizer, prompt, tokens, temperature: train.temperature, stop_token_ids, cache }))
    }

    /// Generates a text; equal weights and seeds give equal texts. Stops at a token that ends a text, and at logits
    /// that are not finite, which training itself reports.
    pub fn generate(&mut self, model: &Decoder, weights: &Parameters, seed: u64) -> Result<String> {
        let sampling = Sampling { temperature: self.temperature, seed, ..Sampling::default() };
        let Self { tokenizer, prompt, tokens, stop_token_ids, cache, .. } = self;
        let request = GenerationRequest { prompt, max_tokens: *tokens, stop_token_ids, sampling: &sampling };
        let mut ids = Vec::with_capacity(*tokens);
        let receive = |id| {
            ids.push(id);
            Ok(true)
        };
        // The weights have changed since the last text.
        cache.truncate(0);
        match generate(model, weights, cache, request, receive) {
            Ok(_) | Err(Error::Model { .. }) => decode_after(tokenizer, prompt, &ids),
            Err(error) => Err(error),
        }
    }
}
