//! The scales of simulated FP8, from a tensor's recent maxima.
//!
//! FP8 has too little range for a loss scale alone, so each operand of a matrix product has its own scale. Delayed
//! scaling takes it from the largest magnitudes of earlier steps (Micikevicius et al., *FP8 Formats for Deep Learning*,
//! 2022): the tensor is read only once, and values that exceed its history saturate at the format's largest value.

use super::FloatFormat;
use crate::settings::settings;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::str::FromStr;

settings! {
    /// Settings of blocks whose matrix products use FP8 operands.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Fp8Config {
        /// The blocks whose matrix products use simulated FP8 operands, counted from 0: a number, a range such as 1-4,
        /// several with commas, or all; none by default.
        block: Option<BlockRanges> = None;
        /// The number of recent steps whose maxima determine a scale.
        amax_history_len: usize = 16;
        /// A block enters FP8 when the running mean of its gradient variance is at most this; without it, FP8 is
        /// always on.
        enter_variance: Option<f64> = None;
        /// It leaves FP8 if that mean exceeds `enter_variance` times this; 1 for a single threshold.
        exit_ratio: f64 = 2.0;
    }
}

/// Ranges of blocks, written `0,2-4` or `all`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "toml::Value", into = "toml::Value")]
pub struct BlockRanges(Vec<RangeInclusive<usize>>);

impl BlockRanges {
    /// Whether a block is among them.
    pub fn contains(&self, block: usize) -> bool {
        self.0.iter().any(|range| range.contains(&block))
    }

    /// The largest block that they name.
    pub fn last(&self) -> Option<usize> {
        self.0.iter().map(|range| *range.end()).filter(|last| *last < usize::MAX).max()
    }
}

impl From<usize> for BlockRanges {
    fn from(block: usize) -> Self {
        Self(vec![block..=block])
    }
}

impl FromStr for BlockRanges {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self(vec![0..=usize::MAX]));
        }
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.trim().parse().ok()?..=last.trim().parse().ok()?).filter(|range| !range.is_empty())
        };
        text.split(',')
            .map(range)
            .collect::<Option<_>>()
            .map(Self)
            .ok_or_else(|| "use `all`, or blocks such as `0,2-4`".into())
    }
}

impl TryFrom<toml::Value> for BlockRanges {
    type Error = String;

    /// Configurations write one block as a number.
    fn try_from(value: toml::Value) -> Result<Self, String> {
        value.as_str().map_or_else(|| value.to_string(), str::to_owned).parse()
    }
}

impl From<BlockRanges> for toml::Value {
    fn from(BlockRanges(ranges): BlockRanges) -> Self {
        let text = |range: &RangeInclusive<usize>| match (*range.start(), *range.end()) {
            (0, usize::MAX) => "all".to_owned(),
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        };
        match &ranges[..] {
            [range] if range.start() == range.end() => Self::Integer(*range.start() as i64),
            ranges => Self::String(ranges.iter().map(text).collect::<Vec<_>>().join(",")),
        }
    }
}

impl Fp8Config {
    /// Rejects invalid settings.
    pub fn validate(&self) -> Result<()> {
        if self.amax_history_len == 0 {
            return Err(Error::config("precision.fp8.amax_history_len", "must be at least 1"));
        }
        if self.enter_variance.is_some_and(|variance| !(variance > 0.0 && variance.is_finite())) {
            return Err(Error::config("precision.fp8.enter_variance", "must be finite and positive"));
        }
        if !(self.exit_ratio >= 1.0 && self.exit_ratio.is_finite()) {
            return Err(Error::config("precision.fp8.exit_ratio", "must be finite and at least 1"));
        }
        Ok(())
    }

    /// Whether the block uses FP8 from now on, given whether it did and the running mean of its gradient variance.
    pub fn switched(&self, active: bool, mean: f64) -> bool {
        let leaves = if active { self.exit_ratio } else { 1.0 };
        self.enter_variance.is_none_or(|enters| mean <= enters * leaves)
    }
}

/// The largest magnitudes of a tensor in the last steps, newest last.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AmaxHistory(Vec<f32>);

impl AmaxHistory {
    /// Adds a step's maximum, and drops those older than `length` steps.
    pub fn push(&mut self, amax: f32, length: usize) {
        self.0.push(amax);
        self.0.drain(..self.0.len().saturating_sub(length));
    }

    /// The largest power of two that keeps the largest of them within `format`; `None` without a step.
    pub fn scale(&self, format: FloatFormat) -> Option<f32> {
        let amax = self.0.iter().copied().reduce(f32::max)?;
        Some(scale_for(amax, format))
    }
}

/// The saved state of a block in FP8.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fp8State {
    /// The index of the block.
    pub block: usize,
    /// Whether its matrix products use FP8 now.
    pub active: bool,
    /// The running mean of its gradient variance.
    pub variance: Option<f64>,
    /// The history of each tensor.
    pub amax: Vec<AmaxHistory>,
}

/// The largest power of two that keeps `amax` within `format`; 1 for zero and for values that are not finite.
pub fn scale_for(amax: f32, format: FloatFormat) -> f32 {
    if !(amax > 0.0 && amax.is_finite()) {
        return 1.0;
    }
    let exponent = (format.max() / f64::from(amax)).log2().floor() as i32;
    2f32.powi(exponent.clamp(-100, 100))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_of_blocks_are_written_as_they_were_read() {
        for text in ["3", "\"1-4\"", "\"0,2-4,9\"", "\"all\""] {
            let ranges: BlockRanges = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&ranges).unwrap(), text);
        }
        let ranges: BlockRanges = "0, 2-3".parse().unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|block| ranges.contains(block)), [true, false, true, true, false]);
    }

    #[test]
    fn a_scale_follows_the_largest_of_the_last_steps() {
        let mut history = AmaxHistory::default();
        assert_eq!(history.scale(FloatFormat::E4M3), None);
        history.push(1.0, 2);
        assert_eq!(history.scale(FloatFormat::E4M3), Some(256.0), "448 fits 256, not 512");
        history.push(448.0, 2);
        assert_eq!(history.scale(FloatFormat::E4M3), Some(1.0));
        assert_eq!(history.scale(FloatFormat::E5M2), Some(128.0));
        history.push(0.5, 2);
        assert_eq!(history.scale(FloatFormat::E4M3), Some(1.0), "the maximum is one of the last two");
        history.push(0.5, 2);
        assert_eq!(history.scale(FloatFormat::E4M3), Some(512.0));
        assert_eq!([0.0, f32::INFINITY, f32::NAN].map(|amax| scale_for(amax, FloatFormat::E4M3)), [1.0; 3]);
    }

    #[test]
    fn values_above_the_history_saturate_and_infinity_stays() {
        let e4m3 = FloatFormat::E4M3;
        assert_eq!(e4m3.round_scaled(1000.0, 1.0), 448.0);
        assert_eq!(e4m3.round_scaled(-3.0, 256.0), -448.0 / 256.0);
        assert_eq!(e4m3.round_scaled(1.06, 256.0), 1.0);
        assert_eq!(e4m3.round_scaled(f32::NEG_INFINITY, 1.0), f32::NEG_INFINITY);
        assert!(e4m3.round_scaled(f32::NAN, 1.0).is_nan());
    }

    proptest! {
        #[test]
        fn rounding_is_idempotent_and_close(x in -1e6f32..1e6, spare in 0i32..4) {
            for (format, bits) in [(FloatFormat::E4M3, 3), (FloatFormat::E5M2, 2)] {
                let scale = scale_for(x.abs(), format) * 2f32.powi(-spare);
                let rounded = format.round_scaled(x, scale);
                prop_assert_eq!(format.round_scaled(rounded, scale).to_bits(), rounded.to_bits());
                // Values just below 2^9 saturate at 448 = 1.75 · 2^8 instead of rounding up.
                prop_assert!((rounded - x).abs() <= x.abs() * 2f32.powi(-bits), "{} {} {}", format.name, x, rounded);
            }
        }
    }

    #[test]
    fn a_mean_that_hovers_around_the_threshold_switches_once() {
        let moves = |exit_ratio, means: &[f64]| {
            let config = Fp8Config { enter_variance: Some(1.0), exit_ratio, ..Fp8Config::default() };
            let mut active = false;
            let states = means.iter().map(|mean| {
                active = config.switched(active, *mean);
                active
            });
            let states: Vec<bool> = std::iter::once(false).chain(states).collect();
            states.windows(2).filter(|pair| pair[0] != pair[1]).count()
        };
        let hovering: Vec<f64> = (0..26).map(|i| if i % 2 == 0 { 0.9 } else { 1.1 }).collect();
        assert_eq!([1.0, 1.05, 2.0].map(|hysteresis| moves(hysteresis, &hovering)), [26, 26, 1]);
        assert_eq!(moves(2.0, &[0.9, 2.0, 2.1, 1.1, 1.0]), 3, "in, out above 2, in again at 1");
    }
}
