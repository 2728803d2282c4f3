//! The survey, the verdict on a step, AdamW.

use super::super::adamw::{self, AdamWTensor};
use super::super::step::{self, Decay, Rules, Schedule, StepRecord, StepState, VerdictBuffers};
use super::super::survey::{self, BINS, CHUNK_STATS_BYTES, RawStats, SurveyBuffers, chunks};
use super::*;
use crate::engine::kernels::adamw::AdamWStep;
use crate::engine::kernels::survey::TensorSurvey;
use crate::precision::{FloatFormat, GradScaler, GradScalerConfig, HysteresisRefill};

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

/// The device's survey of `gradients`.
fn surveyed(
    gpu: &Testbed,
    gradients: &[Vec<f32>],
    dtype: DType,
    format: FloatFormat,
    exponents: bool,
) -> Vec<TensorSurvey> {
    let buffers: Vec<Buffer> = gradients.iter().map(|values| gpu.input(values, dtype)).collect();
    let table = chunks(buffers.iter().map(|buffer| buffer.len));
    let counters =
        exponents.then(|| Buffer { dtype: DType::U32, ..gpu.state(&vec![0.0; buffers.len() * BINS], DType::F32) });
    let stats = gpu.structs(&vec![RawStats::default(); buffers.len()], true);
    let buffers = SurveyBuffers {
        tensors: gpu.structs(&survey::tensors(&buffers).unwrap(), false),
        chunks: gpu.structs(&table, false),
        partial: gpu.structs(&vec![0xffu8; table.len() * CHUNK_STATS_BYTES], true),
        stats,
        exponents: counters,
    };
    survey::survey(gpu, dtype, format, buffers).unwrap();
    let counted: Vec<u32> =
        counters.map_or_else(Vec::new, |counters| gpu.read(counters).into_iter().map(f32::to_bits).collect());
    let raw = gpu.read_structs::<RawStats>(stats);
    raw.iter()
        .enumerate()
        .map(|(i, raw)| raw.survey(counted.get(i * BINS..(i + 1) * BINS).unwrap_or_default()))
        .collect()
}

#[test]
fn surveys() {
    for (dtype, format) in
        [(DType::F32, FloatFormat::FP16), (DType::F16, FloatFormat::FP16), (DType::BF16, FloatFormat::BF16)]
    {
        for (broken, exponents) in [(false, true), (true, true), (true, false)] {
            let gradients = gradients(dtype, broken);
            let [first, others @ ..] =
                Testbed::ORDERS.map(|order| surveyed(&Testbed::new(order), &gradients, dtype, format, exponents));
            for (i, (found, values)) in first.iter().zip(&gradients).enumerate() {
                let cpu = tensor(values, &[values.len()], dtype);
                let expected = crate::engine::kernels::survey::survey(&cpu, format, exponents).unwrap();
                assert_eq!(found.exponents, expected.exponents);
                let squares = expected.stats.sum_squares;
                assert!((found.stats.sum_squares - squares).abs() <= 1e-13 * squares, "{found:?} {expected:?}");
                let mut stats = found.stats;
                stats.sum_squares = squares;
                assert_eq!(stats, expected.stats);
                for other in &others {
                    assert_eq!(other[i].stats, found.stats, "the order of threads shows");
                }
            }
        }
    }
}

/// A few gradients, and what a step makes of them.
fn judged(gpu: &Testbed, rules: Rules<'_>, state: StepState, gradient: &[f32]) -> StepRecord {
    let survey = {
        let gradient = gpu.input(gradient, DType::F32);
        let table = chunks([gradient.len]);
        SurveyBuffers {
            tensors: gpu.structs(&survey::tensors(&[gradient]).unwrap(), false),
            chunks: gpu.structs(&table, false),
            partial: gpu.structs(&vec![0u8; table.len() * CHUNK_STATS_BYTES], true),
            stats: gpu.structs(&[RawStats::default()], true),
            exponents: None,
        }
    };
    survey::survey(gpu, DType::F32, FloatFormat::FP16, survey).unwrap();
    let mut loss = gpu.structs(&[12.0f64], false);
    (loss.dtype, loss.len) = (DType::F64, 1);
    let (state, record) = (gpu.structs(&[state], true), gpu.structs(&[StepRecord::default()], true));
    let buffers = VerdictBuffers { stats: survey.stats, loss, targets: gpu.words(&[8]), state, record };
    step::verdict(gpu, rules, buffers).unwrap();
    let record = gpu.read_structs::<StepRecord>(record)[0];
    assert_eq!(gpu.read_structs::<StepState>(state)[0], record.after);
    record
}

fn constant_rate() -> Schedule {
    Schedule { peak_lr: 0.5, min_lr_ratio: 0.0, warmup_updates: 0, total_updates: 9, decay: Decay::Constant }
}

#[test]
fn a_clean_step_is_clipped_and_applied() {
    let config = GradScalerConfig { init_scale: 4.0, ..GradScalerConfig::default() };
    let rules = Rules { scaler: &config, schedule: constant_rate(), max_grad_norm: Some(1.0), betas: [0.9, 0.99] };
    let state = StepState::new(&GradScaler::new(config).unwrap(), 7, 5);
    // Norm 20 scaled, 5 unscaled.
    let record = judged(&Testbed::new(1), rules, state, &[12.0, -16.0, 0.0]);
    assert!(record.applied());
    assert_eq!((record.loss, record.grad_norm, record.lr), (1.5, 5.0, 0.5));
    assert!((record.clip - 0.2).abs() < 1e-6);
    assert_eq!((record.after.step, record.after.updates, record.total.stats().zero), (8, 6, 1));
    let bias = [0.9f64, 0.99].map(|beta| (1.0 - beta.powi(6)) as f32);
    assert_eq!(record.after, record.after.with_update(0.5, (0.25 * record.clip) as f32, bias, true));
    // Without a limit nothing is clipped.
    assert_eq!(judged(&Testbed::new(0), Rules { max_grad_norm: None, ..rules }, state, &[12.0, -16.0]).clip, 1.0);
}

/// The rates of `optim::LrSchedule`'s own tests, and its ends.
#[test]
fn the_learning_rate_follows_the_applied_updates() {
    let config = GradScalerConfig::default();
    let scaler = GradScaler::new(config).unwrap();
    let rate = |decay, [warmup_updates, total_updates]: [u64; 2], updates| {
        let schedule = Schedule { peak_lr: 1.0, min_lr_ratio: 0.1, warmup_updates, total_updates, decay };
        let rules = Rules { scaler: &config, schedule, max_grad_norm: None, betas: [0.9, 0.99] };
        judged(&Testbed::new(0), rules, StepState::new(&scaler, 1000, updates), &[1.0]).lr
    };
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
    for decay in [Decay::Constant, Decay::Linear, Decay::Cosine] {
        near(rate(decay, [10, 110], 0), 0.1);
        near(rate(decay, [10, 110], 9), 1.0);
        near(rate(decay, [10, 110], 10), 1.0);
    }
    near(rate(Decay::Linear, [10, 110], 35), 0.1 + 0.9 * 0.75);
    near(rate(Decay::Cosine, [10, 110], 35), 0.1 + 0.9 * 0.5 * (1.0 + 0.5f64.sqrt()));
    for decay in [Decay::Linear, Decay::Cosine] {
        near(rate(decay, [10, 110], 110), 0.1);
        near(rate(decay, [10, 110], 10_000), 0.1);
        near(rate(decay, [0, 0], 1), 0.1);
    }
    near(rate(Decay::Constant, [10, 110], 10_000), 1.0);
}

/// A gradient that is finite as it is stored and infinite once it is unscaled counts as an overflow.
#[test]
fn an_overflow_in_unscaling_skips_the_step() {
    let config = GradScalerConfig { init_scale: 0.25, min_scale: 0.125, ..GradScalerConfig::default() };
    let rules = Rules { scaler: &config, schedule: constant_rate(), max_grad_norm: None, betas: [0.9, 0.99] };
    let state = StepState::new(&GradScaler::new(config).unwrap(), 0, 0);
    assert!(!judged(&Testbed::new(0), rules, state, &[f32::MAX]).applied());
    assert!(judged(&Testbed::new(0), rules, state, &[f32::MAX / 8.0]).applied());
}

/// The device's scaler against the host's over a long and eventful run, for several rules.
#[test]
fn scalers_move_alike() {
    let base = GradScalerConfig { growth_interval: 3, min_scale: 8.0, init_scale: 64.0, ..GradScalerConfig::default() };
    let rules = [
        base,
        GradScalerConfig { hysteresis: 2, ..base },
        GradScalerConfig { hysteresis: 3, hysteresis_refill: HysteresisRefill::Clean, ..base },
        GradScalerConfig { growth_factor: 1e30, backoff_factor: 0.3, ..base },
        GradScalerConfig::disabled(),
    ];
    for config in rules {
        let mut host = GradScaler::new(config).unwrap();
        let mut state = StepState::new(&host, 0, 0);
        for i in 0..60u32 {
            let overflow = i % 7 == 5 || (20..32).contains(&i);
            let scale = host.scale();
            let rules = Rules { scaler: &config, schedule: constant_rate(), max_grad_norm: None, betas: [0.9, 0.99] };
            let gradient = if overflow { f32::INFINITY } else { 1.0 };
            let record = judged(&Testbed::new(0), rules, state, &[gradient]);
            let change = host.update(!overflow);
            assert_eq!(
                (record.scale, record.change(), record.applied()),
                (scale, change, !overflow),
                "step {i}, {config:?}"
            );
            assert_eq!(record.after.scaler(), host.state(), "step {i}, {config:?}");
            // What is launched before the host has seen the overflow changes nothing, whatever its own gradients are.
            for behind in [1.0, f32::INFINITY] {
                if overflow {
                    let void = judged(&Testbed::new(0), rules, record.after, &[behind]);
                    assert_eq!((void.applied(), void.after), (false, record.after));
                }
            }
            state = record.after.going_on();
        }
    }
}

#[test]
fn updates() {
    let numbers_of = |lr, factor, corrections| AdamWStep {
        lr,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        bias_corrections: corrections,
        grad_factor: factor,
    };
    let lens = [70_001, 5, 130];
    let decays = [0.1, 0.0, 0.01];
    for [grads, compute] in STREAM_AND_COMPUTE {
        let values =
            |salt: u64| lens.iter().zip(0..).map(|(&len, i)| pattern(len, salt + i, DType::F32)).collect::<Vec<_>>();
        let (gradients, masters, exp_avg) = (values(10), values(20), values(30));
        let gradients: Vec<_> = gradients.into_iter().map(|values| rounded(values, grads)).collect();
        let exp_avg_sq: Vec<Vec<f32>> = values(40).into_iter().map(|v| v.into_iter().map(f32::abs).collect()).collect();
        let numbers_of_step = numbers_of(0.01, 0.125, [0.1, 0.001]);
        let keeps_copy = compute != DType::F32;

        let mut expected = Vec::new();
        for i in 0..lens.len() {
            let cpu = |values: &[Vec<f32>]| tensor(&values[i], &[lens[i]], DType::F32);
            let (grad, weight) = (tensor(&gradients[i], &[lens[i]], grads), poisoned(&[lens[i]], compute));
            let [master, m, v] = [&masters, &exp_avg, &exp_avg_sq].map(|values| cpu(values));
            let step = AdamWStep { weight_decay: decays[i], ..numbers_of_step };
            crate::engine::kernels::adamw::step(step, &grad, &master, &m, &v, keeps_copy.then_some(&weight)).unwrap();
            expected.extend([&master, &m, &v].map(numbers));
            expected.extend(keeps_copy.then(|| numbers(&weight)));
        }

        for apply in [true, false] {
            let found = in_every_order(|gpu| {
                let (mut table, mut results) = (Vec::new(), Vec::new());
                for i in 0..lens.len() {
                    let grad = gpu.input(&gradients[i], grads);
                    let state = [&masters, &exp_avg, &exp_avg_sq].map(|values| gpu.state(&values[i], DType::F32));
                    let weight = keeps_copy.then(|| gpu.output(lens[i], compute));
                    table.push(AdamWTensor::new(grad, state, weight, decays[i]).unwrap());
                    results.extend(state.into_iter().chain(weight));
                }
                let (tensors, cut) = (gpu.structs(&table, false), gpu.structs(&chunks(lens), false));
                let state = StepState::default().with_update(0.01, 0.125, [0.1, 0.001], apply);
                let state = gpu.structs(&[state], false);
                adamw::step(gpu, [grads, compute], tensors, cut, state, [0.9, 0.999], 1e-8).unwrap();
                results.into_iter().map(|buffer| gpu.read(buffer)).collect()
            });
            if apply {
                for (found, expected) in found.iter().zip(&expected) {
                    let dtype = if keeps_copy { compute } else { DType::F32 };
                    assert_close("AdamW", found, expected, dtype);
                }
            } else {
                assert_eq!(found[0], masters[0]);
                assert!(!keeps_copy || found[3].iter().all(|x| x.is_nan()), "a skipped step has written weights");
            }
        }
    }
}
