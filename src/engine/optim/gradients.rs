//! Gradients: as the backward pass writes them, summed over micro-batches, and the survey that decides whether they are used.

use crate::engine::kernels::survey::TensorSurvey;
use crate::engine::kernels::{Kernels, view};
use crate::engine::model::{Parameters, candle_dtype};
use crate::engine::optim::tree::{Nodes, Placed};
use crate::precision::{Dtype, PrecisionPolicy, Unit};
use candle_core::{DType, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The gradient of every parameter.
///
/// A backward pass writes each gradient once, rounded to the policy's type. Where several micro-batches make a step,
/// they are summed in FP32 along a fixed binary [tree], which keeps a sum for each of its open nodes.
///
/// [tree]: crate::engine::optim::tree
#[derive(Debug)]
pub struct Gradients {
    grads: Parameters,
    /// FP32, one for each node that can be open at a time; none where a step has one micro-batch.
    sums: Vec<Parameters>,
    nodes: Nodes,
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

/// The FP32 sums that a step of so many micro-batches takes.
fn sums(micro_batches: usize) -> usize {
    if micro_batches > 1 { Nodes::most_open(0..micro_batches, micro_batches) } else { 0 }
}

impl Gradients {
    /// Buffers for parameters laid out as `like`'s and on its device, with FP32 sums for steps of up to `grad_accum`
    /// micro-batches.
    pub fn new(like: &Parameters, policy: PrecisionPolicy, grad_accum: usize) -> Result<Self> {
        let grads = like.zeros_like(candle_dtype(policy.grads))?;
        let sums = (0..sums(grad_accum)).map(|_| grads.zeros_like(DType::F32)).collect::<Result<_>>()?;
        Ok(Self { grads, sums, nodes: Nodes::default(), largest: None, policy })
    }

    /// What [`Gradients::new`] allocates for so many parameters, in bytes.
    pub fn bytes(parameters: u64, policy: PrecisionPolicy, grad_accum: usize) -> u64 {
        let sums = sums(grad_accum) * Dtype::F32.size_in_bytes();
        parameters * (policy.grads.size_in_bytes() + sums) as u64
    }

    /// Gives the gradient of pack `index` the type it has where its layer computes in `compute`.
    pub fn retype(&mut self, index: usize, compute: Dtype) -> Result<()> {
        let dtype = candle_dtype(self.policy.with_compute(compute).grads);
        let grad = self.grads.pack_at(index);
        let retyped = view::zeros(grad.dims(), dtype, grad.device())?;
        self.grads.replace_pack(index, retyped)
    }

    /// Forgets the last step's gradients; the next step has so many micro-batches.
    pub fn begin(&mut self, micro_batches: usize) {
        self.nodes.begin(0..micro_batches, micro_batches);
        self.largest = None;
    }

    /// Where a backward pass writes: the gradients of one micro-batch.
    pub fn micro_batch(&self) -> &Parameters {
        &self.grads
    }

    /// Adds what a backward pass has written to the step's sum. With `measure`, [`Survey::largest`] will be that of the
    /// micro-batches' gradients: their FP32 sum says nothing of the room that each had in its own type.
    pub fn accumulate(&mut self, kernels: &dyn Kernels, measure: bool) -> Result<()> {
        let Placed { at, adds, merges } = self.nodes.push();
        if self.sums.is_empty() {
            return Ok(());
        }
        if measure {
            let policy = candle_dtype(self.policy.grads);
            for grad in self.grads.tensors().iter().filter(|grad| grad.dtype() == policy) {
                let stats = kernels.survey(grad, view::float_format(policy), false)?.stats;
                self.largest = Some(self.largest.unwrap_or(0.0).max(stats.max_abs));
            }
        }
        let add = |from: &Parameters, to: &Parameters, adds: bool| {
            from.tensors()
                .iter()
                .zip(to.tensors())
                .try_for_each(|(from, to)| if adds { kernels.accumulate(from, to) } else { kernels.copy(from, to) })
        };
        add(&self.grads, &self.sums[at], adds)?;
        (0..merges).try_for_each(|merged| add(&self.sums[at - merged], &self.sums[at - merged - 1], true))
    }

    /// The step's gradients, times the loss scale.
    pub fn total(&self) -> &Parameters {
        self.sums.first().unwrap_or(&self.grads)
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
