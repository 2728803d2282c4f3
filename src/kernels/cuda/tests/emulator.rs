//! The emulator finds the faults it is there for, and converts as the hardware does.

use super::super::elementwise::copy;
use super::super::emulator::Emulator;
use super::super::launch::{Arguments, Launch, Queue};
use super::super::testbed::Testbed;
use super::pattern;
use candle_core::DType;
use half::{bf16, f16};

#[repr(C)]
#[derive(Clone, Copy)]
struct Faulty {
    input: u64,
    output: u64,
    len: u32,
    fault: u32,
}
// SAFETY: mirrors `Faulty`.
unsafe impl Arguments for Faulty {}

const THREADS: u32 = 64;

/// What a kernel with this fault leaves, or what is said of it.
fn run(fault: u32, order: u32) -> Result<Vec<f32>, String> {
    let gpu = Testbed::Emulator(Emulator::new(order));
    let (input, output) = (gpu.input(&pattern(64, 1, DType::F32), DType::F32), gpu.output(64, DType::F32));
    let arguments = Faulty { input: input.address, output: output.address, len: 64, fault };
    let launch =
        Launch { module: "faults", kernel: "faulty".into(), grid: [1; 3], threads: THREADS, shared_bytes: THREADS * 4 };
    // SAFETY: the emulator checks every access.
    unsafe { gpu.launch(&launch, &arguments) }.map_err(|error| error.to_string())?;
    Ok(gpu.read(output))
}

#[test]
fn a_kernel_without_a_fault_runs_in_every_order() {
    let expected: Vec<f32> = pattern(64, 1, DType::F32).into_iter().rev().collect();
    for order in Emulator::ORDERS {
        assert_eq!(run(0, order), Ok(expected.clone()));
    }
}

#[test]
fn faults_are_found() {
    let complaint = |fault| run(fault, 0).unwrap_err();
    assert!(
        complaint(1).contains("thread 63 of block (0, 0, 0) reads 4 bytes outside every buffer"),
        "{}",
        complaint(1)
    );
    assert!(
        complaint(2).contains("thread 0 of block (0, 0, 0) writes 4 bytes outside every buffer"),
        "{}",
        complaint(2)
    );
    assert!(complaint(3).contains("behind its 256 bytes of shared memory"), "{}", complaint(3));
    assert!(complaint(4).contains("barriers of lines"), "{}", complaint(4));
    assert!(complaint(5).contains("waits at line"), "{}", complaint(5));
    assert!(complaint(7).contains("waits at line"), "{}", complaint(7));
    // After all that the next launch is in order.
    assert!(run(0, 0).is_ok());
}

#[test]
fn a_missing_barrier_shows_in_the_results() {
    let bits = |order| run(6, order).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_ne!(bits(0), bits(1));
}

#[test]
fn wrong_launches_are_refused() {
    let gpu = Emulator::new(0);
    let arguments = Faulty { input: 0, output: 0, len: 0, fault: 0 };
    let attempt = |kernel: &str, threads| {
        let launch = Launch { module: "faults", kernel: kernel.into(), grid: [1; 3], threads, shared_bytes: 0 };
        // SAFETY: the launch is refused before it begins.
        unsafe { gpu.launch(&launch, &arguments) }.unwrap_err().to_string()
    };
    assert!(attempt("nothing", THREADS).contains("no kernel `nothing`"));
    assert!(attempt("faulty", 32).contains("takes 64 threads, got 32"));
    assert!(attempt("layer_norm_forward_kept_f32_f32", 256).contains("takes 112 bytes of arguments, got 24"));
}

/// A type with its numbers' values, and the bits that values are rounded to.
type Format = (DType, fn(u16) -> f32, fn(f32) -> u16);

/// Floats around every rounding boundary of a 16-bit format.
fn hard_cases(widen: impl Fn(u16) -> f32) -> Vec<f32> {
    (0..=u16::MAX)
        .step_by(7)
        .flat_map(|bits| {
            let (value, next) = (widen(bits), widen(bits.wrapping_add(1)));
            let middle = (f64::from(value) * 0.5 + f64::from(next) * 0.5) as f32;
            [value, middle, middle.next_up(), middle.next_down(), value.next_up(), value.next_down()]
        })
        .collect()
}

#[test]
fn conversions_round_as_the_hardware_does() {
    let formats: [Format; 2] = [
        (DType::F16, |bits| f16::from_bits(bits).to_f32(), |x| f16::from_f32_const(x).to_bits()),
        (DType::BF16, |bits| bf16::from_bits(bits).to_f32(), |x| bf16::from_f32_const(x).to_bits()),
    ];
    for (dtype, widen, round) in formats {
        let cases = hard_cases(widen);
        let gpu = Testbed::new(0);
        let (input, narrow) = (gpu.input(&cases, DType::F32), gpu.output(cases.len(), dtype));
        copy(&gpu, input, narrow).unwrap();
        let wide = gpu.output(cases.len(), DType::F32);
        copy(&gpu, narrow, wide).unwrap();
        let stored = gpu.bytes(narrow);
        for ((case, stored), wide) in cases.iter().zip(stored.chunks_exact(2)).zip(gpu.read(wide)) {
            let bits = u16::from_ne_bytes([stored[0], stored[1]]);
            assert!(bits == round(*case) || case.is_nan() && widen(bits).is_nan(), "{case:e} became {bits:#x}");
            assert!(wide == widen(bits) || wide.is_nan() && widen(bits).is_nan(), "{bits:#x} became {wide:e}");
        }
    }
}
