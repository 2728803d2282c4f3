//! AdamW over FP32 masters: the update of the mixed-precision recipe.

use crate::engine::kernels::adamw::{AdamWStep, Moments};
use crate::engine::kernels::{Kernels, view};
use crate::engine::model::{ParamSpec, Parameters};
use crate::precision::Dtype;
use candle_core::{DType, Result};
use serde::{Deserialize, Serialize};

/// AdamW's settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of parameters of two or more dimensions; biases and layer norms have none.
    pub weight_decay: f64,
}

impl AdamWConfig {
    /// The decay of this parameter.
    pub(crate) fn decay_of(&self, entry: &ParamSpec) -> f32 {
        if entry.decay { self.weight_decay as f32 } else { 0.0 }
    }
}

/// Adam's moments, in FP32.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// First moments.
    pub exp_avg: Parameters,
    /// Second moments.
    pub exp_avg_sq: Parameters,
}

impl AdamW {
    /// Zero moments for parameters laid out as `masters`.
    pub fn new(config: AdamWConfig, masters: &Parameters) -> Result<Self> {
        Ok(Self { config, exp_avg: masters.zeros_like(DType::F32)?, exp_avg_sq: masters.zeros_like(DType::F32)? })
    }

    /// Its settings.
    pub fn config(&self) -> AdamWConfig {
        self.config
    }

    /// What [`AdamW::new`] allocates for so many parameters, in bytes.
    pub fn bytes(parameters: u64) -> u64 {
        2 * parameters * Dtype::F32.size_in_bytes() as u64
    }

    /// Update number `updates` + 1 of `masters` from `grads · grad_factor`, rounded into the working copy `weights`.
    #[expect(clippy::too_many_arguments, reason = "the update's operands and what computes it")]
    pub fn step(
        &mut self,
        kernels: &dyn Kernels,
        grads: &Parameters,
        grad_factor: f32,
        lr: f64,
        updates: u64,
        masters: &mut MasterWeights,
        weights: &mut Parameters,
    ) -> Result<()> {
        let t = i32::try_from(updates + 1).unwrap_or(i32::MAX);
        for (i, entry) in grads.layout().iter().enumerate() {
            let numbers = AdamWStep {
                lr: lr as f32,
                betas: self.config.betas,
                eps: self.config.eps as f32,
                weight_decay: self.config.decay_of(entry),
                bias_corrections: self.config.betas.map(|beta| (1.0 - beta.powi(t)) as f32),
                grad_factor,
            };
            let weight = Some(&weights[i]).filter(|weight| weight.dtype() != DType::F32);
            let moments = Moments { exp_avg: &self.exp_avg[i], exp_avg_sq: &self.exp_avg_sq[i] };
            kernels.adamw(numbers, &grads[i], &masters.parameters()[i], moments, weight)?;
        }
        Ok(())
    }
}

/// The FP32 weights that updates accumulate in. A working copy in the compute type is rounded from them.
#[derive(Debug)]
pub struct MasterWeights {
    parameters: Parameters,
}

impl MasterWeights {
    /// Takes FP32 `parameters`, whose base stays with the working copy, and rounds that copy of `compute` type from them. In FP32 there is no second copy:
    /// the working copy is the masters' own storage.
    pub fn new(parameters: Parameters, compute: DType, kernels: &dyn Kernels) -> Result<(Self, Parameters)> {
        let base = parameters.base().cloned();
        let parameters = parameters.over(None);
        let weights = if compute == DType::F32 { parameters.clone() } else { parameters.zeros_like(compute)? };
        let masters = Self { parameters };
        masters.write_compute_copy(&weights, kernels)?;
        Ok((masters, weights.over(base)))
    }

    /// What masters and working copy of so many parameters take, in bytes.
    pub fn bytes(parameters: u64, compute: Dtype) -> (u64, u64) {
        let copy = if compute == Dtype::F32 { 0 } else { compute.size_in_bytes() };
        (parameters * Dtype::F32.size_in_bytes() as u64, parameters * copy as u64)
    }

    /// The FP32 tensors.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Gives pack `index` a working copy of another type in `weights`; in FP32 that is the master itself.
    pub fn retype(&self, index: usize, compute: DType, weights: &mut Parameters, kernels: &dyn Kernels) -> Result<()> {
        let master = self.parameters.pack_at(index);
        if compute == DType::F32 {
            return weights.replace_pack(index, master.clone());
        }
        let weight = view::zeros(master.dims(), compute, master.device())?;
        kernels.copy(master, &weight)?;
        weights.replace_pack(index, weight)
    }

    /// Rounds every master into `weights`.
    pub fn write_compute_copy(&self, weights: &Parameters, kernels: &dyn Kernels) -> Result<()> {
        for (master, weight) in self.parameters.tensors().iter().zip(weights.tensors()) {
            // In FP32 they are one tensor.
            if weight.dtype() != DType::F32 {
                kernels.copy(master, weight)?;
            }
        }
        Ok(())
    }
}
