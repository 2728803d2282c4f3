//! Counts the questions that a model answers exactly.

use crate::data::EvalExample;
use crate::inference::ModelView;
use crate::inference::chat::Chat;
use crate::inference::generate::{BATCH_SIZE, GenerationRequest, Sampling, generate_batch};
use crate::inference::trained::TrainedModel;
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

/// Asks `trained`, with these weights, every question of `examples`; the likeliest token is taken each time. Calls
/// `progress` with the number of answers so far. Fails with [`Error::Model`] if the template refuses a question,
/// [`Error::Data`] for a question that fills the model's context.
pub fn exact_match(
    trained: &TrainedModel,
    model: ModelView<'_>,
    examples: &[EvalExample],
    mut progress: impl FnMut(usize),
) -> Result<ExactMatch> {
    let chat = Chat::new(trained, None)?;
    let tokenizer = &trained.tokenizer;
    let context = trained.spec.max_position_embeddings;
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut prompts = Vec::with_capacity(examples.len());
    for (index, EvalExample { prompt, variables, answer }) in examples.iter().enumerate() {
        let ids = tokenizer.encode(&chat.asking(prompt, variables.as_ref())?)?;
        if ids.len() >= context {
            let message = format!("the question has {} tokens, but the model's context is {context}", ids.len());
            return Err(Error::data(format!("conversation {}", index + 1), message));
        }
        prompts.push((ids, tokenizer.encode(answer)?.len() + EXTRA_TOKENS));
    }
    let stop_token_ids = &chat.stop_token_ids[..];
    let requests = prompts.iter().map(|(prompt, max_tokens)| GenerationRequest {
        prompt,
        max_tokens: *max_tokens,
        stop_token_ids,
        sampling: &sampling,
    });
    let requests: Vec<GenerationRequest<'_>> = requests.collect();
    let mut said = vec![String::new(); examples.len()];
    let mut done = 0;
    generate_batch(model, &requests, BATCH_SIZE, |number, found| {
        said[number] = tokenizer.decode(found.text_ids())?;
        done += 1;
        progress(done);
        Ok(())
    })?;
    let mut found = ExactMatch { asked: examples.len(), ..ExactMatch::default() };
    for (EvalExample { answer, .. }, said) in examples.iter().zip(said) {
        if said.trim() == answer.trim() {
            found.exact += 1;
        } else if found.wrong.len() < MAX_WRONG {
            found.wrong.push((answer.trim().to_owned(), said.trim().to_owned()));
        }
    }
    Ok(found)
}
