//! The survey, AdamW.

use super::super::{adamw, survey};
use super::*;
use crate::engine::kernels::adamw::AdamWStep;
use crate::engine::kernels::survey::TensorSurvey;
use crate::precision::FloatFormat;

/// Gradients of several sizes, one larger than a chunk, with everything that counts apart.
fn gradients(dtype: DType, broken: bool) -> Vec<Vec<f32>> {
    [70_001, 8, 1, 3001]
        .into_iter()
        .enumerate()
        .map(|(i, len)| {
            let spread =
                |(at, x): (usize, f32)| if at % 9 == 0 { 0.0 } else { x * x * x * 2f32.powi(-((at % 40) as i32)) };
            let mut values: Vec<f32> = pattern(len, i as u64, DType::F32).into_iter().enumerate().map(spread).collect();
            if broken && len > 100 {
                (values[7], values[len - 1], values[50]) = (f32::INFINITY, f32::NAN, f32::NEG_INFINITY);
            }
            rounded(values, dtype)
        })
        .collect()
}

/// The device's survey of a gradient.
fn surveyed(gpu: &Emulator, values: &[f32], dtype: DType, format: FloatFormat, exponents: bool) -> TensorSurvey {
    let figures = gpu.structs(&[0u32; survey::WORDS], true);
    let figures = Buffer { dtype: DType::U32, len: survey::WORDS, ..figures };
    survey::survey(gpu, gpu.input(values, dtype), format, exponents, figures).unwrap();
    let words: Vec<u32> = gpu.read_structs(figures);
    survey::decode(words.as_slice().try_into().unwrap(), exponents)
}

#[test]
fn surveys() {
    for (dtype, format) in
        [(DType::F32, FloatFormat::FP16), (DType::F16, FloatFormat::FP16), (DType::BF16, FloatFormat::BF16)]
    {
        for (broken, exponents) in [(false, true), (true, true), (true, false)] {
            for values in &gradients(dtype, broken) {
                let [found, others @ ..] =
                    Emulator::ORDERS.map(|order| surveyed(&Emulator::new(order), values, dtype, format, exponents));
                let cpu = tensor(values, &[values.len()], dtype);
                let expected = crate::engine::kernels::survey::survey(&cpu, format, exponents).unwrap();
                assert_eq!(found.exponents, expected.exponents);
                let squares = expected.stats.sum_squares;
                assert!((found.stats.sum_squares - squares).abs() <= 1e-13 * squares, "{found:?} {expected:?}");
                let mut stats = found.stats;
                stats.sum_squares = squares;
                assert_eq!(stats, expected.stats);
                for other in &others {
                    assert_eq!(other.stats, found.stats, "the order of threads shows");
                }
            }
        }
    }
}

#[test]
fn updates() {
    let step = AdamWStep {
        lr: 0.01,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        bias_corrections: [0.1, 0.001],
        grad_factor: 0.125,
    };
    let lens = [70_001, 5, 130];
    let decays = [0.1, 0.0, 0.01];
    for [grads, compute] in STREAM_AND_COMPUTE {
        let values =
            |salt: u64| lens.iter().zip(0..).map(|(&len, i)| pattern(len, salt + i, DType::F32)).collect::<Vec<_>>();
        let (gradients, masters, exp_avg) = (values(10), values(20), values(30));
        let gradients: Vec<_> = gradients.into_iter().map(|values| rounded(values, grads)).collect();
        let exp_avg_sq: Vec<Vec<f32>> = values(40).into_iter().map(|v| v.into_iter().map(f32::abs).collect()).collect();
        let keeps_copy = compute != DType::F32;

        let mut expected = Vec::new();
        for i in 0..lens.len() {
            let cpu = |values: &[Vec<f32>]| tensor(&values[i], &[lens[i]], DType::F32);
            let (grad, weight) = (tensor(&gradients[i], &[lens[i]], grads), poisoned(&[lens[i]], compute));
            let [master, m, v] = [&masters, &exp_avg, &exp_avg_sq].map(|values| cpu(values));
            let decayed = AdamWStep { weight_decay: decays[i], ..step };
            crate::engine::kernels::adamw::step(decayed, &grad, &master, &m, &v, keeps_copy.then_some(&weight))
                .unwrap();
            expected.extend([&master, &m, &v].map(numbers));
            expected.extend(keeps_copy.then(|| numbers(&weight)));
        }

        let found = in_every_order(|gpu| {
            let mut results = Vec::new();
            for i in 0..lens.len() {
                let grad = gpu.input(&gradients[i], grads);
                let state = [&masters, &exp_avg, &exp_avg_sq].map(|values| gpu.state(&values[i], DType::F32));
                let weight = keeps_copy.then(|| gpu.output(lens[i], compute));
                let decayed = AdamWStep { weight_decay: decays[i], ..step };
                adamw::step(gpu, decayed, grad, state, weight).unwrap();
                results.extend(state.into_iter().chain(weight));
            }
            results.into_iter().map(|buffer| gpu.read(buffer)).collect()
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert_close("AdamW", found, expected, if keeps_copy { compute } else { DType::F32 });
        }
    }
}
