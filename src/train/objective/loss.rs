//! The losses of preference tuning as functions of log-probabilities, with their derivatives, in f64. Names and
//! defaults are TRL's.
//!
//! - DPO (Rafailov et al., 2023) and its variants: cDPO with `label_smoothing`, robust DPO (Chowdhury et al., 2024),
//!   IPO (Azar et al., 2023), hinge (SLiC, Zhao et al., 2023);
//! - ORPO (Hong et al., 2024) and SimPO (Meng et al., 2024), which need no reference;
//! - KTO (Ethayarajh et al., 2024), for single completions;
//! - GRPO (Shao et al., 2024), Dr. GRPO (Liu et al., 2025) and DAPO (Yu et al., 2025), for groups of sampled
//!   completions.

use super::ObjectiveKind;
use crate::train::config::ObjectiveSection;

/// The highest mean log-probability of a completion that ORPO distinguishes from certainty, whose odds are infinite.
/// FP32 losses are not more exact.
const ALMOST_CERTAIN: f64 = -1e-6;

/// A completion's log-probability.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CompletionLogp {
    /// Sum over its targets, in nats.
    pub logp: f64,
    /// The same sum under the reference; 0 for an objective without one.
    pub reference: f64,
    /// Number of targets.
    pub targets: usize,
}

/// The loss of a pair; arrays have the chosen completion's value first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairLoss {
    /// The loss.
    pub loss: f64,
    /// Derivatives of the loss with respect to [`CompletionLogp::logp`].
    pub slopes: [f64; 2],
    /// Implicit rewards.
    pub rewards: [f64; 2],
    /// Log-probabilities: sums, or means per target for ORPO and SimPO.
    pub logps: [f64; 2],
}

/// The loss of one completion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompletionLoss {
    /// The loss.
    pub loss: f64,
    /// Its derivative with respect to [`CompletionLogp::logp`].
    pub slope: f64,
    /// The implicit reward.
    pub reward: f64,
}

/// The loss of a pair: a chosen completion and a rejected one.
pub fn pair_loss(settings: &ObjectiveSection, pair: [CompletionLogp; 2]) -> PairLoss {
    let kind = settings.kind;
    let beta = settings.beta();
    let smoothing = settings.label_smoothing;
    let scales = pair.map(|side| if kind.averages() { 1.0 / side.targets.max(1) as f64 } else { 1.0 });
    let scaled = |scales: [f64; 2]| {
        let logps = [0, 1].map(|side| pair[side].logp * scales[side]);
        (logps, [0, 1].map(|side| beta * (logps[side] - pair[side].reference * scales[side])))
    };
    let (_, [chosen, rejected]) = scaled(scales);
    let margin = chosen - rejected;
    // In TRL, the metrics of IPO are sums.
    let (logps, rewards) = scaled(if kind == ObjectiveKind::Ipo { [1.0; 2] } else { scales });
    // The loss and its derivative with respect to the margin.
    let smoothed = |margin: f64| {
        let loss = (1.0 - smoothing) * softplus(-margin) + smoothing * softplus(margin);
        (loss, smoothing * sigmoid(margin) - (1.0 - smoothing) * sigmoid(-margin))
    };
    let (loss, slope) = match kind {
        ObjectiveKind::Orpo => {
            let (loss, slopes) = odds_ratio(beta, logps);
            return PairLoss { loss, slopes: [0, 1].map(|side| slopes[side] * scales[side]), rewards, logps };
        }
        ObjectiveKind::Ipo => {
            let distance = (margin - 0.5) / beta;
            (distance * distance, 2.0 * distance / beta)
        }
        ObjectiveKind::Hinge => ((1.0 - margin).max(0.0), if margin < 1.0 { -1.0 } else { 0.0 }),
        ObjectiveKind::Robust => {
            let loss = (1.0 - smoothing) * softplus(-margin) - smoothing * softplus(margin);
            let slope = -smoothing * sigmoid(margin) - (1.0 - smoothing) * sigmoid(-margin);
            (loss / (1.0 - 2.0 * smoothing), slope / (1.0 - 2.0 * smoothing))
        }
        ObjectiveKind::SimPo => smoothed(margin - settings.simpo_gamma),
        _ => smoothed(margin),
    };
    PairLoss { loss, slopes: [beta * slope * scales[0], -beta * slope * scales[1]], rewards, logps }
}

/// ORPO: the chosen completion's mean loss plus `beta` times the loss of the odds ratio, and derivatives with respect
/// to the mean log-probabilities.
fn odds_ratio(beta: f64, means: [f64; 2]) -> (f64, [f64; 2]) {
    let known = means.map(|mean| mean.min(ALMOST_CERTAIN));
    let [chosen, rejected] = known.map(|mean| mean - log1mexp(mean));
    let ratio = chosen - rejected;
    // The derivative of the log-odds is 1 / (1 - p).
    let [to_chosen, to_rejected] = known.map(|mean| beta * sigmoid(-ratio) / -mean.exp_m1());
    (beta * softplus(-ratio) - means[0], [-1.0 - to_chosen, to_rejected])
}

/// KTO: the loss of a completion, given the estimate `kl` of the divergence from the reference.
pub fn completion_loss(
    settings: &ObjectiveSection,
    completion: CompletionLogp,
    desirable: bool,
    kl: f64,
) -> CompletionLoss {
    let beta = settings.beta();
    let log_ratio = completion.logp - completion.reference;
    let (weight, sign) = if desirable { (settings.desirable_weight, 1.0) } else { (settings.undesirable_weight, -1.0) };
    let value = sign * beta * (log_ratio - kl);
    let slope = -sign * weight * beta * sigmoid(value) * sigmoid(-value);
    CompletionLoss { loss: weight * sigmoid(-value), slope, reward: beta * log_ratio }
}

/// A token of a sampled completion: its log-probability, in nats, under several policies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledToken {
    /// Under the policy.
    pub logp: f64,
    /// Under the policy that sampled it, as training computes it.
    pub old: f64,
    /// Under the reference, if there is one.
    pub reference: Option<f64>,
}

/// The loss of a sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLoss {
    /// The loss.
    pub loss: f64,
    /// Its derivative with respect to [`SampledToken::logp`].
    pub slope: f64,
    /// Whether the ratio is clipped.
    pub is_clipped: bool,
    /// The estimate of the divergence from the reference.
    pub kl: Option<f64>,
}

/// GRPO: the loss of a sampled token with its completion's advantage. `correction` multiplies the loss, except its
/// divergence.
pub fn token_loss(settings: &ObjectiveSection, token: SampledToken, advantage: f64, correction: f64) -> TokenLoss {
    let ratio = (token.logp - token.old).exp();
    let low = 1.0 - settings.epsilon;
    let high = 1.0 + settings.epsilon_high();
    let is_clipped = (advantage > 0.0 && ratio > high) || (advantage < 0.0 && ratio < low);
    let gain = advantage * correction;
    let (mut loss, mut slope) =
        if is_clipped { (-gain * ratio.clamp(low, high), 0.0) } else { (-gain * ratio, -gain * ratio) };
    // The ratio makes the gradient that of the divergence itself.
    let kl = token.reference.map(|reference| {
        let distance = reference - token.logp;
        slope -= settings.beta() * ratio * distance;
        ratio * (distance.exp_m1() - distance)
    });
    loss += kl.map_or(0.0, |kl| settings.beta() * kl);
    TokenLoss { loss, slope, is_clipped, kl }
}

/// The weight of a sampled completion whose log-probabilities, in training minus in the sampler, have this sum: the
/// ratio of the probabilities, or 0 if it is too high.
pub(super) fn sampling_correction(settings: &ObjectiveSection, difference: f64) -> f64 {
    let ratio = difference.exp();
    if ratio <= settings.importance_sampling_cap { ratio } else { 0.0 }
}

/// Added to a standard deviation that divides.
const DEVIATION_EPS: f64 = 1e-4;

/// The advantages of a group's completions; 0 for a reward of NaN, which is left out.
pub fn advantages(settings: &ObjectiveSection, rewards: &[f64]) -> Vec<f64> {
    let known: Vec<f64> = rewards.iter().copied().filter(|reward| !reward.is_nan()).collect();
    let (mean, std) = deviation(&known);
    let divisor = if settings.scale_rewards() { std + DEVIATION_EPS } else { 1.0 };
    rewards.iter().map(|reward| if reward.is_nan() { 0.0 } else { (reward - mean) / divisor }).collect()
}

/// Mean and standard deviation of a sample; 0 for the deviation of one value.
pub(super) fn deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>();
    (mean, if values.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 })
}

/// log(1 + eˣ).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// 1 / (1 + e⁻ˣ).
fn sigmoid(x: f64) -> f64 {
    let small = (-x.abs()).exp();
    if x >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) }
}

/// log(1 - eˣ) for x < 0.
fn log1mexp(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAIRWISE: [ObjectiveKind; 6] = [
        ObjectiveKind::Dpo,
        ObjectiveKind::Ipo,
        ObjectiveKind::Hinge,
        ObjectiveKind::Robust,
        ObjectiveKind::Orpo,
        ObjectiveKind::SimPo,
    ];

    fn settings(kind: ObjectiveKind, beta: f64, label_smoothing: f64) -> ObjectiveSection {
        ObjectiveSection { kind, beta: Some(beta), label_smoothing, ..ObjectiveSection::default() }
    }

    fn completion(logp: f64, reference: f64, targets: usize) -> CompletionLogp {
        CompletionLogp { logp, reference, targets }
    }

    /// The central difference of `f` at `x`.
    fn difference(f: impl Fn(f64) -> f64, x: f64) -> f64 {
        let step = 1e-6 * x.abs().max(1.0);
        (f(x + step) - f(x - step)) / (2.0 * step)
    }

    proptest! {
        #[test]
        fn slopes_are_derivatives(
            which in 0..PAIRWISE.len(), beta in 0.01..3.0, smoothing in 0.0..0.45,
            chosen in -60.0..-0.5, rejected in -60.0..-0.5, references in (-60.0..-0.5, -60.0..-0.5), targets in (1usize..9, 1usize..9),
        ) {
            let settings = settings(PAIRWISE[which], beta, smoothing);
            let reads = settings.needs_reference();
            let reference = |value| if reads { value } else { 0.0 };
            let chosen = completion(chosen, reference(references.0), targets.0);
            let rejected = completion(rejected, reference(references.1), targets.1);
            let found = pair_loss(&settings, [chosen, rejected]);
            let with = |side: usize, logp: f64| {
                let mut pair = [chosen, rejected];
                pair[side].logp = logp;
                pair_loss(&settings, pair).loss
            };
            // Hinge has no derivative where its margin is 1.
            prop_assume!(settings.kind != ObjectiveKind::Hinge || (found.rewards[0] - found.rewards[1] - 1.0).abs() > 1e-3);
            for (side, logp) in [chosen.logp, rejected.logp].into_iter().enumerate() {
                let expected = difference(|logp| with(side, logp), logp);
                let error = (found.slopes[side] - expected).abs();
                prop_assert!(error < 1e-5 * (1.0 + expected.abs()), "{settings:?}: {} for {expected}", found.slopes[side]);
            }
            let expected = difference(
                |logp| completion_loss(&settings, CompletionLogp { logp, ..chosen }, which % 2 == 0, 1.5).loss, chosen.logp,
            );
            prop_assert!((completion_loss(&settings, chosen, which % 2 == 0, 1.5).slope - expected).abs() < 1e-6);
        }
    }

    #[test]
    fn a_tie_costs_the_logarithm_of_two() {
        let pair = [completion(-7.0, -7.0, 3); 2];
        let found = pair_loss(&settings(ObjectiveKind::Dpo, 0.1, 0.0), pair);
        assert_eq!((found.loss, found.rewards), (std::f64::consts::LN_2, [0.0; 2]));
        assert_eq!(found.slopes, [-0.05, 0.05]);
    }

    #[test]
    fn margins_of_a_hundred_nats_overflow_nothing() {
        for kind in PAIRWISE {
            for (chosen, rejected) in [(-1.0, -1e4), (-1e4, -1.0), (-1e-12, -1e4), (-1e4, -1e-12), (0.0, 0.0)] {
                let pair = [completion(chosen, -1.0, 4), completion(rejected, -1.0, 5)];
                let PairLoss { loss, slopes, .. } = pair_loss(&settings(kind, 1.0, 0.1), pair);
                assert!(loss.is_finite() && slopes.iter().all(|slope| slope.is_finite()), "{kind:?} {loss} {slopes:?}");
            }
        }
        let certain =
            pair_loss(&settings(ObjectiveKind::Dpo, 1.0, 0.0), [completion(100.0, 0.0, 1), completion(0.0, 0.0, 1)]);
        assert!((certain.loss / (-100f64).exp() - 1.0).abs() < 1e-12, "the small loss keeps its digits");
        assert!((certain.slopes[0] / -(-100f64).exp() - 1.0).abs() < 1e-12);
    }
}
