//! The matrix products of one distilgpt2 training step of 1024 tokens, each as a share of this machine's peak.
//!
//! `cargo run --release --example matmul_speed [filter] [tokens]`

#![expect(clippy::print_stdout, reason = "the example prints its results")]

use finetune::engine::kernels::convert::Element;
use finetune::engine::kernels::machine::peak::{Peak, measure_peak_bf16, measure_peak_f32};
use finetune::engine::kernels::matmul::{Gemm, Operand};
use half::{bf16, f16};
use std::time::{Duration, Instant};

/// Weights `[in, out]` of distilgpt2, how often they occur, and the head, stored `[out, in]`.
const WEIGHTS: [(&str, usize, usize, usize); 5] = [
    ("attn.c_attn", 768, 2304, 6),
    ("attn.c_proj", 768, 768, 6),
    ("mlp.c_fc", 768, 3072, 6),
    ("mlp.c_proj", 3072, 768, 6),
    ("head", 768, 50257, 1),
];

/// As in the program, whose matrices use huge pages.
#[global_allocator]
static ALLOCATOR: finetune::engine::kernels::machine::allocator::Allocator =
    finetune::engine::kernels::machine::allocator::Allocator;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let tokens = arguments.next().and_then(|tokens| tokens.parse().ok()).unwrap_or(1024);
    // Run inside the pool, like training, so that no other thread must be woken to start.
    rayon::scope(|_| {
        step::<f32>("f32", tokens, measure_peak_f32, &filter);
        step::<f16>("f16", tokens, measure_peak_f32, &filter);
        step::<bf16>("bf16", tokens, measure_peak_bf16, &filter);
    });
}

/// Times forward, input gradient and weight gradient of every weight.
fn step<T: Element>(dtype: &str, tokens: usize, peak: fn() -> Peak, filter: &str) {
    let (mut work, mut at_peak) = (0.0, 0.0);
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
        let gflop = 2.0 * (tokens * inputs * outputs) as f64 / 1e9;
        let shares = [
            share(gflop, peak, || Gemm::new(x, weight).run(&mut y, outputs)),
            share(gflop, peak, || Gemm::new(dy, weight.transposed()).run(&mut dx, inputs)),
            share(gflop, peak, || {
                if is_head {
                    Gemm::new(dy.transposed(), x).run(&mut dw, inputs);
                } else {
                    Gemm::new(x.transposed(), dy).run(&mut dw, outputs);
                }
            }),
        ];
        let [forward, input_gradient, weight_gradient] = shares.map(|share| 100.0 * share);
        println!(
            "{dtype:5} {name:12} {inputs:5} → {outputs:5}: forward {forward:5.1} %, dX {input_gradient:5.1} %, dW {weight_gradient:5.1} %"
        );
        work += 3.0 * gflop * count as f64;
        at_peak += shares.iter().map(|share| gflop / share).sum::<f64>() * count as f64;
    }
    println!("{dtype:5} all products of a step: {:.1} % of the peak", 100.0 * work / at_peak);
}

/// The median share of the peak for a product of `gflop`, each run compared with the peak measured right after it.
fn share(gflop: f64, peak: fn() -> Peak, mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut shares = Vec::new();
    while shares.len() < 5 || start.elapsed() < Duration::from_millis(400) {
        let begin = Instant::now();
        run();
        let rate = gflop / begin.elapsed().as_secs_f64();
        shares.push(rate / peak().sustained);
    }
    shares.sort_unstable_by(f64::total_cmp);
    shares[shares.len() / 2]
}
