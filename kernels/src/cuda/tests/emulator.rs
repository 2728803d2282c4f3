//! The emulator finds the faults that it is built to find, and converts as the hardware does.

use super::super::emulator::{Emulator, bytes_of};
use super::super::launch::{Arguments, KernelLaunch, Queue, arguments, kernel_symbol};
use super::{numbers, pattern, poisoned, tensor};
use crate::convert::tests::hard_cases;
use crate::op::{self, Op};
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

arguments! {
    struct Faulty {
        input: u64,
        output: u64,
        len: u32,
        fault: u32,
    }

    struct Probe {
        input: u64,
        output: u64,
        operation: u32,
        unused: u32,
    }

    struct Converted {
        input: u64,
        output: u64,
        len: u64,
    }
}

const THREADS: u32 = 64;

/// Runs one block of a kernel, which may only read `input`.
fn launch<A: Arguments>(
    kernel: &str,
    [threads, shared_bytes]: [u32; 2],
    order: u32,
    [input, output]: [&Tensor; 2],
    arguments: impl FnOnce([u64; 2]) -> A,
) -> Result<()> {
    let gpu = Emulator::new(order);
    gpu.begin(&Op::from(op::Copy { x: input, dropout: None, out: output }));
    let [input, output] = [input, output].map(|tensor| gpu.address(tensor).unwrap().unwrap());
    let launch = KernelLaunch { module: "faults", kernel: kernel.into(), grid: [1; 3], threads, shared_bytes };
    // SAFETY: the emulator checks every access.
    unsafe { gpu.launch(&launch, &arguments([input, output])) }
}

/// A kernel's output, or the reported fault.
type Output = std::result::Result<Vec<f32>, String>;

fn run_with(kernel: &str, block: [u32; 2], inputs: usize, len: u32, fault: u32, order: u32) -> Output {
    let input = tensor(&pattern(inputs, 1, DType::F32), &[inputs], DType::F32);
    let output = poisoned(&[block[0] as usize], DType::F32);
    launch(kernel, block, order, [&input, &output], |[input, output]| Faulty { input, output, len, fault })
        .map_err(|error| error.to_string())?;
    Ok(numbers(&output))
}

fn run(fault: u32, order: u32) -> Output {
    run_with("faulty", [THREADS, THREADS * 4], 64, 64, fault, order)
}

/// Steps of asynchronous copies, of 64 chunks of four numbers each.
const STEPS: u32 = 3;

fn run_copies(fault: u32, order: u32) -> Output {
    let numbers = STEPS as usize * 4 * THREADS as usize;
    run_with("faulty_copies", [THREADS, 2 * THREADS * 16], numbers, STEPS, fault, order)
}

fn run_matrices(fault: u32, order: u32) -> Output {
    run_with("faulty_matrices", [32, 32 * 16], 1, 0, fault, order)
}

fn assert_complaint(result: Output, part: &str) {
    let complaint = result.unwrap_err();
    assert!(complaint.contains(part), "{complaint}");
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn a_kernel_without_a_fault_runs_in_every_order() {
    let expected: Vec<f32> = pattern(64, 1, DType::F32).into_iter().rev().collect();
    for order in Emulator::ORDERS {
        assert_eq!(run(0, order), Ok(expected.clone()));
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn faults_are_found() {
    for (fault, part) in [
        (1, "thread 63 of block (0, 0, 0) reads 4 bytes outside every buffer"),
        (2, "thread 0 of block (0, 0, 0) writes 4 bytes outside every buffer"),
        (3, "behind its 256 bytes of shared memory"),
        (4, "barriers of lines"),
        (5, "waits at line"),
        (7, "waits at line"),
    ] {
        assert_complaint(run(fault, 0), part);
    }
    // After all that the next launch is in order.
    assert!(run(0, 0).is_ok());
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn a_missing_barrier_shows_in_the_results() {
    assert_ne!(bits(&run(6, 0).unwrap()), bits(&run(6, 1).unwrap()));
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn copies_arrive_when_they_were_waited_for() {
    let input = pattern(STEPS as usize * 4 * THREADS as usize, 1, DType::F32);
    let chunks: Vec<&[f32]> = input.chunks_exact(4).collect();
    let sum = |thread: usize| {
        let mut sum = 0.0;
        for (step, chunks) in chunks.chunks_exact(THREADS as usize).enumerate() {
            let chunk = THREADS as usize - 1 - thread;
            let inside = step + 1 < STEPS as usize || !chunk.is_multiple_of(2);
            chunks[chunk].iter().for_each(|x| sum += if inside { *x } else { 0.0 });
        }
        sum
    };
    let expected: Vec<f32> = (0..THREADS as usize).map(sum).collect();
    for order in Emulator::ORDERS {
        assert_eq!(run_copies(0, order), Ok(expected.clone()));
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn faults_of_copies_are_found() {
    // Without a wait, without a group to wait for, or with one group too many left, there is poison in every order.
    for fault in [1, 2, 3] {
        for order in Emulator::ORDERS {
            assert!(run_copies(fault, order).unwrap().iter().any(|x| x.is_nan()), "fault {fault} in order {order}");
        }
    }
    // Without a barrier it depends on the order.
    for fault in [4, 5] {
        let results = Emulator::ORDERS.map(|order| bits(&run_copies(fault, order).unwrap()));
        assert!(results.iter().any(|other| *other != results[0]), "fault {fault}");
    }
    for (fault, part) in [
        (6, "ends with copies that it did not wait for"),
        (7, "reads 16 bytes outside every buffer"),
        (8, "copies from an address that is not aligned to 16 bytes"),
        (9, "is outside the block's 2048 bytes of shared memory"),
        (10, "an address of shared memory is not aligned to 16 bytes"),
    ] {
        assert_complaint(run_copies(fault, 0), part);
    }
    assert!(run_copies(0, 0).is_ok());
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn faults_of_matrices_are_found() {
    // The first matrix has the rows of lanes 0 to 7; four lanes get each of them.
    let expected: Vec<f32> = (0..32).map(|lane| (lane / 4) as f32).collect();
    for order in Emulator::ORDERS {
        assert_eq!(run_matrices(0, order), Ok(expected.clone()));
    }
    for (fault, part) in [
        (1, "thread 31 is outside the block's 512 bytes of shared memory"),
        (2, "an address of shared memory is not aligned to 16 bytes"),
        (3, "waits at line"),
        (4, "meet in exchanges of lines"),
    ] {
        assert_complaint(run_matrices(fault, 0), part);
    }
    // The neighboring lane's value is poison until it is written.
    assert_ne!(bits(&run_matrices(5, 0).unwrap()), bits(&expected));
    assert!(run_matrices(0, 0).is_ok());
}

/// The four words that each lane gets from an operation of the whole warp.
fn probe(operation: u32, words: &[u32]) -> Vec<u32> {
    let input = Tensor::new(words, &Device::Cpu).unwrap();
    let output = Tensor::zeros(128, DType::U32, &Device::Cpu).unwrap();
    let arguments = |[input, output]: [u64; 2]| Probe { input, output, operation, unused: 0 };
    launch("probe", [32, 512], 2, [&input, &output], arguments).unwrap();
    output.to_vec1().unwrap()
}

/// The lane that has an element of a matrix of 8 × 8, as the figures of the PTX ISA show them: two neighbors of a row
/// share a lane's register, the left one in its lower half.
fn lane_of(row: usize, column: usize) -> usize {
    4 * row + column / 2
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn products_of_a_warp_have_the_layouts_of_the_hardware() {
    // Whole numbers, so that all sums are exact.
    let whole = |count, salt, range: f32| -> Vec<f32> {
        pattern(count, salt, DType::F32).into_iter().map(|x| (x * range).trunc()).collect()
    };
    let (a, b, c) = (whole(256, 1, 100.0), whole(128, 2, 100.0), whole(128, 3, 1e5));
    let formats: [fn(f32) -> u16; 2] = [|x| f16::from_f32_const(x).to_bits(), |x| bf16::from_f32_const(x).to_bits()];
    for (operation, round) in formats.into_iter().enumerate() {
        let mut words = [[0; 10]; 32];
        for row in 0..16 {
            for k in 0..16 {
                // Quarters of the left operand: upper left, lower left, upper right, lower right.
                let register = [[0, 2], [1, 3]][row / 8][k / 8];
                words[lane_of(row % 8, k % 8)][register] |= u32::from(round(a[row * 16 + k])) << (k % 2 * 16);
            }
        }
        for k in 0..16 {
            for column in 0..8 {
                // The right operand's neighbors are in a column; its upper half is register 4.
                words[lane_of(column, k % 8)][4 + k / 8] |= u32::from(round(b[k * 8 + column])) << (k % 2 * 16);
            }
        }
        let result = |row: usize, column: usize| (lane_of(row % 8, column), row / 8 * 2 + column % 2);
        for row in 0..16 {
            for column in 0..8 {
                let (lane, register) = result(row, column);
                words[lane][6 + register] = c[row * 8 + column].to_bits();
            }
        }
        let found = probe(operation as u32, words.as_flattened());
        for row in 0..16 {
            for column in 0..8 {
                let product: f32 = (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).sum();
                let (lane, register) = result(row, column);
                let found = f32::from_bits(found[lane * 4 + register]);
                assert_eq!(found, product + c[row * 8 + column], "element ({row}, {column})");
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn matrices_of_a_warp_have_the_layouts_of_the_hardware() {
    // Every element is its own number.
    let element = |matrix: usize, row: usize, column: usize| (matrix * 64 + row * 8 + column) as u32;
    let words: Vec<u32> = (0..128)
        .map(|word| {
            let matrix = word / 32;
            let row = word / 4 % 8;
            let column = word % 4 * 2;
            element(matrix, row, column) | element(matrix, row, column + 1) << 16
        })
        .collect();
    let (plain, transposed) = (probe(2, &words), probe(3, &words));
    for matrix in 0..4 {
        for row in 0..8 {
            for column in 0..8 {
                let half = |words: &[u32]| words[lane_of(row, column) * 4 + matrix] >> (column % 2 * 16) & 0xffff;
                assert_eq!(half(&plain), element(matrix, row, column));
                assert_eq!(half(&transposed), element(matrix, column, row));
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn wrong_launches_are_refused() {
    let arguments = Faulty { input: 0, output: 0, len: 0, fault: 0 };
    let attempt = |kernel: &str, threads| {
        let launch = KernelLaunch { module: "faults", kernel: kernel.into(), grid: [1; 3], threads, shared_bytes: 0 };
        // SAFETY: the launch is refused before it begins.
        unsafe { Emulator::new(0).launch(&launch, &arguments) }.unwrap_err().to_string()
    };
    assert!(attempt("nothing", THREADS).contains("no kernel `nothing`"));
    assert!(attempt("faulty", 32).contains("takes 64 threads, got 32"));
    assert!(attempt("faulty_or_smaller", 96).contains("takes 64 threads, got 96"));
    assert!(attempt("norm_forward_narrow_f32_f32", 256).contains("takes 80 bytes of arguments, got 24"));
}

/// `out = x`, rounded to `out`'s type.
fn convert(x: &Tensor, out: &Tensor) {
    let kernel = kernel_symbol("convert", &[x.dtype(), out.dtype()]).unwrap();
    let len = x.elem_count() as u64;
    launch(&kernel, [THREADS, 0], 0, [x, out], |[input, output]| Converted { input, output, len }).unwrap();
}

/// A type with its numbers' values, and the bits that values are rounded to.
type Format = (DType, fn(u16) -> f32, fn(f32) -> u16);

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn conversions_round_as_the_hardware_does() {
    let formats: [Format; 2] = [
        (DType::F16, |bits| f16::from_bits(bits).to_f32(), |x| f16::from_f32_const(x).to_bits()),
        (DType::BF16, |bits| bf16::from_bits(bits).to_f32(), |x| bf16::from_f32_const(x).to_bits()),
    ];
    for (dtype, upcast, round) in formats {
        let cases = hard_cases(7, upcast);
        let [narrow, wide] = [dtype, DType::F32].map(|dtype| poisoned(&[cases.len()], dtype));
        convert(&tensor(&cases, &[cases.len()], DType::F32), &narrow);
        convert(&narrow, &wide);
        let stored = bytes_of(&narrow).unwrap();
        for ((case, stored), wide) in cases.iter().zip(stored.chunks_exact(2)).zip(numbers(&wide)) {
            let bits = u16::from_ne_bytes([stored[0], stored[1]]);
            assert!(bits == round(*case) || case.is_nan() && upcast(bits).is_nan(), "{case:e} became {bits:#x}");
            assert!(wide == upcast(bits) || wide.is_nan() && upcast(bits).is_nan(), "{bits:#x} became {wide:e}");
        }
    }
}
