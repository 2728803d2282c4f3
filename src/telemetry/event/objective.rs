//! Metrics of objectives other than plain fine-tuning.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use strum::{IntoStaticStr, VariantArray};

/// A metric of an objective: a mean over the pairs, completions or tokens of a step or a validation. The rewards of
/// pairs are `beta` times the log-probability, relative to the reference if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[repr(usize)]
#[strum(serialize_all = "snake_case")]
pub enum ObjectiveMetric {
    /// Reward of chosen, or desirable, completions.
    #[strum(serialize = "rewards/chosen")]
    RewardsChosen,
    /// Reward of rejected, or undesirable, completions.
    #[strum(serialize = "rewards/rejected")]
    RewardsRejected,
    /// The first reward minus the second.
    #[strum(serialize = "rewards/margins")]
    RewardsMargins,
    /// Share of pairs whose chosen completion has the higher reward.
    #[strum(serialize = "rewards/accuracies")]
    RewardsAccuracies,
    /// Log-probability of chosen completions: the sum over targets, or their mean for ORPO and SimPO.
    #[strum(serialize = "logps/chosen")]
    LogpsChosen,
    /// Log-probability of rejected completions.
    #[strum(serialize = "logps/rejected")]
    LogpsRejected,
    /// The estimate of the divergence from the reference.
    Kl,
    /// Reward of sampled completions.
    Reward,
    /// Standard deviation of the rewards within a group.
    RewardStd,
    /// Share of groups whose rewards are equal, which teach nothing.
    FracRewardZeroStd,
    /// Tokens of a completion.
    #[strum(serialize = "completions/mean_length")]
    MeanLength,
    /// Share of completions that were cut at the maximum length.
    #[strum(serialize = "completions/clipped_ratio")]
    ClippedRatio,
    /// Share of tokens whose ratio is clipped.
    ClipRatio,
    /// Mean of minus the log-probability of the sampled tokens, an estimate of the policy's entropy.
    Entropy,
    /// Mean distance of the log-probabilities of the sampler and of training.
    #[strum(serialize = "sampling/sampling_logp_difference/mean")]
    SamplingLogpDifference,
}

impl ObjectiveMetric {
    /// All metrics, in the order of the log.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// TRL's name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The values of an objective's metrics; NaN for a mean of nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ObjectiveMetrics([Option<f64>; ObjectiveMetric::ALL.len()]);

impl ObjectiveMetrics {
    /// Sets a metric that the objective has.
    pub fn set(&mut self, metric: ObjectiveMetric, value: f64) {
        self.0[metric as usize] = Some(value);
    }

    /// A metric's value; `None` if the objective lacks it, or for a mean of nothing.
    pub fn get(&self, metric: ObjectiveMetric) -> Option<f64> {
        self.0[metric as usize].filter(|value| !value.is_nan())
    }

    /// The metrics that the objective has, by name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, f64)> {
        ObjectiveMetric::ALL.iter().zip(self.0).filter_map(|(metric, value)| Some((metric.name(), value?)))
    }
}

impl Serialize for ObjectiveMetrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.named())
    }
}

impl<'de> Deserialize<'de> for ObjectiveMetrics {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut metrics = Self::default();
        for (name, value) in BTreeMap::<String, Option<f64>>::deserialize(deserializer)? {
            if let Some(metric) = ObjectiveMetric::ALL.iter().find(|metric| metric.name() == name) {
                metrics.set(*metric, value.unwrap_or(f64::NAN));
            }
        }
        Ok(metrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Event, Record, StepRecord, VERSION};

    #[test]
    fn metrics_have_their_names_in_the_log_and_survive_it() {
        let mut metrics = ObjectiveMetrics::default();
        for metric in ObjectiveMetric::ALL {
            metrics.set(*metric, 0.5);
        }
        let json = serde_json::to_value(metrics).unwrap();
        let mut names: Vec<&str> = metrics.named().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names, json.as_object().unwrap().keys().collect::<Vec<_>>());
        assert_eq!(names.len(), ObjectiveMetric::ALL.len());
        let event = Event::Step(Box::new(StepRecord { objective: Some(metrics), ..StepRecord::default() }));
        let line = serde_json::to_string(&Record { v: VERSION, t: 1, s: 0.5, event: event.clone() }).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&line).unwrap().event, event);
    }

    #[test]
    fn a_mean_of_nothing_is_null_and_a_missing_metric_is_absent() {
        let mut metrics = ObjectiveMetrics::default();
        metrics.set(ObjectiveMetric::Kl, f64::NAN);
        let json = serde_json::to_string(&metrics).unwrap();
        assert_eq!(json, r#"{"kl":null}"#);
        let back: ObjectiveMetrics = serde_json::from_str(&json).unwrap();
        assert_eq!((back.get(ObjectiveMetric::Kl), back.named().count()), (None, 1));
    }
}
