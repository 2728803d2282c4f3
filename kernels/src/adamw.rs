//! AdamW on one tensor (Loshchilov and Hutter, 2019), fused with unscaling, clipping and the working copy.

use crate::op;
use crate::precision::{FloatFormat, UpdateCounts};
use crate::rows::{Rows, for_each_part};
use crate::view::{ViewMut, float_format, read, write_f32, write_optional};
use candle_core::Result;
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
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// `1 - beta^t` for each moment, t the number of updates including this one.
    pub bias_corrections: [f32; 2],
    /// Multiplies the stored gradient: one over the loss scale, times the clipping factor.
    pub grad_factor: f32,
}

const WIDTH: usize = 1024;

/// Computes [`op::AdamW`].
pub fn step(op: &mut op::AdamW<'_>) -> Result<()> {
    let &mut op::AdamW { step, grad, master, exp_avg, exp_avg_sq, weight, .. } = op;
    // Integers, so their sums do not depend on the order of the threads.
    let counted = op.counts.is_some().then(Mutex::<UpdateCounts>::default);
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
                                        update_block(step, grad, master, moments);
                                        weight.view.store(start, master);
                                        weight.view.as_view().load(start, after);
                                        counts.count(format, [old, master], [before, after]);
                                    }
                                    weight => {
                                        update_block(step, grad, master, moments);
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
    if let (Some(counts), Some(Ok(counted))) = (op.counts.as_deref_mut(), counted.map(Mutex::into_inner)) {
        *counts += counted;
    }
    Ok(())
}

#[inline(always)]
fn update_block(n: AdamWStep, grad: &[f32], master: &mut [f32], [exp_avg, exp_avg_sq]: [&mut [f32]; 2]) {
    let betas = n.betas.map(|beta| beta as f32);
    let shares = n.betas.map(|beta| (1.0 - beta) as f32);
    let decay = 1.0 - n.lr * n.weight_decay;
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
                weight_decay: 0.0,
                bias_corrections: [0.1, (1.0 - beta2) as f32],
                grad_factor: 1.0,
            };
            super::step(&mut op::AdamW {
                step,
                grad,
                master,
                exp_avg,
                exp_avg_sq,
                scales: None,
                weight: None,
                counts: None,
            })
            .unwrap();
            let update = master.to_vec1::<f32>().unwrap()[0];
            assert!((update + 1.0).abs() < 1e-6, "beta2 {beta2}: {update}");
        }
    }
}
