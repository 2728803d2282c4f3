//! `torch.amp.GradScaler` for candle's `GradStore`: applies the state machine of [`precision::GradScaler`] to tensors.
//!
//! [`precision::GradScaler`]: crate::precision::GradScaler

use super::stages::Stages;
use super::{ScaledOptimizer, upcast};
use crate::precision::{self, GradScalerConfig, ScaleChange, ScalerMode, StateDict};
use crate::{Error, Result};
use candle_core::{Tensor, Var, backprop::GradStore};

/// Scales losses, unscales gradients, skips steps whose gradients are not finite, and adjusts the scale.
///
/// Methods, defaults and rules are PyTorch's, with these differences:
/// - `unscale` widens half-precision gradients to FP32 in the store, because they would otherwise underflow when
///   unscaled; PyTorch rejects such gradients.
/// - Gradients are checked a second time, right before the optimizer runs. This detects values that become infinite
///   when a scale below 1 is removed, or that the program breaks between `unscale` and `step`. PyTorch lets both into
///   the weights; here the step is skipped and counts as an overflow.
/// - The scale has a floor, and consecutive overflows at the floor are counted: see [`is_stuck`](Self::is_stuck).
///
/// The configuration's `on_overflow` is up to the loop, which can repeat a batch if [`step`](Self::step) returns that
/// it was skipped. Each check of an optimizer's gradients reads one number from the device.
#[derive(Debug, Clone)]
pub struct GradScaler {
    scaler: precision::GradScaler,
    stages: Stages,
    /// Whether the second check of a `step` since the last update found a value that is not finite.
    found_inf_late: bool,
}

impl GradScaler {
    /// A scaler at its initial scale. Errors name the invalid option.
    pub fn new(config: GradScalerConfig) -> Result<Self> {
        if config.mode != ScalerMode::Dynamic {
            let message = "`predictive` needs gradient magnitudes, which this scaler does not measure; use `dynamic`";
            return Err(Error::config("scaler.mode", message));
        }
        let scaler = precision::GradScaler::new(config)?;
        Ok(Self { scaler, stages: Stages::default(), found_inf_late: false })
    }

    /// Whether scaling is enabled. If not, `scale`, `unscale` and `update` do nothing and `step` always runs the
    /// optimizer, so that one loop serves all types.
    pub const fn is_enabled(&self) -> bool {
        self.scaler.config().enabled
    }

    /// The current scale; 1 if disabled.
    pub const fn get_scale(&self) -> f32 {
        self.scaler.scale()
    }

    /// The factor on the scale after `growth_interval` clean steps.
    pub const fn get_growth_factor(&self) -> f64 {
        self.scaler.config().growth_factor
    }

    /// The factor on the scale after an overflow.
    pub const fn get_backoff_factor(&self) -> f64 {
        self.scaler.config().backoff_factor
    }

    /// The number of consecutive clean steps after which the scale grows.
    pub const fn get_growth_interval(&self) -> u32 {
        self.scaler.config().growth_interval
    }

    /// Sets the growth factor. An error that changes nothing unless it is finite and above 1.
    pub fn set_growth_factor(&mut self, factor: f64) -> Result<()> {
        self.scaler.set_factors(factor, self.get_backoff_factor(), self.get_growth_interval())
    }

    /// Sets the backoff factor. An error that changes nothing unless it is between 0 and 1.
    pub fn set_backoff_factor(&mut self, factor: f64) -> Result<()> {
        self.scaler.set_factors(self.get_growth_factor(), factor, self.get_growth_interval())
    }

    /// Sets the growth interval; earlier clean steps count. An error that changes nothing if it is 0.
    pub fn set_growth_interval(&mut self, steps: u32) -> Result<()> {
        self.scaler.set_factors(self.get_growth_factor(), self.get_backoff_factor(), steps)
    }

    /// [`scale`](Self::scale) for several tensors, such as the outputs of several heads.
    pub fn scale_all(&self, losses: &[Tensor]) -> Result<Vec<Tensor>> {
        losses.iter().map(|loss| self.scale(loss)).collect()
    }

    /// `loss` times the scale; a loss in half precision is widened to FP32 first, so that the product does not
    /// overflow.
    ///
    /// Compute losses in FP32: the gradient of a loss *computed* in FP16 is the scale rounded to FP16, which is
    /// infinite for scales of 65520 and more.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !loss.dtype().is_float() {
            return Err(Error::Scaler(format!("a loss of {:?} has no gradient; compute it in F32", loss.dtype())));
        }
        if !self.is_enabled() {
            return Ok(loss.clone());
        }
        Ok(upcast(loss)?.affine(f64::from(self.get_scale()), 0.0)?)
    }

    /// Divides the gradients of `optimizer` by the scale and records whether all of them were finite.
    ///
    /// Only needed to use gradients before the step, for example to clip them. Skips variables without a gradient. An
    /// error that changes nothing if called twice between updates.
    pub fn unscale(&mut self, optimizer: &impl ScaledOptimizer, grads: &mut GradStore) -> Result<()> {
        let vars = optimizer.vars();
        if !self.is_enabled() || vars.iter().all(|var| grads.get(var).is_none()) {
            return Ok(());
        }
        self.stages.record_unscale(optimizer.id(), !all_finite(vars, grads)?)?;
        let inverse = self.scaler.inverse();
        for var in vars {
            if let Some(grad) = grads.get(var) {
                let grad = upcast(&grad.detach())?;
                let unscaled = if inverse == 1.0 { grad } else { grad.affine(f64::from(inverse), 0.0)? };
                grads.insert(var, unscaled);
            }
        }
        Ok(())
    }

    /// Unscales the gradients if [`unscale`](Self::unscale) was not called, and runs `optimizer` if they are finite;
    /// returns whether it ran.
    ///
    /// An error if none of its variables has a gradient, or if called twice between updates.
    pub fn step<O: ScaledOptimizer>(&mut self, optimizer: &mut O, grads: &mut GradStore) -> Result<bool> {
        if self.is_enabled() {
            if self.stages.is_ready(optimizer.id()) {
                self.unscale(optimizer, grads)?;
            }
            if !self.stages.record_step(optimizer.id())? {
                return Ok(false);
            }
            if !all_finite(optimizer.vars(), grads)? {
                self.found_inf_late = true;
                return Ok(false);
            }
        }
        optimizer.step(grads)?;
        Ok(true)
    }

    /// Adjusts the scale after the steps of all optimizers; returns the change and its cause. One optimizer's overflow
    /// is enough to lower the scale. An error if no gradient was checked since the last update.
    pub fn update(&mut self) -> Result<ScaleChange> {
        if !self.is_enabled() {
            return Ok(ScaleChange::Held);
        }
        let found_inf = self.stages.finish()? | std::mem::take(&mut self.found_inf_late);
        Ok(self.scaler.update(!found_inf))
    }

    /// PyTorch's `update(new_scale)`: sets the scale regardless of overflows and keeps the growth tracker. An error if
    /// `new_scale` is not finite and positive.
    pub fn update_to(&mut self, new_scale: f32) -> Result<()> {
        self.scaler.set_scale(new_scale)?;
        self.stages.clear();
        self.found_inf_late = false;
        Ok(())
    }

    /// Whether training should stop, because `max_overflows_at_min_scale` consecutive overflows occurred at the scale's
    /// floor.
    pub const fn is_stuck(&self) -> bool {
        self.scaler.is_stuck()
    }

    /// PyTorch's state, under its keys; `None`, like its empty dictionary, if disabled. Call it after an update.
    pub fn state_dict(&self) -> Option<StateDict> {
        self.scaler.state_dict()
    }

    /// Restores scale, tracker, factors and interval; does nothing if disabled. An empty state or a value out of range
    /// is an error and changes nothing.
    pub fn load_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        self.scaler.load_state_dict(state)
    }
}

/// Whether every gradient of `vars` is finite, for any type, strides and device.
///
/// 0 · x is NaN exactly where x is not finite, and sums propagate NaN. So the sum cannot overflow, and the host reads a
/// single number.
fn all_finite(vars: &[Var], grads: &GradStore) -> Result<bool> {
    let mut total: Option<Tensor> = None;
    for grad in vars.iter().filter_map(|var| grads.get(var)) {
        let zero = grad.affine(0.0, 0.0)?.sum_all()?.to_dtype(candle_core::DType::F32)?;
        total = Some(match total {
            None => zero,
            Some(total) => (&total + zero.to_device(total.device())?)?,
        });
    }
    Ok(total.map(|total| total.to_scalar::<f32>()).transpose()?.is_none_or(f32::is_finite))
}
