//! Statistics of a gradient before anything rescales it: whether it is finite, its magnitude, and what its type lost.

use crate::engine::kernels::isa;
use crate::engine::kernels::view::{View, host, read};
use crate::precision::{ExponentHistogram, FloatFormat, TensorStats};
use candle_core::{Result, Tensor};

/// A tensor's statistics and its histogram of exponents.
#[derive(Clone, Debug, Default)]
pub struct TensorSurvey {
    /// Counts, extremes and sum of squares.
    pub stats: TensorStats,
    /// Counts by binade; empty where none were asked for.
    pub exponents: ExponentHistogram,
}

impl TensorSurvey {
    /// Adds another part's figures.
    pub fn merge(&mut self, other: &Self) {
        self.stats.merge(&other.stats);
        self.exponents.merge(&other.exponents);
    }
}

/// Elements of a task. The tree in which parts are merged, and so the sums' bits, depend only on this.
const PART: usize = 1 << 16;

/// Surveys `tensor` on the host; a value counts as subnormal below the smallest normal value of `format`.
pub fn survey(tensor: &Tensor, format: FloatFormat, exponents: bool) -> Result<TensorSurvey> {
    let tensor = host(tensor)?;
    Ok(by_parts(read(&tensor)?.view(), format, exponents))
}

/// The sum of a tensor's values, in f64 in the order of its elements.
pub fn sum(tensor: &Tensor) -> Result<f64> {
    const WIDTH: usize = 1024;
    let tensor = read(tensor)?;
    let view = tensor.view();
    let (mut values, mut sum) = ([0.0; WIDTH], 0.0);
    for start in (0..view.len()).step_by(WIDTH) {
        let values = &mut values[..WIDTH.min(view.len() - start)];
        view.load(start, values);
        sum += values.iter().map(|x| f64::from(*x)).sum::<f64>();
    }
    Ok(sum)
}

fn by_parts(view: View<'_>, format: FloatFormat, exponents: bool) -> TensorSurvey {
    if view.len() <= PART {
        return isa::vectorize(
            #[inline(always)]
            || leaf(view, format, exponents),
        );
    }
    let cut = (view.len() / 2).next_multiple_of(PART).min(view.len() - 1);
    let (low, high) = (view.slice(0..cut), view.slice(cut..view.len()));
    let (mut low, high) = rayon::join(|| by_parts(low, format, exponents), || by_parts(high, format, exponents));
    low.merge(&high);
    low
}

#[inline(always)]
fn leaf(view: View<'_>, format: FloatFormat, exponents: bool) -> TensorSurvey {
    let mut survey = TensorSurvey::default();
    survey.stats = match (view, exponents) {
        (View::F32(x), false) => TensorStats::of(x, format),
        (View::F16(x), false) => TensorStats::of(x, format),
        (View::BF16(x), false) => TensorStats::of(x, format),
        (View::F32(x), true) => TensorStats::with_histogram(x, format, &mut survey.exponents),
        (View::F16(x), true) => TensorStats::with_histogram(x, format, &mut survey.exponents),
        (View::BF16(x), true) => TensorStats::with_histogram(x, format, &mut survey.exponents),
    };
    survey
}
