//! Gradients from their birth in the policy's type to the survey that decides whether they are used.

use crate::engine::kernels::survey::{TensorSurvey, sum, survey};
use crate::engine::kernels::view;
use crate::engine::model::{Parameters, candle_dtype};
use crate::precision::{Dtype, PrecisionPolicy, Unit};
use candle_core::{DType, Device, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The gradient of every parameter.
///
/// A backward pass writes each gradient once, rounded to the policy's type. Where several micro-batches make a step,
/// they are summed in FP32.
#[derive(Debug)]
pub struct Gradients {
    born: Parameters,
    sum: Option<Parameters>,
    micro_batches: usize,
    policy: PrecisionPolicy,
}

/// What the gradients of a step look like, scaled as they are.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// One entry a parameter, in order.
    pub tensors: Vec<TensorSurvey>,
    /// All of them together.
    pub total: TensorSurvey,
    /// The largest finite magnitude among those that were born in the policy's type: what the loss scale has to leave room
    /// for.
    pub largest: f32,
}

impl Gradients {
    /// Buffers for parameters of these shapes, with an FP32 sum if a step has more than one micro-batch.
    pub fn new(
        shapes: &[(String, Vec<usize>)],
        policy: PrecisionPolicy,
        grad_accum: usize,
        device: &Device,
    ) -> Result<Self> {
        let born = Parameters::zeros(shapes, candle_dtype(policy.grads), device)?;
        let sum = (grad_accum > 1).then(|| born.zeros_like(DType::F32)).transpose()?;
        Ok(Self { born, sum, micro_batches: 0, policy })
    }

    /// What [`Gradients::new`] allocates for so many parameters, in bytes.
    pub fn bytes(parameters: u64, policy: PrecisionPolicy, grad_accum: usize) -> u64 {
        let sum = if grad_accum > 1 { Dtype::F32.size_in_bytes() } else { 0 };
        parameters * (policy.grads.size_in_bytes() + sum) as u64
    }

    /// Lets the gradient of parameter `index` be born as where its layer computes in `compute`.
    pub fn retype(&mut self, index: usize, compute: Dtype) -> Result<()> {
        let dtype = candle_dtype(self.policy.with_compute(compute).grads);
        let born = &self.born[index];
        let retyped = view::zeros(born.dims(), dtype, born.device())?;
        self.born.replace(index, retyped)
    }

    /// Forgets the last step's gradients.
    pub fn clear(&mut self) {
        self.micro_batches = 0;
    }

    /// Where a backward pass writes.
    pub fn born(&self) -> &Parameters {
        &self.born
    }

    /// Adds what a backward pass has written to the step's sum.
    pub fn accumulate(&mut self) -> Result<()> {
        if let Some(sum) = &self.sum {
            let add = if self.micro_batches == 0 { view::copy } else { view::accumulate };
            for (born, sum) in self.born.tensors().iter().zip(sum.tensors()) {
                add(born, sum)?;
            }
        }
        self.micro_batches += 1;
        Ok(())
    }

    /// The step's gradients, times the loss scale.
    pub fn total(&self) -> &Parameters {
        self.sum.as_ref().unwrap_or(&self.born)
    }

    /// The variance of the elements of each unit's gradient, scaled as they are, given the look at them.
    pub fn variances(&self, survey: &Survey) -> Result<BTreeMap<Unit, f64>> {
        let sums = self.total().tensors().par_iter().map(sum).collect::<Result<Vec<f64>>>()?;
        let mut units: BTreeMap<Unit, [f64; 3]> = BTreeMap::new();
        for ((entry, looked), sum) in self.born.layout().iter().zip(&survey.tensors).zip(sums) {
            let of_unit = units.entry(Unit::of(&entry.name)).or_default();
            for (total, term) in of_unit.iter_mut().zip([looked.stats.count as f64, sum, looked.stats.sum_squares]) {
                *total += term;
            }
        }
        let variance = |[count, sum, squares]: [f64; 3]| (squares / count - (sum / count).powi(2)).max(0.0);
        Ok(units.into_iter().map(|(unit, sums)| (unit, variance(sums))).collect())
    }

    /// Looks at every gradient in one pass; with `exponents` it also counts them by binade.
    pub fn survey(&self, exponents: bool, survey_out: &mut Survey) -> Result<()> {
        let tensors = self.total().tensors();
        survey_out.tensors.resize(tensors.len(), TensorSurvey::default());
        let born = self.born.tensors();
        survey_out.tensors.par_iter_mut().zip(tensors.par_iter().zip(born)).try_for_each(
            |(out, (tensor, born))| -> Result<()> {
                *out = survey(tensor, view::float_format(born.dtype()), exponents)?;
                Ok(())
            },
        )?;
        survey_out.total = TensorSurvey::default();
        survey_out.largest = 0.0;
        let policy = candle_dtype(self.policy.grads);
        for (tensor, born) in survey_out.tensors.iter().zip(born) {
            survey_out.total.merge(tensor);
            if born.dtype() == policy {
                survey_out.largest = survey_out.largest.max(tensor.stats.max_abs);
            }
        }
        Ok(())
    }
}
