//! Generates many texts at once: all of them take part in each pass, and the next one begins as soon as one ends.

use super::{Continuation, GenerationRequest, StopReason};
use crate::Result;
use crate::engine::kernels::view::to_host;
use crate::engine::model::KvCache;
use crate::inference::ModelView;
use candle_core::{DType, Tensor};
use rayon::prelude::*;

/// The default number of texts that are generated at a time.
pub const BATCH_SIZE: usize = 32;
/// A pass begins no further prompt with more than this number of tokens, which bounds its buffers.
const PASS_TOKENS: usize = 1024;

/// A generated text.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The new tokens, including the one that ended the text.
    pub ids: Vec<u32>,
    /// The log-probability of each of `ids` in nats, from the model's logits as they are: `sampling` does not change
    /// it.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub reason: StopReason,
}

impl Completion {
    /// The new tokens without the one that ended the text.
    pub fn text_ids(&self) -> &[u32] {
        let ended = usize::from(self.reason == StopReason::EndOfText);
        &self.ids[..self.ids.len() - ended]
    }
}

/// A text that is being generated.
struct RunningText<'a> {
    /// The number of its request.
    number: usize,
    text: Continuation<'a>,
    log_probs: Vec<f32>,
}

/// Generates a text for each of `requests`, up to `batch_size` at a time, and calls `on_end` with the request's number
/// and its text, in the order in which they end. With the CPU's own kernels a text does not depend on the other texts
/// or on `batch_size`: log-probabilities have the bits that the training pass computes. Until the last text ends, the
/// weights are also in memory as panels
/// ([`Parameters::with_packed`](crate::engine::model::Parameters::with_packed)). Fails with
/// [`Error::Model`](crate::Error::Model) if the model's logits are not finite; [`Error::Data`](crate::Error::Data) for
/// a prompt without tokens; errors of `on_end`.
pub fn generate_batch(
    model: ModelView<'_>,
    requests: &[GenerationRequest<'_>],
    batch_size: usize,
    mut on_end: impl FnMut(usize, Completion) -> Result<()>,
) -> Result<()> {
    model.weights.with_packed(|| {
        let ModelView { decoder, weights, policy } = model;
        let context = decoder.spec().max_position_embeddings;
        let device = weights.device();
        let mut cache = KvCache::empty(policy, &device);
        let mut waiting = requests.iter().enumerate();
        let mut running: Vec<RunningText<'_>> = Vec::new();
        loop {
            let mut rows: usize = running.len();
            while running.len() < batch_size.max(1) && rows < PASS_TOKENS {
                let Some((number, request)) = waiting.next() else { break };
                let capacity = context.min(request.prompt.len().saturating_add(request.max_tokens));
                let text = Continuation::new(*request, capacity)?;
                if let Some(reason) = text.stopped() {
                    on_end(number, Completion { ids: Vec::new(), log_probs: Vec::new(), reason })?;
                    continue;
                }
                cache.add(decoder.spec(), capacity)?;
                running.push(RunningText { number, text, log_probs: Vec::new() });
                rows += request.prompt.len();
            }
            if running.is_empty() {
                return Ok(());
            }
            let texts = running.iter().map(|one| &one.text).enumerate();
            let ids = texts.map(|(row, text)| &text.seen[cache.reusable(decoder.spec(), row, text.seen.len())..]);
            let ids: Vec<&[u32]> = ids.collect();
            let hidden = decoder.decode_batch(weights, &ids, &mut cache)?;
            let mut end = 0;
            let last = ids.iter().map(|ids| {
                end += ids.len();
                end as u32 - 1
            });
            let last = hidden.index_select(&Tensor::new(last.collect::<Vec<u32>>(), &device)?, 0)?;
            let stored = decoder.logits(weights, &last)?;
            let logits = to_host(&stored.to_dtype(DType::F32)?)?;
            let chosen = running.par_iter_mut().enumerate().map(|(row, one)| one.text.choose(logits.get(row)?));
            let chosen = chosen.collect::<Result<Vec<u32>>>()?;
            for (one, log_prob) in running.iter_mut().zip(decoder.log_probs(&stored, &chosen)?) {
                one.log_probs.push(log_prob);
            }
            for row in (0..running.len()).rev() {
                if let Some(reason) = running[row].text.stopped() {
                    cache.remove(row);
                    let RunningText { number, text, log_probs } = running.remove(row);
                    on_end(number, Completion { ids: text.new_ids().to_vec(), log_probs, reason })?;
                }
            }
        }
    })
}
