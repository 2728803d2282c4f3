//! The options of dynamic loss scaling, with PyTorch's names and defaults.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the loss scale starts and moves; the `[scaler]` table of a configuration file.
///
/// The first five options are `torch.amp.GradScaler`'s. Factors that are powers of two, as the defaults are, keep the
/// scale one too, so that scaling and unscaling are exact.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradScalerConfig {
    /// Whether there is a loss scale at all; without one the scale is 1 and stays there.
    pub enabled: bool,
    /// The scale of the first step.
    pub init_scale: f32,
    /// What the scale is multiplied with after `growth_interval` clean steps, unless that leaves f32's range; above 1.
    pub growth_factor: f64,
    /// What the scale is multiplied with after an overflow; between 0 and 1, exclusive.
    pub backoff_factor: f64,
    /// Clean steps in a row after which the scale grows.
    pub growth_interval: u32,
    /// The scale never backs off below this. PyTorch's has no floor and then multiplies gradients with a number above
    /// 1, which can overflow unseen; at a floor of 1 or more it cannot.
    pub min_scale: f32,
    /// Overflows in a row at the floor after which the run counts as diverged; 0 means never.
    pub patience: u32,
    /// Overflows it takes to back off. The others only skip their step; 1, PyTorch's rule, has no others.
    pub hysteresis: u32,
    /// What resets the count of `hysteresis`: `growth` of the scale, or any `clean` step.
    pub hysteresis_refill: HysteresisRefill,
    /// What happens to the batch of an overflowing step: `skip` or `retry`.
    pub on_overflow: OnOverflow,
    /// How the scale is chosen: `dynamic`, by trial, or `predictive`, from the headroom of the steps before.
    pub policy: ScalerPolicy,
}

/// What the scale is chosen by, as long as nothing overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScalerPolicy {
    /// By trial, as in PyTorch: it grows after a quiet stretch.
    #[default]
    Dynamic,
    /// By measure: the largest power of two that leaves room for gradients as large as those of late. See [`Headroom`].
    ///
    /// [`Headroom`]: super::Headroom
    Predictive,
}

/// What makes the count of [`GradScalerConfig::hysteresis`] start anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HysteresisRefill {
    /// Growth of the scale, as in DeepSpeed and Megatron.
    #[default]
    Growth,
    /// Any clean step, as in apex.
    Clean,
}

/// What happens to the batch of an overflowing step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOverflow {
    /// It is given up, as in PyTorch.
    #[default]
    Skip,
    /// It runs again at the scale that the overflow led to, so no data is lost.
    Retry,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            min_scale: 1.0,
            patience: 16,
            hysteresis: 1,
            hysteresis_refill: HysteresisRefill::Growth,
            on_overflow: OnOverflow::Skip,
            policy: ScalerPolicy::Dynamic,
        }
    }
}

impl GradScalerConfig {
    /// No loss scale.
    pub fn disabled() -> Self {
        Self { enabled: false, ..Self::default() }
    }

    /// Refuses values the scaler cannot work with, naming the option.
    pub fn validate(&self) -> Result<()> {
        check_scale("init_scale", self.init_scale)?;
        check_scale("min_scale", self.min_scale)?;
        check_factors(self.growth_factor, self.backoff_factor, self.growth_interval)?;
        if self.init_scale < self.min_scale {
            let (init, min) = (self.init_scale, self.min_scale);
            return Err(invalid(
                "init_scale",
                format!("{init} is below `min_scale` {min}; raise it or lower the floor"),
            ));
        }
        if self.hysteresis < 1 {
            return Err(invalid("hysteresis", "0 overflows cannot cause anything; use 1 or more".into()));
        }
        Ok(())
    }
}

/// The checks that a loaded state needs as much as a configuration.
pub(super) fn check_factors(growth_factor: f64, backoff_factor: f64, growth_interval: u32) -> Result<()> {
    if !(growth_factor > 1.0 && growth_factor.is_finite()) {
        return Err(invalid("growth_factor", format!("{growth_factor} must be finite and above 1")));
    }
    if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
        return Err(invalid("backoff_factor", format!("{backoff_factor} must lie between 0 and 1")));
    }
    if growth_interval < 1 {
        return Err(invalid("growth_interval", "must be 1 or more".into()));
    }
    Ok(())
}

/// Refuses a scale that is not finite and positive.
pub(super) fn check_scale(field: &str, scale: f32) -> Result<()> {
    if scale.is_finite() && scale > 0.0 {
        Ok(())
    } else {
        Err(invalid(field, format!("{scale} must be finite and positive")))
    }
}

fn invalid(field: &str, message: String) -> Error {
    Error::config(format!("scaler.{field}"), message)
}
