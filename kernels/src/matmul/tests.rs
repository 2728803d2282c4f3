//! Every micro-kernel against sums in f64.

use super::super::amx::model::EmulatedTiles;
use super::super::convert::Element;
use super::super::isa::Isa;
use super::buffer::{GemmWorkspace, PackBuffer, with_thread_buffer};
use super::epilogue::OutputMatrix;
use super::micro::MicroKernel;
use super::{Epilogue, Gemm, GemmShape, LowRankTerm, Operand, with_packed, words};
use crate::{Fused, WeightLayout, op, view};
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use std::ops::Range;

/// The micro-kernels of an instruction set of this CPU, or the one for AMX on a model of its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    Of(Isa),
    TileModel,
}

impl Kernels {
    /// The micro-kernel for a type; there is a model for BF16 alone.
    fn of<T: Element>(self) -> Option<MicroKernel> {
        match self {
            Self::Of(isa) => Some(MicroKernel::of::<T>(isa)),
            Self::TileModel => (T::DTYPE == candle_core::DType::BF16).then(MicroKernel::in_tiles::<EmulatedTiles>),
        }
    }
}

/// Numbers in [-1, 1) from a small generator (Knuth's MMIX constants); a format's rounding is applied.
fn random<T: Element>(len: usize, mut seed: u64) -> Vec<T> {
    (0..len)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            T::from_f32((seed >> 40) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}

fn element<T: Element>(operand: &Operand<'_, T>, i: usize, j: usize) -> f64 {
    f64::from(operand.data[i * operand.row_stride + j * operand.col_stride].to_f32())
}

/// The elements of a product in f64, and the sums of their terms' magnitudes.
struct Exact {
    sums: Vec<f64>,
    magnitudes: Vec<f64>,
}

impl Exact {
    fn of<T: Element>(a: &Operand<'_, T>, b: &Operand<'_, T>) -> Self {
        let (m, k, n) = (a.rows, a.cols, b.cols);
        let (mut sums, mut magnitudes) = (vec![0.0; m * n], vec![0.0; m * n]);
        for p in 0..k {
            let row: Vec<f64> = (0..n).map(|j| element(b, p, j)).collect();
            for i in 0..m {
                let factor = element(a, i, p);
                let sums = sums[i * n..][..n].iter_mut().zip(&mut magnitudes[i * n..][..n]);
                for ((sum, magnitude), b) in sums.zip(&row) {
                    *sum += factor * b;
                    *magnitude += (factor * b).abs();
                }
            }
        }
        Self { sums, magnitudes }
    }
}

/// Fails where an element of C is further from the sum in f64 than one rounding to `C` and FP32 sums allow, with a
/// second term and without.
fn check<A: Element, C: Element>(kernels: Kernels, a: Operand<'_, A>, b: Operand<'_, A>, epilogue: Epilogue<'_>) {
    check_product::<A, C>(kernels, a, b, &Exact::of(&a, &b), epilogue);
}

fn check_product<A: Element, C: Element>(
    kernels: Kernels,
    a: Operand<'_, A>,
    b: Operand<'_, A>,
    exact: &Exact,
    epilogue: Epilogue<'_>,
) {
    let depth = a.cols % 7 + 1;
    let alpha = 0.75;
    let [second_a, second_b] = [(a.rows * depth, 11), (depth * b.cols, 12)].map(|(len, seed)| random::<A>(len, seed));
    let [rows, columns] = [a.rows, b.cols];
    let term = |b, shares| LowRankTerm { a: Operand::new(&second_a, rows, depth), b, alpha, shares };
    check_terms::<A, C>(kernels, a, b, exact, None, epilogue);
    check_terms::<A, C>(kernels, a, b, exact, Some(&term(Operand::new(&second_b, depth, columns), &[])), epilogue);
    // Every row of B adds to separate columns, and some columns get nothing.
    let width = b.cols / (depth + 1);
    let shares: Vec<Range<usize>> = (0..depth).map(|k| k * width..(k + 1) * width).collect();
    let mut parted = second_b.clone();
    for (row, share) in parted.chunks_exact_mut(b.cols.max(1)).zip(&shares) {
        row[..share.start].fill(A::zero());
        row[share.end..].fill(A::zero());
    }
    check_terms::<A, C>(kernels, a, b, exact, Some(&term(Operand::new(&parted, depth, columns), &shares)), epilogue);
}

fn check_terms<A: Element, C: Element>(
    kernels: Kernels,
    a: Operand<'_, A>,
    b: Operand<'_, A>,
    exact: &Exact,
    second: Option<&LowRankTerm<'_, A>>,
    epilogue: Epilogue<'_>,
) {
    let Some(kernel) = kernels.of::<A>() else { return };
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let ldc = n + 3;
    let old: Vec<C> = random(m * ldc, 7);
    let mut c = old.clone();
    Gemm { a, b, second: second.copied(), epilogue }.run_on(kernel, &mut c, ldc);
    let more = second.map(|LowRankTerm { a, b, alpha, .. }| (Exact::of(a, b), f64::from(*alpha)));
    for (i, (row, old)) in c.chunks(ldc).zip(old.chunks(ldc)).enumerate() {
        assert!(row[n..] == old[n..], "wrote beyond row {i}");
        for j in 0..n {
            let at = i * n + j;
            let (mut sum, mut magnitude) = (exact.sums[at], exact.magnitudes[at]);
            if let Some((more, alpha)) = &more {
                sum += alpha * more.sums[at];
                magnitude += alpha * more.magnitudes[at];
            }
            let alpha = f64::from(epilogue.alpha);
            let bias = epilogue.bias.map_or(0.0, |bias| f64::from(bias[j]));
            let before = if epilogue.accumulate { f64::from(old[j].to_f32()) } else { 0.0 };
            let expected = alpha * sum + bias + before;
            let roundings = 4.0 + (k as f64).sqrt();
            let fp32 = (magnitude * alpha.abs() + bias.abs() + before.abs()) * roundings * 2f64.powi(-25);
            let allowed = view::float_format(C::DTYPE).ulp(expected) / 2.0 * 1.001 + fp32;
            let found = f64::from(row[j].to_f32());
            assert!(
                (found - expected).abs() <= allowed,
                "{kernels:?} {:?} to {:?}, {m} × {k} × {n}, ({i}, {j}): {found}, not {expected} ± {allowed:e}",
                A::DTYPE,
                C::DTYPE
            );
        }
    }
}

/// Kernels that run here: AMX on the CPU's tiles if it has them, and always on the model.
fn supported() -> impl Iterator<Item = Kernels> {
    Isa::ALL.iter().copied().filter(|isa| isa.is_supported()).map(Kernels::Of).chain([Kernels::TileModel])
}

/// All four layouts of the operands of one shape.
fn check_layouts<A: Element, C: Element>(kernels: Kernels, m: usize, k: usize, n: usize, epilogue: Epilogue<'_>) {
    let transposed = |x: &[A], rows: usize, columns: usize| -> Vec<A> {
        (0..x.len()).map(|at| x[at % rows * columns + at / rows]).collect()
    };
    let (a, b) = (random::<A>(m * k, 1), random::<A>(k * n, 2));
    let (ta, tb) = (transposed(&a, m, k), transposed(&b, k, n));
    let left = [Operand::new(&a, m, k), Operand::new(&ta, k, m).transposed()];
    let right = [Operand::new(&b, k, n), Operand::new(&tb, n, k).transposed()];
    let exact = Exact::of(&left[0], &right[0]);
    for a in left {
        for b in right {
            check_product::<A, C>(kernels, a, b, &exact, epilogue);
        }
    }
}

fn check_all_types(kernels: Kernels, m: usize, k: usize, n: usize, epilogue: Epilogue<'_>) {
    check_layouts::<f32, f32>(kernels, m, k, n, epilogue);
    check_layouts::<f32, f16>(kernels, m, k, n, epilogue);
    check_layouts::<f32, bf16>(kernels, m, k, n, epilogue);
    check_layouts::<f16, f32>(kernels, m, k, n, epilogue);
    check_layouts::<f16, f16>(kernels, m, k, n, epilogue);
    check_layouts::<bf16, f32>(kernels, m, k, n, epilogue);
    check_layouts::<bf16, bf16>(kernels, m, k, n, epilogue);
}

#[test]
fn all_shapes_layouts_and_types_agree_with_f64() {
    let shapes = [
        (1, 1, 1),
        (1, 7, 100),
        (1, 770, 600),
        (2, 1, 1),
        (2, 7, 100),
        (5, 2, 3),
        (8, 16, 48),
        (9, 17, 49),
        (61, 5, 30),
        (130, 63, 50),
        (50, 64, 145),
        (100, 33, 1),
        (100, 70, 16),
        (97, 64, 50),
    ];
    for kernels in supported() {
        for (m, k, n) in shapes {
            check_all_types(kernels, m, k, n, Epilogue::default());
        }
    }
}

#[test]
fn the_epilogue_scales_adds_the_bias_and_the_old_value() {
    let bias: Vec<f32> = random(51, 3);
    for kernels in supported() {
        for accumulate in [false, true] {
            let epilogue = Epilogue { alpha: -0.75, bias: Some(&bias), accumulate };
            check_all_types(kernels, 20, 33, 51, epilogue);
            check_all_types(kernels, 1, 33, 51, epilogue);
            check_all_types(kernels, 150, 33, 9, Epilogue { bias: Some(&bias[..9]), ..epilogue });
        }
    }
}

#[test]
fn a_product_rounds_once_whatever_its_depth() {
    let bias: Vec<f32> = random(50, 3);
    for kernels in supported() {
        for k in [768, 3072, 8192] {
            check_layouts::<f16, f16>(kernels, 11, k, 50, Epilogue::default());
            check_layouts::<bf16, bf16>(kernels, 11, k, 50, Epilogue::default());
            check_layouts::<f32, f32>(kernels, 11, k, 50, Epilogue::default());
            check_all_types(kernels, 1, k, 300, Epilogue::default());
            let epilogue = Epilogue { alpha: 0.5, bias: Some(&bias), accumulate: true };
            check_layouts::<bf16, bf16>(kernels, 60, k, 50, epilogue);
            check_layouts::<f16, f32>(kernels, 60, k, 50, epilogue);
            check_layouts::<bf16, bf16>(kernels, 100, k, 7, Epilogue { bias: Some(&bias[..7]), ..epilogue });
        }
    }
}

#[test]
fn operands_may_have_any_strides() {
    let data = random::<bf16>(4000, 1);
    for kernels in supported() {
        let a = Operand::with_strides(&data, 13, 11, 29, 2);
        let b = Operand::with_strides(&data, 11, 9, 3, 101);
        check::<bf16, f32>(kernels, a, b, Epilogue::default());
        let row = Operand::with_strides(&data, 1, 11, 0, 2);
        check::<bf16, f32>(kernels, row, b, Epilogue::default());
        check::<bf16, f32>(kernels, row, Operand::with_strides(&data, 11, 9, 101, 1), Epilogue::default());
        check::<bf16, f32>(kernels, row, Operand::with_strides(&data, 11, 9, 1, 101), Epilogue::default());
    }
}

#[test]
fn large_products_are_cut_up_correctly() {
    let checks: [(usize, usize, usize); 3] = [(2100, 3, 2050), (700, 1, 5000), (6001, 2, 100)];
    for (m, k, n) in checks {
        let a: Vec<f32> = (0..m * k).map(|i| (i % 31) as f32).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i % 29) as f32).collect();
        let mut c = vec![0f32; m * n];
        Gemm::new(Operand::new(&a, m, k), Operand::new(&b, k, n)).run(&mut c, n);
        for i in 0..m {
            for j in 0..n {
                let expected: f32 = (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
                assert_eq!(c[i * n + j], expected, "({i}, {j}) of {m} × {k} × {n}");
            }
        }
    }
}

#[test]
fn empty_products_are_zeros_or_nothing() {
    let bias = [2.0, 3.0];
    for kernels in supported() {
        let Some(kernel) = kernels.of::<bf16>() else { continue };
        let mut c = [bf16::ONE; 4];
        let empty = Operand::new(&[] as &[bf16], 2, 0);
        let epilogue = Epilogue { bias: Some(&bias), ..Epilogue::default() };
        Gemm { epilogue, ..Gemm::new(empty, empty.transposed()) }.run_on(kernel, &mut c, 2);
        assert_eq!(c.map(bf16::to_f32), [2.0, 3.0, 2.0, 3.0]);
        let mut nothing: [f32; 0] = [];
        Gemm::new(empty.transposed(), Operand::new(&[bf16::ONE; 6], 2, 3)).run_on(kernel, &mut nothing, 3);
    }
}

#[test]
fn nan_and_infinity_reach_their_row_and_column_and_no_other_place() {
    fn poisoned<T: Element>(kernels: Kernels, m: usize, k: usize, is_transposed: bool) {
        let Some(kernel) = kernels.of::<T>() else { return };
        let n = 52;
        let row = m - 7;
        let mut a = vec![T::from_f32(1.0); m * k];
        let mut b = vec![T::from_f32(1.0); k * n];
        a[if is_transposed { 6 * m + row } else { row * k + 6 }] = T::from_f32(f32::INFINITY);
        b[6 * n + 50] = T::from_f32(0.0);
        b[2 * n + 5] = T::from_f32(f32::NAN);
        let mut c = vec![T::from_f32(0.0); m * n];
        let a = if is_transposed { Operand::new(&a, k, m).transposed() } else { Operand::new(&a, m, k) };
        Gemm::new(a, Operand::new(&b, k, n)).run_on(kernel, &mut c, n);
        for (index, value) in c.iter().enumerate() {
            let value = value.to_f32();
            let i = index / n;
            let j = index % n;
            match (i, j) {
                (_, 5) => assert!(value.is_nan(), "({i}, {j}) is {value}"),
                (_, 50) if i == row => assert!(value.is_nan(), "({i}, {j}) is {value}"),
                (_, _) if i == row => assert_eq!(value, f32::INFINITY, "({i}, {j})"),
                (_, 50) => assert_eq!(value, k as f32 - 1.0, "({i}, {j})"),
                _ => assert_eq!(value, k as f32, "({i}, {j})"),
            }
        }
    }
    for kernels in supported() {
        // The second depth does not fill its last tile. No earlier packed values may stay in that tile.
        for (m, k, is_transposed) in [(10, 7, false), (70, 34, false), (70, 34, true)] {
            poisoned::<f32>(kernels, m, k, is_transposed);
            poisoned::<f16>(kernels, m, k, is_transposed);
            poisoned::<bf16>(kernels, m, k, is_transposed);
        }
    }
}

/// The bits of a product that is cut in many ways.
fn bits<T: Element>(kernel: MicroKernel, threads: usize, rows: Range<usize>) -> Vec<u32> {
    let (k, n) = (3200, 333);
    let m = rows.len();
    let a = random::<T>(m * k, 1);
    let b = random::<T>(k * n, 2);
    let mut c = vec![T::from_f32(0.0); m * n];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let (a, b) = (Operand::new(&a, m, k), Operand::new(&b, k, n));
    pool.install(|| Gemm::new(a, b).run_on(kernel, &mut c, n));
    c.iter().map(|value| value.to_f32().to_bits()).collect()
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    for rows in [0..1, 0..64, 0..500] {
        let current = Kernels::Of(Isa::current());
        let f32 = current.of::<f32>().unwrap();
        let one = bits::<f32>(f32, 1, rows.clone());
        assert!([2, 3, 7].iter().all(|&threads| bits::<f32>(f32, threads, rows.clone()) == one));
        for bf16_kernel in [current, Kernels::TileModel].map(|kernels| kernels.of::<bf16>().unwrap()) {
            let one = bits::<bf16>(bf16_kernel, 1, rows.clone());
            assert!([2, 3, 7].iter().all(|&threads| bits::<bf16>(bf16_kernel, threads, rows.clone()) == one));
        }
    }
}

/// Bytes in the buffers of a product on two threads. The larger own buffer counts.
fn held<A: Element, C: Element>(kernel: MicroKernel, [m, k, n]: [usize; 3], depth: usize) -> [usize; 5] {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let (a, b, mut c) = (vec![A::zero(); m * k], vec![A::zero(); k * n], vec![C::zero(); m * n]);
    let (low, factor) = (vec![A::zero(); m * depth], vec![A::zero(); depth * n]);
    let term =
        LowRankTerm { a: Operand::new(&low, m, depth), b: Operand::new(&factor, depth, n), alpha: 1.0, shares: &[] };
    let a = Operand::new(&a, m, k);
    let b = Operand::new(&b, k, n);
    let second = (depth > 0).then_some(term);
    let mut workspace = GemmWorkspace::new();
    pool.install(|| Gemm { second, ..Gemm::new(a, b) }.run_in(&mut workspace, kernel, OutputMatrix::new(&mut c, n)));
    let own = pool.broadcast(|_| with_thread_buffer(|buffer| buffer.bytes()));
    let GemmWorkspace { shared, partial, second: [a, b] } = &workspace;
    [own.into_iter().max().unwrap(), shared.bytes(), partial.bytes(), a.bytes(), b.bytes()]
}

/// Predictions of a run's memory count packed operands by their shapes alone.
#[test]
fn buffers_take_what_is_told_of_them() {
    fn compare<A: Element, C: Element>(kernels: Kernels) {
        let Some(kernel) = kernels.of::<A>() else { return };
        let sizes = [[5, 7, 9], [256, 300, 700], [700, 300, 256], [3000, 20, 2500], [60, 3100, 700], [700, 3100, 8]];
        for (sizes, second) in sizes.into_iter().flat_map(|sizes| [(sizes, 0), (sizes, 24)]) {
            let shape = GemmShape { sizes, second, operands: A::DTYPE, c: C::DTYPE };
            let told = words(kernel, shape, 2).map(PackBuffer::bytes_of);
            assert_eq!(held::<A, C>(kernel, sizes, second), told, "{kernels:?} {shape:?}");
        }
    }
    for kernels in supported() {
        compare::<f32, f32>(kernels);
        compare::<f16, f16>(kernels);
        compare::<bf16, bf16>(kernels);
        compare::<bf16, f32>(kernels);
    }
    // Partial sums have a bound.
    let kernel = MicroKernel::of::<f16>(Isa::current());
    let sizes = [2050, 1540, 2200];
    let shape = GemmShape { sizes, second: 0, operands: candle_core::DType::F16, c: candle_core::DType::F16 };
    assert_eq!(held::<f16, f16>(kernel, sizes, 0), words(kernel, shape, 2).map(PackBuffer::bytes_of));
}

/// Sizes around those of tiles and of their pairs.
#[test]
fn tiles_of_any_size_agree_with_f64() {
    for kernels in supported().filter(|kernels| kernels.of::<bf16>().is_some_and(|kernel| kernel.a().unit.words() > 1))
    {
        for (m, n) in [(2, 33), (15, 64), (16, 16), (17, 31), (31, 17), (32, 32), (33, 2), (65, 96), (130, 200)] {
            for k in [1, 2, 31, 32, 33, 63, 257, 290] {
                check_layouts::<bf16, f32>(kernels, m, k, n, Epilogue::default());
                check_layouts::<bf16, bf16>(kernels, m, k, n, Epilogue { accumulate: true, ..Epilogue::default() });
            }
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
#[ignore = "needs a CPU with AMX, where .ci/run runs it"]
fn the_cpus_tiles_and_their_model_give_the_same_products() {
    let real = Kernels::Of(Isa::Amx);
    let model = Kernels::TileModel;
    let [real, model] = [real, model].map(|kernels| kernels.of::<bf16>().unwrap());
    for rows in [2..7, 0..64, 0..500] {
        assert!(bits::<bf16>(real, 2, rows.clone()) == bits::<bf16>(model, 2, rows));
    }
}

/// Rows that are multiplied alone or with few others have the bits that they have among many.
fn check_rows<T: Element>(kernels: Kernels) {
    let (m, k, n) = (37, 3300, 101);
    let Some(kernel) = kernels.of::<T>() else { return };
    let [a, b, transposed] = [(m * k, 1), (k * n, 2), (k * n, 3)].map(|(len, seed)| random::<T>(len, seed));
    let [low, factor] = [(m * 8, 4), (8 * n, 5)].map(|(len, seed)| random::<T>(len, seed));
    let bias = random::<f32>(n, 6);
    let epilogue = Epilogue { alpha: 0.75, bias: Some(&bias), accumulate: false };
    for b in [Operand::new(&b, k, n), Operand::new(&transposed, n, k).transposed()] {
        for has_second in [false, true] {
            let product = |rows: Range<usize>| {
                let of = |x: &'_ [T], columns: usize| x[rows.start * columns..rows.end * columns].to_vec();
                let a = of(&a, k);
                let low = of(&low, 8);
                let term = LowRankTerm {
                    a: Operand::new(&low, rows.len(), 8),
                    b: Operand::new(&factor, 8, n),
                    alpha: 2.0,
                    shares: &[],
                };
                let mut c = vec![T::zero(); rows.len() * n];
                let a = Operand::new(&a, rows.len(), k);
                let gemm = Gemm { a, b, second: has_second.then_some(term), epilogue };
                gemm.run_on(kernel, &mut c, n);
                let mut wide = vec![0.0f32; rows.len() * n];
                gemm.run_on(kernel, &mut wide, n);
                c.iter().map(|x| x.to_f32()).chain(wide).map(f32::to_bits).collect::<Vec<u32>>()
            };
            let all = product(0..m);
            for rows in [0..1, 20..21, 36..37, 3..5, 0..8, 5..22, 0..33] {
                let found = product(rows.clone());
                for (half, expected) in found.chunks(rows.len() * n).zip(all.chunks(m * n)) {
                    assert!(half == &expected[rows.start * n..rows.end * n], "{kernels:?} {:?} {rows:?}", T::DTYPE);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_for_any_number_of_rows() {
    for kernels in supported() {
        check_rows::<f32>(kernels);
        check_rows::<f16>(kernels);
        check_rows::<bf16>(kernels);
    }
}

/// Panels are made once: within the scope a changed weight is not noticed, and after it is.
#[test]
fn kept_panels_give_the_same_bits() {
    let (k, n) = (3300, 101);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (layout, shape) in [(WeightLayout::InOut, (k, n)), (WeightLayout::OutIn, (n, k))] {
            let matrix = |seed, shape| {
                let values = Tensor::new(random::<f32>(k * n, seed), &Device::Cpu).unwrap();
                values.reshape(shape).unwrap().to_dtype(dtype).unwrap()
            };
            let weight = matrix(1, shape);
            let inputs = matrix(2, (n, k));
            let product = |rows: usize| {
                let x = inputs.narrow(0, 0, rows).unwrap();
                let y = Tensor::zeros((rows, n), dtype, &Device::Cpu).unwrap();
                op::Linear { layout, x: &x, weight: &weight, bias: None, low_rank: None, y: &y }.run(&Fused).unwrap();
                y.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap()
            };
            let all = || [1, 2, 37, n].map(product);
            let expected = all();
            with_packed([&weight].into_iter(), || {
                assert_eq!(all(), expected, "{dtype:?} {layout:?}");
                view::copy(&matrix(3, shape), &weight).unwrap();
                assert_eq!(all(), expected, "{dtype:?} {layout:?}: packed again");
            });
            assert_ne!(all(), expected, "{dtype:?} {layout:?}: panels outlive their scope");
        }
    }
}
