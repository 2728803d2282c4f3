//! Rows for lists of a run's events, overflows and samples, each kept in bounded memory.

use crate::telemetry::{Event, FirstNonFinite, Overflow, ScaleCause, ScaleUpdate, TensorRecord};
use std::collections::VecDeque;

/// Maximum number of rows kept of each kind.
pub(super) const OVERFLOWS: usize = 1000;
pub(super) const EVENTS: usize = 4000;
pub(super) const SAMPLES: usize = 200;
/// Maximum number of tensors kept of an overflow.
const NAMED: usize = 16;

/// An event with its time.
#[derive(Debug, Clone, PartialEq)]
pub struct EventRow {
    /// Run-relative seconds.
    pub s: f64,
    /// The step it belongs to.
    pub step: u64,
    /// The event without long tables. An overflow keeps its worst tensors, the worst first.
    pub event: Event,
    /// Number of an overflow's tensors that were left out.
    pub more: usize,
}

impl EventRow {
    /// An event worth listing; `None` for phases, figures of layers, and steps whose scale neither grew nor was
    /// lowered.
    pub(super) fn of(s: f64, step: u64, event: &Event) -> Option<Self> {
        let mut more = 0;
        let event = match event {
            Event::GradVariance(_) | Event::GradMax(_) | Event::Phase { .. } => return None,
            Event::Step(step) => {
                if !matches!(step.scale.cause, ScaleCause::Grew | ScaleCause::Lowered) {
                    return None;
                }
                let mut step = step.clone();
                step.tensors.clear();
                step.grads.exponents.clear();
                Event::Step(step)
            }
            Event::Overflow(overflow) => {
                let (mut worst, others) = worst(&overflow.tensors);
                for tensor in &mut worst {
                    tensor.stats.exponents.clear();
                }
                more = others;
                Event::Overflow(Overflow {
                    tensors: worst,
                    first_nonfinite: overflow.first_nonfinite.clone(),
                    ..*overflow
                })
            }
            other => other.clone(),
        };
        Some(Self { s, step, event, more })
    }
}

/// A skipped step.
#[derive(Debug, Clone, PartialEq)]
pub struct OverflowRow {
    /// The step.
    pub step: u64,
    /// The scale before and after.
    pub scale: ScaleUpdate,
    /// The names of the tensors that overflowed, by descending share of elements that are not finite.
    pub tensors: Vec<String>,
    /// Number of tensors left out.
    pub more: usize,
    /// The first tensor that was not finite, if the overflow was traced.
    pub origin: Option<FirstNonFinite>,
}

impl OverflowRow {
    pub(super) fn of(overflow: &Overflow) -> Self {
        let (tensors, more) = worst(&overflow.tensors);
        let tensors = tensors.into_iter().map(|tensor| tensor.name).collect();
        Self { step: overflow.step, scale: overflow.scale, tensors, more, origin: overflow.first_nonfinite.clone() }
    }
}

/// A generated text with the smoothed loss at that moment.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// Steps attempted before it.
    pub step: u64,
    /// The smoothed loss.
    pub loss: Option<f64>,
    /// The prompt.
    pub prompt: String,
    /// The text generated.
    pub text: String,
}

/// The tensors with the largest shares of elements that are not finite, the worst first, and the number of the others.
fn worst(tensors: &[TensorRecord]) -> (Vec<TensorRecord>, usize) {
    let share = |tensor: &TensorRecord| tensor.stats.not_finite() as f64 / tensor.stats.count.max(1) as f64;
    let mut worst: Vec<_> = tensors.iter().collect();
    worst.sort_by(|a, b| share(b).total_cmp(&share(a)));
    worst.truncate(NAMED);
    (worst.into_iter().cloned().collect(), tensors.len().saturating_sub(NAMED))
}

/// Adds a row, and drops the oldest if there are already `capacity`.
pub(super) fn keep<T>(rows: &mut VecDeque<T>, row: T, capacity: usize) {
    if rows.len() == capacity {
        rows.pop_front();
    }
    rows.push_back(row);
}
