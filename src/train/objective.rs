//! The training signal: turns the log-probabilities of a batch's targets into the factor of each target's gradient.
//!
//! Every objective is a function of log-probabilities. The gradient of the logits is each target's gradient of the
//! cross-entropy times a weight, the derivative of the loss with respect to minus the target's log-probability. It
//! takes one more pass of the head, and neither a separate backward pass nor a second model.

mod loss;
mod reference;

pub use loss::{
    CompletionLogp, CompletionLoss, PairLoss, SampledToken, TokenLoss, advantages, completion_loss, pair_loss,
    token_loss,
};
pub use reference::{Reference, ReferenceLogps, ReferenceModel};

use crate::Result;
use crate::data::{Batch, IGNORE_INDEX, SampleKind, Sequence, SequenceRole, padded_len};
use crate::engine::kernels::view::{read, to_host};
use crate::engine::model::{Decoder, ForwardMode, Parameters, Workspace};
use crate::telemetry::{ObjectiveMetric, ObjectiveMetrics};
use crate::train::config::ObjectiveSection;
use candle_core::Tensor;
use loss::{deviation, sampling_correction};
use serde::{Deserialize, Serialize};

/// The name of an objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectiveKind {
    /// Cross-entropy of the targets.
    #[default]
    Sft,
    /// Direct preference optimization.
    Dpo,
    /// DPO with a squared loss of the mean log-probabilities.
    Ipo,
    /// DPO with a hinge loss.
    Hinge,
    /// DPO that corrects for a share of swapped pairs.
    Robust,
    /// Odds-ratio preference optimization.
    Orpo,
    /// Simple preference optimization.
    SimPo,
    /// Kahneman-Tversky optimization of single completions.
    Kto,
    /// Group-relative policy optimization of sampled completions by their rewards.
    Grpo,
    /// GRPO without its bias by length and by the spread of rewards.
    #[serde(rename = "dr_grpo")]
    DrGrpo,
    /// GRPO with a mean over all tokens of the step and a wider upper clip.
    Dapo,
}

impl ObjectiveKind {
    /// Whether weights depend on log-probabilities.
    pub fn needs_log_probs(self) -> bool {
        self != Self::Sft
    }

    /// Whether it samples completions and rewards them.
    pub fn samples_completions(self) -> bool {
        matches!(self, Self::Grpo | Self::DrGrpo | Self::Dapo)
    }

    /// The kind of samples that it reads.
    pub fn samples(self) -> SampleKind {
        match self {
            Self::Sft => SampleKind::Plain,
            Self::Kto => SampleKind::UnpairedPreference,
            Self::Grpo | Self::DrGrpo | Self::Dapo => SampleKind::Prompt,
            _ => SampleKind::Preference,
        }
    }

    fn metrics(self) -> &'static [ObjectiveMetric] {
        match self.samples() {
            SampleKind::Plain => &[],
            SampleKind::Preference => &ObjectiveMetric::ALL[..6],
            SampleKind::UnpairedPreference => &[
                ObjectiveMetric::RewardsChosen,
                ObjectiveMetric::RewardsRejected,
                ObjectiveMetric::RewardsMargins,
                ObjectiveMetric::LogpsChosen,
                ObjectiveMetric::LogpsRejected,
                ObjectiveMetric::Kl,
            ],
            SampleKind::Prompt => &ObjectiveMetric::ALL[6..],
        }
    }

    /// Whether its loss reads the mean log-probability of a completion instead of the sum.
    pub fn averages(self) -> bool {
        matches!(self, Self::Ipo | Self::Orpo | Self::SimPo)
    }
}

/// The factors of the losses of a step's micro-batches.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossFactors {
    /// The loss scale.
    pub(super) scale: f32,
    /// The number of losses in all micro-batches, whose mean is the step's loss.
    pub(super) count: usize,
    /// The number of micro-batches, whose load-balancing losses are averaged.
    pub(super) micro_batches: usize,
}

impl LossFactors {
    pub(super) fn new(scale: f32, objective: &Objective, micro_batches: &[Batch]) -> Self {
        Self { scale, count: objective.count(micro_batches).max(1), micro_batches: micro_batches.len() }
    }
}

/// Sums over the pairs, completions or targets of micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Losses.
    pub loss: f64,
    /// The sum and the number of each metric's values.
    metrics: [[f64; 2]; ObjectiveMetric::ALL.len()],
}

impl LossSums {
    /// The length of [`Self::to_array`].
    pub const LEN: usize = 1 + 2 * ObjectiveMetric::ALL.len();

    /// The number of sums that are not always 0, from the start of [`Self::to_array`].
    pub fn len(kind: ObjectiveKind) -> usize {
        if kind.needs_log_probs() { Self::LEN } else { 1 }
    }

    /// All sums, for an exchange.
    pub fn to_array(self) -> [f64; Self::LEN] {
        let mut all = [self.loss; Self::LEN];
        all[1..].copy_from_slice(self.metrics.as_flattened());
        all
    }

    /// Adds sums in the order of [`Self::to_array`].
    pub fn add(&mut self, sums: &[f64]) {
        let [loss, metrics @ ..] = sums else { return };
        self.loss += loss;
        self.metrics.as_flattened_mut().iter_mut().zip(metrics).for_each(|(total, sum)| *total += sum);
    }

    pub(super) fn push(&mut self, metric: ObjectiveMetric, value: f64) {
        let [sum, count] = &mut self.metrics[metric as usize];
        *sum += value;
        *count += 1.0;
    }

    /// The metrics of an objective; `None` for plain fine-tuning.
    pub fn metrics(&self, settings: &ObjectiveSection) -> Option<ObjectiveMetrics> {
        let mean = |metric: ObjectiveMetric| {
            let [sum, count] = self.metrics[metric as usize];
            sum / count
        };
        let mut metrics = ObjectiveMetrics::default();
        for &metric in settings.kind.metrics() {
            metrics.set(
                metric,
                match metric {
                    ObjectiveMetric::Kl if !settings.needs_reference() => continue,
                    ObjectiveMetric::RewardsMargins => {
                        mean(ObjectiveMetric::RewardsChosen) - mean(ObjectiveMetric::RewardsRejected)
                    }
                    _ => mean(metric),
                },
            );
        }
        settings.kind.needs_log_probs().then_some(metrics)
    }

    /// Adds the reward and the log-probability of a better or a worse completion.
    fn push_completion(&mut self, is_better: bool, reward: f64, logp: f64) {
        let better = (ObjectiveMetric::RewardsChosen, ObjectiveMetric::LogpsChosen);
        let worse = (ObjectiveMetric::RewardsRejected, ObjectiveMetric::LogpsRejected);
        let (of_reward, of_logp) = if is_better { better } else { worse };
        self.push(of_reward, reward);
        self.push(of_logp, logp);
    }
}

/// The objective of a run, with the results of the current micro-batch.
#[derive(Debug, Default)]
pub struct Objective {
    /// Its settings.
    pub settings: ObjectiveSection,
    /// The source of the reference's log-probabilities.
    pub reference: Reference,
    /// One for each target of the micro-batch.
    weights: Vec<f32>,
    /// The reference's log-probability of each sequence; of each target for sampled completions.
    reference_logps: Vec<f64>,
    /// The policy's log-probability of each target of sampled completions without dropout; empty if there is none.
    policy_logps: Vec<f64>,
    /// KTO's estimate of the divergence from the reference.
    kl: f64,
    sums: LossSums,
}

/// A model with its weights and the micro-batch that it computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchPass<'a> {
    pub(super) model: &'a Decoder,
    pub(super) weights: &'a Parameters,
    pub(super) batch: &'a Batch,
}

impl BatchPass<'_> {
    /// Reads the losses of the targets, computed by a pass without dropout. Overwrites the buffers.
    pub(super) fn with_losses<R>(
        self,
        mode: ForwardMode,
        workspace: &mut Workspace,
        f: impl FnOnce(&[f32]) -> R,
    ) -> Result<R> {
        let mut narrow = None;
        let workspace = workspace.for_shape(self.batch.shape(), &mut narrow)?;
        self.model.forward(self.weights, self.batch.tokens(), mode, workspace, &mut ())?;
        self.model.loss(self.weights, &self.batch.labels, workspace)?;
        Ok(with_losses(workspace.losses(), f)?)
    }

    /// The log-probability of each target.
    fn target_logps(self, mode: ForwardMode, workspace: &mut Workspace) -> Result<Vec<f64>> {
        self.with_losses(mode, workspace, |losses| losses.iter().map(|loss| -f64::from(*loss)).collect())
    }

    /// The log-probability of each sequence and its number of targets.
    fn logps(self, mode: ForwardMode, workspace: &mut Workspace) -> Result<Vec<(f64, usize)>> {
        self.with_losses(mode, workspace, |losses| {
            self.batch.sequences.iter().map(|it| logp(self.batch, it, losses)).collect()
        })
    }
}

/// Reads the losses of a pass of the head.
fn with_losses<R>(losses: &Tensor, f: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let losses = to_host(losses)?;
    Ok(f(read(&losses)?.typed::<f32>()?))
}

fn sum_of(losses: &[f32]) -> LossSums {
    LossSums { loss: losses.iter().map(|&loss| f64::from(loss)).sum(), ..LossSums::default() }
}

/// The log-probability of a sequence's targets, and their number.
fn logp(batch: &Batch, sequence: &Sequence, losses: &[f32]) -> (f64, usize) {
    let targets = sequence.labels.clone().filter(|&at| batch.labels[at] != IGNORE_INDEX);
    targets.fold((0.0, 0), |(logp, count), at| (logp - f64::from(losses[at]), count + 1))
}

impl Objective {
    /// The objective of a configuration.
    pub fn new(settings: ObjectiveSection, reference: Reference) -> Self {
        Self { settings, reference, ..Self::default() }
    }

    /// The number of losses of micro-batches, which a step's loss is divided by: targets, pairs or completions.
    pub fn count(&self, batches: &[Batch]) -> usize {
        let of_batch = |batch: &Batch| match self.settings.kind {
            ObjectiveKind::Sft | ObjectiveKind::Dapo => batch.num_label_tokens,
            ObjectiveKind::Kto | ObjectiveKind::Grpo => batch.sequences.len(),
            ObjectiveKind::DrGrpo => batch.sequences.len() * self.settings.max_completion_length,
            _ => batch.sequences.len() / 2,
        };
        batches.iter().map(of_batch).sum()
    }

    /// Computes the reference's log-probabilities of a micro-batch, KTO's estimate, and the policy's log-probabilities
    /// without dropout, before its forward pass.
    pub(super) fn refer(&mut self, pass: BatchPass<'_>, workspace: &mut Workspace, split: Split) -> Result<()> {
        self.reference_logps = match self.settings.needs_reference() {
            true if self.settings.kind.samples_completions() => self.reference.read_targets(pass, workspace)?,
            true => self.reference.read(pass, workspace, split)?,
            false => Vec::new(),
        };
        // A validation pass has no dropout.
        let samples = self.settings.kind.samples_completions();
        let drops = samples && split == Split::Train && pass.model.spec().has_dropout();
        self.policy_logps = if drops { pass.target_logps(ForwardMode::Eval, workspace)? } else { Vec::new() };
        self.kl = match self.mismatched(pass.batch, workspace.seq_len()) {
            Some(batch) => self.estimate_kl(BatchPass { batch: &batch, ..pass }, workspace, split)?,
            None => 0.0,
        };
        Ok(())
    }

    /// The batch that KTO estimates the divergence from, if it has other prompts to give completions to.
    fn mismatched(&self, batch: &Batch, seq_len: usize) -> Option<Batch> {
        (self.settings.kind == ObjectiveKind::Kto && batch.sequences.len() > 1).then(|| mismatched(batch, seq_len))
    }

    /// The batches whose sequences need a reference: `batch`, and its mismatched one.
    pub(in crate::train) fn referred(&self, batch: Batch, seq_len: usize) -> impl Iterator<Item = Batch> + use<> {
        let other = self.mismatched(&batch, seq_len);
        std::iter::once(batch).chain(other)
    }

    /// The mean log-ratio of completions that do not belong to their prompts, at least 0.
    fn estimate_kl(&mut self, pass: BatchPass<'_>, workspace: &mut Workspace, split: Split) -> Result<f64> {
        let reference = self.reference.read(pass, workspace, split)?;
        let policy = pass.logps(ForwardMode::Eval, workspace)?;
        let ratios = policy.iter().zip(&reference).map(|((policy, _), reference)| policy - reference);
        Ok((ratios.sum::<f64>() / policy.len().max(1) as f64).max(0.0))
    }

    /// Computes the weights of a micro-batch's targets after its forward pass; with log-probabilities by a pass of the
    /// head.
    pub(super) fn weigh(&mut self, pass: BatchPass<'_>, workspace: &Workspace) -> candle_core::Result<()> {
        if self.settings.kind.needs_log_probs() {
            pass.model.loss(pass.weights, &pass.batch.labels, workspace)?;
            return with_losses(workspace.losses(), |losses| self.score(pass.batch, losses));
        }
        if !pass.batch.sequences.is_empty() {
            self.weights.clear();
            self.weights.resize(pass.batch.labels.len(), 0.0);
            for sequence in &pass.batch.sequences {
                self.weights[sequence.labels.clone()].fill(sample_weight(sequence));
            }
        }
        Ok(())
    }

    /// The weights that [`Self::weigh`] has computed; `None` if all are 1.
    pub(super) fn weights(&self, batch: &Batch) -> Option<&[f32]> {
        (!batch.sequences.is_empty()).then_some(&self.weights[..])
    }

    /// The sums of a micro-batch, whose targets have these losses.
    pub(super) fn sums(&self, batch: &Batch, losses: &Tensor) -> Result<LossSums> {
        if self.settings.kind.needs_log_probs() {
            return Ok(self.sums);
        }
        if batch.sequences.is_empty() {
            return Ok(with_losses(losses, sum_of)?);
        }
        let weighted = |losses: &[f32], it: &Sequence| -f64::from(sample_weight(it)) * logp(batch, it, losses).0;
        let loss = with_losses(losses, |losses| batch.sequences.iter().map(|it| weighted(losses, it)).sum())?;
        Ok(LossSums { loss, ..LossSums::default() })
    }

    /// The sums of a batch by a pass without dropout; without the weights of samples, so that a loss has a perplexity.
    pub(super) fn evaluate(&mut self, pass: BatchPass<'_>, workspace: &mut Workspace) -> Result<LossSums> {
        self.refer(pass, workspace, Split::Validation)?;
        pass.with_losses(ForwardMode::Eval, workspace, |losses| {
            if !self.settings.kind.needs_log_probs() {
                return sum_of(losses);
            }
            self.score(pass.batch, losses);
            self.sums
        })
    }

    /// Computes weights and sums from the losses of the targets.
    fn score(&mut self, batch: &Batch, losses: &[f32]) {
        self.sums = LossSums::default();
        self.weights.clear();
        self.weights.resize(batch.labels.len(), 0.0);
        let completion = |at: usize, sequence: &Sequence, references: &[f64]| {
            let (logp, targets) = logp(batch, sequence, losses);
            CompletionLogp { logp, reference: references.get(at).copied().unwrap_or(0.0), targets }
        };
        if self.settings.kind.samples_completions() {
            return self.score_groups(batch, losses);
        }
        if self.settings.kind == ObjectiveKind::Kto {
            for (at, sequence) in batch.sequences.iter().enumerate() {
                let desirable = sequence.role == SequenceRole::Desirable;
                let completion = completion(at, sequence, &self.reference_logps);
                let found = completion_loss(&self.settings, completion, desirable, self.kl);
                self.weights[sequence.labels.clone()].fill(-found.slope as f32);
                self.sums.loss += found.loss;
                self.sums.push(ObjectiveMetric::Kl, self.kl);
                self.sums.push_completion(desirable, found.reward, completion.logp);
            }
            return;
        }
        for (pair, sequences) in batch.sequences.chunks(2).enumerate() {
            let [chosen, rejected] = sequences else { continue };
            let references = &self.reference_logps;
            let both = [completion(2 * pair, chosen, references), completion(2 * pair + 1, rejected, references)];
            let found = pair_loss(&self.settings, both);
            for (sequence, slope) in [chosen, rejected].into_iter().zip(found.slopes) {
                self.weights[sequence.labels.clone()].fill(-slope as f32);
            }
            self.sums.loss += found.loss;
            self.sums.push_completion(true, found.rewards[0], found.logps[0]);
            self.sums.push_completion(false, found.rewards[1], found.logps[1]);
            self.sums
                .push(ObjectiveMetric::RewardsAccuracies, f64::from(u8::from(found.rewards[0] > found.rewards[1])));
        }
    }

    /// Computes weights and sums of groups of sampled completions.
    fn score_groups(&mut self, batch: &Batch, losses: &[f32]) {
        for group in batch.sequences.chunks(self.settings.num_generations) {
            let rewards: Vec<f64> = group.iter().map(|it| reward(it).0).filter(|reward| !reward.is_nan()).collect();
            for reward in &rewards {
                self.sums.push(ObjectiveMetric::Reward, *reward);
            }
            if !rewards.is_empty() {
                let std = deviation(&rewards).1;
                self.sums.push(ObjectiveMetric::RewardStd, std);
                self.sums.push(ObjectiveMetric::FracRewardZeroStd, f64::from(u8::from(std == 0.0)));
            }
            for sequence in group {
                self.score_sampled(batch, sequence, losses);
            }
        }
    }

    /// Computes weights and sums of one sampled completion.
    fn score_sampled(&mut self, batch: &Batch, sequence: &Sequence, losses: &[f32]) {
        let (_, advantage, is_cut) = reward(sequence);
        let targets = || sequence.labels.clone().filter(|&at| batch.labels[at] != IGNORE_INDEX);
        let length = targets().count();
        self.sums.push(ObjectiveMetric::MeanLength, length as f64);
        self.sums.push(ObjectiveMetric::ClippedRatio, f64::from(u8::from(is_cut)));
        let share = if self.settings.kind == ObjectiveKind::Grpo { 1.0 / length.max(1) as f64 } else { 1.0 };
        // Ratios compare policies, so they are without dropout, which only the gradient has.
        let logp = |at: usize| self.policy_logps.get(at).copied().unwrap_or(-f64::from(losses[at]));
        let old = |at: usize| batch.old_logps.get(at).map_or(logp(at), |old| f64::from(*old));
        let difference = |at: usize| batch.sampled_logps.get(at).map_or(0.0, |sampled| old(at) - f64::from(*sampled));
        let correction = sampling_correction(&self.settings, targets().map(difference).sum());
        for at in targets() {
            let logp = logp(at);
            let token = SampledToken { logp, old: old(at), reference: self.reference_logps.get(at).copied() };
            let found = token_loss(&self.settings, token, advantage, correction);
            self.weights[at] = (-found.slope * share) as f32;
            self.sums.loss += found.loss * share;
            self.sums.push(ObjectiveMetric::Entropy, -logp);
            self.sums.push(ObjectiveMetric::SamplingLogpDifference, difference(at).abs());
            self.sums.push(ObjectiveMetric::ClipRatio, f64::from(u8::from(found.is_clipped)));
            if let Some(kl) = found.kl {
                self.sums.push(ObjectiveMetric::Kl, kl);
            }
        }
    }
}

/// The reward of a sampled completion, its advantage, and whether it was cut.
fn reward(sequence: &Sequence) -> (f64, f64, bool) {
    match sequence.role {
        SequenceRole::Sampled { reward, advantage, is_cut } => (reward, advantage, is_cut),
        _ => (f64::NAN, 0.0, false),
    }
}

/// The part of the data that a batch comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Split {
    /// Training text.
    Train,
    /// Validation text.
    Validation,
}

fn sample_weight(sequence: &Sequence) -> f32 {
    if let SequenceRole::Weighted(weight) = sequence.role { weight } else { 1.0 }
}

/// Each prompt of a batch with the completion of the sequence before it, cut at `seq_len` tokens, as in TRL. So a pair
/// does not depend on the rest of the batch.
fn mismatched(batch: &Batch, seq_len: usize) -> Batch {
    let first_target =
        |it: &Sequence| it.labels.clone().find(|&at| batch.labels[at] != IGNORE_INDEX).unwrap_or(it.labels.end - 1);
    let others = batch.sequences.last().into_iter().chain(&batch.sequences);
    // The highest bit distinguishes a pair from a row of the data, and from the pairs of older versions, which cut an
    // answer at the width of its batch.
    let pairs = batch.sequences.iter().zip(others).map(|(prompt, other)| {
        let tokens = prompt.labels.start..first_target(prompt) + 1;
        let from = first_target(other);
        let answer = from..other.labels.end.min(from + seq_len + 1 - tokens.len());
        let index = 1 << 63 | prompt.index << 32 | other.index;
        (tokens, answer, Sequence { index, ..prompt.clone() })
    });
    let pairs: Vec<_> = pairs.collect();
    let longest = pairs.iter().map(|(prompt, answer, _)| prompt.len() + answer.len() - 1).max();
    let width = padded_len(longest.unwrap_or(0), seq_len);
    let mut out = Batch::new(batch.batch_size, width);
    for (row, (prompt, answer, sequence)) in pairs.into_iter().enumerate() {
        let start = row * width;
        let first = start + prompt.len() - 1;
        let end = first + answer.len();
        out.inputs[start..=first].copy_from_slice(&batch.inputs[prompt]);
        out.inputs[first + 1..end].copy_from_slice(&batch.inputs[answer.start + 1..answer.end]);
        out.labels[first..end].copy_from_slice(&batch.labels[answer]);
        out.sequences.push(Sequence { labels: start..end, ..sequence });
    }
    out.num_label_tokens = out.labels.iter().filter(|&&label| label != IGNORE_INDEX).count();
    out
}
