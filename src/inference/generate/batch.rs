//! Generates many texts at once: all of them take part in each pass, and the next one begins as soon as one ends.

use super::{Continuation, GenerationRequest, StopReason};
use crate::Result;
use crate::engine::kernels::view::to_host;
use crate::engine::model::{Decoder, KvCache, Parameters};
use crate::precision::PrecisionPolicy;
use candle_core::{DType, Tensor};
use rayon::prelude::*;

/// The default number of texts that are generated at a time.
pub const BATCH_SIZE: usize = 32;
/// A pass begins no further prompt with more than this number of tokens, which bounds its buffers.
const PASS_TOKENS: usize = 1024;

/// Generates a text for each of `requests`, up to `batch_size` at a time, and calls `on_end` with the request's number,
/// its new tokens and why it ended, in the order in which they end. A text does not depend on the other texts or on
/// `batch_size`, but it may differ from [`generate`](super::generate)'s by rounding, because the product of a single
/// row has a different order of summation.
///
/// # Errors
/// [`Error::Model`](crate::Error::Model) if the model's logits are not finite; errors of `on_end`.
pub fn generate_batch(
    model: &Decoder,
    weights: &Parameters,
    policy: PrecisionPolicy,
    requests: &[GenerationRequest<'_>],
    batch_size: usize,
    mut on_end: impl FnMut(usize, &[u32], StopReason) -> Result<()>,
) -> Result<()> {
    let context = model.spec().max_position_embeddings;
    let device = weights.device();
    let mut cache = KvCache::empty(policy, &device);
    let mut waiting = requests.iter().enumerate();
    let mut running: Vec<(usize, usize, Continuation<'_>)> = Vec::new();
    loop {
        let mut rows: usize = running.len();
        while running.len() < batch_size.max(1) && rows < PASS_TOKENS {
            let Some((number, request)) = waiting.next() else { break };
            if request.max_tokens == 0 || request.prompt.len() > context {
                let length = request.max_tokens == 0;
                on_end(number, &[], if length { StopReason::Length } else { StopReason::ContextFull })?;
                continue;
            }
            let capacity = context.min(request.prompt.len().saturating_add(request.max_tokens));
            cache.add(model.spec(), capacity)?;
            running.push((number, capacity, Continuation::new(*request)));
            rows += request.prompt.len();
        }
        if running.is_empty() {
            return Ok(());
        }
        // The product of a single row has a different order of summation. A second one keeps texts independent of
        // the batch.
        let alone = rows == 1;
        let mut ids: Vec<&[u32]> = running.iter().map(|(_, _, text)| text.undecoded()).collect();
        if alone {
            cache.add(model.spec(), 1)?;
            ids.push(&[0]);
        }
        let hidden = model.decode_batch(weights, &ids, &mut cache)?;
        let mut end = 0;
        let last = ids.iter().map(|ids| {
            end += ids.len();
            end as u32 - 1
        });
        let mut last: Vec<u32> = last.collect();
        if last.len() == 1 {
            last.push(last[0]);
        }
        let last = hidden.index_select(&Tensor::new(last, &device)?, 0)?;
        let logits = to_host(&model.logits(weights, &last)?.to_dtype(DType::F32)?)?;
        if alone {
            cache.remove(1);
        }
        let choose = |(row, (_, capacity, text)): (usize, &mut (usize, usize, Continuation<'_>))| {
            let next = text.choose(logits.get(row)?)?;
            Ok(match next {
                None => Some(StopReason::EndOfText),
                Some(_) if text.new == text.request.max_tokens => Some(StopReason::Length),
                Some(_) => (text.seen.len() > *capacity).then_some(StopReason::ContextFull),
            })
        };
        let ended: Vec<Result<Option<StopReason>>> = running.par_iter_mut().enumerate().map(choose).collect();
        for (row, ended) in ended.into_iter().enumerate().rev() {
            if let Some(reason) = ended? {
                cache.remove(row);
                let (number, _, text) = running.remove(row);
                on_end(number, &text.seen[text.request.prompt.len()..], reason)?;
            }
        }
    }
}
