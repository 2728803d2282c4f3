//! Adam's moments in 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022).
//!
//! A block of 256 elements shares its largest magnitude; an element is the nearest of 256 values between -1 and 1,
//! which lie denser towards zero. The values are from `create_dynamic_map` in bitsandbytes' `functional.py`, and a
//! first moment keeps its sign, as in its kernel. Tensors of fewer than 4096 elements stay FP32, as there.

use crate::adamw::{AdamWStep, AdamWTensor};
use crate::op::{self, MomentScales};
use crate::view::{self, host_range, read, to_host};
use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

/// Elements that share a magnitude.
pub const BLOCK_SIZE: usize = 256;
/// Tensors with fewer elements stay FP32.
pub const MIN_QUANTIZED_ELEMENTS: usize = 4096;

/// A moment of one tensor.
#[derive(Clone, Debug)]
pub struct BlockwiseQuantized {
    storage: Storage,
    signed: bool,
}

/// The codes, and the largest magnitude of each block.
#[derive(Clone, Debug)]
enum Storage {
    Host(Vec<u8>, Vec<f32>),
    /// On a GPU, with the values of the codes.
    Device {
        codes: Tensor,
        absmax: Tensor,
        map: Tensor,
    },
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
    pub fn zeros(elements: usize, signed: bool, device: &Device) -> Result<Self> {
        let map: &[f32; 256] = if signed { &SIGNED } else { &UNSIGNED };
        let (codes, absmax) = (vec![nearest(map, 0.0); elements], vec![0.0; elements.div_ceil(BLOCK_SIZE)]);
        let host = Self { storage: Storage::Host(codes, absmax), signed };
        if device.is_cpu() || elements == 0 { Ok(host) } else { host.on(device) }
    }

    /// A copy on `device`, as a GPU keeps it.
    pub(crate) fn on(&self, device: &Device) -> Result<Self> {
        let storage = Storage::Device {
            codes: Tensor::new(&*self.codes(0..self.len())?, device)?,
            absmax: Tensor::new(&*self.absmax(0..self.len().div_ceil(BLOCK_SIZE))?, device)?,
            map: Tensor::new(self.map(), device)?,
        };
        Ok(Self { storage, signed: self.signed })
    }

    /// A copy on the host.
    pub(crate) fn on_host(&self) -> Result<Self> {
        let (codes, absmax) = (self.codes(0..self.len())?, self.absmax(0..self.len().div_ceil(BLOCK_SIZE))?);
        Ok(Self { storage: Storage::Host(codes.into(), absmax.into()), signed: self.signed })
    }

    /// The codes and their scales on a GPU; `None` on the host.
    pub fn on_device(&self) -> Option<(&Tensor, MomentScales<'_>)> {
        match &self.storage {
            Storage::Host(..) => None,
            Storage::Device { codes, absmax, map } => Some((codes, MomentScales { absmax, map })),
        }
    }

    fn map(&self) -> &'static [f32; 256] {
        if self.signed { &SIGNED } else { &UNSIGNED }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        match &self.storage {
            Storage::Host(codes, _) => codes.len(),
            Storage::Device { codes, .. } => codes.elem_count(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        let Storage::Host(codes, absmax) = &self.storage else { bail!("moments on a GPU are loaded by its kernels") };
        view::write_f32(out, |out| {
            let blocks = out.par_chunks_mut(BLOCK_SIZE).zip(codes.par_chunks(BLOCK_SIZE)).zip(absmax);
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
        let Storage::Host(codes, absmax) = &mut self.storage else {
            bail!("moments on a GPU are stored by its kernels")
        };
        let from = to_host(from)?;
        let from = read(&from)?;
        let blocks = codes.par_chunks_mut(BLOCK_SIZE).zip(absmax).zip(from.typed::<f32>()?.par_chunks(BLOCK_SIZE));
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

    /// Some of the codes.
    pub fn codes(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>> {
        Ok(match &self.storage {
            Storage::Host(codes, _) => Cow::Borrowed(&codes[range]),
            Storage::Device { codes, .. } => Cow::Owned(host_range(codes, range)?.to_vec1()?),
        })
    }

    /// The largest magnitudes of some blocks.
    pub fn absmax(&self, range: Range<usize>) -> Result<Cow<'_, [f32]>> {
        Ok(match &self.storage {
            Storage::Host(_, absmax) => Cow::Borrowed(&absmax[range]),
            Storage::Device { absmax, .. } => Cow::Owned(host_range(absmax, range)?.to_vec1()?),
        })
    }

    /// Loads the contents of a file; returns `false` if its number of elements differs.
    pub fn restore(&mut self, new_codes: &[u8], new_absmax: &[f32]) -> Result<bool> {
        if (new_codes.len(), new_absmax.len()) != (self.len(), self.len().div_ceil(BLOCK_SIZE)) {
            return Ok(false);
        }
        match &mut self.storage {
            Storage::Host(codes, absmax) => {
                codes.copy_from_slice(new_codes);
                absmax.copy_from_slice(new_absmax);
            }
            Storage::Device { codes, absmax, .. } => {
                *codes = Tensor::new(new_codes, codes.device())?;
                *absmax = Tensor::new(new_absmax, absmax.device())?;
            }
        }
        Ok(true)
    }
}

/// Computes [`op::AdamW`] by updates of single tensors with FP32 moments.
pub(crate) fn adamw(op: &mut op::AdamW<'_>, update: impl Fn(AdamWStep, AdamWTensor<'_>) -> Result<()>) -> Result<()> {
    op.tensors.iter_mut().try_for_each(|tensor| {
        let counts = tensor.counts.as_deref_mut();
        let tensor = AdamWTensor { counts, ..*tensor };
        match tensor.scales {
            None => update(op.step, tensor),
            Some(scales) => by_fp32_moments(tensor, scales, |tensor| update(op.step, tensor)),
        }
    })
}

/// Updates a tensor with 8-bit moments by FP32 ones, which are converted on the host.
fn by_fp32_moments(
    tensor: AdamWTensor<'_>,
    scales: [MomentScales<'_>; 2],
    update: impl Fn(AdamWTensor<'_>) -> Result<()>,
) -> Result<()> {
    let stored = [(tensor.exp_avg, scales[0]), (tensor.exp_avg_sq, scales[1])];
    let load = |which: usize| -> Result<(BlockwiseQuantized, Tensor)> {
        let (codes, MomentScales { absmax, .. }) = stored[which];
        let storage = Storage::Host(codes.flatten_all()?.to_vec1()?, absmax.to_vec1()?);
        let moment = BlockwiseQuantized { storage, signed: which == 0 };
        let values = view::zeros(tensor.grad.dims(), DType::F32, tensor.grad.device())?;
        moment.load(&values)?;
        Ok((moment, values))
    };
    let moments = [load(0)?, load(1)?];
    let [(_, exp_avg), (_, exp_avg_sq)] = &moments;
    update(AdamWTensor { exp_avg, exp_avg_sq, scales: None, ..tensor })?;
    for ((mut moment, values), (codes, scales)) in moments.into_iter().zip(stored) {
        moment.store(&values)?;
        let Storage::Host(new_codes, new_absmax) = moment.storage else { continue };
        codes.slice_set(&Tensor::from_vec(new_codes, codes.dims(), codes.device())?, 0, 0)?;
        scales.absmax.slice_set(&Tensor::from_vec(new_absmax, scales.absmax.dims(), codes.device())?, 0, 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(signed: bool) -> BlockwiseQuantized {
        BlockwiseQuantized::zeros(1000, signed, &Device::Cpu).unwrap()
    }

    /// Everything that a moment stores.
    fn stored(moment: &BlockwiseQuantized) -> (Vec<u8>, Vec<f32>) {
        (moment.codes(0..1000).unwrap().into(), moment.absmax(0..4).unwrap().into())
    }

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
            assert_eq!(BlockwiseQuantized::blocks(&(0..len)), 0..len.div_ceil(BLOCK_SIZE));
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
            let mut moment = zeros(signed);
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
                let mut again = zeros(signed);
                again.store(&out).unwrap();
                assert_eq!(stored(&again).0, stored(&moment).0, "what has been rounded stays as it is");
                assert!(values.iter().zip(&read).all(|(x, y)| (*x > 0.0) == (*y > 0.0)), "no second moment becomes 0");
            }
            let (codes, absmax) = stored(&moment);
            let mut restored = zeros(signed);
            assert!(restored.restore(&codes, &absmax).unwrap());
            assert_eq!(stored(&restored), stored(&moment));
        }
    }
}
