//! Weights in MXFP4 (Open Compute Project, 2023): blocks of 32 numbers of four bits with a common power of two.

use super::tensor_file::{Dtype, TensorView};
use crate::Result;

/// Numbers of a block.
pub(super) const BLOCK: usize = 32;

/// FP4 E2M1's numbers by code. It has neither infinity nor NaN.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The places in a block of the low and the high half of byte `i`.
pub(super) type Places = fn(i: usize) -> [usize; 2];

/// Safetensors: neighbors share a byte.
const NEIGHBORS: Places = |i| [2 * i, 2 * i + 1];
/// GGUF: the halves of a block share bytes.
pub(super) const HALVES: Places = |i| [i, i + BLOCK / 2];

/// Dequantizes a block. `exponent` is 127 more than the power of two.
pub(super) fn dequantize(exponent: u8, codes: &[u8], places: Places) -> [f32; BLOCK] {
    let scale = if exponent == 0 { f32::from_bits(1 << 22) } else { f32::from_bits(u32::from(exponent) << 23) };
    let mut numbers = [0.0; BLOCK];
    for (i, code) in codes.iter().enumerate() {
        let [low, high] = places(i);
        numbers[low] = scale * E2M1[usize::from(code & 15)];
        numbers[high] = scale * E2M1[usize::from(code >> 4)];
    }
    numbers
}

/// Fails unless these are the blocks and exponents of a matrix of these inputs and outputs.
pub(super) fn check([blocks, exponents]: [TensorView<'_>; 2], [inputs, outputs]: [usize; 2]) -> Result<()> {
    let expected = [outputs, inputs / BLOCK, BLOCK / 2];
    for (view, expected) in [(blocks, &expected[..]), (exponents, &expected[..2])] {
        if view.dtype != Dtype::U8 || view.shape != expected || !inputs.is_multiple_of(BLOCK) {
            let found = format!("{} of shape {:?}", view.dtype, view.shape);
            return Err(view.error(format!("{found}, but `config.json` requires U8 of shape {expected:?}")));
        }
    }
    Ok(())
}

/// Dequantizes the blocks of `[outputs, inputs]` into `out [inputs, outputs]`.
pub(super) fn read_transposed([blocks, exponents]: [TensorView<'_>; 2], out: &mut [f32]) {
    let outputs = blocks.shape[0];
    let per_output = exponents.bytes.len() / outputs;
    for (i, (codes, exponent)) in blocks.bytes.chunks_exact(BLOCK / 2).zip(exponents.bytes).enumerate() {
        let output = i / per_output;
        let first = i % per_output * BLOCK;
        for (j, number) in dequantize(*exponent, codes, NEIGHBORS).into_iter().enumerate() {
            out[(first + j) * outputs + output] = number;
        }
    }
    blocks.release(0..blocks.bytes.len());
    exponents.release(0..exponents.bytes.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of `gguf.quants.MXFP4` and of transformers' `convert_moe_packed_tensors`.
    #[test]
    fn a_block_has_its_numbers_times_its_power_of_two() {
        let codes: [u8; 16] = std::array::from_fn(|i| (i as u8) << 4 | (15 - i as u8));
        let halves = dequantize(128, &codes, HALVES);
        assert_eq!(halves[..4], [-12.0, -8.0, -6.0, -4.0]);
        assert_eq!(halves[16..20], [0.0, 1.0, 2.0, 3.0]);
        let neighbors = dequantize(126, &codes, NEIGHBORS);
        assert_eq!(neighbors[..4], [-3.0, 0.0, -2.0, 0.25]);
        assert_eq!(dequantize(0, &[0x22; 16], HALVES), [2.0_f32.powi(-127); BLOCK]);
    }
}
