//! Compares runs: the differences in their configurations and results.
//!
//! Runs that differ only in the seed and in settings without effect on the numbers are samples of one [`Arm`], to distinguish
//! the effect of a setting from chance: means with confidence intervals, and for two arms their difference.

mod html;
mod metrics;
mod page;
mod report;
mod run;
mod statistics;

pub use metrics::{METRICS, Metric};
pub use report::{Arm, Difference, Report, Verdict};
pub use run::{RunMetrics, RunSummary};
pub use statistics::Estimate;
