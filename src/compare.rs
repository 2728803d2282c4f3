//! Runs side by side: what differs in their configurations, and what came of it.
//!
//! Runs that differ in nothing but what cannot change their numbers and the seed are samples of one [`Arm`], so that the
//! effect of a setting can be told from luck: means with confidence intervals, and for two arms their difference.

pub(crate) mod chart;
mod html;
mod metrics;
mod page;
mod report;
mod run;
mod statistics;

pub use metrics::{METRICS, Metric};
pub use report::{Arm, Difference, Report, Verdict};
pub use run::{Figures, RunSummary};
pub use statistics::Estimate;
