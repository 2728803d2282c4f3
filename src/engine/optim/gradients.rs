//! Gradients: as the backward pass writes them, summed over micro-batches, and the survey that decides whether they are used.

use crate::engine::kernels::survey::TensorSurvey;
use crate::engine::kernels::{Kernels, view};
use crate::engine::model::{Parameters, candle_dtype};
use crate::precision::{Dtype, PrecisionPolicy, Unit};
use candle_core::{DType, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The gradient of every parameter.
///
/// A backward pass writes each gradient once, rounded to the policy's type. Where several micro-batches make a step,
/// they are summed in FP32.
#[derive(Debug)]
pub struct Gradients {
    grads: Parameters,
    sum: Option<Parameters>,
    micro_batches: usize,
    /// The largest magnitude in the micro-batches' gradients, if it was measured.
    largest: Option<f32>,
    policy: PrecisionPolicy,
}

/// What the gradients of a step look like, scaled as they are.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// One entry a parameter, in order.
    pub tensors: Vec<TensorSurvey>,
    /// All of them together.
    pub total: TensorSurvey,
    /// The largest finite magnitude among those of the policy's type: what the loss scale has to leave room for.
    pub largest: f32,
}

impl Gradients {
    /// Buffers for parameters laid out as `like`'s and on its device, with an FP32 sum if a step has more than one micro-batch.
    pub fn new(like: &Parameters, policy: PrecisionPolicy, grad_accum: usize) -> Result<Self> {
        let grads = like.zeros_like(candle_dtype(policy.grads))?;
        let sum = (grad_accum > 1).then(|| grads.zeros_like(DType::F32)).transpose()?;
        Ok(Self { grads, sum, micro_batches: 0, largest: None, policy })
    }

    /// What [`Gradients::new`] allocates for so many parameters, in bytes.
    pub fn bytes(parameters: u64, policy: PrecisionPolicy, grad_accum: usize) -> u64 {
        let sum = if grad_accum > 1 { Dtype::F32.size_in_bytes() } else { 0 };
        parameters * (policy.grads.size_in_bytes() + sum) as u64
    }

    /// Gives the gradient of pack `index` the type it has where its layer computes in `compute`.
    pub fn retype(&mut self, index: usize, compute: Dtype) -> Result<()> {
        let dtype = candle_dtype(self.policy.with_compute(compute).grads);
        let grad = self.grads.pack(index);
        let retyped = view::zeros(grad.dims(), dtype, grad.device())?;
        self.grads.replace_pack(index, retyped)
    }

    /// Forgets the last step's gradients.
    pub fn clear(&mut self) {
        self.micro_batches = 0;
        self.largest = None;
    }

    /// Where a backward pass writes: the gradients of one micro-batch.
    pub fn micro_batch(&self) -> &Parameters {
        &self.grads
    }

    /// Adds what a backward pass has written to the step's sum. With `measure`, [`Survey::largest`] will be that of the
    /// micro-batches' gradients: their FP32 sum says nothing of the room that each had in its own type.
    pub fn accumulate(&mut self, kernels: &dyn Kernels, measure: bool) -> Result<()> {
        if let Some(sum) = &self.sum {
            if measure {
                let policy = candle_dtype(self.policy.grads);
                for grad in self.grads.tensors().iter().filter(|grad| grad.dtype() == policy) {
                    let stats = kernels.survey(grad, view::float_format(policy), false)?.stats;
                    self.largest = Some(self.largest.unwrap_or(0.0).max(stats.max_abs));
                }
            }
            for (grad, sum) in self.grads.tensors().iter().zip(sum.tensors()) {
                if self.micro_batches == 0 {
                    kernels.copy(grad, sum)?;
                } else {
                    kernels.accumulate(grad, sum)?;
                }
            }
        }
        self.micro_batches += 1;
        Ok(())
    }

    /// The step's gradients, times the loss scale.
    pub fn total(&self) -> &Parameters {
        self.sum.as_ref().unwrap_or(&self.grads)
    }

    /// The variance of the elements of each unit's gradient, scaled as they are, given the look at them.
    pub fn variances(&self, survey: &Survey, kernels: &dyn Kernels) -> Result<BTreeMap<Unit, f64>> {
        let sums = self.total().tensors().par_iter().map(|grad| kernels.sum(grad)).collect::<Result<Vec<f64>>>()?;
        let mut units: BTreeMap<Unit, [f64; 3]> = BTreeMap::new();
        for ((entry, looked), sum) in self.grads.layout().iter().zip(&survey.tensors).zip(sums) {
            let of_unit = units.entry(entry.layer.unit()).or_default();
            for (total, term) in of_unit.iter_mut().zip([looked.stats.count as f64, sum, looked.stats.sum_squares]) {
                *total += term;
            }
        }
        let variance = |[count, sum, squares]: [f64; 3]| (squares / count - (sum / count).powi(2)).max(0.0);
        Ok(units.into_iter().map(|(unit, sums)| (unit, variance(sums))).collect())
    }

    /// Looks at every gradient in one pass; with `exponents` it also counts them by binade.
    pub fn survey(&self, exponents: bool, survey: &mut Survey, kernels: &dyn Kernels) -> Result<()> {
        let tensors = self.total().tensors();
        survey.tensors.resize(tensors.len(), TensorSurvey::default());
        let grads = self.grads.tensors();
        survey.tensors.par_iter_mut().zip(tensors.par_iter().zip(grads)).try_for_each(
            |(out, (tensor, grad))| -> Result<()> {
                *out = kernels.survey(tensor, view::float_format(grad.dtype()), exponents)?;
                Ok(())
            },
        )?;
        survey.total = TensorSurvey::default();
        survey.largest = 0.0;
        let policy = candle_dtype(self.policy.grads);
        for (tensor, grad) in survey.tensors.iter().zip(grads) {
            survey.total.merge(tensor);
            if grad.dtype() == policy {
                survey.largest = survey.largest.max(tensor.stats.max_abs);
            }
        }
        survey.largest = self.largest.unwrap_or(survey.largest);
        Ok(())
    }
}
