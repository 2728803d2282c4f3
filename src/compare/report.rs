//! Groups runs into arms, and computes the arms' differences and their significance.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::metrics::{METRICS, Metric, NONE};
use super::run::RunSummary;
use super::statistics::Estimate;
use crate::telemetry::float;
use crate::{Error, Result};

/// Settings that cannot change a run's numbers, and the seed: runs that differ only in these belong to one arm.
const WITHIN_AN_ARM: [&str; 5] = ["seed", "threads", "checkpoint.", "telemetry.", "run."];
/// Settings that always differ between runs and are not listed.
const NEVER_LISTED: [&str; 3] = ["seed", "checkpoint.run", "checkpoint.dir"];

/// Runs of one configuration.
#[derive(Debug, Clone)]
pub struct Arm {
    /// `A`, `B`, ….
    pub label: String,
    /// The settings that distinguish it, or its run's name.
    pub name: String,
    /// Its runs, in the order they were given.
    pub runs: Vec<RunSummary>,
}

/// A setting that differs between arms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its dotted key.
    pub key: String,
    /// Its value in each arm.
    pub values: Vec<String>,
}

/// The verdict on a bound for the difference of two arms' perplexities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The whole interval is beyond the bound.
    Exceeded,
    /// The whole interval is within the bound.
    NotExceeded,
    /// The interval contains the bound, or there is none.
    Undecided,
}

/// A comparison of runs.
#[derive(Debug, Clone)]
pub struct Report {
    /// Runs by configuration, in the order they were given.
    pub arms: Vec<Arm>,
    /// The settings that differ between arms.
    pub differences: Vec<Difference>,
    /// The bound on the difference of two arms' perplexities.
    pub bound: Option<f64>,
    /// The bound on how many more consecutive steps the second arm may skip than the first.
    pub skip_bound: Option<f64>,
}

impl Arm {
    /// The runs' figures of one kind, if any.
    fn values(&self, metric: &Metric) -> Vec<f64> {
        self.runs.iter().filter_map(|run| (metric.of)(&run.figures)).collect()
    }

    /// Their mean, with a confidence interval.
    pub fn estimate(&self, metric: &Metric) -> Option<Estimate> {
        Estimate::mean(&self.values(metric))
    }

    /// A run's label: the arm's, with a number if it has several runs.
    pub fn run_label(&self, index: usize) -> String {
        if self.runs.len() == 1 { self.label.clone() } else { format!("{}{}", self.label, index + 1) }
    }
}

impl Verdict {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exceeded => "exceeded",
            Self::NotExceeded => "not exceeded",
            Self::Undecided => "undecided",
        }
    }
}

impl Report {
    /// Compares runs. A bound requires exactly two configurations.
    pub fn new(runs: Vec<RunSummary>, bound: Option<f64>) -> Result<Self> {
        if runs.len() < 2 {
            return Err(Error::config("compare", "a comparison needs at least two runs"));
        }
        for (i, run) in runs.iter().enumerate() {
            let file = |run: &RunSummary| run.log.canonicalize().unwrap_or_else(|_| run.log.clone());
            if runs[..i].iter().any(|other| file(other) == file(run)) {
                return Err(Error::config(format!("`{}`", run.log.display()), "is named twice"));
            }
        }
        let mut arms: Vec<(Arm, BTreeMap<String, String>)> = Vec::new();
        for run in runs {
            let mut settings = run.settings();
            settings.retain(|key, _| !is_among(&WITHIN_AN_ARM, key));
            if let Some((arm, _)) = arms.iter_mut().find(|(_, of_arm)| *of_arm == settings) {
                arm.runs.push(run);
            } else {
                let label = char::from(b'A' + (arms.len() % 26) as u8).to_string();
                arms.push((Arm { label, name: String::new(), runs: vec![run] }, settings));
            }
        }
        let mut arms: Vec<Arm> = arms.into_iter().map(|(arm, _)| arm).collect();
        if bound.is_some() && arms.len() != 2 {
            let message = format!("requires two configurations, but these runs have {}", arms.len());
            return Err(Error::config("--bound", message));
        }
        let differences = differences(&arms);
        let differing = || differences.iter().filter(|difference| !is_among(&WITHIN_AN_ARM, &difference.key));
        for (i, arm) in arms.iter_mut().enumerate() {
            let differing_settings: Vec<_> = differing().map(|d| format!("{} = {}", d.key, d.values[i])).collect();
            arm.name = match &arm.runs[..] {
                [only] => only.name.clone(),
                _ if differing_settings.is_empty() => arm.runs[0].started.model.clone(),
                _ => differing_settings.join(", "),
            };
        }
        Ok(Self { arms, differences, bound, skip_bound: None })
    }

    /// Whether an arm has several runs.
    pub fn has_samples(&self) -> bool {
        self.arms.iter().any(|arm| arm.runs.len() > 1)
    }

    /// The second arm's figure minus the first's; `None` without two arms or without the figure.
    pub fn difference(&self, metric: &Metric) -> Option<Estimate> {
        let [first, second] = &self.arms[..] else { return None };
        Estimate::difference(&first.values(metric), &second.values(metric))
    }

    /// The metrics that at least one run has.
    pub fn metrics(&self) -> impl Iterator<Item = &'static Metric> {
        METRICS.iter().filter(|metric| self.arms.iter().any(|arm| !arm.values(metric).is_empty()))
    }

    /// The difference of two arms' final perplexities.
    pub fn perplexity(&self) -> Option<Estimate> {
        METRICS.iter().find(|metric| metric.key == "perplexity").and_then(|metric| self.difference(metric))
    }

    /// The verdict on the bound, if there is one.
    pub fn verdict(&self) -> Option<(f64, Verdict)> {
        let bound = self.bound?;
        let verdict = match self.perplexity().and_then(|estimate| estimate.interval()) {
            Some((low, high)) if low > bound || high < -bound => Verdict::Exceeded,
            Some((low, high)) if low >= -bound && high <= bound => Verdict::NotExceeded,
            _ => Verdict::Undecided,
        };
        Some((bound, verdict))
    }

    /// Adds a bound on the longest streak of skipped steps. Requires exactly two configurations.
    pub fn with_skip_bound(self, skip_bound: Option<f64>) -> Result<Self> {
        if skip_bound.is_some() && self.arms.len() != 2 {
            let message = format!("requires two configurations, but these runs have {}", self.arms.len());
            return Err(Error::config("--skip-bound", message));
        }
        Ok(Self { skip_bound, ..self })
    }

    /// Whether the second arm's longest streak of skipped steps exceeds the first's by more than the bound, if there is one.
    pub fn skip_verdict(&self) -> Option<(f64, Estimate, Verdict)> {
        let bound = self.skip_bound?;
        let metric = METRICS.iter().find(|metric| metric.key == "longest_streak")?;
        let estimate = self.difference(metric)?;
        let verdict = match estimate.interval() {
            Some((low, _)) if low > bound => Verdict::Exceeded,
            Some((_, high)) if high <= bound => Verdict::NotExceeded,
            _ => Verdict::Undecided,
        };
        Some((bound, estimate, verdict))
    }

    /// The comparison as JSON.
    pub fn json(&self) -> Value {
        let arms = self.arms.iter().map(|arm| {
            let runs = arm.runs.iter().enumerate().map(|(i, run)| {
                json!({
                    "label": arm.run_label(i),
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
                "label": arm.label,
                "name": arm.name,
                "runs": runs.collect::<Vec<_>>(),
                "means": by_key(|metric| arm.estimate(metric).map(|estimate| json!(estimate))),
            })
        });
        let differences = self.differences.iter().map(|d| json!({ "key": d.key, "values": d.values }));
        json!({
            "arms": arms.collect::<Vec<_>>(),
            "differences": differences.collect::<Vec<_>>(),
            "second_minus_first": (self.arms.len() == 2)
                .then(|| by_key(|metric| self.difference(metric).map(|estimate| json!(estimate)))),
            "skip_bound": self.skip_verdict().map(|(bound, estimate, verdict)| {
                json!({ "skips": bound, "difference": estimate, "verdict": verdict.name() })
            }),
            "bound": self.verdict().map(|(bound, verdict)| json!({ "perplexity": bound, "verdict": verdict.name() })),
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

/// The settings that differ between arms.
fn differences(arms: &[Arm]) -> Vec<Difference> {
    let settings: Vec<Vec<_>> = arms.iter().map(|arm| arm.runs.iter().map(RunSummary::settings).collect()).collect();
    let keys: BTreeSet<&String> = settings.iter().flatten().flat_map(BTreeMap::keys).collect();
    let of_arm = |runs: &[BTreeMap<String, String>], key: &str| {
        let values: BTreeSet<_> = runs.iter().map(|run| run.get(key).map_or(NONE, String::as_str)).collect();
        let mut values = values.into_iter();
        match (values.next(), values.next()) {
            (Some(only), None) => only.to_owned(),
            _ => "various".to_owned(),
        }
    };
    let differing_settings = keys.into_iter().filter(|key| !is_among(&NEVER_LISTED, key));
    let differences = differing_settings
        .map(|key| Difference { key: key.clone(), values: settings.iter().map(|runs| of_arm(runs, key)).collect() });
    differences.filter(|difference| difference.values.windows(2).any(|pair| pair[0] != pair[1])).collect()
}
