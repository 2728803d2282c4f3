//! What the recipe is for: training in FP16 with FP32 masters and a loss scale ends where FP32 ends, and without them it
//! does not. `docs/mixed-precision.md` quotes these figures; `cargo test --test tracking -- --nocapture` prints them.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test; its figures are quoted in the documentation")]

mod common {
    pub(crate) mod compare;
    pub(crate) mod engine;
    pub(crate) mod golden;
    pub(crate) mod oracle;
}

use candle_core::Device;
use common::engine::{Settings, engine};
use finetune::data::{BatchLoader, TokenSource, grammar};
use finetune::kernels::view;
use finetune::model::Gpt2Config;
use finetune::optim::AdamWConfig;
use finetune::precision::{FloatFormat, GradScaler, GradScalerConfig, PrecisionPolicy};
use finetune::train::{Engine, Outcome, TrainState};

const STEPS: usize = 200;
const BATCH: (usize, usize) = (8, 64);

/// What the weights live in between steps.
#[derive(Clone, Copy, PartialEq)]
enum Masters {
    Fp32,
    /// None: every update is rounded to FP16 at once.
    Fp16,
}

/// The mean loss of the last ten steps, and how many steps were skipped.
fn train(policy: PrecisionPolicy, scaler: GradScaler, masters: Masters, lr: f64) -> (f64, usize) {
    let config = Gpt2Config::named("tiny").unwrap();
    let settings = Settings {
        policy,
        scaler,
        adamw: AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 },
        lr,
        max_grad_norm: Some(1.0),
        batch: BATCH,
        grad_accum: 1,
    };
    let mut engine = engine(&config, TrainState::random_masters(&config, 17, &Device::Cpu).unwrap(), settings);
    let text = grammar::text(2, 200_000);
    let tokens = TokenSource::from_ids(text.bytes().map(u32::from).collect());
    let mut loader = BatchLoader::new(tokens, BATCH.0, BATCH.1, 23).unwrap();
    let mut batch = [loader.batch()];
    let (mut last, mut skipped) = (0.0, 0);
    for step in 0..STEPS {
        loader.next_batch(&mut batch[0]);
        let report = engine.step(&batch).unwrap();
        skipped += usize::from(report.outcome == Outcome::Skipped);
        if masters == Masters::Fp16 {
            round_masters(&engine);
        }
        if step >= STEPS - 10 {
            last += report.loss / 10.0;
        }
    }
    (last, skipped)
}

fn round_masters(engine: &Engine) {
    for tensor in engine.state.masters.parameters().tensors() {
        view::write_f32(tensor, |weights| {
            weights.iter_mut().for_each(|weight| *weight = FloatFormat::FP16.round_f32(*weight));
        })
        .unwrap();
    }
}

fn scaled() -> GradScaler {
    // Short enough an interval that the scale grows into overflows within the run.
    GradScaler::new(GradScalerConfig { growth_interval: 20, ..GradScalerConfig::default() }).unwrap()
}
#[test]
fn explore() {
    for lr in [1e-3, 3e-4, 1e-4, 3e-5] {
        let (fp32, _) = train(PrecisionPolicy::FP32, GradScaler::disabled(), Masters::Fp32, lr);
        let fp16 = train(PrecisionPolicy::FP16, scaled(), Masters::Fp32, lr);
        let bf16 = train(PrecisionPolicy::BF16, GradScaler::disabled(), Masters::Fp32, lr);
        let bare = train(PrecisionPolicy::FP16, GradScaler::disabled(), Masters::Fp16, lr);
        let nomaster = train(PrecisionPolicy::FP16, scaled(), Masters::Fp16, lr);
        let noscale = train(PrecisionPolicy::FP16, GradScaler::disabled(), Masters::Fp32, lr);
        println!(
            "LR {lr} fp32 {fp32} fp16 {fp16:?} bf16 {bf16:?} bare {bare:?} nomaster {nomaster:?} noscale {noscale:?}"
        );
    }
}
