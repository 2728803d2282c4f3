//! `torch.amp.GradScaler` for candle's `GradStore`: the scale's state machine is [`precision::GradScaler`]'s, here are
//! the tensors.
//!
//! [`precision::GradScaler`]: crate::precision::GradScaler

use candle_core::{Tensor, Var, backprop::GradStore};

use super::{OptimizerId, ScaledOptimizer, widen};
use crate::precision::{self, GradScalerConfig, OptimizerStages, ScaleChange, ScalerPolicy, StateDict};
use crate::{Error, Result};

/// Scales losses, unscales gradients, skips the steps of gradients that are not finite, and moves the scale.
///
/// Methods, defaults and rules are PyTorch's, with these differences:
/// - `unscale` widens half-precision gradients to FP32 in the store. What the scale has saved from underflow would
///   otherwise be lost at its last division; PyTorch refuses such gradients.
/// - Gradients are looked at a second time, right before the optimizer runs. It finds what a scale below 1 makes
///   infinite in unscaling, and what the program broke between `unscale` and `step`. PyTorch lets both into the weights;
///   here the step is skipped and counts as an overflow. Parameters the program broke itself are found a step later, by
///   their gradients.
/// - The scale has a floor and counts the overflows that meet it: see [`is_stuck`](Self::is_stuck).
///
/// The configuration's `on_overflow` is for the loop to honour: a batch can be run again when [`step`](Self::step) says
/// that it was skipped. The host reads one number from the device for every look at an optimizer's gradients.
#[derive(Debug, Clone)]
pub struct GradScaler {
    scaler: precision::GradScaler,
    stages: OptimizerStages<OptimizerId>,
    /// The second look of a `step` since the last update found what the first did not.
    found_inf_late: bool,
}

impl GradScaler {
    /// A scaler at its initial scale. Errors name the option that makes no sense.
    pub fn new(config: GradScalerConfig) -> Result<Self> {
        if config.policy != ScalerPolicy::Dynamic {
            let message = "`predictive` needs to know how large gradients are, and nothing here looks: use `dynamic`";
            return Err(Error::config("scaler.policy", message));
        }
        let scaler = precision::GradScaler::new(config)?;
        Ok(Self { scaler, stages: OptimizerStages::new(), found_inf_late: false })
    }

    /// Whether there is a scale. Without one `scale` and `unscale` change nothing, `step` always runs the optimizer and
    /// `update` does nothing, so that one loop serves all types.
    pub const fn is_enabled(&self) -> bool {
        self.scaler.config().enabled
    }

    /// The scale as it is now; 1 where disabled.
    pub const fn get_scale(&self) -> f32 {
        self.scaler.scale()
    }

    /// What the scale is multiplied with after `growth_interval` clean steps.
    pub const fn get_growth_factor(&self) -> f64 {
        self.scaler.config().growth_factor
    }

    /// What the scale is multiplied with after an overflow.
    pub const fn get_backoff_factor(&self) -> f64 {
        self.scaler.config().backoff_factor
    }

    /// Clean steps in a row after which the scale grows.
    pub const fn get_growth_interval(&self) -> u32 {
        self.scaler.config().growth_interval
    }

    /// Sets the growth factor. An error, which changes nothing, unless it is finite and above 1.
    pub fn set_growth_factor(&mut self, factor: f64) -> Result<()> {
        self.scaler.set_factors(factor, self.get_backoff_factor(), self.get_growth_interval())
    }

    /// Sets the backoff factor. An error, which changes nothing, unless it lies between 0 and 1.
    pub fn set_backoff_factor(&mut self, factor: f64) -> Result<()> {
        self.scaler.set_factors(self.get_growth_factor(), factor, self.get_growth_interval())
    }

    /// Sets the growth interval; the clean steps so far count. An error, which changes nothing, if it is 0.
    pub fn set_growth_interval(&mut self, steps: u32) -> Result<()> {
        self.scaler.set_factors(self.get_growth_factor(), self.get_backoff_factor(), steps)
    }

    /// [`scale`](Self::scale) for several tensors, the outputs of several heads for example, in their order.
    pub fn scale_all(&self, losses: &[Tensor]) -> Result<Vec<Tensor>> {
        losses.iter().map(|loss| self.scale(loss)).collect()
    }

    /// `loss` times the scale, of the same shape; a loss in half precision is widened to FP32 first, where the product
    /// has room.
    ///
    /// The gradient of a loss that was *computed* in FP16 is the scale rounded to FP16, infinite from 65520 on: compute
    /// losses in FP32, or the first step only serves to find that out.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !loss.dtype().is_float() {
            return Err(Error::Scaler(format!("a loss of {:?} has no gradient; compute it in F32", loss.dtype())));
        }
        if !self.is_enabled() {
            return Ok(loss.clone());
        }
        Ok(widen(loss)?.affine(f64::from(self.get_scale()), 0.0)?)
    }

    /// Divides the gradients of `optimizer` by the scale and remembers whether all of them were finite before.
    ///
    /// Only for programs that look at gradients before the step, to clip them for example. Variables without a gradient
    /// are skipped. An error, which leaves the gradients alone, if this was done since the last update.
    pub fn unscale(&mut self, optimizer: &impl ScaledOptimizer, grads: &mut GradStore) -> Result<()> {
        let vars = optimizer.vars();
        if !self.is_enabled() || vars.iter().all(|var| grads.get(var).is_none()) {
            return Ok(());
        }
        self.stages.record_unscale(optimizer.id(), !all_finite(vars, grads)?)?;
        let inverse = self.scaler.inverse();
        for var in vars {
            if let Some(grad) = grads.get(var) {
                let grad = widen(&grad.detach())?;
                let unscaled = if inverse == 1.0 { grad } else { grad.affine(f64::from(inverse), 0.0)? };
                grads.insert(var, unscaled);
            }
        }
        Ok(())
    }

    /// Runs `optimizer` on its gradients if they are finite, and says whether it did; unscales them before, unless that
    /// was done.
    ///
    /// An error if none of its variables has a gradient, or if it has stepped since the last update.
    pub fn step<O: ScaledOptimizer>(&mut self, optimizer: &mut O, grads: &mut GradStore) -> Result<bool> {
        if self.is_enabled() {
            if self.stages.is_ready(&optimizer.id()) {
                self.unscale(optimizer, grads)?;
            }
            if !self.stages.record_step(&optimizer.id())? {
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

    /// Moves the scale after the steps of all optimizers, says what it did and why, and starts the next round. One
    /// optimizer's overflow is enough to lower the scale. An error if no gradient was checked since the last update.
    pub fn update(&mut self) -> Result<ScaleChange> {
        if !self.is_enabled() {
            return Ok(ScaleChange::Held);
        }
        let found_inf = self.stages.finish()? | std::mem::take(&mut self.found_inf_late);
        Ok(self.scaler.update(!found_inf))
    }

    /// PyTorch's `update(new_scale)`: sets the scale whatever was found, leaves the growth tracker alone and starts the
    /// next round. An error if `new_scale` is not finite and positive.
    pub fn update_to(&mut self, new_scale: f32) -> Result<()> {
        self.scaler.set_scale(new_scale)?;
        self.stages.clear();
        self.found_inf_late = false;
        Ok(())
    }

    /// Whether so many overflows in a row have met the scale's floor that no scale will help: stop then.
    pub const fn is_stuck(&self) -> bool {
        self.scaler.is_stuck()
    }

    /// PyTorch's state, under its keys; `None`, its empty dictionary, when disabled. To be taken after an update.
    pub fn state_dict(&self) -> Option<StateDict> {
        self.scaler.state_dict()
    }

    /// Takes over a saved scale, tracker, factors and interval; does nothing when disabled. An empty state or a value
    /// out of range is an error and changes nothing.
    pub fn load_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        self.scaler.load_state_dict(state)
    }
}

/// Whether every gradient of `vars` is free of infinities and NaNs, whatever its type, strides and device.
///
/// 0 · x is NaN exactly where x is not finite, and a NaN stays one in every sum. So no sum can overflow, and the host
/// reads a single number.
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
