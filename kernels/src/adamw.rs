//! AdamW (Loshchilov and Hutter, 2019), fused with unscaling, clipping and the working copy.

use crate::blockwise::{BLOCK_SIZE, BlockwiseQuantized, Moment, dequantize, quantize};
use crate::op::{MomentScales, same_shapes};
use crate::precision::{FloatFormat, UpdateCounts};
use crate::rows::{Rows, SplitRows, for_each_part};
use crate::view::{ViewMut, float_format, read, write_f32, write_optional, write_u8};
use candle_core::{DType, Result, Tensor};
use std::ops::Range;
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
        let moments = [self.exp_avg, self.exp_avg_sq];
        let len = self.grad.elem_count();
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

/// Codes, and the largest magnitude of each block.
type QuantizedBlocks<'a> = (Rows<&'a mut [u8]>, Rows<&'a mut [f32]>);

/// Both moments of a tensor, or of some of its blocks of [`BLOCK_SIZE`] elements.
enum Moments<'a> {
    Fp32([Rows<&'a mut [f32]>; 2]),
    Int8([QuantizedBlocks<'a>; 2]),
}

impl SplitRows for Moments<'_> {
    fn split_rows(self, blocks: usize) -> (Self, Self) {
        match self {
            Self::Fp32(moments) => {
                let (a, b) = moments.split_rows(blocks);
                (Self::Fp32(a), Self::Fp32(b))
            }
            Self::Int8(moments) => {
                let (a, b) = moments.split_rows(blocks);
                (Self::Int8(a), Self::Int8(b))
            }
        }
    }
}

impl Moments<'_> {
    /// Updates `master` and its moments, which are at `range`: up to [`WIDTH`] elements from the start of a block on.
    #[inline(always)]
    fn update(&mut self, step: AdamWStep, weight_decay: f32, grad: &[f32], master: &mut [f32], range: Range<usize>) {
        match self {
            Self::Fp32([m, v]) => {
                update_block(step, weight_decay, grad, master, [&mut m.view[range.clone()], &mut v.view[range]]);
            }
            Self::Int8([m, v]) => {
                let blocks = BlockwiseQuantized::blocks(&range);
                let mut values = [[0.0; WIDTH]; 2];
                let [m_values, v_values] = values.each_mut().map(|values| &mut values[..range.len()]);
                let m = (&mut m.0.view[range.clone()], &mut m.1.view[blocks.clone()]);
                let v = (&mut v.0.view[range], &mut v.1.view[blocks]);
                dequantize(Moment::First, (m.0, m.1), m_values);
                dequantize(Moment::Second, (v.0, v.1), v_values);
                update_block(step, weight_decay, grad, master, [&mut *m_values, &mut *v_values]);
                quantize(Moment::First, m_values, m);
                quantize(Moment::Second, v_values, v);
            }
        }
    }
}

/// Elements that are updated at a time: they stay in the L1 cache.
const WIDTH: usize = 4 * BLOCK_SIZE;

fn rows<V>(view: V, width: usize) -> Rows<V> {
    Rows { view, width }
}

impl AdamWTensor<'_> {
    fn write_moments<R>(&self, f: impl FnOnce(Moments<'_>) -> R) -> Result<R> {
        let (m, v) = (self.exp_avg, self.exp_avg_sq);
        let Some([m_scales, v_scales]) = self.scales else {
            return write_f32(m, |m| write_f32(v, |v| f(Moments::Fp32([m, v].map(|view| rows(view, BLOCK_SIZE))))))?;
        };
        write_u8(m, |m| {
            write_u8(v, |v| {
                write_f32(m_scales.absmax, |m_absmax| {
                    write_f32(v_scales.absmax, |v_absmax| {
                        let moments = [(m, m_absmax), (v, v_absmax)];
                        f(Moments::Int8(moments.map(|(codes, absmax)| (rows(codes, BLOCK_SIZE), rows(absmax, 1)))))
                    })
                })
            })
        })???
    }
}

/// Updates a tensor.
pub fn step(step: AdamWStep, mut tensor: AdamWTensor<'_>) -> Result<()> {
    // Integers, so their sums do not depend on the order of the threads.
    let counted = tensor.counts.is_some().then(Mutex::<UpdateCounts>::default);
    let format = tensor.weight.map_or(FloatFormat::FP32, |weight| float_format(weight.dtype()));
    let grad = read(tensor.grad)?;
    let weight_decay = tensor.weight_decay;
    let grad = grad.view();
    let update = |master: &mut [f32], moments: Moments<'_>, weight: Option<ViewMut<'_>>| {
        for_each_part(
            (rows(master, BLOCK_SIZE), (moments, weight.map(|weight| rows(weight, BLOCK_SIZE)))),
            grad.len().div_ceil(BLOCK_SIZE),
            32 * WIDTH / BLOCK_SIZE,
            #[inline(always)]
            |first, _, (master, (mut moments, mut weight)): (Rows<&mut [f32]>, (Moments<'_>, _))| {
                let mut buffers = [[0.0; WIDTH]; 4];
                let mut counts = UpdateCounts::default();
                let len = master.view.len();
                for start in (0..len).step_by(WIDTH) {
                    let range = start..(start + WIDTH).min(len);
                    let [buffer, old, before, after] = buffers.each_mut().map(|buffer| &mut buffer[..range.len()]);
                    let grad = grad.as_f32(first * BLOCK_SIZE + start, buffer);
                    let master = &mut master.view[range.clone()];
                    if counted.is_some() {
                        old.copy_from_slice(master);
                    }
                    moments.update(step, weight_decay, grad, master, range);
                    let Some(Rows { view: weight, .. }) = &mut weight else { continue };
                    if counted.is_none() {
                        weight.store(start, master);
                        continue;
                    }
                    weight.as_view().load(start, before);
                    weight.store(start, master);
                    weight.as_view().load(start, after);
                    counts.count(format, [old, master], [before, after]);
                }
                if let Some(Ok(mut counted)) = counted.as_ref().map(Mutex::lock) {
                    *counted += counts;
                }
            },
        );
    };
    write_f32(tensor.master, |master| {
        tensor.write_moments(|moments| write_optional(tensor.weight, |weight| update(master, moments, weight)))
    })???;
    if let (Some(counts), Some(Ok(counted))) = (&mut tensor.counts, counted.map(Mutex::into_inner)) {
        **counts += counted;
    }
    Ok(())
}

#[inline(always)]
fn update_block(
    n: AdamWStep,
    weight_decay: f32,
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
            let scales = None;
            let weight = None;
            let weight_decay = 0.0;
            let counts = None;
            let tensor = AdamWTensor { grad, master, exp_avg, exp_avg_sq, scales, weight, weight_decay, counts };
            super::step(step, tensor).unwrap();
            let update = master.to_vec1::<f32>().unwrap()[0];
            assert!((update + 1.0).abs() < 1e-6, "beta2 {beta2}: {update}");
        }
    }
}
