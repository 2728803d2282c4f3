//! Gradient statistics: of all gradients, of one tensor, of each layer.

use crate::precision::{ExponentHistogram, UpdateCounts};
use crate::telemetry::float;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Statistics of scaled gradients as their dtype stores them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GradStats {
    /// Elements.
    pub count: u64,
    /// Smallest magnitude above zero; `None` if all are zero.
    pub min_abs: Option<f32>,
    /// Largest finite magnitude.
    pub max_abs: f32,
    /// Exact zeros, whether true or flushed.
    pub zero: u64,
    /// Subnormal values.
    pub subnormal: u64,
    /// Infinities.
    pub inf: u64,
    /// NaNs.
    pub nan: u64,
    /// Euclidean norm.
    #[serde(with = "float")]
    pub norm: f64,
    /// The number of finite non-zero values with exponent e, 2^e ≤ |g| < 2^(e+1): pairs (e, count) in ascending e,
    /// without zero counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exponents: Vec<(i16, u64)>,
}

impl GradStats {
    /// The share of `part` of the elements; `None` without elements.
    pub fn share(&self, part: u64) -> Option<f64> {
        (self.count > 0).then(|| part as f64 / self.count as f64)
    }

    /// log2 of the magnitude, divided by `scale`, that 1 % of the non-zero values are below; `None` if exponents were
    /// not counted. In a large model the minimum itself is the format's smallest magnitude in every step.
    pub fn log2_p1(&self, scale: f32) -> Option<f64> {
        Some(self.histogram().log2_quantile(0.01)? - f64::from(scale).log2())
    }

    /// The exponent counts as an [`ExponentHistogram`].
    pub fn histogram(&self) -> ExponentHistogram {
        let counts = self.exponents.iter().map(|&(exponent, count)| (i32::from(exponent), count));
        let mut histogram = ExponentHistogram::from_counts(counts);
        histogram.zero = self.zero;
        histogram.inf = self.inf;
        histogram.nan = self.nan;
        histogram
    }

    /// Elements that are infinite or NaN.
    pub fn not_finite(&self) -> u64 {
        self.inf.saturating_add(self.nan)
    }
}

/// Statistics of one tensor's gradient.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TensorRecord {
    /// The parameter's name.
    pub name: String,
    /// Its gradient.
    #[serde(flatten)]
    pub stats: GradStats,
    /// The part of its update that its 16-bit weights show, if it was counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost_updates: Option<UpdateCounts>,
}

/// The largest gradient of each layer in a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GradMax {
    /// The step.
    pub step: u64,
    /// Its loss scale.
    pub loss_scale: f32,
    /// The largest finite magnitude of the scaled gradient's elements, by layer: a block, `h.3`, or `head`.
    pub layers: BTreeMap<String, f32>,
}

/// Tensors whose gradient contained 2^-24, FP16's smallest magnitude, for the first time in the run. Smaller values
/// were flushed to zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnderflowOnset {
    /// The step.
    pub step: u64,
    /// The parameters' names, in order.
    pub tensors: Vec<String>,
}

/// The variance of each layer's gradient in an applied step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GradVariance {
    /// The step.
    pub step: u64,
    /// The variance of the *unscaled* gradient's elements, by layer: a block, `h.3`, or `head`.
    pub layers: BTreeMap<String, f64>,
}
