//! Counts the questions that a model answers exactly.

use crate::data::EvalExample;
use crate::engine::model::{Decoder, KvCache, Parameters};
use crate::inference::chat::Chat;
use crate::inference::generate::{GenerationRequest, Sampling, TextStream, generate};
use crate::inference::trained::TrainedModel;
use crate::precision::PrecisionPolicy;
use crate::{Error, Result};
use serde::Serialize;

/// Tokens that an answer may have beyond those of the right one.
const EXTRA_TOKENS: usize = 8;
/// Wrong answers that are kept to be shown.
const MAX_WRONG: usize = 3;

/// The result of an exact-match evaluation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExactMatch {
    /// Questions.
    pub asked: usize,
    /// Answers that match the reference after trimming white space.
    pub exact: usize,
    /// The first wrong answers: the expected one and the model's.
    pub wrong: Vec<(String, String)>,
}

/// Asks `trained`, with these weights, every question of `examples`; the likeliest token is taken each time.
/// Calls `progress` with the number of answers so far.
///
/// # Errors
/// [`Error::Model`] if the template refuses a question, [`Error::Data`] for a question that fills the model's context.
pub fn exact_match(
    trained: &TrainedModel,
    (model, weights, policy): (&Decoder, &Parameters, PrecisionPolicy),
    examples: &[EvalExample],
    mut progress: impl FnMut(usize),
) -> Result<ExactMatch> {
    let chat = Chat::new(trained, None)?;
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut found = ExactMatch { asked: examples.len(), ..ExactMatch::default() };
    for (index, EvalExample { prompt, tools, answer }) in examples.iter().enumerate() {
        let ids = trained.tokenizer.encode(&chat.asking(prompt, tools.as_ref())?)?;
        let (max_tokens, context) =
            (trained.tokenizer.encode(answer)?.len() + EXTRA_TOKENS, trained.config.max_position_embeddings);
        if ids.len() >= context {
            let message = format!("the question has {} tokens, but the model's context is {context}", ids.len());
            return Err(Error::data(format!("conversation {}", index + 1), message));
        }
        let capacity = context.min(ids.len() + max_tokens);
        let mut cache = KvCache::new(&trained.config, policy, capacity, &weights.device())?;
        let request =
            GenerationRequest { prompt: &ids, max_tokens, stop_token_ids: &chat.stop_token_ids, sampling: &sampling };
        let (mut stream, mut said) = (TextStream::new(&trained.tokenizer), String::new());
        generate(model, weights, &mut cache, request, |id| {
            said += &stream.push(id)?;
            Ok(true)
        })?;
        said += &stream.finish()?;
        if said.trim() == answer.trim() {
            found.exact += 1;
        } else if found.wrong.len() < MAX_WRONG {
            found.wrong.push((answer.trim().to_owned(), said.trim().to_owned()));
        }
        progress(index + 1);
    }
    Ok(found)
}
