//! Metrics of preference tuning.

use serde::{Deserialize, Serialize};

/// Means over the pairs or completions of a step or of a validation, under TRL's names. A reward is `beta` times the
/// log-probability, relative to the reference if there is one. `None` without such completions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PreferenceMetrics {
    /// Reward of chosen, or desirable, completions.
    #[serde(rename = "rewards/chosen")]
    pub rewards_chosen: Option<f64>,
    /// Reward of rejected, or undesirable, completions.
    #[serde(rename = "rewards/rejected")]
    pub rewards_rejected: Option<f64>,
    /// The first reward minus the second.
    #[serde(rename = "rewards/margins")]
    pub rewards_margins: Option<f64>,
    /// Share of pairs whose chosen completion has the higher reward.
    #[serde(rename = "rewards/accuracies")]
    pub rewards_accuracies: Option<f64>,
    /// Log-probability of chosen completions: the sum over targets, or their mean if the objective uses means.
    #[serde(rename = "logps/chosen")]
    pub logps_chosen: Option<f64>,
    /// Log-probability of rejected completions.
    #[serde(rename = "logps/rejected")]
    pub logps_rejected: Option<f64>,
    /// KTO's estimate of the divergence from the reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
}

impl PreferenceMetrics {
    /// The metrics that have a value, by name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let all = [
            ("rewards/chosen", self.rewards_chosen),
            ("rewards/rejected", self.rewards_rejected),
            ("rewards/margins", self.rewards_margins),
            ("rewards/accuracies", self.rewards_accuracies),
            ("logps/chosen", self.logps_chosen),
            ("logps/rejected", self.logps_rejected),
            ("kl", self.kl),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Event, Record, StepRecord, VERSION};

    #[test]
    fn names_in_the_log_are_those_in_other_files() {
        let some = Some(0.5);
        let metrics = PreferenceMetrics {
            rewards_chosen: some,
            rewards_rejected: some,
            rewards_margins: some,
            rewards_accuracies: some,
            logps_chosen: some,
            logps_rejected: some,
            kl: some,
        };
        let json = serde_json::to_value(metrics).unwrap();
        let mut names: Vec<&str> = metrics.named().map(|(name, _)| name).collect();
        names.sort_unstable();
        assert_eq!(names, json.as_object().unwrap().keys().collect::<Vec<_>>());
        let event = Event::Step(Box::new(StepRecord { preference: Some(metrics), ..StepRecord::default() }));
        let line = serde_json::to_string(&Record { v: VERSION, t: 1, s: 0.5, event: event.clone() }).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&line).unwrap().event, event);
    }
}
