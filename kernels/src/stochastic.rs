//! Stochastic rounding to BF16: up or down with the probability of the distance to the other neighbor, so that updates
//! smaller than half a step of the format are not lost on average (Gupta et al., 2015).

use crate::random::{Domain, Stream, site_of};
use crate::view::{ViewMut, read, to_host, write};
use candle_core::{Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

/// Elements that share a block of random numbers.
const BLOCK: usize = 8;

/// Rounds the FP32 tensor `values` into the BF16 tensor `out`. They are the elements of a parameter starting at
/// `first`, which is a multiple of 8 unless there are no values. The random numbers depend on `seed`, the parameter's
/// `name`, the number of the update and the element.
pub fn round(values: &Tensor, out: &Tensor, first: usize, seed: u64, name: &str, update: u64) -> Result<()> {
    const TASK_ELEMENTS: usize = 8 << 10;
    debug_assert!(
        first.is_multiple_of(BLOCK) || values.elem_count() == 0,
        "element {first} is inside of a block of random numbers"
    );
    let stream = Stream::new(seed, Domain::Rounding);
    let site = site_of(name);
    let values = to_host(values)?;
    let values = read(&values)?;
    let values = values.typed::<f32>()?;
    write(out, |out| {
        let ViewMut::BF16(out) = out else { bail!("stochastic rounding is to BF16") };
        out.par_chunks_mut(TASK_ELEMENTS).zip(values.par_chunks(TASK_ELEMENTS)).enumerate().for_each(
            |(part, (out, values))| {
                let blocks = out.chunks_mut(BLOCK).zip(values.chunks(BLOCK));
                for ((out, values), block) in blocks.zip((first + part * TASK_ELEMENTS) / BLOCK..) {
                    let draws = stream.block(site, update, block as u32);
                    for (i, (out, value)) in out.iter_mut().zip(values).enumerate() {
                        *out = round_one(*value, (draws[i / 2] >> (16 * (i % 2))) as u16);
                    }
                }
            },
        );
        Ok(())
    })?
}

/// The BF16 neighbor below `x` in magnitude, or the one above if `draw` is larger than its distance from `x`.
fn round_one(x: f32, draw: u16) -> bf16 {
    let raised = bf16::from_bits((x.to_bits().wrapping_add(u32::from(draw)) >> 16) as u16);
    match x.is_finite() {
        true if raised.is_finite() => raised,
        true => bf16::from_bits((x.to_bits() >> 16) as u16),
        false => bf16::from_f32(x),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn the_mean_is_the_value_and_neighbors_are_next_to_it() {
        for x in [1.001f32, -3.3e-5, 0.1, -7.0, 65504.3] {
            let values = Tensor::full(x, 40_000, &Device::Cpu).unwrap();
            let out = Tensor::zeros(40_000, DType::BF16, &Device::Cpu).unwrap();
            round(&values, &out, 0, 1, "w", 2).unwrap();
            let rounded: Vec<f32> = out.to_dtype(DType::F32).unwrap().to_vec1().unwrap();
            let step = x.abs() / 128.0;
            assert!(rounded.iter().all(|y| (y - x).abs() <= step));
            let mean = rounded.iter().map(|y| f64::from(*y)).sum::<f64>() / 4e4;
            assert!((mean - f64::from(x)).abs() < 0.02 * f64::from(step), "{x}: {mean}");
        }
    }

    #[test]
    fn exact_values_and_what_is_not_finite_stay() {
        for x in [0.0f32, -0.0, 1.5, -2.0, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(round_one(x, u16::MAX).to_f32().to_bits(), x.to_bits());
        }
        assert!(round_one(f32::NAN, u16::MAX).is_nan());
        assert_eq!(round_one(f32::MAX, u16::MAX), bf16::MAX);
    }

    #[test]
    fn numbers_are_those_of_name_and_update() {
        let values = Tensor::full(1.001f32, 10_000, &Device::Cpu).unwrap();
        let rounded = |name: &str, update| {
            let out = Tensor::zeros(10_000, DType::BF16, &Device::Cpu).unwrap();
            round(&values, &out, 0, 1, name, update).unwrap();
            out.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(rounded("a", 1), rounded("a", 1));
        assert_ne!(rounded("a", 1), rounded("a", 2));
        assert_ne!(rounded("a", 1), rounded("b", 1));
    }

    #[test]
    fn a_part_is_rounded_as_in_the_whole() {
        let values = Tensor::full(1.001f32, 40_000, &Device::Cpu).unwrap();
        let out = Tensor::zeros(40_000, DType::BF16, &Device::Cpu).unwrap();
        let parts = Tensor::zeros(40_000, DType::BF16, &Device::Cpu).unwrap();
        round(&values, &out, 0, 1, "w", 2).unwrap();
        // A shard without this parameter begins at the end of it, inside of a block of random numbers.
        for (first, len) in [(0, 8 << 10), (8 << 10, 808), (9000, 31_000), (3078, 0)] {
            let part = |tensor: &Tensor| tensor.narrow(0, first, len).unwrap();
            round(&part(&values), &part(&parts), first, 1, "w", 2).unwrap();
        }
        let bits = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(bits(&out), bits(&parts));
    }
}
