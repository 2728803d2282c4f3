//! The options of loss scaling, with PyTorch's names and defaults.

use crate::settings::Heading::LossScale;
use crate::settings::settings;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

settings! {
    /// The initial loss scale and how it changes; the `[scaler]` table of a configuration file.
    ///
    /// The first five options are `torch.amp.GradScaler`'s. With factors that are powers of two, like the defaults, the
    /// scale stays a power of two, so that scaling and unscaling are exact.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct GradScalerConfig {
        /// Whether losses are scaled; if not, the scale stays 1.
        enabled: bool = true;
        /// The scale of the first step.
        init_scale: f32 = 65536.0, fixed(), flag("init-scale", LossScale, 0, "X"), help("The first loss scale");
        /// Whether to measure the gradients before the first step, and to begin at a lower scale if they would
        /// overflow.
        measure_first: bool = false, fixed();
        /// Factor on the scale after `growth_interval` clean steps, unless that overflows f32; above 1.
        growth_factor: f64 = 2.0;
        /// Factor on the scale after an overflow; between 0 and 1, exclusive.
        backoff_factor: f64 = 0.5;
        /// Consecutive clean steps after which the scale grows.
        growth_interval: u32 = 2000, flag("growth-interval", LossScale, 0, "N"),
            help("Steps without an overflow before the scale grows");
        /// The scale never backs off below this. PyTorch has no minimum and may multiply gradients by a number above 1,
        /// which can overflow undetected; a minimum of at least 1 prevents this.
        min_scale: f32 = 1.0;
        /// Consecutive overflows at `min_scale` after which the run counts as diverged; 0 for never.
        max_overflows_at_min_scale: u32 = 16;
        /// Overflows before the scale backs off; earlier ones only skip their step. 1 is PyTorch's rule.
        hysteresis: u32 = 1;
        /// Whether every clean step resets the count for `hysteresis`, as in apex, and not only a growth of the scale,
        /// as in DeepSpeed's default and Megatron.
        consecutive_hysteresis: bool = false;
        /// Whether to `skip` the batch of an overflowing step, or `retry` it at the lower scale.
        on_overflow: OnOverflow = OnOverflow::Skip;
        /// How the scale is chosen: `dynamic`, by trial, or `predictive`, from the headroom of earlier steps.
        mode: ScalerMode = ScalerMode::Dynamic;
    }
}

/// How the scale is chosen without an overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScalerMode {
    /// By trial, as in PyTorch: it grows after a number of clean steps.
    #[default]
    Dynamic,
    /// By measurement: the largest power of two with headroom for gradients as large as recent ones. See [`Headroom`].
    ///
    /// [`Headroom`]: super::Headroom
    Predictive,
}

/// Whether the batch of an overflowing step is skipped or repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnOverflow {
    /// It is skipped, as in PyTorch.
    #[default]
    Skip,
    /// It is repeated at the lower scale, so no data is lost.
    Retry,
}

impl GradScalerConfig {
    /// No loss scale.
    pub fn disabled() -> Self {
        Self { enabled: false, ..Self::default() }
    }

    /// Rejects invalid values, naming the option.
    pub fn validate(&self) -> Result<()> {
        check_scale("init_scale", self.init_scale)?;
        check_scale("min_scale", self.min_scale)?;
        check_factors(self.growth_factor, self.backoff_factor, self.growth_interval)?;
        if self.init_scale < self.min_scale {
            let (init, min) = (scale_text(self.init_scale), scale_text(self.min_scale));
            return Err(invalid(
                "init_scale",
                format!("{init} is below `min_scale` {min}; raise `init_scale` or lower `min_scale`"),
            ));
        }
        if self.hysteresis < 1 {
            return Err(invalid("hysteresis", "must be at least 1".into()));
        }
        Ok(())
    }
}

/// log2 of a scale that is a power of two.
pub fn exact_log2(scale: f32) -> Option<f32> {
    Some(scale.log2()).filter(|exponent| exponent.is_finite() && exponent.fract() == 0.0)
}

/// A loss scale as a user may type it: `2^15` if it is a power of two.
pub fn scale_text(scale: f32) -> String {
    exact_log2(scale).map_or_else(|| format!("{scale:e}"), |exponent| format!("2^{exponent}"))
}

/// The checks for configurations and loaded states.
pub(super) fn check_factors(growth_factor: f64, backoff_factor: f64, growth_interval: u32) -> Result<()> {
    if !(growth_factor > 1.0 && growth_factor.is_finite()) {
        return Err(invalid("growth_factor", format!("{growth_factor} must be finite and above 1")));
    }
    if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
        return Err(invalid("backoff_factor", format!("{backoff_factor} must be between 0 and 1")));
    }
    if growth_interval < 1 {
        return Err(invalid("growth_interval", "must be at least 1".into()));
    }
    Ok(())
}

/// Rejects a scale that is not finite and positive.
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
