//! A product of BF16 matrices whose sums are kept in BF16, and in FP32, against the same product in FP32: why matrix
//! units multiply in half precision and add in single.
//!
//! `cargo run --example gemm_accumulation`

#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use candle_core::{DType, Device, Tensor};
use finetune::engine::kernels::matmul::{Epilogue, Operand, matmul};
use half::bf16;

type Result<T = ()> = std::result::Result<T, finetune::Error>;

const ROWS: usize = 16;
const DEPTHS: [usize; 3] = [64, 512, 4096];

fn main() -> Result {
    println!("depth  relative error with BF16 sums, with FP32 sums");
    let mut errors = vec![];
    for depth in DEPTHS {
        let (a, b) = (positive(ROWS * depth, 0.7), positive(depth * ROWS, 1.3));
        let exact = in_f32(&a, &b, depth)?;
        let (narrow, wide) = (bf16_sums(&a, &b, depth), f32_sums(&a, &b, depth));
        let error = [relative_error(&narrow, &exact), relative_error(&wide, &exact)];
        println!("{depth:5}  {:.5}  {:.5}", error[0], error[1]);
        errors.push(error);
    }
    // One rounding of the result, at most half of BF16's last place.
    assert!(errors.iter().all(|[_, wide]| *wide <= 1.0 / 256.0));
    // A sum in BF16 stops growing where its last place exceeds twice what is added: the deeper, the worse.
    assert!(errors.windows(2).all(|pair| pair[1][0] > 2.0 * pair[0][0]));
    assert!(errors[2][0] > 0.5);
    Ok(())
}

/// Values in [0.5, 1.5], as activations are after a rectifier: their sums grow with the depth.
fn positive(count: usize, frequency: f32) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32(1.0 + 0.5 * (i as f32 * frequency).sin())).collect()
}

fn in_f32(a: &[bf16], b: &[bf16], depth: usize) -> Result<Vec<f32>> {
    let single = |x: &[bf16], shape| Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(DType::F32);
    Ok(single(a, (ROWS, depth))?.matmul(&single(b, (depth, ROWS))?)?.flatten_all()?.to_vec1()?)
}

/// Every product and every partial sum is rounded to BF16.
fn bf16_sums(a: &[bf16], b: &[bf16], depth: usize) -> Vec<bf16> {
    let element = |i: usize| {
        let (row, column) = (i / ROWS, i % ROWS);
        (0..depth).fold(bf16::ZERO, |sum, k| sum + a[row * depth + k] * b[k * ROWS + column])
    };
    (0..ROWS * ROWS).map(element).collect()
}

/// This crate's product: sums in FP32, rounded once.
fn f32_sums(a: &[bf16], b: &[bf16], depth: usize) -> Vec<bf16> {
    let mut c = vec![bf16::ZERO; ROWS * ROWS];
    matmul(Operand::new(a, ROWS, depth), Operand::new(b, depth, ROWS), &mut c, ROWS, Epilogue::default());
    c
}

fn relative_error(values: &[bf16], exact: &[f32]) -> f32 {
    let errors = values.iter().zip(exact).map(|(value, exact)| ((value.to_f32() - exact) / exact).abs());
    errors.fold(0.0, f32::max)
}
