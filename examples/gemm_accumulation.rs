//! A product of BF16 matrices with BF16 and with FP32 accumulation, compared with FP32: why matrix units multiply in
//! half precision and accumulate in single.
//!
//! `cargo run --example gemm_accumulation`

#![expect(clippy::print_stdout, reason = "the example prints its results")]

use candle_core::{DType, Device, Tensor};
use finetune::engine::kernels::matmul::{Gemm, Operand};
use finetune::random::{Domain, Stream};
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
    // One rounding of the result: at most half a unit in BF16's last place.
    assert!(errors.iter().all(|[_, wide]| *wide <= 1.0 / 256.0));
    // A BF16 sum stops growing when its last place exceeds twice the addend, so the error grows with depth.
    assert!(errors.windows(2).all(|pair| pair[1][0] > 2.0 * pair[0][0]));
    assert!(errors[2][0] > 0.5);
    of_normal_values()
}

/// 64 × 128 by 128 × 64 matrices of N(0, 0.1), rounded to BF16: the error against FP32 over the size of the result,
/// both summed over all elements. A tutorial reports 0.0120 for BF16 sums and 0.0028 for FP32 sums, for its own values.
fn of_normal_values() -> Result {
    const SHAPE: [usize; 3] = [64, 128, 64];
    let [rows, depth, columns] = SHAPE;
    let stream = Stream::new(0, Domain::Bench);
    let draw = |site, count| {
        let mut values = vec![0f32; count];
        stream.fill_normal(site, 0, 0, &mut values);
        values.iter().map(|value| 0.1 * value).collect::<Vec<_>>()
    };
    let (a, b) = (draw(0, rows * depth), draw(1, depth * columns));
    let tensor = |values: &[f32], shape| Tensor::from_slice(values, shape, &Device::Cpu);
    let exact = tensor(&a, (rows, depth))?.matmul(&tensor(&b, (depth, columns))?)?.flatten_all()?.to_vec1::<f32>()?;
    let narrow = |values: &[f32]| values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>();
    let (a, b) = (narrow(&a), narrow(&b));
    let element = |i: usize| (0..depth).map(move |k| (i / columns * depth + k, k * columns + i % columns));
    let in_bf16 = |i| element(i).fold(bf16::ZERO, |sum, (left, right)| sum + a[left] * b[right]);
    let in_f32 = |i| bf16::from_f32(element(i).map(|(left, right)| a[left].to_f32() * b[right].to_f32()).sum());
    let error = |value: &dyn Fn(usize) -> bf16| {
        let apart: f32 = exact.iter().enumerate().map(|(i, exact)| (value(i).to_f32() - exact).abs()).sum();
        apart / exact.iter().map(|exact| exact.abs()).sum::<f32>()
    };
    let (narrow, wide) = (error(&in_bf16), error(&in_f32));
    println!(
        "{rows} × {depth} × {columns} of N(0, 0.1): relative L1 {narrow:.4} with BF16 sums, {wide:.4} with FP32 sums"
    );
    assert!((narrow / 0.0120 - 1.0).abs() < 0.1 && (wide / 0.0028 - 1.0).abs() < 0.1);
    Ok(())
}

/// Values in [0.5, 1.5], like activations after a rectifier, whose sums grow with depth.
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
    Gemm::new(Operand::new(a, ROWS, depth), Operand::new(b, depth, ROWS)).run(&mut c, ROWS);
    c
}

fn relative_error(values: &[bf16], exact: &[f32]) -> f32 {
    let errors = values.iter().zip(exact).map(|(value, exact)| ((value.to_f32() - exact) / exact).abs());
    errors.fold(0.0, f32::max)
}
