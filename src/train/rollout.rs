//! The data source of objectives that reward completions: replaces a batch of prompts by groups of completions, which
//! the current weights generate and a [`Reward`] judges.
//!
//! A completion depends on the weights, the run's seed, the number of updates, its prompt and its number in the step.
//! So each of several processes samples a part of the prompts.

use crate::data::{Batch, EvalLoader, IGNORE_INDEX, SampledRow, SequenceRole, Tokenizer};
use crate::engine::kernels::machine::spin::with_spinning_workers;
use crate::engine::model::ForwardMode;
use crate::inference::ModelView;
use crate::inference::generate::{BATCH_SIZE, Completion, GenerationRequest, Sampling, StopReason, generate_batch};
use crate::precision::PrecisionPolicy;
use crate::telemetry::{ObjectiveMetric, ObjectiveMetrics, float};
use crate::train::config::{Config, ObjectiveSection};
use crate::train::engine::{EvalReport, TrainEngine};
use crate::train::objective::{BatchPass, advantages};
use crate::train::reward::{Answered, Reward};
use crate::train::trainer::on_leader;
use crate::untrusted::sanitize_line;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// The most characters of a prompt in an error.
const SHOWN: usize = 60;

/// Samples completions, and keeps them for the steps that use them.
#[derive(Debug)]
pub(super) struct Rollouts {
    settings: ObjectiveSection,
    policy: PrecisionPolicy,
    seed: u64,
    seq_len: usize,
    /// Rows in a batch of completions.
    batch_rows: usize,
    tokenizer: Tokenizer,
    stop_token_ids: Vec<u32>,
    reward: Reward,
    /// The rows that a reward program reads, of the training data and of the validation data.
    rows: [Vec<Arc<str>>; 2],
    kept: Option<KeptRollouts>,
}

/// The last completions, as a checkpoint stores them if another step uses them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct KeptRollouts {
    /// Steps that will use them.
    left: u64,
    batches: Vec<KeptBatch>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct KeptBatch {
    groups: Vec<CompletionGroup>,
    /// [`Batch::old_logps`].
    old_logps: Logps,
    ends_epoch: bool,
}

/// A prompt with its completions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct CompletionGroup {
    /// The prompt's number in the data.
    index: u64,
    prompt: Vec<u32>,
    answer: String,
    completions: Vec<Sampled>,
    #[serde(skip)]
    row: Option<Arc<str>>,
}

/// Log-probabilities. After an overflow they may not be finite.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Logps(#[serde(with = "float::list")] Vec<f32>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Sampled {
    ids: Vec<u32>,
    logps: Logps,
    /// Whether it ended at the maximum length.
    is_cut: bool,
    text: String,
    seed: u64,
    reward: Option<f32>,
}

/// A completion in the log of rollouts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutRecord {
    /// The step that trained on it first.
    pub step: u64,
    /// The prompt, as the model read it.
    pub prompt: String,
    /// The completion.
    pub completion: String,
    /// Its reward; `None` if it has none.
    pub reward: Option<f32>,
    /// Its advantage over the other completions of the prompt.
    pub advantage: f64,
    /// The seed that it was sampled with.
    pub seed: u64,
}

impl CompletionGroup {
    /// The prompts of a batch of a data set with these rows, without completions.
    fn of_batch(batch: &Batch, tokenizer: &Tokenizer, rows: &[Arc<str>]) -> Result<Vec<Self>> {
        let group = |sequence: &crate::data::Sequence| {
            let labels = &batch.labels[sequence.labels.clone()];
            let first = labels.iter().position(|&label| label != IGNORE_INDEX).unwrap_or(labels.len() - 1);
            let answer: Vec<u32> = labels.iter().copied().filter(|&label| label != IGNORE_INDEX).collect();
            let prompt = batch.inputs[sequence.labels.clone()][..=first].to_vec();
            let answer = tokenizer.decode(&answer)?;
            let row = rows.get(sequence.index as usize).cloned();
            Ok(Self { index: sequence.index, prompt, answer, completions: Vec::new(), row })
        };
        batch.sequences.iter().map(group).collect()
    }
}

impl Sampled {
    /// Its reward; NaN if it has none.
    fn reward(&self) -> f64 {
        self.reward.map_or(f64::NAN, f64::from)
    }
}

impl Rollouts {
    /// The sampler of a run whose objective samples. `rows` has the [`crate::data::Dataset::rows`] of all data sets.
    pub(super) fn new(
        config: &Config,
        engine: &TrainEngine,
        tokenizer: &Tokenizer,
        stop_token_ids: Vec<u32>,
        rows: [Vec<Arc<str>>; 2],
    ) -> Result<Option<Self>> {
        let Some(rule) = &config.objective.reward else { return Ok(None) };
        let reward = Reward::new(rule, config.folder.as_deref())?;
        if engine.group.is_leader() {
            reward.check()?;
        }
        Ok(Some(Self {
            settings: config.objective.clone(),
            policy: config.dtype,
            seed: config.seed,
            seq_len: config.train.seq_len,
            batch_rows: config.objective.rows(config.train.batch_size),
            tokenizer: tokenizer.clone(),
            stop_token_ids,
            reward,
            rows,
            kept: None,
        }))
    }

    /// Rejects prompts without the right answer that the reward needs, so that a run does not end at one of them.
    /// `origin` is the name of the prompts in the error.
    pub(super) fn check_answers(&self, mut prompts: EvalLoader, origin: &str) -> Result<()> {
        if !matches!(self.reward, Reward::Exact) {
            return Ok(());
        }
        let mut batch = prompts.batch();
        while prompts.next_batch(&mut batch) {
            let groups = CompletionGroup::of_batch(&batch, &self.tokenizer, &[])?;
            // A completion without a token would equal a missing answer.
            if let Some(CompletionGroup { index, prompt, .. }) =
                groups.iter().find(|group| group.answer.trim().is_empty())
            {
                let prompt = self.tokenizer.decode(prompt)?;
                let prompt: String = sanitize_line(&prompt).chars().take(SHOWN).collect();
                let row = index + 1;
                let message = format!("row {row}: `{prompt}` has no right answer, which `--reward exact` needs");
                return Err(Error::data(origin, message));
            }
        }
        prompts.check()
    }

    /// Whether the next step uses the completions of the last one.
    pub(super) fn has_kept(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.left > 0)
    }

    /// The completions that later steps use; with `repeats` also those of the last step, if the next one repeats it.
    pub(super) fn kept(&self, repeats: bool) -> Option<KeptRollouts> {
        let KeptRollouts { left, batches } = self.kept.as_ref()?;
        let left = left + u64::from(repeats);
        (left > 0).then(|| KeptRollouts { left, batches: batches.clone() })
    }

    /// Continues with the completions of a checkpoint.
    pub(super) fn restore(&mut self, kept: Option<KeptRollouts>) {
        self.kept = kept;
    }

    /// Fills `batches` with the completions of the last step.
    pub(super) fn reuse(&mut self, batches: &mut [Batch]) {
        let Some(kept) = &mut self.kept else { return };
        kept.left -= 1;
        let kept = self.kept.iter().flat_map(|kept| &kept.batches);
        batches.iter_mut().zip(kept).for_each(|(batch, kept)| *batch = self.batch(kept));
    }

    /// Replaces the prompts in `batches` by completions. Returns them for the log.
    pub(super) fn sample(&mut self, engine: &mut TrainEngine, batches: &mut [Batch]) -> Result<Vec<RolloutRecord>> {
        let groups = batches.iter().map(|batch| CompletionGroup::of_batch(batch, &self.tokenizer, &self.rows[0]));
        let mut groups: Vec<Vec<CompletionGroup>> = groups.collect::<Result<_>>()?;
        self.complete(engine, &mut groups.iter_mut().flatten().collect::<Vec<_>>(), None)?;
        let step = engine.state.counters.step + 1;
        let mut records = Vec::new();
        for CompletionGroup { prompt, completions, .. } in groups.iter().flatten() {
            let prompt = self.tokenizer.decode(prompt)?;
            let rewards: Vec<f64> = completions.iter().map(Sampled::reward).collect();
            for (it, advantage) in completions.iter().zip(advantages(&self.settings, &rewards)) {
                let Sampled { text: completion, seed, reward, .. } = it.clone();
                records.push(RolloutRecord { step, prompt: prompt.clone(), completion, reward, advantage, seed });
            }
        }
        let mut kept = Vec::with_capacity(batches.len());
        for (batch, groups) in batches.iter_mut().zip(groups) {
            kept.push(KeptBatch { groups, old_logps: Logps::default(), ends_epoch: batch.ends_epoch });
        }
        if self.settings.num_iterations > 1 {
            batches.iter_mut().zip(&kept).for_each(|(batch, kept)| *batch = self.batch(kept));
            for (kept, logps) in kept.iter_mut().zip(old_logps(engine, batches)?) {
                kept.old_logps = logps;
            }
        }
        self.kept = Some(KeptRollouts { left: self.settings.num_iterations as u64, batches: kept });
        self.reuse(batches);
        Ok(records)
    }

    /// Rewards one completion, of the likeliest tokens, for each prompt of the batches that `next` returns. The loss is
    /// minus the mean reward.
    pub(super) fn evaluate(
        &mut self,
        engine: &mut TrainEngine,
        batch: &mut Batch,
        mut next: impl FnMut(&mut Batch) -> bool,
    ) -> Result<EvalReport> {
        let mut groups = Vec::new();
        while next(batch) {
            groups.extend(CompletionGroup::of_batch(batch, &self.tokenizer, &self.rows[1])?);
        }
        self.complete(engine, &mut groups.iter_mut().collect::<Vec<_>>(), Some(0.0))?;
        let completions = || groups.iter().flat_map(|group| &group.completions);
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
            sum / count
        };
        let reward = mean(&mut completions().filter_map(|it| it.reward).map(f64::from));
        let mut metrics = ObjectiveMetrics::default();
        metrics.set(ObjectiveMetric::Reward, reward);
        metrics.set(ObjectiveMetric::MeanLength, mean(&mut completions().map(|it| it.ids.len() as f64)));
        let targets = completions().map(|it| it.ids.len() as u64).sum();
        Ok(EvalReport { loss: -reward, metrics: Some(metrics), targets })
    }

    /// Samples and rewards the completions of `groups`: one of the likeliest tokens at `temperature` 0, else a group.
    fn complete(
        &mut self,
        engine: &mut TrainEngine,
        groups: &mut [&mut CompletionGroup],
        temperature: Option<f64>,
    ) -> Result<()> {
        let count = if temperature.is_some() { 1 } else { self.settings.num_generations };
        let base = Sampling { temperature: temperature.unwrap_or(1.0), seed: self.seed, ..Sampling::default() };
        let updates = engine.state.counters.updates;
        // A mixture may repeat a prompt in a step.
        let mut sampled = HashMap::<u64, usize>::new();
        let mut seeds_of = |group: &&mut CompletionGroup| -> Vec<Sampling> {
            let next = sampled.entry(group.index).or_default();
            let first = *next;
            *next += count;
            (first..*next).map(|number| base.of_completion(updates, group.index as u32, number as u32)).collect()
        };
        let samplings: Vec<Vec<Sampling>> = groups.iter().map(&mut seeds_of).collect();
        let (group, weights) = (&engine.group, &engine.state.weights);
        let model = ModelView { decoder: &engine.model, weights, policy: self.policy };
        let own = || (group.rank()..groups.len()).step_by(group.world_size());
        let requests: Vec<GenerationRequest<'_>> = own()
            .flat_map(|at| samplings[at].iter().map(move |sampling| (at, sampling)))
            .map(|(at, sampling)| {
                let prompt = &groups[at].prompt[..];
                let max_tokens = self.settings.max_completion_length.min(self.seq_len + 1 - prompt.len());
                GenerationRequest { prompt, max_tokens, stop_token_ids: &self.stop_token_ids, sampling }
            })
            .collect();
        let mut found: Vec<Option<Sampled>> = vec![None; requests.len()];
        let mut generate = || {
            generate_batch(model, &requests, BATCH_SIZE, |number, completion: Completion| {
                let text = self.tokenizer.decode(completion.text_ids())?;
                let is_cut = completion.reason != StopReason::EndOfText;
                let seed = requests[number].sampling.seed;
                let Completion { ids, log_probs, .. } = completion;
                let logps = Logps(log_probs);
                found[number] = Some(Sampled { ids, logps, is_cut, text, seed, reward: None });
                Ok(())
            })
        };
        let generated = if weights.device().is_cpu() { with_spinning_workers(&mut generate) } else { generate() };
        let own: Result<Vec<Sampled>, String> = match generated {
            Ok(()) => Ok(found.into_iter().flatten().collect()),
            // All processes end with the same error.
            Err(Error::Model { message, .. }) => Err(message),
            Err(error) => return Err(error),
        };
        for (rank, found) in group.all_gather_messages(&own)?.into_iter().enumerate() {
            let step = engine.state.counters.step;
            let diverged = |problem| format!("the model cannot sample a completion: {problem}");
            let found = found.map_err(|problem| Error::Diverged { step, message: diverged(problem) })?;
            let of_rank = (rank..groups.len()).step_by(group.world_size());
            for (at, completions) in of_rank.zip(found.chunks(count)) {
                groups[at].completions = completions.to_vec();
            }
        }
        self.judge(engine, groups)
    }

    /// Rewards completions. The leader asks for the rewards, so one program sees all of them in their order.
    fn judge(&mut self, engine: &TrainEngine, groups: &mut [&mut CompletionGroup]) -> Result<()> {
        let score = || {
            self.score(groups).map_err(|error| match error {
                Error::Reward { origin, message } => [origin, message],
                other => ["the rewards".into(), other.to_string()],
            })
        };
        // All processes have the same result, and end with the same error.
        let rewards = on_leader(&*engine.group, score)?;
        let rewards = rewards.map_err(|[origin, message]| Error::Reward { origin, message })?;
        let completions = groups.iter_mut().flat_map(|group| &mut group.completions);
        completions.zip(rewards).for_each(|(completion, reward)| completion.reward = reward);
        Ok(())
    }

    /// The rewards of all completions.
    fn score(&mut self, groups: &[&mut CompletionGroup]) -> Result<Vec<Option<f32>>> {
        let mut answered = Vec::new();
        for group in groups {
            let prompt = self.tokenizer.decode(&group.prompt)?;
            let answer = &group.answer;
            let of = |it: &Sampled| Answered {
                prompt: prompt.clone(),
                completion: it.text.clone(),
                answer: answer.clone(),
                tokens: it.ids.len() - usize::from(!it.is_cut),
                row: group.row.clone(),
            };
            answered.extend(group.completions.iter().map(of));
        }
        self.reward.score(&answered, &self.settings)
    }

    fn batch(&self, kept: &KeptBatch) -> Batch {
        let mut completions = Vec::new();
        for CompletionGroup { index, prompt, completions: sampled, .. } in &kept.groups {
            let numbers = (index * self.settings.num_generations as u64)..;
            let rewards: Vec<f64> = sampled.iter().map(Sampled::reward).collect();
            let advantages = advantages(&self.settings, &rewards);
            for ((it, index), advantage) in sampled.iter().zip(numbers).zip(advantages) {
                let role = SequenceRole::Sampled { reward: it.reward(), advantage, is_cut: it.is_cut };
                completions.push(SampledRow { prompt, ids: &it.ids, logps: &it.logps.0, index, role });
            }
        }
        let mut batch = Batch::of_completions(&completions, self.batch_rows, self.seq_len);
        batch.old_logps.clone_from(&kept.old_logps.0);
        batch.ends_epoch = kept.ends_epoch;
        batch
    }
}

/// The log-probability of each label of `batches`, as training computes it; each process computes its share.
fn old_logps(engine: &mut TrainEngine, batches: &[Batch]) -> Result<Vec<Logps>> {
    let TrainEngine { group, model, state, workspace, .. } = engine;
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut own = Vec::new();
    for batch in batches.iter().skip(rank).step_by(world_size) {
        let pass = BatchPass { model, weights: &state.weights, batch };
        let logps = |losses: &[f32]| Logps(losses.iter().map(|loss| -loss).collect());
        own.push(pass.with_losses(ForwardMode::Eval, workspace, logps)?);
    }
    let all = group.all_gather_messages(&own)?;
    Ok((0..batches.len()).map(|at| all[at % world_size][at / world_size].clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logps_that_are_not_finite_are_kept() {
        let logps = Logps(vec![-0.1, f32::NEG_INFINITY, f32::INFINITY, f32::NAN]);
        let json = serde_json::to_string(&logps).unwrap();
        assert_eq!(json, r#"[-0.1,"-inf","inf","NaN"]"#);
        let bits = |Logps(values): Logps| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(serde_json::from_str(&json).unwrap()), bits(logps));
    }
}
