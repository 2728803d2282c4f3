//! Converts a step's results to the records of [`crate::telemetry`].

use crate::engine::kernels::summary::TensorSummary;
use crate::engine::model::ParamSpec;
use crate::precision::UpdateCounts;
use crate::telemetry::{GradStats, TensorRecord};

pub(super) fn grad_stats(summary: &TensorSummary) -> GradStats {
    let stats = &summary.stats;
    GradStats {
        count: stats.count,
        min_abs: stats.min_nonzero,
        max_abs: stats.max_abs,
        zero: stats.zero,
        subnormal: stats.subnormal,
        inf: stats.inf,
        nan: stats.nan,
        norm: if stats.is_finite() { stats.norm() } else { f64::NAN },
        exponents: summary.exponents.iter().map(|(exponent, count)| (exponent as i16, count)).collect(),
    }
}

pub(super) fn tensor_record((entry, summary): (&ParamSpec, &TensorSummary)) -> TensorRecord {
    TensorRecord { name: entry.name.clone(), stats: grad_stats(summary), lost_updates: None }
}

/// The counts of all tensors together; `None` if none was counted.
pub(super) fn sum(counts: &[UpdateCounts]) -> Option<UpdateCounts> {
    let mut sum = UpdateCounts::default();
    for counts in counts {
        sum += *counts;
    }
    (sum.elements > 0).then_some(sum)
}
