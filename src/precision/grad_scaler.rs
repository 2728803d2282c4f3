//! The loss scale as a pure state machine: whether each step's gradients were finite in, the change of the scale out.
//!
//! Semantics are `torch.amp.GradScaler`'s, with four deliberate differences: the scale has a floor (see
//! [`GradScalerConfig::min_scale`]); the growth tracker is compared with `>=`, so an interval lowered below it still
//! grows the scale; invalid values are rejected, also in a loaded state; and `update` returns the change.
//! Programs with several optimizers add [`OptimizerStages`](super::OptimizerStages).

use serde::{Deserialize, Serialize};

use super::scaler_config::{check_factors, check_scale};
use super::{FloatFormat, GradScalerConfig, Headroom, HysteresisRefill, ScalerPolicy};
use crate::{Error, Result};

/// The change of the scale by an update, and its cause.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ScaleChange {
    /// No change: there were too few clean steps, growth would overflow f32, or hysteresis absorbed an overflow.
    Held,
    /// `growth_interval` clean steps passed, or the predictive rule found enough headroom.
    Grew {
        /// The scale before.
        from: f32,
        /// The scale from now on.
        to: f32,
    },
    /// The predictive rule found too little headroom. Nothing overflowed.
    Lowered {
        /// The scale before.
        from: f32,
        /// The scale from now on.
        to: f32,
    },
    /// An overflow; the step must be skipped.
    BackedOff {
        /// The scale before.
        from: f32,
        /// The scale from now on.
        to: f32,
    },
    /// An overflow while the scale is at its floor or disabled.
    AtFloor {
        /// The scale, which stays.
        scale: f32,
        /// Consecutive overflows at the floor, including this one.
        streak: u32,
    },
}

/// The mutable state of a [`GradScaler`]; together with the configuration, all that a checkpoint needs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The loss scale.
    pub scale: f32,
    /// Clean steps since the last overflow or growth.
    pub growth_tracker: u32,
    /// Overflows left until the scale backs off, including that one.
    pub hysteresis_left: u32,
    /// Consecutive overflows at the floor.
    pub floor_streak: u32,
    /// The measurements of the predictive rule; `None` under the dynamic rule, and before the first clean step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headroom: Option<Headroom>,
}

/// `torch.amp.GradScaler.state_dict()`, under PyTorch's keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateDict {
    /// The loss scale.
    pub scale: f32,
    /// See [`GradScalerConfig::growth_factor`].
    pub growth_factor: f64,
    /// See [`GradScalerConfig::backoff_factor`].
    pub backoff_factor: f64,
    /// See [`GradScalerConfig::growth_interval`].
    pub growth_interval: u32,
    /// See [`ScalerState::growth_tracker`].
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: u32,
}

/// The loss scale and the rule that adjusts it.
///
/// A step multiplies the loss's gradient by [`scale`](Self::scale), checks whether all gradients are finite, applies them
/// times [`inverse`](Self::inverse) if so, and reports the result to [`update`](Self::update).
#[derive(Debug, Clone, PartialEq)]
pub struct GradScaler {
    config: GradScalerConfig,
    state: ScalerState,
}

impl GradScaler {
    /// A scaler at its initial scale. *Errors name the invalid option.
    pub fn new(config: GradScalerConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self::start(config))
    }

    /// A scaler whose scale is always 1, so that one code path serves all dtypes.
    pub fn disabled() -> Self {
        Self::start(GradScalerConfig::disabled())
    }

    /// A scaler that continues from a saved state.
    pub fn resume(config: GradScalerConfig, state: ScalerState) -> Result<Self> {
        config.validate()?;
        check_scale("scale", state.scale)?;
        if state.hysteresis_left == 0 {
            return Err(Error::Scaler("the saved state is damaged: `hysteresis_left` is 0".into()));
        }
        // The configuration may have changed since the state was saved.
        let hysteresis_left = state.hysteresis_left.min(config.hysteresis);
        Ok(Self { config, state: ScalerState { hysteresis_left, ..state } })
    }

    fn start(config: GradScalerConfig) -> Self {
        let scale = if config.enabled { config.init_scale } else { 1.0 };
        let hysteresis_left = config.hysteresis;
        Self {
            config,
            state: ScalerState { scale, growth_tracker: 0, hysteresis_left, floor_streak: 0, headroom: None },
        }
    }

    /// The options.
    pub const fn config(&self) -> &GradScalerConfig {
        &self.config
    }

    /// The state for a checkpoint; see [`resume`](Self::resume).
    pub const fn state(&self) -> ScalerState {
        self.state
    }

    /// The factor for the loss; 1 if disabled.
    pub const fn scale(&self) -> f32 {
        self.state.scale
    }

    /// The factor that unscales gradients: 1/scale, divided in f64 and rounded once, as in PyTorch. With a scale below 1 it is
    /// above 1, so that unscaling may overflow and callers must check again.
    pub const fn inverse(&self) -> f32 {
        (1.0 / self.state.scale as f64) as f32
    }

    /// Adjusts the scale after a step, given whether all of its gradients were finite. Without their maximum, the predictive rule
    /// acts like the dynamic one: see [`update_measured`](Self::update_measured).
    pub fn update(&mut self, grads_finite: bool) -> ScaleChange {
        self.move_scale(grads_finite, None)
    }

    /// Whether the predictive rule is in use.
    pub fn is_predictive(&self) -> bool {
        self.config.enabled && self.config.policy == ScalerPolicy::Predictive
    }

    /// Adjusts the scale after a step whose largest finite scaled gradient was `max_abs`.
    pub fn update_measured(&mut self, grads_finite: bool, max_abs: f32) -> ScaleChange {
        let measured = self.config.policy == ScalerPolicy::Predictive && grads_finite && max_abs > 0.0;
        self.move_scale(grads_finite, measured.then_some(max_abs))
    }

    fn move_scale(&mut self, grads_finite: bool, max_abs: Option<f32>) -> ScaleChange {
        if grads_finite {
            self.state.floor_streak = 0;
            if self.config.enabled { self.after_clean_step(max_abs) } else { ScaleChange::Held }
        } else if self.config.enabled {
            self.after_overflow()
        } else {
            self.at_floor()
        }
    }

    fn after_clean_step(&mut self, max_abs: Option<f32>) -> ScaleChange {
        if self.config.hysteresis_refill == HysteresisRefill::Clean {
            self.state.hysteresis_left = self.config.hysteresis;
        }
        self.state.growth_tracker = self.state.growth_tracker.saturating_add(1);
        let from = self.state.scale;
        let to = match max_abs {
            Some(max_abs) => self.predict(max_abs),
            None if self.state.growth_tracker < self.config.growth_interval => from,
            None => {
                self.state.growth_tracker = 0;
                self.state.hysteresis_left = self.config.hysteresis;
                times(from, self.config.growth_factor)
            }
        };
        if to == from || !to.is_finite() {
            return ScaleChange::Held;
        }
        self.state.growth_tracker = 0;
        self.state.scale = to;
        if to < from {
            return ScaleChange::Lowered { from, to };
        }
        self.state.hysteresis_left = self.config.hysteresis;
        ScaleChange::Grew { from, to }
    }

    /// The scale with headroom for gradients like the last ones and this clean step's.
    fn predict(&mut self, max_abs: f32) -> f32 {
        let log2 = max_abs.log2() - self.state.scale.log2();
        let headroom = self.state.headroom.get_or_insert_with(|| Headroom::new(log2));
        headroom.add_clean(log2, self.config.growth_interval);
        predicted(*headroom, &self.config)
    }

    /// Whether the predictive rule has no measurement yet.
    pub fn wants_measure(&self) -> bool {
        let GradScalerConfig { enabled, policy, .. } = self.config;
        enabled && policy == ScalerPolicy::Predictive && self.state.headroom.is_none()
    }

    /// Gives the predictive rule the largest *unscaled* gradient, including activation gradients, of a step that overflowed, or
    /// of the first one before it runs, and returns the new scale: after an overflow, at most the one backed off to. Does
    /// nothing under the dynamic rule.
    pub fn measure(&mut self, largest: f32) -> f32 {
        let GradScalerConfig { enabled, policy, .. } = self.config;
        if enabled && policy == ScalerPolicy::Predictive && largest > 0.0 && largest.is_finite() {
            let log2 = largest.log2();
            let highest = self.state.headroom.map_or(f32::INFINITY, |_| self.state.scale);
            let headroom = self.state.headroom.get_or_insert_with(|| Headroom::new(log2));
            // Replace the estimate from the overflow.
            headroom.replace_excess(log2);
            self.state.scale = predicted(*headroom, &self.config).min(highest);
        }
        self.state.scale
    }

    fn after_overflow(&mut self) -> ScaleChange {
        self.state.growth_tracker = 0;
        if self.state.hysteresis_left > 1 {
            self.state.hysteresis_left -= 1;
            return ScaleChange::Held;
        }
        let from = self.state.scale;
        if from <= self.config.min_scale {
            return self.at_floor();
        }
        let mut to = times(from, self.config.backoff_factor).max(self.config.min_scale);
        if let Some(headroom) = &mut self.state.headroom {
            // The largest gradient is only known to exceed FP16's maximum: assume by half a binade.
            headroom.add_overflow(top_log2() + 0.5 - from.log2());
            to = to.min(predicted(*headroom, &self.config));
        }
        self.state.scale = to;
        ScaleChange::BackedOff { from, to }
    }

    fn at_floor(&mut self) -> ScaleChange {
        self.state.floor_streak = self.state.floor_streak.saturating_add(1);
        ScaleChange::AtFloor { scale: self.state.scale, streak: self.state.floor_streak }
    }

    /// Whether `patience` consecutive overflows occurred at the floor, so that no scale helps.
    pub const fn is_stuck(&self) -> bool {
        self.config.patience > 0 && self.state.floor_streak >= self.config.patience
    }

    /// PyTorch's `update(new_scale)`: sets the scale and leaves the growth tracker alone. Does nothing when disabled.
    pub fn set_scale(&mut self, scale: f32) -> Result<()> {
        check_scale("scale", scale)?;
        if self.config.enabled {
            self.state.scale = scale;
        }
        Ok(())
    }

    /// Changes the factors and the interval for later updates; keeps scale and tracker. An error changes nothing.
    pub fn set_factors(&mut self, growth_factor: f64, backoff_factor: f64, growth_interval: u32) -> Result<()> {
        check_factors(growth_factor, backoff_factor, growth_interval)?;
        self.config = GradScalerConfig { growth_factor, backoff_factor, growth_interval, ..self.config };
        Ok(())
    }

    /// The state that PyTorch also has; `None`, like its empty dictionary, if disabled.
    pub fn state_dict(&self) -> Option<StateDict> {
        let GradScalerConfig { enabled, growth_factor, backoff_factor, growth_interval, .. } = self.config;
        let ScalerState { scale, growth_tracker, .. } = self.state;
        enabled.then_some(StateDict { scale, growth_factor, backoff_factor, growth_interval, growth_tracker })
    }

    /// Restores scale, tracker, factors and interval, and resets the rest. Does nothing if disabled. An empty state or a value
    /// out of range is an error and changes nothing.
    pub fn load_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        let state = state.ok_or_else(|| {
            Error::Scaler("the saved state is empty: it comes from a disabled scaler; start a new one instead".into())
        })?;
        check_scale("scale", state.scale)?;
        check_factors(state.growth_factor, state.backoff_factor, state.growth_interval)?;
        self.config.growth_factor = state.growth_factor;
        self.config.backoff_factor = state.backoff_factor;
        self.config.growth_interval = state.growth_interval;
        self.state = ScalerState {
            scale: state.scale,
            growth_tracker: state.growth_tracker,
            hysteresis_left: self.config.hysteresis,
            floor_streak: 0,
            headroom: None,
        };
        Ok(())
    }
}

/// The largest power of two with the headroom needed, within the limits of the configuration and f32.
fn predicted(headroom: Headroom, config: &GradScalerConfig) -> f32 {
    2f32.powi(headroom.log2_scale().clamp(-126, 127)).max(config.min_scale)
}

/// log2 of FP16's largest number.
fn top_log2() -> f32 {
    FloatFormat::FP16.max().log2() as f32
}

/// A scale times a factor, rounded once to f32 as PyTorch's kernel does.
fn times(scale: f32, factor: f64) -> f32 {
    (f64::from(scale) * factor) as f32
}
