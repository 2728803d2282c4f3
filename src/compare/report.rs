//! Groups runs by configuration, and computes the groups' differences and their significance.

use super::metrics::{METRICS, Metric, NONE};
use super::run::RunSummary;
use super::statistics::Estimate;
use crate::telemetry::float;
use crate::ui::format::letter;
use crate::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Settings that cannot change a run's numbers, and the seed: runs that differ only in these belong to one group.
const VARIES_WITHIN_GROUP: [&str; 10] = [
    "seed",
    "threads",
    "folder",
    "checkpoint.",
    "telemetry.",
    "run.program",
    "run.cpu",
    "run.isa",
    "run.threads",
    "run.device",
];
/// Settings that always differ between runs and are not listed.
const UNLISTED_SETTINGS: [&str; 4] = ["seed", "checkpoint.run", "checkpoint.dir", "folder"];

/// Settings that decide which tokens a loss is a mean over. `run.data` counts tokens, which depend on the tokenizer.
const DATA_SETTINGS: [&str; 4] = ["val", "data", "train.loss_on", "run.data"];

/// Runs of one configuration.
#[derive(Debug, Clone)]
pub(crate) struct RunGroup {
    /// `A`, `B`, ….
    pub(crate) label: String,
    /// The settings that distinguish it, or its run's name.
    pub(crate) name: String,
    /// Its runs, in the order they were given.
    pub(crate) runs: Vec<RunSummary>,
}

/// A setting that differs between groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SettingDifference {
    pub(crate) key: String,
    /// Its value in each group.
    pub(crate) values: Vec<String>,
}

/// The verdict on a margin for the difference of two groups' perplexities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EquivalenceVerdict {
    /// The whole interval is beyond the margin.
    Exceeded,
    /// The whole interval is within the margin.
    #[serde(rename = "not exceeded")]
    NotExceeded,
    /// The interval contains the margin, or there is none.
    Undecided,
}

impl EquivalenceVerdict {
    /// The verdict on whether a difference is between `least` and `most`.
    fn new(difference: Option<Estimate>, least: f64, most: f64) -> Self {
        match difference.and_then(|estimate| estimate.interval()) {
            Some((low, high)) if low > most || high < least => Self::Exceeded,
            Some((low, high)) if low >= least && high <= most => Self::NotExceeded,
            _ => Self::Undecided,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Comparison {
    /// Runs by configuration, in the order they were given.
    pub(crate) groups: Vec<RunGroup>,
    pub(crate) differences: Vec<SettingDifference>,
    /// The margin on the difference of two groups' perplexities.
    pub(crate) margin: Option<f64>,
    /// The margin on how many more consecutive steps the second group may skip than the first.
    pub(crate) skip_margin: Option<f64>,
}

impl RunGroup {
    /// The runs' figures of one kind, if any. Runs with one seed have the same numbers, so the first one counts, except
    /// for times and memory.
    fn values(&self, metric: &Metric) -> Vec<f64> {
        let mut seeds = BTreeSet::new();
        let samples = self.runs.iter().filter(|run| metric.is_of_machine() || seeds.insert(run.started.seed));
        samples.filter_map(|run| (metric.of)(&run.figures)).collect()
    }

    /// Their mean, with a confidence interval.
    pub(crate) fn estimate(&self, metric: &Metric) -> Option<Estimate> {
        Estimate::mean(&self.values(metric))
    }

    /// A run's label: the group's, with a number if it has several runs.
    pub(crate) fn run_label(&self, index: usize) -> String {
        if self.runs.len() == 1 { self.label.clone() } else { format!("{}{}", self.label, index + 1) }
    }
}

impl Comparison {
    /// Compares runs. A margin requires exactly two configurations.
    pub(crate) fn new(runs: Vec<RunSummary>, margin: Option<f64>, skip_margin: Option<f64>) -> Result<Self> {
        if runs.len() < 2 {
            return Err(Error::config("compare", "a comparison needs at least two runs"));
        }
        for (i, run) in runs.iter().enumerate() {
            let file = |run: &RunSummary| run.log.canonicalize().unwrap_or_else(|_| run.log.clone());
            if runs[..i].iter().any(|other| file(other) == file(run)) {
                return Err(Error::config(format!("`{}`", run.log.display()), "is named twice"));
            }
        }
        let mut groups: Vec<(RunGroup, BTreeMap<String, String>)> = Vec::new();
        for run in runs {
            let mut settings = run.settings();
            settings.retain(|key, _| !is_among(&VARIES_WITHIN_GROUP, key));
            if let Some((group, _)) = groups.iter_mut().find(|(_, of_group)| *of_group == settings) {
                group.runs.push(run);
            } else {
                let label = letter(groups.len()).to_string();
                groups.push((RunGroup { label, name: String::new(), runs: vec![run] }, settings));
            }
        }
        let mut groups: Vec<RunGroup> = groups.into_iter().map(|(group, _)| group).collect();
        for (flag, margin) in [("--margin", margin), ("--skip-margin", skip_margin)] {
            if margin.is_some() && groups.len() != 2 {
                let message = format!("requires two configurations, but these runs have {}", groups.len());
                return Err(Error::config(flag, message));
            }
        }
        let differences = differences(&groups);
        let differing = || differences.iter().filter(|difference| !is_among(&VARIES_WITHIN_GROUP, &difference.key));
        for (i, group) in groups.iter_mut().enumerate() {
            let differing_settings: Vec<_> = differing().map(|d| format!("{} = {}", d.key, d.values[i])).collect();
            group.name = match &group.runs[..] {
                [only] => only.name.clone(),
                _ if differing_settings.is_empty() => group.runs[0].started.model.clone(),
                _ => differing_settings.join(", "),
            };
        }
        let comparison = Self { groups, differences, margin, skip_margin };
        if let (Some(_), Some(different)) = (margin, comparison.different_data()) {
            let message = format!("perplexities over different data are not comparable: `{}` differs", different.key);
            return Err(Error::config("--margin", message));
        }
        Ok(comparison)
    }

    /// Whether a group has several runs.
    pub(crate) fn has_samples(&self) -> bool {
        self.groups.iter().any(|group| group.runs.len() > 1)
    }

    /// The first setting that decides about the data of losses and in which the groups differ.
    pub(crate) fn different_data(&self) -> Option<&SettingDifference> {
        DATA_SETTINGS.iter().find_map(|key| self.differences.iter().find(|difference| difference.key == *key))
    }

    /// The second group's figure minus the first's; `None` without two groups, without the figure, or for losses over
    /// different data.
    pub(crate) fn difference(&self, metric: &Metric) -> Option<Estimate> {
        let [first, second] = &self.groups[..] else { return None };
        if metric.depends_on_data() && self.different_data().is_some() {
            return None;
        }
        Estimate::difference(&first.values(metric), &second.values(metric))
    }

    /// The metrics that at least one run has.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = &'static Metric> {
        METRICS.iter().filter(|metric| self.groups.iter().any(|group| !group.values(metric).is_empty()))
    }

    /// The difference of two groups' final perplexities.
    pub(crate) fn perplexity(&self) -> Option<Estimate> {
        self.difference(Metric::named("perplexity")?)
    }

    pub(crate) fn verdict(&self) -> Option<(f64, EquivalenceVerdict)> {
        let margin = self.margin?;
        Some((margin, EquivalenceVerdict::new(self.perplexity(), -margin, margin)))
    }

    /// Whether the second group's longest streak of skipped steps exceeds the first's by more than the margin, if there
    /// is one.
    pub(crate) fn skip_verdict(&self) -> Option<(f64, Estimate, EquivalenceVerdict)> {
        let margin = self.skip_margin?;
        let estimate = self.difference(Metric::named("longest_streak")?)?;
        Some((margin, estimate, EquivalenceVerdict::new(Some(estimate), f64::NEG_INFINITY, margin)))
    }

    pub(crate) fn json(&self) -> Value {
        let groups = self.groups.iter().map(|group| {
            let runs = group.runs.iter().enumerate().map(|(i, run)| {
                json!({
                    "label": group.run_label(i),
                    "name": run.name,
                    "log": run.log,
                    "seed": run.started.seed,
                    "end": run.end(),
                    "finished": run.finished,
                    "unreadable_lines": run.unreadable,
                    "figures": by_key(|metric| (metric.of)(&run.figures).map(number)),
                })
            });
            json!({
                "label": group.label,
                "name": group.name,
                "runs": runs.collect::<Vec<_>>(),
                "means": by_key(|metric| group.estimate(metric).map(|estimate| json!(estimate))),
            })
        });
        let differences = self.differences.iter().map(|d| json!({ "key": d.key, "values": d.values }));
        json!({
            "groups": groups.collect::<Vec<_>>(),
            "differences": differences.collect::<Vec<_>>(),
            "second_minus_first": (self.groups.len() == 2)
                .then(|| by_key(|metric| self.difference(metric).map(|estimate| json!(estimate)))),
            "skip_margin": self.skip_verdict().map(|(margin, estimate, verdict)| {
                json!({ "skips": margin, "difference": estimate, "verdict": verdict })
            }),
            "margin": self.verdict().map(|(margin, verdict)| json!({ "perplexity": margin, "verdict": verdict })),
        })
    }
}

/// One field per metric.
fn by_key(value: impl Fn(&Metric) -> Option<Value>) -> Map<String, Value> {
    METRICS.iter().map(|metric| (metric.key.to_owned(), json!(value(metric)))).collect()
}

/// A number as JSON, by name if it is not finite.
fn number(value: f64) -> Value {
    float::serialize(&value, serde_json::value::Serializer).unwrap_or_default()
}

/// Whether `key` is one of `keys`, or inside one that ends in a dot.
fn is_among(keys: &[&str], key: &str) -> bool {
    keys.iter().any(|known| if known.ends_with('.') { key.starts_with(known) } else { key == *known })
}

fn differences(groups: &[RunGroup]) -> Vec<SettingDifference> {
    let settings: Vec<Vec<_>> =
        groups.iter().map(|group| group.runs.iter().map(RunSummary::settings).collect()).collect();
    let keys: BTreeSet<&String> = settings.iter().flatten().flat_map(BTreeMap::keys).collect();
    let of_group = |runs: &[BTreeMap<String, String>], key: &str| {
        let values: BTreeSet<_> = runs.iter().map(|run| run.get(key).map_or(NONE, String::as_str)).collect();
        let mut values = values.into_iter();
        match (values.next(), values.next()) {
            (Some(only), None) => only.to_owned(),
            _ => "various".to_owned(),
        }
    };
    let differing_settings = keys.into_iter().filter(|key| !is_among(&UNLISTED_SETTINGS, key));
    let differences = differing_settings.map(|key| SettingDifference {
        key: key.clone(),
        values: settings.iter().map(|runs| of_group(runs, key)).collect(),
    });
    differences.filter(|difference| difference.values.windows(2).any(|pair| pair[0] != pair[1])).collect()
}
