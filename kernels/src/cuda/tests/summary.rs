//! Statistics of gradients.

use super::*;
use crate::precision::{FloatFormat, TensorStats};
use crate::summary::{CHUNK, THREADS, TensorSummary, merge_chunks};
use crate::view;

/// Gradients of several sizes, one larger than a chunk, with every value that is counted separately.
fn gradients(dtype: DType, broken: bool) -> Vec<Vec<f32>> {
    [70_001, 8, 1, 3001]
        .into_iter()
        .enumerate()
        .map(|(i, len)| {
            let spread =
                |(at, x): (usize, f32)| if at % 9 == 0 { 0.0 } else { x * x * x * 2f32.powi(-((at % 40) as i32)) };
            let mut values: Vec<f32> = pattern(len, i as u64, DType::F32).into_iter().enumerate().map(spread).collect();
            if broken && len > 100 {
                values[7] = f32::INFINITY;
                values[len - 1] = f32::NAN;
                values[50] = f32::NEG_INFINITY;
            }
            rounded(values, dtype)
        })
        .collect()
}

/// The statistics of a tensor's chunks, summarized one by one.
fn chunks(tensor: &Tensor, format: FloatFormat) -> impl Iterator<Item = TensorStats> {
    let chunk = move |start: usize| {
        let part = view::range(tensor, start..tensor.elem_count().min(start + CHUNK)).unwrap();
        (&kernels(0) as &dyn Kernels).summarize(&part, format, false).unwrap().stats
    };
    (0..tensor.elem_count()).step_by(CHUNK).map(chunk)
}

/// A thread of `summary.cu` merges several chunks of a tensor of more than [`THREADS`] chunks.
#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn chunks_of_large_tensors_merge_in_one_order() {
    let len = (THREADS + 5) * CHUNK + 77;
    let values: Vec<f32> = (0..len).map(|at| 0.5 + ((at / 7) as f32).sin()).collect();
    let large = tensor(&values, &[len], DType::F32);
    let format = FloatFormat::FP16;
    let found = (&kernels(0) as &dyn Kernels).summarize(&large, format, false).unwrap().stats;
    assert_eq!(merge_chunks(chunks(&large, format)), found);
    let in_a_row: f64 = chunks(&large, format).map(|chunk| chunk.sum_squares).sum();
    assert_ne!(in_a_row, found.sum_squares, "the order of chunks does not show");
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn summaries_equal_the_cpus() {
    let types = [(DType::F32, FloatFormat::FP16), (DType::F16, FloatFormat::FP16), (DType::BF16, FloatFormat::BF16)];
    for (broken, exponents) in [(false, true), (true, true), (true, false)] {
        // Tensors of a type are not neighbors, and one is empty.
        let mut tensors: Vec<_> = (types.iter())
            .flat_map(|&(dtype, format)| {
                let tensor_of = move |values: Vec<f32>| (tensor(&values, &[values.len()], dtype), format);
                gradients(dtype, broken).into_iter().map(tensor_of)
            })
            .collect();
        tensors.push((tensor(&[], &[0], DType::F16), FloatFormat::FP16));
        tensors.rotate_left(3);
        tensors.swap(1, 10);
        let tensors: Vec<_> = tensors.iter().map(|(tensor, format)| (tensor, *format)).collect();
        let [found, others @ ..] = Emulator::ORDERS.map(|order| {
            let mut out = vec![TensorSummary::default(); tensors.len()];
            op::Summarize { tensors: &tensors, exponents, out: &mut out }.run(&kernels(order)).unwrap();
            out
        });
        for (i, ((tensor, format), found)) in tensors.iter().zip(&found).enumerate() {
            let expected = crate::summary::summarize(tensor, *format, exponents).unwrap();
            assert_eq!(found.exponents, expected.exponents);
            let squares = expected.stats.sum_squares;
            assert!((found.stats.sum_squares - squares).abs() <= 1e-13 * squares, "{found:?} {expected:?}");
            let mut stats = found.stats;
            stats.sum_squares = squares;
            assert_eq!(stats, expected.stats);
            for other in &others {
                assert_eq!(other[i].stats, found.stats, "the order of threads shows");
            }
            assert_eq!(merge_chunks(chunks(tensor, *format)), found.stats, "the order of chunks differs");
        }
    }
}
