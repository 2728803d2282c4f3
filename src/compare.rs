//! Compares runs: the differences in their configurations and results.
//!
//! Runs that differ only in the seed and in settings without effect on the numbers are samples of one [`RunGroup`], to distinguish
//! the effect of a setting from chance: means with confidence intervals, and for two groups their difference.

mod html;
mod metrics;
mod page;
mod report;
mod run;
mod statistics;

pub use metrics::{METRICS, Metric};
pub use report::{Comparison, EquivalenceVerdict, RunGroup, SettingDifference};
pub use run::{RunMetrics, RunSummary};
pub use statistics::Estimate;
