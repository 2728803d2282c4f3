//! Layer fallback: units of a model that overflow too often compute in a wider dtype than the policy's.
//!
//! A unit that overflows repeatedly costs skipped steps, or limits the loss scale of all others. In FP32 or BF16 it
//! does not overflow, and the others stay as fast as they were.

use super::{Dtype, Fp8Config};
use crate::settings::settings;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// A part of the model with its own compute dtype: a block, or everything outside the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PrecisionUnit {
    /// A transformer block.
    Block(usize),
    /// The embeddings, the final norm and the LM head; written `head`. One unit, because tied embeddings are the head's
    /// weight.
    NonBlock,
}

impl PrecisionUnit {
    /// The unit of a module or parameter, such as `h.3.mlp.c_fc`, `layers.3.mlp.up_proj` or `wte.weight`.
    pub fn of(name: &str) -> Self {
        let block = ["h.", "layers."]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix))
            .and_then(|rest| rest.split('.').next());
        block.and_then(|number| number.parse().ok()).map_or(Self::NonBlock, Self::Block)
    }
}

impl fmt::Display for PrecisionUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(block) => f.pad(&format!("h.{block}")),
            Self::NonBlock => f.pad("head"),
        }
    }
}

impl FromStr for PrecisionUnit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = Self::of(text);
        if unit.to_string() == text { Ok(unit) } else { Err(format!("`{text}` is neither `h.N` nor `head`")) }
    }
}

impl TryFrom<String> for PrecisionUnit {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PrecisionUnit> for String {
    fn from(unit: PrecisionUnit) -> Self {
        unit.to_string()
    }
}

/// A set of units, written `h.3,head`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct UnitSet(pub BTreeSet<PrecisionUnit>);

impl TryFrom<String> for UnitSet {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl From<UnitSet> for String {
    fn from(UnitSet(units): UnitSet) -> Self {
        units.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
}

/// Which units fall back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FallbackRule {
    /// None: every layer computes in the policy's dtype.
    #[default]
    Off,
    /// Single units: a block, or everything outside the blocks.
    Layer,
}

settings! {
    /// The rules for a layer to leave the policy's compute dtype and to return to it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct PrecisionConfig {
        /// Whether updates accumulate in FP32 masters. Without them, which is for comparisons, each update is rounded
        /// into the weights of the compute dtype, and smaller ones than half a unit in the last place are lost.
        masters: bool = true, fixed();
        /// Whether layers that overflow too often switch to a wider dtype: `off` or `layer`.
        fallback: FallbackRule = FallbackRule::Off;
        /// Layers that always compute in `fallback_dtype`, such as `h.3,head`; `finetune bisect` finds them.
        keep: UnitSet = UnitSet::default();
        /// The compute dtype of layers in fallback: `f32` or `bf16`.
        fallback_dtype: Dtype = Dtype::F32;
        /// Overflows within `fallback_window` steps that make a layer fall back.
        fallback_overflows: usize = 3;
        /// The window, in steps, in which `fallback_overflows` are counted.
        fallback_window: u64 = 500;
        /// Overflows of the backward pass count only at loss scales up to this; at a higher one the scale is the cause.
        fallback_max_scale: f32 = 65536.0;
        /// Consecutive steps whose gradients fit the policy's dtype before a layer returns to it; 0 for never.
        fallback_cooldown: u64 = 0;
        /// Blocks whose matrix products use simulated FP8.
        fp8: Fp8Config = Fp8Config::default(), section(Fp8Config::settings);
    }
}

impl PrecisionConfig {
    /// Rejects settings that are invalid or have no effect.
    pub fn validate(&self, compute: Dtype) -> Result<()> {
        let refuse = |key: &str, message: String| Err(Error::config(format!("precision.{key}"), message));
        if self.fallback_dtype == Dtype::F16 {
            return refuse("fallback_dtype", "a layer in fallback cannot compute in `f16`; use `f32` or `bf16`".into());
        }
        if self.fallback_overflows == 0 || self.fallback_window == 0 {
            return refuse("fallback_overflows", "this and `fallback_window` must be at least 1".into());
        }
        if self.fallback != FallbackRule::Off && compute != Dtype::F16 {
            let message = format!("fallback needs FP16, but this run computes in `{compute}`; remove the setting");
            return refuse("fallback", message);
        }
        let is_kept = !self.keep.0.is_empty();
        if is_kept && (compute == Dtype::F32 || compute == self.fallback_dtype) {
            let message = format!("this run computes in `{compute}`, which is not narrower; remove the setting");
            return refuse("keep", message);
        }
        self.fp8.validate()?;
        if self.fp8.block.is_some() && (is_kept || self.fallback != FallbackRule::Off) {
            let message = "layers in a wider dtype and FP8 cannot be combined; remove `precision.fp8.block`";
            return refuse(if is_kept { "keep" } else { "fallback" }, message.into());
        }
        if self.fp8.block.is_some() && compute == Dtype::F32 {
            return refuse(
                "fp8.block",
                "FP8 needs a working copy of the weights, which an FP32 run lacks; use fp16 or bf16".into(),
            );
        }
        Ok(())
    }
}

/// The history of a unit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitRecord {
    /// Steps in the window in which it overflowed.
    pub overflows: Vec<u64>,
    /// The step after which it fell back, if it has.
    pub since: Option<u64>,
    /// Consecutive steps since then whose gradients would have fit the policy's dtype.
    pub clean_steps: u64,
}

/// The units that overflowed or fell back, and when.
#[derive(Debug, Clone, PartialEq)]
pub struct Fallback {
    config: PrecisionConfig,
    /// The state that a checkpoint saves.
    pub units: BTreeMap<PrecisionUnit, UnitRecord>,
}

impl Fallback {
    /// Starts from a checkpoint's `units`, or none. If the rule is off, no unit is in fallback.
    pub fn new(config: PrecisionConfig, units: BTreeMap<PrecisionUnit, UnitRecord>) -> Self {
        let units = if config.fallback == FallbackRule::Off { BTreeMap::new() } else { units };
        Self { config, units }
    }

    /// Whether fallback is enabled.
    pub fn is_on(&self) -> bool {
        self.config.fallback != FallbackRule::Off
    }

    /// The compute dtype of units in fallback.
    pub fn dtype(&self) -> Dtype {
        self.config.fallback_dtype
    }

    /// The units in fallback, and those that the configuration keeps in its dtype.
    pub fn active(&self) -> impl Iterator<Item = PrecisionUnit> {
        let fallen = self.units.iter().filter(|(_, record)| record.since.is_some()).map(|(unit, _)| *unit);
        self.config.keep.0.iter().copied().chain(fallen.filter(|unit| !self.config.keep.0.contains(unit)))
    }

    /// Records that the overflow of attempted step `step` began in `unit`. Returns the number of overflows in the
    /// window if the unit falls back now.
    pub fn overflowed(&mut self, unit: PrecisionUnit, step: u64) -> Option<usize> {
        if !self.is_on() || self.config.keep.0.contains(&unit) {
            return None;
        }
        let PrecisionConfig { fallback_overflows, fallback_window, .. } = self.config;
        let record = self.units.entry(unit).or_default();
        record.clean_steps = 0;
        if record.since.is_some() {
            return None;
        }
        record.overflows.retain(|earlier| earlier + fallback_window > step);
        record.overflows.push(step);
        let count = record.overflows.len();
        if count < fallback_overflows {
            return None;
        }
        record.overflows.clear();
        record.since = Some(step);
        Some(count)
    }

    /// Records a clean step. `fits` returns whether a unit's gradients would have fit the policy's dtype. Returns the
    /// units that go back to it.
    pub fn clean(&mut self, mut fits: impl FnMut(PrecisionUnit) -> bool) -> Vec<PrecisionUnit> {
        let wanted = self.config.fallback_cooldown;
        let mut back = Vec::new();
        if wanted == 0 {
            return back;
        }
        for (&unit, record) in self.units.iter_mut().filter(|(_, record)| record.since.is_some()) {
            record.clean_steps = if fits(unit) { record.clean_steps + 1 } else { 0 };
            if record.clean_steps >= wanted {
                back.push(unit);
            }
        }
        for unit in &back {
            self.units.remove(unit);
        }
        back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After three overflows within ten steps, for at least four.
    fn fallback(fallback_cooldown: u64) -> Fallback {
        let rule = PrecisionConfig { fallback: FallbackRule::Layer, fallback_window: 10, ..PrecisionConfig::default() };
        Fallback::new(PrecisionConfig { fallback_cooldown, ..rule }, BTreeMap::new())
    }

    #[test]
    fn a_unit_falls_back_at_the_third_overflow_within_the_window() {
        let mut state = fallback(4);
        let one = PrecisionUnit::Block(1);
        assert_eq!([1, 5, 11, 16].map(|step| state.overflowed(one, step)), [None; 4], "never three within ten steps");
        assert_eq!(state.overflowed(PrecisionUnit::NonBlock, 17), None, "overflows are counted by unit");
        assert_eq!(state.overflowed(one, 20), Some(3), "11, 16, 20");
        assert_eq!(state.active().collect::<Vec<_>>(), [one]);
        assert_eq!(state.units[&one].since, Some(20));
        assert_eq!(state.overflowed(one, 21), None, "it has fallen back already");
    }

    #[test]
    fn it_returns_after_consecutive_quiet_steps_and_counts_from_zero() {
        let mut state = fallback(4);
        let (one, two) = (PrecisionUnit::Block(1), PrecisionUnit::Block(2));
        for step in 1..=3 {
            let _ = (state.overflowed(one, step), state.overflowed(two, step));
        }
        let mut quiet = |fits_two: bool| state.clean(|unit| unit == one || fits_two);
        assert_eq!([quiet(true), quiet(true), quiet(false)], [[]; 3]);
        assert_eq!([quiet(true), quiet(true)], [vec![one], vec![]]);
        assert_eq!(state.active().collect::<Vec<_>>(), [two], "it did not fit in the third step");
        assert_eq!(state.overflowed(one, 9), None, "a unit that returned counts from zero");
        let mut never = fallback(0);
        (1..=3).for_each(|step| assert!(never.overflowed(one, step).is_none() || step == 3));
        assert!((0..1000).all(|_| never.clean(|_| true).is_empty()));
    }

    #[test]
    fn nothing_is_recorded_if_it_is_off() {
        let mut state =
            Fallback::new(PrecisionConfig::default(), [(PrecisionUnit::NonBlock, UnitRecord::default())].into());
        assert!(!state.is_on() && (0..100).all(|step| state.overflowed(PrecisionUnit::NonBlock, step).is_none()));
        assert!(state.units.is_empty(), "a checkpoint's units are discarded too");
    }

    #[test]
    fn units_have_names_and_keep_them_in_json() {
        for (name, unit) in [
            ("h.3.mlp.c_fc.weight", PrecisionUnit::Block(3)),
            ("h.11.attn", PrecisionUnit::Block(11)),
            ("layers.7.mlp.down_proj.weight", PrecisionUnit::Block(7)),
            ("wte.weight", PrecisionUnit::NonBlock),
            ("lm_head", PrecisionUnit::NonBlock),
        ] {
            assert_eq!(PrecisionUnit::of(name), unit);
        }
        let record = UnitRecord { overflows: vec![7], since: Some(9), clean_steps: 2 };
        let units =
            BTreeMap::from([(PrecisionUnit::Block(10), UnitRecord::default()), (PrecisionUnit::NonBlock, record)]);
        let json = serde_json::to_string(&units).unwrap();
        assert!(json.starts_with(r#"{"h.10":{"overflows":[],"#) && json.contains(r#""head":{"#), "{json}");
        assert_eq!(serde_json::from_str::<BTreeMap<PrecisionUnit, UnitRecord>>(&json).unwrap(), units);
    }
}
