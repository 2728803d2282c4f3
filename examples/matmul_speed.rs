//! The matrix products of one distilgpt2 training step of 1024 tokens, each as a share of this machine's peak.
//!
//! `cargo run --release --example matmul_speed [filter] [tokens]`

#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use std::time::{Duration, Instant};

use finetune::kernels::convert::Element;
use finetune::kernels::matmul::{Epilogue, Operand, matmul};
use finetune::kernels::peak::{measure_peak_bf16, measure_peak_f32};
use half::{bf16, f16};

/// Weights `[in, out]` of distilgpt2, how often they occur, and the head, stored `[out, in]`.
const WEIGHTS: [(&str, usize, usize, usize); 5] = [
    ("attn.c_attn", 768, 2304, 6),
    ("attn.c_proj", 768, 768, 6),
    ("mlp.c_fc", 768, 3072, 6),
    ("mlp.c_proj", 3072, 768, 6),
    ("head", 768, 50257, 1),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let tokens = arguments.next().and_then(|tokens| tokens.parse().ok()).unwrap_or(1024);
    let (f32_peak, bf16_peak) = (measure_peak_f32(), measure_peak_bf16());
    println!("peak: {f32_peak:.0} GFLOP/s FP32, {bf16_peak:.0} BF16; {} threads", rayon::current_num_threads());
    step::<f32>("f32", tokens, f32_peak, &filter);
    step::<f16>("f16", tokens, f32_peak, &filter);
    step::<bf16>("bf16", tokens, bf16_peak, &filter);
}

/// Times forward, input gradient and weight gradient of every weight.
fn step<T: Element>(dtype: &str, tokens: usize, peak: f64, filter: &str) {
    let mut total = Duration::ZERO;
    let mut work = 0.0;
    for (name, inputs, outputs, count) in WEIGHTS {
        if !format!("{dtype} {name}").contains(filter) {
            continue;
        }
        let x = vec![T::from_f32(0.5); tokens * inputs];
        let dy = vec![T::from_f32(0.25); tokens * outputs];
        let weight = vec![T::from_f32(0.125); inputs * outputs];
        let mut y = vec![T::from_f32(0.0); tokens * outputs];
        let mut dx = vec![T::from_f32(0.0); tokens * inputs];
        let mut dw = vec![T::from_f32(0.0); inputs * outputs];
        let is_head = name == "head";
        let (x, dy) = (Operand::new(&x, tokens, inputs), Operand::new(&dy, tokens, outputs));
        let weight = if is_head {
            Operand::new(&weight, outputs, inputs).transposed()
        } else {
            Operand::new(&weight, inputs, outputs)
        };
        let times = [
            best(|| matmul(x, weight, &mut y, outputs, Epilogue::default())),
            best(|| matmul(dy, weight.transposed(), &mut dx, inputs, Epilogue::default())),
            best(|| {
                if is_head {
                    matmul(dy.transposed(), x, &mut dw, inputs, Epilogue::default());
                } else {
                    matmul(x.transposed(), dy, &mut dw, outputs, Epilogue::default());
                }
            }),
        ];
        let gflop = 2.0 * (tokens * inputs * outputs) as f64 / 1e9;
        let [forward, input_gradient, weight_gradient] = times.map(|time| 100.0 * gflop / time.as_secs_f64() / peak);
        println!(
            "{dtype:5} {name:12} {inputs:5} → {outputs:5}: forward {forward:5.1} %, dX {input_gradient:5.1} %, dW {weight_gradient:5.1} %"
        );
        total += times.iter().sum::<Duration>() * count as u32;
        work += 3.0 * gflop * count as f64;
    }
    let share = 100.0 * work / total.as_secs_f64() / peak;
    println!("{dtype:5} all products of a step: {:.0} ms, {share:.1} % of the peak", total.as_secs_f64() * 1e3);
}

/// The shortest of many runs: other programs can only lengthen one.
fn best(mut run: impl FnMut()) -> Duration {
    let start = Instant::now();
    let mut best = Duration::MAX;
    for round in 0.. {
        let begin = Instant::now();
        run();
        best = best.min(begin.elapsed());
        if round >= 3 && start.elapsed() > Duration::from_millis(400) {
            break;
        }
    }
    best
}
