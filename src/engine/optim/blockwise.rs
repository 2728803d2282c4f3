//! Adam's moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022).
//!
//! A block of 256 elements shares its largest magnitude; an element is the nearest of 256 values between -1 and 1,
//! which lie denser towards zero. The values are from `create_dynamic_map` in bitsandbytes' `functional.py`, and a
//! first moment keeps its sign, as in its kernel. Tensors of fewer than 4096 elements stay FP32, as there.

use crate::engine::kernels::view::{self, read, to_host};
use candle_core::{Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::LazyLock;

/// Elements that share a magnitude.
pub(super) const BLOCK_SIZE: usize = 256;
/// Tensors with fewer elements stay FP32.
pub(super) const MIN_QUANTIZED_ELEMENTS: usize = 4096;

/// A moment of one tensor, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockwiseQuantized {
    codes: Vec<u8>,
    /// The largest magnitude of each block.
    absmax: Vec<f32>,
    signed: bool,
}

static SIGNED: LazyLock<[f32; 256]> = LazyLock::new(|| dynamic_map(true));
static UNSIGNED: LazyLock<[f32; 256]> = LazyLock::new(|| dynamic_map(false));

/// The dynamic data type: seven decades, each with twice as many evenly spaced values as the one below, and 0 and 1.
fn dynamic_map(signed: bool) -> [f32; 256] {
    let mut values = vec![0.0f32, 1.0];
    for decade in 0..7u32 {
        let count = 1usize << if signed { decade } else { decade + 1 };
        let boundary = |at: usize| 0.1 + 0.9 * at as f64 / count as f64;
        for at in 0..count {
            let mean = f64::midpoint(boundary(at), boundary(at + 1)) * 10f64.powi(decade as i32 - 6);
            values.push(mean as f32);
            if signed {
                values.push(-mean as f32);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    let mut map = [0.0; 256];
    map.copy_from_slice(&values);
    map
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

impl BlockwiseQuantized {
    /// Zeros.
    pub fn zeros(elements: usize, signed: bool) -> Self {
        let map: &[f32; 256] = if signed { &SIGNED } else { &UNSIGNED };
        let zero = nearest(map, 0.0);
        Self { codes: vec![zero; elements], absmax: vec![0.0; elements.div_ceil(BLOCK_SIZE)], signed }
    }

    fn map(&self) -> &'static [f32; 256] {
        if self.signed { &SIGNED } else { &UNSIGNED }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.codes.len()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.codes.is_empty()
    }

    /// The blocks of `elements`, which start at a block or are empty.
    pub fn blocks(elements: &Range<usize>) -> Range<usize> {
        elements.start.div_ceil(BLOCK_SIZE)..elements.end.div_ceil(BLOCK_SIZE)
    }

    /// Bytes of `elements` elements.
    pub fn bytes(elements: u64) -> u64 {
        elements + elements.div_ceil(BLOCK_SIZE as u64) * 4
    }

    /// Writes the values into the FP32 tensor `out`.
    pub fn load(&self, out: &Tensor) -> Result<()> {
        let map = self.map();
        view::write_f32(out, |out| {
            let blocks = out.par_chunks_mut(BLOCK_SIZE).zip(self.codes.par_chunks(BLOCK_SIZE)).zip(&self.absmax);
            blocks.with_min_len(64).for_each(|((out, codes), absmax)| {
                for (out, code) in out.iter_mut().zip(codes) {
                    *out = map[usize::from(*code)] * absmax;
                }
            });
        })
    }

    /// Takes over the values of the FP32 tensor `from`.
    pub fn store(&mut self, from: &Tensor) -> Result<()> {
        let (map, signed) = (self.map(), self.signed);
        let from = to_host(from)?;
        let from = read(&from)?;
        let blocks = self
            .codes
            .par_chunks_mut(BLOCK_SIZE)
            .zip(&mut self.absmax)
            .zip(from.typed::<f32>()?.par_chunks(BLOCK_SIZE));
        blocks.with_min_len(64).for_each(|((codes, absmax), values)| {
            *absmax = values.iter().fold(0.0, |most, value| value.abs().max(most));
            let inverse = if *absmax > 0.0 { 1.0 / *absmax } else { 0.0 };
            for (code, value) in codes.iter_mut().zip(values) {
                *code = nearest(map, (value * inverse).clamp(-1.0, 1.0));
                // A second moment of 0 would divide the first one by `eps` alone.
                if !signed && *value > 0.0 {
                    *code = (*code).max(1);
                }
                if signed && map[usize::from(*code)].is_sign_negative() != value.is_sign_negative() {
                    *code = if *value > 0.0 { code.saturating_add(1) } else { code.saturating_sub(1) };
                }
            }
        });
        Ok(())
    }

    /// The contents of a file: the codes, and each block's largest magnitude.
    pub fn stored(&self) -> (&[u8], &[f32]) {
        (&self.codes, &self.absmax)
    }

    /// Loads the contents of a file; returns `false` if its number of elements differs.
    pub fn restore(&mut self, codes: &[u8], absmax: Vec<f32>) -> bool {
        let fits = (codes.len(), absmax.len()) == (self.codes.len(), self.absmax.len());
        if fits {
            self.codes.copy_from_slice(codes);
            self.absmax = absmax;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that bitsandbytes' formula gives in Python.
    #[test]
    fn the_map_is_that_of_bitsandbytes() {
        assert_eq!(SIGNED.len(), 256);
        assert!(SIGNED.is_sorted() && UNSIGNED.is_sorted());
        for (map, at, expected) in [
            (&SIGNED, 0, -0.992_968_74),
            (&SIGNED, 127, 0.0),
            (&SIGNED, 128, 5.5e-7),
            (&SIGNED, 255, 1.0),
            (&UNSIGNED, 0, 0.0),
            (&UNSIGNED, 1, 3.25e-7),
            (&UNSIGNED, 2, 7.75e-7),
            (&UNSIGNED, 254, 0.996_484_4),
            (&UNSIGNED, 255, 1.0),
        ] {
            let found: f32 = map[at];
            assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{at}: {found} {expected}");
        }
    }

    #[test]
    fn an_empty_part_has_no_blocks() {
        for len in [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 3078] {
            assert!(BlockwiseQuantized::blocks(&(len..len)).is_empty(), "{len}");
            assert_eq!(BlockwiseQuantized::blocks(&(0..len)), 0..BlockwiseQuantized::zeros(len, true).stored().1.len());
        }
        assert_eq!(BlockwiseQuantized::blocks(&(512..3078)), 2..13);
    }

    #[test]
    fn blocks_keep_their_zeros_and_their_signs() {
        let values: Vec<f32> =
            (0..1000).map(|i| ((i * 37 % 501) as f32 - 250.0) * 1e-6f32.powi((i / 256) % 2)).collect();
        for signed in [true, false] {
            let values: Vec<f32> = values.iter().map(|x| if signed { *x } else { x.abs() }).collect();
            let tensor = Tensor::from_vec(values.clone(), 1000, &candle_core::Device::Cpu).unwrap();
            let mut moment = BlockwiseQuantized::zeros(1000, signed);
            moment.store(&tensor).unwrap();
            let out = tensor.zeros_like().unwrap();
            moment.load(&out).unwrap();
            let read = out.to_vec1::<f32>().unwrap();
            for (block, found) in values.chunks(BLOCK_SIZE).zip(read.chunks(BLOCK_SIZE)) {
                let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                for (x, y) in block.iter().zip(found) {
                    // Half the distance of the map's neighbours in the highest decade.
                    assert!((x - y).abs() <= 0.0075 * most && x * y >= 0.0, "{x} {y}");
                }
            }
            // The signed map has no -1, so that a block whose largest value is negative shrinks.
            if !signed {
                let mut again = BlockwiseQuantized::zeros(1000, signed);
                again.store(&out).unwrap();
                assert_eq!(again.codes, moment.codes, "what has been rounded stays as it is");
                assert!(values.iter().zip(&read).all(|(x, y)| (*x > 0.0) == (*y > 0.0)), "no second moment becomes 0");
            }
            let (codes, absmax) = moment.stored();
            let mut restored = BlockwiseQuantized::zeros(1000, signed);
            assert!(restored.restore(codes, absmax.to_vec()));
            assert_eq!(restored, moment);
        }
    }
}
