//! The rate at which a device multiplies matrices, measured: what a step's speed is a share of.

use super::launch::Memory;
use super::product::{Epilogue, Multiply, Operand, Operands, Product};
use crate::engine::kernels::peak::Peak;
use crate::random::{Domain, Stream};
use candle_core::{DType, Result};
use half::{bf16, f16};
use std::time::Instant;

/// The largest matrices: what they take is moved in a small part of the time in which they are multiplied.
const LARGEST: usize = 8192;
const SMALLEST: usize = 64;
/// Products of a burst, so that waiting for the device costs little of it.
const PRODUCTS: usize = 8;
const BURSTS: usize = 5;

/// Rows of square matrices whose product does no more than about `operations`.
pub(crate) fn product_size(operations: f64) -> usize {
    let rows = |n: &usize| 2.0 * (*n as f64).powi(3);
    let mut sizes = std::iter::successors(Some(LARGEST), |n| Some(n / 2));
    sizes.find(|n| *n <= SMALLEST || rows(n) <= operations).unwrap_or(SMALLEST)
}

/// What `device` reaches in products of `size` × `size` matrices of random numbers of this type, summed in FP32. With zeros
/// it would draw less power, and be faster.
pub(crate) fn dense_rate(device: &(impl Multiply + Memory), dtype: DType, size: usize) -> Result<Peak> {
    let len = size * size;
    let [a, b, d] = [device.allocate(dtype, len)?, device.allocate(dtype, len)?, device.allocate(dtype, len)?];
    for (site, buffer) in [(1, a), (2, b)] {
        device.upload(&random_bytes(len, site, dtype), buffer)?;
    }
    let operand = |transposed| Operand { stride: size, transposed };
    // As the products of a forward pass are.
    let product = Product {
        rows: size,
        columns: size,
        inner: size,
        a: operand(false),
        b: operand(false),
        dtype,
        out: dtype,
        epilogue: Epilogue::None,
        accumulate: false,
    };
    let operands = Operands { a, b, d, bias: None, aux: None };
    let mut rates = Vec::new();
    // The first burst warms up.
    for burst in 0..=BURSTS {
        let begin = Instant::now();
        for _ in 0..PRODUCTS {
            // SAFETY: the buffers are of this size.
            unsafe { device.multiply(product, operands)? };
        }
        // Waits for the products.
        device.download(d.part(0, 1)?, &mut vec![0; dtype.size_in_bytes()])?;
        if burst > 0 {
            rates.push(PRODUCTS as f64 * 2.0 * (size as f64).powi(3) / begin.elapsed().as_secs_f64() / 1e9);
        }
    }
    rates.sort_unstable_by(f64::total_cmp);
    Ok(Peak { held: rates[BURSTS / 2], best: rates[BURSTS - 1] })
}

/// Numbers between -1 and 1.
fn random_bytes(len: usize, site: u32, dtype: DType) -> Vec<u8> {
    let stream = Stream::new(1, Domain::Bench);
    let words = (0..).flat_map(|block| stream.block(site, 0, block));
    let mut bytes = Vec::with_capacity(len * dtype.size_in_bytes());
    for number in words.map(|word| (word >> 8) as f32 / (1 << 23) as f32 - 1.0).take(len) {
        match dtype {
            DType::F16 => bytes.extend(f16::from_f32(number).to_ne_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(number).to_ne_bytes()),
            _ => bytes.extend(number.to_ne_bytes()),
        }
    }
    bytes
}
