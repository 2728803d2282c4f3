//! Compares runs: the differences in their configurations and results.
//!
//! Runs that differ only in the seed and in settings without effect on the numbers are samples of one `RunGroup`, to
//! distinguish the effect of a setting from chance: means with confidence intervals, and for two groups their
//! difference.

mod html;
mod metrics;
mod page;
mod report;
mod run;
mod statistics;

pub(crate) use metrics::METRICS;
pub(crate) use report::Comparison;
pub(crate) use run::RunSummary;
