//! Adam's moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022).
//!
//! A block of 256 elements shares its largest magnitude; an element is the nearest of 256 values between -1 and 1,
//! which lie denser towards zero. The values are from `create_dynamic_map` in bitsandbytes' `functional.py`, and a
//! first moment keeps its sign, as in its kernel. Tensors of fewer than 4096 elements stay FP32, as there.

use crate::adamw::AdamWTensor;
use crate::op::MomentScales;
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;
use std::sync::LazyLock;

/// Elements that share a magnitude.
pub const BLOCK_SIZE: usize = 256;
/// Tensors with fewer elements stay FP32.
pub const MIN_QUANTIZED_ELEMENTS: usize = 4096;

/// The mean that a moment is of, which determines the values of its codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Of gradients.
    First,
    /// Of squared gradients, which have no sign.
    Second,
}

/// A moment of one tensor.
#[derive(Clone, Debug)]
pub struct BlockwiseQuantized {
    /// `[elements]`, U8.
    pub codes: Tensor,
    /// `[blocks]`, FP32: the largest magnitude of each block.
    pub absmax: Tensor,
    /// `[256]`, FP32: the values of the codes.
    map: Tensor,
}

static FIRST: LazyLock<[f32; 256]> = LazyLock::new(|| dynamic_map(&[1.0, -1.0]));
static SECOND: LazyLock<[f32; 256]> = LazyLock::new(|| dynamic_map(&[1.0]));

/// The dynamic data type: seven decades, each with twice as many evenly spaced values as the one below, and 0 and 1.
fn dynamic_map(signs: &[f64]) -> [f32; 256] {
    let mut values = vec![0.0f32, 1.0];
    for decade in 0..7u32 {
        let count = (2usize << decade) / signs.len();
        let boundary = |at: usize| 0.1 + 0.9 * at as f64 / count as f64;
        for at in 0..count {
            let mean = f64::midpoint(boundary(at), boundary(at + 1)) * 10f64.powi(decade as i32 - 6);
            values.extend(signs.iter().map(|sign| (sign * mean) as f32));
        }
    }
    values.sort_by(f32::total_cmp);
    let mut map = [0.0; 256];
    map.copy_from_slice(&values);
    map
}

impl Moment {
    /// The values of the codes.
    fn map(self) -> &'static [f32; 256] {
        match self {
            Self::First => &FIRST,
            Self::Second => &SECOND,
        }
    }
}

/// The code of the value nearest to `x`, which is not beyond 1; of two as near, the lower.
fn nearest(map: &[f32; 256], x: f32) -> u8 {
    let above = map.partition_point(|value| *value < x);
    let at = match above {
        0 => 0,
        256 => 255,
        _ if x - map[above - 1] <= map[above] - x => above - 1,
        _ => above,
    };
    at as u8
}

/// The values of blocks with these codes and largest magnitudes.
pub(crate) fn dequantize(moment: Moment, (codes, absmax): (&[u8], &[f32]), out: &mut [f32]) {
    let map = moment.map();
    for ((out, codes), absmax) in out.chunks_mut(BLOCK_SIZE).zip(codes.chunks(BLOCK_SIZE)).zip(absmax) {
        for (out, code) in out.iter_mut().zip(codes) {
            *out = map[usize::from(*code)] * absmax;
        }
    }
}

/// [`dequantize`] for tensors on any device.
pub(crate) fn dequantized(moment: Moment, codes: &Tensor, absmax: &Tensor) -> Result<Vec<f32>> {
    let mut values = vec![0.0; codes.elem_count()];
    dequantize(moment, (&codes.to_vec1()?, &absmax.to_vec1()?), &mut values);
    Ok(values)
}

/// Writes the codes and largest magnitudes of blocks of `values`.
pub(crate) fn quantize(moment: Moment, values: &[f32], (codes, absmax): (&mut [u8], &mut [f32])) {
    let map = moment.map();
    for ((codes, absmax), values) in codes.chunks_mut(BLOCK_SIZE).zip(absmax).zip(values.chunks(BLOCK_SIZE)) {
        *absmax = values.iter().fold(0.0, |most, value| value.abs().max(most));
        let inverse = if *absmax > 0.0 { 1.0 / *absmax } else { 0.0 };
        for (code, value) in codes.iter_mut().zip(values) {
            *code = nearest(map, (value * inverse).clamp(-1.0, 1.0));
            match moment {
                Moment::First if map[usize::from(*code)].is_sign_negative() != value.is_sign_negative() => {
                    *code = if *value > 0.0 { code.saturating_add(1) } else { code.saturating_sub(1) };
                }
                // A second moment of 0 would divide the first one by `eps` alone.
                Moment::Second if *value > 0.0 => *code = (*code).max(1),
                _ => {}
            }
        }
    }
}

impl BlockwiseQuantized {
    /// Zeros.
    pub fn zeros(elements: usize, moment: Moment, device: &Device) -> Result<Self> {
        // A GPU has no memory of no elements.
        let device = if elements == 0 { &Device::Cpu } else { device };
        Ok(Self {
            codes: Tensor::full(nearest(moment.map(), 0.0), elements, device)?,
            absmax: Tensor::zeros(elements.div_ceil(BLOCK_SIZE), DType::F32, device)?,
            map: Tensor::new(moment.map(), device)?,
        })
    }

    pub(crate) fn from_values(values: &[f32], moment: Moment, device: &Device) -> Result<Self> {
        let mut codes = vec![0; values.len()];
        let mut absmax = vec![0.0; values.len().div_ceil(BLOCK_SIZE)];
        quantize(moment, values, (&mut codes, &mut absmax));
        let [codes, absmax] = [Tensor::new(codes, device)?, Tensor::new(absmax, device)?];
        Ok(Self { codes, absmax, map: Tensor::new(moment.map(), device)? })
    }

    /// The scales of the codes.
    pub fn scales(&self) -> MomentScales<'_> {
        MomentScales { absmax: &self.absmax, map: &self.map }
    }

    /// The blocks of `elements`, which start at a block or are empty.
    pub fn blocks(elements: &Range<usize>) -> Range<usize> {
        elements.start.div_ceil(BLOCK_SIZE)..elements.end.div_ceil(BLOCK_SIZE)
    }

    /// Bytes of `elements` elements.
    pub fn bytes(elements: u64) -> u64 {
        elements + elements.div_ceil(BLOCK_SIZE as u64) * 4
    }

    /// Loads the contents of a file; returns `false` if its number of elements differs.
    pub fn restore(&mut self, codes: &[u8], absmax: &[f32]) -> Result<bool> {
        let fits = (codes.len(), absmax.len()) == (self.codes.elem_count(), self.absmax.elem_count());
        if fits {
            self.codes = Tensor::new(codes, self.codes.device())?;
            self.absmax = Tensor::new(absmax, self.absmax.device())?;
        }
        Ok(fits)
    }
}

/// Updates a tensor by FP32 moments. Those in 8 bits are converted on the host.
pub(crate) fn by_fp32_moments(tensor: AdamWTensor<'_>, update: impl Fn(AdamWTensor<'_>) -> Result<()>) -> Result<()> {
    let Some([first, second]) = tensor.scales else { return update(tensor) };
    let grad = tensor.grad;
    let stored = [(Moment::First, tensor.exp_avg, first), (Moment::Second, tensor.exp_avg_sq, second)];
    let wide = |(moment, codes, scales): (Moment, &Tensor, MomentScales<'_>)| {
        Tensor::from_vec(dequantized(moment, codes, scales.absmax)?, grad.dims(), grad.device())
    };
    let [exp_avg, exp_avg_sq] = stored.map(wide);
    let (exp_avg, exp_avg_sq) = (&exp_avg?, &exp_avg_sq?);
    update(AdamWTensor { exp_avg, exp_avg_sq, scales: None, ..tensor })?;
    for ((moment, codes, scales), values) in stored.into_iter().zip([exp_avg, exp_avg_sq]) {
        let values = values.flatten_all()?.to_vec1()?;
        let new = BlockwiseQuantized::from_values(&values, moment, grad.device())?;
        codes.slice_set(&new.codes, 0, 0)?;
        scales.absmax.slice_set(&new.absmax, 0, 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that bitsandbytes' formula gives in Python.
    #[test]
    fn the_map_is_that_of_bitsandbytes() {
        assert_eq!(FIRST.len(), 256);
        assert!(FIRST.is_sorted() && SECOND.is_sorted());
        for (map, at, expected) in [
            (&FIRST, 0, -0.992_968_74),
            (&FIRST, 127, 0.0),
            (&FIRST, 128, 5.5e-7),
            (&FIRST, 255, 1.0),
            (&SECOND, 0, 0.0),
            (&SECOND, 1, 3.25e-7),
            (&SECOND, 2, 7.75e-7),
            (&SECOND, 254, 0.996_484_4),
            (&SECOND, 255, 1.0),
        ] {
            let found: f32 = map[at];
            assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{at}: {found} {expected}");
        }
    }

    #[test]
    fn an_empty_part_has_no_blocks() {
        for len in [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 3078] {
            assert!(BlockwiseQuantized::blocks(&(len..len)).is_empty(), "{len}");
            assert_eq!(BlockwiseQuantized::blocks(&(0..len)), 0..len.div_ceil(BLOCK_SIZE));
        }
        assert_eq!(BlockwiseQuantized::blocks(&(512..3078)), 2..13);
    }

    #[test]
    fn blocks_keep_their_zeros_and_their_signs() {
        let values: Vec<f32> =
            (0..1000).map(|i| ((i * 37 % 501) as f32 - 250.0) * 1e-6f32.powi((i / 256) % 2)).collect();
        for moment in [Moment::First, Moment::Second] {
            let values: Vec<f32> = values.iter().map(|x| if moment == Moment::First { *x } else { x.abs() }).collect();
            let quantized = |values: &[f32]| {
                let (mut codes, mut absmax) = ([0; 1000], [0.0; 4]);
                quantize(moment, values, (&mut codes, &mut absmax));
                let mut read = [0.0; 1000];
                dequantize(moment, (&codes, &absmax), &mut read);
                (codes, read)
            };
            let (codes, read) = quantized(&values);
            for (block, found) in values.chunks(BLOCK_SIZE).zip(read.chunks(BLOCK_SIZE)) {
                let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                for (x, y) in block.iter().zip(found) {
                    // Half the distance of the map's neighbors in the highest decade.
                    assert!((x - y).abs() <= 0.0075 * most && x * y >= 0.0, "{x} {y}");
                }
            }
            // The map of a first moment has no -1, so that a block whose largest value is negative shrinks.
            if moment == Moment::Second {
                assert_eq!(quantized(&read).0, codes, "what has been rounded stays as it is");
                assert!(values.iter().zip(&read).all(|(x, y)| (*x > 0.0) == (*y > 0.0)), "no second moment becomes 0");
            }
        }
    }
}
