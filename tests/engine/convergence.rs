//! Training in FP16 with FP32 masters and a loss scale reaches FP32's loss, and without them it does not.
//! `docs/numerics.md` quotes these figures; `cargo test --test engine convergence:: -- --nocapture` prints them.

use crate::common::compare::largest;
use crate::common::engine::{Settings, engine};
use crate::common::golden::all_kernels;
use crate::common::processes::compute_alone;
use candle_core::Device;
use finetune::data::{BatchLoader, TokenSource, grammar};
use finetune::engine::kernels::{Kernels, view};
use finetune::engine::model::{Decoder, ModelSpec, Parameters};
use finetune::precision::{FloatFormat, GradScaler, GradScalerConfig, PrecisionPolicy};
use finetune::train::{StepOutcome, TrainEngine};
use std::sync::Arc;

const STEPS: usize = 200;
const BATCH: (usize, usize) = (4, 64);

/// The storage of the weights between steps.
#[derive(Clone, Copy, PartialEq)]
enum Masters {
    Fp32,
    /// None: every update is rounded to FP16 at once.
    Fp16,
}

/// `tiny` with random weights before its first step, and its batches; both the same in every run.
fn start(policy: PrecisionPolicy, scaler: GradScaler, lr: f64) -> (TrainEngine, BatchLoader) {
    compute_alone();
    let config = ModelSpec::named("tiny").unwrap();
    let settings = Settings { scaler, ..Settings::new(policy, GradScalerConfig::default(), lr, BATCH) };
    let masters = Parameters::random(&config.parameters(), 17, &Device::Cpu).unwrap();
    let tokens = TokenSource::from_ids(grammar::text(2, 200_000).bytes().map(u32::from).collect());
    (engine(&config, masters, settings), BatchLoader::new(tokens, BATCH.0, BATCH.1, 23).unwrap())
}

/// The mean loss of the last ten steps, and how many steps were skipped.
fn train(policy: PrecisionPolicy, scaler: GradScaler, masters: Masters, lr: f64) -> (f64, usize) {
    let (mut engine, mut loader) = start(policy, scaler, lr);
    let mut batch = [loader.batch()];
    let (mut last, mut skipped) = (0.0, 0);
    for step in 0..STEPS {
        loader.next_batch(&mut batch[0]);
        let report = engine.step(&batch).unwrap();
        skipped += usize::from(report.outcome == StepOutcome::Skipped);
        if masters == Masters::Fp16 {
            round_masters(&engine);
        }
        if step >= STEPS - 10 {
            last += report.loss / 10.0;
        }
    }
    (last, skipped)
}

fn round_masters(engine: &TrainEngine) {
    for tensor in engine.state.masters.parameters().tensors() {
        view::write_f32(tensor, |weights| {
            for weight in weights {
                *weight = FloatFormat::FP16.round(f64::from(*weight)) as f32;
            }
        })
        .unwrap();
    }
}

/// The recipe's scaler, with an interval short enough that the scale grows into overflows within the run.
fn scaled() -> GradScaler {
    GradScaler::new(GradScalerConfig { growth_interval: 50, ..GradScalerConfig::default() }).unwrap()
}

/// A figure as `docs/numerics.md` quotes it; `before` is the text before it on that page.
fn quoted(before: &str, figure: &str) -> f64 {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/numerics.md");
    let text = std::fs::read_to_string(page).unwrap().replace('\n', " ");
    assert!(text.contains(&format!("{before}{figure}")), "the page lacks `{before}{figure}`");
    figure.parse().unwrap()
}

/// Other instruction sets round other sums, and training amplifies it: a quoted loss holds within this share.
const ELSEWHERE: f64 = 0.03;

/// How far `loss` is from `truth`, relatively.
fn apart(loss: f64, truth: f64) -> f64 {
    (loss / truth - 1.0).abs()
}

#[test]
#[ignore = "more than a minute; .ci/run runs it"]
fn half_precision_ends_where_fp32_ends() {
    const LR: f64 = 1e-3;
    let (fp32, _) = train(PrecisionPolicy::FP32, GradScaler::disabled(), Masters::Fp32, LR);
    let (fp16, skipped) = train(PrecisionPolicy::FP16, scaled(), Masters::Fp32, LR);
    let (bf16, _) = train(PrecisionPolicy::BF16, GradScaler::disabled(), Masters::Fp32, LR);
    println!("lr {LR}: FP32 {fp32:.4}, FP16 {fp16:.4} with {skipped} steps skipped, BF16 {bf16:.4}");
    assert!(fp32 < 3.0, "FP32 itself has learned nothing: {fp32}");
    assert!(skipped > 0, "the scale never overflowed, so the run shows nothing of skipped steps");
    assert!(apart(fp16, fp32) < 0.02 && apart(bf16, fp32) < 0.02);
    assert!(apart(fp32, quoted("| FP32 | ", "1.7622")) < ELSEWHERE);
    assert!(apart(fp16, quoted("| FP16, 3 steps skipped | ", "1.7732")) < ELSEWHERE);
    assert!(apart(bf16, quoted("| BF16 | ", "1.7570")) < ELSEWHERE);
    assert!((1..=6).contains(&skipped), "{skipped} steps skipped, where the page tells of 3");

    // At this large rate updates exceed half an ULP, and masters have no benefit within these few steps.
    let (without, _) = train(PrecisionPolicy::FP16, scaled(), Masters::Fp16, LR);
    println!("FP16 without masters {without:.4}");
    quoted("At a learning rate of 10^-3 FP16 without masters is no worse within ", "200");
    assert!(without < 1.02 * fp16, "{without} without masters, {fp16} with them");
}

/// In a short run candle's own operations and the fused kernels train to the same result.
#[test]
fn every_set_of_kernels_learns_alike() {
    const STEPS: usize = 8;
    let losses = |kernels: &Arc<dyn Kernels>, policy: PrecisionPolicy| -> Vec<f64> {
        let scaler = if policy.needs_loss_scale() { scaled() } else { GradScaler::disabled() };
        let (mut engine, mut loader) = start(policy, scaler, 1e-3);
        let spec = engine.model.spec().clone();
        engine.model = Decoder::new(&spec, &engine.state.weights, kernels.clone()).unwrap();
        let mut batch = [loader.batch()];
        (0..STEPS)
            .map(|_| {
                loader.next_batch(&mut batch[0]);
                engine.step(&batch).unwrap().loss
            })
            .collect()
    };
    for policy in [PrecisionPolicy::FP32, PrecisionPolicy::FP16, PrecisionPolicy::BF16] {
        let [fused, plain] = all_kernels().map(|kernels| losses(&kernels, policy));
        assert!(fused[STEPS - 1] < 0.9 * fused[0], "{policy}: {fused:?}");
        let worst = largest(&fused.iter().zip(&plain).map(|(fused, plain)| apart(*plain, *fused)).collect::<Vec<_>>());
        println!("{policy}: losses of {STEPS} steps by candle's operations are within {worst:.1e}");
        let tolerance = if policy == PrecisionPolicy::FP32 { 1e-4 } else { 1e-2 };
        assert!(worst < tolerance, "{policy}: {worst:.1e}");
    }
}

/// At a small rate most updates are less than half a unit in the last place of an FP16 weight: rounding undoes them.
#[test]
#[ignore = "more than a minute; .ci/run runs it"]
fn fp16_without_masters_and_scale_stays_behind() {
    const LR: f64 = 1e-6;
    let (fp32, _) = train(PrecisionPolicy::FP32, GradScaler::disabled(), Masters::Fp32, LR);
    let (fp16, _) = train(PrecisionPolicy::FP16, scaled(), Masters::Fp32, LR);
    let (bare, _) = train(PrecisionPolicy::FP16, GradScaler::disabled(), Masters::Fp16, LR);
    println!("lr {LR}: FP32 {fp32:.4}, FP16 {fp16:.4}, FP16 with neither masters nor scale {bare:.4}");
    assert!(apart(fp16, fp32) < 0.02);
    assert!(bare > fp32 && apart(bare, fp32) > 0.02);
    assert!(apart(fp32, quoted("| FP32 | ", "5.1202")) < ELSEWHERE);
    assert!(apart(fp16, quoted("| FP16 with FP32 masters and a loss scale | ", "5.1257")) < ELSEWHERE);
    assert!(apart(bare, quoted("| FP16 with neither | ", "5.3776")) < ELSEWHERE);
}

/// Sums in FP16 stop growing once the grid is coarser than the addend.
#[test]
fn a_sum_of_ones_in_fp16_stops_at_2048() {
    let mut sum = 0.0;
    for _ in 0..5000 {
        sum = FloatFormat::FP16.round(sum + 1.0);
    }
    assert_eq!(sum, quoted("sums in it stop growing at ", "2048"));
    assert_eq!(FloatFormat::FP16.max(), quoted("FP16 ends at ", "65504"));
}

/// Below FP16's normal range a gradient loses bits, and below its subnormal one it is lost.
#[test]
fn without_a_scale_gradients_leave_the_normal_range_of_fp16() {
    let share_below = |scaler| {
        let (mut engine, mut loader) = start(PrecisionPolicy::FP16, scaler, 1e-3);
        let mut batch = [loader.batch()];
        loader.next_batch(&mut batch[0]);
        assert!(engine.step(&batch).unwrap().outcome != StepOutcome::Skipped);
        // Rows of the position embedding beyond the batch's length are zeros by right.
        let tensors = engine.grads.total().iter().zip(&engine.grad_stats.tensors);
        let stats = tensors.filter(|((name, _), _)| *name != "wpe.weight").map(|(_, summary)| summary.stats);
        let (below, all) = stats.fold((0, 0), |(b, a), stats| (b + stats.zero + stats.subnormal, a + stats.count));
        below as f64 / all as f64
    };
    let without = share_below(GradScaler::disabled());
    let with = share_below(scaled());
    println!("below the smallest normal number: {:.1} % at scale 1, {:.3} % at 65536", without * 100.0, with * 100.0);
    assert!(without > 0.1 && with < 0.01);
    assert!((without * 100.0 - quoted("gradients, ", "14.6")).abs() < 1.0);
    assert!(with * 100.0 < 3.0 * quoted("at loss scale 1, and ", "0.005"));
}
