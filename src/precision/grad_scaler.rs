//! The loss scale as a pure state machine: [`GradScaler`].

use super::scaler_config::{check_factors, check_scale};
use super::{FloatFormat, GradScalerConfig, Headroom, ScalerMode};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The change of the scale by an update, and its cause.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ScaleChange {
    /// No change: there were too few clean steps, growth would overflow f32, or hysteresis absorbed an overflow.
    Held,
    /// `growth_interval` clean steps passed, or the predictive rule found enough headroom.
    Grew {
        /// The scale before the update.
        from: f32,
        /// The scale after the update.
        to: f32,
    },
    /// The predictive rule found too little headroom. Nothing overflowed.
    Lowered {
        /// The scale before the update.
        from: f32,
        /// The scale after the update.
        to: f32,
    },
    /// An overflow; the step must be skipped.
    BackedOff {
        /// The scale before the update.
        from: f32,
        /// The scale after the update.
        to: f32,
    },
    /// An overflow while the scale is at `min_scale`, or disabled.
    AtMinScale {
        /// The scale, which does not change.
        scale: f32,
        /// Consecutive overflows at `min_scale`, including this one.
        streak: u32,
    },
}

/// The mutable state of a [`GradScaler`], which a checkpoint saves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The loss scale; if disabled, the one to continue with when it is enabled.
    pub scale: f32,
    /// Clean steps since the last overflow or growth.
    pub growth_tracker: u32,
    /// Overflows until the scale backs off, including the one that backs off; at least 1.
    pub hysteresis_left: u32,
    /// Consecutive overflows at `min_scale`.
    pub min_scale_streak: u32,
    /// The measurements of the predictive mode; `None` in the dynamic mode, and before the first clean step.
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

/// The loss scale, adjusted after every step so that FP16 gradients neither overflow nor vanish.
///
/// ```text
/// scale = init_scale; tracker = 0; hysteresis_left = hysteresis
/// for each step:
///     grads = backward(loss · scale)
///     if all grads are finite:
///         optimizer.step(grads / scale)
///         if consecutive_hysteresis: hysteresis_left = hysteresis
///         tracker += 1
///         if mode == predictive: next = the largest power of two with headroom (see `Headroom`)
///         else if tracker >= growth_interval: next = scale · growth_factor, tracker = 0, hysteresis_left = hysteresis
///         else: next = scale
///         if next is finite and next != scale:
///             if next > scale: hysteresis_left = hysteresis
///             scale = next, tracker = 0
///     else:                                        # skip the optimizer
///         tracker = 0
///         if hysteresis_left > 1: hysteresis_left -= 1
///         else if scale > min_scale: scale = max(scale · backoff_factor, min_scale)
///         else: stop after max_overflows_at_min_scale of these in a row
/// ```
///
/// This is `torch.amp.GradScaler` with four differences: `min_scale`; the tracker is compared with `>=`, so that an
/// interval lowered below it still grows the scale; invalid values are rejected, also in a loaded state; and
/// [`update`](Self::update) returns the change.
#[derive(Debug, Clone, PartialEq)]
pub struct GradScaler {
    config: GradScalerConfig,
    state: ScalerState,
}

impl GradScaler {
    /// A scaler at its initial scale.
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
            return Err(Error::Scaler(
                "the saved scaler state is damaged: `hysteresis_left` is 0 but must be at least 1".into(),
            ));
        }
        // The configuration may have changed since the state was saved.
        let hysteresis_left = state.hysteresis_left.min(config.hysteresis);
        let headroom = state.headroom.filter(|_| config.mode == ScalerMode::Predictive);
        let scale = state.scale.max(config.min_scale);
        Ok(Self { config, state: ScalerState { scale, hysteresis_left, headroom, ..state } })
    }

    fn start(config: GradScalerConfig) -> Self {
        let (scale, hysteresis_left) = (config.init_scale, config.hysteresis);
        let state = ScalerState { scale, growth_tracker: 0, hysteresis_left, min_scale_streak: 0, headroom: None };
        Self { config, state }
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
        if self.config.enabled { self.state.scale } else { 1.0 }
    }

    /// The factor that unscales gradients: 1/scale, divided in f64 and rounded once, as in PyTorch. If the scale is
    /// below 1, unscaling can overflow, so callers must check again.
    pub const fn inverse(&self) -> f32 {
        (1.0 / self.scale() as f64) as f32
    }

    /// Adjusts the scale after a step, given whether all of its gradients were finite. Without their maximum, which
    /// [`update_with_amax`](Self::update_with_amax) takes, the predictive mode acts like the dynamic one.
    pub fn update(&mut self, grads_finite: bool) -> ScaleChange {
        self.move_scale(grads_finite, None)
    }

    /// Whether the predictive mode is in use.
    pub fn is_predictive(&self) -> bool {
        self.config.enabled && self.config.mode == ScalerMode::Predictive
    }

    /// Adjusts the scale after a step whose largest finite scaled gradient was `max_abs`.
    pub fn update_with_amax(&mut self, grads_finite: bool, max_abs: f32) -> ScaleChange {
        let measured = self.config.mode == ScalerMode::Predictive && grads_finite && max_abs > 0.0;
        self.move_scale(grads_finite, measured.then_some(max_abs))
    }

    fn move_scale(&mut self, grads_finite: bool, max_abs: Option<f32>) -> ScaleChange {
        if grads_finite {
            self.state.min_scale_streak = 0;
            if self.config.enabled { self.after_clean_step(max_abs) } else { ScaleChange::Held }
        } else if self.config.enabled {
            self.after_overflow()
        } else {
            self.at_min_scale()
        }
    }

    fn after_clean_step(&mut self, max_abs: Option<f32>) -> ScaleChange {
        if self.config.consecutive_hysteresis {
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

    /// The largest power of two at which gradients whose largest is `largest`, unscaled, have headroom.
    pub fn scale_for(&self, largest: f32) -> f32 {
        predicted(Headroom::new(largest.log2()), &self.config)
    }

    /// Lowers the scale to [`Self::scale_for`] `largest`. Does nothing if disabled.
    pub fn lower_for(&mut self, largest: f32) {
        if self.config.enabled {
            self.state.scale = self.state.scale.min(self.scale_for(largest));
        }
    }

    /// Whether the predictive mode has no measurement yet, so that it needs [`set_amax`](Self::set_amax).
    pub fn needs_amax(&self) -> bool {
        self.is_predictive() && self.state.headroom.is_none()
    }

    /// Sets the largest *unscaled* gradient, including activation gradients, of a step that overflowed, or of the first
    /// step before it runs. Returns the new scale, which after an overflow is at most the current one. Does nothing in
    /// the dynamic mode.
    pub fn set_amax(&mut self, largest: f32) -> f32 {
        if self.is_predictive() && largest > 0.0 && largest.is_finite() {
            let log2 = largest.log2();
            let highest = self.state.headroom.map_or(f32::INFINITY, |_| self.state.scale);
            let headroom = self.state.headroom.get_or_insert_with(|| Headroom::new(log2));
            // Replaces the estimate that the overflow made.
            headroom.replace_peak_deviation(log2);
            self.state.scale = predicted(*headroom, &self.config).min(highest);
        }
        self.scale()
    }

    fn after_overflow(&mut self) -> ScaleChange {
        self.state.growth_tracker = 0;
        if self.state.hysteresis_left > 1 {
            self.state.hysteresis_left -= 1;
            return ScaleChange::Held;
        }
        let from = self.state.scale;
        if from <= self.config.min_scale {
            return self.at_min_scale();
        }
        let mut to = times(from, self.config.backoff_factor).max(self.config.min_scale);
        if let Some(headroom) = &mut self.state.headroom {
            // The largest gradient exceeds FP16's maximum by an unknown factor: assume half a binade.
            headroom.add_overflow(FloatFormat::FP16.max().log2() as f32 + 0.5 - from.log2());
            to = to.min(predicted(*headroom, &self.config));
        }
        self.state.scale = to;
        ScaleChange::BackedOff { from, to }
    }

    fn at_min_scale(&mut self) -> ScaleChange {
        self.state.min_scale_streak = self.state.min_scale_streak.saturating_add(1);
        ScaleChange::AtMinScale { scale: self.scale(), streak: self.state.min_scale_streak }
    }

    /// Whether `max_overflows_at_min_scale` consecutive overflows occurred at the minimum, so that no scale helps.
    pub const fn is_stuck(&self) -> bool {
        self.config.max_overflows_at_min_scale > 0
            && self.state.min_scale_streak >= self.config.max_overflows_at_min_scale
    }

    /// PyTorch's `update(new_scale)`: sets the scale and keeps the growth tracker. Does nothing if disabled.
    pub fn set_scale(&mut self, scale: f32) -> Result<()> {
        check_scale("scale", scale)?;
        if self.config.enabled {
            self.state.scale = scale;
        }
        Ok(())
    }

    /// Sets the factors and the interval of later updates; keeps scale and tracker. A value out of range is an error
    /// and changes nothing.
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

    /// Restores scale, tracker, factors and interval, and resets the rest. Does nothing if disabled. An empty state or
    /// a value out of range is an error and changes nothing.
    pub fn load_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        let state = state.ok_or_else(|| {
            Error::Scaler(
                "the saved scaler state is empty, because the scaler was disabled; start with a new scaler instead"
                    .into(),
            )
        })?;
        check_scale("scale", state.scale)?;
        check_factors(state.growth_factor, state.backoff_factor, state.growth_interval)?;
        let StateDict { scale, growth_factor, backoff_factor, growth_interval, growth_tracker } = *state;
        *self = Self::start(GradScalerConfig { growth_factor, backoff_factor, growth_interval, ..self.config });
        self.state.scale = scale;
        self.state.growth_tracker = growth_tracker;
        Ok(())
    }
}

/// The largest power of two with enough headroom, within the limits of the configuration and f32.
fn predicted(headroom: Headroom, config: &GradScalerConfig) -> f32 {
    2f32.powi(headroom.log2_scale().clamp(-126, 127)).max(config.min_scale)
}

/// A scale times a factor, rounded once to f32 as PyTorch's kernel does.
fn times(scale: f32, factor: f64) -> f32 {
    (f64::from(scale) * factor) as f32
}
