//! AdamW (Loshchilov and Hutter, 2019), fused with unscaling, clipping and the working copy.

use crate::blockwise::BLOCK_SIZE;
use crate::op::{MomentScales, same_shapes};
use crate::precision::{FloatFormat, UpdateCounts};
use crate::rows::{Rows, for_each_part};
use crate::view::{ViewMut, float_format, read, write_f32, write_optional};
use candle_core::{DType, Result, Tensor};
use std::sync::Mutex;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay rates of the two moments; in FP64, because in FP32 `1 - beta` of a beta near 1 has few digits left.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f32,
    /// `1 - beta^t` for each moment, t the number of updates including this one.
    pub bias_corrections: [f32; 2],
    /// Multiplies the stored gradient: one over the loss scale, times the clipping factor.
    pub grad_factor: f32,
}

/// A tensor that AdamW updates.
#[derive(Debug)]
pub struct AdamWTensor<'a> {
    /// Any type.
    pub grad: &'a Tensor,
    /// The shape of `grad`, FP32.
    pub master: &'a Tensor,
    /// The first moment, FP32, or 8-bit codes.
    pub exp_avg: &'a Tensor,
    /// The second moment.
    pub exp_avg_sq: &'a Tensor,
    /// The scales of moments in 8 bits.
    pub scales: Option<[MomentScales<'a>; 2]>,
    /// The working copy that the new master is rounded into; `None` if the master is the working copy.
    pub weight: Option<&'a Tensor>,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Receives the number of updates that `weight` shows, if they are counted.
    pub counts: Option<&'a mut UpdateCounts>,
}

impl AdamWTensor<'_> {
    /// Whether the shapes and types of the operands fit together.
    pub(crate) fn fits(&self) -> bool {
        let (moments, len) = ([self.exp_avg, self.exp_avg_sq], self.grad.elem_count());
        let moments_fit = match self.scales {
            None => same_shapes([self.grad, moments[0], moments[1]]) && moments.iter().all(|x| x.dtype() == DType::F32),
            Some(scales) => {
                let blocks = len.div_ceil(BLOCK_SIZE);
                let is_f32 = |x: &Tensor, len: usize| x.dtype() == DType::F32 && x.dims() == [len];
                scales.iter().all(|scales| is_f32(scales.absmax, blocks) && is_f32(scales.map, 256))
                    && moments.iter().all(|x| x.dtype() == DType::U8 && x.dims() == [len])
            }
        };
        let fits = same_shapes([self.grad, self.master, self.weight.unwrap_or(self.grad)]) && moments_fit;
        fits && self.master.dtype() == DType::F32 && self.grad.dtype() != DType::U8
    }
}

const WIDTH: usize = 1024;

/// Updates a tensor with FP32 moments.
pub fn step(step: AdamWStep, tensor: AdamWTensor<'_>) -> Result<()> {
    let AdamWTensor { grad, master, exp_avg, exp_avg_sq, weight, weight_decay, counts, .. } = tensor;
    // Integers, so their sums do not depend on the order of the threads.
    let counted = counts.is_some().then(Mutex::<UpdateCounts>::default);
    let format = weight.map_or(FloatFormat::FP32, |weight| float_format(weight.dtype()));
    let grad = read(grad)?;
    let grad = grad.view();
    let update = |weight: Option<ViewMut<'_>>| {
        write_f32(master, |master| {
            write_f32(exp_avg, |exp_avg| {
                write_f32(exp_avg_sq, |exp_avg_sq| {
                    let rows = |view| Rows { view, width: 1 };
                    let len = master.len();
                    let state = (rows(master), rows(exp_avg), rows(exp_avg_sq));
                    let weight = weight.map(|view| Rows { view, width: 1 });
                    for_each_part(
                        (state, weight),
                        len,
                        32 * WIDTH,
                        #[inline(always)]
                        |first, len, ((master, exp_avg, exp_avg_sq), mut weight)| {
                            let (mut buffer, mut counts) = ([0.0; WIDTH], UpdateCounts::default());
                            for start in (0..len).step_by(WIDTH) {
                                let end = (start + WIDTH).min(len);
                                let grad = grad.as_f32(first + start, &mut buffer[..end - start]);
                                let master = &mut master.view[start..end];
                                let moments = [&mut exp_avg.view[start..end], &mut exp_avg_sq.view[start..end]];
                                match &mut weight {
                                    Some(weight) if counted.is_some() => {
                                        let (mut old, mut copies) = ([0.0; WIDTH], [[0.0; WIDTH]; 2]);
                                        let [before, after] = copies.each_mut().map(|copy| &mut copy[..end - start]);
                                        let old = &mut old[..end - start];
                                        old.copy_from_slice(master);
                                        weight.view.as_view().load(start, before);
                                        update_block((step, weight_decay), grad, master, moments);
                                        weight.view.store(start, master);
                                        weight.view.as_view().load(start, after);
                                        counts.count(format, [old, master], [before, after]);
                                    }
                                    weight => {
                                        update_block((step, weight_decay), grad, master, moments);
                                        if let Some(weight) = weight {
                                            weight.view.store(start, master);
                                        }
                                    }
                                }
                            }
                            if let Some(Ok(mut counted)) = counted.as_ref().map(Mutex::lock) {
                                *counted += counts;
                            }
                        },
                    );
                })
            })
        })
    };
    write_optional(weight, update)????;
    if let (Some(counts), Some(Ok(counted))) = (counts, counted.map(Mutex::into_inner)) {
        *counts += counted;
    }
    Ok(())
}

#[inline(always)]
fn update_block(
    (n, weight_decay): (AdamWStep, f32),
    grad: &[f32],
    master: &mut [f32],
    [exp_avg, exp_avg_sq]: [&mut [f32]; 2],
) {
    let betas = n.betas.map(|beta| beta as f32);
    let shares = n.betas.map(|beta| (1.0 - beta) as f32);
    let decay = 1.0 - n.lr * weight_decay;
    let step_size = n.lr / n.bias_corrections[0];
    let root = n.bias_corrections[1].sqrt();
    for (((grad, master), m), v) in grad.iter().zip(master).zip(exp_avg).zip(exp_avg_sq) {
        let g = grad * n.grad_factor;
        *m += (g - *m) * shares[0];
        *v = *v * betas[1] + g * g * shares[1];
        *master = *master * decay - step_size * *m / (v.sqrt() / root + n.eps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    /// The first update of any gradient is the learning rate, regardless of the betas.
    #[test]
    fn a_beta_near_one_leaves_the_first_update_as_it_is() {
        for beta2 in [0.95, 0.999, 0.999_999, 1.0 - 1e-9] {
            let one = |value: f32| Tensor::new(&[value], &Device::Cpu).unwrap();
            let [grad, master, exp_avg, exp_avg_sq] = &[0.3, 0.0, 0.0, 0.0].map(one);
            let step = AdamWStep {
                lr: 1.0,
                betas: [0.9, beta2],
                eps: 0.0,
                bias_corrections: [0.1, (1.0 - beta2) as f32],
                grad_factor: 1.0,
            };
            let (scales, weight, weight_decay, counts) = (None, None, 0.0, None);
            let tensor = AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts };
            super::step(step, tensor).unwrap();
            let update = master.to_vec1::<f32>().unwrap()[0];
            assert!((update + 1.0).abs() < 1e-6, "beta2 {beta2}: {update}");
        }
    }
}
