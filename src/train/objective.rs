//! The training signal: turns the log-probabilities of a batch's targets into the factor of each target's gradient.
//!
//! Every objective is a function of log-probabilities. The gradient of the logits is each target's gradient of the
//! cross-entropy times a weight, the derivative of the loss with respect to minus the target's log-probability. It takes
//! one more pass of the head, and neither a separate backward pass nor a second model.

mod loss;
mod reference;

pub use loss::{Completion, CompletionLoss, PairLoss, completion_loss, pair_loss};
pub use reference::{Reference, ReferenceLogps};

use crate::Result;
use crate::data::{Batch, IGNORE_INDEX, SampleKind, Sequence, SequenceRole};
use crate::engine::kernels::view::{read, to_host};
use crate::engine::model::{Decoder, ForwardMode, Parameters, Workspace};
use crate::telemetry::PreferenceMetrics;
use crate::train::config::ObjectiveSection;
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
}

impl ObjectiveKind {
    /// Whether weights depend on log-probabilities.
    pub fn needs_log_probs(self) -> bool {
        self != Self::Sft
    }

    /// Whether it compares log-probabilities with those of a reference model.
    pub fn needs_reference(self) -> bool {
        !matches!(self, Self::Sft | Self::Orpo | Self::SimPo)
    }

    /// Whether it reads pairs of a chosen and a rejected completion.
    pub fn reads_pairs(self) -> bool {
        !matches!(self, Self::Sft | Self::Kto)
    }

    /// The kind of samples that it reads.
    pub fn samples(self) -> SampleKind {
        match self {
            Self::Sft => SampleKind::Plain,
            Self::Kto => SampleKind::UnpairedPreference,
            _ => SampleKind::Preference,
        }
    }

    /// The rows of `samples` samples in a batch.
    pub fn rows(self, samples: usize) -> usize {
        if self.reads_pairs() { 2 * samples } else { samples }
    }

    /// Whether it reads the mean log-probability of a completion instead of the sum.
    pub fn averages(self) -> bool {
        matches!(self, Self::Ipo | Self::Orpo | Self::SimPo)
    }
}

/// Sums over the pairs, completions or targets of micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSums {
    /// Losses.
    pub loss: f64,
    /// Chosen, or desirable, completions.
    pub chosen: CompletionSums,
    /// Rejected, or undesirable, completions.
    pub rejected: CompletionSums,
    /// Pairs whose chosen completion has the higher reward.
    pub correct: f64,
    /// KTO's estimates of the divergence, one per completion.
    pub kl: f64,
}

/// Sums over completions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CompletionSums {
    /// Their number.
    pub count: f64,
    /// Implicit rewards.
    pub reward: f64,
    /// Log-probabilities.
    pub logp: f64,
}

impl LossSums {
    /// The length of [`Self::to_array`].
    pub const LEN: usize = 9;

    /// The number of sums that are not always 0, from the start of [`Self::to_array`].
    pub fn len(kind: ObjectiveKind) -> usize {
        if kind.needs_log_probs() { Self::LEN } else { 1 }
    }

    /// All sums, for an exchange.
    pub fn to_array(self) -> [f64; Self::LEN] {
        let [chosen, rejected] = [self.chosen, self.rejected].map(|side| [side.count, side.reward, side.logp]);
        let ([a, b, c], [d, e, f]) = (chosen, rejected);
        [self.loss, a, b, c, d, e, f, self.correct, self.kl]
    }

    /// Adds sums in the order of [`Self::to_array`].
    pub fn add(&mut self, sums: &[f64]) {
        let mut total = self.to_array();
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        let [loss, a, b, c, d, e, f, correct, kl] = total;
        let side = |count, reward, logp| CompletionSums { count, reward, logp };
        *self = Self { loss, chosen: side(a, b, c), rejected: side(d, e, f), correct, kl };
    }

    /// The metrics of an objective of preferences.
    pub fn metrics(&self, kind: ObjectiveKind) -> Option<PreferenceMetrics> {
        let mean = |sum: f64, count: f64| (count > 0.0).then(|| sum / count);
        let reward = |side: CompletionSums| mean(side.reward, side.count);
        let logp = |side: CompletionSums| mean(side.logp, side.count);
        let (chosen, rejected) = (self.chosen, self.rejected);
        kind.needs_log_probs().then(|| PreferenceMetrics {
            rewards_chosen: reward(chosen),
            rewards_rejected: reward(rejected),
            rewards_margins: reward(chosen).zip(reward(rejected)).map(|(chosen, rejected)| chosen - rejected),
            rewards_accuracies: mean(self.correct, chosen.count).filter(|_| kind.reads_pairs()),
            logps_chosen: logp(chosen),
            logps_rejected: logp(rejected),
            kl: mean(self.kl, chosen.count + rejected.count).filter(|_| kind == ObjectiveKind::Kto),
        })
    }
}

impl CompletionSums {
    fn push(&mut self, reward: f64, logp: f64) {
        self.count += 1.0;
        self.reward += reward;
        self.logp += logp;
    }
}

/// The objective of a run, with the results of the current micro-batch.
#[derive(Debug, Default)]
pub struct Objective {
    settings: ObjectiveSection,
    /// The source of the reference's log-probabilities.
    pub reference: Reference,
    /// One for each target of the micro-batch.
    weights: Vec<f32>,
    /// The reference's log-probability of each sequence.
    reference_logps: Vec<f64>,
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
    /// The log-probability of each sequence and its number of targets, by a pass without dropout.
    fn logps(self, mode: ForwardMode, workspace: &mut Workspace) -> Result<Vec<(f64, usize)>> {
        self.model.forward(self.weights, self.batch.tokens(), mode, workspace, &mut ())?;
        self.model.loss(self.weights, &self.batch.labels, workspace)?;
        with_losses(workspace, |losses| self.batch.sequences.iter().map(|it| logp(self.batch, it, losses)).collect())
    }
}

/// Reads the losses of the head's last pass.
fn with_losses<R>(workspace: &Workspace, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let losses = to_host(workspace.losses())?;
    Ok(f(read(&losses)?.typed::<f32>()?))
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

    /// Its name.
    pub fn kind(&self) -> ObjectiveKind {
        self.settings.kind
    }

    /// The number of losses of micro-batches, which a step's loss is divided by: targets, pairs or completions.
    pub fn count(&self, batches: &[Batch]) -> usize {
        let of_batch = |batch: &Batch| match self.kind() {
            ObjectiveKind::Sft => batch.num_label_tokens,
            ObjectiveKind::Kto => batch.sequences.len(),
            _ => batch.sequences.len() / 2,
        };
        batches.iter().map(of_batch).sum()
    }

    /// Computes the reference's log-probabilities of a micro-batch, and KTO's estimate, before its forward pass.
    pub(super) fn refer(&mut self, pass: BatchPass<'_>, workspace: &mut Workspace, split: Split) -> Result<()> {
        if self.kind().needs_reference() {
            self.reference_logps.clear();
            self.reference.read(pass, workspace, split, &mut self.reference_logps)?;
        }
        self.kl = match self.mismatched(pass.batch) {
            Some(batch) => self.estimate_kl(BatchPass { batch: &batch, ..pass }, workspace, split)?,
            None => 0.0,
        };
        Ok(())
    }

    /// The batch that KTO estimates the divergence from, if it has other prompts to give completions to.
    fn mismatched(&self, batch: &Batch) -> Option<Batch> {
        (self.kind() == ObjectiveKind::Kto && batch.sequences.len() > 1).then(|| mismatched(batch))
    }

    /// The batches whose sequences need a reference: `batch`, and its mismatched one.
    pub(in crate::train) fn referred(&self, batch: Batch) -> impl Iterator<Item = Batch> + use<> {
        let other = self.mismatched(&batch);
        std::iter::once(batch).chain(other)
    }

    /// The mean log-ratio of completions that do not belong to their prompts, at least 0.
    fn estimate_kl(&self, pass: BatchPass<'_>, workspace: &mut Workspace, split: Split) -> Result<f64> {
        let mut reference = Vec::new();
        self.reference.read(pass, workspace, split, &mut reference)?;
        let policy = pass.logps(ForwardMode::Eval, workspace)?;
        let ratios = policy.iter().zip(&reference).map(|((policy, _), reference)| policy - reference);
        Ok((ratios.sum::<f64>() / policy.len().max(1) as f64).max(0.0))
    }

    /// Computes the weights of a micro-batch's targets after its forward pass; with log-probabilities by a pass of the head.
    pub(super) fn weigh(&mut self, pass: BatchPass<'_>, workspace: &Workspace) -> Result<()> {
        if self.kind().needs_log_probs() {
            pass.model.loss(pass.weights, &pass.batch.labels, workspace)?;
            return with_losses(workspace, |losses| self.score(pass.batch, losses));
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

    /// The sums of a micro-batch after the head's pass, which returned the sum `nll` of all targets' losses.
    pub(super) fn sums(&mut self, pass: BatchPass<'_>, workspace: &Workspace, nll: f64) -> Result<LossSums> {
        if self.kind().needs_log_probs() {
            return Ok(self.sums);
        }
        let loss = if pass.batch.sequences.is_empty() {
            nll
        } else {
            let weighted = |losses: &[f32]| {
                let sequences = pass.batch.sequences.iter();
                sequences.map(|it| -f64::from(sample_weight(it)) * logp(pass.batch, it, losses).0).sum()
            };
            with_losses(workspace, weighted)?
        };
        Ok(LossSums { loss, ..LossSums::default() })
    }

    /// The sums of a batch by a pass without dropout.
    pub(super) fn evaluate(&mut self, pass: BatchPass<'_>, workspace: &mut Workspace) -> Result<LossSums> {
        self.refer(pass, workspace, Split::Validation)?;
        pass.model.forward(pass.weights, pass.batch.tokens(), ForwardMode::Eval, workspace, &mut ())?;
        let nll = pass.model.loss(pass.weights, &pass.batch.labels, workspace)?;
        if self.kind().needs_log_probs() {
            with_losses(workspace, |losses| self.score(pass.batch, losses))?;
        }
        self.sums(pass, workspace, nll)
    }

    /// Computes weights and sums from the losses of the targets.
    fn score(&mut self, batch: &Batch, losses: &[f32]) {
        self.sums = LossSums::default();
        self.weights.clear();
        self.weights.resize(batch.labels.len(), 0.0);
        let completion = |at: usize, sequence: &Sequence, references: &[f64]| {
            let (logp, targets) = logp(batch, sequence, losses);
            Completion { logp, reference: references.get(at).copied().unwrap_or(0.0), targets }
        };
        if self.kind() == ObjectiveKind::Kto {
            for (at, sequence) in batch.sequences.iter().enumerate() {
                let desirable = sequence.role == SequenceRole::Desirable;
                let completion = completion(at, sequence, &self.reference_logps);
                let found = completion_loss(&self.settings, completion, desirable, self.kl);
                self.weights[sequence.labels.clone()].fill(-found.slope as f32);
                self.sums.loss += found.loss;
                self.sums.kl += self.kl;
                let side = if desirable { &mut self.sums.chosen } else { &mut self.sums.rejected };
                side.push(found.reward, completion.logp);
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
            self.sums.chosen.push(found.rewards[0], found.logps[0]);
            self.sums.rejected.push(found.rewards[1], found.logps[1]);
            self.sums.correct += f64::from(u8::from(found.rewards[0] > found.rewards[1]));
        }
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

/// The weight of a sample's targets.
fn sample_weight(sequence: &Sequence) -> f32 {
    if let SequenceRole::Weighted(weight) = sequence.role { weight } else { 1.0 }
}

/// Each prompt of a batch with the completion of the next sequence, as far as it fits into the row.
fn mismatched(batch: &Batch) -> Batch {
    let mut out = Batch { sequences: Vec::with_capacity(batch.sequences.len()), ..batch.clone() };
    out.inputs.fill(0);
    out.labels.fill(IGNORE_INDEX);
    let first_target =
        |it: &Sequence| it.labels.clone().find(|&at| batch.labels[at] != IGNORE_INDEX).unwrap_or(it.labels.end - 1);
    // A completion of another prompt has a number beyond those of the data.
    for (at, prompt) in batch.sequences.iter().enumerate() {
        let other = &batch.sequences[(at + 1) % batch.sequences.len()];
        let (row, first) = (prompt.labels.start, first_target(prompt));
        let room = batch.seq_len - (first - row) % batch.seq_len;
        let from = first_target(other);
        let count = (other.labels.end - from).min(room);
        out.inputs[row..=first].copy_from_slice(&batch.inputs[row..=first]);
        out.labels[first..first + count].copy_from_slice(&batch.labels[from..from + count]);
        for step in 1..count {
            out.inputs[first + step] = batch.inputs[from + step];
        }
        let index = (prompt.index + 1) << 32 | other.index;
        out.sequences.push(Sequence { labels: row..first + count, index, role: prompt.role });
    }
    out.num_label_tokens = out.labels.iter().filter(|&&label| label != IGNORE_INDEX).count();
    out
}
