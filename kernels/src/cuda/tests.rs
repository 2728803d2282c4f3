//! Each kernel in the emulator against its CPU counterpart or its definition in f64: odd sizes, poisoned outputs, all
//! types, and every order of threads, whose results must have the same bits.
mod adamw;
mod attention;
mod elementwise;
mod emulator;
mod non_finite;
mod summary;

use super::dispatch::{CudaKernels, KernelFamily};
use super::emulator::Emulator;
use crate::Kernels;
use crate::op::cases::table::{PAIRS, TYPES};
use crate::op::cases::{Bounds, Case, cases};
use crate::view::{View, read};
use crate::{Fused, op};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeSet;
use strum::VariantArray;

/// Our kernels in the emulator, which has no cuBLASLt.
fn kernels(order: u32) -> CudaKernels<Emulator> {
    CudaKernels::new(Emulator::new(order), KernelFamily::VARIANTS.iter().copied().collect())
}

/// A case, with the same bits in every order; attention also with the products of one warp alone.
fn check_case(case: &Case) {
    let all: BTreeSet<_> = KernelFamily::VARIANTS.iter().copied().collect();
    let mut choices = vec![all.clone()];
    if case.family == KernelFamily::Attention.name() {
        choices.push(&all - &BTreeSet::from([KernelFamily::AttentionWgmma]));
    }
    for families in choices {
        in_every_order(|order| {
            let kernels = CudaKernels::new(Emulator::new(order), families.clone());
            let found = case.check(&kernels, &Device::Cpu, 1, Bounds::Gpu).unwrap_or_else(|error| panic!("{error}"));
            found.iter().map(numbers).collect()
        });
    }
}

fn check_cases(families: &[KernelFamily]) {
    let wanted = |case: &&Case| families.iter().any(|family| family.name() == case.family);
    cases().iter().filter(wanted).for_each(check_case);
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn cases_of_attention() {
    check_cases(&[KernelFamily::Attention]);
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn cases_of_norms() {
    check_cases(&[KernelFamily::Norm]);
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn cases_of_all_other_kernels() {
    use KernelFamily::{AdamW, CrossEntropy, Elementwise, Embedding, Rope, Summary};
    check_cases(&[AdamW, CrossEntropy, Elementwise, Embedding, Rope, Summary]);
}

/// Values between -1 and 1 in no order that `dtype` can hold.
fn pattern(count: usize, salt: u64, dtype: DType) -> Vec<f32> {
    let entry = |i: u64| {
        let mut bits = (i + 1 + (salt << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    rounded((0..count as u64).map(entry).collect(), dtype)
}

/// `values` as `dtype` holds them.
#[expect(clippy::needless_pass_by_value, reason = "callers make the values on the spot")]
fn rounded(values: Vec<f32>, dtype: DType) -> Vec<f32> {
    let len = values.len();
    numbers(&tensor(&values, &[len], dtype))
}

fn tensor(values: &[f32], shape: &[usize], dtype: DType) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// A CPU tensor full of NaN.
fn poisoned(shape: &[usize], dtype: DType) -> Tensor {
    tensor(&vec![f32::NAN; shape.iter().product()], shape, dtype)
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).unwrap();
    let opened = read(&tensor).unwrap();
    let View::F32(values) = opened.view() else { unreachable!("converted above") };
    values.to_vec()
}

/// The result of `run`, which has the same bits for each order of threads.
fn in_every_order(run: impl Fn(u32) -> Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let [first, others @ ..] = Emulator::ORDERS.map(run);
    let bits = |results: &[Vec<f32>]| results.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
    for other in &others {
        assert!(bits(&first) == bits(other), "the result depends on the order of the threads");
    }
    first
}

/// Every element within the bound of the table's cases, relative to the larger of the expected one and the tensor's
/// root mean square.
fn assert_close(what: &str, found: &[f32], expected: &[f32], dtype: DType) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let squares: f64 = expected.iter().map(|&x| f64::from(x).powi(2)).sum();
    let typical = (squares / expected.len().max(1) as f64).sqrt();
    let [bound, _] = Bounds::Gpu.of(dtype);
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = f64::from(found - expected).abs() / f64::from(expected.abs()).max(typical).max(f64::MIN_POSITIVE);
        assert!(error <= bound, "{what} in {dtype:?}: element {i} is {found}, not {expected}");
    }
}
